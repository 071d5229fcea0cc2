"""`python -m quaver.shim SCRIPT [ARGUMENTS]`: runs a script written for TransformerEngine.

The script is not changed: `import transformer_engine` finds Quaver. `-m MODULE` runs a module.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

from quaver.integrations import transformer_engine

_USAGE = (
    "usage: python -m quaver.shim SCRIPT [ARGUMENTS ...]\n       python -m quaver.shim -m MODULE"
)


def main(arguments: list[str]) -> None:
    """Run what `arguments` names as the main program.

    Raises:
        SystemExit: with 2, nothing to run was named.
    """
    is_module = arguments[:1] == ["-m"]
    rest = arguments[1:] if is_module else arguments
    if not rest or rest[0] in ("-h", "--help"):
        sys.stderr.write(f"{_USAGE}\n")
        raise SystemExit(0 if rest else 2)
    target = rest[0]
    if not is_module and not Path(target).exists():
        sys.stderr.write(f"there is no script {target!r}\n{_USAGE}\n")
        raise SystemExit(2)
    transformer_engine.enable()
    sys.argv[:] = rest
    if is_module:
        sys.path.insert(0, "")
        runpy.run_module(target, run_name="__main__", alter_sys=True)
    else:
        sys.path.insert(0, str(Path(target).resolve().parent))
        runpy.run_path(target, run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
