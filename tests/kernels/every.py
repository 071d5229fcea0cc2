"""Every kernel that has a Triton version, with small arguments.

    compute-sanitizer --tool memcheck python -m tests.kernels.every

runs each of them once on the current GPU, and the products beside them.
"""

from collections.abc import Iterator
from typing import Any

import torch

from quaver import kernels
from quaver.kernels.rope.op import rope
from quaver.kernels.scaled_mm import layouts
from tests.kernels import test_activation, test_norm, test_operators
from tests.samples import FORMATS, normal


def calls(x: torch.Tensor) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """Kernels by name, each with arguments, made from the matrix x."""
    for arguments, names in (
        (test_operators.arguments, ("amax", "cast", "dequantize", "scale_update")),
        (_grad_arguments, ("cast_grad",)),
        (test_norm.arguments, test_norm.OPERATORS),
        (test_activation.arguments, test_activation.OPERATORS),
    ):
        for name in names:
            for args in arguments(name, x):
                yield name, args
    yield from _inverses(x)
    for dtype in FORMATS:
        yield "current_cast", (x, dtype, True, 0.0, None, True)
        for dimensions in (1, 2):
            yield "block_cast", (x, dtype, dimensions, dimensions == 1, 0.0, True, True)
        yield "mx_cast", (x, dtype, True, True)
    for two_dimensional in (False, True):
        yield "nvfp4_cast", (x, two_dimensional, not two_dimensional, 1, 2, True, True)
    yield "hadamard", (x,)


def _grad_arguments(name: str, x: torch.Tensor) -> list[tuple[Any, ...]]:
    return test_operators.arguments("cast", x)


def _inverses(x: torch.Tensor) -> Iterator[tuple[str, tuple[Any, ...]]]:
    for dtype in FORMATS:
        for dimensions in (1, 2):
            data, scale, *_ = kernels.block_cast(x, dtype, dimensions, True, 0.0, True, False)
            yield "block_dequantize", (data, scale, dimensions, x.dtype)
        data, scale, *_ = kernels.mx_cast(x, dtype, True, False)
        yield "mx_dequantize", (data, scale, x.dtype)
    for two_dimensional in (False, True):
        data, scale, *_, top = kernels.nvfp4_cast(x, two_dimensional, False, 1, 2, True, False)
        yield "nvfp4_dequantize", (data, scale, top, two_dimensional, x.shape[1], x.dtype)


def products(device: torch.device) -> None:
    """Products of the layouts that cuBLASLt multiplies, with sizes that have to be filled up."""
    one = torch.ones(1, device=device)
    a, b = (normal(n, 30, device=device).to(torch.float8_e4m3fn) for n in (13, 7))
    kernels.scaled_mm(a, one, b, one, None, torch.bfloat16)
    x, w = normal(200, 300, device=device), normal(130, 300, device=device)
    left = kernels.block_cast(x, torch.float8_e4m3fn, 1, True, 0.0, True, False)[:2]
    right = kernels.block_cast(w, torch.float8_e4m3fn, 2, True, 0.0, True, False)[:2]
    names = (layouts.BLOCK_1D, layouts.BLOCK_2D)
    kernels.scaled_mm(*left, *right, None, torch.bfloat16, *names)


def main() -> None:
    """Run every kernel on the current GPU."""
    device = torch.device("cuda", torch.cuda.current_device())
    ran = set()
    for shape in ((64, 256), (13, 30)):
        for dtype in (torch.bfloat16, torch.float32):
            for name, args in calls(normal(*shape, dtype=dtype, device=device)):
                getattr(kernels, name)(*args)
                ran.add(name)
            angles = normal(9, 8, device=device)
            positions = torch.arange(5, device=device)
            for interleaved in (False, True):
                heads = normal(5, 3, 16, dtype=dtype, device=device)
                rope(heads, angles.cos(), angles.sin(), positions, interleaved)
            ran.add("rope")
    products(device)
    torch.cuda.synchronize()
    print(len(ran), "kernels and the products ran:", *sorted(ran))


if __name__ == "__main__":
    main()
