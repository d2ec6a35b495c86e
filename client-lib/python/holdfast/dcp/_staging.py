"""Staging for dcp.async_save: the state is copied once, straight into a slot of the daemon's, and
what DCP plans and "writes" afterwards are views of that slot. Writing is then no more than sealing
it.
"""

from __future__ import annotations

import dataclasses
import math
import operator
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItemType
from torch.distributed.checkpoint.staging import AsyncStager

from holdfast import _core, _fences, _fresh, _held, _objects
from holdfast._collection import no_collection
from holdfast._described import plain_types, traits
from holdfast._errors import InvalidArgumentError, RefusedError
from holdfast._handle import Handle, streams_of
from holdfast._held import HeldSave
from holdfast._jobs import SharedJob
from holdfast._state import FRESH, TREE
from holdfast._torch_types import (
    Place,
    address_of,
    dense,
    device_ordinal,
    dtensor_place,
    dtype_from_name,
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


_fences_of: weakref.WeakKeyDictionary[SharedJob, _fences.Fences] = weakref.WeakKeyDictionary()


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
        raise InvalidArgumentError(
            f"stage: no Writer of job {job!r} waits for a state: the step comes from it, so make "
            "it in the call: "
            f"dcp.async_save(state, storage_writer=holdfast.dcp.Writer({job!r}, step=…), "
            "async_stager=stager)"
        )
    return writer


_NBYTES = operator.attrgetter("nbytes")

# Where it is there, dcp.async_save takes a future of the staged state.
_TAKES_FUTURES = hasattr(state_dict_saver, "AsyncSaveResponse")


class Stager(AsyncStager):
    """Stages for `dcp.async_save` straight into the slot; takes the step and all else from the
    Writer of the same call.

        stager = holdfast.dcp.Stager("llama")
        for step in …:
            writer = holdfast.dcp.Writer("llama", step=step)
            saving = dcp.async_save(state, storage_writer=writer, async_stager=stager)
            ...
            saving.upload_completion.result()

    For code that has a place for a stager; a Writer stages in the same way where none is given.
    What may be changed when is what Writer says. Where PyTorch has an AsyncSaveResponse, that is
    what async_save returns for a Stager: `staging_completion` and `upload_completion` are futures.
    """

    _synchronize_after_execute = False

    def __init__(self, job: str) -> None:
        self.job = job
        self._writer: Writer | None = None
        _fences.install()

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any] | Future[dict[str, Any]]:
        self._writer = writer = _claim(self.job)
        staged = writer.stage(state_dict)
        if not _TAKES_FUTURES:
            return staged
        future: Future[dict[str, Any]] = Future()

        def finish() -> None:
            writer._finish_staging()  # (planning tells all ranks what failed)
            future.set_result(staged)

        if writer._staging is None:
            finish()
        else:
            threading.Thread(target=finish, name="holdfast-staging").start()
        return future

    def synchronize_staging(self) -> None:
        """Returns when the loop may change all of the state that was staged last."""
        if self._writer is not None:
            self._writer.synchronize_staging()

    def close(self) -> None:
        """A Stager holds nothing."""
        self._writer = None


class _Pieces:
    """The contiguous pieces of the state, in the order of the image."""

    def __init__(self) -> None:
        self.slices: list[Slice] = []
        self.sources: list[torch.Tensor] = []
        self.traits: list[tuple[Any, ...]] | None = None  # as Layout has it

    def add(self, name: str, tensor: torch.Tensor, place: Place | None = None) -> Any:
        """Its number; or what is to be there instead of a copy, where there is nothing to copy."""
        source = dense(tensor, name)
        if place is None:
            shape = tuple(source.shape)
            place = Place(shape, (0,) * len(shape), shape)
        elif place.empty:
            return torch.empty(source.shape, dtype=source.dtype, device="cpu")
        self.slices.append(
            Slice(name, dtype_name(source.dtype, name), place, device_ordinal(source, name))
        )
        self.sources.append(source)
        return len(self.slices) - 1


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
    piece = pieces.add(name, tensor._local_tensor, place)
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
            pieces.add(
                name,
                shard.tensor,
                Place(size, tuple(part.shard_offsets), tuple(part.shard_sizes)),
            )
            for shard, part in zip(tensor.local_shards(), parts, strict=True)
        ],
        rebuild,
    )


