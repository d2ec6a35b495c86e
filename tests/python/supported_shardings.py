"""The ways to shard of the table of docs/python.md (supported.py)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from parallel_test import assert_same
from supported_optimizers import Row
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import holdfast
from holdfast import layouts

# Shards of FSDP2 are uneven; no rank has a single row, of which a tensor subclass would be refused.
IN, HIDDEN, OUT = 9, 12, 8


class Net(nn.Module):
    """Tensor parallelism makes a DTensor of each of its parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(IN, HIDDEN), nn.Linear(HIDDEN, IN)
        self.head = nn.Linear(IN, OUT)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.down(torch.tanh(self.up(x)))))


def inside(optim: Any) -> list[Any]:
    """The optimizers that have the state."""
    if isinstance(optim, list):
        return [one for each in optim for one in inside(each)]
    if hasattr(optim, "optimizer"):
        return inside(optim.optimizer)
    return inside(list(optim.optimizers)) if hasattr(optim, "optimizers") else [optim]


# The shape of a whole, and where this rank's part of it begins.
Box = tuple[tuple[int, ...], tuple[int, ...]]


@dataclasses.dataclass(frozen=True)
class Piece:
    """A plain tensor, and of what it is a part."""

    tensor: torch.Tensor
    box: Box


def pieces(value: Any, box: Box | None = None) -> Any:
    """What this rank has of a value, to be sent to the others: DTensors, and tensors that are such a box, as pieces; subclasses as
    what they are made of; float8 as other floats."""
    if isinstance(value, dict):
        return {key: pieces(each, box) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [pieces(each, box) for each in value]
    if isinstance(value, DTensor):
        _, offset = compute_local_shape_and_global_offset(
            value.shape, value.device_mesh, value.placements
        )
        return pieces(value.to_local(), (tuple(value.shape), tuple(offset)))
    if hasattr(value, "__tensor_flatten__"):
        return {each: pieces(getattr(value, each), box) for each in value.__tensor_flatten__()[0]}
    if not isinstance(value, torch.Tensor):
        return value
    is_float8 = value.dtype.is_floating_point and value.dtype.itemsize == 1
    sent = value.detach().to(torch.float32) if is_float8 else value.detach().clone()
    return [str(value.dtype), sent if box is None else Piece(sent, box)]


def together(every: list[Any]) -> Any:
    """All ranks' pieces of one value as the whole; what is no piece once, where all have the same."""
    first = every[0]
    if isinstance(first, Piece):
        shape, _ = first.box
        # (Tensors of fewer dimensions, as the scales of rows, have the first of them.)
        made = torch.zeros(shape[: first.tensor.ndim], dtype=first.tensor.dtype)
        for each in every:
            _, offset = each.box
            ends = zip(offset, each.tensor.shape, strict=False)
            made[tuple(slice(begin, begin + n) for begin, n in ends)] = each.tensor
        return made
    if isinstance(first, dict):
        return {key: together([each[key] for each in every]) for key in first}
    if isinstance(first, list):
        return [together(list(each)) for each in zip(*every, strict=True)]
    try:
        for each in every:
            assert_same(first, each)
    except AssertionError:
        return every
    return first


class Run:
    """One start of a training, on this rank; `state` is what is saved and restored."""

    def __init__(self, row: Row, model: nn.Module, optim: Any, dtype: torch.dtype) -> None:
        self.row, self.model, self.optim, self.dtype = row, model, optim, dtype
        self.state = {"model": model, "optim": optim}

    def train(self, first: int, steps: int) -> None:
        for step in range(first, first + steps):
            torch.manual_seed(step)
            x = torch.randn(4, IN).to(self.dtype)

            def closure(x: torch.Tensor = x) -> torch.Tensor:
                for each in inside(self.optim):
                    each.zero_grad()
                loss = self.model(x).square().mean()
                loss.backward()
                return loss

            self.step(closure)

    def step(self, closure: Callable[[], torch.Tensor]) -> None:
        if isinstance(self.optim, torch.optim.LBFGS):
            self.optim.step(closure)  # type: ignore[no-untyped-call]
            return
        closure()
        for each in self.optim if isinstance(self.optim, list) else [self.optim]:
            each.step()

    def named(self) -> dict[str, nn.Parameter]:
        return dict(getattr(self.model, "module", self.model).named_parameters())

    def box(self, name: str) -> Box | None:
        """Of a parameter that is a part and no DTensor."""
        return None

    def whole(self) -> Any:
        """All of it, the same on all ranks, and on all numbers of them."""
        named = self.named()

        def of(name: str, value: Any) -> Any:
            alike = isinstance(value, torch.Tensor) and value.shape == named[name].shape
            return pieces(value, self.box(name) if alike else None)

        mine = {
            "model": {name: of(name, each) for name, each in named.items()},
            "optim": [
                {
                    "state": {
                        name: {key: of(name, value) for key, value in one.state[each].items()}
                        for name, each in named.items()
                        if each in one.state
                    },
                    "groups": [
                        {key: pieces(each) for key, each in group.items() if key != "params"}
                        for group in one.param_groups
                    ],
                }
                for one in inside(self.optim)
            ],
        }
        every: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(every, mine)
        return together(every)


Wrap = Callable[[nn.Module], nn.Module]
Start = Callable[[Row, torch.dtype, int], Run]
Leg = tuple[Start, int]  # and the number of ranks


def one_process(model: nn.Module) -> nn.Module:
    return model


def ddp(model: nn.Module) -> nn.Module:
    return DistributedDataParallel(model)


def fsdp2(model: nn.Module) -> nn.Module:
    return fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))


TENSOR_PARALLEL = {
    "up": ColwiseParallel(),
    "down": RowwiseParallel(),
    "head": ColwiseParallel(output_layouts=Replicate()),
}


