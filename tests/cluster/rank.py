"""Training ranks on nodes.

`Rank` is tests/integration/rank_program.cc, which does what it is told and checks each restored bit by itself; it starts in
milliseconds, so tests of the daemons use it. `start_training` is for programs of the Python package, whose torch takes seconds.

    ranks = start_ranks([a, b], "job", per_node=2)      # ranks 0 and 1 on a, 2 and 3 on b
    assert ask_all(ranks, "open") == ["ok attempt=1"] * 4
    ranks[0].ask("save 7")
    ranks[0].kill()
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping, Sequence

from .daemon import SOCKET
from .node import PROGRAMS, Node
from .process import DEADLINE_S, Process

STATE_BYTES = 100_000
USER = 1000  # who owns the jobs: the same uid on all nodes


class Rank:
    """A rank that waits for commands: open, restore, save STEP, committed, tier remote, exit …"""

    def __init__(
        self,
        node: Node,
        job: str,
        *,
        rank: int = 0,
        world_size: int = 1,
        state_bytes: int = STATE_BYTES,
        launch: str = "",
        policy: str = "",
        uid: int = USER,
        env: Mapping[str, str] | None = None,
    ) -> None:
        self.node = node
        self.rank = rank
        words = [SOCKET, job, str(rank), str(world_size), str(state_bytes), launch, policy]
        self.process = node.start(
            [node.programs / "holdfast_test_rank", *words],
            uid=uid,
            env=env,
            stdin=True,
            stdout=True,
        )

    def send(self, command: str) -> None:
        """Without waiting for its answer."""
        assert self.process.stdin is not None
        self.process.stdin.write(command + "\n")

    def answer(self, deadline_s: float = DEADLINE_S) -> str:
        """The answer to the oldest command that has none yet: "ok …" or "error CODE …"; "" when the rank has ended."""
        return self.process.read_line(deadline_s)

    def ask(self, command: str, deadline_s: float = DEADLINE_S) -> str:
        self.send(command)
        return self.answer(deadline_s)

    def kill(self) -> None:
        self.process.kill()


def start_ranks(
    nodes: Iterable[Node],
    job: str,
    *,
    per_node: int = 1,
    state_bytes: int = STATE_BYTES,
    launch: str = "",
    policy: str = "",
    uid: int = USER,
    armed: Mapping[int, str] | None = None,
) -> list[Rank]:
    """Ranks 0, 1, …, `per_node` on each node, in order. `armed`: sync points of some of them."""
    places = [node for node in nodes for _ in range(per_node)]
    return [
        Rank(
            node,
            job,
            rank=rank,
            world_size=len(places),
            state_bytes=state_bytes,
            launch=launch,
            policy=policy,
            uid=uid,
            env={"HOLDFAST_SYNC_POINT": (armed or {}).get(rank, "")},
        )
        for rank, node in enumerate(places)
    ]


def ask_all(ranks: Sequence[Rank], command: str, deadline_s: float = DEADLINE_S) -> list[str]:
    """All at once, as ranks that wait for each other must be asked; their answers in order."""
    for rank in ranks:
        rank.send(command)
    return [rank.answer(deadline_s) for rank in ranks]


def start_training(
    node: Node,
    program: Sequence[str | os.PathLike[str]],
    *,
    rank: int = 0,
    world_size: int = 1,
    uid: int = USER,
    env: Mapping[str, str] | None = None,
) -> Process:
    """A Python program with the package `holdfast` and what torchrun tells a rank; its log has what it prints."""
    build = PROGRAMS.parent
    variables = {
        "PYTHONPATH": str(build / "python"),
        "HOLDFAST_SOCKET": SOCKET,
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_RANK": "0",
    }
    return node.start([sys.executable, *program], uid=uid, env={**variables, **(env or {})})
