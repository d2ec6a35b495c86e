"""kill -9 of each role at each step of the protocol: a daemon with ranks, the host, a spare, a rank, etcd.

Of each the same is wanted: no commit is lost or doubled, nobody hangs, all ranks agree on one step afterwards, and the next save
commits. Where a process is to be at a certain step when another one dies, it stops there by itself (base/sync_point.h). Of each kind one
or two steps always run, all of them in the slow suite.
"""

from __future__ import annotations

import concurrent.futures
import signal

import pytest

from .cluster_of_daemons import SHORT_LEASE_S, Cluster, Job, saved_job, wait_until
from .matrix import matrix
from .network import Network
from .rank import Rank

# ---- A daemon with ranks; another node hosts the job ----


@pytest.mark.parametrize(
    "point",
    matrix(
        "daemon.seal.received",
        "daemon.flush.data_written",
        whole=[
            "daemon.begin.note_written",
            "daemon.begin.granted",
            "daemon.seal.record_written",
            "daemon.seal.replied",
            "daemon.flush.published",
        ],
    ),
)
def test_a_daemon_whose_ranks_save_is_killed(network: Network, point: str) -> None:
    cluster, job = saved_job(network, "a b c", "a b", host="c")
    cluster.start_anew("b", armed={"b": f"{point}:kill"})
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        answers = pool.submit(lambda: job.ask("save 2") + job.ask("tier remote 10000"))
        cluster.revive("b")
        said = answers.result()
    assert said[0] == "ok sealed", f"what rank 0 does hangs on no other node: {said}"
    job.save_soon()
    job.save()
    job.check_history()
    job.start("a b")
    assert job.resume() == job.safe


@pytest.mark.parametrize(
    "point",
    matrix("daemon.session.source_sent", whole=["daemon.join.replied", "daemon.session.done_sent"]),
)
def test_a_daemon_whose_ranks_restore_is_killed(network: Network, point: str) -> None:
    cluster, job = saved_job(network, "a b c", "a b", host="c")
    job.kill()
    cluster.start_anew("b", armed={"b": f"{point}:kill"})
    job.start("a b")
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        step = pool.submit(job.resume)
        cluster.revive("b")
        assert step.result() == 1
    job.save_soon()
    job.check_history()
    job.start("a b")
    assert job.resume() == job.safe


# ---- The host ----


def test_the_host_is_killed_when_the_first_attempt_is_written(network: Network) -> None:
    cluster = Cluster(network, "a b", armed={"a": "daemon.join.state_written:kill"})
    job = Job(cluster)
    job.start("a b")
    job.ranks[0].send("open")
    cluster.revive("a")
    said = [job.ranks[0].answer(), job.ranks[1].ask("open")]
    assert said[0] == said[1] and said[0].startswith("ok attempt="), said
    assert job.restore() == 0
    job.save()
    job.check_history()


def test_the_host_is_killed_when_the_second_attempt_is_written(network: Network) -> None:
    # Its ranks join one after the other: each has the state written once, the first attempt's two before those of the second.
    cluster = Cluster(network, "a b", armed={"a": "daemon.join.state_written:kill@3"})
    job = Job(cluster)
    job.start("a b")
    assert [rank.ask("open") for rank in job.ranks] == ["ok attempt=1"] * 2
    job.attempt = 1
    assert job.restore() == 0
    job.save()
    assert cluster.is_running("a"), "it was to die later"
    job.start("a b")
    job.ranks[0].send("open")
    cluster.revive("a")
    said = [job.ranks[0].answer(), job.ranks[1].ask("open")]
    assert said[0] == said[1] and int(said[0].removeprefix("ok attempt=")) > 1, said
    assert job.restore() == 1
    job.save()
    job.check_history()


def test_the_host_is_killed_when_the_restore_is_decided(network: Network) -> None:
    cluster = Cluster(network, "a b c", armed={"c": "daemon.session.decided:kill"})
    job = Job(cluster)
    job.make_host("c")
    job.start("a b")
    job.join()
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        said = pool.submit(job.ask_anew, "restore")
        cluster.revive("c")
        assert all("NOTHING_TO_RESTORE" in each for each in said.result()), said.result()
    job.save_soon()
    job.check_history()
    job.start("a b")
    assert job.resume() == job.safe


