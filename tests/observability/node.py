"""A real ckptd, and the ranks of a job on it."""

from __future__ import annotations

import re
import select
import shutil
import subprocess
import sys
import urllib.request

from files import TREE
from prometheus import DEADLINE_S

sys.path.append(str(TREE / "tests/python"))
from daemons import BIN, Daemon, own_folders  # noqa: E402

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


class Node(Daemon):
    """A daemon that can be asked for its metrics, and the ranks on it."""

    def __init__(self, settings: str = WHOLE) -> None:
        root, memory = own_folders(["remote"])
        super().__init__(
            root,
            memory,
            settings.replace("ROOT", str(root)),
            metrics="127.0.0.1:0",
            memory_bytes="256MiB",
        )
        self.remote = root / "remote"
        self.ranks: list[Rank] = []
        self.metrics_address = ""

    def start(self) -> None:
        super().start()
        port = re.search(r"metrics_port=(\d+)", (self.root / "log").read_text())
        assert port is not None
        self.metrics_address = f"127.0.0.1:{port[1]}"

    def close(self) -> None:
        self.end_ranks()
        self.stop()
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

    def metrics(self) -> str:
        with urllib.request.urlopen(
            f"http://{self.metrics_address}/metrics", timeout=DEADLINE_S
        ) as reply:
            return reply.read().decode()
