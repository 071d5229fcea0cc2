"""GroupedLinear beside as many Linears, each with its own rows."""

import copy
import pickle

import pytest
import torch
from torch import nn

import quaver as qv
from quaver.nn import GroupedLinear, checkpoint
from quaver.nn.wgrad import WgradOptions
from quaver.testing import launches
from tests.integration.helpers import (
    assert_guarded,
    assert_same,
    gradients,
    reference_device,
    scaling,
)
from tests.integration.recipes import RECIPES
from tests.samples import normal

SPLITS = [5, 0, 9, 18]
WIDTHS = (24, 40)
STEPS = 4

Devices = list[torch.device]
EVERY_RECIPE = pytest.mark.parametrize("recipe", RECIPES)


def twins(device="cpu", bias: bool = True) -> tuple[GroupedLinear, nn.ModuleList]:
    grouped = GroupedLinear(len(SPLITS), *WIDTHS, bias, device=device)
    linears = nn.ModuleList(qv.Linear(*WIDTHS, bias, device=device) for _ in SPLITS)
    with torch.no_grad():
        for i, one in enumerate(linears):
            one.weight.copy_(getattr(grouped, f"weight{i}"))
            if bias:
                one.bias.copy_(getattr(grouped, f"bias{i}"))
    return grouped, linears


def train(module: nn.Module, recipe, device, splits=SPLITS, steps=STEPS) -> dict[str, torch.Tensor]:
    """A few steps of SGD; all outputs and gradients of the last step."""
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for step in range(steps):
        x = normal(sum(splits), WIDTHS[0], name=f"x{step}").to(device).requires_grad_()
        with qv.autocast(enabled=recipe is not None, recipe=recipe):
            if isinstance(module, GroupedLinear):
                y = module(x, splits)
            else:
                y = torch.cat(
                    [one(rows) for one, rows in zip(module, x.split(splits), strict=True)]
                )
        optimizer.zero_grad()
        y.backward(normal(*y.shape, name=f"grad{step}").to(device))
        optimizer.step()
    return {"y": y.detach().cpu(), "dx": x.grad.cpu(), **gradients(module)}


