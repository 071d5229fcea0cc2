"""Each fusion equals the operations called in turn, forward and backward, for every recipe."""

import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import quaver as qv
from quaver import ops
from quaver.nn.wgrad import WgradOptions
from quaver.ops.fuser import fuse
from quaver.recipe import Float8BlockScaling, Float8CurrentScaling
from quaver.testing import launches
from tests.integration.helpers import (
    assert_guarded,
    assert_same,
    equal,
    reference_device,
    scaling,
)
from tests.integration.recipes import RECIPES
from tests.ops.chains import CHAINS, IN, OUT, make, step, unfused
from tests.samples import normal

Results = dict[str, torch.Tensor]
every_recipe = pytest.mark.parametrize("recipe", [None, *RECIPES])


def recipe_of(name: str | None) -> qv.recipe.Recipe | None:
    return None if name is None else RECIPES[name]


@pytest.mark.parametrize("name", CHAINS)
def test_what_is_fused(name: str) -> None:
    operations = list(make(name))
    steps = fuse(operations)
    assert tuple(type(each) for each in steps) == CHAINS[name].fused
    assert [id(o) for each in steps for o in each.operations] == [id(o) for o in operations]


@every_recipe
@pytest.mark.parametrize("name", CHAINS)
def test_fused_equals_unfused_bit_for_bit(name: str, recipe: str | None) -> None:
    model = make(name)
    twin = unfused(model)
    for i in range(2):
        found = step(name, model, recipe_of(recipe), number=i)
        assert_same(found, step(name, twin, recipe_of(recipe), number=i))
    if scaling(twin):
        assert_same(scaling(model), scaling(twin))


ROUNDINGS_ALIKE = ("biased_linear_silu", "output_linear_gelu", "output_linear_add", "block")


@every_recipe
@pytest.mark.parametrize(
    "name", [*ROUNDINGS_ALIKE, "linear_scale_add", "output_rms", "output_norm"]
)
def test_in_16_bits(name: str, recipe: str | None) -> None:
    """Bit for bit where both chains round alike.

    DelayedScaling casts the gradient before an activation from float32; in turn it is rounded to
    bfloat16 first, which moves the gradient g, its amax and with that the scale by 2^-8 each at
    most. That takes g over one boundary between neighbours of E5M2 at most, a quarter of |g| apart
    (2^-16 of the largest |g| among the subnormals). So of the products with g, dx moves by at most
    a = (|g| / 4 + 2^-16 max|g| + 2^-7 |g|) |W| and dW by that against |x|, both with operands that
    FP8 has widened by 1 / 16 at most, and are then rounded to bfloat16; db by 2^-8 sum|g|.
    """
    dtype = torch.bfloat16
    model = make(name, dtype=dtype)
    twin = unfused(model)
    found = step(name, model, recipe_of(recipe), dtype=dtype)
    expected = step(name, twin, recipe_of(recipe), dtype=dtype)
    linear = model[-2]
    if recipe != "delayed" or not isinstance(model[-1], ops.SiLU | ops.GELU):
        assert_same(found, expected)
        return
    slope = 1.13  # the largest |f'|, of GELU and of SiLU 1.1
    g = slope * normal(4, 4, OUT, name="dy 0").to(dtype).float().abs().reshape(-1, OUT)
    moved = g / 4 + g.max() * 2.0**-16 + g * 2.0**-7
    x = normal(4, 4, IN, name="x 0").to(dtype).float().abs().reshape(-1, IN)
    weight = linear.weight.detach().float().abs()
    prefix = next(key for key in found if key.endswith("weight")).removesuffix("weight")
    bounds = {
        "dx0": (moved @ weight * 17 / 16).reshape(4, 4, IN),
        f"{prefix}weight": moved.t() @ x * 17 / 16,
        f"{prefix}bias": g.sum(0) * 2.0**-8,
    }
    for key, value in expected.items():
        if key in bounds:
            difference = (found[key].float() - value.float()).abs()
            assert (difference <= bounds[key] + value.float().abs() * 2.0**-7).all(), key
        else:
            assert equal(found[key], value), key


@every_recipe
@pytest.mark.parametrize("name", ["linear_bias_gelu", "output_linear_add", "block"])
def test_over_two_devices(devices, name: str, recipe: str | None) -> None:
    """Split, or on a device that is not current, it gives the CPU's bits."""
    here, there = devices
    home = reference_device(devices)
    local = make(name, home)
    split = make(name, there)
    for i in range(2):
        expected = step(name, local, recipe_of(recipe), device=home, number=i)
        with launches() as log:
            found = step(name, split, recipe_of(recipe), device=there, number=i)
        assert_same(found, expected)
        if recipe is not None:
            assert_guarded(log, [there])
    assert torch.accelerator.current_device_index() == here.index
    if scaling(local):
        assert_same(scaling(split), scaling(local))


class Move(nn.Module):
    def __init__(self, device: torch.device | str) -> None:
        super().__init__()
        self.device = device

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.to(self.device)


