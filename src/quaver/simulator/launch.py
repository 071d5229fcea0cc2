"""What a kernel launch does on a real accelerator when it meets another device's memory: it fails.

The simulator runs a kernel wherever its memory is, so this check stands for the illegal access. It
sees only the launches that ask it: every launch of Quaver's goes through one door that does.
"""

from __future__ import annotations

from typing import Any

import torch

from quaver.simulator.device import device_index

# The error that torch raises for CUDA's errors, so that one test serves both.
AcceleratorError = torch.AcceleratorError


def check_launch(*operands: Any, stream: torch.Stream | None = None) -> None:
    """Check the operands of a launch on this thread's current device.

    Args:
        *operands: tensors, and lists or tuples of them; anything else (scalars, None) passes.
        stream: the stream of the launch, if not the current one.

    Raises:
        AcceleratorError: a tensor is not on the current device, or the stream is another device's.
    """
    current = torch._C._accelerator_getDeviceIndex()
    for operand in operands:
        if isinstance(operand, torch.Tensor):
            device = operand.device
            if device.index != current or device.type != "sim":
                raise AcceleratorError(
                    "sim: an illegal memory access was encountered: "
                    f"launch on sim:{current}, memory of {device}"
                )
        elif isinstance(operand, (list, tuple)):
            check_launch(*operand)
    if stream is not None and device_index(stream.device) != current:
        raise AcceleratorError(
            f"sim: invalid resource handle: launch on sim:{current}, stream of {stream.device}"
        )


def device_of_pointer(pointer: int) -> torch.device | None:
    """Return the simulated device whose memory holds an address; None: it is no such memory.

    For a launch that gets addresses instead of tensors, as a grouped kernel's table of pointers.
    """
    index = torch.ops.quaver_sim.device_of_pointer(pointer)
    return None if index < 0 else torch.device("sim", index)
