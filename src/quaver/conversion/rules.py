"""Which layers `convert` takes, and with which recipe: ordered rules, the first match decides."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from torch import nn

from quaver.conversion.errors import ConversionError
from quaver.conversion.report import UnmatchedRule
from quaver.recipe import Recipe

Predicate = Callable[[str, nn.Module], bool]
Match = str | Predicate
Matches = Match | Iterable[Match]

DEFAULT_EXCLUDE: tuple[str, ...] = ("lm_head", "*.lm_head")
"""What `convert` leaves alone unless told otherwise: the output layer of a language model."""


@dataclass(frozen=True)
class Rule:
    """What `convert` does with the layers that `match`.

    Args:
        match: a glob on the layer's whole qualified name, as in `fnmatch`: `*` stands for any
            characters, dots included, `?` for one, `[ab]` for one of those; upper and lower case
            differ. Or a function (qualified name, module) -> bool.
        recipe: attached to these layers; None: the one that `convert` was given.
        skip: leave these layers as they are.

    Raises:
        ConversionError: the pattern is malformed, or both `recipe` and `skip` were given.
    """

    match: Match
    recipe: Recipe | None = None
    skip: bool = False

    def __post_init__(self) -> None:
        _check_match(self.match)
        if self.recipe is not None and not isinstance(self.recipe, Recipe):
            raise ConversionError(
                "a rule's recipe must be a recipe such as DelayedScaling() or "
                f"named_recipe('mxfp8'), not {self.recipe!r}"
            )
        if self.skip and self.recipe is not None:
            raise ConversionError(
                f"a rule must either skip layers or give them a recipe, but the one for "
                f"{describe(self.match)} does both; drop one of the two"
            )

    def matches(self, name: str, module: nn.Module) -> bool:
        """Whether this rule is about `module`, called `name`.

        Raises:
            ConversionError: the predicate failed.
        """
        if isinstance(self.match, str):
            return fnmatchcase(name, self.match)
        try:
            return bool(self.match(name, module))
        except Exception as error:
            raise ConversionError(
                f"the predicate {describe(self.match)} must return whether to take a layer, but "
                f"for {name} it raised {type(error).__name__}: {error}"
            ) from error


def describe(match: Match) -> str:
    """`match` in a few words: the pattern in quotes, or the function's name."""
    return repr(match) if isinstance(match, str) else getattr(match, "__name__", repr(match))


def _check_match(match: object) -> None:
    if isinstance(match, str):
        if not match.strip():
            raise ConversionError(
                "a pattern must not be empty; '*' matches every layer, and '' would match only "
                "the model itself"
            )
        if match.count("[") != match.count("]"):
            raise ConversionError(
                f"the pattern {match!r} must close each '[' with a ']'; patterns are globs, such "
                f"as 'layers.[01].*', not regular expressions"
            )
    elif isinstance(match, nn.Module) or not callable(match):
        raise ConversionError(
            f"layers are named by a glob (a string) or by a function (name, module) -> bool, not "
            f"by {type(match).__name__} {match!r}"
        )


@dataclass(frozen=True)
class Decision:
    """What the rules say about one layer: `skip_reason` is empty for one that is converted."""

    recipe: Recipe | None
    skip_reason: str = ""


@dataclass
class _Entry:
    """A rule, where the user gave it, and what came of it."""

    rule: Rule
    given_as: str
    skip_reason: str
    matched: int = 0
    decided: int = 0


class RuleList:
    """`rules`, then `exclude`, then `include`, as one ordered list that counts its matches."""

    def __init__(
        self,
        rules: Iterable[Rule],
        include: Matches | None,
        exclude: Matches,
    ) -> None:
        is_default = exclude is DEFAULT_EXCLUDE
        self._is_default_exclude = is_default
        self._entries = [
            _Entry(rule, f"rules[{i}]", f"skipped by rules[{i}], {describe(rule.match)}")
            for i, rule in enumerate(_as_rules(rules))
        ]
        for i, match in enumerate(_as_matches(exclude, "exclude")):
            reason = f"excluded by {describe(match)}"
            if is_default:
                reason += " of the default; exclude=() converts it"
            self._entries.append(_Entry(Rule(match, skip=True), f"exclude[{i}]", reason))
        self._only_included = include is not None
        if include is not None:
            for i, match in enumerate(_as_matches(include, "include")):
                self._entries.append(_Entry(Rule(match), f"include[{i}]", ""))

    def decide(self, names: Sequence[str], module: nn.Module) -> Decision:
        """What to do with `module`, which the model holds under each of `names`."""
        decision: Decision | None = None
        for entry in self._entries:
            if not any(entry.rule.matches(name, module) for name in names):
                continue
            entry.matched += 1
            if decision is None:
                entry.decided += 1
                decision = Decision(entry.rule.recipe, entry.skip_reason if entry.rule.skip else "")
        if decision is None:
            return Decision(None, "not among include" if self._only_included else "")
        return decision

    @property
    def recipes(self) -> list[Recipe]:
        """The recipes that rules name."""
        return [e.rule.recipe for e in self._entries if e.rule.recipe is not None]

    def unmatched(self) -> tuple[UnmatchedRule, ...]:
        """The rules that decided about no layer, in order; those of the default left out."""
        return tuple(
            UnmatchedRule(
                entry.given_as,
                describe(entry.rule.match),
                "only layers that an earlier rule decides"
                if entry.matched
                else "no layer that can be converted",
            )
            for entry in self._entries
            if not entry.decided
            and not (self._is_default_exclude and entry.given_as.startswith("exclude"))
        )


def _as_rules(rules: Iterable[Rule]) -> list[Rule]:
    found = list(rules)
    for rule in found:
        if not isinstance(rule, Rule):
            raise ConversionError(
                f"rules must hold Rule objects, such as Rule('layers.0.*', skip=True), not {rule!r}"
            )
    return found


def _as_matches(matches: Matches, option: str) -> list[Match]:
    if isinstance(matches, str) or callable(matches):
        return [matches]
    if not isinstance(matches, Iterable):
        raise ConversionError(
            f"{option} must be a glob, a function (name, module) -> bool, or several of them, not "
            f"{matches!r}"
        )
    return list(matches)
