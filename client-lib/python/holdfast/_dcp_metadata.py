"""What `.metadata` of torch.distributed.checkpoint says: a pickle, read as data.

    metadata = parse(path.read_bytes())     # Metadata(tensors={"model.w": Described(shape=(6, 4), …), "epoch": None}, …)

Nothing in it is called, imported, hashed or compared. A class or function that it names becomes the name (of those alone of which
DCP's metadata are made), and what the pickle would have made of it a record of that name, of what it would have been called with,
and of the state that it would have been given. Only of these records is read what is needed, each field as the type that it must
have. Python's own unpickler would set attributes of whatever it finds, classes of the standard library included.
"""

from __future__ import annotations

import dataclasses
import math
import pickle
import struct
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from holdfast._errors import RefusedError

_Kind = TypeVar("_Kind")

_RANK_MAX = 64
_INTEGER_MAX = (1 << 63) - 1
_FIELDS_MAX = 64

_METADATA = "torch.distributed.checkpoint.metadata"
_NAMED = {
    (_METADATA, "Metadata"),
    (_METADATA, "MetadataIndex"),
    (_METADATA, "TensorStorageMetadata"),
    (_METADATA, "BytesStorageMetadata"),
    (_METADATA, "ChunkStorageMetadata"),
    (_METADATA, "TensorProperties"),
    (_METADATA, "StorageMeta"),
    (_METADATA, "_MEM_FORMAT_ENCODING"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("collections", "OrderedDict"),
    ("pathlib", "Path"),
    ("pathlib", "PosixPath"),
    ("pathlib._local", "PosixPath"),
    ("builtins", "getattr"),  # as which some Pythons pickle members of enumerations
    ("__builtin__", "getattr"),  # the same, up to protocol 2
}
_DTYPES = {name: value for name, value in vars(torch).items() if isinstance(value, torch.dtype)}


@dataclasses.dataclass(frozen=True, slots=True)
class Stored:
    """Where a part lies."""

    file: str
    offset: int
    length: int
    transformed: bool


@dataclasses.dataclass(frozen=True, slots=True)
class Described:
    """A tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    parts: list[tuple[tuple[int, ...], tuple[int, ...]]]  # offsets, which are unique, and sizes


@dataclasses.dataclass(frozen=True, slots=True)
class Metadata:
    tensors: dict[str, Described | None]  # by name; None: no tensor
    stored: dict[tuple[str, str], Stored]  # by name and offsets

    def stored_at(self, name: str, offsets: tuple[int, ...]) -> Stored:
        """LookupError: nowhere."""
        return self.stored[name, str(offsets)]


def parse(data: bytes) -> Metadata:
    """Refused: it names what DCP's metadata are not made of. ValueError: it is damaged, or not DCP's metadata."""
    root = _Machine(data).run()
    if type(root) is not _Record or root.name != "Metadata":
        raise ValueError("its root is no Metadata")
    fields = _fields(root, "Metadata")
    parts: dict[int, list[Any]] = {}  # of lists that several tensors share
    return Metadata(
        {
            _typed(name, str): _described(value, parts)
            for name, value in _pairs(fields["state_dict_metadata"])
        },
        dict(_stored(*pair) for pair in _pairs(fields["storage_data"])),
    )


# ---- the pickle ----


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class _Name:
    """Instead of a class or function."""

    name: str


@dataclasses.dataclass(slots=True, eq=False, repr=False)
class _Record:
    """Instead of what would have been made by a call; `pairs` of what is a dictionary."""

    name: str
    arguments: Any
    state: Any = None
    pairs: list[tuple[Any, Any]] | tuple[()] = ()


class _Machine:
    """Pickle's, without all that could do anything (https://docs.python.org/3/library/pickletools.html has the opcodes).

    There are bytes behind each value that it makes: memory grows with the pickle's length, whatever it claims.
    """

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0
        self._stack: list[Any] = []
        self._marks: list[int] = []  # heights of the stack
        self._memo: dict[int, Any] = {}

    def run(self) -> Any:
        steps = self._steps()
        while True:
            opcode = self._take(1)[0]
            if opcode == pickle.STOP[0]:
                return self._stack.pop()
            step = steps.get(opcode)
            if step is None:
                raise RefusedError(
                    f"it has a step {opcode:#04x}, which DCP's metadata have no need of"
                )
            step()

    def _steps(self) -> dict[int, Callable[[], None]]:
        push, take = self._stack.append, self._take

        def number(form: str) -> Callable[[], Any]:
            unpack, size = struct.Struct(form).unpack, struct.calcsize(form)
            return lambda: unpack(take(size))[0]

        byte, u16, i32, u32, u64 = (number(form) for form in ("<B", "<H", "<i", "<I", "<Q"))
        real = number(">d")

        def memoize(number: int) -> None:
            self._memo[number] = self._stack[-1]

        steps: dict[bytes, Callable[[], Any]] = {
            pickle.PROTO: byte,
            pickle.FRAME: u64,
            pickle.MARK: lambda: self._marks.append(len(self._stack)),
            pickle.NONE: lambda: push(None),
            pickle.NEWTRUE: lambda: push(True),
            pickle.NEWFALSE: lambda: push(False),
            pickle.BININT: lambda: push(i32()),
            pickle.BININT1: lambda: push(byte()),
            pickle.BININT2: lambda: push(u16()),
            pickle.LONG1: lambda: push(int.from_bytes(take(byte()), "little", signed=True)),
            pickle.BINFLOAT: lambda: push(real()),
            pickle.SHORT_BINUNICODE: lambda: push(take(byte()).decode()),
            pickle.BINUNICODE: lambda: push(take(u32()).decode()),
            pickle.BINUNICODE8: lambda: push(take(u64()).decode()),
            pickle.SHORT_BINBYTES: lambda: push(take(byte())),
            pickle.BINBYTES: lambda: push(take(u32())),
            pickle.BINBYTES8: lambda: push(take(u64())),
            pickle.EMPTY_TUPLE: lambda: push(()),
            pickle.TUPLE1: lambda: push(tuple(self._pop(1))),
            pickle.TUPLE2: lambda: push(tuple(self._pop(2))),
            pickle.TUPLE3: lambda: push(tuple(self._pop(3))),
            pickle.TUPLE: lambda: push(tuple(self._marked())),
            pickle.EMPTY_LIST: lambda: push([]),
            pickle.APPEND: lambda: self._append(self._pop(1)),
            pickle.APPENDS: lambda: self._append(self._marked()),
            pickle.EMPTY_DICT: lambda: push(_Record("dict", ())),
            pickle.SETITEM: lambda: self._set(self._pop(2)),
            pickle.SETITEMS: lambda: self._set(self._marked()),
            pickle.MEMOIZE: lambda: memoize(len(self._memo)),
            pickle.BINPUT: lambda: memoize(byte()),
            pickle.LONG_BINPUT: lambda: memoize(u32()),
            pickle.BINGET: lambda: push(self._memo[byte()]),
            pickle.LONG_BINGET: lambda: push(self._memo[u32()]),
            pickle.GLOBAL: lambda: push(_named(self._line(), self._line())),
            pickle.STACK_GLOBAL: lambda: push(_named(*self._pop(2))),
            pickle.REDUCE: self._call,
            pickle.NEWOBJ: self._call,
            pickle.BUILD: self._build,
        }
        return {opcode[0]: step for opcode, step in steps.items()}

    def _take(self, count: int) -> bytes:
        taken = self._data[self._at : self._at + count]
        if len(taken) != count:
            raise ValueError("it ends before its end")
        self._at += count
        return taken

    def _line(self) -> str:
        end = self._data.index(b"\n", self._at)
        line = self._take(end - self._at).decode()
        self._take(1)
        return line

    def _pop(self, count: int) -> list[Any]:
        if len(self._stack) < count:
            raise ValueError("it takes what is not there")
        taken = self._stack[-count:]
        del self._stack[-count:]
        return taken

    def _marked(self) -> list[Any]:
        height = self._marks.pop()
        taken = self._stack[height:]
        del self._stack[height:]
        return taken

    def _append(self, values: list[Any]) -> None:
        _typed(self._stack[-1], list).extend(values)

    def _set(self, values: list[Any]) -> None:
        pairs = zip(values[::2], values[1::2], strict=True)
        record = _typed(self._stack[-1], _Record)
        record.pairs = record.pairs or []
        record.pairs.extend(pairs)

    def _call(self) -> None:
        function, arguments = self._pop(2)
        self._stack.append(_Record(_typed(function, _Name).name, arguments))

    def _build(self) -> None:
        (state,) = self._pop(1)
        _typed(self._stack[-1], _Record).state = state


def _named(module: Any, name: Any) -> _Name | torch.dtype:
    module, name = _typed(module, str), _typed(name, str)
    if (module, name) in _NAMED:
        return _Name(name)
    if module == "torch" and name in _DTYPES:
        return _DTYPES[name]
    asked = ascii(f"{module}.{name}"[:200])
    raise RefusedError(f"it asks for {asked}, which DCP's metadata have no need of")


# ---- what the records say ----


def _typed(value: Any, kind: type[_Kind]) -> _Kind:
    if type(value) is not kind:
        raise ValueError(f"a {type(value).__name__} where a {kind.__name__} should be")
    return value


def _pairs(value: Any) -> Sequence[tuple[Any, Any]]:
    if _typed(value, _Record).name != "dict":
        raise ValueError(f"a {value.name} where a dict should be")
    pairs: Sequence[tuple[Any, Any]] = value.pairs
    return pairs


def _fields(value: Any, name: str) -> dict[str, Any]:
    """What a dataclass was given."""
    if _typed(value, _Record).name != name:
        raise ValueError(f"a {value.name} where a {name} should be")
    pairs = _pairs(value.state)
    if len(pairs) > _FIELDS_MAX:
        raise ValueError(f"a {name} of {len(pairs)} fields")
    return {_typed(key, str): each for key, each in pairs}


def _integer(value: Any) -> int:
    number = _typed(value, int)
    if abs(number) > _INTEGER_MAX:
        raise ValueError("a number of more than 64 bits")
    return number


def _size(value: Any) -> tuple[int, ...]:
    """A torch.Size, or what it was made from."""
    if type(value) is _Record and value.name == "Size":
        (value,) = _typed(value.arguments, tuple)
    if type(value) not in (tuple, list) or len(value) > _RANK_MAX:
        raise ValueError(f"a size is wanted, of {_RANK_MAX} dimensions at most")
    size = tuple(_integer(each) for each in value)
    _integer(math.prod(abs(each) or 1 for each in size))
    return size


def _described(value: Any, parts: dict[int, list[Any]]) -> Described | None:
    if type(value) is _Record and value.name == "BytesStorageMetadata":
        return None
    fields = _fields(value, "TensorStorageMetadata")
    properties = _typed(fields["properties"], _Record)
    if properties.name != "TensorProperties":
        raise ValueError(f"a {properties.name} where TensorProperties should be")
    dtype = _typed(properties.state, tuple)[0]
    chunks = _typed(fields["chunks"], list)
    if id(chunks) not in parts:
        parts[id(chunks)] = list(dict(map(_part, chunks)).values())
    return Described(_size(fields["size"]), _typed(dtype, torch.dtype), parts[id(chunks)])


# (Offsets are keys as text: there are numbers whose hashes are all the same, texts there are not.)
def _part(value: Any) -> tuple[str, tuple[tuple[int, ...], tuple[int, ...]]]:
    fields = _fields(value, "ChunkStorageMetadata")
    offsets = _size(fields["offsets"])
    return str(offsets), (offsets, _size(fields["sizes"]))


def _stored(index: Any, info: Any) -> tuple[tuple[str, str], Stored]:
    at, where = _fields(index, "MetadataIndex"), _fields(info, "_StorageInfo")
    offsets = at.get("offset")
    stored = Stored(
        _typed(where["relative_path"], str),
        _integer(where["offset"]),
        _integer(where["length"]),
        bool(where.get("transform_descriptors")),
    )
    key = () if offsets is None else _size(offsets)
    return (_typed(at["fqn"], str), str(key)), stored
