"""A container of a rendered pod, as a container runtime would start it: namespaces, a root that nobody can write, the volumes
at their paths, the user and the capabilities that the manifest says. What stands in for the node is a few directories.

    node = Node(tmp_path)                              # its directories, and a network of its own
    daemon = node.start(command, mounts, confinement(container), own_processes=False)
    daemon.wait_until_ready()

As root; `possible()` says what the machine forbids.
"""

from __future__ import annotations

import dataclasses
import os
import pathlib
import re
import select
import shlex
import signal
import socket
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

DEADLINE_S = int(os.environ.get("HOLDFAST_TEST_DEADLINE_S", "120"))
BIN = pathlib.Path(os.environ.get("HOLDFAST_TEST_BIN", "build/test/bin")).resolve()
TREE = pathlib.Path(__file__).resolve().parent.parent.parent
# What a runtime gives a container beside its image: no more of the host's /etc than the dynamic linker and names need.
_ETC = ("ld.so.cache", "passwd", "group", "nsswitch.conf", "ssl", "alternatives")
_NOTIFY = "/notify"
_MAKE_NETWORK = "ip link set lo up && echo ready && exec cat"


@dataclasses.dataclass(frozen=True)
class Mount:
    source: pathlib.Path
    path: str
    writable: bool = False


@dataclasses.dataclass(frozen=True)
class Confinement:
    """What a security context comes to."""

    uid: int
    gid: int
    capabilities: Sequence[str] = ()
    writable_root: bool = False


