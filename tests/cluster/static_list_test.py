"""A cluster by a list, without etcd: its first node decides for all jobs, and nobody takes over from it."""

from __future__ import annotations

import concurrent.futures

from .cluster_of_daemons import Cluster, Job, wait_until
from .network import Network


def test_the_first_of_the_list_hosts_every_job(network: Network) -> None:
    cluster = Cluster(network, "first b c", etcd_members=0)
    jobs = [Job(cluster, name) for name in ("one", "two")]
    for job, places in zip(jobs, ("b c", "c first")):
        job.start(places)
        assert job.resume() == 0
        job.save()
        assert cluster.host(job.name, "first") == "first"
    for name in cluster.nodes:
        assert cluster.members(name) == {"first", "b", "c"}
    jobs[0].start("c b")
    assert jobs[0].resume() == 1
    jobs[0].save()
    for job in jobs:
        job.check_history()


def test_the_first_of_the_list_is_killed_and_started_anew(network: Network) -> None:
    cluster, job = _running(network)
    cluster.daemons["first"].kill()
    assert job.ask("save 2") == ["ok sealed"] * 2, "saves wait for no host"
    for said in job.ask("tier remote 500"):
        assert said.startswith(("error DEADLINE_EXCEEDED", "error UNAVAILABLE")), said
    # It was reached, and the cause is the same with each try: nodes and status say so all the same.
    wait_until("b tells", lambda: "refused" in cluster.unreachable("b", "first"))
    cluster.start("first")
    assert job.ask("tier remote") == ["ok remote"] * 2
    job.save()
    job.check_history()
    job.start("c b")
    assert job.resume() == job.safe


def test_another_of_the_list_is_killed_and_started_anew(network: Network) -> None:
    cluster, job = _running(network)
    cluster.daemons["b"].kill()
    for said in job.ask("save 2")[1:]:
        assert said == "ok sealed", said
    cluster.start("b")
    job.save_soon()
    job.save()
    job.check_history()
    job.start("c b")
    assert job.resume() == job.safe


def test_ranks_join_before_the_first_of_the_list_is_up(network: Network) -> None:
    cluster = Cluster(network, "first b c", etcd_members=0, start=False)
    cluster.start("b c")
    job = Job(cluster)
    job.start("b c")
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        joined = pool.submit(job.join)
        for name in ("b", "c"):
            wait_until("it tells", lambda name=name: cluster.unreachable(name, "first"))
        assert "cluster: node 'first' is not reached: " in cluster.problems("b")
        cluster.start("first")
        joined.result()
    assert job.restore() == 0
    job.save()
    job.check_history()


def test_all_of_the_list_are_killed_and_started_anew(network: Network) -> None:
    cluster, job = _running(network)
    cluster.start_anew("first b c")
    job.save_soon()
    job.kill()
    cluster.start_anew("c b first")
    job.start("c b")
    assert job.resume() == job.safe
    job.save()
    job.check_history()


def _running(network: Network) -> tuple[Cluster, Job]:
    cluster = Cluster(network, "first b c", etcd_members=0)
    job = Job(cluster)
    job.start("b c")
    assert job.resume() == 0
    assert job.save() == 1
    return cluster, job
