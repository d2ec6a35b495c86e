"""One rank of dcp_ranks_test.py's runs. `save` and `load` models of every kind through DCP, and
compare bit for bit with what DCP's own files give; others fail, die and go on.
"""

from __future__ import annotations

import logging
import os
import pathlib
import signal
import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.logger import _dcp_logger
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import holdfast
from holdfast import _held
from holdfast.dcp import Reader, Stager, Writer

RANK, WORLD = 0, 1  # of this process, by run()
WAYS = ("save", "async")


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = torch.nn.Linear(8, 12)
        self.down = torch.nn.Linear(12, 8)
        self.norm = torch.nn.LayerNorm(8)
        self.tail = torch.nn.Linear(8, 3)  # less rows than four ranks: one has none
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        return self.tail(self.norm(self.down(torch.relu(self.up(x)))))


def build(kind: str) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(1)
    model: torch.nn.Module = Model()
    if kind == "ddp":
        model = torch.nn.parallel.DistributedDataParallel(model)
    elif kind == "fsdp":
        mesh = init_device_mesh("cpu", (WORLD,), mesh_dim_names=("dp",))
        fully_shard(model.up, mesh=mesh)
        fully_shard(model, mesh=mesh)
    elif kind == "tp":
        mesh = init_device_mesh("cpu", (WORLD,), mesh_dim_names=("tp",))
        parallelize_module(model, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    elif kind == "2d":
        shape = (2, WORLD // 2) if WORLD > 1 else (1, 1)
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))
        parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        fully_shard(model, mesh=mesh["dp"])
    return model, torch.optim.AdamW(model.parameters(), lr=0.01, foreach=False)


def odd_tensors() -> dict[str, torch.Tensor]:
    """Shardings that models seldom have."""
    mesh = init_device_mesh("cpu", (WORLD,))

    def spread(value: torch.Tensor, placement: Any) -> DTensor:
        return distribute_tensor(value, mesh, [placement])

    return {
        "rows": spread(torch.arange(21.0).reshape(7, 3), Shard(0)),
        "columns": spread(torch.arange(15, dtype=torch.int32).reshape(5, 3), Shard(1)),
        "one": spread(torch.arange(1.0), Shard(0)),
        "replica": spread(torch.arange(4.0), Replicate()),
        "bf16": spread(torch.arange(24).reshape(2, 3, 4).to(torch.bfloat16), Shard(2)),
        "empty": spread(torch.zeros(0, 3), Shard(0)),
    }


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    torch.manual_seed(5)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(4, 8)).square().sum().backward()
        optimizer.step()


def state_of(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    model_state, optimizer_state = get_state_dict(model, optimizer)
    return {
        "model": model_state,
        "optim": optimizer_state,
        "odd": odd_tensors(),
        "step": 3,
        "extra": {"betas": (0.9, 0.95), "lr": 0.01},
    }


def blank(value: Any) -> Any:
    """The same state with other values."""
    if isinstance(value, torch.Tensor):
        return torch.full_like(value, 1)
    if isinstance(value, dict):
        return {key: blank(each) for key, each in value.items()}
    if isinstance(value, list):
        return [blank(each) for each in value]
    return None


def bits(tensor: torch.Tensor) -> tuple[Any, ...]:
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return (
        local.dtype,
        tuple(local.shape),
        local.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes(),
    )


def compare(got: Any, wanted: Any, path: str) -> None:
    if isinstance(wanted, torch.Tensor):
        assert bits(got) == bits(wanted), (path, got, wanted)
    elif isinstance(wanted, dict):
        assert list(got) == list(wanted), (path, list(got), list(wanted))
        for key in wanted:
            compare(got[key], wanted[key], f"{path}.{key}")
    elif isinstance(wanted, (list, tuple)):
        assert type(got) is type(wanted) and len(got) == len(wanted), path
        for i, each in enumerate(wanted):
            compare(got[i], each, f"{path}[{i}]")
    else:
        assert type(got) is type(wanted) and repr(got) == repr(wanted), (path, got, wanted)


def whole(value: Any) -> Any:
    if isinstance(value, DTensor):
        return value.full_tensor().clone()
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: whole(each) for key, each in value.items()}
    if isinstance(value, list):
        return [whole(each) for each in value]
    return value


