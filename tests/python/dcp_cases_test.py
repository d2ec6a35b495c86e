"""What PyTorch's own tests ask of torch.distributed.checkpoint, asked of it through Holdfast: nested states, objects with a state,
DTensors on meshes, get_state_dict and set_state_dict with their options, planners. Ranks are children with gloo."""

from __future__ import annotations

import logging
import pathlib
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo  # here, once: each rank would import it, which takes a second
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from parallel_test import (
    Model,
    assert_same,
    fsdp2,
    fsdp2_over_tp,
    local,
    made,
    tensor_parallel,
    train,
)
from ranks import run_ranks
from relay import ATTACH, relayed
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.logger import _dcp_logger
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from daemons import DEADLINE_S, Daemon
from holdfast import _core
from holdfast.dcp import Reader, Writer

_dcp_logger.setLevel(logging.ERROR)
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def save(state: dict[str, Any], step: int = 1, job: str = "job", **options: Any) -> None:
    dcp.save(state, storage_writer=Writer(job, step=step, wait="committed"), **options)


def load(state: dict[str, Any], job: str = "job", step: int | None = None, **options: Any) -> None:
    dcp.load(state, storage_reader=Reader(job, step=step, adopt=False), **options)


def whole(value: Any) -> Any:
    """Put together, on every rank."""
    if isinstance(value, DTensor):
        return value.full_tensor().detach().clone()
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: whole(each) for key, each in value.items()}
    return [whole(each) for each in value] if isinstance(value, list) else value


def trained(wrap: Callable[[Model], nn.Module], seed: int = 0) -> tuple[nn.Module, Any]:
    model, optim = made(wrap, seed=seed)
    train(model, optim, 2, alike=True)
    return model, optim


def both(model: nn.Module, optim: Any, **options: Any) -> dict[str, Any]:
    of_model, of_optim = get_state_dict(model, optim, options=StateDictOptions(**options))
    return {"model": of_model, "optim": of_optim}


def put(model: nn.Module, optim: Any, state: dict[str, Any], **options: Any) -> None:
    set_state_dict(
        model,
        optim,
        model_state_dict=state["model"],
        optim_state_dict=state["optim"],
        options=StateDictOptions(**options),
    )


# ---- States that are no tensors ----


