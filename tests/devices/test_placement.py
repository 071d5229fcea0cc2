"""Where tensors and modules live."""

import pytest
import torch
from torch import nn

from quaver.devices import get_module_device, group_by_device, operands_device
from quaver.errors import DeviceMismatchError

CPU = torch.device("cpu")


def tensor(device: torch.device | str) -> torch.Tensor:
    return torch.ones(2, device=device)


class Buffers(nn.Module):
    """A module without parameters."""

    def __init__(self, *devices: torch.device | str) -> None:
        super().__init__()
        for i, device in enumerate(devices):
            self.register_buffer(f"table{i}", tensor(device))


def test_operands_device_is_that_of_all(devices) -> None:
    pair = (tensor(devices[1]), None, tensor(devices[1]))
    assert operands_device(("x", "bias", "weight"), pair) == devices[1]
    assert operands_device(["x"], [tensor("cpu")]) == CPU


@pytest.mark.parametrize("other", ["cpu", "meta", "neighbour"])
def test_operands_on_two_devices_are_an_error_that_names_both(devices, other: str) -> None:
    elsewhere = devices[0] if other == "neighbour" else torch.device(other)
    with pytest.raises(DeviceMismatchError) as caught:
        operands_device(("x", "bias", "weight"), (tensor(devices[1]), None, tensor(elsewhere)))
    message = str(caught.value)
    assert f"x is on {devices[1]} and weight is on {elsewhere}" in message
    assert "move one of them" in message
    assert isinstance(caught.value, RuntimeError)


def test_operands_device_needs_an_operand() -> None:
    with pytest.raises(ValueError, match="at least one tensor"):
        operands_device(("x",), (None,))


def test_module_device_comes_from_parameters(devices) -> None:
    assert get_module_device(nn.Linear(2, 2, device=devices[1])) == devices[1]
    assert get_module_device(nn.Linear(2, 2)) == CPU
    nested = nn.Sequential(nn.ReLU(), nn.Sequential(nn.Linear(2, 2, device=devices[1])))
    assert get_module_device(nested) == devices[1]


def test_module_device_comes_from_buffers_when_there_are_no_parameters(devices) -> None:
    assert get_module_device(Buffers(devices[1])) == devices[1]


def test_a_module_with_neither_has_no_device() -> None:
    assert get_module_device(nn.Sequential(nn.ReLU(), nn.Dropout())) is None


def test_it_follows_the_module(devices) -> None:
    module = nn.Linear(2, 2)
    assert get_module_device(module.to(devices[0])) == devices[0]
    assert get_module_device(module.to(devices[1])) == devices[1]


@pytest.mark.parametrize("order", [0, 1])
def test_meta_tensors_count_only_when_there_are_no_others(devices, order: int) -> None:
    mixed = ("meta", devices[1], "meta")[order:]
    assert get_module_device(Buffers(*mixed)) == devices[1]
    assert get_module_device(Buffers("meta", "meta")) == torch.device("meta")


@pytest.mark.parametrize("with_meta", [False, True])
def test_two_devices_are_an_error_that_names_both_tensors(devices, with_meta: bool) -> None:
    module = nn.Module()
    if with_meta:
        module.placeholder = nn.Parameter(tensor("meta"))
    module.first = nn.Linear(2, 2, bias=False, device=devices[0])
    module.second = Buffers(devices[1])
    with pytest.raises(DeviceMismatchError) as caught:
        get_module_device(module)
    message = str(caught.value)
    assert f"first.weight is on {devices[0]}" in message
    assert f"second.table0 is on {devices[1]}" in message


def test_grouping_keeps_the_order(devices) -> None:
    first, second = devices
    items = [("a", second), ("b", first), ("c", second), ("d", CPU), ("e", first)]
    groups = group_by_device(items, lambda item: item[1])
    assert list(groups) == [second, first, CPU]
    assert [[name for name, _ in group] for group in groups.values()] == [
        ["a", "c"],
        ["b", "e"],
        ["d"],
    ]
