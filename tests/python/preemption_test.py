"""A job that is told to end: the signals, the same last step on all ranks, and where that step lies when they have ended."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from typing import Any

import numpy
import pytest

import holdfast
from daemons import DEADLINE_S, Daemon

TIERS = "nvme: {dirs: [ROOT/drive]}\nremote: {dir: ROOT/remote}\n"


@pytest.fixture
def daemon(make_daemon, monkeypatch: pytest.MonkeyPatch) -> Daemon:
    one = make_daemon(TIERS, ["drive", "remote"])
    monkeypatch.setenv("HOLDFAST_SOCKET", str(one.socket))
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "HOLDFAST_GRACE"):
        monkeypatch.delenv(name, raising=False)
    return one


@pytest.fixture
def handlers():
    """What this process does with signals is as before afterwards."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


STATE = {"w": numpy.arange(1000)}

# A rank as a program: step after step, until it is told to end. It says "step N" of the first one and "last N …" of the last.
RANK = """
import sys
import numpy
import holdfast

ckpt = holdfast.Checkpointer("job", policy=holdfast.Policy(nvme_every=0, remote_every=1000), on_error="raise", grace="1min")
last = ckpt.restore({"w": numpy.zeros(1000, numpy.int64)})
step = 0 if last is None else last
for line in sys.stdin:  # each line: one step more
    step += 1
    stop = ckpt.preempted(step)
    if stop or step % 5 == 0:
        ckpt.save(step, {"w": numpy.full(1000, step)})
    if stop:
        print("last", step, *ckpt.drain(), flush=True)
        break
    print("step", step, flush=True)
ckpt.close()
print("closed", flush=True)
"""


