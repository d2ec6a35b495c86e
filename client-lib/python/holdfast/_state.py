"""From what the user hands over to what lies in a shard.

A state is a dictionary of modules, optimizers, tensors, NumPy arrays, other objects with `state_dict` and
`load_state_dict`, and plain Python values, nested as one likes. Tensors become tensors of the shard, named by their path
("model.layers.0.weight"); the rest is one JSON object, `holdfast.state`, a tree of nodes (docs/formats.md, "The state of
Python programs"):

    {"dict": [[key, node], …]}  {"list": [node, …]}  {"tuple": [node, …]}  {"stateful": node}
    {"value": JSON}             what holds no tensor
    {"tensor": NAME}            {"array": NAME} when it was NumPy's; a part, where the tensor in the shard is one
    {"absent": SHAPE}           a DTensor's part that has no element
    {"subclass": {…}}           a tensor subclass, of which each inner tensor is one of the shard (_subclasses.py)
    {"object": NAME}            an object of the shard, with its codec: a pickle, a subclass that does not say what it is made of
    {"module": {KEY: node, …}}  keys of its state_dict that are not simply the tensor PREFIX.KEY
    {"optimizer": {"groups": [node, …], "states": …}}

Nothing here waits, or knows the daemon.
"""

from __future__ import annotations

import bisect
import dataclasses
import json
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from holdfast import _json, _objects, _subclasses
from holdfast._arrays import array_dtype, has_place, is_array
from holdfast._described import (
    Described,
    Spec,
    describe,
    is_subclass,
    local_parts,
    plain_types,
    taken,
    torch_module,
)
from holdfast._errors import InvalidArgumentError
from holdfast._fences import memory_of
from holdfast._fsdp1 import refuse_fsdp1
from holdfast._lbfgs import refuse_lbfgs
from holdfast._optimizers import (
    is_optimizer,
    reads_plainly,
    state_of,
    stepped_by,
    unwrapped_optimizer,
)
from holdfast._part import PARTS, Part
from holdfast._range import Range, check_plain
from holdfast._same_ranks import is_of_part_alone, is_split

TREE = "holdfast.state"
FRESH = "holdfast.fresh"  # the run's label (_fresh.py)
TENSOR_CODEC = "torch.save.1"

# Each level is up to three of the JSON.
_DEPTH_MAX = 150
_PATH_SHOWN = 200
_HOST_FIRST_BYTES_MAX = 1 << 20  # takes a copy a tenth of a millisecond

# What becomes of a value's node that is not simply the tensor of its path: (number of the value, node).
Put = Callable[[int, dict[str, Any]], None]


def numpy_module() -> Any:
    return sys.modules.get("numpy")


def join(path: str, key: object) -> str:
    return f"{path}.{key}" if path else str(key)


def unwrapped(module: Any) -> Any:
    """The module that DistributedDataParallel and torch.compile stand around: names do not depend on them."""
    torch = torch_module()
    while True:
        if isinstance(module, (torch.nn.parallel.DistributedDataParallel, torch.nn.DataParallel)):
            module = module.module
        elif type(module).__name__ == "OptimizedModule" and hasattr(module, "_orig_mod"):
            module = module._orig_mod
        else:
            return module


_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")


def module_key(key: str) -> str:
    """A key of state_dict without what wrappers within the module put there."""
    for wrapper in _WRAPPERS:
        if wrapper in key:
            key = key.replace(wrapper, "")
    return key


def module_keys(state_dict: Iterable[str]) -> list[str]:
    """All its keys, like that."""
    keys = list(state_dict)
    text = "\n".join(keys)
    return (
        [module_key(key) for key in keys] if any(wrapper in text for wrapper in _WRAPPERS) else keys
    )


def untagged(key: str, path: str) -> str:
    """A key of a JSON object in the tree: one that begins with `$` would be read as a tag (_json.py)."""
    if key.startswith("$"):
        raise InvalidArgumentError(
            f"{join(path, key)}: a name of a module's state cannot begin with '$'"
        )
    return key


