"""From a shard back into the user's state: the way back of _state.py.

Tensors that are there already are filled where they lie; what is not there (the state of an optimizer that has made no step,
a value of a dictionary) is made. Everything but tensors' bytes is put in place at the end, when all has been loaded and
verified, by `finish`.
"""

from __future__ import annotations

import functools
import io
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from holdfast import _json, _objects
from holdfast._core import TensorInfo
from holdfast._errors import Corrupt, InvalidArgument, Refused
from holdfast._range import Range
from holdfast._state import (
    ARRAY_DTYPES_BACK,
    TENSOR_CODEC,
    TREE,
    Parameters,
    Spec,
    array_dtype,
    is_array,
    is_module,
    is_optimizer,
    is_stateful,
    is_subclass,
    is_tensor,
    join,
    module_key,
    module_keys,
    numpy_module,
    reads_plainly,
    torch_module,
    unwrapped,
)
from holdfast._tree import Owners

_SHOWN = 5


@functools.cache
def torch_types() -> Any:
    """holdfast._torch_types, which needs torch: not before there is a tensor."""
    from holdfast import _torch_types

    return _torch_types


# What is in a place now; asked for at most once.
Like = Callable[[], Any]


def _state_of(target: Any) -> Like:
    @functools.cache
    def state() -> Any:
        try:
            return target.state_dict()
        except Exception:  # it has none yet, perhaps
            return None

    return state


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
    if isinstance(value, Range):
        return True
    if isinstance(value, Mapping):
        return (type(value) is not dict and is_stateful(value)) or any(
            holds_tensors(each) for each in value.values()
        )
    if type(value) in (list, tuple):
        return any(holds_tensors(each) for each in value)
    return is_stateful(value)


