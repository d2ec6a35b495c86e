"""Staging for dcp.async_save: the state is copied once, straight into a slot of the daemon's, and
what DCP plans and "writes" afterwards are views of that slot. Writing is then no more than sealing
it.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItemType
from torch.distributed.checkpoint.staging import AsyncStager

from holdfast import _core, _objects
from holdfast._errors import InvalidArgument, Refused
from holdfast._jobs import SharedJob
from holdfast._torch_types import (
    Place,
    dense,
    device_ordinal,
    dtensor_place,
    dtype_name,
    is_dtensor,
    streams_of,
    tensors_over,
)
from holdfast.dcp import _items
from holdfast.dcp._layout import MAPPINGS, Slice, chunk_place, encode_mappings, tensor_list

if TYPE_CHECKING:
    from holdfast.dcp._writer import Writer

_log = logging.getLogger("holdfast")

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


@dataclasses.dataclass(slots=True)
class _Part:
    """A contiguous piece of the state that lies in the slot."""

    slice: Slice
    source: torch.Tensor
    # In the slot, after the copy.
    staged: torch.Tensor | None = None


@dataclasses.dataclass(slots=True)
class _Leaf:
    """A tensor of the state dict: its parts, and how one like it is made over the copies."""

    parts: list[_Part]
    rebuild: Callable[[list[torch.Tensor]], Any]


def _first(staged: list[torch.Tensor]) -> torch.Tensor:
    return staged[0]


def _plain_leaf(name: str, tensor: torch.Tensor, known: Mapping[str, Slice]) -> _Leaf:
    source = dense(tensor, name)
    dtype, shape, device = dtype_name(source.dtype, name), source.shape, device_ordinal(source)
    # The last save's, mostly: with thousands of tensors it is the making of objects that costs.
    each = known.get(name)
    if (
        each is None
        or each.place.shape != shape
        or each.place.local_shape != shape
        or each.dtype != dtype
        or each.device != device
    ):
        each = Slice(name, dtype, Place(tuple(shape), (0,) * len(shape), tuple(shape)), device)
    return _Leaf([_Part(each, source)], _first)


def _dtensor_leaf(name: str, tensor: Any) -> _Leaf | None:
    from torch.distributed.tensor import DTensor

    place = dtensor_place(tensor, name)
    if place is None:
        return None  # not of this rank, and DCP plans nothing for it
    source = dense(tensor._local_tensor, name)
    part = _Part(Slice(name, dtype_name(source.dtype, name), place, device_ordinal(source)), source)
    # from_local would move the copy to the mesh's device.
    return _Leaf([part], lambda staged: DTensor(staged[0], tensor._spec, requires_grad=False))


def _sharded_leaf(name: str, tensor: Any) -> _Leaf:
    from torch.distributed._shard.sharded_tensor import Shard, ShardedTensor

    shards = tensor.local_shards()
    size = tuple(tensor.metadata().size)
    parts = []
    for shard in shards:
        source = dense(shard.tensor, name)
        place = Place(size, tuple(shard.metadata.shard_offsets), tuple(shard.metadata.shard_sizes))
        parts.append(
            _Part(
                Slice(name, dtype_name(source.dtype, name), place, device_ordinal(source)), source
            )
        )

    def rebuild(staged: list[torch.Tensor]) -> Any:
        return ShardedTensor._init_from_local_shards_and_global_metadata(
            [Shard(tensor=copy, metadata=shard.metadata) for copy, shard in zip(staged, shards)],
            sharded_tensor_metadata=tensor.metadata(),
            process_group=tensor._process_group,
            init_rrefs=tensor._init_rrefs,
        )

    return _Leaf(parts, rebuild)


def _leaf(name: str, tensor: torch.Tensor, known: Mapping[str, Slice]) -> _Leaf | None:
    if type(tensor) is torch.Tensor or type(tensor) is torch.nn.Parameter:
        return _plain_leaf(name, tensor, known)
    from torch.distributed._shard.sharded_tensor import ShardedTensor

    if isinstance(tensor, ShardedTensor):
        return _sharded_leaf(name, tensor)
    if is_dtensor(tensor):
        return _dtensor_leaf(name, tensor)
    if hasattr(tensor, "__create_write_items__"):
        raise Refused(
            f"{name}: a {type(tensor).__module__}.{type(tensor).__qualname__} is staged by its own "
            "rules only: "
            "use DCP's DefaultStager beside the Writer"
        )
    return _plain_leaf(name, tensor, known)


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


def _like(
    value: Any, path: tuple[str | int, ...], leaves: Mapping[tuple[str | int, ...], Any]
) -> Any:
    """The nested state dict anew, with other leaves."""
    if isinstance(value, Mapping):
        return {key: _like(each, path + (str(key),), leaves) for key, each in value.items()}
    if _is_terminal(value):
        return leaves[path]
    return [_like(each, path + (i,), leaves) for i, each in enumerate(value)]


class Staged:
    """A state in a slot that is not sealed yet. It is sealed or given up, once, by whoever comes
    first.
    """

    def __init__(
        self,
        shared: SharedJob,
        step: int,
        save: _core.Save,
        parts: list[_Part],
        objects: dict[str, tuple[str, bytes, str | None]],
        values: dict[str, Any],
        mappings: dict[str, Any],
    ) -> None:
        self.shared = shared
        self.step = step
        self.save = save
        self.objects = objects
        self._parts = {(part.slice.name, part.slice.place.offset): part for part in parts}
        self._values = values
        self._mappings = mappings
        staged = [part.staged for part in parts if part.staged is not None and part.staged.numel()]
        self._begin = min((each.data_ptr() for each in staged), default=0)
        self._end = max((each.data_ptr() + each.nbytes for each in staged), default=0)
        self._open = True  # under shared.lock
        with _live_changed:
            _live.add(self)

    def difference(self, plan: SavePlan, planner: SavePlanner) -> str | None:
        """What the plan wants that is not what lies in the slot; None: nothing, and sealing it is
        all that is to do.

        The slot may well hold more: replicas that the plan has another rank write.
        """
        if plan.planner_data is not None and plan.planner_data != self._mappings:
            return "other names for what is in the state"
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
            part = self._parts.get((name, place.offset))
            if part is None or part.slice.place != place or part.staged is None:
                return f"{name!r} in another shape or place"
            if (
                wanted.dtype != part.staged.dtype
                or tuple(wanted.shape) != place.local_shape
                or not wanted.is_contiguous()
                or (wanted.numel() > 0 and wanted.data_ptr() != part.staged.data_ptr())
            ):
                return f"other values of {name!r}"
        return None

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor lies in this slot."""
        return tensor.device.type == "cpu" and self._begin <= tensor.data_ptr() < self._end

    def seal(self, timeout: float) -> None:
        with self.shared.lock:
            if not self._open:
                raise Refused(
                    f"job {self.shared.name!r}: what was staged for step {self.step} was given up "
                    "before it could be sealed"
                )
            self._open = False
            try:
                self.save.seal(timeout)
            except BaseException:
                self.save.discard()  # it may not even have begun, and hold the slot still
                raise
            finally:
                self._settled()

    def discard(self) -> bool:
        """Gives the step up, for all ranks, unless it is sealed or given up already."""
        with self.shared.lock:
            if not self._open:
                return False
            self._open = False
            try:
                self.save.discard()
            finally:
                self._settled()
            return True

    def discard_after(self, worker: threading.Thread) -> None:
        """DCP tells a StorageWriter nothing of a save that fails while it is planned, here or on
        another rank, or whose process group breaks. But the thread that does it ends: what is not
        sealed by then never will be.
        """
        if worker is threading.main_thread():
            return

        def wait() -> None:
            worker.join()
            if self.discard():
                _log.warning(
                    "holdfast: job %s: step %d was staged and not saved: given up",
                    self.shared.name,
                    self.step,
                )

        threading.Thread(target=wait, name="holdfast-staged").start()

    def _settled(self) -> None:
        with _live_changed:
            _live.discard(self)
            _live_changed.notify_all()


