"""holdfast.open(job).state(): what several ranks saved, as one nested state for a process that took no part."""

from __future__ import annotations

import torch
import torch.distributed as dist
from ranks import run_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import holdfast
from daemons import Daemon


def stepped(model: nn.Module) -> torch.optim.AdamW:
    optim = torch.optim.AdamW(model.parameters(), lr=0.1)
    for each in model.parameters():
        each.grad = torch.ones_like(each)
    optim.step()
    return optim


def test_a_sharded_state_is_whole(daemon: Daemon) -> None:
    def save(rank: int) -> None:
        torch.manual_seed(3)
        model = nn.Linear(4, 3)  # rows of one rank and of the other: 2 and 1
        fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
        with holdfast.Checkpointer("job") as ckpt:
            state = {"model": model, "optim": stepped(model), "extra": {"epoch": 5, "rank": rank}}
            ckpt.save(0, state, wait="committed")
            dist.barrier()

    run_ranks(2, save)
    torch.manual_seed(3)
    model = nn.Linear(4, 3)
    optim = stepped(model)
    with holdfast.open("job") as saved:
        state = saved.state()
    assert list(state) == ["model", "optim", "extra"]
    assert state["extra"] == {"epoch": 5, "rank": 0}
    assert sorted(state["model"]) == ["bias", "weight"]
    for name, parameter in model.named_parameters():
        assert state["model"][name].equal(parameter)
        moments = state["optim"]["state"][f"model.{name}"]
        assert moments["exp_avg"].equal(optim.state[parameter]["exp_avg"])
    nn.Linear(4, 3).load_state_dict(state["model"])


def test_stages_of_a_pipeline_are_put_together(daemon: Daemon) -> None:
    def save(rank: int) -> None:
        stage = nn.ModuleDict({f"layer{rank}": nn.Linear(2, 2, bias=False)})
        nn.init.constant_(stage[f"layer{rank}"].weight, rank)
        with holdfast.Checkpointer("job") as ckpt:
            state = {"model": stage, "optim": stepped(stage), f"only{rank}": rank}
            ckpt.save(0, state, wait="committed")
            dist.barrier()

    run_ranks(2, save)
    with holdfast.open("job") as saved:
        state = saved.state()
    names = [f"layer{rank}.weight" for rank in range(2)]
    assert sorted(state["model"]) == names
    assert (state["only0"], state["only1"]) == (0, 1)
    assert sorted(state["optim"]["state"]) == [f"model.{name}" for name in names]
    (group,) = state["optim"]["param_groups"]
    assert sorted(group["params"]) == [f"model.{name}" for name in names]
    assert group["lr"] == 0.1