@pytest.mark.parametrize(
    "point", matrix("daemon.manifest.begun", whole=["daemon.manifest.published"])
)
def test_the_host_is_killed_at_the_manifest(network: Network, point: str) -> None:
    cluster, job = saved_job(
        network, "a b c", "a b", host="c", armed={"c": f"{point}:kill@2"}, lease_s=SHORT_LEASE_S
    )
    # Whoever hosts it next finds the step whole, and publishes what is not there yet.
    assert job.save() == 2
    assert not cluster.is_running("c")
    assert cluster.wait_host(job.name, "a", but="c") in ("a", "b")
    job.save()
    job.check_history()
    cluster.start("c")
    job.start("a c")
    assert job.resume() == job.safe


@pytest.mark.parametrize(
    "point", matrix("client.save.seal_sent", whole=["client.save.granted", "client.save.sealed"])
)
def test_the_host_is_killed_while_a_rank_saves(network: Network, point: str) -> None:
    cluster = Cluster(network, "a b c", lease_s=SHORT_LEASE_S)
    job = Job(cluster)
    job.make_host("c")
    job.start("a b", armed={1: f"{point}:stop@2"})
    assert job.resume() == 0
    job.save()
    for rank in job.ranks:
        rank.send("save 2")
    job.ranks[1].process.wait_stopped()
    cluster.daemons["c"].kill()
    job.ranks[1].process.resume()
    said = job.note("save 2", [rank.answer() for rank in job.ranks])
    assert said == ["ok sealed"] * 2, "saves wait for no host"
    assert job.ask("tier remote") == ["ok remote"] * 2, "the next host counts again"
    job.save()
    job.check_history()
    cluster.start("c")
    job.start("c a")
    assert job.resume() == job.safe


@pytest.mark.parametrize(
    "point", matrix("client.restore.source_mapped", whole=["client.restore.reported"])
)
def test_the_host_is_killed_while_a_rank_restores(network: Network, point: str) -> None:
    cluster, job = saved_job(network, "a b c", "a b", host="c", lease_s=SHORT_LEASE_S)
    job.start("a b", armed={1: f"{point}:stop"})
    job.join()
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        said = pool.submit(job.ask_anew, "restore")
        job.ranks[1].process.wait_stopped()
        cluster.daemons["c"].kill()
        job.ranks[1].process.resume()
        assert job.agreed(said.result()) == 1
    job.save_soon()
    job.check_history()


@pytest.mark.parametrize(
    "point",
    matrix(
        "daemon.host.elected",
        whole=["daemon.host.campaigns", "daemon.host.stores", "daemon.host.agreed"],
    ),
)
def test_the_next_host_is_killed_as_it_takes_the_job_over(network: Network, point: str) -> None:
    cluster, job = saved_job(network, "a c", "a a", host="c", lease_s=SHORT_LEASE_S)
    cluster.start_anew("a", armed={"a": f"{point}:kill"})
    job.save_soon()
    assert cluster.is_running("a"), "it was to die later"
    cluster.daemons["c"].kill()
    cluster.revive("a")
    job.save_soon()
    job.save()
    assert cluster.host(job.name, "a") == "a"
    job.check_history()
    cluster.start("c")
    job.start("a a")
    assert job.resume() == job.safe


def test_a_node_is_killed_that_hosts_the_job_and_has_ranks_of_it(network: Network) -> None:
    cluster = Cluster(network, "a b c", lease_s=SHORT_LEASE_S)
    job = Job(cluster, policy="remote.every_steps=2 remote.keep_last=100 nvme.every_steps=1")
    job.make_host("b")
    job.start("a b b")
    assert job.resume() == 0
    assert (job.save(), job.save()) == (1, 2)
    # Step 3 is committed, and nowhere whole without b.
    assert job.ask("save 3") + job.ask("tier nvme") == ["ok sealed"] * 3 + ["ok nvme"] * 3
    assert cluster.host(job.name, "a") == "b"
    cluster["b"].kill()
    job.start("a c c")
    assert job.resume() == 2
    host = cluster.wait_host(job.name, "a", but="b")
    assert host in ("a", "c")
    assert job.save() == 4
    job.check_history()
    # It comes back with its drive and its state, and is a node as any other.
    cluster["b"].boot()
    cluster.start("b")
    cluster.wait_members("a", "a b c")
    cluster.wait_host_is(job.name, "b", host)
    job.start("a b b")
    assert job.resume() == 4
    assert cluster.host(job.name, "a") == host
    assert job.ask("save 5") == ["ok sealed"] * 3
    assert job.save() == 6
    job.check_history()


