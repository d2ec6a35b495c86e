"""Half an hour of a job over several nodes to which something happens every few seconds: whatever it is, no step that was promised is
lost, each bit of what comes back is right, nothing is called damaged, and in between, while nothing happens, nobody complains. At the
end every daemon holds no more than one that was just started.

HOLDFAST_SOAK_MINUTES (30) says how long, HOLDFAST_SOAK_SEED which faults; both are in what a failure says.
"""

from __future__ import annotations

import os
import random
import re
import signal
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from .cluster_of_daemons import SHORT_LEASE_S, Cluster, Job, wait_until
from .held import Held, held_by
from .network import Network

MINUTES = float(os.environ.get("HOLDFAST_SOAK_MINUTES", "30"))
SEED = int(os.environ.get("HOLDFAST_SOAK_SEED", "0")) or random.SystemRandom().randrange(1, 1 << 32)

NODES = "a b c d"
POLICY = "remote.every_steps=1 remote.keep_last=4 nvme.every_steps=2 nvme.keep_last=2 replicas=1"
RANKS = 3
# Nothing here damages a byte, and no client misbehaves: whoever says so is wrong.
NEVER = {"copy_bad", "slot_lost", "protocol_error", "events_lost"}
# Ranks of the test's program have tensors of the same names with other bytes: as ever.
ALWAYS = {"replicas_diverged"}
CALM_SAVES = 4
# Beyond those of a daemon that was just started.
# Of each kind: connections to others come and go, the catalog has more files the longer it was written, and more slots are full.
# What leaks with one kind of fault leaks some sixty times in half an hour.
MORE_DESCRIPTORS = 16
MORE_THREADS = 8
MORE_KIB = 48 << 10


class Soak:
    def __init__(self, network: Network) -> None:
        self.random = random.Random(SEED)
        self.network = network
        self.cluster = Cluster(network, NODES, lease_s=SHORT_LEASE_S)
        self.job = Job(self.cluster, policy=POLICY)
        self.seen: dict[str, tuple[int, int]] = {}  # of each daemon: its pid, and the last event
        self.done: Counter[str] = Counter()

    # ---- What happens ----

    def places(self) -> str:
        return " ".join(self.random.choices(NODES.split(), k=RANKS))

    def some_node(self) -> str:
        return self.random.choice(NODES.split())

    def ranks_die(self) -> None:
        """All or some, and come back elsewhere or where they were."""
        if self.random.random() < 0.5:
            self.random.choice(self.job.ranks).kill()
        self.come_back()

    def come_back(self) -> None:
        self.job.start(self.places())
        self.job.resume()

    def a_daemon_dies(self) -> None:
        self.cluster.start_anew(self.some_node())

    def a_daemon_is_stopped(self) -> None:
        name = self.some_node()
        assert self.cluster.daemons[name].terminate() == 0, self.cluster.daemons[name].log()
        self.cluster.start(name)

    def the_host_dies(self) -> None:
        host = self.cluster.host(self.job.name, self.some_node())
        self.cluster.start_anew(host or self.some_node())

    def a_node_loses_power(self) -> None:
        name = self.some_node()
        self.cluster[name].kill()
        self.cluster[name].boot()
        self.cluster.start(name)
        self.come_back()

    def a_daemon_stands_still(self) -> None:
        daemon = self.cluster.daemons[self.some_node()]
        assert daemon.process is not None
        daemon.process.stop()
        self.job.ask(f"save {self.job.step + 1}")
        daemon.process.resume()

    def a_node_is_cut_off(self) -> None:
        self.network.links.cut(
            self.cluster[self.some_node()], way=self.random.choice(["both", "in", "out"])
        )
        self.job.ask(f"save {self.job.step + 1}")
        self.job.ask("tier remote 1000")
        self.network.links.heal()

    def packets_are_lost(self) -> None:
        self.network.links.lossy(self.cluster[self.some_node()], share=0.1)
        self.job.save_soon()
        self.network.links.heal()

    def etcd_stands_still(self) -> None:
        assert self.cluster.etcd is not None
        self.cluster.etcd.stop()
        self.job.ask(f"save {self.job.step + 1}")
        self.cluster.etcd.resume()

    def the_settings_are_read_again(self) -> None:
        process = self.cluster.daemons[self.some_node()].process
        assert process is not None
        process.send_signal(signal.SIGHUP)

    def a_node_is_drained(self) -> None:
        name = self.some_node()
        self.cluster.daemons[name].ctl("drain", name, "--wait", "30s")
        self.cluster.daemons[name].ctl("drain", name, "--undo")

    def the_job_is_told_to_end(self) -> None:
        """Its ranks end with one step, and come back behind it."""
        self.random.choice(self.job.ranks).process.send_signal(signal.SIGUSR1)
        first = self.job.step + 1
        for step in range(first, first + 1000):
            said = self.job.ask(f"reach {step}")
            assert set(said) <= {"ok on", "ok last"} and len(set(said)) == 1, (step, said)
            if said[0] == "ok last":
                break
        self.job.step = step - 1
        self.job.save_soon()
        self.come_back()
        assert self.job.safe >= step

    def faults(self) -> list[Callable[[], None]]:
        return [
            self.ranks_die,
            self.a_daemon_dies,
            self.a_daemon_is_stopped,
            self.the_host_dies,
            self.a_node_loses_power,
            self.a_daemon_stands_still,
            self.a_node_is_cut_off,
            self.packets_are_lost,
            self.etcd_stands_still,
            self.the_settings_are_read_again,
            self.a_node_is_drained,
            self.the_job_is_told_to_end,
        ]

    # ---- What must hold ----

    def whole_again(self) -> None:
        """All nodes see each other, and the job saves."""
        for name in NODES.split():
            self.cluster.wait_members(name, NODES)
        self.job.save_soon()

    def new_events(self) -> list[tuple[str, dict[str, Any]]]:
        """Of all nodes, since this was asked last."""
        found = []
        for name in NODES.split():
            told = self.cluster.tell(name, "events")
            assert "events" in told, told
            process = self.cluster.daemons[name].process
            assert process is not None
            pid, last = self.seen.get(name, (0, 0))
            last = last if pid == process.pid else 0
            events = [event for event in told["events"] if event["number"] > last]
            found += [(name, event) for event in events]
            self.seen[name] = (process.pid, max([last, *(event["number"] for event in events)]))
        return found

    def nothing_is_called_damaged(self) -> None:
        wrong = [(name, event) for name, event in self.new_events() if event["kind"] in NEVER]
        assert wrong == [], self.said(wrong)

    def save_everywhere(self) -> None:
        self.job.save()
        said = self.job.ask("tier peer")
        assert said == ["ok peer"] * RANKS, self.said(said)

    def calm(self) -> None:
        """While nothing happens, nobody warns of anything."""
        # What was begun before has ended. (Who saves faster than a tier takes it hears that steps are left out.)
        self.save_everywhere()
        self.nothing_is_called_damaged()
        first = self.job.step + 1
        for _ in range(CALM_SAVES):
            self.save_everywhere()
        wrong = [
            (name, event)
            for name, event in self.new_events()
            if event["severity"] in ("warning", "error")
            and event["kind"] not in ALWAYS
            and not of_before(event, first)
        ]
        assert wrong == [], self.said(wrong)

    def said(self, what: Any) -> str:
        return f"seed {SEED}, after {sum(self.done.values())} faults ({dict(self.done)}): {what}"

    # ---- What each daemon holds ----

    def idle_daemons_hold(self) -> dict[str, Held]:
        """Of each, once all ranks have gone."""
        self.job.kill()
        held = {}
        for name in NODES.split():
            wait_until(f"{name} has nobody", lambda name=name: self.nobody_is_on(name))
            process = self.cluster.daemons[name].process
            assert process is not None
            held[name] = held_by(process)
        return held

    def nobody_is_on(self, name: str) -> bool:
        daemon = self.cluster.tell(name, "status")["daemon"]
        return daemon.get("connections", 0) == 0 and daemon.get("slots_quarantined", 0) == 0

    def whole_again_with_new_ranks(self) -> None:
        for name in NODES.split():
            self.cluster.wait_members(name, NODES)
        for _ in range(4):
            self.come_back()
            self.job.save_soon()
            self.save_everywhere()


