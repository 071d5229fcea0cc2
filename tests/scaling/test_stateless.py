"""The state of the recipes without scales: quantizers by role, and the forwards' numbers."""

import copy
import pickle

import pytest
import torch

import quaver as qv
from quaver.recipe import (
    CustomRecipe,
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    Recipe,
    Role,
)
from quaver.scaling import RecipeState, StatelessState
from quaver.scaling.state import Request
from quaver.testing import launches
from tests.samples import normal

NVFP4 = NVFP4BlockScaling()
RECIPES = [Float8CurrentScaling(), Float8BlockScaling(), MXFP8BlockScaling(), NVFP4]
SLOTS = {"forward": 3, "backward": 2}


def state(recipe: Recipe, mode: str = "forward", device="cpu", name: str = "a") -> StatelessState:
    made = RecipeState.create(recipe, mode=mode, num_quantizers=SLOTS[mode], device=device)
    assert isinstance(made, StatelessState)
    made.belong(name, "Linear")
    return made


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: type(recipe).__name__)
def test_a_state_quantizes_where_its_module_is(devices, recipe: Recipe) -> None:
    mine = state(recipe, device=devices[1])
    assert (mine.device, mine.mode, mine.num_quantizers) == (devices[1], "forward", 3)
    x = normal(32, 64, device=devices[1])
    with launches() as log:
        made = mine.operands(x, 1, Request(True, True))
    assert {(launch.device, launch.current) for launch in log} == {(devices[1], devices[1])}
    for operand in (made.rowwise, made.columnwise):
        assert operand.data.device == operand.scale_inv.device == devices[1]
    rows, columns = (mine.operands(x, 1, Request(*each)) for each in ((True, False), (False, True)))
    assert (rows.columnwise, columns.rowwise) == (None, None)


def test_roles_go_to_the_factory_and_none_means_high_precision() -> None:
    seen: list[Role] = []

    def factory(role: Role) -> None:
        seen.append(role)

    recipe = CustomRecipe(factory)
    forward, backward = state(recipe, name="block.up"), state(recipe, "backward", name="block.up")
    assert seen == [
        Role(tensor, "block.up", "Linear") for tensor in ("input", "weight", "grad_output")
    ]
    x = normal(4, 8)
    made = forward.operands(x, 0, Request(True, True))
    assert torch.equal(made.rowwise.data, x)
    assert torch.equal(made.columnwise.data, x.t())
    assert made.rowwise.scale_inv is None
    assert torch.equal(backward.operands(x, 0, Request()).rowwise.data, x)


def test_it_follows_its_class_and_no_other() -> None:
    mine, x = state(Float8CurrentScaling()), normal(4, 8)
    before = mine.operands(x, 0, Request()).rowwise.scale_inv.item()
    assert mine.follow(Float8CurrentScaling(use_power_2_scales=True))
    after = mine.operands(x, 0, Request()).rowwise.scale_inv.item()
    assert before < after < 2 * before
    assert torch.tensor(after).frexp().mantissa == 0.5
    for other in (MXFP8BlockScaling(), DelayedScaling()):
        assert not mine.follow(other)
    assert mine.recipe == Float8CurrentScaling(use_power_2_scales=True)


@pytest.mark.parametrize("recipe", RECIPES[:3], ids=lambda recipe: type(recipe).__name__)
def test_only_random_rounding_numbers_its_forwards(recipe: Recipe) -> None:
    assert state(recipe, "backward").draw() is None
    assert state(NVFP4, "forward").draw() is None
    assert state(NVFP4BlockScaling(disable_stochastic_rounding=True), "backward").draw() is None


def test_the_forwards_of_a_module_are_numbered_and_two_modules_differ() -> None:
    first, second = state(NVFP4, "backward"), state(NVFP4, "backward", name="b")
    numbers = [first.draw().item() for _ in range(4)]
    assert numbers == list(range(numbers[0], numbers[0] + 4))
    assert abs(second.draw().item() - numbers[0]) > 2**20
    assert state(NVFP4, "backward").draw().item() == numbers[0]


def test_a_number_gives_the_same_bits_again() -> None:
    mine, x = state(NVFP4, "backward"), normal(16, 64)
    numbers = [mine.draw() for _ in range(2)]
    bytes_of = [
        mine.operands(x, 0, Request(draw=draw)).rowwise.data.view(torch.uint8)
        for draw in (*numbers, numbers[0])
    ]
    assert torch.equal(bytes_of[0], bytes_of[2])
    assert not torch.equal(bytes_of[0], bytes_of[1])


def test_numbers_move_with_the_module_and_begin_anew_off_the_meta_device(devices) -> None:
    mine = state(NVFP4, "backward", device=devices[0])
    first = mine.draw().item()
    with torch.inference_mode():
        mine.move(devices[1])
    number = mine.draw()
    assert (number.device, number.item()) == (devices[1], first + 1)
    assert not number.is_inference()
    meta = state(NVFP4, "backward", device="meta")
    meta.draw()
    meta.move(devices[1])
    assert meta.device == devices[1]
    assert meta.draw().item() == first


@pytest.mark.parametrize(
    "twin_of",
    [lambda s: s.copy(), copy.deepcopy, lambda s: pickle.loads(pickle.dumps(s))],
    ids=["copy", "deepcopy", "pickle"],
)
def test_a_twin_goes_on_with_the_same_numbers_by_itself(devices, twin_of) -> None:
    mine = state(NVFP4, "backward", device=devices[1])
    first = mine.draw().item()
    twin = twin_of(mine)
    assert [each.draw().item() for each in (twin, twin, mine)] == [first + 1, first + 2, first + 1]
    assert twin.device == devices[1]
    assert twin.recipe == NVFP4
    x = normal(16, 64, device=devices[1])
    draw = mine.draw()
    left, right = (s.operands(x, 0, Request(draw=draw)).rowwise for s in (mine, twin))
    assert torch.equal(left.data.view(torch.uint8), right.data.view(torch.uint8))


def test_a_checkpoint_of_a_state_without_scales_is_not_mistaken_for_one_with(devices) -> None:
    stateless = qv.Linear(16, 16, recipe=MXFP8BlockScaling())
    stateless(normal(4, 16))
    delayed = qv.Linear(16, 16, device=devices[1], recipe=DelayedScaling(amax_history_len=4))
    delayed.load_state_dict(stateless.state_dict())
    x = normal(4, 16)
    delayed(x.to(devices[1]))
    scale = delayed.recipe_states["forward"].scale
    assert scale[0].item() == (torch.tensor(448.0) / x.abs().max()).item()
