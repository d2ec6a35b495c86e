"""A ckptd that does not answer: what it costs the training loop, and what is said of it."""

from __future__ import annotations

import logging
import os
import pathlib
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator

import pytest
import torch

import holdfast
from daemons import BIN, DEADLINE_S, Daemon
from holdfast import _daemon
from holdfast._missing_ranks import MissingRanks
from holdfast._skipped import SkippedSaves

STATE = {"w": torch.ones(1000)}
# What a loop may lose to a daemon that hangs, on a slow machine; one exchange alone may take 30 s.
LITTLE_S = 20


class Said(logging.Handler):
    """What the logger `holdfast` says from WARNING on; `then` is called for each line."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []
        self.then: Callable[[], None] = lambda: None

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(f"{record.levelname} {record.getMessage()}")
        self.then()


@pytest.fixture
def said() -> Iterator[Said]:
    handler = Said()
    logging.getLogger("holdfast").addHandler(handler)
    yield handler
    logging.getLogger("holdfast").removeHandler(handler)


@pytest.fixture
def ckpt(daemon: Daemon) -> Iterator[holdfast.Checkpointer]:
    one = holdfast.Checkpointer("job", rank=0, world_size=1)
    one.save(0, STATE, wait="committed", timeout=DEADLINE_S)
    yield one
    assert daemon.process is not None
    daemon.process.send_signal(signal.SIGCONT)
    one.close()


def stop(daemon: Daemon) -> int:
    assert daemon.process is not None
    daemon.process.send_signal(signal.SIGSTOP)
    # Only then it is certain that it answers nothing any more.
    os.waitid(os.P_PID, daemon.process.pid, os.WSTOPPED | os.WNOWAIT)
    return daemon.process.pid


def test_a_stopped_daemon_costs_the_loop_little_and_once(
    daemon: Daemon, ckpt: holdfast.Checkpointer, said: Said
) -> None:
    model = torch.nn.Linear(8, 8)
    optim = torch.optim.SGD(model.parameters(), lr=0.1)
    state = {"model": model, "optim": optim}
    pid = stop(daemon)
    began = time.monotonic()
    for step in range(1, 31):  # a second each would be too much
        handle = ckpt.save(step, state)
        model(torch.ones(1, 8)).sum().backward()
        optim.step()
        ckpt.wait_snapshot()
        assert isinstance(handle.error, holdfast.UnavailableError)
    assert time.monotonic() - began < LITTLE_S
    assert ckpt.failed_saves == 30
    ckpt._report(in_save=False)
    first = [line for line in said.lines if "was not saved" in line]
    assert len(first) == 1 and "step 1 was" in first[0] and f"kill -CONT {pid}" in first[0]
    assert len([line for line in said.lines if line.startswith("ERROR")]) < 10  # not one for each
    daemon.process.send_signal(signal.SIGCONT)
    until = time.monotonic() + DEADLINE_S
    step = 31
    while ckpt.save(step, state, wait="sealed", timeout=DEADLINE_S).error is not None:
        assert time.monotonic() < until
        step += 1
    assert (
        f"job 'job': saves work again with step {step}; {step - 1} skipped since " in said.lines[-1]
    )


def skip_one(ckpt: holdfast.Checkpointer, step: int) -> None:
    """Leaves a request to the stopped daemon without an answer."""
    with pytest.raises(holdfast.UnavailableError):
        ckpt.save(step, STATE).wait("sealed", DEADLINE_S)


def test_a_save_with_wait_waits_also_while_an_earlier_request_is_unanswered(
    daemon: Daemon, ckpt: holdfast.Checkpointer, said: Said
) -> None:
    pid = stop(daemon)
    skip_one(ckpt, 1)

    def go_on() -> None:
        if "the save of step 2 has waited for" in said.lines[-1]:
            assert f"kill -CONT {pid}" in said.lines[-1]
            os.kill(pid, signal.SIGCONT)

    said.then = go_on
    assert ckpt.save(2, STATE, wait="sealed", timeout=DEADLINE_S).error is None
    assert any("the save of step 2 has waited for" in line for line in said.lines)


def test_a_save_with_wait_waits_for_a_daemon_that_is_being_restarted(
    daemon: Daemon, ckpt: holdfast.Checkpointer, said: Said
) -> None:
    daemon.kill()

    def start_again() -> None:
        if daemon.process is None:
            daemon.start()

    said.then = start_again
    assert ckpt.save(1, STATE, wait="committed", timeout=DEADLINE_S).error is None
    first = said.lines[0]
    assert first.startswith("WARNING job 'job': the save of step 1 has waited for ")
    assert str(daemon.socket) in first and "is ckptd running?" in first


def test_a_save_with_wait_takes_no_longer_than_its_timeout(
    daemon: Daemon, ckpt: holdfast.Checkpointer
) -> None:
    pid = stop(daemon)
    began = time.monotonic()
    for step in (1, 2):
        handle = ckpt.save(step, STATE, wait="sealed", timeout=2)
        with pytest.raises(holdfast.UnavailableError, match=f"kill -CONT {pid}"):
            handle.wait("sealed", DEADLINE_S)
    assert time.monotonic() - began < LITTLE_S


def test_prepare_says_who_does_not_answer(daemon: Daemon, ckpt: holdfast.Checkpointer) -> None:
    pid = stop(daemon)
    skip_one(ckpt, 1)
    with pytest.raises(holdfast.UnavailableError, match=f"kill -CONT {pid}"):
        ckpt.prepare(STATE, timeout=0.5)


def test_skipped_saves_are_counted_in_a_line_every_ten_seconds() -> None:
    skipped = SkippedSaves()
    error = holdfast.UnavailableError("ckptd hangs")
    lines = [skipped.line(step, error, 1000.0 + step / 4) for step in range(100)]
    told = {step: line for step, line in enumerate(lines) if line is not None}
    assert list(told) == [0, 40, 80]
    assert told[0] == (logging.ERROR, "step 0 was not saved: ckptd hangs")
    level, text = told[80]
    since = time.strftime("%H:%M:%S", time.localtime(1000))
    assert level == logging.ERROR
    assert text == f"81 saves were skipped since {since}, step 80 is the newest: ckptd hangs"
    rest = skipped.rest()
    assert rest is not None and rest[1].startswith("100 saves were skipped")
    assert skipped.rest() is None
    assert skipped.line(100, None, 1025.0) == (
        logging.WARNING,
        f"saves work again with step 100; 100 skipped since {since}",
    )
    assert skipped.line(101, None, 1026.0) is None
    assert skipped.rest() is None


def test_another_reason_is_said_in_full() -> None:
    skipped = SkippedSaves()
    gone, full = holdfast.UnavailableError("no daemon"), holdfast.NoRoomError("no slot")
    wrong = holdfast.InvalidArgumentError("steps must grow")
    for step, error in enumerate((gone, full, wrong)):
        line = skipped.line(step, error, 1000.0)
        assert line == (logging.ERROR, f"step {step} was not saved: {error}")
    for error in (full, wrong):
        assert skipped.line(3, error, 1001.0) is None


def test_the_start_of_a_private_daemon_is_said_without_the_loggers_name(
    tmp_path: pathlib.Path, said: Said
) -> None:
    _daemon._tell(str(tmp_path / "log"), "checkpoints go to memory")
    assert said.lines == ["WARNING started a private ckptd: checkpoints go to memory"]


def saves(ckpt: holdfast.Checkpointer) -> None:
    assert ckpt.save(1, STATE, wait="sealed", timeout=DEADLINE_S).error is None


def restores(ckpt: holdfast.Checkpointer) -> None:
    assert ckpt.restore({"w": torch.zeros(1000)}, timeout=DEADLINE_S) == 1


@pytest.mark.parametrize("thread", ["main", "another"])
@pytest.mark.parametrize(("call", "what"), [(saves, "the save of step 1"), (restores, "a restore")])
def test_what_waits_for_a_stopped_daemon_says_so(
    daemon: Daemon,
    ckpt: holdfast.Checkpointer,
    said: Said,
    call: Callable[[holdfast.Checkpointer], None],
    what: str,
    thread: str,
) -> None:
    pid = stop(daemon)
    said.then = lambda: os.kill(pid, signal.SIGCONT)  # as the line says
    if thread == "main":
        call(ckpt)
    else:
        raised: list[BaseException] = []

        def run() -> None:
            try:
                call(ckpt)
            except BaseException as error:
                raised.append(error)

        other = threading.Thread(target=run)
        other.start()
        other.join()
        assert not raised, raised
    first = said.lines[0]
    assert first.startswith(f"WARNING job 'job': {what} has waited for ")
    assert f"process {pid} at '{daemon.socket}' is stopped" in first
    assert f"kill -CONT {pid}" in first


def test_a_restore_that_waits_for_other_ranks_names_them(
    daemon: Daemon, said: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of three ranks the middle one restores; the others never come."""
    monkeypatch.setenv("PATH", str(BIN.resolve()), prepend=os.pathsep)

    class Told(Exception):
        pass

    def end(_: holdfast.RestoreProgress) -> None:
        if any("waits for ranks 0, 2" in line for line in said.lines):
            raise Told

    with holdfast.Checkpointer("three", rank=1, world_size=3) as one:
        with pytest.raises(Told):
            one.restore({"w": torch.zeros(1)}, progress=end, timeout=DEADLINE_S)
    named = [line for line in said.lines if "waits for ranks 0, 2" in line]
    assert re.match(
        r"WARNING job 'three': a restore has waited for \d+\.\d s: 1 of 3 ranks", named[0]
    )
    assert "start the missing ones, or end this process" in named[0]


