"""What people get wrong on several nodes: each is told where it happens, with a way out, and harms nobody else."""

from __future__ import annotations

import re

from .cluster_of_daemons import (
    POLICY,
    PORT,
    SHORT_LEASE_S,
    Cluster,
    Job,
    saved_job,
    wait_until,
)
from .daemon import Daemon
from .network import Network
from .rank import Rank


def test_one_name_and_two_users(network: Network) -> None:
    cluster = Cluster(network, "a b")
    job = _saved_once(cluster, "a")
    theirs = Rank(cluster["b"], job.name, policy=POLICY, uid=2000)
    said = theirs.ask("open")
    assert "REFUSED" in said and "belongs to uid 1000, not to uid 2000" in said, said
    assert "choose another job name" in said, said
    for node in ("a", "b"):
        told = cluster.tell(node, "status", job.name, uid=2000)
        assert "jobs" not in told and told["error"]["exit_code"] != 0, told
        assert cluster.tell(node, "status", uid=2000)["jobs"] == []
        assert cluster.status(job.name, node)["uid"] == 1000
    job.save()
    job.check_history()


def test_one_rank_on_two_nodes(network: Network) -> None:
    cluster = Cluster(network, "a b c")
    job = _saved_once(cluster, "a b")
    twin = Rank(cluster["c"], job.name, rank=1, world_size=2, policy=POLICY)
    pid = job.ranks[1].process.pid
    said = _refused(twin, rf"rank 1 of job 'job' is pid {pid}\b.* on b, which is still alive")
    assert "end that process first" in said, said
    job.save()
    job.ranks[0].kill()
    job.ranks[1].kill()
    assert twin.ask("open") == f"ok attempt={job.attempt + 1}", "nobody has it any more"


def test_a_second_run_of_a_job_that_runs(network: Network) -> None:
    cluster = Cluster(network, "a b c")
    job = _saved_once(cluster, "a b")
    second = [Rank(cluster["c"], job.name, rank=r, world_size=2, policy=POLICY) for r in range(2)]
    for rank in second:
        _refused(rank, f"rank {rank.rank} of job 'job' is pid")
    job.save()
    job.check_history()


def test_ranks_that_disagree_about_the_world_size(network: Network) -> None:
    cluster = Cluster(network, "a b")
    job = _saved_once(cluster, "a b")
    other = Rank(cluster["b"], job.name, rank=2, world_size=3, policy=POLICY)
    said = _refused(other, "rank 2 says world size 3")
    assert "TOPOLOGY" in said, said
    assert "was opened with 2 and rank 0 (pid" in said and "on a" in said, said
    job.save()
    job.start("a b")
    job.ranks[1].kill()
    job.ranks[1] = Rank(cluster["b"], job.name, rank=1, world_size=3, policy=POLICY)
    # (Whoever comes first is right.)
    assert job.ranks[0].ask("open") == f"ok attempt={job.attempt + 1}"
    said = _refused(job.ranks[1], "rank 1 says world size 3")
    assert "TOPOLOGY" in said, said


def test_ranks_that_disagree_about_the_layout(network: Network) -> None:
    cluster = Cluster(network, "a b")
    job = _saved_once(cluster, "a b")
    job.start("a b")
    job.join()
    assert job.ranks[1].ask("size 50000") == "ok"
    # The one that is wrong hears what it wants, the other one, which may have loaded its own, whose fault it is.
    what = "tensor 'layers.0.weight' was saved as U64 [6251], wanted is U64 [3126]"
    of_others = f"restore of job 'job', step 1: rank 1 wants something else than was saved: {what}"
    other, wrong = job.ask("restore")
    assert other.startswith(f"error INVALID_ARGUMENT restore: {of_others}")
    assert wrong == f"error INVALID_ARGUMENT restore: attempt 1 step 1: {what}"
    assert job.ranks[1].ask("size 100000") == "ok"
    assert job.restore() == 1, "nothing was discarded for that"
    job.save()
    job.check_history()


def test_a_node_name_that_is_taken(network: Network) -> None:
    cluster = Cluster(network, "a b")
    job = _saved_once(cluster, "a b")
    node = network.add_node("twin")
    twin = Daemon(node, {"node_name": "a", "cluster": cluster.section(node)})
    cluster.daemons["twin"] = twin.start()
    holder = f"the node name 'a' is used by a daemon at {cluster['a'].address}:{PORT}"
    problem = wait_until(
        "what is wrong",
        lambda: [line for line in cluster.problems("twin").split("\n") if holder in line],
    )
    assert "give this node another node_name" in problem[0], problem
    assert "cluster:" not in cluster.problems("a")
    (a,) = [each for each in cluster.tell("b", "nodes")["nodes"] if each["name"] == "a"]
    assert a["address"] == f"{cluster['a'].address}:{PORT}"
    assert "used by" in cluster.tell("twin", "nodes")["problem"]
    job.save()
    # Its name is free when the other one has left.
    twin.terminate()
    twin.settings["node_name"] = "c"
    twin.start()
    cluster.wait_members("b", "a b c")
    job.save()
    job.check_history()


def test_etcd_is_unreachable_at_the_start(network: Network) -> None:
    cluster = Cluster(network, "a b", start=False, lease_s=SHORT_LEASE_S)
    assert cluster.etcd is not None
    cluster.etcd.stop()
    cluster.start("a b")
    for name in cluster.nodes:
        problem = wait_until("a problem", lambda name=name: cluster.problems(name))
        assert "cluster: etcd at " in problem, problem
        assert "etcd" in cluster.tell(name, "nodes")["problem"]
    job = Job(cluster)
    job.start("a b")
    for said in job.ask("open 1000"):
        assert "UNAVAILABLE" in said or "DEADLINE_EXCEEDED" in said, said
    for rank in job.ranks:
        rank.send("open")
    cluster.etcd.resume()
    assert [rank.answer() for rank in job.ranks] == ["ok attempt=1"] * 2
    assert job.restore() == 0
    job.save()
    for name in cluster.nodes:
        wait_until("all is well", lambda name=name: "cluster:" not in cluster.problems(name))
    job.check_history()


def test_a_daemon_starts_under_its_ranks_while_etcd_is_away(network: Network) -> None:
    cluster, job = saved_job(network, "a b", "a b", lease_s=SHORT_LEASE_S)
    assert cluster.etcd is not None
    cluster.etcd.stop()
    cluster.start_anew("a b")
    assert job.ask("save 2") == ["ok sealed"] * 2, "local saves work"
    cluster.etcd.resume()
    job.save_soon()
    job.check_history()


def _refused(rank: Rank, pattern: str) -> str:
    """Its refusal that has this. (A node that hears nothing of the job's host in time says only that.)"""
    heard = []

    def told() -> str:
        heard.append(said := rank.ask("open 1500"))
        assert said.startswith("error"), said
        return said if re.search(pattern, said) else ""

    try:
        return wait_until(pattern, told)
    except TimeoutError as error:
        raise AssertionError(f"not told '{pattern}': {set(heard)}") from error


def _saved_once(cluster: Cluster, places: str) -> Job:
    job = Job(cluster)
    job.start(places)
    assert job.resume() == 0
    assert job.save() == 1
    return job
