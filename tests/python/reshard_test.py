"""Jobs that come back on another number of ranks, or in another parallel layout: every rank gets what it has a place for, bit for
bit, out of all old ranks' shards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from parallel_test import (
    Model,
    assert_same,
    ddp,
    fsdp2,
    fsdp2_over_tp,
    made,
    plain,
    tensor_parallel,
    train,
)
from ranks import run_ranks
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import holdfast
from daemons import Daemon

Wrap = Callable[[Model], nn.Module]


def full(value: torch.Tensor) -> torch.Tensor:
    return (value.full_tensor() if isinstance(value, DTensor) else value).detach().clone()


def whole(model: nn.Module, optim: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Everything put together, on every rank."""
    unwrapped = model.module if isinstance(model, DistributedDataParallel) else model
    found = {}
    for name, parameter in unwrapped.named_parameters():
        found[name] = full(parameter)
        for key, value in optim.state[parameter].items():
            found[f"{name}.{key}"] = full(value)
    return found


def stage(wrap: Wrap, first: int, steps: int) -> Callable[[int], dict[str, torch.Tensor]]:
    """One start of the job: restores, if there is something, trains on, and saves; what it found, and what it left."""

    def work(rank: int) -> Any:
        alike = wrap in (tensor_parallel, fsdp2_over_tp)
        model, optim = made(wrap, seed=first)
        extra = {"seen": -1}
        with holdfast.Checkpointer("job") as ckpt:
            start = ckpt.restore({"model": model, "optim": optim, "extra": extra})
            restored = ckpt.last_restored
            found = None if restored is None else whole(model, optim)
            resharded = 0 if restored is None else restored.resharded_from
            train(model, optim, steps, alike)
            ckpt.save(
                first + steps,
                {"model": model, "optim": optim, "extra": {"seen": first + steps}},
                wait="committed",
            )
            left = whole(model, optim)
        dist.barrier()
        return start, extra["seen"], resharded, found, left

    return work


def run_stages(stages: list[tuple[Wrap, int]]) -> None:
    before: Any = None
    ranks_before = 0
    for number, (wrap, ranks) in enumerate(stages):
        results = run_ranks(ranks, stage(wrap, 10 * number, 2))
        for start, seen, resharded, found, _ in results:
            if before is None:
                assert start == 0
                continue
            assert start - 1 == seen == 10 * (number - 1) + 2
            assert resharded in ((0, ranks_before) if ranks == ranks_before else (ranks_before,))
            assert_same(before, found)
        before, ranks_before = results[0][4], ranks


def test_fsdp2_on_other_numbers_of_ranks_with_training_in_between(daemon: Daemon) -> None:
    run_stages([(fsdp2, 2), (fsdp2, 3), (fsdp2, 1), (fsdp2, 4)])


@pytest.mark.parametrize(
    "stages",
    [
        pytest.param([(ddp, 2), (fsdp2, 3), (ddp, 2)], id="ddp-fsdp2"),
        pytest.param([(fsdp2, 2), (tensor_parallel, 2), (fsdp2, 2)], id="fsdp2-tp-same-number"),
        pytest.param(
            [(tensor_parallel, 2), (plain, 1), (fsdp2_over_tp, 4), (ddp, 3)], id="tp-plain-2d-ddp"
        ),
    ],
)
def test_from_one_way_to_train_into_another(daemon: Daemon, stages: list[tuple[Wrap, int]]) -> None:
    run_stages(stages)


def save(ranks: int, state: Callable[[int], dict[str, Any]], step: int = 1) -> None:
    def work(rank: int) -> None:
        with holdfast.Checkpointer("job") as ckpt:
            ckpt.save(step, state(rank), wait="committed")

    run_ranks(ranks, work, group=False)


def restored(ranks: int, state: Callable[[int], dict[str, Any]], **options: Any) -> list[Any]:
    def work(rank: int) -> Any:
        mine = state(rank)
        with holdfast.Checkpointer("job") as ckpt:
            try:
                assert ckpt.restore(mine, **options) == 2
            except holdfast.InvalidArgumentError as error:
                return str(error)
        return mine

    return run_ranks(ranks, work, group=False)


