"""Daemons, ranks and ckptctl of this release and of the one before it, beside each other: each way round, and while a cluster is updated,
node by node, there and back."""

from __future__ import annotations

import os
import pathlib
import subprocess

import pytest

from .cluster_of_daemons import SHORT_LEASE_S, Cluster, Job, wait_until
from .network import Network
from .node import PROGRAMS
from .peers_test import copies, save

POLICY = "replicas=1 nvme.every_steps=1 remote.every_steps=1"


@pytest.fixture(scope="module")
def previous() -> pathlib.Path:
    """The programs of the release before."""
    given = os.environ.get("HOLDFAST_TEST_PREVIOUS_BIN", "")
    assert given, "HOLDFAST_TEST_PREVIOUS_BIN is not set: run this by tests/cluster/run_versions"
    return pathlib.Path(given)


def use(cluster: Cluster, name: str, programs: pathlib.Path) -> None:
    """From its next start on, with settings that it knows."""
    cluster[name].programs = programs
    settings = cluster.daemons[name].settings
    if programs == PROGRAMS:
        settings["cluster"]["plaintext"] = True
    else:
        settings["cluster"].pop("plaintext", None)  # which was not asked for in 0.1
        settings.pop("restore", None)


def cluster_of(network: Network, programs: dict[str, pathlib.Path]) -> Cluster:
    cluster = Cluster(network, " ".join(programs), lease_s=SHORT_LEASE_S, start=False)
    for name, place in programs.items():
        use(cluster, name, place)
    cluster.start(" ".join(programs))
    for name in programs:
        cluster.wait_members(name, " ".join(programs))
    return cluster


def a_job(cluster: Cluster, places: str) -> Job:
    job = Job(cluster, policy=POLICY)
    job.start(places)
    assert job.resume() == 0
    return job


def in_tiers(job: Job) -> None:
    """The next step, everywhere."""
    save(job, job.step + 1)
    for tier in ("nvme", "remote"):
        assert job.ask(f"tier {tier} 30000") == [f"ok {tier}"] * len(job.ranks)
    job.settle()
    job.safe = job.step


@pytest.mark.parametrize("older", ["a", "b c"])
@pytest.mark.parametrize("lost", ["a", "b"])
def test_nodes_of_two_releases_share_a_job(
    network: Network, previous: pathlib.Path, older: str, lost: str
) -> None:
    """Whoever hosts it, saves, keeps replicas, loses a node and restores from what the others have."""
    cluster = cluster_of(
        network, {name: previous if name in older.split() else PROGRAMS for name in "abc"}
    )
    job = a_job(cluster, "a b c")
    for _ in range(3):
        in_tiers(job)
    there = [c for c in copies(cluster, job, "c", job.step) if c[1] == "peer"]
    assert {rank for rank, _, _ in there} == {0, 1, 2}, there
    cluster[lost].kill()
    job.start(" ".join(name if name != lost else "c" for name in "abc"))
    job.join()
    said = job.ask_anew("restore")
    assert all(f"step={job.step} " in f"{each} " for each in said), said
    assert not any("source=remote" in each for each in said), said
    in_tiers(job)


@pytest.mark.parametrize("ranks_are_older", [True, False])
def test_ranks_and_ckptctl_of_the_other_release(
    network: Network, previous: pathlib.Path, ranks_are_older: bool
) -> None:
    daemons, others = (PROGRAMS, previous) if ranks_are_older else (previous, PROGRAMS)
    cluster = cluster_of(network, {"a": daemons, "b": daemons})
    for name in "ab":
        cluster[name].programs = others
    job = a_job(cluster, "a b")
    in_tiers(job)
    job.start("b a")
    assert job.resume() == job.step
    in_tiers(job)
    for words in (
        "status",
        "jobs",
        "nodes",
        "list job",
        "where job",
        "explain job",
        "timeline job",
    ):
        assert "error" not in cluster.tell("a", *words.split()), words
    cluster.daemons["a"].ctl("verify", "job", "--all")
    cluster.daemons["b"].ctl("pin", "job", "--step", str(job.step))
    cluster.daemons["b"].ctl("events", "--json")
    assert cluster.status("job", "b")["phase"] == "running"


def test_a_cluster_is_updated_node_by_node_and_back(
    network: Network, previous: pathlib.Path
) -> None:
    """Ranks live on; what lies in memory stays; a step is saved between any two updates, and restored by each mixture."""
    cluster = cluster_of(network, dict.fromkeys("abc", previous))
    job = a_job(cluster, "a b c")
    in_tiers(job)
    for programs in (PROGRAMS, previous):
        for name in "abc":
            daemon = cluster.daemons[name]
            before = [c for c in copies(cluster, job, "a", job.step) if c[2] == name]
            assert daemon.terminate() == 0, daemon.log()
            use(cluster, name, programs)
            cluster.start(name)
            for each in "abc":
                cluster.wait_members(each, "a b c")
            wait_until(
                "all copies",
                lambda name=name, before=before: (
                    set(before) <= set(copies(cluster, job, "a", job.step))
                ),
            )
            job.save_soon()
            in_tiers(job)
        job.start("c a b")
        assert job.resume() == job.step
        in_tiers(job)


def test_an_older_daemon_cannot_say_what_would_be_lost_with_it(
    network: Network, previous: pathlib.Path
) -> None:
    """Which is not taken for "nothing"."""
    cluster = cluster_of(network, {"a": PROGRAMS, "b": previous})
    job = a_job(cluster, "a b")
    in_tiers(job)
    with pytest.raises(subprocess.CalledProcessError) as refused:
        cluster.daemons["a"].ctl("drain", "b", "--wait", "20s")
    assert refused.value.returncode == 1
    assert "of an older version" in refused.value.output
    cluster.daemons["a"].ctl("drain", "b", "--undo")
    in_tiers(job)
