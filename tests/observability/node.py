"""A real ckptd, and the ranks of a job on it."""

from __future__ import annotations

import os
import pathlib
import re
import select
import shutil
import socket
import subprocess
import tempfile
import urllib.request

from prometheus import DEADLINE_S

BIN = pathlib.Path(os.environ.get("HOLDFAST_TEST_BIN", "build/test/bin"))
STATE_BYTES = 1_000_000


class Rank:
    """tests/integration/rank_program.cc: does what it is told, a line at a time."""

    def __init__(self, node: Node, job: str, rank: int, world_size: int, launch: str) -> None:
        words = [str(node.socket), job, str(rank), str(world_size), str(STATE_BYTES), launch]
        self.process = subprocess.Popen(
            [BIN / "holdfast_test_rank", *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
        )

    def send(self, command: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(command + "\n")

    def answer(self) -> str:
        assert self.process.stdout is not None
        readable, _, _ = select.select([self.process.stdout], [], [], DEADLINE_S)
        assert readable, "the rank does not answer"
        return self.process.stdout.readline().strip()

    def stop(self) -> None:
        self.process.kill()
        self.process.wait(DEADLINE_S)


# With all tiers, and a member of a cluster of one, so that it has all metrics that there are. ROOT: its own folder.
WHOLE = """\
node_name: node-a
nvme: {dirs: [ROOT/nvme]}
remote: {dir: ROOT/remote}
policy: {remote: {every_steps: 1}}
cluster: {listen_address: "127.0.0.1:0", advertise_address: "127.0.0.1:0"}
"""


class Node:
    def __init__(self, settings: str = WHOLE) -> None:
        self.root = pathlib.Path(tempfile.mkdtemp(prefix="hf-obs-"))
        self.memory = pathlib.Path(tempfile.mkdtemp(prefix="hf-obs-", dir="/dev/shm"))
        self.remote = self.root / "remote"
        self.socket = self.root / "ckptd.sock"
        self.ranks: list[Rank] = []
        self.metrics_address = ""
        self.process: subprocess.Popen[bytes] | None = None
        self.remote.mkdir()
        (self.root / "ckptd.yaml").write_text(
            'metrics: {address: "127.0.0.1:0"}\n' + settings.replace("ROOT", str(self.root))
        )

    def start(self) -> None:
        ready_path = self.root / "notify.sock"
        with (
            socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as ready,
            open(self.root / "log", "ab") as log,
        ):
            ready.bind(str(ready_path))
            self.process = subprocess.Popen(
                [
                    BIN / "ckptd",
                    f"--config={self.root / 'ckptd.yaml'}",
                    f"--memory-dir={self.memory}",
                    f"--state-dir={self.root / 'state'}",
                    f"--socket={self.socket}",
                    f"--admin={self.root / 'admin.sock'}",
                    "--memory-bytes=256MiB",
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
        port = re.search(r"metrics_port=(\d+)", (self.root / "log").read_text())
        assert port is not None
        self.metrics_address = f"127.0.0.1:{port[1]}"

    def log(self) -> str:
        return (self.root / "log").read_text(errors="replace")[-4000:]

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait(DEADLINE_S)
            self.process = None

    def close(self) -> None:
        self.end_ranks()
        self.kill()
        shutil.rmtree(self.root, ignore_errors=True)
        shutil.rmtree(self.memory, ignore_errors=True)

    def start_job(self, job: str, world_size: int, attempt: int) -> None:
        self.ranks = [
            Rank(self, job, rank, world_size, f"launch-{attempt}") for rank in range(world_size)
        ]
        assert self.ask("open") == [f"ok attempt={attempt}"] * world_size

    def end_ranks(self) -> None:
        for rank in self.ranks:
            rank.stop()
        self.ranks = []

    def ask(self, command: str) -> list[str]:
        """All ranks at once: what they answer."""
        for rank in self.ranks:
            rank.send(command)
        return [rank.answer() for rank in self.ranks]

    def save(self, step: int) -> None:
        for command, answer in ((f"save {step}", "ok sealed"), ("committed", "ok committed")):
            assert self.ask(command) == [answer] * len(self.ranks)

    def ctl(self, *words: str) -> str:
        done = subprocess.run(
            [BIN / "ckptctl", *words, f"--socket={self.root / 'admin.sock'}"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
        )
        assert done.returncode == 0, f"ckptctl {' '.join(words)}: {done.stdout}{done.stderr}"
        return done.stdout

    def metrics(self) -> str:
        with urllib.request.urlopen(
            f"http://{self.metrics_address}/metrics", timeout=DEADLINE_S
        ) as reply:
            return reply.read().decode()
