"""What the tensors of a state are in a shard: names, types, places, and which of them are one.

A loop saves the same tensors over and over. `Described` is a pure function of their names and of what `rows` reads of them, so
that a save makes it once, and then only sees that nothing has changed, in passes that run no Python for each tensor.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
import sys
from collections.abc import Iterable
from typing import Any

from holdfast._errors import HoldfastError, InvalidArgumentError
from holdfast._part import PARTS, Part
from holdfast._range import Range

# name, dtype, global shape, offset, local shape, device, range: what a TensorList is told of a tensor.
Spec = tuple[
    str,
    str,
    tuple[int, ...],
    tuple[int, ...] | None,
    tuple[int, ...] | None,
    int,
    tuple[int, int] | None,
]


def torch_module() -> Any:
    """torch, if the program uses it: a state can hold no tensor before."""
    return sys.modules.get("torch")


@functools.cache
def plain_types() -> frozenset[type]:
    """Types of tensors that are nothing but their elements."""
    torch = torch_module()
    return frozenset((torch.Tensor, torch.nn.Parameter))


def is_subclass(value: Any) -> bool:
    """A tensor with a meaning of its own: neither torch's nor a parameter or buffer over one."""
    return type(value) not in plain_types() and type(value.data) is not torch_module().Tensor


def is_dense(value: Any) -> bool:
    """Whether its elements lie in this process's or a CUDA device's memory one after the other, as they are saved."""
    return (
        value.layout is torch_module().strided
        and value.is_contiguous()
        and value.device.type in ("cpu", "cuda")
        and not value.is_conj()
        and not value.is_neg()
    )


def local_parts(tensors: list[Any]) -> list[Any]:
    """What of each tensor lies in this process: of a DTensor, a Range or a Part its own."""
    if plain_types().issuperset(map(type, tensors)):
        return tensors
    return [_local_part(each) for each in tensors]


def _local_part(tensor: Any) -> Any:
    from holdfast import _torch_types

    if isinstance(tensor, PARTS):
        return tensor.local if isinstance(tensor, Part) else tensor.tensor
    return tensor._local_tensor if _torch_types.is_dtensor(tensor) else tensor


_METADATA = operator.attrgetter("dtype", "shape", "device", "layout")


def traits(parts: list[Any]) -> Iterable[tuple[Any, ...]]:
    """All of a tensor but its address that decides what becomes of it."""
    tensor = torch_module().Tensor
    return zip(
        map(type, parts),
        map(_METADATA, parts),
        map(tensor.is_contiguous, parts),
        map(tensor.is_conj, parts),
        map(tensor.is_neg, parts),
        strict=True,
    )


def rows(parts: list[Any]) -> Iterable[tuple[tuple[Any, ...], int]]:
    """With the address."""
    return zip(traits(parts), map(torch_module().Tensor.data_ptr, parts), strict=True)


def _places(tensors: list[Any], parts: list[Any]) -> list[tuple[Any, ...]]:
    """What decides where parts lie in the whole, and which tensors are parts: those of DTensors, Ranges, Parts."""
    if parts is tensors:
        return []
    return [
        (index, each.shape, each.start)
        if isinstance(each, Range)
        else (index, each.shape, each.offset)
        if isinstance(each, Part)
        else (index, tuple(each.shape), each.device_mesh, each.placements)
        for index, (each, part) in enumerate(zip(tensors, parts, strict=True))
        if part is not each
    ]


def taken(name: str) -> InvalidArgumentError:
    return InvalidArgumentError(
        f"two parts of the state are called {name!r}: keys that differ only in their type, or contain dots"
    )


