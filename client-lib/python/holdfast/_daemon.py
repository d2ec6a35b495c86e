"""A private ckptd for a machine that has none: started once per user, detached, found again by the
next program.

    socket = ensure_daemon(None)    # where to connect; started only where nobody has seen to one

Where the machine has a daemon's socket, be it dead, or a daemon's settings, nothing is started:
whoever put them there means to run that daemon. The private one lies at the private place,
$HOLDFAST_PRIVATE_DIR or /dev/shm/holdfast-private-<uid> (base/private_place.h: the C++ library and
ckptctl look there, too):

    ckptd.sock, admin.sock      its sockets
    memory/                     its slots
    state/                      its catalog, if it keeps checkpoints in memory only
    settings.yaml               its settings, if it keeps checkpoints on disk too (_spill.py)
    spill                       which directory on disk it used last
    ckptd.log                   what it says
    start.lock                  held by the process that is starting it
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import select
import shutil
import socket as sockets
import stat
import struct
import subprocess
import time
from collections.abc import Iterator

from holdfast import _core
from holdfast._errors import (
    DeadlineExceededError,
    InvalidArgumentError,
    RefusedError,
    UnavailableError,
)
from holdfast._programs import carried
from holdfast._spill import DiskWatch, MemoryOnly, find_spill

SYSTEM_SOCKET = "/run/holdfast/ckptd.sock"
SYSTEM_CONFIG = "/etc/holdfast/ckptd.yaml"
SHARED_MEMORY = "/dev/shm"

_log = logging.getLogger("holdfast")
_PAUSE_S = 0.05
_PAUSE_MAX_S = 1.0
_LOG_BYTES_MAX = 1 << 20
_CORES_MAX = 4096
_CREDENTIALS = "3i"  # pid, uid, gid
_QUOTED_LINES = 12
_QUOTED_CHARACTERS = 4096
# What ckptd says when another one works at the same place.
_TAKEN = ("': held by ", "another process already listens there")


def ensure_daemon(socket: str | None = None, *, start: bool = True, timeout: float = 60.0) -> str:
    """The path of the socket to connect to; starts this user's private daemon if there is no other
    and none is expected.

        path = ensure_daemon()                  # a laptop: starts one, or finds the last run's
        path = ensure_daemon("/my/ckptd.sock")  # as it is; nothing is looked at, nothing started

    `start=False`, or HOLDFAST_START_DAEMON=0: nothing is started. The path is then where a daemon
    would be expected. Raises `UnavailableError` where the daemon of a configuration does not come up by
    `timeout`, or the private one cannot start.
    """
    if known := known_socket(socket):
        return known
    place = private_place()
    own = os.path.join(place, "ckptd.sock")
    trusted = _is_ours(place)
    if trusted and _somebody_listens(own):
        return own
    if not (start and _allowed_by_environment()):
        return own if trusted and os.path.lexists(own) else SYSTEM_SOCKET
    end = time.monotonic() + timeout
    if configuration := _configuration():
        return _await_configured(configuration, end)
    _make_place(place)
    with _starting(place, end):
        return own if _somebody_listens(own) else _start(place, own, end)


def known_socket(socket: str | None) -> str | None:
    """The path that somebody has named or made, whether a daemon is there or not; nobody's: None."""
    return socket or os.environ.get("HOLDFAST_SOCKET") or _system_socket()


def private_place() -> str:
    """The directory in which the private daemon of this user lies, whether there is one or not."""
    place = os.environ.get("HOLDFAST_PRIVATE_DIR") or os.path.join(
        SHARED_MEMORY, f"holdfast-private-{os.geteuid()}"
    )
    if not os.path.isabs(place):
        raise InvalidArgumentError(f"HOLDFAST_PRIVATE_DIR: '{place}' is not an absolute path")
    return place


def disk_watch(job: str, socket: str) -> DiskWatch | None:
    """None: it is not the private daemon that the socket leads to."""
    home = _config_home()
    try:
        private = socket == os.path.join(private_place(), "ckptd.sock")
    except InvalidArgumentError:
        private = False
    return DiskWatch(job, os.path.join(home or "", "private.yaml")) if private else None


def _system_socket() -> str | None:
    """A socket's path that is there, even if nobody answers: somebody means to have a daemon."""
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    candidates = [os.path.join(runtime, "holdfast/ckptd.sock")] if runtime else []
    return next((path for path in [*candidates, SYSTEM_SOCKET] if os.path.lexists(path)), None)


def _config_home() -> str | None:
    home = os.environ.get("XDG_CONFIG_HOME")
    if not home and os.environ.get("HOME"):
        home = os.path.join(os.environ["HOME"], ".config")
    return os.path.join(home, "holdfast") if home else None


def _configuration() -> str | None:
    """The settings of a daemon that somebody else is to start."""
    home = _config_home()
    candidates = [SYSTEM_CONFIG] + ([os.path.join(home, "ckptd.yaml")] if home else [])
    return next((path for path in candidates if os.path.lexists(path)), None)


