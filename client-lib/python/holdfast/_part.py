"""A part of a tensor as frameworks that split tensors themselves have it."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Sequence
from typing import Any

from holdfast._errors import InvalidArgument
from holdfast._range import Range, check_plain


@dataclasses.dataclass(frozen=True, eq=False)
class Part:
    """What this rank has of a tensor of that shape: a box, which begins at `offset` and is as large as its own tensor. Stands in
    a state wherever a tensor may; what DTensors say of themselves this says of plain ones.

        # Megatron's way: the second half of the rows of a matrix.
        mine = torch.nn.Parameter(torch.zeros(512, 1024))
        state = {"w": holdfast.Part(mine, shape=(1024, 1024), offset=(512, 0))}

    Parts may be of any size, also empty. An optimizer of `mine` in the same state has parts, too: `optim.state.w.exp_avg`.
    `holdfast.layouts` makes them for whole modules.
    """

    tensor: Any
    shape: tuple[int, ...]
    offset: tuple[int, ...]

    def __init__(self, tensor: Any, shape: Sequence[int], offset: Sequence[int]) -> None:
        try:
            sizes = tuple(operator.index(size) for size in shape)
            begin = tuple(operator.index(first) for first in offset)
        except TypeError as error:
            raise InvalidArgument(
                f"Part: shape={shape!r}, offset={offset!r}: sequences of integers are wanted"
            ) from error
        object.__setattr__(self, "tensor", tensor)
        object.__setattr__(self, "shape", sizes)
        object.__setattr__(self, "offset", begin)
        self.check("Part")

    @property
    def empty(self) -> bool:
        """Nothing of a tensor that has elements."""
        return 0 in self.tensor.shape and 0 not in self.shape

    def check(self, path: str) -> None:
        """Raises what is wrong with it: now, for a tensor may have been resized since."""
        tensor = self.tensor
        check_plain("a Part", tensor, path)
        fits = len(self.shape) == len(self.offset) == tensor.ndim and all(
            0 <= first and first + here <= size
            for first, here, size in zip(self.offset, tensor.shape, self.shape, strict=True)
        )
        if not fits:
            raise InvalidArgument(
                f"{path}: a part of shape {list(tensor.shape)} at {list(self.offset)} is not within a tensor of shape {list(self.shape)}"
            )

    def __str__(self) -> str:
        return f"{list(self.tensor.shape)} at {list(self.offset)} of {self.tensor.dtype} {list(self.shape)}"


# What stands for a tensor in a state, and has a part of it.
PARTS = (Range, Part)
