"""From a shard back into the user's state: the way back of _state.py.

Tensors that are there already are filled where they lie; what is not there (the state of an optimizer that has made no step,
a value of a dictionary) is made. Everything but tensors' bytes is put in place at the end, when all has been loaded and
verified, by `finish`.
"""

from __future__ import annotations

import fnmatch
import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from holdfast import _json, _objects, _subclasses
from holdfast._arrays import array_dtype, is_array, numpy_dtype
from holdfast._core import TensorInfo
from holdfast._described import Spec, is_subclass, plain_types, rows, torch_module
from holdfast._errors import CorruptError, InvalidArgumentError, RefusedError, not_in_shard
from holdfast._fresh_states import FreshStates, check_no_whole, check_plain, load_into
from holdfast._merged import AS_VALUE, DIFFERS, Merge, OfAll, refusal
from holdfast._optimizers import (
    assign_state,
    by_position,
    is_optimizer,
    reads_plainly,
    unwrapped_optimizer,
)
from holdfast._part import PARTS, Part
from holdfast._range import Range
from holdfast._same_ranks import refuse_of_whole
from holdfast._state import (
    TENSOR_CODEC,
    TREE,
    Parameters,
    found_in,
    is_module,
    is_stateful,
    is_tensor,
    join,
    module_keys,
    numpy_module,
    unwrapped,
)
from holdfast._tensor_memory import (
    OTHER_DEVICE,
    address_of,
    bytes_of,
    copy_into,
    device_of,
    empty_like,
    extent_of,
    repeats_itself,
)
from holdfast._tree import Owners

_SHOWN = 5


@functools.cache
def torch_types() -> Any:
    """holdfast._torch_types, which needs torch: not before there is a tensor."""
    from holdfast import _torch_types

    return _torch_types


def _replace_content(target: dict[Any, Any], content: dict[Any, Any]) -> None:
    target.clear()
    target.update(content)


# What is in a place now; asked for at most once.
Like = Callable[[], Any]


def _there(like: Like | None) -> Any:
    return None if like is None else like()


def _child(like: Like | None, key: Any) -> Like | None:
    def child() -> Any:
        parent = _there(like)
        try:
            return parent[key]
        except (KeyError, IndexError, TypeError):
            return None

    return None if like is None else child


def holds_tensors(value: Any) -> bool:
    """Whether it names places that are to be filled, instead of being a value that is replaced."""
    if is_tensor(value) or is_array(value) or is_module(value) or is_optimizer(value):
        return True
    if isinstance(value, PARTS):
        return True
    if isinstance(value, Mapping):
        return (type(value) is not dict and is_stateful(value)) or any(
            holds_tensors(each) for each in value.values()
        )
    if type(value) in (list, tuple):
        return any(holds_tensors(each) for each in value)
    return is_stateful(value)


