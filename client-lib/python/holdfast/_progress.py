"""How far a restore is: what `restore(progress=…)` is called with; and of one that takes long a bar on a terminal, or lines
in the log."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
import time
from collections.abc import Callable

from holdfast._missing_ranks import MissingRanks
from holdfast._progress_bar import Bar, bar_on_terminal

_log = logging.getLogger("holdfast")
_BETWEEN_LINES_S = 10.0
_BAR_AFTER_S = 1.0


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
    """What the core calls, for one restore.

    with Progress("llama", tell, ranks, bar=rank == 0) as progress:
        core.restore(…, progress=progress)

    `tell`: the program's own function. `bar`: this rank may show one.
    """

    def __init__(
        self,
        job: str,
        tell: Callable[[RestoreProgress], object] | None,
        ranks: MissingRanks,
        *,
        bar: bool,
    ) -> None:
        self._job = job
        self._tell = tell
        self._ranks = ranks
        self._bar_from = time.monotonic() + _BAR_AFTER_S if bar and tell is None else math.inf
        self._bar: Bar | None = None
        self._next_line = time.monotonic() + _BETWEEN_LINES_S

    def __call__(self, loading: bool, step: int, attempt: int, read: int, of: int) -> None:
        known = attempt != 0
        now = RestoreProgress(
            loading, step if known else None, attempt if known else None, read, of
        )
        clock = time.monotonic()
        if loading:
            self._ranks.moved_on()
        else:
            self._ranks.look(clock)
        if not self._shown(now, clock) and clock >= self._next_line:
            self._next_line = clock + _BETWEEN_LINES_S
            _log.info("job '%s': restore: %s", self._job, now)
        if self._tell is not None:
            self._tell(now)

    def _shown(self, now: RestoreProgress, clock: float) -> bool:
        """Whether a bar shows it."""
        title = f"job '{self._job}': restore step {now.step}"
        if self._bar is None and now.loading and now.bytes_of > 0 and clock >= self._bar_from:
            self._bar_from = math.inf
            self._bar = bar_on_terminal(title, now.bytes_of)
        if self._bar is None:
            return False
        try:
            self._bar.show(title, now.bytes, now.bytes_of)
        except Exception:  # the terminal has gone
            self._bar = None
            return False
        return True

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        self._ranks.close()
        if self._bar is not None:
            with contextlib.suppress(Exception):  # the terminal has gone
                self._bar.close()
