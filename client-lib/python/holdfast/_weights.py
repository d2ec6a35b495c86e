"""Weights that something else has saved, as tensors by name: files of `torch.save`, directories of
torch.distributed.checkpoint, safetensors files and directories of such.

    weights = read("consolidated.00.pth")          # Weights(tensors={"layers.0.weight": …}, left_out=["epoch"])

Whatever a source says is hostile: nothing of it is executed (pickles are read by torch's unpickler of weights, and DCP's metadata
as data alone), names in it never lead out of its directory, lengths are compared with what its files have before anything is read
or memory is taken, and what it says once does not count a million times.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import io
import itertools
import json
import math
import mmap
import os
import pathlib
import pickle
import re
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import IO, Any

import torch

from holdfast import _dcp_metadata, _torch_types
from holdfast._errors import InvalidArgumentError, NoRoomError, NotFoundError, RefusedError
from holdfast._state import join

_HEADER_BYTES_MAX = 100_000_000  # safetensors' own limit
_INDEX_BYTES_MAX = 100_000_000
# To read a pickle takes up to 64 times as much memory, whatever it says. (DCP's metadata of 900,000 parts have so many bytes.)
_PICKLE_BYTES_MAX = 128 << 20
_INDEX = "*.safetensors.index.json"
_DCP_METADATA = ".metadata"
_ARCHIVE = b"PK\3\4"  # how a file of torch.save begins
_PICKLE = "data.pkl"  # in it
_END_BYTES, _LOCATOR_BYTES, _END64_BYTES = 22, 20, 56  # and with what it ends: zip's records
_RANK_MAX = 64  # torch's own limit
_INTEGER_MAX = (1 << 63) - 1
_FILE_NAME_MAX = 255  # of any file system
_SHOWN_CHARACTERS_MAX = 200
# Of what a dictionary of torch.save holds, in which one value can be in many places:
_DEPTH_MAX = 150
_VALUES_MAX = 1_000_000
_NAMES_BYTES_MAX = 256 << 20
_NAMED_EACH_MAX = 1000  # of a container without tensors; a longer one has one name
_EXPANDED_BYTES_MAX = 1 << 30  # what tensors may have more than their file


@dataclasses.dataclass
class Weights:
    """What was found: tensors by their names, and the names of what is no tensor."""

    tensors: dict[str, torch.Tensor]
    left_out: list[str]

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())


def read(source: str | os.PathLike[str]) -> Weights:
    """The tensors of a file or directory, in memory or mapped from their files; the kind is seen from what is there."""
    path = pathlib.Path(source)
    if path.is_dir():
        if (path / _DCP_METADATA).is_file():
            return _read_dcp(path)
        return _read_directory(path)
    if not path.is_file():
        raise NotFoundError(f"read weights: '{path}' is no file and no directory")
    if path.suffix == ".safetensors":
        return _read_file(path)
    return _read_torch(path)


def _first_line(error: Exception) -> str:
    text = str(error).strip()
    return text.splitlines()[0][:_SHOWN_CHARACTERS_MAX] if text else type(error).__name__


def _shown(name: str) -> str:
    """A name that something hostile may have given."""
    long = len(name) > _SHOWN_CHARACTERS_MAX
    return repr(name[:_SHOWN_CHARACTERS_MAX]) + ("…" if long else "")


def of_memory(where: str, error: Exception) -> NoRoomError | None:
    """What to raise instead, if the error is one of memory that is not to be had."""
    if isinstance(error, MemoryError) or "allocate memory" in str(error):
        return NoRoomError(
            f"{where}: no memory for it ({_first_line(error)}): import it on a host that has more"
        )
    return None


@contextlib.contextmanager
def _memory(where: str) -> Iterator[None]:
    """Memory is taken in it. (How much there is, is not asked before: that depends on what else runs.)"""
    try:
        yield
    except (MemoryError, OSError, OverflowError, RuntimeError) as error:
        if no_room := of_memory(where, error):
            raise no_room from None
        if isinstance(error, OSError):
            raise
        raise InvalidArgumentError(f"{where}: {_first_line(error)}") from None


def _add(weights: Weights, where: str, name: str, tensor: torch.Tensor) -> None:
    try:
        name.encode()
    except UnicodeEncodeError:
        raise InvalidArgumentError(
            f"{where}: a tensor is called {_shown(name)}, which is no text"
        ) from None
    if name in weights.tensors:
        raise InvalidArgumentError(
            f"{where}: two tensors are called {_shown(name)}: they cannot be told apart"
        )
    weights.tensors[name] = tensor.detach()


# ---- torch.save ----


def _read_torch(path: pathlib.Path) -> Weights:
    with open(path, "rb") as file:
        # (Files of before torch 1.6 are no archives, and cannot be mapped.)
        mapped = file.read(len(_ARCHIVE)) == _ARCHIVE
    try:
        if mapped:
            with open(path, "rb") as file:
                _check_archive(file)
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    except pickle.UnpicklingError as error:
        raise RefusedError(
            f"read '{path}': it holds more than tensors, containers and numbers, and what else it holds could run any code: "
            f"load it yourself, if you trust who wrote it, and save its weights with holdfast.Checkpointer ({_first_line(error)})"
        ) from None
    except Exception as error:  # of many kinds, for a file that is none of torch's
        if no_room := of_memory(f"read '{path}'", error):
            raise no_room from None
        raise InvalidArgumentError(
            f"read '{path}': not a file of torch.save, or a damaged one ({_first_line(error)}); files of safetensors "
            "are known by the end of their names"
        ) from None
    if not isinstance(content, Mapping):
        raise InvalidArgumentError(
            f"read '{path}': it holds a {type(content).__name__}: a dictionary of tensors is wanted"
        )
    with _memory(f"read '{path}'"):
        return _Collected(path).weights(content)


def _check_archive(file: IO[bytes]) -> None:
    """torch.save compresses nothing; what is compressed can be a thousand times as long as the file."""
    with zipfile.ZipFile(file) as archive:
        if archive.start_dir != _stated_start(file):
            raise ValueError("its list of contents is not where it says")
        if any(entry.compress_type != zipfile.ZIP_STORED for entry in archive.infolist()):
            raise ValueError("it is compressed")
        if any(
            entry.filename.endswith(_PICKLE) and entry.file_size > _PICKLE_BYTES_MAX
            for entry in archive.infolist()
        ):
            raise ValueError(f"what is no tensor has more than {_PICKLE_BYTES_MAX} bytes in it")


def _stated_start(file: IO[bytes]) -> int:
    """Where an archive says that its list of contents begins: there torch reads it, and Python in front of the archive's end."""
    size = file.seek(0, os.SEEK_END)
    file.seek(max(size - _END_BYTES - _LOCATOR_BYTES - _END64_BYTES, 0))
    tail = file.read()
    end, locator = tail[-_END_BYTES:], tail[-_END_BYTES - _LOCATOR_BYTES : -_END_BYTES]
    if not end.startswith(b"PK\5\6") or end[20:] != b"\0\0":
        raise ValueError("something follows its end")
    if not locator.startswith(b"PK\6\7"):
        return int.from_bytes(end[16:20], "little")
    end64 = tail[: -_END_BYTES - _LOCATOR_BYTES]
    if not end64.startswith(b"PK\6\6") or int.from_bytes(locator[8:16], "little") != size - len(
        tail
    ):
        raise ValueError("its end is not where it says")
    return int.from_bytes(end64[48:56], "little")


