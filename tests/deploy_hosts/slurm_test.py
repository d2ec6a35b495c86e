"""Slurm itself (slurmctld, slurmd and munge of the distribution) runs the example job, which is requeued twice.

tests/deploy_hosts/run build/test slurm_test.py
"""

from __future__ import annotations

import os
import pathlib
import select
import shutil
import site
from collections.abc import Iterator

import pytest
from conftest import BUILD, TREE
from installed import DEADLINE_S, Host
from machine import Machine

# A job that was requeued waits until its old credential has expired.
CREDENTIAL_S = 5
SLURM_CONF = f"""
ClusterName=hills
SlurmctldHost=testnode
SlurmUser=root
MailProg=/bin/true
AuthType=auth/munge
AuthInfo=cred_expire={CREDENTIAL_S}
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
StateSaveLocation=/var/spool/slurm/ctld
SlurmdSpoolDir=/var/spool/slurm/d
SlurmctldPidFile=/run/slurmctld.pid
SlurmdPidFile=/run/slurmd.pid
SlurmctldLogFile=/var/log/slurm/slurmctld.log
SlurmdLogFile=/var/log/slurm/slurmd.log
SchedulerParameters=sched_interval=1,sched_min_interval=0,bf_interval=1
KillWait=2
Prolog=/usr/share/holdfast/slurm/prolog
PrologFlags=Alloc
Epilog=/usr/share/holdfast/slurm/epilog
TaskProlog=/usr/share/holdfast/slurm/task_prolog
NodeName=testnode CPUs=1 State=UNKNOWN
PartitionName=all Nodes=testnode Default=YES MaxTime=INFINITE State=UP
"""
# Found before the real one by the prolog and the epilog: notes how they call it.
CALLS = "/var/log/ckptctl.calls"
NOTING = f"""#!/bin/sh
echo "$*" >>{CALLS}
exec /usr/bin/ckptctl "$@"
"""
# Says what it does in one pipe, and makes each step when the other one says so.
TRAIN = """
import os
import sys

import numpy as np

import holdfast

told, say = open(sys.argv[1]), open(sys.argv[2], "w", buffering=1)
state = {"w": np.zeros(1000, dtype=np.int64)}
with holdfast.Checkpointer(os.environ["HOLDFAST_JOB"]) as ckpt:
    step = ckpt.restore(state)
    print(f"starts at step {step}", flush=True)
    say.write(f"{os.environ['HOLDFAST_JOB']} {step} {state['w'].sum()}\\n")
    while told.readline().strip() == "step":
        state["w"] += 1
        ckpt.save(step, state, wait="committed")
        say.write(f"step {step}\\n")
        step += 1
print("trained", flush=True)
"""


class Pipes:
    """The two ends of the program's pipes that stay open while it comes and goes."""

    def __init__(self, folder: pathlib.Path) -> None:
        self.tell, self.hear = folder / "tell", folder / "hear"
        for pipe in (self.tell, self.hear):
            os.mkfifo(pipe)
            pipe.chmod(0o666)
        self._tell = os.open(self.tell, os.O_RDWR)
        self._hear = os.open(self.hear, os.O_RDWR)

    def say(self, line: str) -> None:
        os.write(self._tell, f"{line}\n".encode())

    def next(self) -> str:
        line = b""
        while not line.endswith(b"\n"):
            readable, _, _ = select.select([self._hear], [], [], DEADLINE_S)
            assert readable, f"the program says nothing more than {line!r}"
            line += os.read(self._hear, 1)
        return line.decode().strip()


@pytest.fixture
def machine(tmp_path: pathlib.Path) -> Iterator[Machine]:
    for folder in (tmp_path, *tmp_path.parents[:2]):
        folder.chmod(0o755)
    packages = pathlib.Path(site.getsitepackages()[0])
    # (The build folder has links into the tree, which other users may not be able to read.)
    shutil.copytree(BUILD / "python", tmp_path / "python")
    binds = {BUILD: "/opt/build", TREE / "deploy": "/opt/deploy", packages: "/opt/packages"}
    with Machine(tmp_path, binds) as one:
        yield one


@pytest.fixture
def slurm(host: Host) -> Iterator[Host]:
    """A host with Slurm on it; ckptd does not run: that is the prolog's business."""
    machine = host.machine
    host.configure(settings="memory: {bytes_max: 64MiB}")
    machine.write("/etc/holdfast/slurm.sh", "start_unit=ckptd.service\nrequired=yes\n")
    machine.write("/usr/local/sbin/ckptctl", NOTING, mode=0o755)
    machine.write("/etc/slurm/slurm.conf", SLURM_CONF)
    machine.write("/etc/slurm/cgroup.conf", "CgroupPlugin=cgroup/v1\n")
    machine.run("useradd", "--create-home", "trainer")
    machine.run("sh", "-euc", "mkdir -p /var/spool/slurm/ctld /var/spool/slurm/d /var/log/slurm")
    key = "head -c 1024 /dev/urandom >/etc/munge/munge.key; chown munge /etc/munge/munge.key; chmod 400 /etc/munge/munge.key"
    machine.run("sh", "-euc", key)
    try:
        machine.run("systemctl", "start", "munge", "slurmctld", "slurmd")
        yield host
    finally:
        print(
            machine.attempt("sh", "-c", "tail -n 30 /var/log/slurm/*.log /home/trainer/out").stdout
        )


def as_trainer(machine: Machine, *command: str) -> str:
    return machine.run("runuser", "--user=trainer", "--", "env", "--chdir=/home/trainer", *command)


def test_a_job_resumes_over_requeues(slurm: Host, tmp_path: pathlib.Path) -> None:
    machine, pipes = slurm.machine, Pipes(tmp_path)
    machine.write("/home/trainer/train.py", TRAIN)
    path = f"PYTHONPATH={tmp_path}/python:/opt/packages"
    submit = (
        *("env", path, "sbatch", "--parsable"),
        *("--output=/home/trainer/out", "--time=60", "/usr/share/holdfast/slurm/train.sbatch"),
        *("/usr/bin/python3", "/home/trainer/train.py", str(pipes.tell), str(pipes.hear)),
    )
    job = as_trainer(machine, *submit).strip().partition(";")[0]
    name = f"slurm-hills-{job}"

    # The prolog has started the daemon.
    assert pipes.next() == f"{name} 0 0"
    assert slurm.property("ActiveState") == "active"
    for step in range(3):
        pipes.say("step")
        assert pipes.next() == f"step {step}"

    # Back into the queue: by whoever may, and by the script's own trap, which --signal sets off when the time is nearly up.
    as_trainer(machine, "scontrol", "requeue", job)
    assert pipes.next() == f"{name} 3 3000"
    pipes.say("step")
    assert pipes.next() == "step 3"
    as_trainer(machine, "scancel", "--signal=USR1", "--batch", job)
    assert pipes.next() == f"{name} 4 4000"
    pipes.say("end")

    # A job that depends on the end of it, and waits for it.
    after = ("sbatch", "--wait", f"--dependency=afterok:{job}", "--output=/dev/null", "--wrap=true")
    as_trainer(machine, *after)
    assert machine.read("/home/trainer/out").splitlines()[-1] == "trained"
    assert "requeueing" in machine.read("/home/trainer/out")
    shown = machine.run("scontrol", "show", "job", job)
    assert "JobState=COMPLETED" in shown and "Restarts=2" in shown
    # The epilog ran after each start, and the checkpoints are there.
    assert machine.read(CALLS).count(f"status {name} ") == 3
    assert "step 3" in machine.run("/usr/bin/ckptctl", "status", name)