class Counter:
    """An object with a state, which says how often it was given one."""

    def __init__(self, value: int) -> None:
        self.value, self.weights, self.loads = value, torch.full((3,), float(value)), 0

    def state_dict(self) -> dict[str, Any]:
        return {
            "value": self.value,
            "deep": {"weights": self.weights, "list": [self.value, {"a": self.value}]},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.loads += 1
        self.value, self.weights = state["value"], state["deep"]["weights"]
        assert state["deep"]["list"] == [self.value, {"a": self.value}]


@pytest.mark.parametrize("asynchronous", [False, True])
def test_objects_with_a_state_are_asked_and_given_it_once(
    daemon: Daemon, asynchronous: bool
) -> None:
    def work(rank: int) -> None:
        one = {"counter": Counter(7), "plain": {"n": 1}}
        if asynchronous:
            writer = Writer("job", step=1, wait="committed")
            dcp.async_save(
                one, storage_writer=writer, process_group=dist.new_group(backend="gloo")
            ).result(DEADLINE_S)
        else:
            save(one)
        other = {"counter": Counter(0), "plain": {"n": 0}}
        place = other["counter"].weights
        load(other)
        assert other["counter"].loads == 1 and other["counter"].value == 7
        assert place.eq(7).all() and other["counter"].weights.eq(7).all()
        assert other["plain"] == {"n": 1}

    run_ranks(2, work)


NESTED = {
    "ints": {0: torch.arange(3), 1: {2: torch.arange(4.0)}},
    "list": [torch.ones(2), [torch.zeros(1), {"x": torch.full((2,), 3.0)}], "text", None],
    "with.dots": {"a.b": torch.ones(1), "a": {"c": 2.5}},
    "empty": {"dict": {}, "list": [], "tensor": torch.zeros(0, 4)},
    "values": {"none": None, "bool": True, "big": 2**80, "tuple": (1, (2, 3))},
    "scalar": torch.tensor(4, dtype=torch.int16),
    "half": torch.arange(6).to(torch.float16).view(2, 3).T,
}


def blank(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return torch.zeros_like(value) - 1
    if isinstance(value, dict):
        return {key: blank(each) for key, each in value.items()}
    return [blank(each) for each in value] if isinstance(value, list) else value


@pytest.mark.parametrize("flatten", [True, False])
def test_nested_states(daemon: Daemon, flatten: bool) -> None:
    # Not flattened, all that is no tensor at the top is an object.
    state = {key: NESTED[key] for key in (NESTED if flatten else ("half", "scalar", "values"))}

    def work(rank: int) -> None:
        save(state, planner=DefaultSavePlanner(flatten_state_dict=flatten))
        found = blank(state)
        load(found, planner=DefaultLoadPlanner(flatten_state_dict=flatten))
        assert_same(state, found)

    run_ranks(2, work)


def test_each_rank_has_keys_of_its_own(daemon: Daemon) -> None:
    """As the stages of a pipeline, and their optimizers, have."""

    def stage(rank: int, fill: float) -> dict[str, Any]:
        return {
            f"layers.{2 * rank + i}": {"weight": torch.full((2, 3), fill * (2 * rank + i + 1))}
            for i in range(2)
        } | {"norm": torch.full((3,), fill), f"stage.{rank}": [rank, {"fill": fill}]}

    def write(rank: int) -> None:
        save(stage(rank, 1.0))

    def read(rank: int) -> None:
        mine, other = stage(rank, 0.0), stage(1 - rank, 0.0)
        load(mine)
        assert_same(stage(rank, 1.0), mine)
        load(other)  # the stages have changed places
        assert_same(stage(1 - rank, 1.0), other)

    def read_all(rank: int) -> None:
        every = stage(0, 0.0) | stage(1, 0.0)
        load(every)
        assert_same(stage(0, 1.0) | stage(1, 1.0), every)

    run_ranks(2, write)
    run_ranks(2, read)
    run_ranks(1, read_all)


# ---- DTensors from one mesh into another ----

PLACEMENTS: dict[str, tuple[tuple[int, ...], list[Any]]] = {
    "rows": ((4,), [Shard(0)]),
    "columns": ((4,), [Shard(1)]),
    "all": ((4,), [Replicate()]),
    "blocks": ((2, 2), [Shard(0), Shard(1)]),
    "blocks-turned": ((2, 2), [Shard(1), Shard(0)]),
    "rows-twice": ((2, 2), [Shard(0), Shard(0)]),
    "hybrid": ((2, 2), [Replicate(), Shard(0)]),
    "hybrid-columns": ((2, 2), [Shard(1), Replicate()]),
}
SHAPES = {"even": (8, 8), "uneven": (7, 5), "few": (3, 2), "deep": (5, 4, 3), "none": (0, 4)}


def spread(ranks: int, places: dict[str, Any], fill: float | None = None) -> dict[str, Any]:
    """A tensor of each shape, in each placement; the mesh is of so many ranks in all."""
    found: dict[str, Any] = {}
    for name, (mesh, placements) in places.items():
        mesh = mesh if ranks == 4 else (ranks, *[1] * (len(mesh) - 1))
        of = init_device_mesh("cpu", mesh)
        for key, shape in SHAPES.items():
            value = torch.arange(float(torch.Size(shape).numel())).view(shape) + len(name)
            value = value if fill is None else torch.full_like(value, fill)
            # Each rank takes its part of what all have: nothing is sent.
            found[f"{name}/{key}"] = distribute_tensor(value, of, placements, src_data_rank=None)
    return found


@pytest.mark.parametrize("ranks", [4, 2, 1])
def test_every_placement_into_every_other(daemon: Daemon, ranks: int) -> None:
    def write(rank: int) -> None:
        save(spread(4, PLACEMENTS))

    def read(rank: int) -> None:
        names = list(PLACEMENTS)
        for turn in range(len(names) if ranks == 4 else 2):
            # What was saved in one placement is wanted in another.
            other = {
                name: PLACEMENTS[names[(i + turn) % len(names)]] for i, name in enumerate(names)
            }
            found = spread(ranks, other, fill=-1.0)
            load(found)
            assert_same(local(spread(ranks, other)), local(found))

    run_ranks(4, write)
    run_ranks(ranks, read)


def test_a_plain_tensor_into_dtensors_and_back(daemon: Daemon) -> None:
    value = torch.arange(35.0).view(7, 5)

    def work(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,))
        save({"was_plain": value, "was_sharded": distribute_tensor(value, mesh, [Shard(0)])})
        found = {
            "was_plain": distribute_tensor(torch.zeros(7, 5), mesh, [Shard(1)]),
            "was_sharded": torch.zeros(7, 5),
        }
        load(found)
        assert_same({"was_plain": value, "was_sharded": value}, whole(found))

    run_ranks(2, work)


def test_experts_on_a_part_of_the_ranks(daemon: Daemon) -> None:
    """Two experts, each sharded over its own two of four ranks; afterwards over both of two."""

    def value(expert: int) -> torch.Tensor:
        return torch.arange(21.0).view(7, 3) + 100 * expert

    def write(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("expert", "shard"))["shard"]
        mine = distribute_tensor(value(rank // 2), mesh, [Shard(0)])
        save({f"experts.{rank // 2}": mine, "router": torch.ones(2)})

    def read(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,))
        found: dict[str, Any] = {
            f"experts.{i}": distribute_tensor(torch.zeros(7, 3), mesh, [Shard(1)]) for i in range(2)
        }
        load(found)
        assert_same({f"experts.{i}": value(i) for i in range(2)}, whole(found))

    run_ranks(4, write)
    run_ranks(2, read)


# ---- Models and optimizers ----


def hsdp(model: Model) -> nn.Module:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "shard"))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


