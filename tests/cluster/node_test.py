"""What a node has for itself, what it shares, and what its end takes with it."""

from __future__ import annotations

import os
import pathlib
import re
import signal
import subprocess
import sys
import time

import pytest

from .network import DIRECTORY_PREFIX, Network, remove_what_killed_runs_left
from .process import DEADLINE_S, KILLED_WITH_ITS_NODE, wait_readable

PRIVATE_PLACES = ("/tmp", "/run", "/var/tmp", "/dev/shm", "/var/lib/holdfast", "/nvme")
TREE = pathlib.Path(__file__).resolve().parents[2]


def test_what_one_node_writes_no_other_sees_but_below_remote(network: Network) -> None:
    a, b = network.add_node("a"), network.add_node("b")
    for place in (*PRIVATE_PLACES, "/remote"):
        a.run(["sh", "-c", f"echo mine >{place}/file"])
        assert a.run(["cat", f"{place}/file"]) == "mine\n"
    for place in PRIVATE_PLACES:
        assert "file" not in b.run(["ls", place]), place
        assert not os.path.exists(f"{place}/file"), place
    assert b.run(["cat", "/remote/file"]) == "mine\n"


def test_nothing_else_can_be_written(network: Network) -> None:
    node = network.add_node("a")
    writable = node.run(
        [
            "sh",
            "-c",
            r"""while read -r _ place _ options _; do
                  case $options in rw*) echo "$place";; esac
                done </proc/mounts; for d in / /etc /usr /root /home /opt /sys /work /dev; do
                  touch $d/holdfast-probe 2>/dev/null && echo $d; done; true""",
        ]
    ).split()
    mine = {"/tmp", "/run", "/var", "/dev/shm", "/var/lib/holdfast", "/nvme", "/remote", "/proc"}
    assert set(writable) <= mine, writable
    outside = set(writable) - {"/proc"}
    assert mine - {"/proc"} == outside, writable


def test_remote_has_the_same_owners_on_all_nodes_and_the_rest_other_ones(network: Network) -> None:
    a, b = network.add_node("a"), network.add_node("b")
    for node in (a, b):
        node.run(["install", "-d", "-m", "1777", "/remote/open"])
        node.run(["sh", "-c", f"echo 1 >/remote/open/{node.name}; echo 1 >/tmp/x"], uid=1000)
    for node in (a, b):
        listed = node.run(["stat", "-c", "%u %g", "/remote/open/a", "/remote/open/b", "/tmp/x"])
        assert listed == "1000 1000\n" * 3
        # uid 0 of a node rules over its users' files, on any node; other users do not.
        node.run(["chown", "2000", "/remote/open/a", "/remote/open/b"])
        with pytest.raises(subprocess.CalledProcessError, match="chown"):
            node.run(["chown", "1000", "/remote/open/a"], uid=1000)
        node.run(["chown", "1000", "/remote/open/a", "/remote/open/b"])
    owners = {os.stat(node.path("/tmp/x")).st_uid for node in (a, b)}
    assert len(owners) == 2 and 1000 not in owners
    assert os.stat(network.remote / "open" / "a").st_uid == 1000


def test_a_node_has_its_own_name_processes_and_ids(network: Network) -> None:
    a, b = network.add_node("a"), network.add_node("b")
    other = b.start(["sleep", "1000"])
    ids = set()
    for node in (a, b):
        assert node.run(["hostname"]) == f"{node.name}\n"
        processes = node.run(["sh", "-c", "cat /proc/[0-9]*/comm"]).split()
        assert ("sleep" in processes) == (node is b)
        boot = node.run(["cat", "/proc/sys/kernel/random/boot_id"]).strip()
        assert boot == node.boot_id and len(boot) == 36
        assert node.run(["cat", "/etc/machine-id"]).strip() == node.machine_id
        assert node.run(["getent", "hosts", "a", "b"]).split()[0::2] == [a.address, b.address]
        ids |= {boot, node.machine_id}
    assert len(ids) == 4
    assert other.is_running()


def test_dev_shm_has_a_limit(network: Network) -> None:
    node = network.add_node("a", memory_bytes=1 << 20)
    with pytest.raises(subprocess.CalledProcessError) as failed:
        node.run(["dd", "if=/dev/zero", "of=/dev/shm/file", "bs=64k", "count=32"])
    assert "No space left" in failed.value.stderr
    assert os.stat(node.path("/dev/shm/file")).st_size == 1 << 20


def test_killing_a_node_takes_all_processes_and_its_memory_and_leaves_its_drive(
    network: Network,
) -> None:
    node = network.add_node("a")
    sleepers = [node.start(["sleep", "1000"]), node.start(["sh", "-c", "setsid sleep 1000"])]
    pids = [sleeper.outer_pid() for sleeper in sleepers]
    node.run(
        ["sh", "-c", "for d in /dev/shm /tmp /run /nvme /var/lib/holdfast; do echo 1 >$d/f; done"]
    )
    boot_id = node.boot_id
    node.kill()
    assert not node.is_running()
    assert all(not os.path.exists(f"/proc/{pid}") for pid in pids)
    assert [sleeper.wait() for sleeper in sleepers] == [KILLED_WITH_ITS_NODE] * 2
    assert not any("sleep 1000" in line for line in _commands_below(os.getpid()))
    node.boot()
    kept = node.run(
        ["sh", "-c", "ls /dev/shm/f /tmp/f /run/f /nvme/f /var/lib/holdfast/f 2>&1; true"]
    )
    assert [line for line in kept.split("\n") if line.startswith("/")] == [
        "/nvme/f",
        "/var/lib/holdfast/f",
    ]
    assert node.boot_id != boot_id
    assert node.run(["cat", "/proc/sys/kernel/random/boot_id"]).strip() == node.boot_id
    node.erase("nvme")
    assert node.run(["ls", "/nvme"]) == ""


