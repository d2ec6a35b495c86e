"""A machine of its own for a test: namespaces with a root directory whose changes are lost with it, and a real systemd
as its first process. Units, packages and batch systems are installed and run there as on a host.

    with Machine(tmp_path, {BUILD: "/opt/build"}) as machine:
        machine.run("systemctl", "start", "ckptd")

It shares the kernel, the installed programs and the directories of `binds` (there: its own names
for them); network, processes, /dev/shm, /run and everything that is written are its own. As root.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import select
import shutil
import signal
import socket
import struct
import subprocess
import tempfile
from collections.abc import Mapping
from types import TracebackType

DEADLINE_S = 60
_HERE = pathlib.Path(__file__).resolve().parent
_CGROUPS = pathlib.Path("/sys/fs/cgroup")
_NAMESPACES = ("--mount", "--pid", "--uts", "--ipc", "--net", "--cgroup")
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid: struct ucred


def _own_cgroups() -> list[pathlib.Path]:
    """This process's control groups: of version 2 one, of version 1 one for each controller."""
    groups = []
    for line in pathlib.Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        hierarchy = controllers.removeprefix("name=")
        if not controllers and (_CGROUPS / "unified").exists():
            hierarchy = "unified"
        group = _CGROUPS / hierarchy / path.lstrip("/")
        # (A new group of cpuset takes no process before it has been given cores.)
        if controllers != "cpuset" and (group / "cgroup.procs").exists():
            groups.append(group)
    return groups


class Machine:
    """Booted when the `with` begins, gone with all its processes when it ends."""

    def __init__(
        self,
        scratch: pathlib.Path,
        binds: Mapping[pathlib.Path, str] = {},
        name: str = "testnode",
    ) -> None:
        self.name = name
        self._log = scratch / "machine.log"
        # (Not below the test's directory, which the machine sees, too.)
        self._root = pathlib.Path(tempfile.mkdtemp(prefix="holdfast-machine-"))
        self._binds = [f"{scratch}:{scratch}", *(f"{out}:{there}" for out, there in binds.items())]
        self._notify = scratch / "booted.sock"
        self._cgroups = [group / self._root.name for group in _own_cgroups()]
        self._process: subprocess.Popen[bytes] | None = None
        self._first = 0  # systemd's pid, as it is seen from here

    def __enter__(self) -> Machine:
        try:
            self._boot()
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is not None:
            print(self.log())
        self._end()

    def _boot(self) -> None:
        for group in self._cgroups:
            group.mkdir()
        with (
            socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as booted,
            open(self._log, "wb") as log,
        ):
            booted.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
            booted.bind(str(self._notify))
            # The shell enters the groups before unshare makes them the roots of all that is inside.
            enter = "".join(f"echo $$ >{group}/cgroup.procs; " for group in self._cgroups)
            self._process = subprocess.Popen(
                [
                    *("sh", "-euc", enter + 'exec "$@"', "sh"),
                    # Nor does it outlive a test that is killed.
                    *("setpriv", "--pdeathsig=KILL"),
                    *("unshare", *_NAMESPACES, "--fork", "--kill-child=KILL"),
                    *("sh", _HERE / "machine_init.sh", self._root, self.name, *self._binds),
                ],
                env={
                    "PATH": "/usr/sbin:/usr/bin:/sbin:/bin",
                    "NOTIFY_SOCKET": str(self._notify),
                },
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
            self._first = self._await_ready(booted)

    def _await_ready(self, booted: socket.socket) -> int:
        assert self._process is not None
        end = os.pidfd_open(self._process.pid)
        try:
            while True:
                readable, _, _ = select.select([booted, end], [], [], DEADLINE_S)
                assert booted in readable, f"the machine did not boot: {self.log()}"
                text, ancillary, _, _ = booted.recvmsg(4096, socket.CMSG_SPACE(_CREDENTIALS.size))
                if b"READY=1" in text.splitlines():
                    return _CREDENTIALS.unpack(ancillary[0][2])[0]
        finally:
            os.close(end)

    def _end(self) -> None:
        if self._process is not None:
            # Its first process takes all others of its pid namespace along.
            self._process.send_signal(signal.SIGKILL)
            self._process.wait(DEADLINE_S)
            if self._first:
                with contextlib.suppress(ProcessLookupError):
                    end = os.pidfd_open(self._first)
                    select.select([end], [], [], DEADLINE_S)
                    os.close(end)
        for group in self._cgroups:
            for path, _, _ in os.walk(group, topdown=False):
                with contextlib.suppress(FileNotFoundError):
                    os.rmdir(path)
        shutil.rmtree(self._root, ignore_errors=True)

    def start(self, *command: str | os.PathLike[str], **options: object) -> subprocess.Popen[str]:
        """A process inside, with pipes."""
        assert self._first
        return subprocess.Popen(  # type: ignore[call-overload]
            ["nsenter", f"--target={self._first}", "--all", "--", *map(str, command)],
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={"PATH": "/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"},
            **options,
        )

    def attempt(
        self, *command: str | os.PathLike[str], deadline_s: int = DEADLINE_S
    ) -> subprocess.CompletedProcess[str]:
        with self.start(*command, stderr=subprocess.PIPE) as process:
            try:
                out, err = process.communicate(timeout=deadline_s)
            except subprocess.TimeoutExpired:
                process.kill()
                raise
        return subprocess.CompletedProcess(command, process.returncode, out, err)

    def run(self, *command: str | os.PathLike[str], deadline_s: int = DEADLINE_S) -> str:
        """What a command prints; fails when it fails."""
        done = self.attempt(*command, deadline_s=deadline_s)
        assert done.returncode == 0, f"{command}: {done.returncode}\n{done.stdout}{done.stderr}"
        return done.stdout

    def write(self, path: str, text: str, mode: int = 0o644) -> None:
        """A file inside, with the directories that it lies in."""
        install = ("sh", "-euc", 'install -D -m "$1" /dev/stdin "$2"', "sh", f"{mode:o}", path)
        with self.start(*install) as process:
            process.communicate(text, timeout=DEADLINE_S)
        assert process.returncode == 0, f"write {path}: {process.returncode}"

    def read(self, path: str) -> str:
        return self.run("cat", path)

    def log(self) -> str:
        return self._log.read_text(errors="replace")[-8000:]