def test_a_few_ranks_of_many_ask_whom_they_wait_for() -> None:
    asking = [MissingRanks("job", "ckptd.sock", rank, 12_288)._asks for rank in range(12_288)]
    assert asking[0] and sum(asking) == 8
    assert not MissingRanks("job", "ckptd.sock", 0, 1)._asks  # there is nobody to wait for


def opens() -> None:
    with holdfast.open("job") as saved:
        assert saved.step == 0


def lists() -> None:
    assert [found.step for found in holdfast.checkpoints("job")] == [0]


@pytest.mark.parametrize("read", [opens, lists])
def test_a_reader_that_waits_for_a_stopped_daemon_says_so(
    daemon: Daemon, ckpt: holdfast.Checkpointer, said: Said, read: Callable[[], None]
) -> None:
    pid = stop(daemon)
    said.then = lambda: os.kill(pid, signal.SIGCONT)
    read()
    first = said.lines[0]
    assert first.startswith("WARNING reading checkpoints has waited for ")
    assert f"process {pid} at '{daemon.socket}' is stopped" in first
    assert f"kill -CONT {pid}" in first


@pytest.mark.parametrize(
    "call",
    [
        lambda: holdfast.open("job", timeout=3),
        lambda: holdfast.checkpoints("job", timeout=3),
        lambda: holdfast.Checkpointer("other", rank=0, world_size=1, open_timeout=3),
    ],
    ids=["open", "checkpoints", "join"],
)
def test_the_error_of_a_call_that_was_not_answered_says_who_hangs(
    daemon: Daemon, ckpt: holdfast.Checkpointer, call: Callable[[], object]
) -> None:
    pid = stop(daemon)
    with pytest.raises(holdfast.DeadlineExceededError, match=f"kill -CONT {pid}"):
        call()


