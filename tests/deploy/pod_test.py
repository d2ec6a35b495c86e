"""The DaemonSet's pod as rendered, run: the real node-config and ckptd with the manifest's user, capabilities, mounts and
settings, the chart's etcd by its own command line, and training processes in pods of their own. The kubelet's part is in pod.py."""

from __future__ import annotations

import dataclasses
import os
import pathlib
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence

import pod
import pytest
import rendered
from pod import BIN, DEADLINE_S, TREE, Confinement, Container, Mount, Node, confinement
from rendered import container, daemon_pod, merged, only
from settings import FIELDS, environment

OBSTACLE = pod.possible()
pytestmark = pytest.mark.skipif(OBSTACLE is not None, reason=str(OBSTACLE))
USER = 10042  # of the training pods
VALUES = {
    "cluster": {"plaintext": True},  # the pods' network is the test's own
    "image": {"repository": "registry.example.com/holdfast/ckptd"},
    "nvme": {"hostPaths": ["/mnt/nvme0/holdfast"]},
    "remote": {"claimName": "checkpoints"},
    "topology": {"source": "podLabels"},
    "etcd": {"replicas": 1},
    "settings": {
        "memory": {"bytes_max": "512MiB"},
        "nvme": {"bytes_max": "1GiB"},
        "remote": {"mounted": False},  # a directory of this test's, wherever that lies
        "policy": {
            "nvme": {"every_steps": 1, "keep_last": 1},
            "remote": {"every_steps": 1, "keep_last": 1},
        },
    },
}
ALONE = merged(VALUES, {"cluster": {"membership": "none"}, "topology": {"source": "none"}})
NOT_ROOT = {"security": {"user": 10001, "group": 10001}}


@dataclasses.dataclass
class World:
    """One node with the chart's pods on it."""

    node: Node
    objects: list[rendered.Object]
    places: dict[str, pathlib.Path]  # volume -> directory

    def mounts(self, one: rendered.Object) -> list[Mount]:
        tools = [Mount(BIN, "/opt/bin"), Mount(TREE / "deploy/container", "/opt/container")]
        return tools + [
            Mount(self.places[each["name"]], each["mountPath"], not each.get("readOnly", False))
            for each in one["volumeMounts"]
        ]

    def run(self, name: str, **options: object) -> Container:
        """A container of the DaemonSet's pod. The image's programs are this build's."""
        spec = daemon_pod(self.objects)
        one = container(spec, name)
        names = {
            "/usr/bin/ckptd": "/opt/bin/ckptd",
            "/usr/libexec/holdfast/node-config": "/opt/container/node-config",
        }
        command = [names.get(word, word) for word in one["command"]]
        return self.node.start(
            command,
            self.mounts(one),
            confinement(one),
            env=environment(one) | {"POD_IP": "127.0.0.1"},
            hosts=etcd_hosts(self.objects),
            **{"own_processes": not spec.get("hostPID", False)} | options,
        )

    def start_pod(self) -> Container:
        """As the kubelet does: one init container after the other, then the daemon."""
        for one in daemon_pod(self.objects)["initContainers"]:
            code, said = self.run(one["name"]).wait()
            assert code == 0, said
        daemon = self.run("ckptd")
        daemon.wait_until_ready()
        return daemon

    def ckptctl(self, *words: str) -> str:
        one = container(daemon_pod(self.objects), "ckptd")
        command = ["/opt/bin/ckptctl", *words]
        code, said = self.node.start(
            command, self.mounts(one), confinement(one), env=rendered.literal_env(one)
        ).wait()
        assert code == 0, said
        return said

    def rank(self, job: str = "job", uid: int = USER) -> Container:
        """A training process in a pod that has the sockets and nothing else of Holdfast."""
        words = ["/run/holdfast/ckptd.sock", job, "0", "1", "3000000"]
        return self.node.start(
            ["/opt/bin/holdfast_test_rank", *words],
            [Mount(self.places["sockets"], "/run/holdfast"), Mount(BIN, "/opt/bin")],
            Confinement(uid, uid),
        )

    def serving(self, probe: rendered.Object) -> bool:
        """What the kubelet's gRPC probe would find: grpc.health.v1.Health/Check by HTTP/2."""
        service = probe["grpc"].get("service", "").encode()
        message = b"\x0a" + bytes([len(service)]) + service if service else b""
        url = f"http://127.0.0.1:{probe['grpc']['port']}/grpc.health.v1.Health/Check"
        done = subprocess.run(
            self.node.network(["curl", "--silent", "--http2-prior-knowledge", "--max-time", "10"])
            + ["-H", "content-type: application/grpc", "-H", "te: trailers"]
            + ["--data-binary", "@-", url],
            input=b"\0" + len(message).to_bytes(4, "big") + message,
            capture_output=True,
            timeout=DEADLINE_S,
        )
        return done.stdout == b"\0\0\0\0\x02\x08\x01"  # a message that says SERVING


