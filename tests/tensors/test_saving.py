"""Pickles and files of Float8Tensors."""

import io
import pickle

import pytest
import torch
from torch import nn

import quaver as qv
from tests.tensors.make import float8, parameter, same_payload


def saved_and_loaded(value, **options):
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=True, **options)


@pytest.mark.parametrize("columnwise", [False, True])
@pytest.mark.parametrize("roundtrip", [saved_and_loaded, lambda v: pickle.loads(pickle.dumps(v))])
def test_a_tensor_comes_back(roundtrip, columnwise: bool) -> None:
    t = float8(2, 3, 8, dtype=torch.bfloat16, columnwise=columnwise)
    back = roundtrip(t)
    assert isinstance(back, qv.Float8Tensor)
    assert (back.shape, back.dtype) == (t.shape, torch.bfloat16)
    assert same_payload(back, t)
    assert not isinstance(back, nn.Parameter)


@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("roundtrip", [saved_and_loaded, lambda v: pickle.loads(pickle.dumps(v))])
def test_a_parameter_comes_back_as_one(roundtrip, requires_grad: bool) -> None:
    back = roundtrip(parameter(6, 8, requires_grad=requires_grad))
    assert isinstance(back, nn.Parameter)
    assert isinstance(back, qv.Float8Tensor)
    assert back.requires_grad == requires_grad
    assert same_payload(back, parameter(6, 8))


def test_loading_onto_another_device(devices) -> None:
    t = float8(6, 8, device=devices[0])
    back = saved_and_loaded({"w": t}, map_location=devices[1])["w"]
    assert back.device == devices[1]
    assert back.rowwise_data.device == devices[1]
    assert back.rowwise_scale_inv.device == devices[1]
    assert same_payload(back, t)


def test_a_file_holds_no_quantizer() -> None:
    """It holds scales of a module that is not in the file."""
    assert saved_and_loaded(float8(6, 8)).quantizer is None
