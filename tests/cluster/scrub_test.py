"""Copies in remote are read again by the nodes whose ranks wrote them, and not by the job's host alone."""

from __future__ import annotations

from typing import Any

from .cluster_of_daemons import Cluster, Job, wait_until
from .network import Network


def _scrub(cluster: Cluster, name: str) -> dict[str, Any]:
    return cluster.tell(name, "scrub", "--status")


def test_what_is_bad_in_remote_is_found_by_the_scrub_of_its_ranks_node(network: Network) -> None:
    cluster = Cluster(network, "a b", settings={"scrub": {"period_ms": 2000}})
    job = Job(cluster, policy="nvme.every_steps=0 nvme.every_ms=0 remote.every_steps=1")
    job.start("a b")
    assert job.resume() == 0
    assert job.ask("save 1") + job.ask("tier remote") == ["ok sealed"] * 2 + ["ok remote"] * 2
    host = cluster.host("job", "a")
    reader = {"a": "b", "b": "a"}[host]
    rank = "ab".index(reader)

    def read(name: str) -> int:
        return _scrub(cluster, name)["copies_read"]

    # Each has its rank's copy in memory and that in remote; nobody has the other one's.
    for name in cluster.nodes:
        wait_until(f"{name} reads its part", lambda name=name: _scrub(cluster, name)["copies"] == 2)
        before = read(name)
        wait_until(f"{name} reads", lambda name=name, before=before: read(name) >= before + 2)

    def copy() -> dict[str, Any]:
        (found,) = [
            each
            for each in cluster.tell(host, "where", "job", "--step", "1")["copies"]
            if each["tier"] == "remote" and each["rank"] == rank
        ]
        return found

    image = network.remote / copy()["location"].removeprefix("/remote/")
    content = bytearray(image.read_bytes())
    content[-5] ^= 1
    image.write_bytes(content)

    def events(kind: str) -> list[str]:
        told = cluster.tell(host, "events")["events"]
        return [each["text"] for each in told if each["kind"] == kind]

    (mended,) = wait_until("it is mended", lambda: events("copy_mended"))
    assert f"rank {rank}" in mended and "remote" in mended, mended
    content[-5] ^= 1
    assert image.read_bytes() == content
    assert _scrub(cluster, reader)["copies_bad"] >= 1
    assert _scrub(cluster, host)["copies_bad"] == 0, "the host reads its own rank's"
