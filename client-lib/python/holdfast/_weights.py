"""Weights that something else has saved, as tensors by name: files of `torch.save`, directories of
torch.distributed.checkpoint, safetensors files and directories of such.

    weights = read("consolidated.00.pth")          # Weights(tensors={"layers.0.weight": …}, left_out=["epoch"])

Whatever a source says is hostile: nothing of it is executed (pickles are read by an unpickler that makes tensors, containers
and DCP's own records, and refuses all else), names in it never lead out of its directory, and lengths are checked before
anything is read.
"""

from __future__ import annotations

import dataclasses
import enum
import io
import json
import math
import mmap
import os
import pathlib
import pickle
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, BinaryIO

import torch

from holdfast import _torch_types
from holdfast._errors import HoldfastError, InvalidArgument, NotFound, Refused
from holdfast._state import join

_HEADER_BYTES_MAX = 100_000_000  # safetensors' own limit
_METADATA_BYTES_MAX = 1 << 30
_INDEX = "*.safetensors.index.json"
_DCP_METADATA = ".metadata"
_DEPTH_MAX = 150


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
        raise NotFound(f"read weights: '{path}' is no file and no directory")
    if path.suffix == ".safetensors":
        return _read_file(path)
    return _read_torch(path)


# ---- torch.save ----


def _read_torch(path: pathlib.Path) -> Weights:
    for mapped in (True, False):  # files of before torch 1.6 cannot be mapped
        try:
            content = torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
            break
        except pickle.UnpicklingError as error:
            raise Refused(
                f"read '{path}': it holds more than tensors, containers and numbers, and what else it holds could run any code: "
                f"load it yourself, if you trust who wrote it, and save its weights with holdfast.Checkpointer ({_first_line(error)})"
            ) from None
        except Exception as error:  # of many kinds, for a file that is none of torch's
            if not mapped:
                raise InvalidArgument(
                    f"read '{path}': not a file of torch.save, or a damaged one ({_first_line(error)}); files of safetensors "
                    "are known by the end of their names"
                ) from None
    weights = Weights({}, [])
    if not isinstance(content, Mapping):
        raise InvalidArgument(
            f"read '{path}': it holds a {type(content).__name__}: a dictionary of tensors is wanted"
        )
    _collect(content, "", weights, 0)
    return weights


def _first_line(error: Exception) -> str:
    text = str(error).strip()
    return text.splitlines()[0][:200] if text else type(error).__name__


def _collect(value: Any, path: str, weights: Weights, depth: int) -> None:
    if isinstance(value, torch.Tensor):
        _add(weights, path, value)
    elif depth < _DEPTH_MAX and isinstance(value, Mapping) and value:
        for key, each in value.items():
            _collect(each, join(path, key), weights, depth + 1)
    elif depth < _DEPTH_MAX and isinstance(value, (list, tuple)) and value:
        for number, each in enumerate(value):
            _collect(each, join(path, number), weights, depth + 1)
    else:
        weights.left_out.append(path)


def _add(weights: Weights, name: str, tensor: torch.Tensor) -> None:
    if name in weights.tensors:
        raise InvalidArgument(f"two tensors are called {name!r}: they cannot be told apart")
    weights.tensors[name] = tensor.detach()


# ---- safetensors ----

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
                _add(self._weights, name, tensor)

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
        raise InvalidArgument(
            f"read '{path}': it has several indices ({', '.join(index.name for index in indices)}): name a file of it"
        )
    if indices:
        return _read_indexed(path, indices[0])
    names = sorted(file.name for file in path.glob("*.safetensors"))
    if not names:
        raise NotFound(
            f"read '{path}': no weights in it: looked for *.safetensors and for DCP's {_DCP_METADATA}"
        )
    for name in names:
        if of := _OF_SEVERAL.fullmatch(name):
            for number in range(1, min(int(of[3]), len(names) + 1) + 1):
                other = f"{of[1]}-{number:0{len(of[2])}}-of-{of[3]}.safetensors"
                if other not in names:
                    raise NotFound(f"read '{path}': '{other}' is missing: the set is not complete")
    files = _Files()
    for name in names:
        files.add(path / name)
    return files.weights()


