"""The campaign of many jobs in little memory (starvation.py), some of its cases one by one, and that its judge can say no."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator

import pytest
from campaign import RECOVERY_S, play, play_long
from ledger import Fault
from starvation import USERS, Room, Run, Starvation, Tenant

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root to be several users")

_SHORT_ROUNDS = 50
_LONG_ROUNDS = 200
ALICE, BOB = USERS[:2]


def test_short(seed: int, rounds: int | None, capsys: pytest.CaptureFixture[str]) -> None:
    campaign = play(seed, rounds or _SHORT_ROUNDS, Starvation)
    with capsys.disabled():
        print("\n" + campaign.summary())


@pytest.mark.slow
def test_long(seed: int, rounds: int | None, capsys: pytest.CaptureFixture[str]) -> None:
    play_long(seed, rounds or _LONG_ROUNDS, Starvation, capsys)


@contextlib.contextmanager
def _node(
    *, share: int, limit: int = 0, keep_ended: str = "24h", seed: int = 1
) -> Iterator[Starvation]:
    """Of two users."""
    campaign = Starvation(seed, Room((ALICE, BOB), share, limit), keep_ended)
    try:
        campaign.start()
        yield campaign
    finally:
        campaign.close()


def _saves(run: Run, times: int) -> bool:
    """Whether so many in a row are committed."""
    return all(run.save(()) for _ in range(times))


_IN_TURNS = [
    (ALICE, False),
    (BOB, True),
    (ALICE, False),
    (BOB, False),
    (ALICE, True),
    (BOB, False),
    (ALICE, False),
    (BOB, True),
    (ALICE, False),
    (BOB, False),
]
_ONE_AFTER_THE_OTHER = [
    *[(ALICE, left) for left in (True, True, False, True, True)],
    *[(BOB, left) for left in (False, True, False, False, True)],
]


# Each takes half of the memory.
@pytest.mark.parametrize(
    "jobs", [_IN_TURNS, _ONE_AFTER_THE_OTHER], ids=["in-turns", "one-after-the-other"]
)
def test_ten_jobs_in_a_row_as_two_users(jobs: list[tuple[int, bool]]) -> None:
    with _node(share=2) as node:
        runs = []
        for number, (user, left) in enumerate(jobs):
            runs.append(node.start_run(user, 1))
            assert _saves(runs[-1], 4), (number, runs[-1].answers)
            node.end_run(runs[-1], left=left)
        node.go_on(runs[-1])
        assert runs[-1].step == 4


@pytest.mark.parametrize("left", [True, False], ids=["left", "killed"])
def test_an_ended_jobs_only_copy_is_kept_from_another_user(left: bool) -> None:
    with _node(share=2) as node:
        hers = node.start_run(ALICE, 1)
        assert _saves(hers, 2)
        node.end_run(hers, left=left)
        his, more_of_his = node.start_run(BOB, 1), node.start_run(BOB, 1)
        assert _saves(his, 3)
        # It would take the whole memory.
        assert not _saves(more_of_his, 3)
        assert _saves(his, 3)
        node.go_on(hers)
        assert hers.step == 2


def test_an_ended_jobs_only_copy_gives_way_after_its_time() -> None:
    with _node(share=2, keep_ended="1s") as node:
        hers = node.start_run(ALICE, 1)
        assert _saves(hers, 2)
        node.end_run(hers, left=True)
        his, more_of_his = node.start_run(BOB, 1), node.start_run(BOB, 1)
        assert _saves(his, 3)
        until = time.monotonic() + RECOVERY_S
        while not _saves(more_of_his, 3):
            assert time.monotonic() < until, more_of_his.answers
        assert _saves(his, 3)


def test_a_living_jobs_newest_step_gives_way_to_nobody() -> None:
    with _node(share=2) as node:
        runs = [node.start_run(user, 1) for user in (ALICE, ALICE, BOB)]
        # Hers fill the memory before he comes.
        for run in runs[:2]:
            assert _saves(run, 3)
        assert not _saves(runs[2], 1)
        for run in runs[:2]:
            assert _saves(run, 3)
            node.end_run(run, left=False)
            node.go_on(run)
            assert run.step == 6


def test_a_limit_of_each_user() -> None:
    with _node(share=4, limit=2) as node:
        first, second = node.start_run(ALICE, 1), node.start_run(ALICE, 1)
        assert _saves(first, 3)
        assert not _saves(second, 1)
        his = node.start_run(BOB, 1)
        assert _saves(his, 3)
        # An ended job of hers gives way to her next one, although the memory has room.
        node.end_run(second, left=True)
        node.end_run(first, left=True)
        third = node.start_run(ALICE, 1)
        assert _saves(third, 3), third.answers


# The judge can say no.


def test_the_judge_sees_a_save_that_gets_no_room() -> None:
    with _node(share=2) as node:
        node.room.share = 8  # what it believes
        runs = [node.start_run(ALICE, 1) for _ in range(3)]
        with pytest.raises(Fault, match="fits into its share of 8 slots"):
            node.save_all(runs, 3)


@pytest.mark.parametrize("ended", [True, False], ids=["ended", "living"])
def test_the_judge_sees_a_step_that_is_gone(ended: bool) -> None:
    with _node(share=2) as node:
        run = node.start_run(ALICE, 1)
        node.save_all([run], 2)
        if ended:
            node.end_run(run, left=True)
        else:
            run.kill_all()
        node.daemon.kill()
        for entry in node.memory.iterdir():
            entry.unlink()
        node.daemon.start()
        with pytest.raises(Fault, match="was promised"):
            node.go_on(run)


def test_a_room_knows_who_must_get_a_slot() -> None:
    living, hers = Tenant(BOB, 1), Tenant(ALICE, 1)
    room = Room((ALICE, BOB), 2, tenants=[living, hers])
    assert room.must_save(BOB) and room.must_save(ALICE)
    more = Tenant(ALICE, 1)
    room.tenants.append(more)
    assert not room.must_save(ALICE)  # beyond her share
    assert not room.must_save(BOB)  # who came later, perhaps
    more.ended, more.left = 1, True
    assert room.must_save(BOB)
    more.left = False  # she may start it again at any moment
    assert not room.must_save(BOB)
    assert room.must_save(ALICE)


def test_a_room_knows_whose_step_may_go() -> None:
    his = Tenant(BOB, 2)
    hers = [Tenant(ALICE, 1, ended=when, left=True) for when in (1, 2, 3)]
    room = Room((ALICE, BOB), 4, tenants=[his, *hers])
    room.all_save()  # all of hers are within her share
    assert not any(tenant.may_go for tenant in hers)
    room.tenants.extend(Tenant(ALICE, 1, ended=when, left=False) for when in (4, 5))
    room.all_save()
    assert [tenant.may_go for tenant in room.tenants] == [False, True, False, False, False, False]
    room.tenants.append(Tenant(ALICE, 1))  # her own next one
    room.all_save()
    assert [tenant.may_go for tenant in room.tenants] == [False, *[True] * 5, False]
