"""The optimizers of the table of docs/python.md (supported.py)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import torch
from optimizers_test import AcceleratedOptimizer, Container, Factored
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor

aten = torch.ops.aten

Make = Callable[[nn.Module], Any]


@dataclasses.dataclass(frozen=True)
class Row:
    """An optimizer, and what it needs."""

    name: str
    make: Make  # the optimizer, or a list of them, of a model or of what has its parameters
    only: tuple[str, ...] = ()  # the columns that it is made for; none: all
    fast: bool = False  # tried by the fast tests, too


def of_torch(name: str, **options: Any) -> Make:
    return lambda model: getattr(torch.optim, name)(model.parameters(), lr=0.01, **options)


def muon(model: nn.Module) -> list[torch.optim.Optimizer]:
    """As it is meant: it has the matrices, AdamW the rest."""
    matrices = [each for each in model.parameters() if each.ndim == 2]
    others = [each for each in model.parameters() if each.ndim != 2]
    if not matrices:  # they are flattened
        return [torch.optim.AdamW(others, lr=0.01)]
    return [torch.optim.Muon(matrices, lr=0.01), torch.optim.AdamW(others, lr=0.01)]


def two_inside(model: nn.Module) -> torch.optim.Optimizer:
    every = list(model.parameters())
    return Container(torch.optim.AdamW(every[:2], lr=0.01), torch.optim.SGD(every[2:], lr=0.01))


class Float8Moments(torch.optim.Optimizer):
    """Its moments are float8_e4m3fn."""

    def __init__(self, parameters: Iterable[torch.Tensor]) -> None:
        super().__init__(list(parameters), {"lr": 0.01})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            moment = self.state[p].get("moment", torch.zeros_like(p)).to(torch.float32) * 0.9
            moment += p.grad
            self.state[p]["moment"] = moment.to(torch.float8_e4m3fn)
            p.sub_(moment.to(p.dtype), alpha=self.param_groups[0]["lr"])


class Rows(torch.Tensor):
    """As quantized optimizers have their moments: a subclass, of a code for each element and a scale for each row."""

    @staticmethod
    def __new__(cls, codes: torch.Tensor, scale: torch.Tensor) -> Rows:
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32)  # type: ignore[attr-defined, no-any-return]

    def __init__(self, codes: torch.Tensor, scale: torch.Tensor) -> None:
        self.codes, self.scale = codes, scale

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["codes", "scale"], None

    @classmethod
    def __tensor_unflatten__(cls, tensors: Any, context: Any, size: Any, stride: Any) -> Rows:
        return cls(tensors["codes"], tensors["scale"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        own = args[0]
        if func is aten.slice.Tensor and args[1] == 0:
            return cls(own.codes[args[2] : args[3]], own.scale[args[2] : args[3]])
        if func in (aten.detach.default, aten.alias.default, aten.view.default):
            return cls(own.codes, own.scale)
        raise NotImplementedError(f"{func}")

    @classmethod
    def of(cls, value: torch.Tensor) -> Rows:
        scale = value.reshape(value.shape[0], -1).abs().amax(1).clamp(min=1e-12) / 127
        return cls((value.T / scale).T.round().to(torch.int8).contiguous(), scale)

    def values(self) -> torch.Tensor:
        return (self.codes.T * self.scale).T


class SubclassMoments(torch.optim.Optimizer):
    """Its moments are a tensor subclass, under DTensors their local part."""

    def __init__(self, parameters: Iterable[torch.Tensor]) -> None:
        super().__init__(list(parameters), {"lr": 0.01})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            local = p.to_local() if isinstance(p, DTensor) else p
            grad = p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad
            before = self.state[p].get("moment")
            before = getattr(before, "_local_tensor", before)
            moment = grad.float() if before is None else before.values() * 0.9 + grad
            local.sub_(moment.to(p.dtype), alpha=self.param_groups[0]["lr"])
            made: Any = Rows.of(moment)
            if isinstance(p, DTensor):
                made = DTensor.from_local(
                    made, p.device_mesh, p.placements, run_check=False, shape=p.shape, stride=p.stride()
                )  # fmt: skip
            self.state[p]["moment"] = made


ROWS = [
    Row("`SGD`, momentum", of_torch("SGD", momentum=0.9)),
    Row("`Adam`, amsgrad", of_torch("Adam", amsgrad=True, foreach=False)),
    Row("`AdamW`", of_torch("AdamW", foreach=False), fast=True),
    Row("`AdamW`, foreach", of_torch("AdamW", foreach=True)),
    Row("`AdamW`, fused", of_torch("AdamW", fused=True)),
    Row(
        "`AdamW`, lr a tensor",
        lambda model: torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.01), foreach=False),
    ),
    Row("`NAdam`", of_torch("NAdam", foreach=False)),
    Row("`RAdam`", of_torch("RAdam", foreach=False)),
    Row("`Adamax`", of_torch("Adamax", foreach=False)),
    Row("`Adagrad`", of_torch("Adagrad", foreach=False)),
    Row("`Adadelta`", of_torch("Adadelta", foreach=False)),
    Row("`RMSprop`, centered", of_torch("RMSprop", centered=True, momentum=0.9, foreach=False)),
    Row("`Rprop`", of_torch("Rprop", foreach=False)),
    Row("`ASGD`", of_torch("ASGD", foreach=False)),
    Row("`Adafactor`", of_torch("Adafactor", foreach=False)),
    Row("`LBFGS`", of_torch("LBFGS", max_iter=2, history_size=3), fast=True),
    Row("`Muon` and `AdamW`, in a list", muon, fast=True),
    Row("factored and layer-wise state, lists (as SOAP)", lambda model: Factored(model.parameters()), fast=True),
    Row("moments in `float8_e4m3fn`", lambda model: Float8Moments(model.parameters())),
    Row("moments in a tensor subclass", lambda model: SubclassMoments(model.parameters()), fast=True),
    Row(
        "accelerate's `AcceleratedOptimizer`",
        lambda model: AcceleratedOptimizer(of_torch("AdamW", foreach=False)(model)),
    ),
    Row("a container (as torchtitan's)", two_inside),
    Row(
        "`ZeroRedundancyOptimizer`",
        lambda model: ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.01),
        only=("DDP",),
        fast=True,
    ),
]  # fmt: skip