def tensor_parallel(model: nn.Module) -> nn.Module:
    return parallelize_module(
        model, init_device_mesh("cpu", (dist.get_world_size(),)), TENSOR_PARALLEL
    )


def hsdp(model: nn.Module) -> nn.Module:
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("all", "some"))
    return fully_shard(model, mesh=mesh)


def fsdp2_over_tp(model: nn.Module) -> nn.Module:
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("dp", "tp"))
    parallelize_module(model, mesh["tp"], TENSOR_PARALLEL)
    return fully_shard(model, mesh=mesh["dp"])


def fsdp1(model: nn.Module) -> nn.Module:
    return FullyShardedDataParallel(model, use_orig_params=True, device_id=torch.device("cpu"))


class Untrained(Run):
    """Of what is refused whatever the optimizer does."""

    def train(self, first: int, steps: int) -> None:
        pass


def module(wrap: Wrap, kind: type[Run] = Run) -> Start:
    def start(row: Row, dtype: torch.dtype, seed: int) -> Run:
        torch.manual_seed(seed)
        model = wrap(Net().to(dtype))
        return kind(row, model, row.make(model), dtype)

    start.__name__ = wrap.__name__
    return start


class Pieces(nn.Module):
    """What a framework has on a rank that splits tensors without DTensors: boxes of them."""

    def __init__(self, pieces: dict[str, tuple[torch.Tensor, Box]]) -> None:
        super().__init__()
        self.boxes = {name: box for name, (_, box) in pieces.items()}
        for name, (tensor, _) in pieces.items():
            self.register_parameter(name.replace(".", "_"), nn.Parameter(tensor.clone()))


class PiecesRun(Run):
    """Gradients are made up, the same for each element on any number of ranks."""

    model: Pieces

    def named(self) -> dict[str, nn.Parameter]:
        return dict(zip(self.model.boxes, self.model.parameters(), strict=True))

    def box(self, name: str) -> Box:
        return self.model.boxes[name]

    def train(self, first: int, steps: int) -> None:
        for step in range(first, first + steps):

            def closure(step: int = step) -> torch.Tensor:
                for name, parameter in self.named().items():
                    shape, offset = self.box(name)
                    torch.manual_seed(step)
                    here = [
                        slice(begin, begin + n)
                        for begin, n in zip(offset, parameter.shape, strict=True)
                    ]
                    parameter.grad = torch.randn(shape)[tuple(here)].to(self.dtype).contiguous()
                return torch.zeros(())

            self.step(closure)


def parts(row: Row, dtype: torch.dtype, seed: int) -> Run:
    """Megatron's tensor parallelism."""
    torch.manual_seed(seed)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    rule = layouts.tensor_parallel(rank, ranks, column=["up.*", "head.*"], row=["down.weight"])
    pieces: dict[str, tuple[torch.Tensor, Box]] = {}
    for name, tensor in Net().to(dtype).state_dict().items():
        split, offset, mine = rule(name, tensor), [0] * tensor.ndim, tensor
        if split is not None:
            mine = tensor.chunk(ranks, split.dim)[rank]
            offset[split.dim] = rank * mine.shape[split.dim]
        pieces[name] = mine, (tuple(tensor.shape), tuple(offset))
    model = Pieces(pieces)
    optim = row.make(model)
    run = PiecesRun(row, model, optim, dtype)
    names = {name.replace(".", "_"): name for name in pieces}
    run.state = {"model": layouts.parts(model, rule, name=names.__getitem__), "optim": optim}
    return run


def ranges(row: Row, dtype: torch.dtype, seed: int) -> Run:
    """ZeRO: the optimizer has a range of all parameters, one behind the other."""
    torch.manual_seed(seed)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    flat = torch.cat([each.detach().flatten() for each in Net().to(dtype).parameters()])
    begin, end = (len(flat) * each // ranks for each in (rank, rank + 1))
    model = Pieces({"flat": (flat[begin:end], (tuple(flat.shape), (begin,)))})
    optim = row.make(model)
    run = PiecesRun(row, model, optim, dtype)
    run.state = {"master": holdfast.Range(model.flat, tuple(flat.shape), begin), "optim": optim}
    return run


@dataclasses.dataclass(frozen=True)
class Column:
    """Ways to shard and numbers of ranks: what each of `legs` saves all of its others restore."""

    name: str
    legs: Sequence[tuple[Leg, Sequence[Leg]]]


def same(start: Start, ranks: int, *others: Leg) -> Sequence[tuple[Leg, Sequence[Leg]]]:
    return [((start, ranks), [(start, ranks), *others])]


_alone, _fsdp2, _tp = module(one_process), module(fsdp2), module(tensor_parallel)
COLUMNS = [
    Column("one process", same(_alone, 1)),
    Column("DDP", same(module(ddp), 2, (_alone, 1))),
    Column("FSDP2", same(_fsdp2, 2)),
    Column(
        "FSDP2 N→M",
        [((_fsdp2, 2), [(_fsdp2, 3), (_fsdp2, 1)]), ((_fsdp2, 1), [(_fsdp2, 2)])],
    ),
    Column("TP", same(_tp, 2, (_alone, 1))),
    Column("2-D mesh", [((module(fsdp2_over_tp), 4), [(module(hsdp), 4), (_fsdp2, 2)])]),
    Column("FSDP1", same(module(fsdp1, Untrained), 2)),
    Column("parts", same(parts, 2)),
    Column("parts N→M", [((parts, 2), [(parts, 1)]), ((parts, 1), [(parts, 2)])]),
    Column("ranges", same(ranges, 2)),
    Column("ranges N→M", [((ranges, 2), [(ranges, 3), (ranges, 1)]), ((ranges, 1), [(ranges, 2)])]),
]
