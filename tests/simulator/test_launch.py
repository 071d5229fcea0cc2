"""A raw launch, one that no op guards, fails when its memory is not the current device's."""

import pytest
import torch

from quaver.simulator import AcceleratorError, check_launch


def test_a_launch_fails_just_where_the_device_is_not_current(placement: tuple[int, int]) -> None:
    tensor, current = placement
    x = torch.ones(2, device=f"sim:{tensor}")
    if tensor == current:
        check_launch(x, [x, x], 3, None)
    else:
        message = f"an illegal memory access .*launch on sim:{current}, memory of sim:{tensor}"
        with pytest.raises(AcceleratorError, match=message):
            check_launch(x)
        with pytest.raises(AcceleratorError, match=message):
            check_launch(1.0, None, (x,))
    with torch.sim.device(tensor):
        torch.sim.check_launch(x)


def test_one_wrong_operand_is_enough() -> None:
    good, wrong = torch.ones(2, device="sim:0"), torch.ones(2, device="sim:1")
    with pytest.raises(AcceleratorError, match="memory of sim:1"):
        check_launch(good, good, wrong)
    with pytest.raises(AcceleratorError, match="memory of cpu"):
        check_launch(good, torch.ones(2))


def test_the_stream_must_be_the_current_devices() -> None:
    x = torch.ones(2, device="sim:0")
    check_launch(x, stream=torch.sim.current_stream())
    with pytest.raises(AcceleratorError, match="launch on sim:0, stream of sim:1"):
        check_launch(x, stream=torch.sim.Stream(1))


def test_the_error_is_cudas() -> None:
    assert AcceleratorError is torch.AcceleratorError
    assert torch.get_device_module("sim").check_launch is check_launch
