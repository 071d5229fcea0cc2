"""Rotary position embedding against complex numbers, in every form and format."""

import pytest
import torch

import quaver as qv
from quaver.functional import apply_rotary_pos_emb
from quaver.nn import RotaryPositionEmbedding
from tests.samples import normal

FORMS = pytest.mark.parametrize("interleaved", [False, True])


def turned(x: torch.Tensor, positions: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """x [n, h, d] at integer positions [n], as products of complex numbers in float64."""
    half = x.shape[-1] // 2
    angle = positions.double()[:, None] * 10000.0 ** (-torch.arange(half).double() / half)
    factor = torch.polar(torch.ones_like(angle), angle)[:, None]
    pairs = x.unflatten(-1, (half, 2)) if interleaved else x.unflatten(-1, (2, half)).mT
    result = torch.view_as_real(torch.view_as_complex(pairs.double().contiguous()) * factor)
    return (result if interleaved else result.mT).flatten(-2)


def angles(interleaved: bool, length: int = 16, **options) -> torch.Tensor:
    return RotaryPositionEmbedding(8, interleaved=interleaved, **options)(length)


@FORMS
@pytest.mark.parametrize("starts", [None, [3, 0]])
def test_it_multiplies_complex_numbers(interleaved: bool, starts) -> None:
    x = normal(2, 5, 3, 8)
    positions = torch.arange(5) + torch.tensor(starts or [0, 0])[:, None]
    expected = turned(x.flatten(0, 1), positions.flatten(), interleaved).view_as(x)
    options = {"interleaved": interleaved}
    if starts is not None:
        options["start_positions"] = torch.tensor(starts, dtype=torch.int32)
    got = apply_rotary_pos_emb(x, angles(interleaved), **options)
    torch.testing.assert_close(got.double(), expected, rtol=0, atol=3e-6)
    second = apply_rotary_pos_emb(x.transpose(0, 1), angles(interleaved), "sbhd", **options)
    assert torch.equal(second.transpose(0, 1), got)
    packed = torch.cat((x[0, :2], x[1, :4]))
    third = apply_rotary_pos_emb(
        packed, angles(interleaved), "thd", cu_seqlens=torch.tensor([0, 2, 6]), **options
    )
    assert torch.equal(third, torch.cat((got[0, :2], got[1, :4])))


@FORMS
def test_only_a_part_is_turned_and_gradients_are_turned_back(interleaved: bool) -> None:
    rope = RotaryPositionEmbedding(16, 0.5, interleaved=interleaved)
    x = normal(2, 5, 3, 16).requires_grad_()
    y = apply_rotary_pos_emb(x, rope(5), interleaved=interleaved)
    assert torch.equal(y[..., 8:], x[..., 8:])
    assert not torch.equal(y[:, 1:, :, :8], x[:, 1:, :, :8])
    (grad,) = torch.autograd.grad(y, x, y.detach())  # a rotation: its inverse gives x again
    torch.testing.assert_close(grad, x.detach(), rtol=0, atol=3e-6)


def test_low_precision_is_computed_in_float32_and_rounded_once() -> None:
    x = normal(1, 5, 3, 8, dtype=torch.bfloat16)
    y = apply_rotary_pos_emb(x, angles(False))
    assert torch.equal(y, apply_rotary_pos_emb(x.float(), angles(False)).bfloat16())


def test_offset_and_interpolation() -> None:
    assert torch.equal(angles(False)[4:9], RotaryPositionEmbedding(8)(5, offset=4))
    slow = angles(False, 9, seq_len_interpolation_factor=4.0)
    torch.testing.assert_close(slow[8], angles(False)[2])
    other = angles(False, rotary_base=500.0)
    torch.testing.assert_close(other[1, 0, 0, :4], 500.0 ** -(torch.arange(4.0) / 4))


def test_the_frequencies_survive_casts_moves_and_meta(devices) -> None:
    exact = RotaryPositionEmbedding(8)(6)
    moved = RotaryPositionEmbedding(8).to(torch.bfloat16).to(devices[1])
    assert moved(6).device == devices[1]
    assert torch.equal(moved(6).cpu(), exact)
    empty = RotaryPositionEmbedding(8, device="meta")
    assert empty(6).device.type == "meta"
    assert torch.equal(empty.to_empty(device=devices[1])(6).cpu(), exact)
    assert moved.state_dict() == {}


@FORMS
def test_the_device_is_the_tensors(devices, interleaved: bool) -> None:
    x, freqs = normal(2, 5, 3, 8), angles(interleaved)
    expected = apply_rotary_pos_emb(x, freqs, interleaved=interleaved)
    there = devices[1]
    got = apply_rotary_pos_emb(x.to(there), freqs.to(there), interleaved=interleaved)
    assert got.device == there
    if there.type != "cuda":
        assert torch.equal(got.cpu(), expected)
    with pytest.raises(qv.DeviceMismatchError, match=f"t is on {there} and freqs is on"):
        apply_rotary_pos_emb(x.to(there), freqs.to(devices[0]))


def test_tokens_of_no_sequence_are_harmless() -> None:
    packed = normal(5, 3, 8)
    got = apply_rotary_pos_emb(packed, angles(False, 2), "thd", cu_seqlens=torch.tensor([0, 2, 4]))
    assert got.isfinite().all()
    assert torch.equal(got[4], packed[4])


@pytest.mark.parametrize(
    ("shape", "freqs", "options", "message"),
    [
        ((2, 5, 3, 8), (4, 1, 1, 8), {}, "cover the 5 positions"),
        ((2, 5, 3, 8), (9, 1, 1, 10), {}, "at most 8"),
        ((2, 5, 3, 8), (9, 1, 8), {}, r"\[positions, 1, 1, r\]"),
        ((5, 3, 8), (9, 1, 1, 8), {}, "4 dimensions for bshd"),
        ((5, 3, 8), (9, 1, 1, 8), {"tensor_format": "thd"}, "needs cu_seqlens"),
        ((2, 5, 3, 8), (9, 1, 1, 8), {"tensor_format": "bhsd"}, "one of bshd, sbhd, thd"),
        ((2, 5, 3, 8), (9, 1, 1, 8), {"cu_seqlens": torch.tensor([0, 5])}, "belongs to"),
        ((2, 5, 3, 8), (9, 1, 1, 8), {"start_positions": torch.tensor([1])}, "2 sequences"),
    ],
)
def test_what_does_not_fit_is_said(shape, freqs, options, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        apply_rotary_pos_emb(torch.zeros(shape), torch.zeros(freqs), **options)
    with pytest.raises(ValueError, match="even number of features"):
        RotaryPositionEmbedding(10, 0.5)