_live: weakref.WeakSet[Staged] = weakref.WeakSet()
_live_changed = threading.Condition()
# Of one that is dropped nobody tells.
_LOOK_EVERY_S = 0.05


def holder_of(tensor: torch.Tensor) -> Staged | None:
    """The staged state that this tensor is a part of."""
    with _live_changed:
        return next((staged for staged in _live if staged.holds(tensor)), None)


def _unsettled(shared: SharedJob) -> list[Staged]:
    """What is staged for this job and can still be sealed; with _live_changed."""
    return [
        staged for staged in _live if staged.shared is shared and not staged.save.done("sealed")
    ]


def wait_for_others(shared: SharedJob, step: int, timeout: float) -> None:
    """A job holds one staged state: a save that begins would give up the one before. So it waits
    until that one is sealed or given up.
    """
    until = time.monotonic() + timeout
    told = False
    while True:
        with _live_changed:
            others = [staged.step for staged in _unsettled(shared)]
            if others and told:
                _live_changed.wait(_LOOK_EVERY_S)
        if not others or time.monotonic() >= until:
            return
        if not told:
            _log.info("holdfast: job %s: step %d waits for step %d", shared.name, step, others[0])
            told = True


def give_up_others(shared: SharedJob, step: int) -> None:
    """What has not been sealed in time; with shared.lock, right before the save begins."""
    with _live_changed:
        others = _unsettled(shared)
    for other in others:
        if other.discard():
            _log.warning(
                "holdfast: job %s: step %d was staged and is not sealed yet: given up, for step "
                "%d begins",
                shared.name,
                other.step,
                step,
            )


