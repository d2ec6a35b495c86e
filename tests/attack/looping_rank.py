"""A training process in Python that does what it is told: one command a line on stdin, one answer a line on stdout.

    looping_rank.py SOCKET JOB RANK WORLD_SIZE BYTES LAUNCH POLICY

It speaks as tests/integration/rank_program.cc does, as far as the campaigns need it, with the settings that users have. One
command is its own: `loop COUNT STEP` saves so many steps as a training loop does, which looks at no answer.
"""

from __future__ import annotations

import sys
import time

import numpy as np

import holdfast

_DEADLINE_S = 25.0


class Trainer:
    """Its state is a function of rank and step, so that whatever comes back can be checked bit for bit."""

    def __init__(self, arguments: list[str]) -> None:
        self._socket, self._job, rank, world, size, _, policy = arguments
        self._rank, self._world = int(rank), int(world)
        self._numbers = np.arange(int(size) // 8, dtype=np.uint64)
        words = dict(word.split("=") for word in policy.split())
        self._policy = holdfast.Policy(
            **{word.replace(".", "_"): int(n) for word, n in words.items()}
        )
        self._checkpointer: holdfast.Checkpointer | None = None
        self._handle: holdfast.Handle | None = None

    def do(self, command: str) -> str:
        verb, *words = command.split()
        if verb != "open" and self._checkpointer is None:
            return "error REFUSED no job is open"
        try:
            return str(getattr(self, "_" + verb)(*words))
        except holdfast.HoldfastError as error:
            return f"error {error.code} {error}".replace("\n", " ")

    def _values(self, step: int) -> np.ndarray:
        first = np.uint64((self._rank << 48) + (step << 32) + 1)
        return (self._numbers + first) * np.uint64(0x9E3779B97F4A7C15)

    def _state(self, step: int) -> dict[str, object]:
        return {"weight": self._values(step), "progress": {"step": step}}

    def _open(self) -> str:
        if self._checkpointer is not None:
            self._checkpointer.close()
            self._checkpointer = None
        self._checkpointer = holdfast.Checkpointer(
            self._job,
            rank=self._rank,
            world_size=self._world,
            socket=self._socket,
            start_daemon=False,
            policy=self._policy,
            open_timeout=_DEADLINE_S,
        )
        return f"ok attempt={self._checkpointer.attempt}"

    def _restore(self) -> str:
        state = {"weight": np.zeros_like(self._numbers), "progress": None}
        start = self._checkpointer.restore(state, timeout=_DEADLINE_S)
        if start == 0:
            return "error NOTHING_TO_RESTORE"
        step = start - 1
        saved = self._state(step)
        if state["progress"] != saved["progress"] or (state["weight"] != saved["weight"]).any():
            return f"error CONTENT step {step} came back with other bytes"
        restored = self._checkpointer.last_restored
        return f"ok attempt={restored.attempt} step={step} source={restored.source}"

    def _save(self, step: str) -> str:
        self._handle = self._checkpointer.save(int(step), self._state(int(step)))
        return self._wait("sealed")

    def _committed(self) -> str:
        return self._wait("committed")

    def _tier(self, tier: str, deadline_ms: str) -> str:
        return self._wait(tier, int(deadline_ms) / 1000)

    def _wait(self, stage: str, timeout: float = _DEADLINE_S) -> str:
        self._handle.wait(stage, timeout)
        return f"ok {stage}"

    def _loop(self, count: str, step: str) -> str:
        longest = 0.0
        for each in range(int(step), int(step) + int(count)):
            state = self._state(each)
            began = time.monotonic()
            self._handle = self._checkpointer.save(each, state)
            longest = max(longest, time.monotonic() - began)
        return f"ok longest_ms={longest * 1000:.0f} failed={self._checkpointer.failed_saves}"


def main() -> None:
    trainer = Trainer(sys.argv[1:])
    for line in sys.stdin:
        print(trainer.do(line.strip()), flush=True)


main()
