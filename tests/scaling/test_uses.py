"""Which forward a recomputation repeats, told by autograd's sequence numbers."""

import threading

import pytest
import torch

from quaver.errors import QuaverError
from quaver.recipe import DelayedScaling
from quaver.scaling.uses import KEPT, Use, Uses

RECIPES = [DelayedScaling(margin=i) for i in range(KEPT + 3)]
NESTED: list[Use | None] = []


class Probe(torch.autograd.Function):
    """A node whose backward asks which use it repeats."""

    @staticmethod
    def forward(ctx, x, uses, found):
        ctx.uses, ctx.found = uses, found
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        with torch.set_grad_enabled(ctx.found is not NESTED):  # a checkpoint recomputes with grad
            ctx.found.append(ctx.uses.recomputed())
        return grad, None, None


class CheckpointFunction(Probe):
    """A node with the name of reentrant checkpointing's; its first forward is inside of its own."""

    @staticmethod
    def forward(ctx, x, uses, found):
        ctx.uses, ctx.found = uses, found
        uses.note(found.pop())
        return x.clone()


def test_forwards_alike_in_a_row_are_one_use() -> None:
    uses, recipe = Uses(), RECIPES[0]
    for _ in range(3):
        uses.note(Use(recipe, None, 0, True))
    first = uses.recomputed()
    assert first.updates == 0
    for fields in (
        (RECIPES[1], None, 0, True),
        (recipe, "group", 0, True),
        (recipe, "group", 1, True),
        (recipe, "group", 1, False),
    ):
        other = Use(*fields)
        uses.note(other)
        assert uses.recomputed() is other


def test_nothing_is_known_before_the_first_use() -> None:
    assert Uses().recomputed() is None


def test_a_node_finds_the_forward_that_it_belongs_to() -> None:
    """Two forwards, an update between them, before either's backward, in either order."""
    for order in ((0, 1), (1, 0)):
        uses, found, outputs = Uses(), [], []
        for i in range(2):
            x = torch.ones(2, requires_grad=True) * 1
            uses.note(Use(RECIPES[i], None, i, True))
            outputs.append(Probe.apply(x, uses, found).sum())
        for i in order:
            outputs[i].backward()
        assert [use.recipe for use in found] == [RECIPES[i] for i in order]


def test_a_reentrant_node_finds_the_forward_inside_of_it() -> None:
    uses, outputs, found = Uses(), [], [[], []]
    for i in range(2):
        found[i].append(Use(RECIPES[i], None, i, True))
        x = torch.ones(2, requires_grad=True) * 1
        outputs.append(CheckpointFunction.apply(x, uses, found[i]).sum())
    for output in outputs:
        output.backward()
    assert [each[0].recipe for each in found] == RECIPES[:2]


def test_a_forward_older_than_what_is_kept_is_an_error() -> None:
    uses, found = Uses(), []
    x = torch.ones(2, requires_grad=True) * 1
    uses.note(Use(RECIPES[0], None, 0, True))
    output = Probe.apply(x, uses, found).sum()
    for recipe in RECIPES[1:]:
        torch.ones(1, requires_grad=True) * 1  # draws a number
        uses.note(Use(recipe, None, 0, True))
    with pytest.raises(QuaverError, match=f"last {KEPT} are remembered"):
        output.backward()
    assert found == []


def test_numbers_of_another_thread_are_not_compared_with() -> None:
    uses, found = Uses(), []
    thread = threading.Thread(target=lambda: uses.note(Use(RECIPES[0], None, 0, True)))
    thread.start()
    thread.join()
    assert uses.recomputed().recipe is RECIPES[0]
    x = torch.ones(2, requires_grad=True) * 1
    mine = Use(RECIPES[1], None, 0, True)
    uses.note(mine)
    Probe.apply(x, uses, found).sum().backward()
    assert found == [mine]
    assert found[0] is mine


def test_a_reentrant_checkpoint_inside_another_is_refused() -> None:
    """Its first run, in the outer's recomputation, is without grad."""
    uses = Uses()
    uses.note(Use(RECIPES[0], None, 0, True))
    x = torch.ones(2, requires_grad=True) * 1
    output = Probe.apply(x, uses, NESTED).sum()
    with pytest.raises(QuaverError, match="use_reentrant=False"):
        output.backward()
