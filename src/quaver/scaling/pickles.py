"""Foreign pickles read without executing anything that they name.

A pickle may call any function of the process. This reader admits numbers, strings, containers,
tensors and the names that it is given. Tensors are rebuilt by the code below, from bytes; a name
becomes a `Record` of what it was called with, and never the class or the function itself.
Forms: a plain pickle, and what `torch.save` writes, as a zip file or in the older way.
"""

from __future__ import annotations

import io
import math
import pickle
import pickletools
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, ClassVar

import torch

from quaver.errors import CheckpointError

_ZIP = b"PK\x03\x04"
_PICKLE = b"\x80"
_LEGACY_MAGIC = 0x1950A86A20F9469CFC6C  # of torch.save before it wrote zip files

_OPCODES = frozenset(
    "PROTO FRAME STOP MARK POP POP_MARK DUP NONE NEWTRUE NEWFALSE BININT BININT1 BININT2 LONG1 "
    "BINFLOAT BINUNICODE SHORT_BINUNICODE BINBYTES SHORT_BINBYTES BINBYTES8 EMPTY_LIST APPEND "
    "APPENDS EMPTY_TUPLE TUPLE TUPLE1 TUPLE2 TUPLE3 EMPTY_DICT SETITEM SETITEMS EMPTY_SET ADDITEMS "
    "BINPUT LONG_BINPUT BINGET LONG_BINGET MEMOIZE GLOBAL STACK_GLOBAL REDUCE NEWOBJ BUILD "
    "BINPERSID".split()
)
_MOST_OPCODES = 100_000
_MOST_TUPLES = 5_000
"""The hash of a tuple recurses in C, without a limit; deep ones would overflow the stack."""

_STORAGES = {
    "FloatStorage": torch.float32,
    "DoubleStorage": torch.float64,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
}

Storage = torch.Tensor
"""A flat tensor, of which others are views."""


class Record:
    """What a pickle says of an object of an admitted class.

    Attributes:
        record_args: what the class was called with.

    The attributes that the pickle sets are the record's own: `vars(record)`.
    """

    record_args: tuple[Any, ...]

    def __new__(cls, *args: Any) -> Record:
        """A record of a call with `args`."""
        self = object.__new__(cls)
        self.record_args = args
        return self


class _Call:
    """A function that a pickle may call, and can do nothing else with."""

    __slots__ = ("_function",)
    _function: Callable[..., Any]

    def __init__(self, function: Callable[..., Any]) -> None:
        object.__setattr__(self, "_function", function)

    def __setattr__(self, name: str, value: Any) -> None:
        raise CheckpointError("a pickle must not write to a function")

    def __call__(self, *args: Any) -> Any:
        return self._function(*args)


class _Reader(pickle._Unpickler):
    """Reads one pickle; `stored` gives the storage of a torch file by its key.

    In Python, where it can be seen what a pickle gives a state to: a tensor would grow by it.
    """

    dispatch: ClassVar[dict[int, Any]] = dict(pickle._Unpickler.dispatch)
    stack: list[Any]

    def __init__(
        self,
        data: bytes,
        records: frozenset[str],
        stored: Callable[[str, torch.dtype, int], Storage] | None,
        may_nest: bool,
    ) -> None:
        super().__init__(io.BytesIO(data))
        self._stored = stored
        self._names: dict[str, Any] = {
            "collections.OrderedDict": OrderedDict,
            "torch._utils._rebuild_tensor_v2": _Call(_rebuild),
            "torch._utils._rebuild_tensor": _Call(_rebuild),
            "torch._utils._rebuild_parameter": _Call(lambda tensor, *_: tensor),
        }
        for name, dtype in _STORAGES.items():
            self._names[f"torch.{name}"] = self._names[f"torch.storage.{name}"] = dtype
        if may_nest:
            self._names["torch.storage._load_from_bytes"] = _Call(_storage_of_file)
        self._names |= {name: type(name.rpartition(".")[2], (Record,), {}) for name in records}

    def find_class(self, module: str, name: str) -> Any:
        full = f"{module}.{name}"
        if full not in self._names:
            raise CheckpointError(
                f"a pickle in a checkpoint names {full[:100]!r}, which is not admitted; nothing of "
                "it was executed"
            )
        return self._names[full]

    def load_build(self) -> None:
        """Give a state to an object: to a record, or a dict's own attributes to it."""
        if not isinstance(self.stack[-2], Record | OrderedDict):
            raise CheckpointError("a pickle in a checkpoint gives a state to what has none")
        super().load_build()  # type: ignore[misc]

    dispatch[pickle.BUILD[0]] = load_build

    def persistent_load(self, pid: Any) -> Any:
        if self._stored is None or not isinstance(pid, tuple) or len(pid) < 5:
            raise CheckpointError("a pickle refers to a storage that is not there")
        kind, dtype, key, _, count = pid[:5]
        if kind != "storage" or not isinstance(dtype, torch.dtype):
            raise CheckpointError("a pickle refers to something else than a storage")
        if not isinstance(key, str) or not isinstance(count, int) or count < 0:
            raise CheckpointError("a pickle refers to a storage without a key or a size")
        return self._stored(key, dtype, count)


def is_pickle(head: bytes) -> bool:
    """Whether data that begins with `head` has one of the forms that `read` knows."""
    return head[:1] == _PICKLE or head[:4] == _ZIP[: len(head)]


