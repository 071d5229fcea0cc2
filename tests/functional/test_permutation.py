"""moe_permute and its kin against loops over tokens and experts, values and gradients."""

import pytest
import torch

import quaver as qv
from quaver.functional import (
    moe_permute,
    moe_permute_with_probs,
    moe_sort_chunks_by_index,
    moe_unpermute,
)

TOKENS, EXPERTS, HIDDEN = 13, 5, 6

Devices = list[torch.device]
MAPS = pytest.mark.parametrize("map_type", ["mask", "index"])
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])


def routing(map_type: str, device: torch.device | str = "cpu") -> torch.Tensor:
    """Each token to up to three experts; one token to none, expert 3 gets nothing."""
    chosen = torch.stack([torch.randperm(EXPERTS)[:3] for _ in range(TOKENS)]).to(torch.int32)
    chosen[chosen == 3] = -1
    chosen[4] = -1
    if map_type == "index":
        return chosen.to(device)
    mask = torch.zeros(TOKENS, EXPERTS, dtype=torch.int32)
    for token, experts in enumerate(chosen.tolist()):
        mask[token, [e for e in experts if e >= 0]] = 1
    return mask.to(device)


def pairs(routing_map: torch.Tensor, map_type: str) -> list[tuple[int, int]]:
    """(token, column of the probabilities) of each row, in order."""
    found = []
    for token, row in enumerate(routing_map.tolist()):
        for column, value in enumerate(row):
            expert = value if map_type == "index" else (column if value else -1)
            if expert >= 0:
                found.append((expert, token, column))
    return [(token, column) for _, token, column in sorted(found)]


@MAPS
@pytest.mark.parametrize("num_out_tokens", [-1, 20, 60])
def test_rows_are_sorted_by_expert(map_type: str, num_out_tokens: int, devices: Devices) -> None:
    routing_map = routing(map_type, devices[1])
    x = torch.randn(TOKENS, HIDDEN, device=devices[1], requires_grad=True)
    rows, _ = moe_permute(x, routing_map, num_out_tokens, map_type)
    expected = pairs(routing_map, map_type)
    size = len(expected) if num_out_tokens < 0 else num_out_tokens
    assert len(expected) > 20
    assert rows.shape == (size, HIDDEN)
    assert rows.device == devices[1]
    kept = expected[:size]
    assert torch.equal(rows[: len(kept)], x[[token for token, _ in kept]])
    assert not rows[len(kept) :].any()
    grad = torch.randn_like(rows)
    rows.backward(grad)
    sums = torch.zeros(TOKENS, HIDDEN)
    for row, (token, _) in enumerate(kept):
        sums[token] += grad[row].cpu()
    torch.testing.assert_close(x.grad.cpu(), sums)


@MAPS
@DTYPES
@pytest.mark.parametrize("size", [-1, 20, 60])
def test_merging_weighs_and_adds(
    map_type: str, dtype: torch.dtype, size: int, devices: Devices
) -> None:
    device = devices[1]
    routing_map = routing(map_type, device)
    rows, row_map = moe_permute(
        torch.randn(TOKENS, HIDDEN, device=device), routing_map, size, map_type
    )
    rows = rows.detach().to(dtype).requires_grad_()
    probs = torch.rand(routing_map.shape, device=device).requires_grad_()
    merged = moe_unpermute(rows, row_map, probs)
    assert (merged.dtype, merged.device) == (dtype, device)
    grad = torch.randn(TOKENS, HIDDEN, device=device).to(dtype)
    merged.backward(grad)

    twin_rows = rows.detach().cpu().double().requires_grad_()
    twin_probs = probs.detach().cpu().double().requires_grad_()
    kept = pairs(routing_map, map_type)[: len(rows)]
    sums = [torch.zeros(HIDDEN, dtype=torch.float64) for _ in range(TOKENS)]
    for row, (token, column) in enumerate(kept):
        sums[token] = sums[token] + twin_rows[row] * twin_probs[token, column]
    expected = torch.stack(sums)
    expected.backward(grad.cpu().double())
    close = {"rtol": 2 * torch.finfo(dtype).eps, "atol": 1e-6, "check_dtype": False}
    torch.testing.assert_close(merged.cpu().double(), expected, **close)
    torch.testing.assert_close(rows.grad.cpu().double(), twin_rows.grad, **close)
    torch.testing.assert_close(probs.grad.cpu().double(), twin_probs.grad, rtol=1e-5, atol=1e-5)


@MAPS
def test_without_weights_and_without_change_a_token_comes_back_as_often_as_it_was_sent(
    map_type: str,
) -> None:
    routing_map = routing(map_type)
    x = torch.randint(-8, 8, (TOKENS, HIDDEN)).float().requires_grad_()
    merged = moe_unpermute(*moe_permute(x, routing_map, map_type=map_type))
    times = ((routing_map >= 0) if map_type == "index" else (routing_map != 0)).sum(1)
    assert torch.equal(merged, x * times[:, None])
    merged.sum().backward()
    assert torch.equal(x.grad, times[:, None].expand_as(x).float())