def _allowed_by_environment() -> bool:
    value = os.environ.get("HOLDFAST_START_DAEMON", "").strip().lower()
    if value in ("", "1", "true", "yes", "on"):
        return True
    if value in ("0", "false", "no", "off"):
        return False
    raise InvalidArgumentError(f"HOLDFAST_START_DAEMON: '{value[:64]}' is neither 0 nor 1")


def _await_configured(configuration: str, end: float) -> str:
    """The daemon of a configuration may be on its way (the machine has just booted); nothing takes
    its place."""
    while True:
        if found := _system_socket():
            return found
        if time.monotonic() >= end:
            raise UnavailableError(
                f"find ckptd: there is no socket of one, and since '{configuration}' configures "
                "one, no private one is "
                "started in its place: start it (ckptd, or systemctl start ckptd), or name its "
                "socket (HOLDFAST_SOCKET)"
            )
        time.sleep(_PAUSE_S)


def _is_ours(place: str) -> bool:
    """Whether nobody else can have put a socket there."""
    try:
        info = os.lstat(place)
    except OSError:
        return False
    return stat.S_ISDIR(info.st_mode) and info.st_uid == os.geteuid() and not info.st_mode & 0o022


def _make_place(place: str) -> None:
    try:
        os.makedirs(os.path.dirname(place), exist_ok=True)
        with contextlib.suppress(FileExistsError):
            os.mkdir(place, 0o700)
    except OSError as error:
        raise UnavailableError(
            f"start a private ckptd: make the directory '{place}': {error.strerror}: name another "
            "one on a tmpfs in "
            "HOLDFAST_PRIVATE_DIR"
        ) from None
    if not _is_ours(place):
        raise RefusedError(
            f"start a private ckptd: '{place}' is not a directory of this user's that nobody else "
            "can write: remove it, or "
            "name another one in HOLDFAST_PRIVATE_DIR"
        )


def connect_error(path: str) -> OSError | None:
    """Why one cannot connect to this socket; None: a process has it open. One that is stuck has it open, too."""
    with sockets.socket(sockets.AF_UNIX, sockets.SOCK_STREAM) as probe:
        return _connect(probe, path)


def _connect(probe: sockets.socket, path: str) -> OSError | None:
    probe.setblocking(False)
    try:
        probe.connect(path)
    except OSError as error:
        return None if error.errno == errno.EAGAIN else error
    return None


def _somebody_listens(path: str) -> bool:
    """A ckptd that was killed and hangs has the socket open, too. Another one takes its place."""
    with sockets.socket(sockets.AF_UNIX, sockets.SOCK_STREAM) as probe:
        if _connect(probe, path) is not None:
            return False
        credentials = probe.getsockopt(
            sockets.SOL_SOCKET, sockets.SO_PEERCRED, struct.calcsize(_CREDENTIALS)
        )
        # (Pid 0: the queue is full, or it is another namespace's.)
        return not _core.is_dying(struct.unpack(_CREDENTIALS, credentials)[0])


@contextlib.contextmanager
def _starting(place: str, end: float) -> Iterator[None]:
    """One process at a time starts the daemon; the kernel lets go of the lock when that process
    dies. That there are never two daemons is not this lock's doing: ckptd has its own.
    """
    path = os.path.join(place, "start.lock")
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= end:
                    raise DeadlineExceededError(
                        "start a private ckptd: another process has been starting it for too "
                        f"long (it holds '{path}'); "
                        f"see '{os.path.join(place, 'ckptd.log')}'"
                    ) from None
            time.sleep(_PAUSE_S)
        yield
    finally:
        os.close(descriptor)


def _program() -> str:
    if installed := carried("ckptd"):
        return installed
    named = os.environ.get("HOLDFAST_CKPTD")
    if named:
        if os.path.isfile(named) and os.access(named, os.X_OK):
            return os.path.abspath(named)
        raise UnavailableError(
            f"start a private ckptd: HOLDFAST_CKPTD: '{named}' is no program that can be run"
        )
    if found := shutil.which("ckptd"):
        return os.path.abspath(found)
    raise UnavailableError(
        "start a private ckptd: no ckptd is installed: not by the package holdfast-ckptd, not at "
        "HOLDFAST_CKPTD, not on PATH. Install the wheel of holdfast-ckptd or another package of "
        "Holdfast that has ckptd, or name the socket of a daemon that runs (HOLDFAST_SOCKET)"
    )


