"""Sealed steps that do not commit, for not all ranks of the job save: a warning, then failed saves."""

from __future__ import annotations

import logging

import pytest
import torch

import holdfast
from daemons import Daemon

STATE = {"w": torch.ones(100)}


def told(caplog: pytest.LogCaptureFixture, level: int) -> list[str]:
    return [
        each.getMessage()
        for each in caplog.records
        if each.name == "holdfast" and each.levelno == level
    ]


def test_rank_0_saves_alone(daemon: Daemon, caplog) -> None:
    """What Lightning's DDP does with a CheckpointIO."""
    with holdfast.Checkpointer("job", rank=0, world_size=2) as ckpt:
        failed = []
        for step in range(12):
            ckpt.save(step, STATE, wait="sealed")
            failed.append(ckpt.failed_saves)
    # Four are needed to tell three that do not commit from one that is about to.
    assert failed == [0, 0, 0, 0, 1, 2, 3, 4, 5, 6, 7, 8]
    (warning,) = told(caplog, logging.WARNING)
    assert "steps 0, 1, 2" in warning and "1 of 2 ranks have sealed it, rank 1 has not" in warning
    (error,) = told(caplog, logging.ERROR)
    assert "step 3" in error and "not committed" in error, error
    assert not holdfast.checkpoints("job")


def test_it_raises_where_failed_saves_do(daemon: Daemon) -> None:
    ckpt = holdfast.Checkpointer("job", rank=0, world_size=2, on_error="raise", uncommitted_max=1)
    ckpt.save(0, STATE, wait="sealed")
    ckpt.save(1, STATE, wait="sealed")
    with pytest.raises(holdfast.AbandonedError, match="step 1"):
        ckpt.save(2, STATE, wait="sealed")
    ckpt.close()


def test_steps_that_commit_late_are_no_failures(daemon: Daemon, caplog) -> None:
    first = holdfast.Checkpointer("job", rank=0, world_size=2, launch="a")
    other = holdfast._core.Job("job", rank=1, world_size=2, launch="a", socket=str(daemon.socket))
    tensors = holdfast._core.TensorList()

    def both(step: int, *, committed: bool = True) -> None:
        handle = first.save(step, STATE, wait="sealed")
        if committed:
            other.save(step, tensors, [], [("n", b"1", None)]).wait("sealed", 60)
            handle.wait("committed", 60)

    for step in range(3):
        both(step)
    # One behind the other, as ranks are; and once by two.
    both(3, committed=False)
    both(4)
    both(5, committed=False)
    both(6, committed=False)
    for step in range(7, 12):
        both(step)
    assert first.failed_saves == 0 and not told(caplog, logging.ERROR)
    assert not told(caplog, logging.WARNING)
    first.close()
    other.close()


def test_a_number_of_steps_that_makes_no_sense(daemon: Daemon) -> None:
    for count in (0, -1, 1.5, True):
        with pytest.raises(holdfast.InvalidArgumentError, match="uncommitted_max"):
            holdfast.Checkpointer("job", uncommitted_max=count)  # type: ignore[arg-type]
