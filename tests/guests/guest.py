"""An emulated machine: Debian's kernel, over files of this machine.

    answer = Guest(directory, X86_64).run([sys.executable, "program.py"])  # JSON that it wrote to /run/share/answer

X86_64 is for RDMA, which it has by soft-RoCE: it has this machine's root directory, read-only, at the same paths, so that the
very programs of the build run in it. ARM64 has build/arm64-root (scripts/arm64-root). In both, /run, /dev/shm and /proc are its
own, and /run/share is `directory`. The guest has two processors, no network but what it makes, and ends with the program, or
after a deadline. What its kernel and the program say is in `directory`/console.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import re
import shlex
import stat
import subprocess
from collections.abc import Sequence
from typing import Any

_TREE = pathlib.Path(__file__).resolve().parents[2]
_MEMORY_MIB = 3072
_SHARES = ("virtio_pci", "9pnet_virtio", "9p")


@dataclasses.dataclass(frozen=True)
class Machine:
    qemu: tuple[str, ...]
    kernel: pathlib.Path  # the folder that its package is unpacked in
    root: pathlib.Path  # what the guest has as its root directory
    busybox: str
    console: str
    # In the order of their need; what they need themselves is found.
    modules: tuple[str, ...] = _SHARES


X86_64 = Machine(
    qemu=("qemu-system-x86_64", "-accel", "tcg,thread=multi", "-cpu", "max"),
    kernel=_TREE / "build/guest",
    root=pathlib.Path("/"),
    busybox="/bin/busybox",
    console="ttyS0",
    # The guest loads no module on demand. soft-RoCE asks the kernel for crc32 by name, so that is listed too.
    modules=(*_SHARES, "veth", "crc32_generic", "rdma_rxe", "ib_uverbs", "rdma_ucm"),
)
ARM64 = Machine(
    qemu=("qemu-system-aarch64", "-machine", "virt", "-accel", "tcg,thread=multi", "-cpu", "max"),
    kernel=_TREE / "build/arm64-root",
    root=_TREE / "build/arm64-root",
    busybox="bin/busybox",
    console="ttyAMA0",
)

_INIT = """#!/bin/busybox sh
export PATH=/usr/sbin:/usr/bin:/sbin:/bin
b=/bin/busybox
end() { $b sync; $b reboot -f; }
$b mount -t proc proc /proc
while read -r module; do $b insmod "/modules/$module" || { echo "guest: no $module"; end; }; done </modules/order
share=version=9p2000.L,trans=virtio,msize=512000,cache
$b mount -t 9p -o ro,$share=loose host /host || end
cd /host
$b mount -t proc proc proc
$b mount -t sysfs sysfs sys
$b mount -t devtmpfs devtmpfs dev
$b mkdir -p dev/shm dev/pts
$b mount -t tmpfs -o mode=1777,size=70% shm dev/shm
$b mount -t tmpfs -o mode=0755 run run
$b mkdir -p run/share run/tmp
$b chmod 1777 run/tmp
$b mount -t 9p -o rw,$share=none share run/share || end
$b ip link set lo up
export TMPDIR=/run/tmp HOME=/run/tmp
echo "guest: begins"
$b chroot /host /bin/sh -c "$($b cat /host/run/share/command)"
echo "guest: ended with $?"
end
"""


class Guest:
    def __init__(self, directory: pathlib.Path, machine: Machine) -> None:
        self.directory = directory
        self.machine = machine
        self.console = directory / "console"
        kernels = sorted(machine.kernel.glob("boot/vmlinuz-*"))
        assert kernels, (
            f"{machine.kernel} has no kernel: run tests/verbs/setup or scripts/arm64-root"
        )
        self.kernel = kernels[-1]
        version = self.kernel.name.removeprefix("vmlinuz-")
        self.modules = machine.kernel / "lib/modules" / version

    def run(
        self, command: Sequence[str | os.PathLike[str]], *, deadline_s: float
    ) -> dict[str, Any]:
        """The program's answer; raises when it gave none, with the end of what the guest said."""
        initramfs = self.directory / "initramfs"
        initramfs.write_bytes(self._initramfs())
        (self.directory / "command").write_text(shlex.join(map(os.fspath, command)))
        # Whoever wrote it last: the 9p server follows no links of the guest's, and writes as root.
        machine = [
            *(*self.machine.qemu, "-nodefaults", "-no-user-config", "-no-reboot"),
            *("-smp", "2", "-m", str(_MEMORY_MIB)),
            *("-display", "none", "-nic", "none", "-serial", f"file:{self.console}"),
            *("-kernel", str(self.kernel), "-initrd", str(initramfs)),
            # (A kernel that panics ends the guest. Its check of the timer fails where it gets too little of a processor.)
            *(
                "-append",
                f"console={self.machine.console} panic=-1 quiet loglevel=4 random.trust_cpu=on no_timer_check",
            ),
            *_shared("host", str(self.machine.root), "readonly=on"),
            *_shared("share", str(self.directory), "writeout=immediate"),
        ]
        with open(self.directory / "qemu", "wb") as said:
            qemu = subprocess.Popen(machine, stdin=subprocess.DEVNULL, stdout=said, stderr=said)
            try:
                ended = f"qemu ended with {qemu.wait(deadline_s)}"
            except subprocess.TimeoutExpired:
                ended = f"the guest had not ended after {deadline_s:.0f} s"
            finally:
                qemu.kill()
                qemu.wait()
        answer = self.directory / "answer"
        if not answer.exists():
            raise RuntimeError(f"{ended}, without an answer\n{self.said()}")
        return json.loads(answer.read_text())

    def said(self) -> str:
        """All that the guest wrote: its console, and the logs of its programs."""
        parts = []
        for path in [self.console, self.directory / "qemu", *sorted(self.directory.glob("*.log"))]:
            if path.exists() and path.stat().st_size > 0:
                parts.append(f"--- {path.name}\n{path.read_text(errors='replace')}")
        return "\n".join(parts)

    def _initramfs(self) -> bytes:
        files = {path.stem.replace("-", "_"): path for path in sorted(self.modules.rglob("*.ko"))}
        order: list[str] = []

        def need(name: str) -> None:
            """A module is preceded by what it says it depends on; what is not a module is in the kernel."""
            if name in order or name not in files:
                return
            found = re.search(rb"(?:^|\0)depends=([^\0]*)\0", files[name].read_bytes())
            for other in found[1].decode().split(",") if found else ():
                need(other.replace("-", "_"))
            order.append(name)

        built_in = (self.modules / "modules.builtin").read_text().replace("-", "_")
        for name in self.machine.modules:
            assert name in files or f"/{name}.ko" in built_in, f"{self.modules} has no {name}"
            need(name)
        busybox = self.machine.root / self.machine.busybox
        archive = _Archive()
        for directory in ("bin", "proc", "host", "modules", "dev"):
            archive.add(directory, stat.S_IFDIR | 0o755)
        # What the first process's messages go to: the kernel opens it before anything is mounted.
        archive.add("dev/console", stat.S_IFCHR | 0o600, device=(5, 1))
        archive.add("bin/busybox", stat.S_IFREG | 0o755, busybox.read_bytes())
        archive.add("init", stat.S_IFREG | 0o755, _INIT.encode())
        archive.add("modules/order", stat.S_IFREG | 0o644, "\n".join([*order, ""]).encode())
        for name in order:
            archive.add(f"modules/{name}", stat.S_IFREG | 0o644, files[name].read_bytes())
        return archive.bytes()


def _shared(tag: str, path: str, option: str) -> list[str]:
    # multidevs=remap: the root's files are of several devices, whose inode numbers are the same.
    backend = f"local,id={tag},path={path},security_model=none,multidevs=remap,{option}"
    return ["-fsdev", backend, "-device", f"virtio-9p-pci,fsdev={tag},mount_tag={tag}"]


class _Archive:
    """cpio's "newc", as the kernel unpacks it."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self._count = 0

    def add(
        self, name: str, mode: int, content: bytes = b"", device: tuple[int, int] = (0, 0)
    ) -> None:
        self._count += 1
        fields = [self._count, mode, 0, 0, 1, 0, len(content), 0, 0, *device, len(name) + 1, 0]
        header = b"070701" + b"".join(b"%08X" % field for field in fields)
        self._parts.append(_padded(header + name.encode() + b"\0"))
        self._parts.append(_padded(content))

    def bytes(self) -> bytes:
        self.add("TRAILER!!!", 0)
        return b"".join(self._parts)


def _padded(content: bytes) -> bytes:
    return content + b"\0" * (-len(content) % 4)
