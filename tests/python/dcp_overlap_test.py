"""dcp.async_save copies beside the loop: what is saved is all of one step, and optimizers wait."""

from __future__ import annotations

import inspect
import logging
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from overlap_test import Routed, Weights, one_value, sgd, until_overlapped
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.logger import _dcp_logger

import holdfast
from daemons import DEADLINE_S, Daemon
from holdfast import _held, _jobs
from holdfast.dcp import Reader, Stager, Writer

_dcp_logger.setLevel(logging.ERROR)
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.fixture(autouse=True)
def slow_copies(daemon: Daemon) -> Iterator[None]:
    """By one thread."""
    torch.set_num_threads(1)
    _jobs.job_for("job", rank=0, world_size=1, socket=str(daemon.socket), copy_threads=1)
    yield
    _jobs._close_all()
    _jobs._loaded.clear()
    assert not _held._live


class Saving:
    """dcp.async_save, with a Stager or without."""

    def __init__(self, stager: str, state: dict[str, Any], step: int, **options: Any) -> None:
        self.writer = Writer("job", step=step)
        self.stager = Stager("job") if stager else None
        if self.stager is not None:
            options["async_stager"] = self.stager
        saving: Any = dcp.async_save(state, storage_writer=self.writer, **options)
        self.future: Future[Any] = getattr(saving, "upload_completion", saving)
        self.staged: Future[None] | None = getattr(saving, "staging_completion", None)

    def is_copying(self) -> bool:
        with _held._live_changed:
            return not all(each.save.done("snapshot") for each in _held._live)

    def result(self) -> None:
        self.future.result(DEADLINE_S)


def states(model: torch.nn.Module, optim: torch.optim.Optimizer) -> dict[str, Any]:
    """As a loop has them: views of what is trained."""
    return {"model": model.state_dict(), "optim": optim.state_dict()}


def loaded(model: torch.nn.Module, optim: torch.optim.Optimizer, step: int) -> dict[str, Any]:
    target = {
        "model": {name: torch.full_like(each, -9) for name, each in model.state_dict().items()},
        "optim": optim.state_dict(),
    }
    dcp.load(target, storage_reader=Reader("job", step=step, adopt=False))
    return target


ELEMENTS = 6_000_000  # copied in milliseconds
# PyTorch 2.6 takes none.
STAGERS = ["", "stager"] if "async_stager" in inspect.signature(dcp.async_save).parameters else [""]


@pytest.mark.parametrize("stager", STAGERS)
def test_the_optimizer_waits_and_the_loop_does_not(stager: str) -> None:
    model = Routed()
    optim = sgd(model)
    Writer("job", step=0)  # from here on optimizers are seen
    seen = {"steps": [0]}

    def attempt(step: int) -> bool:
        optim.step()
        with torch.no_grad():
            model.w.fill_(step)
        model(step)
        saving = Saving(stager, {**states(model, optim), "seen": seen}, step)
        overlapped = saving.is_copying()
        model(-7)  # statistics and a router's bias change in the forward pass
        seen["steps"].append(step)
        overlapped = overlapped and saving.is_copying()
        optim.step()
        assert not saving.is_copying()
        assert one_value(model.w.detach()) == step - 1
        saving.result()
        target = loaded(model, optim, step)["model"]
        assert one_value(target["w"]) == step
        assert one_value(target["router_bias"]) == step
        assert one_value(target["norm.running_mean"]) == step
        return overlapped

    until_overlapped(attempt)


def test_an_optimizer_that_was_not_seen_to_step_has_all_copied_at_once() -> None:
    model = Weights(ELEMENTS)
    optim = sgd(model)
    Writer("job", step=0)
    for step in range(3):  # never stepped, or by something that runs no hook
        with torch.no_grad():
            model.w.fill_(step)
        saving = Saving("", states(model, optim), step)
        assert not saving.is_copying()
        with torch.no_grad():
            model.w.fill_(-1)
        saving.result()
        assert one_value(loaded(model, optim, step)["model"]["w"]) == step


