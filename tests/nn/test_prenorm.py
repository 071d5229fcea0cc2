"""What LayerNormLinear and LayerNormMLP share: twins, FP8 bit for bit, and their options."""

import copy
import io

import pytest
import torch
from torch import nn

import quaver as qv
from quaver.nn.wgrad import WgradOptions
from quaver.recipe import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
)
from quaver.scaling import DelayedScalingState
from tests.integration.helpers import assert_same
from tests.integration.recipes import BOUNDS, RECIPES, TENSORS, error
from tests.nn.fused import IN, MODULES, ONE_OF_EACH, Emulation, make, step, twin
from tests.samples import DTYPES, normal

every_module = pytest.mark.parametrize("name", MODULES)
one_of_each = pytest.mark.parametrize("name", ONE_OF_EACH)
every_recipe = pytest.mark.parametrize("recipe", RECIPES)
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def rows(*shape: int, dtype=torch.float32, device="cpu") -> torch.Tensor:
    return normal(*(shape or (6, IN)), dtype=dtype, device=device, name="rows") * 2 + 0.3


def in_fp8(module, recipe):
    def run(x, **options):
        with qv.autocast(recipe=recipe):
            return module(x, **options)

    return run


# ---- in high precision


@every_module
@dtypes
@pytest.mark.parametrize("shape", [(6, IN), (2, 3, IN), (IN,), (0, IN)], ids=str)
def test_in_high_precision_it_equals_its_twin_within_rounding(name, dtype, shape) -> None:
    """A bfloat16 or float16 twin rounds as often: a few steps, of what is summed."""
    module, x = make(name, dtype=dtype), rows(*shape, dtype=dtype)
    got, expected = step(module, module, x), step(lambda x: twin(module, x), module, x)
    assert got.keys() == expected.keys()
    for key, value in expected.items():
        assert got[key].dtype == dtype
        assert got[key].shape == value.shape
        steps = {torch.float32: 1e-5}.get(dtype, 8 * torch.finfo(dtype).eps)
        largest = value.abs().max() if value.numel() else 0.0
        assert ((got[key] - value).abs() <= steps * largest).all(), key
    assert module.recipe_states == {}


@one_of_each
def test_it_draws_what_torch_draws(name) -> None:
    torch.manual_seed(5)
    module = MODULES[name]()
    torch.manual_seed(5)
    sizes = [(p.shape[1], p.shape[0]) for n, p in module.named_parameters() if p.dim() == 2]
    for (weight, bias), size in zip(module.linear_names, sizes, strict=True):
        plain = nn.Linear(*size)
        assert torch.equal(getattr(module, weight), plain.weight)
        assert torch.equal(getattr(module, bias), plain.bias)
    gain = 0.0 if module.zero_centered_gamma else 1.0
    assert (module.layer_norm_weight == gain).all()


@one_of_each
def test_a_plain_state_dict_loads_strictly_and_ours_goes_through_a_file(name) -> None:
    module = make(name)
    plain = {key: value.clone() for key, value in module.named_parameters()}
    assert list(module.state_dict()) == [*plain, "_extra_state"]
    assert MODULES[name]().load_state_dict(plain, strict=True).missing_keys == []
    x = rows()
    step(in_fp8(module, RECIPES["delayed"]), module, x)
    file = io.BytesIO()
    torch.save(module.state_dict(), file)
    file.seek(0)
    other = MODULES[name]()
    other.load_state_dict(torch.load(file, weights_only=True))
    for mode, state in module.recipe_states.items():
        assert torch.equal(other.recipe_states[mode].scale, state.scale)
    again = [step(in_fp8(m, RECIPES["delayed"]), m, x) for m in (module, other)]
    assert_same(*again)


# ---- in FP8


def recipes_to_emulate():
    yield from RECIPES.items()
    for kind in (Float8CurrentScaling, Float8BlockScaling, MXFP8BlockScaling, NVFP4BlockScaling):
        for override in ("dequantized", "high_precision"):
            yield f"{kind.__name__}_{override}", kind(backward_override=override)


