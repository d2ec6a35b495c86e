"""The nested state that all ranks saved together, of what each of them saved (`Checkpoint.state`).

whole = OnceRead(tensor_of, array_of, names)  # stands for the checkpoint: each tensor is read once
state = functools.reduce(together, states)    # of the ranks, in their order
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any


class OnceRead:
    """Tensors and arrays by their names, whichever rank's tree names them."""

    def __init__(
        self, tensor: Callable[[str], Any], numpy: Callable[[str], Any], names: list[str]
    ) -> None:
        self._tensor = tensor
        self._numpy = numpy
        self._names = names
        self._read: dict[tuple[str, str], Any] = {}

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def tensor(self, name: str, *, rank: int) -> Any:
        key = "tensor", name
        if key not in self._read:
            self._read[key] = self._tensor(name)
        return self._read[key]

    def numpy(self, name: str, *, rank: int) -> Any:
        key = "numpy", name
        if key not in self._read:
            self._read[key] = self._numpy(name)
        return self._read[key]


def together(first: Any, other: Any) -> Any:
    """What either has; of what both have, and not alike, the first one's.

    >>> together({"a": 1, "b": [None]}, {"a": 2, "b": [3], "c": 4})
    {'a': 1, 'b': [3], 'c': 4}
    """
    if first is None:
        return other
    if isinstance(first, dict) and isinstance(other, dict):
        both = {key: together(first[key], other[key]) for key in first if key in other}
        if isinstance(both.get("params"), list):  # of a group: a pipeline stage has its own
            both["params"] = [*dict.fromkeys([*first["params"], *other["params"]])]
        return first | other | both
    if (
        type(first) is type(other)
        and isinstance(first, (list, tuple))
        and len(first) == len(other)
        and type(first) in (list, tuple)
    ):
        return type(first)(map(together, first, other))
    return first
