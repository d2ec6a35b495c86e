"""`Checkpointer`: save in the loop, restore at its start."""

from __future__ import annotations

import atexit
import logging
import math
import os
import re
import signal
import sys
import time
import weakref
from collections.abc import Callable, Iterable, Mapping
from types import TracebackType
from typing import Any, Literal

from holdfast import _core, _daemon, _fences, _first_steps, _fresh, _held, _jobs, _preemption
from holdfast._collection import no_collection
from holdfast._described import Described, Spec, torch_module
from holdfast._errors import (
    DeadlineExceededError,
    HoldfastError,
    InternalError,
    InvalidArgumentError,
    NothingToRestoreError,
    RefusedError,
)
from holdfast._first_saves import never_heals
from holdfast._fresh_states import FreshStates
from holdfast._fsdp1 import refuse_fsdp1
from holdfast._handle import STAGES, Handle, Stage, streams_of
from holdfast._lbfgs import refuse_lbfgs
from holdfast._merged import Merge, OfAll
from holdfast._missing_ranks import MissingRanks
from holdfast._network import NetworkBusy
from holdfast._optimizers import is_optimizer
from holdfast._policy import Policy
from holdfast._progress import Progress, RestoreProgress
from holdfast._reader import Checkpoint, OldRanks
from holdfast._restored_state import Wanted
from holdfast._same_ranks import SameRanksOnly
from holdfast._skipped import Line, SkippedSaves
from holdfast._state import Flat, Flattener, found_in
from holdfast._uncommitted import UncommittedSteps

_log = logging.getLogger("holdfast")
_made: weakref.WeakSet[Checkpointer] = weakref.WeakSet()

# The most valuable copies first.
_DRAINED: tuple[Stage, ...] = ("sealed", "committed", "peer", "remote", "nvme")
_EXIT_S = 2.0  # what a process needs to end in good order
_WAIT_S = 60.0  # that a save waits for its slot and its commit, if it waits and nothing is said
_ANSWER_S = 0.25  # so much earlier a save gives up that waits for a slot: it knows why


# What becomes of saves that fail; a function gets the step and the error.
OnError = Literal["log", "raise"] | Callable[[int, HoldfastError], object]


