"""What the tests want of a distributed file system, whichever it is."""

from __future__ import annotations

import pathlib
import subprocess
import time
from collections.abc import Callable, Sequence
from typing import Protocol

DEADLINE_S = 240


class Mounted(Protocol):
    """A file system of several servers, mounted on this machine."""

    path: pathlib.Path

    def lose_a_server(self) -> None:
        """One of those that hold data dies; the others have all that it had."""

    def bring_it_back(self) -> None:
        """It comes back, and has what was written meanwhile when this returns."""

    def mount_anew(self) -> None:
        """As after a reboot: nothing is in a cache of this machine. Nobody has a file open there."""

    def cut_off(self) -> None:
        """The mount reaches none of them."""

    def reconnect(self) -> None: ...

    def limit(self, bytes_more: int) -> None:
        """No more than that can be written from now on."""

    def lift_limit(self) -> None: ...

    def close(self) -> None: ...


def run(command: Sequence[object], *, deadline_s: float = 60, check: bool = True) -> str:
    """What it printed."""
    done = subprocess.run(
        [str(word) for word in command],
        stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=deadline_s,
    )  # fmt: skip
    assert not check or done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
    return done.stdout


def wait_until(what: str, holds: Callable[[], bool], deadline_s: float = DEADLINE_S) -> None:
    end = time.monotonic() + deadline_s
    while not holds():
        assert time.monotonic() < end, f"not within {deadline_s} s: {what}"
        time.sleep(0.1)
