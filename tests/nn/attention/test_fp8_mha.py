"""fp8_mha: attention's output goes on as it was quantized, and is cast no second time."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import quaver as qv
from quaver.recipe import DelayedScaling, Float8CurrentScaling, MXFP8BlockScaling
from quaver.testing import launches
from tests.integration.helpers import assert_guarded, assert_same, gradients, scaling

RECIPES = {
    "current": Float8CurrentScaling(fp8_dpa=True, fp8_mha=True),
    "delayed": DelayedScaling(amax_history_len=3, fp8_dpa=True, fp8_mha=True),
}
DPA = {
    "current": Float8CurrentScaling(fp8_dpa=True),
    "delayed": DelayedScaling(amax_history_len=3, fp8_dpa=True),
}
every_recipe = pytest.mark.parametrize("name", RECIPES)


def multihead(**options) -> qv.MultiheadAttention:
    return qv.MultiheadAttention(32, 4, num_gqa_groups=2, **options)


def step(module, recipe, x: torch.Tensor, run=None, **options) -> dict[str, torch.Tensor]:
    module.zero_grad()
    x = x.detach().requires_grad_()
    with qv.autocast(recipe=recipe):
        y = (module if run is None else run)(x, **options)
    y.square().sum().backward()
    return {"y": y.detach().cpu(), "dx": x.grad.cpu(), **gradients(module)}


@every_recipe
@pytest.mark.parametrize("form", ["bshd", "sbhd", "thd"])
def test_the_attention_gives_what_it_computed_as_a_quantized_tensor(name: str, form: str) -> None:
    q, k, v = (torch.randn(2, 5, 4, 8) for _ in range(3))
    cu = torch.tensor([0, 4, 9])
    options = {"cu_seqlens_q": cu, "cu_seqlens_kv": cu} if form == "thd" else {}
    if form == "thd":
        q, k, v = (x.flatten(0, 1) for x in (q, k, v))
    handing, plain = (qv.DotProductAttention(4, 8, qkv_format=form) for _ in range(2))
    for _ in range(2):
        with qv.autocast(recipe=RECIPES[name]):
            y = handing(q, k, v, **options)
        with qv.autocast(recipe=DPA[name]):
            expected = plain(q, k, v, **options)
        assert isinstance(y, qv.Float8Tensor)
        assert (y.shape, y.dtype, y.fp8_dtype) == (expected.shape, q.dtype, torch.float8_e4m3fn)
        assert torch.equal(y.dequantize(), expected)
    if form == "thd":
        assert y.dequantize()[9:].eq(0).all()


@every_recipe
def test_the_projection_casts_it_no_second_time(name: str) -> None:
    module, recipe, x = multihead(), RECIPES[name], torch.randn(2, 5, 32)
    twin = multihead()
    twin.load_state_dict(module.state_dict())
    step(module, recipe, x)
    step(twin, DPA[name], x)
    counts = []
    for each, given in ((module, recipe), (twin, DPA[name])):
        with torch.no_grad(), qv.autocast(recipe=given), launches() as log:
            each(x)
        counts.append(sum("cast" in launch.kernel for launch in log))
    assert counts[0] == counts[1] - 1


def test_outputs_and_gradients_are_those_of_the_handed_values() -> None:
    """An emulation: the output's FP8 values through the projection as a quantized tensor."""
    module, recipe, x = multihead(), RECIPES["current"], torch.randn(2, 5, 32)
    twin = multihead()
    twin.load_state_dict(module.state_dict())
    got = step(module, recipe, x)
    seen = []
    twin.proj.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    expected = step(twin, DPA["current"], x)
    values = seen[0].detach()  # what stands in FP8 already; its own cast finds the same bytes
    again = qv.Float8CurrentScalingQuantizer(torch.float8_e4m3fn)(values).dequantize()
    torch.testing.assert_close(again, values, rtol=1e-6, atol=0)
    for key, value in expected.items():
        torch.testing.assert_close(got[key], value, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("reentrant", [False, True])
@every_recipe
def test_a_checkpoint_repeats_it(name: str, reentrant: bool) -> None:
    module, plain = multihead(), multihead()
    plain.load_state_dict(module.state_dict())
    for _ in range(3):
        x = torch.randn(2, 5, 32)
        got = step(
            module, RECIPES[name], x, lambda x: checkpoint(module, x, use_reentrant=reentrant)
        )
        assert_same(got, step(plain, RECIPES[name], x))
        if name == "delayed":
            assert_same(scaling(module), scaling(plain))


@every_recipe
def test_on_a_device_it_is_the_same_and_guarded(devices, name: str) -> None:
    here, there = multihead(device=devices[0]), multihead(device=devices[1])
    there.load_state_dict(here.state_dict())
    for _ in range(3):
        x = torch.randn(2, 5, 32)
        with launches() as log:
            got = step(there, RECIPES[name], x.to(devices[1]))
        assert_guarded(log, [devices[1]])
        assert_same(got, step(here, RECIPES[name], x.to(devices[0])))


def test_a_projection_in_high_precision_takes_its_values() -> None:
    module, recipe, x = multihead(), RECIPES["current"], torch.randn(2, 5, 32)
    twin = multihead()
    twin.load_state_dict(module.state_dict())
    module.core_attention.recipe, twin.core_attention.recipe = recipe, DPA["current"]
    y = module(x.requires_grad_())
    assert torch.equal(y, twin(x))
    y.sum().backward()
    assert all(p.grad is not None for p in module.parameters())


def test_calibration_hands_on_high_precision() -> None:
    module, x = multihead(), torch.randn(2, 5, 32)
    exact = module(x)
    recipe = RECIPES["delayed"]
    with torch.no_grad(), qv.autocast(enabled=False, calibrating=True, recipe=recipe):
        torch.testing.assert_close(module(x), exact)


def test_torch_autocast_names_its_dtype() -> None:
    attention = qv.DotProductAttention(4, 8)
    q, k, v = (torch.randn(2, 5, 4, 8) for _ in range(3))
    with torch.autocast("cpu", dtype=torch.bfloat16), qv.autocast(recipe=RECIPES["current"]):
        assert attention(q, k, v).dtype == torch.bfloat16


def test_it_needs_fp8_dpa_and_one_scale() -> None:
    with pytest.raises(qv.RecipeError, match="True only with fp8_dpa=True"):
        Float8CurrentScaling(fp8_mha=True)
    with pytest.raises(qv.RecipeError, match="fp8_"):
        MXFP8BlockScaling(fp8_dpa=True, fp8_mha=True)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_torch_compile_says_that_it_cannot() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(multihead(), fullgraph=True, backend="aot_eager")
    with (
        qv.autocast(recipe=RECIPES["current"]),
        pytest.raises(Exception, match=r"torch\.compile cannot trace fp8_mha=True"),
    ):
        compiled(torch.randn(2, 5, 32))
    torch._dynamo.reset()
