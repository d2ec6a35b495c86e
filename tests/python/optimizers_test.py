"""Optimizers as frameworks hand them over: wrapped, in containers, in objects; and without a state yet, over DTensors."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from overlap_test import BIG, Weights, one_value, saved, until_overlapped
from parallel_test import assert_same, fsdp2, made, train
from ranks import run_ranks
from reshard_test import full
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor

import holdfast.dcp
from daemons import Daemon
from holdfast import _state, _torch_types

Optimizer = torch.optim.Optimizer


@pytest.fixture
def ckpt(daemon: Daemon) -> Iterator[holdfast.Checkpointer]:
    torch.set_num_threads(1)
    one = holdfast.Checkpointer("job", rank=0, world_size=1, copy_threads=1)
    yield one
    one.close()


class AcceleratedOptimizer(Optimizer):
    """As accelerate has it: an Optimizer that never was initialised as one, over the one inside."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer

    state = property(lambda self: self.optimizer.state)
    param_groups = property(lambda self: self.optimizer.param_groups)
    defaults = property(lambda self: self.optimizer.defaults)

    def state_dict(self) -> dict[str, Any]:
        return self.optimizer.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(state)

    def step(self, closure: Any = None) -> None:
        self.optimizer.step(closure)


class Container(Optimizer):
    """As torchtitan has it: an Optimizer of all parameters, that has the optimizers inside make the steps."""

    def __init__(self, *optimizers: Optimizer) -> None:
        self.optimizers = list(optimizers)
        super().__init__([p for one in optimizers for p in one.param_groups[0]["params"]], {})

    def step(self, closure: Any = None) -> None:
        for one in self.optimizers:
            one.step()


