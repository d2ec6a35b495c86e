"""deploy/examples/training-job.yaml: Kubernetes takes it, it asks for nothing that the strictest Pod Security refuses, and its
script trains with a real ckptd and goes on where it was."""

from __future__ import annotations

import json
import os
import pathlib
import re
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest
import rendered
from rendered import TREE, container, objects_of, only, render
from valid import VERSIONS, check

EXAMPLE = TREE / "deploy/examples/training-job.yaml"
sys.path.append(str(TREE / "tests/python"))
from daemons import BIN, Daemon, own_daemon  # noqa: E402


def job() -> rendered.Object:
    return only(objects_of(EXAMPLE.read_text()), "Job")


def test_kubernetes_takes_it() -> None:
    for one in objects_of(EXAMPLE.read_text()):
        for version in VERSIONS:
            check(one, version)


def test_it_is_allowed_where_pod_security_is_restricted() -> None:
    pod = job()["spec"]["template"]["spec"]
    assert not {"hostPID", "hostIPC", "hostNetwork"} & set(pod)
    kinds = {kind for volume in pod["volumes"] for kind in set(volume) - {"name"}}
    assert kinds <= {"configMap", "emptyDir", "persistentVolumeClaim", "projected", "secret"}
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["seccompProfile"]["type"] == "RuntimeDefault"
    for one in pod["containers"]:
        assert one["securityContext"]["allowPrivilegeEscalation"] is False
        assert one["securityContext"]["capabilities"] == {"drop": ["ALL"]}


def test_it_finds_what_the_chart_gives() -> None:
    one = container(job()["spec"]["template"]["spec"], "train")
    sockets = rendered.read_yaml(rendered.CHART / "values.yaml")["socket"]["hostPath"]
    assert rendered.mount(one, "holdfast")["mountPath"] == sockets
    claims = rendered.of_kind(render("everything"), "PersistentVolumeClaim")
    (volume,) = [each for each in job()["spec"]["template"]["spec"]["volumes"] if each["name"] == "holdfast"]  # fmt: skip
    assert volume["persistentVolumeClaim"]["claimName"] in {each["metadata"]["name"] for each in claims}  # fmt: skip
    service = only(objects_of(EXAMPLE.read_text()), "Service")
    name = job()["metadata"]["name"]
    assert service["spec"]["selector"] == {"batch.kubernetes.io/job-name": name}
    subdomain = job()["spec"]["template"]["spec"]["subdomain"]
    assert service["metadata"]["name"] == subdomain
    assert f"--rdzv-endpoint={name}-0.{subdomain}:29500" in one["command"]


def test_a_policy_holds_tenants_to_their_uids() -> None:
    policy, binding = objects_of((TREE / "deploy/examples/tenants.yaml").read_text())
    for one in (policy, binding):
        check(one, VERSIONS[-1])  # (1.27 does not have them)
    assert binding["spec"]["policyName"] == policy["metadata"]["name"]
    assert (policy["spec"]["failurePolicy"], binding["spec"]["validationActions"]) == ("Fail", ["Deny"])  # fmt: skip
    # Pods, and what is added to them later.
    resources = {name for rule in policy["spec"]["matchConstraints"]["resourceRules"] for name in rule["resources"]}  # fmt: skip
    assert resources == {"pods", "pods/ephemeralcontainers"}
    # Each variable that an expression uses was made before it, and each kind of container is looked at.
    known: set[str] = set()
    for variable in policy["spec"]["variables"]:
        assert set(re.findall(r"variables\.(\w+)", variable["expression"])) <= known
        known.add(variable["name"])
    for rule in policy["spec"]["validations"]:
        said = rule["expression"] + rule.get("messageExpression", "")
        assert set(re.findall(r"variables\.(\w+)", said)) <= known
    everything = json.dumps(policy)
    for kind in ("containers", "initContainers", "ephemeralContainers"):
        assert f"object.spec.{kind}" in everything, kind
    assert "runAsUser" in everything and "runAsGroup" in everything
    pages = [(TREE / "docs" / name).read_text() for name in ("security.md", "kubernetes.md")]
    assert all("deploy/examples/tenants.yaml" in page for page in pages)


@pytest.fixture
def daemon() -> Iterator[Daemon]:
    with own_daemon() as one:
        yield one


def test_its_script_goes_on_where_it_was(daemon: Daemon, tmp_path: pathlib.Path) -> None:
    one = container(job()["spec"]["template"]["spec"], "train")
    (tmp_path / "train.py").write_text(only(objects_of(EXAMPLE.read_text()), "ConfigMap")["data"]["train.py"])  # fmt: skip
    variables = rendered.literal_env(one) | {"HOLDFAST_SOCKET": str(daemon.socket), "HOME": str(tmp_path)}  # fmt: skip

    def train(steps: int) -> set[str]:
        done = subprocess.run(
            [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
            + [f"--log-dir={tmp_path / 'launcher'}", tmp_path / "train.py"],
            env={**os.environ, **variables, "STEPS": str(steps), "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        # torchrun runs its workers with -u: another's line may come before the end of one.
        return set(re.findall(r"rank \d starts at step \d+", done.stdout))

    assert train(3) == {"rank 0 starts at step 0", "rank 1 starts at step 0"}
    assert train(5) == {"rank 0 starts at step 3", "rank 1 starts at step 3"}
    assert "step 4" in daemon.ctl("status", variables["RUN"])


def listed(daemon: Daemon, run: str) -> str:
    """What ckptctl lists of it; "" while there is nothing."""
    done = subprocess.run(
        [BIN / "ckptctl", "list", run, f"--socket={daemon.admin}"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    return done.stdout


def test_it_saves_a_last_step_when_its_pod_is_told_to_end(
    daemon: Daemon, tmp_path: pathlib.Path
) -> None:
    """SIGTERM to the pod's first process, torchrun, which passes it on."""
    one = container(job()["spec"]["template"]["spec"], "train")
    (tmp_path / "train.py").write_text(only(objects_of(EXAMPLE.read_text()), "ConfigMap")["data"]["train.py"])  # fmt: skip
    variables = rendered.literal_env(one) | {"HOLDFAST_SOCKET": str(daemon.socket), "HOME": str(tmp_path)}  # fmt: skip
    pod = subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
        + [f"--log-dir={tmp_path / 'launcher'}", tmp_path / "train.py"],
        env={**os.environ, **variables, "STEPS": "1000000", "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        end = time.monotonic() + 120
        while "committed" not in listed(daemon, variables["RUN"]):  # both train
            assert time.monotonic() < end and pod.poll() is None
            time.sleep(0.1)
        pod.terminate()
        said, _ = pod.communicate(timeout=120)
    finally:
        pod.kill()
        pod.wait()
    assert pod.returncode != 0
    last = re.findall(r"told to end: step (\d+) is \(([^)]*)\)", said)
    assert len(last) == 2 and len({step for step, _ in last}) == 1, said
    assert all("'committed'" in stages for _, stages in last), last
    assert f"step {last[0][0]} is the last" in re.sub(r", or the first one after it,", "", daemon.ctl("status", variables["RUN"]))  # fmt: skip
