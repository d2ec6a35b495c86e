"""DCP's chunks and items as slices of images, and back. Nothing here reads or writes anything."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)

from holdfast import _core
from holdfast._errors import CorruptError, InvalidArgumentError
from holdfast._state import FRESH, TREE
from holdfast._torch_types import Place, dtype_from_name
from holdfast.dcp import _optimizers, _tree

_RANKS_SHOWN = 8

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


class Item(NamedTuple):
    """As _core.OpenStep.items has it."""

    name: str
    dtype: str | None  # safetensors' name; None: an object
    shape: Sequence[int]
    ranks: Sequence[int]  # of a tensor: the one rank whose own it is, or none
    problem: str


@dataclasses.dataclass
class Stored:
    """A step as DCP sees it: each tensor whole, whichever rank saved which part of it."""

    metadata: Metadata
    # By name of DCP's: the name under which the tensor was saved (tied ones are saved once).
    tensors: dict[str, str]
    # By name: JSON, or which item has the value.
    objects: dict[str, bytes | int]
    # Names under which the ranks have things that cannot be told as one, or not all of it, and why.
    conflicts: dict[str, str]
    # Objects that are another value for another form of state dict.
    params: dict[str, _optimizers.Params]


def descriptions(items: Iterable[Item]) -> list[int]:
    """Which items are names, paths and trees: every rank's are to be read before anything is planned."""
    return [
        i for i, item in enumerate(items) if item.dtype is None and item.name in (TREE, MAPPINGS)
    ]


def stored(items: Sequence[Item], contents: Sequence[tuple[str, bytes, str | None]]) -> Stored:
    """DCP's metadata of a step. `contents`: of descriptions(items), in that order."""
    state: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
    tensors: dict[str, str] = {}
    objects: dict[str, bytes | int] = {}
    conflicts: dict[str, str] = {}
    mappings: dict[str, tuple[str | int, ...]] = {}
    trees: list[tuple[int, bytes]] = []
    own: dict[str, list[Item]] = {}  # several ranks', under one name
    for item in items:
        if item.dtype is None:
            continue
        if item.ranks:
            own.setdefault(item.name, []).append(item)
        if item.problem:
            conflicts[item.name] = item.problem
        if item.name not in tensors:
            tensors[item.name] = item.name
            state[item.name] = _whole(item.dtype, item.shape, item.name)
    for name, each in own.items():
        conflicts[name] = _differing(name, each)
    for index, (name, data, _) in zip(descriptions(items), contents, strict=True):
        rank = items[index].ranks[0]
        if name == TREE:
            trees.append((rank, data))
        else:
            mappings = {**decode_mappings(data, f"rank {rank}"), **mappings}
    seen = {TREE, MAPPINGS, FRESH}
    for index, item in enumerate(items):
        name = item.name
        if item.dtype is not None or name in seen:
            continue  # of values that ranks have of their own the lowest rank's
        seen.add(name)
        if name in tensors:
            conflicts[name] = (
                f"{name!r} is a tensor on some ranks and an object on rank {item.ranks[0]}"
            )
        else:
            objects[name] = index
            state[name] = BytesStorageMetadata()

    def name_again(name: str, content: str | bytes) -> None:
        """Never what was saved under that name itself."""
        if name in state:
            return
        if isinstance(content, bytes):
            objects[name] = content
            state[name] = BytesStorageMetadata()
        elif content in state:
            state[name] = state[content]
            if content in tensors:
                tensors[name] = tensors[content]
            if content in objects:
                objects[name] = objects[content]
            if content in conflicts:
                conflicts[name] = conflicts[content]

    optimizers = _optimizers.Names()
    for rank, data in trees:
        tree = _tree.read(data, f"rank {rank}")
        optimizers.add(tree, f"rank {rank}")
        for name, content in tree.entries:
            name_again(name, content)
    params = {name: each for name, each in optimizers.params.items() if name not in state}
    for name, content in optimizers.found():
        name_again(name, content)
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
        tensors,
        objects,
        conflicts,
        params,
    )


def _whole(dtype: str, shape: Sequence[int], name: str) -> TensorStorageMetadata:
    """In one chunk: what is planned with it is the same however many ranks saved parts."""
    size = torch.Size(shape)
    return TensorStorageMetadata(
        TensorProperties(dtype=dtype_from_name(dtype, name)),
        size,
        [ChunkStorageMetadata(torch.Size([0] * len(size)), size)],
    )


def _differing(name: str, own: Sequence[Item]) -> str:
    kinds = {(each.dtype, tuple(each.shape)) for each in own}
    ranks = ", ".join(str(each.ranks[0]) for each in own[:_RANKS_SHOWN])
    more = f" and {len(own) - _RANKS_SHOWN} more" if len(own) > _RANKS_SHOWN else ""
    what = (
        "different values"
        if len(kinds) == 1
        else "tensors of different types or shapes, "
        + ", ".join(f"{dtype} {list(shape)}" for dtype, shape in sorted(kinds, key=str))
    )
    return (
        f"ranks {ranks}{more} saved {what}. Leave it out of the state that is loaded; one rank's is "
        f"holdfast.open(…).tensor({name!r}, rank=…)"
    )
