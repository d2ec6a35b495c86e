"""Fifty times SIGKILL at random moments, of each rank in turn: examples/train_gpt.py resumes to the exact losses."""

from __future__ import annotations

import os
import pathlib
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable

import pytest
from ranks import free_port
from training import SEED, Torchrun, check_losses, listens, undisturbed, wait_until

from daemons import DEADLINE_S, Daemon

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


def test_the_manuals_two_ranks_survive_an_agent(daemon: Daemon, tmp_path: pathlib.Path) -> None:
    """train_ranks.py with an agent for each rank. In place of rank 1 one of the agents is killed, with its worker: the one that
    is started instead counts restarts from 0, the other one has counted one."""
    page = (pathlib.Path(__file__).resolve().parents[2] / "docs/python.md").read_text()
    (text,) = re.findall(r"```python\n(# train_ranks\.py\n.*?)```", page, re.DOTALL)
    dies = "os.kill(os.getpid(), signal.SIGKILL)"
    assert text.count(dies) == text.count("ckpt.rank == 1") == 1
    text = text.replace("ckpt.rank == 1", 'os.environ["DIES"] == "1"')
    text = text.replace(dies, f"os.kill(os.getppid(), signal.SIGKILL), {dies}")
    program = tmp_path / "train_ranks.py"
    program.write_text(text)
    endpoint = f"127.0.0.1:{free_port()}"
    agents: list[subprocess.Popen[bytes]] = []

    def agent(dies: bool) -> subprocess.Popen[bytes]:
        command = [
            *(sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1"),
            *("--max-restarts=3", "--rdzv-backend=c10d", f"--rdzv-endpoint={endpoint}"),
            *("--rdzv-id=two", "--local-addr=127.0.0.1"),
            *("--rdzv-conf=keep_alive_interval=1,keep_alive_max_attempt=2", str(program)),
        ]
        # torch's agents that share one store do not survive this, whatever the program does.
        variables = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "DIES": str(int(dies))}
        with open(tmp_path / "said", "ab") as out:
            agents.append(
                subprocess.Popen(command, stdout=out, stderr=out, env={**os.environ, **variables})
            )
        return agents[-1]

    def said() -> str:
        return (tmp_path / "said").read_text()

    try:
        first = agent(dies=False)  # the rendezvous lives in this one
        wait_until("the rendezvous", lambda: listens(endpoint), said=said)
        assert agent(dies=True).wait(DEADLINE_S) == -signal.SIGKILL, said()
        third = agent(dies=False)
        for each in (first, third):
            wait_until("the end", lambda each=each: each.poll() is not None, said=said)
        assert first.returncode == third.returncode == 0, said()
    finally:
        for each in agents:
            each.terminate()  # and its worker with it
            each.wait(DEADLINE_S)
    assert re.search(r"started at step [1-9]\d*, step 19 done", said()), said()
