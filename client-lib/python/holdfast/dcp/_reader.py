"""The StorageReader: DCP's plan is served from the shards of a step, wherever they lie nearest."""

from __future__ import annotations

import dataclasses
import logging
import os
import uuid
from collections.abc import Iterable, Mapping
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from holdfast import _core, _environment, _fences, _held
from holdfast._daemon import ensure_daemon
from holdfast._errors import (
    HoldfastError,
    InvalidArgumentError,
    NothingToRestoreError,
    RefusedError,
)
from holdfast._jobs import (
    SharedJob,
    forget_loaded,
    job_for,
    job_name,
    open_job,
    remember_loaded,
    seconds,
    unsigned,
)
from holdfast._policy import Policy, as_core
from holdfast.dcp import _items
from holdfast.dcp._checkpoint_id import names_step
from holdfast.dcp._layout import Item, Stored, descriptions, stored
from holdfast.dcp._reads import Reads

_log = logging.getLogger("holdfast")
_LOOK_S = 1.0

# By name: JSON or opaque bytes, codec.
_Values = dict[str, tuple[bytes, str | None]]


class Reader(StorageReader):
    """Loads a step of a job through DCP.

        dcp.load(state, storage_reader=holdfast.dcp.Reader("llama"))    # the newest whole step
        dcp.load(state, storage_reader=holdfast.dcp.Reader("llama", step=900))

        reader = holdfast.dcp.Reader("llama")
        if reader.find() is not None:                                   # None: nothing to restore
            dcp.load(state, storage_reader=reader)

    A run that goes on from what it loads says so to the daemon: all its ranks agree on the step,
    and the steps that they save descend from it (going back to step 900 and training on discards
    what came after 900). To *adopt* a step is to do that.

    `adopt=None`: at the start of a run: at once, if this process takes part in the job already, or
    if a launcher (torchrun, Slurm, MPI) started it and no step is named; else with the first save
    of this process under that name. So what only reads a named step never adopts it. Nor does a
    load in the middle of a run, in a process that has restored or saved: it reads, and the run goes
    on from where it is.
    `adopt=True`: at once, also in the middle of a run, which then goes back to that step. All ranks
    of the run must load. A warning (logger `holdfast`) names the steps that are discarded.
    `adopt=False`: never. For evaluation and export beside a run.

    `allow_pickle`: objects that were saved as pickles are unpickled, which may run any code.
    `timeout`: seconds to choose the step (for all ranks to come, if it is adopted), to learn what it
    is made of, and for each 256 MiB that are read.
    `rank`, `world_size`, `launch`, `socket`: of the job, where the launcher's environment does not
    say it.
    `policy`: a holdfast.Policy, of the job; the first that is given counts.
    """

    def __init__(
        self,
        job: str,
        *,
        step: int | None = None,
        attempt: int = 0,
        adopt: bool | None = None,
        allow_pickle: bool = False,
        timeout: float = 600.0,
        rank: int | None = None,
        world_size: int | None = None,
        launch: str | None = None,
        socket: str = "",
        policy: Policy | Mapping[str, Mapping[str, int]] | None = None,
    ) -> None:
        super().__init__()
        attempt = unsigned("Reader", "attempt", attempt)
        if attempt and step is None:
            raise InvalidArgumentError("Reader: attempt= is of no use without step=")
        self.job = job_name("Reader", job)
        self._step = None if step is None else unsigned("Reader", "step", step)
        self._attempt = attempt
        self._adopt = adopt
        self._allow_pickle = allow_pickle
        self._timeout = seconds("Reader", "timeout", timeout)
        self._socket = socket
        self._job_options: dict[str, Any] = {
            "rank": rank,
            "world_size": world_size,
            "launch": launch,
            "socket": socket,
            "policy": as_core(policy),
        }
        self._load_id = str(uuid.uuid4())
        self._found: tuple[int, int] | None = None  # attempt, step
        self._saved_by: int | None = None  # so many ranks
        self._step_opened: _core.OpenStep | None = None  # while it is loaded
        self._stored: Stored | None = None
        self._reads: Reads | None = None  # what this rank's plan wants, until it is read
        self._values: _Values = {}  # the coordinator has them until the plans say who wants them
        self._error: HoldfastError | None = None

    # For the loop.

    def find(self) -> int | None:
        """The step that dcp.load will load, or None: the job never committed anything. What cannot
        be read is an error.

        Where it adopts, all ranks must call it, as they must all load.
        """
        try:
            return self._choose()[1]
        except NothingToRestoreError:
            return None

    @property
    def step(self) -> int | None:
        """The step that was loaded, or found."""
        return self._found[1] if self._found is not None else None

    # What StorageReader asks for, in the order in which DCP calls it.

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return False  # never chosen by a path

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        self._reads = None  # of a load whose plan failed: nobody tells
        step = self._step if self._found is None else self._found[1]
        if checkpoint_id is not None and (step is None or not names_step(checkpoint_id, step)):
            raise InvalidArgumentError(
                f"Reader: checkpoint_id={str(checkpoint_id)!r} does not name the step that this "
                f"Reader loads ({'the newest' if step is None else f'step {step}'} of job "
                f"{self.job!r}): leave it out, or name the step: Reader({self.job!r}, step=…)"
            )

    @property
    def checkpoint_id(self) -> str:
        return f"{self.job}/{'newest' if self._step is None else self._step}"

    def read_metadata(self) -> Metadata:
        # DCP makes an AssertionError of what is raised here, and of its type nothing is left.
        # set_up_storage_reader, which comes next, raises it for all ranks.
        try:
            self._error = None
            self._reads = None
            self._stored = self._read_layout()
            metadata = self._stored.metadata
            metadata.storage_meta = StorageMeta(
                checkpoint_id=f"{self.job}/{self.step}", load_id=self._load_id
            )
            return metadata
        except HoldfastError as error:
            self._error = error
            return Metadata({}, planner_data={})

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool) -> None:
        if self._error is not None:
            raise self._error
        if is_coordinator:
            # For all ranks: they lie in as many shards as there are ranks. And before the others'
            # plans have come: the run beside may give the slots to newer steps.
            assert self._stored is not None
            self._values = self._read_values(self._stored.objects)

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        # Held from here on: the run beside may give the slots to newer steps.
        self._reads = self._plan(plan)
        return dataclasses.replace(plan, storage_data=self._found)

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        found = {plan.storage_data for plan in plans}
        if len(found) > 1:
            steps = ", ".join(
                f"step {step} of attempt {attempt}" for attempt, step in sorted(found)
            )
            raise RefusedError(
                f"Reader: the ranks found different newest steps ({steps}): a run is saving just "
                "now; name one with step="
            )
        values, self._values = self._values, {}
        return [
            dataclasses.replace(
                plan,
                storage_data={name: values[name] for name in _objects(plan) if name in values},
            )
            for plan in plans
        ]

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        assert self._stored is not None
        _fences.before_change()  # of what is loaded into; dcp.async_save may be copying it still
        try:
            reads = self._reads
            if reads is None or reads.items != _tensor_items(plan):  # planned by another than DCP
                reads = self._plan(plan)
            values: _Values = plan.storage_data if isinstance(plan.storage_data, dict) else {}
            # (The same: what another has planned brings no values.)
            rest = [name for name in _objects(plan) if name not in values]
            values = {**values, **self._read_values(rest)}
            wanted = {item.storage_index.fqn for item in plan.items}
            for item in plan.items:
                if item.type == LoadItemType.BYTE_IO:
                    self._load_value(item, planner, values, wanted)
            reads.into(planner)
        finally:
            self._reads = reads = self._step_opened = None  # and so the slots that they hold
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def _plan(self, plan: LoadPlan) -> Reads:
        assert self._stored is not None and self._step_opened is not None
        for item in plan.items:
            name = item.storage_index.fqn
            if name in self._stored.conflicts:
                raise RefusedError(
                    f"Reader: load step {self.step} of job {self.job!r}: {name}: "
                    f"{self._stored.conflicts[name]}"
                )
        return Reads(self._step_opened, _tensor_items(plan), self._stored)

    def _choose(self) -> tuple[int, int]:
        """Attempt and step. Asked again it says the same: dcp.load after `find` loads what was
        found.
        """
        if self._found is not None:
            return self._found
        shared = open_job(self.job, **self._job_options)
        if self._adopts(shared):
            self._found = self._adopted(shared)
            return self._found
        if shared is not None and shared.has_begun:
            shared.wait_committed(self._step, self._timeout)
        view = self._attach(self._step, self._attempt)
        self._found = view.attempt, view.step
        self._saved_by = view.world_size
        if self._adopt is None:
            if shared is None:
                remember_loaded(self.job, view.attempt, view.step)
            else:
                _log.log(
                    logging.INFO if self._step is None else logging.WARNING,
                    "job %s: step %d of attempt %d is read only, for this process has "
                    "restored or saved before: the run goes on from where it is (adopt=True goes "
                    "back)",
                    self.job,
                    view.step,
                    view.attempt,
                )
        return self._found

    def _adopts(self, shared: SharedJob | None) -> bool:
        if self._adopt is not None:
            return self._adopt
        if shared is not None:
            return not shared.has_begun
        return self._step is None and _environment.detect().launcher != ""

    def _adopted(self, shared: SharedJob | None) -> tuple[int, int]:
        if shared is None:
            options = self._job_options
            options = {**options, "socket": ensure_daemon(options["socket"] or None)}
            shared = job_for(self.job, **options)
        with _held.alone(shared, "a load that adopts", self._timeout):
            before = self._line(shared.socket)
            restored = shared.core.adopt(
                step=self._step, attempt=self._attempt, timeout=self._timeout
            )
            shared.has_begun = shared.has_a_step = True
        forget_loaded(self.job)
        found = restored.attempt, restored.step
        if left := sorted({step for attempt, step in before if (attempt, step) > found}):
            _log.warning(
                "job %s: the run goes on from step %d of attempt %d: %s %s discarded by "
                "its next save (adopt=False only reads)",
                self.job,
                restored.step,
                restored.attempt,
                "step" if len(left) == 1 else "steps",
                f"{', '.join(map(str, left))} {'is' if len(left) == 1 else 'are'}",
            )
        return found

    def _line(self, socket: str) -> list[tuple[int, int]]:
        """Attempt and step of what the run could go on from."""
        try:
            # Only for a warning: a tier that does not answer keeps nobody from starting.
            found = _core.list_checkpoints(
                self.job, socket=socket, timeout=min(_LOOK_S, self._timeout)
            )
        except HoldfastError:
            return []  # adopting says what is wrong
        return [(each.attempt, each.step) for each in found if each.on_line]

    def _socket_path(self) -> str:
        shared = open_job(self.job)
        return (
            shared.socket
            if shared is not None
            else ensure_daemon(self._socket or None, start=False)
        )

    def _attach(self, step: int | None, attempt: int) -> _core.View:
        """The shard of rank 0, which says what the step is."""
        return _core.attach(
            self.job,
            step=step,
            attempt=attempt,
            socket=self._socket_path(),
            timeout=self._timeout,
        )

    def _read_layout(self) -> Stored:
        attempt, step = self._choose()
        if self._saved_by is None:
            self._saved_by = self._attach(step, attempt).world_size
        # No other shard is attached before it is planned what is wanted of it: the daemon has the
        # records of all of them.
        self._step_opened = _core.open_step(
            self.job,
            step=step,
            attempt=attempt,
            world_size=self._saved_by,
            socket=self._socket_path(),
            timeout=self._timeout,
        )
        items = [Item(*each) for each in self._step_opened.items]
        return stored(items, self._step_opened.objects(descriptions(items)))

    def _read_values(self, names: Iterable[str]) -> _Values:
        """Those that are objects of their own; others are in what is read already."""
        assert self._stored is not None and self._step_opened is not None
        found = {
            name: item for name in names if isinstance(item := self._stored.objects[name], int)
        }
        wanted = sorted(set(found.values()))
        read = dict(zip(wanted, self._step_opened.objects(wanted), strict=True))
        return {name: read[item][1:] for name, item in found.items()}

    def _load_value(
        self, item: ReadItem, planner: LoadPlanner, values: _Values, wanted: set[str]
    ) -> None:
        assert self._stored is not None
        name = item.storage_index.fqn
        value = self._stored.objects[name]
        data, codec = values[name] if isinstance(value, int) else (value, None)
        if name in self._stored.params:
            data = self._stored.params[name].wanted(wanted)
        planner.load_bytes(
            item, _items.bytes_for(name, data, codec, allow_pickle=self._allow_pickle)
        )


def _objects(plan: LoadPlan) -> list[str]:
    return [item.storage_index.fqn for item in plan.items if item.type == LoadItemType.BYTE_IO]


def _tensor_items(plan: LoadPlan) -> list[ReadItem]:
    return [item for item in plan.items if item.type != LoadItemType.BYTE_IO]