# ---- The host, while it removes ----


def test_the_host_is_killed_while_a_step_is_removed(network: Network) -> None:
    cluster, job = saved_job(
        network,
        "a b c",
        "a b",
        host="c",
        armed={"c": "daemon.removal.done:kill"},
        lease_s=SHORT_LEASE_S,
    )
    for _ in range(2):
        job.save()
    cluster.tell("a", "rm", job.name, "--step", "1")  # may be answered before it dies, or not
    cluster.revive("c")
    job.promised.remove(1)

    def is_gone() -> bool:
        said = cluster.tell("a", "rm", job.name, "--step", "1")
        return said.get("error", {}).get("code") == "NOT_FOUND" and "step 1" in str(said)

    wait_until("the end of step 1", is_gone)
    assert 1 not in {one["step"] for one in job.listed() if one["tiers"]}, job.listed()
    assert not list((network.remote / job.name).glob("1-a*/shard-*"))
    assert "every digest is right" in cluster.daemons["a"].ctl("verify", job.name, "--all")
    job.save_soon()
    job.check_history()
    job.start("a c")
    assert job.resume() == job.safe


@pytest.mark.parametrize(
    "point", matrix("daemon.evict.record_removed", whole=["daemon.slot.deleted"])
)
def test_the_host_is_killed_while_its_job_is_removed(network: Network, point: str) -> None:
    cluster, job = saved_job(
        network, "a b c", "a b", host="b", armed={"b": f"{point}:kill"}, lease_s=SHORT_LEASE_S
    )
    assert job.ask("tier nvme") == ["ok nvme"] * 2
    job.kill()
    assert cluster.is_running("b"), "it was to die later"
    wait_until(
        "a removal that begins",
        lambda: (
            cluster.tell("a", "rm", job.name, "--yes", "--timeout", "2s")
            and not cluster.is_running("b")
        ),
    )
    cluster.revive("b")
    # Whoever hosts the name now knows from the agreed state what is to go: nobody asks again.
    for name in cluster.nodes:
        wait_until(
            f"{name} knows no job", lambda name=name: cluster.tell(name, "jobs").get("jobs") == []
        )
    wait_until(
        "the end of it in remote",
        lambda: not list((network.remote / job.name).glob("*/*.safetensors")),
    )
    for node in cluster.nodes.values():
        assert node.run(["find", "/nvme", "-path", f"*/{job.name}/*/*"]) == ""
        assert node.run(["find", "/dev/shm/holdfast", "-name", "slot-*"]) == ""
    theirs = Rank(cluster["b"], job.name, policy=job.policy, uid=2000)
    assert theirs.ask("open") == "ok attempt=1"
    assert "NOTHING_TO_RESTORE" in theirs.ask("restore")
    assert theirs.ask("save 1") + theirs.ask("tier remote") == "ok sealed" + "ok remote"


# ---- A spare, which gets ranks of another node ----


@pytest.mark.parametrize(
    "point",
    matrix("daemon.fetch.published", whole=["daemon.slot.created", "daemon.session.source_sent"]),
)
def test_a_spare_is_killed_while_it_takes_over_a_rank(network: Network, point: str) -> None:
    cluster, job = saved_job(
        network, "a b spare", "a b", armed={"spare": f"{point}:kill"}, lease_s=SHORT_LEASE_S
    )
    cluster["b"].kill()
    job.start("a spare")
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        step = pool.submit(job.resume)
        cluster.revive("spare")
        assert step.result() == 1
    job.save_soon()
    job.check_history()


# ---- A rank ----


