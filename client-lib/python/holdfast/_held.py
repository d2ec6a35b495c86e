"""Saves that are held: copied into a slot, and not sealed yet. A job has one of them at a time, and
whatever else begins a save, a restore or a prepare of the same job, or closes it, gives it up. So
all that do any of these wait for it here first.

    with _held.alone(shared, "step 5", timeout):
        held = HeldSave(shared, 5, shared.core.save(..., hold=True), sources)
    try:
        held.save.wait("snapshot", timeout)
        held.seal(timeout)
    except BaseException:
        held.discard()
        raise
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from holdfast import _core
from holdfast._errors import RefusedError

if TYPE_CHECKING:
    from holdfast._jobs import SharedJob

_log = logging.getLogger("holdfast")


class HeldSave:
    """A save that is sealed or given up, once, by the thread that comes first.

    `sources`: what the copy reads. It is kept until the copy has ended, whatever is raised before
    then and wherever; so make one in the expression that begins the save.
    """

    def __init__(self, shared: SharedJob, step: int, save: _core.Save, sources: Any) -> None:
        self.shared = shared
        self.step = step
        self.save = save
        self.sources = sources
        self._begin, self._end = 0, 0
        self._open = True  # under shared.lock
        with _live_changed:
            _live.add(self)

    def __del__(self) -> None:
        del self.save  # waits for the copy; then the sources may go

    def lies_at(self, begin: int, end: int) -> None:
        """The copy has ended: its tensors are between these addresses, and the sources are free."""
        self._begin, self._end = begin, end
        self.sources = None

    def seal(self, timeout: float) -> None:
        with self.shared.lock:
            if not self._open:
                raise RefusedError(
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
        """Gives the step up, for all ranks, unless it is sealed or given up already. Returns when
        nothing reads the sources any more.
        """
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
                    "job %s: step %d was staged and not saved: given up",
                    self.shared.name,
                    self.step,
                )

        threading.Thread(target=wait, name="holdfast-staged").start()

    def _settled(self) -> None:
        with _live_changed:
            _live.discard(self)
            _live_changed.notify_all()


_live: weakref.WeakSet[HeldSave] = weakref.WeakSet()
_live_changed = threading.Condition()
PATIENCE_S = 60.0
# Of one that is dropped nobody tells.
_LOOK_EVERY_S = 0.05
_FIRST_LINE_S = 0.9
_BETWEEN_LINES_S = 10.0


def holder_of(address: int) -> HeldSave | None:
    """The held save in whose slot this address is."""
    with _live_changed:
        return next((held for held in _live if held._begin <= address < held._end), None)


def _unsettled(shared: SharedJob) -> list[HeldSave]:
    """What is held of this job and can still be sealed; with _live_changed."""
    return [held for held in _live if held.shared is shared and not held.save.done("sealed")]


@contextlib.contextmanager
def alone(shared: SharedJob, what: str, timeout: float) -> Iterator[None]:
    """For what would give up the save that is held: waits until that one is sealed or given up, and
    has shared.lock then. What is not sealed in time is given up, and a warning says so.

    `what`: that begins: "step 5", "a restore".
    `timeout`: PATIENCE_S where the caller has none of its own.
    """
    until = time.monotonic() + timeout
    while True:
        _wait_for_others(shared, what, until)
        with shared.lock:
            with _live_changed:
                others = _unsettled(shared)
            if others and time.monotonic() < until:
                continue  # it began in between
            for other in others:
                if other.discard():
                    _log.warning(
                        "job %s: step %d was staged and is not sealed yet: given up for %s",
                        shared.name,
                        other.step,
                        what,
                    )
            yield
            return


def _wait_for_others(shared: SharedJob, what: str, until: float) -> None:
    told = False
    next_line = time.monotonic() + _FIRST_LINE_S
    while True:
        with _live_changed:
            others = [held.step for held in _unsettled(shared)]
            if others and told:
                _live_changed.wait(_LOOK_EVERY_S)
        if not others or time.monotonic() >= until:
            return
        if not told:
            _log.info("job %s: %s waits for step %d", shared.name, what, others[0])
            told = True
        if time.monotonic() >= next_line:
            next_line = time.monotonic() + _BETWEEN_LINES_S
            _log.warning(
                "job %s: %s still waits for step %d, which dcp.async_save has staged and "
                "not sealed yet: its own thread seals it, or it is given up in %.0f s",
                shared.name,
                what,
                others[0],
                max(0.0, until - time.monotonic()),
            )


def _after_fork() -> None:
    """Threads of the parent may hold its locks for ever. What it staged is not the child's."""
    global _live_changed, _live
    _live_changed = threading.Condition()
    _live = weakref.WeakSet()


os.register_at_fork(after_in_child=_after_fork)
