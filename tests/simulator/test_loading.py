"""Loading: once a process, and in clear words when it cannot be."""

import subprocess
import sys

import pytest
import torch

from quaver.errors import SimulatorUnavailableError
from quaver.simulator import is_loaded, load


def test_a_later_load_returns_as_many_as_asked_for(devices: list[torch.device]) -> None:
    assert is_loaded()
    assert load(2) == devices == [torch.device("sim:0"), torch.device("sim:1")]
    assert load(1) == devices[:1]


def test_the_first_load_fixes_the_number() -> None:
    with pytest.raises(SimulatorUnavailableError, match=r"loaded with 2 devices and 3 .*load\(3\)"):
        load(3)


@pytest.mark.parametrize("count", [0, 17])
def test_the_number_has_bounds(count: int) -> None:
    with pytest.raises(SimulatorUnavailableError, match=f"1 to 16 devices, {count} were asked"):
        load(count)


REFUSALS = {
    "an earlier backward": (
        "torch.ones(1, requires_grad=True).sum().backward()",
        "before the process's first backward pass",
    ),
    "another backend": (
        "torch.utils.rename_privateuse1_backend('other')",
        "cannot be loaded beside the accelerator 'other'",
    ),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_load_refuses_after(case: str) -> None:
    before, message = REFUSALS[case]
    script = f"""
import torch
{before}
from quaver.errors import SimulatorUnavailableError
from quaver.simulator import is_loaded, load
for _ in range(2):
    try:
        load(2)
    except SimulatorUnavailableError as error:
        print(error)
assert not is_loaded()
"""
    lines = _python("-c", script).stdout.splitlines()
    assert len(lines) == 2
    assert all(message in line for line in lines)


def test_a_script_that_ends_after_a_backward_exits_cleanly() -> None:
    script = """
import torch
from quaver.simulator import is_loaded, load
assert not is_loaded()
a, b, c = load(3)
x = torch.ones(2, device=c, requires_grad=True)
(x.to(a) * 2).sum().backward()
print(x.grad.tolist(), torch.sim.device_count())
"""
    assert _python("-c", script).stdout.split("\n")[0] == "[2.0, 2.0] 3"


def _python(*arguments: str) -> subprocess.CompletedProcess[str]:
    result = subprocess.run(
        [sys.executable, "-W", "error", *arguments], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    return result