class _Collected:
    """The tensors of nested containers, in which one value may be in many places, or within itself."""

    def __init__(self, path: pathlib.Path) -> None:
        self._path = path
        self._weights = Weights({}, [])
        self._values = 0
        self._names_bytes = 0
        self._nbytes: dict[str, int] = {}  # of tensors, by where they lie
        self._plain: dict[int, bool] = {}
        self._around: set[int] = set()  # the containers around the value that is looked at

    def weights(self, content: Mapping[Any, Any]) -> Weights:
        self._collect(content, "", 0)
        nbytes_max = 4 * self._path.stat().st_size + _EXPANDED_BYTES_MAX
        if sum(self._nbytes.values()) > nbytes_max:  # of a few bytes that they share
            raise InvalidArgumentError(
                f"read '{self._path}': tensors of more than {nbytes_max} bytes in a file of {self._path.stat().st_size}: save them "
                "again, each tensor by itself (tensor.clone())"
            )
        return self._weights

    def _count(self, name: str) -> None:
        self._values += 1
        self._names_bytes += len(name)
        if self._values > _VALUES_MAX or self._names_bytes > _NAMES_BYTES_MAX:
            raise InvalidArgumentError(
                f"read '{self._path}': more than {_VALUES_MAX} values, or {_NAMES_BYTES_MAX} bytes of names: save a dictionary "
                "of the weights alone"
            )

    def _collect(self, value: Any, name: str, depth: int) -> None:
        self._count(name)
        if isinstance(value, torch.Tensor):
            self._tensor(value, name)
        elif (
            depth == _DEPTH_MAX
            or not isinstance(value, (Mapping, list, tuple))
            or not value
            or id(value) in self._around  # or what is in it had names without end
            or self._many_plain(value)
        ):
            self._weights.left_out.append(name)
        else:
            self._around.add(id(value))
            self._collect_each(value, name, depth + 1)
            self._around.remove(id(value))

    def _collect_each(self, container: Any, name: str, depth: int) -> None:
        items = container.items() if isinstance(container, Mapping) else enumerate(container)
        for key, each in items:
            if _is_name(key):
                self._collect(each, join(name, key), depth)
            else:
                nameless = join(name, f"<a {type(key).__name__}>")
                self._count(nameless)
                self._weights.left_out.append(nameless)

    def _tensor(self, tensor: torch.Tensor, name: str) -> None:
        if _torch_types.is_dtensor(tensor):
            raise InvalidArgumentError(
                f"read '{self._path}': {_shown(name)} is a DTensor, of which other ranks have parts: save it whole (full_tensor())"
            )
        if tensor.is_nested:
            raise _torch_types.without_plain_memory(tensor, f"read '{self._path}': {_shown(name)}")
        if type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout == torch.strided:
            where = f"{tensor.data_ptr()} {tensor.dtype} {tensor.shape} {tensor.stride()}"
            self._nbytes[where] = tensor.nbytes
        _add(self._weights, f"read '{self._path}'", name, tensor)

    def _many_plain(self, value: Any) -> bool:
        """Whether it is long (a history of losses, the order of samples) and nothing in it can hold a tensor."""
        if len(value) <= _NAMED_EACH_MAX:
            return False
        if id(value) not in self._plain:
            values = value.values() if isinstance(value, Mapping) else value
            self._plain[id(value)] = not any(
                isinstance(each, (torch.Tensor, Mapping, list, tuple)) for each in values
            )
        return self._plain[id(value)]


