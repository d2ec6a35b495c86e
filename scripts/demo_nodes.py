"""The demo on several nodes: scripts/demo --nodes N builds and then runs this, as root. Standard library only.

Each node is a network namespace with mounts and users of its own, so that nothing can arrive by a shared path: only the
remote directory is shared. etcd and the daemons are real. A job of two ranks a node saves, each shard is kept in another node's
memory, too; a node is killed in the middle of a step, the spare takes its ranks, and the job goes on from the step that all can load;
then the daemon that hosts the job dies. At the end a node is lost for good, with its memory: the job goes on from what its peers
kept, and nothing is read from the remote directory.
"""

from __future__ import annotations

import argparse
import pathlib
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "tests"))

from cluster import Network  # noqa: E402
from cluster.daemon import Daemon  # noqa: E402
from cluster.etcd import Etcd  # noqa: E402
from cluster.node import Node  # noqa: E402
from cluster.possible import obstacle  # noqa: E402
from cluster.rank import Rank, ask_all, start_ranks  # noqa: E402

JOB = "demo"
PER_NODE = 2
LEASE_MS = 3000
POLICY = "remote.every_steps=1 replicas=1"


class Wrong(Exception):
    """Something that the demo claims is not so."""


def check(claim: str, holds: bool, detail: object = "") -> None:
    if not holds:
        raise Wrong(f"{claim}: {detail}")
    print(f"  \u2713 {claim}", flush=True)


def save(ranks: list[Rank], step: int) -> None:
    """All ranks, until it is whole in other nodes' memory, and in the remote tier."""
    began = time.monotonic()
    said = ask_all(ranks, f"save {step}")
    said += ask_all(ranks, "tier peer")
    in_peers = time.monotonic() - began
    said += ask_all(ranks, "tier remote")
    took = time.monotonic() - began
    check(
        f"step {step}: {len(ranks)} ranks saved, whole in other nodes' memory after {in_peers * 1000:.0f} ms, "
        f"in remote after {took * 1000:.0f} ms",
        all(each.startswith("ok") for each in said),
        said,
    )


def restore(ranks: list[Rank], attempt: int, step: int) -> list[str]:
    opened = ask_all(ranks, "open")
    check(
        f"{len(ranks)} ranks joined attempt {attempt}",
        set(opened) == {f"ok attempt={attempt}"},
        opened,
    )
    began = time.monotonic()
    said = ask_all(ranks, "restore")
    took = time.monotonic() - began
    check(
        f"all of them agreed on step {step} and have it, every bit checked, after {took * 1000:.0f} ms",
        all(f"step={step} " in f"{each} " for each in said),
        said,
    )
    return said


