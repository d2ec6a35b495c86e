"""Daemons that make one cluster, and a job on them that remembers what it was promised.

    cluster = Cluster(network, "a b spare")             # through one etcd; a static list: Cluster(…, etcd_members=0)
    job = Job(cluster)
    job.start("a b")                                    # rank 0 on a, rank 1 on b
    assert job.resume() == 0                            # all joined one attempt, and agreed on a step; 0: from scratch
    job.save()                                          # the next step, until it is whole in remote
    cluster.daemons["b"].kill()
    …
    job.start("a spare")                                # as the launcher does: the old ranks are killed first
    assert job.resume() == job.safe                     # every bit checked, and nothing lost that was promised
    job.check_history()

Nothing is waited for but answers, ends of processes and states that somebody tells of, each with a deadline.
"""

from __future__ import annotations

import concurrent.futures
import json
import re
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from .daemon import Daemon
from .etcd import Etcd
from .network import MEMORY_BYTES, Network
from .node import Node
from .process import DEADLINE_S
from .rank import STATE_BYTES, Rank, ask_all

LEASE_S = 10
REQUEST_TIMEOUT_MS = 2000
# For tests that wait for the end of a lease. (A machine that stands still for as long costs all nodes theirs.)
SHORT_LEASE_S = 3
SHORT_REQUEST_TIMEOUT_MS = 700
PORT = 9465
# Every step goes to remote and stays there, so that a commit that is lost is missed.
POLICY = "remote.every_steps=1 remote.keep_last=1000"
TRIES_MAX = 5  # of what a death may have spoilt, and that again when its consequences come later
# A step that lacks a rank's shard may lie there for minutes: the next one is tried instead.
SPOILT_MS = 8000
_LOOK_AGAIN_S = 0.02
# What only a node that is gone had is not waited for: most of these tests take nodes away for good.
_SETTINGS: Mapping[str, Any] = {"restore": {"wait_for_copies_ms": 0}}

T = TypeVar("T")


def wait_until(what: str, told: Callable[[], T], deadline_s: float = DEADLINE_S) -> T:
    """Asks until the answer is true, or anything but empty, and returns it."""
    end = time.monotonic() + deadline_s
    while not (answer := told()):
        if time.monotonic() > end:
            raise TimeoutError(f"{what}: not within {deadline_s:.0f} s")
        time.sleep(_LOOK_AGAIN_S)
    return answer


