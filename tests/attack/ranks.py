"""A job's ranks as processes that may be killed or stopped at any time."""

from __future__ import annotations

import os
import pathlib
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence

from daemons import BIN

# The program's own calls end after 25 s, and a restore is at most a few of them.
ANSWER_S = 100


class Hung(AssertionError):
    """Somebody did not answer in time."""


def where_it_waits(pid: int) -> str:
    """Each thread of a process: its name, its state, and what it waits for in the kernel."""
    lines = []
    for task in sorted(pathlib.Path(f"/proc/{pid}/task").glob("*")):
        try:
            name = (task / "comm").read_text().strip()
            state = (task / "stat").read_text().rsplit(")", 1)[1].split()[0]
            lines.append(f"  {task.name} {name} {state} {(task / 'wchan').read_text().strip()}")
        except OSError:
            continue
    return "\n".join(lines)


class Rank:
    """tests/integration/rank_program.cc, which checks each restored bit by itself."""

    program: Sequence[str | pathlib.Path] = (BIN / "holdfast_test_rank",)
    environment: Mapping[str, str] | None = None  # None: ours

    def __init__(
        self,
        socket: pathlib.Path,
        job: str,
        rank: int,
        world: int,
        size: int,
        policy: str,
        user: int | None = None,
    ) -> None:
        self.job = job
        self.rank = rank
        self.process = subprocess.Popen(
            [
                *self.program,
                socket,
                job,
                str(rank),
                str(world),
                str(size),
                "",
                policy,
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=self.environment,
            user=user,
            group=user,
            extra_groups=None if user is None else [],
        )
        self._asked = ""
        self._read = b""

    def tell(self, command: str) -> None:
        self._asked = command
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(command.encode() + b"\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            pass  # its answer will be its end

    def answer(self, within_s: float = ANSWER_S) -> str:
        """ "ok …" or "error CODE …"; "" once the process has ended."""
        assert self.process.stdout is not None
        until = time.monotonic() + within_s
        while b"\n" not in self._read:
            left = until - time.monotonic()
            ready, _, _ = select.select([self.process.stdout], [], [], max(0, left))
            if not ready:
                raise Hung(
                    f"rank {self.rank} of {self.job}: no answer to '{self._asked}' in {within_s:.0f} s\n"
                    + where_it_waits(self.process.pid)
                )
            more = os.read(self.process.stdout.fileno(), 1 << 16)
            if not more:
                return ""
            self._read += more
        line, self._read = self._read.split(b"\n", 1)
        return line.decode(errors="replace")

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def is_alive(self) -> bool:
        return self.process.poll() is None

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def close(self) -> None:
        self.kill()
        assert self.process.stdin is not None and self.process.stdout is not None
        try:
            self.process.stdin.close()
        except BrokenPipeError:
            pass
        self.process.stdout.close()


class LoopingRank(Rank):
    """looping_rank.py: the same in Python, with a loop as users write it."""

    program = (sys.executable, pathlib.Path(__file__).with_name("looping_rank.py"))
    environment: Mapping[str, str] | None = {**os.environ, "PYTHONPATH": str(BIN.parent / "python")}


def ask_all(ranks: Sequence[Rank], command: str) -> list[str]:
    """All at once, as ranks that wait for each other must be asked; their answers in order."""
    for rank in ranks:
        rank.tell(command)
    return [rank.answer() for rank in ranks]
