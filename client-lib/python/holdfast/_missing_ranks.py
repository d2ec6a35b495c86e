"""Which ranks a restore waits for, by name, in the log. ckptctl knows: it is run beside the restore, and
nothing waits for it. Without ckptctl the log has the library's own lines, which name no rank.

    ranks = MissingRanks("llama", "/run/holdfast/ckptd.sock", rank=0, world_size=512)
    ranks.look(time.monotonic())  # a few times a second while the restore waits for others
    ranks.close()
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import tempfile
from typing import IO

from holdfast._programs import program

_log = logging.getLogger("holdfast")
_FIRST_S = 0.9
_BETWEEN_S = 10.0
# So many ranks of a job ask: the same answer for thousands would keep the job's host busy.
_ASKING_MAX = 8


class MissingRanks:
    """Of one restore. By the thread that restores."""

    def __init__(self, job: str, socket: str, rank: int, world_size: int) -> None:
        self._job = job
        self._admin = os.path.join(os.path.dirname(socket), "admin.sock")
        self._asks = rank % -(-world_size // _ASKING_MAX) == 0 and world_size > 1
        self._began: float | None = None
        self._next = 0.0
        self._asked: tuple[subprocess.Popen[bytes], IO[bytes]] | None = None

    def look(self, now: float) -> None:
        """While the restore waits. `now`: of time.monotonic()."""
        if not self._asks:
            return
        if self._began is None:
            self._began, self._next = now, now + _FIRST_S
        if self._asked is not None:
            self._hear(now - self._began)
        elif now >= self._next:
            self._next = now + _BETWEEN_S
            self._ask()

    def moved_on(self) -> None:
        """It waits no more."""
        self.close()
        self._began = None

    def close(self) -> None:
        if self._asked is not None:
            process, answer = self._asked
            self._asked = None
            process.kill()
            process.wait()
            answer.close()

    def _ask(self) -> None:
        ckptctl = program("ckptctl")
        if ckptctl is None:
            self._asks = False
            return
        try:
            answer = tempfile.TemporaryFile()
        except OSError:  # a full disk
            self._asks = False
            return
        try:
            process = subprocess.Popen(
                [ckptctl, "status", self._job, "--json", f"--socket={self._admin}"],
                stdin=subprocess.DEVNULL,
                stdout=answer,
                stderr=subprocess.DEVNULL,
            )
        except OSError:
            answer.close()
            self._asks = False
            return
        self._asked = process, answer

    def _hear(self, waited: float) -> None:
        assert self._asked is not None
        process, answer = self._asked
        if process.poll() is None:
            return
        self._asked = None
        with answer:
            answer.seek(0)
            text = _restore_in(answer.read())
        if "waits for rank" in text:
            _log.warning(
                "job '%s': a restore has waited for %.1f s: %s. All ranks must call restore: start "
                "the missing ones, or end this process. See `ckptctl status %s`",
                self._job,
                waited,
                text,
                self._job,
            )


def _restore_in(answer: bytes) -> str:
    """What `ckptctl status JOB --json` says of the job's restore: "1 of 2 ranks have asked; waits for rank 1"."""
    try:
        return str(json.loads(answer)["jobs"][0]["restore"]["text"])
    except (ValueError, LookupError, TypeError):  # no such job, no restore, or ckptctl failed
        return ""
