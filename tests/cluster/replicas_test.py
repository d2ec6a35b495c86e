"""Replicas on several nodes: what they hold alike is written to remote once, and read again by all."""

from __future__ import annotations

import concurrent.futures
import pathlib
from typing import Any

import pytest

from .cluster_of_daemons import POLICY, Cluster, Job, wait_until
from .network import Network
from .rank import Rank

STATE_BYTES = 100_000  # as in rank.py
TENSOR_BYTES = 2 * 8 * (STATE_BYTES // 16 + 1)  # two tensors of u64
HEADER_BYTES = 4096
OBJECT_BYTES = len('{"step": 1}')
BIG_STATE_BYTES = 6 << 20
MEMORY_ONLY = f"{POLICY} nvme.every_steps=0"


def saved_replicas(
    network: Network, *, differs: int | None = None, policy: str = MEMORY_ONLY, **settings: Any
) -> tuple[Cluster, Job]:
    """Four ranks on two nodes, all with rank 0's tensors (but for the one that differs), and step 1 in remote."""
    cluster = Cluster(network, "a b", **settings)
    job = Job(cluster, policy=policy)
    job.start("a a b b")
    assert job.resume() == 0
    alike(job, differs)
    job.save()
    return cluster, job


def alike(job: Job, differs: int | None = None) -> None:
    for rank in job.ranks:
        if rank.rank != differs:
            assert rank.ask("as 0") == "ok"


def files(job: Job, step: int) -> dict[int, int]:
    """Lengths of the images of a committed step, by rank."""
    directory = job.manifests()[job.attempt, step]
    found = sorted(directory.glob("shard-*.safetensors"))
    return {int(path.name.split("-")[1]): path.stat().st_size for path in found}


def lose_everything_but_remote(cluster: Cluster, job: Job) -> None:
    job.kill()
    for name, daemon in cluster.daemons.items():
        daemon.kill()
        cluster[name].run(
            ["sh", "-c", "rm -rf /dev/shm/holdfast/* /nvme/holdfast /var/lib/holdfast/*"]
        )
    cluster.start(" ".join(cluster.nodes))


def test_replicas_write_their_tensors_once(network: Network) -> None:
    cluster, job = saved_replicas(network)
    lengths = files(job, 1)
    assert sum(lengths.values()) == TENSOR_BYTES + 4 * (HEADER_BYTES + OBJECT_BYTES), lengths
    # Two of the four have a tensor each: no rank writes more than its share and one tensor.
    assert max(lengths.values()) == TENSOR_BYTES // 2 + HEADER_BYTES + OBJECT_BYTES, lengths
    shown = {
        copy["rank"]: copy
        for copy in cluster.tell("a", "where", job.name, "--step", "1")["copies"]
        if copy["tier"] == "remote"
    }
    assert {rank: copy["bytes"] for rank, copy in shown.items()} == lengths
    assert shown[3]["shard_bytes"] == TENSOR_BYTES + HEADER_BYTES + OBJECT_BYTES
    assert shown[3]["rest_in"] == "ranks 0, 1, 2"
    # Whoever reads gets all of any rank, from remote, whichever node it is on.
    for name in cluster.nodes:
        reader = Rank(cluster[name], job.name)
        for rank in range(4):
            said = reader.ask(f"attach rank={rank} without=memory without=nvme without=peer")
            assert said.startswith("ok step=1 source=remote"), said
            assert reader.ask("read as 0") == "ok tensors=2 world=4"
    assert "every digest is right" in cluster.daemons["a"].ctl("verify", job.name)
    # All memory is lost, and the ranks come back on other nodes: each bit is checked.
    lose_everything_but_remote(cluster, job)
    job.start("b b a a")
    job.join()
    alike(job)
    said = job.ask("restore")
    assert job.agreed(said) == 1
    assert all("source=remote" in each for each in said), said
    job.save()
    job.check_history()


def read_from_remote(cluster: Cluster) -> int:
    """Bytes, since the daemons were started."""
    told = [cluster.tell(name, "status")["daemon"] for name in cluster.nodes]
    return sum(
        int(tier.get("bytes_read", 0))
        for daemon in told
        for tier in daemon["tiers"]
        if tier["tier"] == "remote"
    )


def test_a_cold_start_reads_each_byte_once(network: Network) -> None:
    """Four nodes: what they share each of them reads in part, and passes on."""
    cluster = Cluster(network, "a b c d")
    job = Job(cluster, policy=MEMORY_ONLY)
    job.start("a b c d", state_bytes=BIG_STATE_BYTES)
    assert job.resume() == 0
    alike(job)
    job.save()
    lengths = files(job, 1)
    assert max(lengths.values()) < 0.6 * BIG_STATE_BYTES, lengths
    lose_everything_but_remote(cluster, job)
    job.start("b c d a", state_bytes=BIG_STATE_BYTES)
    job.join()
    alike(job)
    said = job.ask("restore")
    assert job.agreed(said) == 1
    assert all("source=remote" in each for each in said), said
    assert read_from_remote(cluster) == sum(lengths.values())
    job.save()
    job.check_history()


def test_whoever_reads_for_others_may_die(network: Network) -> None:
    """Amid what it passes on: the others read the rest of it themselves."""
    cluster = Cluster(network, "a b c d")
    job = Job(cluster, policy=MEMORY_ONLY)
    job.start("a b c d", state_bytes=BIG_STATE_BYTES)
    assert job.resume() == 0
    alike(job)
    job.save()
    lose_everything_but_remote(cluster, job)
    lengths = files(job, 1)
    dies = "abcd"[max(lengths, key=lambda rank: lengths[rank])]
    cluster.start_anew(dies, armed={dies: "daemon.pull.passed_on:kill"})
    job.start("a b c d", state_bytes=BIG_STATE_BYTES)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        restored = pool.submit(lambda: (job.join(), alike(job), job.restore())[2])
        cluster.revive(dies)
        assert restored.result() == 1
    job.save()
    job.check_history()


@pytest.mark.parametrize("places", ["b b a a", "d c c d"])
def test_reading_the_manifest_is_enough(network: Network, places: str) -> None:
    """Nothing is left of the cluster that wrote it but /remote; others than its nodes can read that, too."""
    cluster, job = saved_replicas(network, policy=POLICY)
    assert (job.save(), job.save()) == (2, 3)
    lengths = files(job, 3)
    assert sum(lengths.values()) == TENSOR_BYTES + 4 * (HEADER_BYTES + OBJECT_BYTES), lengths
    saved = {path: path.read_bytes() for path in job.manifests()[job.attempt, 3].iterdir()}
    for node in cluster.nodes.values():
        node.kill()
        node.erase("nvme")
        node.erase("state")
    assert cluster.etcd is not None
    cluster.etcd.wipe()
    if places == "d c c d":
        job.cluster = Cluster(network, "c d", etcd_members=0)
    else:
        for node in cluster.nodes.values():
            node.boot()
        cluster.start("a b")
    job.cluster.adopt_remote(places[0])  # to what they know it is another cluster's
    job.start(places)
    job.join()
    alike(job)
    said = job.ask("restore")
    assert job.agreed(said) == 3
    assert all("source=remote" in each for each in said), said
    assert {path: path.read_bytes() for path in saved} == saved
    job.save()
    job.check_history()


def test_one_that_diverged_writes_all_its_own(network: Network) -> None:
    cluster, job = saved_replicas(network, differs=2)
    lengths = files(job, 1)
    whole = TENSOR_BYTES + HEADER_BYTES + OBJECT_BYTES
    assert lengths[2] == whole
    assert sum(lengths.values()) == whole + TENSOR_BYTES + 3 * (HEADER_BYTES + OBJECT_BYTES)
    host = cluster.host(job.name, "a")
    said = r"rank 2 holds the same tensors as ranks 0, 1, 3 with other bytes"
    cluster.wait_said(host, said)
    explained = cluster.tell("b", "explain", job.name, "--step", "1")
    assert any(said in reason for reason in explained["steps"][0]["reasons"]), explained
    lose_everything_but_remote(cluster, job)
    job.start("a a b b")
    job.join()
    alike(job, differs=2)
    assert job.agreed(job.ask("restore")) == 1


def test_an_owner_is_killed_amid_its_flush_and_the_step_becomes_whole(network: Network) -> None:
    cluster, job = saved_replicas(network)
    # Its files of step 2 are written, and not yet published, when its daemon dies.
    cluster.start_anew("b", armed={"b": "daemon.flush.data_written:kill"})
    job.ask("save 2")
    cluster.revive("b")
    wait_until("the manifest of step 2", lambda: (job.attempt, 2) in job.manifests())
    lengths = files(job, 2)
    assert sum(lengths.values()) == TENSOR_BYTES + 4 * (HEADER_BYTES + OBJECT_BYTES), lengths
    lose_everything_but_remote(cluster, job)
    job.start("a a b b")
    job.join()
    alike(job)
    assert job.agreed(job.ask("restore")) == 2


def test_a_bad_owners_file_is_named_and_an_older_step_restored(network: Network) -> None:
    cluster, job = saved_replicas(network)
    job.save()
    lengths = files(job, 2)
    owner = max(lengths, key=lambda rank: lengths[rank])
    directory = job.manifests()[job.attempt, 2]
    path = directory / f"shard-{owner:05d}-of-00004.safetensors"
    flip_a_byte_of_data(path)
    lose_everything_but_remote(cluster, job)
    job.start("a a b b")
    job.join()
    alike(job)
    job.safe = 1  # what was promised is damaged
    said = job.ask("restore")
    assert job.agreed(said) == 1
    cluster.wait_said(cluster.host(job.name, "a"), path.name)


def flip_a_byte_of_data(path: pathlib.Path) -> None:
    with path.open("r+b") as file:
        file.seek(HEADER_BYTES + 100)
        byte = file.read(1)
        file.seek(HEADER_BYTES + 100)
        file.write(bytes([byte[0] ^ 1]))


def test_a_job_may_have_every_file_whole(network: Network) -> None:
    settings = {"policy": {"remote": {"share_replicas": False}}}
    _, job = saved_replicas(network, settings=settings)
    assert set(files(job, 1).values()) == {TENSOR_BYTES + HEADER_BYTES + OBJECT_BYTES}
