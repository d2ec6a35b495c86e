"""The unit, under a real systemd: what it allows is enough, and what it forbids is forbidden.

tests/deploy_hosts/run build/test systemd_test.py
"""

from __future__ import annotations

import re

import pytest
from installed import USER, Host

# What `systemd-analyze security` may count at most, of 10.
EXPOSURE_MAX = 2.7
EVERYWHERE = "nvme.every_steps=1 remote.every_steps=1"


def memory_of(host: Host) -> str:
    return host.machine.run("sh", "-c", "ls -d /dev/shm/holdfast*").strip()


@pytest.mark.parametrize("drop_ins", [(), ("tiers.conf",), ("tiers.conf", "user.conf")])
def test_systemd_understands_every_line(host: Host, drop_ins: tuple[str, ...]) -> None:
    host.configure(*drop_ins)
    if "user.conf" in drop_ins:
        host.machine.run("useradd", "--system", "--no-create-home", "holdfast")
    done = host.machine.attempt("systemd-analyze", "verify", "ckptd.service")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_little_is_exposed(host: Host) -> None:
    unit = "/lib/systemd/system/ckptd.service"
    analyze = ("systemd-analyze", "security", "--offline=true", "--no-pager")
    threshold = f"--threshold={int(EXPOSURE_MAX * 10)}"
    done = host.machine.attempt(*analyze, threshold, unit)
    assert done.returncode == 0, done.stdout


def test_all_tiers_work_and_outlive_the_daemon(host: Host) -> None:
    drive = host.mount("nvme0")
    host.configure("tiers.conf")
    host.machine.run("mkdir", "/mnt/remote")
    host.start()
    # A file system that is mounted after ckptd was started is there for it, too.
    (host.mount("remote") / "holdfast").mkdir()
    rank = host.rank(settings=EVERYWHERE)
    rank.do("open", "save 5", "tier nvme", "tier remote")
    assert "io_uring (" in host.machine.run("ckptctl", "status")
    copy = drive / "holdfast/run/5-a1/0.safetensors"
    assert (copy.stat().st_uid, copy.stat().st_mode & 0o777) == (USER, 0o640)

    host.machine.run("systemctl", "restart", "ckptd")
    rank.do("save 6", "tier remote")
    rank.end()
    host.machine.run("systemctl", "kill", "--signal=KILL", "ckptd")
    again = host.rank()
    again.do("open")
    assert again.do("restore") == "ok attempt=1 step=6"
    again.end()

    # Memory lost, as by a reboot.
    host.machine.run("systemctl", "stop", "ckptd")
    assert memory_of(host) == "/dev/shm/holdfast"
    host.machine.run("rm", "-r", "/dev/shm/holdfast")
    host.start()
    host.await_tiers_read()
    rebooted = host.rank()
    rebooted.do("open")
    assert " step=6 source=nvme " in rebooted.do("restore")


def test_it_may_do_little_else(host: Host) -> None:
    host.mount("nvme0")
    host.configure("tiers.conf", settings="memory: {bytes_max: 64MiB}")
    host.start()
    process = host.status_of_process()
    names = host.property("CapabilityBoundingSet").split()
    asked = host.machine.run("capsh", f"--decode={process['CapBnd']}").strip().partition("=")[2]
    assert sorted(asked.split(",")) == sorted(names) != []
    assert process["CapEff"] == process["CapBnd"]
    assert (process["NoNewPrivs"], process["Seccomp"]) == ("1", "2")

    for forbidden in ("/usr/x", "/etc/x", "/etc/holdfast/x", "/var/x", "/boot/x", "/opt/x"):
        done = host.as_daemon_sees("touch", forbidden)
        assert done.returncode != 0 and "Read-only file system" in done.stderr, forbidden
    for allowed in ("/dev/shm/x", "/mnt/nvme0/x", "/var/lib/holdfast/x", "/run/holdfast/x"):
        done = host.as_daemon_sees("touch", allowed)
        assert done.returncode == 0, f"{allowed}: {done.stderr}"
    host.machine.write("/home/somebody/key", "secret")
    assert host.as_daemon_sees("ls", "-A", "/home").stdout == ""


# As tiers.conf says: mount points, or what lies above them. (Below one the old file system would stay.)
@pytest.mark.parametrize("writable", ["/mnt", "/mnt/remote"])
def test_a_file_system_that_is_mounted_anew_is_seen(host: Host, writable: str) -> None:
    host.mount("remote")
    host.configure(settings="memory: {bytes_max: 64MiB}", more=f"ReadWritePaths={writable}\n")
    host.start()
    host.machine.run("umount", "--lazy", "/mnt/remote")
    outside = host.mount("other")
    host.machine.run("mount", "--bind", "/mnt/other", "/mnt/remote")
    done = host.as_daemon_sees("touch", "/mnt/remote/written")
    assert done.returncode == 0, done.stderr
    assert (outside / "written").exists()


def test_a_wrong_setting_is_not_tried_again(host: Host) -> None:
    host.configure(settings="memory: {no_such_setting: 1}")
    assert host.machine.attempt("systemctl", "start", "ckptd").returncode != 0
    assert host.property("NRestarts") == "0"
    assert host.property("ExecMainStatus") == "2"
    assert "no_such_setting" in host.log()


@pytest.mark.parametrize("drop_ins", [(), ("user.conf",)])
def test_settings_are_read_again(host: Host, drop_ins: tuple[str, ...]) -> None:
    if drop_ins:
        host.machine.run("useradd", "--system", "--no-create-home", "holdfast")
    host.configure(*drop_ins, settings="memory: {bytes_max: 64MiB}")
    host.start()
    pid = host.property("MainPID")
    for settings, problem in (
        ("memory: {bytes_max: 32MiB, slots_per_rank: 4}", "memory.slots_per_rank differs from"),
        ("memory: {no_such_setting: 1}", "memory.no_such_setting: unknown setting"),
    ):
        host.machine.write("/etc/holdfast/ckptd.yaml", settings)
        host.machine.run("systemctl", "reload", "ckptd")
        host.await_status(problem)
        assert "32 MiB" in host.machine.run("ckptctl", "status")
    assert host.property("MainPID") == pid


def test_without_root(host: Host) -> None:
    host.machine.run("useradd", "--system", "--no-create-home", "holdfast")
    uid = int(host.machine.run("id", "--user", "holdfast"))
    drive, remote = host.mount("nvme0"), host.mount("remote")
    (remote / "holdfast").mkdir()
    host.machine.run("chown", "holdfast:holdfast", "/mnt/nvme0", "/mnt/remote/holdfast")
    host.configure("tiers.conf", "user.conf")
    host.start()
    process = host.status_of_process()
    assert process["Uid"].split() == [str(uid)] * 4
    assert int(process["CapPrm"], 16) == int(process["CapBnd"], 16) == 0

    rank = host.rank(settings=EVERYWHERE)
    rank.do("open", "save 5", "tier nvme", "tier remote")
    rank.end()
    # As user.conf says: copies are the daemon's.
    assert (drive / "holdfast/run/5-a1/0.safetensors").stat().st_uid == uid
    host.machine.run("systemctl", "restart", "ckptd")
    assert memory_of(host) == f"/dev/shm/holdfast-{uid}"
    again = host.rank()
    again.do("open")
    assert again.do("restore") == "ok attempt=1 step=5"
    again.end()
    host.machine.run("systemctl", "stop", "ckptd")
    assert re.search("slot-000000$", host.machine.run("ls", memory_of(host)), re.MULTILINE)
