"""dcp.async_save with AsyncCheckpointerType.PROCESS: DCP's own process plans, and the state stays in the slot."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from ranks import run_ranks
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import holdfast
from daemons import DEADLINE_S, Daemon
from holdfast.dcp import Reader, Stager, Writer


def state(rank: int, value: float) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return {
        "model": {
            "w": torch.full((1000,), value),
            "split": distribute_tensor(torch.arange(40.0).reshape(10, 4) * value, mesh, [Shard(0)]),
        },
        "steps": [torch.tensor(value), {"n": value}],
        "name": f"step {value}",
    }


class AddsOne(DefaultSavePlanner):
    """Plans an object that the state has not."""

    def create_local_plan(self) -> Any:
        self.state_dict["extra"] = 1
        return super().create_local_plan()


@pytest.mark.parametrize("staged_by", ["writer", "stager"])
def test_it_saves_what_was_staged(daemon: Daemon, staged_by: str) -> None:
    def rank_saves(rank: int) -> None:
        stager = {"async_stager": Stager("job")} if staged_by == "stager" else {}

        def save(step: int, *, value: float, **options: Any) -> Any:
            saved = state(rank, value)
            if "storage_writer" not in options:
                options["storage_writer"] = Writer("job", step=step)
            saving = dcp.async_save(
                saved, async_checkpointer_type=AsyncCheckpointerType.PROCESS, **stager, **options
            )
            staging = getattr(saving, "staging_completion", None)
            if staging is not None:
                staging.result(DEADLINE_S)
            saved["model"]["w"].zero_()  # no optimizer has it: it was copied before
            return getattr(saving, "upload_completion", saving)

        for step in (1, 2):
            writer = Writer("job", step=step)
            save(step, value=step, storage_writer=writer).result(DEADLINE_S)
            writer.wait("committed", DEADLINE_S)

        # What fails does so on all ranks, and the next save succeeds.
        with pytest.raises(CheckpointException, match="AsyncCheckpointerType.PROCESS"):
            save(3, value=3, storage_writer=Writer("job", step=3, wait="committed")).result(
                DEADLINE_S
            )
        with pytest.raises(CheckpointException, match="AddsOne plans an object 'extra'"):
            save(4, value=4, planner=AddsOne()).result(DEADLINE_S)
        writer = Writer("job", step=5)
        save(5, value=5, storage_writer=writer).result(DEADLINE_S)
        writer.wait("committed", DEADLINE_S)

        for step in (2, 5):
            loaded = state(rank, 0)
            dcp.load(loaded, storage_reader=Reader("job", step=step, adopt=False))
            expected = state(rank, step)
            assert torch.equal(loaded["model"]["w"], expected["model"]["w"])
            whole, wanted = loaded["model"]["split"], expected["model"]["split"]
            assert torch.equal(whole.full_tensor(), wanted.full_tensor())
            assert loaded["steps"] == [torch.tensor(float(step)), {"n": step}]
            assert loaded["name"] == expected["name"]

    run_ranks(2, rank_saves)


def test_a_writer_goes_nowhere_else(daemon: Daemon) -> None:
    writer = Writer("job", step=1, rank=0, world_size=1)
    for elsewhere in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(holdfast.RefusedError, match="cannot go to another process"):
            elsewhere(writer)
