"""The campaign of kills, stops and losses of power (campaign.py), and that its judge can say no."""

from __future__ import annotations

import pathlib
import random
import shutil
import signal
from collections.abc import Iterator

import pytest
from campaign import Campaign, play, play_long
from ledger import TIERS, Fault, Ledger
from ranks import Hung

_SHORT_ROUNDS = 40
_LONG_ROUNDS = 1000


def test_short(seed: int, rounds: int | None, capsys: pytest.CaptureFixture[str]) -> None:
    campaign = play(seed, rounds or _SHORT_ROUNDS)
    with capsys.disabled():
        print("\n" + campaign.summary())


@pytest.mark.slow
def test_long(seed: int, rounds: int | None, capsys: pytest.CaptureFixture[str]) -> None:
    play_long(seed, rounds or _LONG_ROUNDS, Campaign, capsys)


# The judge can say no: of a node with whose files somebody meddles, its ranks and ckptd being gone.


@pytest.fixture
def saved(seed: int) -> Iterator[Campaign]:
    campaign = Campaign(seed)
    try:
        campaign.start()
        for job in campaign.jobs:
            job.launch_with(dict.fromkeys(TIERS, 1), dict.fromkeys(TIERS, 3))
            job.resume()
            assert job.save(TIERS) and job.save(TIERS)
        campaign.lose_power()
        yield campaign
    finally:
        campaign.close()


def _steps(campaign: Campaign) -> list[pathlib.Path]:
    """The directories of the newest step of the first job, in all tiers."""
    job = campaign.jobs[0]
    found = list(campaign.root.glob(f"*/{job.name}/{job.step}-a{job.attempt}"))
    assert found
    return found


def _go_on(campaign: Campaign) -> None:
    campaign.daemon.start()
    campaign.jobs[0].launch(random.Random(campaign.seed))
    campaign.jobs[0].resume()


def test_the_judge_has_nothing_against_a_node_that_is_left_alone(saved: Campaign) -> None:
    _go_on(saved)
    saved.jobs[0].audit()


def test_the_judge_sees_an_older_step(saved: Campaign) -> None:
    for step in _steps(saved):
        shutil.rmtree(step)
    with pytest.raises(Fault, match="was promised"):
        _go_on(saved)


def test_the_judge_sees_a_job_that_starts_from_nothing(saved: Campaign) -> None:
    for step in _steps(saved):
        shutil.rmtree(step.parent)
    saved.lose_state()
    with pytest.raises(Fault, match="'nothing was saved', but"):
        _go_on(saved)


def test_the_judge_sees_wrong_bytes_that_make_a_restore_fall_back(saved: Campaign) -> None:
    for step in _steps(saved):
        for image in step.glob("*.safetensors"):
            data = bytearray(image.read_bytes())
            data[-1] ^= 1
            image.write_bytes(data)
    with pytest.raises(Fault, match="was promised"):
        _go_on(saved)


@pytest.mark.parametrize("name", ["*.record", "*.safetensors", "MANIFEST"])
def test_the_judge_sees_a_file_that_is_gone(saved: Campaign, name: str) -> None:
    next(path for step in _steps(saved) for path in step.glob(name)).unlink()
    with pytest.raises(Fault, match=r"is gone, keep_last is \d, and later are only \[\]"):
        saved.jobs[0].audit()


def test_the_judge_sees_who_does_not_answer(saved: Campaign) -> None:
    _go_on(saved)
    rank = saved.jobs[0].ranks[0]
    rank.signal(signal.SIGSTOP)
    rank.tell("save 9")
    with pytest.raises(Hung, match="rank 0 of alpha: no answer to 'save 9'"):
        rank.answer(within_s=0.2)


def test_a_ledger_lets_go_of_what_newer_steps_cover() -> None:
    ledger = Ledger()
    ledger.restored(1, None)
    for step in (1, 2, 3):
        ledger.whole_in("nvme", (1, step))
    ledger.judge_missing("nvme", {(1, 1)}, {(1, 2), (1, 3)}, keep=2)
    assert ledger.durable["nvme"] == {(1, 2), (1, 3)}
    with pytest.raises(Fault, match="is gone"):
        ledger.judge_missing("nvme", {(1, 2)}, {(1, 3)}, keep=2)


def test_a_ledger_lets_go_of_nothing_that_a_branch_covers() -> None:
    ledger = Ledger()
    ledger.restored(1, None)
    ledger.whole_in("nvme", (1, 1))
    ledger.restored(2, (1, 1))
    ledger.whole_in("nvme", (2, 2))
    ledger.memory_lost()
    ledger.started_over(3)
    ledger.whole_in("nvme", (3, 1))
    assert ledger.promised() == (3, 1)
    with pytest.raises(Fault, match="of a branch that was left"):
        ledger.judge_missing("nvme", {(2, 2)}, {(3, 1)}, keep=1)
    with pytest.raises(Fault, match="not on the line"):
        ledger.restored(4, (2, 2))