def read(data: bytes, records: frozenset[str] = frozenset()) -> Any:
    """What `data` holds.

    Args:
        data: a pickle, or a file of `torch.save`.
        records: full names of the classes whose objects are admitted, as `Record`s.

    Raises:
        CheckpointError: it is damaged, or holds something that is not admitted.
    """
    try:
        if data[:4] == _ZIP:
            return _read_zip(data, records)
        first, end = _load(data, 0, records, None)
        return _read_legacy(data, end, records) if first == _LEGACY_MAGIC else first
    except CheckpointError:
        raise
    except Exception as error:  # whatever damaged data makes of the unpickler
        said = " ".join(str(error).split())[:100]
        raise CheckpointError(
            f"a pickle in a checkpoint cannot be read: {type(error).__name__}: {said}"
        ) from None


def _load(
    data: bytes,
    start: int,
    records: frozenset[str],
    stored: Callable[[str, torch.dtype, int], Storage] | None,
    may_nest: bool = True,
) -> tuple[Any, int]:
    """The object of the pickle that begins at `start`, and where the pickle ends."""
    end = _scan(data, start)
    return _Reader(data[start:end], records, stored, may_nest).load(), end


def _scan(data: bytes, start: int) -> int:
    """Where the pickle at `start` ends, if it has only harmless opcodes and sizes."""
    stream = io.BytesIO(data)
    stream.seek(start)
    tuples = 0
    for count, (opcode, argument, _) in enumerate(pickletools.genops(stream)):
        tuples += opcode.name.startswith("TUPLE")
        if opcode.name not in _OPCODES:
            raise CheckpointError(f"a pickle in a checkpoint uses {opcode.name}, not admitted")
        if count > _MOST_OPCODES or tuples > _MOST_TUPLES:
            raise CheckpointError("a pickle in a checkpoint is larger than a scaling state can be")
        if opcode.name in ("LONG_BINPUT", "FRAME") and (argument or 0) > len(data):
            raise CheckpointError("a pickle in a checkpoint asks for more memory than it fills")
    return stream.tell()


def _rebuild(storage: Any, offset: Any, size: Any, stride: Any, *_: Any) -> torch.Tensor:
    """A tensor of a storage, a view within its bounds."""
    numbers = (offset, *size, *stride)
    if not isinstance(storage, torch.Tensor) or not all(
        isinstance(n, int) and n >= 0 for n in numbers
    ):
        raise CheckpointError("a pickle describes a tensor without a storage or with odd sizes")
    if math.prod(size) > storage.numel():
        raise CheckpointError("a pickle describes a tensor that is larger than its storage")
    return torch.as_strided(storage, size, stride, offset)


def _storage_of_file(data: Any) -> Any:
    """The storage that a pickled tensor carries, as a file of `torch.save` within the pickle."""
    if not isinstance(data, bytes):
        raise CheckpointError("a pickle describes a storage that is no bytes")
    if data[:4] == _ZIP:
        return _read_zip(data, frozenset(), may_nest=False)
    magic, end = _load(data, 0, frozenset(), None, may_nest=False)
    if magic != _LEGACY_MAGIC:
        raise CheckpointError("a pickle describes a storage that is no file of torch.save")
    return _read_legacy(data, end, frozenset(), may_nest=False)


def _read_zip(data: bytes, records: frozenset[str], may_nest: bool = True) -> Any:
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        entries = archive.infolist()
        if sum(entry.file_size for entry in entries) > len(data):
            raise CheckpointError("a zip file in a checkpoint unpacks to more than its own size")
        (root,) = [e.filename[:-8] for e in entries if e.filename.endswith("data.pkl")]

        def stored(key: str, dtype: torch.dtype, count: int) -> Storage:
            return _storage(archive.read(f"{root}data/{key}"), dtype, count)

        return _load(archive.read(f"{root}data.pkl"), 0, records, stored, may_nest)[0]


def _read_legacy(data: bytes, end: int, records: frozenset[str], may_nest: bool = True) -> Any:
    """After the magic number: version, system, the object, its storages' keys, their bytes."""
    storages: dict[str, Storage] = {}

    def stored(key: str, dtype: torch.dtype, count: int) -> Storage:
        claimed = sum(s.numel() * s.element_size() for s in storages.values())
        if key not in storages:
            if claimed + count * dtype.itemsize > len(data):
                raise CheckpointError("a pickle describes a storage that is larger than its file")
            storages[key] = torch.zeros(count, dtype=dtype)
        return storages[key]

    for _ in ("version", "system"):
        _, end = _load(data, end, frozenset(), None, may_nest=False)
    content, end = _load(data, end, records, stored, may_nest)
    keys, end = _load(data, end, frozenset(), None, may_nest=False)
    for key in keys:
        storage = storages[key]
        size = storage.numel() * storage.element_size()
        if int.from_bytes(data[end : end + 8], "little") != storage.numel():
            raise CheckpointError("a storage in a pickle has another size than its tensor says")
        body = data[end + 8 : end + 8 + size]
        storage.copy_(_storage(body, storage.dtype, storage.numel()))
        end += 8 + size
    return content


def _storage(body: bytes, dtype: torch.dtype, count: int) -> Storage:
    if len(body) != count * dtype.itemsize:
        raise CheckpointError(
            f"a storage must have {count * dtype.itemsize} bytes, not {len(body)}"
        )
    if not body:
        return torch.zeros(0, dtype=dtype)
    return torch.frombuffer(bytearray(body), dtype=dtype)