class Cluster:
    """`etcd_members`: 0 is a static list of the nodes, in their order."""

    def __init__(
        self,
        network: Network,
        names: str,
        *,
        etcd_members: int = 1,
        clocks_s: Mapping[str, float] | None = None,
        settings: Mapping[str, Any] | None = None,
        start: bool = True,
        armed: Mapping[str, str] | None = None,
        lease_s: int = LEASE_S,
        memory_bytes: int = MEMORY_BYTES,
    ) -> None:
        """`clocks_s`: how far the wall clocks of nodes are off. `armed`: see `start`."""
        self.network = network
        self.lease_s = lease_s
        self.etcd = Etcd(network, members=etcd_members).start() if etcd_members else None
        offsets = clocks_s or {}
        self.nodes = {
            name: network.add_node(
                name, memory_bytes=memory_bytes, clock_offset_s=offsets.get(name, 0)
            )
            for name in names.split()
        }
        self.daemons = {
            name: Daemon(node, {**_SETTINGS, **(settings or {}), "cluster": self.section(node)})
            for name, node in self.nodes.items()
        }
        if start:
            self.start(names, armed)

    def section(self, node: Node) -> dict[str, Any]:
        """The section `cluster` of its settings."""
        section: dict[str, Any] = {
            "name": "test",
            "advertise_address": f"{node.address}:{PORT}",
            "plaintext": True,
        }
        if self.etcd is None:
            section["members"] = [
                {"name": name, "address": f"{member.address}:{PORT}"}
                for name, member in self.nodes.items()
            ]
        else:
            short = self.lease_s <= SHORT_LEASE_S
            section["etcd"] = {
                "endpoints": self.etcd.endpoints,
                "lease_ttl_ms": self.lease_s * 1000,
                "request_timeout_ms": SHORT_REQUEST_TIMEOUT_MS if short else REQUEST_TIMEOUT_MS,
            }
        return section

    def __getitem__(self, name: str) -> Node:
        return self.nodes[name]

    # Daemons.

    def start(self, names: str, armed: Mapping[str, str] | None = None) -> None:
        """`armed`: where daemons die or stop, as base/sync_point.h has it: {"a": "daemon.seal.received:kill"}."""
        for name in names.split():
            self.daemons[name].start(HOLDFAST_SYNC_POINT=(armed or {}).get(name, ""))

    def start_anew(self, names: str, armed: Mapping[str, str] | None = None) -> None:
        for name in names.split():
            self.daemons[name].kill()
        self.start(names, armed)

    def revive(self, name: str) -> None:
        """Waits for the daemon that was armed to die, and starts it again."""
        process = self.daemons[name].process
        assert process is not None
        assert process.wait() == -signal.SIGKILL, self.daemons[name].log()
        self.start(name)

    def is_running(self, name: str) -> bool:
        process = self.daemons[name].process
        return process is not None and process.is_running()

    def adopt_remote(self, name: str) -> None:
        """That node takes the remote directory over for the cluster, from the one that it says it is of."""
        mark = (self.network.remote / ".holdfast" / "cluster").read_text()
        (owner,) = re.findall(r"^cluster ([0-9a-f]{32})$", mark, re.M)
        wait_until("it is refused", lambda: f"adopt-remote {owner}" in self.daemons[name].log())
        self.daemons[name].ctl("adopt-remote", owner, "--yes")

    # What they tell.

    def tell(self, asked: str, *words: str, uid: int = 0) -> dict[str, Any]:
        """What `ckptctl … --json` says on that node: its answer, or {"error": …}."""
        try:
            said = self.daemons[asked].ctl(*words, "--json", uid=uid)
        except subprocess.CalledProcessError as error:
            said = error.output
        return json.loads(said) if said else {"error": {"message": "ckptctl said nothing"}}

    def members(self, asked: str) -> set[str]:
        """The nodes that live, as that one sees it."""
        return {node["name"] for node in self.tell(asked, "nodes").get("nodes", [])}

    def host(self, job: str, asked: str) -> str:
        """The node that hosts the job, as that one sees it; "" while nobody does."""
        nodes = self.tell(asked, "nodes").get("nodes", [])
        return next((node["name"] for node in nodes if job in node["jobs"]), "")

    def unreachable(self, asked: str, name: str) -> str:
        """Why that one does not reach it; "" if it does."""
        nodes = self.tell(asked, "nodes").get("nodes", [])
        return next((node["unreachable"] for node in nodes if node["name"] == name), "")

    def problems(self, asked: str) -> str:
        return "\n".join(self.tell(asked, "status").get("daemon", {}).get("problems", []))

    def status(self, job: str, asked: str) -> dict[str, Any]:
        """Of the job; {} while nobody can tell."""
        jobs = self.tell(asked, "status", job).get("jobs", [])
        return jobs[0] if jobs else {}

    def wait_members(self, asked: str, names: str) -> None:
        wanted = set(names.split())
        wait_until(f"{asked} sees {names}", lambda: self.members(asked) == wanted)

    def wait_host(self, job: str, asked: str, but: str = "") -> str:
        """Until a node other than `but` hosts it."""
        return wait_until(
            f"a host of {job} other than '{but}'",
            lambda: host if (host := self.host(job, asked)) != but else "",
        )

    def wait_host_is(self, job: str, asked: str, host: str) -> None:
        """Until that one knows it."""
        wait_until(f"{asked} knows {host}", lambda: self.host(job, asked) == host)

    def wait_said(self, name: str, pattern: str) -> re.Match[str]:
        """Until the daemon's log has it."""
        return wait_until(
            f"'{pattern}' in the log of {name}",
            lambda: re.search(pattern, self.daemons[name].log()),
        )