class Checkpointer:
    """One rank of a training job.

        ckpt = holdfast.Checkpointer("llama-70b", policy=holdfast.Policy(remote_every_ms="10min", remote_keep_last=5))
        start = ckpt.restore({"model": model, "optim": optim, "extra": extra})   # 0: nothing was saved yet
        for step in range(start, n):
            train(...)
            ckpt.save(step, {"model": model, "optim": optim, "extra": {"loader": loader.state_dict()}})

    Rank and world size come from the launcher (torchrun, Slurm, MPI), unless you pass `rank` and `world_size`.
    torch.distributed need not be initialised, and no method here is a collective.

    `overlap`: copy the parameters and state of the optimizers in the state while the next forward and backward pass runs. Their
    `step()` waits until the copy is done. A hook of torch's for all optimizers sees to that, and must have run once before the
    copy may overlap: pass the optimizers to `restore` before the loop, also at a first start. Everything else is copied before
    `save` returns. With False everything is.
    `allow_pickle`: pickle values that are not JSON, and unpickle them in `restore`. A checkpoint that you read can then run any
    code.
    `on_error`: what happens when a save fails. "log": each cause is logged once. "raise": the failure is raised, at the latest
    by the next call. A function: it is called with the step and the error. In all three cases the first save raises what no
    later save can overcome (docs/python.md, "Errors").
    `uncommitted_max`: warn after this rank has sealed so many steps in a row of which none was committed, because other ranks
    did not save them. Later saves count as failed until a step is committed again.
    `fresh`: a label. The first start with it begins a new training under this job's name: nothing is restored, and the old steps
    stay for the grace time. Every later start with the same label resumes (docs/python.md, "A new run under the same name").
    `start_daemon`: with False, do not start a private ckptd where none is installed.
    `grace`, `stop_signals`: how long the job may still run after it was told to end (seconds, or a text like "90s"; otherwise
    HOLDFAST_GRACE, otherwise 30 s), and which signals tell it so: see `preempted`.

    `last_restored`: the step that `restore` read, with its attempt, the tier it came from and why not a nearer one. None when
    nothing was restored.
    """

    def __init__(
        self,
        job: str,
        *,
        policy: Policy | None = None,
        rank: int | None = None,
        world_size: int | None = None,
        launch: str | None = None,
        socket: str | os.PathLike[str] | None = None,
        copy_threads: int = 0,
        overlap: bool = True,
        allow_pickle: bool = False,
        on_error: OnError = "log",
        uncommitted_max: int = 3,
        fresh: str | None = None,
        start_daemon: bool | None = None,
        open_timeout: float = 60.0,
        call_timeout: float = 30.0,
        grace: float | str | None = None,
        stop_signals: Iterable[int] = (signal.SIGTERM,),
    ) -> None:
        if not callable(on_error) and on_error not in ("log", "raise"):
            raise InvalidArgumentError(
                f"on_error={on_error!r}: 'log', 'raise', or a function of the step and the error"
            )
        if policy is not None and not isinstance(policy, Policy):
            raise InvalidArgumentError(f"Checkpointer: policy={policy!r} is not a holdfast.Policy")
        self.job = _jobs.job_name("Checkpointer", job)
        most = _jobs.unsigned("Checkpointer", "uncommitted_max", uncommitted_max)
        if most == 0:
            raise InvalidArgumentError("Checkpointer: uncommitted_max=0: it is at least 1")
        self._grace = _preemption.grace_of("Checkpointer", grace)
        self._stop_signals = _preemption.stop_signals("Checkpointer", stop_signals)
        self._watches_signals = False
        self._allow_pickle = allow_pickle
        self._on_error = on_error
        self._at_exit = False
        for what, value, kinds in (
            ("launch", launch, (str,)),
            ("socket", socket, (str, os.PathLike)),
        ):
            if value is not None and not isinstance(value, kinds):
                raise InvalidArgumentError(f"Checkpointer: {what}={value!r} is not a text")
        path = _daemon.ensure_daemon(
            None if socket is None else str(os.fspath(socket)), start=start_daemon is not False
        )
        self._shared = _jobs.job_for(
            job,
            rank=rank,
            world_size=world_size,
            launch=launch,
            socket=path,
            copy_threads=_jobs.unsigned("Checkpointer", "copy_threads", copy_threads),
            policy=None if policy is None else policy.to_core(),
            fresh=_fresh.checked(fresh),
            open_timeout=_jobs.seconds("Checkpointer", "open_timeout", open_timeout),
            call_timeout=_jobs.seconds("Checkpointer", "call_timeout", call_timeout),
            user=self,
        )
        # One rank speaks for all.
        self._disk = _daemon.disk_watch(self.job, path) if self._shared.rank == 0 else None
        self._layout: tuple[list[Spec], _core.TensorList | None] = ([], None)
        self._half_restored: dict[str, str] = {}  # keys of states, and why
        self._described: Described | None = None
        self._handle: Handle | None = None
        self._unreported: list[Handle] = []  # what becomes of them is not known yet
        self._to_report: list[Handle] = []  # sealed or failed, and nobody was told
        self._skipped = SkippedSaves()
        self._same_ranks_only = SameRanksOnly()
        self._uncommitted = UncommittedSteps(most)
        self._failed = 0
        self._last_step: int | None = None  # the first that `preempted` has called the last one
        self._has_saved = False
        self._overlap = overlap
        self._fences = _fences.Fences(overlap=overlap)
        self._closed = False
        self.last_restored: _core.Restored | None = None
        _made.add(self)

    # ---- saving ----

    def save(
        self,
        step: int,
        state: Mapping[str, Any],
        *,
        wait: Stage | None = None,
        timeout: float | None = None,
    ) -> Handle:
        """Begins to save the state under this step, which must grow; returns within milliseconds.

            ckpt.save(step, {"model": model, "optim": optim, "extra": {"epoch": epoch}})
            ckpt.save(step, state, wait="remote")       # before the job is ended on purpose

        `wait`: "snapshot", "sealed", "committed", "peer", "nvme" or "remote": returns when the save has come that far, or never will,
        or after `timeout` seconds. Without `timeout` it waits 60 s for the save to be committed, and for a tier after that as long
        as the tier takes. Such a save (but for "snapshot") also waits for a slot, should none be free, and for a daemon that
        hangs or is being restarted, for as long as that; one without `wait` is given up when the daemon has said nothing for a second,
        and at once where there is none. A save that fails, or has not come that far, is logged and does not raise, but for the
        first save of a process, and as `on_error` says; the handle says so (`error`, `times`), and `failed_saves`.
        """
        if wait is not None and wait not in STAGES:
            raise InvalidArgumentError(f"save: there is no stage {wait!r}: {', '.join(STAGES)}")
        step = _jobs.unsigned("save", "step", step)
        timeout = None if timeout is None else _jobs.seconds("save", "timeout", timeout)
        until = None if timeout is None else time.monotonic() + timeout
        self._report(in_save=True)
        self.wait_snapshot()  # of the save before: here Ctrl-C works
        self._look_at_disk()
        room = 0.0
        if wait is not None and wait != "snapshot":
            room = _WAIT_S if until is None else max(0.0, until - time.monotonic())
            room -= min(room / 8, _ANSWER_S)
        handle = self._begun(step, state, room)
        self._handle = handle
        self._unreported.append(handle)
        handle._wait_first()
        if not self._shared.has_a_step:
            handle._wait_for_slot()
        if wait is not None:
            self._await(handle, wait, None if until is None else max(0.0, until - time.monotonic()))
        self._report(in_save=True)
        return handle

    def _await(self, handle: Handle, stage: Stage, timeout: float | None) -> None:
        try:
            if timeout is None and stage != "snapshot":
                # Who waits for a tier knows how fast it is. A step that does not commit is another matter.
                first: Stage = "sealed" if stage == "sealed" else "committed"
                handle.wait(first, _WAIT_S)
            handle.wait(stage, timeout)
        except HoldfastError as error:
            if handle.error is None:  # or it is reported as any other save that failed
                if self._on_error == "raise":
                    raise
                _log.error(
                    "job '%s': step %d has not come to %r: %s", self.job, handle.step, stage, error
                )
                self._tell(handle.step, error)

    def _begun(self, step: int, state: Mapping[str, Any], wait_for_room: float) -> Handle:
        """What goes wrong with the state is raised as long as nothing was saved, and is a failed save in the middle of a run."""
        try:
            flat, tensors = self._taken_apart(f"save step {step}", state, self._fences.hold)
        except Exception as error:
            if not self._has_saved:
                raise
            return _failed(step, error)
        try:
            self._check_open(f"save step {step}")
            handle = self._started(step, flat, tensors, wait_for_room)
        except Exception as error:
            return _failed(step, error)
        if (
            not self._has_saved
            and handle.done("sealed")
            and isinstance(handle.error, InvalidArgumentError)
        ):
            raise handle.error  # nobody was asked: a name that can never be
        self._has_saved = True
        return handle

    def _started(
        self, step: int, flat: Flat, tensors: _core.TensorList, wait_for_room: float
    ) -> Handle:
        self._shared.begin(60.0)
        with _held.alone(self._shared, f"step {step}", _held.PATIENCE_S):
            # In one expression: an interrupt finds either the save, which waits for its copy when it goes, or the handle,
            # which lets go of the save before it does of the tensors.
            handle = Handle(
                step,
                self._shared.core.save(
                    step,
                    tensors,
                    flat.addresses,
                    flat.objects,
                    copy_first=flat.copy_first,
                    wait_first=False,
                    streams=streams_of(flat.devices),
                    wait_for_room=wait_for_room,
                ),
                flat.keep,
                None,
                flat.fenced_devices,
                at_once=flat.copies and len(flat.copy_first) == len(flat.specs),
            )
            _fences.add(handle)
            return handle

    def _taken_apart(
        self, what: str, state: Mapping[str, Any], fences: Callable[[Any], bool]
    ) -> tuple[Flat, _core.TensorList]:
        flat = Flattener(
            allow_pickle=self._allow_pickle,
            fences=fences,
            beside=self._fences.added,
            before=self._described,
        ).run(state)
        self._described = flat.described
        self._say(self._same_ranks_only.line(flat.same_ranks_only))
        flat.objects += _fresh.objects_of(self._shared.label)
        for key, error in self._half_restored.items():
            raise RefusedError(
                f"{what}: a restore has failed after it had changed {key!r} in part "
                f"({error}): restore {key!r} again first, or, if it is a new object since then, go on with another Checkpointer"
            )
        specs, tensors = self._layout
        if tensors is None or flat.specs != specs:
            tensors = tensor_list(flat.specs)
            self._layout = (flat.specs, tensors)
        return flat, tensors

    def _check_open(self, what: str) -> None:
        if self._closed:
            raise RefusedError(
                f"{what} of job {self.job!r}: this Checkpointer was closed. Make another one: holdfast.Checkpointer({self.job!r})"
            )

    def fence(self, optimizer: Any) -> None:
        """Copy this optimizer's parameters and state beside the loop, though the state does not show it.

            ckpt.fence(wrapper.optim)       # once, before the loop: the state has `wrapper`, and a state_dict() is all it shows

        Its `step()` then waits for the copy, as that of optimizers in the state does. Nothing else may change them before the next
        `step()`: a wrapper that writes parameters of its own accord waits with `wait_snapshot()`.
        """
        self._fences.add(optimizer)

    def wait_snapshot(self) -> None:
        """Returns when what the last save saved may be changed by hand. Optimizers that were passed need no such call."""
        if self._handle is not None and not self._handle.done("snapshot"):
            self._handle.wait_snapshot()

    def _look_at_disk(self, *, last: bool = False) -> None:
        if self._disk is not None and self._handle is not None:
            self._disk.look(self._handle, last=last)

    @property
    def failed_saves(self) -> int:
        """Saves of this Checkpointer that failed, as far as is known now."""
        self._count()
        return self._failed

    def _count(self) -> None:
        for handle in list(self._unreported):
            if handle.done("sealed") and handle in self._unreported:
                self._unreported.remove(handle)
                if handle.error is None:
                    self._shared.has_a_step = True
                else:
                    self._failed += 1
                self._to_report.append(handle)

    def _report(self, *, in_save: bool) -> None:
        """Says of each save that failed that it did: once. Only a save raises what no later one can overcome."""
        self._count()
        settled, self._to_report = self._to_report, []
        failed: list[tuple[int, HoldfastError]] = []
        for handle in settled:
            self._say(self._skipped.line(handle.step, handle.error, time.time()))
            error: HoldfastError | None = handle.error
            if error is None and self._shared.world_size > 1:
                line, error = self._uncommitted.sealed(handle)
                self._say(line)
                self._failed += error is not None
            if error is not None:
                failed.append((handle.step, error))
        for step, error in failed:
            self._tell(step, error)
        if failed and not self._at_exit:
            error = failed[-1][1]
            final = in_save and not self._shared.has_a_step and never_heals(error)
            if self._on_error == "raise" or final:
                raise error

    def _tell(self, step: int, error: HoldfastError) -> None:
        if callable(self._on_error):
            self._on_error(step, error)

    def _say(self, line: Line | None) -> None:
        if line is not None:
            level, text = line
            _log.log(level, "job '%s': %s", self.job, text)

    # ---- the end ----

    def preempted(self, step: int) -> bool:
        """Whether the job is to end, and this step is its last one. Every rank calls it when it is done with a step, and
        before it saves that:

            last = ckpt.preempted(step)
            if last or step % 100 == 0:
                ckpt.save(step, state)
            if last:
                print(ckpt.drain())     # ('committed', 'peer', 'remote')
                break

        From the first call on SIGTERM (see `stop_signals`) does not end the process any more, but tells the job to end; so does
        `notice_stop`. Whichever rank was told: all hear `True` after the same step, which their nodes agree on, and which none
        of them is beyond. That step goes into every tier that the job uses, ahead of all others, also when all ranks have
        ended.

        It is not a collective, and may be called in any rhythm that is the same on all ranks. It takes some 20 microseconds,
        once after the notice up to 2 s (of a short grace no more than half), and never raises because of a daemon: without one
        it is `True` where this process itself was told. A daemon that is just being restarted is waited for as long; so it is
        by the save of the last step, for `call_timeout`, as far as the grace goes.
        """
        step = _jobs.unsigned("preempted", "step", step)
        if not self._watches_signals:
            self._watches_signals = True
            _preemption.watch(self, self._grace, self._stop_signals)
        last = self._shared.core.preempted(step)
        if not last:
            self._last_step = None  # of an attempt before this one
        elif self._last_step is None:
            self._last_step = step
        return last

    def notice_stop(self, grace: float | str | None = None) -> None:
        """This process was told to end otherwise than by a signal (a notice of the cloud): it is killed in so many seconds. May
        be called in any thread; the first one counts.
        """
        seconds = self._grace if grace is None else _preemption.grace_of("notice_stop", grace)
        self._shared.core.notice_stop(seconds)

    def drain(self, timeout: float | None = None) -> tuple[Stage, ...]:
        """Waits until the last save lies wherever it goes to, and returns the stages that it has come to: of "sealed",
        "committed", "peer", "remote", "nvme".

        At the latest after `timeout` seconds; None: when the job was told to end, 2 s before it is killed. It does not raise
        because of what the save has not come to. () where the step that `preempted` has called the last one was not saved here. The
        daemons go on with it when this process has ended: waiting is for jobs whose nodes go with them.
        """
        if timeout is None:
            left = self._shared.core.stop_left
            limit = math.inf if left is None else max(0.0, left - _EXIT_S)
        else:
            limit = _jobs.seconds("drain", "timeout", timeout)
        if self._last_step is not None and (
            self._handle is None or self._handle.step < self._last_step
        ):
            _log.error(
                "job '%s': drain: step %d, the last one of the job, was not saved by this Checkpointer, and is not committed for "
                "any rank without that: call save(%d, …) after `preempted` has said True, then drain()",
                self.job,
                self._last_step,
                self._last_step,
            )
            return ()
        if self._handle is None:
            return ()
        until = time.monotonic() + limit
        reached: list[Stage] = []
        for stage in _DRAINED:
            try:
                self._handle.wait(stage, max(0.0, until - time.monotonic()))
                reached.append(stage)
            except (RefusedError, DeadlineExceededError):
                continue  # it does not go there, or has not come there in time
            except HoldfastError as error:
                if self._handle.error is None:  # or it is reported as any other save that failed
                    _log.error("job '%s': step %d: %s", self.job, self._handle.step, error)
                break
        self._report(in_save=False)
        return tuple(reached)

    # ---- restoring ----

    def restore(
        self,
        state: dict[str, Any],
        *,
        step: int | None = None,
        attempt: int = 0,
        strict: bool = True,
        convert: bool = False,
        rename: Rename | None = None,
        merge: Mapping[str, Merge] | None = None,
        progress: Callable[[RestoreProgress], object] | None = None,
        timeout: float = 600.0,
    ) -> int:
        """Fill the state from the newest step that every rank can load. Return the next step to train.

            start = ckpt.restore({"model": model, "optim": optim, "extra": extra})
            for step in range(start, n): ...

        The next step is the restored step + 1, or 0 when the job has saved nothing. `last_restored` names the restored step, its
        attempt and the tier it came from. If there are checkpoints and none can be read, `restore` raises: a run must not
        start from scratch because of an error.

        All ranks must call it, and all get the same step. Modules, optimizers, tensors and arrays are filled in place, bit for
        bit. Dictionaries and lists without tensors get the content that was saved. Keys that the state leaves out are not
        restored. Another number of ranks, or another parallel layout, may have saved the step: each rank gets the parts that it
        has a place for, out of all shards (docs/elastic.md).

        `step`, `attempt`: restore this step instead. The next save discards all later steps for good:

            ckpt.restore(state, step=900)      # returns 901

        `strict`: with False, leave alone what only the checkpoint has, and what only a module or a dictionary with tensors has.
        `convert`: round floating-point tensors that were saved with another type to the nearest value.
        `rename`: the names that tensors of modules, and of their optimizers, had when they were saved. It is a function of the
        name now, or a dictionary of regular expressions and replacements:

            ckpt.restore({"model": model}, rename={r"^model\\.encoder\\.": "model.bert."})

        `merge`: what each rank gets of a value that each old rank had for itself, when the number of ranks differs. Keys are paths
        in the state; a function gets the list of the old ranks' values:

            ckpt.restore(state, merge={"extra.rng": lambda values: values[rank % len(values)]})

        `progress`: a function that is called a few times a second with a holdfast.RestoreProgress. An exception in it ends the
        restore. Without it, a restore that takes long shows a bar on a terminal (with rich or tqdm, if one is installed), or
        logs a line every 10 s (logger `holdfast`).
        `timeout`: seconds after which the restore gives up, also while it waits for other ranks.
        """
        if not isinstance(state, dict):
            raise InvalidArgumentError(
                f"restore: a state is a dictionary of what is to be filled, not a {type(state).__name__}"
            )
        self._check_open("restore")
        self.wait_snapshot()
        step = None if step is None else _jobs.unsigned("restore", "step", step)
        attempt = _jobs.unsigned("restore", "attempt", attempt)
        timeout = _jobs.seconds("restore", "timeout", timeout)
        if attempt and step is None:
            raise InvalidArgumentError(f"restore: attempt {attempt} of which step? Name it: step=…")
        for path, each in found_in(state):
            refuse_fsdp1(path, each)
            refuse_lbfgs(path, each)
            if is_optimizer(each):
                self._fences.watch(each)
        if progress is not None and not callable(progress):
            raise InvalidArgumentError(
                f"restore: progress is a function of a holdfast.RestoreProgress, not a {type(progress).__name__}"
            )
        merge = _functions(merge)
        renamed = _renaming(rename)
        wanted: Wanted | None = None
        old_ranks: dict[tuple[int, int], OldRanks] = {}
        with _fences.no_training():
            fresh = FreshStates(state)
        looks = _fresh.Looks(self._shared)
        until = time.monotonic() + timeout

        def choose(
            saved: list[_core.TensorInfo],
            objects: list[_core.Object],
            of_all: _core.SavedByAll | None,
        ) -> tuple[_core.TensorList, list[int]]:
            nonlocal wanted
            every = None if of_all is None else OfAll(*of_all)
            looks.at(objects, every, step=step)
            with no_collection():
                wanted = Wanted(
                    state,
                    saved,
                    objects,
                    strict=strict,
                    allow_pickle=self._allow_pickle,
                    convert=convert,
                    rename=renamed,
                    of_all=every,
                    merge=merge,
                    values_of=lambda known, path: self._values_of(known, path, old_ranks, until),
                    fresh=fresh,
                )
                return tensor_list(wanted.specs), wanted.addresses

        devices = devices_of(state)
        ranks = MissingRanks(self.job, self._shared.socket, self.rank, self.world_size)
        with (
            _held.alone(self._shared, "a restore", timeout),
            Progress(self.job, progress, ranks, bar=self.rank == 0) as shown,
        ):
            try:
                restored = looks.patiently(
                    timeout,
                    lambda left: self._shared.core.restore(
                        choose,
                        step=step,
                        attempt=attempt,
                        timeout=left,
                        streams=streams_of(devices),
                        convert=convert,
                        progress=shown,
                        label=looks.label,
                    ),
                )
            except NothingToRestoreError:
                if step is not None:
                    raise
                self._shared.has_begun = True
                return 0
            except BaseException as error:
                if wanted is not None:  # some of it may have been loaded
                    self._note_half_restored(state, error)
                raise
            finally:
                for each in old_ranks.values():
                    each.close()
            self._shared.has_begun = self._shared.has_a_step = True
        assert wanted is not None
        try:
            with _fences.no_training(), no_collection():
                wanted.finish()
        except BaseException as error:
            self._note_half_restored(state, error)
            raise
        for key in map(str, state):
            self._half_restored.pop(key, None)
        self.last_restored = restored
        for note in restored.notes:
            _log.warning("job '%s': restored step %d, but %s", self.job, restored.step, note)
        _log.info(
            "job '%s': restored step %d of attempt %d from %s%s",
            self.job,
            restored.step,
            restored.attempt,
            restored.source,
            f" ({restored.why})" if restored.why else "",
        )
        return restored.step + 1

    def _note_half_restored(self, state: Mapping[str, Any], error: BaseException) -> None:
        self._half_restored |= dict.fromkeys(map(str, state), str(error) or type(error).__name__)
        if sys.version_info >= (3, 11):
            error.add_note(
                "some of the state may have been written: it is not saved before it has been restored"
            )

    def _values_of(
        self, of_all: OfAll, path: str, opened: dict[tuple[int, int], OldRanks], until: float
    ) -> list[Any]:
        """What each of the ranks that saved a step had under that path; None: nothing."""

        def attach() -> Checkpoint:
            views = [
                _core.attach(
                    self.job,
                    rank=rank,
                    step=of_all.step,
                    attempt=of_all.attempt,
                    socket=self._shared.socket,
                    timeout=max(until - time.monotonic(), 0.0),
                )
                for rank in range(of_all.saved_by)
            ]
            return Checkpoint(
                self.job, views, self._shared.socket, max(until - time.monotonic(), 0.0)
            )

        key = of_all.attempt, of_all.step
        if key not in opened:
            opened[key] = OldRanks(of_all, attach)
        return opened[key].values(path, allow_pickle=self._allow_pickle)

    # ---- the rest ----

    def prepare(self, state: Mapping[str, Any], timeout: float = 60.0) -> tuple[int, int]:
        """Makes the slots for this state and describes it, so that the first save is as fast as later ones.

            ckpt.restore(state)
            ckpt.prepare(state)     # (slots ready, slots wanted), at the latest after `timeout` seconds
            loader = build_loader()

        Best after `restore`, which may make tensors; it may also come before, and each rank calls it when it likes. An optimizer
        of torch.optim that has made no step yet is prepared for with the state that its first step makes, which for a moment takes
        as much memory as it will then.
        Where memory is in use now, fewer slots are ready than wanted: that is no error, and the saves ask for the rest.
        A state that no save could take raises what the first save would: NoRoomError where it is larger than all slots may be.
        """
        self._check_open("prepare")
        timeout = _jobs.seconds("prepare", "timeout", timeout)
        optimizers = [each for _, each in found_in(state) if is_optimizer(each)]
        for each in optimizers:
            self._fences.watch(each)
        with _first_steps.shown(optimizers):
            flat, tensors = self._taken_apart("prepare", state, lambda _: self._overlap)
            with _held.alone(self._shared, "prepare", timeout):
                ready, wanted, _ = self._shared.core.reserve(
                    tensors, flat.addresses, flat.objects, timeout
                )
        return ready, wanted

    def network_busy(self) -> NetworkBusy:
        """A quiet window: the training itself needs the network, and this node's background copying pauses meanwhile.

            with ckpt.network_busy():
                loss.backward()  # all-reduces gradients

        What pauses: copies that this node keeps of other nodes' shards, and what it writes to the remote tier. Restores go on, and so does everything while a process of the node waits for it (`wait="remote"`). What is
        under way already, some MiB, still arrives.

        Entering and leaving takes a microsecond: nothing is sent, nothing is waited for, and nothing fails; without a daemon, with
        an older one, or in a forked child it has no effect. Windows are counted: they may be nested, and open in several threads,
        and what this returns may be entered again and again. They end with the process. Copying never stops for good: a
        window that is not left counts for 10 s, and all windows of a node hold copying up for at most 9 s of any 10 s.
        """
        return NetworkBusy(self._shared.core)

    @property
    def attempt(self) -> int:
        """The number of this incarnation of the job."""
        return self._shared.core.attempt

    @property
    def rank(self) -> int:
        return self._shared.rank

    @property
    def world_size(self) -> int:
        return self._shared.world_size

    def close(self) -> None:
        """Waits for a copy under way, and leaves the job with the process's last Checkpointer of it. The interpreter's end does
        the same.
        """
        self._close(_held.PATIENCE_S)

    def _close(self, timeout: float) -> None:
        self.wait_snapshot()
        self._closed = True
        if self._watches_signals:
            self._watches_signals = False
            _preemption.unwatch(self)
        self._look_at_disk(last=True)
        self._disk = None
        self._shared.leave(self, timeout)
        try:
            self._report(in_save=False)
        finally:
            self._say(self._skipped.rest())

    def __reduce__(self) -> Any:
        raise RefusedError(
            f"job {self.job!r}: a Checkpointer cannot be copied, or go to another process: its slots are mapped in this one"
        )

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


