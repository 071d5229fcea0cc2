"""Sample tensors that tests and benchmarks share: every shape and value that is easily forgotten.

Each sample is made anew from its own name, on any device, with the same values everywhere.
"""

import math
import zlib
from collections.abc import Callable, Iterator

import torch

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
FORMATS = (torch.float8_e4m3fn, torch.float8_e5m2)


def normal(
    *shape: int,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    name: str = "normal",
) -> torch.Tensor:
    """Normal random values, the same for the same shape and name on every device."""
    seed = zlib.crc32(f"{name}{shape}".encode())
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(dtype).to(device)


def _spread(dtype: torch.dtype) -> torch.Tensor:
    """Magnitudes over the whole range of the dtype, both signs."""
    low, high = math.log2(torch.finfo(dtype).tiny), math.log2(torch.finfo(dtype).max)
    exponents = torch.linspace(low, high - 1, 7 * 33, dtype=torch.float64)
    signs = torch.where(torch.arange(7 * 33) % 2 == 0, 1.0, -1.0)
    return (signs * exponents.exp2() * 1.37).clamp(-(2.0**high), 2.0**high).to(dtype).reshape(7, 33)


def _subnormal(dtype: torch.dtype) -> torch.Tensor:
    smallest = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    return (torch.arange(-60, 60, dtype=torch.float64) * smallest).to(dtype).reshape(8, 15)


def _with_holes(dtype: torch.dtype) -> torch.Tensor:
    x = normal(6, 17, dtype=dtype, name="holes")
    x[0, 0], x[1, 3], x[2, 16] = torch.nan, torch.inf, -torch.inf
    x[4] = torch.nan
    x[5] = 0.0
    return x


def _zero_row(dtype: torch.dtype) -> torch.Tensor:
    x = normal(5, 30, dtype=dtype, name="zero row")
    x[2] = 0.0
    return x


_MAKERS: dict[str, Callable[[torch.dtype], torch.Tensor]] = {
    "empty": lambda dtype: torch.zeros(0, 16, dtype=dtype),
    "empty_columns": lambda dtype: torch.zeros(3, 0, dtype=dtype),
    "one": lambda dtype: torch.full((1, 1), -0.75, dtype=dtype),
    "vector": lambda dtype: normal(37, dtype=dtype, name="vector"),
    "ragged": lambda dtype: normal(13, 30, dtype=dtype, name="ragged"),
    "three_dims": lambda dtype: normal(3, 5, 24, dtype=dtype, name="three"),
    "transposed": lambda dtype: normal(24, 10, dtype=dtype, name="transposed").t(),
    "strided": lambda dtype: normal(18, 64, dtype=dtype, name="strided")[::2, 1::3],
    "expanded": lambda dtype: normal(1, 20, dtype=dtype, name="expanded").expand(9, 20),
    "offset": lambda dtype: normal(300, dtype=dtype, name="offset")[11:293].view(6, 47),
    "all_zero": lambda dtype: torch.zeros(4, 33, dtype=dtype),
    "minus_zero": lambda dtype: torch.full((2, 9), -0.0, dtype=dtype),
    "zero_row": _zero_row,
    "nan_inf": _with_holes,
    "all_nan": lambda dtype: torch.full((2, 16), torch.nan, dtype=dtype),
    "subnormal": _subnormal,
    "huge": lambda dtype: normal(8, 16, dtype=dtype, name="huge").sign() * torch.finfo(dtype).max,
    "spread": _spread,
}

NAMES = tuple(_MAKERS)


def sample(
    name: str, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
) -> torch.Tensor:
    """The sample `name`, one of NAMES; its strides are kept on every device."""
    x = _MAKERS[name](dtype)
    if torch.device(device).type == "cpu":
        return x
    moved = torch.empty_strided(x.shape, x.stride(), dtype=dtype, device=device)
    if 0 in x.stride():  # an expanded tensor cannot be written
        return x[:1].to(device).expand(x.shape)
    return moved.copy_(x)


def samples(
    dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
) -> Iterator[tuple[str, torch.Tensor]]:
    """All samples with their names."""
    for name in NAMES:
        yield name, sample(name, dtype, device)
