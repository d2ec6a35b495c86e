"""The StorageWriter: what DCP has planned goes into a slot of the daemon's."""

from __future__ import annotations

import math
import os
import threading
import uuid
import weakref
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from holdfast import _core, _fences, _fresh, _held
from holdfast._daemon import ensure_daemon
from holdfast._errors import InvalidArgumentError, RefusedError
from holdfast._handle import streams_of
from holdfast._held import HeldSave
from holdfast._jobs import SharedJob, job_for, job_name, open_job, seconds, unsigned
from holdfast._policy import Policy, as_core
from holdfast._torch_types import dense, device_ordinal, dtype_name
from holdfast.dcp import _items, _staging
from holdfast.dcp._checkpoint_id import names_step
from holdfast.dcp._layout import (
    MAPPINGS,
    Slice,
    check_name,
    chunk_place,
    encode_mappings,
    tensor_list,
)

_STAGES = ("sealed", "committed", "peer", "nvme", "remote")


class Writer(StorageWriter):
    """Saves one step of a job through DCP.

        dcp.save(state, storage_writer=holdfast.dcp.Writer("llama", step=100))
        future = dcp.async_save(state, storage_writer=holdfast.dcp.Writer("llama", step=100))

    Make one for each save. With `async_save` the Writer stages as well (or a holdfast.dcp.Stager
    does, if one is given): the state is copied once, into the slot.

    When `async_save` returns, all has been copied that the loop may change next, but for what
    optimizers have: parameters and their state are copied beside the next forward and backward
    pass, and the optimizers' next `step()` waits for that. What else changes these, by hand, calls
    `synchronize_staging()` first. An optimizer has to have made a step since the save before;
    else all is copied at once.

    `step`: must grow within a run.
    `wait`: "sealed": the save is done when every rank's copy is complete in the daemon's memory,
    and survives the process from then on. "committed", "nvme", "remote": when the step is whole
    there.
    `allow_pickle`: objects that are not JSON are pickled; they are refused otherwise.
    `wait_for_room`: seconds that a save may wait for a slot. By default it fails instead, with
    holdfast.NoRoomError.
    `timeout`: seconds for each thing that is waited for. One is the last step that was staged and
    is not sealed yet: if it takes longer, it is given up.
    `rank`, `world_size`, `launch`, `socket`: of the job, where the launcher's environment does not
    say it.
    `policy`: a holdfast.Policy, of the job; the first that is given counts.
    """

    # As AsyncStager has it: async_save does not wait for what optimizers wait for.
    _synchronize_after_execute = False

    def __init__(
        self,
        job: str,
        *,
        step: int,
        wait: str = "sealed",
        allow_pickle: bool = False,
        wait_for_room: float = 0.0,
        timeout: float = 600.0,
        rank: int | None = None,
        world_size: int | None = None,
        launch: str | None = None,
        socket: str = "",
        policy: Policy | Mapping[str, Mapping[str, int]] | None = None,
    ) -> None:
        super().__init__()
        if wait not in _STAGES:
            raise InvalidArgumentError(f"Writer: wait={wait!r} is none of {', '.join(_STAGES)}")
        self.job = job_name("Writer", job)
        self.step = unsigned("Writer", "step", step)
        self._wait = wait
        self._allow_pickle = allow_pickle
        self._wait_for_room = seconds("Writer", "wait_for_room", wait_for_room)
        self._timeout = seconds("Writer", "timeout", timeout)
        self._job_options: dict[str, Any] = {
            "rank": rank,
            "world_size": world_size,
            "launch": launch,
            "socket": socket,
            "policy": as_core(policy),
        }
        self._save_id = str(uuid.uuid4())
        self._staging: _staging.Staging | None = None  # while it is copied
        self._staged: _staging.Staged | None = None
        self._stage_error: Exception | None = None
        self._save: _core.Save | None = None
        self._joined: SharedJob | None = None
        self._planned_together = True  # by one rank for all
        _staging.announce(self)
        _fences.install()

    def __reduce__(self) -> Any:
        raise RefusedError("Writer: cannot go to another process: the slots are mapped in this one")

    @property
    def checkpoint_id(self) -> str:
        return f"{self.job}/{self.step}"

    # What AsyncStager asks for.

    @property
    def should_synchronize_after_execute(self) -> bool:
        return False

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Copies the state into a slot; `async_save` calls it. What is returned is filled when all
        has been copied, at the latest when DCP saves it. A save that fails already here says
        so where DCP tells all ranks, in the future: were it raised here, on one rank, the others
        would wait for this one.
        """
        _staging.withdraw(self)
        if self._staging is not None or self._staged is not None or self._save is not None:
            raise InvalidArgumentError(
                f"Writer: step {self.step} of job {self.job!r} was given to this Writer already: "
                "make one for each save"
            )
        try:
            shared = self._shared()
            if not shared.stages_in_slots:
                return _copy(state_dict)
            self._staging = staging = _staging.stage(
                shared,
                state_dict,
                self.step,
                allow_pickle=self._allow_pickle,
                wait_for_room=self._wait_for_room,
                timeout=self._timeout,
            )
        except Exception as error:
            self._stage_error = error
            return {}
        if staging.overlaps:
            writer = weakref.ref(self)
            staging.outline.finish = lambda: _finish(writer())
        else:
            self._finish_staging()
        return staging.outline

    def _finish_staging(self) -> None:
        """All has been copied when this returns, or there is an error for all ranks."""
        staging = self._staging
        if staging is None:
            return
        try:
            self._staged = staging.finish(self._timeout)
        except Exception as error:
            self._stage_error = error
            staging.outline.clear()
        finally:
            self._staging = staging.outline.finish = None

    def synchronize_staging(self) -> None:
        """Returns when the loop may change all of the state that was staged."""
        staging = self._staging
        if staging is not None:
            staging.wait(self._timeout)

    def close(self) -> None:
        """Gives up what was staged and never saved."""
        staged = self._staging or self._staged
        if staged is not None:
            staged.held.discard()

    # What StorageWriter asks for, in the order in which DCP calls it.

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return False  # never chosen by a path

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        if checkpoint_id is not None and not names_step(checkpoint_id, self.step):
            self.close()
            raise InvalidArgumentError(
                f"Writer: checkpoint_id={str(checkpoint_id)!r} does not name the step that this "
                f"Writer saves, {self.step} of job {self.job!r}: leave it out, or let it end in "
                "the step"
            )

    def storage_meta(self) -> StorageMeta:
        # The first that DCP calls, in the thread that then does all of the save, and before
        # anything of it can fail.
        if self._staged is not None:
            self._staged.held.discard_after(threading.current_thread())
        return StorageMeta(checkpoint_id=self.checkpoint_id, save_id=self._save_id)

    def set_up_storage_writer(
        self, is_coordinator: bool, *, use_collectives: bool = True, **kwargs: Any
    ) -> None:
        # (DCP gives more than is_coordinator to what has `kwargs`.)
        self._planned_together = use_collectives
        _staging.withdraw(self)
        if self._stage_error is not None:
            raise self._stage_error
        if self._staged is None:
            self._shared().begin(self._timeout)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        # Called once, on the coordinator, before any rank writes.
        world_size = self._shared().world_size
        in_group = dist.is_available() and dist.is_initialized()
        if self._planned_together and in_group and len(plans) != world_size:
            raise InvalidArgumentError(
                f"Writer: save step {self.step} of job {self.job!r}: {len(plans)} of its "
                f"{world_size} ranks take part, so the step would never be committed. Call it on "
                "all ranks of the job, without no_dist=True, and with a process_group that has all "
                "of them; or give these ranks a job of their own (Writer(…, rank=, world_size=))"
            )
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        sizes = (
            self._write_staged(plan, planner)
            if self._staged is not None
            else self._write(plan, planner)
        )
        assert self._save is not None
        self._note_sealed(self._save)
        return self._results(plan, sizes)

    def _note_sealed(self, save: _core.Save) -> None:
        self._save = save
        shared = self._shared()
        shared.last_sealed = self.step, save
        shared.has_a_step = True

    def _results(self, plan: SavePlan, sizes: list[int]) -> Future[list[WriteResult]]:
        rank = self._shared().rank
        future: Future[list[WriteResult]] = Future()
        future.set_result(
            [
                WriteResult(item.index, size, (rank, self.step))
                for item, size in zip(plan.items, sizes, strict=True)
            ]
        )
        return future

    def _seal_staged(self) -> _staging.Sealed:
        """Before it is planned, as what was staged."""
        self._finish_staging()
        if self._stage_error is not None:
            raise self._stage_error
        staged, self._staged = self._staged, None
        if staged is None:
            raise RefusedError(
                f"Writer: step {self.step} of job {self.job!r} was not staged by this Writer, and "
                "so cannot go to the process of AsyncCheckpointerType.PROCESS: leave the stager "
                "out, or use a holdfast.dcp.Stager or AsyncCheckpointerType.THREAD"
            )
        try:
            staged.held.seal(self._timeout)
        except BaseException:
            staged.held.discard()
            raise
        self._note_sealed(staged.held.save)
        return staged.sealed()

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        for rank_results in results:
            for result in rank_results:
                rank, step = result.storage_data
                if step != self.step:
                    raise InvalidArgumentError(
                        f"Writer: this rank saved step {self.step}, rank {rank} step {step}: name "
                        "the same step on all ranks"
                    )
        metadata.storage_meta = StorageMeta(checkpoint_id=self.checkpoint_id, save_id=self._save_id)
        if self._wait != "sealed":
            self.wait(self._wait, self._timeout)

    # For the loop.

    def wait(self, stage: str = "committed", timeout: float | None = None) -> None:
        """Waits until the save has come that far: "sealed", "committed", "nvme" or "remote"."""
        if self._save is None:
            raise RefusedError(f"Writer: step {self.step} of job {self.job!r} has not been saved")
        self._save.wait(stage, self._timeout if timeout is None else timeout)

    def _shared(self) -> SharedJob:
        """Joined once: a job that is closed in the middle of a save is not joined again, as a run of its own."""
        if self._joined is None:
            options = self._job_options
            if open_job(self.job, **options) is None:
                options = {**options, "socket": ensure_daemon(options["socket"] or None)}
            self._joined = job_for(self.job, **options)
        return self._joined

    def _write_staged(self, plan: SavePlan, planner: SavePlanner) -> list[int]:
        staged = self._staged
        assert staged is not None
        try:
            difference = staged.difference(plan, planner)
            if difference is not None:
                # The slot is of this step, and a step is begun once: to write anything else it
                # would have to be another.
                staged.held.shared.stages_in_slots = False
                raise RefusedError(
                    f"Writer: step {self.step} of job {self.job!r} was staged before it was "
                    f"planned, and {type(planner).__qualname__} "
                    f"plans {difference}: the step is lost; from the next one on this process "
                    "stages by a copy of its own"
                )
            sizes = [_nbytes(item, staged) for item in plan.items]
            staged.held.seal(self._timeout)
        except BaseException:
            staged.held.discard()
            raise
        self._save = staged.held.save
        self._staged = None  # and with it the slot's mapping
        return sizes

    def _write(self, plan: SavePlan, planner: SavePlanner) -> list[int]:
        # 1. The items' data. What is contiguous is taken as it lies there.
        slices: list[Slice] = []
        sources: list[torch.Tensor] = []
        objects: list[tuple[str, bytes, str | None]] = []
        sizes: list[int] = []
        for item in plan.items:
            name = item.index.fqn
            check_name(name)
            if item.type == WriteItemType.BYTE_IO:
                objects.append(_items.object_of(item, planner, allow_pickle=self._allow_pickle))
                sizes.append(len(objects[-1][1]))
                continue
            resolved = planner.resolve_data(item)
            assert item.tensor_data is not None and isinstance(resolved, torch.Tensor)
            source = dense(resolved, name)
            owner = _held.holder_of(source.data_ptr())
            if owner is not None:
                owner.discard()
                raise RefusedError(
                    f"Writer: {name} was staged for step {owner.step} by another Writer than this "
                    f"one of step {self.step}: "
                    "make one Writer for each async_save, in the call"
                )
            place = chunk_place(item.tensor_data.size, item.tensor_data.chunk)
            if tuple(source.shape) != place.local_shape:
                raise InvalidArgumentError(
                    f"{name}: planned was shape {place.local_shape}, the planner resolves it to "
                    f"{tuple(source.shape)}"
                )
            sizes.append(source.nbytes)
            if place.empty:
                continue
            slices.append(
                Slice(name, dtype_name(source.dtype, name), place, device_ordinal(source, name))
            )
            sources.append(source)
        # Also where there are none: a rank of which the plan wants nothing saves its shard all the same.
        objects.append(_mappings_object({} if plan.planner_data is None else plan.planner_data))

        # 2. One copy; then the daemon has it. A save that raises must neither be committed nor go on
        # to read what is freed then.
        shared = self._shared()
        objects += _fresh.objects_of(shared.label)
        with _held.alone(shared, f"step {self.step}", self._timeout):
            held = HeldSave(
                shared,
                self.step,
                shared.core.save(
                    self.step,
                    tensor_list(slices),
                    [source.data_ptr() for source in sources],
                    objects,
                    hold=True,
                    streams=streams_of({each.device for each in slices} - {-1}),
                    wait_for_room=self._wait_for_room,
                ),
                sources,
            )
        try:
            held.save.wait("snapshot", self._timeout)
            held.seal(self._timeout)
        except BaseException:
            held.discard()
            raise
        self._save = held.save
        return sizes


def _finish(writer: Writer | None) -> None:
    if writer is not None:
        writer._finish_staging()


def _nbytes(item: WriteItem, staged: _staging.Staged) -> int:
    if item.tensor_data is None:
        return len(staged.objects[item.index.fqn][1])
    return math.prod(item.tensor_data.chunk.sizes) * item.tensor_data.properties.dtype.itemsize


def _mappings_object(planner_data: Any) -> tuple[str, bytes, str | None]:
    if not isinstance(planner_data, Mapping):
        raise RefusedError(
            f"Writer: planner_data of type {type(planner_data).__qualname__}: only DCP's own (a "
            "map of names to paths) can be saved"
        )
    return MAPPINGS, encode_mappings(planner_data), None


def _copy(state_dict: dict[str, Any]) -> dict[str, Any]:
    """Staged as DCP's own stager does it, for planners that write something else than the state as
    it is.
    """
    try:
        from torch.distributed.checkpoint._state_dict_stager import StateDictStager
    except ImportError:  # PyTorch 2.7 and older
        from torch.distributed.checkpoint.staging import BlockingAsyncStager

        return BlockingAsyncStager().stage(state_dict)
    staged: dict[str, Any] = StateDictStager(pin_memory=False, share_memory=False).stage(state_dict)
    return staged
