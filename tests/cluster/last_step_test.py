"""A job over several nodes is told to end: all ranks save the same last step, and it is in remote when they have ended."""

from __future__ import annotations

import concurrent.futures
import signal
import threading
from collections.abc import Callable, Mapping

import pytest

from .cluster_of_daemons import LEASE_S, SHORT_LEASE_S, Cluster, Job, wait_until
from .network import Network
from .rank import Rank

# By it, nothing but the first step goes to remote.
RARELY = "remote.every_steps=1000000 remote.keep_last=100 nvme.every_steps=0"
STEPS_MAX = 1_000_000  # a loop that nobody ends fails by the deadline of the test


def started(
    network: Network,
    names: str,
    places: str,
    host: str,
    armed: Mapping[str, str] | None = None,
    lease_s: int = SHORT_LEASE_S,
) -> tuple[Cluster, Job]:
    cluster = Cluster(network, names, lease_s=lease_s, armed=armed)
    job = Job(cluster, policy=RARELY)
    job.make_host(host)
    job.start(places)
    assert job.resume() == 0
    return cluster, job


def reach_the_last(rank: Rank, begun: threading.Event) -> int:
    """Step after step, each at its own pace, until it is told that it is the last one."""
    for step in range(1, STEPS_MAX):
        said = rank.ask(f"reach {step}")
        assert said in ("ok on", "ok last"), said
        if step == 10:
            assert rank.ask("save 10").startswith("ok")
        if step == 20:
            begun.set()
        if said == "ok last":
            return step
    raise AssertionError("it never ends")


def train(rank: Rank, begun: threading.Event) -> int:
    step = reach_the_last(rank, begun)
    assert rank.ask(f"save {step}").startswith("ok"), step
    return step


def last_steps(
    job: Job, told: int, loop: Callable[[Rank, threading.Event], int], timeout_s: float = 60
) -> set[int]:
    """All of them at the same time, of which one is told to end: each one's last."""
    begun = [threading.Event() for _ in job.ranks]
    with concurrent.futures.ThreadPoolExecutor(len(job.ranks)) as pool:
        loops = [pool.submit(loop, rank, each) for rank, each in zip(job.ranks, begun)]
        for each in begun:
            assert each.wait(timeout_s)
        job.ranks[told].process.send_signal(signal.SIGUSR1)
        return {each.result() for each in loops}


@pytest.mark.parametrize("told", [0, 3])
def test_all_ranks_save_the_same_last_step(network: Network, told: int) -> None:
    cluster, job = started(network, "a b c", "a a b b", "c")
    last = last_steps(job, told, train)
    assert len(last) == 1, last
    (step,) = last
    said = [rank.ask("tier remote") for rank in job.ranks]
    assert all(each.startswith("ok") for each in said), said
    assert {key for key in job.manifests()} == {(job.attempt, 10), (job.attempt, step)}
    stopping = cluster.status(job.name, "c")["stopping"]
    assert (stopping["rank"], stopping["last_step"] <= step) == (told, True)


def test_a_rank_whose_daemon_stood_still_a_moment_ago_ends_with_the_others(
    network: Network,
) -> None:
    cluster, job = started(network, "a b c", "a b", "c", lease_s=LEASE_S)
    stalled = cluster.daemons["b"].process
    assert stalled is not None
    stalled.stop()
    assert job.ranks[1].ask("reach 0") == "ok on"  # 2.25 s later
    stalled.resume()
    last = last_steps(job, 0, train)
    assert len(last) == 1, last
    said = [rank.ask("tier remote") for rank in job.ranks]
    assert all(each.startswith("ok") for each in said), said


def test_without_a_host_nobody_stands_for_ever_and_the_next_one_sees_to_it(
    network: Network,
) -> None:
    cluster, job = started(network, "a b c", "a b", "c")
    cluster["c"].kill()
    last = last_steps(job, 1, train)
    assert len(last) == 1, last
    assert cluster.wait_host(job.name, "a", but="c") in ("a", "b")
    wait_until(
        "the last step is in remote", lambda: (job.attempt, next(iter(last))) in job.manifests()
    )


def test_a_daemon_that_is_restarted_before_the_last_save_loses_nothing(network: Network) -> None:
    cluster, job = started(network, "a b c", "a b", "c")
    (step,) = last_steps(job, 1, reach_the_last)
    cluster.daemons["a"].kill()
    job.ranks[0].send(f"save {step}")
    cluster.start("a")
    assert job.ranks[0].answer().startswith("ok")
    assert job.ranks[1].ask(f"save {step}").startswith("ok")
    said = [rank.ask("tier remote") for rank in job.ranks]
    assert all(each.startswith("ok") for each in said), said
    assert (job.attempt, step) in job.manifests()


def test_a_last_copy_that_was_published_counts_though_its_daemon_died_before_it_said_so(
    network: Network,
) -> None:
    cluster, job = started(network, "a b c", "a b", "c", {"a": "daemon.seal.record_written:kill@2"})
    (step,) = last_steps(job, 1, reach_the_last)
    for rank in job.ranks:
        rank.send(f"save {step}")
    cluster.revive("a")
    assert [rank.answer() for rank in job.ranks] == ["ok sealed"] * 2
    assert [rank.ask("tier remote") for rank in job.ranks] == ["ok remote"] * 2
    assert (job.attempt, step) in job.manifests()


def test_a_last_copy_that_the_host_has_given_up_is_not_sealed_again(network: Network) -> None:
    """It knows that the rank had begun the step, and that the daemon that was to seal it is another one now. (A daemon tells its host
    within 20 ms what its ranks begin: one that was killed before that has told nothing, and the step is begun anew, for all.)"""
    cluster, job = started(network, "a b c", "a b", "c", {"a": "daemon.seal.received:kill@2"})
    (step,) = last_steps(job, 1, reach_the_last)
    for rank in job.ranks:
        rank.send(f"save {step}")
    cluster.revive("a")
    said = job.ranks[0].answer()
    if said == "ok sealed":
        assert job.ranks[1].answer() == "ok sealed"
        assert [rank.ask("tier remote") for rank in job.ranks] == ["ok remote"] * 2
        assert (job.attempt, step) in job.manifests()
        return
    assert said.startswith("error UNAVAILABLE") and "rank 0 lost it" in said, said
    job.ranks[1].answer()  # before, or after the host had
    assert job.ranks[1].ask("tier remote").startswith("error ABANDONED")
    assert (job.attempt, step) not in job.manifests()