def of_before(event: dict[str, Any], first: int) -> bool:
    """What the faults have left is given up when its room is needed."""
    step = re.match(r"step (\d+) of attempt", event["text"])
    return event["kind"] == "step_shed" and step is not None and int(step[1]) < first


def test_half_an_hour_of_faults(network: Network) -> None:
    soak = Soak(network)
    print(f"seed {SEED}, {MINUTES} minutes", flush=True)
    soak.job.start(soak.places())
    assert soak.job.resume() == 0
    soak.job.save()
    until = time.monotonic() + MINUTES * 60
    while time.monotonic() < until:
        fault = soak.random.choice(soak.faults())
        soak.done[fault.__name__] += 1
        try:
            fault()
            soak.whole_again()
        except Exception as error:
            raise AssertionError(soak.said(f"{fault.__name__}: {error}")) from error
        if soak.random.random() < 0.3:
            soak.calm()
    soak.come_back()
    soak.calm()
    print(soak.said("passed"), flush=True)

    # What a daemon holds once all ranks have gone is what one holds that was just started, and has seen a few saves.
    soaked = soak.idle_daemons_hold()
    soak.cluster.start_anew(NODES)
    soak.whole_again_with_new_ranks()
    fresh = soak.idle_daemons_hold()
    for name in NODES.split():
        now, before = soaked[name], fresh[name]
        more = now.descriptors - before.descriptors
        assert max(more.values(), default=0) <= MORE_DESCRIPTORS, soak.said(
            f"{name}: {more}; {before.descriptors}"
        )
        assert now.threads <= before.threads + MORE_THREADS, soak.said(f"{name}: {now}, {before}")
        assert now.kib <= before.kib + MORE_KIB, soak.said(f"{name}: {now}, {before}")