def is_module(value: Any) -> bool:
    torch = torch_module()
    return torch is not None and isinstance(value, torch.nn.Module)


def is_tensor(value: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def is_stateful(value: Any) -> bool:
    return (
        callable(getattr(value, "state_dict", None))
        and callable(getattr(value, "load_state_dict", None))
        and not isinstance(value, type)
    )


_LEAVES = frozenset((bool, int, float, str, bytes, type(None)))


def found_in(state: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """The modules, optimizers, ranges and parts of a state, with their paths; of wrapped optimizers those inside."""
    if is_module(state) or isinstance(state, PARTS):
        yield path, state
    elif is_optimizer(state):
        yield from ((path, each) for each in stepped_by(state))
    elif type(state) in (dict, list, tuple) or isinstance(state, Mapping):
        items = state.items() if isinstance(state, Mapping) else enumerate(state)
        for key, value in items:
            if type(value) not in _LEAVES and not is_tensor(value):  # as most are
                yield from found_in(value, join(path, key))
    elif is_stateful(state):
        yield from ((path, each) for each in stepped_by(state))


class Parameters:
    """The names of parameters, as the modules, ranges and parts beside an optimizer give them."""

    def __init__(
        self, found: Sequence[tuple[str, Any]], rename: Callable[[str], str] = str
    ) -> None:
        """`found`: what is `found_in` the state. `rename`: a module's name for a parameter made into the one that is meant."""
        self._rename = rename
        self._names: dict[int, str] = {}
        self._further: dict[int, list[str]] = {}  # of those that several modules have
        self._parts: dict[int, Range | Part] = {}
        self.optimizers = [value for _, value in found if is_optimizer(value)]
        if not self.optimizers:
            return  # nobody else asks for names
        modules = [(path, unwrapped(value)) for path, value in found if is_module(value)]
        for path, module in modules:
            self._take(path, module)
        for path, value in found:
            if isinstance(value, PARTS):
                self._names.setdefault(id(value.tensor), path)
                self._parts.setdefault(id(value.tensor), value)
        if not all(
            id(each) in self._names for optim in self.optimizers for each in _parameters(optim)
        ):
            # Between a forward pass and its backward pass, or after one without, FSDP2 shows whole
            # parameters, which no optimizer knows. A state_dict has it put the parts back.
            for path, module in modules:
                module.state_dict(keep_vars=True)
                self._take(path, module)

    def _take(self, path: str, module: Any) -> None:
        named = dict(module.named_parameters(remove_duplicate=True))
        prefix = f"{path}." if path else ""
        for key, parameter in zip(module_keys(named), named.values(), strict=True):
            name = self._rename(prefix + key)
            if self._names.setdefault(id(parameter), name) != name:
                self._further.setdefault(id(parameter), []).append(name)

    def names_of(self, optimizer: Any, among: Collection[str] = ()) -> dict[int, str]:
        """Each parameter's name by its id: a module's, or its number in the optimizer. Where several modules have it, the one
        that is `among` these, or the first's."""
        names: dict[int, str] = {}
        for key in map(id, _parameters(optimizer)):
            name = self._names.get(key)
            names[key] = f"#{len(names)}" if name is None else name
        for key in names.keys() & self._further.keys():
            if names[key] not in among:
                names[key] = next((one for one in self._further[key] if one in among), names[key])
        return names

    def parts(self, parameter: Any, state: Mapping[str, Any], prefix: str) -> Iterable[Any]:
        """What the optimizer has for a parameter: as `part` has it."""
        if not self._parts:
            return state.values()
        return [self.part(parameter, value, prefix + key) for key, value in state.items()]

    def whole_shape(self, parameter: Any) -> tuple[int, ...] | None:
        """Of what a parameter that is a Range or a Part is one of."""
        of = self._parts.get(id(parameter))
        return None if of is None else of.shape

    def part(self, parameter: Any, value: Any, path: str) -> Any:
        """A tensor of the optimizer's state as the same Range or Part that the parameter is, if it is one, and goes with each of
        its elements."""
        of = self._parts.get(id(parameter))
        if of is None or not is_tensor(value) or value.shape != parameter.shape:
            return value
        check_plain(f"a {type(of).__name__}", value, path)
        return of.over(value) if isinstance(of, Part) else Range(value, of.shape, of.start)

    def is_split(self, parameter: Any) -> bool:
        """Whether it is a Range or Part, and not all of the whole."""
        of = self._parts.get(id(parameter))
        return of is not None and is_split(of)

    def is_empty_part(self, parameter: Any) -> bool:
        of = self._parts.get(id(parameter))
        return isinstance(of, Part) and of.empty

    def padded(self, parameter: Any) -> Part | None:
        """The Part that it is, where some of it is padding."""
        of = self._parts.get(id(parameter))
        return of if isinstance(of, Part) and of.valid is not None else None


def _parameters(optimizer: Any) -> Iterator[Any]:
    for group in optimizer.param_groups:
        yield from group["params"]


@dataclasses.dataclass
class Flat:
    """A state as one call of save takes it."""

    specs: list[Spec]
    addresses: list[int]
    keep: list[Any]  # what the addresses are of
    copy_first: list[int]
    copies: bool  # whether some of `keep` are copies, made for this save
    objects: list[tuple[str, bytes, str | None]]
    devices: set[int]
    described: Described | None  # for the next call
    # Of which streams an optimizer's step() is put behind the copy, instead of the host.
    fenced_devices: set[int] = dataclasses.field(default_factory=set)
    same_ranks_only: list[str] = dataclasses.field(default_factory=list)  # paths (_same_ranks.py)


def is_described(value: Any) -> bool:
    """Whether it is saved as one tensor: subclasses are several, or objects."""
    return isinstance(value, PARTS) or (is_tensor(value) and not is_subclass(*local_parts([value])))


class Flattener:
    """Makes a Flat of a state; used once. `before` is what was described the last time: when it is the same again, all that is
    left to do is to see that. `fences`: whether that optimizer's step() waits for a copy; `beside`: optimizers that the state does not
    show, and of which that is to be asked, too.

        flat = Flattener(allow_pickle=False, fences=lambda optimizer: True).run({"model": model, "optim": optim, "extra": {"epoch": 3}})
    """

    def __init__(
        self,
        *,
        allow_pickle: bool,
        fences: Callable[[Any], bool],
        beside: Iterable[Any] = (),
        before: Described | None = None,
    ) -> None:
        self._allow_pickle = allow_pickle
        self._fences = fences
        self._beside = beside
        self._before = before
        self._flat = Flat([], [], [], [], False, [], set(), None)
        self._names: set[str] = {TREE, FRESH}  # of what is not a tensor of torch
        self._depth = 0
        # Memory that nobody changes but a step() that waits: address to bytes.
        self._fenced: dict[int, int] = {}
        # Tensors of torch: they are described together. A node of the tree that turns out not to be simply {"tensor": path} is
        # put where it belongs by whoever holds it: (index of the first, their numbers there, put).
        self._paths: list[str] = []
        self._tensors: list[Any] = []
        self._holders: list[tuple[int, Sequence[int], Put]] = []
        self._nodes: dict[
            int, dict[str, Any]
        ] = {}  # by index: of those that have a node of their own
        self._arrays: list[tuple[Spec, int, Any]] = []
        self._plain_types: frozenset[type] = (
            frozenset() if torch_module() is None else plain_types()
        )
        self._parameters: Parameters

    def run(self, state: Any) -> Flat:
        if not isinstance(state, Mapping):
            raise InvalidArgumentError(
                f"a state is a dictionary of what is to be saved, not a {type(state).__name__}"
            )
        try:
            return self._run(state)
        except RecursionError:
            raise InvalidArgumentError(
                "a state is nested too deeply, or contains itself: what was saved could not be read again"
            ) from None

    def _run(self, state: Mapping[Any, Any]) -> Flat:
        found = list(found_in(state))
        if self._before is None:
            for path, value in found:
                refuse_fsdp1(path, value)
                refuse_lbfgs(path, value)
        self._parameters = Parameters(found)
        for optimizer in dict.fromkeys((*self._parameters.optimizers, *self._beside)):
            if self._fences(optimizer):
                self._fenced.update(memory_of(optimizer))
        tree = self._node(state, "")
        if self._tensors:
            self._add_tensors()
        self._add_arrays()
        if self._flat.devices:
            self._fence_devices()
        if not self._fenced:
            self._flat.copy_first = list(range(len(self._flat.specs)))
        text = json.dumps(tree, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
        try:
            self._flat.objects.append((TREE, text.encode(), None))
        except UnicodeEncodeError as error:
            raise InvalidArgumentError(
                f"a key on the way to a tensor is no text that UTF-8 has: …{text[max(0, error.start - 40) : error.end]!r}"
            ) from None
        return self._flat

    def _fence_devices(self) -> None:
        """Beside tensors on devices, what is in this process's memory (Adam's step counts) mostly is little. An optimizer's step()
        then has the device's streams wait, not the host (Checkpointer), and so must find it copied. Where it is much, as state
        that is offloaded, the host waits."""
        described = self._flat.described
        if described is not None and described.host_beside > _HOST_FIRST_BYTES_MAX:
            return
        self._flat.fenced_devices = self._flat.devices
        first = set(self._flat.copy_first)
        first.update(i for i, spec in enumerate(self._flat.specs) if spec[5] < 0)
        self._flat.copy_first = sorted(first)

    # ---- nodes ----

    def _node(self, value: Any, path: str) -> dict[str, Any]:
        if is_tensor(value) or isinstance(value, PARTS):
            return self._tensor(value, path)
        if self._depth == _DEPTH_MAX:
            raise InvalidArgumentError(
                f"{path[:_PATH_SHOWN]}…: nested deeper than {_DEPTH_MAX} levels, or it contains itself"
            )
        self._depth += 1
        try:
            return self._other_node(value, path)
        finally:
            self._depth -= 1

    def _other_node(self, value: Any, path: str) -> dict[str, Any]:
        if is_array(value):
            return self._array(value, path)
        if is_module(value):
            return self._module(unwrapped(value), path)
        if is_optimizer(value):
            value = unwrapped_optimizer(value)
            if is_optimizer(value) and reads_plainly(value):
                return self._optimizer(value, path)
        kind = type(value)
        if isinstance(value, Mapping) and (kind is dict or not is_stateful(value)):
            return self._dict(value, path)
        if kind is list or kind is tuple:
            nodes = [self._node(each, join(path, i)) for i, each in enumerate(value)]
            if all(len(node) == 1 and "value" in node for node in nodes):
                return {"value": _json.tree_of(value, path)}
            return {kind.__name__: nodes}
        if is_stateful(value):
            return {"stateful": self._node(state_of(value, path), path)}
        return self._value(value, path)

    def _dict(self, value: Mapping[Any, Any], path: str) -> dict[str, Any]:
        nodes = [[key, self._node(each, join(path, key))] for key, each in value.items()]
        if path and all(len(node) == 1 and "value" in node for _, node in nodes):
            return self._value(value, path)
        for pair in nodes:
            if type(pair[0]) is not str or not pair[0].isascii():
                pair[0] = self._key(pair[0], path)
        return {"dict": nodes}

    @staticmethod
    def _key(key: Any, path: str) -> Any:
        try:
            return _json.tree_of(key, f"{path}: key {key!r}")
        except _json.NotJson:
            raise InvalidArgumentError(
                f"{path}: key {key!r} of a dictionary with tensors in it: a text, number, None, or a tuple of such is wanted"
            ) from None

    def _value(self, value: Any, path: str) -> dict[str, Any]:
        try:
            return {"value": _json.tree_of(value, path)}
        except _json.NotJson:
            if not self._allow_pickle:
                raise
        return self._object(path, *_objects.to_object(path, value, allow_pickle=True)[1:])

    def _object(self, path: str, data: bytes, codec: str | None) -> dict[str, Any]:
        self._take(path)
        self._flat.objects.append((path, data, codec))
        return {"object": path}

    def _module(self, module: Any, path: str) -> dict[str, Any]:
        state = module.state_dict(keep_vars=True)
        keys = module_keys(state)
        rest: dict[str, Any] = {}
        self._leaves(
            [f"{path}.{key}" for key in keys],
            list(state.values()),
            lambda number, node: rest.update({untagged(keys[number], path): node}),
        )
        return {"module": rest}

    def _optimizer(self, optimizer: Any, path: str) -> dict[str, Any]:
        names = self._parameters.names_of(optimizer)
        groups = []
        for number, group in enumerate(optimizer.param_groups):
            fields = [
                [key, self._node(value, f"{path}.groups.{number}.{key}")]
                for key, value in group.items()
                if key != "params"
            ]
            groups.append(
                {
                    "params": [names[id(parameter)] for parameter in group["params"]],
                    "fields": fields,
                }
            )
        # Mostly all parameters have the same entries, each a tensor.
        kinds: dict[tuple[str, ...], list[str]] = {}
        paths: list[str] = []
        values: list[Any] = []
        owners: list[tuple[int, str]] = []  # number of the first, name of the parameter
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                state = optimizer.state.get(parameter)
                if not state:
                    continue
                name = names[id(parameter)]
                keys = tuple(state)
                if keys not in kinds:
                    kinds[keys] = []
                    for key in keys:
                        if not isinstance(key, str):
                            raise InvalidArgumentError(
                                f"{path}: the optimizer's state of {name} has the key {key!r}: a string is wanted"
                            )
                kinds[keys].append(name)
                owners.append((len(paths), name))
                prefix = f"{path}.state.{name}."
                paths += [prefix + key for key in keys]
                values += self._parameters.parts(parameter, state, prefix)
                if self._parameters.is_split(parameter):
                    self._flat.same_ranks_only += [
                        prefix + key
                        for key, value in state.items()
                        if is_of_part_alone(value, parameter.shape)
                    ]
        rest: dict[str, Any] = {}

        def put(number: int, node: dict[str, Any]) -> None:
            _, name = owners[bisect.bisect_right(owners, number, key=lambda owner: owner[0]) - 1]
            key = paths[number].removeprefix(f"{path}.state.{name}.")
            rest.setdefault(untagged(name, path), {})[untagged(key, path)] = node

        self._leaves(paths, values, put)
        states = [{"keys": list(keys), "params": params} for keys, params in kinds.items()]
        return {"optimizer": {"groups": groups, "states": states, "rest": rest}}

    def _leaves(self, paths: list[str], values: list[Any], put: Put) -> None:
        """Takes the values of a module or optimizer; `put` gets the nodes of those that are not simply the tensors of their paths."""
        numbers: Sequence[int] = range(len(values))
        if not plain_types().issuperset(map(type, values)):
            numbers = [number for number, value in enumerate(values) if is_described(value)]
            for number in sorted(set(range(len(values))).difference(numbers)):
                put(number, self._node(values[number], paths[number]))
            paths = [paths[number] for number in numbers]
            values = [values[number] for number in numbers]
        if values:
            self._holders.append((len(self._tensors), numbers, put))
            self._paths += paths
            self._tensors += values

    # ---- tensors ----

    def _tensor(self, value: Any, path: str) -> dict[str, Any]:
        if isinstance(value, Part) and is_array(value.tensor):
            return self._array_part(value, path)
        if type(value) not in self._plain_types:
            if type(value).__name__ == "ShardedTensor":
                raise InvalidArgumentError(
                    f"{path}: a ShardedTensor: use FSDP2 (fully_shard), whose parameters are DTensors, or save it with "
                    "holdfast.dcp.Writer"
                )
            if not is_described(value):
                return self._subclass(value, path)
        node = {"tensor": path}
        self._nodes[len(self._tensors)] = node
        self._paths.append(path)
        self._tensors.append(value)
        return node

    def _add_tensors(self) -> None:
        flat = self._flat
        parts = local_parts(self._tensors)
        made = describe(self._paths, self._tensors, parts, self._fenced, self._before)
        flat.described = made
        flat.specs += made.specs
        flat.addresses += made.addresses
        flat.copy_first += made.copy_first
        flat.devices |= made.devices
        # The memory, not the tensors alone: `.to()` gives a parameter other memory while the old is being copied.
        flat.keep += parts
        flat.keep += map(torch_module().Tensor.untyped_storage, parts)
        for index, spec in made.scattered:
            self._add_copy(parts[index], self._paths[index], spec)
        for index, node in made.odd:
            self._replace(index, node)
        for name in self._names.intersection(made.names):
            raise taken(name)

    def _add_copy(self, part: Any, path: str, spec: int) -> None:
        from holdfast import _torch_types

        copy = _torch_types.dense(part, path)
        self._flat.addresses[spec] = copy.data_ptr()
        self._flat.keep.append(copy)
        self._flat.copies = True

    def _replace(self, index: int, node: dict[str, Any]) -> None:
        own = self._nodes.get(index)
        if own is not None:
            own.clear()
            own.update(node)
            return
        first, numbers, put = self._holders[
            bisect.bisect_right(self._holders, index, key=lambda holder: holder[0]) - 1
        ]
        put(numbers[index - first], node)

    def _subclass(self, value: Any, path: str) -> dict[str, Any]:
        """A tensor with a meaning of its own: what it is made of, or what torch.save writes where it does not say that."""
        is_part = local_parts([value])[0] is not value
        if is_part or _subclasses.is_made_of_tensors(value):
            try:
                parts = _subclasses.parts_of(value, path)
                return parts.node(self._node, path) if parts else {"absent": list(value.shape)}
            except _json.NotJson as error:
                if is_part:
                    raise InvalidArgumentError(
                        f"{error}, which a part of a tensor cannot be"
                    ) from error
        data = _subclasses.pickled(value, path, allow_pickle=self._allow_pickle)
        return self._object(path, data, TENSOR_CODEC)

    def _array(self, value: Any, path: str) -> dict[str, Any]:
        numpy = numpy_module()
        if not has_place(value.dtype):  # texts, dates, objects: JSON, or a pickle
            made = _objects.to_object(path, value, allow_pickle=self._allow_pickle)
            return self._object(path, *made[1:])
        value = numpy.ascontiguousarray(value) if value.ndim else value.copy()
        return self._dense_array(value, value.shape, None, path)

    def _array_part(self, part: Part, path: str) -> dict[str, Any]:
        part.check(path)
        if part.empty:
            return {"absent": list(part.shape)}
        value = numpy_module().ascontiguousarray(part.local).reshape(part.local.shape)
        whole = value.shape == part.shape
        return self._dense_array(value, part.shape, None if whole else part.offset, path)

    def _dense_array(
        self, value: Any, shape: tuple[int, ...], offset: tuple[int, ...] | None, path: str
    ) -> dict[str, Any]:
        dtype = array_dtype(value.dtype, path)
        self._take(path)
        local_shape = None if offset is None else value.shape
        spec = (path, dtype, shape, offset, local_shape, -1, None)
        self._arrays.append((spec, value.__array_interface__["data"][0], value))
        return {"array": path}

    def _add_arrays(self) -> None:
        flat = self._flat
        for spec, address, array in self._arrays:
            flat.copy_first.append(len(flat.specs))
            flat.specs.append(spec)
            flat.addresses.append(address)
            flat.keep.append(array)

    def _take(self, name: str) -> None:
        if name in self._names:
            raise taken(name)
        self._names.add(name)
