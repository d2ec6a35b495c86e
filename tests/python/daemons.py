"""Real daemons and processes for the tests of the Python package."""

from __future__ import annotations

import os
import pathlib
import select
import socket
import subprocess
import sys

DEADLINE_S = int(os.environ.get("HOLDFAST_TEST_DEADLINE_S", "240"))
BIN = pathlib.Path(os.environ.get("HOLDFAST_TEST_BIN", "build/test/bin"))


class Daemon:
    """A ckptd with directories of its own. `start` after `kill` finds what the last one left."""

    def __init__(self, root: pathlib.Path, memory: pathlib.Path, settings: str = "") -> None:
        self.root = root
        self.memory = memory
        self.socket = root / "ckptd.sock"
        self.admin = root / "admin.sock"
        self.config = root / "ckptd.yaml"
        self.config.write_text("metrics: {address: 'off'}\n" + settings)
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Returns when the daemon has said that it is ready."""
        ready_path = self.root / "notify.sock"
        ready_path.unlink(missing_ok=True)
        with (
            socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as ready,
            open(self.root / "log", "ab") as log,
        ):
            ready.bind(str(ready_path))
            self.process = subprocess.Popen(
                [
                    BIN / "ckptd",
                    f"--config={self.config}",
                    f"--memory-dir={self.memory}",
                    f"--state-dir={self.root / 'state'}",
                    f"--socket={self.socket}",
                    f"--admin={self.admin}",
                    "--memory-bytes=4GiB",
                ],
                env={**os.environ, "NOTIFY_SOCKET": str(ready_path)},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
            end = os.pidfd_open(self.process.pid)
            readable, _, _ = select.select([ready, end], [], [], DEADLINE_S)
            os.close(end)
        assert ready in readable, f"ckptd did not become ready: {self.log()}"

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


def run_python(code: str, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Another Python process with this one's packages."""
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