@pytest.mark.parametrize("stager", STAGERS)
def test_what_changes_parameters_by_hand_waits_first(stager: str) -> None:
    model = Weights(ELEMENTS)
    optim = sgd(model)
    Writer("job", step=0)

    def attempt(step: int) -> bool:
        optim.step()
        with torch.no_grad():
            model.w.fill_(step)
        saving = Saving(stager, states(model, optim), step)
        overlapped = saving.is_copying()
        (saving.stager or saving.writer).synchronize_staging()
        with torch.no_grad():
            model.w.fill_(-1)
        saving.result()
        assert one_value(loaded(model, optim, step)["model"]["w"]) == step
        return overlapped

    until_overlapped(attempt)


def test_a_load_waits_for_the_copy_of_what_it_fills() -> None:
    model = Weights(ELEMENTS)
    optim = sgd(model)
    dcp.save({"model": model.state_dict()}, storage_writer=Writer("other", step=0))

    def attempt(step: int) -> bool:
        optim.step()
        with torch.no_grad():
            model.w.fill_(step + 1)
        saving = Saving("", states(model, optim), step)
        overlapped = saving.is_copying()
        reader = Reader("other", step=0, adopt=False)
        dcp.load({"model": model.state_dict()}, storage_reader=reader)
        assert one_value(model.w.detach()) == 0
        saving.result()
        assert one_value(loaded(model, optim, step)["model"]["w"]) == step + 1
        return overlapped

    until_overlapped(attempt)


def test_a_parameter_that_is_changed_while_it_is_copied_loses_the_step() -> None:
    """It would be a mix of two steps."""
    model = Weights(ELEMENTS)
    optim = sgd(model)
    Writer("job", step=0)

    def attempt(step: int) -> bool:
        optim.step()
        saving = Saving("", states(model, optim), step)
        if not saving.is_copying():
            saving.result()
            return False
        with torch.no_grad():
            model.w[:1].fill_(-1)
        with pytest.raises(CheckpointException) as raised:
            saving.result()
        ((error, _),) = raised.value.failures.values()
        assert isinstance(error, holdfast.RefusedError)
        assert f"step {step}" in str(error) and "model.w was changed" in str(error), error
        assert "synchronize_staging()" in str(error)
        assert step not in [each.step for each in holdfast.checkpoints("job")]
        return True

    until_overlapped(attempt)
    step = 100
    Saving("", states(model, optim), step).result()
    loaded(model, optim, step)


def test_a_stager_says_when_all_is_staged() -> None:
    """Where PyTorch has a future for it, it is done before the step is saved."""
    if not hasattr(dcp.state_dict_saver, "AsyncSaveResponse"):
        pytest.skip("PyTorch is older than AsyncSaveResponse")
    model = Weights(ELEMENTS)
    optim = sgd(model)
    gate = threading.Event()

    class Waits(DefaultSavePlanner):
        def create_local_plan(self) -> Any:
            assert gate.wait(DEADLINE_S)
            return super().create_local_plan()

    for step in range(2):  # all copied at once; beside the loop
        optim.step()
        with torch.no_grad():
            model.w.fill_(step)
        saving = Saving("stager", states(model, optim), step, planner=Waits())
        assert saving.staged is not None
        saving.staged.result(DEADLINE_S)
        assert not saving.future.done()
        with torch.no_grad():
            model.w.fill_(-1)
        gate.set()
        saving.result()
        gate.clear()
        assert one_value(loaded(model, optim, step)["model"]["w"]) == step


@pytest.mark.parametrize("stager", STAGERS)
def test_a_planner_that_writes_something_else_loses_the_step_and_no_more(stager: str) -> None:
    class Doubles(DefaultSavePlanner):
        def resolve_data(self, item: Any) -> Any:
            made = super().resolve_data(item)
            return made * 2 if isinstance(made, torch.Tensor) else made

    model = Weights(1000)
    optim = sgd(model)
    Writer("job", step=0)
    for step in (1, 2):
        optim.step()
        with torch.no_grad():
            model.w.fill_(step)
        saving = Saving(stager, states(model, optim), step, planner=Doubles())
        if step == 1:
            with pytest.raises(CheckpointException, match="from the next one on"):
                saving.result()
        else:
            saving.result()
    assert one_value(loaded(model, optim, 2)["model"]["w"]) == 4
