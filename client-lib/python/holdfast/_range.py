"""A part of a tensor as optimizers over flat buffers have it."""

from __future__ import annotations

import dataclasses
import math
import operator
import sys
from collections.abc import Sequence
from typing import Any

from holdfast._errors import InvalidArgumentError


def check_plain(kind: str, tensor: Any, path: str) -> None:
    """What a part of a tensor is of: a tensor of torch with no meaning of its own."""
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(tensor, torch.Tensor):
        raise InvalidArgumentError(
            f"{path}: {kind} is of a torch.Tensor, not of a {type(tensor).__name__}"
            " (torch.from_numpy shares an array's memory)"
        )
    if type(tensor.data) is not torch.Tensor:
        raise InvalidArgumentError(
            f"{path}: {kind} is of a plain tensor, not of a {type(tensor).__qualname__}"
        )


@dataclasses.dataclass(frozen=True, eq=False)
class Range:
    """What this rank has of a tensor of that shape: its elements from `start` on, counted row by row, as many as the 1-D
    tensor has. Stands in a state wherever a tensor may.

        # ZeRO's or Megatron's way: a buffer of 10 elements, of which this rank has, and steps, 4 to 9.
        mine = torch.nn.Parameter(torch.zeros(6))
        ckpt.save(step, {"master": holdfast.Range(mine, shape=(10,), start=4)})
        ckpt.restore({"master": holdfast.Range(mine, shape=(10,), start=4)})     # into `mine`
        holdfast.open(job).tensor("master")                                      # all 10, of all ranks

    Ranks may have ranges of any length, none too: `torch.zeros(0)`. dcp.load has the whole tensor under its name, for any
    number of ranks. `shape` is the parameter's where each parameter is flattened by itself. An optimizer of `mine` in the same
    state has ranges, too: `optim.state.master.exp_avg`.
    """

    tensor: Any
    shape: tuple[int, ...]
    start: int

    def __init__(self, tensor: Any, shape: Sequence[int], start: int) -> None:
        try:
            sizes = tuple(operator.index(size) for size in shape)
            first = operator.index(start)
        except TypeError as error:
            raise InvalidArgumentError(
                f"Range: shape={shape!r}, start={start!r}: a sequence of integers and an integer are wanted"
            ) from error
        object.__setattr__(self, "tensor", tensor)
        object.__setattr__(self, "shape", sizes)
        object.__setattr__(self, "start", first)
        self.check("Range")

    @property
    def length(self) -> int:
        return int(self.tensor.numel())

    def check(self, path: str) -> None:
        """Raises what is wrong with it: now, for a tensor may have been resized since."""
        tensor = self.tensor
        check_plain("a Range", tensor, path)
        if tensor.layout is not sys.modules["torch"].strided or tensor.ndim != 1:
            raise InvalidArgumentError(
                f"{path}: a Range is of a strided tensor with one dimension, not {list(tensor.shape)} {tensor.layout}: flatten it (view(-1))"
            )
        if not tensor.is_contiguous():
            raise InvalidArgumentError(
                f"{path}: a Range is of a contiguous tensor, not of one with stride {tensor.stride(0)}: what is restored "
                "would not lie in its place"
            )
        if (
            min(self.shape, default=0) < 0
            or self.start < 0
            or not self._end <= math.prod(self.shape) < 2**63
        ):
            raise InvalidArgumentError(
                f"{path}: elements {self.start} to {self._end} are not within a tensor of shape {list(self.shape)}, which has "
                f"{math.prod(self.shape)}"
            )

    @property
    def _end(self) -> int:
        return self.start + self.length

    def __str__(self) -> str:
        return f"elements {self.start} to {self._end} of {self.tensor.dtype} {list(self.shape)}"
