"""DCP's chunks and items as slices of images, and back. Nothing here reads or writes anything."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from holdfast import _core
from holdfast._errors import CorruptError, InvalidArgumentError
from holdfast._state import FRESH, TREE
from holdfast._torch_types import Place, dtype_from_name
from holdfast.dcp import _optimizers, _tree

# The object beside a rank's state that says which path each name was made of: what puts a flat
# state dict together again.
MAPPINGS = "torch.distributed.checkpoint/planner_data"


def check_name(name: str) -> None:
    """A value under the name of what Holdfast puts beside a state would be read as that."""
    if name in (TREE, FRESH, MAPPINGS):
        raise InvalidArgumentError(f"{name!r}: Holdfast keeps this name for itself: rename the key")


@dataclasses.dataclass(frozen=True, slots=True)
class Slice:
    """One tensor of a rank's image."""

    name: str
    dtype: str  # safetensors' name
    place: Place
    device: int = -1


def tensor_list(slices: Sequence[Slice]) -> _core.TensorList:
    """As the extension module takes it."""
    tensors = _core.TensorList()
    for each in slices:
        place = each.place
        if place.whole:
            tensors.add(each.name, each.dtype, place.shape, device=each.device)
        else:
            tensors.add(
                each.name,
                each.dtype,
                place.shape,
                offset=place.offset,
                local_shape=place.local_shape,
                device=each.device,
            )
    return tensors


def chunk_place(size: Sequence[int], chunk: ChunkStorageMetadata) -> Place:
    return Place(tuple(size), tuple(chunk.offsets), tuple(chunk.sizes))


def encode_mappings(mappings: Mapping[str, Sequence[str | int]]) -> bytes:
    """DCP's FLATTEN_MAPPING: of each name the path that it was made of.

    >>> encode_mappings({"optim.state.0": ("optim", "state", 0)})
    b'{"optim.state.0":["optim","state",0]}'
    """
    return json.dumps(
        {name: list(path) for name, path in mappings.items()},
        ensure_ascii=True,
        separators=(",", ":"),
    ).encode("ascii")


def decode_mappings(data: bytes, where: str) -> dict[str, tuple[str | int, ...]]:
    try:
        tree = json.loads(data)
        paths = {name: tuple(path) for name, path in tree.items()}
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise CorruptError(
            f"{where}: object {MAPPINGS!r} is not a map of names to paths: {error}"
        ) from error
    for name, path in paths.items():
        if not path or not all(type(part) in (str, int) for part in path):
            raise CorruptError(f"{where}: object {MAPPINGS!r} has {path!r} as the path of {name!r}")
    return paths


def boxes_of_range(
    shape: Sequence[int], start: int, length: int
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...], int]]:
    """A range of a tensor's row-major flattening as boxes: (offset, shape, first element within the
    range), in order.

    >>> list(boxes_of_range((4, 3), 1, 6))          # rest of a row, whole rows, beginning of a row
    [((0, 1), (1, 2), 0), ((1, 0), (1, 3), 2), ((2, 0), (1, 1), 5)]
    """
    shape = tuple(shape)
    if length == 0:
        return
    if len(shape) <= 1:
        yield ((start,), (length,), 0) if shape else ((), (), 0)
        return
    row = math.prod(shape[1:])
    done = 0
    while done < length:
        at = start + done
        index, within = divmod(at, row)
        if within == 0 and length - done >= row:
            rows = (length - done) // row
            yield (index,) + (0,) * (len(shape) - 1), (rows,) + shape[1:], done
            done += rows * row
            continue
        part = min(row - within, length - done)
        for offset, box, first in boxes_of_range(shape[1:], within, part):
            yield (index,) + offset, (1,) + box, done + first
        done += part


