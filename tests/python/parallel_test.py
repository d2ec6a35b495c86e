"""Checkpointer over torch's ways to train on several ranks: each rank gets back its own bits, and the files say where in the
global tensors they lie. Uneven shards; gloo on the CPU."""

from __future__ import annotations

import io
import json
import pathlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from ranks import run_ranks
from safetensors import safe_open
from torch import nn
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

import holdfast
from daemons import DEADLINE_S, Daemon

# Shards are uneven, and some ranks have nothing of the smallest. (Tensor parallelism itself wants HIDDEN to be even.)
IN, HIDDEN, OUT = 5, 6, 1


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(IN, HIDDEN), nn.Linear(HIDDEN, IN)
        self.norm = nn.LayerNorm(IN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x + self.down(torch.tanh(self.up(x))))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(IN, OUT)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def plain(model: Model) -> nn.Module:
    return model


def ddp(model: Model) -> nn.Module:
    return DistributedDataParallel(model)


def fsdp2(model: Model) -> nn.Module:
    for block in model.blocks:
        fully_shard(block)
    return fully_shard(model)


TENSOR_PARALLEL = {"up": ColwiseParallel(), "down": RowwiseParallel()}


def tensor_parallel(model: Model) -> nn.Module:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks:
        parallelize_module(block, mesh, TENSOR_PARALLEL)
    return model


def fsdp2_over_tp(model: Model) -> nn.Module:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    for block in model.blocks:
        parallelize_module(block, mesh["tp"], TENSOR_PARALLEL)
        fully_shard(block, mesh=mesh["dp"])
    return fully_shard(model, mesh=mesh["dp"])


