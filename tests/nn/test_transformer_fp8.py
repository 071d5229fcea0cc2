"""TransformerLayer and MultiheadAttention in FP8 equal what quantizers and plain sums make."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import quaver as qv
from quaver.functional import activation
from quaver.kernels import operand_values
from quaver.quantizers import Quantizer
from quaver.recipe import Float8BlockScaling, Float8CurrentScaling, MXFP8BlockScaling, Recipe
from tests.integration.helpers import assert_same
from tests.nn.fused import product

HIDDEN, FFN, HEADS = 32, 48, 4
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2

Make = Callable[[str], Quantizer]


def current(tensor: str) -> Quantizer:
    return qv.Float8CurrentScalingQuantizer(E5M2 if tensor == "grad_output" else E4M3)


def block(tensor: str) -> Quantizer:
    return qv.Float8BlockQuantizer(E4M3, block_scaling_dim=1 + (tensor == "weight"))


def mx(tensor: str) -> Quantizer:
    return qv.MXFP8Quantizer(E4M3)


CASES: dict[str, tuple[Recipe, Make]] = {
    "current": (Float8CurrentScaling(), current),
    "block": (Float8BlockScaling(), block),
    "mxfp8": (MXFP8BlockScaling(), mx),
}
every_case = pytest.mark.parametrize("name", CASES)


class Linear(torch.autograd.Function):
    """A linear of quantized operands, each cast along rows and along columns."""

    @staticmethod
    def forward(ctx: Any, x, weight, bias, make: Make):
        ctx.shape, ctx.make = x.shape, make
        xs, ws = operands(make("input"), x.flatten(0, -2)), operands(make("weight"), weight)
        ctx.save_for_backward(xs[1], ws[1])
        return (product(xs[0], ws[0]) + bias).unflatten(0, x.shape[:-1])

    @staticmethod
    def backward(ctx: Any, grad):
        x, weight = ctx.saved_tensors
        rows = grad.flatten(0, -2)
        gs = operands(ctx.make("grad_output"), rows)
        return product(gs[0], weight).reshape(ctx.shape), product(gs[1], x), rows.sum(0), None


def operands(quantizer: Quantizer, x: torch.Tensor) -> list[torch.Tensor]:
    pair = quantizer.quantize(x.contiguous(), True, True)
    return [operand_values(o.data, o.scale_inv, o.layout, o.global_scale_inv) for o in pair]


class Norm(torch.autograd.Function):
    """LayerNorm with the formula of its gradient, whose rounding autograd's would not have."""

    @staticmethod
    def forward(ctx: Any, x, gain, bias, eps: float):
        centered = x - x.mean(-1, keepdim=True)
        rstd = torch.rsqrt(centered.square().mean(-1, keepdim=True) + eps)
        ctx.save_for_backward(centered * rstd, rstd, gain)
        return centered * rstd * gain + bias

    @staticmethod
    def backward(ctx: Any, grad):
        n, rstd, gain = ctx.saved_tensors
        g = grad * gain
        dx = g - n * (g * n).mean(-1, keepdim=True) - g.mean(-1, keepdim=True)
        rows = grad.flatten(0, -2)
        return dx * rstd, (rows * n.flatten(0, -2)).sum(0), rows.sum(0), None


def normed(part: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return Norm.apply(x, part.layer_norm_weight, part.layer_norm_bias, part.eps)


def attend(part: nn.Module, x: torch.Tensor, make: Make) -> torch.Tensor:
    """Self attention with the projection that norms, or the one that does not."""
    first = part.layernorm_qkv if part.input_layernorm else part.qkv
    n = normed(first, x) if part.input_layernorm else x
    qkv = Linear.apply(n, first.weight, first.bias, make)
    q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in qkv.chunk(3, -1))
    out = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    return Linear.apply(out.transpose(1, 2).flatten(2), part.proj.weight, part.proj.bias, make)


def whole(layer: nn.Module, x: torch.Tensor, make: Make) -> torch.Tensor:
    h = x + attend(layer.self_attention, x, make)
    mlp = layer.layernorm_mlp
    hidden = Linear.apply(normed(mlp, h), mlp.fc1_weight, mlp.fc1_bias, make)
    return h + Linear.apply(activation(hidden, mlp.activation), mlp.fc2_weight, mlp.fc2_bias, make)


def step(module: nn.Module, run: Callable[[torch.Tensor], torch.Tensor], x, grad):
    module.zero_grad()
    x = x.clone().requires_grad_()
    y = run(x)
    y.backward(grad)
    grads = {name: p.grad.clone() for name, p in module.named_parameters()}
    return {"y": y.detach(), "dx": x.grad} | grads


def compare(module: nn.Module, emulated, name: str) -> None:
    recipe, make = CASES[name]
    with torch.no_grad():
        for key, parameter in module.named_parameters():
            if parameter.dim() == 1:  # so that gains and biases matter
                parameter.normal_(float("norm_weight" in key), 0.3)
    for index in range(2):
        x, grad = torch.randn(2, 6, HIDDEN) * 3.0**index, torch.randn(2, 6, HIDDEN)
        with qv.autocast(recipe=recipe):
            found = step(module, module, x, grad)
        assert_same(found, step(module, lambda x: emulated(module, x, make), x, grad))


@every_case
@pytest.mark.parametrize("input_layernorm", [False, True])
def test_attention_equals_an_emulation_bit_for_bit(name: str, input_layernorm: bool) -> None:
    compare(qv.MultiheadAttention(HIDDEN, HEADS, input_layernorm=input_layernorm), attend, name)


@every_case
@pytest.mark.parametrize("function", ["gelu", "swiglu"])
def test_a_layer_equals_an_emulation_bit_for_bit(name: str, function: str) -> None:
    still = {"hidden_dropout": 0.0, "attention_dropout": 0.0}
    layer = qv.TransformerLayer(HIDDEN, FFN, HEADS, activation=function, **still)
    compare(layer, whole, name)
