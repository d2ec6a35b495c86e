"""A node under attack: two drives, a remote directory, and a job of two ranks, all of them real processes."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import pathlib
import select
import shutil
import subprocess
import time
from collections.abc import Iterable, Iterator

from daemons import BIN, DEADLINE_S, Daemon, own_folders

JOB = "job"
RANKS = 2
_BYTES = 200_000  # of one rank's state: several digest blocks

_SETTINGS = {
    "nvme": "nvme: {dirs: [ROOT/d0, ROOT/d1], bytes_max: 1GiB}\n",
    "remote": "remote: {dir: ROOT/remote}\n",
    "": (
        "policy: {nvme: {every_steps: 1, keep_last: 9}, "
        "remote: {every_steps: 1, every_ms: 0, keep_last: 9}}\n"
        "restore: {wait_for_copies_ms: 0}\n"
    ),
}


class Rank:
    """A training process that does what it is told (tests/integration/rank_program.cc)."""

    def __init__(self, node: Node, rank: int) -> None:
        self._process = subprocess.Popen(
            [
                BIN / "holdfast_test_rank",
                node.daemon.socket,
                JOB,
                str(rank),
                str(RANKS),
                str(_BYTES),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
        )

    def tell(self, command: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(command + "\n")
        self._process.stdin.flush()

    def answer(self) -> str:
        assert self._process.stdout is not None
        ready, _, _ = select.select([self._process.stdout], [], [], DEADLINE_S)
        assert ready, "a rank does not answer"
        return self._process.stdout.readline().rstrip("\n")

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()


class Node:
    """`crash` takes memory and processes, as a loss of power does; what lies in the durable places stays."""

    def __init__(self, tiers: tuple[str, ...]) -> None:
        self.tiers = tiers
        self.root, self.memory = own_folders(["d0", "d1", "remote"])
        settings = "".join(_SETTINGS[name] for name in (*tiers, ""))
        self.daemon = Daemon(self.root, self.memory, settings.replace("ROOT", str(self.root)))
        self.ranks: list[Rank] = []

    def start(self) -> None:
        self.daemon.start()

    def launch(self) -> list[str]:
        self.ranks = [Rank(self, rank) for rank in range(RANKS)]
        return self.all("open")

    def all(self, command: str) -> list[str]:
        for rank in self.ranks:
            rank.tell(command)
        return [rank.answer() for rank in self.ranks]

    def save_everywhere(self, step: int) -> None:
        assert self.all(f"save {step}") == ["ok sealed"] * RANKS
        for tier in self.tiers:
            assert self.all(f"tier {tier}") == [f"ok {tier}"] * RANKS

    def restore_when_ready(self) -> list[str]:
        """What a launcher does that starts the ranks again while what is needed is still being read."""
        until = time.monotonic() + DEADLINE_S
        while True:
            answers = self.all("restore")
            if not any("is still being read" in answer for answer in answers):
                return answers
            assert time.monotonic() < until, answers

    def collect_garbage(self) -> None:
        """Returns when nothing is left that retention would remove."""
        self.daemon.ctl("gc")
        until = time.monotonic() + DEADLINE_S
        while "is being removed" in self.daemon.ctl("gc", "--dry-run"):
            assert time.monotonic() < until, self.daemon.ctl("gc", "--dry-run")

    def crash(self) -> None:
        for rank in self.ranks:
            rank.kill()
        self.ranks = []
        if self.daemon.process is not None:
            self.daemon.kill()
        for entry in self.memory.iterdir():
            shutil.rmtree(entry) if entry.is_dir() else entry.unlink()

    def lose_state(self) -> None:
        shutil.rmtree(self.root / "state", ignore_errors=True)

    def places(self) -> list[pathlib.Path]:
        return [self.root / name for name in ("d0", "d1", "remote")]

    def files(self) -> dict[pathlib.Path, str]:
        """What was saved: every file of the job, by path, with a digest of its bytes."""
        found: dict[pathlib.Path, str] = {}
        for place in self.places():
            for folder, _, names in os.walk(place / JOB):
                for name in names:
                    path = pathlib.Path(folder) / name
                    # (manifest.json is made again with MANIFEST, for people to read.)
                    if not name.endswith(".tmp") and name != "manifest.json":
                        found[path] = hashlib.sha256(path.read_bytes()).hexdigest()
        return found

    def whole_steps(self) -> dict[str, set[int]]:
        """By tier, the steps that ckptd can restore from it alone."""
        reply = json.loads(self.daemon.ctl("explain", JOB, "--json"))
        whole: dict[str, set[int]] = {tier: set() for tier in self.tiers}
        for step in reply["steps"]:
            for tier in whole:
                if any(reason.startswith(f"{tier}: all of") for reason in step["reasons"]):
                    whole[tier].add(int(step["step"]))
        return whole

    def wait_for_whole(self, steps: set[int], tiers: Iterable[str]) -> None:
        """A tier may still be read after another one has given a restore what it needs."""
        until = time.monotonic() + DEADLINE_S
        while not all(steps <= (whole := self.whole_steps())[tier] for tier in tiers):
            assert time.monotonic() < until, whole

    def close(self) -> None:
        self.crash()
        shutil.rmtree(self.root, ignore_errors=True)
        shutil.rmtree(self.memory, ignore_errors=True)


@contextlib.contextmanager
def saved_node(tiers: tuple[str, ...] = ("nvme", "remote")) -> Iterator[Node]:
    """One that lost power after it had saved steps 1 and 2 everywhere."""
    node = Node(tiers)
    try:
        node.start()
        assert all("ok attempt=1" in answer for answer in node.launch())
        assert all("NOTHING_TO_RESTORE" in answer for answer in node.all("restore"))
        node.save_everywhere(1)
        node.save_everywhere(2)
        node.crash()
        yield node
    finally:
        node.close()
