"""A ckptd that does not answer: what it costs the training loop, and what is said of it."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator

import pytest
import torch

import holdfast
from daemons import DEADLINE_S, Daemon

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
        assert isinstance(handle.error, holdfast.Unavailable)
    assert time.monotonic() - began < LITTLE_S
    assert ckpt.failed_saves == 30
    ckpt._report()
    skipped = [line for line in said.lines if "was not saved" in line]
    assert len(skipped) == 30
    assert all(f"kill -CONT {pid}" in line for line in skipped)
    daemon.process.send_signal(signal.SIGCONT)
    until = time.monotonic() + DEADLINE_S
    step = 31
    while ckpt.save(step, state, wait="sealed", timeout=DEADLINE_S).error is not None:
        assert time.monotonic() < until
        step += 1


def saves(ckpt: holdfast.Checkpointer) -> None:
    assert ckpt.save(1, STATE, wait="sealed", timeout=DEADLINE_S).error is None


def restores(ckpt: holdfast.Checkpointer) -> None:
    assert ckpt.restore({"w": torch.zeros(1000)}, timeout=DEADLINE_S) == 0


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
