"""Compile the Triton kernels for GPUs that this machine need not have; nothing runs.

`python -m tests.kernels.triton.compiling 90`: for compute capability 9.0. Each kernel is called on
CPU tensors through the door, and what it would launch is compiled to PTX.
"""

import os
import re
import sys
from importlib import import_module
from typing import Any

os.environ["TRITON_INTERPRET"] = "0"

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

import quaver.devices
from quaver import kernels
from quaver.kernels import use_implementation
from quaver.kernels.common import triton_launch
from tests.kernels.every import calls
from tests.samples import normal

POINTERS = {
    torch.float32: "*fp32",
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float8_e4m3fn: "*fp8e4nv",
    torch.float8_e5m2: "*fp8e5",
    torch.uint8: "*u8",
    torch.int32: "*i32",
    torch.int64: "*i64",
}
PAIRS = re.compile(r"cvt\.rn\.satfinite\.e\dm\dx2\.f32\s+%rs")
"""FP8 conversions to 16-bit registers that are not local to one piece of inline assembly."""
ALIGNED = [["tt.divisibility", 16]]


class Compiler:
    """Stands in for `launch_grid`.

    Attributes:
        compiled: the names of the kernels compiled so far, one an instance.
    """

    def __init__(self, capability: int) -> None:
        self.target = GPUTarget("cuda", capability, 32)
        self.compiled: list[str] = []

    def __call__(self, fn: Any, grid: tuple[int, ...], *args: Any, **meta: Any) -> None:
        signature: dict[str, str] = {}
        constants: dict[tuple[int, ...], Any] = {}
        attributes: dict[tuple[int, ...], Any] = {}
        for i, parameter in enumerate(fn.params):
            if parameter.is_constexpr:
                kind, constants[i,] = "constexpr", meta.pop(parameter.name)
            else:
                kind = self._kind(args[i], parameter.do_not_specialize)
            signature[parameter.name] = kind
            if kind == "constexpr":
                constants.setdefault((i,), args[i] if i < len(args) else None)
            elif kind[0] == "*" or (
                kind == "i32" and not parameter.do_not_specialize and args[i] % 16 == 0
            ):
                attributes[i,] = ALIGNED
        source = ASTSource(fn, signature, constants, attributes)
        code = triton.compile(source, target=self.target, options=meta)
        assert not PAIRS.search(code.asm["ptx"]), "see fp8_bytes: ptxas may lose such bytes"
        self.compiled.append(fn.__name__)

    @staticmethod
    def _kind(arg: Any, plain: bool) -> str:
        """The type of an argument in Triton's signature."""
        if arg is None or (isinstance(arg, int) and arg == 1 and not plain):
            return "constexpr"
        if isinstance(arg, torch.Tensor):
            return POINTERS[arg.dtype]
        if isinstance(arg, float):
            return "fp32"
        return "i32" if -(2**31) <= arg < 2**31 else "i64"


def main(capability: int) -> None:
    """Compile for a capability, 90 for 9.0, and print how many kernels."""
    compiler = Compiler(capability)
    triton_launch.launch_grid = compiler
    triton_launch.is_interpreted = lambda fn: False
    quaver.devices.capability = lambda device: divmod(capability, 10)
    with use_implementation("triton"):
        for name, args in calls(normal(64, 256, dtype=torch.bfloat16)):
            getattr(kernels, name)(*args)
        import_module("quaver.kernels.norm.triton").LONGEST = 64
        import_module("quaver.kernels.norm.triton_backward").LONGEST = 64
        for name, args in calls(normal(64, 256, dtype=torch.bfloat16)):
            if name.startswith("norm"):
                getattr(kernels, name)(*args)
    print(len(compiler.compiled), "compiled:", *sorted(set(compiler.compiled)))


if __name__ == "__main__":
    main(int(sys.argv[1]))