class Wanted:
    """What a state wants of a shard, and where to. Made anew for each copy that is tried.

    wanted = Wanted(state, saved, objects, strict=True, allow_pickle=False)
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
    ) -> None:
        self._strict = strict
        self._new_on: Any = "cpu"  # where tensors are made for which there is no place
        self._allow_pickle = allow_pickle
        self._saved = {info.name: info for info in saved}
        self._objects = {name: (data, codec) for name, data, codec in objects}
        self._parameters = Parameters(state)
        self.specs: list[Spec] = []
        self.addresses: list[int] = []
        self._keep: list[Any] = []
        # Where a saved tensor goes first; other places get it from there.
        self._places: dict[str, Any] = {}
        self._index_of: dict[str, int] = {}  # of the spec of a saved tensor
        # Where the content of a spec (by index) goes in the end: where it is loaded, or copied from there; maybe several.
        self._goals: list[tuple[int, Any]] = []
        self._copied: list[tuple[Any, int]] = []
        self._compared: list[tuple[list[str], Any, int]] = []
        # After the load and the copies: everything else, then the load_state_dict of those who are given it all.
        self._at_the_end: list[Callable[[], None]] = []
        self._loads: list[Callable[[], None]] = []
        self._modules: list[str] = []
        self._unexpected: list[str] = []  # what modules had, and have not, that is no tensor
        if TREE not in self._objects:
            raise InvalidArgument(
                "this step was not saved by holdfast.Checkpointer: load it with dcp.load and holdfast.dcp.Reader, or read it with holdfast.open"
            )
        tree = _json.decode(self._objects[TREE][0])
        try:
            nodes = {key: node for key, node in tree["dict"]}
            for key in state:
                if key not in nodes:
                    raise InvalidArgument(
                        f"{key!r} was not saved; what was: {_some(map(repr, nodes))}"
                    )
                self._into(nodes[key], state, key, str(key))
        except (KeyError, TypeError, AttributeError, IndexError) as error:
            raise Corrupt(
                f"the tree of this state cannot be understood: {type(error).__name__}: {error}"
            ) from error
        self._check_unexpected(tree)
        self._share_memory()

    def finish(self) -> None:
        """After all tensors have been loaded: everything else."""
        for each in self._keep:
            if is_tensor(each) and not each.is_inference():
                # A backward pass through what was there before is an error, as after load_state_dict.
                torch_module().autograd.graph.increment_version(each)
        for target, index in self._copied:
            copy_into(target, self._keep[index])
        for names, target, index in self._compared:
            if not bool((bytes_of(target) == bytes_of(self._keep[index])).all()):
                raise InvalidArgument(
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
            device = device_of(target)
            if self._is_direct(number):
                begin = self.addresses[index]
                extents.append((device, begin, begin + target.nbytes, number))
            elif device == _OTHER_DEVICE:
                self._copied.append((target, index))
            elif target.nbytes:
                extents.append((device, *extent_of(target), number))
        extents.sort()
        cluster: list[int] = []
        device, end = _OTHER_DEVICE, 0
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
        if "tensor" in node and type(target) in (bool, int, float):
            # A learning rate that was a tensor then, and is a number now.
            made = self._make(node, path)
            if is_tensor(made) and made.numel() == 1:
                self._at_the_end.append(lambda: holder.__setitem__(key, made.item()))
                return
        value = self._fill(node, target, path)
        if value is not target:
            self._at_the_end.append(lambda: holder.__setitem__(key, value))

    def _fill(self, node: dict[str, Any], target: Any, path: str) -> Any:
        """What the target is to be replaced by; itself, if it is filled in place."""
        if "module" in node:
            if not is_module(target):
                raise InvalidArgument(
                    f"{path}: saved was a module, wanted is a {type(target).__name__}"
                )
            self._module(node["module"], unwrapped(target), path)
            return target
        if "optimizer" in node:
            if not is_optimizer(target) or not reads_plainly(target):
                raise InvalidArgument(
                    f"{path}: saved was an optimizer of torch, wanted is a {type(target).__name__}"
                )
            self._optimizer(node["optimizer"], target, path)
            return target
        if "stateful" in node and is_stateful(target):
            loaded = self._make(node["stateful"], path, _state_of(target))
            self._loads.append(lambda: target.load_state_dict(loaded))
            return target
        if is_module(target) or is_optimizer(target):
            raise InvalidArgument(
                f"{path}: wanted is a {type(target).__name__}, saved was something else: {_kind(node)}"
            )
        if is_tensor(target) or isinstance(target, Range):
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
                self._fill(each, target[i], join(path, i)) for i, each in enumerate(node["tuple"])
            ]
            return (
                target if all(a is b for a, b in zip(parts, target, strict=True)) else tuple(parts)
            )
        if holds_tensors(target):
            size = f" of {len(target)}" if isinstance(target, (list, tuple, Mapping)) else ""
            raise InvalidArgument(
                f"{path}: wanted is a {type(target).__name__}{size} with tensors to be filled, saved was {_kind(node)}"
            )
        return self._replacing(self._make(node, path), target)

    def _replacing(self, value: Any, target: Any) -> Any:
        """A dictionary or list that the user holds gets the new content, for others may hold it, too."""
        if type(value) is dict and type(target) is dict:
            self._at_the_end.append(lambda: (target.clear(), target.update(value)))
            return target
        if type(value) is list and type(target) is list:
            self._at_the_end.append(lambda: target.__setitem__(slice(None), value))
            return target
        return value

    def _dict_into(self, node: dict[str, Any], target: Any, path: str) -> Any:
        nodes = {key: each for key, each in node["dict"]}
        missing = [repr(key) for key in target if key not in nodes]
        unexpected = [repr(key) for key in nodes if key not in target]
        if self._strict and (missing or unexpected):
            raise InvalidArgument(
                f"{path}: the keys differ: not saved: {_some(missing)}; saved and not wanted: {_some(unexpected)}"
                " (strict=False loads what both have)"
            )
        for key in target:
            if key in nodes:
                self._into(nodes[key], target, key, join(path, key))
        return target

    def _make(self, node: dict[str, Any], path: str, like: Like | None = None) -> Any:
        """Anew, of what was saved. `like`: what is in its place now, asked for when the node alone does not say enough."""
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
            return self._new_array(node["array"], path)
        if "tensor" in node:
            return self._make_tensor(node, path, like)
        there = _there(like)
        if there is None:
            raise InvalidArgument(
                f"{path}: saved was {_kind(node)}: give the object that it goes into"
            )
        return self._fill(node, there, path)

    def _make_tensor(self, node: dict[str, Any], path: str, like: Like | None) -> Any:
        info = self._info(node["tensor"], path)
        there = _there(like) if "torch.distributed.tensor" in sys.modules else None
        if is_tensor(there) and torch_types().is_dtensor(there):
            return self._tensor_into(node, torch_module().empty_like(there), path)
        if info.flat is not None:
            return self._new_range(info, path)
        if info.offset is not None:
            raise InvalidArgument(
                f"{path}: saved was a part of a tensor: give the DTensor that it goes into"
            )
        if info.name in self._places:
            return self._places[info.name]
        tensor = self._new_tensor(info, path, self._new_on)
        self._want(info.name, tensor, None, path)
        return tensor

    def _object(self, name: str, path: str) -> Any:
        if name not in self._objects:
            raise Corrupt(f"{path}: the object {name!r} is named and was not saved")
        data, codec = self._objects[name]
        if codec != TENSOR_CODEC:
            return _objects.from_object(path, data, codec, allow_pickle=self._allow_pickle)
        return tensor_of_bytes(data, path, allow_pickle=self._allow_pickle)

    # ---- tensors ----

    def _info(self, name: str, path: str) -> TensorInfo:
        info = self._saved.get(name)
        if info is None:
            raise InvalidArgument(f"{path}: no tensor {name!r} was saved by this rank")
        return info

    def _new_tensor(self, info: TensorInfo, path: str, device: Any) -> Any:
        _torch_types = torch_types()
        torch = torch_module()
        if torch is None:
            raise Refused(f"{path}: is a tensor of torch: import torch first")
        shape = info.shape if info.flat is None else info.flat[1:]
        return torch.empty(
            shape, dtype=_torch_types.dtype_from_name(info.dtype, path), device=device
        )

    def _new_range(self, info: TensorInfo, path: str) -> Range:
        assert info.flat is not None
        tensor = self._places.get(info.name)
        made = self._new_tensor(info, path, self._new_on) if tensor is None else tensor
        part = Range(made, info.shape, info.flat[0])
        if tensor is None:
            self._want(info.name, made, part, path)
        return part

    def _tensor_into(self, node: dict[str, Any], target: Any, path: str) -> Any:
        _torch_types = torch_types()
        if isinstance(target, Range):
            self._check_range(node, target, path)
            self._want(node["tensor"], target.tensor, target, path)
            return target
        if "object" in node:
            loaded = self._object(node["object"], path)
            if (
                not is_tensor(loaded)
                or loaded.dtype != target.dtype
                or loaded.shape != target.shape
            ):
                raise InvalidArgument(
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
                return target
            local = target._local_tensor
        if "tensor" not in node:
            raise InvalidArgument(f"{path}: wanted is a tensor, saved was {_kind(node)}")
        info = self._info(node["tensor"], path)
        if info.flat is not None:
            raise InvalidArgument(
                f"{path}: was saved as {_saved_as(info)}, wanted is {_words(target)}: give the holdfast.Range that it goes into"
            )
        if is_subclass(local):
            raise InvalidArgument(
                f"{path}: wanted is a {type(local).__qualname__}, saved was a plain tensor"
            )
        self._want(node["tensor"], local, place, path)
        return target

    def _check_range(self, node: dict[str, Any], target: Range, path: str) -> None:
        target.check(path)
        saved = _kind(node)
        if "tensor" in node:
            info = self._info(node["tensor"], path)
            if (info.shape, info.flat) == (target.shape, (target.start, target.length)) and (
                self._dtype(info, path) == target.tensor.dtype
            ):
                return
            saved = _saved_as(info)
        raise InvalidArgument(f"{path}: was saved as {saved}, wanted is {target}")

    def _want(self, name: str, local: Any, place: Any, path: str) -> None:
        """The saved tensor into this one, where it lies if that is possible."""
        _torch_types = torch_types()
        self._info(name, path)
        if local.device.type == "meta":
            raise InvalidArgument(
                f"{path}: a tensor on the meta device has no memory: materialise it first (to_empty)"
            )
        if name in self._places:
            first = self._places[name]
            if is_array(first):
                raise InvalidArgument(f"{path}: {name!r} is wanted as an array, too")
            if first.shape != local.shape or first.dtype != local.dtype:
                raise InvalidArgument(
                    f"{path}: tensor {name!r} is wanted as {first.dtype} {list(first.shape)}, and here as "
                    f"{local.dtype} {list(local.shape)}"
                )
            if first.data_ptr() != local.data_ptr() or first.stride() != local.stride():
                self._check_elements(local, path)
                self._goals.append((self._index_of[name], local))
            return
        self._places[name] = local
        into = local
        if torch_module().nn.parameter.is_lazy(local):
            raise InvalidArgument(
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
        device = _torch_types.device_ordinal(into)
        dtype = _torch_types.dtype_name(into.dtype, path)
        spec = (name, dtype, shape, offset, local_shape, device, flat)
        self._append(spec, into.data_ptr(), into, local)

    @staticmethod
    def _check_elements(target: Any, path: str) -> None:
        if repeats_itself(target):
            kind, own = (
                ("expanded tensor", "clone") if is_tensor(target) else ("broadcast array", "copy")
            )
            raise InvalidArgument(
                f"{path}: is an {kind}: several of its elements are one in memory: give one of its own ({own}())"
            )

    def _append(self, spec: Spec, address: int, keep: Any, target: Any) -> None:
        self._index_of[spec[0]] = len(self.specs)
        self._goals.append((len(self.specs), target))
        self.specs.append(spec)
        self.addresses.append(address)
        self._keep.append(keep)

    def _array_into(self, name: str, target: Any, path: str) -> Any:
        info = self._info(name, path)
        if target.shape != info.shape or array_dtype(target.dtype, path) != info.dtype:
            raise InvalidArgument(
                f"{path}: was saved as {info.dtype} {list(info.shape)}, wanted is an array of {target.dtype} "
                f"{list(target.shape)}"
            )
        spec = (name, info.dtype, info.shape, None, None, -1, None)
        if not target.flags.writeable:
            return self._new_array(name, path)
        self._check_elements(target, path)
        if name in self._places:
            self._goals.append((self._index_of[name], target))
            return target
        into = target
        if not target.flags.c_contiguous:
            into = numpy_module().empty(target.shape, target.dtype)
        self._places[name] = into
        self._append(spec, address_of(into), into, target)
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
            raise Refused(f"{path}: is an array of NumPy: import numpy first")
        if info.dtype not in ARRAY_DTYPES_BACK:
            raise InvalidArgument(f"{path}: NumPy has no dtype for {info.dtype}")
        if name in self._places:
            return self._places[name]
        array = numpy.empty(info.shape, dtype=ARRAY_DTYPES_BACK[info.dtype])
        self._places[name] = array
        self._append(
            (name, info.dtype, info.shape, None, None, -1, None), address_of(array), array, array
        )
        return array

    # ---- modules ----

    def _module(self, rest: dict[str, Any], module: Any, path: str) -> None:
        self._modules.append(path)
        state = module.state_dict(keep_vars=True)
        plain = says_its_memory(module, state)
        if not plain:
            state = module.state_dict()
            self._loads.append(lambda: module.load_state_dict(state, strict=self._strict))
        missing = []
        for key, value in state.items():
            name = f"{path}.{module_key(key)}"
            node = rest.get(module_key(key), {"tensor": name})
            if "tensor" in node and node["tensor"] not in self._saved:
                missing.append(name)
            elif key.rpartition(".")[2] == "_extra_state":
                state[key] = self._make(node, name)
                if plain:
                    self._set_extra_state(module, key, state[key])
            elif is_tensor(value):
                self._tensor_into(node, value, name)
            else:
                self._into(node, state, key, name)
        for key in rest.keys() - set(module_keys(state)):
            self._unexpected.append(f"{path}.{key}")
        if missing and self._strict:
            raise InvalidArgument(
                f"{path}: not saved: {_some(missing)} (strict=False leaves them as they are)"
            )

    def _set_extra_state(self, module: Any, key: str, value: Any) -> None:
        owner = module.get_submodule(key.rpartition(".")[0])
        self._at_the_end.append(lambda: owner.set_extra_state(value))

    def _check_unexpected(self, tree: dict[str, Any]) -> None:
        if not self._strict:
            return
        if self._unexpected:
            raise InvalidArgument(
                f"saved and not wanted: {_some(self._unexpected)} (strict=False leaves them out)"
            )
        owners: Owners | None = None
        for path in self._modules:
            unexpected = [
                name
                for name in self._saved
                if name.startswith(f"{path}.") and name not in self._places
            ]
            if unexpected:
                owners = owners or Owners(tree)
                unexpected = [name for name in unexpected if owners.are(name, path)]
            if unexpected:
                raise InvalidArgument(
                    f"{path}: saved and not wanted: {_some(unexpected)} (strict=False leaves them out)"
                )

    # ---- optimizers ----

    def _optimizer(self, node: dict[str, Any], optimizer: Any, path: str) -> None:
        had = {name for group in node["groups"] for name in group["params"]}
        names = by_position(
            node["groups"], optimizer.param_groups, self._parameters.names_of(optimizer, had)
        )
        self._check_groups(node["groups"], optimizer, names, path)
        for saved, group in zip(node["groups"], optimizer.param_groups, strict=True):
            for key, field in saved["fields"]:
                full = f"{path}.{key}"
                if key in group:
                    self._into(field, group, key, full)
                else:
                    value = self._make(field, full)
                    self._at_the_end.append(
                        lambda group=group, key=key, value=value: group.__setitem__(key, value)
                    )
        parameters = {
            names[id(parameter)]: (parameter, group)
            for group in optimizer.param_groups
            for parameter in group["params"]
        }
        states: dict[Any, dict[str, Any]] = {}
        for kind in node["states"]:
            for name in kind["params"]:
                parameter, group = parameters[name]
                has = optimizer.state.get(parameter, {})
                states[parameter] = {
                    key: self._entry(
                        node["rest"]
                        .get(name, {})
                        .get(key, {"tensor": f"{path}.state.{name}.{key}"}),
                        has.get(key),
                        parameter,
                        key == "step" and not (group.get("capturable") or group.get("fused")),
                        f"{path}.state.{name}.{key}",
                    )
                    for key in kind["keys"]
                }

        def put() -> None:
            optimizer.state.clear()
            optimizer.state.update(states)

        self._at_the_end.append(put)

    def _entry(
        self, node: dict[str, Any], has: Any, parameter: Any, on_host: bool, path: str
    ) -> Any:
        """One entry of a parameter's state: the tensor that is there, or one made as the optimizer would."""
        if "absent" in node:
            return self._absent(has, parameter)
        if "tensor" not in node:
            return self._nested_entry(node, has, parameter, path)
        info = self._info(node["tensor"], path)
        shape = info.shape if info.flat is None else info.flat[1:]
        if is_tensor(has) and tuple(has.shape) == shape and self._dtype(info, path) == has.dtype:
            return self._entry_into(info, has, parameter, path)
        if tuple(parameter.shape) == shape:
            made = torch_module().empty_like(
                parameter, dtype=self._dtype(info, path), requires_grad=False
            )
        else:
            self._check_plain(parameter, info.shape, path)
            made = self._new_tensor(info, path, "cpu" if on_host else parameter.device)
        return self._entry_into(info, made, parameter, path)

    def _entry_into(self, info: TensorInfo, target: Any, parameter: Any, path: str) -> Any:
        into = self._parameters.part(parameter, target)
        if info.flat is not None and into is target:  # the parameter itself is not restored
            into = Range(target, info.shape, info.flat[0])
        self._tensor_into({"tensor": info.name}, into, path)
        return target

    def _nested_entry(self, node: dict[str, Any], has: Any, parameter: Any, path: str) -> Any:
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
            self._check_plain(parameter, (1,), path)
        before, self._new_on = self._new_on, parameter.device
        try:
            return self._make(node, path)
        finally:
            self._new_on = before

    @staticmethod
    def _check_plain(parameter: Any, shape: tuple[int, ...], path: str) -> None:
        """What an optimizer makes of a DTensor is one, too, and how it is sharded only the optimizer knows."""
        if shape and torch_types().is_dtensor(parameter):
            raise InvalidArgument(
                f"{path}: has another shape than its parameter, which is a DTensor: make one step before restoring, so that "
                "there is a tensor to fill"
            )

    @staticmethod
    def _absent(has: Any, parameter: Any) -> Any:
        # Of a DTensor of which this rank has no element.
        if not is_absent(parameter):
            raise InvalidArgument(
                f"saved was no part of the state of a parameter of shape {list(parameter.shape)}, and wanted is one"
            )
        return has if is_tensor(has) else torch_module().empty_like(parameter, requires_grad=False)

    @staticmethod
    def _dtype(info: TensorInfo, path: str) -> Any:
        _torch_types = torch_types()
        return _torch_types.dtype_from_name(info.dtype, path)

    @staticmethod
    def _check_groups(
        saved: list[dict[str, Any]], optimizer: Any, names: dict[int, str], path: str
    ) -> None:
        if len(saved) != len(optimizer.param_groups):
            raise InvalidArgument(
                f"{path}: saved were {len(saved)} groups of parameters, wanted are {len(optimizer.param_groups)}"
            )
        for number, (one, group) in enumerate(zip(saved, optimizer.param_groups, strict=True)):
            wanted = {names[id(parameter)] for parameter in group["params"]}
            had = set(one["params"])
            if wanted != had:
                raise InvalidArgument(
                    f"{path}: group {number}: not saved: {_some(sorted(wanted - had))}; saved and not wanted: {_some(sorted(had - wanted))}"
                )


