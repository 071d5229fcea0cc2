"""The Triton kernels in Triton's interpreter, each against its reference."""

import importlib.util
import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from quaver.devices import launch_check
from quaver.kernels import use_implementation

if importlib.util.find_spec("triton") is None:
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(autouse=True)
def _triton_versions() -> Iterator[None]:
    """Every kernel runs in its Triton version; NumPy is silent about overflows that are wanted."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("GPUs are tested by tests/gpu; for the interpreter set TRITON_INTERPRET=1")
    with use_implementation("triton"), np.errstate(all="ignore"):
        yield


@pytest.fixture(autouse=True)
def _launches_where_the_memory_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """A launch fails, as on a GPU, when any of its tensors is not on the current device.

    The door sees what the caller passed, this also what the wrapper of a kernel allocated.
    """
    from triton.runtime.interpreter import GridExecutor

    run = GridExecutor.__call__

    def checked(self: Any, *args: Any, **meta: Any) -> None:
        tensors = [arg for arg in args if isinstance(arg, torch.Tensor)]
        assert len({tensor.device for tensor in tensors}) == 1
        check = launch_check(tensors[0].device.type)
        if check is not None:
            check(*tensors)
        run(self, *args, **meta)

    monkeypatch.setattr(GridExecutor, "__call__", checked)
