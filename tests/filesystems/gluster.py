"""GlusterFS: three machines, as network namespaces, each with a brick on a file system of its own; one volume, three times
replicated, mounted through FUSE from a fourth.

    with contextlib.closing(Gluster(tmp_path)) as gluster:
        (gluster.path / "file").write_text("…")

Each glusterd has its own /var/lib/glusterd, /var/log/glusterfs and /run, in a mount namespace: it knows only those places.
"""

from __future__ import annotations

import os
import pathlib
import signal
import subprocess
import time

from mounted import DEADLINE_S, run, wait_until

_SERVERS = (1, 2, 3)
_CLIENT = 9
_LOST = 2
_VOLUME = "holdfast"
_BRICK_BYTES = 768 << 20
# After so long without a word the mount counts a server as gone.
_PING_S = 5


class Gluster:
    def __init__(self, root: pathlib.Path) -> None:
        self.path = root / "mount"
        self._root = root
        self._netns = {number: f"hfgl{os.getpid()}-{number}" for number in (*_SERVERS, _CLIENT)}
        self._switch = f"hfgl{os.getpid()}-sw"
        self._glusterds: dict[int, subprocess.Popen[bytes]] = {}
        self._mount: subprocess.Popen[bytes] | None = None
        self._ballast: pathlib.Path | None = None
        try:
            self._make_network()
            for number in _SERVERS:
                self._make_brick(number)
                self._start_glusterd(number)
            self._make_volume()
            self._mount_it()
        except BaseException:
            self.close()
            raise

    # ---- what the tests want ----

    def lose_a_server(self) -> None:
        for pid in self._pids(_LOST):
            os.kill(pid, signal.SIGKILL)
        self._glusterds.pop(_LOST).wait(DEADLINE_S)

    def bring_it_back(self) -> None:
        self._start_glusterd(_LOST)  # which starts the brick
        wait_until("the brick is there again", lambda: self._bricks_online() == len(_SERVERS))
        wait_until("what was written meanwhile is healed", self._is_healed)

    def mount_anew(self) -> None:
        assert self._mount is not None
        run(["umount", self.path])
        self._mount.terminate()
        self._mount.wait(DEADLINE_S)
        self._mount_it()

    def cut_off(self) -> None:
        run(["ip", "-n", self._netns[_CLIENT], "link", "set", "eth0", "down"])

    def reconnect(self) -> None:
        run(["ip", "-n", self._netns[_CLIENT], "link", "set", "eth0", "up"])

    def limit(self, bytes_more: int) -> None:
        """A file fills what else there is."""
        self._ballast = self.path / "ballast"
        space = os.statvfs(self.path)
        free = space.f_bavail * space.f_frsize
        assert free > bytes_more, f"{free} bytes are free"
        chunk = bytes(1 << 20)
        with open(self._ballast, "wb") as file:
            for _ in range((free - bytes_more) >> 20):
                file.write(chunk)
            file.flush()
            os.fsync(file.fileno())

    def lift_limit(self) -> None:
        if self._ballast is not None:
            self._ballast.unlink()
            self._ballast = None

    def close(self) -> None:
        run(["umount", "-l", self.path], check=False)
        for number, name in self._netns.items():
            for pid in self._pids(number):
                os.kill(pid, signal.SIGKILL)
            if number in self._glusterds:
                self._glusterds[number].wait(DEADLINE_S)
            run(["umount", "-l", self._root / str(number) / "brick"], check=False)
            run(["ip", "netns", "del", name], check=False)
        if self._mount is not None:
            self._mount.kill()
            self._mount.wait(DEADLINE_S)
        run(["ip", "netns", "del", self._switch], check=False)

    # ---- how ----

    def _make_network(self) -> None:
        switch = self._switch
        run(["ip", "netns", "add", switch])
        run(["ip", "-n", switch, "link", "add", "bridge", "type", "bridge"])
        run(["ip", "-n", switch, "link", "set", "bridge", "up"])
        for number, name in self._netns.items():
            run(["ip", "netns", "add", name])
            run(["ip", "link", "add", f"port{number}", "netns", switch, "type", "veth", "peer", "name", "eth0", "netns", name])  # fmt: skip
            run(["ip", "-n", switch, "link", "set", f"port{number}", "master", "bridge", "up"])
            run(["ip", "-n", name, "address", "add", f"{self._address(number)}/24", "dev", "eth0"])
            for link in ("lo", "eth0"):
                run(["ip", "-n", name, "link", "set", link, "up"])

    @staticmethod
    def _address(number: int) -> str:
        return f"10.91.0.{number}"

    def _make_brick(self, number: int) -> None:
        place = self._root / str(number)
        for name in ("lib", "log", "run", "brick"):
            (place / name).mkdir(parents=True)
        disk = place / "disk"
        with open(disk, "wb") as file:
            file.truncate(_BRICK_BYTES)
        run(["mkfs.xfs", "-q", disk])
        run(["mount", "-o", "loop", disk, place / "brick"])
        (place / "brick/data").mkdir()

    def _start_glusterd(self, number: int) -> None:
        place = self._root / str(number)
        # (Of the volume's mount it has no part: that would outlive it.)
        own = f"""
            umount -l {self.path} 2>/dev/null || true
            mkdir -p /var/lib/glusterd /var/log/glusterfs
            mount --bind {place}/lib /var/lib/glusterd
            mount --bind {place}/log /var/log/glusterfs
            mount --bind {place}/run /run
            mkdir -p /run/gluster
            exec glusterd -N -p /run/glusterd.pid"""
        with open(place / "log/started", "ab") as log:
            self._glusterds[number] = subprocess.Popen(
                ["ip", "netns", "exec", self._netns[number]]
                + ["unshare", "--mount", "--propagation", "private", "sh", "-euc", own],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip
        wait_until(f"glusterd {number} answers", lambda: "Number of Peers" in self._ask("peer", "status", number=number, check=False))  # fmt: skip

    def _ask(self, *words: str, number: int = 1, check: bool = True) -> str:
        inside = ["nsenter", "--mount", "--net", "--target", str(self._glusterds[number].pid)]
        return run([*inside, "gluster", "--mode=script", *words], check=check)

    def _make_volume(self) -> None:
        for number in _SERVERS[1:]:
            self._ask("peer", "probe", self._address(number))
        wait_until(
            "the servers know one another",
            lambda: self._ask("peer", "status").count("Peer in Cluster (Connected)") == len(_SERVERS) - 1,
        )  # fmt: skip
        bricks = [f"{self._address(n)}:{self._root}/{n}/brick/data" for n in _SERVERS]
        self._ask("volume", "create", _VOLUME, "replica", str(len(_SERVERS)), *bricks)
        self._ask("volume", "set", _VOLUME, "network.ping-timeout", str(_PING_S))
        # The one that dies is the one that is read from; all are on this machine.
        self._ask("volume", "set", _VOLUME, "cluster.choose-local", "off")
        self._ask("volume", "set", _VOLUME, "cluster.read-subvolume-index", str(_SERVERS.index(_LOST)))  # fmt: skip
        self._ask("volume", "start", _VOLUME)
        wait_until("all bricks are there", lambda: self._bricks_online() == len(_SERVERS))

    def _bricks_online(self) -> int:
        lines = self._ask("volume", "status", _VOLUME, "--xml", check=False)
        bricks = [node for node in lines.split("<node>") if "brick/data" in node]
        return sum("<status>1</status>" in node for node in bricks)

    def _is_healed(self) -> bool:
        said = self._ask("volume", "heal", _VOLUME, "info", "summary", check=False)
        pending = [line.split(":")[1].strip() for line in said.splitlines() if "Number of entries:" in line]  # fmt: skip
        return len(pending) == len(_SERVERS) and all(number == "0" for number in pending)

    def _mount_it(self) -> None:
        """The mount is this machine's; what it says goes through the fourth namespace."""
        self.path.mkdir(exist_ok=True)
        with open(self._root / "mount.out", "ab") as log:
            self._mount = subprocess.Popen(
                ["nsenter", f"--net=/run/netns/{self._netns[_CLIENT]}", "glusterfs", "--no-daemon"]
                + [f"--volfile-server={self._address(1)}", f"--volfile-id={_VOLUME}"]
                + [f"--log-file={self._root}/mount.log", str(self.path)],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip
        wait_until("it is mounted", lambda: os.path.ismount(self.path))
        wait_until("all its bricks are connected", self._takes_files)

    def _takes_files(self) -> bool:
        try:
            (self.path / "probe").write_text("x")
            (self.path / "probe").unlink()
            return True
        except OSError:
            time.sleep(0.5)
            return False

    def _pids(self, number: int) -> list[int]:
        said = run(["ip", "netns", "pids", self._netns[number]], check=False)
        return [int(pid) for pid in said.split()]
