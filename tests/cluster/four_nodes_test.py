"""Four nodes with one remote directory: any one part of any durable tier is lost while all nodes lose power, and is put back."""

from __future__ import annotations

import hashlib
import pathlib
import shutil
from collections.abc import Callable

import pytest

from .cluster_of_daemons import Cluster, Job, wait_until
from .network import Network

NODES = "a b c d"
# Every step goes to both, and none is old enough to go.
POLICY = (
    "remote.every_steps=1 remote.keep_last=100 nvme.every_steps=1 nvme.keep_last=100 replicas=1"
)


def _away(path: pathlib.Path, kept: pathlib.Path) -> Callable[[], None]:
    path.rename(kept)

    def back() -> None:
        shutil.rmtree(path, ignore_errors=True)
        kept.rename(path)

    return back


def _flipped(path: pathlib.Path) -> Callable[[], None]:
    good = path.read_bytes()
    bad = bytearray(good)
    bad[len(bad) // 2] ^= 1
    path.write_bytes(bad)

    def back() -> None:
        path.write_bytes(good)

    return back


def _saved_files(network: Network) -> dict[str, str]:
    """By path: of the three steps, in remote and on every drive. (What is made again for people does not count.)"""
    found = {}
    for place in [network.remote, *sorted(network.directory.glob("nodes/*/nvme/holdfast"))]:
        for path in sorted(place.glob("job/*/*")) + [place / "job" / "JOB"]:
            if path.name != "manifest.json":
                name = str(path.relative_to(network.directory))
                found[name] = hashlib.sha256(path.read_bytes()).hexdigest()
    return found


def _start_all(cluster: Cluster) -> None:
    cluster.start(NODES)
    for name in NODES.split():
        cluster.wait_members(name, NODES)


def _lose_power(cluster: Cluster, job: Job) -> None:
    job.kill()
    for node in cluster.nodes.values():
        node.reboot()


def test_what_any_one_part_held_is_there_when_it_is_back(network: Network) -> None:
    cluster = Cluster(network, NODES)
    job = Job(cluster, policy=POLICY)
    job.start(NODES)
    assert job.resume() == 0
    for step in (1, 2, 3):
        assert job.save() == step
        assert job.ask("tier nvme") == ["ok nvme"] * 4
    before = _saved_files(network)
    assert sum("3-a1" in name and name.endswith(".record") for name in before) == 8, before
    remote = network.remote / "job"
    drive = network.directory / "nodes" / "d" / "nvme" / "holdfast"
    kept = network.directory / "kept"
    losses: dict[str, Callable[[], Callable[[], None]]] = {
        "a drive": lambda: _away(drive / "job", kept),
        "a step in remote": lambda: _away(remote / "3-a1", kept),
        "the job in remote": lambda: _away(remote, kept),
        "a MANIFEST": lambda: _flipped(remote / "3-a1" / "MANIFEST"),
        "JOB in remote": lambda: _flipped(remote / "JOB"),
        "an image in remote": lambda: _flipped(next(remote.glob("3-a1/*-00002-*.safetensors"))),
    }
    for number, (what, lose) in enumerate(losses.items()):
        _lose_power(cluster, job)
        put_back = lose()
        if number % 2:
            cluster["d"].erase("state")
        _start_all(cluster)
        job.start(NODES)
        assert job.resume() == 3, what
        _lose_power(cluster, job)
        put_back()
        assert {name: _saved_files(network).get(name) for name in before} == before, what
    _start_all(cluster)
    job.start(NODES)
    assert job.resume() == 3
    wait_until(
        "everything is whole again",
        lambda: all(
            any(reason.startswith(f"{tier}: all of") for reason in step["reasons"])
            for step in cluster.tell("a", "explain", "job").get("steps", [{"reasons": []}])
            for tier in ("nvme", "remote")
        ),
    )
    assert job.save() == 4


@pytest.mark.parametrize("lost", ["the newest step's other copies", "everything but remote"])
def test_remote_alone_brings_all_four_back(network: Network, lost: str) -> None:
    cluster = Cluster(network, NODES)
    job = Job(cluster, policy=POLICY)
    job.start(NODES)
    assert job.resume() == 0
    assert job.save() == 1
    _lose_power(cluster, job)
    for node in cluster.nodes.values():
        node.erase("nvme")
        if lost == "everything but remote":
            node.erase("state")
    _start_all(cluster)
    if lost != "everything but remote":
        # Their drives are empty ones, of which nobody has said that the old ones are gone for good.
        for name in NODES.split():
            wait_until(
                "it is missed",
                lambda name=name: (
                    "forget-drive" in cluster.tell(name, "status").get("daemon", {}).__str__()
                ),
            )
    job.start(NODES)
    assert job.resume() == 1
    assert job.save() == 2
