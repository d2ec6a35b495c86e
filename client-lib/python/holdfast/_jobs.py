"""The jobs that this process takes part in: one `_core.Job` for each name, shared by all that save
and restore.

    shared = job_for("llama")
    with shared.lock:
        save = shared.core.save(...)

Rank and world size are the launcher's where nobody says otherwise.
"""

from __future__ import annotations

import atexit
import logging
import operator
import os
import sys
import threading
import weakref
from collections.abc import Mapping
from typing import Any

from holdfast import _core, _environment, _fresh, _held
from holdfast._errors import HoldfastError, InvalidArgumentError

_log = logging.getLogger("holdfast")
_MOMENT_S = 5.0
_lock = threading.RLock()
_open: dict[str, SharedJob] = {}
# What a reader loaded without taking part in the job: (attempt, step).
_loaded: dict[str, tuple[int, int]] = {}
# A forked child has no part in its parent's jobs, and must not run their destructors either.
_of_the_parent: list[Any] = []
# Those that are closed and still referred to, too.
_all: weakref.WeakSet[SharedJob] = weakref.WeakSet()


def unsigned(who: str, what: str, value: Any) -> int:
    """The value as a step or an attempt: any integer that the daemon has room for, NumPy's as well."""
    try:
        if not isinstance(value, bool) and 0 <= (number := operator.index(value)) < 2**64:
            return number
    except TypeError:  # nothing like an integer
        pass
    raise InvalidArgumentError(f"{who}: {what}={value!r} is not an integer from 0 to 2**64 - 1")


def seconds(who: str, what: str, value: Any) -> float:
    """The value as a time: any number from 0 (math.inf: no limit)."""
    try:
        if not isinstance(value, (bool, str)) and (number := float(value)) >= 0:
            return number
    except (TypeError, ValueError, OverflowError):
        pass
    raise InvalidArgumentError(f"{who}: {what}={value!r} is not a number of seconds from 0")


def job_name(who: str, value: Any) -> str:
    if isinstance(value, str) and value and value.isprintable():
        return value
    raise InvalidArgumentError(f"{who}: job={value!r} is not the name of a job")


class SharedJob:
    """A job that is open. `core` takes one call at a time: hold `lock` (not for Save.wait)."""

    def __init__(
        self,
        name: str,
        place: _environment.Environment,
        socket: str,
        policy: Mapping[str, Mapping[str, int]],
        core: _core.Job,
        fresh: str | None,
        *,
        detected: bool,
    ) -> None:
        """`detected`: rank or world size were the launcher's, or those of the process group."""
        self.name = name
        self.rank = place.rank
        self.world_size = place.world_size
        self.launch = place.launch
        self.socket = socket
        self.policy = policy
        self.core = core
        # The label that the run was given, and the one under which it saves (_fresh.py).
        self.fresh = fresh
        self.label = fresh
        self.detected = detected
        group = _group()
        # The process group in which it was joined, if there was one.
        self._group = None if group is None else weakref.ref(group)
        # Writers and Readers do not close it.
        self.used_by_dcp = False
        self.lock = threading.RLock()
        # Checkpointers that are not closed. Those that are dropped count no more.
        self.users: weakref.WeakSet[Any] = weakref.WeakSet()
        # Whether this process has restored, adopted or saved in its attempt: whose line it goes on
        # is settled.
        self.has_begun = False
        # Whether this process has restored a step, or sealed one: then a failed save never raises
        # unless on_error asks for it (_first_saves.py).
        self.has_a_step = False
        # Whether dcp.async_save may copy into a slot before it plans: not with planners that write
        # something else.
        self.stages_in_slots = True
        # The last save through DCP that was sealed, and its step.
        self.last_sealed: tuple[int, _core.Save] | None = None
        # The layout that dcp.async_save staged last (dcp/_staging.py).
        self.staged: Any = None
        _all.add(self)

    def begin(self, timeout: float) -> None:
        """Before the first save: what a reader loaded without taking part is what this run goes on
        from.
        """
        with self.lock:
            if self.has_begun:
                return
            loaded = _loaded.get(self.name)
            if loaded is not None:
                attempt, step = loaded
                self.core.adopt(step=step, attempt=attempt, timeout=timeout)
                self.has_a_step = True
            elif self.fresh is not None:
                _fresh.begin(self, timeout)
            self.has_begun = True

    def wait_committed(self, step: int | None, timeout: float) -> None:
        """Before a step is looked for (None: the newest): what this process has sealed is committed
        a moment later, or never, since another rank's save of it failed.
        """
        if self.last_sealed is None or step not in (None, self.last_sealed[0]):
            return
        try:
            self.last_sealed[1].wait("committed", min(timeout, _MOMENT_S))
        except HoldfastError:
            pass  # what can be read then is what there is

    def leave(self, user: Any, timeout: float = _held.PATIENCE_S) -> None:
        """Closes the job if no other user is left. A save that dcp.async_save has under way may
        still be sealed, for up to so many seconds.
        """
        with _lock:
            self.users.discard(user)
            if self.users:
                return
            self._forget()
        with _held.alone(self, "the end of the job in this process", timeout):
            self.core.close()

    @property
    def is_left_behind(self) -> bool:
        """Whether nobody can use it any more: its Checkpointers were dropped, and the process group
        in which Writers and Readers used it is gone.
        """
        if self.users:
            return False
        if not self.used_by_dcp:
            return True
        group = None if self._group is None else self._group()
        return self._group is not None and (group is None or group is not _group())

    def close(self) -> None:
        """Leaves the job at once, even if it is in use. The next `job_for` of its name joins again."""
        with _lock:
            self._forget()
        with _held.alone(self, "the end of the job in this process", 0.0):
            self.core.close()

    def _forget(self) -> None:
        if _open.get(self.name) is self:
            del _open[self.name]


