"""FP8 and FP4 with a scale for each block of values."""

from __future__ import annotations

from typing import Any

import torch

from quaver.errors import RecipeError
from quaver.kernels import block_cast, hadamard, mx_cast, nvfp4_cast
from quaver.kernels.scaled_mm.layouts import BLOCK_1D, BLOCK_2D, MX, NVFP4, NVFP4_2D
from quaver.quantizers.base import Draw, Quantizer, check_fp8
from quaver.tensors import Float8BlockwiseTensor, MXFP8Tensor, NVFP4Tensor, Quantized
from quaver.tensors.payload import paired


class Float8BlockQuantizer(Quantizer):
    """A float32 scale for each 1×128 or 128×128 values.

    Args:
        dtype: torch.float8_e4m3fn or torch.float8_e5m2.
        rowwise: blocks along the rows, in the tensor's own layout.
        columnwise: blocks along the columns, stored transposed.
        block_scaling_dim: 1 for blocks of 1×128, 2 for 128×128.
        power_2_scale: round the scales down to powers of two.
        amax_epsilon: an amax counts as at least this much.

    Raises:
        RecipeError: a dtype that is not FP8, no usage, or another block_scaling_dim.
    """

    def __init__(
        self,
        dtype: torch.dtype,
        *,
        rowwise: bool = True,
        columnwise: bool = True,
        block_scaling_dim: int = 2,
        power_2_scale: bool = True,
        amax_epsilon: float = 0.0,
    ) -> None:
        super().__init__(rowwise, columnwise)
        check_fp8(dtype)
        if block_scaling_dim not in (1, 2):
            raise RecipeError(f"block_scaling_dim must be 1 or 2, not {block_scaling_dim!r}")
        self.dtype = dtype
        self.block_scaling_dim = block_scaling_dim
        self.power_2_scale = power_2_scale
        self.amax_epsilon = amax_epsilon
        self.transposes_losslessly = block_scaling_dim == 2

    def quantize(
        self,
        x: torch.Tensor,
        rowwise: bool,
        columnwise: bool,
        *,
        draw: Draw = None,
        group: Any = None,
    ) -> Quantized:
        """x [M, K] in blocks along K, and along M."""
        dim = self.block_scaling_dim
        results = block_cast(
            x, self.dtype, dim, self.power_2_scale, self.amax_epsilon, rowwise, columnwise
        )
        return paired(results, BLOCK_1D if dim == 1 else BLOCK_2D)

    def wrap(self, quantized: Quantized, like: torch.Tensor) -> Float8BlockwiseTensor:
        """The operands as a Float8BlockwiseTensor with the shape and nominal dtype of `like`."""
        wrapped: Float8BlockwiseTensor = Float8BlockwiseTensor(
            quantized, shape=like.shape, dtype=like.dtype, quantizer=self
        )
        return wrapped


class MXFP8Quantizer(Quantizer):
    """A power-of-two scale (E8M0) for each 32 values along the rows, and along the columns.

    Args:
        dtype: torch.float8_e4m3fn or torch.float8_e5m2.
        rowwise, columnwise: as in `Float8BlockQuantizer`.

    Raises:
        RecipeError: a dtype that is not FP8, or no usage.
    """

    def __init__(
        self, dtype: torch.dtype, *, rowwise: bool = True, columnwise: bool = True
    ) -> None:
        super().__init__(rowwise, columnwise)
        check_fp8(dtype)
        self.dtype = dtype

    def quantize(
        self,
        x: torch.Tensor,
        rowwise: bool,
        columnwise: bool,
        *,
        draw: Draw = None,
        group: Any = None,
    ) -> Quantized:
        """x [M, K] in blocks along K, and along M."""
        return paired(mx_cast(x, self.dtype, rowwise, columnwise), MX)

    def wrap(self, quantized: Quantized, like: torch.Tensor) -> MXFP8Tensor:
        """The operands as an MXFP8Tensor with the shape and nominal dtype of `like`."""
        wrapped: MXFP8Tensor = MXFP8Tensor(
            quantized, shape=like.shape, dtype=like.dtype, quantizer=self
        )
        return wrapped


class NVFP4Quantizer(Quantizer):
    """4-bit values (E2M1), an E4M3 scale for each 16 of them, a float32 scale a tensor.

    Args:
        rowwise, columnwise: as in `Float8BlockQuantizer`.
        two_dimensional: blocks of 16×16 instead of 1×16.
        hadamard: apply the random Hadamard transform to the column-wise copy, along its rows; a
            product with an operand that was transformed too is that of the originals.
        stochastic_rounding: round at random, without bias.
        seed: of the random bits, 0 to 2^32 - 1; None: 0. Each call draws further bits.

    Raises:
        RecipeError: no usage, or a seed out of range.
    """

    def __init__(
        self,
        *,
        rowwise: bool = True,
        columnwise: bool = True,
        two_dimensional: bool = False,
        hadamard: bool = False,
        stochastic_rounding: bool = False,
        seed: int | None = None,
    ) -> None:
        super().__init__(rowwise, columnwise)
        if seed is not None and not 0 <= seed < 2**32:
            raise RecipeError(f"seed must be from 0 to 2^32 - 1, not {seed!r}")
        self.two_dimensional = two_dimensional
        self.hadamard = hadamard
        self.stochastic_rounding = stochastic_rounding
        self.draws_bits = stochastic_rounding
        self.seed = seed or 0
        self.transposes_losslessly = two_dimensional and not (hadamard or stochastic_rounding)
        self._calls = 0

    def quantize(
        self,
        x: torch.Tensor,
        rowwise: bool,
        columnwise: bool,
        *,
        draw: Draw = None,
        group: Any = None,
    ) -> Quantized:
        """x [M, K] in blocks along K, and along M."""
        if self.stochastic_rounding and draw is None:
            self._calls += 1
            draw = torch.full((1,), self._calls, dtype=torch.int64, device=x.device)
        layout = NVFP4_2D if self.two_dimensional else NVFP4
        if not (self.hadamard and columnwise):
            return paired(self._cast(x, draw, rowwise, columnwise), layout)
        transformed = self._cast(hadamard(x.t()).t(), draw, False, True)
        col = paired(transformed, layout).columnwise
        row = None
        if rowwise:
            row = paired(self._cast(x, draw, True, False), layout).rowwise
        return Quantized(row, col)

    def _cast(
        self, x: torch.Tensor, draw: Draw, rowwise: bool, columnwise: bool
    ) -> tuple[torch.Tensor, ...]:
        options = (self.two_dimensional, self.stochastic_rounding, self.seed, 0)
        results: tuple[torch.Tensor, ...] = nvfp4_cast(x, *options, rowwise, columnwise, draw)
        return results

    def wrap(self, quantized: Quantized, like: torch.Tensor) -> NVFP4Tensor:
        """The operands as an NVFP4Tensor with the shape and nominal dtype of `like`."""
        wrapped: NVFP4Tensor = NVFP4Tensor(
            quantized, shape=like.shape, dtype=like.dtype, quantizer=self
        )
        return wrapped