def etcd_hosts(objects: list[rendered.Object]) -> list[str]:
    service = [one["metadata"]["name"] for one in rendered.of_kind(objects, "StatefulSet")]
    return [f"{name}-0.{name}.holdfast.svc.cluster.local" for name in service]


def start_etcd(world: World) -> Container:
    """The StatefulSet's container, with Debian's etcd as its image; returns when it is ready."""
    spec = only(world.objects, "StatefulSet")["spec"]["template"]["spec"]
    (one,) = spec["containers"]
    user = spec["securityContext"]["runAsUser"]
    one["securityContext"] |= {"runAsUser": user, "runAsGroup": user}
    os.chown(world.places["data"], user, user)  # fsGroup
    name = FIELDS["metadata.name"]
    command = [word.replace("$(POD_NAME)", name) for word in one["command"]]
    running = world.node.start(
        command, world.mounts(one), confinement(one), hosts=etcd_hosts(world.objects)
    )
    wanted = {port["name"]: port["containerPort"] for port in one["ports"]}
    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
        get = one[probe]["httpGet"]
        url = f"http://127.0.0.1:{wanted[get['port']]}{get['path']}"
        ask = world.node.network(["curl", "--silent", "--fail", "--max-time", "10", url])
        until(lambda ask=ask: subprocess.run(ask, capture_output=True).returncode == 0, running)
    return running


def until(condition: Callable[[], bool], running: Container | None = None) -> None:
    end = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < end, "not in time"
        assert running is None or running.process.poll() is None, running.stop()
        time.sleep(0.02)


@pytest.fixture
def make_world(tmp_path: pathlib.Path) -> Iterator[Callable[[dict], World]]:
    made: list[World] = []
    memory = tempfile.mkdtemp(prefix="hf-pod-", dir="/dev/shm")
    os.chmod(memory, 0o755)  # as the kubelet makes it

    def make(values: dict) -> World:
        objects = rendered.objects_of(rendered.render_text(values))
        places = {"memory": pathlib.Path(memory), "data": tmp_path / "data"}
        for volume in daemon_pod(objects)["volumes"]:
            places.setdefault(volume["name"], tmp_path / volume["name"])
        for place in places.values():
            place.mkdir(exist_ok=True)
        os.chmod(places["settings"], 0o777)  # an emptyDir
        for name, text in only(objects, "ConfigMap")["data"].items():
            (places["template"] / name).write_text(text)
        if daemon_pod(objects)["containers"][0]["securityContext"]["runAsUser"] != 0:
            os.chmod(places["remote"], 0o777)  # a claim is what its storage makes it
        made.append(World(Node(tmp_path), objects, places))
        return made[-1]

    yield make
    for world in made:
        world.node.close()
    shutil.rmtree(memory)


def save(rank: Container, steps: Sequence[int]) -> None:
    for step in steps:
        assert rank.ask(f"save {step}") == "ok sealed"
        assert rank.ask("tier nvme") == "ok nvme"
        assert rank.ask("tier remote") == "ok remote"