def _is_name(key: Any) -> bool:
    """Whether its text says it, and is short; there are tuples of tuples whose text never ends."""
    plain = (str, int, float, bool, type(None))
    return isinstance(key, plain) or (
        isinstance(key, tuple) and len(key) < 10 and all(isinstance(each, plain) for each in key)
    )


# ---- safetensors ----


def _object_of(text: bytes) -> dict[str, Any]:
    """The object that a header or an index is. What it says twice could be read in two ways, and checked in one of them."""

    def told_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        told = dict(pairs)
        if len(told) != len(pairs):
            [(twice, _)] = collections.Counter(name for name, _ in pairs).most_common(1)
            raise InvalidArgumentError(f"it says {_shown(twice)} twice")
        return told

    try:
        told = json.loads(text, object_pairs_hook=told_once)
    except InvalidArgumentError:
        raise
    except (ValueError, RecursionError):
        told = None
    if type(told) is not dict:
        raise InvalidArgumentError("it says nothing that makes sense")
    return told


# Of a set: "model-00002-of-00003.safetensors".
_OF_SEVERAL = re.compile(r"(.*)-(\d+)-of-(\d+)\.safetensors")
# Entries of an exported set that are no tensors of the state (docs/formats.md, "An exported set").
_NO_TENSORS = "holdfast:"