def by_group(found: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Results of a GroupedLinear under the names of a list of Linears."""
    renamed = {}
    for name, value in found.items():
        kind = name.rstrip("0123456789")
        group = name.removeprefix(kind)
        renamed[f"{group}.{kind}" if group else name] = value
    return renamed


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("name", [None, *(name for name in RECIPES if name != "nvfp4")])
def test_it_equals_as_many_linears(name: str | None, bias: bool, devices: Devices) -> None:
    recipe = RECIPES[name] if name else None
    grouped, linears = twins(devices[1], bias)
    ours = by_group(train(grouped, recipe, devices[1]))
    assert_same(ours, train(linears, recipe, devices[1]))
    if name == "delayed":
        for mode, slots in (("forward", 3), ("backward", 2)):
            state = grouped.recipe_states[mode]
            others = [one.recipe_states[mode] for one in linears]
            assert torch.equal(state.scale, torch.cat([s.scale for s in others]))
            history = torch.cat([s.amax_history for s in others], dim=1)
            assert torch.equal(state.amax_history, history)
            assert state.num_quantizers == slots * len(SPLITS)


def test_with_nvfp4s_random_rounding_the_forward_is_the_same_and_no_two_groups_draw_alike() -> None:
    grouped, linears = twins()
    ours = by_group(train(grouped, RECIPES["nvfp4"], "cpu", steps=1))
    theirs = train(linears, RECIPES["nvfp4"], "cpu", steps=1)
    assert torch.equal(ours["y"], theirs["y"])
    assert torch.equal(ours["3.bias"], theirs["3.bias"])
    same = GroupedLinear(2, *WIDTHS)
    same.load_state_dict({**same.state_dict(), "weight1": same.weight0})
    row = normal(16, WIDTHS[0], name="x")
    with qv.autocast(recipe=RECIPES["nvfp4"]):
        y = same(torch.cat((row, row)), [16, 16])
    grad = normal(16, WIDTHS[1], name="grad")
    y.backward(torch.cat((grad, grad)))
    assert not torch.equal(same.weight0.grad, same.weight1.grad)


@EVERY_RECIPE
def test_each_device_computes_the_same_bits(recipe: str, devices: Devices) -> None:
    grouped, _ = twins()
    found = []
    for device in (reference_device(devices), *devices):
        module = copy.deepcopy(grouped).to(device)
        with launches() as log:
            found.append({**train(module, RECIPES[recipe], device), **scaling(module)})
        if device == devices[1]:
            assert_guarded(log, [device])
    for other in found[1:]:
        assert_same(found[0], other)


def test_empty_groups_learn_nothing_and_have_no_gradient() -> None:
    grouped, _ = twins()
    found = train(grouped, RECIPES["delayed"], "cpu", splits=[0, 0, 4, 0])
    assert not found["weight0"].any()
    assert not found["bias3"].any()
    scale = grouped.recipe_states["forward"].scale
    assert scale[0] == 1  # its input was never seen
    assert scale[6] != 1
    with qv.autocast(recipe=RECIPES["delayed"]):
        y = grouped(torch.empty(0, WIDTHS[0]), [0] * 4)
    assert y.shape == (0, WIDTHS[1])


def test_leading_dimensions_are_rows() -> None:
    grouped, _ = twins()
    x = normal(4, 8, WIDTHS[0], name="x")
    y = grouped(x, SPLITS)
    assert y.shape == (4, 8, WIDTHS[1])
    assert torch.equal(y.flatten(0, 1), grouped(x.flatten(0, 1), torch.tensor(SPLITS)))


def test_kept_weights_are_used_until_the_first_microbatch() -> None:
    grouped, _ = twins()
    x = normal(sum(SPLITS), WIDTHS[0], name="x")
    with torch.no_grad(), qv.autocast(recipe=RECIPES["current"]):
        fresh = grouped(x, SPLITS)
        assert torch.equal(grouped(x, SPLITS, is_first_microbatch=True), fresh)
        for i in range(4):
            getattr(grouped, f"weight{i}").mul_(2)
        assert torch.equal(grouped(x, SPLITS, is_first_microbatch=False), fresh)
        assert not torch.equal(grouped(x, SPLITS, is_first_microbatch=True), fresh)


@EVERY_RECIPE
def test_weights_are_quantized_from_the_start(recipe: str) -> None:
    with qv.quantized_model_init(recipe=RECIPES[recipe]):
        grouped = GroupedLinear(3, *WIDTHS)
    if recipe != "custom":
        assert all(type(getattr(grouped, f"weight{i}")) is not nn.Parameter for i in range(3))
    before = [getattr(grouped, f"weight{i}").dequantize().clone() for i in range(3)]
    grouped.reset_parameters()
    assert not torch.equal(grouped.weight1.dequantize(), before[1])
    x = normal(8, WIDTHS[0], name="x")
    with qv.autocast(recipe=RECIPES[recipe]):
        y = grouped(x, [2, 2, 4])
    exact = torch.cat(
        [
            nn.functional.linear(rows, getattr(grouped, f"weight{i}").dequantize(), bias)
            for i, (rows, bias) in enumerate(
                zip(x.split([2, 2, 4]), [grouped.bias0, grouped.bias1, grouped.bias2], strict=True)
            )
        ]
    )
    assert (y - exact).norm() < 0.2 * exact.norm()


def test_state_is_saved_and_comes_back(devices: Devices) -> None:
    grouped, _ = twins(devices[0])
    train(grouped, RECIPES["delayed"], devices[0])
    again = GroupedLinear(len(SPLITS), *WIDTHS, device=devices[1])
    again.load_state_dict(grouped.state_dict())
    pickled = pickle.loads(pickle.dumps(copy.deepcopy(grouped)))
    expected = train(grouped, RECIPES["delayed"], devices[0])
    assert_same(expected, train(again, RECIPES["delayed"], devices[1]))
    assert_same(expected, train(pickled, RECIPES["delayed"], devices[0]))
    assert list(GroupedLinear(1, 4, 4).state_dict()) == ["weight0", "bias0", "_extra_state"]


def test_calibration_finds_each_groups_scales() -> None:
    grouped, _ = twins()
    x = normal(sum(SPLITS), WIDTHS[0], name="x")
    with torch.no_grad(), qv.autocast(enabled=False, calibrating=True, recipe=RECIPES["delayed"]):
        y = grouped(x, SPLITS)
    plain = [
        nn.functional.linear(r, getattr(grouped, f"weight{i}"), getattr(grouped, f"bias{i}"))
        for i, r in enumerate(x.split(SPLITS))
    ]
    assert torch.equal(y, torch.cat(plain))
    scale = grouped.recipe_states["forward"].scale
    for i, rows in enumerate(x.split(SPLITS)):
        if rows.numel():
            torch.testing.assert_close(scale[3 * i], 448 / rows.abs().max())
        weight = getattr(grouped, f"weight{i}").detach()
        torch.testing.assert_close(scale[3 * i + 1], 448 / weight.abs().max())


@pytest.mark.parametrize("recipe", [None, "current"])
def test_gradients_can_go_to_main_grad_later(recipe: str | None) -> None:
    options = WgradOptions(fuse_wgrad_accumulation=True, delay_wgrad_compute=True)
    grouped, _ = twins()
    delaying = GroupedLinear(len(SPLITS), *WIDTHS, wgrad=options)
    delaying.load_state_dict(grouped.state_dict())
    for i in range(len(SPLITS)):
        weight = getattr(delaying, f"weight{i}")
        weight.main_grad = torch.ones_like(weight)
    x = normal(sum(SPLITS), WIDTHS[0], name="x")
    chosen = RECIPES[recipe] if recipe else None
    for module in (grouped, delaying):
        with qv.autocast(enabled=recipe is not None, recipe=chosen):
            module(x, SPLITS).square().sum().backward()
    assert torch.equal(delaying.weight2.main_grad, torch.ones(WIDTHS[::-1]))
    delaying.backward_dw()
    assert delaying.weight2.grad is None
    torch.testing.assert_close(delaying.weight2.main_grad, grouped.weight2.grad + 1)


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputation_repeats_the_scales(reentrant: bool, devices: Devices) -> None:
    grouped, _ = twins(devices[1])
    plain = copy.deepcopy(grouped)
    for step in range(3):
        results = []
        for module in (grouped, plain):
            module.zero_grad()
            x = normal(sum(SPLITS), WIDTHS[0], name=f"x{step}", device=devices[1])
            x.requires_grad_()
            with qv.autocast(recipe=RECIPES["delayed"]):
                if module is grouped:
                    y = checkpoint(module, x, SPLITS, use_reentrant=reentrant)
                else:
                    y = module(x, SPLITS)
            y.square().sum().backward()
            results.append({"y": y, "dx": x.grad, **gradients(module), **scaling(module)})
        assert_same(*results)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated.*:DeprecationWarning")
def test_it_traces_under_compile() -> None:
    grouped, _ = twins()
    compiled = torch.compile(copy.deepcopy(grouped), backend="aot_eager", fullgraph=True)
    assert_same(
        {k.removeprefix("_orig_mod."): v for k, v in results(compiled).items()}, results(grouped)
    )


def results(module: nn.Module) -> dict[str, torch.Tensor]:
    x = normal(sum(SPLITS), WIDTHS[0], name="x").requires_grad_()
    with qv.autocast(recipe=RECIPES["current"]):
        y = module(x, SPLITS)
    y.square().sum().backward()
    return {"y": y, "dx": x.grad, **gradients(module)}


def test_mistakes_are_named(devices: Devices) -> None:
    grouped, _ = twins()
    x = normal(sum(SPLITS), WIDTHS[0], name="x")
    for splits in ([32], [5, 0, 9, 17], [33, 0, 0, -1]):
        with pytest.raises(ValueError, match="4 sizes that add up to the 32 rows"):
            grouped(x, splits)
    with pytest.raises(ValueError, match="24 features"):
        grouped(x[:, 1:], SPLITS)
    with pytest.raises(qv.DeviceMismatchError, match="x is on cpu and weight0 is on"):
        grouped.to(devices[1])(x, SPLITS)
    with pytest.raises(ValueError, match="num_gemms must be at least 1"):
        GroupedLinear(0, 4, 4)
    assert "num_gemms=4, in_features=24, out_features=40, bias=True" in repr(grouped)