def run(network: Network, nodes: int) -> None:
    print(f"\n{nodes} nodes, an etcd of three members, one shared remote directory", flush=True)
    etcd = Etcd(network, members=3).start()
    names = [f"node-{i}" for i in range(1, nodes)] + ["spare"]
    daemons = {}
    for name in names:
        node = network.add_node(name)
        cluster = {
            "name": JOB,
            "advertise_address": f"{node.address}:9465",
            "plaintext": True,  # a network of this machine's own
            "labels": [{"name": "rack", "value": f"rack-{len(daemons) // 2}"}],
            "etcd": {
                "endpoints": etcd.endpoints,
                "lease_ttl_ms": LEASE_MS,
                "request_timeout_ms": 700,
            },
        }
        daemons[name] = Daemon(node, {"cluster": cluster}).start()
    workers = [network.nodes[name] for name in names[:-1]]
    lost, spare = workers[-1], network.nodes["spare"]

    print("\na job on all nodes but the spare", flush=True)
    # The last one stands still when half of its third save is in the slot.
    armed = {len(workers) * PER_NODE - 1: "client.save.half_copied:stop@3"}
    ranks = start_ranks(workers, JOB, per_node=PER_NODE, policy=POLICY, armed=armed)
    restored = ask_all(ranks, "open")
    check(f"{len(ranks)} ranks joined attempt 1", set(restored) == {"ok attempt=1"}, restored)
    ask_all(ranks, "restore")
    save(ranks, 1)
    save(ranks, 2)
    print(daemons["spare"].ctl("nodes"))

    print(f"{lost.name} is killed in the middle of step 3", flush=True)
    for rank in ranks:
        rank.send("save 3")
    ranks[-1].process.wait_stopped()
    sealed = [rank.answer() for rank in ranks if rank.node is not lost]
    check(
        "the ranks on the other nodes have sealed it, and wait for nobody",
        set(sealed) == {"ok sealed"},
        sealed,
    )
    lost.kill()
    for rank in ranks:
        if rank.node is not lost:
            rank.kill()

    print("\nthe launcher starts all ranks again; the spare has those of the dead node", flush=True)
    ranks = start_ranks([*workers[:-1], spare], JOB, per_node=PER_NODE, policy=POLICY)
    said = restore(ranks, attempt=2, step=2)
    check(
        "who stayed found it in memory",
        all("source=" not in each for each in said[:-PER_NODE]),
        said,
    )
    check(
        "who moved got it from another node's memory, not from remote",
        not any("source=remote" in each for each in said),
        said,
    )
    save(ranks, 3)
    print(daemons["spare"].ctl("status", JOB))

    host = next(
        name
        for name in names
        if f"\n{chr(len(name))}{name}"
        in "".join(etcd.keys(f"/holdfast/{JOB}/jobs/{JOB}/host").values())
    )
    print(f"the daemon on {host}, which hosts the job, is killed", flush=True)
    daemons[host].kill()
    if network.nodes[host] in [*workers[:-1], spare]:
        daemons[host].start()
    save(ranks, 4)
    print(daemons[names[0]].ctl("nodes"))
    lose_for_good(daemons, ranks, workers[:-1], spare)


def lose_for_good(
    daemons: dict[str, Daemon], ranks: list[Rank], workers: list[Node], spare: Node
) -> None:
    """The first node, its memory and all: the others take its ranks."""
    gone, *left = workers
    places = [*left, spare]
    print(f"{gone.name} is lost for good, with its memory", flush=True)
    print(daemons[spare.name].ctl("status", JOB))
    began = time.monotonic()
    gone.kill()
    for rank in ranks:
        if rank.node is not gone:
            rank.kill()
    ended = time.monotonic()
    per_node = -(-len(ranks) // len(places))
    places = [place for place in places for _ in range(per_node)][: len(ranks)]
    fresh = [
        Rank(place, JOB, rank=rank, world_size=len(ranks), policy=POLICY)
        for rank, place in enumerate(places)
    ]
    started = time.monotonic()
    opened = ask_all(fresh, "open")
    check(
        "all ranks run again, on the nodes that are left", set(opened) == {"ok attempt=3"}, opened
    )
    joined = time.monotonic()
    said = ask_all(fresh, "restore")
    restored = time.monotonic()
    check(
        "they have step 4, every bit checked, from memory and from other nodes' memory",
        all("step=4 " in f"{each} " and "source=remote" not in each for each in said),
        said,
    )
    for what, seconds in (
        ("the node and the job's other processes ended", ended - began),
        ("new processes started", started - ended),
        ("they joined (the dead node's lease had to end)", joined - started),
        ("the shards came from memory, its own or other nodes', verified", restored - joined),
    ):
        print(f"    {seconds * 1000:7.0f} ms  {what}")
    if len(set(places)) > 1:
        save(fresh, 5)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, default=4)
    arguments = parser.parse_args()
    if not 3 <= arguments.nodes <= 16:
        parser.error("--nodes is 3 to 16")
    if (why := obstacle()) is not None:
        print(f"scripts/demo --nodes: this machine does not allow it: {why}", file=sys.stderr)
        return 1
    try:
        with Network() as network:
            run(network, arguments.nodes)
    except Wrong as wrong:
        print(f"  \u2717 {wrong}", file=sys.stderr)
        return 1
    print("the demo on several nodes held")
    return 0


if __name__ == "__main__":
    sys.exit(main())
