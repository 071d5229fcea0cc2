"""What the kernels must compute, in NumPy and ml_dtypes: it shares no code with the product."""

import ml_dtypes
import numpy as np
import torch

FLOAT32_MAX = np.finfo(np.float32).max
FP8 = {torch.float8_e4m3fn: ml_dtypes.float8_e4m3fn, torch.float8_e5m2: ml_dtypes.float8_e5m2}
LIMIT = {torch.float8_e4m3fn: np.float32(448), torch.float8_e5m2: np.float32(57344)}


def to_float32(x: torch.Tensor) -> np.ndarray:
    """The values of x, whose dtypes all fit into float32 exactly."""
    x = x.detach().cpu()
    if x.dtype == torch.bfloat16:
        bits = x.contiguous().view(torch.int16).numpy().astype(np.uint16).astype(np.uint32) << 16
        return bits.view(np.float32)
    return x.numpy().astype(np.float32)


def payload_bits(data: torch.Tensor) -> np.ndarray:
    """The bytes of an FP8 tensor."""
    return data.detach().cpu().contiguous().view(torch.uint8).numpy()


def cast_bits(x: torch.Tensor, scale: np.float32, dtype: torch.dtype) -> np.ndarray:
    """The bytes of saturate(x * scale)."""
    with np.errstate(all="ignore"):
        scaled = to_float32(x) * np.float32(scale)
        held = np.clip(scaled, -LIMIT[dtype], LIMIT[dtype])  # np.clip keeps NaN
        bits = held.astype(FP8[dtype]).view(np.uint8)
    # A NaN has several spellings; the one that is written is what NVIDIA hardware writes.
    return np.where(np.isnan(scaled), np.uint8(0x7F), bits)


def amax_of(x: torch.Tensor) -> np.float32:
    """max|x|: NaN passed over, inf counted, 0 if nothing is left."""
    magnitudes = np.abs(to_float32(x))
    counted = magnitudes[~np.isnan(magnitudes)]
    return counted.max() if counted.size else np.float32(0)


def divided(numerator: float, values: np.ndarray) -> np.ndarray:
    """numerator / values, rounded once to float32."""
    with np.errstate(all="ignore"):
        return np.float32(numerator) / values.astype(np.float32)


def scale_of(amax: np.ndarray, limit: float) -> np.ndarray:
    """The scale of a tensor's own amax."""
    scale = np.minimum(divided(limit, amax), FLOAT32_MAX)
    return np.where((amax > 0) & np.isfinite(amax), scale, np.float32(1))


def dequantized(data: torch.Tensor, scale_inv: torch.Tensor) -> np.ndarray:
    """data * scale_inv in float32."""
    values = payload_bits(data).view(FP8[data.dtype]).astype(np.float32)
    with np.errstate(all="ignore"):
        return values * scale_inv.cpu().numpy()