# A name now made into the one that was saved; or patterns and replacements, as re.sub has them.
Rename = Callable[[str], str] | Mapping[str, str]


def _renaming(rename: Rename | None) -> Callable[[str], str]:
    if rename is None:
        return str
    if callable(rename):
        function = rename

        def told(name: str) -> str:
            try:
                saved = function(name)
            except Exception as error:
                raise InvalidArgumentError(
                    f"restore: rename of {name!r}: the function raised {type(error).__name__}: {error}"
                ) from error
            if not isinstance(saved, str):
                raise InvalidArgumentError(
                    f"restore: rename of {name!r}: the function returned {saved!r}, which is no name"
                )
            return saved

        return told
    if not isinstance(rename, Mapping):
        raise InvalidArgumentError(
            "restore: rename is a function of a tensor's name, or a dictionary of patterns and replacements"
        )
    try:
        patterns = [(re.compile(pattern), to) for pattern, to in rename.items()]
        for pattern, to in patterns:
            pattern.sub(to, "")
    except (re.error, TypeError) as error:
        raise InvalidArgumentError(f"restore: rename: {error}") from error

    def renamed(name: str) -> str:
        for pattern, to in patterns:
            name = pattern.sub(to, name)
        return name

    return renamed


def _functions(merge: Mapping[str, Merge] | None) -> Mapping[str, Merge]:
    if merge is None:
        return {}
    if not isinstance(merge, Mapping) or not all(
        isinstance(path, str) and callable(function) for path, function in merge.items()
    ):
        raise InvalidArgumentError(
            "restore: merge is a dictionary of paths in the state and functions of all old ranks' values"
        )
    return merge


