"""From a shard back into the user's state: the way back of _state.py.

Tensors that are there already are filled where they lie; what is not there (the state of an optimizer that has made no step,
a value of a dictionary) is made. Everything but tensors' bytes is put in place at the end, when all has been loaded and
verified, by `finish`.
"""

from __future__ import annotations

import functools
import io
from collections.abc import Callable, Mapping
from typing import Any

from holdfast import _json, _objects
from holdfast._core import TensorInfo
from holdfast._errors import Corrupt, InvalidArgument, Refused
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

_SHOWN = 5


@functools.cache
def torch_types() -> Any:
    """holdfast._torch_types, which needs torch: not before there is a tensor."""
    from holdfast import _torch_types

    return _torch_types


def holds_tensors(value: Any) -> bool:
    """Whether it names places that are to be filled, instead of being a value that is replaced."""
    if is_tensor(value) or is_array(value) or is_module(value) or is_optimizer(value):
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
        self._allow_pickle = allow_pickle
        self._saved = {info.name: info for info in saved}
        self._objects = {name: (data, codec) for name, data, codec in objects}
        self._parameters = Parameters(state)
        self.specs: list[Spec] = []
        self.addresses: list[int] = []
        self.devices: set[int] = set()
        self._keep: list[Any] = []
        # Where a saved tensor goes first; other places get it from there.
        self._places: dict[str, Any] = {}
        self._owners: dict[tuple[int, int], str] = {}  # memory to the saved tensor that goes there
        self._at_the_end: list[Callable[[], None]] = []
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
        self._check_unexpected()

    def finish(self) -> None:
        """After all tensors have been loaded: everything else."""
        for action in self._at_the_end:
            action()

    # ---- what a node becomes ----

    def _into(self, node: dict[str, Any], holder: Any, key: Any, path: str) -> None:
        """The node's content into holder[key], in place where there is a place."""
        target = holder[key]
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
            loaded = self._make(node["stateful"], path)
            self._at_the_end.append(lambda: target.load_state_dict(loaded))
            return target
        if is_module(target) or is_optimizer(target):
            raise InvalidArgument(
                f"{path}: wanted is a {type(target).__name__}, saved was something else: {_kind(node)}"
            )
        if is_tensor(target):
            return self._tensor_into(node, target, path)
        if is_array(target) and "array" in node:
            return self._array_into(node["array"], target, path)
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
            raise InvalidArgument(
                f"{path}: wanted is a {type(target).__name__} with tensors to be filled, saved was {_kind(node)}"
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

    def _make(self, node: dict[str, Any], path: str) -> Any:
        """Anew, of what was saved."""
        if "value" in node:
            return node["value"]
        if "dict" in node:
            return {key: self._make(each, join(path, key)) for key, each in node["dict"]}
        if "list" in node:
            return [self._make(each, join(path, i)) for i, each in enumerate(node["list"])]
        if "tuple" in node:
            return tuple(self._make(each, join(path, i)) for i, each in enumerate(node["tuple"]))
        if "stateful" in node:
            return self._make(node["stateful"], path)
        if "object" in node:
            return self._object(node["object"], path)
        if "array" in node:
            return self._new_array(node["array"], path)
        if "tensor" in node:
            info = self._info(node["tensor"], path)
            if info.offset is not None or info.flat is not None:
                raise InvalidArgument(
                    f"{path}: saved was a part of a tensor: give the DTensor that it goes into"
                )
            if info.name in self._places:
                return self._places[info.name]
            tensor = self._new_tensor(info, path, "cpu")
            self._want(info.name, tensor, None, path)
            return tensor
        raise InvalidArgument(f"{path}: saved was {_kind(node)}: give the object that it goes into")

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
        return torch.empty(
            info.shape, dtype=_torch_types.dtype_from_name(info.dtype, path), device=device
        )

    def _tensor_into(self, node: dict[str, Any], target: Any, path: str) -> Any:
        _torch_types = torch_types()
        if "object" in node:
            loaded = self._object(node["object"], path)
            torch = torch_module()

            def put() -> None:
                with torch.no_grad():
                    target.copy_(loaded)

            self._at_the_end.append(put)
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
        if is_subclass(local):
            raise InvalidArgument(
                f"{path}: wanted is a {type(local).__qualname__}, saved was a plain tensor"
            )
        self._want(node["tensor"], local, place, path)
        return target

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
            if first.data_ptr() != local.data_ptr():
                self._copy_at_the_end(local, first)
            return
        self._places[name] = local
        into = local
        if (
            not local.is_contiguous()
            or local.device.type not in ("cpu", "cuda")
            or local.is_conj()
            or local.is_neg()
        ):
            torch = torch_module()
            device = local.device if local.device.type in ("cpu", "cuda") else "cpu"
            into = torch.empty(local.shape, dtype=local.dtype, device=device)
            self._copy_at_the_end(local, into)
        shape, offset, local_shape = tuple(local.shape), None, None
        if place is not None and not place.whole:
            shape, offset, local_shape = place.shape, place.offset, place.local_shape
        device = _torch_types.device_ordinal(into)
        if device >= 0:
            self.devices.add(device)
        spec = (name, _torch_types.dtype_name(into.dtype, path), shape, offset, local_shape, device)
        self._append(spec, into.data_ptr(), into)

    def _append(self, spec: Spec, address: int, keep: Any) -> None:
        other = self._owners.setdefault((address, spec[5]), spec[0]) if keep.nbytes else spec[0]
        if other != spec[0]:
            raise InvalidArgument(
                f"{spec[0]}: lies in the same memory as {other}, and they were saved as two: "
                "what was saved was not tied, what is wanted is"
            )
        self.specs.append(spec)
        self.addresses.append(address)
        self._keep.append(keep)

    def _copy_at_the_end(self, to: Any, source: Any) -> None:
        def copy() -> None:
            with torch_module().no_grad():
                to.detach().copy_(source.detach())

        self._at_the_end.append(copy)

    def _array_into(self, name: str, target: Any, path: str) -> Any:
        info = self._info(name, path)
        if target.shape != info.shape or array_dtype(target.dtype, path) != info.dtype:
            raise InvalidArgument(
                f"{path}: was saved as {info.dtype} {list(info.shape)}, wanted is an array of {target.dtype} "
                f"{list(target.shape)}"
            )
        if not target.flags.c_contiguous or not target.flags.writeable or name in self._places:
            made = self._new_array(name, path)
            if not target.flags.writeable:
                return made
            self._at_the_end.append(lambda: target.__setitem__(..., made))
            return target
        self._places[name] = target
        self._append(
            (name, info.dtype, info.shape, None, None, -1),
            target.__array_interface__["data"][0],
            target,
        )
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
            (name, info.dtype, info.shape, None, None, -1),
            array.__array_interface__["data"][0],
            array,
        )
        return array

    # ---- modules ----

    def _module(self, rest: dict[str, Any], module: Any, path: str) -> None:
        self._modules.append(path)
        state = module.state_dict(keep_vars=True)
        if not says_its_memory(module, state):
            state = module.state_dict()
            self._at_the_end.append(lambda: module.load_state_dict(state, strict=self._strict))
        missing = []
        for key, value in state.items():
            name = f"{path}.{module_key(key)}"
            node = rest.get(module_key(key), {"tensor": name})
            if "tensor" in node and node["tensor"] not in self._saved:
                missing.append(name)
            elif key.rpartition(".")[2] == "_extra_state":
                self._extra_state(node, module, key, name)
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

    def _extra_state(self, node: dict[str, Any], module: Any, key: str, path: str) -> None:
        owner = module.get_submodule(key.rpartition(".")[0])
        value = self._make(node, path)
        self._at_the_end.append(lambda: owner.set_extra_state(value))

    def _check_unexpected(self) -> None:
        if not self._strict:
            return
        if self._unexpected:
            raise InvalidArgument(
                f"saved and not wanted: {_some(self._unexpected)} (strict=False leaves them out)"
            )
        for path in self._modules:
            unexpected = [
                name
                for name in self._saved
                if name.startswith(f"{path}.") and name not in self._places
            ]
            if unexpected:
                raise InvalidArgument(
                    f"{path}: saved and not wanted: {_some(unexpected)} (strict=False leaves them out)"
                )

    # ---- optimizers ----

    def _optimizer(self, node: dict[str, Any], optimizer: Any, path: str) -> None:
        names = self._parameters.names_of(optimizer)
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
        if "tensor" not in node:
            return self._make(node, path) if "absent" not in node else self._absent(has, parameter)
        info = self._info(node["tensor"], path)
        if (
            is_tensor(has)
            and tuple(has.shape) == info.shape
            and self._dtype(info, path) == has.dtype
        ):
            return self._tensor_into(node, has, path)
        if tuple(parameter.shape) == info.shape:
            made = torch_module().empty_like(
                parameter, dtype=self._dtype(info, path), requires_grad=False
            )
        else:
            made = self._new_tensor(info, path, "cpu" if on_host else parameter.device)
        return self._tensor_into(node, made, path)

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
        id(value) in own if is_tensor(value) else key.rpartition(".")[2] == "_extra_state"
        for key, value in state.items()
    )


def is_absent(tensor: Any) -> bool:
    """Whether it is a DTensor of which this rank has no element."""
    _torch_types = torch_types()
    if not _torch_types.is_dtensor(tensor):
        return False
    place = _torch_types.dtensor_place(tensor, "")
    return place is None or place.empty


def _kind(node: dict[str, Any]) -> str:
    return f"a {next(iter(node), 'nothing')}"


def _some(names: Any) -> str:
    names = list(names)
    shown = ", ".join(names[:_SHOWN])
    return (shown or "nothing") + (
        f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    )