def possible() -> str | None:
    """None, or what forbids containers here."""
    if os.geteuid() != 0:
        return "making namespaces needs root"
    tried = subprocess.run(
        ["unshare", "--mount", "--pid", "--ipc", "--net", "--fork", "sh", "-c"]
        + ["mount -t tmpfs tmpfs /mnt && ip link set lo up"],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    return None if tried.returncode == 0 else f"no namespaces: {tried.stderr.strip()}"


def confinement(container: Mapping[str, Any]) -> Confinement:
    """Of a container in a manifest; a manifest that does not confine it is an error."""
    context = container["securityContext"]
    capabilities = context["capabilities"]
    assert capabilities["drop"] == ["ALL"], capabilities
    assert context["allowPrivilegeEscalation"] is False
    return Confinement(
        uid=context["runAsUser"],
        gid=context["runAsGroup"],
        # As the kernel does for whoever is not root: what is added is in the bounding set alone.
        capabilities=capabilities.get("add", []),
        writable_root=not context["readOnlyRootFilesystem"],
    )


def _enter(root: str, mounts: Sequence[Mount], own_processes: bool) -> list[str]:
    """Commands of a shell that make the container's file system at `root`."""
    quote = shlex.quote
    lines = [
        f"mount -t tmpfs -o mode=755 tmpfs {root}",
        f"mkdir -p {root}/usr {root}/etc {root}/proc {root}/dev/shm {root}/tmp",
        f"mount --bind -o ro /usr {root}/usr",
        f"cp -P /bin /sbin /lib /lib64 {root}/",
        f"cp -a {' '.join('/etc/' + name for name in _ETC)} {root}/etc/",
        f"echo '127.0.0.1 localhost' > {root}/etc/hosts",
    ]
    lines += [f"touch {root}/dev/{name} && mount --bind /dev/{name} {root}/dev/{name}"
              for name in ("null", "zero", "urandom")]  # fmt: skip
    lines.append(
        f"mount -t proc proc {root}/proc" if own_processes else f"mount --rbind /proc {root}/proc"
    )
    lines.append(f"mount -t tmpfs -o mode=1777,size=64m tmpfs {root}/dev/shm")
    for mount in mounts:
        target = quote(root + mount.path)
        source = quote(str(mount.source))
        if mount.source.is_dir():
            lines.append(f"mkdir -p {target}")
        else:
            lines.append(f"mkdir -p $(dirname {target}) && touch {target}")
        lines.append(f"mount --bind {source} {target}")
        if not mount.writable:
            lines.append(f"mount -o remount,bind,ro {target}")
    return lines


class Container:
    """A process in a container; ends with `stop`, and its pod's processes with it."""

    def __init__(
        self, process: subprocess.Popen[str], ready: socket.socket, own_processes: bool
    ) -> None:
        self.process = process
        self._ready: socket.socket | None = ready
        self._own_processes = own_processes
        self.log = ""  # of what was read so far
        self._lines = bytearray()

    def wait_until_ready(self) -> None:
        assert self._ready is not None
        end = os.pidfd_open(self.process.pid)
        readable, _, _ = select.select([self._ready, end], [], [], DEADLINE_S)
        os.close(end)
        assert self._ready in readable, f"not ready: {self.stop()}"

    def send(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def ask(self, line: str) -> str:
        """For programs that answer each line with one."""
        self.send(line)
        return self._read_line().rstrip("\n")

    def _read_line(self) -> str:
        """ "" at its end, or if there is none in time."""
        assert self.process.stdout is not None
        lines = self._lines
        while b"\n" not in lines:
            readable, _, _ = select.select([self.process.stdout], [], [], DEADLINE_S)
            more = os.read(self.process.stdout.fileno(), 65536) if readable else b""
            if not more:
                return ""
            lines += more
        line, _, rest = bytes(lines).partition(b"\n")
        lines[:] = rest
        return line.decode(errors="replace") + "\n"

    def wait_for(self, pattern: str) -> str:
        """The first line of what it prints from here on in which `pattern` is found."""
        while True:
            line = self._read_line()
            self.log += line
            assert line, f"nothing like '{pattern}' in: {self.log}"
            if re.search(pattern, line):
                return line

    def wait(self) -> tuple[int, str]:
        """Its exit code, and what it printed."""
        printed, _ = self.process.communicate(timeout=DEADLINE_S)
        return self.process.returncode, bytes(self._lines).decode(errors="replace") + printed

    def kill(self) -> None:
        """At once, with all that it started."""
        if not self._own_processes:
            return self.process.kill()
        # The first process of its namespace, below `unshare`, which then ends, too.
        pid = self.process.pid
        for child in pathlib.Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
            os.kill(int(child), signal.SIGKILL)

    def _end(self) -> None:
        if self.process.poll() is None:
            self.kill() if self._own_processes else self.process.terminate()

    def stop(self) -> str:
        """What it printed. The first process of a namespace minds no signal that it does not know, so there it is killed."""
        self._end()
        try:
            printed, _ = self.process.communicate(timeout=DEADLINE_S)
        except subprocess.TimeoutExpired:
            self.kill()
            printed, _ = self.process.communicate(timeout=DEADLINE_S)
        self.log += bytes(self._lines).decode(errors="replace") + (printed or "")
        self._lines.clear()
        if self._ready is not None:
            self._ready.close()
            self._ready = None
        return self.log


class Node:
    """A node's network, and what was started there. Close it."""

    def __init__(self, directory: pathlib.Path) -> None:
        self.directory = directory
        self._containers: list[Container] = []
        self._count = 0
        self._network = subprocess.Popen(
            ["unshare", "--net", "sh", "-c", _MAKE_NETWORK],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._network.stdout is not None
        assert self._network.stdout.readline() == "ready\n"

    def close(self) -> None:
        for container in reversed(self._containers):
            container.stop()
        assert self._network.stdin is not None
        self._network.stdin.close()
        self._network.wait(DEADLINE_S)

    def network(self, command: Sequence[str]) -> list[str]:
        """`command`, run in the node's network."""
        return ["nsenter", f"--net=/proc/{self._network.pid}/ns/net", *command]

    def start(
        self,
        command: Sequence[str],
        mounts: Sequence[Mount],
        confined: Confinement,
        *,
        env: Mapping[str, str] | None = None,
        hosts: Sequence[str] = (),
        own_processes: bool = True,
    ) -> Container:
        self._count += 1
        place = self.directory / f"container-{self._count}"
        place.mkdir()
        root = tempfile.mkdtemp(dir=place)
        ready = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        ready.bind(str(place / "notify"))
        os.chmod(place / "notify", 0o666)
        lines = _enter(root, [*mounts, Mount(place / "notify", _NOTIFY)], own_processes)
        # Of both families: no name server answers for one that is missing here.
        for address in ("127.0.0.1", "::1") if hosts else ():
            lines.append(f"echo '{address} {' '.join(hosts)}' >> {root}/etc/hosts")
        if not confined.writable_root:
            lines.append(f"mount -o remount,bind,ro {root}")
        bounding = ",".join(["-all", *(f"+{name.lower()}" for name in confined.capabilities)])
        words = ["setpriv", f"--reuid={confined.uid}", f"--regid={confined.gid}", "--clear-groups"]
        words += ["--no-new-privs", "--inh-caps=-all", "--ambient-caps=-all"]
        words += [f"--bounding-set={bounding}", *command]
        variables = {
            "PATH": "/usr/sbin:/usr/bin:/sbin:/bin",
            "NOTIFY_SOCKET": _NOTIFY,
            **(env or {}),
        }
        setting = " ".join(f"{name}={shlex.quote(value)}" for name, value in variables.items())
        lines.append(f"exec env -i {setting} /usr/sbin/chroot {root} {shlex.join(words)}")
        namespaces = ["--mount", "--ipc"]
        if own_processes:
            # The shell is the container's first process, and the program, by exec.
            namespaces += ["--pid", "--fork"]
        process = subprocess.Popen(
            self.network(["unshare", *namespaces, "sh", "-ec", "\n".join(lines)]),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        container = Container(process, ready, own_processes)
        self._containers.append(container)
        return container
