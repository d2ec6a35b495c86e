"""What Checkpointer saved on two ranks, loaded by dcp.load on one, two and four into another model and optimizer: bit for bit what
torch.save has of the whole. And what DCP saved, by dcp_ranks_test.py."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import parallel_test
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from parallel_test import Model, assert_same, ddp, fsdp2, made, plain, tensor_parallel, train
from ranks import run_ranks
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.tensor import DTensor

import holdfast
from daemons import Daemon
from holdfast.dcp import Reader

WAYS = [plain, ddp, fsdp2, tensor_parallel]
WORLDS = [1, 2, 4]


def whole(value: Any) -> Any:
    if isinstance(value, DTensor):
        return value.full_tensor().detach().clone()
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: whole(each) for key, each in value.items()}
    if isinstance(value, list):
        return [whole(each) for each in value]
    return value


def full(model: nn.Module, optim: torch.optim.Optimizer) -> dict[str, Any]:
    """Put together of all ranks, by the names of DCP."""
    model_state, optim_state = get_state_dict(model, optim)
    return {"model": whole(dict(model_state)), "optim": whole(optim_state)}


def alike(way: Callable[[Model], nn.Module]) -> bool:
    return way in (plain, tensor_parallel)


def fit_for(way: Callable[[Model], nn.Module], world: int) -> None:
    """Tensor parallelism wants HIDDEN to be divisible."""
    parallel_test.HIDDEN = 8 if way is tensor_parallel else 6
    assert way is not tensor_parallel or parallel_test.HIDDEN % world == 0


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_what_a_checkpointer_saved_is_loaded_by_any_number_of_ranks(
    daemon: Daemon, way: Callable[[Model], nn.Module]
) -> None:
    def save(rank: int) -> bytes:
        fit_for(way, 2)
        model, optim = made(way, seed=0)
        optim.param_groups[0]["lr"] = 0.02
        train(model, optim, 3, alike(way))
        with holdfast.Checkpointer("job") as ckpt:
            ckpt.save(3, {"model": model, "optim": optim, "extra": {"epoch": 3}}, wait="committed")
        buffer = io.BytesIO()
        torch.save(full(model, optim), buffer)
        return buffer.getvalue()

    saved, replica = run_ranks(2, save)
    reference = torch.load(io.BytesIO(saved), weights_only=True)
    assert_same(reference, torch.load(io.BytesIO(replica), weights_only=True))
    moments = [state["exp_avg"] for state in reference["optim"]["state"].values()]
    assert len(moments) == 14 and all(each.abs().sum() > 0 for each in moments)

    def load(rank: int) -> None:
        fit_for(way, dist.get_world_size())
        model, optim = made(way, seed=5)
        model_state, optim_state = get_state_dict(model, optim)
        state = {"model": model_state, "optim": optim_state, "extra": {"epoch": 0}}
        dcp.load(state, storage_reader=Reader("job", adopt=False))
        set_state_dict(model, optim, model_state_dict=model_state, optim_state_dict=optim_state)
        assert_same(full(model, optim), reference)
        assert optim.param_groups[0]["lr"] == 0.02 and state["extra"] == {"epoch": 3}
        # The flattened form.
        flattened = StateDictOptions(flatten_optimizer_state_dict=True)
        model, optim = made(way, seed=6)
        state = {"optim": get_optimizer_state_dict(model, optim, options=flattened)}
        dcp.load(state, storage_reader=Reader("job", adopt=False))
        set_optimizer_state_dict(model, optim, optim_state_dict=state["optim"], options=flattened)
        assert_same(full(model, optim)["optim"], reference["optim"])
        # Numbers, as the optimizer itself has it.
        model, optim = made(way, seed=7)
        train(model, optim, 1, alike(way))  # it has no state before
        state = {"optim": optim.state_dict()}
        dcp.load(state, storage_reader=Reader("job", adopt=False))
        optim.load_state_dict(state["optim"])
        assert set(optim.state) == set(model.parameters())  # not the numbers themselves
        assert_same(full(model, optim)["optim"], reference["optim"])
        train(model, optim, 1, alike(way))

    for world in WORLDS:
        run_ranks(world, load)
