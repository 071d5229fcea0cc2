"""Load the simulator into this process: build, register with torch, and try it."""

import atexit
import threading
import time
from typing import Any

import torch
from torch.utils.backend_registration import (
    generate_methods_for_privateuse1_backend,
    rename_privateuse1_backend,
)

from quaver.errors import SimulatorUnavailableError
from quaver.simulator import build, module
from quaver.simulator.distributed import register_collectives

MAX_DEVICES = 16

_lock = threading.Lock()
_loaded: list[torch.device] = []


def load(count: int = 2) -> list[torch.device]:
    """Load the simulated accelerators, once a process, and return the first ``count`` of them.

    The first call fixes how many there are. It must come before the process's first backward
    pass, since autograd counts devices only once. Afterwards ``torch.accelerator`` means the
    simulator, so a process that uses a real accelerator must not load it. The first load on a
    machine compiles for some seconds; later ones take the library from a cache.

    Args:
        count: how many devices, 1 to 16.

    Returns:
        ``[torch.device("sim:0"), ...]``, ``count`` of them.

    Raises:
        SimulatorUnavailableError: there is no C++ compiler, another accelerator took the place, a
            backward pass came before, or more devices are asked for than there are.
    """
    if not 1 <= count <= MAX_DEVICES:
        raise SimulatorUnavailableError(
            f"the simulator has 1 to {MAX_DEVICES} devices, {count} were asked for"
        )
    with _lock:
        if not _loaded:
            _load(count)
            _loaded.extend(torch.device("sim", i) for i in range(count))
    if count > len(_loaded):
        raise SimulatorUnavailableError(
            f"the simulator was loaded with {len(_loaded)} devices and {count} are asked for: the "
            f"first load fixes the number, so call load({count}) there"
        )
    return _loaded[:count]


def is_loaded() -> bool:
    """Return whether this process has simulated devices."""
    return bool(_loaded)


def _load(count: int) -> None:
    if not hasattr(torch, "sim"):  # else an earlier call got as far as the check below
        _register(count)
    _check_autograd(count)


def _register(count: int) -> None:
    _check_place()
    library = build.library()
    try:
        torch.ops.load_library(library)
    except OSError as error:
        raise SimulatorUnavailableError(
            f"the simulator's library does not load: remove {library} to have it built again "
            f"({error})"
        ) from error
    rename_privateuse1_backend("sim")
    torch.ops.quaver_sim.start(count)
    module.default_generators[:] = [module.default_generator(i) for i in range(count)]
    torch._register_device_module("sim", module)
    generate_methods_for_privateuse1_backend(for_storage=True)
    register_collectives()
    # An autograd thread that drops its last graph while the interpreter goes down aborts the
    # process: let the threads settle first.
    atexit.register(time.sleep, 0.05)


def _check_place() -> None:
    """Refuse when another backend has torch's one place for an outside accelerator."""
    name = torch._C._get_privateuse1_backend_name()
    accelerator = torch.accelerator.current_accelerator()
    if name != "privateuseone" or (accelerator is not None and accelerator.type == name):
        raise SimulatorUnavailableError(
            f"the simulator cannot be loaded beside the accelerator {name!r}: torch has room for "
            "one backend from outside in a process"
        )


def _check_autograd(count: int) -> None:
    """Refuse when autograd does not run backward on each device's own thread and device."""
    for index in range(count):
        x = torch.ones(1, device=f"sim:{index}", requires_grad=True)
        y = _BackwardDevice.apply(x)  # type: ignore[no-untyped-call]
        try:
            (seen,) = torch.autograd.grad(y, x)
        except RuntimeError:  # the engine has no thread for the device
            seen = None
        if seen is None or int(seen) != index:
            raise SimulatorUnavailableError(
                "the simulator must be loaded before the process's first backward pass, since "
                "autograd counts devices only once: call quaver.simulator.load() earlier"
            )


class _BackwardDevice(torch.autograd.Function):
    """The identity, with a gradient that tells on which current device backward runs."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return torch.full_like(grad, module.current_device())
