"""For tests of code that uses Quaver: simulated devices, and the log of kernel launches."""

import torch

from quaver import simulator
from quaver.kernels.door import Launch, launches

__all__ = ["Launch", "launches", "simulated_devices"]


def simulated_devices(count: int = 2) -> list[torch.device]:
    """`count` simulated accelerators of this process, on the CPU; they are loaded once.

    Call it before the process's first backward pass, and never in one that uses a real GPU.

    Raises:
        SimulatorUnavailableError: no C++ compiler, or fewer devices were loaded before.
    """
    return simulator.load(count)