CHAIN = [(fsdp2, 2), (hsdp, 4), (fsdp2_over_tp, 4), (tensor_parallel, 2), (fsdp2, 3), (fsdp2, 1)]


def test_training_goes_through_all_ways_to_shard(daemon: Daemon) -> None:
    """Each start loads what the one before saved, trains, and saves."""
    before: Any = None
    for number, (wrap, ranks) in enumerate(CHAIN):

        def work(rank: int, wrap: Any = wrap, number: int = number, before: Any = before) -> Any:
            model, optim = made(wrap, seed=number)
            if number:
                state = both(model, optim)
                dcp.load(state, storage_reader=Reader("job"))  # the run goes on from there
                put(model, optim, state)
                assert_same(before, whole(both(model, optim)))
            train(model, optim, 1, alike=True)
            save(both(model, optim), step=number)
            return whole(both(model, optim))

        before = run_ranks(ranks, work)[0]


def test_a_model_and_its_optimizer_are_objects_with_a_state(daemon: Daemon) -> None:
    """Passed as they are; numbers name the optimizer's parameters then."""

    def work(rank: int) -> None:
        model, optim = trained(fsdp2)
        save({"model": model, "optim": optim})
        expected = whole(both(model, optim))
        other, other_optim = trained(fsdp2, seed=5)  # whose state is there to be filled
        load({"model": other, "optim": other_optim})
        assert_same(expected, whole(both(other, other_optim)))
        train(model, optim, 1, alike=True)
        train(other, other_optim, 1, alike=True)
        assert_same(whole(both(model, optim)), whole(both(other, other_optim)))

    run_ranks(2, work)


def test_a_whole_state_that_rank_0_alone_saves_loads_and_spreads(daemon: Daemon) -> None:
    """All ranks agree on the step by find(), and so the run goes on: on other ranks than before."""

    def save_whole(model: nn.Module, optim: Any, step: int) -> Any:
        state = both(model, optim, full_state_dict=True, cpu_offload=True)
        assert bool(state["model"]) is (dist.get_rank() == 0)
        save(state, step)
        return whole(both(model, optim))

    def write(rank: int) -> Any:
        return save_whole(*trained(fsdp2), step=1)

    def read(rank: int) -> Any:
        model, optim = made(fsdp2, seed=4)
        reader = Reader("job")
        assert reader.find() == 1
        state: dict[str, Any] = {"model": {}, "optim": {}}
        if rank == 0:
            state = both(*made(lambda model: model, seed=4))
            dcp.load(state, storage_reader=reader, no_dist=True)
        spread = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        # One after the other. set_state_dict sets nothing of a model on a rank whose state of it is
        # empty, and rank 0 would wait for the others.
        set_model_state_dict(model, state["model"], options=spread)
        set_optimizer_state_dict(model, optim, state["optim"], options=spread)
        found = whole(both(model, optim))
        for group in found["optim"]["param_groups"]:
            group["betas"] = tuple(group["betas"])  # torch makes a list of it when it spreads
        train(model, optim, 1, alike=True)
        save_whole(model, optim, step=2)
        return found

    expected = run_ranks(2, write)[0]
    for found in run_ranks(3, read):
        assert_same(expected, found)