def test_a_save_that_waits_for_a_full_memory_says_so(
    make_daemon: Callable[..., Daemon], monkeypatch: pytest.MonkeyPatch, said: Said
) -> None:
    one = make_daemon(memory_bytes="16MiB")
    monkeypatch.setenv("HOLDFAST_SOCKET", str(one.socket))
    with holdfast.Checkpointer("hog", rank=0, world_size=1) as hog:
        for step in range(2):
            hog.save(step, {"w": torch.ones(900_000)}, wait="committed", timeout=DEADLINE_S)
        with holdfast.Checkpointer("late", rank=0, world_size=1) as late:
            late.save(0, {"w": torch.ones(2_500_000)}, wait="sealed", timeout=3)
    first = said.lines[0]
    assert first.startswith("WARNING job 'late': the save of step 0 has waited for ")
    assert "ckptd has no free slot yet. `ckptctl status` shows your jobs." in first
    assert "the node holds 8 MiB of 16 MiB (memory.bytes_max)" in said.lines[-1]


def test_a_save_with_wait_ends_by_itself(
    daemon: Daemon, ckpt: holdfast.Checkpointer, said: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("holdfast._checkpointer._WAIT_S", 0.2)
    stop(daemon)
    ckpt.save(1, STATE, wait="remote")
    assert "step 1 has not come to 'remote'" in said.lines[-1]


def test_a_handler_that_fails_ends_no_wait(
    daemon: Daemon, ckpt: holdfast.Checkpointer, said: Said
) -> None:
    pid = stop(daemon)

    def fail() -> None:
        os.kill(pid, signal.SIGCONT)
        raise ZeroDivisionError("in a handler")

    said.then = fail
    unraisable: list[str] = []
    hook = "sys.unraisablehook"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hook, lambda args: unraisable.append(str(args.exc_value)))
        saves(ckpt)
    assert unraisable == ["in a handler"]
