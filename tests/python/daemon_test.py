"""The private daemon of the Python package: real programs, in places of the test's own.

tests/python/run build/test daemon_test.py
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pathlib
import select
import shutil
import signal
import socket as sockets
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

BIN = os.environ["HOLDFAST_TEST_BIN"]
PACKAGE = os.environ["PYTHONPATH"]
DEADLINE_S = 60

# What a program that uses the package does, with the machine's own places out of sight.
PREAMBLE = """
import json, os, sys
from holdfast import _daemon
from holdfast._errors import HoldfastError
_daemon.SYSTEM_SOCKET = os.environ["TEST_SYSTEM_SOCKET"]
_daemon.SYSTEM_CONFIG = os.environ["TEST_SYSTEM_CONFIG"]
"""
ENSURE = """
try:
    print(json.dumps({"path": _daemon.ensure_daemon(**json.loads(sys.argv[1]))}), flush=True)
except HoldfastError as error:
    print(json.dumps({"error": error.code, "text": str(error)}), flush=True)
"""


def wait_until(
    what: str, holds: Callable[[], Any], *, deadline_s: float = DEADLINE_S, said: Callable[[], str]
) -> None:
    end = time.monotonic() + deadline_s
    while not holds():
        assert time.monotonic() < end, f"not within {deadline_s} s: {what}\n{said()}"
        time.sleep(0.005)


class Machine:
    """A home, a runtime directory and shared memory that are empty."""

    def __init__(self) -> None:
        self.work = pathlib.Path(tempfile.mkdtemp(prefix="holdfast-d-"))
        self.memory = pathlib.Path(tempfile.mkdtemp(prefix="holdfast-d-", dir="/dev/shm"))
        self.place = self.memory / "place"
        self.runtime = self.work / "run"
        self.runtime.mkdir()
        kept = ("PATH", "LD_LIBRARY_PATH", "LANG")
        self.environment = {name: os.environ[name] for name in kept if name in os.environ} | {
            "HOME": str(self.work),
            "HOLDFAST_PRIVATE_DIR": str(self.place),
            "HOLDFAST_CKPTD": os.path.join(BIN, "ckptd"),
            "PYTHONPATH": PACKAGE,
            "TEST_SYSTEM_SOCKET": str(self.work / "system.sock"),
            "TEST_SYSTEM_CONFIG": str(self.work / "system.yaml"),
        }

    def spawn(self, code: str = ENSURE, **arguments: object) -> subprocess.Popen[str]:
        """A program of its own session that reads from a pipe; its `arguments` are
        ensure_daemon's."""
        return subprocess.Popen(
            [sys.executable, "-c", PREAMBLE + code, json.dumps(arguments)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env=self.environment, start_new_session=True, cwd=self.work,
        )  # fmt: skip

    def ensure(self, code: str = ENSURE, **arguments: object) -> dict[str, str]:
        out, errors = self.spawn(code, **arguments).communicate(timeout=DEADLINE_S)
        assert out, errors
        return json.loads(out.splitlines()[-1])

    def path(self, **arguments: object) -> str:
        answer = self.ensure(**arguments)
        assert "path" in answer, answer
        return answer["path"]

    def log(self) -> str:
        return (self.place / "ckptd.log").read_text()

    def await_logged(self, words: str) -> None:
        """A program finds the daemon a moment before it says that it is ready."""
        wait_until(f"'{words}' in its log", lambda: words in self.log(), said=self.log)

    def await_admin(self) -> None:
        """Until ckptctl can connect, which is a moment after other programs can."""

        def connects() -> bool:
            with contextlib.suppress(FileNotFoundError, ConnectionRefusedError):
                return listener(str(self.place / "admin.sock")) > 0
            return False

        wait_until("the admin socket", connects, said=self.log)

    def daemons(self) -> list[int]:
        """All processes that were started for this place, ckptd or what stands in for it."""
        found = []
        for entry in pathlib.Path("/proc").iterdir():
            try:
                words = (
                    (entry / "cmdline").read_bytes().split(b"\0") if entry.name.isdigit() else []
                )
            except OSError:
                continue
            if (
                b"--memory-dir" in words
                and str(self.place / "memory").encode() in words
                and words[0] != b"/bin/sh"
            ):
                found.append(int(entry.name))
        return found

    def kill(self, pid: int, how: signal.Signals = signal.SIGKILL) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, how)
        self.await_end(pid)

    def await_end(self, pid: int) -> None:
        try:
            end = os.pidfd_open(pid)
        except ProcessLookupError:
            return
        assert select.select([end], [], [], DEADLINE_S)[0], f"pid {pid} does not end"
        os.close(end)

    def train(self, *arguments: str) -> list[dict[str, object]]:
        """The events of the C++ example trainer, which is told of no socket."""
        done = subprocess.run(
            [
                os.path.join(BIN, "holdfast_train_example"),
                *("--job", "job", "--rank", "0", "--world", "1", "--bytes", "1048576"),
                *arguments,
            ],
            stdout=subprocess.PIPE,
            text=True,
            env=self.environment,
            timeout=DEADLINE_S,
            check=False,
        )
        return [json.loads(line) for line in done.stdout.splitlines()]

    def close(self) -> None:
        for pid in self.daemons():
            self.kill(pid)
        shutil.rmtree(self.work, ignore_errors=True)
        shutil.rmtree(self.memory, ignore_errors=True)