def test_what_belongs_to_single_ranks_is_refused_by_name_or_merged(daemon: Daemon) -> None:
    def of_rank(rank: int) -> dict[str, Any]:
        return {
            "w": torch.arange(6.0),
            "epoch": 3,
            "rng": torch.tensor([rank, rank * rank], dtype=torch.uint8),
            "loader": {"position": 100 * rank, "shards": [rank]},
        }

    save(4, of_rank)

    def blank(*keys: str) -> Callable[[int], dict[str, Any]]:
        state = {
            "w": torch.zeros(6),
            "epoch": 0,
            "rng": torch.zeros(2, dtype=torch.uint8),
            "loader": {},
        }
        return lambda rank: {key: state[key] for key in keys}

    for mine in restored(3, blank("w", "epoch")):
        assert torch.equal(mine["w"], torch.arange(6.0)) and mine["epoch"] == 3
    for said in restored(3, blank("w", "loader")):
        assert (
            "loader.position: is not the same in all ranks that saved it" in said
            and "merge=" in said
        )
    for said in restored(3, blank("w", "rng")):
        assert "rng" in said and "rank" in said
    merge = {
        "rng": lambda values: torch.stack(values).sum(0).to(torch.uint8),
        "loader": lambda values: {
            "position": min(v["position"] for v in values),
            "ranks": len(values),
        },
    }
    for mine in restored(3, blank("w", "rng", "loader"), merge=merge):
        assert mine["rng"].tolist() == [6, 14]
        assert mine["loader"] == {"position": 0, "ranks": 4}
    # As many ranks as then: each has its own, and nobody is asked.
    for rank, mine in enumerate(restored(4, blank("w", "rng", "loader"), merge=merge)):
        assert mine["rng"].tolist() == [rank, rank * rank]
        assert mine["loader"] == {"position": 100 * rank, "shards": [rank]}


def test_a_merge_of_what_is_not_there_is_a_mistake(daemon: Daemon) -> None:
    save(2, lambda rank: {"w": torch.arange(4.0), "n": rank})
    for said in restored(1, lambda rank: {"w": torch.zeros(4)}, merge={"m": min}):
        assert "merge" in said and "'m'" in said
    with (
        pytest.raises(holdfast.InvalidArgumentError, match="merge"),
        holdfast.Checkpointer("job") as ckpt,
    ):
        ckpt.restore({"w": torch.zeros(4)}, merge={"w": 3})


def test_pipeline_stages_into_one_and_back(daemon: Daemon) -> None:
    """Each rank has layers of its own; an optimizer over them."""

    def layers(which: list[int], seed: int) -> tuple[nn.ModuleDict, torch.optim.Optimizer]:
        torch.manual_seed(seed)
        model = nn.ModuleDict({f"layer{i}": nn.Linear(3, 3) for i in which})
        optim = torch.optim.AdamW(model.parameters(), foreach=False)
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, float(seed + 1))
        optim.step()
        return model, optim

    def values(model: nn.ModuleDict, optim: torch.optim.Optimizer) -> dict[str, Any]:
        return {
            name: (value.detach(), optim.state[value]["exp_avg"])
            for name, value in model.named_parameters()
        }

    def save_by_two(rank: int) -> Any:
        model, optim = layers([rank, rank + 2], seed=rank)
        with holdfast.Checkpointer("job") as ckpt:
            ckpt.save(1, {"model": model, "optim": optim}, wait="committed")
        return values(model, optim)

    def load(split: Callable[[int], list[int]]) -> Callable[[int], Any]:
        def work(rank: int) -> Any:
            model, optim = layers(split(rank), seed=77)
            with holdfast.Checkpointer("job") as ckpt:
                assert ckpt.restore({"model": model, "optim": optim}) == 2
            return values(model, optim)

        return work

    saved = {}
    for part in run_ranks(2, save_by_two, group=False):
        saved |= part
    for ranks, split in (
        (1, lambda rank: [0, 1, 2, 3]),
        (4, lambda rank: [rank]),
        (2, lambda rank: [1 - rank, 3 - rank]),
    ):
        got = {}
        for part in run_ranks(ranks, load(split), group=False):
            got |= part
        assert_same(
            {name: saved[name] for name in sorted(saved)}, {name: got[name] for name in sorted(got)}
        )


