"""`FP8GlobalStateManager`: its questions answered from the region that the thread is in.

There is no global state to manage: amaxes are registered, reduced and turned into scales without
being asked to, and a recomputation finds its scales by itself.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from quaver.errors import QuaverError
from quaver.integrations.transformer_engine.options import transformer_engine_name
from quaver.integrations.transformer_engine.quantization import autocast, check_support
from quaver.integrations.transformer_engine.recipes import default_recipe
from quaver.nn.init import current_init
from quaver.recipe import Recipe
from quaver.scaling import backward_passes, current_region


@transformer_engine_name("transformer_engine.pytorch.quantization")
class FP8GlobalStateManager:
    """Answers what scripts ask; what they tell it to do happens by itself."""

    # ---- availability

    @classmethod
    def is_fp8_available(cls) -> tuple[bool, str]:
        """Whether FP8 runs here, and why not."""
        return check_support()

    is_mxfp8_available = is_fp8_block_scaling_available = is_nvfp4_available = is_fp8_available

    # ---- the region

    @classmethod
    def is_fp8_enabled(cls) -> bool:
        """Whether modules called now would quantize."""
        region = current_region()
        return region is not None and region.enabled

    @classmethod
    def is_fp8_calibration(cls) -> bool:
        """Whether modules called now would calibrate."""
        region = current_region()
        return region is not None and region.calibrating

    @classmethod
    def get_fp8_recipe(cls) -> Recipe:
        """The recipe in force."""
        region = current_region()
        return (None if region is None else region.recipe) or default_recipe()

    @classmethod
    def get_fp8_group(cls) -> Any:
        """The process group of the amax reduction."""
        region = current_region()
        return None if region is None else region.group

    @classmethod
    def is_first_fp8_module(cls) -> bool:
        """True at the first question within the outermost region, then False."""
        region = current_region()
        if region is None:
            return False
        outermost = region.collector()
        first = not getattr(outermost, "asked", False)
        outermost.asked = True  # type: ignore[attr-defined]
        return first

    @classmethod
    def with_fp8_parameters(cls) -> bool:
        """Whether modules made now get quantized weights."""
        return current_init() is not None

    @classmethod
    def with_high_precision_init_val(cls) -> bool:
        """Whether they keep the values before quantization."""
        options = current_init()
        return options is not None and options.preserve

    @classmethod
    def fp8_graph_capturing(cls) -> bool:
        """Whether a graph is being captured; never through the shim."""
        return False

    _entered: list[autocast] = []  # noqa: RUF012 - shared on purpose, by enter and exit

    @classmethod
    def autocast_enter(
        cls,
        enabled: bool = False,
        calibrating: bool = False,
        fp8_recipe: Recipe | None = None,
        fp8_group: Any = None,
        _graph: bool = False,
    ) -> None:
        """Enter an autocast, until `autocast_exit`."""
        region = autocast(enabled, calibrating, fp8_recipe, fp8_group, _graph)
        region.__enter__()
        cls._entered.append(region)

    @classmethod
    def autocast_exit(cls, enabled: bool, _graph: bool = False) -> None:
        """Leave the autocast that `autocast_enter` entered last."""
        cls._entered.pop().__exit__(None, None, None)

    fp8_autocast_enter, fp8_autocast_exit = autocast_enter, autocast_exit

    # ---- what happens by itself

    @classmethod
    def reset(cls) -> None:
        """Do nothing: scales belong to their modules, and regions end with their `with`."""

    @classmethod
    def add_fp8_tensors_to_global_buffer(cls, fp8_meta: Any, **kwargs: Any) -> None:
        """Do nothing: states register themselves."""

    @classmethod
    def copy_forward_fp8_meta_tensors_for_recompute(cls, fp8_meta: Any) -> None:
        """Do nothing: a recomputation finds its scales."""

    get_old_fp8_meta_tensors_for_recompute = copy_forward_fp8_meta_tensors_for_recompute
    restore_fp8_meta_tensors = copy_forward_fp8_meta_tensors_for_recompute

    @classmethod
    def reduce_and_update_fp8_tensors(cls, forward: bool = True, **kwargs: Any) -> None:
        """Update the scales that a compiled backward left to be updated; others are already."""
        if not forward:
            backward_passes().settle()

    # ---- graphs

    @classmethod
    def set_skip_fp8_weight_update_tensor(cls, skip: bool) -> None:
        """Accept False.

        Raises:
            QuaverError: weights are to be skipped.
        """
        if skip:
            raise QuaverError(
                "FP8GlobalStateManager cannot skip the quantization of weights; pass "
                "is_first_microbatch=False to the modules"
            )

    @classmethod
    def get_skip_fp8_weight_update_tensor(cls) -> torch.Tensor | None:
        """None: weights are not skipped."""
        return None

    # ---- names

    @staticmethod
    def get_meta_tensor_key(forward: bool = True) -> str:
        """The key of a state in `fp8_meta`."""
        return "scaling_fwd" if forward else "scaling_bwd"

    @staticmethod
    def get_fwd_bwd_key(forward: bool = True) -> str:
        """The name of a direction."""
        return "forward" if forward else "backward"

    @classmethod
    def get_buffer_info(cls) -> str:
        """A key of `fp8_meta` that scripts may write."""
        return "buffer_index_and_autocast_key"

    @staticmethod
    def get_unique_autocast_key(recipe: Recipe | None = None, group: Any = None) -> str:
        """A name for a recipe and a group."""
        return f"recipe={recipe!r},group={None if group is None else id(group)}"

    @classmethod
    def get_key_in_buffer(cls, forward: bool, fp8_recipe: Recipe | None, fp8_group: Any) -> str:
        """A name for a direction, a recipe and a group."""
        key = cls.get_unique_autocast_key(fp8_recipe, fp8_group)
        return f"{cls.get_fwd_bwd_key(forward)}_{key}"

    @classmethod
    def split_key_in_buffer(cls, key: str) -> tuple[bool, str]:
        """Whether such a name is of the forward, and the rest of it."""
        direction, rest = key.split("_", 1)
        return direction == "forward", rest

    @staticmethod
    def reduce_tensor_across_group_op_max(tensor: torch.Tensor, group: Any) -> None:
        """MAX-reduce a tensor in place, where there are processes."""
        if dist.is_available() and dist.is_initialized():
            dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=group)
