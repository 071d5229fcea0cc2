"""Attention as loops and float64 sums say it, for tests to compare with."""

import torch

WAYS = ("bshd", "sbhd", "thd")


def allowed(mask_type: str, window, queries: list[int], keys: list[int]) -> torch.Tensor:
    """bool [b, 1, sq, sk] for sequences of these lengths, padded at the end; no arbitrary mask."""
    found = torch.zeros(len(queries), 1, max(queries), max(keys), dtype=torch.bool)
    left, right = window
    for b, (nq, nk) in enumerate(zip(queries, keys, strict=True)):
        own = 0 if mask_type in ("causal", "padding_causal") else nk - nq
        for i in range(nq):
            for j in range(nk):
                at = i + own
                ok = "causal" not in mask_type or j <= at
                ok = ok and (left < 0 or j >= at - left) and (right < 0 or j <= at + right)
                found[b, 0, i, j] = ok
    return found


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    allow: torch.Tensor,
    *,
    scale: float | None = None,
    bias: torch.Tensor | float = 0.0,
    sink: torch.Tensor | None = None,
) -> torch.Tensor:
    """q [b, sq, h, d], k [b, sk, g, d], v [b, sk, g, dv] to [b, sq, h·dv], in float64."""
    shared = q.shape[2] // k.shape[2]
    keys = [k[:, :, h // shared].double() for h in range(q.shape[2])]
    values = [v[:, :, h // shared].double() for h in range(q.shape[2])]
    products = [q[:, :, h].double() @ keys[h].mT for h in range(q.shape[2])]
    scores = torch.stack(products, 1) * (scale or q.shape[-1] ** -0.5) + bias
    e = scores.exp() * allow
    total = e.sum(-1, keepdim=True)
    if sink is not None:
        total = total + sink.double().exp().view(1, -1, 1, 1)
    weights = e / total.masked_fill(total == 0, 1.0)
    out = torch.stack([weights[:, h] @ values[h] for h in range(q.shape[2])], 2)
    return out.flatten(2)


def operands(
    queries: list[int], keys: list[int], heads: int = 4, groups: int = 2, channels=(8, 6)
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, k and v, padded with values that must not matter, float32 bshd, requiring grad."""
    batch = len(queries)
    shapes = (
        (batch, max(queries), heads, channels[0]),
        (batch, max(keys), groups, channels[0]),
        (batch, max(keys), groups, channels[1]),
    )
    return tuple(torch.randn(shape).requires_grad_() for shape in shapes)  # type: ignore[return-value]


def packed(x: torch.Tensor, lengths: list[int]) -> torch.Tensor:
    """[b, s, ...] as [t, ...] without the padding."""
    return torch.cat([row[:n] for row, n in zip(x, lengths, strict=True)])


def totals(lengths: list[int]) -> torch.Tensor:
    """cu_seqlens."""
    return torch.tensor([0, *lengths]).cumsum(0).int()


def padding(lengths: list[int]) -> torch.Tensor:
    """bool [b, 1, 1, s], True for padding at the end."""
    steps = torch.arange(max(lengths))
    return (steps >= torch.tensor(lengths)[:, None])[:, None, None]


def gradients(y: torch.Tensor, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Of a loss that weighs each entry of y differently."""
    weights = torch.linspace(-1, 1, y.numel(), dtype=torch.float64).view(y.shape).sin()
    return torch.autograd.grad((y.double() * weights.to(y.device)).sum(), inputs)
