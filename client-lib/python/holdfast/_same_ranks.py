"""State of an optimizer that only as many ranks as saved it can have back.

Where a parameter is a Part or a Range, its state is cut as it is, element by element. State that is neither one number nor
of the parameter's shape (Adafactor's rows and columns, LBFGS's history) is of this rank's part alone. Saving it is right: the
same number of ranks restores it. The first save with some of it says that no other number can.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import Any

from holdfast._described import torch_module
from holdfast._errors import InvalidArgumentError
from holdfast._part import Part
from holdfast._range import Range
from holdfast._skipped import Line

_SHOWN = 5


def is_split(of: Range | Part) -> bool:
    """Whether this rank has some of the whole, and not all of it."""
    here = of.length if isinstance(of, Range) else math.prod(of.local.shape)
    return here != math.prod(of.shape)


def is_of_part_alone(value: Any, shape: Any) -> bool:
    """Of an entry of the state of a parameter that is split; `shape`: what this rank has of the parameter.

    What is in a list or dictionary is never cut.
    """
    if isinstance(value, torch_module().Tensor):
        return int(value.numel()) > 1 and value.shape != shape
    inside: Any = value if isinstance(value, (list, tuple)) else ()
    if isinstance(value, Mapping):
        inside = value.values()
    return any(is_of_part_alone(each, None) for each in inside)


def refuse_of_whole(value: Any, shape: Any, path: str) -> None:
    """Raises for an entry that was made of what another number of ranks has saved."""
    if is_of_part_alone(value, shape):
        raise InvalidArgumentError(
            f"{path}: another number of ranks has saved this state. Its shape is not that of its parameter, of which this rank has a "
            "part, so nobody knows how to cut it. Restore on as many ranks as saved it, or restore without this optimizer"
        )


class SameRanksOnly:
    """What a Checkpointer says of such state: once.

    line = SameRanksOnly().line(["optim.state.w.row_var"])  # the paths of a save
    """

    def __init__(self) -> None:
        self._told = False

    def line(self, paths: list[str]) -> Line | None:
        if self._told or not paths:
            return None
        self._told = True
        more = f" and {len(paths) - _SHOWN} more" if len(paths) > _SHOWN else ""
        return logging.WARNING, (
            f"only as many ranks as now can restore {', '.join(paths[:_SHOWN])}{more}: this state of an optimizer is neither one "
            "number nor of the shape of its parameter, of which each rank has a part. For other numbers of ranks, use an optimizer "
            "whose state has its parameters' shapes (AdamW), or shard with FSDP2"
        )