class Wanted:
    """What a state wants of a shard, and where to. A new one is made for each copy that is tried.

    wanted = Wanted(state, saved, objects, strict=True, allow_pickle=False, fresh=FreshStates(state))
    # load wanted.specs to wanted.addresses
    wanted.finish()
    """

    def __init__(
        self,
        state: dict[str, Any],
        saved: list[TensorInfo],
        objects: list[tuple[str, bytes, str | None]],
        *,
        strict: bool,
        allow_pickle: bool,
        convert: bool = False,
        rename: Callable[[str], str] = str,
        of_all: OfAll | None = None,
        merge: Mapping[str, Merge] | None = None,
        values_of: Callable[[OfAll, str], list[Any]] | None = None,
        fresh: FreshStates,
    ) -> None:
        """`of_all`: what all old ranks saved is looked at, not this rank's own alone: `saved` are whole tensors then.
        `values_of(of_all, path)`: what each of them had there, for those that `merge` names."""
        self._strict = strict
        self._convert = convert
        self._rename = rename
        self._of_all = of_all
        # (As many ranks as saved: each has its own, and nobody is asked.)
        self._merge = dict(merge or {}) if of_all is not None and not objects else {}
        self._values_of = values_of
        self._fresh = fresh
        self._differing = set() if of_all is None else of_all.differing(objects)
        self._new_on: Any = "cpu"  # where tensors are made for which there is no place
        self._allow_pickle = allow_pickle
        self._saved = {info.name: info for info in saved}
        own = objects
        if of_all is not None:
            objects = of_all.objects(own)
        self._objects = {name: (data, codec) for name, data, codec in objects}
        self._parameters = Parameters(list(found_in(state)), rename)
        self.specs: list[Spec] = []
        self.addresses: list[int] = []
        self._keep: list[Any] = []
        self._put_off: list[tuple[str, Any, str]] = []  # whole tensors that `_want` was given
        # Where a saved tensor, or that part of it, goes first; other places get it from there.
        self._places: dict[Key, Any] = {}
        self._index_of: dict[Key, int] = {}  # of its spec
        self._wanted_names: set[str] = set()
        # Where the content of a spec (by index) goes in the end: where it is loaded, or copied from there; maybe several.
        self._goals: list[tuple[int, Any]] = []
        self._copied: list[tuple[Any, int]] = []
        self._compared: list[tuple[list[str], Any, int]] = []
        # After the load and the copies: everything else, then the load_state_dict of those who are given it all.
        self._at_the_end: list[Callable[[], None]] = []
        self._loads: list[Callable[[], None]] = []
        self._modules: list[str] = []
        self._used_merges: set[str] = set()
        self._subclasses = _subclasses.Restored(self)
        self._unexpected: list[str] = []  # what modules had, and have not, that is no tensor
        if TREE not in self._objects:
            raise InvalidArgumentError(
                "this step was not saved by holdfast.Checkpointer: load it with dcp.load and holdfast.dcp.Reader, or read it with holdfast.open"
            )
        try:
            tree = _json.decode(self._objects[TREE][0])
            if of_all is not None:
                tree = of_all.tree(own)
            nodes = {key: node for key, node in tree["dict"]}
            for key in state:
                if key not in nodes:
                    raise not_in_shard(
                        f"{key!r} was not saved; what was: {_some(map(repr, nodes))}"
                    )
                self._into(nodes[key], state, key, str(key))
            self._want_put_off()
        except (KeyError, TypeError, AttributeError, IndexError, StopIteration) as error:
            raise CorruptError(
                f"the tree of this state cannot be understood: {type(error).__name__}: {error}"
            ) from error
        unused = self._merge.keys() - self._used_merges
        if unused:
            raise InvalidArgumentError(
                f"merge: there is nothing to be restored under {_some(sorted(map(repr, unused)))}"
            )
        self._check_unexpected(tree)
        self._share_memory()

    def finish(self) -> None:
        """After all tensors have been loaded: everything else."""
        torch = torch_module()
        for each in self._keep:
            if not is_array(each) and not each.is_inference():
                # A backward pass through what was there before is an error, as after load_state_dict.
                torch.autograd.graph.increment_version(each)
        for target, index in self._copied:
            copy_into(target, self._keep[index])
        for names, target, index in self._compared:
            if not bool((bytes_of(target) == bytes_of(self._keep[index])).all()):
                raise InvalidArgumentError(
                    f"{' and '.join(names)}: lie in the same memory, and were saved with different values: "
                    "what was saved was not tied, what is wanted is"
                )
        for action in self._at_the_end + self._loads:
            action()

    def _share_memory(self) -> None:
        """Views of one buffer, tied parameters of which each was saved: what lies in others' memory is loaded beside it, and
        compared with what came to lie there."""
        extents = []
        for number, (index, target) in enumerate(self._goals):
            nbytes = target.nbytes
            if nbytes == 0:
                continue  # no byte of it is in memory, whatever its address and strides are
            if target is self._keep[index]:
                begin = self.addresses[index]
                extents.append((self.specs[index][5], begin, begin + nbytes, number))
                continue
            device = device_of(target)
            if device == OTHER_DEVICE:
                self._copied.append((target, index))
            else:
                extents.append((device, *extent_of(target), number))
        extents.sort()
        cluster: list[int] = []
        device, end = OTHER_DEVICE, 0
        for where, begin, beyond, number in extents:
            if where != device or begin >= end:
                self._settle(cluster)
                cluster, device, end = [], where, beyond
            cluster.append(number)
            end = max(end, beyond)
        self._settle(cluster)

    def _is_direct(self, number: int) -> bool:
        """Whether that goal is where its tensor is loaded to."""
        index, target = self._goals[number]
        return target is self._keep[index]

    def _settle(self, cluster: list[int]) -> None:
        """Goals that overlap; one that does not is on its own."""
        if len(cluster) < 2:
            for number in cluster:
                if not self._is_direct(number):
                    index, target = self._goals[number]
                    self._copied.append((target, index))
            return
        names = sorted({self.specs[self._goals[number][0]][0] for number in cluster})[:_SHOWN]
        # One that holds all the others is loaded where it lies, unless some are copied into it.
        whole = None
        if all(map(self._is_direct, cluster)):
            spans = {number: extent_of(self._goals[number][1]) for number in cluster}
            begin, end = (
                min(span[0] for span in spans.values()),
                max(span[1] for span in spans.values()),
            )
            whole = next((number for number in cluster if spans[number] == (begin, end)), None)
        for number in cluster:
            if number == whole:
                continue
            index, target = self._goals[number]
            if self._is_direct(number):
                beside = self._keep[index] = empty_like(target)
                self.addresses[index] = address_of(beside)
            self._compared.append((names, target, index))
            if whole is None:
                self._copied.append((target, index))

    # ---- what a node becomes ----

    def _into(self, node: dict[str, Any], holder: Any, key: Any, path: str) -> None:
        """The node's content into holder[key], in place where there is a place."""
        target = holder[key]
        if self._merges(path):
            self._merged_into(self._merged_value(path), holder, key, path)
            return
        if "tensor" in node and type(target) in (bool, int, float):
            # A learning rate that was a tensor then, and is a number now.
            made = self._make(node, path)
            if is_tensor(made) and made.numel() == 1:
                self._at_the_end.append(lambda: holder.__setitem__(key, made.item()))
                return
        value = self._fill(node, target, path)
        if value is not target:
            self._at_the_end.append(lambda: holder.__setitem__(key, value))

    def _merges(self, path: str) -> bool:
        """Whether the user says what becomes of what is there."""
        fits = [pattern for pattern in self._merge if fnmatch.fnmatchcase(path, pattern)]
        self._used_merges.update(fits)
        return bool(fits)

    def _merged_value(self, path: str) -> Any:
        """What the user's function makes of all old ranks' values."""
        assert self._of_all is not None and self._values_of is not None
        pattern = next(each for each in self._merge if fnmatch.fnmatchcase(path, each))
        values = self._values_of(self._of_all, path)
        try:
            return self._merge[pattern](values)
        except Exception as error:
            raise InvalidArgumentError(
                f"merge of {path!r}: the function raised {type(error).__name__}: {error}"
            ) from error

    def _merged_into(self, value: Any, holder: Any, key: Any, path: str) -> None:
        target = holder[key]
        if is_module(target) or is_optimizer(target):
            raise InvalidArgumentError(
                f"{path}: a {type(target).__name__} cannot be merged: its parts can"
            )
        if isinstance(target, PARTS) or (is_tensor(target) and torch_types().is_dtensor(target)):
            raise InvalidArgumentError(
                f"{path}: is a part of a tensor, which is put together without being merged"
            )
        if is_tensor(target):
            fits = is_tensor(value) and value.shape == target.shape and value.dtype == target.dtype
            if not fits:
                raise InvalidArgumentError(
                    f"{path}: merge made {_words(value)}, wanted is {_words(target)}"
                )

            def put() -> None:
                with torch_module().no_grad():
                    target.copy_(value)

            self._at_the_end.append(put)
        elif is_array(target) and is_array(value) and target.shape == value.shape:
            self._at_the_end.append(lambda: target.__setitem__(..., value))
        elif is_stateful(target):
            self._loads.append(lambda: load_into(target, value, path))
        elif self._replacing(value, target) is not target:
            self._at_the_end.append(lambda: holder.__setitem__(key, value))

    @staticmethod
    def _check_agreed(node: dict[str, Any], path: str, *, of_optimizer: bool = False) -> None:
        if DIFFERS in node:
            raise refusal(path, of_optimizer=of_optimizer)

    def _present(self, node: dict[str, Any], name: str) -> dict[str, Any]:
        """Where one old rank had no element of a tensor others had."""
        if self._of_all is not None and "absent" in node and name in self._saved:
            return {"tensor": name}
        return node

    def _fill(self, node: dict[str, Any], target: Any, path: str) -> Any:
        """What the target is to be replaced by; itself, if it is filled in place."""
        self._check_agreed(node, path, of_optimizer=is_optimizer(target))
        inner = unwrapped_optimizer(target)
        if inner is not target:
            self._fill(node, inner, path)
            return target
        if "module" in node:
            if not is_module(target):
                raise InvalidArgumentError(
                    f"{path}: saved was a module, wanted is a {type(target).__name__}"
                )
            self._module(node["module"], unwrapped(target), path)
            return target
        if "optimizer" in node:
            if not is_optimizer(target) or not reads_plainly(target):
                raise InvalidArgumentError(
                    f"{path}: saved was an optimizer of torch, wanted is a {type(target).__name__}"
                )
            self._optimizer(node["optimizer"], target, path)
            return target
        if "stateful" in node and is_stateful(target):
            there = self._fresh.shown(target)
            loaded = self._make(node["stateful"], path, there)
            check_no_whole(loaded, there, target, path)
            self._loads.append(lambda: load_into(target, loaded, path))
            return target
        if is_module(target) or is_optimizer(target):
            raise InvalidArgumentError(
                f"{path}: wanted is a {type(target).__name__}, saved was something else: {_kind(node)}"
            )
        if is_tensor(target) or isinstance(target, PARTS):
            return self._tensor_into(node, target, path)
        if is_array(target) and "array" in node:
            return self._array_into(node["array"], target, path)
        if is_array(target) and "object" in node:
            return self._values_into(self._object(node["object"], path), target)
        if "dict" in node and isinstance(target, Mapping) and holds_tensors(target):
            return self._dict_into(node, target, path)
        if (
            "list" in node
            and type(target) is list
            and len(target) == len(node["list"])
            and holds_tensors(target)
        ):
            for i, each in enumerate(node["list"]):
                self._into(each, target, i, join(path, i))
            return target
        if (
            "tuple" in node
            and type(target) is tuple
            and len(target) == len(node["tuple"])
            and holds_tensors(target)
        ):
            parts = [
                self._merged_value(join(path, i))
                if self._merges(join(path, i))
                else self._fill(each, target[i], join(path, i))
                for i, each in enumerate(node["tuple"])
            ]
            return (
                target if all(a is b for a, b in zip(parts, target, strict=True)) else tuple(parts)
            )
        if holds_tensors(target):
            size = f" of {len(target)}" if isinstance(target, (list, tuple, Mapping)) else ""
            raise InvalidArgumentError(
                f"{path}: wanted is a {type(target).__name__}{size} with tensors to be filled, saved was {_kind(node)}"
            )
        return self._replacing(self._make(node, path), target)

    def _replacing(self, value: Any, target: Any) -> Any:
        """A dictionary or list that the user holds gets the new content, for others may hold it, too."""
        if type(value) is dict and type(target) is dict:
            self._at_the_end.append(functools.partial(_replace_content, target, value))
            return target
        if type(value) is list and type(target) is list:
            self._at_the_end.append(functools.partial(target.__setitem__, slice(None), value))
            return target
        return value

    def _dict_into(self, node: dict[str, Any], target: Any, path: str) -> Any:
        nodes = {key: each for key, each in node["dict"]}
        missing = [repr(key) for key in target if key not in nodes]
        unexpected = [repr(key) for key in nodes if key not in target]
        if AS_VALUE in node:
            unexpected = []  # other ranks' own
        if self._strict and (missing or unexpected):
            raise (not_in_shard if missing else InvalidArgumentError)(
                f"{path}: the keys differ: not saved: {_some(missing)}; saved and not wanted: {_some(unexpected)}"
                " (strict=False loads what both have)"
            )
        for key in target:
            if key in nodes:
                self._into(nodes[key], target, key, join(path, key))
        return target

    def _make(self, node: dict[str, Any], path: str, like: Like | None = None) -> Any:
        """Anew, of what was saved. `like`: what is in its place now, asked for when the node alone does not say enough."""
        if self._merges(path):
            return self._merged_value(path)
        self._check_agreed(node, path)
        if AS_VALUE in node:
            if node[AS_VALUE] is None:
                raise refusal(path)
            node = node[AS_VALUE]
        if "value" in node:
            return node["value"]
        if "dict" in node:
            return {
                key: self._make(each, join(path, key), _child(like, key))
                for key, each in node["dict"]
            }
        if "list" in node or "tuple" in node:
            kind = list if "list" in node else tuple
            return kind(
                self._make(each, join(path, i), _child(like, i))
                for i, each in enumerate(node[kind.__name__])
            )
        if "stateful" in node:
            return self._make(node["stateful"], path, like)
        if "object" in node:
            return self._object(node["object"], path)
        if "array" in node:
            there = _there(like)
            if isinstance(there, Part):
                return self._part_into(node, there.over(there.tensor.copy()), path)
            return self._new_array(node["array"], path)
        if "subclass" in node:
            return self._subclasses.make(node["subclass"], path, _there(like), self._new_on)
        if "tensor" in node:
            return self._make_tensor(node, path, like)
        there = _there(like)
        if there is None:
            raise InvalidArgumentError(
                f"{path}: saved was {_kind(node)}: give the object that it goes into"
            )
        return self._fill(node, there, path)

    def _make_tensor(self, node: dict[str, Any], path: str, like: Like | None) -> Any:
        info = self._info(node["tensor"], path)
        there = _there(like)
        if is_tensor(there) and torch_types().is_dtensor(there):
            return self._tensor_into(node, torch_module().empty_like(there), path)
        if isinstance(there, Range):
            fresh = Range(torch_module().empty_like(there.tensor), there.shape, there.start)
            return self._tensor_into(node, fresh, path)
        if isinstance(there, Part):
            return self._tensor_into(node, there.over(there.tensor.detach().clone()), path)
        if info.flat is not None:
            return self._new_range(info, path)
        if info.offset is not None:
            raise not_in_shard(
                f"{path}: saved was a part of a tensor: give the DTensor, or the holdfast.Part, that it goes into"
            )
        if info.name in self._places:
            return self._places[info.name]
        tensor = self._new_tensor(info, path, self._new_on)
        self._want(info.name, tensor, None, path)
        return tensor

    def _object(self, name: str, path: str) -> Any:
        if name not in self._objects:
            raise CorruptError(f"{path}: the object {name!r} is named and was not saved")
        if name in self._differing:
            raise refusal(path)
        data, codec = self._objects[name]
        if codec != TENSOR_CODEC:
            return _objects.from_object(path, data, codec, allow_pickle=self._allow_pickle)
        device = self._new_on
        return _subclasses.unpickled(data, path, device, allow_pickle=self._allow_pickle)

    def leave(self, names: Iterable[str]) -> None:
        """Saved tensors of which this rank has no place, and needs none."""
        self._wanted_names.update(names)

    # ---- tensors ----

    def _info(self, name: str, path: str) -> TensorInfo:
        info = self._saved.get(name)
        if info is None:
            who = "this rank" if self._of_all is None else "any rank"
            raise not_in_shard(f"{path}: no tensor {name!r} was saved by {who}")
        return info

    def _new_tensor(self, info: TensorInfo, path: str, device: Any) -> Any:
        _torch_types = torch_types()
        torch = torch_module()
        if torch is None:
            raise RefusedError(f"{path}: is a tensor of torch: import torch first")
        shape = info.shape if info.flat is None else info.flat[1:]
        return torch.empty(
            shape, dtype=_torch_types.dtype_from_name(info.dtype, path), device=device
        )

    def _new_range(self, info: TensorInfo, path: str) -> Range:
        assert info.flat is not None
        tensor = self._places.get((info.name, info.flat))
        made = self._new_tensor(info, path, self._new_on) if tensor is None else tensor
        part = Range(made, info.shape, info.flat[0])
        if tensor is None:
            self._want(info.name, made, part, path)
        return part

    def _tensor_into(self, node: dict[str, Any], target: Any, path: str) -> Any:
        self._check_agreed(node, path)
        _torch_types = torch_types()
        if isinstance(target, Range):
            self._check_range(node, target, path)
            self._want(node["tensor"], target.tensor, target, path)
            return target
        if isinstance(target, Part):
            return self._part_into(node, target, path)
        if "subclass" in node:
            return self._subclasses.fill(node["subclass"], target, path)
        if "object" in node:
            loaded = self._object(node["object"], path)
            if (
                not is_tensor(loaded)
                or loaded.dtype != target.dtype
                or loaded.shape != target.shape
            ):
                raise InvalidArgumentError(
                    f"{path}: was saved as {_words(loaded)}, wanted is {_words(target)}"
                )

            def put() -> None:
                with torch_module().no_grad():
                    target.copy_(loaded)

            self._at_the_end.append(put)
            return target
        if "value" in node and target.dim() == 0 and type(node["value"]) in (bool, int, float):
            number = node["value"]

            def put_number() -> None:  # a learning rate that was a number then
                with torch_module().no_grad():
                    target.fill_(number)

            self._at_the_end.append(put_number)
            return target
        place = None
        local = target
        if _torch_types.is_dtensor(target):
            place = _torch_types.dtensor_place(target, path)
            if place is None or place.empty:
                self._wanted_names.add(node.get("tensor", path))  # of which this rank has nothing
                return target
            local = target._local_tensor
        if "tensor" not in node:
            error = not_in_shard if "absent" in node else InvalidArgumentError
            raise error(f"{path}: wanted is a tensor, saved was {_kind(node)}")
        info = self._info(node["tensor"], path)
        if info.flat is not None:
            raise not_in_shard(
                f"{path}: was saved as {_saved_as(info)}, wanted is {_words(target)}: give the holdfast.Range that it goes into"
            )
        if is_subclass(local):
            raise InvalidArgumentError(
                f"{path}: wanted is a {type(local).__qualname__}, saved was a plain tensor"
            )
        self._want(node["tensor"], local, place, path)
        return target

    def _part_into(self, node: dict[str, Any], target: Part, path: str) -> Part:
        place = torch_types().part_place(target, path)
        if place.empty:
            self._wanted_names.add(node.get("tensor", path))
            return target
        of_numpy = is_array(target.tensor)
        kind = "array" if of_numpy and "array" in node else "tensor"
        if kind not in node:
            error = not_in_shard if "absent" in node else InvalidArgumentError
            raise error(f"{path}: wanted is a part of a tensor, saved was {_kind(node)}")
        if of_numpy:
            self._array_into(node[kind], target.local, path, place)
        else:
            self._want(node[kind], target.local, place, path)
        return target

    def _check_range(self, node: dict[str, Any], target: Range, path: str) -> None:
        target.check(path)
        saved = _kind(node)
        if "tensor" in node:
            info = self._info(node["tensor"], path)
            same_part = self._of_all is not None or info.flat == (target.start, target.length)
            if info.shape == target.shape and same_part:
                if self._dtype(info, path) == target.tensor.dtype or self._convert:
                    return
            saved = _saved_as(info)
        raise not_in_shard(f"{path}: was saved as {saved}, wanted is {target}")

    def _want(self, name: str, local: Any, place: Any, path: str) -> None:
        """The saved tensor into this one, where it lies if that is possible."""
        if place is None and name not in self._places and type(local) in plain_types():
            self._places[name] = local
            self._put_off.append((name, local, path))
        else:
            self._want_put_off()
            self._want_now(name, local, place, path)

    def _want_put_off(self) -> None:
        """All that `_want` has put off. Of thousands of tensors most lie in one piece: that is seen with little Python for each."""
        put_off, self._put_off = self._put_off, []
        try:
            found: Iterable[Any] = list(rows([local for _, local, _ in put_off])) if put_off else ()
        except (RuntimeError, ValueError):
            found = [None] * len(put_off)  # one has no memory: `_want_now` says which
        strided = torch_module() and torch_module().strided
        kinds: dict[Any, tuple[str, int]] = {}  # of dtype and device: their names
        for (name, local, path), row in zip(put_off, found, strict=True):
            if row is not None:
                (_, (dtype, shape, device, layout), contiguous, conj, neg), address = row
                kind = kinds.get((dtype, device))
                if kind is None and device.type in ("cpu", "cuda"):
                    kind = kinds[dtype, device] = (
                        torch_types().dtype_name(dtype, path),
                        torch_types().device_ordinal(local, path),
                    )
                if kind is not None and layout is strided and contiguous and not (conj or neg):
                    spec = (name, kind[0], tuple(shape), None, None, kind[1], None)
                    self._append(name, spec, address, local, local)
                    continue
            del self._places[name]
            self._want_now(name, local, None, path)

    def _want_now(self, name: str, local: Any, place: Any, path: str) -> None:
        _torch_types = torch_types()
        self._info(name, path)
        if local.device.type == "meta":
            raise InvalidArgumentError(
                f"{path}: a tensor on the meta device has no memory: materialise it first (to_empty)"
            )
        if local.layout != torch_module().strided:
            raise InvalidArgumentError(
                f"{path}: is a tensor of layout {local.layout}, which cannot be filled: give a dense one (to_dense())"
            )
        key = _place_key(name, place)
        if key in self._places:
            first = self._places[key]
            if is_array(first):
                raise InvalidArgumentError(f"{path}: {name!r} is wanted as an array, too")
            if first.shape != local.shape or first.dtype != local.dtype:
                raise InvalidArgumentError(
                    f"{path}: tensor {name!r} is wanted as {first.dtype} {list(first.shape)}, and here as "
                    f"{local.dtype} {list(local.shape)}"
                )
            if first.data_ptr() != local.data_ptr() or first.stride() != local.stride():
                self._check_elements(local, path)
                self._goals.append((self._index_of[key], local))
            return
        self._places[key] = local
        into = local
        if torch_module().nn.parameter.is_lazy(local):
            raise InvalidArgumentError(
                f"{path}: has no shape yet: run a forward pass through the lazy module first"
            )
        contiguous = local.is_contiguous()
        if not contiguous:
            self._check_elements(local, path)
        if (
            not contiguous
            or local.device.type not in ("cpu", "cuda")
            or local.is_conj()
            or local.is_neg()
        ):
            torch = torch_module()
            device = local.device if local.device.type in ("cpu", "cuda") else "cpu"
            into = torch.empty(local.shape, dtype=local.dtype, device=device)
        shape, offset, local_shape, flat = tuple(local.shape), None, None, None
        if isinstance(place, Range):
            shape, flat = place.shape, (place.start, place.length)
        elif place is not None and not place.whole:
            shape, offset, local_shape = place.shape, place.offset, place.local_shape
        device = _torch_types.device_ordinal(into, path)
        dtype = _torch_types.dtype_name(into.dtype, path)
        spec = (name, dtype, shape, offset, local_shape, device, flat)
        self._append(key, spec, into.data_ptr(), into, local)

    @staticmethod
    def _check_elements(target: Any, path: str) -> None:
        if repeats_itself(target):
            kind, copy = (
                ("an expanded tensor", "clone")
                if is_tensor(target)
                else ("a broadcast array", "copy")
            )
            raise InvalidArgumentError(
                f"{path}: is {kind}: several of its elements are one in memory. Give a copy of it ({copy}())"
            )

    def _append(self, key: Key, spec: Spec, address: int, keep: Any, target: Any) -> None:
        self._wanted_names.add(spec[0])
        self._index_of[key] = len(self.specs)
        self._goals.append((len(self.specs), target))
        self.specs.append(spec)
        self.addresses.append(address)
        self._keep.append(keep)

    def _array_into(self, name: str, target: Any, path: str, place: Any = None) -> Any:
        """`place`: of the part of the array that the target is."""
        info = self._info(name, path)
        shape = target.shape if place is None else place.shape
        if shape != info.shape or array_dtype(target.dtype, path) != info.dtype:
            raise InvalidArgumentError(
                f"{path}: was saved as {info.dtype} {list(info.shape)}, wanted is an array of {target.dtype} "
                f"{list(shape)}"
            )
        offset, local_shape = None, None
        if place is not None and not place.whole:
            offset, local_shape = place.offset, place.local_shape
        spec = (name, info.dtype, info.shape, offset, local_shape, -1, None)
        if not target.flags.writeable:
            if place is not None:
                raise InvalidArgumentError(
                    f"{path}: is a part of a read-only array: give a copy of it"
                )
            return self._new_array(name, path)
        self._check_elements(target, path)
        key = _place_key(name, place)
        self._want_put_off()
        if key in self._places:
            self._goals.append((self._index_of[key], target))
            return target
        into = target
        if not target.flags.c_contiguous:
            into = numpy_module().empty(target.shape, target.dtype)
        self._places[key] = into
        self._append(key, spec, address_of(into), into, target)
        return target

    def _values_into(self, value: Any, target: Any) -> Any:
        """An array of what has no place in a safetensors file: texts, dates."""
        if (
            not is_array(value)
            or value.dtype != target.dtype
            or value.shape != target.shape
            or not target.flags.writeable
        ):
            return value
        self._at_the_end.append(lambda: target.__setitem__(..., value))
        return target

    def _new_array(self, name: str, path: str) -> Any:
        info = self._info(name, path)
        numpy = numpy_module()
        if numpy is None:
            raise RefusedError(f"{path}: is an array of NumPy: import numpy first")
        if info.offset is not None:
            raise not_in_shard(
                f"{path}: saved was a part of an array: give the holdfast.Part that it goes into"
            )
        key = name
        if key in self._places:
            return self._places[key]
        array = numpy.empty(info.shape, dtype=numpy_dtype(info.dtype, path))
        self._places[key] = array
        spec = (name, info.dtype, info.shape, None, None, -1, None)
        self._append(key, spec, address_of(array), array, array)
        return array

    # ---- modules ----

    def _module(self, rest: dict[str, Any], module: Any, path: str) -> None:
        self._modules.append(path)
        state = module.state_dict(keep_vars=True)
        shows_memory = says_its_memory(module, state)
        if not shows_memory:
            state = module.state_dict()
            self._loads.append(lambda: load_into(module, state, path, strict=self._strict))
        missing = []
        plain = plain_types()
        prefix = f"{path}."
        names = [self._rename(prefix + key) for key in module_keys(state)]
        for name, (key, value) in zip(names, state.items(), strict=True):
            info = self._saved.get(name)
            if (
                info is not None
                and type(value) in plain
                and info.flat is None
                and not self._merge
                and not key.endswith("_extra_state")
                and not (rest and name.removeprefix(prefix) in rest)
            ):
                self._want(name, value, None, name)  # as nearly all are
                continue
            node = self._present(rest.get(name.removeprefix(prefix), {"tensor": name}), name)
            if self._merges(name):
                self._wanted_names.add(name)
                self._merged_into(self._merged_value(name), state, key, name)
            elif "tensor" in node and node["tensor"] not in self._saved:
                missing.append(name)
            elif key.rpartition(".")[2] == "_extra_state":
                state[key] = self._make(node, name)
                if shows_memory:
                    self._set_extra_state(module, key, state[key])
            elif is_tensor(value):
                self._tensor_into(node, value, name)
            else:
                self._into(node, state, key, name)
        self._unexpected += sorted({prefix + key for key in rest}.difference(names))
        if missing and self._strict:
            raise not_in_shard(
                f"{path}: not saved: {_some(missing)} (strict=False leaves them as they are)"
            )

    def _set_extra_state(self, module: Any, key: str, value: Any) -> None:
        owner = module.get_submodule(key.rpartition(".")[0])
        self._at_the_end.append(lambda: owner.set_extra_state(value))

    def _check_unexpected(self, tree: dict[str, Any]) -> None:
        if not self._strict:
            return
        if self._of_all is not None:
            self._unexpected = [
                name for name in self._unexpected if name in self._of_all.of_every_rank
            ]
        if self._unexpected:
            raise InvalidArgumentError(
                f"saved and not wanted: {_some(self._unexpected)} (strict=False leaves them out)"
            )
        left = [
            name
            for name in self._saved
            if name not in self._wanted_names
            and (self._of_all is None or name in self._of_all.of_every_rank)
        ]
        owners: Owners | None = None
        for path in self._modules if left else ():
            unexpected = [name for name in left if name.startswith(f"{path}.")]
            if unexpected:
                owners = owners or Owners(tree)
                unexpected = [name for name in unexpected if owners.are(name, path)]
            if unexpected:
                raise InvalidArgumentError(
                    f"{path}: saved and not wanted: {_some(unexpected)} (strict=False leaves them out)"
                )

    # ---- optimizers ----

    def _optimizer(self, node: dict[str, Any], optimizer: Any, path: str) -> None:
        had = {name for group in node["groups"] for name in group["params"]}
        names = self._parameters.names_of(optimizer, had)
        if node.get("by_position", True):
            names = by_position(node["groups"], optimizer.param_groups, names)
        self._check_groups(node["groups"], optimizer, names, path)
        groups = zip(node["groups"], optimizer.param_groups, strict=True)
        for number, (saved, group) in enumerate(groups):
            for key, field in saved["fields"]:
                full = f"{path}.groups.{number}.{key}"
                for each in getattr(group, "groups", (group,)):  # of merged optimizers
                    if key in each:
                        self._into(field, each, key, full)
                    else:
                        value = self._make(field, full)
                        self._at_the_end.append(functools.partial(each.__setitem__, key, value))
        parameters = {
            names[id(parameter)]: (parameter, group)
            for group in optimizer.param_groups
            for parameter in group["params"]
        }
        states: dict[Any, dict[str, Any]] = {}
        there = optimizer.state or self._fresh.of(optimizer)
        why_not = self._fresh.why_not(optimizer)
        for kind in node["states"]:
            for name in kind["params"]:
                if name not in parameters and self._of_all is not None:
                    continue  # another pipeline stage's
                parameter, group = parameters[name]
                has = there.get(parameter, {})
                states[parameter] = {
                    key: self._entry(
                        node["rest"]
                        .get(name, {})
                        .get(key, {"tensor": f"{path}.state.{name}.{key}"}),
                        has.get(key),
                        parameter,
                        key == "step" and not (group.get("capturable") or group.get("fused")),
                        f"{path}.state.{name}.{key}",
                        why_not,
                    )
                    for key in kind["keys"]
                }
        self._at_the_end.append(functools.partial(assign_state, optimizer, states))

    def _entry(
        self, node: dict[str, Any], has: Any, parameter: Any, on_host: bool, path: str, why_not: str
    ) -> Any:
        """One entry of a parameter's state: the tensor that is there, or one made as the optimizer would."""
        self._check_agreed(node, path, of_optimizer=True)
        node = self._present(node, path)
        if "absent" in node:
            return self._absent(has, parameter)
        if "subclass" in node:
            return self._subclasses.entry(node["subclass"], has, parameter, path)
        if "tensor" not in node:
            return self._nested_entry(node, has, parameter, path, why_not)
        info = self._info(node["tensor"], path)
        shape = info.shape if info.flat is None else info.flat[1:]
        if info.flat is None and info.shape == self._parameters.whole_shape(parameter):
            shape = tuple(parameter.shape)  # a part, as the parameter is one
        same_type = is_tensor(has) and (self._convert or self._dtype(info, path) == has.dtype)
        if same_type and tuple(has.shape) == shape:
            return self._entry_into(info, has, parameter, path)
        if tuple(parameter.shape) == shape:
            dtype = self._dtype(info, path)
            if self._convert and dtype.is_floating_point and not on_host:
                dtype = parameter.dtype  # as the optimizer would have it
            torch = torch_module()
            like = torch.zeros_like if self._parameters.padded(parameter) else torch.empty_like
            made = like(parameter, dtype=dtype, requires_grad=False)
        else:
            check_plain(parameter, info.shape, path, why_not)
            made = self._new_tensor(info, path, "cpu" if on_host else parameter.device)
            self._check_same_ranks(made, parameter, path)
        return self._entry_into(info, made, parameter, path)

    def _entry_into(self, info: TensorInfo, target: Any, parameter: Any, path: str) -> Any:
        into = self._parameters.part(parameter, target, path)
        if info.flat is not None and into is target:  # the parameter itself is not restored
            into = Range(target, info.shape, info.flat[0])
        self._tensor_into({"tensor": info.name}, into, path)
        return target

    def _nested_entry(
        self, node: dict[str, Any], has: Any, parameter: Any, path: str, why_not: str
    ) -> Any:
        """An entry that is a list or dictionary, with tensors in it perhaps (LBFGS)."""
        if (
            ("list" in node and type(has) is list and len(has) == len(node["list"]))
            or ("tuple" in node and type(has) is tuple and len(has) == len(node["tuple"]))
            or (
                "dict" in node
                and isinstance(has, Mapping)
                and set(has) == {key for key, _ in node["dict"]}
            )
        ) and holds_tensors(has):
            return self._fill(node, has, path)
        if "value" not in node and "object" not in node:
            check_plain(parameter, (1,), path, why_not)
        before, self._new_on = self._new_on, parameter.device
        try:
            made = self._make(node, path)
        finally:
            self._new_on = before
        self._check_same_ranks(made, parameter, path)
        return made

    def _check_same_ranks(self, made: Any, parameter: Any, path: str) -> None:
        if self._of_all is not None and self._parameters.is_split(parameter):
            refuse_of_whole(made, parameter.shape, path)

    def _absent(self, has: Any, parameter: Any) -> Any:
        # Of a DTensor, or a Part, of which this rank has no element.
        if not is_absent(parameter) and not self._parameters.is_empty_part(parameter):
            raise not_in_shard(
                f"saved was no part of the state of a parameter of shape {list(parameter.shape)}, and wanted is one"
            )
        return has if is_tensor(has) else torch_module().zeros_like(parameter, requires_grad=False)

    @staticmethod
    def _dtype(info: TensorInfo, path: str) -> Any:
        _torch_types = torch_types()
        return _torch_types.dtype_from_name(info.dtype, path)

    def _check_groups(
        self, saved: list[dict[str, Any]], optimizer: Any, names: dict[int, str], path: str
    ) -> None:
        if len(saved) != len(optimizer.param_groups):
            raise InvalidArgumentError(
                f"{path}: saved were {len(saved)} groups of parameters, wanted are {len(optimizer.param_groups)}"
            )
        for number, (one, group) in enumerate(zip(saved, optimizer.param_groups, strict=True)):
            in_group = [names[id(parameter)] for parameter in group["params"]]
            if in_group == one["params"]:
                continue
            wanted, had = set(in_group), set(one["params"])
            left_out = had - wanted
            if self._of_all is not None:
                left_out &= self._of_all.of_every_rank
            if wanted - had or left_out:
                raise (not_in_shard if wanted - had else InvalidArgumentError)(
                    f"{path}: group {number}: not saved: {_some(sorted(wanted - had))}; saved and not wanted: {_some(sorted(had - wanted))}"
                )


