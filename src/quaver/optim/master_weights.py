"""An optimizer for quantized weights that small steps do not get lost on.

A step that is smaller than half a step of the format rounds away when a quantized weight is updated
in place. `MasterWeights` steps float32 copies instead, and quantizes them anew each time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from quaver.errors import CheckpointError
from quaver.optim.requantize import requantize
from quaver.tensors import QuantizedTensor

MASTER = "master"
"""The name of a master weight in a parameter's state."""


class MasterWeights(torch.optim.Optimizer):
    """Steps float32 masters of quantized parameters with another optimizer.

        optimizer = qv.optim.MasterWeights(model.parameters(), torch.optim.AdamW, lr=1e-3)
        loss.backward(); optimizer.step(); optimizer.zero_grad()

    A master starts from the value that `quantized_model_init` preserved, if the parameter still is
    that value quantized, else from the dequantized parameter; it lies on the parameter's device.
    After each step the parameters are quantized from their masters, device by device, each with its
    own quantizer: those of a format with one scale a tensor in one pass, the others one by one
    (`quaver.optim.requantize` has the particulars). Parameters that are not quantized are stepped
    themselves. Learning-rate schedulers and `torch.amp.GradScaler` work with it as with the other
    optimizer.

    Whoever writes to a parameter meanwhile (by loading a checkpoint, say) changes its master, too,
    at the next step.

    Args:
        params: parameters or parameter groups, as for any optimizer.
        optimizer: the class of the other optimizer, of those whose `step` needs no closure.
        options: what it is made with.
    """

    def __init__(
        self, params: Iterable[Any], optimizer: Callable[..., torch.optim.Optimizer], **options: Any
    ) -> None:
        self._masters: dict[torch.Tensor, torch.Tensor] = {}
        self._versions: dict[torch.Tensor, int] = {}
        self._inner: torch.optim.Optimizer | None = None
        super().__init__(params, options)
        self._inner = optimizer([self._of_masters(group) for group in self.param_groups], **options)
        self._adopt_options()

    @property
    def inner(self) -> torch.optim.Optimizer:
        """The other optimizer, whose parameters are the masters."""
        if self._inner is None:
            raise RuntimeError("this optimizer is not made yet")
        return self._inner

    def master(self, parameter: torch.Tensor) -> torch.Tensor:
        """The float32 master of a quantized parameter.

        Raises:
            KeyError: it is none, or not among the optimizer's parameters.
        """
        return self._masters[parameter]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, as for any optimizer."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        for parameter in group["params"]:
            weight = _local(parameter)
            if self._needs_master(weight):
                self._masters[parameter] = _first_master(weight)
                self._versions[parameter] = weight._version
        if self._inner is not None:
            self._inner.add_param_group(self._of_masters(group))
            self._adopt_options()

    def _needs_master(self, weight: torch.Tensor) -> bool:
        """Whether a parameter is stepped through a master; a subclass may say so of more."""
        return isinstance(weight, QuantizedTensor)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step of the masters with the parameters' gradients; quantizes the parameters.

        Args:
            closure: computes the loss anew and returns it; called once, before the step.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._hand_on_options()
        for parameter, master in self._masters.items():
            weight: Any = _local(parameter)
            if weight._version != self._versions[parameter] and not _stands_for(weight, master):
                master.copy_(_value(weight))
            grad = parameter.grad
            master.grad = None if grad is None else _local(grad).to(torch.float32)
        self.inner.step()
        self._quantize()
        return loss

    def _quantize(self) -> None:
        stepped = [pair for pair in self._masters.items() if pair[1].grad is not None]
        requantize([(_local(parameter), master) for parameter, master in stepped])
        for _, master in stepped:
            master.grad = None
        self._note_versions()

    def _note_versions(self) -> None:
        self._versions = {parameter: _local(parameter)._version for parameter in self._masters}

    # ---- options and state

    def _of_masters(self, group: dict[str, Any]) -> dict[str, Any]:
        masters = [self._masters.get(p, p) for p in group["params"]]
        return {**group, "params": masters}

    def _adopt_options(self) -> None:
        for mine, theirs in zip(self.param_groups, self.inner.param_groups, strict=True):
            mine.update(_options(theirs))

    def _hand_on_options(self) -> None:
        for mine, theirs in zip(self.param_groups, self.inner.param_groups, strict=True):
            theirs.update(_options(mine))

    def _numbered(self) -> list[torch.Tensor]:
        return [parameter for group in self.param_groups for parameter in group["params"]]

    def state_dict(self) -> dict[str, Any]:
        """The other optimizer's state, in its form, with each master as "master"."""
        self._hand_on_options()
        state = self.inner.state_dict()
        by_number = dict(state["state"])
        for number, parameter in enumerate(self._numbered()):
            if parameter in self._masters:
                master = self._masters[parameter]
                by_number[number] = {**by_number.get(number, {}), MASTER: master}
        return {**state, "state": by_number}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over what `state_dict` gave; the parameters stay as they are.

        Raises:
            CheckpointError: the state has no master for a quantized parameter.
        """
        by_number = {number: dict(entry) for number, entry in state_dict["state"].items()}
        masters: list[tuple[torch.Tensor, torch.Tensor]] = []
        for number, parameter in enumerate(self._numbered()):
            if parameter in self._masters:
                entry = by_number.get(number, {})
                if MASTER not in entry:
                    raise CheckpointError(
                        f"the state must have a master for the quantized parameter {number}, but "
                        "has none; load what MasterWeights.state_dict() gave"
                    )
                masters.append((self._masters[parameter], entry.pop(MASTER)))
                if not entry:
                    del by_number[number]
        self.inner.load_state_dict({**state_dict, "state": by_number})
        with torch.no_grad():
            for master, loaded in masters:
                master.copy_(loaded)
        self._note_versions()
        self._adopt_options()


def _options(group: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name != "params"}


def _local(tensor: torch.Tensor) -> Any:
    """This rank's piece of a tensor that FSDP2 shards; the tensor itself otherwise."""
    with torch.no_grad():
        local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local


@torch.no_grad()
def _first_master(weight: torch.Tensor) -> torch.Tensor:
    preserved = None
    if isinstance(weight, QuantizedTensor):
        preserved = weight.get_high_precision_init_val()
    if preserved is not None:
        master = preserved.to(weight.device, torch.float32, copy=True)
        if _stands_for(weight, master):
            return master
    return _value(weight)


def _value(weight: torch.Tensor) -> torch.Tensor:
    """What `weight` stands for, in float32."""
    if isinstance(weight, QuantizedTensor):
        return weight.dequantize(torch.float32).detach()
    return weight.detach().float()


def _stands_for(weight: torch.Tensor, master: torch.Tensor) -> bool:
    """Whether `weight` is `master`, quantized or rounded."""
    fresh = weight.detach().clone()
    fresh.copy_(master)
    return torch.equal(fresh, weight)