def test_several_optimizers_groups_and_tied_weights(daemon: Daemon) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.up, self.head = (
                nn.Embedding(7, 4),
                nn.Linear(4, 4),
                nn.Linear(4, 7, bias=False),
            )
            self.head.weight = self.embedding.weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(torch.tanh(self.up(self.embedding(x))))

    def start(seed: int, steps: int) -> tuple[nn.Module, list[Any]]:
        torch.manual_seed(seed)
        model = fully_shard(Tied(), mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
        groups = [
            {"params": [model.up.weight], "lr": 0.1 + seed},
            {"params": [model.up.bias], "weight_decay": 0.5},
        ]
        optims = [
            torch.optim.SGD([model.embedding.weight], lr=0.1, momentum=0.9),
            torch.optim.AdamW(groups),
        ]
        for step in range(steps):
            torch.manual_seed(step)
            model(torch.randint(0, 7, (3,))).square().sum().backward()
            for each in optims:
                each.step()
                each.zero_grad()
        return model, optims

    def write(rank: int) -> Any:
        model, optims = start(0, 2)
        save(both(model, optims))
        return whole(both(model, optims))

    def read(rank: int) -> Any:
        model, optims = start(3, 0)
        state = both(model, optims)
        load(state)
        put(model, optims, state)
        assert model.head.weight is model.embedding.weight
        return whole(both(model, optims))

    expected = run_ranks(2, write)[0]
    for found in run_ranks(3, read):
        assert_same(expected, found)


def test_names_do_not_depend_on_activation_checkpoints_and_compile(daemon: Daemon) -> None:
    def wrapped(model: Model) -> nn.Module:
        for i, block in enumerate(model.blocks):
            model.blocks[i] = checkpoint_wrapper(block)
        fully_shard(model)
        return torch.compile(model, backend="eager")  # type: ignore[return-value]

    def write(rank: int) -> Any:
        warnings.simplefilter("ignore")
        model, optim = made(wrapped, seed=0)
        train(model, optim, 2, alike=True)
        save(both(model, optim))
        return whole(both(model, optim))

    def read(rank: int) -> Any:
        model, optim = made(fsdp2, seed=1)
        state = both(model, optim)
        load(state)
        put(model, optim, state)
        return whole(both(model, optim))

    expected = run_ranks(2, write)[0]
    for found in run_ranks(2, read):
        assert_same(expected, found)


def test_fine_tuning_of_a_pretrained_model(daemon: Daemon) -> None:
    """The backbone is loaded out of a larger state and frozen; then only what is trained is saved and loaded."""

    class Tuned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.backbone = Model()
            self.adapter = nn.Linear(1, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.adapter(self.backbone(x))

    def pretrain(rank: int) -> Any:
        model, optim = trained(fsdp2)
        save(both(model, optim), job="pretrained")
        return whole(get_model_state_dict(model))

    def start(seed: int) -> tuple[nn.Module, Any]:
        torch.manual_seed(seed)
        model = Tuned()
        model.backbone.requires_grad_(False)
        fully_shard(model.backbone)
        fully_shard(model)
        state = {"model": get_model_state_dict(model.backbone)}
        load(state, job="pretrained")
        set_model_state_dict(model.backbone, state["model"])
        return model, torch.optim.AdamW(model.adapter.parameters(), lr=0.1)

    def tune(rank: int, resume: bool, pretrained: Any) -> Any:
        model, optim = start(3 + resume)
        assert_same(pretrained, whole(get_model_state_dict(model.backbone)))
        if resume:
            state = both(model, optim, ignore_frozen_params=True)
            load(state)
            put(model, optim, state, strict=False)
            return whole(both(model, optim))
        train(model, optim, 2, alike=True)
        state = both(model, optim, ignore_frozen_params=True)
        assert list(state["model"]) == ["adapter.weight", "adapter.bias"]
        save(state)
        return whole(both(model, optim))

    pretrained = run_ranks(2, pretrain)[0]
    expected = run_ranks(2, lambda rank: tune(rank, False, pretrained))[0]
    for found in run_ranks(3, lambda rank: tune(rank, True, pretrained)):
        assert_same(expected, found)


# ---- Planners ----


def failures(call: Callable[[], Any]) -> list[str]:
    with pytest.raises(CheckpointException) as caught:
        call()
    return [str(error) for error, _ in caught.value.failures.values()]


def test_what_a_state_wants_and_has_not_is_said_by_dcp(daemon: Daemon) -> None:
    def work(rank: int) -> None:
        save({"w": torch.arange(6.0), "n": 3})
        for state, says in (
            ({"w": torch.zeros(6), "more": torch.zeros(1)}, "more"),
            ({"w": torch.zeros(7)}, "w"),
            ({"w": torch.zeros(2, 3)}, "w"),
        ):
            said = failures(lambda state=state: load(state))
            assert len(said) == 2 and all(says in each for each in said), said
        lenient = {"w": torch.zeros(6), "more": torch.full((1,), 9.0), "n": 0}
        load(lenient, planner=DefaultLoadPlanner(allow_partial_load=True))
        assert_same({"w": torch.arange(6.0), "more": torch.full((1,), 9.0), "n": 3}, lenient)

    run_ranks(2, work)


@pytest.mark.parametrize("lowest", [False, True])
def test_replicas_are_written_once(daemon: Daemon, lowest: bool) -> None:
    """And read by all; which rank writes them the planner decides."""

    def value(name: int, fill: bool = True) -> torch.Tensor:
        return torch.arange(50.0) + name if fill else torch.zeros(50)

    def work(rank: int) -> list[str]:
        save(
            {str(i): value(i) for i in range(4)},
            planner=DefaultSavePlanner(dedup_save_to_lowest_rank=lowest),
        )
        found = {str(i): value(i, fill=False) for i in range(4)}
        load(found)
        assert_same({str(i): value(i) for i in range(4)}, found)
        return [each.name for each in _core.attach("job", rank=rank).tensors]

    zero, one = run_ranks(2, work)
    assert sorted(zero + one) == list("0123")
    assert zero and bool(one) is not lowest


def test_values_are_read_once_for_all_ranks(
    daemon: Daemon, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DCP spreads over the shards what all ranks have."""
    world = 6
    values = {f"group.{i}": {"lr": i / 8, "betas": [0.9, i]} for i in range(world)}

    def write(rank: int) -> bool:
        save(dict(values))
        shard = _core.attach("job", rank=rank)
        return any(name.startswith("group.") for name, _, _ in shard.objects)

    def read(rank: int) -> None:
        found: dict[str, Any] = {name: {"lr": -1.0, "betas": [-1.0, -1]} for name in values}
        load(found)
        assert found == values

    assert all(run_ranks(world, write))
    with relayed(tmp_path / "relay.sock", daemon.socket) as relay:
        monkeypatch.setenv("HOLDFAST_SOCKET", str(tmp_path / "relay.sock"))
        run_ranks(world, read)
        monkeypatch.setenv("HOLDFAST_SOCKET", str(daemon.socket))
    # By each rank one to choose the step, and one for names and paths; by one of them all shards.
    assert relay.requests[ATTACH] <= 3 * world, relay.requests


def test_a_planner_that_asks_for_other_names_and_types(daemon: Daemon) -> None:
    """A load planner of the user's: the state has other keys than what was saved, and half the bits."""

    class Renames(DefaultLoadPlanner):
        def set_up_planner(
            self, state_dict: Any, metadata: Any = None, is_coordinator: bool = False
        ) -> None:
            super().set_up_planner(
                {f"old.{key}": value for key, value in state_dict.items()}, metadata, is_coordinator
            )

    def work(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,))
        value = torch.arange(12.0).view(6, 2)
        save({"old": {"w": distribute_tensor(value, mesh, [Shard(0)])}})
        found = {"w": distribute_tensor(torch.zeros(6, 2).to(torch.bfloat16), mesh, [Shard(1)])}
        load(found, planner=Renames())
        assert_same(value.to(torch.bfloat16), whole(found["w"]))

    run_ranks(2, work)


# ---- Steps one after another ----


def test_asynchronous_saves_one_after_another_have_each_its_own_state(daemon: Daemon) -> None:
    def work(rank: int) -> None:
        model, optim = made(fsdp2, seed=0)
        saving = dist.new_group(backend="gloo")
        expected, future = [], None
        for step in range(3):
            train(model, optim, 1, alike=True)
            if future is not None:
                future.result(DEADLINE_S)
            future = dcp.async_save(
                both(model, optim),
                storage_writer=Writer("job", step=step, wait="committed"),
                process_group=saving,
            )
            expected.append(whole(both(model, optim)))
        future.result(DEADLINE_S)
        for step in (2, 1):  # (memory keeps the newest two)
            other, other_optim = made(fsdp2, seed=8)
            state = both(other, other_optim)
            load(state, step=step)
            put(other, other_optim, state)
            assert_same(expected[step], whole(both(other, other_optim)))

    run_ranks(2, work)
