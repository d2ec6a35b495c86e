"""The optimizers of accelerate, torchtitan and pytorch-optimizer themselves, fetched for the test: what they hand over is saved beside
the loop, comes back in a fresh process, and trains on as if nothing had been."""

from __future__ import annotations

import pathlib
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from optimizers_test import copied_first, seen
from parallel_test import IN, assert_same, fsdp2, made
from ranks import run_ranks
from torch import nn

import holdfast
from daemons import Daemon

HERE = pathlib.Path(__file__).resolve().parent
INSTALL_DEADLINE_S = 1800


@pytest.fixture(scope="session")
def frameworks(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Where they are; the ranks import them, the test's own process does not."""
    place = str(tmp_path_factory.mktemp("frameworks"))
    subprocess.run(
        [sys.executable, "-m", "pip", "install", "-q", "--no-cache-dir", "--no-deps", "--target", place]
        + ["-r", str(HERE / "frameworks.txt")],
        check=True,
        timeout=INSTALL_DEADLINE_S,
    )  # fmt: skip
    return place


def accelerated(model: nn.Module) -> torch.optim.Optimizer:
    from accelerate import Accelerator

    optim = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=False)
    prepared: torch.optim.Optimizer = Accelerator(cpu=True).prepare(optim)
    assert type(prepared).__name__ == "AcceleratedOptimizer"
    return prepared


def contained(model: nn.Module) -> torch.optim.Optimizer:
    from torchtitan.components.optimizer import OptimizersContainer, ParamGroupConfig

    groups = [
        ParamGroupConfig(pattern="norm", optimizer_name="Adam", optimizer_kwargs={"lr": 0.02}),
        ParamGroupConfig(pattern=".*", optimizer_name="AdamW", optimizer_kwargs={"lr": 0.01}),
    ]
    config = OptimizersContainer.Config(param_groups=groups, implementation="for-loop")
    return OptimizersContainer(config, model_parts=[model])


def states(optim: Any, model: nn.Module) -> dict[str, Any]:
    every = getattr(optim, "optimizers", [optim])
    return {str(i): seen(each, model) for i, each in enumerate(every)}


def train(model: nn.Module, optim: Any, steps: int) -> list[float]:
    """All ranks see the same."""
    losses = []
    for step in range(steps):
        torch.manual_seed(step)
        optim.zero_grad()
        loss = model(torch.randn(4, IN)).square().mean()
        loss.backward()
        optim.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("make", [accelerated, contained])
@pytest.mark.parametrize("ranks", [2, 3])
def test_under_fsdp2(
    daemon: Daemon, frameworks: str, make: Callable[[nn.Module], Any], ranks: int
) -> None:
    def save(rank: int) -> Any:
        sys.path.append(frameworks)
        model, _ = made(fsdp2, seed=0)
        optim = make(model)
        train(model, optim, 2)
        state = {"model": model, "optim": optim}
        late = copied_first(state)
        with holdfast.Checkpointer("job") as ckpt:
            ckpt.save(1, state, wait="committed")
        found = states(optim, model)
        return found, late, train(model, optim, 3)

    def restore(rank: int) -> Any:
        sys.path.append(frameworks)
        model, _ = made(fsdp2, seed=7)
        optim = make(model)
        with holdfast.Checkpointer("job") as ckpt:
            assert ckpt.restore({"model": model, "optim": optim}) == 2
            found = states(optim, model)
            return found, train(model, optim, 3)

    expected, late, losses = run_ranks(2, save)[0]
    assert late == set()
    for found, again in run_ranks(ranks, restore):
        assert_same(expected, found)
        assert again == (losses if ranks == 2 else pytest.approx(losses))


@pytest.mark.parametrize(
    "name", ["SOAP", "AdaFactor", "Shampoo", "CAME", "Lamb", "ScheduleFreeAdamW", "Adafactor"]
)
def test_factored_and_layerwise_state(daemon: Daemon, frameworks: str, name: str) -> None:
    """In one process: their steps do not run over DTensors."""

    def make(seed: int) -> tuple[nn.Module, Any]:
        import pytorch_optimizer

        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(IN, 6), nn.Tanh(), nn.Linear(6, 3))
        kind = torch.optim.Adafactor if name == "Adafactor" else getattr(pytorch_optimizer, name)
        optim = kind(model.parameters(), lr=0.01)
        if hasattr(optim, "train"):
            optim.train()
        return model, optim

    def save(rank: int) -> list[float]:
        sys.path.append(frameworks)
        model, optim = make(0)
        train(model, optim, 3)
        with holdfast.Checkpointer("job") as ckpt:
            ckpt.save(1, {"model": model, "optim": optim}, wait="committed")
        return train(model, optim, 12)

    def restore(rank: int) -> list[float]:
        sys.path.append(frameworks)
        model, optim = make(7)
        with holdfast.Checkpointer("job") as ckpt:
            assert ckpt.restore({"model": model, "optim": optim}) == 2
        return train(model, optim, 12)

    [expected], [found] = run_ranks(1, save, group=False), run_ranks(1, restore, group=False)
    # (SOAP's bases lie column by column, as LAPACK returns them, and are restored row by row: products differ in their last bit.)
    assert found == (pytest.approx(expected, rel=1e-6) if name == "SOAP" else expected)
