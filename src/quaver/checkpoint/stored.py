"""FP8 weights as checkpoints hold them: payload, scales, and how many values share a scale.

    weight float8_e4m3fn + weight_scale_inv     transformers' finegrained FP8 (DeepSeek-V3)
    weight float8_e4m3fn + weight_scale         fbgemm_fp8, compressed-tensors

In all of them x ≈ weight * scale, whatever the scale's name says. A scale is for the whole tensor
(one value), a row ([M, 1]) or a block ([ceil(M/rows), ceil(K/columns)]); float32, bfloat16 or
E8M0. `activation_scale` and `input_scale` are the same for the layer's input, where it is static.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from quaver.checkpoint.files import Entry, Folder
from quaver.errors import CheckpointError
from quaver.formats import MAX
from quaver.kernels.block_cast.blocks import block_counts, dequantize_blocks
from quaver.kernels.scaled_mm.layouts import BLOCK_1D, BLOCK_2D, MX, TENSOR
from quaver.tensors import (
    Float8BlockwiseTensor,
    Float8Tensor,
    MXFP8Tensor,
    Operand,
    Quantized,
    QuantizedTensor,
)

Block = tuple[int, int]

SCALE_NAMES = ("weight_scale_inv", "weight_scale")
INPUT_NAMES = ("activation_scale", "input_scale")
_DEFAULT_BLOCK = (128, 128)
_SIDE = 128  # of the blocks of Float8BlockwiseTensor
_MX_BLOCK = (1, 32)
_METHODS = ("fp8", "fbgemm_fp8", "compressed-tensors")


class StoredWeight(NamedTuple):
    """An FP8 weight [M, K] of a checkpoint.

    Attributes:
        name: of the payload.
        shape: M, K.
        scale: of the scales, float32 [ceil(M/rows), ceil(K/columns)].
        block: rows and columns that share a scale; None: there is one for the tensor.
        input_scale: the layer's static scale of its input, or None.
    """

    name: str
    shape: tuple[int, int]
    scale: torch.Tensor
    block: Block | None
    input_scale: float | None

    @property
    def layer(self) -> str:
        """The name of the layer."""
        return self.name.removesuffix(".weight")

    def dequantize(self, data: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """What the payload `data`, on the CPU, stands for: [M, K] in `dtype`."""
        return dequantize_blocks(data, self.scale, self.block or self.shape, dtype)

    def tensor(self, data: torch.Tensor, dtype: torch.dtype) -> QuantizedTensor | None:
        """The payload and scales as a quantized tensor of the nominal `dtype`, without loss.

        Scales of rows, and of wide blocks, are repeated for each block of 1×128.

        Returns:
            The tensor; None where no class has such blocks.
        """
        (rows, columns), (height, width) = self.shape, self.block or self.shape
        if self.block == (_SIDE, _SIDE):
            return _wrap(Float8BlockwiseTensor, data, self.scale, BLOCK_2D, dtype)
        if self.block is None:
            return _wrap(Float8Tensor, data, self.scale.reshape(1), TENSOR, dtype)
        if self.block == _MX_BLOCK:
            exponents = self.scale.to(torch.float8_e8m0fnu)
            if torch.equal(exponents.to(torch.float32), self.scale):
                return _wrap(MXFP8Tensor, data, exponents, MX, dtype)
        if width % _SIDE and width < columns:
            return None
        below = self.scale.repeat_interleave(height, 0)[:rows]
        beside = below.repeat_interleave(max(-(-width // _SIDE), 1), 1)[:, : -(-columns // _SIDE)]
        return _wrap(Float8BlockwiseTensor, data, beside.contiguous(), BLOCK_1D, dtype)


def _wrap(
    kind: type[QuantizedTensor],
    data: torch.Tensor,
    scale: torch.Tensor,
    layout: str,
    dtype: torch.dtype,
) -> QuantizedTensor:
    operand = Operand(data, scale, layout)
    wrapped: QuantizedTensor = kind(Quantized(operand, None), shape=data.shape, dtype=dtype)
    return wrapped


def stored_weights(folder: Folder) -> dict[str, StoredWeight]:
    """The FP8 weights of a checkpoint by name, all their scales read and checked.

    Raises:
        CheckpointError: a scale is missing, of the wrong shape, negative, NaN or infinite; or the
            checkpoint is quantized in another way than FP8.
    """
    block = block_of_config(folder.config())
    found = {}
    for name, entry in folder.entries.items():
        if entry.dtype in MAX:
            found[name] = _stored(folder, name, entry, block)
    return found


def companions(folder: Folder) -> set[str]:
    """The names of the scales in a checkpoint, those of weights that are not FP8 too."""
    names = (*SCALE_NAMES, *INPUT_NAMES, "input_scale_ub")  # a bound, of fbgemm
    return {
        name
        for name in folder.entries
        if name.rpartition(".")[2] in names
        and f"{name.rpartition('.')[0]}.weight" in folder.entries
    }


def block_of_config(config: Mapping[str, Any]) -> Block:
    """Rows and columns of a block, as `quantization_config` says; 128×128 where it does not.

    Raises:
        CheckpointError: the checkpoint is quantized in another way than FP8.
    """
    quantization = config.get("quantization_config") or {}
    method = quantization.get("quant_method")
    if quantization and method not in _METHODS:
        raise CheckpointError(
            f"the checkpoint's quant_method must be one of {', '.join(_METHODS)}, or none, not "
            f"{method!r}; load it with what wrote it, and save it in high precision first"
        )
    sizes = [quantization.get("weight_block_size")]
    for group in (quantization.get("config_groups") or {}).values():
        weights = group.get("weights") or {}
        if (weights.get("type"), weights.get("num_bits")) != ("float", 8):
            raise CheckpointError(
                f"the checkpoint's weights are {weights.get('num_bits')}-bit "
                f"{weights.get('type')} by compressed-tensors; only 8-bit float can be read"
            )
        sizes.append(weights.get("block_structure"))
    given = {tuple(size) for size in sizes if size}
    if len(given) > 1:
        raise CheckpointError(f"the checkpoint has blocks of several sizes: {sorted(given)}")
    block = given.pop() if given else _DEFAULT_BLOCK
    if len(block) != 2 or not all(isinstance(n, int) and n > 0 for n in block):
        raise CheckpointError(f"a block must have two sides of at least 1, not {list(block)}")
    return block


def _stored(folder: Folder, name: str, entry: Entry, block: Block) -> StoredWeight:
    layer, _, last = name.rpartition(".")
    if last != "weight" or len(entry.shape) != 2:
        raise CheckpointError(
            f"{name} is FP8 of shape {list(entry.shape)}; only two-dimensional weights of layers, "
            "such as those of nn.Linear, can be read"
        )
    scales = [f"{layer}.{scale}" for scale in SCALE_NAMES if f"{layer}.{scale}" in folder.entries]
    if len(scales) != 1 or f"{layer}.weight_zero_point" in folder.entries:
        raise CheckpointError(
            f"{name} is FP8 and must have one of {layer}.{' and '.join(SCALE_NAMES)}, and no zero "
            f"point; found {len(scales)} scales"
        )
    scale = _values(folder, scales[0])
    rows, columns = entry.shape
    fitting = _fitting(scale, (rows, columns), block)
    if fitting is None:
        expected = list(block_counts(rows, columns, block))
        raise CheckpointError(
            f"{scales[0]} must be of shape {expected} for blocks of {block[0]}×{block[1]}, "
            f"[{rows}, 1] for rows or [1] for the tensor {name} of shape [{rows}, {columns}], not "
            f"{list(scale.shape)}"
        )
    return StoredWeight(name, (rows, columns), *fitting, _input_scale(folder, layer))


def _fitting(
    scale: torch.Tensor, shape: tuple[int, int], block: Block
) -> tuple[torch.Tensor, Block | None] | None:
    """The scales as a matrix, and the block that fits their shape; None: none does."""
    rows, columns = shape
    grid = tuple(scale.shape)
    if grid == block_counts(rows, columns, block):
        return scale, block
    if scale.numel() == 1:
        return scale.reshape(1, 1), None
    return (scale.reshape(rows, 1), (1, columns)) if grid in ((rows, 1), (rows,)) else None


def _values(folder: Folder, name: str) -> torch.Tensor:
    """Scales in float32, checked."""
    stored = folder.read(name)
    if stored.dtype == torch.uint8:  # E8M0 as bytes
        stored = stored.view(torch.float8_e8m0fnu)
    if not stored.dtype.is_floating_point:
        raise CheckpointError(f"{name} must be of a floating-point dtype, not {stored.dtype}")
    values = stored.to(torch.float32)
    if not (torch.isfinite(values) & (values >= 0)).all():
        worst = values[~(torch.isfinite(values) & (values >= 0))].flatten()[0].item()
        raise CheckpointError(f"{name} must hold finite scales of at least 0, but has {worst}")
    return values


def _input_scale(folder: Folder, layer: str) -> float | None:
    for last in INPUT_NAMES:
        name = f"{layer}.{last}"
        if name in folder.entries:
            values = _values(folder, name)
            if values.numel() != 1 or values.item() <= 0:
                raise CheckpointError(f"{name} must be one positive scale, not {values.tolist()}")
            return values.item()
    return None