def save(folder: pathlib.Path, kinds: list[str]) -> None:
    beside = dist.new_group(
        backend="gloo"
    )  # as DCP wants it: its collectives run beside the loop's
    for kind in kinds:
        model, optimizer = build(kind)
        train(model, optimizer, 2)
        state = state_of(model, optimizer)
        dcp.save(state, storage_writer=Writer(f"{kind}-save", step=3))
        dcp.save(state, storage_writer=FileSystemWriter(str(folder / kind)))
        reference = whole(state)
        # What the loop does when all is staged is not in the step.
        stager = Stager(f"{kind}-async")
        saving = dcp.async_save(
            state,
            storage_writer=Writer(f"{kind}-async", step=3),
            async_stager=stager,
            process_group=beside,
        )
        stager.synchronize_staging()
        with torch.no_grad():
            for each in [*model.parameters(), *model.buffers()]:
                (each.to_local() if isinstance(each, DTensor) else each).zero_()
        getattr(saving, "upload_completion", saving).result()
        if RANK == 0:
            torch.save(reference, folder / f"{kind}.pt")


def load(folder: pathlib.Path, kinds: list[str]) -> None:
    for kind in kinds:
        model, optimizer = build(kind)
        state = state_of(model, optimizer)
        files = blank(state)
        dcp.load(files, storage_reader=FileSystemReader(str(folder / kind)))
        for way in WAYS:
            got = blank(state)
            dcp.load(got, storage_reader=Reader(f"{kind}-{way}", adopt=False))
            compare(got, files, f"{kind}-{way}")
            reference = torch.load(folder / f"{kind}.pt")
            compare(whole(got), reference, f"{kind}-{way}")
        set_state_dict(
            model, optimizer, model_state_dict=got["model"], optim_state_dict=got["optim"]
        )
        train(model, optimizer, 1)


def sharded(folder: pathlib.Path, kinds: list[str]) -> None:
    """FSDP1's ShardedTensors: several parts of one tensor on a rank."""
    from torch.distributed._shard.sharded_tensor import Shard as Part
    from torch.distributed._shard.sharded_tensor import init_from_local_shards

    beside = dist.new_group(backend="gloo")
    value = torch.arange(24.0).reshape(8, 3)

    def parts(fill: float | None) -> dict[str, Any]:
        mine = []
        for row in (RANK * 4, RANK * 4 + 2):
            part = value[row : row + 2].clone() if fill is None else torch.full((2, 3), fill)
            mine.append(Part.from_tensor_and_offsets(part, [row, 0], RANK))
        return {"w": init_from_local_shards(mine, [8, 3]), "n": 1}

    for step, way in enumerate(WAYS):
        if way == "save":
            dcp.save(parts(None), storage_writer=Writer("sharded", step=step))
        else:
            dcp.async_save(
                parts(None), storage_writer=Writer("sharded", step=step), process_group=beside
            ).result()
        got = parts(-1.0)
        dcp.load(got, storage_reader=Reader("sharded", step=step, adopt=False))
        for part, row in zip(got["w"].local_shards(), (RANK * 4, RANK * 4 + 2), strict=True):
            assert torch.equal(part.tensor, value[row : row + 2])
        alone = {"w": torch.zeros(8, 3)}
        planner = DefaultLoadPlanner(allow_partial_load=True)
        dcp.load(
            alone,
            storage_reader=Reader("sharded", step=step, adopt=False),
            planner=planner,
            no_dist=True,
        )
        assert torch.equal(alone["w"], value)


def failures_of(call: Callable[[], Any]) -> dict[int, BaseException]:
    try:
        call()
    except CheckpointException as error:
        return {rank: failure for rank, (failure, _) in error.failures.items()}
    raise AssertionError("nothing was raised")


class FailsOnRank1(DefaultSavePlanner):
    def create_local_plan(self):
        if RANK == 1:
            raise RuntimeError("boom")
        return super().create_local_plan()