@pytest.mark.parametrize("security", [{}, NOT_ROOT], ids=["root", "not-root"])
def test_a_pod_of_the_cluster_serves_and_its_update_loses_nothing(make_world, security) -> None:
    world = make_world(merged(VALUES, security))
    start_etcd(world)
    daemon = world.start_pod()
    spec = container(daemon_pod(world.objects), "ckptd")
    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
        assert world.serving(spec[probe]), probe
    daemon.wait_for("this node is a member")
    nodes = world.ckptctl("nodes")
    assert "zone=eu-1a" in nodes and "host=gpu-17" in nodes and "127.0.0.1:9465" in nodes, nodes
    listening = subprocess.check_output(world.node.network(["ss", "-Hltn"]), text=True)
    ports = {int(line.split()[3].rsplit(":", 1)[1]) for line in listening.splitlines()}
    low, high = (int(rendered.literal_env(spec)[f"FI_TCP_PORT_{end}_RANGE"]) for end in ("LOW", "HIGH"))  # fmt: skip
    known = {port["containerPort"] for port in spec["ports"]} | {2379, 2380}
    assert known <= ports and all(low <= port <= high for port in ports - known), listening
    rank = world.rank()
    assert rank.ask("open") == "ok attempt=1"
    assert rank.ask("restore").startswith("error NOTHING_TO_RESTORE")
    save(rank, [1, 2])
    # The update of the DaemonSet: this pod ends, the next one begins, and the training goes on.
    daemon.process.terminate()
    code, said = daemon.wait()
    assert code == 0 and "Permission denied" not in said and "not permitted" not in said, said
    assert not world.serving(spec["readinessProbe"])
    world.start_pod()
    assert world.serving(spec["readinessProbe"])
    save(rank, [3])
    # The rank's pod is killed, and comes again.
    rank.kill()
    rank.wait()
    again = world.rank()
    assert again.ask("open") == "ok attempt=2"
    assert again.ask("restore") == "ok attempt=1 step=3"


def test_a_user_has_his_own_files_and_nobody_else(make_world) -> None:
    world = make_world(ALONE)
    world.start_pod()
    for job, uid in (("one", USER), ("two", USER + 1)):
        rank = world.rank(job, uid)
        assert rank.ask("open") == "ok attempt=1", job
        assert rank.ask("restore").startswith("error NOTHING_TO_RESTORE")
        save(rank, [1])
    (image,) = (world.places["remote"] / "two").glob("*/*.safetensors")
    assert (image.stat().st_uid, image.stat().st_mode & 0o777) == (USER + 1, 0o640)
    thief = world.rank("one", USER + 1).ask("open")
    assert "belongs to uid 10042, not to uid 10043" in thief, thief


def test_ckptctl_finds_a_daemon_whose_sockets_are_elsewhere(make_world) -> None:
    world = make_world(merged(ALONE, {"socket": {"hostPath": "/run/holdfast-prod"}}))
    world.start_pod()
    assert "no job" in world.ckptctl("status")


def test_without_the_nodes_processes_nobody_is_let_in(make_world) -> None:
    world = make_world(ALONE)
    del daemon_pod(world.objects)["hostPID"]
    daemon = world.start_pod()
    world.rank().send("open")
    assert "is the peer in another container" in daemon.wait_for("client turned away")


@pytest.mark.parametrize("missing", ["CHOWN", "FOWNER", "DAC_OVERRIDE"])
def test_each_capability_is_needed(make_world, missing: str) -> None:
    world = make_world(ALONE)
    context = container(daemon_pod(world.objects), "ckptd")["securityContext"]
    context["capabilities"]["add"].remove(missing)
    daemon = world.start_pod()
    rank = world.rank()
    assert rank.ask("open") == "ok attempt=1"
    assert rank.ask("restore").startswith("error NOTHING_TO_RESTORE")
    save(rank, [1])
    (image,) = (world.places["remote"] / "job").glob("*/*.safetensors")
    if missing == "CHOWN":
        assert image.stat().st_uid == 0
    elif missing == "FOWNER":
        assert image.stat().st_mode & 0o777 != 0o640
    else:
        save(rank, [2])
        assert "Permission denied" in daemon.wait_for("could not be removed from")


def test_what_keep_last_does_not_keep_goes(make_world) -> None:
    world = make_world(ALONE)
    daemon = world.start_pod()
    rank = world.rank()
    assert rank.ask("open") == "ok attempt=1"
    assert rank.ask("restore").startswith("error NOTHING_TO_RESTORE")
    save(rank, [1, 2, 3])
    for tier in ("nvme-0", "remote"):
        job = world.places[tier] / "job"
        until(lambda job=job: [one.name for one in job.glob("*-a1")] == ["3-a1"], daemon)
    assert "could not be removed" not in daemon.stop()
