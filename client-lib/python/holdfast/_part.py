"""A part of a tensor as frameworks that split tensors themselves have it."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Sequence
from typing import Any

from holdfast._arrays import is_array
from holdfast._errors import InvalidArgumentError
from holdfast._range import Range, check_plain


@dataclasses.dataclass(frozen=True, eq=False)
class Part:
    """What this rank has of a tensor of that shape: a box, which begins at `offset` and is as large as its own tensor. Stands in
    a state wherever a tensor may; what DTensors say of themselves this says of plain ones, and of NumPy's arrays.

        # Megatron's way: the second half of the rows of a matrix.
        mine = torch.nn.Parameter(torch.zeros(512, 1024))
        state = {"w": holdfast.Part(mine, shape=(1024, 1024), offset=(512, 0))}

    `valid`: only so many of its rows (of the first dimension) are of the whole; the others are padding, which is neither saved
    nor restored, so that it may depend on the number of ranks:

        # 1000 words, padded to 2 × 504 rows. Rank 1 has the last 496.
        state = {"words": holdfast.Part(mine, shape=(1000, 64), offset=(504, 0), valid=496)}

    Parts may be of any size, also empty. An optimizer of `mine` in the same state has parts, too: `optim.state.w.exp_avg`.
    `holdfast.layouts` makes them for whole modules.
    """

    tensor: Any
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    valid: int | None

    def __init__(
        self,
        tensor: Any,
        shape: Sequence[int],
        offset: Sequence[int],
        *,
        valid: int | None = None,
    ) -> None:
        try:
            sizes = tuple(operator.index(size) for size in shape)
            begin = tuple(operator.index(first) for first in offset)
            rows = None if valid is None else operator.index(valid)
        except TypeError as error:
            raise InvalidArgumentError(
                f"Part: shape={shape!r}, offset={offset!r}, valid={valid!r}: two sequences of integers and an integer are wanted"
            ) from error
        object.__setattr__(self, "tensor", tensor)
        object.__setattr__(self, "shape", sizes)
        object.__setattr__(self, "offset", begin)
        object.__setattr__(self, "valid", rows)
        self.check("Part")

    @property
    def local(self) -> Any:
        """The tensor without its padding: a view of it."""
        if self.valid is None:
            return self.tensor
        return (self.tensor if is_array(self.tensor) else self.tensor.detach())[: self.valid]

    def over(self, tensor: Any) -> Part:
        """The same part, of another tensor."""
        return Part(tensor, self.shape, self.offset, valid=self.valid)

    @property
    def empty(self) -> bool:
        """Nothing of a tensor that has elements."""
        return 0 in self.local.shape and 0 not in self.shape

    def check(self, path: str) -> None:
        """Raises what is wrong with it: now, for a tensor may have been resized since."""
        tensor = self.tensor
        if not is_array(tensor):
            check_plain("a Part", tensor, path)
        if self.valid is not None and not (tensor.ndim and 0 <= self.valid <= tensor.shape[0]):
            raise InvalidArgumentError(
                f"{path}: {self.valid} valid rows are not within a part of shape {list(tensor.shape)}"
            )
        local = tuple(self.local.shape)
        fits = len(self.shape) == len(self.offset) == len(local) and all(
            # (A part that is padding alone begins anywhere.)
            0 <= first and (first + here <= size or (dim == 0 and self.valid == 0))
            for dim, (first, here, size) in enumerate(
                zip(self.offset, local, self.shape, strict=True)
            )
        )
        if not fits:
            raise InvalidArgumentError(
                f"{path}: a part of shape {list(local)} at {list(self.offset)} is not within a tensor of shape {list(self.shape)}"
            )

    def __str__(self) -> str:
        return f"{list(self.local.shape)} at {list(self.offset)} of {self.tensor.dtype} {list(self.shape)}"


# What stands for a tensor in a state, and has a part of it.
PARTS = (Range, Part)
