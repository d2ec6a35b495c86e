"""Drives and a remote directory that fail (hostile_fs.py): errors, hangs, short and corrupt reads, no room, and losses of
power that take all that was not synced.

Judged from outside: a save that was acknowledged is there, no restore passes over a step that is healthy, and what one
place does holds up no other.
"""

from __future__ import annotations

import contextlib
import errno
import pathlib
import random
import shutil
import time
from collections.abc import Iterator

import pytest
from campaign import Campaign, play, play_long
from hostile_fs import (
    HostileFs,
    Rule,
    corrupts,
    fails,
    flips,
    freeze,
    hangs,
    own_mounts,
    shortens,
    why_impossible,
)
from ledger import TIERS, Fault
from node import JOB, RANKS, Node

from daemons import DEADLINE_S

pytestmark = pytest.mark.skipif(bool(why_impossible()), reason=why_impossible())


def slow(*case: object) -> object:
    return pytest.param(*case, marks=pytest.mark.slow)


PLACES = {"nvme": ["d0", "d1"], "remote": ["remote"]}
STATE_BYTES = 200_000  # of one rank, as node.py has it
BOTH = ("nvme", "remote")


@pytest.fixture(scope="session", autouse=True)
def _mounts() -> None:
    own_mounts()


class HostileNode(Node):
    """One whose durable places are on file systems of ours."""

    def __init__(self, tiers: tuple[str, ...], *, cached: bool = False) -> None:
        super().__init__(tiers)
        settings = self.daemon.config.read_text()
        for end in ("bytes_max: 1GiB}", "/remote}"):
            assert end in settings or len(tiers) == 1
            settings = settings.replace(end, f"{end[:-1]}, stall_timeout_ms: 500}}")
        self.daemon.config.write_text(settings)
        names = [name for tier in tiers for name in PLACES[tier]]
        self.systems = {name: HostileFs(self.root / name, cached=cached) for name in names}
        for system in self.systems.values():
            system.mount()

    def begin(self) -> None:
        """Steps 1 and 2 are whole in all tiers."""
        self.start()
        assert all("ok attempt=1" in answer for answer in self.launch())
        assert all("NOTHING_TO_RESTORE" in answer for answer in self.all("restore"))
        self.save_everywhere(1)
        self.save_everywhere(2)

    def restart(self) -> list[str]:
        """After a crash: what the ranks restore, where a launcher starts them again while something cannot be read just now."""
        self.start()
        until = time.monotonic() + DEADLINE_S
        answers = self.launch()
        while True:
            if all("ok attempt=" in answer for answer in answers):
                answers = self.restore_when_ready()
            passing = ("error UNAVAILABLE", "error ABANDONED", "error ABORTED")
            if not any(answer.startswith(passing) for answer in answers):
                return answers
            assert time.monotonic() < until, answers
            answers = self.all("open")

    def save(self, step: int) -> None:
        assert self.all(f"save {step}") == ["ok sealed"] * RANKS
        assert self.all("committed") == ["ok committed"] * RANKS

    def await_tier(self, tier: str) -> None:
        assert self.all(f"tier {tier}") == [f"ok {tier}"] * RANKS

    def await_said(self, words: str) -> None:
        """By `ckptctl status`."""
        until = time.monotonic() + DEADLINE_S
        while words not in (text := self.daemon.ctl("status", JOB)):
            assert time.monotonic() < until, text

    def is_unharmed(self, before: dict[pathlib.Path, str]) -> None:
        now = self.files()
        assert {path: now.get(path) for path in before} == before

    def count(self, effect: str) -> int:
        return sum(system.counts.get(effect, 0) for system in self.systems.values())

    def rules(self, rule: Rule, *places: str) -> None:
        for place in places:
            self.systems[place].rules.append(rule)

    def release(self) -> None:
        for system in self.systems.values():
            system.release()

    def lose_power(self, draw: random.Random | None) -> None:
        freeze(self.systems.values())
        self.crash()
        for system in self.systems.values():
            system.lose_power(draw)

    def close(self) -> None:
        self.release()
        self.crash()
        for system in self.systems.values():
            system.unmount()
        super().close()


@contextlib.contextmanager
def hostile_node(tiers: tuple[str, ...] = BOTH, *, cached: bool = False) -> Iterator[HostileNode]:
    node = HostileNode(tiers, cached=cached)
    try:
        yield node
    finally:
        node.close()


# Reads that are wrong.