@pytest.fixture
def machine() -> Iterator[Machine]:
    made = Machine()
    yield made
    made.close()


def listener(path: str) -> int:
    """The process that listens there."""
    with sockets.socket(sockets.AF_UNIX) as client:
        client.connect(path)
        return struct.unpack("3i", client.getsockopt(sockets.SOL_SOCKET, sockets.SO_PEERCRED, 12))[
            0
        ]


def stat_of(pid: int) -> list[str]:
    """From the state on: state, ppid, pgrp, session, …"""
    return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def dead_socket(path: pathlib.Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with sockets.socket(sockets.AF_UNIX) as gone:
        gone.bind(str(path))


def test_a_daemon_is_started_and_the_next_program_finds_it(machine: Machine) -> None:
    path = machine.path()
    assert path == str(machine.place / "ckptd.sock")
    first = listener(path)
    assert machine.path() == path
    assert listener(path) == first
    assert machine.daemons() == [first]
    assert oct(os.stat(machine.place).st_mode & 0o777) == oct(0o700)


def test_with_a_runtime_directory_the_place_is_the_same(machine: Machine) -> None:
    machine.environment["XDG_RUNTIME_DIR"] = str(machine.runtime)
    path = machine.path()
    del machine.environment["XDG_RUNTIME_DIR"]
    assert machine.path() == path
    assert len(machine.daemons()) == 1


def test_eight_programs_at_once_get_one_daemon(machine: Machine) -> None:
    together = machine.work / "go"
    os.mkfifo(together)
    programs = [machine.spawn(f"open({str(together)!r}).close()\n" + ENSURE) for _ in range(8)]
    with open(
        together, "w"
    ):  # opens when one reads; the others' open() returns, too, while it is open
        answers = [json.loads(program.communicate(timeout=DEADLINE_S)[0]) for program in programs]
    assert answers == [{"path": str(machine.place / "ckptd.sock")}] * 8
    assert machine.daemons() == [listener(answers[0]["path"])]


def test_ckptds_own_lock_decides_when_all_try_to_start_one(machine: Machine) -> None:
    lockless = (
        "import contextlib\n_daemon._starting = lambda place, end: contextlib.nullcontext()\n"
    )
    programs = [machine.spawn("sys.stdin.readline()\n" + lockless + ENSURE) for _ in range(8)]
    for program in programs:
        assert program.stdin
        program.stdin.write("go\n")
        program.stdin.flush()
    answers = [json.loads(program.communicate(timeout=DEADLINE_S)[0]) for program in programs]
    assert answers == [{"path": str(machine.place / "ckptd.sock")}] * 8
    winner = listener(answers[0]["path"])
    for loser in set(machine.daemons()) - {winner}:
        machine.await_end(loser)
    assert machine.daemons() == [winner]


def test_ckptctl_and_the_cpp_client_find_it_unasked(machine: Machine) -> None:
    if os.path.lexists("/run/holdfast"):
        pytest.skip("this machine has a daemon of its own in /run/holdfast, which goes first")
    daemon = listener(machine.path())
    machine.await_admin()
    done = subprocess.run(
        [os.path.join(BIN, "ckptctl"), "status", "--json"],
        stdout=subprocess.PIPE, env=machine.environment, timeout=DEADLINE_S, check=True,
    )  # fmt: skip
    assert str(daemon) in done.stdout.decode()
    assert [event["event"] for event in machine.train("--steps", "1")].count("save") == 1


def test_a_daemon_that_was_killed_is_started_again_and_has_the_old_steps(machine: Machine) -> None:
    if os.path.lexists("/run/holdfast"):
        pytest.skip("this machine has a daemon of its own in /run/holdfast, which goes first")
    path = machine.path()
    saved = [
        event["step"]
        for event in machine.train("--steps", "3", "--await-commit")
        if event["event"] == "save"
    ]
    first = listener(path)
    machine.kill(first)
    assert os.path.lexists(path)  # it lies about dead
    assert machine.path() == path
    assert listener(path) != first
    restored = [event for event in machine.train("--steps", "4") if event["event"] == "restore"]
    assert [(event["step"], event["source"]) for event in restored] == [(saved[-1], "memory")]


def test_one_that_is_stopped_for_a_moment_is_not_replaced(machine: Machine) -> None:
    path = machine.path()
    daemon = listener(path)
    os.kill(daemon, signal.SIGSTOP)
    try:
        assert machine.path() == path
        assert machine.daemons() == [daemon]
    finally:
        os.kill(daemon, signal.SIGCONT)


@pytest.mark.parametrize("where", ["system", "home", "xdg"])
def test_with_a_configuration_none_is_started(machine: Machine, where: str) -> None:
    if where == "xdg":
        machine.environment["XDG_CONFIG_HOME"] = str(machine.work / "elsewhere")
    config = {
        "system": machine.work / "system.yaml",
        "home": machine.work / ".config/holdfast/ckptd.yaml",
        "xdg": machine.work / "elsewhere/holdfast/ckptd.yaml",
    }[where]
    config.parent.mkdir(parents=True, exist_ok=True)
    config.touch()
    answer = machine.ensure(timeout=0.2)
    assert answer["error"] == "UNAVAILABLE"
    assert str(config) in answer["text"]
    assert "start it" in answer["text"]
    assert not machine.place.exists()


def test_a_configured_daemon_that_is_on_its_way_is_waited_for(machine: Machine) -> None:
    config = machine.work / "system.yaml"
    config.touch()
    program = machine.spawn(
        "_daemon.time.sleep = lambda s: print('waits', flush=True) or sys.stdin.readline()\n"
        + ENSURE
    )
    assert program.stdout
    assert program.stdout.readline() == "waits\n"
    dead_socket(machine.work / "system.sock")
    out, _ = program.communicate("\n", timeout=DEADLINE_S)
    assert json.loads(out) == {"path": str(machine.work / "system.sock")}
    assert not machine.place.exists()


def test_a_socket_that_is_there_counts_even_when_nobody_answers(machine: Machine) -> None:
    dead_socket(machine.work / "system.sock")
    assert machine.path() == str(machine.work / "system.sock")
    machine.environment["XDG_RUNTIME_DIR"] = str(machine.runtime)
    dead_socket(machine.runtime / "holdfast/ckptd.sock")
    assert machine.path() == str(machine.runtime / "holdfast/ckptd.sock")
    machine.environment["HOLDFAST_SOCKET"] = "/nowhere/environment.sock"
    assert machine.path() == "/nowhere/environment.sock"
    assert machine.path(socket="/nowhere/argument.sock") == "/nowhere/argument.sock"
    assert not machine.place.exists()


def test_the_error_of_a_dead_socket_names_it(machine: Machine) -> None:
    machine.environment["XDG_RUNTIME_DIR"] = str(machine.runtime)
    dead = machine.runtime / "holdfast/ckptd.sock"
    dead_socket(dead)
    events = machine.train("--socket", machine.path(), "--steps", "1", "--deadline-ms", "300")
    assert [event["event"] for event in events] == ["error"]
    assert str(dead) in json.dumps(events[0])
    assert not machine.place.exists()


@pytest.mark.parametrize("value", ["0", "no", "OFF", "false"])
def test_off_by_environment(machine: Machine, value: str) -> None:
    machine.environment["HOLDFAST_START_DAEMON"] = value
    assert machine.path() == str(machine.work / "system.sock")
    assert not machine.place.exists()


def test_off_by_argument_still_finds_one_that_runs(machine: Machine) -> None:
    assert machine.path(start=False) == str(machine.work / "system.sock")
    assert not machine.place.exists()
    path = machine.path()
    assert machine.path(start=False) == path
    machine.environment["HOLDFAST_START_DAEMON"] = "perhaps"
    assert machine.path() == path  # nothing is to be started
    machine.kill(listener(path))
    assert machine.ensure()["error"] == "INVALID_ARGUMENT"


def test_ctrl_c_and_the_end_of_the_program_do_not_end_it(machine: Machine) -> None:
    program = machine.spawn(ENSURE + "sys.stdin.read()\n")
    assert program.stdout
    path = json.loads(program.stdout.readline())["path"]
    daemon = listener(path)
    assert stat_of(daemon)[3] != str(os.getsid(program.pid))
    assert stat_of(daemon)[1] != str(program.pid)  # nobody's child here
    os.killpg(program.pid, signal.SIGINT)
    program.communicate(timeout=DEADLINE_S)
    assert program.returncode != 0
    assert listener(path) == daemon
    machine.kill(daemon, signal.SIGTERM)  # and this is how it is stopped


def open_descriptors(pid: int) -> dict[int, str]:
    """What each descriptor of a process leads to; one that it closes meanwhile is left out."""
    found = {}
    for entry in pathlib.Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            found[int(entry.name)] = os.readlink(entry)
    return found


def test_nothing_of_the_program_is_inherited(machine: Machine) -> None:
    code = """
import fcntl, socket
held = open("held", "w")
os.set_inheritable(held.fileno(), True)
fcntl.flock(held, fcntl.LOCK_EX)
listening = socket.socket()
listening.bind(("127.0.0.1", 0))
listening.listen()
listening.set_inheritable(True)
os.environ["NOTIFY_SOCKET"] = os.environ["LD_PRELOAD"] = "/nowhere"
os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])
os.umask(0)
"""
    answer = machine.ensure(code + ENSURE)
    daemon = listener(answer["path"])
    root = pathlib.Path(f"/proc/{daemon}")
    descriptors = open_descriptors(daemon)
    assert descriptors[0] == "/dev/null"
    assert descriptors[1] == descriptors[2] == str(machine.place / "ckptd.log")
    assert not [
        link
        for link in descriptors.values()
        if "held" in link or "pipe:" in link or "start.lock" in link
    ], descriptors
    with open(machine.work / "held", "w") as held:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    tcp = {line.split()[9] for line in pathlib.Path("/proc/net/tcp").read_text().splitlines()[1:]}
    assert not [
        link for link in descriptors.values() if link.startswith("socket:") and link[8:-1] in tcp
    ]
    assert os.readlink(root / "cwd") == "/"
    environment = (root / "environ").read_bytes()
    assert b"NOTIFY_SOCKET" not in environment and b"LD_PRELOAD" not in environment
    assert os.sched_getaffinity(daemon) == os.sched_getaffinity(0)
    assert oct(os.stat(machine.place / "ckptd.log").st_mode & 0o777) == oct(0o600)


def test_settings_of_the_private_daemon(machine: Machine) -> None:
    settings = machine.work / ".config/holdfast/private.yaml"
    settings.parent.mkdir(parents=True)
    settings.write_text("memory: {bytes_max: 6MiB}\nmetrics: {address: 'off'}\n")
    machine.path()
    machine.await_logged("memory_bytes_max=6291456")


def test_without_settings_of_its_own_it_opens_no_port(machine: Machine) -> None:
    machine.path()
    machine.await_logged("metrics_port=0")


def test_an_error_quotes_the_end_of_the_log(machine: Machine) -> None:
    settings = machine.work / ".config/holdfast/private.yaml"
    settings.parent.mkdir(parents=True)
    settings.write_text("memory: {byte_max: 4MiB}\n")
    answer = machine.ensure()
    assert answer["error"] == "UNAVAILABLE"
    assert "byte_max" in answer["text"] and str(machine.place / "ckptd.log") in answer["text"]
    assert machine.daemons() == []


def test_one_that_does_not_come_up_in_time(machine: Machine) -> None:
    slow = machine.work / "ckptd"
    shoes = machine.work / "shoes"
    os.mkfifo(shoes)
    # (By env, so that Machine.daemons does not take it for the shell that starts a daemon.)
    slow.write_text(f"#!/usr/bin/env sh\necho 'looks for its shoes' >&2\nread -r shoes <{shoes}\n")
    slow.chmod(0o755)
    machine.environment["HOLDFAST_CKPTD"] = str(slow)
    answer = machine.ensure(timeout=10)
    assert answer["error"] == "DEADLINE_EXCEEDED"
    assert "looks for its shoes" in answer["text"]


def test_without_a_program_the_error_says_what_to_do(machine: Machine) -> None:
    machine.environment["PATH"] = "/nowhere"
    machine.environment["HOLDFAST_CKPTD"] = "/nowhere/ckptd"
    answer = machine.ensure()
    assert answer["error"] == "UNAVAILABLE" and "HOLDFAST_CKPTD: '/nowhere/ckptd'" in answer["text"]
    del machine.environment["HOLDFAST_CKPTD"]
    answer = machine.ensure()
    assert answer["error"] == "UNAVAILABLE" and "install the wheel" in answer["text"]
    machine.environment["PATH"] = BIN
    machine.path()


@pytest.mark.parametrize(
    "spoil",
    [lambda place: place.chmod(0o777), lambda place: place.symlink_to("/tmp")],
    ids=["open", "link"],
)
def test_a_place_that_others_can_write_is_refused(
    machine: Machine, spoil: Callable[[pathlib.Path], None]
) -> None:
    if spoil.__code__.co_names[0] == "chmod":
        machine.place.mkdir()
    spoil(machine.place)
    answer = machine.ensure()
    assert answer["error"] == "REFUSED"
    assert str(machine.place) in answer["text"]


def test_another_daemon_at_its_place_is_waited_for_not_joined(machine: Machine) -> None:
    """One that is going down: it holds the memory, and nobody listens."""
    machine.place.mkdir(mode=0o700)
    notify = machine.work / "notify.sock"
    with sockets.socket(sockets.AF_UNIX, sockets.SOCK_DGRAM) as ready:
        ready.bind(str(notify))
        ready.settimeout(DEADLINE_S)
        other = subprocess.Popen(
            [
                os.path.join(BIN, "ckptd"),
                *("--memory-dir", str(machine.place / "memory")),
                *("--state-dir", str(machine.place / "state")),
                *("--socket", str(machine.work / "o.sock")),
                *("--config", os.path.join(PACKAGE, "holdfast/private.yaml")),
            ],
            env=machine.environment | {"NOTIFY_SOCKET": str(notify)},
            stderr=subprocess.DEVNULL,
        )
        ready.recv(64)
    answer = machine.ensure(timeout=10)
    assert answer["error"] == "UNAVAILABLE" and f"held by pid {other.pid}" in answer["text"], answer
    program = machine.spawn()
    log = machine.place / "ckptd.log"
    seen = log.stat().st_size
    while log.stat().st_size == seen:  # it has tried
        assert program.poll() is None
    other.terminate()
    other.wait(timeout=DEADLINE_S)
    assert json.loads(program.communicate(timeout=DEADLINE_S)[0]) == {
        "path": str(machine.place / "ckptd.sock")
    }