def test_ranges_of_flat_buffers_and_the_optimizer_over_them(daemon: Daemon) -> None:
    """As ZeRO has it: a master copy that is cut anywhere, and moments like it."""
    size = 23

    def state(cuts: list[int], rank: int, fill: bool) -> dict[str, Any]:
        start, end = cuts[rank], cuts[rank + 1]
        part = nn.Parameter(
            torch.arange(start, end, dtype=torch.float32) if fill else torch.zeros(end - start)
        )
        optim = torch.optim.AdamW([part], foreach=False)
        if fill:
            part.grad = torch.arange(start, end, dtype=torch.float32)
            optim.step()
        return {"flat": holdfast.Range(part, shape=(size,), start=start), "optim": optim}

    def parts(of: dict[str, Any]) -> dict[str, torch.Tensor]:
        part = of["flat"].tensor
        entries = of["optim"].state[part]
        return {"part": part.detach(), "exp_avg": entries["exp_avg"], "step": entries["step"]}

    def work(cuts: list[int], fill: bool) -> Callable[[int], Any]:
        def run(rank: int) -> Any:
            mine = state(cuts, rank, fill)
            with holdfast.Checkpointer("job") as ckpt:
                if fill:
                    ckpt.save(1, mine, wait="committed")
                else:
                    assert ckpt.restore(mine) == 2
            return parts(mine)

        return run

    saved = run_ranks(2, work([0, 17, size], fill=True), group=False)
    for cuts in ([0, 4, 11, size], [0, size], [0, 9, size]):
        got = run_ranks(len(cuts) - 1, work(cuts, fill=False), group=False)
        for key in ("part", "exp_avg"):
            assert torch.equal(
                torch.cat([each[key] for each in got]), torch.cat([each[key] for each in saved])
            )
        assert all(each["step"] == 1 for each in got)


class Then(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(3, 3), nn.BatchNorm1d(3)])


class Now(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.decoder = nn.ModuleList([nn.Linear(3, 3), nn.BatchNorm1d(3)])


@pytest.mark.parametrize("ranks", [1, 2])
def test_other_names(daemon: Daemon, ranks: int) -> None:
    """Of a module and its optimizer: by a function, by patterns; on the rank that saved, and on others."""

    def state(kind: type[nn.Module], seed: int) -> dict[str, Any]:
        torch.manual_seed(seed)
        model = kind()
        optim = torch.optim.AdamW(model.parameters(), foreach=False)
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)
        optim.step()
        return {"model": model, "optim": optim}

    def parts(of: dict[str, Any]) -> list[Any]:
        entries = [of["optim"].state[each] for each in of["model"].parameters()]
        return [each.detach() for each in of["model"].state_dict().values()] + [
            each["exp_avg"] for each in entries
        ]

    save(1, lambda rank: state(Then, 1))
    expected = parts(state(Then, 1))
    for rename in (
        lambda name: name.replace(".decoder.", ".layers."),
        {r"^model\.decoder\.(\d)": r"model.layers.\1"},
    ):
        for mine in restored(ranks, lambda rank: state(Now, 2), rename=rename):
            assert_same(expected, parts(mine))
    for said in restored(ranks, lambda rank: state(Now, 2)):
        assert "model.decoder.0.weight" in said
    for said in restored(ranks, lambda rank: state(Now, 2), rename={"(": ""}):
        assert "rename" in said


def test_another_type_when_asked_for(daemon: Daemon) -> None:
    torch.manual_seed(1)
    values = torch.randn(50, 3)
    save(2, lambda rank: {"w": values})
    for ranks in (2, 3):
        for said in restored(ranks, lambda rank: {"w": torch.zeros(50, 3, dtype=torch.bfloat16)}):
            assert "F32" in said and "BF16" in said
        for mine in restored(
            ranks, lambda rank: {"w": torch.zeros(50, 3, dtype=torch.bfloat16)}, convert=True
        ):
            assert torch.equal(mine["w"], values.to(torch.bfloat16))


