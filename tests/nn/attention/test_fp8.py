"""fp8_dpa: against an emulation made of quantizers and plain products, and through its life."""

import copy
import io
import pickle

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import quaver as qv
from quaver.formats import E4M3, E5M2, MAX
from quaver.nn import DotProductAttention
from quaver.recipe import DelayedScaling, Float8CurrentScaling
from quaver.testing import launches
from tests.integration.helpers import assert_guarded, assert_same, equal, scaling
from tests.samples import normal

CURRENT = Float8CurrentScaling(fp8_dpa=True)
DELAYED = DelayedScaling(amax_history_len=3, fp8_dpa=True)
RECIPES = {"current": CURRENT, "delayed": DELAYED}
NAMES = ("query", "key", "value", "weight", "output", "grad_output", "grad_score")

every_recipe = pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
quiet = pytest.mark.filterwarnings("ignore:delayed scaling has no scales yet")


def sample(step: int = 0, device="cpu") -> tuple[torch.Tensor, ...]:
    """q, k, v requiring grad, and the output's gradient."""
    shapes = ((2, 5, 4, 8), (2, 6, 2, 8), (2, 6, 2, 6), (2, 5, 24))
    made = [normal(*s, name=f"{i} {step}") * 2.0**step for i, s in enumerate(shapes)]
    return tuple(x.to(device).requires_grad_(i < 3) for i, x in enumerate(made))


def module(**options) -> DotProductAttention:
    return DotProductAttention(4, (8, 6), num_gqa_groups=2, **options)


def step(attention, recipe, index: int = 0, device="cpu", run=None) -> dict[str, torch.Tensor]:
    *inputs, grad = sample(index, device)
    with qv.autocast(recipe=recipe):
        y = (attention if run is None else run)(*inputs)
    grads = torch.autograd.grad(y, inputs, grad)
    return {"y": y.detach()} | dict(zip(("dq", "dk", "dv"), grads, strict=True))


class Emulation:
    """Attention with each operand cast to FP8 and back, and its backward, written out."""

    def __init__(self, delayed: bool, gradients: bool = True) -> None:
        self.delayed = delayed
        self.gradients = gradients
        self.histories: dict[str, list[float]] = {name: [] for name in NAMES}

    def cast(self, name: str, x: torch.Tensor) -> torch.Tensor:
        dtype = E5M2 if name.startswith("grad") else E4M3
        if name.startswith("grad") and not self.gradients:
            return x
        if not self.delayed:
            return qv.Float8CurrentScalingQuantizer(dtype)(x).dequantize()
        history = self.histories[name]
        amax = torch.tensor(max(history[-3:])) if history else x.abs().max()
        history.append(x.abs().max().item())
        scale = torch.full_like(amax, MAX[dtype]) / amax
        return qv.Float8Quantizer(scale.view(1), torch.zeros(1), dtype)(x).dequantize()

    def __call__(self, q, k, v, grad) -> dict[str, torch.Tensor]:
        q, k, v = (x.detach().transpose(1, 2) for x in (q, k, v))
        q, k, v = self.cast("query", q), self.cast("key", k), self.cast("value", v)
        k, v = (x.repeat_interleave(2, 1) for x in (k, v))
        hidden = torch.ones(5, 6, dtype=torch.bool).triu(1)
        scores = (q @ k.mT) * 8**-0.5
        weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
        cast = self.cast("weight", weights)
        y = self.cast("output", cast @ v)
        g = self.cast("grad_output", grad.unflatten(-1, (4, 6)).transpose(1, 2))
        dv = cast.mT @ g
        inner = torch._softmax_backward_data(g @ v.mT, weights, -1, torch.float32)
        ds = self.cast("grad_score", inner * 8**-0.5)
        dq, dk = ds @ k, ds.mT @ q
        results = {"y": y.transpose(1, 2).flatten(2), "dq": dq.transpose(1, 2)}
        for name, x in (("dk", dk), ("dv", dv)):
            results[name] = x.unflatten(1, (2, 2)).sum(2).transpose(1, 2)
        return results


