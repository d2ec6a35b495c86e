"""A job that is told to end: the signals, the same last step on all ranks, and where that step lies when they have ended."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import subprocess
import sys
import threading
from typing import Any

import numpy
import pytest

import holdfast
from daemons import DEADLINE_S, Daemon, run_python

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

ckpt = holdfast.Checkpointer("job", policy=holdfast.Policy(nvme_every_steps=0, remote_every_steps=1000, remote_every_ms=0), on_error="raise", grace="1min")
step = max(ckpt.restore({"w": numpy.zeros(1000, numpy.int64)}) - 1, 0)
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


# A loader of its own forks, as multiprocessing does by default; what is left of it at the end is terminated and waited for.
WITH_A_CHILD = """
import multiprocessing, sys, time
import holdfast

ckpt = holdfast.Checkpointer("parent")
assert not ckpt.preempted(1)
child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(3600,), daemon=True)
child.start()
print(child.pid, flush=True)
sys.stdin.readline()
assert ckpt.preempted(2)
raise SystemExit(75)
"""


def test_a_forked_child_ends_with_the_signal(daemon: Daemon) -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", WITH_A_CHILD],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert parent.stdin is not None and parent.stdout is not None
    child = int(parent.stdout.readline())
    try:
        parent.send_signal(signal.SIGTERM)
        parent.stdin.write("\n")
        parent.stdin.flush()
        # Its exit code is the program's own: it did not have to be killed.
        assert parent.wait(DEADLINE_S) == 75
        with pytest.raises(ProcessLookupError):
            os.kill(child, 0)
    finally:
        parent.kill()
        parent.wait(DEADLINE_S)
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)


AT_ONCE = """
import multiprocessing, time
import holdfast

ckpt = holdfast.Checkpointer("parent")
assert not ckpt.preempted(1)
for _ in range(200):
    child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(3600,), daemon=True)
    child.start()
    child.terminate()
    child.join(DEADLINE_S)
    if child.exitcode is None:
        child.kill()
        raise SystemExit("it lives on")
assert not ckpt.preempted(2)
"""


def test_a_child_that_has_just_been_forked_ends_with_it(daemon: Daemon) -> None:
    program = AT_ONCE.replace("DEADLINE_S", str(DEADLINE_S))
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_handler_of_the_programs_own_is_what_a_child_has(daemon: Daemon, handlers) -> None:
    signal.signal(signal.SIGTERM, lambda *_: os._exit(7))
    with holdfast.Checkpointer("own") as ckpt:
        assert not ckpt.preempted(1)
        child = os.fork()
        if child == 0:
            os.kill(os.getpid(), signal.SIGTERM)
            os._exit(8)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        assert not ckpt.preempted(2), "the parent was not told"


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
        "drain", policy=holdfast.Policy(nvme_every_steps=1, remote_every_steps=1)
    ) as ckpt:
        assert ckpt.drain() == ()
        ckpt.save(1, STATE)
        assert set(ckpt.drain(60)) == {"sealed", "committed", "remote", "nvme"}
    with holdfast.Checkpointer(
        "none", policy=holdfast.Policy(nvme_every_steps=0, remote_every_steps=0, remote_every_ms=0)
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
        ("-5", "grace='-5'"),
        ("-5s", "grace='-5s'"),
        ("nan", "grace='nan'"),
        ("9" * 23, "grace='9+'"),
        ("99999999h", "grace='99999999h'"),
        (" ", "grace=' '"),
    ],
)
def test_a_grace_that_is_none(daemon: Daemon, grace: Any, words: str) -> None:
    with pytest.raises(holdfast.InvalidArgumentError, match=words):
        holdfast.Checkpointer("wrong", grace=grace)


def test_the_grace_of_the_environment(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOLDFAST_GRACE", "soon")
    with pytest.raises(holdfast.InvalidArgumentError, match="HOLDFAST_GRACE='soon'"):
        holdfast.Checkpointer("wrong")
    monkeypatch.setenv("HOLDFAST_GRACE", "-5")
    with pytest.raises(holdfast.InvalidArgumentError, match="HOLDFAST_GRACE='-5'"):
        holdfast.Checkpointer("wrong")
    monkeypatch.setenv("HOLDFAST_GRACE", "99.5")
    with holdfast.Checkpointer("env") as ckpt:
        ckpt.notice_stop()
        assert ckpt.preempted(1)
        left = json.loads(daemon.ctl("status", "env", "--json"))["jobs"][0]["stopping"]["left_ms"]
        assert 30_000 < left <= 100_000


@pytest.mark.parametrize("signals", [[signal.SIGKILL], [signal.SIGINT], [0], ["TERM"], 15])
def test_signals_that_are_none(daemon: Daemon, signals: Any) -> None:
    with pytest.raises(holdfast.InvalidArgumentError, match="stop_signals"):
        holdfast.Checkpointer("wrong", stop_signals=signals)


def test_a_daemon_that_is_away(daemon: Daemon, handlers) -> None:
    with holdfast.Checkpointer("away") as ckpt:
        daemon.kill()
        assert not ckpt.preempted(1)
        ckpt.notice_stop()
        assert ckpt.preempted(2)
        daemon.start()


def test_a_signal_that_nobody_hears_ends_the_process_and_says_why(daemon: Daemon) -> None:
    ended = run_python(
        """