def test_what_nobody_saved_is_named(daemon: Daemon) -> None:
    save(2, lambda rank: {"model": nn.Linear(2, 2)})
    for said in restored(3, lambda rank: {"model": nn.Linear(2, 2), "more": torch.zeros(1)}):
        assert "'more' was not saved" in said
    for said in restored(3, lambda rank: {"model": nn.Linear(2, 3)}):
        assert "model.weight" in said and "[2, 2]" in said and "[3, 2]" in said


# ---- What a rank leaves to others, and what must be wanted ----


def sequence(*layers: int) -> Callable[[int], dict[str, Any]]:
    """A module of so many linear layers, and its optimizer with state."""

    def state(rank: int) -> dict[str, Any]:
        torch.manual_seed(3)
        model = nn.Sequential(*(nn.Linear(2, 2) for _ in layers))
        optim = torch.optim.AdamW(model.parameters(), foreach=False)
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optim.step()
        return {"model": model, "optim": optim}

    return state


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_what_every_rank_had_must_be_wanted(daemon: Daemon, ranks: int) -> None:
    save(2 if ranks > 1 else 1, sequence(1, 2))
    for said in restored(ranks, sequence(1)):
        assert "model" in said and "saved and not wanted" in said
    for said in restored(ranks, lambda rank: {"optim": sequence(1)(rank)["optim"]}):
        assert "optim" in said
    for mine in restored(ranks, lambda rank: {"model": sequence(1)(rank)["model"]}, strict=False):
        assert not isinstance(mine, str)


def test_positions_say_nothing_where_ranks_had_other_parameters(daemon: Daemon) -> None:
    """An optimizer alone is matched by the order of its parameters: of pipeline stages there is none."""

    def stage(rank: int, which: list[int]) -> dict[str, Any]:
        model = nn.ModuleDict({f"layer{i}": nn.Linear(2, 2) for i in which})
        optim = torch.optim.AdamW(model.parameters(), foreach=False)
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, float(rank + 1))
        optim.step()
        return {"model": model, "optim": optim}

    save(2, lambda rank: stage(rank, [rank, rank + 2]))
    for said in restored(1, lambda rank: {"optim": stage(rank, [0, 1, 2, 3])["optim"]}):
        assert isinstance(said, str) and "optim" in said and "not saved" in said


def test_keys_of_other_ranks_are_not_mixed_in(daemon: Daemon) -> None:
    def of_rank(rank: int) -> dict[str, Any]:
        return {
            "loader": {"buffer": torch.zeros(2), f"worker{rank}": torch.tensor(rank)},
            "w": torch.ones(2),
        }

    save(2, of_rank)
    for said in restored(3, lambda rank: {"loader": {}, "w": torch.zeros(2)}):
        assert "loader: is not the same in all ranks" in said
    for mine in restored(
        3, lambda rank: {"loader": {}}, merge={"loader": lambda values: values[0]}
    ):
        assert sorted(mine["loader"]) == ["buffer", "worker0"]


def test_as_many_ranks_in_another_layout_keep_their_own(daemon: Daemon) -> None:
    """The state is cut otherwise; random states and positions stay each rank's, and nobody is asked."""

    def cut(rank: int, cuts: list[int]) -> holdfast.Range:
        return holdfast.Range(
            torch.arange(float(cuts[rank]), float(cuts[rank + 1])), shape=(10,), start=cuts[rank]
        )

    def of_rank(rank: int, cuts: list[int]) -> dict[str, Any]:
        return {
            "flat": cut(rank, cuts),
            "rng": torch.tensor([rank, 7]),
            "loader": {
                "position": rank,
                "buffer": torch.full((2,), rank),
                f"file{rank}": torch.tensor(1),
            },
            "lr": 0.5 + rank,
        }

    save(2, lambda rank: of_rank(rank, [0, 4, 10]))

    def blank(rank: int) -> dict[str, Any]:
        state = of_rank(rank, [0, 7, 10])
        state["flat"].tensor.zero_()
        return {**state, "rng": torch.zeros(2, dtype=torch.int64), "loader": {}, "lr": 0.0}

    def never(values: list[Any]) -> Any:
        raise AssertionError("nobody is asked")

    for rank, mine in enumerate(restored(2, blank, merge={"rng": never, "l*": never})):
        assert torch.equal(mine["flat"].tensor, of_rank(rank, [0, 7, 10])["flat"].tensor)
        assert mine["rng"].tolist() == [rank, 7] and mine["lr"] == 0.5 + rank
        assert sorted(mine["loader"]) == ["buffer", f"file{rank}", "position"]


