"""Float8Tensors as the parameters of modules."""

import copy

import pytest
import torch
from torch import nn

import quaver as qv
from tests.samples import normal
from tests.tensors.make import parameter, same_payload


class Holder(nn.Module):
    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight


@pytest.mark.parametrize("requires_grad", [False, True])
def test_parameter_wraps_it(requires_grad: bool) -> None:
    weight = parameter(6, 8, requires_grad=requires_grad)
    assert isinstance(weight, nn.Parameter)
    assert isinstance(weight, qv.Float8Tensor)
    assert weight.requires_grad == requires_grad
    assert weight.is_leaf
    assert list(Holder(weight).parameters()) == [weight] or weight is Holder(weight).weight


def test_another_wrapper_made_by_its_type_shares_the_payload() -> None:
    """As accelerate makes one: type(param)(value, requires_grad=...)."""
    weight = parameter(6, 8)
    for requires_grad in (False, True):
        twin = type(weight)(weight.data, requires_grad=requires_grad)
        assert isinstance(twin, qv.Float8Tensor)
        assert twin.requires_grad == requires_grad
        assert same_payload(twin, weight)
        assert twin.data_ptr() == weight.data_ptr()


def test_another_wrapper_of_a_moved_value_lies_where_the_value_does(devices) -> None:
    weight = parameter(6, 8, device=devices[0])
    twin = type(weight)(weight.to(devices[1]), requires_grad=False)
    assert twin.device == devices[1]
    assert same_payload(twin, weight)


def test_a_plain_value_is_refused_by_its_type_in_one_line() -> None:
    with pytest.raises(ValueError, match="Float8Tensor needs") as caught:
        qv.Float8Tensor(torch.ones(2, 2), requires_grad=False)
    assert "\n" not in str(caught.value)


def test_a_module_moves_with_its_quantized_parameter(devices) -> None:
    module = Holder(parameter(6, 8, device=devices[0]))
    before = module.weight.detach().clone()
    for device in (devices[1], torch.device("cpu"), devices[0]):
        module.to(device)
        weight = module.weight
        assert isinstance(weight, nn.Parameter)
        assert isinstance(weight, qv.Float8Tensor)
        assert weight.device == weight.rowwise_data.device == device
        assert weight.rowwise_scale_inv.device == device
        assert weight.requires_grad
        assert same_payload(weight, before)
    assert torch.accelerator.current_device_index() == 0


def test_a_cast_of_the_module_keeps_the_payload() -> None:
    module = Holder(parameter(6, 8)).bfloat16()
    assert module.weight.dtype == torch.bfloat16
    assert same_payload(module.weight, parameter(6, 8))


def test_meta_and_back_by_to_empty(devices) -> None:
    module = Holder(parameter(6, 8)).to("meta")
    assert module.weight.device.type == "meta"
    assert isinstance(module.weight, qv.Float8Tensor)
    module.to_empty(device=devices[1])
    weight = module.weight
    assert weight.device == weight.rowwise_data.device == devices[1]
    assert weight.rowwise_scale_inv.device == devices[1]
    with torch.no_grad():
        weight.copy_(normal(6, 8))
    expected = parameter(6, 8)
    with torch.no_grad():
        expected.copy_(normal(6, 8))
    assert same_payload(weight, expected)


def test_deepcopy_of_a_module_with_tied_parameters() -> None:
    pair = nn.ModuleList([Holder(parameter(6, 8)), Holder(parameter(6, 8))])
    pair[1].weight = pair[0].weight
    twin = copy.deepcopy(pair)
    assert twin[0].weight is twin[1].weight
    assert isinstance(twin[0].weight, nn.Parameter)
    assert twin[0].weight.data_ptr() != pair[0].weight.data_ptr()
    assert same_payload(twin[0].weight, pair[0].weight)


def test_load_state_dict_copies_into_it() -> None:
    source, target = Holder(parameter(6, 8)), Holder(parameter(6, 8))
    with torch.no_grad():
        target.weight.zero_()
    pointer = target.weight.data_ptr()
    target.load_state_dict(source.state_dict())
    assert same_payload(target.weight, source.weight)
    assert target.weight.data_ptr() == pointer
    target.load_state_dict({"weight": normal(6, 8, name="plain")})
    step = normal(6, 8, name="plain").abs().max() / 448
    error = (target.weight.dequantize() - normal(6, 8, name="plain")).abs().max()
    assert 0 < error < 16 * step


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW])
def test_an_optimizer_step_changes_it_and_keeps_it_quantized(optimizer) -> None:
    module = Holder(parameter(6, 8))
    before = module.weight.detach().clone()
    steps = optimizer(module.parameters(), lr=0.5)
    (normal(4, 8, name="x") @ module.weight.t()).pow(2).sum().backward()
    steps.step()
    assert isinstance(module.weight, qv.Float8Tensor)
    assert not same_payload(module.weight, before)
    assert module.weight.dequantize().isfinite().all()


def test_tools_tell_tied_parameters_by_the_payloads_address() -> None:
    first, second = parameter(6, 8), parameter(6, 8)
    assert first.data_ptr() == first.rowwise_data.data_ptr()
    assert first.data_ptr() != second.data_ptr()
