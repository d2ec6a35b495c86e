"""The disk of the private daemon: where it keeps checkpoints that outlive a reboot.

    try:
        spill = find_spill(place)       # ready to be used
    except MemoryOnly as reason:
        ...                             # it keeps them in memory only

The directory is $XDG_STATE_HOME/holdfast/private-<machine-id> (~/.local/state/…):

    checkpoints/   the daemon's drive (nvme.dirs)
    state/         its catalog. Here, so that it goes when the user removes the directory
    token          a random text. The private place has it too, in `spill`, with the directory's path

A daemon waits for a drive that it knows and that is gone. A user who removes this directory wants
no such wait: it is an order to forget what was in it. `token` shows that this has happened.

    watch = DiskWatch("job", "…/private.yaml")
    watch.look(handle)              # before each save: the one before it
    watch.look(handle, last=True)   # at the end
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import logging
import os
import pathlib
import re
import shutil
import stat
import time
import uuid

from holdfast import _core
from holdfast._errors import DeadlineExceededError, HoldfastError
from holdfast._handle import Handle

_log = logging.getLogger("holdfast")

MACHINE_ID = "/etc/machine-id"

# File systems of local drives, as statfs tells them. Others may lie on a network, or in memory.
_LOCAL = ("ext4", "xfs", "btrfs", "f2fs", "zfs")
_BYTES_MAX = 20 << 30
_BYTES_MIN = 64 << 20
_FREE_PART = 10
_LOCK_PATIENCE_S = 1.0
_PAUSE_S = 0.05
_TROUBLE_S = 10.0  # others may be making room just now
_LOCKS_MAX = 16
_PID_BYTES_MAX = 9
_TEXT_BYTES_MAX = 8192  # a token and a path, say
_RECORD_BYTES_MAX = 1 << 30  # docs/formats.md
_JOB_STATE = re.compile(r"job-([0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12})")


class MemoryOnly(Exception):
    """Why the private daemon keeps no checkpoints on disk."""


@dataclasses.dataclass(frozen=True)
class Spill:
    directory: str
    bytes_max: int

    @property
    def checkpoints(self) -> str:
        return os.path.join(self.directory, "checkpoints")

    @property
    def state(self) -> str:
        return os.path.join(self.directory, "state")

    @property
    def locks(self) -> tuple[str, str]:
        """Each is held by the daemon that uses the directory."""
        return (
            os.path.join(self.state, "lock"),
            os.path.join(self.checkpoints, ".holdfast", "lock"),
        )

    def settings(self) -> str:
        """Settings of ckptd (YAML), to be appended to others that have no `nvme` and no `policy`."""
        return f"""
nvme:
  dirs: [{json.dumps(self.checkpoints, ensure_ascii=False)}]
  bytes_max: {self.bytes_max}
  keep_ended_ms: 1s          # the last step of a job that ended gives way to a newer run (0 would keep it for ever)
policy:
  nvme: {{every_steps: 0, every_ms: 5min}}
