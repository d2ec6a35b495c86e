"""What can be wrong with the network between nodes. Every fault acts at once, on what is connected already too, until it is healed.

    network.links.cut(a, b)                        # nothing goes between a and b; both reach all others
    network.links.cut(a, way="out")                # a hears everybody and nobody hears a
    network.links.lossy(a, b, share=0.3)           # three of ten packets between them are lost
    network.links.slow(a, bytes_per_s=1 << 20)
    network.links.delay(a, b, by_ms=50, jitter_ms=100)
    network.links.flapping(a, up_ms=300, down_ms=200)
    network.links.heal()

`way` is as the first node sees it. The second: a node, several, or nobody named: all others. IP is cut, ARP is not, so that a link
that is cut one way is good the other way for ever.
"""

from __future__ import annotations

import dataclasses
import pathlib
import random
import sys
import threading
from collections.abc import Iterable
from typing import TYPE_CHECKING, Literal

from .delay_proxy import MARK
from .process import Process

if TYPE_CHECKING:
    from .network import Network
    from .node import Node

    Others = Node | Iterable[Node] | None

Way = Literal["both", "in", "out"]


@dataclasses.dataclass(frozen=True)
class _Loss:
    source: str | None  # ports of the switch; None: any
    target: str | None
    share: float

    def rule(self) -> str:
        words = ["ether type ip"]
        if self.source is not None:
            words.append(f'iifname "{self.source}"')
        if self.target is not None:
            words.append(f'oifname "{self.target}"')
        if self.share < 1:
            words.append(f"numgen random mod 10000 < {round(self.share * 10000)}")
        return " ".join([*words, "counter drop"])


def _ports(others: Others) -> list[str | None]:
    if others is None:
        return [None]
    return [node.port for node in ([others] if hasattr(others, "port") else others)]


class Links:
    """The faults of one `Network`; any thread may call it."""

    def __init__(self, network: Network) -> None:
        self._network = network
        self._mutex = threading.Lock()
        self._losses: list[_Loss] = []
        self._slow: dict[str, tuple[int, Way]] = {}
        self._delays: dict[tuple[str, str], _Delay] = {}
        self._flapping: dict[str, Flapping] = {}

    # Faults.

    def cut(self, node: Node, others: Others = None, *, way: Way = "both") -> None:
        """Packets vanish, without a word to either side."""
        self.lossy(node, others, share=1, way=way)

    def partition(self, *groups: Iterable[Node]) -> None:
        """Nodes of different groups do not reach each other."""
        sets = [list(group) for group in groups]
        losses = [
            _Loss(a.port, b.port, 1)
            for mine in sets
            for theirs in sets
            if mine is not theirs
            for a in mine
            for b in theirs
        ]
        self._change([*self._losses, *losses])

    def lossy(self, node: Node, others: Others = None, *, share: float, way: Way = "both") -> None:
        """Each packet is lost with the probability `share`."""
        losses = []
        for other in _ports(others):
            if way != "in":
                losses.append(_Loss(node.port, other, share))
            if way != "out":
                losses.append(_Loss(other, node.port, share))
        self._change([*self._losses, *losses])

    def slow(self, node: Node, *, bytes_per_s: int, way: Way = "both") -> None:
        """The node's link has so much bandwidth, each way."""
        self._slow[node.name] = (bytes_per_s, way)
        self._apply_slow(node)

    def delay(self, a: Node, b: Node, *, by_ms: int, jitter_ms: int = 0, seed: int = 1) -> None:
        """Whatever a and b say to each other over TCP arrives `by_ms` to `by_ms + jitter_ms` later.

        Each chunk of each connection has its own delay, so what goes over several connections arrives in another order; within one it
        does not, as TCP promises. Connections of before are broken (reset). A connection is accepted at once even if nobody listens
        at the other end; it is then reset.
        """
        for here, there in ((a, b), (b, a)):
            key = (here.name, there.name)
            if key in self._delays:
                self._delays.pop(key).end()
            self._delays[key] = _Delay(here, there, by_ms, jitter_ms, seed)

    def flapping(
        self,
        node: Node,
        others: Others = None,
        *,
        up_ms: int,
        down_ms: int,
        way: Way = "both",
        seed: int = 1,
    ) -> Flapping:
        """The link comes and goes, each for a random time around the one given (half to three halves of it), until it is healed."""
        self._end_flapping(node.name)
        flapping = Flapping(self, node, others, up_ms, down_ms, way, seed)
        self._flapping[node.name] = flapping
        return flapping

    def break_connections(self, a: Node, b: Node) -> None:
        """Every TCP connection between the two is reset, at both ends."""
        for here, there in ((a, b), (b, a)):
            if here.is_running():
                here.administer("ss", ["-K", "dst", there.address])

    def heal(self, node: Node | None = None) -> None:
        """Ends all faults, or all that name this node."""
        for name in list(self._flapping):
            if node is None or name == node.name:
                self._end_flapping(name)
        for key in list(self._delays):
            if node is None or node.name in key:
                self._delays.pop(key).end()
        for name in list(self._slow):
            if node is None or name == node.name:
                del self._slow[name]
                self._apply_slow(self._network.nodes[name])
        self._change(
            []
            if node is None
            else [loss for loss in self._losses if node.port not in (loss.source, loss.target)]
        )

    # For Network and Flapping.

    def plugged_in(self, node: Node) -> None:
        """A node came (back): what belongs to its own end of the link is gone. Delays end with it: its proxies were its processes."""
        for key in list(self._delays):
            if key[0] == node.name:
                self._delays[key].begin()
        if node.name in self._slow:
            self._apply_slow(node)

    def close(self) -> None:
        for name in list(self._flapping):
            self._end_flapping(name)

    def add_losses(self, losses: list[_Loss]) -> None:
        self._change([*self._losses, *losses])

    def remove_losses(self, losses: list[_Loss]) -> None:
        self._change([loss for loss in self._losses if not any(loss is one for one in losses)])

    def _change(self, losses: list[_Loss]) -> None:
        rules = "\n".join(loss.rule() for loss in losses)
        # One transaction: no moment without the faults that stay.
        text = f"""table bridge faults
delete table bridge faults
table bridge faults {{
chain forward {{
type filter hook forward priority 0; policy accept;
{rules}
}}
}}
"""
        with self._mutex:
            self._network.administer("nft", ["-f", "-"], text)
            self._losses = losses

    def _apply_slow(self, node: Node) -> None:
        bytes_per_s, way = self._slow.get(node.name, (0, "both"))
        if not node.is_running():
            return
        ends = (
            (lambda words: self._network.administer("tc", words), node.port, way != "out"),
            (lambda words: node.administer("tc", words), "eth0", way != "in"),
        )
        for tc, device, wanted in ends:
            if bytes_per_s and wanted:
                limit = ["rate", f"{bytes_per_s * 8}bit", "burst", "64kb", "latency", "400ms"]
                tc(["qdisc", "replace", "dev", device, "root", "tbf", *limit])
            else:
                tc(["qdisc", "replace", "dev", device, "root", "noqueue"])

    def _end_flapping(self, name: str) -> None:
        flapping = self._flapping.pop(name, None)
        if flapping is not None:
            flapping.end()


