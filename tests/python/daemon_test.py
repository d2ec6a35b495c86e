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
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from holdfast import _core, _daemon, _spill
from holdfast._errors import DeadlineExceededError, HoldfastError, RefusedError

BIN = os.environ["HOLDFAST_TEST_BIN"]
PACKAGE = os.environ["PYTHONPATH"]
DEADLINE_S = 60

# What a program that uses the package does, with the machine's own places out of sight.
PREAMBLE = """
import json, os, sys
from holdfast import _core, _daemon, _spill
from holdfast._errors import HoldfastError
_daemon.SYSTEM_SOCKET = os.environ["TEST_SYSTEM_SOCKET"]
_daemon.SYSTEM_CONFIG = os.environ["TEST_SYSTEM_CONFIG"]
_daemon.SHARED_MEMORY = os.environ.get("TEST_SHARED_MEMORY", _daemon.SHARED_MEMORY)
_spill.MACHINE_ID = os.environ.get("TEST_MACHINE_ID", _spill.MACHINE_ID)
if "TEST_FILESYSTEM" in os.environ:
    _core.filesystem_type = lambda path: os.environ["TEST_FILESYSTEM"]
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


class Laptop(Machine):
    """A machine on which nobody has said where the daemon lies: it keeps checkpoints on disk too."""

    def __init__(self) -> None:
        super().__init__()
        self.place = self.memory / f"holdfast-private-{os.geteuid()}"
        (self.work / "machine-id").write_text("0123456789abcdef" * 2 + "\n")
        self.spill = self.work / ".local/state/holdfast" / ("private-" + "0123456789abcdef" * 2)
        del self.environment["HOLDFAST_PRIVATE_DIR"]
        self.environment |= {
            "TEST_SHARED_MEMORY": str(self.memory),
            "TEST_MACHINE_ID": str(self.work / "machine-id"),
            "TEST_FILESYSTEM": "ext4",  # wherever the tests run
        }

    def train(self, *arguments: str) -> list[dict[str, object]]:
        return super().train("--socket", str(self.place / "ckptd.sock"), *arguments)

    def crash(self) -> None:
        self.kill(listener(str(self.place / "ckptd.sock")))

    def reboot(self) -> None:
        self.crash()
        shutil.rmtree(self.place)

    def restored(self) -> list[tuple[object, object]]:
        """The step that a next run restores, and from where."""
        events = self.train("--steps", "0")
        assert [event["event"] for event in events] == ["open", "restore", "done"], events
        return [(event["step"], event["source"]) for event in events if event["event"] == "restore"]


@pytest.fixture
def laptop() -> Iterator[Laptop]:
    made = Laptop()
    yield made
    made.close()


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


# (tests/base/dying_test.cc and tests/integration/hung_mount_test.cc say which process is dying.)
def test_one_that_was_killed_and_hangs_does_not_count(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not _core.is_dying(os.getpid())
    path = str(machine.work / "ckptd.sock")
    with sockets.socket(sockets.AF_UNIX) as listening:
        listening.bind(path)
        listening.listen(8)
        assert _daemon._somebody_listens(path)
        monkeypatch.setattr(_core, "is_dying", lambda pid: pid == os.getpid())
        assert not _daemon._somebody_listens(path)


def test_its_lock_does_not_count_but_that_of_the_one_after_it(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock = machine.work / "lock"
    with contextlib.ExitStack() as held:

        def hold(path: pathlib.Path, pid: int) -> None:
            file = held.enter_context(path.open("w"))
            print(pid, file=file, flush=True)
            fcntl.flock(file, fcntl.LOCK_EX)

        assert not _spill._is_held(str(lock))
        hold(lock, 4711)
        monkeypatch.setattr(_core, "is_dying", lambda pid: False)
        assert _spill._is_held(str(lock))
        monkeypatch.setattr(_core, "is_dying", lambda pid: pid == 4711)
        assert not _spill._is_held(str(lock))
        hold(machine.work / "lock.1", 4712)
        assert _spill._is_held(str(lock))


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
    assert (
        answer["error"] == "UNAVAILABLE" and "Install the wheel of holdfast-ckptd" in answer["text"]
    )
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


# ---- on disk ----


def test_checkpoints_outlive_a_reboot(laptop: Laptop) -> None:
    laptop.path()
    events = laptop.train("--steps", "1", "--await-tier", "nvme")
    assert "whole" in [event["event"] for event in events], (events, laptop.log())
    laptop.reboot()
    laptop.path()
    assert laptop.restored() == [(0, "nvme")]
    assert oct(laptop.spill.stat().st_mode & 0o777) == oct(0o700)


def test_the_last_step_of_a_run_goes_to_disk_at_its_end(laptop: Laptop) -> None:
    """The first step goes in any case; the others are not due for five minutes."""
    laptop.path()
    laptop.train("--steps", "3", "--await-commit")
    record = laptop.spill / "checkpoints/job/2-a1/0.record"
    wait_until("step 2 on disk", record.exists, said=laptop.log)
    laptop.reboot()
    laptop.path()
    assert laptop.restored() == [(2, "nvme")]


def test_a_restart_finds_the_directory_again(laptop: Laptop) -> None:
    laptop.path()
    laptop.train("--steps", "1", "--await-tier", "nvme")
    token = (laptop.spill / "token").read_text()
    laptop.kill(listener(laptop.path()), signal.SIGTERM)
    laptop.path()
    assert laptop.log().count(f"to '{laptop.spill}' (at most ") == 2
    assert laptop.log().count("the directory survives a reboot too") == 2
    assert (laptop.spill / "token").read_text() == token
    assert laptop.restored() == [(0, "memory")]


@pytest.mark.parametrize("removed", ["", "checkpoints"])
def test_who_removes_the_directory_begins_from_scratch(laptop: Laptop, removed: str) -> None:
    laptop.path()
    laptop.train("--steps", "1", "--await-tier", "nvme")
    laptop.crash()
    for file in (laptop.place / "memory").glob("slot-*"):
        file.unlink()  # as when newer runs took its place
    shutil.rmtree(laptop.spill / removed)
    laptop.path()
    events = [event["event"] for event in laptop.train("--steps", "1", "--await-tier", "nvme")]
    expected = ["open", "scratch", "step", "save", "committed", "whole", "done"]
    assert events == expected, laptop.log()


def test_who_removes_the_directory_keeps_what_is_in_memory(laptop: Laptop) -> None:
    laptop.path()
    laptop.train("--steps", "1", "--await-tier", "nvme")
    laptop.crash()
    shutil.rmtree(laptop.spill)
    laptop.path()
    assert laptop.restored() == [(0, "memory")]


def test_a_job_is_forgotten_only_with_the_directory(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HOLDFAST_PRIVATE_DIR", raising=False)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(_spill, "MACHINE_ID", str(tmp_path / "machine-id"))
    monkeypatch.setattr(_core, "filesystem_type", lambda path: "ext4")
    (tmp_path / "machine-id").write_text("0123456789abcdef" * 2)
    (tmp_path / "home").mkdir()
    place = tmp_path / "place"
    memory = place / "memory"
    memory.mkdir(parents=True)
    in_memory, on_disk, nowhere = (uuid.uuid4() for _ in range(3))
    for job in (in_memory, on_disk, nowhere):
        (memory / f"job-{job}").touch()
    (memory / "slot-000000.record").write_bytes(b"head" + in_memory.bytes + b"rest")

    def find() -> _spill.Spill:
        return _spill.find_spill(str(place))

    def known() -> set[str]:
        return {file.name for file in memory.glob("job-*")}

    everything = known()
    spill = find()  # new to this place: nothing was removed
    witness = pathlib.Path(spill.checkpoints, ".holdfast/witness")
    catalog = pathlib.Path(spill.state, "catalog")
    for file in (witness, catalog):
        file.parent.mkdir()
        file.touch()
    find()
    assert known() == everything and witness.exists() and catalog.exists()

    # The daemon that still runs makes some of it again after the removal.
    shutil.rmtree(spill.directory)
    for file in (witness, catalog, pathlib.Path(spill.checkpoints, "other/JOB")):
        file.parent.mkdir(parents=True)
        file.write_bytes(on_disk.bytes)
    find()
    assert known() == {f"job-{in_memory}", f"job-{on_disk}"}
    assert not witness.exists() and not catalog.exists()

    # Another directory is no removal.
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "home/second"))
    (memory / f"job-{nowhere}").touch()
    assert find().directory != spill.directory
    assert known() == everything


def refuses_disk(laptop: Laptop, reason: str) -> None:
    out, errors = laptop.spawn().communicate(timeout=DEADLINE_S)
    assert json.loads(out) == {"path": str(laptop.place / "ckptd.sock")}, errors
    for said in (errors, laptop.log()):
        assert f"checkpoints go to memory only ('{laptop.place}'), since {reason}" in said
        assert "not a reboot" in said


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"HOLDFAST_PRIVATE_DIR": "{place}"}, "HOLDFAST_PRIVATE_DIR is set"),
        ({"TEST_FILESYSTEM": "nfs"}, "'{work}' is on nfs, which is not known to be a local drive"),
        ({"TEST_MACHINE_ID": "/nowhere"}, "'/nowhere' does not name this machine"),
        ({"HOME": ""}, "neither HOME nor XDG_STATE_HOME is set"),
        ({"XDG_STATE_HOME": "/dev/null"}, "'/dev/null' is not a directory of this user's"),
    ],
    ids=["place", "network", "machine", "home", "file"],
)
def test_memory_only_and_why(laptop: Laptop, changed: dict[str, str], reason: str) -> None:
    names = {"place": laptop.place, "work": laptop.work}
    laptop.environment |= {name: value.format(**names) for name, value in changed.items()}
    refuses_disk(laptop, reason.format(**names))
    assert not (laptop.work / ".local").exists()


@pytest.mark.parametrize("name", ["token", "token.tmp"])
def test_a_pipe_in_place_of_a_file_keeps_no_program(laptop: Laptop, name: str) -> None:
    laptop.spill.mkdir(parents=True, mode=0o700)
    os.mkfifo(laptop.spill / name)
    if name == "token":
        refuses_disk(laptop, f"'{laptop.spill / name}' is not a regular file")
    else:
        laptop.path()
        assert (laptop.spill / "token").is_file()


def test_what_is_too_large_or_a_link_is_not_read(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "token"
    file.write_bytes(b"x" * 9)
    assert _spill._read(str(file), 9) == b"x" * 9
    with pytest.raises(_spill.MemoryOnly, match="has 9 bytes"):
        _spill._read(str(file), 8)
    (tmp_path / "link").symlink_to(file)
    with pytest.raises(OSError, match="link"):
        _spill._read(str(tmp_path / "link"))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory away")
def test_memory_only_in_somebody_elses_home(laptop: Laptop) -> None:
    os.chown(laptop.work, 12_345, 12_345)
    refuses_disk(laptop, f"'{laptop.work}' is not a directory of this user's")


def test_memory_only_while_another_daemon_has_the_directory(laptop: Laptop) -> None:
    laptop.path()
    second = Laptop()
    try:
        second.environment["XDG_STATE_HOME"] = str(laptop.work / ".local/state")
        refuses_disk(second, f"another daemon uses '{laptop.spill}'")
        laptop.crash()
        second.crash()
        second.path()
        assert f"to '{laptop.spill}' (at most " in second.log()
    finally:
        second.close()


def test_settings_of_ones_own_say_whether_there_is_a_disk(laptop: Laptop) -> None:
    settings = laptop.work / ".config/holdfast/private.yaml"
    settings.parent.mkdir(parents=True)
    settings.write_text("metrics: {address: 'off'}\n")
    laptop.path()
    assert f"to the directories of `nvme.dirs` in '{settings}', if it names any" in laptop.log()
    assert not laptop.spill.exists()


def test_any_name_may_lead_to_the_directory(laptop: Laptop) -> None:
    home = laptop.work / 'a "b": {é, \'c'
    laptop.environment["XDG_STATE_HOME"] = str(home)
    laptop.path()
    laptop.train("--steps", "1", "--await-tier", "nvme")
    assert (home / "holdfast" / laptop.spill.name / "checkpoints/job/0-a1/0.record").exists()


def test_a_step_that_is_too_large_for_the_disk_is_told_to_the_program(laptop: Laptop) -> None:
    settings = laptop.work / ".config/holdfast/private.yaml"
    settings.parent.mkdir(parents=True)
    (laptop.work / "disk").mkdir()
    settings.write_text(
        f"nvme: {{dirs: [{laptop.work / 'disk'}], bytes_max: 2MiB}}\n"
        "policy: {nvme: {every_steps: 0, every_ms: 5min}}\n"
        "metrics: {address: 'off'}\n"
    )
    code = """
