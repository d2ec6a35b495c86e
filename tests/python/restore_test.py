"""holdfast.Checkpointer.restore into states that are not quite like the one that was saved."""

from __future__ import annotations

import collections
import contextlib
import copy
import datetime
import enum
import gc
import logging
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from checkpointer_test import bits, model_of, train

import holdfast
from daemons import Daemon


@pytest.fixture
def ckpt(daemon: Daemon):
    one = holdfast.Checkpointer("job", rank=0, world_size=1)
    yield one
    one.close()


@pytest.fixture
def group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def views(values: list[float]) -> dict[str, Any]:
    """A flat buffer and parameters that are views of it, as some optimizers keep them."""
    flat = torch.tensor(values)
    return {"flat": flat, "a": flat[:2], "b": flat[2:5].view(3, 1), "whole": flat.view(3, 2)}


def test_views_of_one_buffer(ckpt: holdfast.Checkpointer) -> None:
    saved = views([1, 2, 3, 4, 5, 6])
    ckpt.save(0, saved, wait="sealed", timeout=60)
    target = views([0] * 6)
    ckpt.restore(target)
    assert bits(target) == bits(saved)
    assert target["a"].data_ptr() == target["flat"].data_ptr()


def test_a_buffer_that_is_longer_than_its_view(ckpt: holdfast.Checkpointer) -> None:
    array = np.arange(8.0)
    ckpt.save(0, {"short": array[:3], "long": array, "middle": array[2:6]})
    fresh = np.zeros(8)
    ckpt.restore({"short": fresh[:3], "long": fresh, "middle": fresh[2:6]})
    assert bits(fresh) == bits(array)


def test_what_was_saved_as_two_is_not_mixed(ckpt: holdfast.Checkpointer) -> None:
    ckpt.save(0, {"a": torch.ones(4), "b": torch.full((4,), 2.0)})
    one = torch.zeros(6)
    for target in ({"a": one[:4], "b": one[:4]}, {"a": one[:4], "b": one[2:]}):
        with pytest.raises(holdfast.InvalidArgumentError, match="saved with different values"):
            ckpt.restore(target)
    error = ckpt.save(1, {"one": one}).error
    assert isinstance(error, holdfast.RefusedError) and "restore 'a' again first" in str(error)


def test_after_a_pass_without_a_step_fsdp2_has_the_names_of_before(
    ckpt: holdfast.Checkpointer,
    group: None,
) -> None:
    from torch.distributed.fsdp import fully_shard

    def sharded(seed: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        model = model_of(seed)
        fully_shard(model)
        optim = torch.optim.AdamW(model.parameters())
        train(model, optim)
        return model, optim

    def full(model: torch.nn.Module, optim: torch.optim.Optimizer) -> Any:
        model.state_dict()  # puts the parts back
        return bits([each.full_tensor() for each in model.parameters()]), bits(
            [
                value.full_tensor() if hasattr(value, "full_tensor") else value
                for state in optim.state.values()
                for value in state.values()
            ]
        )

    model, optim = sharded(1)
    with torch.no_grad():
        model(torch.randn(5, 8))  # evaluated: the root's parameters are whole now
    ckpt.save(0, {"model": model, "optim": optim}, wait="sealed", timeout=60)
    target, other = sharded(2)
    with torch.no_grad():
        target(torch.randn(5, 8))
    assert ckpt.restore({"model": target, "optim": other}) == 1
    assert full(target, other) == full(model, optim)


def lbfgs(model: torch.nn.Module, steps: int) -> torch.optim.LBFGS:
    torch.manual_seed(3)
    optim = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3, history_size=4)
    data = torch.randn(5, 8)

    def loss() -> torch.Tensor:
        optim.zero_grad()
        value = model(data).square().mean()
        value.backward()
        return value

    for _ in range(steps):
        optim.step(loss)
    return optim


