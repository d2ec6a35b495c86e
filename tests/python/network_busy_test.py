"""Quiet windows: what a training loop says of its network, and what a real daemon makes of it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy
import pytest

import holdfast
from daemons import DEADLINE_S, Daemon

TIERS = "remote: {dir: ROOT/remote}\n"


@pytest.fixture
def remote(make_daemon, monkeypatch: pytest.MonkeyPatch) -> Daemon:
    one = make_daemon(TIERS, ["remote"])
    monkeypatch.setenv("HOLDFAST_SOCKET", str(one.socket))
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    return one


def wait_until(what: str, told: Callable[[], Any]) -> Any:
    end = time.monotonic() + DEADLINE_S
    while not (answer := told()):
        assert time.monotonic() < end, what
        time.sleep(0.01)
    return answer


def quiet(daemon: Daemon) -> dict[str, Any]:
    return json.loads(daemon.ctl("status", "--json"))["daemon"].get("quiet", {})


def in_remote(daemon: Daemon, job: str) -> int:
    """The newest step that is whole there; 0: none."""
    tiers = json.loads(daemon.ctl("status", job, "--json"))["jobs"][0]["tiers"]
    return sum(one.get("step", 0) for one in tiers if one["tier"] == "remote" and one["any"])


def checkpointer(job: str) -> holdfast.Checkpointer:
    policy = holdfast.Policy(remote_every_steps=1, remote_keep_last=100)
    return holdfast.Checkpointer(job, policy=policy, on_error="raise")


def test_a_flush_waits_for_the_window_to_end(remote: Daemon) -> None:
    with checkpointer("quiet") as ckpt:
        state = {"w": numpy.arange(1000)}
        ckpt.save(1, state, wait="remote")
        assert in_remote(remote, "quiet") == 1
        for step in range(2, 5):
            before = quiet(remote).get("held_ms", 0)
            with ckpt.network_busy():
                ckpt.save(step, state, wait="committed")
                # (On a machine that stands still for some seconds the window does not hold it any more.)
                wait_until(
                    "a flush",
                    lambda step=step: (
                        quiet(remote).get("holding") or in_remote(remote, "quiet") == step
                    ),
                )
                # One piece: it goes at once, or not at all.
                there = in_remote(remote, "quiet")
                assert there == step - 1 or not quiet(remote).get("holding")
                assert re.search(
                    "network: . process.* busy; background copying", remote.ctl("status")
                )
            wait_until("the step is there", lambda step=step: in_remote(remote, "quiet") == step)
            assert quiet(remote)["held_ms"] > before


def test_what_is_waited_for_does_not_wait(remote: Daemon) -> None:
    with checkpointer("waits") as ckpt, ckpt.network_busy():
        for step in range(1, 4):
            ckpt.save(step, {"w": numpy.arange(10)}, wait="remote")
            assert in_remote(remote, "waits") == step
        assert ckpt.restore({"w": numpy.zeros(10, dtype=numpy.int64)}) == 4


def test_it_ends_with_the_process(remote: Daemon) -> None:
    code = """
import sys, numpy, holdfast
ckpt = holdfast.Checkpointer("killed", policy=holdfast.Policy(remote_every_steps=1))
ckpt.network_busy().__enter__()
ckpt.save(1, {"w": numpy.arange(10)}, wait="committed")
print("saved", flush=True)
sys.stdin.read()
"""
    with subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "HOLDFAST_SOCKET": str(remote.socket)},
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"saved\n"
        assert quiet(remote).get("busy_processes", 0) <= 1
        process.kill()
    wait_until("nobody is busy", lambda: quiet(remote).get("busy_processes", 0) == 0)
    wait_until("the step is there", lambda: in_remote(remote, "killed") == 1)


def test_windows_nest_and_overlap(remote: Daemon) -> None:
    def busy() -> int:
        return quiet(remote).get("busy_processes", 0)

    with checkpointer("nest") as ckpt:
        window = ckpt.network_busy()
        inside, leave = threading.Event(), threading.Event()

        def other() -> None:
            with window:
                inside.set()
                leave.wait(DEADLINE_S)

        thread = threading.Thread(target=other)
        with window, window, ckpt.network_busy():
            thread.start()
            inside.wait(DEADLINE_S)
        with pytest.raises(RuntimeError), window:
            raise RuntimeError
        leave.set()
        thread.join()
        assert busy() == 0
        for _ in range(10_000):
            with window:
                pass
        assert busy() == 0


def test_it_has_no_effect_where_there_is_nobody(remote: Daemon) -> None:
    ckpt = checkpointer("alone")
    window = ckpt.network_busy()
    with window:
        remote.kill()
    with window:
        remote.start()
    ckpt.save(1, {"w": numpy.arange(10)}, wait="remote")
    with window:
        child = os.fork()
        if child == 0:
            with window, ckpt.network_busy():
                os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    ckpt.close()
    with window, ckpt.network_busy():  # nothing, and no error
        pass
