"""A machine of the cluster, as namespaces: what it has in common with others is the network and `/remote`, nothing else.

    node = network.add_node("a")
    node.run(["sh", "-c", "echo 1 >/nvme/file"])
    node.kill()     # as by a power cut: its memory is gone, its drive is not
    node.boot()
    assert node.run(["cat", "/nvme/file"]) == "1\n"

Inside of it:

| path | what | after `boot` |
|---|---|---|
| `/tmp`, `/run`, `/var`, `/dev/shm` | its own memory; `/dev/shm` with a limit | empty |
| `/var/lib/holdfast`, `/nvme` | its own directories on disk; outside: `node.disk / "state"`, `node.disk / "nvme"` | as they were |
| `/remote` | one directory for all nodes, with the same owners on all of them | as it was |
| all else | the machine's files, read-only | |

Processes see those of their node only, its hostname, its boot id and machine id, and /etc/hosts with all nodes' names. They run in a
user namespace: uid 0 of a node owns its directories, may do there what root may, and is nobody to other nodes and to the machine.
"""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import re
import shutil
import signal
import socket
import subprocess
import sys
import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from . import clock
from . import system_calls as sc
from .process import DEADLINE_S, Process, wait_readable

if TYPE_CHECKING:
    from .network import Network

IDS_PER_NODE = 65536
PROGRAMS = pathlib.Path(os.environ.get("HOLDFAST_TEST_BIN", "build/test/bin")).resolve()
ADDRESS_PREFIX = "10.77.0."
_HERE = pathlib.Path(__file__).parent
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
# Of the harness's environment; the rest (RANK, HOLDFAST_SOCKET, LD_PRELOAD …) is not a node's.
_KEPT_VARIABLES = re.compile(
    r"LANG|LC_\w+|TZ|PYTHONPATH|(ASAN|LSAN|UBSAN|TSAN)_OPTIONS|HOLDFAST_TEST_\w+"
)


