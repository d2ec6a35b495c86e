"""FSDP1 (FullyShardedDataParallel), which is refused."""

from __future__ import annotations

import sys
from typing import Any

from holdfast._errors import InvalidArgumentError
from holdfast._optimizers import is_optimizer
from holdfast._part import PARTS


def refuse_fsdp1(path: str, value: Any) -> None:
    """Raises if that module, or optimizer, of a state is sharded by FSDP1. Its optimizers hold flat pieces of parameters that
    say nothing of the whole: they would be saved, and another number of ranks could do nothing with them."""
    kind = getattr(sys.modules.get("torch.distributed.fsdp"), "FullyShardedDataParallel", None)
    if kind is None or isinstance(value, PARTS):
        return
    if is_optimizer(value):
        parameters = (each for group in value.param_groups for each in group["params"])
        # (FSDP1 marks both its flat parameters and, with use_orig_params, those that are views of them.)
        refused = any(getattr(each, "_fsdp_flattened", False) for each in parameters)
    else:
        refused = any(isinstance(each, kind) for each in value.modules())
    if refused:
        what = (
            "is an optimizer over FSDP1's parameters"
            if is_optimizer(value)
            else "is an FSDP1 module"
        )
        raise InvalidArgumentError(
            f"{path}: {what} (FullyShardedDataParallel), which a Checkpointer does not save: its pieces cannot be restored on "
            "another number of ranks. Shard with FSDP2 (torch.distributed.fsdp.fully_shard), or save with holdfast.dcp.Writer what "
            "torch.distributed.checkpoint.state_dict.get_state_dict returns with flatten_optimizer_state_dict=True"
        )