def _failed(step: int, error: Exception) -> Handle:
    if not isinstance(error, HoldfastError):
        cause = error
        error = InternalError(f"save step {step}: the state: {type(cause).__name__}: {cause}")
        error.__cause__ = cause
    return Handle(step, None, None, error, set())


def tensor_list(specs: list[Spec]) -> _core.TensorList:
    tensors = _core.TensorList()
    for name, dtype, shape, offset, local_shape, device, flat in specs:
        tensors.add(
            name, dtype, shape, offset=offset, local_shape=local_shape, flat=flat, device=device
        )
    return tensors


def devices_of(state: Any) -> set[int]:
    """Every CUDA device that this process uses: tensors that restore makes may lie on any of them."""
    torch = torch_module()
    if torch is None or not torch.cuda.is_available() or not torch.cuda.is_initialized():
        return set()
    return set(range(torch.cuda.device_count()))


def _close_all() -> None:
    """At the interpreter's end: the last save's failure is told like any other's. Nobody can catch it any more."""
    for checkpointer in list(_made):
        # Of a forked child's they are not, nor are those that were closed.
        if _jobs.open_job(checkpointer.job) is checkpointer._shared:
            checkpointer._at_exit = True
            try:
                checkpointer._close(0.0)  # all threads have ended: nobody seals anything any more
            except Exception as error:
                _log.error("job '%s': leaving it: %s", checkpointer.job, error)


atexit.register(_close_all)  # after that of _jobs, and so before it