def _leaf(name: str, tensor: torch.Tensor, pieces: _Pieces) -> Any:
    """The number of its one piece, for a plain tensor; else a _Leaf."""
    if type(tensor) in plain_types():
        return pieces.add(name, tensor)
    from torch.distributed._shard.sharded_tensor.api import ShardedTensor

    if isinstance(tensor, ShardedTensor):
        return _sharded_leaf(name, tensor, pieces)
    if is_dtensor(tensor):
        return _dtensor_leaf(name, tensor, pieces)
    if hasattr(tensor, "__create_write_items__"):
        raise RefusedError(
            f"{name}: a {type(tensor).__module__}.{type(tensor).__qualname__} is staged by its own "
            "rules only: "
            "use DCP's DefaultStager beside the Writer"
        )
    return pieces.add(name, tensor)


# Never taken apart.
_SCALARS = frozenset((bool, int, float, str, bytes, type(None)))


def _is_terminal(value: Any) -> bool:
    """As DCP's own traversal has it (_traverse.py): lists are taken apart where they hold tensors
    or mappings.
    """
    if isinstance(value, Mapping):
        return False
    if not isinstance(value, list):
        return True
    return not any(
        type(each) not in _SCALARS
        and (
            isinstance(each, torch.Tensor)
            or (isinstance(each, (Mapping, list)) and not _is_terminal(each))
        )
        for each in value
    )


class _NotCopied:
    """In a state dict that is still being copied."""

    def __reduce__(self) -> Any:
        raise RefusedError(
            "dcp.async_save: this state is still being copied: a state that a Writer or Stager "
            "has staged is saved by dcp.async_save alone"
        )


_NOT_COPIED = _NotCopied()


class Outline(dict[str, Any]):
    """A state dict whose leaves come later. dcp.save begins with its items, in a thread of its own:
    these wait for the leaves.
    """

    finish: Callable[[], None] | None = None

    def items(self) -> Any:
        if self.finish is not None:
            self.finish()
        return super().items()


class Flattened:
    """A nested state dict by the names that DCP gives its leaves (flatten_state_dict), in DCP's order.

    flat = Flattened({"model": {"w": w}, "epoch": 3})
    flat.names      # ["model.w", "epoch"], of flat.values
    flat.mappings   # {"model.w": ("model", "w"), "epoch": ("epoch",)}
    flat.fill([copy, 3])
    flat.outline    # {"model": {"w": copy}, "epoch": 3}
    """

    def __init__(self, state_dict: Mapping[str, Any]) -> None:
        self.names: list[str] = []
        self.values: list[Any] = []
        self.outline = Outline()
        self._paths: list[tuple[str | int, ...]] = []
        self._walk(state_dict, self.outline, "", ())
        self.mappings = dict(zip(self.names, self._paths, strict=True))
        if len(self.mappings) < len(self.names):
            twice = next(name for name in self.mappings if self.names.count(name) > 1)
            raise ValueError(f"duplicated flatten key {twice}")

    def fill(self, leaves: Iterable[Any]) -> None:
        """What the outline has in place of the values."""
        _fill(self.outline, iter(leaves))

    def _walk(self, value: Any, made: Any, prefix: str, path: tuple[str | int, ...]) -> None:
        is_mapping = isinstance(value, Mapping)
        if is_mapping and plain_types().issuperset(map(type, value.values())):  # as most are
            words = list(map(str, value))
            made.update(dict.fromkeys(value, _NOT_COPIED))
            self.names += [prefix + word for word in words]
            self.values += value.values()
            self._paths += [(*path, word) for word in words]
            return
        for key, each in value.items() if is_mapping else enumerate(value):
            name = f"{prefix}{key!s}"
            here = (*path, str(key) if is_mapping else key)
            if type(each) in plain_types() or type(each) in _SCALARS or _is_terminal(each):
                made[key] = _NOT_COPIED
                self.names.append(name)
                self.values.append(each)
                self._paths.append(here)
            else:
                made[key] = {} if isinstance(each, Mapping) else [_NOT_COPIED] * len(each)
                self._walk(each, made[key], f"{name}.", here)


def _fill(made: Any, leaves: Iterator[Any]) -> None:
    for key in made if isinstance(made, dict) else range(len(made)):
        if made[key] is _NOT_COPIED:
            made[key] = next(leaves)
        else:
            _fill(made[key], leaves)