class _Files:
    """The tensors of several safetensors files, and the further names that their metadata have for them (tied weights)."""

    def __init__(self) -> None:
        self._weights = Weights({}, [])
        self._further: dict[str, str] = {}

    def add(self, path: pathlib.Path, wanted: Callable[[str], bool] = lambda name: True) -> None:
        tensors, metadata = _read_safetensors(path)
        self._further |= metadata
        for name, tensor in tensors:
            if name.startswith(_NO_TENSORS):
                self._weights.left_out.append(name)
            elif wanted(name):
                _add(self._weights, f"read '{path}'", name, tensor)

    def weights(self) -> Weights:
        tensors = self._weights.tensors
        tied = {
            name: tensors[kept]
            for name, kept in self._further.items()
            if kept in tensors and name not in tensors
        }
        tensors |= tied
        return self._weights


def _read_file(path: pathlib.Path) -> Weights:
    files = _Files()
    files.add(path)
    return files.weights()


def _read_directory(path: pathlib.Path) -> Weights:
    indices = sorted(path.glob(_INDEX))
    if len(indices) > 1:
        raise InvalidArgumentError(
            f"read '{path}': it has several indices ({', '.join(index.name for index in indices)}): name a file of it"
        )
    if indices:
        return _read_indexed(path, indices[0])
    names = {file.name for file in path.glob("*.safetensors")}
    if not names:
        raise NotFoundError(
            f"read '{path}': no weights in it: looked for *.safetensors and for DCP's {_DCP_METADATA}"
        )
    sets = {
        (of[1], len(of[2]), of[3]) for of in (_OF_SEVERAL.fullmatch(name) for name in names) if of
    }
    for start, digits, count in sorted(sets):
        for number in range(1, min(int(count), len(names) + 1) + 1):
            other = f"{start}-{number:0{digits}}-of-{count}.safetensors"
            if other not in names:
                raise NotFoundError(f"read '{path}': '{other}' is missing: the set is not complete")
    files = _Files()
    for name in sorted(names):
        files.add(path / name)
    return files.weights()


def _read_indexed(path: pathlib.Path, index: pathlib.Path) -> Weights:
    if not index.is_file():
        raise InvalidArgumentError(f"read '{index}': not a file")
    if index.stat().st_size > _INDEX_BYTES_MAX:
        raise InvalidArgumentError(
            f"read '{index}': an index of more than {_INDEX_BYTES_MAX} bytes"
        )
    try:
        said = _object_of(index.read_bytes())["weight_map"]
        wanted = {str(name): str(file) for name, file in said.items()}
    except InvalidArgumentError as error:
        raise InvalidArgumentError(
            f"read '{index}': not an index of safetensors files: {error}"
        ) from None
    except (KeyError, AttributeError):
        raise InvalidArgumentError(f"read '{index}': not an index of safetensors files") from None
    files = _Files()
    for file in sorted(set(wanted.values())):
        files.add(_inside(path, file, index), lambda name, file=file: wanted.get(name) == file)  # type: ignore[misc]
    weights = files.weights()
    found = weights.tensors.keys() | set(weights.left_out)
    missing = sorted(wanted.keys() - found)
    if missing:
        raise InvalidArgumentError(
            f"read '{index}': {_shown(missing[0])} is not in '{wanted[missing[0]]}', where it should be, nor are "
            f"{len(missing) - 1} others where they should be"
        )
    return weights


def _inside(path: pathlib.Path, name: str, said_by: pathlib.Path) -> pathlib.Path:
    """The file of that name, which something hostile may have given."""
    if name in ("", ".", "..") or "/" in name or "\0" in name:
        raise RefusedError(
            f"read '{said_by}': it names {_shown(name)}, which is no file of its directory"
        )
    if len(name) > _FILE_NAME_MAX or not (path / name).is_file():
        raise NotFoundError(f"read '{said_by}': it names {_shown(name)}, and there is no such file")
    return path / name


