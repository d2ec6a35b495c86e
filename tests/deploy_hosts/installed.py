"""A machine with Holdfast installed: its tiers, its daemon, its jobs."""

from __future__ import annotations

import pathlib
import select
import shutil
import subprocess
import time

from machine import Machine

DEADLINE_S = 20
USER = 1234  # of the training processes; nobody that the machine knows
SETTINGS = """
memory: {bytes_max: 256MiB}
nvme: {dirs: [/mnt/nvme0/holdfast], bytes_max: 256MiB, engine: io_uring}
remote: {dir: /mnt/remote/holdfast}
"""
LOG = "/var/log/ckptd.out"
DROP_INS = "/etc/systemd/system/ckptd.service.d"


class Rank:
    """A training process of another user (holdfast_test_rank), which does what it is told."""

    def __init__(self, machine: Machine, job: str, settings: str = "") -> None:
        program = ("/opt/build/bin/holdfast_test_rank", "/run/holdfast/ckptd.sock")
        user = ("setpriv", f"--reuid={USER}", f"--regid={USER}", "--clear-groups")
        self._process = machine.start(*user, *program, job, "0", "1", "3000000", "", settings)

    def ask(self, command: str) -> str:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(command + "\n")
        self._process.stdin.flush()
        readable, _, _ = select.select([self._process.stdout], [], [], DEADLINE_S)
        assert readable, f"'{command}': no answer"
        return self._process.stdout.readline().strip()

    def do(self, *commands: str) -> str:
        """What the last of them answers; all must go well."""
        answer = ""
        for command in commands:
            answer = self.ask(command)
            assert answer.startswith("ok"), f"'{command}': {answer}"
        return answer

    def end(self) -> None:
        self._process.kill()
        self._process.communicate(timeout=DEADLINE_S)


class Host:
    def __init__(self, machine: Machine, scratch: pathlib.Path) -> None:
        self.machine = machine
        self._scratch = scratch
        self._ranks: list[Rank] = []

    def install(self, package: pathlib.Path) -> None:
        there = self._scratch / package.name
        if not there.exists():
            shutil.copy(package, there)
        self.machine.run("dpkg", "--install", there)

    def mount(self, name: str) -> pathlib.Path:
        """Mounts a directory of this machine's disk at /mnt/NAME."""
        outside = self._scratch / name
        outside.mkdir(exist_ok=True)
        self.machine.run("mkdir", "-p", f"/mnt/{name}")
        self.machine.run("mount", "--bind", outside, f"/mnt/{name}")
        return outside

    def configure(self, *drop_ins: str, settings: str = SETTINGS, more: str = "") -> None:
        """Settings, and the drop-ins of those names that are installed as examples. MORE: lines of [Service]."""
        self.machine.write("/etc/holdfast/ckptd.yaml", settings)
        for name in drop_ins:
            example = f"/usr/share/doc/holdfast/examples/{name}"
            self.machine.run("install", "-D", "-m", "644", example, f"{DROP_INS}/{name}")
        # (There is no journal.)
        output = f"[Service]\nStandardOutput=append:{LOG}\nStandardError=inherit\n"
        self.machine.write(f"{DROP_INS}/test.conf", output + more)
        self.machine.run("systemctl", "daemon-reload")

    def start(self) -> None:
        """Returns when ckptd has said that it serves."""
        done = self.machine.attempt("systemctl", "start", "ckptd")
        assert done.returncode == 0, f"{done.stderr}{self.log()}"

    def await_status(self, text: str) -> None:
        """Until `ckptctl status` has it."""
        until = time.monotonic() + DEADLINE_S
        while text not in (status := self.machine.run("ckptctl", "status")):
            assert time.monotonic() < until, status + self.log()

    def await_tiers_read(self) -> None:
        """Until ckptd knows what lies in the tiers; before that a restore takes what answers."""
        until = time.monotonic() + DEADLINE_S
        while "still being read" in (status := self.machine.run("ckptctl", "status")):
            assert time.monotonic() < until, status + self.log()

    def rank(self, job: str = "run", settings: str = "") -> Rank:
        return Rank(self.machine, job, settings)

    def property(self, name: str) -> str:
        """Of the unit, as systemd understood it."""
        return self.machine.run(
            "systemctl", "show", "ckptd", f"--property={name}", "--value"
        ).strip()

    def status_of_process(self) -> dict[str, str]:
        lines = self.machine.read(f"/proc/{self.property('MainPID')}/status").splitlines()
        return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}

    def as_daemon_sees(self, *command: str) -> subprocess.CompletedProcess[str]:
        """Runs a command, with all of root's rights, on the file systems as ckptd has them."""
        pid = self.property("MainPID")
        return self.machine.attempt("nsenter", f"--target={pid}", "--mount", "--", *command)

    def log(self) -> str:
        return self.machine.attempt("cat", LOG).stdout[-6000:]
