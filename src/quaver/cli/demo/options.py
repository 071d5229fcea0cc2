"""What the person chose on the command line, checked before anything slow starts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from quaver import recipe as recipes
from quaver.cli.errors import CommandError

RECIPES = {name: recipes.named_recipe(name) for name in recipes.RECIPE_NAMES}
ALL = "all"


@dataclass(frozen=True, kw_only=True)
class DemoOptions:
    """The arguments of ``quaver demo``; None means the demo's own model, text or no JSON."""

    model: Path | None = None
    text: Path | None = None
    devices: str = "auto"
    recipe: str = "delayed"
    json: Path | None = None

    def recipe_names(self) -> list[str]:
        """The keys of RECIPES to run; raises CommandError for a name that is none."""
        if self.recipe == ALL:
            return list(RECIPES)
        if self.recipe not in RECIPES:
            names = ", ".join((*RECIPES, ALL))
            raise CommandError(f"unknown recipe {self.recipe!r}; --recipe takes one of: {names}")
        return [self.recipe]

    def check_json(self) -> None:
        """Raise CommandError when the JSON file could not be written after minutes of work."""
        if self.json is None:
            return
        if self.json.is_dir():
            raise CommandError(f"--json {self.json} is a folder; name a file")
        if not self.json.parent.is_dir():
            raise CommandError(f"--json {self.json}: the folder {self.json.parent} does not exist")
        if self.json.exists() and not self.json.is_file():
            return  # a pipe: opening it would already be a use of it
        is_new = not self.json.exists()
        try:
            self.json.open("a").close()
            if is_new:
                self.json.unlink()
        except OSError as error:
            raise unwritable(self.json, error) from None


def unwritable(path: Path, error: OSError) -> CommandError:
    """The error for a ``--json`` that the system refuses to write."""
    reason = error.strerror or error
    return CommandError(f"--json {path} cannot be written: {reason}; name another file")