def _tensor_list(shared: SharedJob, slices: list[Slice]) -> _core.TensorList:
    """The last save's, where nothing but the values has changed."""
    last = shared.staged_tensors
    if last is None or list(last[0].values()) != slices:
        # Several parts of one tensor are not told apart by its name, and made anew each time.
        last = {each.name: each for each in slices}, tensor_list(slices)
        shared.staged_tensors = last
    return last[1]


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
    flat, mappings = flatten_state_dict(state_dict)
    known = shared.staged_tensors[0] if shared.staged_tensors is not None else {}
    leaves: dict[str, _Leaf | None] = {}
    objects: dict[str, tuple[str, bytes, str | None]] = {}
    for name, value in flat.items():
        if isinstance(value, torch.Tensor):
            leaves[name] = _leaf(name, value, known)
        else:
            objects[name] = _objects.to_object(name, value, allow_pickle=allow_pickle)
    parts = [part for leaf in leaves.values() if leaf is not None for part in leaf.parts]
    stored = [part for part in parts if not part.slice.place.empty]

    # 2. One copy. What it reads from is kept until it has ended.
    slices = [part.slice for part in stored]
    wait_for_others(shared, step, timeout)
    with shared.lock:
        give_up_others(shared, step)
        shared.begin(timeout)
        save = shared.core.save(
            step,
            _tensor_list(shared, slices),
            [part.source.data_ptr() for part in stored],
            [*objects.values(), (MAPPINGS, encode_mappings(mappings), None)],
            hold=True,
            streams=streams_of(part.source for part in stored),
            wait_for_room=wait_for_room,
        )
    try:
        save.wait("snapshot", timeout)
        copies = tensors_over(
            save.staged(),
            [part.source.dtype for part in stored],
            [part.source.shape for part in stored],
        )
        for part, copy in zip(stored, copies, strict=True):
            part.staged = copy
        for part in parts:
            if part.staged is None:
                part.staged = torch.empty(part.source.shape, dtype=part.source.dtype)

        # 3. The same state over the copies. Objects are values of their own, too: the loop goes on
        # to change its.
        values = {
            name: _objects.from_object(name, data, codec, allow_pickle=allow_pickle)
            for name, (_, data, codec) in objects.items()
        }
        replaced: dict[tuple[str | int, ...], Any] = {
            mappings[name]: value for name, value in values.items()
        }
        for name, leaf in leaves.items():
            if leaf is None:
                replaced[mappings[name]] = flat[name]
            else:
                replaced[mappings[name]] = leaf.rebuild(
                    [part.staged for part in leaf.parts if part.staged is not None]
                )
        nested = _like(state_dict, (), replaced)
        nothing = torch.empty(0)
        for part in parts:
            part.source = nothing  # the training's memory is its own again
        return nested, Staged(shared, step, save, parts, objects, values, mappings)
    except BaseException:
        with shared.lock:
            save.discard()
        raise


def _after_fork() -> None:
    """Threads of the parent may hold its locks for ever. What it staged is not the child's."""
    global _announced_lock, _live_changed, _live
    _announced_lock = threading.Lock()
    _live_changed = threading.Condition()
    _live = weakref.WeakSet()


os.register_at_fork(after_in_child=_after_fork)
