"""Faults of networks, etcd, clocks and drives under a job that runs: no commit is lost or doubled, nobody hangs, and once the fault
is over the next save commits."""

from __future__ import annotations

import re
from typing import Any

import pytest

from .cluster_of_daemons import (
    LEASE_S,
    POLICY,
    SHORT_LEASE_S,
    TRIES_MAX,
    Cluster,
    Job,
    saved_job,
    wait_until,
)
from .links import Way
from .network import Network
from .rank import Rank

_EVERY_OTHER = "remote.every_steps=2 remote.keep_last=100"

# ---- Links ----


@pytest.mark.parametrize("way", ["both", "out", "in"])
def test_a_node_with_ranks_is_cut_off(network: Network, way: Way) -> None:
    cluster, job = _running(network, lease_s=SHORT_LEASE_S)
    network.links.cut(cluster["b"], way=way)
    assert job.ask("save 2") == ["ok sealed"] * 2, "saves wait for nobody"
    cluster.wait_members("a", "a c")
    for said in job.ask("tier remote 1000"):
        assert re.match("error (DEADLINE_EXCEEDED|UNAVAILABLE|ABANDONED) ", said), said
    network.links.heal()
    cluster.wait_members("a", "a b c")
    job.save_soon()
    job.save()
    _ends_well(job)


def test_the_host_is_cut_off(network: Network) -> None:
    cluster, job = _running(network, lease_s=SHORT_LEASE_S)
    network.links.cut(cluster["c"])
    assert job.save() == 2, "another node decides, and finds what was sealed meanwhile"
    host = cluster.wait_host(job.name, "a", but="c")
    network.links.heal()
    cluster.wait_members("a", "a b c")
    assert wait_until("c knows the new host", lambda: cluster.host(job.name, "c") == host)
    job.save()
    _ends_well(job, "c a")


def test_a_link_that_flaps(network: Network) -> None:
    # Room for what no host gives up while it is out of reach.
    cluster, job = _running(network, settings={"memory": {"slots_per_rank": 4 * TRIES_MAX}})
    flapping = network.links.flapping(cluster["b"], up_ms=300, down_ms=200)
    while flapping.cuts < 8:
        said = job.ask(f"save {job.step + 1}")
        assert said == ["ok sealed"] * 2, f"step {job.step}: {said}"
        job.ask("tier remote 1000")
    network.links.heal()
    job.save_soon()
    job.save()
    _ends_well(job)


def test_a_link_that_loses_packets(network: Network) -> None:
    cluster, job = _running(network)
    network.links.lossy(cluster["b"], share=0.1)
    job.save_soon()
    job.save_soon()
    job.start("a b")
    assert job.resume() >= job.safe
    network.links.heal()
    job.save_soon()
    job.save()
    _ends_well(job)


def test_a_slow_link(network: Network) -> None:
    cluster, job = _running(network)
    for name in ("b", "c"):
        network.links.slow(cluster[name], bytes_per_s=64 << 10)
    for _ in range(3):
        job.save()
    _ends_well(job, "b a")


def test_messages_that_come_late_and_in_another_order(network: Network) -> None:
    cluster, job = _running(network, lease_s=SHORT_LEASE_S)
    assert cluster.etcd is not None
    nodes = [*cluster.nodes.values(), *cluster.etcd.nodes]
    for number, one in enumerate(nodes):
        for other in nodes[:number]:
            network.links.delay(one, other, by_ms=20, jitter_ms=80, seed=number)
    for _ in range(3):
        job.save_soon()
    cluster.daemons["c"].kill()
    job.save_soon()
    job.start("b a")
    assert job.resume() == job.safe
    network.links.heal()
    job.save_soon()
    _ends_well(job)


# ---- The host is out of reach ----


def test_a_wait_in_vain_spoils_no_save(network: Network) -> None:
    # All that is saved stays uncommitted, and nobody else hosts the job meanwhile.
    settings = {"memory": {"slots_per_rank": 2 * TRIES_MAX + 2}}
    cluster, job = saved_job(
        network, "a b c", "a b", host="c", settings=settings, lease_s=10 * LEASE_S
    )
    network.links.cut(cluster["c"])
    heard = []
    # A daemon that gets no time for a tenth of a second is taken for one that hangs: one round without that is enough.
    for _ in range(TRIES_MAX):
        saved = job.ask(f"save {job.step + 1}")
        waited = [said for ms in (0, 20, 300) for said in job.ask(f"committed {ms}")]
        assert all(said.startswith("error") for said in waited), waited
        saved += job.ask(f"save {job.step + 1}")
        heard.append((saved, waited))
        if saved == ["ok sealed"] * 4 and not any("hangs" in said for said in waited):
            return
    raise AssertionError(f"whoever waited for the host: {heard}")