def bytes_of(value: Any) -> Any:
    """The bytes of its elements, in order."""
    if is_tensor(value):
        plain = value.detach().resolve_conj().resolve_neg()
        return plain.contiguous().view(-1).view(torch_module().uint8)
    return numpy_module().ascontiguousarray(value).reshape(-1).view("u1")


def extent_of(value: Any) -> tuple[int, int]:
    """From its first byte to behind its last; others may lie in between."""
    if is_tensor(value):
        size = value.element_size()
        steps = [
            (n - 1) * stride * size for n, stride in zip(value.shape, value.stride(), strict=True)
        ]
        begin = value.data_ptr()
    else:
        size = value.itemsize
        steps = [(n - 1) * stride for n, stride in zip(value.shape, value.strides, strict=True)]
        begin = value.__array_interface__["data"][0]
    low = sum(step for step in steps if step < 0)
    return begin + low, begin + size + sum(step for step in steps if step > 0)


_OTHER_DEVICE = -2  # where addresses say nothing


def device_of(value: Any) -> int:
    """Whose addresses its address is one of."""
    if is_array(value) or value.device.type == "cpu":
        return -1
    return value.device.index if value.device.type == "cuda" else _OTHER_DEVICE


def repeats_itself(value: Any) -> bool:
    """Whether several of its elements are one in memory, as in an expanded tensor."""
    strides = value.stride() if is_tensor(value) else value.strides
    return any(n > 1 and stride == 0 for n, stride in zip(value.shape, strides, strict=True))