def _read_indexed(path: pathlib.Path, index: pathlib.Path) -> Weights:
    try:
        said = json.loads(index.read_bytes())["weight_map"]
        wanted = {str(name): str(file) for name, file in said.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise InvalidArgument(f"read '{index}': not an index of safetensors files") from None
    files = _Files()
    for file in sorted(set(wanted.values())):
        files.add(_inside(path, file, index), lambda name, file=file: wanted.get(name) == file)  # type: ignore[misc]
    weights = files.weights()
    found = weights.tensors.keys() | set(weights.left_out)
    missing = sorted(wanted.keys() - found)
    if missing:
        raise InvalidArgument(
            f"read '{index}': {missing[0]!r} is not in '{wanted[missing[0]]}', where it should be, nor are {len(missing) - 1} others"
            " where they should be"
        )
    return weights


def _inside(path: pathlib.Path, name: str, said_by: pathlib.Path) -> pathlib.Path:
    """The file of that name, which something hostile may have given."""
    if name in ("", ".", "..") or "/" in name or "\0" in name:
        raise Refused(f"read '{said_by}': it names {name!r}, which is no file of its directory")
    if not (path / name).is_file():
        raise NotFound(f"read '{said_by}': it names '{name}', and there is no such file")
    return path / name


def _read_safetensors(
    path: pathlib.Path,
) -> tuple[Iterator[tuple[str, torch.Tensor]], dict[str, str]]:
    """The tensors of one file: private mappings of it, so that memory is used as they are read; and its metadata."""

    def wrong(what: str) -> InvalidArgument:
        return InvalidArgument(f"read '{path}': not a safetensors file, or a damaged one: {what}")

    with open(path, "rb") as file:
        bytes_in_file = os.fstat(file.fileno()).st_size
        length = int.from_bytes(file.read(8), "little")
        if bytes_in_file < 8 or length > min(_HEADER_BYTES_MAX, bytes_in_file - 8):
            raise wrong(f"{bytes_in_file} bytes, {length} of them header")
        try:
            header = json.loads(file.read(length))
            metadata = {
                str(key): str(value) for key, value in header.get("__metadata__", {}).items()
            }
            described = {
                name: (str(each["dtype"]), tuple(each["shape"]), tuple(each["data_offsets"]))
                for name, each in header.items()
                if name != "__metadata__"
            }
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            raise wrong("its header says nothing that makes sense") from None
        data = 8 + length
        mapping = (
            mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) if bytes_in_file > data else b""
        )

    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        for name, (dtype_name, shape, offsets) in described.items():
            dtype = _torch_types.dtype_from_name(dtype_name, f"'{path}': {name}")
            if not all(type(each) is int and each >= 0 for each in (*shape, *offsets)):
                raise wrong(
                    f"{name!r}: a shape and two offsets are wanted, not {shape} and {offsets}"
                )
            count = math.prod(shape)
            if len(offsets) != 2 or offsets[1] - offsets[0] != count * dtype.itemsize:
                raise wrong(
                    f"{name!r}: {offsets} is not where {count} elements of {dtype_name} lie"
                )
            if offsets[1] > bytes_in_file - data:
                raise wrong(f"{name!r} lies beyond the end of the file, which was cut short")
            yield name, _mapped(mapping, data + offsets[0], dtype, count).reshape(shape)

    return tensors(), metadata


def _mapped(mapping: Any, offset: int, dtype: torch.dtype, count: int) -> torch.Tensor:
    if count == 0:
        return torch.empty(0, dtype=dtype)
    if offset % dtype.itemsize == 0:
        return torch.frombuffer(mapping, dtype=dtype, count=count, offset=offset)
    copied = bytearray(mapping[offset : offset + count * dtype.itemsize])
    return torch.frombuffer(copied, dtype=dtype, count=count)


# ---- torch.distributed.checkpoint ----

_METADATA = "torch.distributed.checkpoint.metadata"
# What its metadata are made of. Each of these makes a value and does nothing else.
_ALLOWED = {
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
}


def _member(kind: Any, name: Any) -> Any:
    """Instead of getattr, as which some Pythons pickle an enumeration's members."""
    if isinstance(kind, enum.EnumMeta) and name in kind.__members__:
        return kind.__members__[name]
    raise Refused(f"it asks for {name!r} of {kind!r}, which is no member of an enumeration")


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _ALLOWED:
            return super().find_class(module, name)
        if (module, name) == ("builtins", "getattr"):
            return _member
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        raise Refused(f"it asks for {module}.{name}, which DCP's metadata have no need of")


