"""Parts of tensors: with padding, of NumPy arrays; modules of a pipeline as one; copies that a save needs, and how long."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from ranks import run_ranks
from torch import nn

import holdfast
from daemons import Daemon

WORDS, WIDTH = 10, 3


@pytest.fixture
def ckpt(daemon: Daemon) -> Any:
    one = holdfast.Checkpointer("job", rank=0, world_size=1)
    yield one
    one.close()


# ---- padding ----


def vocabulary(rank: int, ranks: int, fill: float | None) -> dict[str, Any]:
    """10 words, padded to a multiple of 2 × ranks, as Megatron does; the padding is -1, and nobody saved it."""
    rows = -(-WORDS // (2 * ranks)) * 2
    first = rank * rows
    valid = min(max(WORDS - first, 0), rows)
    local = torch.full((rows, WIDTH), -1.0)
    if fill is not None:
        whole = torch.arange(float(WORDS * WIDTH)).view(WORDS, WIDTH) + fill
        local[:valid] = whole[first : first + valid]
    words = nn.Parameter(local)
    optim = torch.optim.AdamW([words], lr=0.1, foreach=False)
    if fill is not None:
        words.grad = local.clone()
        optim.step()
    part = holdfast.Part(words, shape=(WORDS, WIDTH), offset=(first, 0), valid=valid)
    return {"words": part, "optim": optim}


def whole_of(states: list[Any]) -> list[torch.Tensor]:
    return [torch.cat([state[i] for state in states]) for i in range(2)]


def valid_rows(state: dict[str, Any]) -> list[torch.Tensor]:
    part = state["words"]
    moment = state["optim"].state[part.tensor]["exp_avg"]
    return [each.detach()[: part.valid].clone() for each in (part.tensor, moment)]


@pytest.mark.parametrize("saved_by", [1, 4])
def test_padding_depends_on_the_number_of_ranks_and_what_is_saved_does_not(
    daemon: Daemon, saved_by: int
) -> None:
    def save(rank: int) -> Any:
        state = vocabulary(rank, saved_by, fill=1)
        with holdfast.Checkpointer("job") as ckpt:
            ckpt.save(1, state, wait="committed")
        return valid_rows(state)

    saved = whole_of(run_ranks(saved_by, save, group=False))
    assert saved[0].shape == (WORDS, WIDTH)

    def restore(ranks: int) -> Callable[[int], Any]:
        def work(rank: int) -> Any:
            state = vocabulary(rank, ranks, fill=None)
            with holdfast.Checkpointer("job") as ckpt:
                assert ckpt.restore(state) == 2
            part = state["words"]
            moment = state["optim"].state[part.tensor]["exp_avg"]
            assert bool((part.tensor[part.valid :] == -1).all()), "padding is left alone"
            assert moment.shape == part.tensor.shape and not moment[part.valid :].any()
            return valid_rows(state)

        return work

    for ranks in (4, 3) if saved_by == 4 else (2,):
        found = whole_of(run_ranks(ranks, restore(ranks), group=False))
        assert all(torch.equal(a, b) for a, b in zip(found, saved, strict=True))
    with holdfast.open("job") as step:
        assert step.shape("optim.state.words.exp_avg") == (WORDS, WIDTH)


def test_a_rank_without_a_row_comes_back(ckpt: holdfast.Checkpointer) -> None:
    def state() -> dict[str, Any]:
        row, none = (torch.nn.Parameter(torch.ones(rows, 4)) for rows in (1, 0))
        optim = torch.optim.AdamW([row, none])
        return {"w": holdfast.Part(none, (8, 4), (8, 0)), "row": row, "optim": optim}

    saved = state()
    sum(each.sum() for each in saved["optim"].param_groups[0]["params"]).backward()
    saved["optim"].step()
    ckpt.save(1, saved, wait="sealed", timeout=60)
    fresh = state()
    assert ckpt.restore(fresh) == 2
    moments = [each["exp_avg"] for each in fresh["optim"].state.values()]
    assert [tuple(each.shape) for each in moments] == [(1, 4), (0, 4)]
    assert torch.equal(fresh["row"], saved["row"])


def test_wrong_padding_is_named() -> None:
    for valid in (-1, 5, "x"):
        with pytest.raises(holdfast.InvalidArgumentError, match="Part: .*valid"):
            holdfast.Part(torch.zeros(4, 2), (8, 2), (0, 0), valid=valid)  # type: ignore[arg-type]
    with pytest.raises(holdfast.InvalidArgumentError, match="not within a tensor"):
        holdfast.Part(torch.zeros(4, 2), (8, 2), (6, 0), valid=3)


# ---- arrays ----


def test_parts_of_arrays_on_other_numbers_of_ranks(daemon: Daemon) -> None:
    whole = np.arange(48, dtype=np.int32).reshape(8, 6)

    def parts(rank: int, ranks: int, fill: bool) -> dict[str, Any]:
        mine = np.array_split(whole, ranks, 1)[rank]
        begin = sum(each.shape[1] for each in np.array_split(whole, ranks, 1)[:rank])
        local = mine.copy() if fill else np.zeros_like(mine)
        rows = np.full((8, 2), 7, dtype=np.int32)
        return {
            "w": holdfast.Part(local, (8, 6), (0, begin)),
            "v": holdfast.Part(rows, (5, 2), (0, 0), valid=5),
        }

    def work(ranks: int, fill: bool) -> Any:
        def run(rank: int) -> Any:
            state = parts(rank, ranks, fill)
            with holdfast.Checkpointer("job") as ckpt:
                if fill:
                    ckpt.save(1, state, wait="committed")
                else:
                    state["v"].tensor[:5] = 0
                    assert ckpt.restore(state) == 2
            return state["w"].tensor, state["v"].tensor

        return run_ranks(ranks, run, group=False)

    work(2, fill=True)
    for ranks in (2, 3):
        found = work(ranks, fill=False)
        assert np.array_equal(np.concatenate([w for w, _ in found], 1), whole)
        assert all((v == 7).all() for _, v in found)
    with holdfast.open("job") as step:
        assert np.array_equal(step.numpy("w"), whole) and step.shape("v") == (5, 2)


# ---- pipelines ----


class Stage(nn.Module):
    def __init__(self, layers: list[int], *, value: float) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({str(layer): nn.Linear(2, 2) for layer in layers})
        self.register_buffer("shared", torch.zeros(1), persistent=False)
        with torch.no_grad():
            for layer, each in self.layers.items():
                each.weight.fill_(value * (int(layer) + 1))


def stages(rank: int, ranks: int, each: int, value: float) -> tuple[list[nn.Module], Any]:
    """Interleaved: stage i of ranks × each is on rank i % ranks."""
    count = 8 // (ranks * each)
    modules: list[nn.Module] = []
    for stage in range(rank, ranks * each, ranks):
        modules.append(Stage(list(range(stage * count, (stage + 1) * count)), value=value))
    parameters = [each for module in modules for each in module.parameters()]
    optim = torch.optim.SGD(parameters, lr=0.0, momentum=0.9)
    return modules, optim


def test_interleaved_pipelines_have_one_naming(daemon: Daemon) -> None:
    def save(rank: int) -> None:
        modules, optim = stages(rank, 2, 2, value=1)
        for module in modules:
            for parameter in module.parameters():
                parameter.grad = parameter.detach() * 2
        optim.step()
        with holdfast.Checkpointer("job") as ckpt:
            ckpt.save(1, {"model": holdfast.merged(modules), "optim": optim}, wait="committed")

    run_ranks(2, save, group=False)

    def restore(rank: int, ranks: int, each: int) -> None:
        modules, optim = stages(rank, ranks, each, value=0)
        with holdfast.Checkpointer("job") as ckpt:
            assert ckpt.restore({"model": holdfast.merged(modules), "optim": optim}) == 2
        for module in modules:
            for layer, linear in module.layers.items():
                assert bool((linear.weight == int(layer) + 1).all())
                momentum = optim.state[linear.weight]["momentum_buffer"]
                assert bool((momentum == 2 * (int(layer) + 1)).all())

    for ranks, each in ((2, 2), (1, 4), (2, 1)):
        run_ranks(ranks, lambda rank, r=ranks, e=each: restore(rank, r, e), group=False)
    with holdfast.open("job") as step:
        assert "model.layers.7.weight" in step.keys()  # noqa: SIM118


def optimizers(modules: list[nn.Module], lr: Any = 0.0) -> list[torch.optim.Optimizer]:
    """One of each module, of two groups."""
    return [
        torch.optim.SGD(
            [
                {"params": [p for p in module.parameters() if p.ndim == dim], "name": str(dim)}
                for dim in (1, 2)
            ],
            lr=lr,
            momentum=0.9,
        )
        for module in modules
    ]


def test_the_optimizers_of_interleaved_pipelines_are_merged(daemon: Daemon) -> None:
    """Another number of stages, and so of optimizers, finds their state; groups get their values."""

    def save(rank: int) -> None:
        modules, _ = stages(rank, 2, 2, value=1)
        optims = optimizers(modules, torch.tensor(0.25))
        with holdfast.Checkpointer("job") as ckpt:
            state = {"model": holdfast.merged(modules), "optim": holdfast.merged(optims)}
            for step in range(3):
                for module, optim in zip(modules, optims, strict=True):
                    for parameter in module.parameters():
                        parameter.grad = torch.zeros_like(parameter)
                    optim.step()
                    for layer, linear in module.layers.items():
                        for p in linear.parameters():
                            momentum = torch.full_like(p.detach(), (int(layer) + 1) * step)
                            optim.state[p]["momentum_buffer"] = momentum
                ckpt.save(step, state, wait="committed")
            assert not any(map(ckpt._fences.hold, optims)), "none since the last save"
            for optim in optims:
                optim.step()
            assert all(map(ckpt._fences.hold, optims))

    run_ranks(2, save, group=False)

    def restore(rank: int, ranks: int, each: int) -> None:
        modules, _ = stages(rank, ranks, each, value=0)
        optims = optimizers(modules, torch.tensor(0.5))
        for optim in optims:
            optim.param_groups[0].pop("dampening")
        with holdfast.Checkpointer("job") as ckpt:
            state = {"model": holdfast.merged(modules), "optim": holdfast.merged(optims)}
            assert ckpt.restore(state) == 3
        for module, optim in zip(modules, optims, strict=True):
            assert [group["lr"].item() for group in optim.param_groups] == [0.25, 0.25]
            assert [group["dampening"] for group in optim.param_groups] == [0, 0]
            assert set(optim.state) == set(module.parameters())
            for layer, linear in module.layers.items():
                momentum = optim.state[linear.weight]["momentum_buffer"]
                assert bool((momentum == 2 * (int(layer) + 1)).all())

    for ranks, each in ((2, 2), (1, 4), (2, 1)):
        run_ranks(ranks, lambda rank, r=ranks, e=each: restore(rank, r, e), group=False)
    with holdfast.open("job") as step:
        assert "optim.state.model.layers.7.weight.momentum_buffer" in step.keys()  # noqa: SIM118


def test_optimizers_that_differ_cannot_be_merged() -> None:
    modules = [nn.Linear(2, 2), nn.Linear(2, 2)]
    for change, says in (
        (lambda group: group.update(lr=0.5), "group 1 of optimizer 1 .* differ in lr"),
        (lambda group: group.update(more=1), "group 1 of optimizer 1 .* differ in more"),
        (lambda group: group["params"].append(modules[0].weight), "0 and 1 both have a parameter"),
    ):
        optims = optimizers(modules)
        change(optims[1].param_groups[1])
        with pytest.raises(holdfast.InvalidArgumentError, match=says):
            holdfast.merged(optims)
    one, _ = optimizers(modules)
    fewer = torch.optim.SGD(modules[1].parameters(), lr=0.0)
    with pytest.raises(holdfast.InvalidArgumentError, match="optimizer 1 has 1 groups"):
        holdfast.merged([one, fewer])
    with pytest.raises(holdfast.InvalidArgumentError, match="part 1 is a SGD"):
        holdfast.merged([modules[0], fewer])
    # What a schedule does to one of them alone is found when it would be saved.
    merged = holdfast.merged(optimizers(modules))
    merged.merged_optimizers[1].param_groups[0]["lr"] = 7
    with pytest.raises(holdfast.InvalidArgumentError, match="differ in lr"):
        _ = merged.param_groups


def test_modules_that_call_two_things_alike_cannot_be_merged() -> None:
    with pytest.raises(holdfast.InvalidArgumentError, match=r"both have '0.weight'.*layouts.parts"):
        holdfast.merged([nn.Sequential(nn.Linear(2, 2)), nn.Sequential(nn.Linear(2, 2))])
    with pytest.raises(holdfast.InvalidArgumentError, match="part 1 is a int"):
        holdfast.merged([nn.Linear(2, 2), 3])


class Hooked(nn.Module):
    """Its state_dict shows something else than its memory."""

    def __init__(self, name: str, value: float) -> None:
        super().__init__()
        self.register_buffer(name, torch.full((2,), value))
        self.name = name

    def get_extra_state(self) -> Any:
        return {"of": float(getattr(self, self.name)[0])}

    def set_extra_state(self, state: Any) -> None:
        self.seen = state["of"]


def test_extra_state_of_merged_modules(ckpt: holdfast.Checkpointer) -> None:
    def model(value: float) -> list[nn.Module]:
        return [nn.ModuleDict({name: Hooked(name, value + i)}) for i, name in enumerate(("a", "b"))]

    ckpt.save(0, {"model": holdfast.merged(model(1.0))}, wait="sealed", timeout=60)
    target = model(0.0)
    ckpt.restore({"model": holdfast.merged(target)})
    assert [each["ab"[i]].seen for i, each in enumerate(target)] == [1.0, 2.0]


# ---- copies ----

CHANNELS = (
    16,
    64,
    64,
    127,
)  # large enough that nobody could have copied it already; of no other tensor here


def copies() -> int:
    """Tensors of this size that are alive, but for the one that the test holds."""
    gc.collect()
    alive = [each for each in gc.get_objects() if type(each) is torch.Tensor]
    return sum(tuple(each.shape) == CHANNELS and each.is_contiguous() for each in alive)


def test_dense_copies_are_gone_when_save_returns(ckpt: holdfast.Checkpointer) -> None:
    scattered = torch.rand(CHANNELS).contiguous(memory_format=torch.channels_last)
    ckpt.save(0, {"w": scattered})
    assert copies() == 0


def test_dense_copies_are_gone_when_the_optimizer_goes_on(ckpt: holdfast.Checkpointer) -> None:
    model = nn.Module()
    model.w = nn.Parameter(torch.rand(CHANNELS).contiguous(memory_format=torch.channels_last))
    model.b = nn.Parameter(torch.rand(2))
    optim = torch.optim.SGD(model.parameters(), lr=0.1)
    state = {"model": model, "optim": optim}
    ckpt.restore(state)
    model.b.grad = torch.ones(2)
    optim.step()
    handle = ckpt.save(0, state)
    handle._save.wait("sealed", 60.0)  # as time passes: nobody asks the handle
    optim.step()
    assert copies() == 0


def test_a_dtensor_that_is_not_one_box_is_refused(daemon: Daemon) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard
    from torch.distributed.tensor.placement_types import _StridedShard

    def work(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2, 2))

        def value(*placements: Any) -> Any:
            rows = 8 // (4 if isinstance(placements[1], Shard) else 2)
            return DTensor.from_local(
                torch.zeros(rows, 2), mesh, placements, run_check=False, shape=(8, 2), stride=(2, 1)
            )

        strided = _StridedShard(0, split_factor=2)
        with holdfast.Checkpointer("job") as ckpt:
            # Rank 0 has rows 0, 1, 4 and 5.
            with pytest.raises(
                holdfast.InvalidArgumentError, match=r"^w: .*not one box.*redistribute"
            ):
                ckpt.save(1, {"w": value(strided, Replicate())})
            ckpt.save(1, {"w": value(strided, Shard(0))}, wait="committed")

    run_ranks(4, work)
