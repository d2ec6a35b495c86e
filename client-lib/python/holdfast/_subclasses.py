"""Tensor subclasses, as the plain tensors that they are made of.

A subclass with `__tensor_flatten__` (quantized weights, 8-bit moments) names its inner tensors. Each is saved under a name of its
own, "model.w.scale"; a node of the tree (docs/formats.md) says how they make one again. Of a DTensor whose local part is a
subclass, each rank saves its part of every inner tensor that is sharded as the whole is, and whole those that are not.

Nothing is pickled, and no module is imported because a checkpoint names it.
"""

from __future__ import annotations

import dataclasses
import enum
import io
import json
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from holdfast import _json
from holdfast._described import is_subclass, torch_module
from holdfast._errors import CorruptError, InvalidArgumentError, RefusedError, not_in_shard
from holdfast._part import Part

Node = dict[str, Any]

_UNPLAIN = "AsyncCollectiveTensor"  # its elements may still be on their way
_SEQUENCES = ("list", "tuple", "Size")


def is_made_of_tensors(value: Any) -> bool:
    """Whether this subclass says which plain tensors it consists of."""
    kind = type(value)
    return (
        callable(getattr(kind, "__tensor_flatten__", None))
        and callable(getattr(kind, "__tensor_unflatten__", None))
        and kind.__name__ != _UNPLAIN
        and is_subclass(value)
    )


def plain_tensors(values: Iterable[Any]) -> Iterator[Any]:
    """The values; instead of subclasses, what they are made of."""
    for value in values:
        if is_made_of_tensors(value):
            attributes, _ = value.__tensor_flatten__()
            yield from plain_tensors(getattr(value, attribute) for attribute in attributes)
        else:
            yield value


# ---- taken apart ----


@dataclasses.dataclass
class Inner:
    """One of the tensors that a subclass is made of, as a state has it."""

    attribute: str
    value: Any


@dataclasses.dataclass
class Parts:
    """A subclass, or this rank's part of a DTensor over one."""

    kind: str
    context: Node
    shape: tuple[int, ...]  # of the whole
    inner: list[Inner]
    # Along which dimension of each inner tensor a dimension of the whole is split: {0: {"scale": 0}}.
    cuts: dict[int, dict[str, int]]

    def node(self, inner_node: Callable[[Any, str], Node], path: str) -> Node:
        return {
            "subclass": {
                "type": self.kind,
                "context": self.context,
                "shape": list(self.shape),
                "tensors": [
                    [each.attribute, inner_node(each.value, f"{path}.{each.attribute}")]
                    for each in self.inner
                ],
                "cuts": [[dim, cut] for dim, cut in self.cuts.items()],
            }
        }


def parts_of(tensor: Any, path: str) -> Parts | None:
    """None: a DTensor of which this rank has no element. Raises NotJson for a context that is no plain data."""
    from holdfast import _torch_types

    place = None
    local = tensor
    if _torch_types.is_dtensor(tensor):
        place = _torch_types.dtensor_place(tensor, path)
        if place is None or place.empty:
            return None
        local = tensor._local_tensor
    if not is_made_of_tensors(local):
        raise InvalidArgumentError(
            f"{path}: the local part of this DTensor is a {_name(type(local))}, which does not say "
            "(__tensor_flatten__) what plain tensors it is made of: save those instead"
        )
    if not all(type(size) is int for size in (*tensor.shape, *local.shape)):
        raise _json.NotJson(f"{path}: its sizes are not numbers (a nested tensor)")
    attributes, context = local.__tensor_flatten__()
    node = _context_of_local(local, context, f"{path}: the context of __tensor_flatten__")
    cuts: dict[int, dict[str, int]] = {}
    if place is not None:
        for dim, (here, all_of_it) in enumerate(zip(place.local_shape, place.shape, strict=True)):
            if here != all_of_it:
                cuts[dim] = _cut(local, attributes, node, dim, path)
    inner = [
        Inner(each, _part(getattr(local, each), each, place, cuts, path)) for each in attributes
    ]
    return Parts(_name(type(local)), node, tuple(tensor.shape), inner, cuts)


