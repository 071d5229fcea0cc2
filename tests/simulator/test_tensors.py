"""Tensors on simulated devices: aliasing, dtypes, random numbers, memory, saving."""

import copy
import io

import pytest
import torch

FLOAT8 = [torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu]


def test_views_share_memory_and_in_place_ops_write_through() -> None:
    x = torch.zeros(3, 4, device="sim:1")
    view = x.t()[1:]
    assert view._base is x
    assert view.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
    view.add_(1)
    assert x.sum().item() == 9
    assert x.mul_(2) is x
    torch.add(x, 1, out=x)
    assert x[0].tolist() == [1, 3, 3, 3]


def test_resize_and_set_change_the_tensor_itself() -> None:
    x = torch.arange(4.0, device="sim:1")
    x.resize_(2, 4)
    assert x.shape == (2, 4)
    assert x[0].tolist() == [0, 1, 2, 3]
    assert torch.sim.device_of_pointer(x.data_ptr()) == x.device
    out = torch.empty(0, device="sim:1")
    torch.mul(x[0], 2, out=out)
    assert out.tolist() == [0, 2, 4, 6]
    other = torch.ones(5, device="sim:1")
    x.set_(other)
    assert x.data_ptr() == other.data_ptr()
    other.untyped_storage().resize_(8)
    assert x.untyped_storage().nbytes() == 8


def test_copies_between_devices_do_not_alias() -> None:
    x = torch.randn(5, device="sim:0")
    y = x.to("sim:1")
    assert y.device == torch.device("sim:1")
    y.zero_()
    assert x.abs().min() > 0
    y.copy_(x)
    assert torch.equal(y.cpu(), x.cpu())
    assert torch.equal(copy.deepcopy(y).cpu(), x.cpu())


def test_conjugate_and_negative_views_resolve() -> None:
    z = torch.tensor([1 + 2j, 3 - 1j], device="sim:1")
    assert z.conj().cpu().tolist() == [1 - 2j, 3 + 1j]
    assert z.conj().resolve_conj().imag.tolist() == [-2, 1]
    negative = z.conj().imag  # a view with the negative bit
    assert negative.is_neg()
    assert negative.to("sim:0").tolist() == [-2, 1]


@pytest.mark.parametrize("dtype", FLOAT8, ids=str)
def test_float8_casts_give_the_cpus_bytes(dtype: torch.dtype) -> None:
    x = torch.randn(64) * 10
    on_sim = x.to("sim:1").to(dtype)
    assert on_sim.dtype == dtype
    assert torch.equal(on_sim.view(torch.uint8).cpu(), x.to(dtype).view(torch.uint8))
    assert torch.equal(on_sim.float().cpu(), x.to(dtype).float())


def test_scaled_matrix_product_equals_the_cpus() -> None:
    a = torch.randn(16, 32).to(torch.float8_e4m3fn)
    b = torch.randn(16, 32).to(torch.float8_e4m3fn).t()
    scales = torch.tensor(0.5), torch.tensor(2.0)
    expected = torch._scaled_mm(a, b, *scales, out_dtype=torch.bfloat16)
    operands = [t.to("sim:1") for t in (a, b, *scales)]
    result = torch._scaled_mm(*operands, out_dtype=torch.bfloat16)
    assert result.device == torch.device("sim:1")
    assert torch.equal(result.cpu(), expected)


def test_convolution_runs_forward_and_backward() -> None:
    conv = torch.nn.Conv2d(2, 3, 3)
    x = torch.randn(1, 2, 5, 5, requires_grad=True)
    conv(x).sum().backward()
    expected = [x.grad, conv.weight.grad, conv.bias.grad]
    on_sim = copy.deepcopy(conv).to("sim:1")
    y = x.detach().to("sim:1").requires_grad_()
    on_sim.zero_grad()
    on_sim(y).sum().backward()
    for got, want in zip([y.grad, on_sim.weight.grad, on_sim.bias.grad], expected, strict=True):
        torch.testing.assert_close(got.cpu(), want)


