"""Fp8Padding and Fp8Unpadding."""

import pytest
import torch

import quaver as qv
from quaver.nn import Fp8Padding, Fp8Unpadding
from quaver.recipe import Float8CurrentScaling, MXFP8BlockScaling

SPLITS = [3, 0, 16, 17]


def test_groups_get_rows_of_zeros_and_lose_them_again(devices: list[torch.device]) -> None:
    x = torch.randn(sum(SPLITS), 4, device=devices[1], requires_grad=True)
    padded, sizes = Fp8Padding(4, 16)(x, SPLITS)
    assert sizes == [16, 0, 16, 32]
    assert (padded.shape, padded.device) == ((64, 4), devices[1])
    groups = padded.split(sizes)
    for group, original, size in zip(groups, x.split(SPLITS), SPLITS, strict=True):
        assert torch.equal(group[:size], original)
        assert not group[size:].any()
    back = Fp8Unpadding(4, 16)(padded, SPLITS)
    assert torch.equal(back, x)
    grad = torch.randn_like(back)
    back.backward(grad)
    assert torch.equal(x.grad, grad)


def test_what_is_aligned_is_handed_through() -> None:
    x = torch.randn(48, 4)
    padded, sizes = Fp8Padding(2, 8)(x, [8, 40])
    assert padded is x
    assert sizes == [8, 40]
    assert Fp8Unpadding(2, 8)(x, [8, 40]) is x


@pytest.mark.parametrize(
    ("recipe", "size"), [(None, 16), (Float8CurrentScaling(), 16), (MXFP8BlockScaling(), 32)]
)
def test_the_recipe_in_force_says_the_multiple(recipe, size: int) -> None:
    padding = Fp8Padding(1)
    with qv.autocast(recipe=recipe):
        assert padding(torch.randn(5, 4), [5])[1] == [size]
    assert padding(torch.randn(5, 4), [5])[1] == [16]


def test_mistakes_are_named() -> None:
    with pytest.raises(ValueError, match="m_splits must have 3 sizes, not 2"):
        Fp8Padding(3, 16)(torch.randn(5, 4), [3, 2])
    with pytest.raises(ValueError, match="align_size must be at least 1 or None, not 0"):
        Fp8Unpadding(3, 0)