class StoredTensor(Protocol):
    """What _core.TensorInfo has."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: tuple[int, ...] | None
    local_shape: tuple[int, ...] | None
    flat: tuple[int, int] | None


@dataclasses.dataclass(frozen=True, slots=True)
class Source:
    """Where a chunk's bytes are: a part of a tensor in a rank's image."""

    rank: int
    index: int  # of the tensor in the image
    elements: int  # of the whole tensor in the image
    first: int  # element of it that the chunk begins with
    place: Place
    dtype: torch.dtype

    @property
    def whole(self) -> bool:
        return self.first == 0 and math.prod(self.place.local_shape) == self.elements


@dataclasses.dataclass
class Stored:
    """A checkpoint as its shards describe it."""

    metadata: Metadata
    # By name, in the order of the metadata's chunks.
    sources: dict[str, list[Source]]
    # By name: rank, JSON or opaque bytes, codec.
    objects: dict[str, tuple[int, bytes, str | None]]
    # Names under which the ranks have things that cannot be told as one, or not all of it, and why.
    conflicts: dict[str, str]
    # Objects that are another value for another form of state dict.
    params: dict[str, _optimizers.Params]

    def source(self, index: MetadataIndex) -> Source:
        sources = self.sources[index.fqn]
        if (
            index.index is not None
            and index.index < len(sources)
            and _begins_at(sources[index.index], index)
        ):
            return sources[index.index]
        for each in sources:
            if _begins_at(each, index):
                return each
        raise InvalidArgumentError(
            f"load: the plan wants a part of {index.fqn!r} at {index.offset}, where none was saved"
        )


def _begins_at(source: Source, index: MetadataIndex) -> bool:
    return index.offset is None or tuple(index.offset) == source.place.offset


def _sources_of(
    rank: int, index: int, tensor: StoredTensor, dtype: torch.dtype
) -> Iterator[Source]:
    shape = tuple(tensor.shape)
    if tensor.flat is not None:
        start, length = tensor.flat
        for offset, box, first in boxes_of_range(shape, start, length):
            yield Source(rank, index, length, first, Place(shape, offset, box), dtype)
        return
    if tensor.offset is None or tensor.local_shape is None:
        place = Place(shape, (0,) * len(shape), shape)
    else:
        place = Place(shape, tuple(tensor.offset), tuple(tensor.local_shape))
    yield Source(rank, index, math.prod(place.local_shape), 0, place, dtype)


def stored(
    shards: Iterable[tuple[Sequence[StoredTensor], Sequence[tuple[str, bytes, str | None]]]],
) -> Stored:
    """DCP's metadata of a checkpoint, from the layouts of its shards in the order of ranks.

    Of what several ranks hold alike (replicas) the lowest rank's is taken, so that all who load
    read the same bytes, as from a checkpoint that DCP has de-duplicated.
    """
    state: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
    sources: dict[str, list[Source]] = {}
    objects: dict[str, tuple[int, bytes, str | None]] = {}
    owners: dict[str, tuple[int, str]] = {}
    conflicts: dict[str, str] = {}
    mappings: dict[str, tuple[str | int, ...]] = {}
    trees: list[tuple[int, bytes]] = []
    seen: set[tuple[Any, ...]] = set()
    for rank, (tensors, rank_objects) in enumerate(shards):
        for index, tensor in enumerate(tensors):
            kind = f"a {tensor.dtype} tensor of shape {tuple(tensor.shape)}"
            if owners.setdefault(tensor.name, (rank, kind))[1] != kind:
                conflicts[tensor.name] = (
                    f"{owners[tensor.name][1]} on rank {owners[tensor.name][0]}, {kind} on rank "
                    f"{rank}"
                )
                continue
            if tensor.name not in state:
                dtype = dtype_from_name(tensor.dtype, tensor.name)
                state[tensor.name] = TensorStorageMetadata(
                    TensorProperties(dtype=dtype), torch.Size(tensor.shape), []
                )
                sources[tensor.name] = []
            metadata = state[tensor.name]
            assert isinstance(metadata, TensorStorageMetadata)
            for source in _sources_of(rank, index, tensor, metadata.properties.dtype):
                key = (tensor.name, source.place.offset, source.place.local_shape)
                if key in seen:
                    continue
                seen.add(key)
                metadata.chunks.append(
                    ChunkStorageMetadata(
                        torch.Size(source.place.offset), torch.Size(source.place.local_shape)
                    )
                )
                sources[tensor.name].append(source)
        for name, data, codec in rank_objects:
            if name == FRESH:
                continue
            if name == TREE:
                trees.append((rank, data))
                continue
            if name == MAPPINGS:
                mappings = {**decode_mappings(data, f"rank {rank}"), **mappings}
                continue
            kind = "an object"
            if owners.setdefault(name, (rank, kind))[1] != kind:
                conflicts[name] = (
                    f"{owners[name][1]} on rank {owners[name][0]}, {kind} on rank {rank}"
                )
                continue
            if name not in objects:
                objects[name] = (rank, data, codec)
                state[name] = BytesStorageMetadata()
    for name, each in state.items():
        if isinstance(each, TensorStorageMetadata):
            has = sum(math.prod(chunk.sizes) for chunk in each.chunks)
            if has < math.prod(each.size):
                conflicts.setdefault(
                    name, f"the ranks saved {has} of its {math.prod(each.size)} elements"
                )

    def name_again(rank: int, name: str, content: str | bytes) -> None:
        """Never what was saved under that name itself."""
        if name in state:
            return
        if isinstance(content, bytes):
            objects[name] = (rank, content, None)
            state[name] = BytesStorageMetadata()
        elif content in state:
            state[name] = state[content]
            if content in sources:
                sources[name] = sources[content]
            if content in objects:
                objects[name] = objects[content]
            if content in conflicts:
                conflicts[name] = conflicts[content]

    optimizers = _optimizers.Names()
    for rank, data in trees:
        tree = _tree.read(data, f"rank {rank}")
        optimizers.add(tree, f"rank {rank}")
        for name, content in tree.entries:
            name_again(rank, name, content)
    params = {name: each for name, each in optimizers.params.items() if name not in state}
    for name, content in optimizers.found():
        name_again(0, name, content)
    # In the order in which the state dict had them, not that of the images; DCP's readers of whole
    # checkpoints go by it. And they look every name up.
    state = {
        name: state[name]
        for name in [
            *(each for each in mappings if each in state),
            *(each for each in state if each not in mappings),
        ]
    }
    planner_data = {name: mappings.get(name, (name,)) for name in state}
    return Stored(
        Metadata(state_dict_metadata=state, planner_data=planner_data),
        sources,
        objects,
        conflicts,
        params,
    )
