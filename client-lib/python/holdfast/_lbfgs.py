"""LBFGS over DTensors, which is refused."""

from __future__ import annotations

from typing import Any

from holdfast._described import torch_module
from holdfast._errors import InvalidArgumentError
from holdfast._optimizers import is_optimizer


def refuse_lbfgs(path: str, value: Any) -> None:
    """Raises if that optimizer of a state keeps all parameters in one flat tensor, and they are DTensors: nobody can say what of it
    belongs to which parameter on another number of ranks."""
    if not is_optimizer(value) or not isinstance(value, torch_module().optim.LBFGS):
        return
    from holdfast import _torch_types

    parameters = (each for group in value.param_groups for each in group["params"])
    if any(map(_torch_types.is_dtensor, parameters)):
        raise InvalidArgumentError(
            f"{path}: is an LBFGS over DTensors, which a Checkpointer does not save: its state is one flat tensor of all parameters, "
            "which cannot be restored on another number of ranks. Leave the optimizer out of the state, and make a new one after "
            "restore; or give it parameters that are whole on each rank (DistributedDataParallel)"
        )
