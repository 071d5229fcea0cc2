"""Spread a model's blocks over several devices with accelerate, and see where it ended up."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from quaver.cli.errors import CommandError


def dispatch(model: nn.Module, places: Mapping[str, torch.device]) -> nn.Module:
    """Send the model's parts to their places (of ``place``) with ``accelerate.dispatch_model``.

    Modules on the CPU run on the CPU. With one device, accelerate's hooks are there all the same.
    """
    from accelerate import dispatch_model

    # Left to itself, accelerate would lend the CPU's weights to a GPU for each call.
    names = {name: str(device) for name, device in places.items()}
    main = "cpu" if "cpu" in names.values() else next(iter(names.values()))
    with _no_false_alarm():
        dispatched: nn.Module = dispatch_model(
            model, device_map=names, main_device=main, force_hooks=True
        )
    return dispatched


def place(model: nn.Module, devices: Sequence[torch.device]) -> dict[str, torch.device]:
    """A device for every part of the model: ``{name of a module or parameter: device}``.

    The blocks (the largest ModuleList) are dealt out in equal runs. What is registered after them
    goes with the last block, unless it shares a parameter with what came before (a tied head would
    be copied) or has none. Raises CommandError when there are fewer blocks than devices.
    """
    blocks = _blocks(model)
    count = len(model.get_submodule(blocks)) if blocks else 0  # type: ignore[arg-type]
    if count < len(devices):
        raise CommandError(f"the model has {count} blocks; it cannot be split over {len(devices)}")
    places: dict[str, torch.device] = {}
    first: set[int] = set()
    after = False
    for name, part in _parts(model, blocks):
        if name == blocks:
            after = True
            for index in range(count):
                places[f"{name}.{index}"] = devices[index * len(devices) // count]
            continue
        own = {id(p) for p in part.parameters()} if isinstance(part, nn.Module) else {id(part)}
        stays = not after or not own or bool(own & first)
        places[name] = devices[0] if stays else devices[-1]
        first |= own if stays else set()
    return places


@contextmanager
def _no_false_alarm() -> Iterator[None]:
    """accelerate says of every part on the CPU that it is offloaded; here it runs there."""
    logger = logging.getLogger("accelerate.big_modeling")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def _blocks(model: nn.Module) -> str:
    lists = [(n, m) for n, m in model.named_modules() if isinstance(m, nn.ModuleList) and len(m)]
    sizes = {name: sum(p.numel() for p in part.parameters()) for name, part in lists}
    return max(sizes, key=sizes.__getitem__, default="")


def _parts(model: nn.Module, blocks: str) -> list[tuple[str, nn.Module | torch.Tensor]]:
    """The blocks' list and the largest parts beside it, in the order of registration."""
    parts: list[tuple[str, nn.Module | torch.Tensor]] = []
    inside = ""
    for step in blocks.split("."):
        parent = model.get_submodule(inside)
        children = [*parent.named_parameters(recurse=False), *parent.named_buffers(recurse=False)]
        prefix = f"{inside}." if inside else ""
        parts += [(prefix + name, tensor) for name, tensor in children]
        parts += [(prefix + n, m) for n, m in parent.named_children() if n != step]
        inside = prefix + step
    parts.append((blocks, model.get_submodule(blocks)))
    order = {name: at for at, (name, _) in enumerate(model.named_modules())}
    return sorted(parts, key=lambda part: order.get(part[0], -1))
