"""How much of a state is copied before `save` returns, where frameworks stand around AdamW. Everything that only its step() changes
should be copied beside the loop.
"""

from __future__ import annotations

import math
import pathlib
import sys
from collections.abc import Callable
from typing import Any

import torch
from report import Row

import holdfast
from holdfast import _torch_types

BAR_PERCENT, GOAL_PERCENT = 1.0, 0.1
WIDTH, LAYERS = 512, 8
STEPS = 3


def accelerated(model: torch.nn.Module) -> Any:
    from accelerate import Accelerator

    return Accelerator(cpu=True).prepare(torch.optim.AdamW(model.parameters()))


def contained(model: torch.nn.Module) -> Any:
    from torchtitan.components.optimizer import OptimizersContainer, ParamGroupConfig

    config = OptimizersContainer.Config(
        param_groups=[
            ParamGroupConfig(pattern=".*", optimizer_name="AdamW", optimizer_kwargs={"lr": 0.01})
        ],
        implementation="for-loop",
    )
    return OptimizersContainer(config, model_parts=[model])


WRAPPERS: dict[str, Callable[[torch.nn.Module], Any]] = {
    "accelerate's AcceleratedOptimizer": accelerated,
    "torchtitan's OptimizersContainer": contained,
}


def measure(frameworks: pathlib.Path, socket_path: str) -> tuple[list[Row], list[str]]:
    """`frameworks`: where they are installed. The rows, and what could not be measured."""
    sys.path.append(str(frameworks))
    rows, missing = [], []
    for name, wrapped in WRAPPERS.items():
        model = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
        try:
            optim = wrapped(model)
        except ImportError as error:
            missing.append(
                f"not measured: AdamW in {name}: {error}. See tests/python/frameworks.txt"
            )
            continue
        rows.append(_row(name, model, optim, socket_path))
    return rows, missing


def _row(name: str, model: torch.nn.Module, optim: Any, socket_path: str) -> Row:
    percents = []
    with holdfast.Checkpointer(
        name.split("'")[0], rank=0, world_size=1, socket=socket_path, on_error="raise"
    ) as checkpointer:
        begin = checkpointer._started

        def started(step: int, flat: Any, *rest: Any) -> Any:
            nbytes = [_nbytes(spec) for spec in flat.specs]
            first = sum(nbytes[i] for i in flat.copy_first)
            percents.append(100 * first / sum(nbytes))
            return begin(step, flat, *rest)

        checkpointer._started = started  # type: ignore[method-assign]
        state = {"model": model, "optim": optim}
        checkpointer.restore(state)
        for step in range(STEPS):
            optim.zero_grad()
            model(torch.ones(1, WIDTH)).sum().backward()
            optim.step()
            checkpointer.save(step, state, wait="committed")
    value = max(percents)
    return Row(
        f"copied before save returns, AdamW in {name}",
        "%",
        value,
        100.0,
        value,
        min(percents),
        value,
        BAR_PERCENT,
        GOAL_PERCENT,
        higher_is_better=False,
        note="of the state's bytes",
    )


def _nbytes(spec: Any) -> int:
    _, dtype, shape, _, local_shape, _, flat = spec
    elements = flat[1] if flat is not None else math.prod(local_shape or shape)
    return elements * _torch_types.dtype_from_name(dtype, "").itemsize
