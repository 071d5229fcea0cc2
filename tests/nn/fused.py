"""LayerNormLinear and LayerNormMLP to test with, their plain twins, and an emulation in FP8."""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 - as everybody calls it

import quaver as qv
from quaver.kernels import activation as activated
from quaver.kernels import activation_backward, is_gated, operand_values
from quaver.quantizers import Float8CurrentScalingQuantizer, IdentityQuantizer, quantizer_of
from quaver.recipe import DelayedScaling, Recipe
from tests.samples import normal

IN, OUT, HIDDEN = 30, 12, 20


def _linear(**options: Any) -> qv.LayerNormLinear:
    return qv.LayerNormLinear(IN, OUT, **options)


def _mlp(**options: Any) -> qv.LayerNormMLP:
    return qv.LayerNormMLP(IN, HIDDEN, **options)


MODULES: dict[str, Callable[..., nn.Module]] = {
    "linear": _linear,
    "linear_rms": lambda **options: _linear(normalization="RMSNorm", **options),
    "mlp_gelu": _mlp,
    "mlp_swiglu": lambda **options: _mlp(
        normalization="RMSNorm", activation="swiglu", zero_centered_gamma=True, **options
    ),
}
ONE_OF_EACH = ("linear", "mlp_swiglu")


def make(name: str, **options: Any) -> nn.Module:
    """The module with parameters that are the same everywhere, a name, and a gain that is no 1."""
    module = MODULES[name](**options)
    module.qualified_name = name
    with torch.no_grad():
        for key, parameter in module.named_parameters():
            value = normal(*parameter.shape, name=key) * 0.2
            parameter.copy_(value + (key == "layer_norm_weight" and "swiglu" not in name))
    return module


def twin(module: Any, x: torch.Tensor) -> torch.Tensor:
    """What the module computes in high precision, from torch's functions."""
    gain = module.layer_norm_weight
    if module.zero_centered_gamma:
        gain = 1 + gain
    if module.normalization == "RMSNorm":
        n = F.rms_norm(x, (IN,), gain, module.eps)
    else:
        n = F.layer_norm(x, (IN,), gain, module.layer_norm_bias, module.eps)
    if isinstance(module, qv.LayerNormLinear):
        return F.linear(n, module.weight, module.bias)
    hidden = F.linear(n, module.fc1_weight, module.fc1_bias)
    if module.activation == "gelu":
        hidden = F.gelu(hidden, approximate="tanh")
    else:
        gate, value = hidden.chunk(2, -1)
        hidden = F.silu(gate) * value
    return F.linear(hidden, module.fc2_weight, module.fc2_bias)


def step(run: Callable[[torch.Tensor], Any], module: nn.Module, x, grad=None) -> dict[str, Any]:
    """Output and gradients of a training step; the parameters' gradients are taken away."""
    x = x.detach().clone().requires_grad_()
    y = run(x)
    if grad is None:
        grad = normal(*y.shape, dtype=y.dtype, device=y.device, name="grad")
    y.backward(grad)
    grads = {name: p.grad.clone() for name, p in module.named_parameters()}
    module.zero_grad()
    return {"y": y.detach(), "dx": x.grad} | grads


