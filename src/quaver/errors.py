"""The errors that Quaver raises for what a user can mend.

Each message is one line: what must hold, what was given, and what to do about it.
"""


class QuaverError(Exception):
    """Base of every error that is Quaver's own."""


class DeviceMismatchError(QuaverError, RuntimeError):
    """Operands, parameters or buffers of one call lie on two devices."""


class RecipeError(QuaverError, ValueError):
    """A recipe, or a choice made with it, cannot be carried out."""


class CheckpointError(QuaverError, ValueError):
    """A checkpoint holds something that cannot be restored."""


class SimulatorUnavailableError(QuaverError, RuntimeError):
    """The simulated accelerators cannot be built or loaded in this process."""
