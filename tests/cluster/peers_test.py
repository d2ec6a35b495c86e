"""Copies in other nodes' memory: real daemons on nodes that share nothing, shards read over libfabric (tcp) or the daemons' own
connections."""

from __future__ import annotations

import concurrent.futures
import pathlib
from typing import Any

import pytest

from .cluster_of_daemons import SHORT_LEASE_S, Cluster, Job, wait_until
from .links import Way
from .matrix import matrix
from .network import Network
from .rank import start_training

POLICY = "replicas=1 remote.every_steps=0 remote.every_ms=0"
BIG_STATE_BYTES = 24 << 20  # many pieces of a pull


def replicated_job(
    network: Network, names: str, places: str, *, policy: str = POLICY, **settings: Any
) -> tuple[Cluster, Job]:
    """A job that has committed step 1 from these places, and has it in other nodes' memory."""
    cluster = Cluster(network, names, lease_s=SHORT_LEASE_S, **settings)
    job = Job(cluster, policy=policy)
    job.start(places)
    assert job.resume() == 0
    save(job, 1)
    return cluster, job


def save(job: Job, step: int) -> None:
    """Until every shard of it lies in another node's memory."""
    assert job.ask(f"save {step}") == ["ok sealed"] * len(job.ranks)
    assert job.ask("tier peer 30000") == ["ok peer"] * len(job.ranks)
    job.settle()


def protection(cluster: Cluster, job: Job, asked: str) -> dict[str, tuple[int, str]]:
    lines = cluster.status(job.name, asked).get("protection", [])
    return {one["kind"]: (one["step"], one["from"]) for one in lines if "step" in one}


def copies(cluster: Cluster, job: Job, asked: str, step: int) -> list[tuple[int, str, str]]:
    """(rank, tier, node) of what is good."""
    said = cluster.tell(asked, "where", job.name, "--step", str(step)).get("copies", [])
    return sorted((c["rank"], c["tier"], c["node"]) for c in said if c["state"] == "good")


@pytest.mark.parametrize("provider", ["auto", "off"])
def test_a_lost_nodes_ranks_go_on_from_their_peers(network: Network, provider: str) -> None:
    cluster, job = replicated_job(
        network, "a b spare", "a b", settings={"fabric": {"provider": provider}}
    )
    for step in (2, 3):
        save(job, step)
    assert protection(cluster, job, "a")["node"] == (3, "memory+peer")
    cluster["b"].kill()
    job.start("a spare")
    job.join()
    said = job.ask("restore")
    assert "step=3 " in f"{said[0]} " and "source=" not in said[0], said
    assert "step=3 " in f"{said[1]} ", said
    kept_there = "source=" not in said[1]
    assert kept_there or "source=peer" in said[1], said
    save(job, 4)
    assert protection(cluster, job, "a")["node"] == (4, "memory+peer")
    for daemon in cluster.daemons.values():
        if daemon.node.is_running():
            log = daemon.log()
            assert ("fabric provider=" in log) == (provider == "auto"), log


def test_nothing_is_read_from_remote_when_a_node_is_lost(network: Network) -> None:
    policy = "replicas=1 remote.every_steps=1"
    cluster, job = replicated_job(network, "a b c d", "a b c", policy=policy)
    assert job.ask("tier remote") == ["ok remote"] * 3
    cluster["c"].kill()
    job.start("a b d")
    job.join()
    said = job.ask("restore")
    assert all("step=1 " in f"{each} " for each in said), said
    assert not any("source=remote" in each for each in said), said


def test_replicas_outlive_their_daemon(network: Network) -> None:
    cluster, job = replicated_job(network, "a b", "a b")

    def in_memory() -> list[tuple[int, str, str]]:
        return [c for c in copies(cluster, job, "a", 1) if c[1] in ("memory", "peer")]

    before = in_memory()
    assert [c for c in before if c[1] == "peer"] == [(0, "peer", "b"), (1, "peer", "a")]
    cluster.start_anew("a b")
    wait_until("all copies", lambda: in_memory() == before)
    assert protection(cluster, job, "a")["node"] == (1, "memory+peer")


