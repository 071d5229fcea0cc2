"""Linear beside torch.nn.Linear: the same module, until a recipe is in force."""

import copy
import io
import pickle

import pytest
import torch
from torch import nn

import quaver as qv
from quaver.recipe import DelayedScaling
from quaver.testing import launches
from tests.samples import DTYPES, normal

RECIPE = DelayedScaling(amax_history_len=4)


def twins(*, bias: bool = True, dtype=torch.float32, device="cpu", recipe=None):
    """torch's Linear and ours with the same parameters."""
    torch.manual_seed(1)
    plain = nn.Linear(30, 12, bias=bias, dtype=dtype, device=device)
    ours = qv.Linear(30, 12, bias=bias, dtype=dtype, device=device, recipe=recipe)
    ours.load_state_dict(plain.state_dict())
    return plain, ours


def step(module: nn.Module, x: torch.Tensor) -> dict[str, torch.Tensor]:
    """Output and gradients of a training step."""
    x = x.detach().clone().requires_grad_()
    y = module(x)
    y.backward(normal(*y.shape, dtype=y.dtype, device=y.device, name="grad"))
    grads = {name: p.grad.clone() for name, p in module.named_parameters()}
    module.zero_grad()
    return {"y": y.detach(), "x": x.grad} | grads


def trained(**options) -> qv.Linear:
    module = twins(**options)[1]
    with qv.autocast(recipe=RECIPE):
        step(module, normal(5, 30, device=module.weight.device))
    return module


def assert_same_states(left: qv.Linear, right: qv.Linear) -> None:
    assert left.recipe_states.keys() == right.recipe_states.keys() == {"forward", "backward"}
    for mode, state in left.recipe_states.items():
        other = right.recipe_states[mode]
        assert torch.equal(state.scale.cpu(), other.scale.cpu())
        assert torch.equal(state.amax_history.cpu(), other.amax_history.cpu())


# ---- the same module as torch's


