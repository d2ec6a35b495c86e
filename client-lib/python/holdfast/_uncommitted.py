"""Sealed steps that do not commit: this rank saves, and other ranks of the job do not.

Each of its saves succeeds here, and none of them can ever be restored.
"""

from __future__ import annotations

import logging

from holdfast._errors import AbandonedError, DeadlineExceededError, HoldfastError, StepLostError
from holdfast._handle import Handle
from holdfast._skipped import Line


class UncommittedSteps:
    """Of one Checkpointer.

        uncommitted = UncommittedSteps(3)
        line, error = uncommitted.sealed(handle)  # of each save that was sealed, in order

    A line is for the log. An error: a save before this one counts as failed. In a run whose ranks
    all save, the daemon is asked once in `most` saves.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._sealed: list[Handle] = []  # the newest that may be uncommitted
        self._why = ""  # the newest of them is uncommitted
        self._warned = False
        self._failed = False

    def sealed(self, handle: Handle) -> tuple[Line | None, AbandonedError | None]:
        self._sealed.append(handle)
        if len(self._sealed) <= self._most:
            return None, None
        # Of the newest the other ranks may be about to seal their part. So the one before it is
        # asked for first.
        *older, before, newest = self._sealed
        known = [before, newest] if self._warned else [before, newest, *reversed(older)]
        for each in known:
            committed = self._is_committed(each)
            if committed is None:
                del self._sealed[0]
                return None, None
            if committed:
                return self._committed(each), None
        del self._sealed[0]
        if not self._warned:
            self._warned = True
            steps = ", ".join(str(each.step) for each in [*older, before])
            return self._warning(steps), None
        error = AbandonedError(
            f"step {before.step} was sealed by this rank and is not committed: {self._why}"
        )
        line = None if self._failed else (logging.ERROR, f"{error}. {_WAY_OUT}")
        self._failed = True
        return line, error

    def _is_committed(self, handle: Handle) -> bool | None:
        """None: nobody can say now."""
        try:
            handle.wait("committed", 0.0)
        except (DeadlineExceededError, StepLostError) as error:
            if isinstance(error, DeadlineExceededError) and error.reason != "NOT_YET":
                return None  # a daemon that is slow says nothing of the other ranks
            if handle is self._sealed[-1]:
                self._why = str(error)
            return False
        except HoldfastError:
            return None
        return True

    def _committed(self, handle: Handle) -> Line | None:
        """What was sealed before it is committed as well, or was lost on its own."""
        self._sealed = self._sealed[self._sealed.index(handle) + 1 :]
        warned, self._warned, self._failed = self._warned, False, False
        if not warned:
            return None
        return logging.WARNING, f"steps are committed again, with step {handle.step}"

    def _warning(self, steps: str) -> Line:
        return (
            logging.WARNING,
            f"steps {steps} were sealed by this rank and are not committed: {self._why}. "
            f"From now on such saves count as failed. {_WAY_OUT}",
        )


_WAY_OUT = (
    "A step is committed when every rank of the job has saved it: call save on all ranks, or make "
    "this rank a job of its own (rank=0, world_size=1)"
)