def test_probabilities_go_with_their_rows(devices: Devices) -> None:
    routing_map = routing("mask", devices[1])
    x = torch.randn(TOKENS, HIDDEN, device=devices[1])
    probs = torch.rand(TOKENS, EXPERTS, device=devices[1], requires_grad=True)
    rows, permuted, row_map = moe_permute_with_probs(x, probs, routing_map, 60)
    kept = pairs(routing_map, "mask")
    assert permuted.tolist()[: len(kept)] == [probs[t, e].item() for t, e in kept]
    assert not permuted[len(kept) :].any()
    assert torch.equal(rows, moe_permute(x, routing_map, 60)[0])
    assert torch.equal(moe_unpermute(rows, row_map), moe_unpermute(rows, row_map))
    permuted.sum().backward()
    assert torch.equal(probs.grad, routing_map.float())


def test_an_unused_weight_that_is_nan_does_no_harm() -> None:
    routing_map = torch.tensor([[1, 0, 1], [0, 1, 0]])
    probs = torch.where(routing_map != 0, 0.5, float("nan")).requires_grad_()
    x = torch.randn(2, 4, requires_grad=True)
    merged = moe_unpermute(*moe_permute(x, routing_map), probs)
    torch.testing.assert_close(merged, x * torch.tensor([[1.0], [0.5]]))
    merged.sum().backward()
    torch.testing.assert_close(x.grad, torch.tensor([[1.0], [0.5]]).expand(2, 4))
    assert torch.equal(probs.grad != 0, routing_map != 0)


@MAPS
@pytest.mark.parametrize("tokens", [0, 3])
def test_nothing_to_send(map_type: str, tokens: int) -> None:
    x = torch.randn(tokens, HIDDEN, requires_grad=True)
    nothing = torch.full((tokens, 2), 0 if map_type == "mask" else -1)
    rows, row_map = moe_permute(x, nothing, map_type=map_type)
    assert rows.shape == (0, HIDDEN)
    merged = moe_unpermute(rows, row_map, torch.rand(tokens, 2, requires_grad=True))
    assert merged.shape == x.shape
    assert not merged.any()
    merged.sum().backward()
    assert not x.grad.any()
    rows, probs, _ = moe_permute_with_probs(x, torch.rand(tokens, 2), torch.zeros(tokens, 2), 4)
    assert (rows.shape, probs.shape) == ((4, HIDDEN), (4,))
    assert not rows.any()
    assert not probs.any()
    padded = rows.detach().requires_grad_()
    merged = moe_unpermute(padded, row_map, torch.rand(tokens, 2, requires_grad=True))
    merged.sum().backward()
    assert not padded.grad.any()


def test_it_repeats_bit_for_bit_in_deterministic_mode(devices: Devices) -> None:
    routing_map = routing("mask", devices[0])
    x = torch.randn(TOKENS, HIDDEN, device=devices[0], requires_grad=True)
    probs = torch.rand(TOKENS, EXPERTS, device=devices[0], requires_grad=True)

    def run() -> list[torch.Tensor]:
        merged = moe_unpermute(*moe_permute(x, routing_map), probs)
        return [merged, *torch.autograd.grad(merged.square().sum(), (x, probs))]

    first = run()
    torch.use_deterministic_algorithms(True)
    try:
        assert all(torch.equal(a, b) for a, b in zip(first, run(), strict=True))
    finally:
        torch.use_deterministic_algorithms(False)


def test_chunks_are_sorted() -> None:
    x = torch.arange(6.0).reshape(6, 1).requires_grad_()
    y = moe_sort_chunks_by_index(x, torch.tensor([1, 0, 3, 2]), torch.tensor([3, 0, 2, 1]))
    assert y.flatten().tolist() == [4, 5, 0, 1, 2, 3]
    (y * torch.arange(6.0)[:, None]).sum().backward()
    assert x.grad.flatten().tolist() == [2, 3, 4, 5, 0, 1]


def test_mistakes_are_named(devices: Devices) -> None:
    x, routing_map = torch.randn(TOKENS, HIDDEN), routing("mask")
    with pytest.raises(ValueError, match=r'must be "mask" or "index", not "masks"|not \'masks\''):
        moe_permute(x, routing_map, map_type="masks")
    with pytest.raises(ValueError, match=r"as many tokens, not \(13, 6\) and \(12, 5\)"):
        moe_permute(x, routing_map[1:])
    with pytest.raises(qv.DeviceMismatchError, match=r"inp is on (sim|cuda):1"):
        moe_permute(x.to(devices[1]), routing_map)
    with pytest.raises(ValueError, match="what moe_permute returned"):
        moe_unpermute(x, routing_map)
    rows, row_map = moe_permute(x, routing_map)
    with pytest.raises(ValueError, match=r"merging_probs must be \[13"):
        moe_unpermute(rows, row_map, torch.rand(4, 5))
    with pytest.raises(ValueError, match="routing_map's shape"):
        moe_permute_with_probs(x, torch.rand(4, 5), routing_map)