def test_what_a_lost_node_kept_is_kept_by_another(network: Network) -> None:
    cluster, job = replicated_job(
        network, "a b c d", "a b", policy=POLICY.replace("replicas=1", "replicas=2")
    )

    def keepers() -> set[str]:
        return {
            node for rank, tier, node in copies(cluster, job, "a", 1) if (rank, tier) == (0, "peer")
        }

    wait_until("second copies", lambda: len(keepers()) == 2)
    lost = min(keepers() - {"b"})
    cluster[lost].kill()
    wait_until("made up for", lambda: keepers() == {"b", "c", "d"} - {lost})
    assert protection(cluster, job, "a")["node"] == (1, "memory+peer")
    save(job, 2)


@pytest.mark.parametrize(
    "point",
    matrix(
        "daemon.pull.offered",  # it reads the other's shard
        "daemon.pull.held",  # the other one reads its shard
        whole=["daemon.fetch.published"],
    ),
)
def test_a_daemon_is_killed_in_the_middle_of_a_pull(network: Network, point: str) -> None:
    cluster = Cluster(network, "a b", lease_s=SHORT_LEASE_S)
    job = Job(cluster, policy=POLICY)
    job.start("a b")
    assert job.resume() == 0
    cluster.start_anew("b", armed={"b": f"{point}:kill"})
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        answers = pool.submit(lambda: job.ask("save 1") + job.ask("tier peer 60000"))
        cluster.revive("b")
        said = answers.result()
    assert said == ["ok sealed"] * 2 + ["ok peer"] * 2, said
    assert protection(cluster, job, "a")["node"] == (1, "memory+peer")


def test_replicas_wait_while_training_needs_the_network(network: Network) -> None:
    cluster, job = replicated_job(network, "a b", "a b")

    def quiet(node: str) -> dict[str, Any]:
        return cluster.tell(node, "status")["daemon"].get("quiet", {})

    def replicas() -> set[str]:
        """The nodes that have taken theirs of step 2."""
        return {node for _, tier, node in copies(cluster, job, "a", 2) if tier == "peer"}

    assert job.ask("busy on") == ["ok on"] * 2
    assert job.ask("save 2") == ["ok sealed"] * 2
    # (On a machine that stands still for some seconds the window does not hold it any more.)
    for node in ("a", "b"):
        wait_until("its pull", lambda node=node: quiet(node).get("holding") or node in replicas())
        # One piece: it goes at once, or not at all.
        there = node in replicas()
        assert not (quiet(node).get("holding") and there)
    assert job.ask("busy off") == ["ok off"] * 2
    wait_until("the replicas are there", lambda: replicas() == {"a", "b"})
    assert all(quiet(node)["held_ms"] > 0 for node in ("a", "b"))
    assert job.ask("busy on") == ["ok on"] * 2
    save(job, 3)  # which is waited for
    assert protection(cluster, job, "a")["node"] == (3, "memory+peer")


@pytest.mark.parametrize("way", ["both", "out", "in"])
def test_the_network_is_cut_in_the_middle_of_a_pull(network: Network, way: Way) -> None:
    cluster = Cluster(network, "a b", lease_s=SHORT_LEASE_S)
    job = Job(cluster, policy=POLICY)
    job.start("a b")
    assert job.resume() == 0
    cluster.start_anew("b", armed={"b": "daemon.pull.offered:stop"})
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        answers = pool.submit(lambda: job.ask("save 1"))
        process = cluster.daemons["b"].process
        assert process is not None
        process.wait_stopped()
        assert answers.result() == ["ok sealed"] * 2
    network.links.cut(cluster["b"], way=way)
    process.resume()
    cluster.wait_said("a", "b is (out of reach|gone)")
    network.links.heal(cluster["b"])
    save_again = job.ask("tier peer 60000")
    assert save_again == ["ok peer"] * 2, save_again
    assert protection(cluster, job, "a")["node"] == (1, "memory+peer")


@pytest.mark.parametrize("trouble", ["loses packets", "is late", "is slow"])
def test_pulls_over_a_network_that(network: Network, trouble: str) -> None:
    """Replicas are made, and a lost node's rank is brought back from them."""
    cluster = Cluster(network, "a b c", lease_s=SHORT_LEASE_S)
    job = Job(cluster, policy=POLICY)
    job.start("a b", state_bytes=BIG_STATE_BYTES)
    assert job.resume() == 0
    for node in cluster.nodes.values():
        if trouble == "loses packets":
            network.links.lossy(node, share=0.02)
        elif trouble == "is slow":
            network.links.slow(node, bytes_per_s=8 << 20)
    if trouble == "is late":
        for here, there in (("a", "b"), ("a", "c"), ("b", "c")):
            network.links.delay(cluster[here], cluster[there], by_ms=20, jitter_ms=30)
    save(job, 1)
    save(job, 2)
    cluster["b"].kill()
    job.start("a c", state_bytes=BIG_STATE_BYTES)
    job.join()
    said = job.ask("restore")
    assert all("step=2 " in f"{each} " for each in said), said
    assert all("source=" not in each or "source=peer" in each for each in said), said
    save(job, 3)