class Node:
    """Made by `Network.add_node`, and running."""

    def __init__(
        self,
        network: Network,
        name: str,
        number: int,
        memory_bytes: int,
        clock_offset_s: float,
    ) -> None:
        self.network = network
        self.name = name
        self.number = number
        self.address = f"{ADDRESS_PREFIX}{number}"
        self.port = f"port{number}"  # of the switch
        self.disk = network.directory / "nodes" / name
        self.memory_bytes = memory_bytes
        self.clock_offset_s = clock_offset_s
        self.outer_id = 1_000_000 + IDS_PER_NODE * number  # what uid 0 of the node is outside
        self.machine_id = uuid.uuid4().hex
        self.boot_id = ""
        self.programs = PROGRAMS  # of which release: a test may choose another one
        self.processes: list[Process] = []
        self._keeper: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._init_pid = 0
        self._init_pidfd = -1
        self._network_namespace = -1
        self._starts = 0
        for part in ("state", "nvme", "logs", "root"):
            (self.disk / part).mkdir(parents=True)
        for part in ("state", "nvme"):
            os.chown(self.disk / part, self.outer_id, self.outer_id)
        (self.disk / "machine-id").write_text(self.machine_id + "\n")

    def __repr__(self) -> str:
        return f"<node {self.name} {self.address}>"

    # Power.

    def is_running(self) -> bool:
        return self._keeper is not None

    def boot(self) -> None:
        """Starts a node that is down; nothing runs in it yet."""
        assert not self.is_running(), f"{self} is running"
        self.boot_id = str(uuid.uuid4())
        (self.disk / "boot-id").write_text(self.boot_id + "\n")
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        harness = os.pidfd_open(os.getpid())
        settings = {
            "name": self.name,
            "control": theirs.fileno(),
            "harness": harness,
            "outer_id": self.outer_id,
            "memory_bytes": self.memory_bytes,
            "disk": str(self.disk),
            "root": str(self.disk / "root"),
            "remote": str(self.network.remote),
            "visible": self.network.visible,
            "files": {
                "/proc/sys/kernel/random/boot_id": str(self.disk / "boot-id"),
                "/etc/machine-id": str(self.disk / "machine-id"),
                "/etc/hosts": str(self.network.directory / "hosts"),
            },
        }
        with theirs:
            keeper = subprocess.Popen(
                [sys.executable, "-SEsB", str(_HERE / "node_init.py"), json.dumps(settings)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                pass_fds=[theirs.fileno(), harness],
                start_new_session=True,  # the terminal's ^C is the harness's to handle
            )
        os.close(harness)
        self._keeper = keeper
        self._control = ours
        assert keeper.stdout is not None
        with keeper.stdout:
            first = keeper.stdout.readline()
        if not first:
            self._forget()
            raise OSError(f"{self}: its namespaces could not be made (see standard error)")
        self._init_pid = int(first)
        self._init_pidfd = os.pidfd_open(self._init_pid)
        try:
            self._receive("its start")
        except BaseException:
            self._forget()
            raise
        self._network_namespace = os.open(f"/proc/{self._init_pid}/ns/net", os.O_RDONLY)
        self.network.plug_in(self, self._init_pid)

    def kill(self) -> None:
        """A power cut: the link goes first, so that no peer hears a farewell; then all processes at once, and the memory with them."""
        if not self.is_running():
            return
        try:
            self.network.unplug(self)
        finally:
            self._forget()

    def reboot(self) -> None:
        """`kill`, then `boot`."""
        self.kill()
        self.boot()

    def freeze(self) -> None:
        """SIGSTOP to every process of the node: it is there, and silent. `thaw` ends it. Returns when those started here stand still."""
        self._request({"signal_all": signal.SIGSTOP}, [])
        for process in self.processes:
            process.wait_stopped()

    def thaw(self) -> None:
        self._request({"signal_all": signal.SIGCONT}, [])

    # Processes.

    def start(
        self,
        argv: Sequence[str | os.PathLike[str]],
        *,
        uid: int = 0,
        gid: int | None = None,
        env: Mapping[str, str] | None = None,
        cwd: str = "/tmp",
        stdin: bool = False,
        stdout: bool = False,
        clock_offset_s: float | None = None,
    ) -> Process:
        """Starts a program. `stdin`, `stdout`: pipes to and from here; what is not a pipe goes to the process's log.

        `clock_offset_s`: how far its wall clock is off, instead of the node's.
        """
        offset = self.clock_offset_s if clock_offset_s is None else clock_offset_s
        variables = {name: v for name, v in os.environ.items() if _KEPT_VARIABLES.fullmatch(name)}
        variables |= {"PATH": _PATH, "HOME": "/tmp", **clock.shifted(offset), **(env or {})}
        return self._start(argv, uid, uid if gid is None else gid, variables, cwd, stdin, stdout)

    def start_helper(self, argv: Sequence[str | os.PathLike[str]], *, stdout: bool) -> Process:
        """A program of the harness's own, as the machine's root: no fault of the node is its fault."""
        return self._start(argv, None, None, dict(os.environ), "/", False, stdout)

    def run(
        self,
        argv: Sequence[str | os.PathLike[str]],
        *,
        uid: int = 0,
        env: Mapping[str, str] | None = None,
        cwd: str = "/tmp",
        deadline_s: float = DEADLINE_S,
        clock_offset_s: float | None = None,
    ) -> str:
        """What a program prints; raises with its standard error when it fails."""
        process = self.start(
            argv, uid=uid, env=env, cwd=cwd, stdout=True, clock_offset_s=clock_offset_s
        )
        try:
            said = process.read_all(deadline_s)
            code = process.wait(deadline_s)
        finally:
            if process.is_running():
                process.kill()
        if code != 0:
            raise subprocess.CalledProcessError(code, list(argv), said, process.log())
        self.processes.remove(process)
        process.close()
        return said

    def _start(
        self,
        argv: Sequence[str | os.PathLike[str]],
        uid: int | None,
        gid: int | None,
        variables: Mapping[str, str],
        cwd: str,
        stdin: bool,
        stdout: bool,
    ) -> Process:
        self._starts += 1
        program = pathlib.Path(argv[0]).name
        log_path = self.disk / "logs" / f"{self._starts:03d}-{program}.log"
        with contextlib.ExitStack() as opened:
            log = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            opened.callback(os.close, log)
            input_end = writer = output_end = reader = -1
            if stdin:
                input_end, writer = os.pipe()
            else:
                input_end = os.open("/dev/null", os.O_RDONLY)
            opened.callback(os.close, input_end)
            if stdout:
                reader, output_end = os.pipe()
                opened.callback(os.close, output_end)
            exit_pipe, tell_exit = os.pipe()
            opened.callback(os.close, tell_exit)
            request = {
                "argv": [os.fspath(word) for word in argv],
                "env": dict(variables),
                "cwd": cwd,
                "uid": uid,
                "gid": gid,
                "helper": uid is None,
            }
            try:
                answer, fds = self._request(
                    request, [input_end, output_end if stdout else log, log, tell_exit]
                )
            except BaseException:
                for fd in (writer, reader, exit_pipe):
                    if fd >= 0:
                        os.close(fd)
                raise
        process = Process(
            f"{program} on {self.name}",
            answer["pid"],
            fds[0],
            exit_pipe,
            log_path,
            os.fdopen(writer, "w", buffering=1) if stdin else None,
            reader,
        )
        self.processes.append(process)
        return process

    # Files and sockets.

    def path(self, inside: str) -> pathlib.Path:
        """Where the harness finds a path of the node while it runs: (node.path("/run/settings")).write_text("…")."""
        assert self.is_running(), f"{self} is down: see Node.disk"
        return pathlib.Path(f"/proc/{self._init_pid}/root") / inside.lstrip("/")

    @contextlib.contextmanager
    def inside_network(self) -> Iterator[None]:
        """Sockets that this thread makes within the block belong to the node's network, and stay there."""
        with sc.in_network(self._network_namespace):
            yield

    def connect(self, address: str, port: int, deadline_s: float = DEADLINE_S) -> socket.socket:
        """A TCP connection from this node, in the harness's hands."""
        with self.inside_network():
            return socket.create_connection((address, port), deadline_s)

    def administer(self, program: str, words: Sequence[str], text: str = "") -> str:
        """`ip`, `tc`, `nft` or `ss` in the node's network, as the machine's root."""
        return run_in_network(self._network_namespace, [program, *words], text)

    # What goes to and comes from node_init.py.

    def _request(self, request: object, fds: Sequence[int]) -> tuple[dict[str, int], list[int]]:
        assert self._control is not None, f"{self} is down"
        message = json.dumps(request).encode()
        socket.send_fds(self._control, [message], list(fds))
        return self._receive("an answer of its first process")

    def _receive(self, what: str) -> tuple[dict[str, int], list[int]]:
        assert self._control is not None
        wait_readable(self._control.fileno(), DEADLINE_S, f"{self}: {what}")
        message, fds, _, _ = socket.recv_fds(self._control, 65536, 1, socket.MSG_CMSG_CLOEXEC)
        if not message:
            raise OSError(f"{self}: its first process ended (see standard error)")
        answer = json.loads(message)
        if "error" in answer:
            raise OSError(f"{self}: {answer['error']}")
        return answer, fds

    def _forget(self) -> None:
        assert self._keeper is not None and self._control is not None
        if self._init_pidfd >= 0:
            try:
                signal.pidfd_send_signal(self._init_pidfd, signal.SIGKILL)
            except ProcessLookupError:
                pass
            os.close(self._init_pidfd)
        self._control.close()
        self._keeper.wait(
            DEADLINE_S
        )  # ends after the first process, which the kernel lets end last
        for process in self.processes:
            process.close()
        self.processes.clear()
        if self._network_namespace >= 0:
            os.close(self._network_namespace)
        self._keeper = self._control = None
        self._init_pidfd = self._network_namespace = -1

    def erase(self, part: str) -> None:
        """Empties `state` or `nvme`, as a new drive would be."""
        for child in (self.disk / part).iterdir():
            shutil.rmtree(child) if child.is_dir() else child.unlink()


def run_in_network(namespace: int, argv: Sequence[str], text: str) -> str:
    """What a program of the machine prints in another network; raises with its standard error."""
    done = subprocess.run(
        ["nsenter", f"--net=/proc/self/fd/{namespace}", *argv],
        input=text,
        capture_output=True,
        text=True,
        pass_fds=[namespace],
        timeout=DEADLINE_S,
    )
    if done.returncode != 0:
        raise OSError(f"{' '.join(argv)}: {done.stderr.strip()} (input: {text})")
    return done.stdout