def _part(
    inner: Any, attribute: str, place: Any, cuts: dict[int, dict[str, int]], path: str
) -> Any:
    """That inner tensor, as the part of its whole that this rank has."""
    shape, offset = list(inner.shape), [0] * inner.ndim
    split = False
    for dim, cut in cuts.items():
        if attribute not in cut:
            continue
        own = cut[attribute]
        here = place.local_shape[dim]
        if offset[own] or shape[own] != inner.shape[own] or is_subclass(inner):
            raise _not_alike(path, f"{attribute!r} cannot be split twice")
        shape[own], rest = divmod(inner.shape[own] * place.shape[dim], here)
        offset[own], rest_of_offset = divmod(inner.shape[own] * place.offset[dim], here)
        if rest or rest_of_offset:
            raise _not_alike(
                path,
                f"this rank's part begins at {place.offset[dim]} of {place.shape[dim]}, in the middle of an element of {attribute!r}",
            )
        split = True
    return Part(inner, shape, offset) if split else inner


# What a slice of a subclass is made of, as far as it is known: by type, context, shapes and dimension.
_known_cuts: dict[tuple[Any, ...], dict[str, int]] = {}


def _cut(local: Any, attributes: list[str], context: Node, dim: int, path: str) -> dict[str, int]:
    """Which inner tensors are split when the subclass is, and along which of their dimensions: its own slice shows it."""
    before = {each: tuple(getattr(local, each).shape) for each in attributes}
    key = type(local), dim, tuple(local.shape), repr(context), tuple(before.items())
    if key not in _known_cuts:
        _known_cuts[key] = _shown_by_slice(local, before, dim, path)
    return _known_cuts[key]


def _counts(size: int) -> Iterator[int]:
    """Of slices that show how a tensor of that size is made. Blocks are powers of two, mostly: where no half of it can be cut
    off, a quarter cannot either. The empty slice comes last: all that a tensor with one row, or one block, has."""
    yield from (1 << bits for bits in reversed(range((size - 1).bit_length())))
    yield 0


def _shown_by_slice(
    local: Any, before: dict[str, tuple[int, ...]], dim: int, path: str
) -> dict[str, int]:
    size = local.shape[dim]
    why = ""
    for count in _counts(size):
        try:
            with torch_module().no_grad():
                piece = local.detach().narrow(dim, 0, count)
            after = {each: tuple(getattr(piece, each).shape) for each in before}
        except Exception as error:
            why = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
            continue
        cut = _proportional(before, after, size, count)
        if type(piece) is not type(local) or cut is None:
            raise _not_alike(path, f"a slice of it along dimension {dim} is not made of slices")
        return cut
    raise _not_alike(path, f"it cannot be sliced along dimension {dim} ({why})")


def _proportional(
    before: dict[str, tuple[int, ...]], after: dict[str, tuple[int, ...]], size: int, count: int
) -> dict[str, int] | None:
    cut: dict[str, int] = {}
    for attribute, shape in before.items():
        if len(after[attribute]) != len(shape):
            return None
        changed = [i for i, n in enumerate(after[attribute]) if n != shape[i]]
        if not changed:
            continue
        own = changed[0]
        if len(changed) > 1 or after[attribute][own] * size != shape[own] * count:
            return None
        cut[attribute] = own
    return cut


def _not_alike(path: str, why: str) -> InvalidArgumentError:
    return InvalidArgumentError(
        f"{path}: the tensors that this subclass is made of are not sharded as it is, so no other number of ranks could read "
        f"it: {why}. Shard it along another dimension, or save its plain tensors"
    )


# ---- the context ----


def _context(value: Any, shape: tuple[int, ...], path: str, lists: bool) -> Node:
    """What __tensor_unflatten__ is given besides tensors. Its own shape and device are marked: each rank has others. `lists`:
    also a list or tuple that is like the shape."""
    kind = type(value)
    if kind is torch_module().device:
        return {"device": None}
    shapes = _SEQUENCES if lists else ("Size",)
    if kind.__name__ in shapes and isinstance(value, (list, tuple)) and tuple(value) == shape:
        return {"shape": kind.__name__}
    if isinstance(value, enum.Enum):
        return {"enum": [_name(kind), value.name]}
    fields = _fields(value)
    if fields is not None:
        pairs = [
            [key, _context(each, shape, f"{path}.{key}", lists)] for key, each in fields.items()
        ]
        return {"record": [_name(kind), pairs]}
    if kind is list or kind is tuple:
        nodes = [_context(each, shape, f"{path}[{i}]", lists) for i, each in enumerate(value)]
        if not all("value" in node for node in nodes):
            return {kind.__name__: nodes}
    if kind is dict:
        pairs = [
            [_json.tree_of(key, path), _context(each, shape, f"{path}[{key!r}]", lists)]
            for key, each in value.items()
        ]
        if not all("value" in node for _, node in pairs):
            return {"dict": pairs}
    return {"value": _json.tree_of(value, path)}


