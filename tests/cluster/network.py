"""Many nodes on one machine: a switch (a bridge in a network namespace without a name), and what is plugged into it.

    with Network() as network:
        a, b = network.add_node("a"), network.add_node("b")
        server = b.start(["python3", "-m", "http.server", "8000", "--bind", b.address])
        network.links.cut(a, b)

Nothing of it touches the machine's own network, and nothing has a name there that another run could have too. All namespaces
end with this process, however it ends. What may stay is the directory of a run that was killed: the next run removes it.
"""

from __future__ import annotations

import fcntl
import json
import os
import pathlib
import re
import shutil
import sys
import tempfile
import time
from types import TracebackType

from . import system_calls as sc
from .links import Links
from .node import ADDRESS_PREFIX, PROGRAMS, Node, run_in_network
from .process import DEADLINE_S

DIRECTORY_PREFIX = "holdfast-cluster-"
MEMORY_BYTES = 512 << 20
_NODES_MAX = 200
_TREE = pathlib.Path(__file__).resolve().parents[2]


class Network:
    """`directory`: of this run, on disk; `remote`: what all nodes see as /remote; `links`: the faults."""

    def __init__(self) -> None:
        place = pathlib.Path(os.environ.get("HOLDFAST_CLUSTER_DIR") or tempfile.gettempdir())
        remove_what_killed_runs_left(place)
        self.directory = pathlib.Path(
            tempfile.mkdtemp(prefix=f"{DIRECTORY_PREFIX}{os.getpid()}-", dir=place)
        )
        self._lock = os.open(self.directory, os.O_RDONLY)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        self.remote = self.directory / "remote"
        self.remote.mkdir()
        (self.directory / "hosts").write_text("127.0.0.1 localhost\n")
        # The tree, the build and Python, wherever they lie.
        build = PROGRAMS.parent
        previous = os.environ.get("HOLDFAST_TEST_PREVIOUS_BIN", "")  # tests/cluster/previous
        self.visible = sorted(
            {
                os.path.realpath(path)
                for path in (_TREE, build, previous or build, sys.prefix, sys.base_prefix)
            }
        )
        self.nodes: dict[str, Node] = {}
        with sc.in_network(None):
            self._switch = os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
        self.administer("ip", ["-batch", "-"], "link add switch type bridge\nlink set switch up\n")
        self.links = Links(self)

    def __enter__(self) -> Network:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def add_node(
        self, name: str, *, memory_bytes: int = MEMORY_BYTES, clock_offset_s: float = 0
    ) -> Node:
        """A node that runs. `memory_bytes`: of its /dev/shm; `clock_offset_s`: how far its processes' wall clock is off."""
        assert re.fullmatch(r"[a-z][a-z0-9-]{0,62}", name), f"not a node's name: {name}"
        assert name not in self.nodes, f"taken: {name}"
        number = len(self.nodes) + 1
        assert number <= _NODES_MAX
        node = Node(self, name, number, memory_bytes, clock_offset_s)
        with open(self.directory / "hosts", "a") as hosts:
            hosts.write(f"{node.address} {name}\n")
        self.nodes[name] = node
        node.boot()
        return node

    def logs(self) -> str:
        """The ends of all processes' logs, for a test that failed."""
        parts = []
        for path in sorted(self.directory.glob("nodes/*/logs/*")):
            if path.stat().st_size > 0:
                name = path.relative_to(self.directory / "nodes")
                parts.append(f"--- {name}\n{path.read_text(errors='replace')[-4000:]}")
        return "\n".join(parts)

    def close(self) -> None:
        """Ends and removes everything."""
        self.links.close()
        for node in self.nodes.values():
            node.kill()
        if self._switch >= 0:
            os.close(self._switch)
            self._switch = -1
            shutil.rmtree(self.directory)
            os.close(self._lock)

    # For Node and Links.

    def administer(self, program: str, words: list[str], text: str = "") -> str:
        """`ip`, `tc` or `nft` on the switch."""
        return run_in_network(self._switch, [program, *words], text)

    def plug_in(self, node: Node, pid: int) -> None:
        address = f"02:00:0a:4d:00:{node.number:02x}"
        self.administer(
            "ip",
            ["-batch", "-"],
            f"link add {node.port} type veth peer name eth0 address {address} netns {pid}\n"
            f"link set {node.port} master switch up\n",
        )
        node.administer(
            "ip",
            ["-batch", "-"],
            "link set lo up\nlink set eth0 addrgenmode none\nlink set eth0 up\n"
            f"address add {node.address}/24 broadcast {ADDRESS_PREFIX}255 dev eth0\n",
        )
        # The kernel drops what is sent until it has taken note, after the commands above, that both ends have a carrier.
        deadline = time.monotonic() + DEADLINE_S
        while not (
            _is_up(self.administer("ip", ["-json", "link", "show", "dev", node.port]))
            and _is_up(node.administer("ip", ["-json", "link", "show", "dev", "eth0"]))
        ):
            assert time.monotonic() < deadline, f"the link of {node} does not come up"
        self.links.plugged_in(node)

    def unplug(self, node: Node) -> None:
        self.administer("ip", ["link", "delete", node.port])


def _is_up(told: str) -> bool:
    return json.loads(told)[0]["operstate"] == "UP"


def remove_what_killed_runs_left(place: pathlib.Path) -> None:
    """Directories of runs whose process is gone, and with it its lock (in another container it has another pid)."""
    for directory in place.glob(f"{DIRECTORY_PREFIX}*"):
        pid = directory.name[len(DIRECTORY_PREFIX) :].split("-")[0]
        if os.path.exists(f"/proc/{pid}"):
            continue
        try:
            lock = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
        except FileNotFoundError:
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(directory, ignore_errors=True)
        except BlockingIOError:
            pass  # it runs
        finally:
            os.close(lock)
