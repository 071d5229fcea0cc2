"""LayerNormMLP: a norm and two linear layers with an activation between them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch

from quaver.errors import QuaverError
from quaver.functional import dequantized, plain_linear
from quaver.functional.activation import activation as activate
from quaver.functional.norm_mlp import Activation, Layer, norm_mlp
from quaver.kernels import is_gated
from quaver.kernels.activation.names import DEFAULT_ALPHA, DEFAULT_LIMIT
from quaver.nn.init import InitMethod
from quaver.nn.prenorm import NormedInput
from quaver.nn.weights import input_slot
from quaver.nn.wgrad import WgradOptions
from quaver.recipe import Recipe


class LayerNormMLP(NormedInput):
    """y = f(norm(x) W1^T + b1) W2^T + b2, in FP8 where a recipe is in force.

    DelayedScaling quantizes the outputs of the norm and of the activation from float32; the other
    recipes, and high precision, round them to the activations' dtype first.

    Args:
        hidden_size: of x and y.
        ffn_hidden_size: of what the activation gives.
        bias: whether the linear layers have one.
        normalization: "LayerNorm" or "RMSNorm".
        activation: gelu (its tanh form), qgelu, relu, srelu or silu; gated, with twice
            ffn_hidden_size rows in W1, the gate's first: geglu, glu, qgeglu, reglu, sreglu, swiglu
            or clamped_swiglu.
        activation_params: limit and alpha of clamped_swiglu; None: 7.0 and 1.702.
        eps, zero_centered_gamma, return_layernorm_output: as in `LayerNormLinear`.
        return_bias: leave the second bias out of y, and return it, too.
        device, dtype: of the parameters.
        recipe: in force where no `autocast` names one; None: high precision outside of `autocast`.
        init_method: fills W1 in place, and its bias begins with zeros; None: as torch.nn.Linear.
        output_layer_init_method: the same for W2.
        wgrad: where the weights' gradients go and when; None: to autograd, at once.

    Parameters: `layer_norm_weight`, `layer_norm_bias` (None for RMSNorm), `fc1_weight`, `fc1_bias`,
    `fc2_weight`, `fc2_bias`. Under `quantized_model_init` the two weights are quantized tensors.

    Raises:
        QuaverError: another normalization or activation, or parameters that it does not have.
        RecipeError: not a recipe, or `wgrad.save_original_input`.
    """

    weight_names: Sequence[str] = ("fc1_weight", "fc2_weight")
    linear_names: ClassVar[tuple[tuple[str, str], ...]] = (
        ("fc1_weight", "fc1_bias"),
        ("fc2_weight", "fc2_bias"),
    )
    num_gemms = 2

    fc1_weight: torch.Tensor
    fc1_bias: torch.Tensor | None
    fc2_weight: torch.Tensor
    fc2_bias: torch.Tensor | None

    def __init__(  # noqa: PLR0913 - TE's options, by their keywords
        self,
        hidden_size: int,
        ffn_hidden_size: int,
        *,
        bias: bool = True,
        normalization: str = "LayerNorm",
        activation: str = "gelu",
        activation_params: Mapping[str, float] | None = None,
        eps: float = 1e-5,
        zero_centered_gamma: bool = False,
        return_layernorm_output: bool = False,
        return_bias: bool = False,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
        recipe: Recipe | None = None,
        init_method: InitMethod | None = None,
        output_layer_init_method: InitMethod | None = None,
        wgrad: WgradOptions | None = None,
    ) -> None:
        super().__init__()
        self._init_quantized(recipe)
        self._init_wgrad(wgrad)
        self._note_init()
        self.hidden_size = hidden_size
        self.ffn_hidden_size = ffn_hidden_size
        self.activation = activation
        self.activation_params = _checked(activation, activation_params)
        self.return_layernorm_output = return_layernorm_output
        self.return_bias = return_bias
        self.init_method = init_method
        self.output_layer_init_method = output_layer_init_method
        factory = {"device": device, "dtype": dtype}
        rows = ffn_hidden_size * (2 if is_gated(activation) else 1)
        self._make_norm(hidden_size, normalization, eps, zero_centered_gamma, factory)
        self._make_linear(0, (rows, hidden_size), bias, factory)
        self._make_linear(1, (hidden_size, ffn_hidden_size), bias, factory)
        self.reset_parameters()
        if recipe is not None and self.fc1_weight.device.type != "meta":
            self._refresh_states(recipe, self.fc1_weight.device)

    def reset_parameters(self) -> None:
        """Draw the parameters anew; quantized weights stay quantized."""
        with self._drawing():
            self._reset_norm()
            self._reset_linear(0, self.init_method)
            self._reset_linear(1, self.output_layer_init_method)

    def forward(self, x: torch.Tensor, is_first_microbatch: bool | None = None) -> Any:
        """y = f(norm(x) W1^T + b1) W2^T + b2.

        Args:
            x: [..., hidden_size], on the device of the parameters.
            is_first_microbatch: None quantizes the weights anew, True does and keeps them, False
                takes what was kept.

        Returns:
            y [..., hidden_size] in x's dtype or that of `torch.autocast`; with `return_bias` or
            `return_layernorm_output` a tuple of y, then the second bias (None without one), then
            the norm's output [..., hidden_size].

        Raises:
            DeviceMismatchError: x and a parameter lie on two devices; nothing ran.
        """
        x = self.prepare_forward(x)
        try:
            call = self.current_call()
            bias = None if self.return_bias else self.fc2_bias
            if call.quantized:
                plans = [self.weight_plan(call, is_first_microbatch, gemm) for gemm in range(2)]
                first = Layer(self.fc1_weight, self.fc1_bias, plans[0])
                second = Layer(self.fc2_weight, bias, plans[1])
                wanted = self.return_layernorm_output
                y, normed = norm_mlp(x, self._norm(), first, second, self._activation(), wanted)
                return self._returned(y, self.fc2_bias, normed)
            normed = self._normed(x)
            y = self._high_precision(normed, bias, call.recipe is not None, is_first_microbatch)
            return self._returned(y, self.fc2_bias, normed)
        finally:
            self.end_forward()

    def _activation(self) -> Activation:
        return Activation(self.activation, *self.activation_params)

    def _high_precision(
        self,
        normed: torch.Tensor,
        bias: torch.Tensor | None,
        calibrates: bool,
        is_first_microbatch: bool | None,
    ) -> torch.Tensor:
        takers = [self._taker(is_first_microbatch, gemm) for gemm in range(2)]
        hidden = plain_linear(normed, dequantized(self.fc1_weight), self.fc1_bias, takers[0])
        activated = activate(hidden, *self._activation())
        if calibrates:
            self._observe_weights()
            state = self.recipe_states["forward"]
            for gemm, value in enumerate((normed, activated)):
                state.observe(value.detach(), input_slot(gemm))
        return plain_linear(activated, dequantized(self.fc2_weight), bias, takers[1])

    def extra_repr(self) -> str:
        """What repr() shows in the parentheses."""
        sizes = f"hidden_size={self.hidden_size}, ffn_hidden_size={self.ffn_hidden_size}"
        return f"{sizes}, activation={self.activation}, {self._shown()}"


def _checked(name: str, params: Mapping[str, float] | None) -> tuple[float, float]:
    """limit and alpha.

    Raises:
        QuaverError: the activation has no such parameters.
    """
    given = dict(params or {})
    limit, alpha = given.pop("limit", DEFAULT_LIMIT), given.pop("alpha", DEFAULT_ALPHA)
    if given or (params and name != "clamped_swiglu"):
        raise QuaverError(
            "activation_params must be limit and alpha of clamped_swiglu, or None, "
            f"not {params!r} of {name}"
        )
    return limit, alpha
