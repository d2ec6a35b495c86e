"""The first process of a node (pid 1 of its pid namespace); run by node.py as a program, with its settings as JSON in argv[1].

It makes the node's namespaces and its root directory, then starts what the harness asks for over the control socket, and
reaps. When the harness ends, however it ends, this process ends, and the kernel ends all others of the node with it.

A request is one message, JSON, with three to four descriptors: standard input, output, error, and a pipe that gets the exit code:

    {"argv": ["sleep", "1"], "env": {}, "cwd": "/tmp", "uid": 1000, "gid": 1000, "helper": false} → {"pid": 7} and a pidfd, or {"error": "…"}
    {"signal_all": 19}                                                                 → {}
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import sys
from typing import Any

import system_calls as sc

REQUEST_BYTES_MAX = 128 << 10
# What each node has for itself; of the rest of the machine's files it sees a read-only view.
PRIVATE = ("proc", "tmp", "run", "var", "nvme", "remote", "lost+found")


def closed_parent(path: str) -> str | None:
    """The topmost directory on the way that only its owner may pass, such as /root: no process of a node is that."""
    names = path.split("/")[1:]
    for count in range(1, len(names)):
        parent = "/" + "/".join(names[:count])
        if names[0] not in PRIVATE and not os.stat(parent).st_mode & 0o001:
            return parent
    return None


def make_root(settings: dict[str, Any], user_namespace: int) -> None:
    root, disk, owner = settings["root"], settings["disk"], settings["outer_id"]
    sc.mount("", "/", None, sc.MS_REC | sc.MS_PRIVATE)
    sc.mount("node", root, "tmpfs", sc.MS_NODEV | sc.MS_NOSUID, "size=4m,mode=0755")
    for name in os.listdir("/"):
        here, there = f"/{name}", f"{root}/{name}"
        if name in PRIVATE:
            continue
        if os.path.islink(here):
            os.symlink(os.readlink(here), there)
        elif os.path.isdir(here):
            os.mkdir(there)
            sc.bind(here, there, read_only=True)

    def memory(name: str, mode: int, size: str) -> None:
        os.makedirs(f"{root}/{name}", exist_ok=True)
        options = f"size={size},mode={mode:o},uid={owner},gid={owner}"
        sc.mount("node", f"{root}/{name}", "tmpfs", sc.MS_NODEV | sc.MS_NOSUID, options)

    def directory(name: str) -> str:
        os.makedirs(f"{root}/{name}", exist_ok=True)
        os.chown(f"{root}/{name}", owner, owner)
        return f"{root}/{name}"

    memory("tmp", 0o1777, "256m")
    memory("run", 0o755, "64m")
    memory("var", 0o755, "64m")
    memory("dev/shm", 0o1777, str(settings["memory_bytes"]))
    os.chmod(directory("var/tmp"), 0o1777)
    directory("run/holdfast")
    directory("var/lib")
    sc.bind(f"{disk}/state", directory("var/lib/holdfast"))
    sc.bind(f"{disk}/nvme", directory("nvme"))
    # Its owners have the same numbers on all nodes, as on a network file system.
    sc.bind(settings["remote"], directory("remote"), user_namespace=user_namespace)
    opened = set()
    for path in filter(os.path.isdir, settings["visible"]):
        closed = closed_parent(path)
        if closed is not None and closed not in opened:
            opened.add(closed)
            sc.mount("node", root + closed, "tmpfs", sc.MS_NODEV | sc.MS_NOSUID, "mode=0755")
        if closed is not None or path.split("/")[1] in PRIVATE:
            os.makedirs(root + path, exist_ok=True)
            sc.bind(path, root + path, read_only=True)

    os.mkdir(f"{root}/proc")
    sc.mount("proc", f"{root}/proc", "proc", sc.MS_NODEV | sc.MS_NOSUID | sc.MS_NOEXEC)
    for path, source in settings["files"].items():
        if os.path.exists(root + path):
            sc.bind(source, root + path, read_only=True)
    os.mkdir(f"{root}/.old")
    sc.change_root(root, ".old")
    sc.make_read_only("/")


class Init:
    def __init__(self, control: socket.socket, harness: int, user_namespace: int) -> None:
        self.control = control
        self.harness = harness
        self.user_namespace = user_namespace
        self.exits: dict[int, int] = {}  # pid → the pipe that gets its exit code

    def serve(self) -> None:
        child_ended, wakeup = os.pipe()
        os.set_blocking(wakeup, False)
        os.set_blocking(child_ended, False)
        signal.set_wakeup_fd(wakeup, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        poll = select.poll()
        for fd in (self.control.fileno(), self.harness, child_ended):
            poll.register(fd, select.POLLIN)
        while True:
            ready = {fd for fd, _ in poll.poll()}
            if self.harness in ready:
                return
            if child_ended in ready:
                os.read(child_ended, 4096)
            self.reap()
            if self.control.fileno() in ready:
                message, fds, _, _ = socket.recv_fds(
                    self.control, REQUEST_BYTES_MAX, 4, socket.MSG_CMSG_CLOEXEC
                )
                if not message:
                    return
                self.answer(json.loads(message), fds)

    def reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            pipe = self.exits.pop(pid, None)
            if pipe is not None:
                os.write(pipe, str(os.waitstatus_to_exitcode(status)).encode())
                os.close(pipe)

    def answer(self, request: dict[str, Any], fds: list[int]) -> None:
        if "signal_all" in request:
            try:
                os.kill(-1, request["signal_all"])
            except ProcessLookupError:
                pass
            self.control.send(b"{}")
            return
        try:
            pid = self.start(request, fds[:3])
        except OSError as error:
            self.control.send(json.dumps({"error": str(error)}).encode())
            os.close(fds[3])
        else:
            self.exits[pid] = fds[3]
            pidfd = os.pidfd_open(pid)
            socket.send_fds(self.control, [json.dumps({"pid": pid}).encode()], [pidfd])
            os.close(pidfd)
        for fd in fds[:3]:
            os.close(fd)

    def start(self, request: dict[str, Any], standard: list[int]) -> int:
        failure, tell_failure = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                self.become(request, standard)
            except OSError as error:
                os.write(tell_failure, f"{request['argv'][0]}: {error}".encode())
            finally:
                os._exit(127)
        os.close(tell_failure)
        said = os.read(failure, 4096)
        os.close(failure)
        if said:
            os.waitpid(pid, 0)
            raise OSError(said.decode())
        return pid

    def become(self, request: dict[str, Any], standard: list[int]) -> None:
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGCHLD, signal.SIGPIPE, signal.SIGXFSZ):
            signal.signal(number, signal.SIG_DFL)
        os.setsid()
        for number, fd in enumerate(standard):
            os.dup2(fd, number)
        if not request["helper"]:  # a helper of the harness stays the machine's root
            sc.setns(self.user_namespace, sc.CLONE_NEWUSER)
            os.setgroups([])
            os.setresgid(request["gid"], request["gid"], request["gid"])
            os.setresuid(request["uid"], request["uid"], request["uid"])
        os.chdir(request["cwd"])
        os.umask(0o022)
        os.execvpe(request["argv"][0], request["argv"], request["env"])


def main() -> None:
    settings = json.loads(sys.argv[1])
    user_namespace = sc.new_user_namespace(settings["outer_id"])
    sc.unshare(
        sc.CLONE_NEWNS | sc.CLONE_NEWNET | sc.CLONE_NEWPID | sc.CLONE_NEWUTS | sc.CLONE_NEWIPC
    )
    pid = os.fork()
    if pid != 0:
        # Only the child is in the pid namespace; this process stays to say when it has ended, and holds nothing of the harness's.
        print(pid, flush=True)
        os.closerange(0, 3)
        os.close(settings["control"])
        os.waitpid(pid, 0)
        os._exit(0)
    control = socket.socket(fileno=settings["control"])
    for fd in (control.fileno(), settings["harness"], user_namespace):
        os.set_inheritable(fd, False)
    try:
        sc.set_hostname(settings["name"])
        make_root(settings, user_namespace)
    except OSError as error:
        control.send(json.dumps({"error": str(error)}).encode())
        return
    null = os.open("/dev/null", os.O_RDWR)
    for fd in (0, 1):
        os.dup2(null, fd)
    control.send(b"{}")
    Init(control, settings["harness"], user_namespace).serve()


if __name__ == "__main__":
    main()
