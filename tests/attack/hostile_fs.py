"""A file system that fails as a test says: a FUSE server that keeps its files in memory.

    with HostileFs(directory) as fs:                    # mounted over `directory`; as root
        fs.rules.append(fails("fsync", errno.EIO, times=1))
        fs.rules.append(hangs("write", "*.safetensors"))
        …
        fs.await_hanging(); fs.release()                # now all calls that wait are answered
        freeze([fs])                                    # power is lost at this moment …
        fs.lose_power(random.Random(7))                 # … and what was not synced is gone, or half there

It speaks the kernel's protocol (linux/fuse.h) itself, on a thread of this process: no library is needed. The mount is in a
mount namespace of the thread that calls `own_mounts`, and of the processes that it starts; a process that is killed while
its calls hang ends, unless the file system is not `killable`.
"""

from __future__ import annotations

import ctypes
import errno
import fnmatch
import os
import pathlib
import random
import stat
import struct
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

_ROOT = 1
_PIECE = 1 << 20  # the most that one call reads or writes
_SECTOR = 4096
_MAX_PAGES = 1 << 22  # FUSE_MAX_PAGES
_BIG_WRITES = 1 << 5
_DIRECT_IO = 1  # FOPEN_DIRECT_IO
_KEEP_SIZE = 1  # FALLOC_FL_KEEP_SIZE
_NOREPLACE = 1  # RENAME_NOREPLACE
_IN = struct.Struct("<IIQQIIII")
_OUT = struct.Struct("<IiQ")
_ATTR = struct.Struct("<QQQQQQIIIIIIIIII")
_NAMES = {
    1: "lookup",
    3: "getattr",
    4: "setattr",
    9: "mkdir",
    10: "unlink",
    11: "rmdir",
    12: "rename",
    13: "link",
    14: "open",
    15: "read",
    16: "write",
    17: "statfs",
    18: "release",
    20: "fsync",
    25: "flush",
    26: "init",
    27: "opendir",
    28: "readdir",
    29: "releasedir",
    30: "fsyncdir",
    35: "create",
    43: "fallocate",
    45: "rename2",
}
_INTERRUPT, _FORGET, _BATCH_FORGET = 36, 2, 42
# A process that ends closes its files, and nothing interrupts that.
_NEVER_HANG = {"flush", "release", "releasedir", "init"}

_libc = ctypes.CDLL(None, use_errno=True)


def _check(result: int, what: str) -> None:
    if result != 0:
        raise OSError(ctypes.get_errno(), what)


def why_impossible() -> str:
    """Why nothing can be mounted here; "" if it can."""
    if os.geteuid() != 0:
        return "needs root to mount"
    if not os.path.exists("/dev/fuse"):
        return "needs /dev/fuse"
    return ""


def own_mounts() -> None:
    """From now on nobody but this thread, and what it starts, sees what is mounted here."""
    _check(_libc.unshare(0x00020000), "unshare(CLONE_NEWNS)")
    _check(_libc.mount(b"none", b"/", None, 0x4000 | 0x40000, None), "mount(MS_REC | MS_PRIVATE)")


# What a call is answered instead.


@dataclass(frozen=True)
class Fails:
    error: int


@dataclass(frozen=True)
class Hangs:
    pass


@dataclass(frozen=True)
class Shortened:
    bytes: int


@dataclass(frozen=True)
class Flipped:
    """One bit of what is read, counted from its first."""

    bit: int


Effect = Fails | Hangs | Shortened | Flipped


@dataclass(frozen=True)
class Call:
    name: str  # as in _NAMES; "rename" for both kinds
    path: str  # below the mount
    offset: int
    size: int


Rule = Callable[[Call], Effect | None]


def _times(name: str, path: str, effect: Effect, times: int | None) -> Rule:
    left = [times]

    def rule(call: Call) -> Effect | None:
        if name not in ("*", call.name) or not fnmatch.fnmatch(call.path, path) or left[0] == 0:
            return None
        if left[0] is not None:
            left[0] -= 1
        return effect

    return rule


