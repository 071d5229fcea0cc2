"""parallel_cross_entropy equals torch's cross entropy, also with the vocabulary over processes."""

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional

import quaver as qv
from quaver.functional import parallel_cross_entropy

VOCABULARY = 12


def problem() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(3)
    logits = torch.randn(4, 5, VOCABULARY) * 4
    target = torch.randint(0, VOCABULARY, (4, 5))
    target[1, 2:4] = -100
    return logits, target


def reference(smoothing: float, reduce: bool) -> tuple[torch.Tensor, torch.Tensor]:
    logits, target = problem()
    logits.requires_grad_()
    loss = functional.cross_entropy(
        logits.flatten(0, 1),
        target.flatten(),
        label_smoothing=smoothing,
        reduction="mean" if reduce else "none",
    )
    loss = loss if reduce else loss.reshape(4, 5)
    (loss * weights(loss)).sum().backward()
    return loss.detach(), logits.grad


def weights(loss: torch.Tensor) -> torch.Tensor:
    return torch.linspace(0.5, 2, loss.numel()).reshape(loss.shape).to(loss.device)


@pytest.mark.parametrize("reduce", [False, True])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_it_equals_torchs(smoothing: float, reduce: bool, devices: list[torch.device]) -> None:
    expected, expected_grad = reference(smoothing, reduce)
    logits, target = (t.to(devices[1]) for t in problem())
    logits.requires_grad_()
    loss = parallel_cross_entropy(logits, target, smoothing, reduce)
    assert (loss.device, loss.dtype) == (devices[1], torch.float32)
    torch.testing.assert_close(loss.cpu(), expected)
    (loss * weights(loss)).sum().backward()
    torch.testing.assert_close(logits.grad.cpu(), expected_grad)


def test_bfloat16_logits_get_their_gradient_in_bfloat16() -> None:
    logits, target = problem()
    low = logits.bfloat16().requires_grad_()
    high = low.detach().float().requires_grad_()
    loss, twin = parallel_cross_entropy(low, target), parallel_cross_entropy(high, target)
    assert torch.equal(loss, twin)
    loss.sum().backward()
    twin.sum().backward()
    assert torch.equal(low.grad, high.grad.bfloat16())


def test_infinite_logits_and_ignored_targets() -> None:
    logits = torch.zeros(3, 4)
    logits[0, 1] = float("-inf")
    logits.requires_grad_()
    target = torch.tensor([0, 7, 7])
    loss = parallel_cross_entropy(logits, target, ignore_idx=7)
    assert loss.tolist() == pytest.approx([torch.tensor(3.0).log().item(), 0, 0])
    loss.sum().backward()
    assert logits.grad[0].tolist() == pytest.approx([1 / 3 - 1, 0, 1 / 3, 1 / 3])
    assert not logits.grad[1:].any()
    nothing = parallel_cross_entropy(logits, torch.full((3,), 7), 0.0, True, ignore_idx=7)
    assert nothing.item() == 0


def test_a_target_out_of_range_gives_nan_in_its_row_alone() -> None:
    logits = torch.zeros(3, 4, requires_grad=True)
    loss = parallel_cross_entropy(logits, torch.tensor([0, 4, -1]))
    assert loss.isnan().tolist() == [False, True, True]
    loss.sum().backward()
    assert logits.grad.isnan().all(1).tolist() == [False, True, True]


def test_mistakes_are_named(devices: list[torch.device]) -> None:
    logits, target = problem()
    with pytest.raises(ValueError, match=r"\(4, 5\), not \(20,\)"):
        parallel_cross_entropy(logits, target.flatten())
    with pytest.raises(ValueError, match=r"int64 or int32, not torch\.float32"):
        parallel_cross_entropy(logits, target.float())
    with pytest.raises(ValueError, match="from 0 to 1, not 2"):
        parallel_cross_entropy(logits, target, 2)
    with pytest.raises(qv.DeviceMismatchError, match="target is on cpu"):
        parallel_cross_entropy(logits.to(devices[0]), target)


def _rank(rank: int, path: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{path}/meet", rank=rank, world_size=2)
    for smoothing in (0.0, 0.1):
        for reduce in (False, True):
            expected, expected_grad = reference(smoothing, reduce)
            logits, target = problem()
            mine = logits.chunk(2, dim=-1)[rank].clone().requires_grad_()
            loss = parallel_cross_entropy(mine, target, smoothing, reduce, dist.group.WORLD)
            torch.testing.assert_close(loss, expected)
            (loss * weights(loss)).sum().backward()
            torch.testing.assert_close(mine.grad, expected_grad.chunk(2, dim=-1)[rank])
    dist.destroy_process_group()


def test_the_vocabulary_may_be_split_over_processes(tmp_path) -> None:
    torch.multiprocessing.spawn(_rank, (str(tmp_path),), nprocs=2)
