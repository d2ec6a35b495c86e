"""holdfast.layouts: jobs in the layouts of Megatron and ZeRO, without DTensors, from one mesh into another."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from parallel_test import assert_same
from ranks import run_ranks
from torch import nn

import holdfast
from daemons import Daemon
from holdfast import layouts

LAYERS, HIDDEN, FFN, VOCABULARY, EXPERTS = 4, 8, 12, 16, 4


def whole() -> dict[str, torch.Tensor]:
    """All tensors of the model, whole, under their global names."""
    shapes = {"embedding.weight": (VOCABULARY, HIDDEN), "norm.weight": (HIDDEN,)}
    for layer in range(LAYERS):
        prefix = f"layers.{layer}."
        shapes[prefix + "qkv.weight"] = (3 * HIDDEN, HIDDEN)
        shapes[prefix + "qkv.bias"] = (3 * HIDDEN,)
        shapes[prefix + "proj.weight"] = (HIDDEN, HIDDEN)
        shapes[prefix + "proj.bias"] = (HIDDEN,)
        for expert in range(EXPERTS):
            shapes[f"{prefix}experts.{expert}.fc1.weight"] = (2 * FFN, HIDDEN)
            shapes[f"{prefix}experts.{expert}.fc2.weight"] = (HIDDEN, FFN)
    torch.manual_seed(7)
    return {name: torch.randn(shape) for name, shape in shapes.items()}


class Mesh:
    """Tensor, expert and pipeline parallel ranks, tensor parallel ones next to each other."""

    def __init__(self, tensor: int, expert: int, pipeline: int) -> None:
        self.tensor, self.expert, self.pipeline = tensor, expert, pipeline
        self.ranks = tensor * expert * pipeline

    def place(self, rank: int) -> tuple[int, int, int]:
        return (
            rank % self.tensor,
            rank // self.tensor % self.expert,
            rank // (self.tensor * self.expert),
        )

    def has(self, rank: int, name: str) -> bool:
        _, expert, stage = self.place(rank)
        words = name.split(".")
        if words[0] == "embedding":
            return stage == 0
        if words[0] == "norm":
            return stage == self.pipeline - 1
        if int(words[1]) * self.pipeline // LAYERS != stage:
            return False
        return words[2] != "experts" or int(words[3]) * self.expert // EXPERTS == expert


RULES = {
    "column": ["*.qkv.*", "embedding.weight"],
    "row": ["*.proj.*", "*.fc2.weight"],
    "gated": ["*.fc1.weight"],
}


def local(name: str, value: torch.Tensor, split: layouts.Split | None) -> torch.Tensor:
    """What a rank has of it, worked out by slicing alone."""
    if split is None:
        return value.clone()
    blocks = value.chunk(split.blocks, split.dim)
    return torch.cat(
        [block.chunk(split.ranks, split.dim)[split.rank] for block in blocks], split.dim
    )


class Holder(nn.Module):
    """A module whose state_dict has these tensors, under local names."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        super().__init__()
        for name, tensor in tensors.items():
            self.register_parameter(name.replace(".", "_"), nn.Parameter(tensor))


def state_of(mesh: Mesh, rank: int, fill: bool) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """A state for Checkpointer, and the tensors that it is about."""
    tensor, _, _ = mesh.place(rank)
    rule = layouts.tensor_parallel(tensor, mesh.tensor, **RULES)
    tensors = {
        name: local(name, value, rule(name, value))
        for name, value in whole().items()
        if mesh.has(rank, name)
    }
    if not fill:
        tensors = {name: torch.zeros_like(each) for name, each in tensors.items()}
    module = Holder(tensors)
    names = {name.replace(".", "_"): name for name in tensors}
    optim = torch.optim.AdamW(module.parameters(), foreach=False)
    if fill:
        for parameter in module.parameters():
            parameter.grad = parameter.detach() * 2
        optim.step()
    state = {"model": layouts.parts(module, rule, name=names.__getitem__), "optim": optim}
    values = {
        names[key]: torch.stack([each.detach(), *moments(optim, each)])
        for key, each in module.named_parameters()
    }
    return state, values


def moments(optim: torch.optim.Optimizer, parameter: torch.Tensor) -> list[torch.Tensor]:
    entries = optim.state.get(parameter)
    return [entries["exp_avg"], entries["exp_avg_sq"]] if entries else []


