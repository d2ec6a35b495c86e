"""What a Checkpointer's optimizer is called in DCP's state dicts: trees as they are saved, no daemon."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict

from holdfast import CorruptError
from holdfast._state import TREE, Flattener
from holdfast.dcp import _layout
from holdfast.dcp._layout import Item, Stored, descriptions
from holdfast.dcp._optimizers import Names

# Tensors: name, type and shape; objects: name, data and codec.
Shard = tuple[list[tuple[str, str, tuple[int, ...]]], list[tuple[str, bytes, str | None]]]


def shard(state: dict[str, Any]) -> Shard:
    """What a rank saves of it."""
    flat = Flattener(allow_pickle=False, fences=lambda _: False).run(state)
    return [(name, dtype, tuple(shape)) for name, dtype, shape, *_ in flat.specs], flat.objects


def stored(shards: Sequence[Shard]) -> Stored:
    """The step that these ranks saved, with its values; tensors of one name and shape are one tensor."""
    kinds: dict[str, dict[tuple[str, tuple[int, ...]], int]] = {}  # with the rank that has it first
    objects = []
    for rank, (of_tensors, of_objects) in enumerate(shards):
        for name, dtype, shape in of_tensors:
            kinds.setdefault(name, {}).setdefault((dtype, shape), rank)
        objects += [(Item(each[0], None, [], [rank], ""), each) for each in of_objects]
    tensors = [
        Item(name, dtype, shape, [rank] if len(found) > 1 else [], "")
        for name, found in kinds.items()
        for (dtype, shape), rank in found.items()
    ]
    items = [item for item, _ in objects] + tensors
    found = _layout.stored(items, [objects[index][1] for index in descriptions(items)])
    found.objects = {
        name: objects[each][1][1] if isinstance(each, int) else each
        for name, each in found.objects.items()
    }
    return found


def stepped(model: torch.nn.Module, *groups: Any, kind: Any = torch.optim.AdamW) -> Any:
    optim = kind(list(groups) or model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optim.step()
    return optim


def two_layers() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 1))


def check(found: Stored, of: str, wanted: dict[str, Any], names: dict[int, str]) -> None:
    """Everything of that state dict is there: each tensor that of its parameter, each value itself."""
    flat, _ = flatten_state_dict({of: wanted})
    for name, value in flat.items():
        if isinstance(value, torch.Tensor):
            assert found.tensors[name] == found.tensors[names[id(value)]], name
            assert found.metadata.state_dict_metadata[name].size == value.shape
        elif name in found.params:
            assert json.loads(found.params[name].wanted(set(flat))) == value, name
        else:
            wanted_json = {"$tuple": list(value)} if isinstance(value, tuple) else value
            assert json.loads(found.objects[name]) == wanted_json, name


def test_every_form_of_state_dict() -> None:
    model = two_layers()
    optim = stepped(
        model, {"params": model[1].parameters()}, {"params": model[0].parameters(), "lr": 0.5}
    )
    found = stored([shard({"model": model, "optim": optim, "other": {"n": 1}})])
    names = {
        id(value): f"optim.state.model.{name}.{key}"
        for name, parameter in model.named_parameters()
        for key, value in optim.state[parameter].items()
    }
    check(found, "optim", get_optimizer_state_dict(model, optim), names)
    flattened = StateDictOptions(flatten_optimizer_state_dict=True)
    check(found, "optim", get_optimizer_state_dict(model, optim, options=flattened), names)
    check(found, "optim", optim.state_dict(), names)
    assert found.conflicts == {}
    # Who wants everything gets names.
    everything = set(found.metadata.state_dict_metadata)
    params = found.params["optim.param_groups.1.params"]
    assert json.loads(params.wanted(everything)) == ["0.weight", "0.bias"]


def test_without_state_of_its_own() -> None:
    model = two_layers()
    found = stored([shard({"m": model, "o": stepped(model, kind=torch.optim.SGD)})])
    optim = torch.optim.SGD(model.parameters())
    check(found, "o", get_optimizer_state_dict(model, optim), {})


def test_parameters_that_no_module_has_are_numbers() -> None:
    model = two_layers()
    optim = stepped(model)
    found = stored([shard({"optim": optim})])
    names = {
        id(value): f"optim.state.#{number}.{key}"
        for number, parameter in enumerate(model.parameters())
        for key, value in optim.state[parameter].items()
    }
    check(found, "optim", optim.state_dict(), names)


def test_what_two_things_would_be_called_is_no_name() -> None:
    one, other = two_layers(), two_layers()
    both = torch.nn.ModuleList([one, other])
    found = stored([shard({"a": one, "b": other, "optim": stepped(both)})])
    names = found.metadata.state_dict_metadata
    assert "optim.state.a.0.weight.exp_avg" in names and "optim.state.b.0.weight.exp_avg" in names
    assert "optim.state.0.weight.exp_avg" not in names  # of a, or of b?
    assert "optim.state.7.exp_avg" in names  # the eighth of all
    assert json.loads(found.objects["optim.param_groups.0.params"]) == list(range(8))
    assert found.params == {}
    # Names that are numbers, in another order.
    backwards = torch.nn.ParameterList([torch.nn.Parameter(torch.ones(n)) for n in (1, 2)])
    optim = stepped(backwards, {"params": [backwards[1]]}, {"params": [backwards[0]], "lr": 7.0})
    found = stored([shard({"model": backwards, "optim": optim})])
    names = found.metadata.state_dict_metadata
    assert "optim.state.0.exp_avg" not in names and "optim.state.model.0.exp_avg" in names
    assert "optim.param_groups.0.lr" not in names  # group 0's, or parameter 0's?
    assert "optim.param_groups.0.eps" in names  # the same for both
    assert "optim.param_groups.0.params" not in names


def test_ranks_with_optimizers_of_their_own() -> None:
    """Pipeline stages: names in the modules are told apart, numbers are not."""
    stages = [torch.nn.ModuleDict({name: torch.nn.Linear(2, 2)}) for name in ("first", "last")]
    found = stored([shard({"model": each, "optim": stepped(each)}) for each in stages])
    names = found.metadata.state_dict_metadata
    for name in ("first", "last"):
        alias, own = f"optim.state.{name}.weight.step", f"optim.state.model.{name}.weight.step"
        assert found.tensors[alias] == found.tensors[own]
        assert f"optim.param_groups.{name}.weight.lr" in names
    assert "optim.state.0.step" not in names and "optim.param_groups.0.params" not in names
    assert found.params == {}


def test_no_name_hides_what_was_saved() -> None:
    model = two_layers()
    state = {
        "model": model,
        "optim": stepped(model),
        "optim.state": {"0.weight.exp_avg": torch.zeros(7), "0.step": 5},
        "optim.param_groups": [{"params": "mine", "lr": "mine"}],
    }
    found = stored([shard(state)])
    names = found.metadata.state_dict_metadata
    assert names["optim.state.0.weight.exp_avg"].size == (7,)
    assert found.objects["optim.state.0.step"] == b"5"
    assert found.objects["optim.param_groups.0.params"] == b'"mine"'
    assert found.objects["optim.param_groups.0.lr"] == b'"mine"'
    assert found.params == {}
    assert found.tensors["optim.state.0.bias.exp_avg"]  # the rest has its names


def test_a_conflict_is_one_under_every_name() -> None:
    shards = []
    for rank in range(2):
        mine = torch.nn.Parameter(torch.ones(3 + rank))
        optim = torch.optim.AdamW([mine])
        mine.grad = torch.ones_like(mine)
        optim.step()
        shards.append(shard({"optim": optim}))
    found = stored(shards)
    assert (
        "optim.state.#0.exp_avg" in found.conflicts and "optim.state.0.exp_avg" in found.conflicts
    )


def test_tensors_among_the_groups_values() -> None:
    model = two_layers()
    optim = torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.25))
    found = stored([shard({"model": model, "optim": optim})])
    for name in ("optim.param_groups.0.lr", "optim.param_groups.1.bias.lr"):
        assert found.tensors[name] == found.tensors["optim.groups.0.lr"]


def test_thousands_of_ranks_read_one_optimizer_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model = two_layers()
    tensors, objects = shard({"model": model, "optim": stepped(model), "extra": {"rank": 0}})
    tree = json.loads(objects[0][1])
    tree["dict"][1][1]["optimizer"]["rest"] = {"model.0.bias": {"exp_avg": {"absent": [3]}}}
    tree["dict"][2][1] = {"value": {"rank": 1}}
    others = [(TREE, json.dumps(tree).encode(), None)]
    read = []
    put = Names._put_params
    monkeypatch.setattr(Names, "_put_params", lambda *of: (read.append(of[1]), put(*of)))
    found = stored([(tensors, objects), *((tensors, others) for _ in range(2000))])
    assert found.tensors["optim.state.0.weight.exp_avg"]
    assert read == ["optim.param_groups.0.params"]


def test_parameters_that_have_other_numbers_on_other_ranks() -> None:
    shards = []
    for first in (["x"], ["x", "y"]):
        model = torch.nn.ModuleDict({name: torch.nn.PReLU() for name in [*first, "w"]})
        groups = [[model[name].weight for name in first], [model["w"].weight]]
        optim = stepped(model, *({"params": group} for group in groups))
        shards.append(shard({"model": model, "optim": optim}))
    found = stored(shards)
    assert "optim.param_groups.1.params" not in found.metadata.state_dict_metadata
    assert found.params == {} and found.tensors["optim.state.w.weight.exp_avg"]


@pytest.mark.parametrize(
    "optimizer", ["{}", "[]", '{"groups":[{}],"states":[],"rest":{}}', '{"groups":[],"states":[{"keys":["a"],"params":["b"]}],"rest":{}}']
)  # fmt: skip
def test_damaged_optimizers_are_corrupt(optimizer: str) -> None:
    tree = f'{{"dict":[["optim",{{"optimizer":{optimizer}}}]]}}'.encode()
    with pytest.raises(CorruptError, match="rank 0: optim: the optimizer is none"):
        stored([([], [(TREE, tree, None)])])
