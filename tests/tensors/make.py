"""Float8Tensors to test with."""

import torch
from torch import nn

import quaver as qv
from tests.samples import normal

E4M3 = torch.float8_e4m3fn


def float8(
    *shape: int, device="cpu", scale: float = 3.7, dtype=torch.float32, **usages
) -> qv.Float8Tensor:
    """With a quantizer; normal values."""
    quantize = qv.Float8Quantizer(
        torch.tensor([scale], device=device), torch.zeros(1, device=device), E4M3, **usages
    )
    return quantize(normal(*shape, dtype=dtype, device=device))


def without_quantizer(*shape: int, device="cpu", columnwise: bool = True) -> qv.Float8Tensor:
    t = float8(*shape, device=device)
    return qv.Float8Tensor(
        t.rowwise_data, t.rowwise_scale_inv, t.columnwise_data if columnwise else None
    )


def parameter(*shape: int, device="cpu", requires_grad: bool = True) -> nn.Parameter:
    return nn.Parameter(without_quantizer(*shape, device=device), requires_grad=requires_grad)


def same(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Equal bytes; torch has no `equal` for FP8."""
    a, b = (t.detach().cpu().contiguous().view(torch.uint8) for t in (left, right))
    return a.shape == b.shape and torch.equal(a, b)


def same_payload(left: qv.Float8Tensor, right: qv.Float8Tensor) -> bool:
    """Equal bytes in all that both hold; and both hold the same."""
    for name in ("rowwise_data", "columnwise_data", "rowwise_scale_inv"):
        a, b = getattr(left, name), getattr(right, name)
        if (a is None) != (b is None) or (a is not None and not same(a, b)):
            return False
    return True


def consistent(t: qv.Float8Tensor) -> bool:
    """Whether the column-wise copy is the transposed row-wise one."""
    rows = t.rowwise_data.view(torch.uint8).reshape(-1, t.shape[-1])
    return torch.equal(rows.t(), t.columnwise_data.view(torch.uint8))