@every_recipe
def test_it_equals_an_emulation_made_of_quantizers(recipe) -> None:
    attention, emulation = module(), Emulation(recipe is DELAYED)
    for index in range(4):
        got, expected = step(attention, recipe, index % 3), emulation(*sample(index % 3))
        assert torch.equal(got["y"], expected["y"])
        for name, value in expected.items():
            torch.testing.assert_close(got[name], value, rtol=1e-6, atol=1e-6)
    plain = step(module(), None)
    assert not torch.equal(plain["y"], step(attention, recipe)["y"])


def test_gradients_stay_as_they_are_where_the_recipe_says_so() -> None:
    recipe = Float8CurrentScaling(fp8_dpa=True, backward_override="dequantized")
    got, expected = step(module(), recipe), Emulation(False, gradients=False)(*sample())
    for name, value in expected.items():
        torch.testing.assert_close(got[name], value, rtol=1e-6, atol=1e-6)


def test_its_state_has_a_slot_for_each_operand() -> None:
    attention = module()
    step(attention, DELAYED)
    forward, backward = attention.recipe_states["forward"], attention.recipe_states["backward"]
    assert (forward.num_quantizers, backward.num_quantizers) == (5, 2)
    assert [forward.role(i).tensor for i in range(5)][:3] == ["query", "key", "value"]
    assert backward.role(1).tensor == "grad_score"
    q, k, v, grad = sample()
    assert forward.amax_history[-1, :3].tolist() == [x.abs().max().item() for x in (q, k, v)]
    assert backward.amax_history[-1, 0] == grad.abs().max()
    assert (forward.amax_history[-1, 3:] > 0).all()
    assert (backward.amax_history[-1] > 0).all()
    assert (forward.updates, backward.updates) == (1, 1)


def test_without_fp8_dpa_no_recipe_touches_it() -> None:
    attention, exact = module(), step(module(), None)
    with launches() as log:
        for recipe in (DelayedScaling(), Float8CurrentScaling(), qv.recipe.MXFP8BlockScaling()):
            assert_same(step(attention, recipe), exact)
    assert log == []
    assert attention.recipe_states == {}


def test_an_attached_recipe_needs_no_region() -> None:
    attention, twin = module(recipe=DELAYED), module()
    for index in range(3):
        *inputs, grad = sample(index)
        y = attention(*inputs)
        y.backward(grad)
        assert torch.equal(y, step(twin, DELAYED, index)["y"])
    assert_same(scaling(attention), scaling(twin))
    with qv.autocast(enabled=False):
        assert torch.equal(attention(*sample()[:3]), module()(*sample()[:3]))


def test_calibration_learns_scales_without_a_cast() -> None:
    attention = module(backend="reference")
    q, k, v, _ = sample()
    exact = attention(q, k, v)
    with (
        torch.no_grad(),
        launches() as log,
        qv.autocast(enabled=False, calibrating=True, recipe=DELAYED),
    ):
        assert torch.equal(attention(q, k, v), exact)
    assert {entry.kernel for entry in log} == {"amax", "scale_update"}
    state = attention.recipe_states["forward"]
    assert state.scale[1] == MAX[E4M3] / k.abs().max()
    assert (state.ready == 1).all()


@every_recipe
@pytest.mark.parametrize("form", ["sbhd", "thd"])
def test_formats_agree(recipe, form: str) -> None:
    q, k, v, _ = sample()
    with qv.autocast(recipe=recipe):
        expected = module()(q, k, v)
        other = module(qkv_format=form)
        if form == "sbhd":
            got = other(*(x.transpose(0, 1) for x in (q, k, v))).transpose(0, 1)
        else:
            lengths = {"cu_seqlens_q": torch.tensor([0, 5, 10])}
            lengths["cu_seqlens_kv"] = torch.tensor([0, 6, 12])
            got = other(*(x.flatten(0, 1) for x in (q, k, v)), **lengths).view(2, 5, 24)
    assert torch.equal(got, expected)


# ---- devices, checkpoints, recomputation, copies


