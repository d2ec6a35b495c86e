"""Tensor subclasses, as the plain tensors that they are made of: alone, in optimizers, as local parts of DTensors."""

from __future__ import annotations

import enum
import pathlib
from typing import Any

import pytest
import torch
from ranks import run_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing._internal.two_tensor import TwoTensor

import holdfast
from daemons import Daemon
from holdfast import _core, _subclasses

aten = torch.ops.aten
BLOCK = 4


class Rounding(enum.Enum):
    UP = 1
    DOWN = 2


class Blocks(torch.Tensor):
    """As 8-bit optimizers have their moments: a code for each element, a scale for each block of them in a row, one table for all."""

    @staticmethod
    def __new__(cls, codes: Any, scale: Any, table: Any, context: Any) -> Any:
        return torch.Tensor._make_wrapper_subclass(
            cls, codes.shape, dtype=torch.float32, device=codes.device
        )

    def __init__(self, codes: Any, scale: Any, table: Any, context: Any) -> None:
        assert codes.numel() == BLOCK * scale.numel()
        self.codes, self.scale, self.table, self.context = codes, scale, table, context

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["codes", "scale", "table"], [self.context, list(self.shape), torch.float32]

    @classmethod
    def __tensor_unflatten__(cls, tensors: Any, context: Any, size: Any, stride: Any) -> Any:
        assert context[1] == list(size)
        return cls(tensors["codes"], tensors["scale"], tensors["table"], context[0])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        own = args[0]
        if func is aten.slice.Tensor:
            dim, begin, end = args[1:4]
            row = own.codes[0].numel()
            if dim != 0 or (begin * row) % BLOCK or (end * row) % BLOCK:
                raise ValueError("rows of whole blocks, please")
            scale = own.scale[begin * row // BLOCK : end * row // BLOCK]
            return Blocks(own.codes[begin:end], scale, own.table, own.context)
        if func in (aten.detach.default, aten.view.default, aten.alias.default):
            return Blocks(own.codes, own.scale, own.table, own.context)
        raise NotImplementedError(f"{func}")

    def __repr__(self) -> str:
        return f"Blocks({list(self.codes.shape)})"


def blocks(rows: int, columns: int, context: Any = True, fill: bool = True) -> Blocks:
    """Each of its bytes differs; `fill=False`: they are 0."""
    torch.manual_seed(rows * 100 + columns)
    codes = torch.randint(1, 255, (rows, columns), dtype=torch.uint8)
    scale, table = torch.rand(rows * columns // BLOCK) + 1, torch.rand(BLOCK) + 1
    made = codes, scale, table
    return Blocks(*(made if fill else map(torch.zeros_like, made)), context)


def content(value: Any) -> list[torch.Tensor]:
    local = getattr(value, "_local_tensor", value)
    return [getattr(local, name).clone() for name in local.__tensor_flatten__()[0]]


def equal(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.fixture
def ckpt(daemon: Daemon) -> Any:
    one = holdfast.Checkpointer("job", rank=0, world_size=1)
    yield one
    one.close()


class Lowered(nn.Module):
    def __init__(self, fill: bool) -> None:
        super().__init__()
        first, second = (torch.full((3, 4), 1.0 * number * fill) for number in (1, 2))
        self.w = nn.Parameter(TwoTensor(first, second))
        self.nested = nn.Parameter(
            TwoTensor(TwoTensor(first + 1, second + 1), TwoTensor(first, first))
        )
        self.register_buffer("codes", blocks(3, 4, fill=fill))


def lowered(model: Lowered) -> list[torch.Tensor]:
    own = [model.w.a, model.w.b, model.nested.a.a, model.nested.a.b, model.nested.b.b]
    return [each.detach().clone() for each in own] + content(model.codes)


def test_a_model_of_subclasses_comes_back_without_a_pickle(ckpt: holdfast.Checkpointer) -> None:
    model = Lowered(fill=True)
    saved = lowered(model)
    handle = ckpt.save(0, {"model": model, "value": TwoTensor(torch.ones(2), torch.ones(2))})
    with torch.no_grad():
        model.w.a.fill_(-1)  # everything was copied before save returned
    handle.wait("sealed", 60)
    target = Lowered(fill=False)
    places = [each.data_ptr() for each in (target.w.a, target.codes.scale)]
    assert ckpt.restore({"model": target}) == 1
    assert equal(lowered(target), saved)
    assert places == [each.data_ptr() for each in (target.w.a, target.codes.scale)]
    view = _core.attach("job")
    assert [name for name, _, _ in view.objects] == ["holdfast.state"]
    assert {info.name for info in view.tensors} >= {
        "model.w.a",
        "model.nested.a.b",
        "model.codes.scale",
    }
    with holdfast.open("job") as step:
        assert torch.equal(step.tensor("model.codes.scale"), saved[-2])
        assert equal(content(step.value("model")["codes"]), content(blocks(3, 4)))
        assert set(step.value("model")) == {"w", "nested", "codes"}
        assert type(step.value("value")) is TwoTensor


class Moments(torch.optim.Optimizer):
    """Its state is a subclass, sharded as its parameter is."""

    def __init__(self, parameters: Any, context: Any = True) -> None:
        super().__init__(parameters, {"lr": 0.1})
        self.context = context

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            if not state:
                local = getattr(parameter, "_local_tensor", parameter)
                made: Any = blocks(*local.shape, self.context)
                if local is not parameter:
                    made = DTensor.from_local(
                        made,
                        parameter.device_mesh,
                        parameter.placements,
                        run_check=False,
                        shape=parameter.shape,
                        stride=parameter.stride(),
                    )
                state["moment"] = made
            inner = getattr(state["moment"], "_local_tensor", state["moment"])
            inner.codes.add_(1)
            inner.scale.mul_(1.5)


class NeedsNoStep(Moments, type("_AdamBase", (), {"__module__": "torchao.optim.adam"})):
    """A restore makes its state without a step, as it does torchao's."""


def test_the_state_of_a_fresh_optimizer_is_made(ckpt: holdfast.Checkpointer) -> None:
    model = nn.Linear(4, 3, bias=False)
    optim = Moments(model.parameters())
    optim.step()
    ckpt.save(0, {"model": model, "optim": optim}, wait="sealed", timeout=60)
    saved = content(optim.state[model.weight]["moment"])
    fresh = nn.Linear(4, 3, bias=False)
    other = Moments(fresh.parameters())
    ckpt.restore({"model": fresh, "optim": other})
    made = other.state[fresh.weight]["moment"]
    assert type(made) is Blocks and made.context is True and equal(content(made), saved)
    ckpt.restore({"model": fresh, "optim": other})
    assert other.state[fresh.weight]["moment"] is made, "in place, the second time"


def test_an_optimizer_of_subclasses_is_copied_beside_the_loop(ckpt: holdfast.Checkpointer) -> None:
    from holdfast._state import Flattener

    model = nn.Linear(4, 3, bias=False)
    optim = Moments(model.parameters())
    optim.step()
    flat = Flattener(allow_pickle=False, fences=lambda _: True).run({"m": model, "o": optim})
    assert len(flat.specs) == 4 and flat.copy_first == []


def test_what_does_not_fit_is_named(ckpt: holdfast.Checkpointer) -> None:
    ckpt.save(0, {"value": blocks(3, 4), "two": TwoTensor(torch.ones(2), torch.ones(2))})
    for target, said in (
        (blocks(3, 4, context=False), "with the context .*False"),
        (blocks(4, 4), r" of \[3, 4\], wanted is a .*Blocks of \[4, 4\]"),
        (TwoTensor(torch.ones(3, 4), torch.ones(3, 4)), "wanted is a .*TwoTensor"),
        (torch.zeros(3, 4), "wanted is a Tensor"),
    ):
        with pytest.raises(
            holdfast.InvalidArgumentError, match=f"^value: was saved as a Blocks.*{said}"
        ):
            ckpt.restore({"value": target})
    with pytest.raises(holdfast.HoldfastError, match=r"^two: was saved as a TwoTensor"):
        ckpt.restore({"two": torch.zeros(2)})


def test_a_context_of_records_wants_a_place_to_go_to(ckpt: holdfast.Checkpointer) -> None:
    """Nothing is made of what only a checkpoint names: an enumeration, a dataclass."""
    context = {"rounding": Rounding.UP, "sizes": (1, 2)}
    ckpt.save(0, {"extra": {"value": blocks(3, 4, context)}}, wait="sealed", timeout=60)
    target = blocks(3, 4, context, fill=False)
    ckpt.restore({"extra": {"value": target}})
    assert equal(content(target), content(blocks(3, 4)))
    other = blocks(3, 4, {**context, "rounding": Rounding.DOWN})
    with pytest.raises(holdfast.InvalidArgumentError, match=r"^extra.value: .*context .*UP.*DOWN"):
        ckpt.restore({"extra": {"value": other}})
    with pytest.raises(
        holdfast.InvalidArgumentError, match=r"extra.value: .*Rounding.*give the tensor"
    ):
        ckpt.restore({"extra": {}})


def test_a_block_as_large_as_the_tensor_is_not_taken_for_its_shape() -> None:
    def context(block: list[int]) -> str:
        made = _subclasses.parts_of(blocks(4, 4, context=block), "w")
        assert made is not None
        return repr(made.context)

    assert "shape" in context([2, 2]) and "shape" not in context([4, 4])


def test_a_nested_tensor_is_as_torch_writes_it(ckpt: holdfast.Checkpointer) -> None:
    parts = [torch.ones(2), torch.full((3,), 2.0)]
    nested = torch.nested.nested_tensor(parts, layout=torch.jagged)
    ckpt.save(0, {"w": nested}, wait="sealed", timeout=60)
    with holdfast.open("job") as step:
        assert equal(list(step.value("w").unbind()), parts)


def test_a_class_that_was_not_imported_is_not(
    ckpt: holdfast.Checkpointer, tmp_path: pathlib.Path
) -> None:
    value = blocks(3, 4)
    kind = type("Elsewhere", (Blocks,), {"__module__": "nowhere.at_all"})
    value.__class__ = kind
    ckpt.save(0, {"extra": {"value": value}}, wait="sealed", timeout=60)
    with pytest.raises(
        holdfast.RefusedError, match="extra.value: .*nowhere.at_all.Elsewhere.*import"
    ):
        ckpt.restore({"extra": {}})
    with holdfast.open("job") as step:
        assert torch.equal(step.tensor("extra.value.codes"), value.codes)


def test_moments_of_a_part_are_refused_with_their_path(ckpt: holdfast.Checkpointer) -> None:
    mine = nn.Parameter(torch.zeros(3, 4))
    optim = Moments([mine])
    optim.step()
    said = "^optim.state.w.moment: a Part is of a plain tensor, not of a Blocks"
    with pytest.raises(holdfast.InvalidArgumentError, match=said):
        ckpt.save(1, {"w": holdfast.Part(mine, (6, 4), (0, 0)), "optim": optim})


# ---- sharded ----

ROWS, COLUMNS = 12, 4


def sharded(whole: Any, ranks: int, dim: int = 0) -> Any:
    mesh = init_device_mesh("cpu", (ranks,))
    return DTensor.from_local(
        whole, mesh, [Shard(dim)], run_check=False, shape=(ROWS, COLUMNS), stride=(COLUMNS, 1)
    )


def state_of(rank: int, ranks: int, stepped: bool, kind: type[Moments] = Moments) -> dict[str, Any]:
    """The optimizer's state, and that of a model of its own: a subclass as a parameter."""
    rows = [len(part) for part in range_of(ROWS, ranks)]
    local = torch.zeros(rows[rank], COLUMNS)
    parameter = nn.Parameter(sharded(local, ranks))
    optim = kind([parameter])
    if stepped:
        optim.step()
        inner = optim.state[parameter]["moment"]._local_tensor
        begin = sum(rows[:rank])
        inner.codes.copy_(blocks(ROWS, COLUMNS).codes[begin : begin + rows[rank]])
        inner.scale.copy_(blocks(ROWS, COLUMNS).scale[begin : begin + rows[rank]])
        inner.table.copy_(blocks(ROWS, COLUMNS).table)
    return {"w": {"it": parameter}, "optim": optim}


def range_of(rows: int, ranks: int) -> list[list[int]]:
    return [list(part) for part in torch.arange(rows).chunk(ranks)]


def moment(state: dict[str, Any]) -> Any:
    (each,) = state["optim"].state.values()
    return each["moment"]


def restored(ranks: int, stepped: bool, kind: type[Moments] = Moments) -> None:
    def work(rank: int) -> Any:
        state = state_of(rank, ranks, stepped=False, kind=kind)
        if stepped:
            state["optim"].step()
        with holdfast.Checkpointer("job") as ckpt:
            assert ckpt.restore({"optim": state["optim"]}) == 2
        return content(moment(state)), moment(state)._local_tensor.context

    found = run_ranks(ranks, work)
    whole = blocks(ROWS, COLUMNS)
    assert torch.equal(torch.cat([tensors[0] for tensors, _ in found]), whole.codes)
    assert torch.equal(torch.cat([tensors[1] for tensors, _ in found]), whole.scale)
    for (_, _, table), context in found:
        assert torch.equal(table, whole.table) and context is True


def test_an_eight_bit_optimizer_on_other_numbers_of_ranks(daemon: Daemon) -> None:
    def save(rank: int) -> None:
        with holdfast.Checkpointer("job") as ckpt:
            ckpt.save(1, {"optim": state_of(rank, 2, stepped=True)["optim"]}, wait="committed")

    run_ranks(2, save)
    for ranks in (2, 3, 4):
        restored(ranks, stepped=False)
    restored(3, stepped=True)
    restored(1, stepped=True)
    with holdfast.open("job") as step:
        scale = step.tensor("optim.state.#0.moment.scale")
        assert torch.equal(scale, blocks(ROWS, COLUMNS).scale)


@pytest.mark.parametrize("kind", [Moments, NeedsNoStep])
def test_what_one_rank_saved_is_cut(daemon: Daemon, kind: type[Moments]) -> None:
    """No slice was saved that would show how."""

    def save(rank: int) -> None:
        with holdfast.Checkpointer("job") as ckpt:
            ckpt.save(1, {"optim": state_of(0, 1, True, kind)["optim"]}, wait="committed")

    run_ranks(1, save)
    for ranks in (2, 3):
        restored(ranks, stepped=False, kind=kind)


def by_rows(rank: int, ranks: int, stepped: bool) -> dict[str, Any]:
    """A subclass, and an optimizer of such, over as many ranks as it has rows, or nearly."""
    rows = 3
    counts = [len(part) for part in range_of(rows, ranks)]
    begin = sum(counts[:rank])
    here = slice(begin, begin + counts[rank])
    whole = blocks(rows, COLUMNS, fill=stepped)
    inner = whole.codes[here].clone(), whole.scale[here].clone(), whole.table.clone()

    def sharded(local: Any) -> Any:
        mesh = init_device_mesh("cpu", (ranks,))
        shape, stride = (rows, COLUMNS), (COLUMNS, 1)
        return DTensor.from_local(
            local, mesh, [Shard(0)], run_check=False, shape=shape, stride=stride
        )

    parameter = nn.Parameter(sharded(torch.zeros(counts[rank], COLUMNS)))
    optim = Moments([parameter])
    if stepped:
        optim.step()
        moment({"optim": optim})._local_tensor.table.fill_(2.0)  # (as the table is everybody's)
    return {"value": sharded(Blocks(*inner, True)), "optim": optim}


@pytest.mark.parametrize("saved_by", [3, 2])
def test_ranks_with_one_row(daemon: Daemon, saved_by: int) -> None:
    """A slice of one row shows nothing of how it is made; one without a row does."""

    def found(state: dict[str, Any]) -> list[list[torch.Tensor]]:
        return [content(state["value"]), content(moment(state))]

    def save(rank: int) -> Any:
        state = by_rows(rank, saved_by, stepped=True)
        with holdfast.Checkpointer("job") as ckpt:
            ckpt.save(1, state, wait="committed")
        return found(state)

    def together(ranks: list[Any]) -> list[torch.Tensor]:
        return [torch.cat([of[which][i] for of in ranks]) for which in (0, 1) for i in (0, 1)]

    saved = run_ranks(saved_by, save)
    assert torch.equal(together(saved)[0], blocks(3, COLUMNS).codes)
    for ranks in (3, 2, 1):

        def restore(rank: int, ranks: int = ranks) -> Any:
            state = by_rows(rank, ranks, stepped=False)
            with holdfast.Checkpointer("job") as ckpt:
                ckpt.restore(state)
            return found(state)

        restored = run_ranks(ranks, restore)
        assert equal(together(restored), together(saved))
        for of in restored:
            assert equal([of[0][2], of[1][2]], [saved[0][0][2], saved[0][1][2]]), "tables"


def refusal(value: Any) -> str:
    with (
        holdfast.Checkpointer("job") as ckpt,
        pytest.raises(
            holdfast.InvalidArgumentError, match="^value: .*not sharded as it is"
        ) as error,
    ):
        ckpt.save(1, {"value": value})
    return str(error.value)


def test_what_no_other_number_of_ranks_could_read_is_refused_when_it_is_saved(
    daemon: Daemon,
) -> None:
    def work(rank: int) -> list[str]:
        mesh = init_device_mesh("cpu", (2,))
        columns = DTensor.from_local(
            blocks(4, 2), mesh, [Shard(1)], run_check=False, shape=(4, 4), stride=(4, 1)
        )
        said = [refusal(columns)]
        if rank == 1:  # rows 5 to 8 of 9, two elements each: they begin within a block
            rows = DTensor.from_local(
                blocks(4, 2), mesh, [Shard(0)], run_check=False, shape=(9, 2), stride=(2, 1)
            )
            said.append(refusal(rows))
        return said

    _, (columns, rows) = run_ranks(2, work)
    assert "it cannot be sliced along dimension 1 (ValueError: rows of whole blocks" in columns
    assert "begins at 5 of 9, in the middle of an element of 'scale'" in rows


def test_whole_subclasses_on_every_rank(daemon: Daemon) -> None:
    """Replicated: each rank has all of it."""

    def work(rank: int, ranks: int, fill: bool) -> Any:
        mesh = init_device_mesh("cpu", (ranks,))
        value = DTensor.from_local(blocks(3, 4, fill=fill), mesh, [Replicate()], run_check=False)
        with holdfast.Checkpointer("job") as ckpt:
            if fill:
                ckpt.save(1, {"value": value}, wait="committed")
            else:
                assert ckpt.restore({"value": value}) == 2
        return content(value)

    run_ranks(2, lambda rank: work(rank, 2, True))
    for found in run_ranks(3, lambda rank: work(rank, 3, False)):
        assert equal(found, content(blocks(3, 4)))