@pytest.mark.parametrize("steps", [0, 3])
def test_tensors_in_lists_of_an_optimizer(ckpt: holdfast.Checkpointer, steps: int) -> None:
    model = torch.nn.Linear(8, 2)
    target = copy.deepcopy(model)
    optim, other = lbfgs(model, 3), lbfgs(target, steps)
    ckpt.save(0, {"model": model, "optim": optim})
    places = other.state[target.weight].get("old_dirs", [])
    for each in places:
        each.zero_()
    ckpt.restore({"model": target, "optim": other})
    state, wanted = other.state[target.weight], optim.state[model.weight]
    assert len(wanted["old_dirs"]) > 1 and bits(dict(state)) == bits(dict(wanted))
    if steps:  # filled where they lie
        assert all(a is b for a, b in zip(state["old_dirs"], places, strict=True))


def test_a_wait_that_is_in_vain_is_told(daemon: Daemon, caplog: pytest.LogCaptureFixture) -> None:
    state = {"w": torch.ones(3)}
    with holdfast.Checkpointer("job") as ckpt:
        with caplog.at_level(logging.ERROR, "holdfast"):
            handle = ckpt.save(0, state, wait="remote", timeout=60)
        told = [record.message for record in caplog.records if "has not come" in record.message]
        assert [line.split(":")[1] for line in told] == [" step 0 has not come to 'remote'"]
        assert handle.error is None and "remote" not in handle.times and ckpt.failed_saves == 0
    with holdfast.Checkpointer("job", on_error="raise") as ckpt:
        ckpt.restore({"w": torch.zeros(3)})
        with pytest.raises(holdfast.HoldfastError, match="remote"):
            ckpt.save(1, state, wait="remote", timeout=60)
        ckpt.save(2, state, wait="committed", timeout=60)
        assert ckpt.failed_saves == 0


class FailsToLoad:
    def state_dict(self) -> dict[str, int]:
        return {"n": 1}

    def load_state_dict(self, state: dict[str, int]) -> None:
        raise ZeroDivisionError("in the middle")


def test_only_what_was_half_restored_is_to_be_restored_again(ckpt: holdfast.Checkpointer) -> None:
    state = {"w": torch.ones(3), "thing": FailsToLoad(), "n": {"epoch": 3}}
    ckpt.save(0, state, wait="sealed", timeout=60)
    with pytest.raises(ZeroDivisionError):
        ckpt.restore({"w": torch.zeros(3), "thing": FailsToLoad()})
    ckpt.restore({"n": {}})
    error = ckpt.save(1, state).error
    assert isinstance(error, holdfast.RefusedError) and "restore 'w' again first" in str(error)
    ckpt.restore({"w": torch.zeros(3)})
    error = ckpt.save(2, state).error
    assert isinstance(error, holdfast.RefusedError) and "restore 'thing' again first" in str(error)


@pytest.mark.parametrize("then", [True, False], ids=["saved with its module", "without"])
def test_an_optimizer_alone(ckpt: holdfast.Checkpointer, then: bool) -> None:
    model = model_of(1)
    optim = torch.optim.AdamW(model.parameters(), lr=0.5)
    train(model, optim, 2)
    saved = {"model": model, "optim": optim}
    ckpt.save(0, saved if then else {"optim": optim})
    target = model_of(2)
    other = torch.optim.AdamW(target.parameters())
    ckpt.restore({"optim": other})
    assert bits(other.state_dict()) == bits(optim.state_dict())
    fewer = torch.optim.AdamW(list(model_of(2).parameters())[1:])
    with pytest.raises(holdfast.InvalidArgumentError, match="group 0: not saved"):
        ckpt.restore({"optim": fewer})


def test_arrays_that_safetensors_has_no_dtype_for(daemon: Daemon) -> None:
    state = {
        "texts": np.array(["a", "bc"]),
        "dates": np.array(["2026-01-02"], dtype="datetime64[D]"),
        "complex": np.array([1 + 2j]),
        "big": np.array([1, 2], dtype=">i4"),
        "nested": {"list": [np.array(["x"]), np.ones(2)]},
    }
    with holdfast.Checkpointer("job", allow_pickle=True) as ckpt:
        objects = np.array([{"a": 1}, datetime.date(2026, 1, 2)], dtype=object)
        ckpt.save(0, {**state, "objects": objects})
        target = {
            "texts": np.array(["", "  "]),
            "dates": np.array(["1970-01-01"], dtype="datetime64[D]"),
            "complex": np.zeros(3),
            "big": np.zeros(2, dtype=">i4"),
            "nested": {"list": [np.array(["y"]), np.zeros(2)]},
            "objects": np.array([None, None], dtype=object),
        }
        places = {name: target[name] for name in ("texts", "dates", "big", "objects")}
        ckpt.restore(target)
        assert list(target.pop("objects")) == list(objects)
        assert bits(target) == bits(state)
        assert all(value is target.get(name, value) for name, value in places.items())
    with holdfast.Checkpointer("plain") as ckpt:
        ckpt.save(0, state, wait="sealed", timeout=60)
        error = ckpt.save(1, {"objects": np.array([object()], dtype=object)}).error
        assert isinstance(error, holdfast.RefusedError) and "objects" in str(error)