@every_recipe
def test_on_any_device_it_is_the_same_and_every_launch_is_guarded(devices, recipe) -> None:
    here, there = module(), module()
    for index in range(3):
        with launches() as log:
            got = step(there, recipe, index, devices[1])
        assert_guarded(log, [devices[1]])
        assert {value.device for value in got.values()} == {devices[1]}
        got = {name: value.cpu() for name, value in got.items()}
        assert_same(got, {k: v.cpu() for k, v in step(here, recipe, index, devices[0]).items()})
    for state in there.recipe_states.values():
        assert state.device == devices[1]
    assert scaling(here).keys() == scaling(there).keys()


def test_a_checkpoint_is_restored_onto_whichever_device_it_runs_on(devices) -> None:
    trained = module()
    for index in range(2):
        step(trained, DELAYED, index, devices[0])
    file = io.BytesIO()
    torch.save(trained.state_dict(), file)
    file.seek(0)
    restored = module()
    state = torch.load(file, weights_only=True)
    assert list(state) == ["_extra_state"]
    restored.load_state_dict(state)
    got = step(restored, DELAYED, 2, devices[1])
    assert {s.device for s in restored.recipe_states.values()} == {devices[1]}
    expected = step(trained, DELAYED, 2, devices[0])
    assert all(equal(got[name], value) for name, value in expected.items())
    assert_same(scaling(restored), scaling(trained))
    assert restored.get_extra_state().equal(trained.get_extra_state())


def test_a_state_of_other_slots_is_passed_over_aloud() -> None:
    foreign = pickle.dumps({"scale_fwd": 1, "amax_history_fwd": 2}, protocol=2)
    state = {"_extra_state": torch.frombuffer(bytearray(foreign), dtype=torch.uint8)}
    attention = module()
    with pytest.warns(UserWarning, match="TransformerEngine checkpoint is passed over"):
        attention.load_state_dict(state)
    assert attention.recipe_states == {}
    attention.load_state_dict({"_extra_state": torch.empty(0, dtype=torch.uint8)})


@pytest.mark.parametrize("reentrant", [False, True])
@every_recipe
def test_recomputation_repeats_its_scales_and_records_once(recipe, reentrant: bool) -> None:
    plain, again = module(), module()

    def run(*inputs):
        return checkpoint(again, *inputs, use_reentrant=reentrant)

    for index in range(3):
        *inputs, grad = sample(index)
        with qv.autocast(recipe=recipe):
            y = run(*inputs)
        y.backward(grad)
        expected = step(plain, recipe, index)
        assert torch.equal(y, expected["y"])
        for x, name in zip(inputs, ("dq", "dk", "dv"), strict=True):
            assert torch.equal(x.grad, expected[name])
    if recipe is DELAYED:
        assert_same(scaling(again), scaling(plain))


def test_a_deep_copy_goes_on_alone() -> None:
    attention = module()
    step(attention, DELAYED)
    twin = copy.deepcopy(attention)
    assert_same(step(twin, DELAYED, 1), step(attention, DELAYED, 1))
    assert_same(scaling(twin), scaling(attention))
    step(twin, DELAYED, 2)
    assert not equal(twin.recipe_states["forward"].scale, attention.recipe_states["forward"].scale)


@quiet
@every_recipe
def test_inference_equals_the_forward_of_training(recipe) -> None:
    attention = module()
    step(attention, recipe)
    inputs = sample(1)[:3]
    with qv.autocast(recipe=recipe):
        trained = attention(*inputs)
        with torch.no_grad():
            assert torch.equal(attention(*inputs), trained)


@pytest.mark.parametrize("recipe", [None, *RECIPES.values()], ids=["plain", *RECIPES])
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_it_is_traced_whole_and_equal_to_eager(recipe) -> None:
    torch._dynamo.reset()
    eager, traced = module(), module()
    compiled = torch.compile(traced, fullgraph=True, backend="aot_eager")
    for index in range(4):
        with torch._dynamo.config.patch(error_on_recompile=index >= 2):
            got = step(traced, recipe, index % 3, run=compiled)
        assert_same(got, step(eager, recipe, index % 3))
    with qv.autocast(recipe=recipe):  # what backward recorded is finalized here at the latest
        pass
    if recipe is DELAYED:
        assert_same(scaling(traced), scaling(eager))
    torch._dynamo.reset()
