"""A process in a node, held from outside of it.

sleeper = node.start(["sleep", "1000"])
sleeper.stop()      # SIGSTOP: alive, and does nothing
sleeper.kill()
"""

from __future__ import annotations

import os
import pathlib
import select
import signal
import time
from typing import TextIO

DEADLINE_S = int(os.environ.get("HOLDFAST_TEST_DEADLINE_S", "120"))
KILLED_WITH_ITS_NODE = -signal.SIGKILL


def wait_readable(fd: int, deadline_s: float, what: str) -> None:
    """Until `fd` has something to read, or its end; raises TimeoutError with `what` that did not come."""
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    if not poll.poll(max(0.0, deadline_s) * 1000):
        raise TimeoutError(f"{what}: not within {deadline_s:.0f} s")


class Process:
    """Started by `Node.start`. `pid` is its number inside of the node."""

    def __init__(
        self,
        name: str,
        pid: int,
        pidfd: int,
        exit_pipe: int,
        log_path: pathlib.Path,
        stdin: TextIO | None,
        output: int,
    ) -> None:
        self.name = name
        self.pid = pid
        self.log_path = log_path
        self.stdin = stdin
        self.exit_code: int | None = None
        self._output = output  # a pipe, or -1
        self._said = b""
        self._pidfd = pidfd
        self.exit_pipe = exit_pipe

    def wait(self, deadline_s: float = DEADLINE_S) -> int:
        """Its exit code once it has ended, minus the signal if one ended it."""
        if self.exit_code is None:
            wait_readable(self.exit_pipe, deadline_s, f"the end of {self.name}")
            said = os.read(self.exit_pipe, 16)
            self.exit_code = int(said) if said else KILLED_WITH_ITS_NODE
        return self.exit_code

    def read_line(self, deadline_s: float = DEADLINE_S) -> str:
        """The next line that it printed, without its end; "" when it will print no more. For one started with `stdout=True`."""
        end = time.monotonic() + deadline_s
        while b"\n" not in self._said and self._read_more(end):
            pass
        line, _, self._said = self._said.partition(b"\n")
        return line.decode()

    def read_all(self, deadline_s: float = DEADLINE_S) -> str:
        """All that it prints until it closes its standard output."""
        end = time.monotonic() + deadline_s
        while self._read_more(end):
            pass
        said, self._said = self._said, b""
        return said.decode()

    def has_said_more(self) -> bool:
        """Whether something that nobody has read yet is there now."""
        poll = select.poll()
        poll.register(self._output, select.POLLIN)
        return bool(self._said or poll.poll(0))

    def _read_more(self, end: float) -> bool:
        wait_readable(self._output, end - time.monotonic(), f"{self.name}'s output")
        more = os.read(self._output, 65536)
        self._said += more
        return bool(more)

    def is_running(self) -> bool:
        if self.exit_code is not None:
            return False
        poll = select.poll()
        poll.register(self.exit_pipe, select.POLLIN)
        return not poll.poll(0)

    def send_signal(self, number: int) -> None:
        """Nothing happens when it has ended."""
        if self._pidfd < 0:
            return
        try:
            signal.pidfd_send_signal(self._pidfd, number)
        except ProcessLookupError:
            pass

    def kill(self) -> int:
        """SIGKILL; returns when it is gone."""
        self.send_signal(signal.SIGKILL)
        return self.wait()

    def terminate(self, deadline_s: float = DEADLINE_S) -> int:
        """SIGTERM, and what it exits with."""
        self.send_signal(signal.SIGTERM)
        return self.wait(deadline_s)

    def stop(self, deadline_s: float = DEADLINE_S) -> None:
        """SIGSTOP; returns when all its threads stand still."""
        self.send_signal(signal.SIGSTOP)
        self.wait_stopped(deadline_s)

    def wait_stopped(self, deadline_s: float = DEADLINE_S) -> None:
        """Until all its threads stand still, or it has ended."""
        end = time.monotonic() + deadline_s
        while not all(state in "TZX" for state in self._thread_states()):
            if time.monotonic() > end:
                raise TimeoutError(f"{self.name} does not stop: {self._thread_states()}")
            os.sched_yield()

    def resume(self) -> None:
        self.send_signal(signal.SIGCONT)

    def log(self) -> str:
        """The last of what it wrote to standard output (if that is not a pipe) and standard error."""
        return self.log_path.read_text(errors="replace")[-8000:]

    def outer_pid(self) -> int:
        """Its number in the machine's own pid namespace, for a debugger; -1 when it has ended."""
        with open(f"/proc/self/fdinfo/{self._pidfd}") as file:
            return next(int(line.split()[1]) for line in file if line.startswith("Pid:"))

    def close(self) -> None:
        """Lets go of it once it has ended; for `Node`."""
        self.wait()
        if self.stdin is not None:
            try:
                self.stdin.close()
            except BrokenPipeError:
                pass
        for fd in (self._output, self._pidfd, self.exit_pipe):
            if fd >= 0:
                os.close(fd)
        self._output = self._pidfd = self.exit_pipe = -1

    def _thread_states(self) -> list[str]:
        states = []
        pid = self.outer_pid()
        for thread in pathlib.Path(f"/proc/{pid}/task").iterdir() if pid > 0 else ():
            try:
                states.append((thread / "stat").read_text().rpartition(")")[2].split()[0])
            except (FileNotFoundError, ProcessLookupError):
                continue
        return states