class Rank:
    def __init__(self, rank: int, world_size: int) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", RANK],
            env={**os.environ, "RANK": str(rank), "WORLD_SIZE": str(world_size)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def go_on(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def says(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def step(self) -> str:
        self.go_on()
        return self.says()


@pytest.fixture
def two_ranks(daemon: Daemon):
    ranks = [Rank(rank, 2) for rank in range(2)]
    yield ranks
    for rank in ranks:
        rank.process.kill()
        rank.process.wait(DEADLINE_S)


def test_all_end_with_the_same_step_which_is_in_remote(daemon: Daemon, two_ranks) -> None:
    first, second = two_ranks
    assert (first.step(), second.step()) == ("step 1", "step 1")
    assert second.step() == "step 2"  # ahead
    first.process.send_signal(signal.SIGTERM)
    assert first.step() == "step 2", "the other one is beyond that"
    first.go_on()
    second.go_on()
    said = [first.says(), second.says()]
    assert [line.split()[:2] for line in said] == [["last", "3"]] * 2
    # By its policy nothing but each thousandth step goes there; the first one was 3 itself.
    assert all("remote" in line.split() and "nvme" not in line.split() for line in said), said
    for rank in two_ranks:
        assert rank.says() == "closed"
        assert rank.process.wait(DEADLINE_S) == 0
    (job,) = json.loads(daemon.ctl("status", "job", "--json"))["jobs"]
    assert job["stopping"]["chosen"]
    assert job["stopping"]["last_step"] == 3
    assert "told to end" in daemon.ctl("status", "job")
    assert "job_stopping" in daemon.ctl("events", "job")
    again = [Rank(rank, 2) for rank in range(2)]
    for rank in again:
        rank.go_on()
    assert [rank.says() for rank in again] == ["step 4"] * 2
    for rank in again:
        rank.process.kill()
        rank.process.wait(DEADLINE_S)


def test_the_last_step_goes_where_it_is_not_due(daemon: Daemon, two_ranks) -> None:
    for _ in range(10):
        for rank in two_ranks:
            rank.go_on()
        for rank in two_ranks:
            assert rank.says().startswith("step")
    two_ranks[1].process.send_signal(signal.SIGTERM)
    for rank in two_ranks:
        rank.go_on()
    said = sorted(rank.says().split()[0] for rank in two_ranks)
    while said != ["last", "last"]:
        for rank in two_ranks:
            rank.go_on()
        said = sorted(rank.says().split()[0] for rank in two_ranks)
    listed = json.loads(daemon.ctl("list", "job", "--json"))["checkpoints"]
    assert max(one["step"] for one in listed if "remote" in json.dumps(one)) > 10


def test_a_handler_of_the_programs_own_is_called_too(daemon: Daemon, handlers) -> None:
    called: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: called.append(number))
    with holdfast.Checkpointer("own") as ckpt:
        assert not ckpt.preempted(1)
        os.kill(os.getpid(), signal.SIGTERM)
        assert ckpt.preempted(2)
        assert called == [signal.SIGTERM]
        ckpt.save(2, STATE)
        assert ckpt.drain()[:2] == ("sealed", "committed")
    os.kill(os.getpid(), signal.SIGTERM)
    assert called == [signal.SIGTERM] * 2, "its own handler is back"


def test_another_signal(daemon: Daemon, handlers) -> None:
    before = signal.getsignal(signal.SIGTERM)
    with holdfast.Checkpointer("usr1", stop_signals=[signal.SIGUSR1]) as ckpt:
        assert not ckpt.preempted(1)
        assert signal.getsignal(signal.SIGTERM) is before
        os.kill(os.getpid(), signal.SIGUSR1)
        assert ckpt.preempted(2)
    assert signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL


def test_a_signal_that_is_ignored_stays_ignored(daemon: Daemon, handlers) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    with holdfast.Checkpointer("ignored") as ckpt:
        assert not ckpt.preempted(1)
        os.kill(os.getpid(), signal.SIGTERM)
        assert not ckpt.preempted(2)
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_IGN


def test_two_checkpointers_of_a_process(daemon: Daemon, handlers) -> None:
    with holdfast.Checkpointer("one") as one:
        with holdfast.Checkpointer("two") as two:
            assert not one.preempted(1)
            assert not two.preempted(1)
        os.kill(os.getpid(), signal.SIGTERM)
        assert one.preempted(2)
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_told_otherwise_and_in_another_thread(daemon: Daemon, handlers) -> None:
    answers: list[Any] = []
    with holdfast.Checkpointer("thread") as ckpt:

        def loop() -> None:
            answers.append(ckpt.preempted(1))
            ckpt.notice_stop("10min")
            answers.append(ckpt.preempted(2))

        thread = threading.Thread(target=loop)
        thread.start()
        thread.join(DEADLINE_S)
        assert answers == [False, True]
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL, "no other thread may set them"


def test_drain_says_what_the_last_save_has_come_to(daemon: Daemon, handlers) -> None:
    with holdfast.Checkpointer(
        "drain", policy=holdfast.Policy(nvme_every=1, remote_every=1)
    ) as ckpt:
        assert ckpt.drain() == ()
        ckpt.save(1, STATE)
        assert set(ckpt.drain(60)) == {"sealed", "committed", "remote", "nvme"}
    with holdfast.Checkpointer(
        "none", policy=holdfast.Policy(nvme_every=0, remote_every=0)
    ) as ckpt:
        ckpt.save(1, STATE)
        assert ckpt.drain() == ("sealed", "committed")


def test_drain_ends_before_the_process_is_killed(daemon: Daemon, handlers) -> None:
    """A rank that never comes: the step is not committed, and the wait for it ends with the grace."""
    with holdfast.Checkpointer("alone", rank=0, world_size=2, grace=2.5) as ckpt:
        ckpt.save(1, STATE)
        ckpt.notice_stop()
        assert ckpt.drain() == ("sealed",)


@pytest.mark.parametrize(
    ("grace", "words"),
    [
        ("90x", "grace='90x'"),
        (-1, "grace=-1"),
        (True, "grace=True"),
        ([], r"grace=\[\]"),
        (float("nan"), "grace=nan"),
    ],
)
def test_a_grace_that_is_none(daemon: Daemon, grace: Any, words: str) -> None:
    with pytest.raises(holdfast.InvalidArgument, match=words):
        holdfast.Checkpointer("wrong", grace=grace)


def test_the_grace_of_the_environment(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOLDFAST_GRACE", "soon")
    with pytest.raises(holdfast.InvalidArgument, match="HOLDFAST_GRACE='soon'"):
        holdfast.Checkpointer("wrong")
    monkeypatch.setenv("HOLDFAST_GRACE", "100")
    with holdfast.Checkpointer("env") as ckpt:
        ckpt.notice_stop()
        assert ckpt.preempted(1)
        left = json.loads(daemon.ctl("status", "env", "--json"))["jobs"][0]["stopping"]["left_ms"]
        assert 30_000 < left <= 100_000


@pytest.mark.parametrize("signals", [[signal.SIGKILL], [signal.SIGINT], [0], ["TERM"], 15])
def test_signals_that_are_none(daemon: Daemon, signals: Any) -> None:
    with pytest.raises(holdfast.InvalidArgument, match="stop_signals"):
        holdfast.Checkpointer("wrong", stop_signals=signals)


def test_a_daemon_that_is_away(daemon: Daemon, handlers) -> None:
    with holdfast.Checkpointer("away") as ckpt:
        daemon.kill()
        assert not ckpt.preempted(1)
        ckpt.notice_stop()
        assert ckpt.preempted(2)
        daemon.start()
