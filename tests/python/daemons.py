"""Real daemons and processes, for the tests in Python of whatever folder."""

from __future__ import annotations

import contextlib
import os
import pathlib
import select
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator

DEADLINE_S = int(os.environ.get("HOLDFAST_TEST_DEADLINE_S", "240"))
# For several processes that print into one file: where Python was told to keep nothing back, it writes the end of a line for
# itself, and another's line may come between.
WHOLE_LINES = {"PYTHONUNBUFFERED": ""}
BIN = pathlib.Path(os.environ.get("HOLDFAST_TEST_BIN", "build/test/bin"))


class Daemon:
    """A ckptd with directories of its own. `start` after `kill` finds what the last one left."""

    def __init__(
        self,
        root: pathlib.Path,
        memory: pathlib.Path,
        settings: str = "",
        *,
        metrics: str = "off",
        memory_bytes: str = "4GiB",
    ) -> None:
        self.root = root
        self.memory = memory
        self.socket = root / "ckptd.sock"
        self.admin = root / "admin.sock"
        self.config = root / "ckptd.yaml"
        self.config.write_text(f"metrics: {{address: '{metrics}'}}\n" + settings)
        self._memory_bytes = memory_bytes
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Returns when the daemon has said that it is ready."""
        ready_path = self.root / "notify.sock"
        ready_path.unlink(missing_ok=True)
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as ready:
            ready.bind(str(ready_path))
            self.process = self.spawn(NOTIFY_SOCKET=str(ready_path))
            end = os.pidfd_open(self.process.pid)
            readable, _, _ = select.select([ready, end], [], [], DEADLINE_S)
            os.close(end)
        assert ready in readable, f"ckptd did not become ready: {self.log()}"

    def spawn(self, **variables: str) -> subprocess.Popen[bytes]:
        """One that nobody waits for."""
        with open(self.root / "log", "ab") as log:
            return subprocess.Popen(
                [
                    BIN / "ckptd",
                    f"--config={self.config}",
                    f"--memory-dir={self.memory}",
                    f"--state-dir={self.root / 'state'}",
                    f"--socket={self.socket}",
                    f"--admin={self.admin}",
                    f"--memory-bytes={self._memory_bytes}",
                ],
                env={**os.environ, **variables},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    def kill(self) -> None:
        """SIGKILL, as a crash."""
        assert self.process is not None
        self.process.kill()
        self.process.wait(DEADLINE_S)
        self.process = None

    def stop(self) -> None:
        if self.process is not None:
            self.process.terminate()
            try:
                self.process.wait(DEADLINE_S)
            except subprocess.TimeoutExpired:
                self.kill()
            self.process = None

    def log(self) -> str:
        return (self.root / "log").read_text(errors="replace")[-4000:]

    def ctl(self, *arguments: str) -> str:
        """What `ckptctl` prints; fails when it fails."""
        done = subprocess.run(
            [BIN / "ckptctl", *arguments, f"--socket={self.admin}"],
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
        )
        assert done.returncode == 0, f"ckptctl {' '.join(arguments)}: {done.stdout}{done.stderr}"
        return done.stdout


def own_folders(inside: Iterable[str] = ()) -> tuple[pathlib.Path, pathlib.Path]:
    """For a daemon: its root, with these folders in it, and one on a tmpfs. Short, as a socket's path must be."""
    root = pathlib.Path(tempfile.mkdtemp(prefix="hf-"))
    for name in inside:
        (root / name).mkdir()
    return root, pathlib.Path(tempfile.mkdtemp(prefix="hf-", dir="/dev/shm"))


@contextlib.contextmanager
def own_daemon(
    settings: str = "", inside: Iterable[str] = (), memory_bytes: str = "4GiB"
) -> Iterator[Daemon]:
    """One that runs, with folders of its own that go with it; in the settings ROOT is its root."""
    root, memory = own_folders(inside)
    one = Daemon(root, memory, settings.replace("ROOT", str(root)), memory_bytes=memory_bytes)
    try:
        one.start()
        yield one
    finally:
        one.stop()
        shutil.rmtree(root, ignore_errors=True)
        shutil.rmtree(memory, ignore_errors=True)


def run_python(code: str, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Another Python process with this one's packages."""
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
