"""The state that an optimizer will have after its first step, for one that has made none yet.

A step of a twin shows it, over parameters that have no memory: nothing is computed or sent, and the optimizer stays as it is.
"""

from __future__ import annotations

import collections
import contextlib
import copy
import logging
from collections.abc import Iterable, Iterator
from typing import Any

from holdfast._described import torch_module
from holdfast._state import is_tensor

_log = logging.getLogger("holdfast")

# How a step is computed, and which parameters without memory cannot be. The shapes of the state do not depend on it.
_WAYS = ("foreach", "fused", "capturable", "differentiable")


@contextlib.contextmanager
def shown(optimizers: Iterable[Any]) -> Iterator[None]:
    """Meanwhile these optimizers have a state like that after their first step; what its elements are means nothing.

    with shown([optim]):
        describe(optim)
    """
    filled = []
    try:
        for each in optimizers:
            if not each.state and _is_of_torch(each):
                filled.append(each)
                each.state.update(_after_a_step(each))
        yield
    finally:
        for each in filled:
            each.state.clear()


def _is_of_torch(optimizer: Any) -> bool:
    """Whether its step is one of torch.optim's: of another one nobody knows what else it changes."""
    step: Any = type(optimizer).step
    return str(getattr(step, "__module__", "")).startswith("torch.optim.")


def _after_a_step(optimizer: Any) -> dict[Any, Any]:
    """{} if nothing of it can be known: its step wants more than gradients (LBFGS)."""
    torch = torch_module()
    own: dict[Any, Any] = {}  # the twin's parameters to the optimizer's
    try:
        twin = _twin(optimizer, own)
        step: Any = type(twin).step
        # Without the hooks: they are about steps of the training.
        step = step.__wrapped__ if getattr(step, "hooked", False) else step
        # Those that want to know a number (Adafactor) have made their state before.
        with contextlib.suppress(Exception), torch.no_grad():
            step(twin)
        return {
            own[parameter]: {key: _real(value, own[parameter]) for key, value in state.items()}
            for parameter, state in twin.state.items()
        }
    except Exception as error:  # its memory, too, may be less than that takes
        _log.info(
            "the state of this %s is not known before its first step (%s: %s)",
            type(optimizer).__name__,
            type(error).__name__,
            error,
        )
        return {}


def _twin(optimizer: Any, own: dict[Any, Any]) -> Any:
    torch = torch_module()
    twin = object.__new__(type(optimizer))
    twin.__dict__.update(optimizer.__dict__)
    twin.state = collections.defaultdict(dict)
    twin.param_groups = []
    for group in optimizer.param_groups:
        values = {key: copy.deepcopy(each) for key, each in group.items() if key != "params"}
        values |= dict.fromkeys(values.keys() & set(_WAYS), False)
        values["params"] = []
        for parameter in group["params"]:
            ghost = torch.empty_like(parameter, device="meta")
            if parameter.requires_grad:
                ghost.grad = torch.empty_like(ghost)
            own[ghost] = parameter
            values["params"].append(ghost)
        twin.param_groups.append(values)
    return twin


def _real(value: Any, parameter: Any) -> Any:
    if is_tensor(value) and value.device.type == "meta":
        return torch_module().empty_like(value, device=parameter.device)
    return value