class Flapping:
    """A link that comes and goes; `cuts` counts how often it went."""

    def __init__(
        self,
        links: Links,
        node: Node,
        others: Others,
        up_ms: int,
        down_ms: int,
        way: Way,
        seed: int,
    ) -> None:
        self.cuts = 0
        self._links = links
        self._losses = []
        for other in _ports(others):
            if way != "in":
                self._losses.append(_Loss(node.port, other, 1))
            if way != "out":
                self._losses.append(_Loss(other, node.port, 1))
        self._random = random.Random(seed)
        self._periods_ms = (up_ms, down_ms)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._flap, daemon=True)
        self._thread.start()

    def end(self) -> None:
        self._ended.set()
        self._thread.join()

    def _flap(self) -> None:
        up_ms, down_ms = self._periods_ms
        while not self._ended.wait(up_ms / 1000 * self._random.uniform(0.5, 1.5)):
            self._links.add_losses(self._losses)
            self.cuts += 1
            self._ended.wait(down_ms / 1000 * self._random.uniform(0.5, 1.5))
            self._links.remove_losses(self._losses)


class _Delay:
    """One direction of opening: the connections that `here` opens to `there` go through a proxy in `here`."""

    def __init__(self, here: Node, there: Node, by_ms: int, jitter_ms: int, seed: int) -> None:
        self._here, self._there = here, there
        self._numbers = [str(number) for number in (by_ms, jitter_ms, seed)]
        self._process: Process | None = None
        self._table = f"delay_{there.number}"
        if here.is_running():
            self.begin()

    def begin(self) -> None:
        proxy = pathlib.Path(__file__).parent / "delay_proxy.py"
        self._process = self._here.start_helper(
            [sys.executable, "-SEsB", proxy, *self._numbers], stdout=True
        )
        port = int(self._process.read_line())
        self._here.administer(
            "nft",
            ["-f", "-"],
            f"""table ip {self._table} {{
chain output {{
type nat hook output priority -100; policy accept;
meta mark {MARK} accept
ip daddr {self._there.address} meta l4proto tcp redirect to :{port}
}}
}}
""",
        )
        self._break()

    def end(self) -> None:
        if self._process is not None and self._here.is_running():
            # In this order: without the table what the dying connections say would reach nobody.
            self._process.kill()
            self._here.administer("nft", ["delete", "table", "ip", self._table])
        self._process = None

    def _break(self) -> None:
        self._here.administer("ss", ["-K", "dst", self._there.address])