def _stack(first, second) -> ops.Sequential:
    torch.manual_seed(3)
    model = ops.Sequential(
        ops.Sequential(ops.LayerNorm(16), ops.Linear(16, 48), ops.SwiGLU()).to(first),
        Move(second),
        ops.Sequential(ops.BasicLinear(24, 32), ops.Bias(32), ops.GELU()).to(second),
        Move(first),
        ops.BasicLinear(32, 16).to(first),
        ops.ConstantScale(0.5),
        ops.Bias(16).to(first),
    )
    for key, module in model.named_modules():
        module.qualified_name = key
    return model


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_split_chain_trains_as_the_unsplit_bit_for_bit(devices, recipe: str) -> None:
    here, there = devices
    home = reference_device(devices)
    split, whole = _stack(here, there), _stack(home, home)
    if home.type == "cpu":
        whole = unfused(whole)
    optimizers = [torch.optim.AdamW(model.parameters(), lr=0.01) for model in (split, whole)]
    for i in range(4):
        x, grad = torch.randn(6, 16) * 2**i, torch.randn(6, 16)
        outputs = []
        for model, device in ((split, here), (whole, home)):
            with qv.autocast(recipe=RECIPES[recipe]), launches() as log:
                y = model(x.to(device))
                y.backward(grad.to(device))
            if model is split:
                assert_guarded(log, devices)
            outputs.append({"y": y.detach(), **{k: p.grad for k, p in model.named_parameters()}})
        assert_same(*outputs)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    if scaling(whole):
        assert_same(scaling(split), scaling(whole))


def test_the_activations_backward_casts_and_sums() -> None:
    with launches() as log:
        step("linear_bias_gelu", make("linear_bias_gelu"), RECIPES["delayed"])
    kernels = [entry.kernel for entry in log]
    assert kernels.count("activation_backward_cast") == 1
    assert "activation_backward" not in kernels
    assert "cast_grad" not in kernels


@pytest.mark.parametrize("name", ["output_linear_gelu", "output_rms"])
@pytest.mark.parametrize("which", [0, 1])
def test_only_one_output_is_used(name: str, which: int) -> None:
    model = make(name)
    twin = unfused(model)
    grads, states = [], []
    for each in (model, twin):
        x = normal(4, 4, IN).requires_grad_()
        with qv.autocast(recipe=RECIPES["delayed"]):
            y = each(x)[which]
        y.backward(normal(*y.shape, name="grad"))
        grads.append(
            {"x": x.grad} | {k: p.grad for k, p in each.named_parameters() if p.grad is not None}
        )
        states.append(scaling(each))
    assert_same(*grads)
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(states[0][key], states[1][key]) for key in states[0])


@pytest.mark.parametrize("recipe", ["delayed", "current"])
@pytest.mark.parametrize("name", ["output_linear_gelu", "linear_scale", "linear_bias_swiglu"])
def test_without_grad_and_with_frozen_parameters(name: str, recipe: str) -> None:
    model = make(name)
    step(name, model, RECIPES[recipe])
    twin = unfused(model)
    x = normal(4, 4, IN)
    with torch.no_grad(), qv.autocast(recipe=RECIPES[recipe]):
        ours, theirs = model(x), twin(x)
    pairs = zip(ours, theirs, strict=True) if isinstance(ours, tuple) else [(ours, theirs)]
    assert all(torch.equal(a, b) for a, b in pairs)
    gradients = []
    for each in (model, twin):
        each.requires_grad_(False)
        x = normal(4, 4, IN).requires_grad_()
        with qv.autocast(recipe=RECIPES[recipe]):
            y = each(x)
        y = y[0] if isinstance(y, tuple) else y
        y.square().sum().backward()
        gradients.append(x.grad)
    assert torch.equal(*gradients)


@pytest.mark.parametrize("name", ["output_linear_gelu", "linear_add", "linear_bias_gelu"])
def test_under_torch_autocast_no_dtype_changes(name: str) -> None:
    model = make(name)
    with torch.autocast("cpu", torch.bfloat16):
        found = step(name, model, RECIPES["current"])
        expected = step(name, unfused(model), RECIPES["current"])
    if name == "linear_bias_gelu":  # the bias is added before the one rounding to bfloat16
        assert found.keys() == expected.keys()
        assert {v.dtype for v in found.values()} == {torch.bfloat16, torch.float32}
        y, other = found["y0"].float(), expected["y0"].float()
        assert (y - other).abs().max() <= 2.0**-6 * other.abs().max()
    else:
        assert_same(found, expected)


@pytest.mark.parametrize("shape", [(16, IN), (4, 4, IN)], ids=str)
def test_an_extra_output_may_be_written_to(shape: tuple[int, ...]) -> None:
    found = []
    for model in (make("output_linear"), unfused(make("output_linear"))):
        x = normal(*shape).requires_grad_()
        with qv.autocast(recipe=RECIPES["current"]):
            y, extra = model(x * 1)
        joined = ops.AddExtraInput(in_place=True)(y.sum(-1, keepdim=True).expand(shape), extra)
        assert joined is extra
        joined.square().sum().backward()
        found.append({"x": x.grad, "y": joined, "w": model[1].weight.grad})
    assert_same(*found)