@pytest.mark.parametrize("shape", [(5, 30), (2, 3, 30), (30,), (0, 30)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bias", [False, True])
def test_in_high_precision_it_equals_torchs_bit_for_bit(bias: bool, dtype, shape) -> None:
    plain, ours = twins(bias=bias, dtype=dtype)
    x = normal(*shape, dtype=dtype)
    expected, got = step(plain, x), step(ours, x)
    assert expected.keys() == got.keys()
    for name, value in expected.items():
        assert torch.equal(got[name], value), name
    assert ours.recipe_states == {}


def test_it_draws_the_parameters_that_torch_draws() -> None:
    torch.manual_seed(5)
    plain = nn.Linear(30, 12)
    torch.manual_seed(5)
    ours = qv.Linear(30, 12)
    assert torch.equal(plain.weight, ours.weight)
    assert torch.equal(plain.bias, ours.bias)
    assert isinstance(ours, nn.Linear)
    assert repr(ours) == repr(plain)


def test_the_state_dict_is_torchs_and_one_entry_more() -> None:
    plain, ours = twins()
    assert list(ours.state_dict()) == [*plain.state_dict(), "_extra_state"]
    assert list(nn.Sequential(ours).state_dict()) == ["0.weight", "0.bias", "0._extra_state"]
    assert [name for name, _ in ours.named_buffers()] == []


def test_a_checkpoint_of_torchs_loads_strictly_and_keeps_the_states() -> None:
    ours, (plain, _) = trained(), twins()
    before = copy.deepcopy(ours)
    result = ours.load_state_dict(plain.state_dict(), strict=True)
    assert (result.missing_keys, result.unexpected_keys) == ([], [])
    assert torch.equal(ours.weight, plain.weight)
    assert_same_states(ours, before)
    with pytest.raises(RuntimeError, match="Missing key"):
        ours.load_state_dict({"weight": plain.weight}, strict=True)


def test_ours_loads_into_torchs_with_one_unexpected_key() -> None:
    plain, ours = twins()
    result = plain.load_state_dict(ours.state_dict(), strict=False)
    assert (result.missing_keys, result.unexpected_keys) == ([], ["_extra_state"])


# ---- in FP8


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bias", [False, True])
def test_in_fp8_it_is_close_in_the_right_dtype_and_has_three_casts_and_products(
    bias: bool, dtype
) -> None:
    plain, ours = twins(bias=bias, dtype=dtype)
    x = normal(64, 30, dtype=dtype)
    expected = step(plain, x)
    with launches() as log, qv.autocast(recipe=RECIPE):
        got = step(ours, x)
    kernels = [entry.kernel for entry in log]
    gradient = "cast_grad" if bias else "cast"  # the bias's gradient comes with the cast
    assert [k for k in kernels if "cast" in k] == ["cast", "cast", gradient]
    assert kernels.count("scaled_mm") == 3
    for name, value in expected.items():
        assert got[name].dtype == value.dtype
        error = (got[name] - value).float().norm() / value.float().norm()
        assert error < (0.1 if name in ("x", "weight") else 0.05), (name, error)
        if name != "bias":
            assert error > 0, name


def test_only_the_gradients_that_are_needed_are_computed() -> None:
    _, ours = twins()
    ours.weight.requires_grad_(False)
    with qv.autocast(recipe=RECIPE), launches() as log:
        y = ours(normal(4, 30))
        y.sum().backward()
    assert [entry.kernel for entry in log].count("scaled_mm") == 1
    assert ours.weight.grad is None
    assert ours.bias.grad is not None


@pytest.mark.parametrize("shape", [(4, 29), (4, 31), (30, 4), (29,), ()], ids=str)
@pytest.mark.parametrize("recipe", [None, RECIPE], ids=["plain", "fp8"])
def test_a_wrong_feature_count_is_said_before_anything_ran(recipe, shape) -> None:
    ours = qv.Linear(30, 12, recipe=recipe)
    with launches() as log, pytest.raises(ValueError, match="30 features") as caught:
        ours(torch.zeros(shape))
    assert str(shape) in str(caught.value)
    assert log == []


@pytest.mark.parametrize("recipe", [None, RECIPE], ids=["plain", "fp8"])
def test_two_devices_are_an_error_that_names_both_tensors(devices, recipe) -> None:
    ours = qv.Linear(30, 12, device=devices[0], recipe=recipe)
    with launches() as log, pytest.raises(qv.DeviceMismatchError) as caught:
        ours(normal(4, 30, device=devices[1]))
    assert f"x is on {devices[1]} and weight is on {devices[0]}" in str(caught.value)
    ours.bias.data = ours.bias.data.to(devices[1])
    with pytest.raises(qv.DeviceMismatchError, match=f"bias is on {devices[1]}"):
        ours(normal(4, 30, device=devices[0]))
    assert log == []
    assert torch.accelerator.current_device_index() == 0


@pytest.mark.parametrize("current", [0, 1])
def test_the_execution_device_is_pinned_and_put_back(devices, current: int) -> None:
    ours = qv.Linear(30, 12, device=devices[1], recipe=RECIPE)
    x = normal(4, 30, device=devices[1])
    with torch.accelerator.device_index(current):
        assert ours.prepare_forward(x) is x
        pinned = torch.accelerator.current_device_index()
        ours.end_forward()
        assert pinned == 1
        assert torch.accelerator.current_device_index() == current
        with pytest.raises(ValueError, match="features"):
            ours.prepare_forward(x[:, 1:])
        assert torch.accelerator.current_device_index() == current


def test_the_input_can_be_given_by_torchs_name_and_by_ours() -> None:
    plain, ours = twins()
    x = normal(5, 30)
    expected = plain(input=x)
    for given in ({"input": x}, {"x": x}):
        assert torch.equal(ours(**given), expected)
    with torch.no_grad(), pytest.warns(UserWarning, match="no scales yet"):
        in_fp8 = qv.Linear.forward(twins(recipe=RECIPE)[1], input=x)
    assert 0 < (in_fp8 - expected).norm() < 0.05 * expected.norm()
    with pytest.raises(TypeError, match="input"):
        ours()


# ---- moving, copying, saving


def test_states_live_where_the_module_does_and_follow_it(devices) -> None:
    ours = trained(device=devices[1])
    before = copy.deepcopy(ours)
    for device in (devices[0], torch.device("cpu"), devices[1]):
        assert ours.to(device) is ours
        for state in ours.recipe_states.values():
            assert state.device == state.amax_history.device == device
        assert_same_states(ours, before)
        with qv.autocast(recipe=RECIPE):
            step(copy.deepcopy(ours), normal(5, 30, device=device))
    assert torch.accelerator.current_device_index() == 0


@pytest.mark.parametrize("convert", [nn.Module.bfloat16, nn.Module.half, nn.Module.double])
def test_states_stay_float32_when_the_module_is_cast(convert) -> None:
    ours, before = trained(), trained()
    convert(ours)
    assert ours.weight.dtype != torch.float32
    assert {s.scale.dtype for s in ours.recipe_states.values()} == {torch.float32}
    assert_same_states(ours, before)


@pytest.mark.parametrize(
    "twin_of", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["copy", "pickle"]
)
def test_a_twin_goes_on_learning_by_itself(devices, twin_of) -> None:
    ours = trained(device=devices[1], recipe=RECIPE)
    twin = twin_of(ours)
    assert_same_states(twin, ours)
    assert twin.recipe == RECIPE
    frozen = copy.deepcopy(ours)
    twin(normal(5, 30, device=devices[1]) * 8)
    assert_same_states(ours, frozen)
    assert twin.recipe_states["forward"].device == devices[1]
    assert twin.recipe_states["forward"].scale[0] < ours.recipe_states["forward"].scale[0]
    ours(normal(5, 30, device=devices[1]) * 8)
    assert_same_states(ours, twin)


@pytest.mark.parametrize("recipe", [None, RECIPE], ids=["plain", "attached"])
def test_meta_to_empty_and_reset(devices, recipe) -> None:
    ours = qv.Linear(30, 12, device="meta", recipe=recipe)
    ours.to_empty(device=devices[1])
    assert ours.weight.device == devices[1]
    torch.manual_seed(3)
    ours.reset_parameters()
    torch.manual_seed(3)
    expected = nn.Linear(30, 12, device=devices[1])
    assert torch.equal(ours.weight, expected.weight)
    with qv.autocast(recipe=RECIPE):
        y = ours(normal(4, 30, device=devices[1]))
    assert y.device == devices[1]
    assert {s.device for s in ours.recipe_states.values()} == {devices[1]}
    assert ours.recipe_states["forward"].updates == 1


def test_a_forward_on_meta_gives_shapes_and_the_real_states_come_later() -> None:
    ours = qv.Linear(30, 12, device="meta", recipe=RECIPE)
    y = ours(torch.zeros(4, 30, device="meta"))
    assert (y.shape, y.device.type) == ((4, 12), "meta")
    ours.to_empty(device="cpu").reset_parameters()
    ours(normal(4, 30))
    state = ours.recipe_states["forward"]
    assert state.device.type == "cpu"
    assert state.amax_history[-1, 0].item() == normal(4, 30).abs().max().item()


def test_a_checkpoint_restores_the_states_on_another_device(devices) -> None:
    ours = trained(device=devices[0])
    file = io.BytesIO()
    torch.save(ours.state_dict(), file)
    file.seek(0)
    other = qv.Linear(30, 12, device=devices[1])
    other.load_state_dict(torch.load(file, weights_only=True))
    assert_same_states(other, ours)
    assert {s.device for s in other.recipe_states.values()} == {devices[1]}
    x = normal(5, 30, name="next")
    with torch.no_grad(), qv.autocast(recipe=RECIPE):
        left, right = ours(x.to(devices[0])), other(x.to(devices[1]))
    assert torch.equal(left.cpu(), right.cpu())


def test_what_is_no_extra_state_is_an_error_of_one_line() -> None:
    ours = trained()
    broken = ours.state_dict() | {"_extra_state": torch.ones(8, dtype=torch.uint8)}
    with pytest.raises(qv.CheckpointError):
        ours.load_state_dict(broken)


# ---- microbatches


def test_later_microbatches_reuse_the_quantized_weight_bit_for_bit() -> None:
    ours, twin = trained(), trained()
    batches = [normal(5, 30, name=f"batch {i}") for i in range(3)]
    with qv.autocast(recipe=RECIPE), launches() as log:
        kept = [ours(x, is_first_microbatch=i == 0) for i, x in enumerate(batches)]
    with qv.autocast(recipe=RECIPE):
        anew = [twin(x) for x in batches]
    assert [entry.kernel for entry in log].count("cast") == 4, "three inputs and one weight"
    for left, right in zip(kept, anew, strict=True):
        assert torch.equal(left, right)
    for outputs in (kept, anew):
        sum(y.square().sum() for y in outputs).backward()
    assert torch.equal(ours.weight.grad, twin.weight.grad)
    assert torch.equal(ours.bias.grad, twin.bias.grad)
    assert_same_states(ours, twin)


def test_the_kept_weight_is_kept_until_the_next_first_microbatch() -> None:
    ours, x = trained(), normal(5, 30)
    with torch.no_grad(), qv.autocast(recipe=RECIPE):
        before = ours(x, is_first_microbatch=True)
        ours.weight.mul_(2)
        assert torch.equal(ours(x, is_first_microbatch=False), before)
        assert not torch.equal(ours(x, is_first_microbatch=True), before)


def test_the_kept_weight_does_not_stay_behind_on_another_device(devices) -> None:
    ours = trained(device=devices[0])
    x = normal(5, 30)
    with torch.no_grad(), qv.autocast(recipe=RECIPE):
        before = ours(x.to(devices[0]), is_first_microbatch=True)
        ours.to(devices[1])
        after = ours(x.to(devices[1]), is_first_microbatch=False)
    assert after.device == devices[1]
    assert torch.equal(after.cpu(), before.cpu())


@pytest.mark.filterwarnings("ignore:delayed scaling has no scales yet")
def test_a_kept_weight_is_dropped_when_a_checkpoint_is_loaded() -> None:
    ours, x = trained(), normal(5, 30)
    with torch.no_grad(), qv.autocast(recipe=RECIPE):
        ours(x, is_first_microbatch=True)
    ours.load_state_dict({"weight": ours.weight * 2, "bias": ours.bias})
    with torch.no_grad(), qv.autocast(recipe=RECIPE):
        kept = ours(x, is_first_microbatch=False)
        assert torch.equal(kept, ours(x))
    exact = nn.functional.linear(x, ours.weight, ours.bias)
    assert (kept - exact).norm() < 0.05 * exact.norm()


def test_a_quantized_weight_is_its_own_cache() -> None:
    ours, x = trained(), normal(5, 30)
    ours.quantize_weight()
    with torch.no_grad(), qv.autocast(recipe=RECIPE), launches() as log:
        outputs = [ours(x, is_first_microbatch=first) for first in (None, True, False)]
    assert [entry.kernel for entry in log] == ["cast", "scaled_mm"] * 3
    assert torch.equal(outputs[0], outputs[1])
    assert torch.equal(outputs[0], outputs[2])


def test_a_weight_kept_for_inference_has_no_transposed_copy_until_a_backward_needs_it() -> None:
    layer, x = qv.Linear(32, 48), normal(4, 32)
    recipe = qv.recipe.Float8BlockScaling()
    with torch.no_grad(), qv.autocast(recipe=recipe):
        layer(x, is_first_microbatch=True)
        assert layer._weight_cache[0].columnwise is None
        kept = layer._weight_cache[0]
        layer(x, is_first_microbatch=False)
        assert layer._weight_cache[0] is kept
    with qv.autocast(recipe=recipe):
        y = layer(x, is_first_microbatch=False)
    assert layer._weight_cache[0].columnwise is not None
    y.sum().backward()
    assert layer.weight.grad is not None