@pytest.mark.parametrize(
    "point",
    matrix(
        "client.restore.half_copied",
        whole=["client.restore.source_mapped", "client.restore.reported", "client.restore.done"],
    ),
)
def test_a_rank_is_killed_while_it_starts(network: Network, point: str) -> None:
    cluster, job = saved_job(network, "a b", "a b")
    job.start("a b", armed={1: f"{point}:kill"})
    for command in ("open", "restore"):
        job.ranks[1].send(command)
    job.ranks[0].ask("open")
    job.ranks[0].send("restore")
    assert job.ranks[1].process.wait() == -signal.SIGKILL
    # Its launcher ends the other one, too, which waits for a rank that is gone.
    job.attempt = 2
    job.start("a b")
    said = job.ask_anew("open")
    assert said[0] == said[1] and said[0].startswith("ok attempt="), said
    assert job.restore() == 1
    job.save()
    job.check_history()


def test_a_rank_is_killed_at_each_step_of_a_save(network: Network) -> None:
    cluster, job = saved_job(network, "a b c", "a b", host="c")
    for point in (
        "client.save.granted",
        "client.save.header_written",
        "client.save.half_copied",
        "client.save.copied",
        "client.save.record_written",
        "client.save.seal_sent",
        "client.save.sealed",
    ):
        job.start("a b", armed={1: f"{point}:kill"})
        assert job.resume() >= job.safe, point
        said = job.ask(f"save {job.step + 1}")
        assert said[1] == "" and job.ranks[1].process.wait() == -signal.SIGKILL, (point, said)
        # The rank that lives is told what became of the step; once the seal was told, that it is there.
        (alone,) = job.note("tier remote", [job.ranks[0].ask("tier remote")])
        assert "ABANDONED" in alone or (alone == "ok remote" and "seal" in point), (point, alone)
        assert alone == "ok remote" or point != "client.save.sealed", alone
    job.start("a b")
    assert job.resume() == job.safe
    job.save()
    job.check_history()


def test_a_rank_is_killed_while_its_admission_is_on_its_way(network: Network) -> None:
    cluster, job = saved_job(network, "a b", "a b", host="a")
    network.links.delay(cluster["a"], cluster["b"], by_ms=400)
    job.start("a b", armed={1: "client.join.sent:stop"})
    for rank in job.ranks:
        rank.send("open")
    wait_until("both are in", lambda: cluster.status(job.name, "a").get("ranks_alive") == 2)
    job.kill()
    network.links.heal()
    job.start("a b")
    said = [answer.split(" ")[0] for answer in job.ask_anew("open 20000")]
    assert said == ["ok", "ok"], "nobody lives who could have the rank"
    assert job.restore() == 1
    job.save()
    job.check_history()


# ---- etcd ----


@pytest.mark.parametrize("members", matrix(1, whole=[3]))
def test_etcd_is_killed_at_each_step(network: Network, members: int) -> None:
    cluster = Cluster(network, "a b c", etcd_members=members)
    etcd = cluster.etcd
    assert etcd is not None
    job = Job(cluster)
    job.start("a b")
    assert job.resume() == 0
    job.save()
    for point in (
        "client.join.sent",
        "client.restore.source_mapped",
        "client.restore.reported",
        "client.save.half_copied",
        "client.save.seal_sent",
    ):
        job.start("a b", armed={1: f"{point}:stop"})
        saves = point.startswith("client.save")
        if saves:
            assert job.resume() == job.safe, point
            for rank in job.ranks:
                rank.send(f"save {job.step + 1}")
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            resumed = None if saves else pool.submit(job.resume)
            job.ranks[1].process.wait_stopped()
            killed = etcd.members[0] if members == 1 else etcd.leader()
            killed.kill()
            job.ranks[1].process.resume()
            if saves:
                said = job.note(f"save {job.step + 1}", [rank.answer() for rank in job.ranks])
                assert said == ["ok sealed"] * 2, f"{point}: saves do not wait for etcd: {said}"
            if members == 1:
                etcd.start()
            if resumed is not None:
                assert resumed.result() == job.safe, point
            else:
                assert job.ask("tier remote") == ["ok remote"] * 2, point
        job.save_soon()
        etcd.start()
    job.check_history()
