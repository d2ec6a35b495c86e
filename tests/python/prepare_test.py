"""Checkpointer.prepare: what the first save would do once is done before it, and what no save could take is refused."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from ranks import run_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import holdfast
from daemons import DEADLINE_S, Daemon
from holdfast import _checkpointer, _described, _first_steps


@pytest.fixture
def ckpt(daemon: Daemon) -> Iterator[holdfast.Checkpointer]:
    one = holdfast.Checkpointer("job", rank=0, world_size=1)
    yield one
    one.close()


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """How many tensors were described, and how many lists of them were made for the library."""
    made = {"tensors": 0, "lists": 0}
    add, tensor_list = _described._add, _checkpointer.tensor_list

    def counting_add(*arguments: Any) -> None:
        made["tensors"] += 1
        add(*arguments)

    def counting_list(specs: Any) -> Any:
        made["lists"] += 1
        return tensor_list(specs)

    monkeypatch.setattr(_described, "_add", counting_add)
    monkeypatch.setattr(_checkpointer, "tensor_list", counting_list)
    return made


def state(kind: type = torch.optim.AdamW, **options: Any) -> dict[str, Any]:
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
    return {"model": model, "optim": kind(model.parameters(), lr=0.1, **options), "epoch": 0}


def step(of: dict[str, Any]) -> None:
    of["optim"].zero_grad()
    of["model"](torch.ones(4)).sum().backward()
    of["optim"].step()


def saved(ckpt: holdfast.Checkpointer, number: int, of: dict[str, Any]) -> None:
    ckpt.save(number, of, wait="committed", timeout=DEADLINE_S)
    assert ckpt.failed_saves == 0


def test_after_a_restore_the_first_save_describes_nothing(
    daemon: Daemon, counts: dict[str, int]
) -> None:
    with holdfast.Checkpointer("job", rank=0, world_size=1) as before:
        first = state()
        step(first)
        saved(before, 0, first)
    with holdfast.Checkpointer("job", rank=0, world_size=1) as ckpt:
        mine = state()
        ckpt.restore(mine)
        ready, wanted = ckpt.prepare(mine)
        assert ready == wanted > 0
        described, layout = ckpt._described, ckpt._layout[1]
        step(mine)
        counts.update(tensors=0, lists=0)
        saved(ckpt, 1, mine)
        assert counts == {"tensors": 0, "lists": 0}
        assert ckpt._described is described and ckpt._layout[1] is layout
        # What step() changes was copied beside the loop.
        assert described is not None and described.copy_first == []


def test_a_restore_may_come_after(daemon: Daemon, counts: dict[str, int]) -> None:
    with holdfast.Checkpointer("job", rank=0, world_size=1) as before:
        first = state()
        step(first)
        saved(before, 0, first)
        step(first)
        expected = [each.detach().clone() for each in first["model"].parameters()]
    with holdfast.Checkpointer("job", rank=0, world_size=1) as ckpt:
        mine = state()
        assert ckpt.prepare(mine)[0] > 0
        assert not mine["optim"].state
        ckpt.restore(mine)
        assert ckpt.last_restored is not None and ckpt.last_restored.step == 0
        step(mine)
        counts.update(lists=0)
        saved(ckpt, 1, mine)
        assert counts["lists"] == 0, "the moments have other places, and nothing else is new"
        found = list(mine["model"].parameters())
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


EVERY_OPTIMIZER: list[tuple[str, dict[str, Any]]] = [
    (name, options)
    for name, options in (
        ("Adadelta", {}), ("Adafactor", {}), ("Adagrad", {}), ("Adam", {}), ("Adam", {"amsgrad": True}),
        ("AdamW", {}), ("AdamW", {"fused": True}), ("AdamW", {"foreach": True}), ("Adamax", {}),
        ("NAdam", {}), ("RAdam", {}), ("RMSprop", {"momentum": 0.5, "centered": True}), ("Rprop", {}),
        ("SGD", {}), ("SGD", {"momentum": 0.9}), ("SGD", {"momentum": 0.9, "fused": True}),
    )
]  # fmt: skip


@pytest.mark.parametrize(("name", "options"), EVERY_OPTIMIZER)
def test_an_optimizer_without_a_step_is_prepared_for(
    ckpt: holdfast.Checkpointer, counts: dict[str, int], name: str, options: dict[str, Any]
) -> None:
    torch.manual_seed(5)
    mine = state(getattr(torch.optim, name), **options)
    twin = copy.deepcopy(mine)
    random = torch.get_rng_state()
    ckpt.prepare(mine)
    assert torch.equal(torch.get_rng_state(), random)
    for each, other in zip(mine["model"].parameters(), twin["model"].parameters(), strict=True):
        assert torch.equal(each, other) and each.grad is None
    assert len(mine["optim"].state) == len(twin["optim"].state)
    groups = [{**one["optim"].param_groups[0], "params": None} for one in (mine, twin)]
    assert groups[0] == groups[1]
    step(mine)
    step(twin)
    counts.update(lists=0)
    saved(ckpt, 0, mine)
    assert counts["lists"] == 0, "the first save has found the layout that was prepared"
    for each, other in zip(mine["model"].parameters(), twin["model"].parameters(), strict=True):
        assert torch.equal(each, other)


def test_sharded_parameters_without_a_step_are_prepared_for(daemon: Daemon) -> None:
    def work(rank: int) -> None:
        mine = state()
        mesh = init_device_mesh("cpu", (2,))
        fully_shard(mine["model"], mesh=mesh)
        mine["optim"] = torch.optim.AdamW(mine["model"].parameters(), lr=0.1)
        with holdfast.Checkpointer("job") as ckpt:
            ckpt.restore(mine)
            if rank == 1:
                # Not a collective: the other rank makes no such call.
                assert ckpt.prepare(mine)[0] > 0
                assert not mine["optim"].state
            layout = ckpt._layout[1]
            step(mine)
            saved(ckpt, 0, mine)
            assert (ckpt._layout[1] is layout) == (rank == 1)

    run_ranks(2, work)


def test_an_optimizer_that_nobody_can_foresee_is_left_alone(ckpt: holdfast.Checkpointer) -> None:
    class Own(torch.optim.SGD):
        steps = 0

        def step(self, closure: Any = None) -> Any:
            Own.steps += 1
            return super().step(closure)

    for kind in (Own, torch.optim.LBFGS):
        mine = state(kind)
        assert ckpt.prepare(mine)[0] > 0
        assert not mine["optim"].state and Own.steps == 0


def test_the_state_is_gone_also_after_an_error() -> None:
    mine = state()
    with pytest.raises(ZeroDivisionError), _first_steps.shown([mine["optim"]]):
        assert len(mine["optim"].state) == 4
        raise ZeroDivisionError
    assert not mine["optim"].state


def test_what_no_save_could_take_raises_as_the_first_save_does(
    ckpt: holdfast.Checkpointer,
) -> None:
    class Odd:
        pass

    states: list[Callable[[], Any]] = [
        lambda: {"w": torch.ones(2, device="meta")},
        lambda: {"a": {"b": torch.ones(1)}, "a.b": torch.ones(1)},
        lambda: {"extra": {"odd": Odd()}},
        lambda: [torch.ones(1)],
        lambda: {"__metadata__": torch.ones(1)},
    ]
    for make in states:
        said = []
        for call in (ckpt.prepare, lambda each: ckpt.save(0, each)):
            with pytest.raises((holdfast.InvalidArgumentError, holdfast.RefusedError)) as error:
                call(make())
            text = re.sub("^(reserve|save step 0): ", "", str(error.value))
            said.append((type(error.value), text))
        assert said[0] == said[1]


def test_a_state_that_can_never_fit_is_refused(
    make_daemon: Callable[..., Daemon], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOLDFAST_SOCKET", str(make_daemon(memory_bytes="16MiB").socket))
    with holdfast.Checkpointer("job", rank=0, world_size=1) as ckpt:
        with pytest.raises(holdfast.NoRoomError, match="16 MiB"):
            ckpt.prepare({"w": torch.ones(8 << 20)})
        # Some of it fits: no error, and a save finds a slot.
        mine = {"w": torch.ones(1_500_000)}
        ready, wanted = ckpt.prepare(mine, timeout=5)
        assert 0 < ready < wanted
        saved(ckpt, 0, mine)


def test_a_state_that_was_restored_in_part_is_not_prepared(ckpt: holdfast.Checkpointer) -> None:
    saved(ckpt, 0, {"w": torch.ones(4), "extra": {"at": 1}})

    class Fails:
        def state_dict(self) -> dict[str, Any]:
            return {"at": 0}

        def load_state_dict(self, loaded: Any) -> None:
            raise ValueError("not today")

    saved(ckpt, 1, {"loader": Fails()})
    mine = {"loader": Fails()}
    with pytest.raises(ValueError, match="not today"):
        ckpt.restore(mine)
    with pytest.raises(holdfast.RefusedError, match="^prepare: a restore has failed"):
        ckpt.prepare(mine)
