"""How much faster a linear layer is predicted to be in FP8: from its shape and measured rates.

A step, forward and backward, takes as long as its slower side: the device, which multiplies and
casts, or the host, which launches. The model is that of a roofline: three products at the measured
rate; in FP8 three casts, which read each tensor once in bf16 and write two payloads of it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass

import torch
from torch import nn

from quaver.conversion.places import weights_of
from quaver.devices import DeviceCache, has_fp8_gemm, on_device, synchronize
from quaver.nn import Linear
from quaver.recipe import Float8CurrentScaling
from quaver.scaling import autocast

_SIDE = 4096
_TINY = 32


@dataclass(frozen=True)
class Speed:
    """What a conversion is told of speed.

    Args:
        tokens: rows of a call's input, for predicted gains.
        skip_slow: leave the layers that would be slower in FP8.
    """

    tokens: int = 4096
    skip_slow: bool = False


DEFAULT_SPEED = Speed()


@dataclass(frozen=True, kw_only=True)
class Rates:
    """What one device was measured to do.

    Attributes:
        high_precision: products in bf16, FLOP/s.
        fp8: products in FP8, FLOP/s, casts left out.
        bandwidth: of a copy, bytes read and written a second.
        high_precision_host, fp8_host: host time of a layer's forward and backward, seconds.
    """

    high_precision: float
    fp8: float
    bandwidth: float
    high_precision_host: float
    fp8_host: float

    def gain(self, tokens: int, in_features: int, out_features: int) -> float:
        """Time of a step in bf16 over that in FP8; above 1, FP8 is faster.

        Args:
            tokens: rows of the input.
        """
        flop = 2.0 * tokens * in_features * out_features
        # Each product reads two and writes one of x, W and y, or of their gradients.
        elements = tokens * in_features + in_features * out_features + tokens * out_features
        multiplied = max(flop / self.high_precision, 2 * elements / self.bandwidth)
        casts = 4 * elements / self.bandwidth  # two bytes read, two payloads of one byte written
        quantized = max(flop / self.fp8, 4 / 3 * elements / self.bandwidth)
        plain_device, device = 3 * multiplied, 3 * quantized + casts
        return max(plain_device, self.high_precision_host) / max(device, self.fp8_host)


def predicted_gain(module: nn.Module, tokens: int) -> float | None:
    """The predicted gain of a layer, the least of its products.

    None where its device has no FP8 product: there FP8 is emulated, and never faster.

    Args:
        module: with a weight of two dimensions.
        tokens: rows of a call's input.
    """
    gains: list[float] = []
    for weight in weights_of(module).values():
        if weight.dim() != 2 or not has_fp8_gemm(weight.device):
            return None
        rates = _rates.get(weight.device)
        gains.append(rates.gain(tokens, int(weight.shape[1]), int(weight.shape[0])))
    return min(gains, default=None)


def slow_reason(module: nn.Module, gain: float | None, tokens: int) -> str:
    """Why a layer that would not be faster is left, in words for the report."""
    if gain is None:
        device = next(iter(weights_of(module).values())).device
        return f"skip_slow: FP8 products are emulated on {device}, and never faster"
    return (
        f"skip_slow: predicted to be {1 / gain:.2f} times slower in FP8 at {tokens} tokens a call"
    )


def measure_rates(device: torch.device) -> Rates:
    """Measure `device`, in some tenths of a second; it becomes current meanwhile."""
    with on_device(device), torch.enable_grad(), torch.inference_mode(False):
        x = torch.randn(_SIDE, _SIDE, device=device, dtype=torch.bfloat16)
        one = torch.ones(1, device=device)
        payload = x.to(torch.float8_e4m3fn)
        columns = payload.t()
        flop = 2.0 * _SIDE**3

        def fp8() -> object:
            return torch._scaled_mm(payload, columns, one, one, None, None, x.dtype, False)

        target = torch.empty_like(x)
        return Rates(
            high_precision=flop / _seconds(lambda: x @ x, device),
            fp8=flop / _seconds(fp8, device),
            bandwidth=2 * x.nbytes / _seconds(lambda: target.copy_(x), device),
            high_precision_host=_host_seconds(nn.Linear, device),
            fp8_host=_host_seconds(Linear, device),
        )


def _seconds(function: Callable[[], object], device: torch.device, calls: int = 20) -> float:
    """Device time of one call: many in a row, whose launches run ahead."""
    for _ in range(3):
        function()
    synchronize(device)
    start = time.perf_counter()
    for _ in range(calls):
        function()
    synchronize(device)
    return (time.perf_counter() - start) / calls


def _host_seconds(layer_class: type[nn.Linear], device: torch.device, calls: int = 50) -> float:
    """Host time of a layer's forward and backward: on a tiny one the device has nothing to do."""
    layer = layer_class(_TINY, _TINY, bias=False, device=device, dtype=torch.bfloat16)
    x = torch.randn(_TINY, _TINY, device=device, dtype=torch.bfloat16, requires_grad=True)

    def step() -> None:
        with autocast(enabled=layer_class is Linear, recipe=Float8CurrentScaling()):
            layer(x).sum().backward()

    for _ in range(10):
        step()
    synchronize(device)
    start = time.perf_counter()
    for _ in range(calls):
        step()
    return (time.perf_counter() - start) / calls


def _measure(device: torch.device, key: Hashable) -> Rates:
    return measure_rates(device)


_rates: DeviceCache[Rates] = DeviceCache(_measure)