@dataclasses.dataclass(frozen=True)
class Sealed:
    """What was sealed, without its bytes."""

    pieces: dict[tuple[str, tuple[int, ...]], tuple[Place, str]]
    objects: dict[str, int]  # bytes
    mappings: dict[str, Any]

    def sizes_of(self, plan: SavePlan) -> list[int] | str:
        """Bytes of each item of the plan, or what it wants that was not sealed."""
        if plan.planner_data is not None and plan.planner_data != self.mappings:
            return "other names for what is in the state"
        sizes = []
        for item in plan.items:
            name = item.index.fqn
            if item.tensor_data is None:
                if name not in self.objects:
                    return f"an object {name!r}"
                sizes.append(self.objects[name])
                continue
            place = chunk_place(item.tensor_data.size, item.tensor_data.chunk)
            dtype = item.tensor_data.properties.dtype
            wanted = place, dtype_name(dtype, name)
            if not place.empty and self.pieces.get((name, place.offset)) != wanted:
                return f"{name!r} in another shape, type or place"
            sizes.append(math.prod(item.tensor_data.chunk.sizes) * dtype.itemsize)
        return sizes


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

    def sealed(self) -> Sealed:
        return Sealed(
            {
                (piece.name, piece.place.offset): (piece.place, piece.dtype)
                for piece in self._slices
            },
            {name: len(data) for name, (_, data, _) in self.objects.items()},
            self._mappings,
        )

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
    traits: list[tuple[Any, ...]] | None  # of the tensors, where each is a slice as it lies there
    devices: set[int]
    tensors: _core.TensorList
    mappings: dict[str, Any]
    encoded_mappings: bytes


def _layout(shared: SharedJob, pieces: _Pieces, mappings: dict[str, Any]) -> Layout:
    """The last save's, where nothing but the values has changed."""
    last: Layout | None = shared.staged
    slices = pieces.slices
    if last is None or last.slices != slices or last.mappings != mappings:
        last = shared.staged = Layout(
            slices,
            None,
            {each.device for each in slices} - {-1},
            tensor_list(slices),
            mappings,
            encode_mappings(mappings),
        )
    last.traits = pieces.traits
    return last


def _pieces_of(flat: Flattened, last: Layout | None) -> tuple[list[Any], _Pieces]:
    """Of each leaf the number of its one piece, a _Leaf, or None, which is no tensor. A loop saves the same tensors over and
    over: that they are is seen in passes that run no Python for each."""
    pieces = _Pieces()
    leaves: list[Any] = [None] * len(flat.values)
    found = [i for i, each in enumerate(flat.values) if isinstance(each, torch.Tensor)]
    tensors = [flat.values[i] for i in found]
    if plain_types().issuperset(map(type, tensors)):
        pieces.traits = list(traits(tensors))
        if (
            last is not None
            and last.traits == pieces.traits
            and [each.name for each in last.slices] == [flat.names[i] for i in found]
        ):
            pieces.slices, pieces.sources = last.slices, tensors
            for number, i in enumerate(found):
                leaves[i] = number
            return leaves, pieces
    for i, tensor in zip(found, tensors, strict=True):
        leaves[i] = _leaf(flat.names[i], tensor, pieces)
    if any(map(operator.is_not, tensors, pieces.sources)):
        pieces.traits = None  # of some a copy is saved, made now
    return leaves, pieces


class Staging:
    """A state that is being copied into a slot.

        staging = stage(...)
        staging.wait(timeout)             # the loop may change the state
        staged = staging.finish(timeout)  # `staging.outline` is the same state dict over the copies

    `overlaps`: tensors that only an optimizer's step() changes are still being copied, and that
    step() waits.
    """

    def __init__(
        self,
        held: HeldSave,
        layout: Layout,
        sources: list[torch.Tensor],
        overlapped: list[int],
        flat: Flattened,
        leaves: list[Any],
        objects: dict[str, tuple[str, bytes, str | None]],
        *,
        allow_pickle: bool,
    ) -> None:
        self.held = held
        self.outline = flat.outline
        self._flat = flat
        self._leaves = leaves
        self.overlaps = bool(overlapped)
        self._layout = layout
        self._objects = objects
        self._allow_pickle = allow_pickle
        self._unchanged = Unchanged(
            [layout.slices[i].name for i in overlapped], [sources[i] for i in overlapped]
        )
        self.handle = Handle(
            held.step, held.save, None, None, layout.devices, changes=self._unchanged.look
        )

    def wait(self, timeout: float) -> None:
        """Returns when the loop may change the state: it has been copied, or will not be."""
        self.handle.wait_snapshot(timeout)
        self._unchanged.look()

    def finish(self, timeout: float) -> Staged:
        held = self.held
        try:
            held.save.wait("snapshot", timeout)
            changed = self._unchanged.look()
            if changed is not None:
                raise RefusedError(
                    f"save step {held.step} of job {held.shared.name!r}: {changed} was changed "
                    "while it was copied, by something else than an optimizer's step(): the step "
                    "is lost. Call synchronize_staging() of the Writer or Stager before that "
                    "change"
                )
            memory, offsets, sizes = held.save.staged()
            begin = address_of(memory)
            held.lies_at(begin, begin + memory.nbytes)
            with no_collection():
                return self._over(memory, offsets, sizes)
        except BaseException:
            held.discard()
            raise

    def _over(self, memory: memoryview, offsets: list[int], sizes: list[int]) -> Staged:
        """Fills the outline."""
        copies = tensors_over(
            memory,
            offsets,
            sizes,
            [dtype_from_name(each.dtype, each.name) for each in self._layout.slices],
            [each.place.local_shape for each in self._layout.slices],
        )
        # Objects are copied, too: the loop changes its own.
        values = {
            name: _objects.from_object(name, data, codec, allow_pickle=self._allow_pickle)
            for name, (_, data, codec) in self._objects.items()
        }
        self._flat.fill(
            values[name]
            if leaf is None
            else copies[leaf]
            if type(leaf) is int
            else leaf.over(copies)
            for name, leaf in zip(self._flat.names, self._leaves, strict=True)
        )
        return Staged(
            self.held, self._layout.slices, copies, self._objects, values, self._layout.mappings
        )