def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a @ b^T; zeros that FP4 fills an odd width up with are left out."""
    width = min(a.shape[1], b.shape[1])
    return a[:, :width] @ b[:, :width].t()


class Emulation:
    """One training step of a module, from its recipe's quantizers and plain products.

    A state of DelayedScaling must be new: then each scale is that of the tensor's own amax.
    """

    def __init__(self, module: Any, recipe: Recipe) -> None:
        self.module, self.recipe = module, recipe
        self.delayed = isinstance(recipe, DelayedScaling)
        self.override = recipe.backward_override
        self.states = copy.deepcopy(module.recipe_states)
        self.draws = [self.states["backward"].draw() for _ in range(2)]

    def operands(self, x: torch.Tensor, mode: str, slot: int, draw=None) -> list[torch.Tensor]:
        """The values of x's row-wise operand and of its column-wise one."""
        role = self.states[mode].role(slot)
        if self.delayed:
            quantizer = Float8CurrentScalingQuantizer(self.recipe.fp8_format.dtype(mode))
        else:
            quantizer = quantizer_of(self.recipe, role)
        if quantizer is None or isinstance(quantizer, IdentityQuantizer):
            return [x.float(), x.t().float()]
        pair = quantizer.quantize(x, True, not self.delayed, draw=draw)
        if self.delayed:  # the module's column-wise operand is a view, which sums in its own order
            value = operand_values(*pair.rowwise[:3])
            return [value, value.t()]
        return [operand_values(o.data, o.scale_inv, o.layout, o.global_scale_inv) for o in pair]

    def linear(self, x, weight, bias, gemm: int):
        """The output, and the backward as a function of dy and of dy's quantized operands."""
        xs = self.operands(x, "forward", 3 * gemm)
        ws = self.operands(weight, "forward", 3 * gemm + 1)
        dtype = self.dtype
        y = product(xs[0], ws[0])
        y = (y if bias is None else y.add_(bias)).to(dtype)

        def backward(dy):
            if self.override is None:
                gs = self.operands(dy, "backward", 2 * gemm, self.draws[gemm])
                of_x, of_w = xs[1], ws[1]
            else:
                gs = [dy.float(), dy.float().t()]
                plain = self.override == "high_precision"
                of_x = (x if plain else xs[0]).float().t()
                of_w = (weight if plain else ws[0]).float().t()
            dx = product(gs[0], of_w).to(dtype)
            dw = product(gs[1], of_x).to(weight.dtype)
            return dx, dw, None if bias is None else dy.float().sum(0).to(bias.dtype)

        return y, backward

    def norm(self, x):
        """The norm's output in float32, and its backward."""
        m = self.module
        rms = m.normalization == "RMSNorm"
        gain = m.layer_norm_weight.detach().float()
        if m.zero_centered_gamma:
            gain = gain + 1
        wide = x.float()
        centered = wide if rms else wide - wide.mean(1)[:, None]
        rstd = torch.rsqrt(centered.square().mean(1) + m.eps)
        n = centered * rstd[:, None]
        y = n * gain if rms else n * gain + m.layer_norm_bias.detach().float()

        def backward(dy):
            dy = dy.float()
            g = dy * gain
            dx = g - n * (g * n).mean(1, keepdim=True)
            if not rms:
                dx = dx - g.mean(1, keepdim=True)
            found = {"dx": (dx * rstd[:, None]).to(x.dtype)}
            found["layer_norm_weight"] = (dy * n).sum(0).to(m.layer_norm_weight.dtype)
            if not rms:
                found["layer_norm_bias"] = dy.sum(0).to(m.layer_norm_bias.dtype)
            return found

        return y, backward

    def step(self, x: torch.Tensor, grad: torch.Tensor) -> dict[str, torch.Tensor]:
        """Output and gradients."""
        m = self.module
        self.dtype = grad.dtype
        p = {name: parameter.detach() for name, parameter in m.named_parameters()}
        y, norm_backward = self.norm(x)
        n = y if self.delayed else y.to(self.dtype)
        if isinstance(m, qv.LayerNormLinear):
            y, backward = self.linear(n, p["weight"], p.get("bias"), 0)
            dn, dw, db = backward(grad)
            return {"y": y, **norm_backward(dn), "weight": dw, "bias": db}
        h, backward1 = self.linear(n, p["fc1_weight"], p["fc1_bias"], 0)
        a = activated(h, m.activation, torch.float32 if self.delayed else self.dtype)
        y, backward2 = self.linear(a, p["fc2_weight"], p["fc2_bias"], 1)
        da, dw2, db2 = backward2(grad)
        if self.delayed and not is_gated(m.activation):  # the slope in float32, not rounded
            dh = activation_backward(da, h.float(), m.activation)
        else:
            dh = activation_backward(da, h, m.activation)
        dn, dw1, db1 = backward1(dh)
        first = {"fc1_weight": dw1, "fc1_bias": db1}
        return {"y": y, **norm_backward(dn), **first, "fc2_weight": dw2, "fc2_bias": db2}