"""


class DiskWatch:
    """Says once in this program's log why steps do not get to the disk. It ends with the first step
    that is there.
    """

    def __init__(self, job: str, settings: str) -> None:
        self._job = job
        self._settings = settings
        self._handle: Handle | None = None
        self._since: float | None = None  # when it was in trouble first
        self._over = False

    def look(self, handle: Handle, *, last: bool = False) -> None:
        """Asks the daemon, which takes about a millisecond. Not after a save that failed: the daemon
        may hang.
        """
        if self._over or not handle.done() or handle.error is not None:
            return
        watched = self._handle = self._handle or handle
        try:
            watched.wait("nvme", 0.0)
            self._end()
        except DeadlineExceededError as error:
            # Coordinator::HowFar tells of the trouble, if there is any.
            _, _, trouble = str(error).partition("; nvme: ")
            if not trouble:
                return
            now = time.monotonic()
            self._since = self._since or now
            if last or now - self._since >= _TROUBLE_S:
                self._end()
                _log.warning(
                    "job '%s': step %d is not on disk, and a reboot would lose it: %s; the private "
                    "daemon's settings: '%s' (docs/install.md, \"Other settings\")",
                    self._job, watched.step, trouble, self._settings,
                )  # fmt: skip
        except HoldfastError as error:
            self._handle = None  # not this step: none is due, or it was lost
            self._over = "none configured" in str(error)

    def _end(self) -> None:
        self._over = True
        self._handle = None


def budget(bytes_free: int) -> int:
    """How much of a file system with so much free space is used at most."""
    return min(_BYTES_MAX, bytes_free // _FREE_PART)


def find_spill(place: str) -> Spill:
    """The directory, made and ready for the daemon whose private place is `place`. Raises
    MemoryOnly. One process at a time calls it for a place.
    """
    if os.environ.get("HOLDFAST_PRIVATE_DIR"):
        raise MemoryOnly("HOLDFAST_PRIVATE_DIR is set")
    directory = os.path.join(_state_home(), "holdfast", f"private-{_machine_id()}")
    if not directory.isprintable():  # a settings file cannot name it
        raise MemoryOnly(f"{directory!r} is not printable text")
    try:
        spill = Spill(directory, _room(directory))
        if _is_free(spill, place):
            _prepare(spill, place)
    except OSError as error:
        what = f"'{error.filename}': {error.strerror}" if error.filename else str(error)
        raise MemoryOnly(what) from None
    return spill


def _state_home() -> str:
    home = os.environ.get("XDG_STATE_HOME", "")
    if not os.path.isabs(home):  # such a one is to be ignored
        home = os.path.join(os.environ.get("HOME", ""), ".local", "state")
    if not os.path.isabs(home):
        raise MemoryOnly("neither HOME nor XDG_STATE_HOME is set")
    return home


def _machine_id() -> str:
    text = _read(os.path.realpath(MACHINE_ID)).decode(errors="replace").strip()
    if not re.fullmatch(r"[0-9a-f]{32}", text):
        raise MemoryOnly(f"'{MACHINE_ID}' does not name this machine, as in a container")
    return text


def _room(directory: str) -> int:
    """How much the daemon may use there. Looks at the nearest directory that exists."""
    nearest = os.path.join(directory, "checkpoints")
    while not os.path.lexists(nearest):
        nearest = os.path.dirname(nearest)
    info = os.stat(nearest)
    if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.geteuid():
        raise MemoryOnly(f"'{nearest}' is not a directory of this user's")
    kind = _core.filesystem_type(nearest)
    if kind not in _LOCAL:
        raise MemoryOnly(f"'{nearest}' is on {kind}, which is not known to be a local drive")
    space = os.statvfs(nearest)
    free = space.f_bavail * space.f_frsize
    kept = _bytes_below(os.path.join(directory, "checkpoints"))
    if kept > 0:  # what is there is used, however little is free by now
        return max(budget(free + kept), kept, _BYTES_MIN)
    if budget(free) < _BYTES_MIN:
        raise MemoryOnly(f"only {free >> 20} MiB are free in '{nearest}'")
    return budget(free)


def _bytes_below(directory: str) -> int:
    """What its checkpoints take, roughly: the files of steps alone."""
    files = pathlib.Path(directory).glob("*/*/*")
    return sum(file.lstat().st_size for file in files)


def _is_free(spill: Spill, place: str) -> bool:
    """False: the daemon of this place has not ended yet. ckptd says so when it is started."""
    until = time.monotonic() + _LOCK_PATIENCE_S
    while not _is_held(os.path.join(place, "memory", "lock")):
        if not any(_is_held(lock) for lock in spill.locks):
            return True
        # The locks of a daemon that ends are not released all at once.
        if time.monotonic() >= until:
            raise MemoryOnly(f"another daemon uses '{spill.directory}'")
        time.sleep(_PAUSE_S)
    return False


def _is_held(lock: str) -> bool:
    """By a daemon that was not killed. After one that was, and hangs, the next one has `<lock>.1`,
    and so on (base/daemon_lock.h)."""
    later = (f"{lock}.{index}" for index in range(1, _LOCKS_MAX))
    return any(_has_living_holder(name) for name in (lock, *later))


def _has_living_holder(lock: str) -> bool:
    try:
        descriptor = os.open(lock, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return False
    except BlockingIOError:
        pid = os.pread(descriptor, _PID_BYTES_MAX, 0).strip()
        return not (pid.isdigit() and _core.is_dying(int(pid)))
    finally:
        os.close(descriptor)


def _prepare(spill: Spill, place: str) -> None:
    os.makedirs(spill.directory, mode=0o700, exist_ok=True)
    info = os.stat(spill.directory)
    if info.st_uid != os.geteuid() or info.st_mode & 0o022:
        raise MemoryOnly(f"others may write in '{spill.directory}'")
    token = os.path.join(spill.directory, "token")
    known = os.path.join(place, "spill")
    here = _read(token).decode(errors="replace")
    begun = here  # of an earlier start; written again only if it changes
    expected, _, where = _read(known).decode(errors="replace").partition(" ")
    if where != spill.directory:
        expected = ""  # this place used none, or another one
    if not here and os.path.lexists(token):
        here = expected or uuid.uuid4().hex  # it was not removed: a crash emptied its token
    if not here or expected not in ("", here) or not os.path.lexists(spill.checkpoints):
        # What a daemon made again after the removal goes too: it still names the old drive.
        if os.path.lexists(spill.state):
            shutil.rmtree(spill.state)
        os.makedirs(spill.checkpoints, mode=0o700, exist_ok=True)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(os.path.join(spill.checkpoints, ".holdfast", "witness"))
        if expected:
            _forget_jobs(spill, os.path.join(place, "memory"))
        here = uuid.uuid4().hex
    # In this order: a start that is cut short forgets again.
    _write(known, f"{here} {spill.directory}")
    if here != begun:
        _write(token, here)


def _forget_jobs(spill: Spill, memory: str) -> None:
    """Removes the history of jobs that have no copy left, so that they begin from scratch. Each
    record and each JOB file has the 16 bytes of its job's uuid (docs/formats.md).
    """
    records = [
        *pathlib.Path(memory).glob("slot-*.record"),
        *pathlib.Path(spill.checkpoints).glob("*/JOB"),
    ]
    kept = b"\0".join(_read(str(record), _RECORD_BYTES_MAX) for record in records)
    for state in pathlib.Path(memory).glob("job-*"):
        named = _JOB_STATE.fullmatch(state.name)
        if named and uuid.UUID(named[1]).bytes not in kept:
            state.unlink()


def _read(path: str, bytes_max: int = _TEXT_BYTES_MAX) -> bytes:
    """Empty: there is no such file. Opening one that is a pipe, say, does not wait."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return b""
    try:
        info = os.fstat(descriptor)
        if not stat.S_ISREG(info.st_mode):
            raise MemoryOnly(f"'{path}' is not a regular file")
        if info.st_size > bytes_max:
            raise MemoryOnly(f"'{path}' has {info.st_size} bytes, more than any such file")
        with open(descriptor, "rb", closefd=False) as file:
            return file.read(info.st_size)
    finally:
        os.close(descriptor)


def _write(path: str, text: str) -> None:
    aside = path + ".tmp"
    with contextlib.suppress(FileNotFoundError):
        os.unlink(aside)
    with open(aside, "x", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(aside, path)