class Unchanged:
    """Tensors that nobody must change for a while, by torch's count of changes in place. (Those
    through `.data` are not in it.)
    """

    def __init__(self, names: list[str], tensors: list[torch.Tensor]) -> None:
        self._lock = threading.Lock()
        self._names, self._tensors = names, tensors
        self._counts = _changes(tensors)
        self._changed: str | None = None

    def look(self) -> str | None:
        """The first look decides: one of them that was changed, or None; they may change from then
        on.
        """
        with self._lock:
            if self._tensors:
                counts = zip(self._names, self._counts, _changes(self._tensors), strict=True)
                self._changed = next((name for name, was, now in counts if was != now), None)
                self._names, self._tensors, self._counts = [], [], []
            return self._changed


def _changes(tensors: list[torch.Tensor]) -> list[int]:
    """Of tensors that inference has made nobody counts them."""
    return [0 if each.is_inference() else each._version for each in tensors]


def stage(
    shared: SharedJob,
    state_dict: dict[str, Any],
    step: int,
    *,
    allow_pickle: bool,
    wait_for_room: float,
    timeout: float,
) -> Staging:
    """Begins to copy the state into a slot. What the loop may change next has been copied when this
    returns.
    """
    # 1. What there is, by DCP's own names.
    with no_collection():
        flat = Flattened(state_dict)
        for name in (TREE, FRESH, MAPPINGS):
            if name in flat.mappings:
                check_name(name)
        leaves, pieces = _pieces_of(flat, shared.staged)
        objects = {
            name: _objects.to_object(name, value, allow_pickle=allow_pickle)
            for name, value, leaf in zip(flat.names, flat.values, leaves, strict=True)
            if leaf is None
        }
        slices, sources = pieces.slices, pieces.sources
        addresses = list(map(torch.Tensor.data_ptr, sources))
        fenced = _fences_of.setdefault(shared, _fences.Fences()).held()
        # A step() lets its device wait for the copy, not this process: what lies in host memory is copied first.
        on_devices = any(piece.device >= 0 for piece in slices)
        waits = [
            nbytes <= fenced.get(address, -1) and (not on_devices or piece.device >= 0)
            for nbytes, address, piece in zip(map(_NBYTES, sources), addresses, slices, strict=True)
        ]
        overlapped = [i for i, each in enumerate(waits) if each]
        first = [i for i, each in enumerate(waits) if not each]

    # 2. One copy. What it reads from is kept until it has ended.
    with _held.alone(shared, f"step {step}", timeout):
        shared.begin(timeout)
        layout = _layout(shared, pieces, flat.mappings)
        held = HeldSave(
            shared,
            step,
            shared.core.save(
                step,
                layout.tensors,
                addresses,
                [
                    *objects.values(),
                    (MAPPINGS, layout.encoded_mappings, None),
                    *_fresh.objects_of(shared.label),
                ],
                copy_first=first if overlapped else (),
                hold=True,
                wait_first=False,
                streams=streams_of(layout.devices),
                wait_for_room=wait_for_room,
            ),
            sources,
        )
    try:
        staging = Staging(
            held, layout, sources, overlapped, flat, leaves, objects, allow_pickle=allow_pickle
        )
        _fences.add(staging.handle)
        if overlapped:
            held.save.wait_first(timeout)
        else:
            held.save.wait("snapshot", timeout)
        return staging
    except BaseException:
        held.discard()
        raise


def _after_fork() -> None:
    """Threads of the parent may hold its lock for ever."""
    global _announced_lock
    _announced_lock = threading.Lock()


os.register_at_fork(after_in_child=_after_fork)
