"""A job over several nodes is told to end: all ranks save the same last step, and it is in remote when they have ended."""

from __future__ import annotations

import concurrent.futures
import signal
import threading

import pytest

from .cluster_of_daemons import SHORT_LEASE_S, Cluster, Job, wait_until
from .network import Network
from .rank import Rank

# By it, nothing but the first step goes to remote.
RARELY = "remote.every_steps=1000000 remote.keep_last=100 nvme.every_steps=0"
STEPS_MAX = 1_000_000  # a loop that nobody ends fails by the deadline of the test


def started(network: Network, names: str, places: str, host: str) -> tuple[Cluster, Job]:
    cluster = Cluster(network, names, lease_s=SHORT_LEASE_S)
    job = Job(cluster, policy=RARELY)
    job.make_host(host)
    job.start(places)
    assert job.resume() == 0
    return cluster, job


def train(rank: Rank, begun: threading.Event) -> int:
    """Step after step, each at its own pace, until it is told that it is the last one, which it saves."""
    for step in range(1, STEPS_MAX):
        said = rank.ask(f"reach {step}")
        assert said in ("ok on", "ok last"), said
        if step == 10:
            assert rank.ask("save 10").startswith("ok")
        if step == 20:
            begun.set()
        if said == "ok last":
            assert rank.ask(f"save {step}").startswith("ok"), step
            return step
    raise AssertionError("it never ends")


@pytest.mark.parametrize("told", [0, 3])
def test_all_ranks_save_the_same_last_step(network: Network, told: int) -> None:
    cluster, job = started(network, "a b c", "a a b b", "c")
    begun = [threading.Event() for _ in job.ranks]
    with concurrent.futures.ThreadPoolExecutor(len(job.ranks)) as pool:
        loops = [pool.submit(train, rank, each) for rank, each in zip(job.ranks, begun)]
        for each in begun:
            assert each.wait(60)
        job.ranks[told].process.send_signal(signal.SIGUSR1)
        last = {loop.result() for loop in loops}
    assert len(last) == 1, last
    (step,) = last
    said = [rank.ask("tier remote") for rank in job.ranks]
    assert all(each.startswith("ok") for each in said), said
    assert {key for key in job.manifests()} == {(job.attempt, 10), (job.attempt, step)}
    stopping = cluster.status(job.name, "c")["stopping"]
    assert (stopping["rank"], stopping["last_step"] <= step) == (told, True)


def test_without_a_host_nobody_stands_for_ever_and_the_next_one_sees_to_it(
    network: Network,
) -> None:
    cluster, job = started(network, "a b c", "a b", "c")
    cluster["c"].kill()
    begun = [threading.Event() for _ in job.ranks]
    with concurrent.futures.ThreadPoolExecutor(len(job.ranks)) as pool:
        loops = [pool.submit(train, rank, each) for rank, each in zip(job.ranks, begun)]
        for each in begun:
            assert each.wait(60)
        job.ranks[1].process.send_signal(signal.SIGUSR1)
        last = {loop.result() for loop in loops}
    assert len(last) == 1, last
    assert cluster.wait_host(job.name, "a", but="c") in ("a", "b")
    wait_until(
        "the last step is in remote", lambda: (job.attempt, next(iter(last))) in job.manifests()
    )