def test_a_number_that_was_a_tensor_and_back(ckpt: holdfast.Checkpointer) -> None:
    def optimizer(lr: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW([torch.nn.Parameter(torch.ones(2))], lr=lr)

    ckpt.save(0, {"optim": optimizer(0.25)})
    as_tensor = optimizer(torch.tensor(0.0))
    lr = as_tensor.param_groups[0]["lr"]
    ckpt.restore({"optim": as_tensor})
    assert as_tensor.param_groups[0]["lr"] is lr and lr.item() == 0.25
    ckpt.save(1, {"optim": optimizer(torch.tensor(0.5))})
    as_number = optimizer(0.0)
    ckpt.restore({"optim": as_number})
    assert as_number.param_groups[0]["lr"] == 0.5 and type(as_number.param_groups[0]["lr"]) is float


def test_a_backward_pass_through_what_was_there_before_is_an_error(
    ckpt: holdfast.Checkpointer,
) -> None:
    w = torch.nn.Parameter(torch.full((3,), 5.0))
    ckpt.save(0, {"w": w}, wait="sealed", timeout=60)
    loss = (w * w).sum()
    ckpt.restore({"w": w})
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_neighbour_whose_name_begins_like_a_modules(ckpt: holdfast.Checkpointer) -> None:
    state = {
        "model": torch.nn.Linear(2, 2),
        "model.ema": torch.ones(3),
        "model.list": [torch.ones(1)],
    }
    ckpt.save(0, state)
    target = torch.nn.Linear(2, 2)
    ckpt.restore({"model": target})
    assert bits(target.state_dict()) == bits(state["model"].state_dict())
    with pytest.raises(holdfast.InvalidArgumentError, match="saved and not wanted: model.bias"):
        ckpt.restore({"model": torch.nn.Linear(2, 2, bias=False)})


def test_a_state_that_contains_itself_or_is_too_deep(ckpt: holdfast.Checkpointer) -> None:
    state: dict[str, Any] = {"w": torch.ones(1), "d": collections.OrderedDict(t=torch.ones(1))}
    state["d"]["self"] = state
    with pytest.raises(holdfast.InvalidArgumentError, match="contains itself"):
        ckpt.save(0, state)
    for depth, fits in ((140, True), (160, False), (5000, False)):
        deep: Any = torch.ones(1)
        for _ in range(depth):
            deep = {"k": deep}
        if fits:
            ckpt.save(0, deep, wait="sealed", timeout=60)
            ckpt.restore(copy.deepcopy(deep))
        else:
            error = ckpt.save(1, deep).error
            assert isinstance(error, holdfast.InvalidArgumentError) and "contains itself" in str(
                error
            )


def test_keys_that_cannot_be(ckpt: holdfast.Checkpointer) -> None:
    class Color(enum.Enum):
        RED = 1

    with pytest.raises(
        holdfast.InvalidArgumentError, match="^a: key <Color.RED: 1> of a dictionary"
    ):
        ckpt.save(0, {"a": {Color.RED: torch.ones(1)}})
    with pytest.raises(holdfast.InvalidArgumentError, match="no text that UTF-8 has"):
        ckpt.save(0, {"a": {"\ud800": torch.ones(1)}})
    for name in ("", "x" * 20_000, "__metadata__"):
        with pytest.raises(holdfast.InvalidArgumentError):
            ckpt.save(0, {name: torch.ones(1)})
            raise AssertionError(name[:20])
        with holdfast.Checkpointer("other") as other:
            with pytest.raises(holdfast.InvalidArgumentError):
                other.save(0, {name: torch.ones(1)})


class Transposes(torch.nn.Module):
    """What its state_dict shows is not the memory that it works with."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(torch.full((2, 3), value))
        self.count = int(value)

    def state_dict(self, *_: Any, **__: Any) -> dict[str, Any]:  # type: ignore[override]
        return {"w_t": self.w.detach().t(), "count": self.count, "again": self.w.detach().clone()}

    def load_state_dict(self, state: Any, strict: bool = True) -> Any:  # type: ignore[override]
        with torch.no_grad():
            self.w.copy_(state["w_t"].t())
        self.count = state["count"]
        assert bits(state["again"]) == bits(self.w)


def test_a_module_is_given_its_state_when_all_of_it_is_there(ckpt: holdfast.Checkpointer) -> None:
    ckpt.save(0, {"model": Transposes(5.0)})
    target = Transposes(1.0)
    ckpt.restore({"model": target})
    assert target.count == 5 and bits(target.w) == bits(Transposes(5.0).w)


class Ema:
    """An average of a model's parameters, with a state_dict of its own."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.model = model
        self.shadow = [each.detach().clone() for each in model.parameters()]

    def state_dict(self) -> dict[str, Any]:
        return {"shadow": self.shadow, "model": self.model}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state["model"] is self.model
        self.shadow = state["shadow"]


def test_an_object_with_parts_of_tensors(ckpt: holdfast.Checkpointer, group: None) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (1,))

    def average(seed: int) -> Ema:
        model = model_of(seed)
        ema = Ema(model)
        ema.shadow = [distribute_tensor(each, mesh, [Shard(0)]) for each in ema.shadow]
        return ema

    saved, target = average(1), average(2)
    before = [each.to_local() for each in target.shadow]
    ckpt.save(0, {"ema": saved})
    ckpt.restore({"ema": target})
    assert bits([each.full_tensor() for each in target.shadow]) == bits(
        [each.full_tensor() for each in saved.shadow]
    )
    assert bits(target.model.state_dict()) == bits(saved.model.state_dict())
    assert all(new.to_local() is not old for new, old in zip(target.shadow, before, strict=True))