def test_a_rank_moves_from_a_node_that_has_its_shard_on_a_drive(network: Network) -> None:
    cluster = Cluster(network, "a b c", lease_s=SHORT_LEASE_S)
    job = Job(
        cluster, policy="replicas=0 nvme.every_steps=1 remote.every_steps=0 remote.every_ms=0"
    )
    job.start("a b")
    assert job.resume() == 0
    assert job.ask("save 1") + job.ask("tier nvme") == ["ok sealed"] * 2 + ["ok nvme"] * 2
    cluster["b"].reboot()
    cluster.wait_said("a", "cluster: member 'b' is gone")
    cluster.start("b")
    wait_until("a knows what lies there", lambda: (1, "nvme", "b") in copies(cluster, job, "a", 1))
    job.start("a c")
    job.join()
    said = job.ask("restore")
    assert all("step=1 " in f"{each} " for each in said), said
    assert "source=peer" in said[1], said
    assert (1, "memory", "c") in copies(cluster, job, "a", 1)
    assert job.ask("save 2") + job.ask("tier nvme") == ["ok sealed"] * 2 + ["ok nvme"] * 2


def test_a_spare_has_it_before_the_ranks_come(network: Network) -> None:
    cluster, job = replicated_job(network, "a b spare", "a b")
    cluster["b"].kill()
    wait_until(
        "the spare has rank 1's shard", lambda: (1, "peer", "spare") in copies(cluster, job, "a", 1)
    )
    job.start("a spare")
    job.join()
    said = job.ask("restore")
    assert all("step=1 " in f"{each} " and "source=" not in each for each in said), said


def test_a_node_that_is_to_be_taken_out_has_a_spare(network: Network) -> None:
    cluster, job = replicated_job(network, "a b spare", "a b")
    said = cluster.tell("a", "replace", "b", "--with", "spare")
    assert [each["ranks"] for each in said["jobs"]] == [1], said
    wait_until("it has step 1", lambda: (1, "peer", "spare") in copies(cluster, job, "a", 1))
    save(job, 2)
    wait_until("it has step 2", lambda: (1, "peer", "spare") in copies(cluster, job, "a", 2))
    refused = cluster.tell("a", "replace", "b", "--with", "nobody")
    assert "no node is called 'nobody'" in refused["error"]["message"], refused


@pytest.mark.parametrize("provider", ["auto", "off"])
def test_what_carries_shards_is_shown_and_measured(network: Network, provider: str) -> None:
    cluster = Cluster(
        network, "a b", lease_s=SHORT_LEASE_S, settings={"fabric": {"provider": provider}}
    )
    wait_until("they see each other", lambda: cluster.members("a") == {"a", "b"})
    shown = cluster.tell("a", "fabric")
    measured = cluster.tell("a", "fabric", "b")
    assert measured.get("bytes_per_s", 0) > 0 and measured["latency_us"] > 0, measured
    assert (measured["from"], measured["to"]) == ("b", "a"), measured
    if provider == "auto":
        assert shown["provider"] == measured["provider"] == "tcp", (shown, measured)
        assert shown["devices"][0]["address"], shown
    else:
        assert "fabric.provider: off" in shown["problem"], shown
        assert "no fabric here" in measured["problem"], measured
    assert "'x'" in cluster.tell("a", "fabric", "x")["error"]["message"]
    assert "root" in cluster.tell("a", "fabric", "b", uid=4242)["error"]["message"]


def test_a_node_that_hangs_is_named_by_who_measures(network: Network) -> None:
    cluster = Cluster(network, "a b", lease_s=60)
    wait_until("they see each other", lambda: cluster.members("a") == {"a", "b"})
    cluster["b"].freeze()
    said = cluster.tell("a", "fabric", "b", "--timeout", "3s")["error"]["message"]
    assert "measuring from b: node 'b'" in said, said
    cluster["b"].thaw()
    wait_until("it answers", lambda: "bytes_per_s" in cluster.tell("a", "fabric", "b"))