def load(mesh: Mesh) -> None:
    """Each rank has what it would have, had it been trained on that mesh."""

    def work(rank: int) -> None:
        _, expected = state_of(mesh, rank, fill=True)
        state, _ = state_of(mesh, rank, fill=False)
        model = {key: each for key, each in state["model"].items()}
        with holdfast.Checkpointer("job") as ckpt:
            assert ckpt.restore({"model": model}) == 4
        rule = layouts.tensor_parallel(mesh.place(rank)[0], mesh.tensor, **RULES)
        for name, value in expected.items():
            split = rule(name, value[0])
            keys = (
                [name] if split is None or split.blocks == 1 else [f"{name}.{i}" for i in range(2)]
            )
            got = [model[key].tensor for key in keys]
            assert torch.equal(torch.cat([each.detach() for each in got]), value[0]), name

    run_ranks(mesh.ranks, work, group=False)


def test_from_one_mesh_into_others(daemon: Daemon) -> None:
    mesh = Mesh(tensor=2, expert=2, pipeline=2)

    def save(rank: int) -> None:
        state, _ = state_of(mesh, rank, fill=True)
        with holdfast.Checkpointer("job") as ckpt:
            ckpt.save(3, {"model": state["model"]}, wait="committed")

    run_ranks(mesh.ranks, save, group=False)
    for other in (mesh, Mesh(1, 1, 1), Mesh(4, 1, 1), Mesh(1, 4, 1), Mesh(2, 1, 4), Mesh(1, 2, 2)):
        load(other)


def test_the_optimizer_of_parts_has_parts(daemon: Daemon) -> None:
    values = torch.arange(48.0).view(8, 6)

    def state(rank: int, ranks: int, fill: bool) -> dict[str, Any]:
        mine = values.chunk(ranks, 1)[rank].contiguous()
        part = nn.Parameter(mine.clone() if fill else torch.zeros_like(mine))
        optim = torch.optim.AdamW([part], foreach=False)
        if fill:
            part.grad = mine.clone()
            optim.step()
        offset = (0, rank * mine.shape[1])
        return {"w": holdfast.Part(part, shape=(8, 6), offset=offset), "optim": optim}

    def work(ranks: int, fill: bool) -> Any:
        def run(rank: int) -> Any:
            mine = state(rank, ranks, fill)
            with holdfast.Checkpointer("job") as ckpt:
                if fill:
                    ckpt.save(1, mine, wait="committed")
                else:
                    assert ckpt.restore(mine) == 2
            part = mine["w"].tensor
            return part.detach(), mine["optim"].state[part]["exp_avg"]

        return run_ranks(ranks, run, group=False)

    saved = work(2, fill=True)
    for ranks in (2, 3, 1):
        got = work(ranks, fill=False)
        for i in range(2):
            assert torch.equal(
                torch.cat([each[i] for each in got], 1), torch.cat([each[i] for each in saved], 1)
            )
    with holdfast.open("job") as saved_step:
        assert saved_step.tensor("w").shape == (8, 6)


Optimizer = Callable[..., Any]


