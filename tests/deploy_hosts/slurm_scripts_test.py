"""The prolog, epilog and task prolog by themselves: what they do while ckptd is there, away, or hangs.

tests/deploy_hosts/run build/test slurm_scripts_test.py
"""

from __future__ import annotations

import subprocess
import time

import pytest
from conftest import TREE
from installed import Host
from machine import Machine

SLURM = "/usr/share/holdfast/slurm"
ENVIRONMENT = ("env", "SLURM_JOB_ID=77", "SLURM_CLUSTER_NAME=hills")
SETTINGS = "memory: {bytes_max: 64MiB}"


def settings(host: Host, text: str) -> None:
    host.machine.write("/etc/holdfast/slurm.sh", text)


def prolog(host: Host) -> subprocess.CompletedProcess[str]:
    return host.machine.attempt(*ENVIRONMENT, f"{SLURM}/prolog")


def active(host: Host) -> bool:
    return host.property("ActiveState") == "active"


def test_shellcheck_finds_nothing() -> None:
    scripts = [
        *(TREE / "deploy/slurm").iterdir(),
        *(TREE / "deploy/debian").glob("p*"),
        *(TREE / "tests/deploy_hosts").glob("*.sh"),
    ]
    assert len(scripts) >= 9
    command = ["shellcheck", "--external-sources", "--shell=bash", *scripts]
    done = subprocess.run(command, cwd=TREE, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout


def test_a_daemon_that_answers_is_left_alone(host: Host) -> None:
    host.configure(settings=SETTINGS)
    host.start()
    settings(host, "required=yes")
    done = prolog(host)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_the_prolog_starts_the_unit_if_it_is_told_to(host: Host) -> None:
    host.configure(settings=SETTINGS)
    settings(host, "deadline_s=1")
    assert prolog(host).returncode == 0
    assert not active(host)
    settings(host, "start_unit=ckptd.service\nrequired=yes")
    done = prolog(host)
    assert (done.returncode, done.stderr) == (0, "")
    assert active(host)


def test_a_node_without_a_daemon_fails_only_where_one_is_required(host: Host) -> None:
    host.configure(settings="memory: {no_such_setting: 1}")
    settings(host, "deadline_s=1")
    done = prolog(host)
    assert done.returncode == 0
    assert "ckptd does not answer on testnode (ckptctl: no socket" in done.stderr
    settings(host, "start_unit=ckptd.service\nrequired=yes\ndeadline_s=40")
    began = time.monotonic()
    done = prolog(host)
    assert done.returncode == 1
    # It does not wait for a unit that has failed.
    assert time.monotonic() - began < 40
    assert "systemctl start ckptd.service: Job for ckptd.service failed" in done.stderr
    assert "ckptd does not answer on testnode (ckptctl: no socket" in done.stderr


# The settings' second, a second for what ignores SIGTERM, and the last try's second; the rest is the machine's.
SOON_S = 30


def test_nothing_hangs_with_the_daemon(host: Host) -> None:
    host.configure(settings=SETTINGS)
    host.start()
    host.machine.run("systemctl", "kill", "--signal=STOP", "ckptd")
    settings(host, "required=yes\ndeadline_s=1")
    began = time.monotonic()
    assert prolog(host).returncode == 1
    assert host.machine.attempt(*ENVIRONMENT, f"{SLURM}/epilog").returncode == 0
    assert time.monotonic() - began < SOON_S
    host.machine.run("systemctl", "kill", "--signal=KILL", "ckptd")


def test_nothing_hangs_with_the_unit(host: Host) -> None:
    host.configure(settings=SETTINGS, more="ExecStartPre=/bin/sleep infinity\n")
    settings(host, "start_unit=ckptd.service\nrequired=yes\ndeadline_s=1")
    began = time.monotonic()
    done = prolog(host)
    assert done.returncode == 1
    assert "systemctl start ckptd.service: no answer in 1 s" in done.stderr
    assert time.monotonic() - began < SOON_S


def test_the_epilog_removes_nothing(host: Host) -> None:
    host.configure(settings=SETTINGS)
    host.start()
    rank = host.rank("slurm-hills-77")
    rank.do("open", "save 5", "committed 5")
    rank.end()
    done = host.machine.attempt(*ENVIRONMENT, f"{SLURM}/epilog")
    assert (done.returncode, done.stdout) == (0, "")
    assert "slurm-hills-77: if a process dies           you are back at step 5" in done.stderr
    again = host.rank("slurm-hills-77")
    again.do("open")
    assert again.do("restore") == "ok attempt=1 step=5"
    again.end()


@pytest.mark.parametrize(
    ("cluster", "name"),
    [
        ("hills", "hills"),
        ("GPU cluster", "GPU_cluster"),
        ("my/cluster", "my_cluster"),
        ("a b\nexport LD_PRELOAD=/tmp/x.so\n", "a_b_export_LD_PRELOAD__tmp_x.so_"),
        ("Höhen", "H__hen"),
    ],
)
def test_a_cluster_of_any_name_gives_one_that_a_job_may_have(
    machine: Machine, cluster: str, name: str
) -> None:
    environment = ("env", f"SLURM_CLUSTER_NAME={cluster}", "SLURM_JOB_ID=77")
    out = machine.run(*environment, "/opt/deploy/slurm/task_prolog")
    assert out.splitlines() == [
        f"export HOLDFAST_JOB=slurm-{name}-77",
        "export HOLDFAST_START_DAEMON=0",
    ]
    machine.write("/usr/local/bin/ckptctl", '#!/bin/sh\necho "  if $2"\n', mode=0o755)
    done = machine.attempt(*environment, "/opt/deploy/slurm/epilog")
    assert f"slurm-{name}-77: if slurm-{name}-77\n" in done.stderr


@pytest.mark.parametrize(
    ("given", "exported"),
    [
        (
            (),
            {
                "HOLDFAST_JOB=slurm-hills-77",
                "HOLDFAST_START_DAEMON=0",
                "HOLDFAST_SOCKET=/run/there",
            },
        ),
        (("HOLDFAST_JOB=mine", "HOLDFAST_SOCKET=/run/mine"), {"HOLDFAST_START_DAEMON=0"}),
        (
            ("HOLDFAST_START_DAEMON=1",),
            {
                "HOLDFAST_JOB=slurm-hills-77",
                "HOLDFAST_START_DAEMON=1",
                "HOLDFAST_SOCKET=/run/there",
            },
        ),
    ],
)
def test_what_tasks_are_told(host: Host, given: tuple[str, ...], exported: set[str]) -> None:
    settings(host, "client_socket=/run/there")
    out = host.machine.run(*ENVIRONMENT, *given, f"{SLURM}/task_prolog")
    assert set(out.splitlines()) == {f"export {line}" for line in exported}