LOST = ("memory", "memory and nvme")


@pytest.mark.parametrize(
    "case",
    matrix((1, LOST[1]), whole=[(r, w) for r in (0, 1, 2) for w in LOST if (r, w) != (1, LOST[1])]),
    ids=str,
)
def test_every_subset_of_four_nodes_is_lost(network: Network, case: tuple[int, str]) -> None:
    """They come back empty: all is restored if and only if that was promised."""
    replicas, what = case
    names = ["a", "b", "c", "d"]
    cluster = Cluster(network, " ".join(names), lease_s=SHORT_LEASE_S)
    policy = f"replicas={replicas} nvme.every_steps=1 remote.every_steps=0 remote.every_ms=0"
    for mask in range(1, 16):
        lost = [name for i, name in enumerate(names) if mask >> i & 1]
        job = Job(cluster, f"lost-{'-'.join(lost)}", policy=policy)
        job.start(" ".join(names))
        assert job.resume() == 0
        assert job.ask("save 1") + job.ask("tier nvme") == ["ok sealed"] * 4 + ["ok nvme"] * 4

        def good(job: Job = job) -> list[tuple[int, str, str]]:
            return copies(cluster, job, "a", 1)

        wait_until(
            "its replicas",
            lambda: sum(tier == "peer" for _, tier, _ in good()) == 4 * replicas,  # noqa: B023
        )
        promised = protection(cluster, job, "a")
        there = good()
        kept = {
            rank
            for rank, tier, node in there
            if node not in lost or (tier == "nvme" and what == "memory")
        }
        survives = kept == set(range(4))
        if len(lost) in (1, 4):
            kind = "reboot" if what == "memory" else "node" if len(lost) == 1 else "all_nodes"
            assert (promised.get(kind, (0, ""))[0] == 1) == survives, (lost, promised, there)
        job.kill()
        for name in lost:
            cluster[name].kill()
            if what != "memory":  # (a node that knew of its drive would wait for it)
                cluster[name].erase("nvme")
                cluster[name].erase("state")
            cluster[name].boot()
        cluster.start(" ".join(lost))
        job.start(" ".join(names))
        job.join()
        said = job.ask_anew("restore")
        restored = ["step=1 " in f"{each} " for each in said]
        assert restored == [survives] * 4, (lost, there, said)
        job.kill()


def test_what_lies_in_other_nodes_memory_is_read_by_python_and_dcp(network: Network) -> None:
    """Two ranks' parts, each in its own node's memory and nowhere else; a third node looks at them, and goes on from them."""
    cluster = Cluster(network, "a b c", settings={"nvme": None, "remote": None})
    program = pathlib.Path(__file__).parent / "elsewhere_rank.py"
    ranks = [
        start_training(cluster[name], [program, "save"], rank=rank, world_size=2)
        for rank, name in enumerate(("a", "b"))
    ]
    for each in ranks:
        assert each.wait() == 0, each.log()
    for what, said in (("read", ["tiers peer peer", "read"]), ("adopt", ["went on"])):
        reader = start_training(cluster["c"], [program, what])
        assert reader.wait() == 0, reader.log() + cluster.daemons["c"].log()
        lines = reader.log().split("\n")  # torch's warnings, too
        assert [line for line in lines if line in said] == said, reader.log()


def test_who_loses_power_leaves_no_connections_behind(network: Network) -> None:
    """Nothing tells the others that those are over: no word came."""
    cluster, job = replicated_job(network, "a b c", "a b", policy=POLICY.replace("=1", "=2", 1))
    job.kill()

    def connections() -> int:
        """That are open to b and c, as the system has them."""
        lines = cluster["a"].run(["ss", "-Htn", "state", "established"]).splitlines()
        lost = [cluster[name].address for name in "bc"]
        return sum(
            any(f"{address}:" in line.replace("]", "") for address in lost) for line in lines
        )

    wait_until("connections of all kinds", lambda: connections() >= 6)
    for name in "bc":
        cluster[name].kill()
    cluster.wait_members("a", "a")
    wait_until("none", lambda: connections() == 0, deadline_s=120)