def fails(name: str, error: int, path: str = "*", times: int | None = None) -> Rule:
    """So many calls, or all: `name` may be "*"."""
    return _times(name, path, Fails(error), times)


def hangs(name: str = "*", path: str = "*", times: int | None = None) -> Rule:
    return _times(name, path, Hangs(), times)


def corrupts(path: str) -> Rule:
    """Every read of these files, always in the same place."""

    def rule(call: Call) -> Effect | None:
        wanted = call.name == "read" and fnmatch.fnmatch(call.path, path)
        return Flipped(call.size * 4) if wanted else None

    return rule


def flips(draw: random.Random, share: float, path: str = "*", good_after: int = 4) -> Rule:
    """This share of the reads, never one of the same file that soon after another: transient errors."""
    rest: dict[str, int] = {}

    def rule(call: Call) -> Effect | None:
        if call.name != "read" or not fnmatch.fnmatch(call.path, path):
            return None
        if rest.get(call.path, 0) > 0:
            rest[call.path] -= 1
        elif draw.random() < share:
            rest[call.path] = good_after
            return Flipped(draw.randrange(1 << 30))
        return None

    return rule


def shortens(draw: random.Random, share: float) -> Rule:
    """This share of reads and writes, by whole sectors."""

    def rule(call: Call) -> Effect | None:
        sectors = (call.size - 1) // _SECTOR
        if call.name not in ("read", "write") or sectors < 1 or draw.random() >= share:
            return None
        return Shortened(draw.randint(1, sectors) * _SECTOR)

    return rule


class _Error(Exception):
    def __init__(self, number: int) -> None:
        self.number = number


@dataclass
class _Inode:
    number: int
    mode: int
    path: str
    uid: int = 0
    gid: int = 0
    links: int = 1
    changed: float = 0
    data: bytearray = field(default_factory=bytearray)
    allocated: int = 0
    entries: dict[bytes, int] = field(default_factory=dict)
    # What a loss of power leaves for sure; of directories also what was changed since, in order.
    synced: bytes = b""
    synced_owner: tuple[int, int, int] = (0o600, 0, 0)
    synced_entries: dict[bytes, int] = field(default_factory=dict)
    changes: list[dict[bytes, int | None]] = field(default_factory=list)

    def is_directory(self) -> bool:
        return stat.S_ISDIR(self.mode)

    def room(self) -> int:
        return max(len(self.data), self.allocated)

    def change(self, names: dict[bytes, int | None]) -> None:
        """One change of a directory, which a loss of power leaves whole or not at all."""
        _apply(self.entries, names)
        self.changes.append(names)
        self.changed = time.time()


def _apply(entries: dict[bytes, int], names: dict[bytes, int | None]) -> None:
    for name, number in names.items():
        if number is None:
            entries.pop(name, None)
        else:
            entries[name] = number