def empty_like(value: Any) -> Any:
    if is_tensor(value):
        return torch_module().empty_like(value.detach())
    return numpy_module().empty_like(value)


def copy_into(target: Any, source: Any) -> None:
    if is_tensor(target):
        with torch_module().no_grad():
            target.detach().copy_(source.detach())
    else:
        target[...] = source


def address_of(value: Any) -> int:
    return value.data_ptr() if is_tensor(value) else value.__array_interface__["data"][0]


def by_position(
    saved: list[dict[str, Any]], groups: list[dict[str, Any]], names: dict[int, str]
) -> dict[int, str]:
    """Names of parameters as they were saved, where only one side had the module to take them from."""
    had = [name for one in saved for name in one["params"]]
    if [len(one["params"]) for one in saved] != [len(group["params"]) for group in groups]:
        return names
    if not (_are_numbers(had) or _are_numbers(names.values())):
        return names
    parameters = [parameter for group in groups for parameter in group["params"]]
    return {id(parameter): name for parameter, name in zip(parameters, had, strict=True)}


def _are_numbers(names: Iterable[str]) -> bool:
    return all(name.startswith("#") for name in names)


def tensor_of_bytes(data: bytes, path: str, *, allow_pickle: bool) -> Any:
    """A tensor that torch.save wrote: one of a type of its own."""
    torch = torch_module()
    if torch is None:
        raise Refused(f"{path}: is a tensor of torch: import torch first")
    try:
        return torch.load(io.BytesIO(data), weights_only=not allow_pickle)
    except Exception as error:
        raise Refused(
            f"{path}: this tensor's type cannot be read without unpickling ({type(error).__name__}): allow it with "
            "torch.serialization.add_safe_globals, or pickles with allow_pickle=True if you trust them"
        ) from error


def says_its_memory(module: Any, state: dict[str, Any]) -> bool:
    """Whether what its state_dict shows is the memory that the module works with; where hooks or methods of its own put
    something else there, its load_state_dict knows the way back."""
    own = set(map(id, module.parameters())) | set(map(id, module.buffers()))
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
