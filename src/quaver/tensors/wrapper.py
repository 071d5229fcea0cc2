"""A tensor that is made of other tensors: how it is built, mapped, copied and saved."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, Self

import torch
from torch import nn

from quaver.errors import CheckpointError
from quaver.tensors.frame import Frame, Same
from quaver.tensors.saving import reduced
from quaver.tensors.sharding import Gathered, after_gather, before_gather


class WrapperTensor(torch.Tensor):
    """A wrapper with a shape, a device and a nominal dtype around its parts, plain tensors.

    Attributes:
        part_names: the attributes that hold the parts; None where a tensor has not all of them.
        payload_layout, quantizer, hadamard, matrix, is_payload_view: its `Frame`.
    """

    part_names: ClassVar[tuple[str, ...]]
    payload_layout: str
    quantizer: Any
    hadamard: bool
    matrix: tuple[int, int] | None
    is_payload_view: bool

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def build(
        cls, parts: dict[str, torch.Tensor], frame: Frame, requires_grad: bool = False
    ) -> Self:
        """A tensor of its parts, by name."""
        self: Self = torch.Tensor._make_wrapper_subclass(
            cls,
            frame.shape,
            dtype=frame.dtype,
            device=next(iter(parts.values())).device,
            requires_grad=requires_grad,
        )
        for name in cls.part_names:
            setattr(self, name, parts.get(name))
        self.payload_layout = frame.layout
        self.quantizer = frame.quantizer
        self.hadamard = frame.hadamard
        self.matrix = frame.matrix
        self.is_payload_view = frame.is_view
        return self

    def frame(self) -> Frame:
        """What it is beside its parts."""
        return Frame(
            self.shape,
            self.dtype,
            self.payload_layout,
            self.quantizer,
            self.hadamard,
            self.matrix,
            self.is_payload_view,
        )

    def parts(self) -> dict[str, torch.Tensor]:
        """The tensors that it is made of, by attribute."""
        named = {name: getattr(self, name) for name in self.part_names}
        return {name: part for name, part in named.items() if part is not None}

    def like(
        self, parts: dict[str, torch.Tensor], requires_grad: bool = False, **changes: Any
    ) -> Self:
        """A tensor of other parts, with changes of the frame."""
        return self.build(parts, self.frame()._replace(**changes), requires_grad)

    def mapped(
        self, function: Callable[[torch.Tensor], torch.Tensor], dtype: torch.dtype | None = None
    ) -> Self:
        """A tensor of its own from `function` of each part; nominal dtype `dtype`."""
        parts = {name: function(part) for name, part in self.parts().items()}
        twin = self.like(parts, dtype=dtype or self.dtype, is_view=False)
        quantizer, device = self.quantizer, twin.device
        if quantizer is not None and device != self.device and device.type != "meta":
            twin.quantizer = quantizer.to(device)
        return twin

    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: torch.Size, outer_stride: Any, module: Any, mp_policy: Any
    ) -> Gathered:
        """FSDP2's hook: what is gathered of a shard."""
        return before_gather(self, mesh, outer_size)

    def fsdp_post_all_gather(
        self,
        all_gather_outputs: tuple[torch.Tensor, ...],
        metadata: Any,
        param_dtype: torch.dtype,
        *,
        out: torch.Tensor | None = None,
    ) -> Any:
        """FSDP2's hook: the whole tensor from what was gathered."""
        return after_gather(all_gather_outputs, metadata, param_dtype, out)

    def data_ptr(self) -> int:
        """The payload's address: a wrapper has none, and tools tell tied tensors by it."""
        return next(iter(self.parts().values())).data_ptr()

    def share_memory_(self) -> Self:
        """Move the parts to shared memory, in place."""
        for part in self.parts().values():
            part.share_memory_()
        return self

    def is_shared(self) -> bool:
        """Whether the parts are in shared memory."""
        return all(part.is_shared() for part in self.parts().values())

    def numpy(self, *, force: bool = False) -> Any:
        """Refused: NumPy has no such values, and offloading to disk goes through here.

        Raises:
            NotImplementedError: says what to do.
        """
        raise NotImplementedError(
            f"a {type(self).__name__} has no NumPy form; call it on `.dequantize()`, and offload a "
            "model with quantized weights to the CPU, not to disk"
        )

    def storage(self) -> Any:
        """Refused: there is none, and safetensors asks for it before it would write anything.

        Raises:
            CheckpointError: says what to do.
        """
        raise CheckpointError(
            f"safetensors cannot write a {type(self).__name__} as it is; use save_model of "
            "quaver.checkpoint, or save_pretrained of a model that QuaverConfig loaded, or "
            "convert_back first"
        )

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        frame = self.frame()._replace(quantizer=Same(self.quantizer))
        return list(self.parts()), (type(self), frame)

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, torch.Tensor], meta: Any, outer_size: Any, outer_stride: Any
    ) -> Any:
        kind, frame = meta
        return kind.build(inner, frame._replace(quantizer=frame.quantizer.value))

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if id(self) in memo:
            return memo[id(self)]
        twin: Any = self.mapped(torch.clone)
        if isinstance(self, nn.Parameter):
            twin = nn.Parameter(twin)
        twin.requires_grad_(self.requires_grad)
        for name, value in self.__dict__.items():  # a preserved initial value, a user's attribute
            twin.__dict__.setdefault(name, value)
        memo[id(self)] = twin
        return twin

    def __reduce_ex__(self, protocol: Any) -> Any:
        return reduced(self)