# ---- etcd ----


def test_etcd_stands_still_for_longer_than_the_leases(network: Network) -> None:
    cluster, job = _running(network, lease_s=SHORT_LEASE_S)
    assert cluster.etcd is not None
    cluster.etcd.stop()
    assert job.ask("save 2") == ["ok sealed"] * 2
    for name in cluster.nodes:
        cluster.wait_said(name, "this node is no member")
        assert "cluster: etcd at " in cluster.problems(name)
    assert job.ask("save 3") == ["ok sealed"] * 2, "saves go on"
    cluster.etcd.resume()
    job.save_soon()
    job.save()
    for name in cluster.nodes:
        wait_until(
            f"{name} is a member again",
            lambda name=name: _membership(cluster, name) == ["held", "lost", "held"],
        )
    _ends_well(job)


def _membership(cluster: Cluster, name: str) -> list[str]:
    """What happened to it, as that node's events say."""
    kinds = [event["kind"] for event in cluster.tell(name, "events")["events"]]
    return [kind.removeprefix("membership_") for kind in kinds if kind.startswith("membership_")]


@pytest.mark.parametrize("same_cluster_id", [False, True])
def test_etcd_is_wiped_under_a_running_job(network: Network, same_cluster_id: bool) -> None:
    cluster, job = _running(network, lease_s=SHORT_LEASE_S)
    assert cluster.etcd is not None
    cluster.etcd.wipe(same_cluster_id=same_cluster_id)
    job.save_soon()
    job.save()
    _ends_well(job)


def test_etcd_is_wiped_while_all_daemons_are_down(network: Network) -> None:
    cluster, job = _running(network, lease_s=SHORT_LEASE_S)
    assert cluster.etcd is not None
    for daemon in cluster.daemons.values():
        daemon.kill()
    cluster.etcd.wipe()
    cluster.start("a b c")
    job.save_soon()
    _ends_well(job)


@pytest.mark.parametrize("copy", ["keys", "files"])
def test_etcd_is_set_back_while_all_daemons_are_down(network: Network, copy: str) -> None:
    cluster, job = _running(network, lease_s=SHORT_LEASE_S)
    assert cluster.etcd is not None
    dump = cluster.etcd.dump()
    if copy == "files":
        cluster.etcd.copy_files()
    # What is put back names earlier starts of the daemons, and an older epoch.
    cluster.start_anew("a b c")
    job.save_soon()
    for daemon in cluster.daemons.values():
        daemon.kill()
    if copy == "files":
        cluster.etcd.put_files_back()
    else:
        cluster.etcd.put_back(dump)
        found = cluster.etcd.keys("/holdfast/test/")
        for key in ("nodes/a", "nodes/b", "nodes/c", f"jobs/{job.name}/host"):
            assert f"/holdfast/test/{key}" in found, found
    cluster.start("a b c")
    job.save_soon()
    _ends_well(job)
    for name in cluster.nodes:
        cluster.wait_members(name, "a b c")
        wait_until("all is well", lambda name=name: "cluster:" not in cluster.problems(name))


def test_two_of_three_members_of_etcd_are_cut_off(network: Network) -> None:
    cluster, job = _running(network, etcd_members=3, lease_s=SHORT_LEASE_S)
    assert cluster.etcd is not None
    leader = cluster.etcd.leader()
    others = [member.node for member in cluster.etcd.members if member is not leader]
    rest = [*cluster.nodes.values(), leader.node]
    network.links.partition(rest, others)
    assert job.ask("save 2") == ["ok sealed"] * 2
    for name in cluster.nodes:
        cluster.wait_said(name, "this node is no member")
    network.links.heal()
    job.save_soon()
    _ends_well(job)


# ---- Clocks ----


def test_clocks_that_are_minutes_apart(network: Network) -> None:
    cluster, job = _running(network, clocks_s={"a": 600, "b": -600}, lease_s=SHORT_LEASE_S)
    job.save()
    cluster.daemons["c"].kill()
    job.save_soon()
    job.start("b a")
    assert job.resume() == job.safe
    cluster.start_anew("a b")
    job.save_soon()
    _ends_well(job)