def test_what_was_saved_is_not_overwritten_in_silence() -> None:
    x = normal(4, IN).requires_grad_()
    y, extra = make("output_rms")(x * 1)
    joined = ops.AddExtraInput(in_place=True)(y, extra)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        joined.sum().backward()


@pytest.mark.parametrize("recipe", RECIPES)
def test_quantized_weights(devices, recipe: str) -> None:
    torch.manual_seed(0)
    with qv.quantized_model_init(recipe=RECIPES[recipe]):
        model = ops.Sequential(*CHAINS["output_linear_gelu"].make())
    home = reference_device(devices)
    twin, alike, moved = unfused(model), *(copy.deepcopy(model).to(d) for d in (home, devices[1]))
    results = []
    for each, device in ((model, "cpu"), (twin, "cpu"), (alike, home), (moved, devices[1])):
        results.append(step("output_linear_gelu", each, RECIPES[recipe], device=device))
    assert_same(results[0], results[1])
    assert_same(results[2], results[3])


@pytest.mark.parametrize("override", ["high_precision", "dequantized"])
@pytest.mark.parametrize("name", ["output_linear_gelu", "linear_bias_swiglu", "linear_scale_add"])
def test_with_another_backward(name: str, override: str) -> None:
    for recipe in (Float8CurrentScaling, Float8BlockScaling):
        model = make(name)
        chosen = recipe(backward_override=override)
        assert_same(step(name, model, chosen), step(name, unfused(model), chosen))


def test_the_weights_gradient_goes_where_it_is_told() -> None:
    found = []
    for fused in (True, False):
        linear = ops.Linear(IN, OUT, wgrad=WgradOptions(fuse_wgrad_accumulation=True))
        linear.load_state_dict(make("biased_linear_silu")[0].state_dict())
        linear.weight.main_grad = torch.ones(OUT, IN)
        model = ops.Sequential(linear, ops.SiLU())
        if not fused:
            model[1].register_forward_hook(lambda *args: None)
        with qv.autocast(recipe=RECIPES["current"]):
            model(normal(4, IN)).square().sum().backward()
        assert linear.weight.grad is None
        found.append({"main": linear.weight.main_grad, "bias": linear.bias.grad})
    assert_same(*found)


def test_the_norms_second_derivative_is_that_of_the_operations() -> None:
    found = []
    for model in (make("output_norm"), unfused(make("output_norm"))):
        x = normal(3, IN).requires_grad_()
        y, same = model(x)
        (dx,) = torch.autograd.grad((y.square() + same**3).sum(), x, create_graph=True)
        dx.square().sum().backward()
        found.append({"x": x.grad, **{k: p.grad for k, p in model.named_parameters()}})
    for key, value in found[1].items():
        torch.testing.assert_close(found[0][key], value)


def test_a_quantized_chain_has_no_second_derivative() -> None:
    model, x = make("linear_bias_gelu"), normal(3, IN).requires_grad_()
    with qv.autocast(recipe=RECIPES["current"]):
        y = model(x)
    (dx,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="no second derivative"):
        dx.sum().backward()


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("name", ["linear_bias_gelu", "output_linear_add"])
def test_recomputation_gives_the_same_bits(name: str, reentrant: bool) -> None:
    class Recomputed(nn.Module):
        def __init__(self, inner: ops.Sequential) -> None:
            super().__init__()
            self.inner = inner
            self.num_extra_inputs = inner.num_extra_inputs
            self.num_extra_outputs = inner.num_extra_outputs

        def forward(self, *inputs: torch.Tensor):
            return checkpoint(self.inner, *inputs, use_reentrant=reentrant)

    model = make(name)
    twin = copy.deepcopy(model)
    for i in range(3):
        found = step(name, Recomputed(model), RECIPES["delayed"], number=i)
        found = {key.removeprefix("inner."): value for key, value in found.items()}
        assert_same(found, step(name, twin, RECIPES["delayed"], number=i))
    assert_same(scaling(model), scaling(twin))


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize("recipe", ["delayed", pytest.param("mxfp8", marks=pytest.mark.slow)])
def test_it_traces(recipe: str) -> None:
    torch._dynamo.reset()
    model = make("block")
    step("block", model, RECIPES[recipe])
    twin = copy.deepcopy(model)
    x, extra = normal(5, IN), normal(5, IN, name="extra")

    def run(each: nn.Module) -> dict[str, torch.Tensor]:
        inputs = [t.clone().requires_grad_() for t in (x, extra)]
        with qv.autocast(recipe=RECIPES[recipe]):
            y, same = each(*inputs)
        (y.sum() + same.square().sum()).backward()
        found = {"y": y.detach(), "x": inputs[0].grad, "extra": inputs[1].grad}
        return found | {k: p.grad.clone() for k, p in model.named_parameters() if each is not twin}

    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    found = run(compiled)
    model.zero_grad()
    expected = run(twin)
    assert_same({key: found[key] for key in expected}, expected)
