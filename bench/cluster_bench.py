"""scripts/bench restore-peer, fanout, replicate and reshard-cluster: a job on several nodes of this machine, as root.

Real daemons in network namespaces, over libfabric's tcp: all of them share this machine's cores and memory.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import pathlib
import statistics
import sys
import time
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "tests"))

from report import Row, print_report  # noqa: E402

from cluster import Network  # noqa: E402
from cluster.cluster_of_daemons import SHORT_LEASE_S, Cluster, Job  # noqa: E402
from cluster.possible import obstacle  # noqa: E402
from cluster.replicas_test import (  # noqa: E402
    alike,
    files,
    lose_everything_but_remote,
    read_from_remote,
)

MIB = 1 << 20
SLOTS = 3
EXTRA_S_BAR, EXTRA_S_GOAL = 2.0, 0.5
READ_ONCE_BAR, READ_ONCE_GOAL = 1.05, 1.01
RESHARD_BAR, RESHARD_GOAL = 1.1, 1.02


# Nothing but replicas is copied meanwhile.
ONLY_PEERS = " ".join(
    [
        "replicas=1",
        *(f"{tier}.every_{what}=0" for tier in ("nvme", "remote") for what in ("steps", "ms")),
    ]
)


def make_cluster(network: Network, names: str, state_bytes: int) -> Cluster:
    # Of its memory a node gives three quarters to slots.
    return Cluster(
        network, names, lease_s=SHORT_LEASE_S, memory_bytes=2 * (SLOTS + 1) * state_bytes
    )


def restore_peer(rounds: int, state_bytes: int) -> list[Row]:
    """A node is lost for good; its rank comes up on the spare, all others where they were."""
    extra, pulls, restores = [], [], []
    for _ in range(rounds):
        with Network() as network:
            cluster = make_cluster(network, "a b c spare", state_bytes)
            job = Job(cluster, policy="replicas=1 remote.every_steps=0 remote.every_ms=0")
            job.start("a b c", state_bytes=state_bytes)
            assert job.resume() == 0
            assert job.ask("save 1") == ["ok sealed"] * 3
            assert job.ask("tier peer 60000") == ["ok peer"] * 3
            job.settle()
            # How long those bytes take by themselves, between two of these nodes.
            measured = cluster.tell("spare", "fabric", "a")
            pull = state_bytes / float(measured["bytes_per_s"])
            cluster["c"].kill()
            job.start("a b spare", state_bytes=state_bytes)
            job.join()
            began = time.monotonic()
            said = job.ask("restore")
            took = time.monotonic() - began
            assert all("step=1 " in f"{each} " for each in said), said
            assert not any("source=remote" in each for each in said), said
            pulls.append(pull)
            restores.append(took)
            extra.append(took - pull)
    value = statistics.median(extra)
    return [
        Row(
            "node lost: restore beyond the pull's time",
            "s",
            value,
            ratio=value,
            ratio_low=min(extra),
            ratio_high=max(extra),
            bar=EXTRA_S_BAR,
            goal=EXTRA_S_GOAL,
            higher_is_better=False,
            note=f"{state_bytes // MIB} MiB a rank, from all joined to every bit checked "
            f"{statistics.median(restores):.3f} s, the pull alone {statistics.median(pulls):.3f} s",
        )
    ]


def fanout(rounds: int, state_bytes: int) -> list[Row]:
    """Nothing is left but the remote tier; four nodes with the same state."""
    ratios, seconds = [], []
    unique = 0
    for _ in range(rounds):
        with Network() as network:
            cluster = make_cluster(network, "a b c d", state_bytes)
            job = Job(cluster, policy="remote.every_steps=1 nvme.every_steps=0")
            job.start("a b c d", state_bytes=state_bytes)
            assert job.resume() == 0
            alike(job)
            job.save()
            unique = sum(files(job, 1).values())
            lose_everything_but_remote(cluster, job)
            job.start("a b c d", state_bytes=state_bytes)
            job.join()
            alike(job)
            began = time.monotonic()
            said = job.ask("restore")
            seconds.append(time.monotonic() - began)
            assert job.agreed(said) == 1
            assert all("source=remote" in each for each in said), said
            ratios.append(read_from_remote(cluster) / unique)
    value = statistics.median(ratios)
    took = statistics.median(seconds)
    return [
        Row(
            "cold start: remote bytes read / unique bytes",
            "",
            value,
            ratio=value,
            ratio_low=min(ratios),
            ratio_high=max(ratios),
            bar=READ_ONCE_BAR,
            goal=READ_ONCE_GOAL,
            higher_is_better=False,
            note=f"4 nodes, {state_bytes // MIB} MiB each of the same state, {unique // MIB} MiB in remote",
        ),
        Row(
            "cold start: until every bit is checked",
            "s",
            took,
            ratio=took,
            ratio_low=min(seconds),
            ratio_high=max(seconds),
            higher_is_better=False,
        ),
    ]


def reshard_cluster(rounds: int, state_bytes: int) -> list[Row]:
    """Saved by four ranks on four nodes, read by three on three: out of the remote tier, and out of the fourth node's memory."""
    ratios, cold, warm = [], [], []
    unique = 0
    for _ in range(rounds):
        with Network() as network:
            cluster = make_cluster(network, "a b c d", state_bytes)
            job = Job(cluster, policy="remote.every_steps=1 nvme.every_steps=0")
            job.start("a b c d", state_bytes=state_bytes)
            assert job.resume() == 0
            alike(job)
            job.save()
            unique = sum(files(job, 1).values())

            def restored_by(places: str, source: str) -> float:
                job.start(places, state_bytes=state_bytes)
                job.join()
                alike(job)
                began = time.monotonic()
                said = job.ask("restore")
                took = time.monotonic() - began
                assert job.agreed(said) == 1
                assert all("resharded from 4 ranks" in each for each in said if "why=" in each), (
                    said
                )
                assert any(f"source={source}" in each for each in said) or source == "memory", said
                return took

            warm.append(restored_by("a b c", "memory"))
            lose_everything_but_remote(cluster, job)
            cold.append(restored_by("a b c", "remote"))
            ratios.append(read_from_remote(cluster) / unique)
    value = statistics.median(ratios)
    note = f"saved by 4 ranks, read by 3, which want all of it; {unique // MIB} MiB in remote"
    return [
        Row(
            "another number of ranks: remote bytes read / unique bytes wanted",
            "",
            value,
            ratio=value,
            ratio_low=min(ratios),
            ratio_high=max(ratios),
            bar=RESHARD_BAR,
            goal=RESHARD_GOAL,
            higher_is_better=False,
            note=note,
        ),
        *(
            Row(
                f"another number of ranks: from {tier} until every bit is checked",
                "s",
                statistics.median(seconds),
                ratio=statistics.median(seconds),
                ratio_low=min(seconds),
                ratio_high=max(seconds),
                higher_is_better=False,
            )
            for tier, seconds in (("remote", cold), ("memory", warm))
        ),
    ]


