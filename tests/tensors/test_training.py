"""Quantized parameters under torch's own optimizers."""

import pytest
import torch
from torch import nn

from tests.samples import normal
from tests.tensors.formats import QUANTIZERS, is_kind, make, same_parts


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW])
@pytest.mark.parametrize("name", QUANTIZERS)
def test_a_step_is_that_of_the_values_quantized_anew(name: str, optimizer) -> None:
    weight = nn.Parameter(make(name, 30, 70))
    plain = nn.Parameter(weight.dequantize().detach())
    options = {"lr": 0.5, "weight_decay": 0}  # the decay would be an update of its own
    steps, expected = optimizer([weight], **options), optimizer([plain], **options)
    quantizer = QUANTIZERS[name]()
    for _ in range(2):
        for parameter in (weight, plain):
            parameter.grad = None
            (normal(4, 70, name="x") @ parameter.t()).pow(2).sum().backward()
        assert type(weight.grad) is torch.Tensor
        steps.step()
        expected.step()
        fresh = quantizer(plain.detach())
        assert is_kind(weight, fresh)
        assert isinstance(weight, nn.Parameter)
        assert same_parts(weight, fresh)
        with torch.no_grad():
            plain.copy_(fresh.dequantize())
    assert all(
        type(state) is torch.Tensor
        for s in steps.state.values()
        for state in s.values()
        if state is not None
    )
