"""The recipes whose scales come from the tensor itself: nothing is remembered between steps."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from quaver.recipe.base import (
    BackwardOverride,
    Format,
    Recipe,
    Role,
    attention_checks,
    check_fields,
    format_check,
    is_amount,
    is_int,
    override_check,
)


@dataclass(frozen=True)
class Float8CurrentScaling(Recipe):
    """One scale a tensor, from its own amax: scale = fp8_max / max(amax, amax_epsilon).

    Args:
        fp8_format: HYBRID (E4M3 forward, E5M2 for gradients) or E4M3.
        use_power_2_scales: round scales down to powers of two.
        amax_epsilon: an amax counts as at least this much.
        reduce_amax: MAX-reduce each amax over the amax reduction group before the cast.
        fp8_dpa: quantize inside of DotProductAttention too: its operands, weights and output.
        fp8_mha: with fp8_dpa: hand that output on as it is quantized, so that the projection behind
            it casts it no second time.
        backward_override: compute the backward pass with the operands before quantization
            ("high_precision") or with the forward's quantized ones, dequantized ("dequantized"),
            and the gradient in high precision; None: quantized.

    Raises:
        RecipeError: a field holds what it must not.
    """

    fp8_format: Format = Format.HYBRID
    use_power_2_scales: bool = False
    amax_epsilon: float = 0.0
    reduce_amax: bool = False
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: BackwardOverride = None

    def __post_init__(self) -> None:
        checks = (
            format_check(self.fp8_format),
            ("amax_epsilon", is_amount(self.amax_epsilon), "a number of at least 0"),
            *attention_checks(
                self.fp8_dpa, self.fp8_mha, one_scale=True, override=self.backward_override
            ),
            override_check(self.backward_override),
        )
        check_fields(self, checks)


@dataclass(frozen=True)
class Float8BlockScaling(Recipe):
    """A float32 scale for each 1×128 values (input, gradient) or 128×128 (weight).

    Each operand is quantized twice from high precision: along its rows for the products that sum
    over them, and along its columns for the others (DeepSeek-AI, "DeepSeek-V3 Technical Report",
    2024, section 3.3).

    Args:
        fp8_format: E4M3, or HYBRID.
        use_f32_scales: any float32 scale; by default they are powers of two.
        amax_epsilon: an amax counts as at least this much.
        x_block_scaling_dim, w_block_scaling_dim, grad_block_scaling_dim: 1 for 1×128, 2 for
            128×128; of two operands of a product at most one may have 2.
        fp8_dpa, fp8_mha: refused: FP8 attention needs a scale a tensor.
        backward_override: as in `Float8CurrentScaling`.

    Raises:
        RecipeError: a field holds what it must not.
    """

    fp8_format: Format = Format.E4M3
    use_f32_scales: bool = False
    amax_epsilon: float = 0.0
    x_block_scaling_dim: int = 1
    w_block_scaling_dim: int = 2
    grad_block_scaling_dim: int = 1
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: BackwardOverride = None

    def __post_init__(self) -> None:
        x, w = self.x_block_scaling_dim, self.w_block_scaling_dim
        grad = self.grad_block_scaling_dim
        clash = "1 or 2, and 1 where the other operand of a product has 2"
        checks = (
            format_check(self.fp8_format),
            ("amax_epsilon", is_amount(self.amax_epsilon), "a number of at least 0"),
            ("w_block_scaling_dim", w in (1, 2), "1 or 2"),
            ("x_block_scaling_dim", x in (1, 2) and x + w < 4, clash),
            ("grad_block_scaling_dim", grad in (1, 2) and grad + w < 4 and grad + x < 4, clash),
            *attention_checks(self.fp8_dpa, self.fp8_mha, one_scale=False),
            override_check(self.backward_override),
        )
        check_fields(self, checks)


@dataclass(frozen=True)
class MXFP8BlockScaling(Recipe):
    """A power-of-two (E8M0) scale for each 32 values along the summed dimension.

    Source: OCP Microscaling Formats (MX) Specification 1.0.

    Args:
        fp8_format: E4M3, or HYBRID.
        fp8_dpa, fp8_mha: refused: FP8 attention needs a scale a tensor.
        backward_override: as in `Float8CurrentScaling`.

    Raises:
        RecipeError: a field holds what it must not.
    """

    fp8_format: Format = Format.E4M3
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: BackwardOverride = None

    def __post_init__(self) -> None:
        checks = (
            format_check(self.fp8_format),
            *attention_checks(self.fp8_dpa, self.fp8_mha, one_scale=False),
            override_check(self.backward_override),
        )
        check_fields(self, checks)


@dataclass(frozen=True)
class NVFP4BlockScaling(Recipe):
    """4-bit values, an E4M3 scale for each 16 of them, and a float32 scale a tensor.

    Source: NVIDIA, "Pretraining Large Language Models with NVFP4", 2025.

    Args:
        disable_rht: no random Hadamard transform on the operands of the weight's gradient.
        disable_stochastic_rounding: gradients round to nearest.
        disable_2d_quantization: weights in blocks of 1×16 instead of 16×16.
        seed: of the stochastic rounding; with it, the module's name and the number of the forward,
            the random bits are the same on every device. The name is known of modules that
            `convert` was given; others of one form, such as Linears of one size, draw alike.
        fp8_dpa, fp8_mha: refused: FP8 attention needs a scale a tensor.
        backward_override: as in `Float8CurrentScaling`.

    Raises:
        RecipeError: a field holds what it must not.
    """

    disable_rht: bool = False
    disable_stochastic_rounding: bool = False
    disable_2d_quantization: bool = False
    seed: int = 0
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: BackwardOverride = None

    def __post_init__(self) -> None:
        checks = (
            ("seed", is_int(self.seed) and 0 <= self.seed < 2**32, "an integer from 0 to 2^32 - 1"),
            *attention_checks(self.fp8_dpa, self.fp8_mha, one_scale=False),
            override_check(self.backward_override),
        )
        check_fields(self, checks)


@dataclass(frozen=True)
class CustomRecipe(Recipe):
    """A quantizer for each tensor of each module, chosen by a function of the user's.

    Args:
        qfactory: from a `Role` (which tensor, of which module) to a quantizer such as
            `MXFP8Quantizer`, or None for high precision. Called once for each tensor of a module.
        fp8_dpa, fp8_mha: refused: FP8 attention needs a scale a tensor.
        backward_override: as in `Float8CurrentScaling`.

    Raises:
        RecipeError: a field holds what it must not.
    """

    qfactory: Callable[[Role], Any]
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: BackwardOverride = None

    def __post_init__(self) -> None:
        checks = (
            ("qfactory", callable(self.qfactory), "a function from a Role to a quantizer"),
            *attention_checks(self.fp8_dpa, self.fp8_mha, one_scale=False),
            override_check(self.backward_override),
        )
        check_fields(self, checks)
