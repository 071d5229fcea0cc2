"""RecipeState: making, following a recipe, moving, copying, casting."""

import copy
import pickle

import numpy as np
import pytest
import torch

import quaver as qv
from quaver.recipe import DelayedScaling, Format
from quaver.scaling.finalize import finalize
from quaver.scaling.state import RecipeState, Scales
from quaver.scaling.uses import KEPT, Use
from quaver.testing import launches
from tests.kernels import numerics
from tests.samples import normal

TENSORS = ("scale", "ready", "amax_history")


RECIPE = DelayedScaling(amax_history_len=4)


def state(recipe=RECIPE, mode="forward", n=3, device="cpu"):
    return RecipeState.create(recipe, mode=mode, num_quantizers=n, device=device)


def filled(**options) -> RecipeState:
    """A state with a value of its own in every cell."""
    mine = state(**options)
    for i, name in enumerate(TENSORS):
        tensor = getattr(mine, name)
        values = torch.arange(tensor.numel(), dtype=torch.float32).reshape(tensor.shape)
        tensor.copy_(values + 100 * (i + 1))
    return mine


def assert_equal(left: RecipeState, right: RecipeState) -> None:
    for name in TENSORS:
        assert torch.equal(getattr(left, name).cpu(), getattr(right, name).cpu()), name


@pytest.mark.parametrize("first_scale", ["amax", "one"])
def test_a_new_state(devices, first_scale: str) -> None:
    recipe = DelayedScaling(amax_history_len=5, first_scale=first_scale, margin=1)
    mine = state(recipe, "backward", n=2, device=devices[1])
    assert (mine.num_quantizers, mine.device, mine.mode) == (2, devices[1], "backward")
    assert mine.dtype == torch.float8_e5m2
    assert mine.limit == 57344.0 / 2
    assert mine.scale.tolist() == [1.0, 1.0]
    assert mine.amax_history.shape == (5, 2)
    assert mine.amax_history.count_nonzero().item() == 0
    for name in TENSORS:
        assert getattr(mine, name).dtype == torch.float32
        assert getattr(mine, name).device == devices[1]
    known = first_scale == "one"
    assert mine.unset == [not known] * 2
    assert mine.ready.tolist() == [float(known)] * 2


def test_the_format_gives_dtype_and_limit() -> None:
    both = [
        state(DelayedScaling(fp8_format=Format.E4M3, margin=-1), m) for m in ("forward", "backward")
    ]
    assert {s.dtype for s in both} == {torch.float8_e4m3fn}
    assert {s.limit for s in both} == {896.0}


@pytest.mark.parametrize("device", ["name", "index"])
def test_a_device_can_be_given_by_name_or_index(devices, device: str) -> None:
    mine = state(device=str(devices[1]) if device == "name" else 1)
    assert mine.device == devices[1]


def test_a_device_without_an_index_is_refused(devices) -> None:
    """It would be the current device."""
    with pytest.raises((qv.QuaverError, ValueError), match="index"):
        state(device=devices[0].type)


def test_an_unknown_mode_is_an_error() -> None:
    with pytest.raises(qv.RecipeError, match=r'"forward" or "backward", not .fprop.'):
        state(mode="fprop")


# ---- following a recipe


@pytest.mark.parametrize("length", [1, 2, 3, 4, 6])
def test_another_length_keeps_row_0_and_the_newest(length: int) -> None:
    mine = filled()
    before = mine.amax_history.clone()
    assert mine.follow(DelayedScaling(amax_history_len=length))
    history = mine.amax_history
    assert history.shape == (length, 3)
    assert torch.equal(history[0], before[0])
    kept = min(length, 4) - 1
    assert torch.equal(history[length - kept :], before[4 - kept :])
    assert history[1 : length - kept].count_nonzero().item() == 0


def test_another_algorithm_keeps_all_values() -> None:
    mine, before = filled(), filled()
    recipe = DelayedScaling(amax_history_len=4, amax_compute_algo="most_recent")
    pointer = mine.amax_history.data_ptr()
    assert mine.follow(recipe)
    assert mine.recipe is recipe
    assert_equal(mine, before)
    assert mine.amax_history.data_ptr() == pointer


@pytest.mark.parametrize(
    ("mode", "fields", "ratio"),
    [
        ("forward", {"margin": 2}, 1 / 4),
        ("backward", {"margin": -1}, 2.0),
        ("forward", {"fp8_format": Format.E4M3}, 1.0),
        ("backward", {"fp8_format": Format.E4M3}, 448 / 57344),
        ("backward", {"fp8_format": Format.E4M3, "margin": 1}, 224 / 57344),
    ],
    ids=str,
)
def test_another_margin_or_format_rescales_what_was_set(mode: str, fields, ratio: float) -> None:
    """The amaxes stay what they were, and so does what they are scaled to: the limit."""
    mine, before = filled(mode=mode), filled(mode=mode)
    for each in (mine, before):
        each.scale[1] = 1.0  # as in a new state
    mine.past.append(Scales(before.scale * 3, before.ready.clone()))
    assert mine.follow(DelayedScaling(amax_history_len=4, **fields))
    expected = before.scale * torch.tensor([ratio, 1.0, ratio])
    assert torch.equal(mine.scale, expected)
    assert torch.equal(mine.past[0].scale, before.scale * 3 * ratio)
    assert torch.equal(mine.past[0].ready, before.ready)
    assert torch.equal(mine.ready, before.ready)
    assert torch.equal(mine.amax_history, before.amax_history)
    assert mine.follow(RECIPE)
    assert torch.equal(mine.scale, before.scale), "and back again"


