"""A real etcd, each member on a node of its own.

    etcd = Etcd(network, members=3).start()
    settings = {"endpoints": etcd.endpoints}
    etcd.kill_leader()
    network.links.cut(a, etcd.nodes)        # a has lost etcd, and nothing else
    etcd.wipe()                             # an administrator starts it from nothing

Members talk JSON to the harness over etcd's own HTTP gateway, from the member's network: whatever is wrong with links, the harness
reaches every member.
"""

from __future__ import annotations

import base64
import http.client
import json
import pathlib
import select
import socket
import time
import uuid
from typing import TYPE_CHECKING, Any

from .node import Node
from .process import DEADLINE_S, Process

if TYPE_CHECKING:
    from .network import Network

CLIENT_PORT = 2379
_PEER_PORT = 2380
_HEARTBEAT_MS = 50
_ELECTION_MS = 500
_CALL_DEADLINE_S = 15.0  # etcd itself gives up after 5 s and two elections
_LEADER_DEADLINE_S = 1.0
_DATA = "/nvme/etcd"
_COPY = "/nvme/etcd.copy"


class EtcdError(Exception):
    """etcd's own answer that it cannot."""


class Member:
    def __init__(self, node: Node) -> None:
        self.node = node
        self.url = f"http://{node.address}:{CLIENT_PORT}"
        self.process: Process | None = None

    def is_running(self) -> bool:
        return self.process is not None and self.process.is_running()

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()

    def stop(self) -> None:
        """SIGSTOP: its connections stay, and nothing answers. `resume` ends it."""
        assert self.process is not None
        self.process.stop()

    def resume(self) -> None:
        assert self.process is not None
        self.process.resume()

    def call(self, path: str, body: object = None, deadline_s: float = _CALL_DEADLINE_S) -> Any:
        """One call of the gateway (/v3/…); raises EtcdError, or OSError when nobody answers."""
        connection = http.client.HTTPConnection(self.node.address, CLIENT_PORT)
        connection.sock = self.node.connect(self.node.address, CLIENT_PORT, deadline_s)
        try:
            connection.request("POST", path, json.dumps(body or {}))
            reply = connection.getresponse()
            said = json.loads(reply.read())
        except http.client.HTTPException as error:
            raise ConnectionError(f"{self.node} {path}: {error!r}") from error
        finally:
            connection.close()
        if reply.status != 200:
            raise EtcdError(f"{self.node} {path}: {said}")
        return said

    def status(self, deadline_s: float = _CALL_DEADLINE_S) -> Any:
        """What this member believes: {"header": {"cluster_id": …, "revision": …}, "leader": …, …}; asks no other."""
        return self.call("/v3/maintenance/status", deadline_s=deadline_s)


