"""What a load plan wants of a step, as parts of its tensors that are read together."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence

import torch
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlanner, ReadItem

from holdfast import _core
from holdfast._errors import InvalidArgumentError
from holdfast._torch_types import Place, dtype_name
from holdfast.dcp._layout import Slice, Stored, tensor_list

# What is read at once, and so the most memory beside the tensors that are loaded; a larger part is
# read alone.
_BATCH_BYTES = 1 << 28


@dataclasses.dataclass(frozen=True)
class Part:
    """A box of a saved tensor. Several items may want it: tied tensors are saved once."""

    name: str  # under which it was saved
    dtype: torch.dtype
    place: Place

    @property
    def nbytes(self) -> int:
        return math.prod(self.place.local_shape) * self.dtype.itemsize

    def meets(self, other: Part) -> bool:
        return self.name == other.name and all(
            a < b + m and b < a + n
            for a, n, b, m in zip(
                self.place.offset,
                self.place.local_shape,
                other.place.offset,
                other.place.local_shape,
            )
        )


def _parts_of(items: Sequence[ReadItem], stored: Stored) -> dict[Part, list[ReadItem]]:
    """By part, the items that want just that."""
    parts: dict[Part, list[ReadItem]] = {}
    for item in items:
        fqn = item.storage_index.fqn
        metadata = stored.metadata.state_dict_metadata[fqn]
        assert isinstance(metadata, TensorStorageMetadata)
        place = Place(tuple(metadata.size), tuple(item.storage_offsets), tuple(item.lengths))
        part = Part(stored.tensors[fqn], metadata.properties.dtype, place)
        parts.setdefault(part, []).append(item)
    return parts


class Reads:
    """Parts that are planned, and held where they lie on this node, until they have been read.

    reads = Reads(step, items, stored)
    reads.into(planner)
    """

    def __init__(self, step: _core.OpenStep, items: list[ReadItem], stored: Stored) -> None:
        self.items = items
        self._parts = parts = _parts_of(items, stored)
        self._kept = [
            (group, step.keep(tensor_list([_slice(part) for part in group])))
            for group in _apart([part for part in parts if part.nbytes > 0])
        ]

    def into(self, planner: LoadPlanner) -> None:
        for group, kept in self._kept:
            for batch in _batches(group):
                self._read(batch, len(group), kept, planner)
        for part, items in self._parts.items():
            if part.nbytes == 0:
                for item in items:
                    planner.commit_tensor(item, _target(planner, item))

    def _read(
        self, batch: dict[int, Part], count: int, kept: _core.KeptParts, planner: LoadPlanner
    ) -> None:
        addresses = [0] * count
        targets = {}
        for index, part in batch.items():
            wanted = [(item, _target(planner, item)) for item in self._parts[part]]
            # What is alone and has the saved bytes' form is read straight into its place.
            straight = len(wanted) == 1 and _takes(wanted[0][1], part.dtype)
            memory = wanted[0][1] if straight else _beside(part, wanted[0][1].device)
            addresses[index] = memory.data_ptr()
            targets[index] = (wanted, memory)
        kept.read(addresses)
        for wanted, memory in targets.values():
            for item, target in wanted:
                if target is not memory:
                    target.copy_(memory)
                planner.commit_tensor(item, target)


def _slice(part: Part) -> Slice:
    return Slice(part.name, dtype_name(part.dtype, part.name), part.place)


def _apart(parts: Sequence[Part]) -> list[list[Part]]:
    """In groups within which no two share elements: as good as always one."""
    groups: list[dict[str, list[Part]]] = []
    for part in parts:
        for group in groups:
            if not any(part.meets(other) for other in group.get(part.name, ())):
                break
        else:
            groups.append(group := {})
        group.setdefault(part.name, []).append(part)
    return [[part for same in group.values() for part in same] for group in groups]


def _batches(parts: Sequence[Part]) -> Iterator[dict[int, Part]]:
    batch: dict[int, Part] = {}
    nbytes = 0
    for index, part in enumerate(parts):
        if batch and nbytes + part.nbytes > _BATCH_BYTES:
            yield batch
            batch, nbytes = {}, 0
        batch[index] = part
        nbytes += part.nbytes
    if batch:
        yield batch


def _target(planner: LoadPlanner, item: ReadItem) -> torch.Tensor:
    target = planner.resolve_tensor(item).detach()
    if tuple(target.shape) != tuple(item.lengths):
        raise InvalidArgumentError(
            f"load: {item.storage_index.fqn}: the plan wants shape {tuple(item.lengths)} put into "
            f"{tuple(target.shape)}"
        )
    return target


def _takes(target: torch.Tensor, dtype: torch.dtype) -> bool:
    return (
        target.dtype == dtype
        and target.device.type == "cpu"
        and target.is_contiguous()
        and type(target) is torch.Tensor
        and not (target.is_conj() or target.is_neg())
    )


def _beside(part: Part, device: torch.device) -> torch.Tensor:
    """Memory that is ours. What goes on to a GPU goes there fastest from pinned memory."""
    return torch.empty(
        part.place.local_shape,
        dtype=part.dtype,
        device="cpu",
        pin_memory=device.type == "cuda",
    )
