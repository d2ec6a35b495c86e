"""Jobs over several nodes: real daemons, a real etcd, ranks on nodes that share nothing but /remote."""

from __future__ import annotations

import re
import subprocess
from typing import Any

import pytest

from .cluster_of_daemons import POLICY, SHORT_LEASE_S, Cluster, Job, saved_job, wait_until
from .network import Network
from .rank import Rank


def test_ranks_on_several_nodes_commit_together(network: Network) -> None:
    cluster, job = saved_job(network, "a b c", "a a b b")
    job.save()
    job.check_history()


def test_a_node_dies_and_another_takes_its_ranks(network: Network) -> None:
    cluster, job = saved_job(network, "a b spare", "a a b b", lease_s=SHORT_LEASE_S)
    cluster["b"].kill()
    job.start("a a spare spare")
    job.join()
    said = job.ask("restore")
    assert job.agreed(said) == 1
    assert all("source=" not in each for each in said[:2]), said
    assert all("source=remote" in each for each in said[2:]), said
    job.save()
    job.check_history()


def test_the_host_dies_and_nothing_is_lost(network: Network) -> None:
    cluster, job = saved_job(network, "a b c", "a b", host="c", lease_s=SHORT_LEASE_S)
    cluster.daemons["c"].kill()
    job.save_soon()
    assert cluster.wait_host(job.name, "a", but="c") in ("a", "b")
    job.check_history()


def test_etcd_stops_for_a_while(network: Network) -> None:
    cluster, job = saved_job(network, "a b", "a b")
    assert cluster.etcd is not None
    cluster.etcd.stop()
    cluster.etcd.resume()
    job.save()
    job.check_history()


def test_a_daemon_is_started_anew_under_its_ranks(network: Network) -> None:
    cluster, job = saved_job(network, "a b", "a b")
    for name in ("a", "b"):
        cluster.start_anew(name)
    job.save_soon()
    job.check_history()


def test_what_a_dead_node_took_with_it_is_told_on_the_others(network: Network) -> None:
    cluster = Cluster(network, "a b c", lease_s=SHORT_LEASE_S)
    policy = "remote.every_steps=2 remote.keep_last=100 nvme.every_steps=1 nvme.keep_last=9"
    job = Job(cluster, policy=policy)
    job.make_host("c")
    job.start("a b")
    assert job.resume() == 0
    assert (job.save(), job.save()) == (1, 2)
    assert job.ask("save 3") + job.ask("tier nvme") == ["ok sealed"] * 2 + ["ok nvme"] * 2
    at = job.attempt

    def protection(asked: str) -> dict[str, tuple[int, int, str]]:
        lines = cluster.status(job.name, asked).get("protection", [])
        return {one["kind"]: (one["attempt"], one["step"], one["from"]) for one in lines}

    outlasts_nodes = dict.fromkeys(("node", "domain", "all_nodes"), (at, 2, "remote"))
    before = {"process": (at, 3, "memory"), "reboot": (at, 3, "nvme"), **outlasts_nodes}
    for asked in cluster.nodes:
        assert protection(asked) == before, asked
    cluster["b"].kill()
    cluster.wait_said("c", "b is gone: ")
    gone = dict.fromkeys(before, (at, 2, "remote"))
    of_b = r"of b, which is gone since [0-9.]+ \w+"
    for asked in ("a", "c"):
        assert protection(asked) == gone, asked
        told = cluster.tell(asked, "explain", job.name, "--step", "3")
        (step,) = told["steps"]
        assert (step["attempt"], step["step"], step["restorable"]) == (at, 3, False), told
        reasons = step["reasons"]
        assert reasons[0] == "cannot be restored: no tier has a good copy of 1 of 2 shards"
        named = f"rank 1: its shard is only in the memory {of_b} and in nvme {of_b}"
        assert re.fullmatch(named, reasons[1]), reasons
        for tier in ("memory", "nvme"):
            assert f"{tier}: 1 of 2 shards good, 1 missing" in reasons, reasons
        assert "remote: nothing" in reasons, reasons
        choice = rf"step 2 of attempt {at}: .*; not the newer step 3 of attempt {at}: {reasons[0]}"
        assert re.fullmatch(choice, told["next_restore"]), told
        shown = cluster.daemons[asked].ctl("explain", job.name, "--step", "3")
        assert f"step 3 (attempt {at}): NOT restorable" in shown, shown
        assert re.search(named, shown), shown
    # The next launch gets what was told, and where the rank runs now is told, too.
    job.start("a c")
    job.join()
    (step,) = cluster.tell("a", "explain", job.name, "--step", "3")["steps"]
    assert step["reasons"][1].endswith("; the rank runs on c now"), step
    assert job.restore() == 2