class Etcd:
    """`members`: 1 or 3. Their nodes are called etcd1, …, or after another `name`."""

    def __init__(self, network: Network, members: int = 1, name: str = "etcd") -> None:
        self.members = [Member(network.add_node(f"{name}{n + 1}")) for n in range(members)]
        self._token = uuid.uuid4().hex

    @property
    def nodes(self) -> list[Node]:
        return [member.node for member in self.members]

    @property
    def endpoints(self) -> list[str]:
        """Client addresses, host:port."""
        return [f"{node.address}:{CLIENT_PORT}" for node in self.nodes]

    def start(self, *members: Member) -> Etcd:
        """Starts these, or all that do not run; returns when they serve."""
        wanted = members or [member for member in self.members if not member.is_running()]
        ready = {member: self._launch(member) for member in wanted}
        end = time.monotonic() + DEADLINE_S
        for member, notified in ready.items():
            assert member.process is not None
            with notified:
                left = max(0.0, end - time.monotonic())
                readable, _, _ = select.select([notified, member.process.exit_pipe], [], [], left)
                assert notified in readable, f"{member.node}: etcd: {member.process.log()}"
        self.wait_ready()
        return self

    def wait_ready(self, *members: Member) -> None:
        """Until each of these members (or all that run) has answered a read that a majority had to agree to."""
        end = time.monotonic() + DEADLINE_S
        for member in members or [member for member in self.members if member.is_running()]:
            while True:
                try:
                    member.call("/v3/kv/range", {"key": _encoded("ready?")})
                    break
                except (EtcdError, OSError):  # no leader for longer than etcd itself waits
                    if time.monotonic() > end:
                        raise

    def leader(self) -> Member:
        """The member that a majority follows now."""
        end = time.monotonic() + DEADLINE_S
        while time.monotonic() < end:
            claims = []
            for member in [member for member in self.members if member.is_running()]:
                try:
                    status = member.status(_LEADER_DEADLINE_S)
                except (EtcdError, OSError):
                    continue
                if status.get("leader", "0") == status["header"]["member_id"]:
                    claims.append((int(status["raftTerm"]), member))
            # One that has been cut off goes on believing it, with an older term, or until a majority is wanted.
            for _, member in sorted(claims, key=lambda claim: -claim[0])[:1]:
                try:
                    member.call("/v3/kv/range", {"key": _encoded("leader?")}, _LEADER_DEADLINE_S)
                    return member
                except (EtcdError, OSError):
                    continue
        raise TimeoutError("etcd has no leader")

    def kill_leader(self) -> Member:
        """kill -9; returns the member that it was."""
        leader = self.leader()
        leader.kill()
        return leader

    def kill(self) -> None:
        for member in self.members:
            member.kill()

    def stop(self) -> None:
        """SIGSTOP to all; `resume` ends it."""
        for member in self.members:
            member.stop()

    def resume(self) -> None:
        for member in self.members:
            member.resume()

    def wipe(self, *, same_cluster_id: bool = False) -> None:
        """All data gone, and started again: revisions count from 1 anew, under another cluster id or (as with the same
        --initial-cluster-token) under the same."""
        for member in self.members:
            if member.is_running():
                member.kill()
            member.node.erase("nvme")
        if not same_cluster_id:
            self._token = uuid.uuid4().hex
        self.start()

    def dump(self) -> list[dict[str, str]]:
        """All keys and values, as `etcdctl get` shows them: without their leases."""
        found = self._ask("/v3/kv/range", {"key": _encoded("\0"), "range_end": _encoded("\0")})
        return [{"key": one["key"], "value": one.get("value", "")} for one in found.get("kvs", [])]

    def put_back(self, dump: list[dict[str, str]]) -> None:
        """As `etcdctl put` does: what had a lease has none then, and stays."""
        for one in dump:
            self._ask("/v3/kv/put", one)

    def copy_files(self) -> None:
        """A backup of all that etcd has, its leases too."""
        self.kill()
        for member in self.members:
            member.node.run(["cp", "-a", _DATA, _COPY])
        self.start()

    def put_files_back(self) -> None:
        """Starts it again with what `copy_files` copied."""
        self.kill()
        for member in self.members:
            member.node.run(["rm", "-rf", _DATA])
            member.node.run(["mv", _COPY, _DATA])
        self.start()

    def cluster_id(self) -> str:
        return str(self.leader().status()["header"]["cluster_id"])

    def _ask(self, path: str, body: object, member: Member | None = None) -> Any:
        """As `Member.call`, of that member or whichever leads, again while etcd cannot: its leader may be changing."""
        end = time.monotonic() + DEADLINE_S
        while True:
            try:
                return (member or self.leader()).call(path, body)
            except (EtcdError, OSError):
                if time.monotonic() > end:
                    raise

    def put(self, key: str, value: str, member: Member | None = None) -> int:
        """The revision that it made."""
        body = {"key": _encoded(key), "value": _encoded(value)}
        return int(self._ask("/v3/kv/put", body, member)["header"]["revision"])

    def get(self, key: str, member: Member | None = None) -> str | None:
        found = self._ask("/v3/kv/range", {"key": _encoded(key)}, member)
        values = found.get("kvs", [])
        return base64.b64decode(values[0].get("value", "")).decode() if values else None

    def keys(self, prefix: str) -> dict[str, str]:
        """All keys below a prefix, with their values as text."""
        last = prefix[:-1] + chr(ord(prefix[-1]) + 1)
        body = {"key": _encoded(prefix), "range_end": _encoded(last)}
        found = self._ask("/v3/kv/range", body).get("kvs", [])
        return {
            base64.b64decode(one["key"]).decode(): base64.b64decode(one.get("value", "")).decode(
                errors="replace"
            )
            for one in found
        }

    def _launch(self, member: Member) -> socket.socket:
        node = member.node
        ready = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        place = node.path("/run/ready.sock")
        place.unlink(missing_ok=True)
        ready.bind(str(place))
        place.chmod(0o666)
        peers = [f"{peer.name}=http://{peer.address}:{_PEER_PORT}" for peer in self.nodes]
        everywhere = f"http://0.0.0.0:{CLIENT_PORT}"
        options = {
            "name": node.name,
            "data-dir": _DATA,
            "listen-client-urls": everywhere,
            "advertise-client-urls": member.url,
            "listen-peer-urls": f"http://{node.address}:{_PEER_PORT}",
            "initial-advertise-peer-urls": f"http://{node.address}:{_PEER_PORT}",
            "initial-cluster": ",".join(peers),
            "initial-cluster-token": self._token,
            "heartbeat-interval": str(_HEARTBEAT_MS),
            "election-timeout": str(_ELECTION_MS),
        }
        member.process = node.start(
            [pathlib.Path("/usr/bin/etcd"), *(f"--{name}={v}" for name, v in options.items())],
            env={"NOTIFY_SOCKET": "/run/ready.sock", "GOMAXPROCS": "1"},
        )
        return ready


def _encoded(text: str) -> str:
    return base64.b64encode(text.encode()).decode()
