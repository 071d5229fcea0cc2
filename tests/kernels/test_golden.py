"""Casts against what TransformerEngine computed with delayed scaling, bit for bit.

data/quantizers.npz holds the inputs, and for each input, dtype and format the payload, its
scale_inv and its amax, recorded on an H200 with the scale 3.7.
"""

from pathlib import Path

import numpy as np
import pytest
import torch

import quaver as qv

GOLDEN = Path(__file__).parents[1] / "data" / "quantizers.npz"
FORMATS = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


@pytest.fixture(scope="module")
def golden() -> dict[str, np.ndarray]:
    with np.load(GOLDEN) as file:
        return dict(file)


def tensor(array: np.ndarray) -> torch.Tensor:
    """bfloat16 is stored as its bits in uint16."""
    if array.dtype == np.uint16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("source", ["f32", "bf16"])
@pytest.mark.parametrize("kind", ["special", "normal"])
def test_payload_scale_and_amax_are_those_recorded(golden, kind, source, fmt) -> None:
    x = tensor(golden[f"in_{kind}_{source}"])
    amax = torch.zeros(1)
    quantized = qv.Float8Quantizer(torch.tensor([3.7]), amax, FORMATS[fmt])(x)
    tag = f"delayed_{kind}_{source}_{fmt}"
    expected = golden[f"{tag}_data"]
    np.testing.assert_array_equal(quantized.rowwise_data.view(torch.uint8).numpy(), expected)
    np.testing.assert_array_equal(quantized.columnwise_data.view(torch.uint8).numpy(), expected.T)
    np.testing.assert_array_equal(quantized.rowwise_scale_inv.numpy(), golden[f"{tag}_scale_inv"])
    np.testing.assert_array_equal(amax.numpy(), golden[f"{tag}_amax"])
