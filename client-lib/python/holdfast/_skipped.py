"""What is logged of saves that fail: each cause once in full, however many saves it fails. While
ckptd does not answer or has no room, a line every 10 s counts the saves that were skipped.
"""

from __future__ import annotations

import logging
import re
import time

from holdfast._errors import HoldfastError, NoRoomError, UnavailableError

_BETWEEN_LINES_S = 10.0
_CAUSES_MAX = 1000  # that are remembered

Line = tuple[int, str]  # its level, and the text


class SkippedSaves:
    """Of one Checkpointer.

        skipped = SkippedSaves()
        line = skipped.line(step, error, now)  # of each save, in order; error None: it was saved
        line = skipped.rest()  # at the end

    `now`: seconds since 1970.
    """

    def __init__(self) -> None:
        self._count = 0  # in a row
        self._since = 0.0
        self._step = 0  # the newest of them
        self._error: HoldfastError | None = None
        self._untold = 0  # of the count
        self._next_line = 0.0
        self._causes: set[tuple[type, str]] = set()

    def line(self, step: int, error: HoldfastError | None, now: float) -> Line | None:
        if error is None:
            return self._saved(step)
        full = logging.ERROR, f"step {step} was not saved: {error}"
        if not isinstance(error, (UnavailableError, NoRoomError)):
            return full if self._is_new(error) else None
        another = type(error) is not type(self._error)
        if self._count == 0:
            self._since = now
        self._count += 1
        self._untold += 1
        self._step, self._error = step, error
        if another:
            self._next_line = now + _BETWEEN_LINES_S
            self._untold -= 1  # (those before are told at the next line, or at the end)
            return full
        if now >= self._next_line:
            self._next_line = now + _BETWEEN_LINES_S
            return self.rest()
        return None

    def _is_new(self, error: HoldfastError) -> bool:
        """Whether this cause was not told yet. Two errors that differ in numbers alone (the step) have one cause."""
        cause = type(error), re.sub(r"\d+", "#", str(error))
        if cause in self._causes:
            return False
        if len(self._causes) >= _CAUSES_MAX:
            self._causes.clear()
        self._causes.add(cause)
        return True

    def rest(self) -> Line | None:
        """How many were skipped so far, if some are in no line yet."""
        if self._untold == 0:
            return None
        self._untold = 0
        return (
            logging.ERROR,
            f"{self._count} saves were skipped since {_clock(self._since)}, step {self._step} is "
            f"the newest: {self._error}",
        )

    def _saved(self, step: int) -> Line | None:
        if self._count == 0:
            return None
        text = (
            f"saves work again with step {step}; {self._count} skipped since {_clock(self._since)}"
        )
        self._count = self._untold = 0
        self._error = None
        return logging.WARNING, text


def _clock(now: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(now))