def _context_of_local(local: Any, context: Any, path: str) -> Node:
    """As above. A list that is like the shape is it where a slice's is like the slice's shape; else it may be the size of a block."""
    shape = tuple(local.shape)
    node = _context(context, shape, path, lists=False)
    marked = _context(context, shape, path, lists=True)
    key = type(local), shape, repr(marked)
    if repr(node) == repr(marked):
        return node
    if key not in _known_lists:
        _known_lists[key] = _marks_follow(local, marked, path)
    return marked if _known_lists[key] else node


def _marks_follow(local: Any, marked: Node, path: str) -> bool:
    for dim, size in enumerate(local.shape):
        for count in _counts(size):
            try:
                with torch_module().no_grad():
                    piece = local.detach().narrow(dim, 0, count)
                context = piece.__tensor_flatten__()[1]
                return repr(_context(context, tuple(piece.shape), path, lists=True)) == repr(marked)
            except Exception:  # noqa: S112 - it cannot be sliced there
                continue
    return False


_known_lists: dict[tuple[Any, ...], bool] = {}


def _fields(value: Any) -> dict[str, Any] | None:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {each.name: getattr(value, each.name) for each in dataclasses.fields(value)}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return dict(zip(value._fields, value, strict=True))
    return None


def _context_of(node: Node, shape: tuple[int, ...], device: Any, path: str) -> Any:
    """The way back; of plain data alone."""
    ((kind, content),) = node.items()
    if kind == "value":
        return content
    if kind == "device":
        return device
    if kind == "shape":
        made = {"list": list, "tuple": tuple, "Size": torch_module().Size}[content]
        return made(shape)
    if kind in ("list", "tuple"):
        made = {"list": list, "tuple": tuple}[kind]
        return made(_context_of(each, shape, device, path) for each in content)
    if kind == "dict":
        return {key: _context_of(each, shape, device, path) for key, each in content}
    if kind in ("enum", "record"):
        raise InvalidArgumentError(
            f"{path}: its __tensor_unflatten__ wants a {content[0]}, which is no plain data: give the tensor that it goes into"
        )
    raise CorruptError(f"{path}: a context of the unknown kind {kind!r}")


def _same(saved: Node, wanted: Node) -> bool:
    as_saved = _json.decode(json.dumps(wanted).encode())
    return repr(saved) == repr(as_saved)


# ---- put together ----


def _name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _type(name: str, path: str) -> Any:
    """The class of that name, in a module that the program has imported."""
    for at in (i for i, letter in enumerate(name) if letter == "."):
        found: Any = sys.modules.get(name[:at])
        for word in name[at + 1 :].split("."):
            found = getattr(found, word, None)
        if (
            isinstance(found, type)
            and issubclass(found, torch_module().Tensor)
            and _name(found) == name
            and callable(getattr(found, "__tensor_unflatten__", None))
        ):
            return found
    raise RefusedError(
        f"{path}: was saved as a {name}, which this program has not imported: import its module first, or give the tensor "
        "that it goes into"
    )


def put_together(content: Node, tensors: dict[str, Any], shape: tuple[int, ...], path: str) -> Any:
    """A subclass of these inner tensors."""
    torch = torch_module()
    if torch is None:
        raise RefusedError(f"{path}: is a tensor of torch: import torch first")
    kind = _type(content["type"], path)
    device = next((each.device for each in tensors.values()), None)
    context = _context_of(content["context"], shape, device, path)
    stride = torch.empty(shape, device="meta").stride()
    try:
        with torch.no_grad():
            made = kind.__tensor_unflatten__(tensors, context, torch.Size(shape), stride)
    except Exception as error:
        raise InvalidArgumentError(
            f"{path}: __tensor_unflatten__ of {content['type']} raised {type(error).__name__}: {error}"
        ) from error
    if type(made) is not kind or tuple(made.shape) != shape:
        raise InvalidArgumentError(
            f"{path}: __tensor_unflatten__ of {content['type']} made something else than was saved"
        )
    return made


def _alike(value: Any) -> Any:
    """Another one with inner tensors of its own."""
    if not is_made_of_tensors(value):
        return torch_module().empty_like(value)
    attributes, context = value.__tensor_flatten__()
    new = {each: _alike(getattr(value, each)) for each in attributes}
    with torch_module().no_grad():
        return type(value).__tensor_unflatten__(new, context, value.shape, value.stride())


def _as_dtensor(local: Any, like: Any) -> Any:
    """A DTensor of that part, sharded as `like`."""
    from torch.distributed.tensor import DTensor

    with torch_module().no_grad():
        return DTensor.from_local(
            local,
            like.device_mesh,
            like.placements,
            run_check=False,
            shape=like.shape,
            stride=like.stride(),
        )


