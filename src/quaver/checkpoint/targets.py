"""The formats that checkpoints are written in: names, scales, and `quantization_config`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch

from quaver.checkpoint.stored import Block
from quaver.errors import RecipeError
from quaver.formats import E4M3, MAX
from quaver.kernels.block_cast.blocks import cast_usages
from quaver.kernels.cast.reference import divide
from quaver.kernels.current_cast.reference import current_scale
from quaver.quantizers import quantizer_of
from quaver.recipe import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    MXFP8BlockScaling,
    Recipe,
    Role,
)

FINEGRAINED = "finegrained-fp8"
FBGEMM = "fbgemm-fp8"
COMPRESSED = "compressed-tensors"
DEQUANTIZED = "dequantized"
FORMATS = (FINEGRAINED, FBGEMM, COMPRESSED, DEQUANTIZED)

ScaleFormat = Literal["float32", "e8m0"]

_ROLE = Role("weight")
_FBGEMM_ACTIVATION_LIMIT = 1200.0  # transformers' default bound of what activations may be


@dataclass(frozen=True)
class Target:
    """What weights become.

    Attributes:
        format: one of FORMATS.
        recipe: quantizes the weights; None: a scale for each row, or none at all.
        scale_format: of the scales of blocks.
    """

    format: str
    recipe: Recipe | None
    scale_format: ScaleFormat

    @staticmethod
    def of(format: str, recipe: Recipe | None, scale_format: ScaleFormat | None) -> Target:
        """The target, its choices checked against each other.

        Raises:
            RecipeError: the format is not known, or cannot hold what the recipe makes.
        """
        if format not in FORMATS:
            raise RecipeError(f"format must be one of {', '.join(FORMATS)}, not {format!r}")
        if format == FINEGRAINED and recipe is None:
            recipe = Float8BlockScaling()
        kinds = _KINDS[format]
        if recipe is not None and not isinstance(recipe, kinds):
            names = " or ".join(kind.__name__ for kind in kinds) or "no recipe at all"
            raise RecipeError(f"the format {format} takes {names}, not {type(recipe).__name__}")
        blocks_of_rows = isinstance(recipe, Float8BlockScaling) and recipe.w_block_scaling_dim == 1
        if format == COMPRESSED and blocks_of_rows:
            raise RecipeError(f"{COMPRESSED} takes blocks of 128×128: w_block_scaling_dim=2")
        is_mx = isinstance(recipe, MXFP8BlockScaling)
        if scale_format not in (None, "float32", "e8m0"):
            raise RecipeError(f'scale_format must be "float32" or "e8m0", not {scale_format!r}')
        if scale_format == "e8m0" and not (format == FINEGRAINED and _powers_of_two(recipe)):
            raise RecipeError(
                f"E8M0 scales are powers of two of blocks: {FINEGRAINED} with Float8BlockScaling("
                "use_f32_scales=False) or MXFP8BlockScaling"
            )
        if scale_format == "float32" and is_mx:
            raise RecipeError("MXFP8BlockScaling has E8M0 scales; leave scale_format away")
        return Target(format, recipe, scale_format or ("e8m0" if is_mx else "float32"))

    @property
    def scale_name(self) -> str:
        """The last part of the scales' name."""
        return "weight_scale_inv" if self.format == FINEGRAINED else "weight_scale"

    @property
    def input_name(self) -> str | None:
        """The last part of the name of static input scales; None: the format has none."""
        return {FINEGRAINED: "activation_scale", COMPRESSED: "input_scale"}.get(self.format)

    def block(self, columns: int) -> Block | None:
        """Rows and columns that share a scale; None: the whole tensor does.

        Args:
            columns: of the weight.
        """
        if isinstance(self.recipe, Float8BlockScaling):
            return (128, 128) if self.recipe.w_block_scaling_dim == 2 else (1, 128)
        if isinstance(self.recipe, MXFP8BlockScaling):
            return (1, 32)
        return (1, columns) if self.recipe is None else None

    def refusal(self, shape: tuple[int, ...]) -> str:
        """Why a weight of `shape` must be left as it is; empty: it can be quantized.

        transformers, where it dequantizes, divides a weight evenly by its number of blocks.
        """
        if 0 in shape:
            return "it is empty"
        block = self.block(shape[1])
        if self.format != FINEGRAINED or block is None:
            return ""
        for size, side in zip(shape, block, strict=True):
            if size > side and size % side:
                return f"{side} does not divide {size}, and transformers would read it wrongly"
        return ""

    def quantize(self, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The payload [M, K] and the float32 scales [ceil(M/rows), ceil(K/columns)] of a weight."""
        fit = weight if weight.dtype.itemsize < 8 else weight.to(torch.float32)
        if self.recipe is None:
            row = cast_usages(
                fit, E4M3, (1, fit.shape[1]), _row_scale, torch.float32, (True, False)
            )
            return row[0], row[1]
        quantizer = quantizer_of(self.recipe, _ROLE)
        operand = None if quantizer is None else quantizer.quantize(fit, True, False).rowwise
        if operand is None or operand.scale_inv is None:
            raise RecipeError(f"{self.recipe!r} quantizes no weights")
        return operand.data, operand.scale_inv.to(torch.float32)

    def written_scale(self, scale: torch.Tensor) -> torch.Tensor:
        """Scales as the format stores them."""
        if self.scale_format == "e8m0":
            return scale.to(torch.float8_e8m0fnu)
        if isinstance(self.recipe, DelayedScaling | Float8CurrentScaling):
            return scale.reshape(() if self.format == FINEGRAINED else (1,)).clone()
        return scale.contiguous()

    def input_scale(self, value: float) -> torch.Tensor:
        """A static input scale as the format stores it."""
        scale = torch.tensor(value, dtype=torch.float32)
        return scale if self.format == FINEGRAINED else scale.reshape(1)

    def holds(self, scale: torch.Tensor) -> bool:
        """Whether `written_scale` keeps the values of `scale`."""
        if self.scale_format == "float32":
            return True
        return torch.equal(scale.to(torch.float8_e8m0fnu).to(torch.float32), scale)

    def quantization_config(self, left: list[str], is_static: bool) -> dict[str, Any] | None:
        """What config.json says of the weights; None: nothing.

        Args:
            left: the layers that are not quantized.
            is_static: whether there are static input scales.
        """
        if self.format == DEQUANTIZED:
            return None
        if self.format == FBGEMM:
            return {
                "quant_method": "fbgemm_fp8",
                "activation_scale_ub": _FBGEMM_ACTIVATION_LIMIT,
                "modules_to_not_convert": left,
            }
        if self.format == COMPRESSED:
            return self._compressed_config(left, is_static)
        block = self.block(0)
        return {
            "quant_method": "fp8",
            "activation_scheme": "static" if is_static else "dynamic",
            "fmt": "e4m3",
            "modules_to_not_convert": left,
            "scale_fmt": "ue8m0" if self.scale_format == "e8m0" else "float",
            "weight_block_size": None if block is None else list(block),
        }

    def _compressed_config(self, left: list[str], is_static: bool) -> dict[str, Any]:
        fp8 = {"num_bits": 8, "type": "float", "symmetric": True}
        weights: dict[str, Any] = fp8 | {"dynamic": False, "strategy": "tensor"}
        inputs: dict[str, Any] = fp8 | {"dynamic": not is_static, "strategy": "tensor"}
        if self.recipe is None:
            weights["strategy"] = "channel"
        elif isinstance(self.recipe, Float8BlockScaling):
            weights |= {"strategy": "block", "block_structure": [128, 128]}
        if not is_static:
            inputs["strategy"] = "token"
            if "block_structure" in weights:
                inputs |= {"strategy": "group", "group_size": 128}
        scheme = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
        return {
            "quant_method": "compressed-tensors",
            "format": "float-quantized",
            "quantization_status": "compressed",
            "config_groups": {"group_0": scheme},
            "ignore": left,
        }


_KINDS: dict[str, tuple[type[Recipe], ...]] = {
    FINEGRAINED: (Float8BlockScaling, MXFP8BlockScaling, Float8CurrentScaling, DelayedScaling),
    FBGEMM: (),
    COMPRESSED: (Float8BlockScaling, Float8CurrentScaling, DelayedScaling),
    DEQUANTIZED: (),
}


def _powers_of_two(recipe: Recipe | None) -> bool:
    if isinstance(recipe, Float8BlockScaling):
        return not recipe.use_f32_scales
    return isinstance(recipe, MXFP8BlockScaling)


def _row_scale(amax: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    scale = current_scale(amax, MAX[E4M3], False, 0.0)
    return scale, divide(1.0, scale)