def test_a_node_that_was_killed_says_no_farewell_and_comes_back_to_its_address(
    network: Network,
) -> None:
    a, b = network.add_node("a"), network.add_node("b")
    server = b.start([sys.executable, "-c", _ECHO], stdout=True)
    port = int(server.read_line())
    connection = a.connect(b.address, port)
    connection.sendall(b"1")
    assert connection.recv(1) == b"1"
    b.reboot()
    # Neither FIN nor RST came from the dead; the one that came back knows nothing of the connection, and says so when spoken to.
    connection.setblocking(False)
    with pytest.raises(BlockingIOError):
        connection.recv(1)
    connection.setblocking(True)
    connection.sendall(b"2")
    with pytest.raises(ConnectionResetError):
        connection.recv(1)
    connection.close()


def test_a_process_is_stopped_and_goes_on(network: Network) -> None:
    node = network.add_node("a")
    echo = node.start(["cat"], stdin=True, stdout=True)
    assert echo.stdin is not None
    for stop, resume in ((echo.stop, echo.resume), (node.freeze, node.thaw)):
        stop()
        echo.stdin.write("hello\n")
        assert not echo.has_said_more()
        resume()
        assert echo.read_line() == "hello"
    assert echo.terminate() == -signal.SIGTERM
    assert node.start(["sh", "-c", "exit 7"]).wait() == 7
    with pytest.raises(OSError, match="no-such-program.*No such file"):
        node.start(["no-such-program"])


def test_a_clock_that_is_off_leaves_the_monotonic_one_true(network: Network) -> None:
    ahead = network.add_node("ahead", clock_offset_s=600)
    code = (
        "import time; print(time.time(), time.monotonic(), time.clock_gettime(time.CLOCK_BOOTTIME))"
    )
    for offset in (None, -300.0, 0.0):
        before = time.time(), time.monotonic(), time.clock_gettime(time.CLOCK_BOOTTIME)
        said = ahead.run([sys.executable, "-c", code], clock_offset_s=offset)
        after = time.time(), time.monotonic(), time.clock_gettime(time.CLOCK_BOOTTIME)
        wall, *others = (float(word) for word in said.split())
        shift = 600.0 if offset is None else offset
        assert before[0] + shift <= wall <= after[0] + shift
        assert before[1] <= others[0] <= after[1]
        assert before[2] <= others[1] <= after[2]


def test_two_networks_at_once_know_nothing_of_each_other() -> None:
    with Network() as one, Network() as two:
        a, b = one.add_node("a"), two.add_node("a")
        assert a.address == b.address
        a.run(["sh", "-c", "echo 1 >/remote/f"])
        assert b.run(["ls", "/remote"]) == ""


def test_a_failure_leaves_nothing_behind() -> None:
    links = _names_of_links()
    with pytest.raises(ZeroDivisionError), Network() as network:
        network.add_node("a").start(["sleep", "1000"])
        assert _names_of_links() == links
        raise ZeroDivisionError
    assert not network.directory.exists()
    assert not any("sleep 1000" in line for line in _commands_below(os.getpid()))
    assert _names_of_links() == links


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_what_a_killed_run_leaves_ends_and_is_removed_by_the_next(
    number: signal.Signals, tmp_path: pathlib.Path
) -> None:
    run = subprocess.Popen(
        [sys.executable, "-c", _RUN_THAT_STAYS],
        env={
            **os.environ,
            "PYTHONPATH": str(TREE / "tests"),
            "HOLDFAST_CLUSTER_DIR": str(tmp_path),
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert run.stdout is not None
    pid = int(run.stdout.readline())
    sleeper = os.pidfd_open(pid)
    (directory,) = tmp_path.glob(f"{DIRECTORY_PREFIX}*")
    remove_what_killed_runs_left(tmp_path)
    assert directory.exists(), "while it runs it is nobody else's to remove"
    run.send_signal(number)
    run.wait(DEADLINE_S)
    run.stdout.close()
    wait_readable(sleeper, DEADLINE_S, "the end of the killed run's process")
    os.close(sleeper)
    assert directory.exists() == (number == signal.SIGKILL)
    (tmp_path / "another's").mkdir()
    remove_what_killed_runs_left(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["another's"]


_ECHO = """
import socket
server = socket.create_server(("0.0.0.0", 0))
print(server.getsockname()[1], flush=True)
while True:
    connection, _ = server.accept()
    while data := connection.recv(65536):
        connection.sendall(data)
"""

_RUN_THAT_STAYS = """
from cluster import Network
with Network() as network:
    sleeper = network.add_node("a").start(["sleep", "1000"])
    print(sleeper.outer_pid(), flush=True)
    sleeper.wait()
"""


def _names_of_links() -> list[str]:
    return re.findall(r"^\s*(\S+):", pathlib.Path("/proc/net/dev").read_text(), re.MULTILINE)


def _commands_below(pid: int) -> list[str]:
    """The command lines of all processes of this session's networks, which are children of children of `pid`."""
    commands = []
    for child in pathlib.Path(f"/proc/{pid}/task").glob("*/children"):
        for number in child.read_text().split():
            try:
                commands.append(
                    pathlib.Path(f"/proc/{number}/cmdline").read_text().replace("\0", " ")
                )
            except (FileNotFoundError, ProcessLookupError):
                continue
            commands += _commands_below(int(number))
    return commands
