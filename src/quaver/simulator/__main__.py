"""``python -m quaver.simulator``: build the simulator if need be and print where the library is."""

import sys

from quaver.errors import SimulatorUnavailableError
from quaver.simulator.build import library


def main() -> int:
    """Print the path of the built library; on failure print why, and return 1."""
    try:
        print(library())
    except SimulatorUnavailableError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