def fail(folder: pathlib.Path, kinds: list[str]) -> None:
    """What goes wrong on one rank is told to all, and takes no slot with it."""
    beside = dist.new_group(backend="gloo")
    state = {"w": torch.ones(1000), "n": 1}

    def staged(step: int, more: dict[str, Any] | None = None, planner: Any = None) -> None:
        writer = Writer("fail", step=step)
        dcp.async_save(
            {**state, **(more or {})}, storage_writer=writer, process_group=beside, planner=planner
        ).result()

    step = 0
    kept = []
    for _ in range(5):  # more than there are slots
        step += 1
        failures = failures_of(lambda: staged(step, planner=FailsOnRank1()))
        assert list(failures) == [1] and str(failures[1]) == "boom", failures
        kept.append(failures)
        step += 1
        # A rank that cannot even stage: the others do not wait for it.
        failures = failures_of(lambda: staged(step, more={"odd": object()} if RANK == 1 else {}))
        assert list(failures) == [1] and isinstance(failures[1], holdfast.RefusedError), failures
        kept.append(failures)
        step += 1
        failures = failures_of(
            lambda: dcp.save(
                state, storage_writer=Writer("fail", step=step), planner=FailsOnRank1()
            )
        )
        assert list(failures) == [1], failures
    step += 1
    failures = failures_of(lambda: dcp.save(state, storage_writer=Writer("fail", step=step + RANK)))
    # Told where the ranks compare their steps, or before by ckptd, when rank 1 has sealed its later
    # step while rank 0 is still writing the earlier.
    told = {
        holdfast.InvalidArgumentError: f"rank 1 step {step + 1}",
        holdfast.AbandonedError: f"rank 1 went on to step {step + 1} without it",
    }
    assert told[type(failures[0])] in str(failures[0]), failures
    step += 2
    state["n"] = step
    staged(step)
    got = {"w": torch.zeros(1000), "n": 0}
    dcp.load(got, storage_reader=Reader("fail", adopt=False))
    assert got["n"] == step and got["w"].eq(1).all()


def begin(folder: pathlib.Path, kinds: list[str]) -> None:
    """A run that saves two steps, and whose rank 1 dies in the middle of the third."""
    assert Reader("run").find() is None
    mesh = init_device_mesh("cpu", (WORLD,))

    class Dies(DefaultSavePlanner):
        def create_local_plan(self):
            if RANK == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            return super().create_local_plan()

    for step in (1, 2, 3):
        state = {
            "w": distribute_tensor(torch.full((6, 2), float(step)), mesh, [Shard(0)]),
            "n": step,
        }
        planner = Dies() if step == 3 else None
        future = dcp.async_save(state, storage_writer=Writer("run", step=step), planner=planner)
        if step < 3:
            future.result()
            continue
        try:
            future.result()
        except Exception:
            pass
        else:
            raise AssertionError("the other rank is dead and the save went well")
    for thread in threading.enumerate():
        if thread.name == "holdfast-staged":
            thread.join(60)
    assert not _held._live
    os._exit(0)  # the process group is broken


def go_on(folder: pathlib.Path, kinds: list[str]) -> None:
    """Loads kinds[0] ("newest", or a step), which must be step kinds[1]; saves step kinds[2]."""
    what, expected, then = kinds[0], int(kinds[1]), int(kinds[2])
    mesh = init_device_mesh("cpu", (WORLD,))
    state = {"w": distribute_tensor(torch.zeros(6, 2), mesh, [Shard(0)]), "n": 0}
    reader = Reader("run", step=None if what == "newest" else int(what))
    dcp.load(state, storage_reader=reader)
    assert reader.step == expected and state["n"] == expected, (reader.step, state)
    assert state["w"].to_local().eq(float(expected)).all()
    state = {"w": distribute_tensor(torch.full((6, 2), float(then)), mesh, [Shard(0)]), "n": then}
    dcp.async_save(state, storage_writer=Writer("run", step=then)).result()


def run(
    rank: int, world: int, command: str, folder: str, store: str, kinds: list[str], log: str
) -> None:
    """In a process of its own, as torchrun would start it."""
    global RANK, WORLD
    RANK, WORLD = rank, world
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank))
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(output, 1)
    os.dup2(output, 2)
    torch.set_num_threads(1)
    _dcp_logger.setLevel(logging.ERROR)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    commands: dict[str, Callable[[pathlib.Path, list[str]], None]] = {
        "save": save,
        "load": load,
        "sharded": sharded,
        "fail": fail,
        "begin": begin,
        "go_on": go_on,
    }
    commands[command](pathlib.Path(folder), kinds)
    dist.barrier()
    dist.destroy_process_group()