@pytest.mark.parametrize("kind", ["torch", "numpy"])
def test_elements_that_are_one_are_refused(ckpt: holdfast.Checkpointer, kind: str) -> None:
    ckpt.save(0, {"w": torch.arange(4.0) if kind == "torch" else np.arange(4.0)})
    target: Any = torch.zeros(1).expand(4)
    if kind == "numpy":
        target = np.lib.stride_tricks.as_strided(np.zeros(1), (4,), (0,))
    what = "an expanded tensor" if kind == "torch" else "a broadcast array"
    with pytest.raises(
        holdfast.InvalidArgumentError, match=f"^w: is {what}: several of its elements"
    ):
        ckpt.restore({"w": target})


@pytest.mark.parametrize(
    "make",
    [
        lambda: np.zeros((0, 3)),
        lambda: np.zeros((3, 0, 2), np.float32),
        lambda: np.zeros((0, 3), order="F"),
        lambda: np.zeros((4, 5))[:, 2:2],
        lambda: torch.empty(0, 3),
        lambda: torch.zeros(3, 0).t(),
        lambda: torch.zeros(1, 0).expand(4, 0),
        lambda: torch.from_numpy(np.zeros((0, 3))),
    ],
    ids=["0x3", "3x0x2", "fortran", "slice", "torch", "transposed", "expanded", "from-numpy"],
)
def test_what_is_empty_comes_back(ckpt: holdfast.Checkpointer, make: Callable[[], Any]) -> None:
    saved = make()
    ckpt.save(0, {"w": saved, "other": torch.ones(2)})
    for target in (make(), None):
        state = {"w": target, "other": torch.zeros(2)}
        assert ckpt.restore(state) == 1
        restored = state["w"]
        assert type(restored) is type(saved)
        assert (restored.shape, restored.dtype) == (saved.shape, saved.dtype)
        assert state["other"].tolist() == [1, 1]


