"""What the shim's modules share: the options that mean nothing here, devices, initial values."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from quaver.devices import default_device
from quaver.errors import QuaverError
from quaver.nn.wgrad import WgradOptions

DeviceLike = torch.device | str | int | None
InitMethod = Callable[[torch.Tensor], Any]
RngTracker = Callable[[], Any]

C = TypeVar("C")

INIT_STD = 0.023
"""The standard deviation that weights are drawn with where no `init_method` is given."""

_WITHOUT_MEANING: dict[str, Any] = {
    # overlap of products and communication through userbuffers
    **dict.fromkeys(
        ("ub_overlap_ag", "ub_overlap_rs", "ub_overlap_rs_dgrad", "ub_bulk_dgrad"), False
    ),
    **dict.fromkeys(("ub_bulk_wgrad", "ub_tp_comm_overlap"), False),
    "ub_name": None,
    "symmetric_ar_type": None,
    "parameters_split": None,
    # FP8 tensors between modules
    **dict.fromkeys(("fp8_output", "fp8_grad"), False),
    # context parallelism
    **dict.fromkeys(("cp_group", "cp_global_ranks", "cp_stream"), None),
    "cp_comm_type": "p2p",
    "return_max_logit": False,
    "checkpoint": False,  # of LayerNormMLP; the function of that name serves any module
    # cu_seqlens with padding between sequences, and hints for kernels
    **dict.fromkeys(("cu_seqlens_q_padded", "cu_seqlens_kv_padded", "pad_between_seqs"), None),
    "fast_zero_fill": True,
    "num_splits": 1,
    "_graph": False,
}


def transformer_engine_name(module: str) -> Callable[[C], C]:
    """Decorator: a class or function says that it is of the module `module`.

    Code looks there for it: pickle, and Lightning, which knows these layers by that name.
    """

    def rename(thing: C) -> C:
        thing.__module__ = module
        return thing

    return rename


def refuse_unknown(owner: str, given: Mapping[str, Any]) -> None:
    """Raise where an option that means nothing here has another value than its default.

    Args:
        owner: whose options they are.
        given: options by name; those that mean something are passed over.

    Raises:
        QuaverError: names the option and its only value.
    """
    for name, default in _WITHOUT_MEANING.items():
        value = given.get(name, default)
        if not _is(value, default):
            raise QuaverError(
                f"{owner}({name}={value!r}) has no meaning for Quaver; leave it {default!r}"
            )


def _is(value: Any, default: Any) -> bool:
    """Whether `value` is the default; None and False are one."""
    if default is None or default is False:
        return value is None or value is False
    return type(value) is type(default) and bool(value == default)


def refuse_parallel(owner: str, tp_group: Any, tp_size: int) -> None:
    """Raise where a module is to be one part of several, over processes.

    Raises:
        QuaverError: the group has more than one member, or tp_size is more than 1.
    """
    size = tp_size
    if tp_group is not None and dist.is_available() and dist.is_initialized():
        size = max(size, dist.get_world_size(tp_group))
    if size > 1:
        raise QuaverError(
            f"{owner} is not split over the {size} processes of a tensor parallel group; use "
            "tp_size=1, or split the layers yourself"
        )


def chosen_device(device: DeviceLike) -> torch.device:
    """Where parameters are made: where asked, else on the default device, else as scripts expect.

    Scripts expect the current accelerator. With none there, that is the CPU.
    """
    if device is not None:
        return torch.device(device)
    default = torch.get_default_device()
    return default if default.type != "cpu" else default_device()


def wgrad_options(
    fuse_wgrad_accumulation: bool, delay_wgrad_compute: bool, save_original_input: bool = False
) -> WgradOptions | None:
    """The options of the weights' gradients; None if there are none."""
    options = WgradOptions(
        fuse_wgrad_accumulation=fuse_wgrad_accumulation,
        delay_wgrad_compute=delay_wgrad_compute,
        save_original_input=save_original_input,
    )
    return None if options == WgradOptions() else options


class WeightInit:
    """Fills weights: with the user's function or a normal distribution, from a stream of its own.

    Args:
        init_method: fills a tensor in place.
        get_rng_state_tracker: gives the tracker whose stream is drawn from; None: the default one.
        rng_tracker_name: the name of that stream; None: the tracker's own default.
    """

    def __init__(
        self,
        init_method: InitMethod | None = None,
        get_rng_state_tracker: RngTracker | None = None,
        rng_tracker_name: str | None = None,
    ) -> None:
        self._init_method = init_method
        self._tracker = get_rng_state_tracker
        self._name = rng_tracker_name

    def __call__(self, weight: torch.Tensor) -> None:
        """Fill `weight` in place."""
        tracker = None if self._tracker is None else self._tracker()
        names = () if self._name is None else (self._name,)
        with torch.no_grad(), nullcontext() if tracker is None else tracker.fork(*names):
            if self._init_method is not None:
                self._init_method(weight)
            else:
                torch.nn.init.normal_(weight, std=INIT_STD)