def _settings(place: str) -> tuple[str, str, str]:
    """The settings file, the state directory, and one line for people: where checkpoints go and
    what survives."""
    state = os.path.join(place, "state")
    home = _config_home()
    own = os.path.join(home, "private.yaml") if home else ""
    if own and os.path.lexists(own):
        return (
            own,
            state,
            f"checkpoints go to memory ('{place}') and to the directories of `nvme.dirs` in "
            f"'{own}', if it names any. Memory survives the end of a program; these directories "
            "survive a reboot too",
        )
    package = os.path.join(os.path.dirname(os.path.abspath(__file__)), "private.yaml")
    try:
        spill = find_spill(place)
    except MemoryOnly as reason:
        return (
            package,
            state,
            f"checkpoints go to memory only ('{place}'), since {reason}. They survive the end of "
            "a program, not a reboot",
        )
    made = os.path.join(place, "settings.yaml")
    with open(package, encoding="utf-8") as file:
        text = file.read() + spill.settings()
    with open(made, "w", encoding="utf-8") as file:
        file.write(text)
    return (
        made,
        spill.state,
        f"checkpoints go to memory ('{place}') and, every 5 minutes and at the end of a run, to "
        f"'{spill.directory}' (at most {spill.bytes_max / (1 << 30):.1f} GiB). Memory survives "
        "the end of a program; the directory survives a reboot too",
    )


def _tell(log: str, where: str) -> None:
    line = f"started a private ckptd: {where}"
    with open(log, "a", encoding="utf-8", errors="backslashreplace") as file:
        file.write(line + "\n")
    _log.warning("%s", line)  # (what is not a warning, most programs do not show)


def _start(place: str, own: str, end: float) -> str:
    """Starts it, again if another one still holds the place, until somebody listens. The lock
    `start.lock` is held."""
    program = _program()
    log = os.path.join(place, "ckptd.log")
    taken = ""  # what the last try said that found another one there
    pause = _PAUSE_S
    while True:
        settings, state, where = _settings(place)
        command = [
            *(program, "--config", settings, "--state-dir", state),
            *("--memory-dir", os.path.join(place, "memory")),
            *("--socket", own, "--admin", os.path.join(place, "admin.sock")),
        ]
        began, process = _launch(command, log)
        try:
            while (
                not (over := _has_ended(process))
                and not _somebody_listens(own)
                and time.monotonic() < end
            ):
                time.sleep(_PAUSE_S)
        finally:
            if process is not None:
                os.close(process)
        if _somebody_listens(own):
            if not over:
                _tell(log, where)
            return own
        said = _said(log, began)
        if over and not any(words in said for words in _TAKEN):
            raise UnavailableError(
                f"start a private ckptd ({' '.join(command)}): it ended; {_quoted(log, said)}"
            )
        taken = said if over else taken
        if time.monotonic() >= end and taken:
            raise UnavailableError(
                "start a private ckptd: another one holds its place and does not answer; "
                f"{_quoted(log, taken)}"
            )
        if time.monotonic() >= end:
            raise DeadlineExceededError(
                f"start a private ckptd: it is not ready yet; {_quoted(log, said)}"
            )
        time.sleep(
            min(pause, max(0.0, end - time.monotonic()))
        )  # it is just coming up or going down
        pause = min(2 * pause, _PAUSE_MAX_S)


def _launch(command: list[str], log: str) -> tuple[int, int | None]:
    """Where its words begin in the log, and a descriptor of the process (None if it has ended
    already).

    A shell between: the daemon is then nobody's child here, and who ends this process with all its
    descendants misses it.
    """
    if os.path.exists(log) and os.path.getsize(log) > _LOG_BYTES_MAX:
        os.replace(log, log + ".old")
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in ("LD_PRELOAD", "NOTIFY_SOCKET")
    }
    # Not the cores of this rank alone: the daemon serves all.
    cores = os.sched_getaffinity(0)
    with open(
        log, "ab", opener=lambda path, flags: os.open(path, flags | os.O_NOFOLLOW, 0o600)
    ) as out:
        began = out.seek(0, os.SEEK_END)
        with contextlib.suppress(OSError):
            os.sched_setaffinity(0, range(_CORES_MAX))
        try:
            shell = subprocess.run(
                ["/bin/sh", "-c", '"$@" >&2 & echo $!', "sh", *command],
                stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=out,
                cwd="/", env=environment, start_new_session=True, umask=0o077, check=True,
            )  # fmt: skip
        except (OSError, subprocess.CalledProcessError) as error:
            raise UnavailableError(f"start a private ckptd: run /bin/sh: {error}") from None
        finally:
            with contextlib.suppress(OSError):
                os.sched_setaffinity(0, cores)
    try:
        return began, os.pidfd_open(int(shell.stdout))
    except ProcessLookupError:
        return began, None


def _has_ended(process: int | None) -> bool:
    if process is None:
        return True
    poll = select.poll()
    poll.register(process, select.POLLIN)
    return bool(poll.poll(0))


def _said(log: str, began: int) -> str:
    with open(log, "rb") as file:
        file.seek(began)
        return file.read(_LOG_BYTES_MAX).decode(errors="replace")


def _quoted(log: str, said: str) -> str:
    lines = said[-_QUOTED_CHARACTERS:].splitlines()[-_QUOTED_LINES:]
    return f"its log '{log}' ends with:\n" + (
        "\n".join("  " + line for line in lines) or "  (nothing)"
    )
