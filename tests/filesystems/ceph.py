"""CephFS: a monitor, a manager, three OSDs with a file each, and a metadata server on loopback; every object three times; mounted by
ceph-fuse.

    with contextlib.closing(Ceph(tmp_path)) as ceph:
        (ceph.path / "file").write_text("…")
"""

from __future__ import annotations

import json
import os
import pathlib
import signal
import subprocess
import uuid

from mounted import DEADLINE_S, wait_until
from ranks import free_port

_OSDS = (0, 1, 2)
_LOST = 1
_OSD_BYTES = 3 << 30  # of files that are as long as what is in them


class Ceph:
    def __init__(self, root: pathlib.Path) -> None:
        self.path = root / "mount"
        self._root = root
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}
        self._configuration = root / "ceph.conf"
        self._environment = {**os.environ, "CEPH_CONF": str(self._configuration), "CEPH_ARGS": ""}
        try:
            self._configure()
            self._start_monitor()
            self._start("mgr", "ceph-mgr", "-i", "x")
            for number in _OSDS:
                self._make_osd(number)
                self._start_osd(number)
            self._start("mds", "ceph-mds", "-i", "a")
            self._make_file_system()
            self._mount_it()
        except BaseException:
            self.close()
            raise

    # ---- what the tests want ----

    def lose_a_server(self) -> None:
        lost = self._daemons.pop(f"osd{_LOST}")
        lost.kill()
        lost.wait(DEADLINE_S)

    def bring_it_back(self) -> None:
        self._start_osd(_LOST)
        wait_until("all OSDs are there again", lambda: self._osds_up() == len(_OSDS))
        wait_until("every object is there three times again", self._is_clean)

    def mount_anew(self) -> None:
        self._run("umount", self.path)
        self._daemons.pop("mount").wait(DEADLINE_S)
        self._mount_it()

    def cut_off(self) -> None:
        """No OSD says a word, and none is known to be gone: every call of the mount waits."""
        self._signal(signal.SIGSTOP, "mon", *(f"osd{number}" for number in _OSDS), "mds")

    def reconnect(self) -> None:
        self._signal(signal.SIGCONT, "mon", *(f"osd{number}" for number in _OSDS), "mds")

    def limit(self, bytes_more: int) -> None:
        used = int(os.getxattr(self.path, "ceph.dir.rbytes"))
        os.setxattr(self.path, "ceph.quota.max_bytes", str(used + bytes_more).encode())

    def lift_limit(self) -> None:
        os.setxattr(self.path, "ceph.quota.max_bytes", b"0")

    def close(self) -> None:
        self._signal(signal.SIGCONT, *self._daemons)
        subprocess.run(["umount", "-l", self.path], stderr=subprocess.DEVNULL, timeout=DEADLINE_S)
        for daemon in self._daemons.values():
            daemon.kill()
        for daemon in self._daemons.values():
            daemon.wait(DEADLINE_S)
        self._daemons.clear()

    # ---- how ----

    def _configure(self) -> None:
        root = self._root
        for name in ("run", "mon", "mgr", "mds", "log"):
            (root / name).mkdir()
        self._identity = str(uuid.uuid4())
        self._places = f"[v2:127.0.0.1:{free_port()}/0,v1:127.0.0.1:{free_port()}/0]"
        self._configuration.write_text(f"""[global]
fsid = {self._identity}
mon host = {self._places}
public addr = 127.0.0.1
cluster addr = 127.0.0.1
ms bind ipv6 = false
auth cluster required = none
auth service required = none
auth client required = none
mon data = {root}/mon
mgr data = {root}/mgr
mds data = {root}/mds
osd data = {root}/osd$id
log file = {root}/log/$name.log
run dir = {root}/run
admin socket = {root}/run/$name.$pid.asok
pid file = {root}/run/$name.pid
crash dir = {root}/run
# All on one machine, whose disk may be rather full.
osd crush chooseleaf type = 0
mon data avail warn = 1
mon data avail crit = 1
# Whole files, small ones.
osd objectstore = bluestore
bluestore block size = {_OSD_BYTES}
osd memory target = 939524096
osd pool default size = {len(_OSDS)}
osd pool default min size = 2
osd pool default pg autoscale mode = off
# One that is gone is noticed within seconds.
osd heartbeat interval = 1
osd heartbeat grace = 6
mon osd min down reporters = 1
mon osd reporter subtree level = osd
# What client quotas allow is looked at often enough.
client quota df = false
""")

    def _run(self, *words: object, check: bool = True, deadline_s: float = 60) -> str:
        done = subprocess.run(
            [str(word) for word in words], env=self._environment,
            stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=deadline_s,
        )  # fmt: skip
        assert not check or done.returncode == 0, f"{words}: {done.stdout}{done.stderr}"
        return done.stdout

    def _start(self, name: str, *words: str) -> None:
        with open(self._root / "log" / f"{name}.out", "ab") as log:
            self._daemons[name] = subprocess.Popen(
                [*words, "-f"], env=self._environment,
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip

    def _start_monitor(self) -> None:
        monitors = self._root / "monitors"
        self._run("monmaptool", "--create", "--addv", "a", self._places, "--fsid", self._identity, monitors)  # fmt: skip
        self._run("ceph-mon", "--mkfs", "-i", "a", "--monmap", monitors)
        self._start("mon", "ceph-mon", "-i", "a")
        wait_until("the monitor answers", lambda: "quorum" in self._run("ceph", "--connect-timeout=5", "mon", "stat", check=False))  # fmt: skip

    def _make_osd(self, number: int) -> None:
        identity = str(uuid.uuid4())
        self._run("ceph", "osd", "new", identity, number)
        (self._root / f"osd{number}").mkdir()
        self._run("ceph-osd", "-i", number, "--mkfs", "--osd-uuid", identity, deadline_s=DEADLINE_S)

    def _start_osd(self, number: int) -> None:
        self._start(f"osd{number}", "ceph-osd", "-i", str(number))

    def _make_file_system(self) -> None:
        wait_until("all OSDs are there", lambda: self._osds_up() == len(_OSDS))
        for pool in ("metadata", "data"):
            self._run("ceph", "osd", "pool", "create", pool, 4)
        self._run("ceph", "fs", "new", "holdfast", "metadata", "data")
        wait_until("the metadata server serves", lambda: "up:active" in self._run("ceph", "mds", "stat"))  # fmt: skip
        wait_until("every object is there three times", self._is_clean)

    def _mount_it(self) -> None:
        self.path.mkdir(exist_ok=True)
        self._start("mount", "ceph-fuse", str(self.path))
        wait_until("it is mounted", lambda: os.path.ismount(self.path))

    def _osds_up(self) -> int:
        return int(json.loads(self._run("ceph", "osd", "stat", "--format=json"))["num_up_osds"])

    def _is_clean(self) -> bool:
        groups = json.loads(self._run("ceph", "pg", "stat", "--format=json"))["pg_summary"]
        states = groups.get("num_pg_by_state", [])
        return bool(states) and all(state["name"] == "active+clean" for state in states)

    def _signal(self, number: int, *names: str) -> None:
        for name in names:
            if name in self._daemons and self._daemons[name].poll() is None:
                self._daemons[name].send_signal(number)