@every_module
@pytest.mark.parametrize(
    "recipe", [pytest.param(recipe, id=name) for name, recipe in recipes_to_emulate()]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_in_fp8_it_equals_an_emulation_bit_for_bit(name, recipe, dtype) -> None:
    module, x = make(name, dtype=dtype, recipe=recipe), rows(dtype=dtype)
    width = module(x).shape[-1]
    module = make(name, dtype=dtype, recipe=recipe)  # whose states are new
    grad = normal(6, width, dtype=dtype, name="dy")
    expected = Emulation(module, recipe).step(x, grad)
    got = step(module, module, x, grad)
    assert_same(got, expected)
    exact = step(lambda x: twin(module, x), module, x, grad)
    assert not torch.equal(got["y"], exact["y"])


@one_of_each
@every_recipe
def test_parameters_of_another_dtype_and_torch_autocast(name, recipe) -> None:
    module, x = make(name), rows(dtype=torch.bfloat16)
    got = step(in_fp8(module, RECIPES[recipe]), module, x)
    assert got["y"].dtype == got["dx"].dtype == torch.bfloat16
    assert {value.dtype for key, value in got.items() if key not in ("y", "dx")} == {torch.float32}
    twice = make(name), rows()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        wide = step(in_fp8(twice[0], RECIPES[recipe]), *twice)
    assert wide["y"].dtype == torch.bfloat16
    assert wide["dx"].dtype == torch.float32
    assert error(wide["y"], twin(module, rows())) < 3 * BOUNDS[recipe]


@every_module
@every_recipe
def test_without_grad_the_output_is_the_same(name, recipe) -> None:
    module = make(name)
    step(in_fp8(module, RECIPES[recipe]), module, rows())
    with torch.no_grad():
        y = in_fp8(copy.deepcopy(module), RECIPES[recipe])(rows(2, 3, IN))
    assert y.shape[:2] == (2, 3)
    expected = step(in_fp8(module, RECIPES[recipe]), module, rows(2, 3, IN))
    assert torch.equal(y, expected["y"])


@one_of_each
@every_recipe
def test_any_shape(name, recipe) -> None:
    flat = make(name)
    expected = step(in_fp8(flat, RECIPES[recipe]), flat, rows(3, IN))
    module, grad = make(name), normal(*expected["y"].shape, name="grad")
    run, shape = in_fp8(module, RECIPES[recipe]), (1, 3, 1, -1)
    got = step(run, module, rows(3, IN).view(shape), grad.view(shape))
    assert_same({k: v.view(expected[k].shape) for k, v in got.items()}, expected)
    for shape in ((IN,), (0, IN), (2, 0, IN)):
        got = step(run, module, rows(*shape))
        assert got["y"].shape[:-1] == shape[:-1]
        assert got["dx"].shape == shape
        assert all(value.isfinite().all() for value in got.values())


@one_of_each
@every_recipe
def test_only_the_gradients_asked_for_are_made(name, recipe) -> None:
    everything = step(in_fp8(whole := make(name), RECIPES[recipe]), whole, rows())
    module = make(name)
    frozen = [key for key in dict(module.named_parameters()) if "weight" in key]
    for key in frozen:
        getattr(module, key).requires_grad_(False)
    y = in_fp8(module, RECIPES[recipe])(rows())
    y.backward(normal(*y.shape, name="grad"))
    for key, parameter in module.named_parameters():
        if key in frozen:
            assert parameter.grad is None
        elif recipe != "nvfp4":  # of which the random bits are others
            assert torch.equal(parameter.grad, everything[key]), key


# ---- options


@one_of_each
@every_recipe
def test_the_bias_is_returned_instead_of_added(name, recipe) -> None:
    module, x = make(name, return_bias=True, bias=False), rows()
    assert in_fp8(module, RECIPES[recipe])(x)[1] is None
    module, whole = make(name, return_bias=True), make(name)
    apart = step(lambda x: sum(in_fp8(module, RECIPES[recipe])(x)), module, x)
    together = step(in_fp8(whole, RECIPES[recipe]), whole, x)
    assert apart.keys() == together.keys()
    for key, value in together.items():
        torch.testing.assert_close(apart[key], value, rtol=1e-5, atol=1e-5)
    low, bias = in_fp8(module, RECIPES[recipe])(x.bfloat16())
    assert low.dtype == bias.dtype == torch.bfloat16


@every_module
@every_recipe
def test_the_norms_output_is_returned_and_carries_gradients(name, recipe) -> None:
    options = {"return_layernorm_output": True, "dtype": torch.bfloat16}
    module, x = make(name, **options), rows(2, 3, IN, dtype=torch.bfloat16)
    normed = module(x)[1]  # in high precision

    def gradients(share):
        def run(x):
            y, n = in_fp8(module, RECIPES[recipe])(x)
            assert n.dtype == torch.bfloat16
            assert torch.equal(n, normed)
            return y + share * n.sum()

        module = make(name, **options)
        return step(run, module, x)

    grads = {share: gradients(share) for share in (0.0, 1.0)}
    plain = make(name, dtype=torch.bfloat16)
    alone = step(in_fp8(plain, RECIPES[recipe]), plain, x)
    assert_same(grads[0.0], alone)
    total = normal(*alone["y"].shape, dtype=torch.bfloat16, name="grad").sum()
    x = x.detach().requires_grad_()
    wide = make(name, **options)
    wide(x)[1].sum().mul(total).backward()
    for key, extra in (("dx", x.grad), ("layer_norm_weight", wide.layer_norm_weight.grad)):
        moved = grads[1.0][key].float() - alone[key].float()
        scale = grads[1.0][key].abs().max() + extra.abs().max()
        assert (moved - extra.float()).abs().max() < 2**-6 * scale, key
    with torch.no_grad():
        assert torch.equal(in_fp8(module, RECIPES[recipe])(x)[1], normed)


@one_of_each
@every_recipe
def test_kept_weights_give_the_same_bits(name, recipe) -> None:
    module, fresh = make(name), make(name)
    for first in (True, False, False):
        x = rows() * (1 + first)
        kept = step(
            lambda x, f=first: in_fp8(module, RECIPES[recipe])(x, is_first_microbatch=f), module, x
        )
        assert_same(kept, step(in_fp8(fresh, RECIPES[recipe]), fresh, x))
    assert set(module._weight_cache) == set(range(module.num_gemms))
    with torch.no_grad():
        getattr(module, module.weight_names[-1]).zero_()
    y = in_fp8(module, RECIPES[recipe])(rows(), is_first_microbatch=False)
    assert y.std() > 0
    assert in_fp8(module, RECIPES[recipe])(rows(), is_first_microbatch=True).std(0).max() == 0


@one_of_each
@every_recipe
def test_quantized_weights_from_the_start(name, recipe) -> None:
    torch.manual_seed(3)
    plain = MODULES[name]()
    torch.manual_seed(3)
    with qv.quantized_model_init(recipe=RECIPES[recipe], preserve_high_precision_init_val=True):
        module = MODULES[name]()
    for key in module.weight_names:
        weight = getattr(module, key)
        if recipe != "custom":
            assert isinstance(weight, TENSORS[recipe])
            assert torch.equal(weight.get_high_precision_init_val(), getattr(plain, key))
    got = step(in_fp8(module, RECIPES[recipe]), module, rows())
    assert error(got["y"], plain(rows())) < 2 * BOUNDS[recipe]
    before = getattr(module, module.weight_names[0]).dequantize()
    module.reset_parameters()
    after = getattr(module, module.weight_names[0])
    assert type(after) is type(weight)
    assert not torch.equal(after.dequantize(), before)
    assert error(module(rows()), twin_of_quantized(module, rows())) < 1e-5


def twin_of_quantized(module, x):
    plain = copy.deepcopy(module)
    plain.dequantize_weight()
    assert all(type(p) is nn.Parameter for p in plain.parameters())
    return twin(plain, x)


@one_of_each
def test_from_the_meta_device(name) -> None:
    with torch.device("meta"):
        module = MODULES[name](recipe=RECIPES["delayed"])
    assert {p.device.type for p in module.parameters()} == {"meta"}
    module.to_empty(device="cpu")
    torch.manual_seed(7)
    module.reset_parameters()
    torch.manual_seed(7)
    assert_same(dict(module.named_parameters()), dict(MODULES[name]().named_parameters()))
    assert torch.isfinite(step(module, module, rows())["y"]).all()


@one_of_each
def test_init_methods_fill_the_weights(name) -> None:
    def fill(value):
        return lambda weight: nn.init.constant_(weight, value)

    options = {"init_method": fill(0.5)}
    if name.startswith("mlp"):
        options["output_layer_init_method"] = fill(0.25)
    module = MODULES[name](**options)
    for value, (weight, bias) in zip((0.5, 0.25), module.linear_names, strict=False):
        assert (getattr(module, weight) == value).all()
        assert (getattr(module, bias) == 0).all()
    with qv.quantized_model_init(recipe=RECIPES["mxfp8"]):
        quantized = MODULES[name](**options)
    assert (getattr(quantized, quantized.weight_names[0]).dequantize() == 0.5).all()


@one_of_each
def test_calibration_records_what_the_quantized_forward_would(name) -> None:
    recipe = RECIPES["delayed"]
    module, fp8 = make(name), make(name)
    with torch.no_grad(), qv.autocast(enabled=False, calibrating=True, recipe=recipe):
        y = module(rows())
    torch.testing.assert_close(y, twin(module, rows()), rtol=1e-5, atol=1e-5)
    step(in_fp8(fp8, recipe), fp8, rows())
    mine, theirs = (m.recipe_states["forward"].amax_history[-1] for m in (module, fp8))
    for gemm in range(module.num_gemms):
        for slot in (3 * gemm, 3 * gemm + 1):
            assert mine[slot] > 0
            torch.testing.assert_close(mine[slot], theirs[slot], rtol=0.05, atol=0)
        assert mine[3 * gemm + 2] == 0


@one_of_each
@every_recipe
@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputation_repeats_the_bits(name, recipe, reentrant) -> None:
    module, plain = make(name), make(name)

    def repeated(x):
        return qv.nn.checkpoint(module, x, use_reentrant=reentrant)

    for i in range(3):
        x = rows() * 2**i
        got = step(in_fp8(repeated, RECIPES[recipe]), module, x)
        expected = step(in_fp8(plain, RECIPES[recipe]), plain, x)
        if recipe == "nvfp4":  # the gradients' random bits are those of the second run
            assert torch.equal(got["y"], expected["y"])
        else:
            assert_same(got, expected)
    for mode, state in plain.recipe_states.items():
        if isinstance(state, DelayedScalingState):
            assert torch.equal(module.recipe_states[mode].amax_history, state.amax_history)


@one_of_each
def test_the_weights_gradients_go_to_main_grad_or_wait(name) -> None:
    recipe = RECIPES["current"]
    plain = make(name)
    expected = step(in_fp8(plain, recipe), plain, rows())
    options = WgradOptions(fuse_wgrad_accumulation=True, delay_wgrad_compute=True)
    for run in (recipe, None):
        module = make(name, wgrad=options)
        for key in module.weight_names:
            getattr(module, key).main_grad = torch.ones_like(getattr(module, key))
        with qv.autocast(enabled=run is not None, recipe=recipe):
            y = module(rows())
        y.backward(normal(*y.shape, name="grad"))
        for key in module.weight_names:
            assert (getattr(module, key).main_grad == 1).all()
        module.backward_dw()
        for key in module.weight_names:
            weight = getattr(module, key)
            assert weight.grad is None
            bound = 1e-6 if run else 0.1
            assert error(weight.main_grad - 1, expected[key]) < bound
    with pytest.raises(qv.RecipeError, match="save_original_input cannot be used by LayerNorm"):
        make(name, wgrad=WgradOptions(save_original_input=True))


@one_of_each
@every_recipe
def test_copies_are_independent(name, recipe) -> None:
    module = make(name)
    step(in_fp8(module, RECIPES[recipe]), module, rows())
    copied = copy.deepcopy(module)
    step(in_fp8(module, RECIPES[recipe]), module, rows() * 100)
    again = make(name)
    step(in_fp8(again, RECIPES[recipe]), again, rows())
    results = [step(in_fp8(m, RECIPES[recipe]), m, rows() * 3) for m in (copied, again)]
    assert_same(*results)


@one_of_each
@every_recipe
def test_a_second_derivative_is_refused(name, recipe) -> None:
    module, x = make(name), rows().requires_grad_()
    y = in_fp8(module, RECIPES[recipe])(x)
    (dx,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="no second derivative"):
        dx.sum().backward()


# ---- errors


@one_of_each
def test_errors_say_what_is_wrong(name, devices) -> None:
    module = make(name)
    with pytest.raises(qv.QuaverError, match="normalization must be one of LayerNorm, RMSNorm"):
        qv.LayerNormLinear(4, 4, normalization="layernorm")
    with pytest.raises(ValueError, match=r"x must have 30 features .* not shape \(2, 4\)"):
        module(torch.ones(2, 4))
    with pytest.raises(TypeError, match=r"high-precision .* dtype, not torch\.int64"):
        module(torch.ones(2, IN, dtype=torch.int64))
    with pytest.raises(qv.RecipeError, match="recipe must be a recipe"):
        MODULES[name](recipe="delayed")
    here = make(name, device=devices[0])
    with pytest.raises(qv.DeviceMismatchError, match="x and layer_norm_weight must be on one"):
        here(rows(device=devices[1]))
    here.layer_norm_bias = nn.Parameter(torch.zeros(IN, device=devices[1]))
    with pytest.raises(qv.DeviceMismatchError, match="layer_norm_bias must be on one device"):
        here(rows(device=devices[0]))


def test_delayed_scaling_of_the_norm_is_not_rounded_before() -> None:
    """The amax recorded of a bfloat16 layer's norm output is one of float32."""
    module = make("linear", dtype=torch.bfloat16)
    step(in_fp8(module, DelayedScaling()), module, rows(dtype=torch.bfloat16))
    amax = module.recipe_states["forward"].amax_history[-1, 0]
    assert amax != amax.bfloat16()
