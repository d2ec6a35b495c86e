"""Staging for dcp.async_save: the state is copied once, straight into a slot of the daemon's, and
what DCP plans and "writes" afterwards are views of that slot. Writing is then no more than sealing
it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItemType
from torch.distributed.checkpoint.staging import AsyncStager

from holdfast import _core, _held, _objects
from holdfast._errors import InvalidArgument, Refused
from holdfast._handle import streams_of
from holdfast._held import HeldSave
from holdfast._jobs import SharedJob
from holdfast._torch_types import (
    Place,
    address_of,
    dense,
    device_ordinal,
    dtensor_place,
    dtype_name,
    is_dtensor,
    tensors_over,
)
from holdfast.dcp import _items
from holdfast.dcp._layout import (
    MAPPINGS,
    Slice,
    check_name,
    chunk_place,
    encode_mappings,
    tensor_list,
)

if TYPE_CHECKING:
    from holdfast.dcp._writer import Writer

# The Writer of each job that was made last and has not been used: the one of the dcp.async_save
# that is being called.
_announced: dict[str, weakref.ref[Writer]] = {}
_announced_lock = threading.Lock()


def announce(writer: Writer) -> None:
    with _announced_lock:
        _announced[writer.job] = weakref.ref(writer)


def withdraw(writer: Writer) -> None:
    """The writer is in use: no stager looks for it any more."""
    with _announced_lock:
        announced = _announced.get(writer.job)
        if announced is not None and announced() in (writer, None):
            del _announced[writer.job]


def _claim(job: str) -> Writer:
    with _announced_lock:
        announced = _announced.pop(job, None)
    writer = announced() if announced is not None else None
    if writer is None:
        raise InvalidArgument(
            f"stage: no Writer of job {job!r} waits for a state: the step comes from it, so make "
            "it in the call: "
            f"dcp.async_save(state, storage_writer=holdfast.dcp.Writer({job!r}, step=…), "
            "async_stager=stager)"
        )
    return writer


class Stager(AsyncStager):
    """Stages for `dcp.async_save` straight into the slot; takes the step and all else from the
    Writer of the same call.

        stager = holdfast.dcp.Stager("llama")
        for step in …:
            writer = holdfast.dcp.Writer("llama", step=step)
            dcp.async_save(state, storage_writer=writer, async_stager=stager)

    `stage` returns when the state has been copied: the loop may go on and change it. A Writer
    stages by itself where no `async_stager` is given; a Stager is for code that has a place for
    one.
    """

    _synchronize_after_execute = False

    def __init__(self, job: str) -> None:
        self.job = job

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        return _claim(self.job).stage(state_dict)

    def synchronize_staging(self) -> None:
        """Nothing is left to wait for when `stage` has returned."""

    def close(self) -> None:
        """A Stager holds nothing."""


class _Pieces:
    """The contiguous pieces of the state, in the order of the image. With thousands of tensors it
    is the making of objects that costs: so there are two lists, and no object for each piece, and
    the last save's slices are used again.
    """

    def __init__(self, known: Mapping[str, Slice]) -> None:
        self.slices: list[Slice] = []
        self.sources: list[torch.Tensor] = []
        self._known = known

    def add(self, piece: Slice, source: torch.Tensor) -> int | torch.Tensor:
        """Its number; or what is to be there instead of a copy, where there is nothing to copy."""
        if piece.place.empty:
            return torch.empty(source.shape, dtype=source.dtype, device="cpu")
        self.slices.append(piece)
        self.sources.append(source)
        return len(self.slices) - 1

    def add_whole(self, name: str, tensor: torch.Tensor) -> int:
        source = dense(tensor, name)
        dtype, shape, device = (
            dtype_name(source.dtype, name),
            source.shape,
            device_ordinal(source, name),
        )
        piece = self._known.get(name)
        if (
            piece is None
            or piece.place.shape != shape
            or piece.place.local_shape != shape
            or piece.dtype != dtype
            or piece.device != device
        ):
            piece = Slice(name, dtype, Place(tuple(shape), (0,) * len(shape), tuple(shape)), device)
        self.slices.append(piece)
        self.sources.append(source)
        return len(self.slices) - 1

    def add_part(self, name: str, local: torch.Tensor, place: Place) -> int | torch.Tensor:
        source = dense(local, name)
        dtype = dtype_name(source.dtype, name)
        return self.add(Slice(name, dtype, place, device_ordinal(source, name)), source)


@dataclasses.dataclass(slots=True)
class _Leaf:
    """A tensor of the state dict that is more than its memory: its pieces, and how one like it is
    made over the copies. None of them: it stays as it is.
    """

    pieces: list[int | torch.Tensor]
    rebuild: Callable[[list[torch.Tensor]], Any]

    def over(self, copies: list[torch.Tensor]) -> Any:
        return self.rebuild(
            [each if isinstance(each, torch.Tensor) else copies[each] for each in self.pieces]
        )


def _dtensor_leaf(name: str, tensor: Any, pieces: _Pieces) -> _Leaf:
    from torch.distributed.tensor import DTensor

    place = dtensor_place(tensor, name)
    if place is None:  # not of this rank, and DCP plans nothing for it
        return _Leaf([], lambda _: tensor)
    piece = pieces.add_part(name, tensor._local_tensor, place)
    spec = tensor._spec

    def rebuild(copies: list[torch.Tensor]) -> Any:
        # from_local would move the copy to the mesh's device. torch leaves DTensor.__new__ untyped.
        return DTensor(copies[0], spec, requires_grad=False)  # type: ignore[no-untyped-call]

    return _Leaf([piece], rebuild)


def _sharded_leaf(name: str, tensor: Any, pieces: _Pieces) -> _Leaf:
    from torch.distributed._shard.sharded_tensor.api import ShardedTensor
    from torch.distributed._shard.sharded_tensor.shard import Shard

    whole = tensor.metadata()
    size = tuple(whole.size)
    parts = [shard.metadata for shard in tensor.local_shards()]
    group, init_rrefs = tensor._process_group, tensor._init_rrefs

    def rebuild(copies: list[torch.Tensor]) -> Any:
        return ShardedTensor._init_from_local_shards_and_global_metadata(
            [Shard(tensor=copy, metadata=part) for copy, part in zip(copies, parts)],
            sharded_tensor_metadata=whole,
            process_group=group,
            init_rrefs=init_rrefs,
        )

    return _Leaf(
        [
            pieces.add_part(
                name,
                shard.tensor,
                Place(size, tuple(part.shard_offsets), tuple(part.shard_sizes)),
            )
            for shard, part in zip(tensor.local_shards(), parts, strict=True)
        ],
        rebuild,
    )


def _leaf(name: str, tensor: torch.Tensor, pieces: _Pieces) -> int | _Leaf:
    """The number of its one piece, for a plain tensor."""
    if type(tensor) is torch.Tensor or type(tensor) is torch.nn.Parameter:
        return pieces.add_whole(name, tensor)
    from torch.distributed._shard.sharded_tensor.api import ShardedTensor

    if isinstance(tensor, ShardedTensor):
        return _sharded_leaf(name, tensor, pieces)
    if is_dtensor(tensor):
        return _dtensor_leaf(name, tensor, pieces)
    if hasattr(tensor, "__create_write_items__"):
        raise Refused(
            f"{name}: a {type(tensor).__module__}.{type(tensor).__qualname__} is staged by its own "
            "rules only: "
            "use DCP's DefaultStager beside the Writer"
        )
    return pieces.add_whole(name, tensor)


def _is_terminal(value: Any) -> bool:
    """As DCP's own traversal has it (_traverse.py): lists are taken apart where they hold tensors
    or mappings.
    """
    if isinstance(value, Mapping):
        return False
    if not isinstance(value, list):
        return True
    return not any(
        isinstance(each, torch.Tensor)
        or (isinstance(each, (Mapping, list)) and not _is_terminal(each))
        for each in value
    )


def _like(value: Any, leaves: Iterator[Any]) -> Any:
    """The nested state dict anew, with other leaves, in the order in which DCP flattens it."""
    if type(value) is torch.Tensor:
        return next(leaves)
    if isinstance(value, Mapping):
        return {key: _like(each, leaves) for key, each in value.items()}
    if _is_terminal(value):
        return next(leaves)
    return [_like(each, leaves) for each in value]


class Staged:
    """A state in a slot that is not sealed yet."""

    def __init__(
        self,
        held: HeldSave,
        slices: list[Slice],
        copies: list[torch.Tensor],
        objects: dict[str, tuple[str, bytes, str | None]],
        values: dict[str, Any],
        mappings: dict[str, Any],
    ) -> None:
        self.held = held
        self.objects = objects
        self._slices = slices
        self._copies = copies
        self._values = values
        self._mappings = mappings

    def difference(self, plan: SavePlan, planner: SavePlanner) -> str | None:
        """What the plan wants that is not what lies in the slot; None: nothing, and sealing it is
        all that is to do.

        The slot may well hold more: replicas that the plan has another rank write.
        """
        if plan.planner_data is not None and plan.planner_data != self._mappings:
            return "other names for what is in the state"
        pieces = {
            (piece.name, piece.place.offset): (piece.place, copy)
            for piece, copy in zip(self._slices, self._copies, strict=True)
        }
        for item in plan.items:
            name = item.index.fqn
            if item.type == WriteItemType.BYTE_IO:
                if name not in self.objects:
                    return f"an object {name!r}"
                if (
                    _items.resolves_plainly(planner)
                    and planner.lookup_object(item.index) is self._values[name]
                ):
                    continue
                if _items.object_of(item, planner, allow_pickle=True) != self.objects[name]:
                    return f"another value of {name!r}"
                continue
            wanted = planner.resolve_data(item)
            assert item.tensor_data is not None and isinstance(wanted, torch.Tensor)
            place = chunk_place(item.tensor_data.size, item.tensor_data.chunk)
            if place.empty:
                continue
            staged_place, copy = pieces.get((name, place.offset), (None, wanted))
            if staged_place != place:
                return f"{name!r} in another shape or place"
            if (
                wanted.dtype != copy.dtype
                or tuple(wanted.shape) != place.local_shape
                or not wanted.is_contiguous()
                or (wanted.numel() > 0 and wanted.data_ptr() != copy.data_ptr())
            ):
                return f"other values of {name!r}"
        return None


@dataclasses.dataclass(slots=True)
class Layout:
    """What a state is made of, apart from its values; kept from save to save (SharedJob.staged)."""

    slices: list[Slice]
    by_name: dict[str, Slice]
    tensors: _core.TensorList
    mappings: dict[str, Any]
    encoded_mappings: bytes


def _layout(shared: SharedJob, slices: list[Slice], mappings: dict[str, Any]) -> Layout:
    """The last save's, where nothing but the values has changed."""
    last: Layout | None = shared.staged
    if last is None or last.slices != slices or last.mappings != mappings:
        last = shared.staged = Layout(
            slices,
            # Several parts of one tensor are not told apart by its name, and made anew each time.
            {each.name: each for each in slices},
            tensor_list(slices),
            mappings,
            encode_mappings(mappings),
        )
    return last


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """The cyclic collector starts again and again as thousands of objects are made, goes through
    all that the process has, and finds nothing: half of the time that staging takes.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def stage(
    shared: SharedJob,
    state_dict: dict[str, Any],
    step: int,
    *,
    allow_pickle: bool,
    wait_for_room: float,
    timeout: float,
) -> tuple[dict[str, Any], Staged]:
    """Copies the state into a slot: the same state dict over the copies, and what is to become of
    them.
    """
    # 1. What there is, by DCP's own names.
    with _no_collection():
        flat, mappings = flatten_state_dict(state_dict)
        pieces = _Pieces({} if shared.staged is None else shared.staged.by_name)
        leaves: dict[str, int | _Leaf] = {}
        objects: dict[str, tuple[str, bytes, str | None]] = {}
        for name, value in flat.items():
            check_name(name)
            if isinstance(value, torch.Tensor):
                leaves[name] = _leaf(name, value, pieces)
            else:
                objects[name] = _objects.to_object(name, value, allow_pickle=allow_pickle)

    # 2. One copy. What it reads from is kept until it has ended.
    sources = pieces.sources
    with _held.alone(shared, f"step {step}", timeout):
        shared.begin(timeout)
        layout = _layout(shared, pieces.slices, mappings)
        held = HeldSave(
            shared,
            step,
            shared.core.save(
                step,
                layout.tensors,
                [source.data_ptr() for source in sources],
                [*objects.values(), (MAPPINGS, layout.encoded_mappings, None)],
                hold=True,
                streams=streams_of({piece.device for piece in layout.slices} - {-1}),
                wait_for_room=wait_for_room,
            ),
            sources,
        )
    try:
        held.save.wait("snapshot", timeout)
        memory, offsets, sizes = held.save.staged()
        begin = address_of(memory)
        held.lies_at(begin, begin + memory.nbytes)

        # 3. The same state over the copies. Objects are values of their own, too: the loop goes on
        # to change its.
        with _no_collection():
            copies = tensors_over(
                memory,
                offsets,
                sizes,
                [source.dtype for source in sources],
                [source.shape for source in sources],
            )
            values = {
                name: _objects.from_object(name, data, codec, allow_pickle=allow_pickle)
                for name, (_, data, codec) in objects.items()
            }
            nested = _like(state_dict, _replaced(flat, leaves, copies, values))
        return nested, Staged(held, layout.slices, copies, objects, values, mappings)
    except BaseException:
        held.discard()
        raise


def _replaced(
    names: Iterable[str],
    leaves: Mapping[str, int | _Leaf],
    copies: list[torch.Tensor],
    values: Mapping[str, Any],
) -> Iterator[Any]:
    for name in names:
        leaf = leaves.get(name)
        if leaf is None:
            yield values[name]
        else:
            yield copies[leaf] if isinstance(leaf, int) else leaf.over(copies)


def _after_fork() -> None:
    """Threads of the parent may hold its lock for ever."""
    global _announced_lock
    _announced_lock = threading.Lock()


os.register_at_fork(after_in_child=_after_fork)