def test_a_first_scale_of_one_holds_for_a_state_that_knows_none() -> None:
    mine = state()
    mine.follow(DelayedScaling(amax_history_len=4, first_scale="one"))
    x = normal(4, 8)
    assert mine.quantize(x, 0, record=False).scale_inv.item() == 1.0


def test_a_recomputation_repeats_a_first_scale_of_one() -> None:
    """The first run cast with 1, so the second must, after the update in between."""
    mine, x = state(), normal(4, 8)
    mine.follow(DelayedScaling(amax_history_len=4, first_scale="one"))
    mine.keep_scales()
    first = mine.quantize(x, 0, record=True)
    finalize([mine], one_device=True)
    again = mine.quantize(x, 0, record=False, again=mine.scales_at(0))
    assert again.scale_inv.item() == first.scale_inv.item() == 1.0


def test_another_class_of_recipe_needs_another_state() -> None:
    class Other(qv.recipe.Recipe):
        pass

    mine = filled()
    assert not mine.follow(Other())
    assert mine.recipe == DelayedScaling(amax_history_len=4)


@pytest.mark.parametrize("what", ["create", "follow", "move"])
def test_a_state_from_inference_mode_can_be_updated_outside(devices, what: str) -> None:
    mine = state()
    with torch.inference_mode():
        if what == "create":
            mine = state()
        elif what == "follow":
            mine.follow(DelayedScaling(amax_history_len=7))
        else:
            mine.move(devices[1])
    for name in TENSORS:
        tensor = getattr(mine, name)
        assert not tensor.is_inference(), name
        tensor.add_(1)


# ---- moving and copying


def test_moving_keeps_every_value(devices) -> None:
    mine, before = filled(device=devices[0]), filled()
    for device in (devices[1], torch.device("cpu"), devices[0]):
        mine.move(device)
        assert {getattr(mine, name).device for name in TENSORS} == {device}
        assert_equal(mine, before)
    assert torch.accelerator.current_device_index() == 0


def test_off_the_meta_device_it_begins_anew(devices) -> None:
    mine = state(device="meta")
    mine.name = "block.linear"
    mine.move(devices[1])
    assert mine.device == devices[1]
    assert_equal(mine, state())
    assert mine.unset == [True] * 3
    assert mine.name == "block.linear"


@pytest.mark.parametrize(
    "twin_of",
    [lambda s: s.copy(), copy.deepcopy, copy.copy, lambda s: pickle.loads(pickle.dumps(s))],
    ids=["copy", "deepcopy", "shallow", "pickle"],
)
def test_a_twin_has_the_values_and_nothing_else(devices, twin_of) -> None:
    mine = filled(device=devices[1])
    mine.group, mine.updates, mine.name = "group", 7, "layer"
    mine.registered.add("key")
    mine.past.append(Scales(mine.scale, mine.ready))
    mine.uses.note(Use(mine.recipe, None, 0, True, True))
    twin = twin_of(mine)
    assert twin.device == devices[1]
    assert_equal(twin, mine)
    assert (twin.recipe, twin.mode, twin.name) == (mine.recipe, mine.mode, "layer")
    assert twin.registered == set()
    assert twin.group is None
    assert len(twin.past) == 0
    assert twin.uses is not mine.uses
    assert not twin.uses._threads
    twin.unset[0] = twin.cast_unset[0] = "changed"
    assert "changed" not in (mine.unset[0], mine.cast_unset[0])


@pytest.mark.parametrize("twin_of", [lambda s: s.copy(), copy.deepcopy], ids=["copy", "deepcopy"])
def test_a_twin_shares_no_memory(twin_of) -> None:
    mine, before = filled(), filled()
    twin = twin_of(mine)
    for name in TENSORS:
        getattr(twin, name).zero_()
    assert_equal(mine, before)


# ---- casting


def test_quantize_uses_and_records_in_its_slot(devices) -> None:
    mine = state(DelayedScaling(amax_history_len=2, first_scale="one"), device=devices[1])
    mine.scale.copy_(torch.tensor([1.0, 3.7, 1.0]))
    x = normal(5, 30)
    with launches() as log:
        payload = mine.quantize(x.to(devices[1]), 1, record=True)
    assert [entry.kernel for entry in log] == ["cast"]
    assert payload.data.device == devices[1]
    expected = numerics.cast_bits(x, 3.7, torch.float8_e4m3fn)
    np.testing.assert_array_equal(numerics.payload_bits(payload.data), expected)
    assert mine.amax_history[0].tolist() == [0.0, x.abs().max().item(), 0.0]
    mine.quantize(x.to(devices[1]) * 2, 1, record=False)
    assert mine.amax_history[0, 1].item() == x.abs().max().item()