class SpeakingContainer(Container):
    """One with names of its own for what it has."""

    def state_dict(self) -> dict[str, Any]:
        return {f"of {i}": one.state_dict() for i, one in enumerate(self.optimizers)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for i, one in enumerate(self.optimizers):
            one.load_state_dict(state[f"of {i}"])


class Holder:
    """An object of the user's, that nobody knows to hold an optimizer."""

    def __init__(self, optim: Optimizer) -> None:
        self.optim = optim

    def state_dict(self) -> dict[str, Any]:
        return {"of": self.optim.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.optim.load_state_dict(state["of"])


WRAPS = [AcceleratedOptimizer, Container, SpeakingContainer, lambda optim: [optim]]
IDS = ["accelerate", "container", "container-with-names", "list"]


def momentum(module: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(module.parameters(), lr=1.0, momentum=1.0)


def copied_first(state: dict[str, Any], **options: Any) -> set[str]:
    flat = _state.Flattener(allow_pickle=False, fences=lambda _: True, **options).run(state)
    return {flat.specs[i][0] for i in flat.copy_first}


@pytest.mark.parametrize("wrap", WRAPS, ids=IDS)
def test_what_the_optimizer_inside_changes_is_copied_beside_the_loop(
    ckpt: holdfast.Checkpointer, wrap: Callable[[Optimizer], Any]
) -> None:
    model = Weights()
    inside = momentum(model)
    optim = wrap(inside)
    inside.step()
    assert copied_first({"model": model, "optim": optim}) == set()

    def attempt(step: int) -> bool:
        with torch.no_grad():
            model.w.fill_(step)
            inside.state[model.w]["momentum_buffer"].fill_(step)
        handle = ckpt.save(step, {"model": model, "optim": optim})
        overlapped = not handle.done("snapshot")
        inside.step()
        assert handle.done("snapshot")
        saved(ckpt, handle, {"model": model, "optim": optim})
        assert one_value(model.w.detach()) == step
        assert one_value(inside.state[model.w]["momentum_buffer"]) == step
        with torch.no_grad():
            model.w.grad = torch.ones(1).expand(BIG)
        inside.step()
        return overlapped

    until_overlapped(attempt)


def test_an_optimizer_that_no_state_shows_is_fenced_by_name(ckpt: holdfast.Checkpointer) -> None:
    model = Weights()
    inside = momentum(model)
    inside.step()
    state = {"model": model, "trainer": Holder(inside)}
    assert copied_first(state) == {"model.w", "trainer.of.state.0.momentum_buffer"}
    assert copied_first(state, beside=[inside]) == set()
    ckpt.fence(AcceleratedOptimizer(inside))

    def attempt(step: int) -> bool:
        with torch.no_grad():
            model.w.fill_(step)
        handle = ckpt.save(step, state)
        overlapped = not handle.done("snapshot")
        inside.step()
        assert handle.done("snapshot")
        saved(ckpt, handle, state)
        assert one_value(model.w.detach()) == step
        inside.step()
        return overlapped

    until_overlapped(attempt)
    with pytest.raises(holdfast.InvalidArgumentError, match="fence: a Holder takes no hook"):
        ckpt.fence(Holder(inside))


@pytest.mark.parametrize("saved_by, restored_by", [(0, 3), (3, 0), (1, 3), (3, 1), (0, 0), (2, 2)])
def test_a_wrapper_says_nothing_about_what_was_saved(
    ckpt: holdfast.Checkpointer, saved_by: int, restored_by: int
) -> None:
    """One that has nothing of its own: with it or without, there is one state."""

    def state(wrap: int) -> dict[str, Any]:
        torch.manual_seed(wrap)
        model = nn.Linear(3, 2)
        optim = torch.optim.AdamW(model.parameters())
        optims = WRAPS[wrap](optim)
        return {"model": model, "optims": [optims] if wrap == 0 else optims, "inside": optim}

    before, after = state(saved_by), state(restored_by)
    before["model"](torch.ones(3)).sum().backward()
    before["inside"].step()
    expected = before.pop("inside").state_dict()
    inside = after.pop("inside")
    ckpt.save(1, before, wait="sealed")
    assert ckpt.restore(after) == 2
    assert_same(expected, inside.state_dict())


@pytest.mark.parametrize("elements, is_first", [(1000, True), (1_000_000, False)])
def test_offloaded_state_is_copied_beside_the_loop(
    monkeypatch: pytest.MonkeyPatch, elements: int, is_first: bool
) -> None:
    """Parameters on a device, moments in the host's memory: little of that is copied first, much is waited for by step()."""
    model = Weights(elements)
    optim = momentum(model)
    optim.step()
    on_device = model.w.data_ptr()
    monkeypatch.setattr(
        _torch_types, "device_ordinal", lambda part, path: 0 if part.data_ptr() == on_device else -1
    )
    flat = _state.Flattener(allow_pickle=False, fences=lambda _: True).run(
        {"model": model, "optim": optim, "other": torch.zeros(5)}
    )
    names = {flat.specs[i][0] for i in flat.copy_first}
    moments = "optim.state.model.w.momentum_buffer"
    assert flat.devices == {0} and flat.fenced_devices == ({0} if is_first else set())
    assert names == ({"other", moments} if is_first else {"other"})


def test_what_a_wrapper_saved_by_its_state_dict_is_restored_into_the_one_inside(
    ckpt: holdfast.Checkpointer,
) -> None:
    """As accelerate's was, before it was known: in older checkpoints."""

    class Unknown(AcceleratedOptimizer):
        def state_dict(self) -> dict[str, Any]:
            return super().state_dict()

    def stepped() -> tuple[nn.Module, Optimizer]:
        model = nn.Linear(3, 2)
        optim = torch.optim.AdamW(model.parameters())
        model(torch.ones(3)).sum().backward()
        optim.step()
        return model, optim

    model, optim = stepped()
    ckpt.save(1, {"model": model, "optim": Unknown(optim)}, wait="sealed")
    for wrap in (AcceleratedOptimizer, lambda inside: inside):
        other, inside = stepped()
        assert ckpt.restore({"model": other, "optim": wrap(inside)}) == 2
        assert_same(optim.state_dict(), inside.state_dict())


# ---- FSDP2, into optimizers that have made no step ----


class Factored(Optimizer):
    """State as Adafactor, SOAP and layer-wise optimizers have it: a row and a column of each matrix, one as a DTensor sharded like
    the parameter and one whole on all ranks, a plain tensor of the whole matrix, tensors in lists, a norm of each layer."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(list(parameters), {"lr": 0.01})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["steps"] = group.get("steps", 0) + 1
            for p in group["params"]:
                state = self.state[p]
                grad = p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad
                matrix = grad.view(grad.shape[0], -1)
                if not state:
                    state["row"] = torch.zeros_like(p.grad.view(p.shape[0], -1).sum(1))
                    state["column"] = torch.zeros_like(matrix[0])
                    state["bases"] = [torch.zeros(n, n) for n in matrix.shape] + [[]]
                    state["norm"] = torch.tensor(0.0)
                    state["momentum"] = torch.zeros_like(p)
                state["row"] += p.grad.view(p.shape[0], -1).square().sum(1)
                state["column"] += matrix.square().sum(0)
                state["bases"][0] += matrix @ matrix.T
                state["bases"][1] += matrix.T @ matrix
                state["norm"] += grad.norm()
                state["momentum"] += p.grad
                p.add_(state["momentum"] / (1 + state["norm"]), alpha=-group["lr"])


class Speaking(torch.optim.AdamW):
    """Whose state_dict is its own: it is asked, not read."""

    def state_dict(self) -> dict[str, Any]:
        return {"own": super().state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state["own"])


def seen(optim: Any, model: nn.Module) -> dict[str, Any]:
    """All of it, put together, and what of it are DTensors."""

    def of(value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return [of(each) for each in value]
        return (isinstance(value, DTensor), full(value)) if torch.is_tensor(value) else value

    inside = optim.optim if isinstance(optim, Holder) else optim
    return {
        name: {key: of(value) for key, value in inside.state[parameter].items()}
        for name, parameter in model.named_parameters()
        if parameter in inside.state
    }


OPTIMIZERS = {
    "factored": Factored,
    "wrapped": lambda parameters: AcceleratedOptimizer(torch.optim.AdamW(parameters)),
    "speaking": Speaking,
    "held": lambda parameters: Holder(torch.optim.AdamW(parameters)),
    # (PyTorch 2.13 cannot step it over a matrix of one row.)
    "muon": lambda parameters: torch.optim.Muon(
        [p for p in parameters if p.ndim == 2 and p.shape[0] > 1]
    ),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_fresh_optimizer_over_dtensors_gets_its_state(daemon: Daemon, name: str) -> None:
    if name == "muon" and not hasattr(torch.optim, "Muon"):
        pytest.skip("this PyTorch has no Muon")

    def start(seed: int) -> tuple[nn.Module, Any]:
        model, _ = made(fsdp2, seed=seed)
        return model, OPTIMIZERS[name](model.parameters())

    def inside(optim: Any) -> Any:
        return optim.optim if isinstance(optim, Holder) else optim

    def save(rank: int) -> Any:
        model, optim = start(0)
        train(model, _ZeroGrad(inside(optim)), 2, alike=True)
        with holdfast.Checkpointer("job") as ckpt:
            ckpt.save(1, {"model": model, "optim": optim}, wait="committed")
        return seen(optim, model)

    def restore(rank: int) -> Any:
        model, optim = start(7)
        optim_ = inside(optim)
        with holdfast.Checkpointer("job") as ckpt:
            assert ckpt.restore({"model": model, "optim": optim}) == 2
            found = seen(optim, model)
            gradients = [p.grad for p in model.parameters()]
            groups = [{**group, "params": None} for group in optim_.param_groups]
            train(model, _ZeroGrad(optim_), 1, alike=True)
        return found, gradients, groups

    expected = run_ranks(2, save)[0]
    assert all(any(value[0] for value in _tensors(of)) for of in expected.values())
    for ranks in (2, 3):
        for found, gradients, groups in run_ranks(ranks, restore):
            assert_same(expected, found)
            assert gradients == [None] * len(gradients)
            assert name != "factored" or groups == [{"lr": 0.01, "steps": 2, "params": None}]


class _ZeroGrad:
    """For train(), of optimizers that lack it."""

    def __init__(self, optim: Any) -> None:
        self.step = optim.step
        inner = getattr(optim, "optimizer", optim)
        self.zero_grad = inner.zero_grad


def _tensors(state: dict[str, Any]) -> list[Any]:
    return [value for value in state.values() if isinstance(value, tuple)]


def test_making_the_state_changes_nothing_else(daemon: Daemon) -> None:
    """The parameters are not in the state; hooks are not run; a restore that fails leaves no state."""

    def work(rank: int) -> None:
        model, _ = made(fsdp2, seed=0)
        optim = Factored(model.parameters())
        train(model, optim, 1, alike=True)
        with holdfast.Checkpointer("job") as ckpt:
            ckpt.save(1, {"optim": optim}, wait="committed")
            model, _ = made(fsdp2, seed=1)
            before = [full(p) for p in model.parameters()]
            optim = Factored(model.parameters())
            steps: list[Any] = []
            optim.register_step_pre_hook(lambda *of: steps.append(of))
            torch.manual_seed(3)
            random = torch.random.get_rng_state()
            with pytest.raises(holdfast.InvalidArgumentError, match="'more' was not saved"):
                ckpt.restore({"optim": optim, "more": 1})
            assert not optim.state and list(optim.param_groups[0]) == ["params", "lr"]
            assert ckpt.restore({"optim": optim}) == 2
            assert optim.state and steps == []
            assert torch.equal(random, torch.random.get_rng_state())
            assert_same(before, [full(p) for p in model.parameters()])

    run_ranks(2, work)


class Refusing(Factored):
    def step(self, closure: Any = None) -> None:
        if closure is None:
            raise RuntimeError("no closure")
        super().step()


def test_an_optimizer_that_makes_no_step_is_named(daemon: Daemon) -> None:
    def work(rank: int) -> str:
        model, _ = made(fsdp2, seed=0)
        optim = Refusing(model.parameters())
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        optim.step(lambda: None)
        with holdfast.Checkpointer("job") as ckpt:
            ckpt.save(1, {"model": model, "optim": optim}, wait="committed")
            with pytest.raises(holdfast.InvalidArgumentError) as caught:
                ckpt.restore({"model": model, "optim": Refusing(model.parameters())})
        return str(caught.value)

    for said in run_ranks(2, work):
        assert "optim.state.model." in said and "RuntimeError: no closure" in said


def test_a_rank_that_fails_leaves_nobody_in_a_collective(daemon: Daemon) -> None:
    """Making the state communicates: whoever fails does so after it, or before all ranks alike."""

    def work(rank: int) -> str:
        model, _ = made(fsdp2, seed=0)
        optim = Factored(model.parameters())
        train(model, optim, 1, alike=True)
        with holdfast.Checkpointer("job") as ckpt:
            ckpt.save(1, {"model": model, "optim": optim}, wait="committed")
            model, _ = made(fsdp2, seed=1)
            before = [full(p) for p in model.parameters()]
            fresh = Factored(model.parameters())
            more = {"more": 1} if rank == 1 else {}
            with pytest.raises(holdfast.InvalidArgumentError) as caught:
                ckpt.restore({**more, "optim": fresh})
            assert not fresh.state
            assert_same(before, [full(p) for p in model.parameters()])
            assert ckpt.restore({"model": model, "optim": fresh}) == 2
            assert_same(seen(optim, model), seen(optim, model))
        return str(caught.value)

    for said in run_ranks(2, work):
        assert "'more' was not saved" in said


def test_state_that_is_like_its_parameter_needs_no_step(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    def work(rank: int) -> None:
        model, optim = made(fsdp2, seed=0)
        assert type(optim) is torch.optim.AdamW
        train(model, optim, 1, alike=True)
        with holdfast.Checkpointer("job") as ckpt:
            ckpt.save(1, {"model": model, "optim": optim}, wait="committed")
            other, fresh = made(fsdp2, seed=1)
            steps: list[Any] = []
            monkeypatch.setattr(torch.optim.AdamW, "step", steps.append)
            assert ckpt.restore({"model": other, "optim": fresh}) == 2 and steps == []
            assert_same(seen(optim, model), seen(fresh, other))

    run_ranks(2, work)


class Counting(Factored):
    """With what no state shows, and a value of a group that is changed in place."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters)
        self.steps_made = 0
        self.param_groups[0]["seen"] = torch.zeros(())

    def step(self, closure: Any = None) -> None:
        self.steps_made += 1
        self.param_groups[0]["seen"] += 1
        self.last = closure
        super().step()


def test_a_first_start_leaves_the_optimizer_as_it_is(daemon: Daemon) -> None:
    def work(rank: int) -> None:
        model, _ = made(fsdp2, seed=0)
        optim = Counting(model.parameters())
        before = [full(p) for p in model.parameters()]
        with holdfast.Checkpointer("job") as ckpt:
            assert ckpt.restore({"model": model, "optim": optim}) == 0
        assert not optim.state and optim.steps_made == 0 and not hasattr(optim, "last")
        assert optim.param_groups[0]["seen"].item() == 0
        assert list(optim.param_groups[0]) == ["params", "lr", "seen"]
        assert [p.grad for p in model.parameters()] == [None] * len(before)
        assert_same(before, [full(p) for p in model.parameters()])

    run_ranks(2, work)


def test_what_state_dict_raises_has_its_path(daemon: Daemon) -> None:
    def work(rank: int) -> str:
        model = nn.Linear(3, 2)
        optim = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW)
        with holdfast.Checkpointer("job") as ckpt:
            with pytest.raises(holdfast.InvalidArgumentError) as caught:
                ckpt.save(1, {"model": model, "of": {"optim": optim}})
        assert isinstance(caught.value.__cause__, RuntimeError)
        return str(caught.value)

    for said in run_ranks(2, work):
        assert said.startswith(
            "of.optim: state_dict of this ZeroRedundancyOptimizer raised Runtime"
        )


class Mute(Holder):
    """That shows nothing before its first step, also when the optimizer inside has a state."""

    def __init__(self, optim: Optimizer) -> None:
        self._hidden = {"optim": optim}
        self.param_groups = optim.param_groups
        self.stepped = False

    @property
    def optim(self) -> Optimizer:
        return self._hidden["optim"]

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() if self.stepped else {"of": {}}


def test_no_rank_is_given_whole_moments_of_a_dtensor(daemon: Daemon) -> None:
    def save(rank: int) -> None:
        model, optim = made(fsdp2, seed=0)
        train(model, optim, 1, alike=True)
        holder = Mute(optim)
        holder.stepped = True
        with holdfast.Checkpointer("job") as ckpt:
            ckpt.save(1, {"model": model, "optim": holder}, wait="committed")

    def restore(rank: int) -> str:
        model, optim = made(fsdp2, seed=0)
        with holdfast.Checkpointer("job") as ckpt:
            with pytest.raises(holdfast.InvalidArgumentError) as caught:
                ckpt.restore({"model": model, "optim": Mute(optim)})
        return str(caught.value)

    run_ranks(2, save)
    for ranks in (2, 3):
        for said in run_ranks(ranks, restore):
            assert "optim.of.state" in said and "the Mute shows no tensor to fill" in said


# ---- Errors that say where ----


def test_what_load_state_dict_raises_has_its_path(ckpt: holdfast.Checkpointer) -> None:
    model = nn.Linear(2, 2)

    class Picky(Speaking):
        def load_state_dict(self, state: dict[str, Any]) -> None:
            raise KeyError(1)

    ckpt.save(1, {"of": {"optim": Speaking(model.parameters())}}, wait="sealed")
    with pytest.raises(
        holdfast.InvalidArgumentError,
        match=r"of\.optim: load_state_dict of this .*Picky raised KeyError: 1",
    ) as caught:
        ckpt.restore({"of": {"optim": Picky(model.parameters())}})
    assert isinstance(caught.value.__cause__, KeyError)


def test_what_other_objects_raise_stays_what_it_is(ckpt: holdfast.Checkpointer) -> None:
    class Picky(Holder):
        def load_state_dict(self, state: dict[str, Any]) -> None:
            raise KeyError(1)

    optim = momentum(nn.Linear(2, 2))
    ckpt.save(1, {"trainer": Holder(optim)}, wait="sealed")
    with pytest.raises(KeyError) as caught:
        ckpt.restore({"trainer": Picky(optim)})
    if sys.version_info >= (3, 11):
        assert any(note.startswith("trainer: raised by") for note in caught.value.__notes__)


def test_steps_within_a_restore_are_none_of_the_training(ckpt: holdfast.Checkpointer) -> None:
    """A container that makes its state by a step when it is loaded: the loop may replay a graph, which waits for nothing."""

    class Steps(SpeakingContainer):
        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.step()
            super().load_state_dict(state)

    model = Weights(1000)
    state = {"model": model, "optim": Steps(momentum(model))}
    ckpt.save(1, state, wait="sealed")
    ckpt.restore(state)
    assert not ckpt._fences.hold(state["optim"].optimizers[0])
    state["optim"].step()
    assert ckpt._fences.hold(state["optim"].optimizers[0])


# ---- LBFGS ----


def test_lbfgs_over_dtensors_is_refused_before_anything_is_saved(daemon: Daemon) -> None:
    def work(rank: int) -> list[str]:
        model, _ = made(fsdp2, seed=0)
        optim = torch.optim.LBFGS(model.parameters())
        found = []
        with holdfast.Checkpointer("job") as ckpt:
            for state in ({"model": model, "optim": optim}, {"all": [Container(optim)]}):
                for refuses in (ckpt.restore, lambda state, to=ckpt: to.save(1, state)):
                    with pytest.raises(holdfast.InvalidArgumentError) as caught:
                        refuses(state)
                    found.append(str(caught.value))
            ckpt.save(1, {"model": model}, wait="committed")  # the way out
        return found

    for said in run_ranks(2, work):
        assert [text.split(":")[0] for text in said] == 2 * ["optim"] + 2 * ["all.0"]
        for text in said:
            assert "LBFGS over DTensors" in text and "Leave the optimizer out" in text, text


# ---- FSDP1 ----


@pytest.mark.parametrize("use_orig_params", [False, True])
def test_fsdp1_is_refused_before_anything_is_saved(daemon: Daemon, use_orig_params: bool) -> None:
    """With each of its state dicts, before a first save and before a first restore; also where only the optimizer is given."""

    def work(rank: int) -> list[str]:
        warnings.simplefilter("ignore")
        found = []
        for kind in (None, StateDictType.SHARDED_STATE_DICT, StateDictType.LOCAL_STATE_DICT):
            sharded = FullyShardedDataParallel(
                nn.Linear(3, 3), use_orig_params=use_orig_params, device_id=torch.device("cpu")
            )
            if kind is not None:
                FullyShardedDataParallel.set_state_dict_type(sharded, kind)
            model = nn.Sequential(sharded)
            optim = torch.optim.AdamW(model.parameters())
            model(torch.ones(3)).sum().backward()
            optim.step()
            states = [{"model": model}, {"optim": optim}, {"all": [model, {"optim": optim}]}]
            for number, state in enumerate(states):
                with holdfast.Checkpointer(f"job-{kind}-{number}".lower()) as ckpt:
                    for refuses in (ckpt.restore, lambda state, to=ckpt: to.save(1, state)):
                        with pytest.raises(holdfast.InvalidArgumentError) as caught:
                            refuses(state)
                        found.append(str(caught.value))
        return found

    for said in run_ranks(2, work):
        assert len(said) == 18
        for text in said:
            assert "FullyShardedDataParallel" in text and "fully_shard" in text, text
            assert "holdfast.dcp" in text, text
        assert [text.split(":")[0] for text in said[::2]] == 3 * ["model", "optim", "all.0"]


def test_fsdp1_goes_through_dcp_on_another_number_of_ranks(daemon: Daemon) -> None:
    """What the refusal names as the way out."""
    flattened = StateDictOptions(flatten_optimizer_state_dict=True)

    def start(seed: int) -> tuple[nn.Module, Optimizer]:
        warnings.simplefilter("ignore")
        torch.manual_seed(seed)
        model = FullyShardedDataParallel(
            nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 3)),
            use_orig_params=True,
            device_id=torch.device("cpu"),
        )
        return model, torch.optim.AdamW(model.parameters(), lr=0.01)

    def losses(model: nn.Module, optim: Optimizer, first: int) -> list[float]:
        found = []
        for step in range(first, first + 2):
            torch.manual_seed(step)
            optim.zero_grad()
            loss = model(torch.randn(4, 5)).square().mean()
            loss.backward()
            optim.step()
            found.append(loss.item())
        return found

    def save(rank: int) -> list[float]:
        model, optim = start(0)
        losses(model, optim, 0)
        model_state, optim_state = get_state_dict(model, optim, options=flattened)
        dcp.save(
            {"model": model_state, "optim": optim_state},
            storage_writer=holdfast.dcp.Writer("job", step=1),
        )
        return losses(model, optim, 2)

    def load(rank: int) -> list[float]:
        model, optim = start(7)
        model_state, optim_state = get_state_dict(model, optim, options=flattened)
        state = {"model": model_state, "optim": optim_state}
        dcp.load(state, storage_reader=holdfast.dcp.Reader("job"))
        set_state_dict(
            model,
            optim,
            model_state_dict=state["model"],
            optim_state_dict=state["optim"],
            options=flattened,
        )
        return losses(model, optim, 2)

    expected = run_ranks(2, save)[0]
    for found in run_ranks(3, load):
        assert found == pytest.approx(expected)
