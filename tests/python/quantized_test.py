"""torchao's optimizers and weights: the package itself, fetched for the test.

tests/python/run build/test quantized_test.py
"""

from __future__ import annotations

import pathlib
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from ranks import run_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard

import holdfast
from daemons import Daemon
from holdfast import _core

PACKAGES = ("torchao==0.18.0",)
INSTALL_DEADLINE_S = 600
WIDTH = 128  # so that no moment is too small to be quantized

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module", autouse=True)
def packages(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    place: pathlib.Path = tmp_path_factory.mktemp("packages")
    subprocess.run(
        [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", place, *PACKAGES],
        check=True,
        timeout=INSTALL_DEADLINE_S,
    )
    sys.path.append(str(place))
    torch.compiler.set_stance("force_eager")  # torchao compiles each step otherwise, for minutes
    import torchao.optim  # noqa: F401

    yield
    sys.path.remove(str(place))


def train(model: nn.Module, optim: torch.optim.Optimizer, first: int, steps: int) -> list[float]:
    losses = []
    for step in range(first, first + steps):
        torch.manual_seed(step)
        loss = model(torch.randn(8, WIDTH)).square().mean()
        optim.zero_grad()
        loss.backward()
        optim.step()
        losses.append(loss.item())
    return losses


def made(optimizer: str, seed: int, shard: bool) -> tuple[nn.Module, Any]:
    import torchao.optim

    torch.manual_seed(seed)
    model: nn.Module = nn.Sequential(
        nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 2 * WIDTH, bias=False)
    )
    if shard:
        fully_shard(model, mesh=init_device_mesh("cpu", (torch.distributed.get_world_size(),)))
    return model, getattr(torchao.optim, optimizer)(model.parameters(), lr=0.01)


def moments(model: nn.Module, optim: Any) -> list[list[torch.Tensor]]:
    """Of the first matrix: the bytes of what each moment is made of, here."""
    found = []
    for key in ("exp_avg", "exp_avg_sq"):
        value = optim.state[model[0].weight][key]
        local = getattr(value, "_local_tensor", value)
        names, _ = local.__tensor_flatten__()
        found.append([getattr(local, name).clone().view(torch.uint8) for name in names])
    return found


OPTIMIZERS = ["AdamW8bit", "AdamW4bit", "AdamWFp8"]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_fresh_process_goes_on_to_the_same_losses(daemon: Daemon, optimizer: str) -> None:
    def work(rank: int) -> None:
        model, optim = made(optimizer, 1, shard=False)
        train(model, optim, 0, 3)
        with holdfast.Checkpointer("job") as ckpt:
            ckpt.save(2, {"model": model, "optim": optim}, wait="committed")
            expected = train(model, optim, 3, 3)
            other = made(optimizer, 2, shard=False)
            assert ckpt.restore({"model": other[0], "optim": other[1]}) == 3
            assert train(*other, 3, 3) == expected

    run_ranks(1, work, group=False)
    assert [name for name, _, _ in _core.attach("job").objects] == ["holdfast.state"]


@pytest.mark.parametrize("saved_by", [1, 2])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_fsdp2_on_the_same_and_on_other_numbers_of_ranks(
    daemon: Daemon, optimizer: str, saved_by: int
) -> None:
    def save(rank: int) -> Any:
        model, optim = made(optimizer, 1, shard=True)
        train(model, optim, 0, 3)
        with holdfast.Checkpointer("job") as ckpt:
            ckpt.save(2, {"model": model, "optim": optim}, wait="committed")
        return moments(model, optim), train(model, optim, 3, 3)

    def restore(rank: int) -> Any:
        model, optim = made(optimizer, 2, shard=True)
        with holdfast.Checkpointer("job") as ckpt:
            assert ckpt.restore({"model": model, "optim": optim}) == 3
        return moments(model, optim), train(model, optim, 3, 3)

    saved = run_ranks(saved_by, save)
    again = run_ranks(saved_by, restore)
    assert [losses for _, losses in again] == [losses for _, losses in saved]
    for ranks in (2, 4):
        found = run_ranks(ranks, restore)
        for moment in range(2):
            for inner in range(2):  # codes and scales; a table, if there is one, is everybody's
                one = torch.cat([of_rank[moment][inner] for of_rank, _ in found])
                other = torch.cat([of_rank[moment][inner] for of_rank, _ in saved])
                assert torch.equal(one, other)


def int8(values: torch.Tensor) -> Any:
    from torchao.prototype.quantized_training.int8 import Int8QuantizedTrainingLinearWeight

    return Int8QuantizedTrainingLinearWeight.from_float(values)


def mxfp8(values: torch.Tensor) -> Any:
    from torchao.prototype.mx_formats.mx_tensor import MXTensor

    return MXTensor.to_mx(values.bfloat16(), torch.float8_e4m3fn, 32)


def nvfp4(values: torch.Tensor) -> Any:
    from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor

    return NVFP4Tensor.to_nvfp4(values.bfloat16())


def float8(values: torch.Tensor) -> Any:
    from torchao.quantization import Float8Tensor

    return Float8Tensor.from_hp(values.bfloat16())


def float8_training(values: torch.Tensor) -> Any:
    from torchao.float8.float8_training_tensor import LinearMMConfig
    from torchao.float8.fsdp_utils import WeightWithDynamicFloat8CastTensor

    return WeightWithDynamicFloat8CastTensor(values, LinearMMConfig(), torch.float8_e4m3fn)


def nf4(values: torch.Tensor) -> Any:
    from torchao.quantization.quantize_.workflows.nf4.nf4_tensor import to_nf4

    return to_nf4(values.repeat(4, 4))


def inner(value: Any) -> list[torch.Tensor]:
    local = getattr(value, "_local_tensor", value)
    return [getattr(local, name) for name in local.__tensor_flatten__()[0]]


def same(one: Any, other: Any) -> bool:
    return all(
        torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
        if a.ndim
        else torch.equal(a, b)
        for a, b in zip(inner(one), inner(other), strict=True)
    )


WEIGHTS = [int8, mxfp8, nvfp4, float8, float8_training]


@pytest.mark.parametrize("make", [*WEIGHTS, nf4])
def test_weights(daemon: Daemon, make: Callable[[torch.Tensor], Any]) -> None:
    torch.manual_seed(3)
    values = torch.randn(WIDTH, WIDTH)

    class Model(nn.Module):
        def __init__(self, weight: Any) -> None:
            super().__init__()
            self.weight = nn.Parameter(weight, requires_grad=False)

    with holdfast.Checkpointer("job", rank=0, world_size=1) as ckpt:
        ckpt.save(0, {"model": Model(make(values))}, wait="committed")
        target = Model(make(values * 2 + 1))
        assert not same(target.weight, make(values))
        assert ckpt.restore({"model": target}) == 1
    assert same(target.weight, make(values))


@pytest.mark.parametrize("make", WEIGHTS)
def test_sharded_weights_on_other_numbers_of_ranks(
    daemon: Daemon, make: Callable[[torch.Tensor], Any]
) -> None:
    torch.manual_seed(3)
    values = torch.randn(WIDTH, WIDTH)

    def sharded(rank: int, ranks: int, of: torch.Tensor) -> Any:
        return DTensor.from_local(
            make(of.chunk(ranks)[rank].contiguous()),
            init_device_mesh("cpu", (ranks,)),
            [Shard(0)],
            run_check=False,
            shape=of.shape,
            stride=of.stride(),
        )

    def work(rank: int, ranks: int, save: bool) -> None:
        value = sharded(rank, ranks, values if save else values * 2 + 1)
        with holdfast.Checkpointer("job") as ckpt:
            if save:
                ckpt.save(0, {"w": value}, wait="committed")
            else:
                assert ckpt.restore({"w": value}) == 1
        assert same(value, sharded(rank, ranks, values))

    run_ranks(2, lambda rank: work(rank, 2, True))
    for ranks in (2, 4):
        run_ranks(ranks, lambda rank, r=ranks: work(rank, r, False))