# ---- merge ----


def test_entries_of_plain_dictionaries_and_of_modules_are_merged_by_patterns(
    daemon: Daemon,
) -> None:
    def of_rank(rank: int) -> dict[str, Any]:
        norm = nn.BatchNorm1d(2)
        norm.running_mean.fill_(rank)
        return {
            "model": nn.Sequential(norm),
            "extra": {"epoch": 3, "position": 10 * rank, "name": f"r{rank}"},
        }

    save(2, of_rank)
    merge = {
        "model.*.running_mean": lambda values: torch.stack(values).mean(0),
        "extra.position": min,
        "extra.n*": lambda values: "+".join(values),
    }
    for mine in restored(
        3, lambda rank: {"model": nn.Sequential(nn.BatchNorm1d(2)), "extra": {}}, merge=merge
    ):
        assert mine["model"][0].running_mean.tolist() == [0.5, 0.5]
        assert mine["extra"] == {"epoch": 3, "position": 0, "name": "r0+r1"}
    for said in restored(3, lambda rank: {"model": nn.Sequential(nn.BatchNorm1d(2))}):
        assert "running_mean" in said and "merged" in said


@pytest.mark.parametrize("error", [KeyError, TypeError, RuntimeError])
def test_a_merge_that_fails_says_so(daemon: Daemon, error: type[Exception]) -> None:
    save(2, lambda rank: {"w": torch.ones(2), "n": rank})

    def fails(values: list[Any]) -> Any:
        raise error("my mistake")

    for said in restored(1, lambda rank: {"n": 0}, merge={"n": fails}):
        assert "merge of 'n'" in said and error.__name__ in said and "my mistake" in said
    for result in (torch.zeros(3), torch.zeros(2, dtype=torch.int32), 5):
        for said in restored(
            1, lambda rank: {"w": torch.zeros(2)}, merge={"w": lambda _, result=result: result}
        ):
            assert "w: merge made" in said


def test_an_interrupt_while_it_is_looked_at_is_raised(daemon: Daemon) -> None:
    save(2, lambda rank: {"w": torch.ones(2)})

    def interrupted(rank: int) -> str:
        def asks(values: list[Any]) -> Any:
            raise KeyboardInterrupt

        with holdfast.Checkpointer("job") as ckpt:
            try:
                ckpt.restore({"w": torch.zeros(2)}, merge={"w": asks})
            except KeyboardInterrupt:
                return "interrupted"
        return "no error"

    assert run_ranks(1, interrupted, group=False) == ["interrupted"]


