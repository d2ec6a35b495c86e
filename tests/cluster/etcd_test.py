"""etcd on nodes: what the tests of membership rely on."""

from __future__ import annotations

import pytest

from .etcd import Etcd, EtcdError
from .network import Network


def test_three_members_live_on_when_their_leader_is_killed_or_cut_off(network: Network) -> None:
    etcd = Etcd(network, members=3).start()
    assert len({node.address for node in etcd.nodes}) == 3
    etcd.put("a", "1")
    killed = etcd.kill_leader()
    assert etcd.leader() is not killed
    assert etcd.get("a") == "1"
    etcd.put("a", "2")
    etcd.start()
    assert etcd.get("a", killed) == "2"

    cut = etcd.leader()
    network.links.cut(cut.node)
    others = [member for member in etcd.members if member is not cut]
    etcd.wait_ready(*others)
    assert etcd.leader() in others
    etcd.put("a", "3", others[0])
    with pytest.raises((EtcdError, TimeoutError)):  # alone it agrees to nothing
        cut.call("/v3/kv/range", {"key": "YQ=="}, deadline_s=2)
    network.links.heal()
    etcd.wait_ready(cut)
    assert etcd.get("a", cut) == "3"


def test_a_wiped_etcd_is_seen_by_its_revision_and_cluster_id(network: Network) -> None:
    etcd = Etcd(network, members=1).start()
    first = etcd.cluster_id()
    for value in range(5):
        revision = etcd.put("jobs/a", str(value))
    assert etcd.keys("jobs/") == {"jobs/a": "4"}
    etcd.kill()
    etcd.start()
    assert (etcd.cluster_id(), etcd.get("jobs/a")) == (first, "4")
    etcd.wipe(same_cluster_id=True)
    assert (etcd.cluster_id(), etcd.get("jobs/a")) == (first, None)
    assert etcd.put("jobs/a", "x") < revision
    etcd.wipe()
    assert etcd.cluster_id() != first
    assert etcd.put("jobs/a", "x") < revision


def test_a_stopped_etcd_answers_when_it_goes_on(network: Network) -> None:
    etcd = Etcd(network, members=1).start()
    etcd.stop()
    with pytest.raises(TimeoutError):
        etcd.members[0].status(deadline_s=0.2)
    etcd.resume()
    etcd.wait_ready()


def test_a_node_is_cut_off_from_etcd_only(network: Network) -> None:
    etcd = Etcd(network, members=1).start()
    a, b = network.add_node("a"), network.add_node("b")
    (member,) = etcd.members
    address, port = member.url.removeprefix("http://").split(":")
    before = a.connect(address, int(port))
    network.links.cut(a, etcd.nodes)
    with pytest.raises(TimeoutError):
        a.connect(address, int(port), deadline_s=0.2)
    with b.inside_network():
        assert member.status(deadline_s=10)
    b.connect(address, int(port)).close()
    server = b.start(["python3", "-c", _ONE_CONNECTION], stdout=True)
    a.connect(b.address, int(server.read_line())).close()
    assert server.wait() == 0
    a.run(["sh", "-c", "echo 1 >/remote/f"])
    assert b.run(["cat", "/remote/f"]) == "1\n"
    network.links.heal()
    a.connect(address, int(port)).close()
    before.close()


_ONE_CONNECTION = """
import socket
server = socket.create_server(("0.0.0.0", 0))
print(server.getsockname()[1], flush=True)
server.accept()
"""