def spin(counter: Any) -> None:
    """A training loop, as the processor sees it."""
    while True:
        for _ in range(1000):
            pass
        counter.value += 1


def cpu_seconds(cluster: Cluster) -> float:
    """What the daemons have used so far."""
    total = 0.0
    for daemon in cluster.daemons.values():
        assert daemon.process is not None
        # After the name, which may have anything in it, come the state and 10 others.
        fields = daemon.node.path(f"/proc/{daemon.process.pid}/stat").read_text().rpartition(")")[2]
        total += sum(int(ticks) for ticks in fields.split()[11:13])
    return total / os.sysconf("SC_CLK_TCK")


def replicate(rounds: int, state_bytes: int) -> list[Row]:
    """Two nodes keep each other's shards; beside them a process computes."""
    saves = 5
    slower, cpu = [], []
    counter = multiprocessing.RawValue("Q", 0)
    loop = multiprocessing.Process(target=spin, args=(counter,), daemon=True)
    loop.start()

    def pace(since: tuple[float, int]) -> float:
        return (counter.value - since[1]) / (time.monotonic() - since[0])

    def now() -> tuple[float, int]:
        return time.monotonic(), counter.value

    try:
        for _ in range(rounds):
            with Network() as network:
                cluster = make_cluster(network, "a b", state_bytes)
                job = Job(cluster, policy=ONLY_PEERS)
                job.start("a b", state_bytes=state_bytes)
                assert job.resume() == 0
                for step in range(1, saves + 1):
                    began = now()
                    time.sleep(0.5)
                    undisturbed = pace(began)
                    assert job.ask(f"save {step}") == ["ok sealed"] * 2
                    began, used = now(), cpu_seconds(cluster)
                    assert job.ask("tier peer 60000") == ["ok peer"] * 2
                    slower.append(1 - pace(began) / undisturbed)
                    cpu.append((cpu_seconds(cluster) - used) / (2 * state_bytes / 1e9))
    finally:
        loop.kill()
    loss, seconds = statistics.median(slower), statistics.median(cpu)
    note = f"2 nodes, {state_bytes // MIB} MiB each, {os.cpu_count()} cores for all; from sealed to replicated"
    return [
        Row(
            "replicating: CPU seconds per GB, both ends",
            "s/GB",
            seconds,
            ratio=seconds,
            ratio_low=min(cpu),
            ratio_high=max(cpu),
            higher_is_better=False,
            note=note,
        ),
        Row(
            "replicating: a busy loop beside it is slower by",
            "",
            loss,
            ratio=loss,
            ratio_low=min(slower),
            ratio_high=max(slower),
            higher_is_better=False,
        ),
    ]


CASES = {
    "restore-peer": restore_peer,
    "fanout": fanout,
    "replicate": replicate,
    "reshard-cluster": reshard_cluster,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("case", choices=list(CASES))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--mib", type=int, default=256, help="state of each rank")
    parser.add_argument("--json", action="store_true", help="one object as the last line")
    options = parser.parse_args()
    if (why := obstacle()) is not None:
        print(
            f"scripts/bench {options.case}: this machine does not allow it: {why}", file=sys.stderr
        )
        return 1
    rows = CASES[options.case](options.rounds, options.mib * MIB)
    report = json.loads(print_report(options.case, rows, options.json))
    return 0 if report["pass"] else 1


if __name__ == "__main__":
    sys.exit(main())