class HostileFs:
    """`capacity`: how many bytes its files may have; `full`: the error beyond.

    `cached`: the kernel's page cache keeps what was read, so that a second look at it finds the same. Else short reads and
    writes come through to the process.
    `killable`: a process that is killed while its calls hang ends. Else it ends when they are answered.
    """

    def __init__(
        self,
        directory: pathlib.Path,
        *,
        capacity: int = 1 << 30,
        cached: bool = False,
        killable: bool = True,
    ) -> None:
        self.directory = directory
        self.capacity = capacity
        self.full = errno.ENOSPC
        self.rules: list[Rule] = []
        self.lies_about_syncs = False
        self.counts: dict[str, int] = {}  # of calls that got an effect, by its name
        self._cached = cached
        self._killable = killable
        self._lock = threading.RLock()
        self._hung = threading.Condition(self._lock)
        self._waiting: dict[int, bytes] = {}
        self._frozen = False
        self._inodes = {_ROOT: _Inode(_ROOT, stat.S_IFDIR | 0o755, "")}
        self._last = _ROOT
        self._listings: dict[int, list[tuple[bytes, int]]] = {}
        self._device = -1
        self._thread: threading.Thread | None = None

    def __enter__(self) -> HostileFs:
        self.mount()
        return self

    def __exit__(self, *_: object) -> None:
        self.unmount()

    def mount(self) -> None:
        self._device = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
        options = (
            f"fd={self._device},rootmode=40000,user_id=0,group_id=0,allow_other,default_permissions"
        )
        _check(
            _libc.mount(b"hostile", os.fsencode(self.directory), b"fuse", 0, options.encode()),
            f"mount on {self.directory}",
        )
        self._thread = threading.Thread(target=self._serve, args=(self._device,), daemon=True)
        self._thread.start()

    def unmount(self) -> None:
        """Ends the connection: every call that waits fails."""
        _libc.umount2(os.fsencode(self.directory), 1)  # MNT_FORCE
        _libc.umount2(os.fsencode(self.directory), 2)  # MNT_DETACH
        assert self._thread is not None
        self._thread.join()
        os.close(self._device)
        with self._lock:
            self._waiting.clear()
            self._listings.clear()

    def await_hanging(self, deadline_s: float = 60) -> None:
        with self._hung:
            assert self._hung.wait_for(lambda: self._waiting, deadline_s), "no call hangs"

    def is_hanging(self) -> bool:
        with self._lock:
            return bool(self._waiting)

    def release(self) -> None:
        """All rules are forgotten, and the calls that hang are answered."""
        with self._lock:
            self.rules.clear()
            waiting, self._waiting = self._waiting, {}
            for request in waiting.values():
                self._perform(request)

    def lock(self) -> threading.RLock:
        return self._lock

    def freeze(self) -> None:
        """From now on nothing is answered, nor done."""
        with self._lock:
            self._frozen = True

    def lose_power(self, draw: random.Random | None) -> None:
        """What was not synced is gone, or, with `draw`, partly there. Everybody who had files open must be gone; mounts it again."""
        self.unmount()
        old = self._inodes
        for inode in old.values():
            if inode.is_directory():
                kept = draw.randint(0, len(inode.changes)) if draw else 0
                for names in inode.changes[:kept]:
                    _apply(inode.synced_entries, names)
            else:
                inode.synced = _after_power_loss(inode, draw)
        self._inodes = {}
        self._keep(old, _ROOT, "")
        self._frozen = False
        self.mount()

    def _keep(self, old: dict[int, _Inode], number: int, path: str) -> None:
        inode = old[number]
        if number in self._inodes:
            inode.links += 1
            return
        self._inodes[number] = inode
        inode.path = path
        inode.links = 1
        if not inode.is_directory():
            inode.data = bytearray(inode.synced)
            inode.allocated = 0
            mode, inode.uid, inode.gid = inode.synced_owner
            inode.mode = stat.S_IFREG | mode
            return
        inode.entries = dict(inode.synced_entries)
        inode.changes = []
        for name, child in inode.entries.items():
            self._keep(old, child, f"{path}/{os.fsdecode(name)}".lstrip("/"))

    # Calls.

    def _serve(self, device: int) -> None:
        while True:
            try:
                request = os.read(device, _PIECE + (64 << 10))
            except OSError as error:
                if error.errno in (errno.EINTR, errno.ENOENT, errno.EAGAIN):
                    continue
                return  # unmounted
            if not request:
                return
            with self._lock:
                self._take(request)

    def _take(self, request: bytes) -> None:
        code, unique = _IN.unpack_from(request)[1:3]
        if code in (_FORGET, _BATCH_FORGET):
            return
        if code == _INTERRUPT:
            (other,) = struct.unpack_from("<Q", request, _IN.size)
            # (The kernel lets a killed process go only when its call is answered.)
            if self._killable and self._waiting.pop(other, None) is not None:
                self._reply(other, errno.EINTR)
            return
        name = _NAMES.get(code, "")
        if self._frozen and name not in _NEVER_HANG:
            self._hang(request, unique)
            return
        self._perform(request)

    def _hang(self, request: bytes, unique: int) -> None:
        self._waiting[unique] = request
        self._hung.notify_all()

    def _perform(self, request: bytes) -> None:
        _, code, unique, number, uid, gid, _, _ = _IN.unpack_from(request)
        body = request[_IN.size :]
        name = _NAMES.get(code, "")
        try:
            if not name:
                raise _Error(errno.ENOSYS)
            effect = self._effect(name, number, body)
            if isinstance(effect, Hangs):
                self._hang(request, unique)
                return
            if isinstance(effect, Fails):
                raise _Error(effect.error)
            if name in ("create", "mkdir"):
                answer = self._make(name, number, body, uid, gid)
            elif name in ("read", "write"):
                answer = getattr(self, "_" + name)(number, body, effect)
            else:
                answer = getattr(self, "_" + name)(number, body)
        except _Error as error:
            self._reply(unique, error.number)
        except KeyError:  # an inode or a name that a loss of power took
            self._reply(unique, errno.ENOENT)
        else:
            self._reply(unique, 0, answer)

    def _effect(self, name: str, number: int, body: bytes) -> Effect | None:
        if not self.rules or name in _NEVER_HANG:
            return None
        offset, size = 0, 0
        if name in ("read", "write"):
            _, offset, size = struct.unpack_from("<QQI", body)
        path = self._inodes[number].path
        names_at = {"lookup": 0, "unlink": 0, "rmdir": 0, "link": 8, "mkdir": 8, "create": 16}
        if name in names_at:
            path = f"{path}/{os.fsdecode(body[names_at[name] :].split(bytes(1))[0])}".lstrip("/")
        elif name in ("rename", "rename2"):
            path = self._inodes[self._renamed(name, number, body)[0]].path
            name = "rename"
        call = Call(name, path, offset, size)
        for rule in self.rules:
            if (effect := rule(call)) is not None:
                kind = type(effect).__name__
                self.counts[kind] = self.counts.get(kind, 0) + 1
                return effect
        return None

    def _reply(self, unique: int, error: int, data: bytes = b"") -> None:
        try:
            os.write(self._device, _OUT.pack(_OUT.size + len(data), -error, unique) + data)
        except OSError as failed:
            if failed.errno not in (errno.ENOENT, errno.ENODEV, errno.EPERM):
                raise  # (else it was interrupted, or the connection has ended)

    # Answers.

    def _attributes(self, inode: _Inode) -> bytes:
        size = 0 if inode.is_directory() else len(inode.data)
        when = int(inode.changed)
        blocks = (inode.room() + 511) // 512
        return _ATTR.pack(
            inode.number,
            size,
            blocks,
            *(when, when, when, 0, 0, 0),
            *(inode.mode, inode.links, inode.uid, inode.gid, 0, _SECTOR, 0),
        )

    def _entry(self, number: int) -> bytes:
        return struct.pack("<QQQQII", number, 0, 0, 0, 0, 0) + self._attributes(
            self._inodes[number]
        )

    def _init(self, number: int, body: bytes) -> bytes:
        flags = _MAX_PAGES | _BIG_WRITES
        return struct.pack(
            "<IIIIHHIIHHI28x", 7, 31, 0, flags, 64, 48, _PIECE, 1, _PIECE // 4096, 0, 0
        )

    def _lookup(self, number: int, body: bytes) -> bytes:
        return self._entry(self._inodes[number].entries[_text(body)])

    def _getattr(self, number: int, body: bytes) -> bytes:
        return struct.pack("<QII", 0, 0, 0) + self._attributes(self._inodes[number])

    def _setattr(self, number: int, body: bytes) -> bytes:
        valid, _, _, size = struct.unpack_from("<IIQQ", body)
        mode, _, uid, gid = struct.unpack_from("<IIII", body, 68)
        inode = self._inodes[number]
        if valid & 8:
            self._resize(inode, size)
            inode.allocated = min(inode.allocated, size)
        if valid & 1:
            inode.mode = stat.S_IFMT(inode.mode) | stat.S_IMODE(mode)
        inode.uid = uid if valid & 2 else inode.uid
        inode.gid = gid if valid & 4 else inode.gid
        inode.changed = time.time()
        return self._getattr(number, b"")

    def _make(self, name: str, number: int, body: bytes, uid: int, gid: int) -> bytes:
        is_file = name == "create"
        mode = struct.unpack_from("<I", body, 4 if is_file else 0)[0]
        name_ = _text(body[16 if is_file else 8 :])
        parent = self._inodes[number]
        if name_ in parent.entries:
            if not is_file:
                raise _Error(errno.EEXIST)
            made = parent.entries[name_]
        else:
            self._take_room(0)
            self._last += 1
            made = self._last
            kind = stat.S_IFREG if is_file else stat.S_IFDIR
            path = f"{parent.path}/{os.fsdecode(name_)}".lstrip("/")
            self._inodes[made] = _Inode(made, kind | stat.S_IMODE(mode), path, uid, gid)
            parent.change({name_: made})
        return self._entry(made) + (self._open(made, b"") if is_file else b"")

    def _unlink(self, number: int, body: bytes) -> bytes:
        parent = self._inodes[number]
        name = _text(body)
        self._inodes[parent.entries[name]].links -= 1
        parent.change({name: None})
        return b""

    def _rmdir(self, number: int, body: bytes) -> bytes:
        parent = self._inodes[number]
        name = _text(body)
        if self._inodes[parent.entries[name]].entries:
            raise _Error(errno.ENOTEMPTY)
        parent.change({name: None})
        return b""

    def _renamed(self, name: str, number: int, body: bytes) -> tuple[int, int, bytes, bytes, int]:
        """What, into which directory, its name, the new name, flags."""
        to, flags = struct.unpack_from("<QI", body) if name == "rename2" else (0, 0)
        if name == "rename":
            (to,) = struct.unpack_from("<Q", body)
        names = body[16 if name == "rename2" else 8 :].split(bytes(1))
        return self._inodes[number].entries[names[0]], to, names[0], names[1], flags

    def _rename(self, number: int, body: bytes, kind: str = "rename") -> bytes:
        what, to, old, new, flags = self._renamed(kind, number, body)
        parent, target = self._inodes[number], self._inodes[to]
        if flags & ~_NOREPLACE:
            raise _Error(errno.EINVAL)
        replaced = target.entries.get(new)
        if replaced is not None:
            if flags & _NOREPLACE:
                raise _Error(errno.EEXIST)
            if self._inodes[replaced].entries:
                raise _Error(errno.ENOTEMPTY)
            self._inodes[replaced].links -= 1
        if parent is target:
            parent.change({old: None, new: what})
        else:
            target.change({new: what})
            parent.change({old: None})
        self._inodes[what].path = f"{target.path}/{os.fsdecode(new)}".lstrip("/")
        return b""

    def _rename2(self, number: int, body: bytes) -> bytes:
        return self._rename(number, body, "rename2")

    def _link(self, number: int, body: bytes) -> bytes:
        (what,) = struct.unpack_from("<Q", body)
        name = _text(body[8:])
        parent = self._inodes[number]
        if name in parent.entries:
            raise _Error(errno.EEXIST)
        parent.change({name: what})
        self._inodes[what].links += 1
        self._inodes[what].path = f"{parent.path}/{os.fsdecode(name)}".lstrip("/")
        return self._entry(what)

    def _open(self, number: int, body: bytes) -> bytes:
        return struct.pack("<QII", number, 0 if self._cached else _DIRECT_IO, 0)

    def _read(self, number: int, body: bytes, effect: Effect | None) -> bytes:
        _, offset, size = struct.unpack_from("<QQI", body)
        if isinstance(effect, Shortened):
            size = effect.bytes
        data = bytearray(self._inodes[number].data[offset : offset + size])
        if isinstance(effect, Flipped) and data:
            bit = effect.bit % (len(data) * 8)
            data[bit // 8] ^= 1 << bit % 8
        return bytes(data)

    def _write(self, number: int, body: bytes, effect: Effect | None) -> bytes:
        _, offset, size = struct.unpack_from("<QQI", body)
        size = effect.bytes if isinstance(effect, Shortened) else size
        inode = self._inodes[number]
        if offset + size > len(inode.data):
            self._resize(inode, offset + size)
        inode.data[offset : offset + size] = body[40 : 40 + size]
        inode.changed = time.time()
        return struct.pack("<II", size, 0)

    def _fallocate(self, number: int, body: bytes) -> bytes:
        _, offset, length, mode = struct.unpack_from("<QQQI", body)
        if mode & ~_KEEP_SIZE:
            raise _Error(errno.EOPNOTSUPP)
        inode = self._inodes[number]
        self._take_room(max(0, offset + length - inode.room()))
        inode.allocated = max(inode.allocated, offset + length)
        if not mode & _KEEP_SIZE and offset + length > len(inode.data):
            self._resize(inode, offset + length)
        return b""

    def _fsync(self, number: int, body: bytes) -> bytes:
        if self.lies_about_syncs:
            return b""
        inode = self._inodes[number]
        inode.synced = bytes(inode.data)
        inode.synced_owner = (stat.S_IMODE(inode.mode), inode.uid, inode.gid)
        return b""

    def _fsyncdir(self, number: int, body: bytes) -> bytes:
        if self.lies_about_syncs:
            return b""
        inode = self._inodes[number]
        inode.synced_entries = dict(inode.entries)
        inode.changes = []
        return b""

    def _opendir(self, number: int, body: bytes) -> bytes:
        self._last += 1
        self._listings[self._last] = list(self._inodes[number].entries.items())
        return struct.pack("<QII", self._last, 0, 0)

    def _readdir(self, number: int, body: bytes) -> bytes:
        handle, offset, size = struct.unpack_from("<QQI", body)
        out = b""
        for index, (name, child) in enumerate(self._listings[handle][offset:], int(offset)):
            kind = stat.S_IFMT(self._inodes[child].mode) >> 12
            one = struct.pack("<QQII", child, index + 1, len(name), kind) + name
            one += bytes(-len(one) % 8)
            if len(out) + len(one) > size:
                break
            out += one
        return out

    def _releasedir(self, number: int, body: bytes) -> bytes:
        self._listings.pop(struct.unpack_from("<Q", body)[0], None)
        return b""

    def _release(self, number: int, body: bytes) -> bytes:
        return b""

    def _flush(self, number: int, body: bytes) -> bytes:
        return b""

    def _statfs(self, number: int, body: bytes) -> bytes:
        free = max(0, self.capacity - self.used()) // _SECTOR
        blocks = self.capacity // _SECTOR
        return struct.pack("<QQQQQIIII24x", blocks, free, free, 0, 0, _SECTOR, 255, _SECTOR, 0)

    # Room.

    def used(self) -> int:
        return sum(inode.room() for inode in self._inodes.values() if inode.links > 0)

    def _take_room(self, more: int) -> None:
        if self.used() + more > self.capacity or self.capacity == 0:
            raise _Error(self.full)

    def _resize(self, inode: _Inode, size: int) -> None:
        if size > len(inode.data):
            self._take_room(max(0, size - inode.room()))
            inode.data.extend(bytes(size - len(inode.data)))
        else:
            del inode.data[size:]


def _text(body: bytes) -> bytes:
    return body.split(bytes(1))[0]


def _after_power_loss(inode: _Inode, draw: random.Random | None) -> bytes:
    """Of what was written since the last sync any sector may be there or not."""
    if draw is None or inode.synced == inode.data:
        return inode.synced
    old, new = inode.synced, bytes(inode.data)
    size = draw.choice([len(old), len(new)])
    mixed = bytearray()
    for at in range(0, size, _SECTOR):
        sector = draw.choice([old, new])[at : at + _SECTOR]
        mixed += sector + bytes(min(_SECTOR, size - at) - len(sector[: size - at]))
    return bytes(mixed[:size])


def freeze(systems: Iterable[HostileFs]) -> None:
    """All at the same moment."""
    held = list(systems)
    for system in held:
        system.lock().acquire()
    for system in held:
        system.freeze()
    for system in held:
        system.lock().release()
