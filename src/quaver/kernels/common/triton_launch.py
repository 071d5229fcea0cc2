"""Launching Triton kernels by launchers that are prepared once a (kernel, device, signature).

Triton's own path binds arguments, computes the specialization and looks the compiled kernel up at
every launch, in Python. Here a launch computes a key of what Triton specializes on, and hands raw
addresses to the compiled kernel's launcher.
"""

from __future__ import annotations

from typing import Any

import triton
from triton.runtime.jit import JITFunction

from quaver.devices import raw_stream

Grid = tuple[int, ...]


class Prepared:
    """A compiled kernel on one device, for arguments of one signature.

    A wrapper that knows a shorter key for the signature than `launch_grid` may keep it and call it
    with addresses: that is most of the host's work at a launch.

    Args:
        kernel: what Triton compiled.
        index: of the device.
        constants: the constexprs, in their order.
    """

    __slots__ = ("constants", "function", "index", "kernel", "metadata", "run")

    def __init__(self, kernel: Any, index: int, constants: tuple[Any, ...]) -> None:
        self.kernel = kernel
        self.index = index
        self.constants = constants
        self.run = kernel.run
        self.function = kernel.function
        self.metadata = kernel.packed_metadata

    def __call__(self, grid: Grid, raw: tuple[Any, ...]) -> None:
        """Launch on the current stream of the device, which must be current.

        Args:
            grid: three sizes.
            raw: numbers, None, and addresses in place of tensors.
        """
        enter, leave = _hooks.launch_enter_hook, _hooks.launch_exit_hook
        stream = raw_stream(self.index)
        if enter.calls or leave.calls:
            said = self.kernel.launch_metadata(grid, stream, *raw, *self.constants)
        else:
            enter = leave = said = None
        self.run(
            *grid,
            stream,
            self.function,
            self.metadata,
            said,
            enter,
            leave,
            *raw,
            *self.constants,
        )


_hooks = triton.knobs.runtime
_prepared: dict[tuple[Any, ...], Prepared] = {}
_as_they_are: dict[int, tuple[bool, ...]] = {}
"""For each function, which of its parameters Triton does not specialize on."""


def launch_grid(fn: Any, grid: Grid, *args: Any, **meta: Any) -> Prepared | None:
    """Launch `fn` on the device of its first tensor, which must be the current one.

    Args:
        fn: a function decorated with `triton.jit`, whose constexprs come after its other arguments.
        grid: one to three sizes.
        args: tensors, numbers and None, for the arguments that are not constexprs, in their order.
        meta: the constexprs in their order, then Triton's options such as num_warps; always in
            the same order from one place in the code.

    Returns:
        What a later launch of the same signature can call; None in the interpreter.
    """
    if not isinstance(fn, JITFunction):  # the interpreter's
        fn[grid](*args, **meta)
        return None
    index, raw, key = _signature(fn, args, meta)
    prepared = _prepared.get(key)
    if prepared is None:
        prepared = _prepared[key] = _prepare(fn, grid, args, meta, index)
    else:
        prepared(full_grid(grid), tuple(raw))
    return prepared


def full_grid(grid: Grid) -> Grid:
    """`grid` with all three sizes."""
    return (*grid, *(1 for _ in range(3 - len(grid))))


def _signature(
    fn: Any, args: tuple[Any, ...], meta: dict[str, Any]
) -> tuple[int, list[Any], tuple[Any, ...]]:
    """The device's index, the arguments with addresses for tensors, and the key.

    Triton compiles anew for another dtype, for an address or an integer that 16 divides or does
    not, for the integer 1, and for integers beyond 32 bits.
    """
    name = id(fn)
    plain = _as_they_are.get(name)
    if plain is None:
        plain = _as_they_are[name] = tuple(p.do_not_specialize for p in fn.params)
    index = -1
    raw: list[Any] = []
    key: list[Any] = [name]
    for arg, as_it_is in zip(args, plain, strict=False):  # constexprs come after
        kind = type(arg)
        if kind is int:
            raw.append(arg)
            code = 0
            if not as_it_is:
                code = 1 if arg == 1 else 0 if arg & 15 else 2
            key.append(code if -0x80000000 <= arg <= 0x7FFFFFFF else code + 4)
        elif arg is None or kind is float or kind is bool:
            raw.append(arg)
            key.append(kind)
        else:
            if index < 0:
                index = arg.get_device()
            address = arg.data_ptr()
            raw.append(address)
            key.append((arg.dtype,) if address & 15 else arg.dtype)
    key.append(index)
    key.extend(meta.values())
    return index, raw, tuple(key)


def _prepare(
    fn: Any, grid: Grid, args: tuple[Any, ...], meta: dict[str, Any], index: int
) -> Prepared:
    """Compile and launch by Triton's own path, and keep what the next launch needs."""
    if any(p.is_constexpr for p in fn.params[: len(args)]):
        raise TypeError(f"{fn.__name__}: constexprs must come after the other arguments")
    kernel = fn[grid](*args, **meta)
    return Prepared(kernel, index, tuple(meta[p.name] for p in fn.params if p.is_constexpr))


def is_interpreted(fn: Any) -> bool:
    """Whether `fn` runs in Triton's interpreter, on the CPU."""
    return not isinstance(fn, JITFunction)


def next_power_of_two(n: int) -> int:
    """The least power of two from n on, at least 1."""
    return 1 << max(n - 1, 0).bit_length()


def cdiv(a: int, b: int) -> int:
    """ceil(a / b)."""
    return -(-a // b)


__all__ = ["cdiv", "is_interpreted", "launch_grid", "next_power_of_two"]