@dataclasses.dataclass
class Described:
    """Made by `describe`; nobody changes it."""

    # What it was made of.
    paths: list[str]
    fenced: dict[int, int]
    places: list[tuple[Any, ...]]
    rows: list[tuple[Any, ...]] = dataclasses.field(default_factory=list)
    # What was made of it.
    specs: list[Spec] = dataclasses.field(default_factory=list)
    addresses: list[int] = dataclasses.field(default_factory=list)
    copy_first: list[int] = dataclasses.field(default_factory=list)
    names: set[str] = dataclasses.field(default_factory=set)
    devices: set[int] = dataclasses.field(default_factory=set)
    host_beside: int = 0  # bytes in this process's memory that need not be copied first
    # Tensors (by index) whose node in the tree is not {"tensor": path}.
    odd: list[tuple[int, dict[str, Any]]] = dataclasses.field(default_factory=list)
    # Tensors whose elements lie scattered, and the index of the spec: a dense copy of each is saved.
    scattered: list[tuple[int, int]] = dataclasses.field(default_factory=list)


def describe(
    paths: list[str],
    tensors: list[Any],
    parts: list[Any],
    fenced: dict[int, int],
    before: Described | None,
) -> Described:
    """`fenced`: memory (address to bytes) that nobody changes but a step() that waits. `before`: what this returned the last time."""
    places = _places(tensors, parts)
    try:
        if (
            before is not None
            and before.paths == paths
            and before.fenced == fenced
            and before.places == places
            and all(map(operator.eq, rows(parts), before.rows))
        ):
            return before
    except (RuntimeError, ValueError):
        pass  # one of them has no memory: below it is said which
    made = Described(paths, fenced, places)
    seen: dict[tuple[Any, ...], str] = {}
    for index, (path, tensor, part) in enumerate(zip(paths, tensors, parts, strict=True)):
        try:
            _add(made, seen, index, tensor, part)
        except HoldfastError:
            raise
        except Exception as error:  # torch's, of a tensor that lacks what others have
            said = str(error).strip().split("\n", 1)[0]
            raise InvalidArgumentError(
                f"{path}: a {type(tensor).__qualname__} that cannot be saved: {said}"
            ) from error
    try:
        made.rows = list(rows(parts))
    except (RuntimeError, ValueError):
        made.paths = []  # of another kind of memory: to be described again each time
    return made


def _add(
    made: Described, seen: dict[tuple[Any, ...], str], index: int, tensor: Any, part: Any
) -> None:
    """`seen`: memory to the name under which it is saved, for tied tensors are saved once."""
    from holdfast import _torch_types

    path = made.paths[index]
    place = flat = None
    if isinstance(tensor, Range):
        tensor.check(path)
        flat = tensor.start, tensor.length
    if torch_module().nn.parameter.is_lazy(part):
        raise InvalidArgumentError(
            f"{path}: has no shape yet: run a forward pass through the lazy module first"
        )
    if part.layout is not torch_module().strided or part.is_nested:
        raise _torch_types.without_plain_memory(part, path)
    if flat is None and part is not tensor:
        place = (
            _torch_types.part_place(tensor, path)
            if isinstance(tensor, Part)
            else _torch_types.dtensor_place(tensor, path)
        )
        if place is None or place.empty:
            made.odd.append((index, {"absent": list(tensor.shape)}))
            return
    dtype = _torch_types.dtype_name(part.dtype, path)
    shape = tuple(part.shape) if flat is None else tensor.shape
    offset = local_shape = None
    if place is not None and not place.whole:
        shape, offset, local_shape = place.shape, place.offset, place.local_shape
    device = _torch_types.device_ordinal(part, path)
    dense = is_dense(part)
    address = part.data_ptr() if dense else 0
    if address != 0:
        first = seen.setdefault((address, dtype, shape, offset, device, flat), path)
        if first is not path:
            made.odd.append((index, {"tensor": first}))
            return
    if path in made.names:
        raise taken(path)
    made.names.add(path)
    if not dense:
        made.scattered.append((index, len(made.specs)))
    elif part.nbytes > made.fenced.get(address, -1):
        made.copy_first.append(len(made.specs))
    elif device < 0:
        made.host_beside += part.nbytes
    made.specs.append((path, dtype, shape, offset, local_shape, device, flat))
    made.addresses.append(address)
    if device >= 0:
        made.devices.add(device)