@pytest.mark.parametrize("restores", [8, slow(30)])
@pytest.mark.parametrize("tier, cached", [("nvme", True), ("remote", False)], ids=str)
def test_reads_that_are_wrong_now_and_then_cost_no_step(
    tier: str, cached: bool, restores: int, seed: int
) -> None:
    with hostile_node((tier,), cached=cached) as node:
        node.begin()
        node.crash()
        before = node.files()
        for trial in range(restores):
            for place in node.systems:
                draw = random.Random(f"{seed} {trial} {place}")
                node.rules(flips(draw, share=draw.uniform(0.05, 0.1)), place)
            restored = node.restart()
            assert all("step=2" in answer for answer in restored), (seed, trial, restored)
            for notes in node.all("notes"):
                assert "passed over" not in notes, (seed, trial, notes)
            node.crash()
            node.release()
        node.is_unharmed(before)
        assert restores < 30 or node.count("Flipped") > 0


@pytest.mark.parametrize("tier", BOTH)
def test_a_step_that_cannot_be_read_is_kept(tier: str) -> None:
    with hostile_node((tier,)) as node:
        node.begin()
        node.crash()
        before = node.files()
        node.rules(corrupts(f"{JOB}/2-a1/*1*.safetensors"), *node.systems)
        restored = node.restart()
        assert all("step=1" in answer for answer in restored), restored
        assert all("passed over" in notes for notes in node.all("notes"))
        node.save_everywhere(3)
        node.collect_garbage()
        node.crash()
        node.release()
        node.is_unharmed(before)
        restored = node.restart()
        assert all("step=3" in answer for answer in restored), restored
        node.wait_for_whole({1, 2, 3}, [tier])


# Calls that fail or hang.

WRITING = ["create", "write", "fsync", "fsyncdir", "rename", "link", "mkdir", "fallocate"]
ERRORS = [
    (tier, call, error)
    for tier in BOTH
    for call in [*WRITING, "read"]
    for error in (errno.EIO, errno.ENOSPC, errno.EDQUOT)
    if (tier, call) != ("nvme", "link")  # names are given by renaming there
]


def _often(case: tuple[str, str, int]) -> bool:
    return case[2] == errno.EIO and case[1] in ("write", "fsync", "fsyncdir", "rename")


@pytest.mark.parametrize(
    "tier, call, error",
    [case if _often(case) else slow(*case) for case in ERRORS],
    ids=[f"{tier}-{call}-{errno.errorcode[error]}" for tier, call, error in ERRORS],
)
def test_what_is_acknowledged_after_an_error_outlasts_a_loss_of_power(
    tier: str, call: str, error: int
) -> None:
    with hostile_node((tier,)) as node:
        node.begin()
        node.rules(fails(call, error, f"*{JOB}*", times=1), *node.systems)
        node.save(3)
        # (After an error it is tried again, with a newer step if there is one.)
        node.save(4)
        node.await_tier(tier)
        assert node.count("Fails") > 0
        node.lose_power(None)
        restored = node.restart()
        assert all("step=4" in answer for answer in restored), restored


@pytest.mark.parametrize("tier", BOTH)
def test_short_reads_and_writes_are_gone_on_with(tier: str, seed: int) -> None:
    # (io_uring itself goes on after a short read, at a wrong offset if FUSE's files are opened past the cache.)
    with hostile_node((tier,), cached=tier == "nvme") as node:
        for place in node.systems:
            node.rules(shortens(random.Random(f"{seed} {place}"), share=0.7), place)
        node.begin()
        node.crash()
        restored = node.restart()
        assert all("step=2" in answer for answer in restored), (seed, restored)
        assert node.count("Shortened") > 0


OTHER = {"nvme": "remote", "remote": "nvme"}


@pytest.mark.parametrize("call", ["*", *map(slow, ["read", "open", "lookup", "readdir"])])
@pytest.mark.parametrize("place", ["d0", "remote"])
def test_a_place_that_hangs_holds_up_no_restore_from_the_others(place: str, call: str) -> None:
    tier = "remote" if place == "remote" else "nvme"
    with hostile_node() as node:
        node.begin()
        node.crash()
        node.rules(hangs(call), place)
        restored = node.restart()
        assert all("step=2" in answer for answer in restored), restored
        assert node.count("Hangs") > 0
        node.save(3)
        node.await_tier(OTHER[tier])
        node.release()
        node.save(4)
        node.await_tier(tier)


@pytest.mark.parametrize("call", ["write", *map(slow, ["fsync", "rename", "create"])])
@pytest.mark.parametrize("place", ["d0", "remote"])
def test_one_call_that_hangs_holds_up_no_save(place: str, call: str) -> None:
    tier = "remote" if place == "remote" else "nvme"
    with hostile_node() as node:
        node.begin()
        node.rules(hangs(call, times=1), place)
        for step in (3, 4, 5, 6):
            node.save(step)
            node.await_tier(OTHER[tier])
        node.systems[place].await_hanging()
        node.release()
        node.save(7)
        node.await_tier(tier)
        node.lose_power(None)
        restored = node.restart()
        assert all("step=7" in answer for answer in restored), restored


