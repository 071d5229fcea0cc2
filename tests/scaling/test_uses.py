"""Which forward a recomputation repeats, told by autograd's sequence numbers."""

import threading
from collections.abc import Callable

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from quaver.errors import QuaverError
from quaver.recipe import DelayedScaling
from quaver.scaling.uses import KEPT, Use, Uses

RECIPES = [DelayedScaling(margin=i) for i in range(4)]

both_kinds = pytest.mark.parametrize("reentrant", [True, False])


def leaf() -> torch.Tensor:
    return torch.ones(2, requires_grad=True)


def use(recipe=RECIPES[0], group=None, updates=0, recorded=True, grad=True) -> Use:
    return Use(recipe, group, updates, recorded, grad)


class Forwards:
    """Functions under torch's checkpoint that note a use, and ask in their second run for it."""

    def __init__(self, reentrant: bool) -> None:
        self.uses = Uses()
        self.found: list[Use | None] = []
        self.reentrant = reentrant

    def run(self, noted: Use | None) -> torch.Tensor:
        def function(x: torch.Tensor) -> torch.Tensor:
            if torch._C._current_graph_task_id() != -1:
                self.found.append(self.uses.recomputed())
            elif noted is not None:
                noted.grad = torch.is_grad_enabled()
                self.uses.note(noted)
            return x.sin()

        return checkpoint(function, leaf() * 1, use_reentrant=self.reentrant).sum()


def draw_number() -> None:
    """Let autograd's counter go on."""
    leaf() * 1


@both_kinds
def test_nothing_is_known_before_the_first_use(reentrant: bool) -> None:
    forwards = Forwards(reentrant)
    forwards.run(None).backward()
    assert forwards.found == [None]


def test_outside_of_a_backward_nothing_is_recomputed() -> None:
    uses = Uses()
    uses.note(use())
    assert uses.recomputed() is None


@both_kinds
@pytest.mark.parametrize("order", [(0, 1), (1, 0)], ids=str)
def test_a_recomputation_finds_the_forward_that_it_repeats(reentrant: bool, order) -> None:
    """Two forwards, an update between them, before either's backward, in either order."""
    forwards = Forwards(reentrant)
    noted = [use(RECIPES[i], updates=i) for i in (0, 1)]
    outputs = [forwards.run(each) for each in noted]
    for i in order:
        outputs[i].backward()
    assert [id(each) for each in forwards.found] == [id(noted[i]) for i in order]


@both_kinds
def test_only_forwards_in_the_grad_mode_of_a_first_run_count(reentrant: bool) -> None:
    """A reentrant checkpoint's is under no_grad, another's is not."""
    forwards, mine = Forwards(reentrant), use()
    output = forwards.run(mine)
    forwards.uses.note(use(RECIPES[1], grad=reentrant))
    output.backward()
    assert forwards.found == [mine]


@both_kinds
def test_forwards_alike_in_a_row_are_one_use(reentrant: bool) -> None:
    forwards, mine = Forwards(reentrant), use()
    output = forwards.run(mine)
    for _ in range(2 * KEPT):
        draw_number()
        forwards.uses.note(use(RECIPES[1], grad=not reentrant))
    output.backward()
    assert forwards.found[0] is mine