def factored_rows(rank: int, ranks: int, make: Optimizer, steps: int) -> dict[str, Any]:
    """A matrix split by rows, a bias that is not, and an optimizer of both."""
    torch.manual_seed(3)
    mine = nn.Parameter(torch.randn(8, 6).chunk(ranks)[rank].clone())
    bias = nn.Parameter(torch.randn(6))
    optim = make([mine, bias])

    def closure() -> torch.Tensor:
        mine.grad, bias.grad = mine.detach() + 1, bias.detach() + 1
        return torch.zeros(())

    for _ in range(steps):
        closure()
        optim.step(closure)
    return {
        "w": holdfast.Part(mine, shape=(8, 6), offset=(rank * 8 // ranks, 0)),
        "b": holdfast.Part(bias, shape=(6,), offset=(0,)),
        "optim": optim,
    }


def warnings_of(work: Callable[[], None]) -> list[str]:
    said: list[str] = []

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append(record.getMessage())

    listener = Listener(logging.WARNING)
    logging.getLogger("holdfast").addHandler(listener)
    try:
        work()
    finally:
        logging.getLogger("holdfast").removeHandler(listener)
    return said


@pytest.mark.parametrize(
    ("make", "alone"),
    [
        (torch.optim.Adafactor, ["row_var", "col_var"]),
        (torch.optim.LBFGS, ["d", "old_dirs", "old_stps", "prev_flat_grad"]),
        (torch.optim.AdamW, []),
    ],
)
def test_the_first_save_names_state_that_only_as_many_ranks_can_restore(
    daemon: Daemon, make: Optimizer, alone: list[str]
) -> None:
    def save(rank: int) -> tuple[list[str], Any]:
        fresh = factored_rows(rank, 2, make, steps=0)
        state = factored_rows(rank, 2, make, steps=2)

        def work() -> None:
            with holdfast.Checkpointer("job") as ckpt:
                ckpt.save(1, {**state, "optim": fresh["optim"]}, wait="committed")  # has none yet
                ckpt.save(2, state, wait="committed")
                ckpt.save(3, state, wait="committed")

        return warnings_of(work), state["optim"].state_dict()

    def restore(rank: int) -> Any:
        state = factored_rows(rank, 2, make, steps=0)
        with holdfast.Checkpointer("job") as ckpt:
            assert ckpt.restore(state) == 4
        return state["optim"].state_dict()

    saved = run_ranks(2, save, group=False)
    for said, _ in saved:
        assert len(said) == bool(alone)
        paths = ", ".join(f"optim.state.w.{key}" for key in alone)
        for line in said:
            assert f"job 'job': only as many ranks as now can restore {paths}: " in line
    for (_, before), after in zip(saved, run_ranks(2, restore, group=False), strict=True):
        assert_same(before, after)


@pytest.mark.parametrize(
    ("make", "path"), [(torch.optim.Adafactor, "row_var"), (torch.optim.LBFGS, "d")]
)
def test_state_of_a_whole_parameter_does_not_become_that_of_a_part(
    daemon: Daemon, make: Optimizer, path: str
) -> None:
    with holdfast.Checkpointer("job", rank=0, world_size=1) as ckpt:
        ckpt.save(1, factored_rows(0, 1, make, steps=2), wait="committed")

    def restore(rank: int) -> str:
        state = factored_rows(rank, 2, make, steps=0)
        with holdfast.Checkpointer("job") as ckpt:
            with pytest.raises(holdfast.InvalidArgumentError) as caught:
                ckpt.restore(state)
            assert not state["optim"].state
        return str(caught.value)

    for said in run_ranks(2, restore, group=False):
        assert f"optim.state.w.{path}: another number of ranks has saved this state" in said


def experts(
    rank: int, ranks: int, fill: bool, order: tuple[int, ...] = tuple(range(EXPERTS))
) -> tuple[dict[str, Any], dict[str, nn.Parameter]]:
    """Four experts over so many ranks, in this order, under local numbers; nothing of them is split. All ranks have the router,
    and a column parallel layer."""
    here = order[rank * EXPERTS // ranks : (rank + 1) * EXPERTS // ranks]
    model = nn.Module()
    model.router = nn.Linear(HIDDEN, EXPERTS, bias=False)
    model.qkv = nn.Linear(HIDDEN, 8 // ranks, bias=False)
    model.experts = nn.ModuleList(nn.Linear(HIDDEN, 2) for _ in here)

    def global_name(name: str) -> str:
        words = name.split(".")
        if words[0] == "experts":
            words[1] = str(here[int(words[1])])
        return ".".join(words)

    named = {global_name(name): each for name, each in model.named_parameters()}
    with torch.no_grad():
        for name, each in named.items():
            each.fill_(float(sum(name.encode())) if fill else 0)  # each name's own
    optim = torch.optim.AdamW(model.parameters(), lr=0.1, foreach=False)
    if fill:
        for each in named.values():
            each.grad = each.detach() + 1
        optim.step()
    split = layouts.tensor_parallel(rank, ranks, column=["qkv.*"])
    return {"model": layouts.parts(model, split, name=global_name), "optim": optim}, named


def contents(state: dict[str, Any], named: dict[str, nn.Parameter]) -> dict[str, torch.Tensor]:
    return {
        name: torch.stack([each.detach(), *moments(state["optim"], each)])
        for name, each in named.items()
    }


def together(ranks: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    all_of_it = {name: each for one in ranks for name, each in one.items()}
    all_of_it["qkv.weight"] = torch.cat([one["qkv.weight"] for one in ranks], 1)
    return all_of_it


def test_experts_and_their_optimizer_on_fewer_and_on_more_ranks(daemon: Daemon) -> None:
    def save(rank: int) -> dict[str, torch.Tensor]:
        state, named = experts(rank, 2, fill=True)
        with holdfast.Checkpointer("job") as ckpt:
            ckpt.save(3, state, wait="committed")
        return contents(state, named)

    def load(ranks: int) -> dict[str, torch.Tensor]:
        def work(rank: int) -> dict[str, torch.Tensor]:
            state, named = experts(rank, ranks, fill=False)
            with holdfast.Checkpointer("job") as ckpt:
                assert ckpt.restore(state) == 4
            return contents(state, named)

        return together(run_ranks(ranks, work, group=False))

    saved = together(run_ranks(2, save, group=False))
    assert len(saved) == 2 + 2 * EXPERTS
    for ranks in (1, 4):
        found = load(ranks)
        assert found.keys() == saved.keys()
        for name, each in saved.items():
            assert each.shape[0] == 3 and torch.equal(found[name], each), name


def test_experts_that_move_to_other_ranks_in_mid_run(daemon: Daemon) -> None:
    """Each step is restored as it was laid out then: by the same ranks, and by others."""
    orders = ((0, 1, 2, 3), (3, 1, 0, 2))

    def save(rank: int) -> list[dict[str, torch.Tensor]]:
        saved = []
        with holdfast.Checkpointer("job") as ckpt:
            for step, order in enumerate(orders):
                state, named = experts(rank, 2, fill=True, order=order)
                for each in named.values():
                    with torch.no_grad():
                        each.mul_(step + 1)
                ckpt.save(step, state, wait="committed")
                saved.append(contents(state, named))
        return saved

    ranks = run_ranks(2, save, group=False)
    for step, order in reversed(list(enumerate(orders))):
        expected = together([saved[step] for saved in ranks])
        for count, laid_out in ((2, order), (2, orders[1 - step]), (1, orders[0])):

            def load(
                rank: int, count: int = count, laid_out: Any = laid_out, step: int = step
            ) -> dict[str, torch.Tensor]:
                state, named = experts(rank, count, fill=False, order=laid_out)
                with holdfast.Checkpointer("job") as ckpt:
                    assert ckpt.restore(state, step=step) == step + 1
                return contents(state, named)

            found = together(run_ranks(count, load, group=False))
            assert found.keys() == expected.keys()
            assert all(torch.equal(found[name], each) for name, each in expected.items())


def test_an_optimizer_whose_unsplit_tensors_had_numbers_for_names(daemon: Daemon) -> None:
    """As layouts.parts once left them: plain tensors, which give an optimizer no name."""
    state, named = experts(0, 1, fill=True)
    old = {
        key: part if key == "qkv.weight" else part.tensor for key, part in state["model"].items()
    }
    with holdfast.Checkpointer("job", rank=0, world_size=1) as ckpt:
        ckpt.save(3, {"model": old, "optim": state["optim"]}, wait="committed")
        target, own = experts(0, 1, fill=False)
        assert ckpt.restore(target) == 4
    for name, each in named.items():
        found = [own[name], *moments(target["optim"], own[name])]
        expected = [each, *moments(state["optim"], each)]
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True)), name


@pytest.mark.parametrize("ranks", [1, 2, 3, 7, 40])
def test_flat_shards_are_all_of_it_and_nothing_twice(ranks: int) -> None:
    shapes = {"a": (3, 5), "b": (), "c": (7,), "d": (0, 2), "e": (4, 1)}
    total = 15 + 1 + 7 + 4
    share = -(-total // ranks)
    seen: dict[str, list[int]] = {name: [] for name in shapes}
    for rank in range(ranks):
        buffer = torch.arange(share)
        found = layouts.flat_shards(shapes, buffer, rank, ranks)
        at = 0
        for name, part in found.items():
            seen[name] += range(part.start, part.start + part.length)
            assert part.tensor.tolist() == list(range(at, at + part.length)), "one after the other"
            at += part.length
    for name, shape in shapes.items():
        assert seen[name] == list(range(torch.Size(shape).numel()))


def test_mistakes_are_named() -> None:
    linear = nn.Linear(3, 5)
    for split, said in (
        (layouts.Split(0, 2, 2), "part 2 of 2"),
        (layouts.Split(2, 0, 2), "dimension 2"),
        (layouts.Split(0, 0, 2, blocks=2), "2 equal blocks"),
    ):
        with pytest.raises(holdfast.InvalidArgumentError, match=f"weight.*{said}"):
            layouts.parts(linear, lambda name, _, split=split: split if name == "weight" else None)
    with pytest.raises(holdfast.InvalidArgumentError, match="two tensors"):
        layouts.parts(linear, lambda name, _: None, name=lambda name: "same")
    with pytest.raises(holdfast.InvalidArgumentError, match="4 elements"):
        layouts.flat_shards({"a": (8,)}, torch.zeros(3), 0, 2)
    for shape, offset in (((5, 3), (1, 0)), ((5,), (0, 0)), ((5, 3), (-1, 0)), ((5, 3), ("a", 0))):
        with pytest.raises(holdfast.InvalidArgumentError):
            holdfast.Part(torch.zeros(5, 3), shape, offset)


def test_mistakes_are_refused() -> None:
    with pytest.raises(holdfast.InvalidArgumentError, match="column is a list of patterns"):
        layouts.tensor_parallel(0, 2, column="*.qkv.weight")
    with pytest.raises(holdfast.InvalidArgumentError, match="no rank 7 of 2"):
        layouts.tensor_parallel(7, 2)
    for rank, ranks in ((7, 2), (-1, 2), (0, 0)):
        with pytest.raises(holdfast.InvalidArgumentError, match=f"no rank {rank} of {ranks}"):
            layouts.flat_shards({"w": (2,)}, torch.zeros(2), rank, ranks)