# Of a saved tensor, or of a part of it.
Key = str | tuple[Any, ...]


def _place_key(name: str, place: Any) -> Key:
    if isinstance(place, Range):
        return name, (place.start, place.length)
    return name if place is None or place.whole else (name, (place.offset, place.local_shape))


def says_its_memory(module: Any, state: dict[str, Any]) -> bool:
    """Whether what its state_dict shows is the memory that the module works with; where hooks or methods of its own put
    something else there, its load_state_dict knows the way back."""
    own = {
        id(each)
        for part in module.modules()
        for kind in (part._parameters, part._buffers)
        for each in kind.values()
    }
    return all(
        is_tensor(value) and id(value) in own
        for key, value in state.items()
        if key.rpartition(".")[2] != "_extra_state"
    )


def is_absent(tensor: Any) -> bool:
    """Whether it is a DTensor of which this rank has no element."""
    _torch_types = torch_types()
    if not _torch_types.is_dtensor(tensor):
        return False
    place = _torch_types.dtensor_place(tensor, "")
    return place is None or place.empty


def _saved_as(info: TensorInfo) -> str:
    part = "" if info.offset is None else "a part of "
    if info.flat is not None:
        part = f"elements {info.flat[0]} to {sum(info.flat)} of "
    return f"{part}{info.dtype} {list(info.shape)}"


def _kind(node: dict[str, Any]) -> str:
    kind = next(iter(node), "nothing")
    return f"a {kind}" + (f" of {len(node[kind])}" if kind in ("list", "tuple", "dict") else "")


def _words(value: Any) -> str:
    if is_tensor(value):
        return f"a {type(value).__qualname__} of {value.dtype} {list(value.shape)}"
    return f"a {type(value).__qualname__}"


def _some(names: Any) -> str:
    names = list(names)
    shown = ", ".join(names[:_SHOWN])
    return (shown or "nothing") + (
        f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    )
