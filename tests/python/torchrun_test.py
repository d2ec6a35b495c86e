"""examples/train_gpt.py under torchrun: whatever is killed, its losses are bit for bit those of a run that nobody disturbed."""

from __future__ import annotations

import json
import os
import pathlib
import random
import signal
import time
from collections.abc import Callable

from ranks import free_port
from training import SEED, Torchrun, check_losses, listens, undisturbed, wait_until

from daemons import Daemon


def test_killed_workers_resume_to_the_exact_losses(
    daemon: Daemon, start: Callable[..., Torchrun], tmp_path: pathlib.Path
) -> None:
    dice = random.Random(SEED)
    print(f"seed {SEED}")
    steps, rounds = 240, 2
    run = start("killed", steps=steps, ranks=2)
    for number in range(rounds):
        run.await_step((number + 1) * 40)
        time.sleep(dice.uniform(0, 0.05))  # where in the step it dies is chance
        os.kill(run.workers()[dice.randrange(2)], signal.SIGKILL)
        run.await_true("the next start", lambda number=number: len(run.resumed()) >= number + 2)
    assert run.wait() == 0, run.said()
    check_losses(run, undisturbed(steps, tmp_path / "reference", ranks=2), starts=rounds + 1)
    assert run.losses()[-1][0] == steps - 1


def test_a_daemon_that_dies_costs_reported_saves_and_nothing_else(
    daemon: Daemon, start: Callable[..., Torchrun], tmp_path: pathlib.Path
) -> None:
    steps = 600
    run = start("daemon", steps=steps - 50, launcher=None)
    run.await_step(30)
    # It stands still meanwhile, so that most steps are left for the daemon that comes next.
    run.process.send_signal(signal.SIGSTOP)
    daemon.kill()
    run.process.send_signal(signal.SIGCONT)
    run.await_true("a save that failed is reported", lambda: "was not saved" in run.said())
    run.process.send_signal(signal.SIGSTOP)
    since = run.newest()
    daemon.start()
    run.process.send_signal(signal.SIGCONT)

    def committed() -> int:
        checkpoints = json.loads(daemon.ctl("list", "daemon", "--json"))["checkpoints"]
        return max(int(each["step"]) for each in checkpoints if each["state"] == "committed")

    assert run.wait() == 0, run.said()
    assert committed() == steps - 51 > since
    again = start("daemon", steps=steps, launcher=None)
    assert again.wait() == 0, again.said()
    check_losses(again, undisturbed(steps, tmp_path / "reference"), starts=2)
    assert again.resumed() == [-1, steps - 51]


def test_one_of_two_agents_dies_and_is_started_again(
    daemon: Daemon, start: Callable[..., Torchrun], tmp_path: pathlib.Path
) -> None:
    # Agents that share one store over all restarts (torch's default) do not survive this, whatever saves checkpoints.
    shared = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    endpoint = f"127.0.0.1:{free_port()}"

    def agent(name: str) -> Torchrun:
        launcher = (
            "--nnodes=2", "--rdzv-backend=c10d", f"--rdzv-endpoint={endpoint}", "--rdzv-id=agents",
            "--rdzv-conf=keep_alive_interval=1,keep_alive_max_attempt=2", "--local-addr=127.0.0.1",
        )  # fmt: skip
        return start(
            "agents",
            name,
            steps=steps,
            arguments=(f"--losses={losses}",),
            launcher=launcher,
            environment=shared,
        )

    steps, losses = 200, tmp_path / "first.losses"
    first = agent("first")  # the rendezvous lives in this one
    wait_until("the rendezvous", lambda: listens(endpoint), said=first.said)
    second = agent("second")
    first.await_step(40)
    second.kill()
    third = agent("third")
    assert first.wait() == 0, first.said() + third.said()
    assert third.wait() == 0, third.said()
    # Which of the agents has rank 0 is torchrun's choice.
    first.output.write_text(
        first.output.read_text() + second.output.read_text() + third.output.read_text()
    )
    check_losses(first, undisturbed(steps, tmp_path / "reference", ranks=2), starts=2)
    assert first.losses()[-1][0] == steps - 1