def made(wrap: Callable[[Model], nn.Module], seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = wrap(Model())
    return model, torch.optim.AdamW(model.parameters(), lr=0.01, foreach=False)


def train(model: nn.Module, optim: torch.optim.Optimizer, steps: int, alike: bool) -> None:
    """`alike`: all ranks see the same data, as those of one tensor-parallel group must."""
    for step in range(steps):
        torch.manual_seed(step if alike else 100 * dist.get_rank() + step)
        optim.zero_grad()
        model(torch.randn(4, IN)).square().mean().backward()
        optim.step()


def local(value: Any) -> Any:
    """DTensors as this rank's part of them."""
    if isinstance(value, DTensor):
        return value.to_local().detach()
    if isinstance(value, dict):
        return {key: local(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [local(each) for each in value]
    return value.detach() if isinstance(value, torch.Tensor) else value


def pickled(model: nn.Module, optim: torch.optim.Optimizer) -> bytes:
    """What torch.save makes of this rank's state."""
    buffer = io.BytesIO()
    torch.save({"model": local(model.state_dict()), "optim": local(optim.state_dict())}, buffer)
    return buffer.getvalue()


def assert_same(one: Any, other: Any, path: str = "") -> None:
    """Bit for bit."""
    assert type(one) is type(other), path
    if isinstance(one, torch.Tensor):
        assert one.dtype == other.dtype and one.shape == other.shape, path
        one, other = (each.contiguous().view(-1).view(torch.uint8) for each in (one, other))
        assert torch.equal(one, other), f"{path}: the bits differ"
    elif isinstance(one, dict):
        assert list(one) == list(other), path
        for key in one:
            assert_same(one[key], other[key], f"{path}.{key}")
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other), path
        for i, (left, right) in enumerate(zip(one, other, strict=True)):
            assert_same(left, right, f"{path}.{i}")
    else:
        assert one == other, path


def parts(model: nn.Module, optim: torch.optim.Optimizer) -> dict[str, Any]:
    """What this rank's file must say: name, global shape, offset, local shape, of every tensor of which it has a part."""
    unwrapped = model.module if isinstance(model, DistributedDataParallel) else model
    names = {id(parameter): f"model.{name}" for name, parameter in unwrapped.named_parameters()}
    found: dict[str, Any] = {}

    def add(name: str, tensor: torch.Tensor) -> None:
        offset: tuple[int, ...] = (0,) * tensor.ndim
        shape = tuple(tensor.shape)
        if isinstance(tensor, DTensor):
            shape, offset = compute_local_shape_and_global_offset(
                tensor.shape, tensor.device_mesh, tensor.placements
            )
        if 0 not in shape:
            found[name] = (tuple(tensor.shape), tuple(offset), tuple(shape))

    for name, parameter in unwrapped.named_parameters():
        add(f"model.{name}", parameter)
    for parameter, state in optim.state.items():
        for key, value in state.items():
            add(f"optim.state.{names[id(parameter)]}.{key}", value)
    return found


def whole(model: nn.Module) -> dict[str, torch.Tensor]:
    """The parameters put together, on every rank."""
    unwrapped = model.module if isinstance(model, DistributedDataParallel) else model
    return {
        f"model.{name}": value.full_tensor().detach().clone()
        if isinstance(value, DTensor)
        else value.detach().clone()
        for name, value in unwrapped.named_parameters()
    }


WAYS = [
    pytest.param(plain, 1, id="plain"),
    pytest.param(ddp, 2, id="ddp"),
    pytest.param(fsdp2, 2, id="fsdp2-2"),
    pytest.param(fsdp2, 3, id="fsdp2-3"),
    pytest.param(tensor_parallel, 2, id="tp"),
    pytest.param(fsdp2_over_tp, 4, id="fsdp2-over-tp"),
]


@pytest.mark.parametrize("wrap, ranks", WAYS)
def test_each_rank_gets_its_bits_back(
    make_daemon: Callable[..., Daemon],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: pathlib.Path,
    wrap: Callable[[Model], nn.Module],
    ranks: int,
) -> None:
    daemon = make_daemon("remote: {dir: ROOT/remote}\n", ["remote"])
    monkeypatch.setenv("HOLDFAST_SOCKET", str(daemon.socket))
    alike = wrap in (tensor_parallel, fsdp2_over_tp)

    def work(rank: int) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        policy = holdfast.Policy(remote_every_steps=1)
        model, optim = made(wrap, seed=0)
        train(model, optim, 2, alike)
        with holdfast.Checkpointer("job", policy=policy) as ckpt:
            expected = pickled(model, optim)
            assert ckpt.restore({"model": model}) == 0
            state = {"model": model, "optim": optim, "extra": {"rank": rank}}
            seven = ckpt.save(7, state)
            placed, full = parts(model, optim), whole(model)
            train(model, optim, 1, alike)  # beside the copy
            changed = pickled(model, optim)
            ckpt.save(8, state, wait="remote", timeout=DEADLINE_S)
            seven.wait("remote", DEADLINE_S)  # which is opened there below
        dist.barrier()  # all have left before one comes back
        with holdfast.Checkpointer("job", policy=policy) as ckpt:
            # Into an optimizer that has its state, and into one that has none yet.
            for step, saved in ((8, changed), (7, expected)):
                model, optim = made(wrap, seed=5)
                if step == 8:
                    train(model, optim, 1, alike)
                extra: dict[str, Any] = {}
                assert (
                    ckpt.restore({"model": model, "optim": optim, "extra": extra}, step=step)
                    == step + 1
                )
                got = torch.load(io.BytesIO(pickled(model, optim)), weights_only=True)
                assert_same(torch.load(io.BytesIO(saved), weights_only=True), got)
                assert extra == {"rank": rank}
            # And the run goes on as it would have.
            train(model, optim, 1, alike)
            train(model, optim, 1, alike)
        return placed, full

    found = run_ranks(ranks, work)
    (step,) = (daemon.root / "remote" / "job").glob("7-a*")
    check_files(step, [placed for placed, _ in found])
    check_reader(step, found[0][1])


def check_files(step: pathlib.Path, expected: list[dict[str, Any]]) -> None:
    """Of the tensors that a rank had a part of, each is in its safetensors file with its place; what replicas hold alike, in one of
    theirs."""
    found: dict[tuple[str, Any], list[int]] = {}
    for rank in range(len(expected)):
        path = step / f"shard-{rank:05d}-of-{len(expected):05d}.safetensors"
        with safe_open(path, "pt") as file:
            places = json.loads((file.metadata() or {}).get("DCP_SHARDING_INFO", "{}"))
            for name in file.keys():
                local_shape = tuple(file.get_slice(name).get_shape())
                said = places.get(name, {"saved_offsets": [0] * len(local_shape)})
                place = (tuple(said["saved_offsets"]), local_shape)
                found.setdefault((name, place), []).append(rank)
                shape = expected[rank].get(name, (local_shape,))[0]
                assert shape == local_shape or name in places, (rank, name)
    for rank, placed in enumerate(expected):
        for name, (_, offset, local_shape) in placed.items():
            holders = found.get((name, (offset, local_shape)), [])
            assert rank in holders or len(holders) == 1, (rank, name, holders)


def check_reader(step: pathlib.Path, full: dict[str, torch.Tensor]) -> None:
    """PyTorch's own reader of such directories puts the global tensors together."""
    state = {name: torch.zeros_like(tensor) for name, tensor in full.items()}
    dcp.load(state, storage_reader=HuggingFaceStorageReader(str(step)), no_dist=True)
    for name, tensor in full.items():
        assert_same(tensor, state[name], name)