def _read_dcp(path: pathlib.Path) -> Weights:
    metadata_path = path / _DCP_METADATA
    metadata = _read_metadata(metadata_path)
    weights = Weights({}, [])
    files: dict[str, BinaryIO] = {}

    def part_of(info: Any) -> bytes:
        name, offset, length = str(info.relative_path), int(info.offset), int(info.length)
        if getattr(info, "transform_descriptors", None):
            raise Refused(
                f"read '{path / name}': what DCP has transformed ({list(info.transform_descriptors)}) is not read: "
                "load it with dcp.load, and save it with holdfast.Checkpointer"
            )
        if name not in files:
            files[name] = open(_inside(path, name, metadata_path), "rb")
        file = files[name]
        if offset < 0 or length < 0 or offset + length > os.fstat(file.fileno()).st_size:
            raise InvalidArgument(
                f"read '{path / name}': {length} bytes at {offset} are beyond its end: it was cut short"
            )
        file.seek(offset)
        return file.read(length)

    try:
        stored_at = {
            (index.fqn, tuple(index.offset or ())): info
            for index, info in metadata.storage_data.items()
        }
        for name, tensor in sorted(metadata.state_dict_metadata.items()):
            if not hasattr(tensor, "chunks"):
                weights.left_out.append(name)
                continue
            stored = [
                (tuple(chunk.offsets), tuple(chunk.sizes), stored_at[name, tuple(chunk.offsets)])
                for chunk in tensor.chunks
            ]
            where = f"read '{path}': {name}"
            _add(weights, name, _whole(where, tensor, stored, part_of))
    except (AttributeError, LookupError, TypeError, ValueError, OverflowError) as error:
        if isinstance(error, HoldfastError):
            raise
        raise InvalidArgument(
            f"read '{metadata_path}': it contradicts itself ({_first_line(error)})"
        ) from None
    finally:
        for file in files.values():
            file.close()
    return weights


def _read_metadata(path: pathlib.Path) -> Any:
    # (Its classes are torch's; they are there before anything is unpickled.)
    import torch.distributed.checkpoint as dcp

    if path.stat().st_size > _METADATA_BYTES_MAX:
        raise InvalidArgument(f"read '{path}': metadata of more than {_METADATA_BYTES_MAX} bytes")
    try:
        metadata = _MetadataUnpickler(io.BytesIO(path.read_bytes())).load()
    except Refused as refused:
        raise Refused(f"read '{path}': {refused}") from None
    except Exception as error:
        raise InvalidArgument(
            f"read '{path}': not DCP's metadata, or damaged ({_first_line(error)})"
        ) from None
    if not isinstance(metadata, dcp.metadata.Metadata) or not all(
        isinstance(each, dict) for each in (metadata.state_dict_metadata, metadata.storage_data)
    ):
        raise InvalidArgument(f"read '{path}': not DCP's metadata")
    return metadata


def _whole(
    where: str,
    tensor: Any,
    stored: list[tuple[tuple[int, ...], tuple[int, ...], Any]],
    part_of: Callable[[Any], bytes],
) -> torch.Tensor:
    """One tensor, put together out of its chunks."""
    shape, dtype = tuple(tensor.size), tensor.properties.dtype
    _torch_types.dtype_name(dtype, where)
    if not all(type(each) is int and each >= 0 for each in shape):
        raise InvalidArgument(f"{where}: {shape} is no shape")
    bytes_stored = sum(int(info.length) for _, _, info in stored)
    if math.prod(shape) * dtype.itemsize > bytes_stored:  # before memory is taken for it
        raise InvalidArgument(f"{where}: {bytes_stored} bytes are stored of a tensor of {shape}")
    whole = torch.empty(shape, dtype=dtype)
    has = None if len(stored) == 1 else torch.zeros(shape, dtype=torch.bool)
    for offsets, sizes, info in stored:
        box = tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))
        if len(box) != len(shape) or any(
            o < 0 or n < 0 or o + n > size for o, n, size in zip(offsets, sizes, shape, strict=True)
        ):
            raise InvalidArgument(f"{where}: a part at {offsets} of {sizes} is not in {shape}")
        part = _chunk(where, part_of(info))
        if part.dtype != dtype or tuple(part.shape) != sizes:
            raise InvalidArgument(
                f"{where}: the part at {offsets} is {part.dtype} of {tuple(part.shape)}, not {dtype} of {sizes}"
            )
        whole[box] = part
        if has is not None:
            has[box] = True
        elif sizes != shape:
            raise InvalidArgument(f"{where}: only {sizes} of {shape} was stored")
    if has is not None and not has.all():
        raise InvalidArgument(f"{where}: its parts do not make up {shape}")
    return whole


def _chunk(where: str, data: bytes) -> torch.Tensor:
    try:
        part = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except Exception as error:
        raise InvalidArgument(f"{where}: a part is damaged ({_first_line(error)})") from None
    if not isinstance(part, torch.Tensor):
        raise InvalidArgument(f"{where}: a part is no tensor")
    return part
