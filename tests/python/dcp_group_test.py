"""Saves that can never be committed, since not all ranks of the job take part: they fail, and say so."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from ranks import run_ranks
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.logger import _dcp_logger

import holdfast
from daemons import DEADLINE_S, Daemon
from holdfast.dcp import Reader, Writer

_dcp_logger.setLevel(logging.ERROR)


def state(step: int) -> dict[str, Any]:
    return {"w": torch.full((100,), float(step)), "n": step}


def failure_of(save: Callable[[], Any]) -> str:
    with pytest.raises(CheckpointException) as raised:
        save()
    (error,) = {str(error): error for error, _ in raised.value.failures.values()}.values()
    assert isinstance(error, holdfast.InvalidArgumentError), error
    return str(error)


WAYS = {
    "save": dcp.save,
    "async": lambda *state, **options: dcp.async_save(*state, **options).result(DEADLINE_S),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_save_by_some_ranks_of_the_job_fails_before_it_writes(daemon: Daemon, way: str) -> None:
    save = WAYS[way]

    def rank_saves(rank: int) -> list[str]:
        some: list[dict[str, Any]] = [{"process_group": dist.new_group([0])}]
        if "no_dist" in inspect.signature(dcp.save).parameters:  # not in PyTorch 2.6
            some.append({"no_dist": True})
        told = []
        if rank == 0:
            for step, options in enumerate(some, 1):
                writer = Writer("job", step=step)
                told.append(failure_of(lambda: save(state(step), storage_writer=writer, **options)))
            # A job of its own is whole with one rank.
            alone = Writer("alone", step=1, rank=0, world_size=1, wait="committed")
            save(state(1), storage_writer=alone, **some[0])
        dist.barrier()
        save(state(3), storage_writer=Writer("job", step=3, wait="committed"))
        return told

    told, _ = run_ranks(2, rank_saves)
    for step, line in enumerate(told, 1):
        assert f"step {step} of job 'job'" in line and "1 of its 2 ranks" in line, line
        assert "no_dist=True" in line and "process_group" in line, line
    assert [each.step for each in holdfast.checkpoints("job")] == [3]
    assert [each.step for each in holdfast.checkpoints("alone")] == [1]


def test_every_rank_by_itself_without_collectives_is_a_whole_save(daemon: Daemon) -> None:
    """What DCP calls use_collectives=False: no rank hears of the others, and all of them save."""
    if "use_collectives" not in inspect.signature(dcp.save).parameters:
        pytest.skip("PyTorch is older than use_collectives")

    def rank_saves(rank: int) -> None:
        dcp.save(
            state(1),
            storage_writer=Writer("job", step=1, wait="committed"),
            use_collectives=False,
        )

    run_ranks(2, rank_saves)
    loaded = state(0)
    dcp.load(loaded, storage_reader=Reader("job", adopt=False), no_dist=True)
    assert loaded["n"] == 1 and loaded["w"].eq(1).all()
