"""How far a restore is: what `restore(progress=…)` is called with, and lines in the log of one that takes long."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable

_log = logging.getLogger("holdfast")
_BETWEEN_LINES_S = 10.0


@dataclasses.dataclass(frozen=True)
class RestoreProgress:
    """How far a restore is, on this rank.

    def show(now: holdfast.RestoreProgress) -> None:
        print(f"step {now.step}: {now.bytes / 1e9:.1f} of {now.bytes_of / 1e9:.1f} GB")

    ckpt.restore(state, progress=show)

    `loading`: else it waits, for the other ranks to come, or to have loaded.
    `step`, `attempt`: of what is loaded, or was last; None: none has been chosen yet.
    `bytes`: read and verified of it; `bytes_of`: to be read, as far as is known.
    """

    loading: bool
    step: int | None
    attempt: int | None
    bytes: int
    bytes_of: int

    def __str__(self) -> str:
        if self.step is None:
            return "waits for the other ranks to restore, or for the daemon"
        what = f"step {self.step} of attempt {self.attempt}"
        if not self.loading:
            return f"has loaded what it can of {what}, waits for the other ranks"
        return f"loads {what}: {self.bytes / 1e9:.1f} of {self.bytes_of / 1e9:.1f} GB"


class Progress:
    """What the core calls, for one restore."""

    def __init__(self, job: str, tell: Callable[[RestoreProgress], object] | None) -> None:
        self._job = job
        self._tell = tell
        self._next_line = time.monotonic() + _BETWEEN_LINES_S

    def __call__(self, loading: bool, step: int, attempt: int, read: int, of: int) -> None:
        known = attempt != 0
        now = RestoreProgress(
            loading, step if known else None, attempt if known else None, read, of
        )
        if time.monotonic() >= self._next_line:
            self._next_line = time.monotonic() + _BETWEEN_LINES_S
            _log.info("job '%s': restore: %s", self._job, now)
        if self._tell is not None:
            self._tell(now)