def _distributed() -> Any:
    """torch.distributed, where it has a process group."""
    module = sys.modules.get("torch.distributed")
    if module is None or not module.is_available() or not module.is_initialized():
        return None
    return module


def _group() -> Any:
    """The default process group; None: there is none now."""
    distributed = _distributed()
    return None if distributed is None else distributed.group.WORLD


def _place(
    rank: int | None, world_size: int | None, launch: str | None
) -> _environment.Environment:
    place = _environment.detect(rank=rank, world_size=world_size, launch=launch)
    if rank is not None and world_size is not None:
        return place
    distributed = _distributed()
    if distributed is None:
        return place
    group = (distributed.get_rank(), distributed.get_world_size())
    if place.launcher == "" and rank is None and world_size is None:
        return _environment.detect({}, rank=group[0], world_size=group[1], launch=launch)
    if (place.rank, place.world_size) != group:
        raise InvalidArgumentError(
            f"{place.launcher or 'what was given'} says rank {place.rank} of {place.world_size}, "
            "torch.distributed says rank "
            f"{group[0]} of {group[1]}: pass rank= and world_size= of this job"
        )
    return place


def job_for(
    name: str,
    *,
    rank: int | None = None,
    world_size: int | None = None,
    launch: str | None = None,
    socket: str = "",
    copy_threads: int = 0,
    policy: Mapping[str, Mapping[str, int]] | None = None,
    fresh: str | None = None,
    open_timeout: float = 60.0,
    call_timeout: float = 30.0,
    user: Any = None,
) -> SharedJob:
    """The job of that name, joined at the first call. Later calls may leave everything out; what
    they do give must be the same.

    `user`: keeps it open until `SharedJob.leave(user)`.
    """
    with _lock:
        asked = {
            "rank": rank,
            "world_size": world_size,
            "launch": launch,
            "socket": socket,
            "policy": policy,
            "fresh": fresh,
        }
        shared = open_job(name, **asked)
        if shared is not None:
            _check_same(shared, asked)
            shared.used_by_dcp |= user is None
            if user is not None:
                shared.users.add(user)
            return shared
        place = _place(rank, world_size, launch)
        core = _core.Job(
            name,
            rank=place.rank,
            world_size=place.world_size,
            launch=place.launch,
            socket=socket,
            copy_threads=copy_threads,
            policy=policy or {},
            open_timeout=open_timeout,
            call_timeout=call_timeout,
        )
        detected = rank is None or world_size is None
        shared = SharedJob(name, place, socket, policy or {}, core, fresh, detected=detected)
        _open[name] = shared
        shared.used_by_dcp = user is None
        if user is not None:
            shared.users.add(user)
        return shared


def _differences(shared: SharedJob, asked: Mapping[str, Any]) -> dict[str, Any]:
    """What is asked for, and is not as this job has it. Where nothing is said, the place in the
    process group of now counts, if it did before or nobody uses the job any more.
    """
    wanted = {**asked, "socket": asked["socket"] or None}
    counts = shared.detected or shared.is_left_behind
    if counts and wanted["rank"] is None and wanted["world_size"] is None and _group() is not None:
        place = _place(None, None, wanted["launch"])
        wanted |= {"rank": place.rank, "world_size": place.world_size}
    return {
        what: value
        for what, value in wanted.items()
        if value is not None and value != getattr(shared, what)
    }


def _check_same(shared: SharedJob, asked: Mapping[str, Any]) -> None:
    for what, wanted in _differences(shared, asked).items():
        way_out = (
            "close() its Checkpointers first"
            if shared.users
            else f"leave it first: holdfast.Checkpointer({shared.name!r}).close()"
        )
        raise InvalidArgumentError(
            f"job {shared.name!r} is open in this process with {what}={getattr(shared, what)!r}: "
            f"it cannot be {wanted!r} as well. To join it again, {way_out}"
        )


def open_job(name: str, **asked: Any) -> SharedJob | None:
    """The job, if this process takes part in it already. One that was left behind, and is not as it
    is `asked` for (what job_for takes, all of it or nothing), is left for good.
    """
    with _lock:
        shared = _open.get(name)
        if shared is None or not asked or not shared.is_left_behind:
            return shared
        if not _differences(shared, asked):
            return shared
        _log.info(
            "job %s: left as rank %d of %d, to join it again",
            name,
            shared.rank,
            shared.world_size,
        )
        shared.close()
        return None


def remember_loaded(name: str, attempt: int, step: int) -> None:
    """This process has loaded that step and has not joined: should it save later, that is where it
    comes from.
    """
    with _lock:
        _loaded[name] = (attempt, step)


def forget_loaded(name: str) -> None:
    with _lock:
        _loaded.pop(name, None)


def _after_fork() -> None:
    global _lock
    _lock = threading.RLock()
    for shared in _all:
        shared.lock = threading.RLock()
    _of_the_parent.extend(_open.values())
    _open.clear()
    _loaded.clear()


def _close_all() -> None:
    for shared in list(_open.values()):
        try:
            shared.close()
        except Exception:  # the process ends: the daemon notices that as well
            pass


os.register_at_fork(after_in_child=_after_fork)
atexit.register(_close_all)