class Restored:
    """Subclasses of one restore. `wanted` is the Wanted that it is a part of.

    restored = Restored(wanted)
    restored.fill(node["subclass"], parameter, "model.w")
    """

    def __init__(self, wanted: Any) -> None:
        self._wanted = wanted

    def fill(self, content: Node, target: Any, path: str) -> Any:
        """Into the tensors that the target is made of, where they are."""
        said = f"{path}: was saved as a {content['type'].rpartition('.')[2]} of {content['shape']}"
        local = getattr(target, "_local_tensor", target)
        parts = parts_of(target, path) if is_made_of_tensors(local) else None
        if parts is None:
            if local is not target and 0 in local.shape:
                self._wanted.leave(_names(content))  # of which this rank has nothing
                return target
            raise InvalidArgumentError(f"{said}, wanted is a {type(local).__qualname__}")
        if content["type"] != parts.kind or tuple(content["shape"]) != parts.shape:
            raise InvalidArgumentError(f"{said}, wanted is a {parts.kind} of {list(parts.shape)}")
        if not _same(content["context"], parts.context):
            raise InvalidArgumentError(
                f"{said} with the context {content['context']}, wanted is one with {parts.context}"
            )
        nodes = dict(content["tensors"])
        if list(nodes) != [each.attribute for each in parts.inner]:
            raise InvalidArgumentError(
                f"{said} made of {list(nodes)}, wanted is one of {[each.attribute for each in parts.inner]}"
            )
        for each in parts.inner:
            self._wanted._tensor_into(nodes[each.attribute], each.value, f"{path}.{each.attribute}")
        return target

    def make(self, content: Node, path: str, there: Any, device: Any) -> Any:
        """A new one; `there`: what is in its place now."""
        shape = tuple(content["shape"])
        local = getattr(there, "_local_tensor", there)
        if is_made_of_tensors(local) and tuple(there.shape) == shape:
            made = _alike(local)
            if local is not there:
                made = _as_dtensor(made, there)
        elif local is not there:
            return self._of_dtensor(content, there, path)
        else:
            made = put_together(content, self._tensors(content, {}, path, device), shape, path)
        return self.fill(content, made, path)

    def entry(self, content: Node, has: Any, parameter: Any, path: str) -> Any:
        """One entry of an optimizer's state: the tensor that is there, or one made for that parameter."""
        local = getattr(has, "_local_tensor", has)
        if is_made_of_tensors(local) and list(has.shape) == content["shape"]:
            return self.fill(content, has, path)
        if not hasattr(parameter, "_local_tensor"):
            return self.make(content, path, None, parameter.device)
        return self._of_dtensor(content, parameter, path)

    def _of_dtensor(self, content: Node, like: Any, path: str) -> Any:
        """Sharded as `like`."""
        from holdfast import _torch_types

        place = _torch_types.dtensor_place(like, path)
        if list(like.shape) != content["shape"] or place is None:
            raise not_in_shard(
                f"{path}: was saved with shape {content['shape']}, and is to be sharded as a DTensor of {list(like.shape)}: "
                "make one step before restoring"
            )
        if place.empty:
            self._wanted.leave(_names(content))
            return torch_module().empty_like(like, requires_grad=False)
        sizes = self._local_sizes(content, place, path)
        tensors = self._tensors(content, sizes, path, like._local_tensor.device)
        made = put_together(content, tensors, place.local_shape, path)
        return self.fill(content, _as_dtensor(made, like), path)

    def _local_sizes(self, content: Node, place: Any, path: str) -> dict[str, dict[int, int]]:
        """Of each inner tensor the dimensions that are split, and how large they are here."""
        sizes: dict[str, dict[int, int]] = {}
        for dim, (here, all_of_it) in enumerate(zip(place.local_shape, place.shape, strict=True)):
            if here == all_of_it:
                continue
            for attribute, own in self._cut_along(content, dim, path).items():
                node = dict(content["tensors"])[attribute]
                if "tensor" not in node:
                    raise _not_alike(path, f"{attribute!r} is a subclass itself")
                whole = self._wanted._info(node["tensor"], f"{path}.{attribute}").shape
                size, rest = divmod(whole[own] * here, all_of_it)
                if rest:
                    raise _not_alike(
                        path, f"{here} of {all_of_it} is no whole part of {attribute!r}"
                    )
                sizes.setdefault(attribute, {})[own] = size
        return sizes

    def _cut_along(self, content: Node, dim: int, path: str) -> dict[str, int]:
        """As it was saved. Where no rank saved a slice along that dimension, one of the whole shows it, without any memory."""
        for saved, cut in content["cuts"]:
            if saved == dim:
                return dict(cut)
        inner = self._tensors(content, {}, path, "meta")
        whole = put_together(content, inner, tuple(content["shape"]), path)
        return _cut(whole, list(inner), content["context"], dim, path)

    def _tensors(
        self, content: Node, sizes: dict[str, dict[int, int]], path: str, device: Any
    ) -> dict[str, Any]:
        """Inner tensors whose elements are still to come."""
        from holdfast import _torch_types

        made: dict[str, Any] = {}
        for attribute, node in content["tensors"]:
            where = f"{path}.{attribute}"
            if "subclass" in node:
                inner = node["subclass"]
                tensors = self._tensors(inner, {}, where, device)
                made[attribute] = put_together(inner, tensors, tuple(inner["shape"]), where)
                continue
            if "tensor" not in node:
                raise CorruptError(
                    f"{where}: a subclass is made of tensors, not of {next(iter(node))}"
                )
            info = self._wanted._info(node["tensor"], where)
            own = sizes.get(attribute, {})
            if info.offset is not None and not own:
                raise not_in_shard(
                    f"{path}: saved was a part of a tensor: give the DTensor that it goes into"
                )
            shape = [own.get(dim, size) for dim, size in enumerate(info.shape)]
            dtype = _torch_types.dtype_from_name(info.dtype, where)
            made[attribute] = torch_module().zeros(shape, dtype=dtype, device=device)
        return made