def _read_safetensors(
    path: pathlib.Path,
) -> tuple[Iterator[tuple[str, torch.Tensor]], dict[str, str]]:
    """The tensors of one file: private mappings of it, so that memory is used as they are read; and its metadata."""

    def wrong(what: str) -> InvalidArgumentError:
        return InvalidArgumentError(
            f"read '{path}': not a safetensors file, or a damaged one: {what}"
        )

    if not path.is_file():
        raise InvalidArgumentError(f"read '{path}': not a file")
    with open(path, "rb") as file:
        bytes_in_file = os.fstat(file.fileno()).st_size
        length = int.from_bytes(file.read(8), "little")
        if bytes_in_file < 8 or length > min(_HEADER_BYTES_MAX, bytes_in_file - 8):
            raise wrong(f"{bytes_in_file} bytes, {length} of them header")
        data = 8 + length
        try:
            header = _object_of(file.read(length))
            metadata = {
                str(key): str(value) for key, value in header.get("__metadata__", {}).items()
            }
            described = {
                name: _described(each["dtype"], each["shape"], each["data_offsets"])
                for name, each in header.items()
                if name != "__metadata__"
            }
        except InvalidArgumentError as error:
            raise wrong(str(error)) from None
        except (ValueError, KeyError, TypeError, AttributeError):
            raise wrong("its header says nothing that makes sense") from None
        for name, (dtype, shape, (first, end)) in described.items():
            count = math.prod(shape)
            if end - first != count * dtype.itemsize:
                raise wrong(
                    f"{_shown(name)}: {first} to {end} is not where {count} elements of {dtype} lie"
                )
            if end > bytes_in_file - data:
                raise wrong(f"{_shown(name)} lies beyond the end of the file, which was cut short")
        if _overlap(place for _, _, place in described.values()):
            raise wrong("several of its tensors lie in the same place")
        with _memory(f"read '{path}'"):
            mapping = (
                mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
                if bytes_in_file > data
                else b""
            )

    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        for name, (dtype, shape, (first, _)) in described.items():
            with _memory(f"read '{path}': {_shown(name)}"):
                flat = _mapped(mapping, data + first, dtype, math.prod(shape))
                shaped = flat.reshape(shape)
            yield name, shaped

    return tensors(), metadata


def _overlap(places: Iterable[tuple[int, ...]]) -> bool:
    """Whether something lies in two of them. (What lies in none harms nobody.)"""
    taken = sorted((first, end) for first, end in places if first < end)
    return any(following < end for (_, end), (following, _) in itertools.pairwise(taken))


def _described(
    dtype: Any, shape: Any, offsets: Any
) -> tuple[torch.dtype, tuple[int, ...], tuple[int, ...]]:
    """What a header says of a tensor, as what it must be."""
    if type(dtype) is not str or len(shape) > _RANK_MAX or len(offsets) != 2:
        raise ValueError
    if not all(type(each) is int and 0 <= each <= _INTEGER_MAX for each in (*shape, *offsets)):
        raise ValueError
    if math.prod(each or 1 for each in shape) > _INTEGER_MAX:
        raise ValueError
    return _torch_types.dtype_from_name(dtype, "a tensor"), tuple(shape), tuple(offsets)


def _mapped(mapping: Any, offset: int, dtype: torch.dtype, count: int) -> torch.Tensor:
    if count == 0:
        return torch.empty(0, dtype=dtype)
    if offset % dtype.itemsize == 0:
        return torch.frombuffer(mapping, dtype=dtype, count=count, offset=offset)
    copied = bytearray(mapping[offset : offset + count * dtype.itemsize])
    return torch.frombuffer(copied, dtype=dtype, count=count)


# ---- torch.distributed.checkpoint ----


def _read_dcp(path: pathlib.Path) -> Weights:
    said_by = path / _DCP_METADATA
    metadata = _read_metadata(said_by)
    weights = Weights({}, [])
    parts = _Parts(path)
    for name, tensor in sorted(metadata.tensors.items()):
        if tensor is None:
            weights.left_out.append(name)
            continue
        where = f"read '{path}': {_shown(name)}"
        try:
            stored = [
                (offsets, sizes, metadata.stored_at(name, offsets))
                for offsets, sizes in tensor.parts
            ]
        except LookupError:
            raise InvalidArgumentError(
                f"read '{said_by}': it contradicts itself: of {_shown(name)} a part lies nowhere"
            ) from None
        _add(weights, f"read '{path}'", name, _whole(where, tensor, stored, parts))
    return weights


def _read_metadata(path: pathlib.Path) -> _dcp_metadata.Metadata:
    if path.stat().st_size > _PICKLE_BYTES_MAX:
        raise InvalidArgumentError(
            f"read '{path}': metadata of more than {_PICKLE_BYTES_MAX} bytes"
        )
    try:
        return _dcp_metadata.parse(path.read_bytes())
    except RefusedError as refused:
        raise RefusedError(f"read '{path}': {refused}") from None
    except Exception as error:
        raise of_memory(f"read '{path}'", error) or InvalidArgumentError(
            f"read '{path}': not DCP's metadata, or damaged, or it contradicts itself ({_first_line(error)})"
        ) from None


