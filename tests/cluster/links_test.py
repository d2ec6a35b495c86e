"""Each fault of a link does what it says, to that link and to no other, until it is healed.

That something does not arrive is never waited for: what is sent after healing arrives after all that was not lost.
"""

from __future__ import annotations

import select
import socket
import sys
import time

import pytest

from .network import Network
from .node import Node
from .process import DEADLINE_S

_SO_RCVBUFFORCE = 33
_TRIES_MAX = 5
_END = b"end"


class Post:
    """Datagrams between nodes, from the harness's hands."""

    def __init__(self, *nodes: Node) -> None:
        self.boxes: dict[Node, socket.socket] = {}
        for node in nodes:
            with node.inside_network():
                box = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
            box.setsockopt(socket.SOL_SOCKET, _SO_RCVBUFFORCE, 64 << 20)
            box.settimeout(DEADLINE_S)
            box.bind((node.address, 7000))
            self.boxes[node] = box

    def send(self, source: Node, target: Node, text: bytes = b"x") -> None:
        self.boxes[source].sendto(text, (target.address, 7000))

    def received(self, network: Network, source: Node, target: Node) -> list[bytes]:
        """All that had arrived from `source`; heals the network for that."""
        network.links.heal()
        self.send(source, target, _END)
        found = []
        while True:
            text, sender = self.boxes[target].recvfrom(2048)
            if sender[0] == source.address:
                if text == _END:
                    return found
                found.append(text)

    def paths(self, network: Network) -> set[tuple[str, str]]:
        """From whom to whom datagrams go now, as it is; and what it was then is healed."""
        pairs = [(a, b) for a in self.boxes for b in self.boxes if a is not b]
        for a, b in pairs:
            self.send(a, b)
        open_ones = set()
        waiting: dict[Node, set[str]] = {
            b: {a.address for a, t in pairs if t is b} for b in self.boxes
        }
        network.links.heal()
        for a, b in pairs:
            self.send(a, b, _END)
        names = {node.address: node.name for node in self.boxes}
        for b, senders in waiting.items():
            while senders:
                text, (address, _) = self.boxes[b].recvfrom(2048)
                if text == _END:
                    senders.discard(address)
                else:
                    open_ones.add((names[address], b.name))
        return open_ones


def _three(network: Network) -> tuple[Node, Node, Node, Post]:
    a, b, c = (network.add_node(name) for name in "abc")
    return a, b, c, Post(a, b, c)


ALL = {(x, y) for x in "abc" for y in "abc" if x != y}


def test_cuts_are_between_those_named_and_in_the_way_named(network: Network) -> None:
    a, b, c, post = _three(network)
    links = network.links
    assert post.paths(network) == ALL
    links.cut(a, b)
    assert post.paths(network) == ALL - {("a", "b"), ("b", "a")}
    links.cut(a, b, way="out")
    assert post.paths(network) == ALL - {("a", "b")}
    links.cut(a, b, way="in")
    assert post.paths(network) == ALL - {("b", "a")}
    links.cut(a)
    assert post.paths(network) == {("b", "c"), ("c", "b")}
    links.cut(a, way="out")
    assert post.paths(network) == ALL - {("a", "b"), ("a", "c")}
    links.cut(a, way="in")
    assert post.paths(network) == ALL - {("b", "a"), ("c", "a")}
    links.partition([a], [b, c])
    assert post.paths(network) == {("b", "c"), ("c", "b")}
    links.cut(a, b)
    links.cut(c, b, way="in")
    links.heal(a)
    assert post.paths(network) == ALL - {("b", "c")}
    assert post.paths(network) == ALL


def test_a_cut_outlasts_a_reboot_and_holds_for_connections_of_before(network: Network) -> None:
    a, b = network.add_node("a"), network.add_node("b")
    connection = _connected_to_echo(a, b)
    network.links.cut(a, b)
    connection.sendall(b"2")
    b_again = network.add_node("c")
    a_to_c = _connected_to_echo(
        a, b_again
    )  # a answer by way of c: what went to b had its time, too
    a_to_c.sendall(b"3")
    assert a_to_c.recv(1) == b"3"
    assert not select.select([connection], [], [], 0)[0]
    network.links.heal()
    assert connection.recv(1) == b"2", "TCP says it again"
    network.links.cut(b, way="out")
    b.reboot()
    post = Post(a, b)
    assert post.paths(network) == {("a", "b")}


def test_a_lossy_link_loses_its_share(network: Network) -> None:
    a, b, _, post = _three(network)
    network.links.lossy(a, b, share=0.3, way="out")
    for number in range(2000):
        post.send(a, b, b"%d" % number)
        post.send(b, a, b"%d" % number)
    there = post.received(network, a, b)
    assert 1200 <= len(there) <= 1600  # ten standard deviations around 1400
    assert len(post.received(network, b, a)) == 2000