def test_ranges_in_what_an_object_says_of_itself(daemon: Daemon) -> None:
    class Shards:
        def __init__(self, start: int, end: int, fill: bool) -> None:
            values = torch.arange(float(start), float(end))
            self.range = holdfast.Range(values if fill else torch.zeros_like(values), (12,), start)

        def state_dict(self) -> dict[str, Any]:
            return {"mine": self.range}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.range = state["mine"]

    def work(ranks: int, fill: bool) -> Callable[[int], Any]:
        def run(rank: int) -> Any:
            shards = Shards(12 * rank // ranks, 12 * (rank + 1) // ranks, fill)
            with holdfast.Checkpointer("job") as ckpt:
                if fill:
                    ckpt.save(1, {"zero": shards}, wait="committed")
                else:
                    assert ckpt.restore({"zero": shards}) == 2
            return shards.range.start, shards.range.tensor.tolist()

        return run

    run_ranks(2, work(2, fill=True), group=False)
    for ranks in (2, 3, 1):
        for rank, (start, values) in enumerate(
            run_ranks(ranks, work(ranks, fill=False), group=False)
        ):
            assert start == 12 * rank // ranks
            assert values == list(range(start, 12 * (rank + 1) // ranks))


def test_training_goes_on_in_another_type(daemon: Daemon) -> None:
    save(2, sequence(1, 2))

    def work(rank: int) -> None:
        state = sequence(1, 2)(rank)
        fresh = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)).bfloat16()
        for model in (state["model"].bfloat16(), fresh):
            optim = torch.optim.AdamW(model.parameters(), foreach=False)
            with holdfast.Checkpointer("job") as ckpt:
                assert ckpt.restore({"model": model, "optim": optim}, convert=True) == 2
            model(torch.ones(1, 2, dtype=torch.bfloat16)).sum().backward()
            optim.step()

    run_ranks(1, work, group=False)


class Ends(nn.Module):
    """The first and the last layer of a model, or one of them."""

    def __init__(self, *names: str, tied: bool = False) -> None:
        super().__init__()
        for name in names:
            setattr(self, name, nn.Linear(4, 4, bias=False))
        if tied:
            self.head.weight = self.embedding.weight


def filled(module: nn.Module, value: float) -> nn.Module:
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.fill_(value)
    return module


def test_tied_weights_over_pipeline_stages_and_back(daemon: Daemon) -> None:
    def save_tied(rank: int) -> None:
        with holdfast.Checkpointer("job") as ckpt:
            assert ckpt.restore({}) == 0
            model = filled(Ends("embedding", "head", tied=True), 3.0)
            ckpt.save(1, {"model": model}, wait="committed")

    def split(rank: int) -> float:
        """Each stage has one of the two."""
        name = ("embedding", "head")[rank]
        with holdfast.Checkpointer("job") as ckpt:
            model = filled(Ends(name), 0.0)
            assert ckpt.restore({"model": model}) == 2
            found = float(getattr(model, name).weight.detach().mean())
            ckpt.save(2, {"model": filled(model, 4.0)}, wait="committed")
            dist.barrier()
            return found

    def together(rank: int) -> float:
        with holdfast.Checkpointer("job") as ckpt:
            model = filled(Ends("embedding", "head", tied=True), 0.0)
            assert ckpt.restore({"model": model}) == 3
            assert model.head.weight is model.embedding.weight
            return float(model.head.weight.detach().mean())

    run_ranks(1, save_tied)
    assert run_ranks(2, split) == [3.0, 3.0]
    assert run_ranks(1, together) == [4.0]


def test_tied_weights_that_stages_saved_with_different_values_are_refused(daemon: Daemon) -> None:
    def split(rank: int) -> None:
        name = ("embedding", "head")[rank]
        with holdfast.Checkpointer("job") as ckpt:
            assert ckpt.restore({}) == 0
            ckpt.save(1, {"model": filled(Ends(name), float(rank))}, wait="committed")
            dist.barrier()

    def together(rank: int) -> str:
        with holdfast.Checkpointer("job") as ckpt:
            try:
                ckpt.restore({"model": Ends("embedding", "head", tied=True)})
            except holdfast.InvalidArgumentError as error:
                return str(error)
        return ""

    run_ranks(2, split)
    assert "saved with different values" in run_ranks(1, together)[0]


def test_how_far_it_is_is_told_and_logged(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def save(rank: int) -> None:
        with holdfast.Checkpointer("job") as ckpt:
            ckpt.save(3, {"w": torch.full((1 << 20,), float(rank))}, wait="committed")
            dist.barrier()

    run_ranks(2, save)
    monkeypatch.setattr("holdfast._progress._BETWEEN_LINES_S", 0.0)
    caplog.set_level("INFO", logger="holdfast")
    told: list[holdfast.RestoreProgress] = []
    with holdfast.Checkpointer("job", rank=0, world_size=2, launch="again") as ckpt:

        def enough(now: holdfast.RestoreProgress) -> None:
            told.append(now)
            raise ZeroDivisionError("that is enough")

        with pytest.raises(ZeroDivisionError, match="that is enough"):
            ckpt.restore({"w": torch.zeros(1 << 20)}, progress=enough)
    assert told == [holdfast.RestoreProgress(False, None, None, 0, 0)]
    assert "job 'job': restore: waits for the other ranks" in caplog.text
    told.clear()
    with holdfast.Checkpointer("job", rank=0, world_size=1, launch="alone") as ckpt:
        merge = {"w": lambda values: values[1]}
        target = torch.zeros(1 << 20)
        assert ckpt.restore({"w": target}, merge=merge, progress=told.append) == 4
        assert float(target.mean()) == 1.0
    assert told and told[0].attempt in (None, 1)


def test_settings_of_an_optimizer_that_differ_are_merged_by_their_paths(daemon: Daemon) -> None:
    def state(rates: list[float]) -> dict[str, Any]:
        layers = [nn.Linear(2, 2, bias=False) for _ in rates]
        groups = [{"params": each.parameters(), "lr": rate} for each, rate in zip(layers, rates)]
        model = nn.ModuleDict({f"layer{i}": each for i, each in enumerate(layers)})
        return {"model": model, "optim": torch.optim.SGD(groups)}

    same = torch.Generator().manual_seed(1)

    def saved(rank: int) -> dict[str, Any]:
        made = state([0.1 * (rank + 1), 0.5])
        with torch.no_grad():
            for parameter in made["model"].parameters():
                parameter.copy_(torch.rand(2, 2, generator=same.manual_seed(1)))
        return made

    save(2, saved)

    def load(merge: Any) -> Callable[[int], Any]:
        def work(rank: int) -> Any:
            wanted = state([0.0, 0.0])
            with holdfast.Checkpointer("job") as ckpt:
                try:
                    ckpt.restore(wanted, merge=merge)
                except holdfast.InvalidArgumentError as error:
                    return str(error)
            return [group["lr"] for group in wanted["optim"].param_groups]

        return work

    refused = run_ranks(1, load(None), group=False)[0]
    assert "'optim.groups.0.lr': function of" in refused
    for path in ("optim.groups.0.lr", "optim.groups.*.lr"):
        assert run_ranks(1, load({path: max}), group=False) == [[0.2, 0.5]]


def test_a_setting_that_a_new_optimizer_has_not_is_merged_too(daemon: Daemon) -> None:
    def optimizer(rate: float) -> dict[str, Any]:
        return {"optim": torch.optim.SGD([nn.Parameter(torch.zeros(2))], lr=rate)}

    def saved(rank: int) -> dict[str, Any]:
        made = optimizer(0.5)
        made["optim"].param_groups[0]["initial_lr"] = 0.1 * (rank + 1)  # as schedulers do
        return made

    save(2, saved)

    def load(rank: int) -> Any:
        wanted = optimizer(0.0)
        with holdfast.Checkpointer("job") as ckpt:
            with pytest.raises(
                holdfast.InvalidArgumentError, match=r"optim\.groups\.0\.initial_lr"
            ):
                ckpt.restore(wanted)
            ckpt.restore(wanted, merge={"optim.groups.0.initial_lr": min})
        return wanted["optim"].param_groups[0]["initial_lr"]

    assert run_ranks(1, load, group=False) == [0.1]


def test_merging_values_opens_no_shard(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    save(2, lambda rank: {"extra": {"rng": [rank, rank]}, "w": torch.ones(2)})

    def opened(*args: Any, **options: Any) -> Any:
        raise AssertionError("a shard was opened")

    monkeypatch.setattr("holdfast._core.attach", opened)
    with holdfast.Checkpointer("job", rank=0, world_size=1, launch="again") as ckpt:
        extra: dict[str, Any] = {"rng": None}
        assert ckpt.restore({"extra": extra}, merge={"extra.rng": lambda values: values}) == 2
    assert extra == {"rng": [[0, 0], [1, 1]]}


@pytest.mark.parametrize("ranks", [2, 1])
def test_a_rename_that_fails_is_no_damaged_checkpoint(daemon: Daemon, ranks: int) -> None:
    save(2, lambda rank: {"model": nn.Linear(2, 2)}, step=1)

    def wrong(name: str) -> Any:
        return {}[name]

    for rename, said in ((wrong, "raised KeyError"), (lambda name: None, "returned None")):

        def load(rank: int, rename: Any = rename) -> str:
            with holdfast.Checkpointer("job") as ckpt:
                try:
                    ckpt.restore({"model": nn.Linear(2, 2)}, rename=rename)
                except holdfast.InvalidArgumentError as error:
                    return str(error)
            return "no error"

        for message in run_ranks(ranks, load, group=False):
            assert "rename of 'model." in message and said in message
