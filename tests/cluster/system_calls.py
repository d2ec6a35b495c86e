"""The calls of the kernel that make a node and that Python's `os` does not have before 3.12.

unshare(CLONE_NEWNET)             # this thread is in a network of its own
bind("/data/nvme0", "/mnt/nvme")  # the same directory at a second place
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterator

CLONE_NEWNS = 0x00020000
CLONE_NEWUTS = 0x04000000
CLONE_NEWIPC = 0x08000000
CLONE_NEWUSER = 0x10000000
CLONE_NEWPID = 0x20000000
CLONE_NEWNET = 0x40000000

MS_NOSUID = 0x2
MS_NODEV = 0x4
MS_NOEXEC = 0x8
MS_BIND = 0x1000
MS_REC = 0x4000
MS_PRIVATE = 0x40000

_AT_FDCWD = -100
_AT_EMPTY_PATH = 0x1000
_AT_RECURSIVE = 0x8000
_OPEN_TREE_CLONE = 1
_MOVE_MOUNT_F_EMPTY_PATH = 4
_MOUNT_ATTR_RDONLY = 0x1
_MOUNT_ATTR_IDMAP = 0x100000
_MNT_DETACH = 2
# The same numbers on every architecture.
_SYS_OPEN_TREE = 428
_SYS_MOVE_MOUNT = 429
_SYS_MOUNT_SETATTR = 442

_libc = ctypes.CDLL(None, use_errno=True)
_SYS_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}


class _MountAttributes(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint64) for name in ("set", "clear", "propagation", "userns_fd")]


def _checked(what: str, result: int) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


def unshare(flags: int) -> None:
    _checked(f"unshare({flags:#x})", _libc.unshare(flags))


def setns(namespace: int, kind: int) -> None:
    _checked(f"setns({kind:#x})", _libc.setns(namespace, kind))


def set_hostname(name: str) -> None:
    _checked(f"sethostname({name})", _libc.sethostname(name.encode(), len(name.encode())))


def mount(source: str, target: str, kind: str | None, flags: int = 0, options: str = "") -> None:
    _checked(
        f"mount {kind or source} at {target}",
        _libc.mount(
            source.encode(),
            target.encode(),
            kind.encode() if kind else None,
            ctypes.c_ulong(flags),
            options.encode(),
        ),
    )


def bind(
    source: str, target: str, *, read_only: bool = False, user_namespace: int | None = None
) -> None:
    """`source` with all that is mounted in it at `target` too; with its owners as `user_namespace` numbers them, if given."""
    what = f"bind {source} at {target}"
    tree = _checked(
        what,
        _libc.syscall(_SYS_OPEN_TREE, _AT_FDCWD, source.encode(), _OPEN_TREE_CLONE | _AT_RECURSIVE),
    )
    try:
        if read_only or user_namespace is not None:
            attributes = _MountAttributes(
                (_MOUNT_ATTR_RDONLY if read_only else 0)
                | (0 if user_namespace is None else _MOUNT_ATTR_IDMAP),
                0,
                MS_PRIVATE,
                user_namespace or 0,
            )
            _checked(what, _set_attributes(tree, "", _AT_EMPTY_PATH | _AT_RECURSIVE, attributes))
        _checked(
            what,
            _libc.syscall(
                _SYS_MOVE_MOUNT, tree, b"", _AT_FDCWD, target.encode(), _MOVE_MOUNT_F_EMPTY_PATH
            ),
        )
    finally:
        os.close(tree)


def make_read_only(mount_point: str) -> None:
    """This one mount; what is mounted in it stays as it is."""
    attributes = _MountAttributes(_MOUNT_ATTR_RDONLY, 0, 0, 0)
    _checked(f"read-only {mount_point}", _set_attributes(_AT_FDCWD, mount_point, 0, attributes))


def _set_attributes(at: int, path: str, flags: int, attributes: _MountAttributes) -> int:
    return int(
        _libc.syscall(
            _SYS_MOUNT_SETATTR,
            at,
            path.encode(),
            flags,
            ctypes.byref(attributes),
            ctypes.c_size_t(ctypes.sizeof(attributes)),
        )
    )


def change_root(new_root: str, old_inside: str) -> None:
    """`new_root`, a mount, becomes /, and what was / is gone. `old_inside`: an empty directory in it."""
    number = _SYS_PIVOT_ROOT[os.uname().machine]
    os.chdir(new_root)
    _checked(
        f"pivot_root {new_root}",
        _libc.syscall(number, new_root.encode(), f"{new_root}/{old_inside}".encode()),
    )
    os.chdir("/")
    _checked("leave the old root", _libc.umount2(f"/{old_inside}".encode(), _MNT_DETACH))
    os.rmdir(f"/{old_inside}")


def new_user_namespace(first_outer_id: int, count: int = 65536) -> int:
    """A descriptor of a new user namespace in which ids 0 … count-1 are first_outer_id … outside."""
    made, tell_made = os.pipe()
    seen, tell_seen = os.pipe()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            unshare(CLONE_NEWUSER)
            os.write(tell_made, b"1")
            os.close(tell_seen)
            os.read(seen, 1)
            code = 0
        finally:
            os._exit(code)
    os.close(tell_made)
    os.close(seen)
    try:
        if not os.read(made, 1):
            raise PermissionError("unshare(CLONE_NEWUSER): not allowed")
        for name in ("uid_map", "gid_map"):
            with open(f"/proc/{child}/{name}", "w") as file:
                file.write(f"0 {first_outer_id} {count}")
        return os.open(f"/proc/{child}/ns/user", os.O_RDONLY | os.O_CLOEXEC)
    finally:
        os.close(made)
        os.close(tell_seen)
        os.waitpid(child, 0)


@contextlib.contextmanager
def in_network(namespace: int | None) -> Iterator[None]:
    """This thread, within the block, is in that network namespace (None: in a new one). A socket stays where it was made."""
    before = os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    try:
        if namespace is None:
            unshare(CLONE_NEWNET)
        else:
            setns(namespace, CLONE_NEWNET)
        yield
    finally:
        setns(before, CLONE_NEWNET)
        os.close(before)