# ---- Who is over, and does not know ----


@pytest.mark.parametrize("point", ["client.save.half_copied", "client.save.seal_sent"])
def test_a_rank_of_an_old_attempt_wakes_up(network: Network, point: str) -> None:
    cluster = Cluster(network, "a b c")
    job = Job(cluster)
    job.start("a b", launch="one", armed={1: f"{point}:stop@2"})
    assert job.resume() == 0
    job.save()
    old, zombie = job.ranks
    for rank in job.ranks:
        rank.send("save 2")
    zombie.process.wait_stopped()
    old.kill()
    job.step = 2
    job.start("a c", launch="two", keep=True)
    job.resume()
    job.save()
    # What it had said before the new attempt began counts as it did then.
    sent = point == "client.save.seal_sent"
    before = 2 if sent else 1
    zombie.process.resume()
    said = zombie.answer()
    assert "SUPERSEDED" in said or (sent and said == "ok sealed"), said
    assert "SUPERSEDED" in zombie.ask("save 10")
    assert "SUPERSEDED" in zombie.ask("tier remote")
    job.save()
    _nothing_new_of(job, attempt=1, after=before)
    _ends_well(job, "b c")


def test_a_rank_of_an_old_attempt_on_a_node_that_was_cut_off(network: Network) -> None:
    cluster, job = _running(network, lease_s=SHORT_LEASE_S)
    network.links.cut(cluster["b"])
    zombie = job.ranks[1]
    assert zombie.ask("save 2") == "ok sealed"
    cluster.wait_members("a", "a c")
    _moves_without(cluster, job, zombie, "a c")
    network.links.heal()
    cluster.wait_members("a", "a b c")
    _learns_that_it_is_over(zombie)
    job.save()
    _nothing_new_of(job, attempt=2, after=1)
    _ends_well(job)


def test_a_host_that_is_cut_off_from_etcd_but_not_from_the_mount(network: Network) -> None:
    cluster, job = saved_job(network, "a b c", "a b", host="b", lease_s=SHORT_LEASE_S)
    assert cluster.etcd is not None
    network.links.cut(cluster["b"], cluster.etcd.nodes)
    assert cluster.wait_host(job.name, "a", but="b") in ("a", "c")
    cluster.wait_said("b", "this node is no member")
    assert "cluster: etcd at " in cluster.problems("b")
    zombie = job.ranks[1]
    assert zombie.ask("save 2") == "ok sealed"
    _moves_without(cluster, job, zombie, "a c")
    assert cluster.host(job.name, "b") != "b"
    network.links.heal()
    cluster.wait_members("a", "a b c")
    _learns_that_it_is_over(zombie)
    job.save()
    _nothing_new_of(job, attempt=2, after=1)
    _ends_well(job)


def test_a_host_that_is_cut_off_amid_saves_keeps_what_the_next_one_counts_on(
    network: Network,
) -> None:
    cluster = Cluster(network, "a b c", lease_s=SHORT_LEASE_S)
    assert cluster.etcd is not None
    job = Job(cluster, policy="remote.every_steps=1 remote.keep_last=2 nvme.every_steps=0")
    job.make_host("c")
    job.start("a b")
    assert job.resume() == 0
    job.save()
    network.links.cut(cluster["c"], cluster.etcd.nodes)
    # Each commit makes a removal due: c's as long as it may, then the next host's.
    wait_until(
        "another host",
        lambda: job.save_soon() and cluster.host(job.name, "a") not in ("c", ""),
    )
    cluster.wait_said("c", "this node is no member")
    job.save_soon()
    _all_that_is_listed_is_right(job)
    network.links.heal()
    cluster.wait_members("a", "a b c")
    job.save_soon()
    job.save()
    _all_that_is_listed_is_right(job)
    job.start("b c")
    assert job.resume() == job.safe