def _names(content: Node) -> Iterator[str]:
    """Of the tensors in the shard."""
    for _, node in content["tensors"]:
        if "subclass" in node:
            yield from _names(node["subclass"])
        elif "tensor" in node:
            yield node["tensor"]


def tensor_names(node: Node) -> Iterator[str]:
    """Of the tensors that a node of a module or optimizer is made of, if it is a subclass."""
    if "subclass" in node:
        yield from _names(node["subclass"])


def merged(
    every: list[tuple[Node, bool]],
    path: str,
    merge: Callable[[list[tuple[Node, bool]], str], Node],
) -> Node | None:
    """One of several ranks' contents of a node; None: they are not of one tensor."""
    first = every[0][0]
    fixed = ("type", "context", "shape")
    attributes = [attribute for attribute, _ in first["tensors"]]
    for other, _ in every:
        same = all(repr(other[key]) == repr(first[key]) for key in fixed)
        if not same or [attribute for attribute, _ in other["tensors"]] != attributes:
            return None
    return {
        **{key: first[key] for key in fixed},
        "tensors": [
            [
                attribute,
                merge([(one["tensors"][i][1], own) for one, own in every], f"{path}.{attribute}"),
            ]
            for i, attribute in enumerate(attributes)
        ],
        "cuts": next((one["cuts"] for one, _ in every if one["cuts"]), []),
    }


# ---- as torch.save writes them: those that do not say what they are made of ----


def pickled(value: Any, path: str, *, allow_pickle: bool) -> bytes:
    """A tensor with a meaning of its own."""
    torch = torch_module()
    buffer = io.BytesIO()
    try:
        torch.save(value.detach(), buffer)
    except Exception as error:
        raise InvalidArgumentError(
            f"{path}: torch.save cannot write a {_name(type(value))}: {type(error).__name__}: {error}"
        ) from error
    if not allow_pickle:
        try:
            torch.load(io.BytesIO(buffer.getvalue()), weights_only=True)
        except Exception as error:
            raise RefusedError(
                f"{path}: a {_name(type(value))} would have to be pickled "
                f"({type(error).__name__}): allow its type with torch.serialization.add_safe_globals, or pickles with allow_pickle=True"
            ) from error
    return buffer.getvalue()


def unpickled(data: bytes, path: str, device: Any, *, allow_pickle: bool) -> Any:
    """A tensor that torch.save wrote, on that device."""
    torch = torch_module()
    if torch is None:
        raise RefusedError(f"{path}: is a tensor of torch: import torch first")
    try:
        return torch.load(io.BytesIO(data), map_location=device, weights_only=not allow_pickle)
    except Exception as error:
        raise RefusedError(
            f"{path}: this tensor's type cannot be read without unpickling ({type(error).__name__}): allow it with "
            "torch.serialization.add_safe_globals, or pickles with allow_pickle=True if you trust them"
        ) from error