# No room.


@pytest.mark.parametrize("error", [errno.ENOSPC, slow(errno.EDQUOT)], ids=errno.errorcode.get)
@pytest.mark.parametrize("tier", BOTH)
def test_a_full_place_says_so_and_goes_on_once_there_is_room(tier: str, error: int) -> None:
    with hostile_node() as node:
        node.begin()
        for place in PLACES[tier]:
            system = node.systems[place]
            system.full, system.capacity = error, system.used() + (128 << 10)
        # What goes for a newer step leaves no room for it.
        assert node.all(f"size {5 * STATE_BYTES}") == ["ok"] * RANKS
        node.save(3)
        node.await_tier(OTHER[tier])
        node.await_said("ckptctl gc --dry-run")
        node.save(4)
        node.await_tier(OTHER[tier])
        for place in PLACES[tier]:
            node.systems[place].capacity = 1 << 30
        assert node.all(f"size {STATE_BYTES}") == ["ok"] * RANKS
        node.save(5)
        node.await_tier(tier)
        node.lose_power(None)
        restored = node.restart()
        assert all("step=5" in answer for answer in restored), restored


# Losses of power.


class PowerLosses(Campaign):
    """A campaign whose durable places forget what was not synced; some calls that write fail or hang."""

    test = "hostile_fs_test.py -k test_losses_of_power_short"
    kept_at_least = 1  # what ENOSPC makes ckptd give up for a newer step

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        draw = random.Random(f"{seed} systems")
        self.systems = [
            HostileFs(self.root / name, cached=draw.random() < 0.5)
            for name in ("d0", "d1", "remote")
        ]
        for system in self.systems:
            system.mount()
        self.actions = {
            self.reboot: 8,
            self.reboot_and_state_lost: 3,
            self.ckptd_killed: 1,
            self.ckptd_terminated: 1,
            self.a_rank_killed: 1,
            self.ranks_and_ckptd_killed: 1,
            self.nothing: 1,
        }

    def play_round(self, draw: random.Random) -> None:
        for system in self.systems:
            if draw.random() < 0.3:
                error = draw.choice([errno.EIO, errno.ENOSPC])
                call = draw.choice(WRITING)
                system.rules.append(fails(call, error, "*/*-a*", times=draw.randint(1, 3)))
        if draw.random() < 0.15:
            call = hangs(draw.choice(["write", "fsync"]), "*/*-a*/*", times=1)
            draw.choice(self.systems).rules.append(call)
        super().play_round(draw)
        for system in self.systems:
            self.done["calls that failed"] += system.counts.pop("Fails", 0)
            self.done["calls that hung"] += system.counts.pop("Hangs", 0)
            system.release()

    def lose_power(self) -> None:
        freeze(self.systems)
        super().lose_power()
        draw = random.Random(f"{self.seed} {self.round} power")
        for system in self.systems:
            system.lose_power(draw if draw.random() < 0.7 else None)

    def close(self, *, keep: bool = False) -> None:
        for system in self.systems:
            system.release()
        self.end_processes()
        for system in self.systems:
            if keep:
                shutil.copytree(system.directory, f"{system.directory}.kept")
            system.unmount()
        super().close(keep=keep)


def test_losses_of_power_short(
    seed: int, rounds: int | None, capsys: pytest.CaptureFixture[str]
) -> None:
    campaign = play(seed, rounds or 10, PowerLosses)
    with capsys.disabled():
        print("\n" + campaign.summary())


@pytest.mark.slow
def test_losses_of_power_long(
    seed: int, rounds: int | None, capsys: pytest.CaptureFixture[str]
) -> None:
    play_long(seed, rounds or 300, PowerLosses, capsys)


def test_the_judge_sees_a_drive_that_does_not_sync(seed: int) -> None:
    campaign = PowerLosses(seed)
    try:
        campaign.start()
        for job in campaign.jobs:
            job.launch_with(dict.fromkeys(TIERS, 1), dict.fromkeys(TIERS, 3))
            job.resume()
            assert job.save(TIERS)
        for system in campaign.systems:
            system.lies_about_syncs = True
        for job in campaign.jobs:
            assert job.save(TIERS)
        campaign.lose_power()
        campaign.daemon.start()
        campaign.jobs[0].launch(random.Random(seed))
        with pytest.raises(Fault, match="was promised"):
            campaign.jobs[0].resume()
    finally:
        campaign.close()