def test_an_op_for_the_cpu_alone_does_not_run() -> None:
    with torch.library._scoped_library("simulator_test", "DEF") as library:
        library.define("twice(Tensor x) -> Tensor")
        library.impl("twice", lambda x: x * 2, "CPU")
        assert torch.ops.simulator_test.twice(torch.ones(1)).item() == 2
        with pytest.raises(NotImplementedError, match="no kernel"):
            torch.ops.simulator_test.twice(torch.ones(1, device="sim:1"))


# ---- random numbers


def test_random_numbers_are_reproducible_and_each_devices_own() -> None:
    torch.sim.manual_seed_all(7)
    first = torch.rand(4, device="sim:0"), torch.rand(4, device="sim:1")
    assert torch.equal(first[0].cpu(), first[1].cpu())
    torch.manual_seed(7)  # torch's own seeds the devices too
    torch.rand(4, device="sim:0")
    assert torch.equal(torch.rand(4, device="sim:1"), first[1])
    assert not torch.equal(torch.rand(4, device="sim:0").cpu(), first[0].cpu())


def test_the_generators_state_can_be_kept() -> None:
    states = torch.sim.get_rng_state_all()
    with torch.random.fork_rng(devices=[1], device_type="sim"):
        inside = torch.rand(4, device="sim:1")
    assert torch.equal(torch.rand(4, device="sim:1"), inside)
    torch.sim.set_rng_state_all(states)
    assert torch.equal(torch.rand(4, device="sim:1"), inside)
    torch.sim.default_generators[1].set_state(states[1])
    assert torch.equal(torch.rand(4, device="sim:1"), inside)
    torch.sim.set_rng_state(states[1], "sim:1")
    assert torch.equal(torch.rand(4, device="sim:1"), inside)


def test_a_generator_of_its_own() -> None:
    generators = [torch.Generator("sim:1").manual_seed(3) for _ in range(2)]
    a, b = (torch.randn(3, device="sim:1", generator=g) for g in generators)
    assert torch.equal(a, b)
    with pytest.raises(RuntimeError, match="Expected a 'sim' device type for generator"):
        torch.randn(3, device="sim:1", generator=torch.Generator())


# ---- memory


def test_memory_is_counted_by_device() -> None:
    before = [torch.sim.memory_allocated(i) for i in range(2)]
    x = torch.empty(1000, dtype=torch.float32, device="sim:1")
    assert torch.sim.memory_allocated("sim:1") == before[1] + 4000
    torch.sim.reset_peak_memory_stats("sim:1")
    y = x * 2
    del x, y
    assert torch.sim.max_memory_allocated("sim:1") == before[1] + 8000
    torch.sim.reset_peak_memory_stats("sim:1")
    assert torch.sim.max_memory_allocated("sim:1") == before[1]
    assert [torch.sim.memory_allocated(i) for i in range(2)] == before
    free, total = torch.sim.mem_get_info(1)
    assert total - free == before[1]


def test_an_address_tells_its_device() -> None:
    x = torch.empty(4, device="sim:1")
    address = x.data_ptr()
    assert torch.sim.device_of_pointer(address + 15) == torch.device("sim:1")
    assert torch.sim.device_of_pointer(torch.empty(4).data_ptr()) is None


# ---- saving and loading


@pytest.mark.parametrize("where", ["cpu", "sim:0", {"sim:1": "sim:0"}, None], ids=str)
def test_save_and_load(where: str | dict[str, str] | None) -> None:
    saved = {"a": torch.randn(3, device="sim:1"), "b": torch.randn(3).to(torch.float8_e4m3fn)}
    file = io.BytesIO()
    torch.save(saved, file)
    file.seek(0)
    loaded = torch.load(file, map_location=where, weights_only=True)
    expected = {"cpu": "cpu", "sim:0": "sim:0"}.get(str(where), "sim:0" if where else "sim:1")
    assert loaded["a"].device == torch.device(expected)
    assert torch.equal(loaded["a"].cpu(), saved["a"].cpu())
    assert torch.equal(loaded["b"].float().cpu(), saved["b"].float())


def test_a_view_in_inference_mode_is_as_ordinary_as_its_base() -> None:
    base = torch.ones(3, 4, device="sim:1")
    with torch.inference_mode():
        view, copy = base.view(-1), base.clone()
    assert not view.is_inference()
    assert copy.is_inference()
    view.add_(1)
    assert base.sum().item() == 24