def test_a_host_that_is_over_amid_its_removals_removes_nothing_more(network: Network) -> None:
    cluster = Cluster(network, "a b c", lease_s=SHORT_LEASE_S, start=False)
    assert cluster.etcd is not None
    # The host's own policy holds where the job has none: to c four of five steps are too many, to the others none is.
    for name, keep_last in (("a", 100), ("b", 100), ("c", 1)):
        cluster.daemons[name].settings["policy"] = {"remote": {"keep_last": keep_last}}
    cluster.start("a b")
    job = Job(cluster, policy="remote.every_steps=1 nvme.every_steps=0")
    job.start("a b")
    assert job.resume() == 0
    for _ in range(5):
        job.save()
    cluster.start("c", armed={"c": "daemon.removal.done:stop"})
    wait_until("c knows the job", lambda: cluster.host(job.name, "c"))
    job.kill()
    for name in ("a", "b"):
        assert cluster.daemons[name].terminate() == 0
    host = cluster.daemons["c"].process
    assert host is not None
    host.wait_stopped()
    first = {step for _, step in job.manifests()}
    assert len(first) == 4 and 5 in first, "it was to stand still after its first removal"
    network.links.cut(cluster["c"], cluster.etcd.nodes)
    cluster.start("a b")
    job.start("a b")
    assert job.resume() == 5
    assert job.save() == 6
    counted = _steps_in_remote(job)
    assert counted == first | {6}
    # What was due to it is due to nobody now. Cut off as it is it reaches the mount, and the other nodes.
    host.resume()
    cluster.wait_said("c", "this node is no member")
    job.save()
    network.links.heal()
    cluster.wait_members("a", "a b c")
    new_host = cluster.wait_host(job.name, "a", but="c")
    cluster.wait_host_is(job.name, "c", new_host)
    job.save()
    assert _steps_in_remote(job) == counted | {7, 8}
    _all_that_is_listed_is_right(job)
    job.start("b c")
    assert job.resume() == 8


def test_a_host_stands_still_for_longer_than_its_lease(network: Network) -> None:
    # b hosts both jobs, and stands still by itself when it is to publish its third manifest: that of step 2 of the job
    # that runs elsewhere.
    cluster = Cluster(
        network, "a b c", lease_s=SHORT_LEASE_S, armed={"b": "daemon.manifest.begun:stop@3"}
    )
    here, elsewhere = Job(cluster, "here"), Job(cluster, "elsewhere")
    for job, places in ((here, "a b"), (elsewhere, "a c")):
        job.make_host("b")
        job.start(places)
        assert job.resume() == 0
        job.save()
    still = cluster.daemons["b"].process
    assert still is not None
    assert elsewhere.ask("save 2") == ["ok sealed"] * 2
    still.wait_stopped()
    assert (elsewhere.attempt, 2) not in elsewhere.manifests()
    hosts = {job: cluster.wait_host(job.name, "a", but="b") for job in (here, elsewhere)}
    assert set(hosts.values()) <= {"a", "c"}
    assert elsewhere.ask("tier remote") == ["ok remote"] * 2, "the next host commits it"
    assert elsewhere.save() == 3
    before = _manifests_as_they_lie(elsewhere)
    still.resume()
    cluster.wait_members("a", "a b c")
    for job, host in hosts.items():
        for name in cluster.nodes:
            cluster.wait_host_is(job.name, name, host)
    here.save_soon()
    for job in (here, elsewhere):
        job.save()
        assert cluster.status(job.name, "b")["attempt"] == job.attempt, "nobody had to start anew"
        job.check_history()
    now = _manifests_as_they_lie(elsewhere)
    assert now == before | {key: now[key] for key in now.keys() - before.keys()}, "written twice"
    assert {job: cluster.host(job.name, "b") for job in hosts} == hosts
    for job, places in ((here, "b a"), (elsewhere, "b c")):
        _ends_well(job, places)


# ---- What comes back ----


