"""The kernels with one scale a tensor: Triton's results on a device, the reference's on the CPU."""

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from quaver import kernels
from quaver.kernels import use_implementation
from tests.samples import NAMES, sample

MATRICES = tuple(name for name in NAMES if sample(name).dim() == 2)
PAIRS = (
    (torch.bfloat16, torch.float8_e4m3fn),
    (torch.bfloat16, torch.float8_e5m2),
    (torch.float32, torch.float8_e4m3fn),
    (torch.float16, torch.float8_e5m2),
)
"""Input and payload dtypes for the interpreter, which is slow; GPUs are tested with all."""
UNIT = 2.0**-24
"""The unit roundoff of float32."""

Make = Callable[[torch.device], tuple[Any, ...]]


def both(
    operation: Callable[..., Any], make: Make, device: torch.device
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """What the reference on the CPU and the Triton version on `device` return and write.

    Args:
        make: the arguments, made anew on a device; every tensor among them is compared, too.
    """
    here, there = make(torch.device("cpu")), make(device)
    with use_implementation("reference"):
        expected = _tensors([operation(*here), here])
    with use_implementation("triton"):
        found = _tensors([operation(*there), there])
    for tensor in found:
        assert tensor.device == device
    return expected, found


def _tensors(tree: Any) -> list[torch.Tensor]:
    tensors: list[torch.Tensor] = []
    tree_map_only(torch.Tensor, tensors.append, tree)
    return tensors


def assert_same(
    expected: list[torch.Tensor], found: list[torch.Tensor], strides: bool = True
) -> None:
    """Bit for bit; a NaN that is no payload may be any NaN.

    Args:
        strides: they must be equal, too.
    """
    assert len(found) == len(expected)
    for a, b in zip(expected, found, strict=True):
        assert (b.shape, b.dtype) == (a.shape, a.dtype)
        assert b.stride() == a.stride() or not strides
        assert torch.equal(_bits(a), _bits(b.cpu()))


def _bits(x: torch.Tensor) -> torch.Tensor:
    """The bits of x as integers; all NaNs alike, except a payload's."""
    if x.element_size() > 1:
        x = torch.where(x.isnan(), torch.nan, x)
    whole = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[x.element_size()]
    return x.contiguous().view(whole)


def check(operation: Callable[..., Any], make: Make, device: torch.device) -> None:
    """Reference and Triton version agree bit for bit."""
    assert_same(*both(operation, make, device))


def check_cast(name: str, source: torch.dtype, dtype: torch.dtype, device: torch.device) -> None:
    """`cast` of one sample: scale set, known by the device alone, and never set."""
    for readiness, columnwise, margin in ((None, True, 0), (1.0, False, 0), (0.0, True, 2)):

        def make(
            device: torch.device,
            readiness: float | None = readiness,
            columnwise: bool = columnwise,
            margin: int = margin,
        ) -> tuple[Any, ...]:
            history = torch.tensor([[9.0, 0.25, 7.0], [1.0, 2.0, 3.0]], device=device)
            scale = torch.tensor([1.0e9, 3.7, 2.0], device=device)
            ready = None if readiness is None else torch.tensor([1 - readiness, readiness, 0.0])
            ready = None if ready is None else ready.to(device)
            x = sample(name, source, device)
            return x, scale, history, ready, 1, dtype, columnwise, margin

        check(kernels.cast, make, device)


def check_current_cast(
    name: str, source: torch.dtype, dtype: torch.dtype, device: torch.device
) -> None:
    """`current_cast` of one sample: with its own amax, and one from elsewhere."""

    def own(device: torch.device) -> tuple[Any, ...]:
        return sample(name, source, device), dtype, True, 1.0e-3, None, True

    def given(device: torch.device) -> tuple[Any, ...]:
        amax = torch.tensor([5.0], device=device)
        return sample(name, source, device), dtype, False, 0.0, amax, False

    check(kernels.current_cast, own, device)
    check(kernels.current_cast, given, device)


def check_amax(name: str, source: torch.dtype, device: torch.device) -> None:
    """`amax` of one sample, into a cell that it may not reach and into one that is 0."""
    for slot in (1, 3):

        def make(device: torch.device, slot: int = slot) -> tuple[Any, ...]:
            into = torch.tensor([[0.0, 0.5], [0.0, 0.0]], device=device)
            return sample(name, source, device), into, slot

        check(kernels.amax, make, device)


def check_dequantize(
    name: str, source: torch.dtype, dtype: torch.dtype, device: torch.device
) -> None:
    """`dequantize` of one sample's payload, to the sample's own dtype."""

    def make(device: torch.device) -> tuple[Any, ...]:
        return (
            sample(name, source, device).to(dtype),
            torch.full((1,), 0.013, device=device),
            source,
        )

    check(kernels.dequantize, make, device)


def check_cast_grad(
    name: str, source: torch.dtype, dtype: torch.dtype, device: torch.device
) -> None:
    """`cast_grad` of one sample: the cast's results, and sums within the bound of any order."""
    for ready, columnwise in ((None, True), (0.0, False)):

        def make(
            device: torch.device, ready: float | None = ready, columnwise: bool = columnwise
        ) -> tuple[Any, ...]:
            cell = None if ready is None else torch.full((1,), ready, device=device)
            scale, amax = torch.full((1,), 3.7, device=device), torch.zeros(1, device=device)
            return sample(name, source, device), scale, amax, cell, 0, dtype, columnwise, 1

        expected, found = both(kernels.cast_grad, make, device)
        sums = found[3]
        assert_same(expected[:3] + expected[4:], found[:3] + found[4:])
        assert_sums(sample(name, source), sums)


def assert_sums(x: torch.Tensor, sums: torch.Tensor) -> None:
    """sums = x's column sums, up to what float32 additions of M values can lose in any order.

    The bound: (M - 1) u / (1 - (M - 1) u) times the sum of magnitudes (Higham, Accuracy and
    Stability of Numerical Algorithms, section 4.2). Columns that might overflow are passed over.
    """
    assert sums.dtype == torch.float32
    wide = x.to(torch.float64)
    exact, magnitude = wide.sum(0), wide.abs().sum(0)
    lost = max(x.shape[0] - 1, 0) * UNIT
    bound = lost / (1 - lost) * magnitude
    finite = magnitude < torch.finfo(torch.float32).max
    error = (sums.cpu().to(torch.float64) - exact).abs()
    # A sum's own result may be subnormal, but additions there are exact.
    assert bool((error <= bound)[finite].all())
    missing = ~exact.isfinite()
    torch.testing.assert_close(
        sums.cpu()[missing], exact[missing].to(torch.float32), rtol=0, atol=0, equal_nan=True
    )


def check_scale_update(
    length: int, algorithm: str, reduced: bool, device: torch.device, seed: int = 0
) -> None:
    """Three steps' updates of states of several sizes, with amaxes of every kind."""
    generator = torch.Generator().manual_seed(seed)
    sizes = [3, 6, 2]

    def amaxes(*shape: int) -> torch.Tensor:
        values = torch.rand(shape, generator=generator).mul_(80).sub_(40).exp2_()
        kind = torch.randint(0, 10, shape, generator=generator)
        for i, special in enumerate((0.0, torch.inf, torch.nan, 1.0e-41)):
            values[kind == i] = special
        return values

    histories = [amaxes(length, n) for n in sizes]
    scales = [amaxes(n).nan_to_num(1.0, 1.0) for n in sizes]
    readies = [(scale > 1).to(torch.float32) for scale in scales]
    states = [histories, scales, readies]
    there = [[t.to(device) for t in group] for group in states]
    for _ in range(3):
        given = amaxes(sum(sizes)).nan_to_num(3.0) if reduced else None
        fresh = [amaxes(n) for n in sizes]
        for group in (states, there):
            for history, row in zip(group[0], fresh, strict=True):
                history[0] = row.to(history.device)
        with use_implementation("reference"):
            kernels.scale_update(*states, given, 112.0, algorithm)
        moved = None if given is None else given.to(device)
        with use_implementation("triton"):
            kernels.scale_update(*there, moved, 112.0, algorithm)
        for group, other in zip(states, there, strict=True):
            assert_same(group, other)
