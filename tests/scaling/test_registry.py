"""The layout of a reduction's buffer: in the order of first use, never compacted."""

import copy
import gc
import itertools

from quaver.recipe import DelayedScaling
from quaver.scaling.registry import key_of, register, slots
from quaver.scaling.state import RecipeState

_lengths = itertools.count(10_000)


def fresh_recipe(**fields) -> DelayedScaling:
    """A recipe of its own for each test: the registry lives as long as the process."""
    return DelayedScaling(amax_history_len=next(_lengths), **fields)


def state(recipe: DelayedScaling, mode: str = "forward", n: int = 3) -> RecipeState:
    return RecipeState.create(recipe, mode=mode, num_quantizers=n, device="cpu")


def registered(recipe: DelayedScaling, *sizes: int) -> list[RecipeState]:
    states = [state(recipe, n=n) for n in sizes]
    for each in states:
        register(each)
    return states


def test_slots_are_in_registration_order_and_once_each() -> None:
    recipe = fresh_recipe()
    states = registered(recipe, 3, 6, 3)
    for each in reversed(states):
        register(each)
    found = slots(key_of(states[0]))
    assert [slot.state() for slot in found] == states
    assert [slot.size for slot in found] == [3, 6, 3]


def test_a_dead_state_keeps_its_slot() -> None:
    recipe = fresh_recipe()
    states = registered(recipe, 3, 6, 2)
    key = key_of(states[0])
    del states[1]
    gc.collect()
    late = state(recipe, n=4)
    register(late)
    found = slots(key)
    assert [slot.size for slot in found] == [3, 6, 2, 4]
    assert [slot.state() for slot in found] == [states[0], None, states[1], late]


def test_the_registry_does_not_keep_states_alive() -> None:
    states = registered(fresh_recipe(), 3)
    slot = slots(key_of(states[0]))[0]
    states.clear()
    gc.collect()
    assert slot.state() is None


def test_recipe_group_and_direction_are_the_key() -> None:
    recipe = fresh_recipe()
    same = state(DelayedScaling(amax_history_len=recipe.amax_history_len))
    assert key_of(state(recipe)) == key_of(same)
    assert key_of(state(recipe)) != key_of(state(recipe, mode="backward"))
    grouped = state(recipe)
    grouped.group = "another group"
    assert key_of(state(recipe)) != key_of(grouped)
    functions = [fresh_recipe(amax_compute_algo=lambda h: h[0]) for _ in range(2)]
    assert key_of(state(functions[0])) != key_of(state(functions[1]))


def test_a_copy_is_registered_in_its_own_right() -> None:
    (original,) = registered(fresh_recipe(), 3)
    twins = [copy.deepcopy(original), original.copy()]
    for twin in twins:
        register(twin)
    assert [slot.state() for slot in slots(key_of(original))] == [original, *twins]


def test_another_recipe_and_back_again_take_one_slot_each() -> None:
    first, second = fresh_recipe(), fresh_recipe()
    (mine,) = registered(first, 3)
    mine.follow(second)
    register(mine)
    mine.follow(first)
    register(mine)
    assert len(slots(key_of(mine))) == 1
    mine.follow(second)
    assert len(slots(key_of(mine))) == 1


def test_a_state_that_comes_off_the_meta_device_keeps_its_slot() -> None:
    recipe = fresh_recipe()
    mine = RecipeState.create(recipe, mode="forward", num_quantizers=3, device="meta")
    register(mine)
    mine.move(state(recipe).device)
    register(mine)
    assert [slot.state() for slot in slots(key_of(mine))] == [mine]
