"""What the integration tests share: snapshots of a model's state, and training steps."""

from collections.abc import Iterable, Sequence

import torch
from torch import nn

import quaver as qv
from quaver.nn import QuantizedModule
from quaver.recipe import Recipe
from quaver.scaling import RecipeState
from quaver.scaling.delayed import DelayedScalingState
from quaver.testing import Launch

MODES = ("forward", "backward")


def quantized_modules(model: nn.Module) -> dict[str, QuantizedModule]:
    return {n: m for n, m in model.named_modules() if isinstance(m, QuantizedModule)}


def state_tensors(state: RecipeState) -> dict[str, torch.Tensor]:
    if isinstance(state, DelayedScalingState):
        return {"scale": state.scale, "amax_history": state.amax_history}
    # of the recipes without scales in their state, some number their forwards
    return {k: v for k, v in vars(state).items() if isinstance(v, torch.Tensor)}


def scaling(model: nn.Module) -> dict[str, torch.Tensor]:
    """Copies on the CPU of all scales, histories and numbers of forwards of `model`, by name."""
    return {
        f"{name}.{mode}.{what}": tensor.detach().cpu().clone()
        for name, module in quantized_modules(model).items()
        for mode, state in module.recipe_states.items()
        for what, tensor in state_tensors(state).items()
    }


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    """Copies on the CPU of all gradients of `model`, by name; every parameter must have one."""
    found = {}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.device == parameter.device
        found[name] = parameter.grad.cpu().clone()
    return found


def assert_same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> None:
    """The same names and, bit for bit, the same values."""
    assert left.keys() == right.keys()
    assert left
    different = [name for name in left if not equal(left[name], right[name])]
    assert not different, different


def equal(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Bit for bit the same, NaN included, wherever they lie."""
    left, right = left.detach().cpu(), right.detach().cpu()
    if left.dtype != right.dtype or left.shape != right.shape:
        return False
    return torch.equal(left.reshape(-1).view(torch.uint8), right.reshape(-1).view(torch.uint8))


def reference_device(devices: Sequence[torch.device]) -> torch.device:
    """Where products have the bits that they have on `devices`.

    Of simulated ones the CPU; of GPUs, which sum in another order, the first.
    """
    return devices[0] if devices[0].type == "cuda" else torch.device("cpu")


def assert_state_devices(module: nn.Module, device: torch.device) -> None:
    """`module` has both states, and all their tensors are on `device`."""
    assert isinstance(module, QuantizedModule)
    assert set(module.recipe_states) == set(MODES)
    for state in module.recipe_states.values():
        assert state.device == device
        for name, value in vars(state).items():
            if isinstance(value, torch.Tensor):
                assert value.device == device, name


def assert_guarded(log: Sequence[Launch], devices: Iterable[torch.device], least: int = 5) -> None:
    """Every launch had its operands' device current; all `devices` were met, and no others."""
    assert len(log) >= least, log
    assert [launch for launch in log if launch.current != launch.device] == []
    assert {launch.device for launch in log} == set(devices)


def train_step(
    model: nn.Module, x: torch.Tensor, grad: torch.Tensor, recipe: Recipe | None
) -> dict[str, torch.Tensor]:
    """One forward and backward under `autocast`; output, input's gradient and all gradients."""
    model.zero_grad()
    x = x.detach().requires_grad_()
    with qv.autocast(recipe=recipe):
        y = model(x)
    y.backward(grad.to(y.device))
    assert x.grad is not None
    return {"y": y.detach().cpu(), "dx": x.grad.cpu(), **gradients(model)}


def linear_like(source: nn.Linear, device: torch.device | str, **options: object) -> qv.Linear:
    """A quaver.Linear on `device` with the values of `source`."""
    bias = source.bias is not None
    twin = qv.Linear(
        source.in_features, source.out_features, bias, device=device, dtype=source.weight.dtype
    )
    twin.load_state_dict(source.state_dict(), strict=False)
    for name, value in options.items():
        setattr(twin, name, value)
    return twin