def test_readers_on_any_node(network: Network) -> None:
    cluster = Cluster(network, "a b c")
    job = Job(cluster, policy=f"{POLICY} nvme.every_steps=0")
    job.start("a b")
    assert job.resume() == 0
    job.save()
    for name, sources in (
        ("a", ("", " source=peer why=memory copy on b, not on a, nvme copy absent")),
        ("b", (" source=peer why=memory copy on a, not on b, nvme copy absent", "")),
        ("c", (" source=peer why=memory copy on a, not on c, nvme copy absent", None)),
    ):
        reader = Rank(cluster[name], job.name)
        assert reader.ask("list") == "ok 1:1/2,memory,remote"
        for rank, source in enumerate(sources):
            said = reader.ask(f"attach rank={rank}")
            assert said.startswith("ok step=1"), said
            assert source is None or said == f"ok step=1{source}", said
            assert reader.ask("read").startswith("ok"), (name, rank)
    assert "there is no job 'none' in this cluster" in Rank(cluster["c"], "none").ask("list")


def test_every_node_shows_all_jobs(network: Network) -> None:
    cluster, job = saved_job(network, "a b c", "a b")
    other = Rank(cluster["c"], "other", policy=job.policy)
    assert other.ask("open") == "ok attempt=1"
    for name in cluster.nodes:
        told = cluster.tell(name, "jobs")["jobs"]
        assert [one["name"] for one in told] == [job.name, "other"]
        assert told[0]["host"] == cluster.host(job.name, name)
        assert told[0]["node_names"] == ["a", "b"]
        running = (told[0]["phase"], told[0]["ranks_alive"], told[0]["world_size"])
        assert running == ("running", 2, 2)
        assert (told[0]["newest"]["step"], told[0]["newest_in_remote"]["step"]) == (1, 1)
        assert "2 jobs: " in cluster.daemons[name].ctl("jobs")
    assert "no jobs of yours" in cluster.daemons["a"].ctl("jobs", uid=2000)


def test_a_restore_point_is_in_memory_before_the_restore(network: Network) -> None:
    cluster, job = saved_job(network, "a b", "a b")
    job.save()
    job.kill()
    for name in ("a", "b"):
        cluster.daemons[name].kill()
        cluster[name].run(["sh", "-c", "rm -rf /dev/shm/holdfast/*"])
        cluster.start(name)

    def is_set() -> bool:
        """While nobody hosts the job, commands are refused."""
        return "error" not in cluster.tell("a", "restore", job.name, "--step", "1")

    def prefetched() -> dict[str, Any]:
        told = cluster.tell("b", "explain", job.name).get("prefetch", {})
        return told if told.get("in_memory") == 2 else {}

    wait_until("a restore point", is_set)
    assert wait_until("both ranks' shards in memory", prefetched)["text"] == (
        "all ranks have it in memory"
    )
    job.start("a b")
    job.join()
    assert job.ask("restore") == ["ok attempt=1 step=1"] * 2


def test_inspect_and_verify_on_any_node(network: Network) -> None:
    cluster, job = saved_job(network, "a b c", "a b", lease_s=SHORT_LEASE_S)
    assert job.ask("tier nvme") == ["ok nvme"] * 2
    for daemon in cluster.daemons.values():
        # Two ranks' in each tier; those of memory and nvme on two nodes.
        assert "every digest is right: 6 shards" in daemon.ctl("verify", job.name)
        assert "rank 1 of 2" in daemon.ctl("inspect", job.name, "--rank=1")
    # What one node has is out of reach: the rest is read, and the node is named.
    cluster.daemons["b"].kill()
    with pytest.raises(subprocess.CalledProcessError) as failed:
        cluster.daemons["c"].ctl("verify", job.name)
    assert "b: " in str(failed.value.stderr), failed.value.stderr


def test_a_job_is_removed_from_all_nodes(network: Network) -> None:
    cluster, job = saved_job(network, "a b c", "a b", lease_s=SHORT_LEASE_S)
    assert job.ask("tier nvme") == ["ok nvme"] * 2
    refused = cluster.tell("c", "rm", job.name, "--yes")["error"]["message"]
    assert "in use by pid" in refused and "on a" in refused
    job.kill()
    cluster.daemons["b"].kill()
    wait_until("the end of b's lease", lambda: "b" not in cluster.members("c"))
    # (Until b counts as gone for good its rank may live.)
    removed = wait_until(
        "its removal",
        lambda: said if "error" not in (said := cluster.tell("c", "rm", job.name, "--yes")) else {},
    )
    assert removed["nodes_away"] == ["b"] and int(removed["bytes_freed"]) > 0, removed
    assert list((network.remote / job.name).glob("*/*.safetensors")) == []
    assert cluster.tell("a", "jobs")["jobs"] == []
    # The name is another user's then; b lets go of what it has of the one before.
    theirs = Rank(cluster["a"], job.name, policy=job.policy, uid=2000)
    assert theirs.ask("open") == "ok attempt=1"
    assert "NOTHING_TO_RESTORE" in theirs.ask("restore")
    cluster.start("b")
    cluster.wait_said("b", f"was removed job={job.name}")
    assert cluster["b"].run(["find", "/nvme", "-path", f"*/{job.name}/*/*"]) == ""
