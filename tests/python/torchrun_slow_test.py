"""Fifty times SIGKILL at random moments, of each rank in turn: examples/train_gpt.py resumes to the exact losses."""

from __future__ import annotations

import os
import pathlib
import random
import signal
import time
from collections.abc import Callable

import pytest
from training import SEED, Torchrun, check_losses, undisturbed

from daemons import Daemon

ROUNDS = int(os.environ.get("HOLDFAST_TEST_ROUNDS", "50"))


@pytest.mark.parametrize(
    "ranks, arguments", [(1, ()), (2, ()), (2, ("--fsdp",))], ids=["single", "ddp", "fsdp2"]
)
def test_fifty_kills(
    daemon: Daemon,
    start: Callable[..., Torchrun],
    tmp_path: pathlib.Path,
    ranks: int,
    arguments: tuple[str, ...],
) -> None:
    dice = random.Random(SEED)
    print(f"seed {SEED}")
    run = start("fifty", steps=1_000_000, ranks=ranks, restarts=ROUNDS + 1, arguments=arguments)
    run.await_steps_more(5)
    for number in range(ROUNDS):
        rank = number % ranks
        if dice.random() < 0.2:  # while it starts, joins or restores
            pid = run.await_true(
                "the next start", lambda n=number, r=rank: run.workers(after_restart=n - 1).get(r)
            )
        else:
            run.await_steps_more(1)
            pid = run.await_true(
                "its process", lambda n=number, r=rank: run.workers(after_restart=n - 1).get(r)
            )
        time.sleep(dice.uniform(0, 1.0))
        os.kill(pid, signal.SIGKILL)
        print(f"round {number}: rank {rank} killed after step {run.newest()}", flush=True)
        run.await_true("its restart", lambda n=number: len(run.workers(after_restart=n)) == ranks)
    run.await_steps_more(5)
    run.kill()
    reference = undisturbed(
        run.newest() + 2, tmp_path / "reference", ranks=ranks, group=True, arguments=arguments
    )
    check_losses(run, reference, starts=ROUNDS // 2)  # one in five is killed before it resumes