import numpy
import holdfast
state = {"x": numpy.zeros(4 << 20, dtype="uint8")}
with holdfast.Checkpointer("job", rank=0, world_size=1) as ckpt:
    first = ckpt.save(0, state, wait="committed")
    known = False
    while not known:
        try:
            first.wait("nvme", 0.01)
        except holdfast.DeadlineExceededError as error:
            known = "; nvme: " in str(error)
    for step in range(1, 4):
        ckpt.save(step, state, wait="committed")
print("{}")
"""
    out, errors = laptop.spawn(code).communicate(timeout=DEADLINE_S)
    assert out == "{}\n", errors
    said = "job 'job': step 0 is not on disk, and a reboot would lose it: the step takes "
    assert errors.count("is not on disk") == 1 and said in errors, errors
    assert "that nvme.bytes_max leaves for copies; raise it; " in errors
    assert f"settings: '{settings}'" in errors


class SaveOfTest:
    """A save of which the daemon says this when it is asked for the disk."""

    error = None

    def __init__(self, step: int, *answers: HoldfastError | None) -> None:
        self.step = step
        self.answers = list(answers)

    def done(self) -> bool:
        return True

    def wait(self, stage: str, timeout: float) -> None:
        assert (stage, timeout) == ("nvme", 0.0)
        if answer := self.answers.pop(0):
            raise answer


def test_what_keeps_steps_from_the_disk_for_long_is_said_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_spill, "_TROUBLE_S", float("inf"))
    watch = _spill.DiskWatch("job", "/home/me/private.yaml")
    not_due: Any = SaveOfTest(1, RefusedError("step 1 does not go to nvme: the job's policy …"))
    coming = DeadlineExceededError("step 2 is not there yet: 1 of 1 ranks have sealed it")
    full = DeadlineExceededError(
        "step 2 is not there yet: 1 of 1 ranks have sealed it; nvme: no space"
    )
    due: Any = SaveOfTest(2, coming, full, full)
    never_asked: Any = SaveOfTest(3)
    for each in (not_due, due, never_asked):
        watch.look(each)
        assert not caplog.messages
    monkeypatch.setattr(_spill, "_TROUBLE_S", 0.0)
    for _ in range(2):
        watch.look(never_asked)
        assert len(caplog.messages) == 1
    assert "step 2 is not on disk, and a reboot would lose it: no space;" in caplog.text


def test_at_the_end_what_keeps_a_step_from_the_disk_is_said_at_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    watch = _spill.DiskWatch("job", "/home/me/private.yaml")
    save: Any = SaveOfTest(1, DeadlineExceededError("not there yet; nvme: no space"))
    watch.look(save, last=True)
    assert len(caplog.messages) == 1


@pytest.mark.parametrize("answer", [None, RefusedError("… this daemon has none configured")])
def test_nothing_is_asked_once_the_disk_is_known_to_be_used_or_not_there(
    answer: HoldfastError | None, caplog: pytest.LogCaptureFixture
) -> None:
    watch = _spill.DiskWatch("job", "/home/me/private.yaml")
    save: Any = SaveOfTest(1, answer)
    watch.look(save)
    watch.look(save)  # (has no second answer)
    assert not save.answers and not caplog.messages


def test_how_much_of_the_disk_is_used() -> None:
    assert _spill.budget(50 << 30) == 5 << 30
    assert _spill.budget(1 << 40) == 20 << 30


def test_the_type_of_a_file_system() -> None:
    assert _core.filesystem_type("/dev/shm") == "tmpfs"
    with pytest.raises(OSError, match="'/nowhere'"):
        _core.filesystem_type("/nowhere")
