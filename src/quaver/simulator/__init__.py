"""Simulated accelerators on the CPU: several devices in one process, on any machine.

``load()`` adds the device type "sim" to torch. Its devices behave as CUDA's do where devices
matter: each has its memory, a current device belongs to each thread, autograd runs backward on a
thread for each device, an op on two devices is an error, and ``check_launch`` fails where a launch
on the wrong device would. Numbers are the CPU's.

It does not find missing synchronization between streams, nor errors in real kernels.
"""

from quaver.simulator.launch import AcceleratorError, check_launch
from quaver.simulator.loading import is_loaded, load

__all__ = ["AcceleratorError", "check_launch", "is_loaded", "load"]