def test_scales_of_the_last_updates_are_kept_for_recomputations() -> None:
    mine, x, scales = state(DelayedScaling(first_scale="one")), normal(2, 4), []
    for step in range(1, KEPT + 4):
        mine.keep_scales()
        scales.append(mine.quantize(x * step, 0, record=True).scale_inv.item())
        finalize([mine], one_device=True)
    assert mine.updates == KEPT + 3
    assert mine.scales_at(mine.updates) is None
    for updates in range(3, mine.updates):
        again = mine.scales_at(updates)
        assert mine.quantize(x, 0, record=False, again=again).scale_inv.item() == scales[updates]
    with pytest.raises(qv.QuaverError, match=f"{KEPT + 1} updates ago"):
        mine.scales_at(2)


def test_scales_that_no_forward_may_repeat_are_not_kept() -> None:
    mine, x = state(), normal(2, 4)
    for _ in range(2):
        mine.quantize(x, 0, record=True)
        finalize([mine], one_device=True)
    assert not mine.past
    mine.keep_scales()
    for _ in range(KEPT):
        mine.quantize(x, 0, record=True)
        finalize([mine], one_device=True)
        assert mine.scales_at(2) is not None
    mine.quantize(x, 0, record=True)
    finalize([mine], one_device=True)
    assert not mine.past


def test_a_recomputation_that_knew_no_scale_takes_the_own_amax_again() -> None:
    mine, x = state(), normal(2, 4)
    mine.expect(0)
    mine.keep_scales()
    first = mine.quantize(x, 0, record=True)
    finalize([mine], one_device=True)
    mine.scale.fill_(1.0)
    again = mine.quantize(x, 0, record=False, again=mine.scales_at(0))
    assert again.scale_inv.item() == first.scale_inv.item() != 1.0


def test_observe_records_without_a_cast() -> None:
    mine, x = state(), normal(5, 6)
    with launches() as log:
        mine.observe(x, 2)
    assert [entry.kernel for entry in log] == ["amax"]
    assert mine.amax_history[0].tolist() == [0.0, 0.0, x.abs().max().item()]


@pytest.mark.parametrize("margin", [0, 1])
def test_set_scale_takes_the_tensors_amax_and_the_margin(margin: int) -> None:
    mine, x = state(DelayedScaling(margin=margin)), normal(5, 6)
    mine.set_scale(1, x)
    expected = np.float32(448.0 / 2**margin) / np.float32(x.abs().max().item())
    assert mine.scale.tolist() == [1.0, expected.item(), 1.0]
    mine.set_scale(0, torch.zeros(3, 3))
    assert mine.scale[0].item() == 1.0


def test_a_scale_that_was_set_holds_only_for_what_it_was_set_from() -> None:
    """Until the first update: a weight may be loaded after its scale was set."""
    mine, x = state(), normal(5, 6)
    mine.set_scale(1, x)
    assert mine.ready.tolist() == [0.0, 0.0, 0.0]
    assert mine.unset == [True, True, True]
    for factor in (1.0, 30.0):
        mine.expect(1)
        got = mine.quantize(x * factor, 1, record=factor > 1)
        assert got.scale_inv.item() == pytest.approx(x.abs().max().item() * factor / 448, rel=1e-6)
    finalize([mine], one_device=True)
    assert mine.ready.tolist() == [0.0, 1.0, 0.0]
    assert mine.unset == [True, False, True]
    scale_inv = mine.quantize(x, 1, record=False).scale_inv.item()
    assert scale_inv == pytest.approx(x.abs().max().item() * 30 / 448, rel=1e-6)


def test_a_slot_that_is_forgotten_takes_the_own_amax_again() -> None:
    mine, x = state(), normal(5, 6)
    for slot in (0, 1):
        mine.expect(slot)
        mine.quantize(x * 100, slot, record=True)
    finalize([mine], one_device=True)
    mine.forget(1)
    assert (mine.ready.tolist(), mine.unset) == ([1.0, 0.0, 0.0], [False, True, True])
    got = [mine.quantize(x, slot, record=False).scale_inv.item() for slot in (0, 1)]
    assert got[0] == pytest.approx(got[1] * 100, rel=1e-6)
    ones = state(DelayedScaling(amax_history_len=4, first_scale="one"))
    ones.forget(1)
    assert ones.quantize(x, 1, record=False).scale_inv.item() == 1.0


@pytest.mark.parametrize("margin", [0, 1])
def test_the_first_cast_leaves_the_margin_too(margin: int) -> None:
    """As the scale that the update after it sets from the same amax."""
    mine, x = state(DelayedScaling(margin=margin)), normal(5, 6)
    mine.expect(0)
    first = mine.quantize(x, 0, record=True)
    finalize([mine], one_device=True)
    second = mine.quantize(x, 0, record=True)
    assert first.scale_inv.item() == second.scale_inv.item()