class _Parts:
    """The files of a directory of DCP. No part is read twice, so that what is read is never more than they have."""

    def __init__(self, path: pathlib.Path) -> None:
        self._path = path
        self._left: dict[str, int] = {}  # bytes of a file that no part was

    def claim(self, stored: _dcp_metadata.Stored) -> None:
        """Before memory is taken for it."""
        name, offset, length = stored.file, stored.offset, stored.length
        size = _inside(self._path, name, self._path / _DCP_METADATA).stat().st_size
        if stored.transformed:
            raise RefusedError(
                f"read '{self._path / name}': what DCP has transformed (compressed, for one) is not read: "
                "load it with dcp.load, and save it with holdfast.Checkpointer"
            )
        if offset < 0 or length < 0 or offset + length > size:
            raise InvalidArgumentError(
                f"read '{self._path / name}': {length} bytes at {offset} are beyond its end: it was cut short"
            )
        self._left[name] = self._left.get(name, size) - length
        if self._left[name] < 0:
            raise InvalidArgumentError(
                f"read '{self._path / name}': '{_DCP_METADATA}' names more of it than it has: parts of tensors lie in the same place"
            )

    def read(self, stored: _dcp_metadata.Stored) -> bytes:
        with open(self._path / stored.file, "rb") as file:
            file.seek(stored.offset)
            return file.read(stored.length)


def _whole(
    where: str,
    tensor: _dcp_metadata.Described,
    stored: list[tuple[tuple[int, ...], tuple[int, ...], _dcp_metadata.Stored]],
    parts: _Parts,
) -> torch.Tensor:
    """One tensor, put together out of its parts."""
    shape, dtype = tensor.shape, tensor.dtype
    _torch_types.dtype_name(dtype, where)
    if any(size < 0 for size in shape):
        raise InvalidArgumentError(f"{where}: {shape} is no shape")
    for offsets, sizes, place in stored:
        if not len(offsets) == len(sizes) == len(shape) or any(
            o < 0 or n < 0 or o + n > size for o, n, size in zip(offsets, sizes, shape, strict=True)
        ):
            raise InvalidArgumentError(f"{where}: a part at {offsets} of {sizes} is not in {shape}")
        parts.claim(place)
    bytes_stored = sum(place.length for _, _, place in stored)
    if math.prod(shape) * dtype.itemsize > bytes_stored:
        raise InvalidArgumentError(
            f"{where}: {bytes_stored} bytes are stored of a tensor of {shape}"
        )
    with _memory(where):
        whole = torch.empty(shape, dtype=dtype)
        has = None if len(stored) == 1 else torch.zeros(shape, dtype=torch.bool)
    for offsets, sizes, place in stored:
        with _memory(where):
            part = _part(where, parts.read(place))
        if part.dtype != dtype or tuple(part.shape) != sizes:
            raise InvalidArgumentError(
                f"{where}: the part at {offsets} is {part.dtype} of {tuple(part.shape)}, not {dtype} of {sizes}"
            )
        box = tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))
        whole[box] = part
        if has is not None:
            has[box] = True
        elif sizes != shape:
            raise InvalidArgumentError(f"{where}: only {sizes} of {shape} was stored")
    if has is not None and not has.all():
        raise InvalidArgumentError(f"{where}: its parts do not make up {shape}")
    return whole


def _part(where: str, data: bytes) -> torch.Tensor:
    try:
        if not data.startswith(_ARCHIVE):
            raise ValueError("it is no file of torch.save")
        _check_archive(io.BytesIO(data))
        part = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except Exception as error:
        raise of_memory(where, error) or InvalidArgumentError(
            f"{where}: a part is damaged ({_first_line(error)})"
        ) from None
    if (
        type(part) not in (torch.Tensor, torch.nn.Parameter)
        or part.layout != torch.strided
        or part.device.type != "cpu"
        or part.is_quantized
    ):
        raise InvalidArgumentError(f"{where}: a part is no tensor with plain memory")
    plain: torch.Tensor = part.detach()
    return plain