def test_a_flapping_link_comes_and_goes_until_it_is_healed(network: Network) -> None:
    a, b, c, post = _three(network)
    flapping = network.links.flapping(a, b, up_ms=20, down_ms=20)
    changes, was, number = 0, True, 0
    end = time.monotonic() + DEADLINE_S
    while changes < 6:
        assert time.monotonic() < end, "it does not flap"
        number += 1
        post.send(a, b, b"%d" % number)
        post.send(a, c, b"%d" % number)
        assert post.boxes[c].recv(2048) == b"%d" % number
        # The way over c took as long: what is not here is lost.
        arrived = bool(select.select([post.boxes[b]], [], [], 0.001)[0])
        while select.select([post.boxes[b]], [], [], 0)[0]:
            post.boxes[b].recv(2048)
        changes += arrived != was
        was = arrived
    assert flapping.cuts >= 3
    assert post.received(network, a, b) == []
    assert post.paths(network) == ALL
    cuts = flapping.cuts
    assert post.paths(network) == ALL
    assert flapping.cuts == cuts


@pytest.mark.parametrize("way", ["in", "out"])
def test_a_slow_link_takes_its_time(network: Network, way: str) -> None:
    a, b = network.add_node("a"), network.add_node("b")
    rate = 2 << 20
    network.links.slow(a, bytes_per_s=rate, way=way)
    a.reboot()  # it stays slow
    sent = bytes(1 << 20)
    fast, slow = (a, b) if way == "in" else (b, a)
    seconds = {}
    for name, source in (("fast", fast), ("slow", slow)):
        target = b if source is a else a
        connection = _connected_to_echo(source, target, program=_SINK)
        began = time.monotonic()
        connection.sendall(sent)
        connection.shutdown(socket.SHUT_WR)
        assert connection.recv(16) == b"%d" % len(sent)
        seconds[name] = time.monotonic() - began
    assert seconds["slow"] > 0.8 * len(sent) / rate
    network.links.heal()
    for place in (a, network):
        assert "tbf" not in place.administer("tc", ["qdisc", "show"])


def test_delayed_connections_arrive_later_and_out_of_order(network: Network) -> None:
    a, b, c, post = _three(network)
    before = _connected_to_echo(a, b)
    network.links.delay(a, b, by_ms=100)
    _assert_broken(before)
    connection = _connected_to_echo(a, b)
    began = time.monotonic()
    connection.sendall(b"1")
    assert connection.recv(1) == b"1"
    assert time.monotonic() - began >= 2 * 0.100
    with pytest.raises(
        ConnectionRefusedError
    ):  # c is not concerned: there is no proxy in between that would accept
        a.connect(c.address, 1)
    network.links.delay(a, b, by_ms=50, jitter_ms=200)
    _assert_broken(connection)
    connection = _connected_to_echo(a, b)
    # A test that gets no time while they come may see them in order.
    orders = (_order_of_arrival(a, b) for _ in range(_TRIES_MAX))
    assert any(order != sorted(order) for order in orders)
    # Cuts hold for what is delayed, and c is not concerned.
    network.links.cut(a, b)
    connection.sendall(b"2")
    through = _connected_to_echo(a, c)
    through.sendall(b"1")
    assert through.recv(1) == b"1"
    assert not select.select([connection], [], [], 0)[0]
    network.links.heal(c)
    network.links.heal()
    _assert_broken(connection)
    with pytest.raises(ConnectionRefusedError):
        a.connect(b.address, 1)
    assert post.paths(network) == ALL


def _order_of_arrival(source: Node, target: Node) -> list[int]:
    """Of connections that send at once, numbered as they send: each comes when it comes, and nothing is lost or changed."""
    with target.inside_network():
        server = socket.create_server((target.address, 0))
    port = server.getsockname()[1]
    senders = [source.connect(target.address, port) for _ in range(16)]
    accepted = [server.accept() for _ in senders]
    assert {peer[0] for _, peer in accepted} == {source.address}
    for number, sender in enumerate(senders):
        sender.sendall(bytes([number]) * 100_000)
        sender.shutdown(socket.SHUT_WR)
    order, open_ones = [], [one for one, _ in accepted]
    got: dict[socket.socket, bytes] = {one: b"" for one in open_ones}
    while open_ones:
        readable, _, _ = select.select(open_ones, [], [], DEADLINE_S)
        assert readable
        for one in readable:
            data = one.recv(1 << 20)
            got[one] += data
            if data and got[one] == data:
                order.append(data[0])
            if not data:
                open_ones.remove(one)
    assert sorted(order) == list(range(16))
    assert all(data == data[:1] * 100_000 for data in got.values())
    return order


_ECHO = """
import socket, threading
server = socket.create_server(("0.0.0.0", 0))
print(server.getsockname()[1], flush=True)
def serve(connection):
    while data := connection.recv(65536):
        connection.sendall(data)
while True:
    threading.Thread(target=serve, args=[server.accept()[0]], daemon=True).start()
"""

_SINK = """
import socket
server = socket.create_server(("0.0.0.0", 0))
print(server.getsockname()[1], flush=True)
connection, _ = server.accept()
count = 0
while data := connection.recv(65536):
    count += len(data)
connection.sendall(b"%d" % count)
"""


def _assert_broken(connection: socket.socket) -> None:
    try:
        assert connection.recv(1) == b""
    except ConnectionError:
        pass


def _connected_to_echo(source: Node, target: Node, program: str = _ECHO) -> socket.socket:
    """A connection to a server that says everything again, once it has done so."""
    server = target.start([sys.executable, "-c", program], stdout=True)
    connection = source.connect(target.address, int(server.read_line()))
    if program == _ECHO:
        connection.sendall(b"0")
        assert connection.recv(1) == b"0"
    return connection