def test_an_empty_array_shares_no_memory(ckpt: holdfast.Checkpointer) -> None:
    ckpt.save(0, {"w": np.arange(8.0), "nothing": np.zeros((0, 96))})
    memory = np.zeros(1000)
    into = memory[:8]
    # Its address is in `into`, and by its strides it would reach beyond.
    nothing = memory.reshape(10, 100)[0:0, 4:]
    ckpt.restore({"w": into, "nothing": nothing})
    assert into.tolist() == list(range(8))


def test_memory_in_between_others(ckpt: holdfast.Checkpointer) -> None:
    """Columns of one buffer lie in each other's extent and share nothing; rows across them do."""
    base = torch.arange(12.0).view(3, 4)
    state = {"left": base[:, :2], "right": base[:, 2:]}
    ckpt.save(0, {key: value.clone() for key, value in state.items()} | {"row": torch.ones(4)})
    fresh = torch.zeros(3, 4)
    ckpt.restore({"left": fresh[:, :2], "right": fresh[:, 2:]})
    assert bits(fresh) == bits(base)
    with pytest.raises(holdfast.InvalidArgumentError, match="saved with different values"):
        ckpt.restore({"left": fresh[:, :2], "right": fresh[:, 2:], "row": fresh[1]})
    big = np.zeros(8)
    ckpt.restore({"left": torch.zeros(3, 2)})
    with holdfast.Checkpointer("arrays") as other:
        other.save(0, {"even": np.arange(4.0), "front": np.ones(4)})
        with pytest.raises(holdfast.InvalidArgumentError, match="saved with different values"):
            other.restore({"even": big[::2], "front": big[:4]})


def test_a_transposed_view_of_another(ckpt: holdfast.Checkpointer) -> None:
    ckpt.save(0, {"a": torch.arange(4.0), "b": torch.arange(4.0, 8.0).view(2, 2)})
    one = torch.zeros(4)
    with pytest.raises(holdfast.InvalidArgumentError, match="saved with different values"):
        ckpt.restore({"a": one, "b": one.view(2, 2).t()})


def test_empty_texts_of_numpy(ckpt: holdfast.Checkpointer) -> None:
    state = {"a": np.str_(""), "b": np.bytes_(b""), "c": np.array([""]), "w": torch.ones(1)}
    ckpt.save(0, state)
    target: dict[str, Any] = {"a": None, "b": None, "c": np.array(["x"]), "w": torch.zeros(1)}
    ckpt.restore(target)
    assert (target["a"], target["b"], list(target["c"])) == ("", b"", [""])
    assert type(target["a"]) is np.str_ and type(target["b"]) is np.bytes_


def test_two_modules_of_which_one_is_called_like_a_part_of_the_other(
    ckpt: holdfast.Checkpointer,
) -> None:
    model, ema = torch.nn.Linear(2, 2), torch.nn.Linear(3, 3)
    ckpt.save(0, {"model": model, "model.ema": ema, "x": {"a": 1, "a.b": 2}}, wait="committed")
    with holdfast.open("job") as saved:
        assert sorted(saved.value("model")) == ["bias", "weight"]
        assert bits(saved.value("model.ema")) == bits(dict(ema.state_dict()))
        assert saved.value("x.a.b") == 2
    target = torch.nn.Linear(2, 2)
    ckpt.restore({"model": target})
    assert bits(target.state_dict()) == bits(model.state_dict())


def test_modules_that_share_parameters_in_another_order(ckpt: holdfast.Checkpointer) -> None:
    def state(reverse: bool) -> dict[str, Any]:
        model = torch.nn.Linear(2, 2)
        optim = torch.optim.AdamW(model.parameters())
        model(torch.ones(1, 2)).sum().backward()
        optim.step()
        both = {"one": model, "whole": torch.nn.Sequential(model)}
        if reverse:
            both = dict(reversed(both.items()))
        return {**both, "optim": optim}

    saved, target = state(False), state(True)
    ckpt.save(0, saved)
    ckpt.restore(target)
    assert bits(target["optim"].state_dict()) == bits(saved["optim"].state_dict())


