"""Sessions that meet: of two jobs on the same nodes, and of two launches of one job."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Callable, Sequence
from typing import TypeVar

from .cluster_of_daemons import Cluster, Job, saved_job, wait_until
from .network import Network

SLOT_BYTES = 2 << 20  # the unit of slots; a shard is far smaller

T = TypeVar("T")


def at_once(do: Callable[[Job], T], jobs: Sequence[Job]) -> list[T]:
    with concurrent.futures.ThreadPoolExecutor(len(jobs)) as pool:
        return list(pool.map(do, jobs))


def restored(job: Job) -> list[str]:
    """What its ranks are told in the end: one session may take what another one needs, and is told then to restore again."""

    def told() -> list[str]:
        said = job.ask("restore")
        return [] if any("UNAVAILABLE" in one and "needs a slot" in one for one in said) else said

    return wait_until("a restore", told)


def test_two_jobs_restore_at_once_and_memory_is_just_enough(network: Network) -> None:
    # On each node two slots for each of its two ranks: as little as lets both commit.
    settings = {"memory": {"bytes_max": 4 * SLOT_BYTES}, "nvme": None}
    cluster = Cluster(network, "a b", settings=settings)
    jobs = [Job(cluster, name) for name in ("one", "two")]
    for job in jobs:
        job.start("a b")
        assert job.resume() == 0
        job.save()
        job.save()
    for name in cluster.nodes:
        daemon = cluster.tell(name, "status")["daemon"]
        assert daemon["memory_bytes_used"] == 4 * SLOT_BYTES, "nothing is free"
    # Each rank's shard has to come to the other node, into a slot that has another one now.
    for job in jobs:
        job.start("b a")
    at_once(Job.join, jobs)
    said = at_once(restored, jobs)
    assert [job.agreed(each) for job, each in zip(jobs, said)] == [2, 2]
    sources = [each.split("source=")[1].split()[0] for each in sum(said, [])]
    assert set(sources) <= {"peer", "remote"}, said  # a peer's memory may have been needed by then
    for job in jobs:
        job.check_history()


def test_ranks_that_changed_places_save_on_where_memory_is_just_enough(network: Network) -> None:
    settings = {"memory": {"bytes_max": 2 * SLOT_BYTES}, "nvme": None}
    cluster = Cluster(network, "a b", settings=settings)
    job = Job(cluster)
    job.start("a b")
    assert job.resume() == 0
    job.save()
    job.save()
    job.start("b a")
    assert job.resume() == 2
    # Each node has two shards of step 2 now: that of its rank, and one that its rank of before left there.
    job.save()
    job.save()
    job.check_history()


def test_a_second_launch_restores_while_the_first_still_loads(network: Network) -> None:
    cluster, job = saved_job(network, "a b c", "a b c", host="c")
    job.save()
    job.start("a b c", launch="one", armed={1: "client.restore.source_mapped:stop"})
    job.join()
    first = job.ranks
    for rank in first:
        rank.send("restore")
    first[1].process.wait_stopped()
    assert cluster.status(job.name, "b")["phase"] == "restoring"
    # Ranks of the first launch live on while those of the second get their shards, on each node.
    job.start("a b c", launch="two", keep=True)
    assert job.resume() == 2
    said = [first[0].answer(), first[2].answer()]
    first[1].process.resume()
    said.append(first[1].answer())
    assert all("SUPERSEDED" in each for each in said), said
    for rank in first:
        assert "SUPERSEDED" in rank.ask("save 100")
        assert "SUPERSEDED" in rank.ask("restore")
    job.save()
    job.check_history()
    assert {attempt for attempt, _ in job.manifests()} == {job.attempt - 2, job.attempt}