import logging, os, signal, holdfast
logging.basicConfig()

def train():
    holdfast.Checkpointer("dropped").preempted(1)  # and never closed

train()
os.kill(os.getpid(), signal.SIGTERM)
print("it goes on", flush=True)
"""
    )
    assert ended.returncode == -signal.SIGTERM, ended
    assert ended.stdout == ""
    assert ended.stderr.count("SIGTERM: no job could be told that it is to end") == 1, ended.stderr


def test_a_signal_that_nobody_hears_goes_to_the_programs_own_handler_alone(
    daemon: Daemon, handlers, caplog: pytest.LogCaptureFixture
) -> None:
    called: list[int] = []

    def own(number: int, _: Any) -> None:
        called.append(number)

    signal.signal(signal.SIGTERM, own)
    with holdfast.Checkpointer("left") as ckpt:
        assert not ckpt.preempted(1)
        ckpt._shared.close()  # as other users of the job may
        for _ in range(3):
            os.kill(os.getpid(), signal.SIGTERM)
        assert called == [signal.SIGTERM] * 3
        assert signal.getsignal(signal.SIGTERM) is own
    assert caplog.text.count("no job could be told") == 1, caplog.text


def test_a_handler_that_calls_ours_is_left_in_its_place(daemon: Daemon, handlers) -> None:
    called: list[int] = []
    with holdfast.Checkpointer("chained") as ckpt:
        assert not ckpt.preempted(1)
        ours = signal.getsignal(signal.SIGTERM)

        def own(number: int, frame: Any) -> None:
            called.append(number)
            assert callable(ours)
            ours(number, frame)

        signal.signal(signal.SIGTERM, own)
        ckpt._shared.close()
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGTERM)
    assert called == [signal.SIGTERM] * 2
    assert signal.getsignal(signal.SIGTERM) is own


def test_drain_does_not_take_an_earlier_step_for_the_last_one(
    daemon: Daemon, handlers, caplog: pytest.LogCaptureFixture
) -> None:
    with holdfast.Checkpointer("forgetful") as ckpt:
        assert not ckpt.preempted(1)
        ckpt.save(1, STATE, wait="committed")
        ckpt.notice_stop("1min")
        assert ckpt.preempted(2)
        assert ckpt.drain() == ()
        assert "step 2, the last one of the job, was not saved" in caplog.text
        assert ckpt.preempted(3)
        ckpt.save(3, STATE)
        assert ckpt.drain()[:2] == ("sealed", "committed")


def test_a_save_that_is_lost_is_logged_once(
    daemon: Daemon, handlers, caplog: pytest.LogCaptureFixture
) -> None:
    with holdfast.Checkpointer("lost") as ckpt:
        ckpt.save(1, STATE, wait="sealed")
        daemon.kill()
        ckpt.save(2, STATE)
        assert ckpt.drain(DEADLINE_S) == ()
        daemon.start()
    told = [one for one in caplog.records if one.levelno >= logging.ERROR]
    assert [one.getMessage().split(":")[0] for one in told] == ["job 'lost'"]
    assert "step 2 was not saved" in told[0].getMessage()


def test_the_last_step_is_saved_though_the_daemon_is_being_restarted(
    daemon: Daemon, handlers
) -> None:
    with holdfast.Checkpointer("restarted", grace="5min", on_error="raise") as ckpt:
        assert not ckpt.preempted(1)
        ckpt.save(1, STATE, wait="sealed")
        ckpt.notice_stop()
        assert ckpt.preempted(2)
        daemon.kill()
        ckpt.save(2, STATE)
        daemon.start()
        assert ckpt.drain(DEADLINE_S)[:2] == ("sealed", "committed")


@pytest.mark.parametrize(
    "where", ["received", "record_written"]
)  # of the second one; behind the latter the copy is there, and nobody has heard so
def test_the_last_step_is_saved_though_the_daemon_ends_behind_its_copy(
    make_daemon, handlers, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    monkeypatch.setenv("HOLDFAST_SYNC_POINT", f"daemon.seal.{where}:kill@2")
    daemon = make_daemon()
    monkeypatch.delenv("HOLDFAST_SYNC_POINT")
    monkeypatch.setenv("HOLDFAST_SOCKET", str(daemon.socket))
    saved = {"w": numpy.arange(1_000_000)}
    with holdfast.Checkpointer("copied", grace="5min", on_error="raise") as ckpt:
        assert not ckpt.preempted(1)
        ckpt.save(1, {"w": numpy.zeros(1_000_000, numpy.int64)}, wait="sealed")
        ckpt.notice_stop()
        assert ckpt.preempted(2)
        ckpt.save(2, saved)
        daemon.process.wait(DEADLINE_S)
        daemon.start()
        assert ckpt.drain(DEADLINE_S)[:2] == ("sealed", "committed")
    with holdfast.Checkpointer("copied") as ckpt:
        state = {"w": numpy.zeros(1_000_000, numpy.int64)}
        assert ckpt.restore(state) == 3
        assert numpy.array_equal(state["w"], saved["w"])


def test_a_daemon_that_is_being_restarted_is_told_that_the_job_is_to_end(
    daemon: Daemon, handlers
) -> None:
    with holdfast.Checkpointer("told", grace="5min") as ckpt:
        assert not ckpt.preempted(1)
        ckpt.save(1, STATE, wait="sealed")
        daemon.kill()
        starting = threading.Thread(target=daemon.start)
        starting.start()
        ckpt.notice_stop()
        assert ckpt.preempted(2)
        starting.join(DEADLINE_S)
        ckpt.save(2, STATE)
        assert ckpt.drain(DEADLINE_S)[:2] == ("sealed", "committed")
        stopping = json.loads(daemon.ctl("status", "told", "--json"))["jobs"][0]["stopping"]
        assert (stopping["rank"], stopping["chosen"]) == (0, True), "others hear it from there"


def test_a_daemon_that_hangs_takes_no_more_than_there_is_time(daemon: Daemon, handlers) -> None:
    with holdfast.Checkpointer("hangs", grace=3) as ckpt:
        assert not ckpt.preempted(1)
        ckpt.save(1, STATE, wait="sealed")
        assert daemon.process is not None
        daemon.process.send_signal(signal.SIGSTOP)
        try:
            ckpt.notice_stop()
            assert ckpt.preempted(2)
            ckpt.save(2, STATE)
            assert ckpt.drain() == ()
            assert ckpt._shared.core.stop_left > 0, "it would have been killed by now"
        finally:
            daemon.process.send_signal(signal.SIGCONT)