def test_a_node_comes_back_with_copies_of_another_branch_on_its_drive(network: Network) -> None:
    cluster = Cluster(network, "a b c", lease_s=SHORT_LEASE_S)
    job = Job(cluster, policy=f"{_EVERY_OTHER} nvme.every_steps=1 nvme.keep_last=9")
    job.make_host("c")
    job.start("a b")
    assert job.resume() == 0
    assert job.save() == 1
    assert job.save() == 2
    assert job.ask("save 3") + job.ask("tier nvme") == ["ok sealed"] * 2 + ["ok nvme"] * 2
    assert list((cluster["b"].disk / "nvme/holdfast/job").glob("3-a*/1.record"))
    cluster["b"].kill()
    job.start("a c")
    assert job.resume() == 2, "step 3 is on a drive that nobody reaches"
    assert job.ask("save 3") + job.ask("tier nvme") == ["ok sealed"] * 2 + ["ok nvme"] * 2
    assert job.save() == 4
    # The drive has steps 1 to 3 of the attempt before, in a node that knows nothing of the last one.
    cluster["b"].boot()
    cluster.start("b")
    job.start("a b")
    job.join()
    said = job.ask_anew("restore")
    # (Of a peer, or remote; or it is there already: it comes ahead of the session.)
    assert job.agreed(said) == 4
    assert "source=nvme" not in said[1], said
    # What is left of it may have been removed meanwhile: one shard of two, on a branch that was left.
    stale = [one for one in job.listed() if (one["attempt"], one["step"]) == (2, 3)]
    assert not any(one["on_line"] for one in stale), job.listed()
    job.ask("save 5")
    assert job.save() == 6
    job.policy = POLICY
    _ends_well(job)


def test_a_node_comes_back_without_its_drive_and_its_state(network: Network) -> None:
    cluster, job = _running(network, lease_s=SHORT_LEASE_S)
    cluster["b"].kill()
    cluster["b"].erase("nvme")
    cluster["b"].erase("state")
    cluster["b"].boot()
    cluster.start("b")
    job.start("a b")
    assert job.resume() == 1
    job.save()
    _ends_well(job)


# ---- Said once ----


def _running(
    network: Network,
    *,
    etcd_members: int = 1,
    clocks_s: dict[str, float] | None = None,
    settings: dict[str, Any] | None = None,
    lease_s: int = LEASE_S,
) -> tuple[Cluster, Job]:
    """A job with a rank on a and one on b, hosted by c, that has saved step 1."""
    cluster = Cluster(
        network,
        "a b c",
        etcd_members=etcd_members,
        clocks_s=clocks_s,
        settings=settings,
        lease_s=lease_s,
    )
    job = Job(cluster)
    job.make_host("c")
    job.start("a b")
    assert job.resume() == 0
    assert job.save() == 1
    return cluster, job


def _ends_well(job: Job, places: str = "a b") -> None:
    """All commits are there, and ranks that start anew all get the newest one."""
    job.check_history()
    job.start(places)
    assert job.resume() >= job.safe
    job.save()


def _steps_in_remote(job: Job) -> set[int]:
    """Those that are committed there, as its host tells."""
    listed = [one for one in job.listed() if "remote" in one["tiers"]]
    assert all(one["state"] == "committed" for one in listed), listed
    return {one["step"] for one in listed}


def _all_that_is_listed_is_right(job: Job) -> None:
    """Where steps go by the policy: what the host lists in remote is what lies there, every byte of it."""
    assert job.safe in _steps_in_remote(job)
    wait_until(
        "what lies there is what is listed",
        lambda: {step for _, step in job.manifests()} == _steps_in_remote(job),
    )
    asked = job.cluster.daemons[job.ranks[0].node.name]
    assert "every digest is right" in asked.ctl("verify", job.name, "--all")


def _manifests_as_they_lie(job: Job) -> dict[tuple[int, int], tuple[int, int, bytes]]:
    found = {key: directory / "MANIFEST" for key, directory in job.manifests().items()}
    return {
        key: (path.stat().st_ino, path.stat().st_mtime_ns, path.read_bytes())
        for key, path in found.items()
    }


def _moves_without(cluster: Cluster, job: Job, zombie: Rank, places: str) -> None:
    """The launcher starts the job elsewhere, and cannot end that rank."""
    job.ranks.remove(zombie)
    job.kill()
    job.step = max(job.step, 2)
    job.start(places, keep=True)
    assert job.resume() == 1
    job.save()


def _nothing_new_of(job: Job, attempt: int, after: int) -> None:
    """Neither in remote nor anywhere else."""
    steps = [step for its, step in job.manifests() if its == attempt]
    steps += [one["step"] for one in job.listed() if one["attempt"] == attempt]
    assert all(step <= after for step in steps), (job.manifests(), job.listed())


def _learns_that_it_is_over(zombie: Rank) -> None:
    """It saves on until it is told, and then whatever it asks."""
    steps = iter(range(100, 1000))
    wait_until(
        "the old rank hears that it is over",
        lambda: "SUPERSEDED" in zombie.ask(f"save {next(steps)}"),
    )
    assert "SUPERSEDED" in zombie.ask(f"save {next(steps)}")
