"""Weights from masters: all of a device at once where the format allows it, with the same bytes."""

import pytest
import torch
from torch import nn

from quaver.optim import MasterWeights
from quaver.optim.requantize import requantize
from quaver.quantizers import Float8CurrentScalingQuantizer, Float8Quantizer
from quaver.testing import launches
from tests.samples import normal
from tests.tensors.formats import E4M3, E5M2, QUANTIZERS, make, same_parts

PER_TENSOR = {
    "e4m3": lambda: Float8CurrentScalingQuantizer(E4M3),
    "e5m2_power_2": lambda: Float8CurrentScalingQuantizer(E5M2, power_2_scale=True),
    "epsilon": lambda: Float8CurrentScalingQuantizer(E4M3, amax_epsilon=8.0),
    "rowwise": lambda: Float8CurrentScalingQuantizer(E4M3, columnwise=False),
    "columnwise": lambda: Float8CurrentScalingQuantizer(E4M3, rowwise=False),
}
GIVEN = {"given": lambda: Float8Quantizer(torch.full((1,), 0.37), torch.zeros(1), E4M3)}
SHAPES = ((5, 9), (1, 1), (64, 33), (7,), (2, 3, 4))


def pairs(makers, device="cpu"):
    """A weight of each kind and shape, and a master with other values; a NaN and an inf in some."""
    made = []
    for name, maker in makers.items():
        for shape in SHAPES:
            master = normal(*shape, device=device, name=f"master {name}") * 3
            if shape == (5, 9):
                master[1, 2] = torch.nan
            if shape == (64, 33):
                master[3, 1] = -torch.inf
            weight = maker().to(master.device)(normal(*shape, device=device, name=name))
            made.append((weight, master))
    return made


def one_by_one(made) -> list:
    weights = [weight.detach().clone() for weight, _ in made]
    for weight, (_, master) in zip(weights, made, strict=True):
        weight.copy_(master)
    return weights


def test_the_bytes_are_those_of_one_by_one() -> None:
    made = pairs(PER_TENSOR | GIVEN | QUANTIZERS)
    expected = one_by_one(made)
    before = [weight._version for weight, _ in made]
    requantize(made)
    for (weight, _), wanted, version in zip(made, expected, before, strict=True):
        assert same_parts(weight, wanted), weight
        assert weight._version > version


def test_a_weight_without_a_quantizer_takes_the_scale_of_its_own_amax() -> None:
    weight = make("float8", 6, 5)
    bare = weight.like(weight.parts(), quantizer=None)
    master = normal(6, 5, name="master")
    expected = bare.detach().clone()
    expected.copy_(master)
    requantize([(bare, master)])
    assert same_parts(bare, expected)


@pytest.mark.parametrize("count", [1, 4])
def test_one_launch_a_device_and_format_whatever_the_number_of_weights(devices, count) -> None:
    made = [pair for _ in range(count) for device in devices for pair in pairs(PER_TENSOR, device)]
    expected = one_by_one(made)
    with launches() as log:
        requantize(made)
    assert {launch.kernel for launch in log} == {"multi_cast"}
    for device in devices:
        there = [launch for launch in log if launch.device == device]
        assert len(there) == len(PER_TENSOR)
        assert all(launch.current == device for launch in there)
    assert all(same_parts(weight, e) for (weight, _), e in zip(made, expected, strict=True))


def test_a_step_of_many_layers_launches_once_a_device(devices) -> None:
    layers = nn.ModuleList()
    for i in range(6):
        layer = nn.Linear(8, 4, device=devices[i % 2])
        layer.weight = nn.Parameter(make("float8", 4, 8, device=devices[i % 2]))
        layers.append(layer)
    optimizer = MasterWeights(layers.parameters(), torch.optim.SGD, lr=0.1)
    for parameter in layers.parameters():
        parameter.grad = torch.ones_like(parameter, dtype=torch.float32)
    masters = [optimizer.master(layer.weight) - 0.1 for layer in layers]
    with launches() as log:
        optimizer.step()
    assert sorted((launch.kernel, launch.device.index) for launch in log) == [
        ("multi_cast", 0),
        ("multi_cast", 1),
    ]
    for layer, master in zip(layers, masters, strict=True):
        wanted = QUANTIZERS["float8"]()(master)
        assert same_parts(layer.weight, wanted)