@pytest.mark.parametrize(
    "other",
    [{"recipe": None}, {"group": "other"}, {"updates": 1}, {"recorded": False}, {"grad": False}],
    ids=str,
)
def test_forwards_that_differ_are_apart_and_the_oldest_are_forgotten(other) -> None:
    """What cannot be found any more is an error, never another's scales."""
    forwards, first = Forwards(True), use(updates=7)
    output = forwards.run(first)
    for _ in range(KEPT // 2):
        for fields in ({}, other):
            draw_number()
            forwards.uses.note(use(**fields))
    with pytest.raises(QuaverError, match=f"last {KEPT} are remembered"):
        output.backward()
    assert forwards.found == []


def test_a_checkpoint_that_torch_keeps_a_record_of_is_never_forgotten() -> None:
    forwards, first = Forwards(False), use(updates=7)
    output = forwards.run(first)
    for i in range(2 * KEPT):
        draw_number()
        forwards.uses.note(use(updates=i))
    output.backward()
    assert forwards.found == [first]


@both_kinds
def test_functions_before_the_module_take_numbers_of_their_own(reentrant: bool) -> None:
    """Under no_grad, too: a reentrant checkpoint's node is not the last before the module."""

    class Same(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            return grad

    uses, found = Uses(), []
    noted = [use(RECIPES[i], updates=i, grad=not reentrant) for i in range(3)]

    def function(x: torch.Tensor, i: int) -> torch.Tensor:
        for _ in range(3):
            x = Same.apply(x)
        if torch._C._current_graph_task_id() == -1:
            uses.note(noted[i])
        else:
            found.append(uses.recomputed())
        return x.sin()

    outputs = [checkpoint(function, leaf() * 1, i, use_reentrant=reentrant) for i in range(3)]
    for i in (1, 2, 0):
        outputs[i].sum().backward()
    assert [id(each) for each in found] == [id(noted[i]) for i in (1, 2, 0)]


def in_thread(work: Callable[[], None], stay: threading.Event | None = None) -> threading.Thread:
    """Work on a thread, which lives on until `stay` is set."""
    done = threading.Event()

    def run() -> None:
        work()
        done.set()
        if stay is not None:
            stay.wait(10)

    thread = threading.Thread(target=run)
    thread.start()
    done.wait(10)
    if stay is None:
        thread.join()
    return thread


@both_kinds
def test_forwards_of_threads_that_ended_do_not_count(reentrant: bool) -> None:
    forwards, mine = Forwards(reentrant), use()
    in_thread(lambda: forwards.uses.note(use(RECIPES[1], grad=not reentrant)))
    forwards.run(mine).backward()
    assert forwards.found[0] is mine


@pytest.mark.parametrize("same", [True, False])
def test_two_threads_training_count_only_where_they_do_the_same(same: bool) -> None:
    """Each thread counts nodes by itself: whose forward it was cannot be told by the numbers."""
    forwards, mine, stay = Forwards(True), use(), threading.Event()
    theirs = use(grad=False) if same else use(updates=1, grad=False)
    output = forwards.run(mine)
    number = torch._C._autograd._get_sequence_nr()

    def train() -> None:
        while torch._C._autograd._get_sequence_nr() <= number:
            draw_number()
        forwards.uses.note(theirs)

    thread = in_thread(train, stay)
    try:
        if same:
            output.backward()
            assert forwards.found == [mine]
        else:
            with pytest.raises(QuaverError, match="on one thread only"):
                output.backward()
    finally:
        stay.set()
        thread.join()


def test_inference_on_another_thread_does_not_count() -> None:
    forwards, mine, stay = Forwards(False), use(), threading.Event()
    output = forwards.run(mine)
    inference = use(updates=1, recorded=False, grad=False)
    thread = in_thread(lambda: forwards.uses.note(inference), stay)
    try:
        output.backward()
    finally:
        stay.set()
        thread.join()
    assert forwards.found[0] is mine


def test_threads_that_come_and_go_are_not_kept() -> None:
    forwards = Forwards(False)
    mine = use()
    for i in range(2 * KEPT):
        in_thread(lambda i=i: forwards.uses.note(use(updates=i)))
    forwards.run(mine).backward()
    assert forwards.found[0] is mine


def test_a_hook_without_grad_mode_repeats_nothing() -> None:
    uses, found, x = Uses(), [], leaf()
    y = x * 2
    uses.note(use())
    y.register_hook(lambda grad: found.append(uses.recomputed()))
    y.sum().backward()
    assert found == [None]


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")  # torch's, inside
@pytest.mark.parametrize(("outer", "inner"), [(True, True), (True, False), (False, True)])
def test_a_reentrant_checkpoint_in_or_around_another_is_refused(outer: bool, inner: bool) -> None:
    forwards = Forwards(inner)
    output = checkpoint(lambda x: forwards.run(use()) + x, leaf() * 1, use_reentrant=outer)
    with pytest.raises(QuaverError, match="use_reentrant=False"):
        output.sum().backward()
    assert forwards.found == []
