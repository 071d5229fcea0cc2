"""What stands in the way of fusing modules whose code is recognized."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import nn

from quaver.conversion.fusion.source import UnrecognizedError
from quaver.conversion.fusion.swap import Source
from quaver.conversion.parents import weight_reads
from quaver.conversion.places import places_of, users_of_parameters
from quaver.conversion.plan import LayerPlan, Plan
from quaver.conversion.report import class_name
from quaver.conversion.swap import has_replaced_forward, is_exact_twin
from quaver.nn.weights import QuantizedWeights

_HOOKS = (
    "_forward_pre_hooks",
    "_forward_hooks",
    "_backward_pre_hooks",
    "_backward_hooks",
    "_state_dict_pre_hooks",
    "_state_dict_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class Obstacles:
    """The checks, with what they know of a model and of the plan for its linear layers.

    Each raises `UnrecognizedError`, with the reason for the report.
    """

    def __init__(self, model: nn.Module, plan: Plan) -> None:
        self.places = places_of(model)
        self._users = users_of_parameters(model)
        self._layers = {layer.module: layer for layer in plan.layers}
        self._skipped = {layer.name: layer.reason for layer in plan.skipped}
        self._bypassed = {layer.name: layer.reason for layer in plan.bypassed}

    def name(self, module: nn.Module) -> str:
        """The qualified name."""
        return self.places[module][0].name

    def check_forward(self, module: nn.Module) -> None:
        """Calls of `module` must run its class's code, which was read."""
        if has_replaced_forward(module):
            raise UnrecognizedError(
                f"the forward of {self.name(module)} is replaced on the instance"
            )

    def check_input(self, module: nn.Module) -> None:
        """`module` is going to get another input, which nobody but itself may see.

        transformers' own hooks look at outputs only.
        """
        self.check_forward(module)
        hooks = [hook for kind in _HOOKS[:4] for hook in module.__dict__[kind].values()]
        if any(getattr(hook, "__module__", "").split(".")[0] != "transformers" for hook in hooks):
            raise UnrecognizedError(f"{self.name(module)} has a hook, which would see its input")
        self._check_accelerate(module)

    def check_unwatched(self, module: nn.Module) -> None:
        """`module` is not going to be called, or with other tensors: nobody may wait for that."""
        self.check_forward(module)
        if any(module.__dict__.get(kind) for kind in _HOOKS):
            name = self.name(module)
            raise UnrecognizedError(f"{name} has a hook, which would see or change other tensors")
        self._check_accelerate(module)

    def check_replaced(self, module: nn.Module) -> None:
        """`module`, which is going to do something else, must be all that it seems to be."""
        name = self.name(module)
        if len(self.places[module]) > 1:
            others = ", ".join(place.name for place in self.places[module][1:])
            raise UnrecognizedError(f"{name} is also {others}")
        self.check_unwatched(module)
        if type(module).__call__ is not nn.Module.__call__:
            raise UnrecognizedError(f"{type(module).__name__} has a __call__ of its own")
        if module.__dict__["_buffers"]:
            raise UnrecognizedError(f"{name} has buffers")

    def check_linears(self, modules: Sequence[nn.Module]) -> LayerPlan:
        """They must be going to be converted, in one way; returns the plan of the first."""
        for module in modules:
            name = self.name(module)
            if isinstance(module, QuantizedWeights):
                raise UnrecognizedError(f"{name} is Quaver's already; convert_back first")
            if module not in self._layers:
                reason = self._skipped.get(name, f"it is a {class_name(type(module))}")
                raise UnrecognizedError(f"{name} is left as it is: {reason}")
            if not is_exact_twin(module):
                raise UnrecognizedError(f"{name} is of a subclass, {type(module).__name__}")
            if name in self._bypassed:
                raise UnrecognizedError(f"{name}: {self._bypassed[name]}")
            self.check_replaced(module)
        first, *others = (self._layers[module] for module in modules)
        for other in others:
            if other.recipe != first.recipe:
                raise UnrecognizedError(
                    f"{first.name} and {other.name} are given different recipes"
                )
        return first

    def check_norm(self, norm: nn.Module) -> None:
        """Its weight must not be read by its parent."""
        self.check_replaced(norm)
        place = self.places[norm][0]
        if place.parent is not None and place.child in weight_reads(place.parent):
            raise UnrecognizedError(
                f"{type(place.parent).__name__} computes with its weight itself"
            )

    def check_parameters(self, sources: Iterable[Sequence[Source]]) -> None:
        """They must lie together with values, untied, and those that are joined be alike."""
        devices: set[torch.device] = set()
        for joined in sources:
            parameters = [self._parameter(source) for source in joined]
            devices.update(parameter.device for parameter in parameters)
            for what, values in (
                ("dtype", {parameter.dtype for parameter in parameters}),
                ("requires_grad", {parameter.requires_grad for parameter in parameters}),
                ("gradients", {parameter.grad is None for parameter in parameters}),
            ):
                if len(values) > 1:
                    names = ", ".join(self.name(source.module) for source in joined)
                    raise UnrecognizedError(f"{names} differ in their {what}")
        if any(device.type == "meta" for device in devices):
            raise UnrecognizedError(
                "parameters are offloaded or not loaded yet (device meta); convert before "
                "dispatch_model, and after loading"
            )
        if len(devices) > 1:
            raise UnrecognizedError(f"parameters lie on {', '.join(sorted(map(str, devices)))}")

    def _parameter(self, source: Source) -> nn.Parameter:
        parameter = source.module._parameters[source.name]
        name = f"{self.name(source.module)}.{source.name}"
        if type(parameter) is not nn.Parameter:
            raise UnrecognizedError(f"{name} is no plain parameter")
        if parameter.dtype not in _DTYPES:
            raise UnrecognizedError(
                f"{name} is {parameter.dtype}; float32 is the widest that is fused"
            )
        for user in self._users[id(parameter)]:
            if user.module is not source.module or user.parameter != source.name:
                raise UnrecognizedError(f"{name} is tied to {user.name}")
        return parameter

    def _check_accelerate(self, module: nn.Module) -> None:
        hook = getattr(module, "_hf_hook", None)
        for each in getattr(hook, "hooks", (hook,)):
            if each is not None and type(each).__name__ != "AlignDevicesHook":
                name = self.name(module)
                raise UnrecognizedError(f"{name} has accelerate's hook {type(each).__name__}")