def test_with_another_default_device_a_reader_reads(ckpt: holdfast.Checkpointer) -> None:
    ckpt.save(0, {"w": torch.arange(3.0)}, wait="committed", timeout=60)
    with torch.device("meta"), holdfast.open("job") as saved:
        read = saved.tensor("w")
    assert read.tolist() == [0.0, 1.0, 2.0]


def test_what_was_tied_goes_to_each_of_its_places(ckpt: holdfast.Checkpointer) -> None:
    x, y = torch.arange(4.0), torch.arange(2.0, 6.0)  # y[:2] is x[2:]
    ckpt.save(0, {"a": x, "b": x, "c": y}, wait="sealed", timeout=60)
    for apart in (lambda buf: buf[2:6], lambda buf: buf[2:6].view(2, 2).t().reshape(4)):
        buf, b = torch.full((6,), -1.0), torch.full((4,), -1.0)
        c = apart(buf)
        ckpt.restore({"a": buf[:4], "b": b, "c": c})
        assert b.tolist() == x.tolist() and buf[:4].tolist() == x.tolist()
        assert c.tolist() == y.tolist()
    first, second = torch.zeros(4), torch.zeros(4)
    for target in ({"a": first, "b": second, "c": second}, {"a": second, "c": second}):
        with pytest.raises(holdfast.InvalidArgumentError, match="saved with different values"):
            ckpt.restore(target)


def test_tied_is_not_transposed(ckpt: holdfast.Checkpointer) -> None:
    for number, (x, fits) in enumerate(
        ((torch.eye(2), True), (torch.arange(4.0).view(2, 2), False))
    ):
        ckpt.save(number, {"a": x, "b": x}, wait="sealed", timeout=60)
        a = torch.zeros(2, 2)
        if fits:
            ckpt.restore({"a": a, "b": a.t()})
            assert bits(a) == bits(x)
        else:
            with pytest.raises(holdfast.InvalidArgumentError, match="saved with different values"):
                ckpt.restore({"a": a, "b": a.t()})
            ckpt.restore({"a": a, "b": torch.zeros(2, 2).t()})
            assert bits(a) == bits(x)


def test_a_weight_that_is_also_under_another_key_is_the_modules(
    ckpt: holdfast.Checkpointer,
) -> None:
    model = torch.nn.Linear(2, 2)
    for number, state in enumerate(
        ({"model": model, "w": model.weight}, {"w": model.weight, "model": model})
    ):
        ckpt.save(number, state, wait="committed", timeout=60)
        with holdfast.open("job") as saved:
            assert sorted(saved.value("model")) == ["bias", "weight"]
            assert bits(saved.value("model.weight")) == bits(model.weight)

        class OnlyBias(torch.nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.bias = torch.nn.Parameter(torch.zeros(2))

        with pytest.raises(holdfast.InvalidArgumentError, match="saved and not wanted"):
            ckpt.restore({"model": OnlyBias()})


def test_a_tensor_and_its_conjugate(ckpt: holdfast.Checkpointer) -> None:
    x = torch.tensor([1 + 2j, 3 - 1j])
    ckpt.save(0, {"x": x, "conj": x.conj()})
    target = torch.zeros(2, dtype=torch.complex64)
    ckpt.restore({"x": target, "conj": target.conj()})
    assert target.tolist() == x.tolist()


def test_a_save_after_close_is_a_failed_save(daemon: Daemon) -> None:
    ckpt = holdfast.Checkpointer("job")
    ckpt.save(0, {"w": torch.ones(1)}, wait="sealed", timeout=60)
    ckpt.close()
    error = ckpt.save(1, {"w": torch.ones(1)}).error
    assert isinstance(error, holdfast.RefusedError)
    assert "save step 1 of job 'job': this Checkpointer was closed" in str(error)


def test_a_failed_restore_keeps_nothing_of_the_model(ckpt: holdfast.Checkpointer) -> None:
    model = torch.nn.Linear(2, 2)
    ckpt.save(0, {"model": model, "thing": FailsToLoad()}, wait="sealed", timeout=60)
    with contextlib.suppress(ZeroDivisionError):
        ckpt.restore({"model": model, "thing": FailsToLoad()})
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None