class Job:
    """Its present ranks, and what any rank of it was ever told. Rank r is on the r-th of the places that `start` is given."""

    def __init__(self, cluster: Cluster, name: str = "job", policy: str = POLICY) -> None:
        self.cluster = cluster
        self.name = name
        self.policy = policy
        self.ranks: list[Rank] = []
        self.attempt = 0
        self.step = 0  # the newest that any rank began
        self.safe = 0  # the newest that is whole in remote, so a rank was told
        self.promised: set[int] = set()  # all of those

    # The launcher's part.

    def start(
        self,
        places: str,
        *,
        launch: str = "",
        armed: Mapping[int, str] | None = None,
        keep: bool = False,
        state_bytes: int = STATE_BYTES,
    ) -> None:
        """Ends all ranks that there are (unless `keep`), and starts them anew. `armed`: sync points of ranks."""
        if not keep:
            self.kill()
        names = places.split()
        self.ranks = [
            Rank(
                self.cluster[name],
                self.name,
                rank=rank,
                world_size=len(names),
                state_bytes=state_bytes,
                launch=launch,
                policy=self.policy,
                env={"HOLDFAST_SYNC_POINT": (armed or {}).get(rank, "")},
            )
            for rank, name in enumerate(names)
        ]

    def kill(self) -> None:
        for rank in self.ranks:
            if rank.node.is_running():
                rank.kill()

    def make_host(self, name: str) -> None:
        """A visitor asks for the job on that node before anybody else knows it: it is hosted there, where it has no ranks."""
        visitor = Rank(self.cluster[name], self.name, policy=self.policy)
        assert visitor.ask("open") == "ok attempt=1"
        visitor.kill()
        wait_until(f"'{name}' hosts it", lambda: self.cluster.host(self.name, name) == name)
        self.attempt = 1

    # What the ranks do.

    def ask(self, command: str) -> list[str]:
        """All at once; notes what they are told."""
        return self.note(command, ask_all(self.ranks, command))

    def ask_anew(self, command: str) -> list[str]:
        """As programs do that try again when their daemon, or the job's host, is away; each rank by itself."""
        with concurrent.futures.ThreadPoolExecutor(len(self.ranks)) as pool:
            said = list(pool.map(lambda rank: _persistently(rank, command), self.ranks))
        return self.note(command, said)

    def note(self, command: str, said: Sequence[str]) -> list[str]:
        verb, *words = command.split()
        if verb in ("save", "begin"):
            self.step = max(self.step, int(words[0]))
        if verb == "tier" and words[0] == "remote" and "ok remote" in said:
            self.promised.add(self.step)
            self.safe = max(self.promised)
        return list(said)

    def resume(self) -> int:
        """All ranks join one new attempt and agree on one step, which is returned; 0: there was nothing to restore."""
        self.join()
        return self.restore()

    def join(self) -> None:
        said = self.ask_anew("open")
        found = {re.fullmatch(r"ok attempt=(\d+)", each) for each in said}
        assert None not in found, said
        attempts = {int(match[1]) for match in found if match}
        assert len(attempts) == 1, said
        (attempt,) = attempts
        assert attempt > self.attempt, f"attempt {self.attempt} was there before: {said}"
        self.attempt = attempt

    def restore(self) -> int:
        return self.agreed(self.ask_anew("restore"))

    def agreed(self, said: Sequence[str]) -> int:
        """The step of which all these answers to `restore` speak."""
        if all("NOTHING_TO_RESTORE" in each for each in said):
            assert self.safe == 0, said
            return 0
        found = [re.match(r"ok attempt=(\d+) step=(\d+)", each) for each in said]
        assert all(found) and len({match[0] for match in found if match}) == 1, said
        step = int(found[0][2]) if found[0] else 0
        assert self.safe <= step <= self.step, f"promised: {sorted(self.promised)}; {said}"
        return step

    def save(self) -> int:
        """The next step; returns it when all ranks have been told that it is whole in remote."""
        step = self.step + 1
        said = self.ask(f"save {step}")
        assert said == ["ok sealed"] * len(self.ranks), (step, said)
        said = self.ask("tier remote")
        assert said == ["ok remote"] * len(self.ranks), (step, said)
        self.settle()
        return step

    def save_soon(self) -> int:
        """As `save`, by the next step that nothing spoils: what was done to the job may spoil some."""
        first = self.step + 1
        heard = []

        def saved() -> bool:
            said = self.ask(f"save {self.step + 1}") + self.ask(f"tier remote {SPOILT_MS}")
            heard.append(said)
            return said == ["ok sealed"] * len(self.ranks) + ["ok remote"] * len(self.ranks)

        try:
            wait_until("a commit", saved)
        except TimeoutError as error:
            raise AssertionError(f"no step was committed from {first} on: {heard}") from error
        self.settle()
        return self.step

    def settle(self) -> None:
        """Until all that the ranks asked is answered. With `tier` they ask for the earlier stages, too, and wait a tenth of a
        second for that; while it is open they take their daemon for one that hangs, and save nothing."""
        wait_until(
            "answers", lambda: all(said == "ok committed" for said in self.ask("committed 3000"))
        )

    # What came of it.

    def listed(self, asked: str = "") -> list[dict[str, Any]]:
        """Its checkpoints, as its host tells."""
        node = asked or self.ranks[0].node.name
        return wait_until(
            f"a list of {self.name}",
            lambda: self.cluster.tell(node, "list", self.name).get("checkpoints"),
        )

    def check_history(self, asked: str = "") -> None:
        """No commit is lost, none is doubled, and what remote calls committed is there."""
        on_line = [one for one in self.listed(asked) if one["on_line"]]
        committed = [one["step"] for one in on_line if one["state"] == "committed"]
        assert len(committed) == len(set(committed)), on_line
        assert self.promised <= set(committed), (sorted(self.promised), on_line)
        by_age = sorted(on_line, key=lambda one: one["step"])
        attempts = [one["attempt"] for one in by_age]
        assert attempts == sorted(attempts), on_line
        for directory in self.manifests().values():
            shards = {path.name for path in directory.glob("shard-*")}
            worlds = {name.split("-of-")[1].split(".")[0] for name in shards}
            (world,) = worlds
            for rank in range(int(world)):
                shard = f"shard-{rank:05d}-of-{world}.safetensors"
                assert {shard, f"{shard[: -len('.safetensors')]}.record"} <= shards, (
                    directory,
                    shards,
                )

    def manifests(self) -> dict[tuple[int, int], Any]:
        """(attempt, step) → the directory of each checkpoint that is committed in remote."""
        found = {}
        for manifest in (self.cluster.network.remote / self.name).glob("*/MANIFEST"):
            step, attempt = manifest.parent.name.split("-a")
            found[int(attempt), int(step)] = manifest.parent
        return found


def saved_job(
    network: Network, names: str, places: str, *, host: str = "", **settings: Any
) -> tuple[Cluster, Job]:
    """A cluster of these nodes and a job that has committed step 1 from these places; `host`: see `Job.make_host`.
    `settings` are those of Cluster."""
    cluster = Cluster(network, names, **settings)
    job = Job(cluster)
    if host:
        job.make_host(host)
    job.start(places)
    assert job.resume() == 0
    job.save()
    return cluster, job


def _persistently(rank: Rank, command: str) -> str:
    said = ""
    for _ in range(TRIES_MAX):
        said = rank.ask(command)
        if not said.startswith(("error UNAVAILABLE", "error ABORTED")):
            break
    return said
