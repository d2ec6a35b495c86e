"""holdfast.Range: what optimizers over flat buffers have of a tensor, of any length on any rank. Saved by two ranks, filled in
place on the same two, put together by holdfast.open, and resharded by DCP."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from ranks import run_ranks
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import holdfast
from daemons import Daemon
from holdfast._state import Flattener
from holdfast.dcp import Reader

# Of each tensor its shape, its type, and what two ranks have of it. One has nothing of the last.
WHOLE = {
    "master": ((23,), torch.float32, [(0, 17), (17, 6)]),
    "exp_avg": ((23,), torch.bfloat16, [(0, 5), (5, 18)]),
    "weight": ((4, 3, 5), torch.float64, [(0, 22), (22, 38)]),
    "little": ((2, 2), torch.int32, [(0, 0), (0, 4)]),
}


def whole(name: str) -> torch.Tensor:
    shape, dtype, _ = WHOLE[name]
    torch.manual_seed(sum(map(ord, name)))
    values = torch.empty(shape, dtype=dtype)
    raw = values.view(-1).view(torch.uint8)  # all bits, those of NaN too
    raw.copy_(torch.randint(0, 256, raw.shape, dtype=torch.uint8))
    return values


def bits(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy())


def ranges(rank: int, *, blank: bool) -> dict[str, Any]:
    """A state with this rank's parts: of the right values, or zeros to be filled."""
    state: dict[str, Any] = {"flat": {}, "step": 0 if blank else 7}
    for name, (shape, _, parts) in WHOLE.items():
        start, length = parts[rank]
        part = whole(name).view(-1)[start : start + length].clone()
        if blank:
            part.zero_()
        state["flat"][name] = holdfast.Range(part, shape=shape, start=start)
    return state


def save_by_two(daemon: Daemon) -> None:
    def work(rank: int) -> None:
        with holdfast.Checkpointer("job") as ckpt:
            ckpt.save(7, ranges(rank, blank=False), wait="committed")
        dist.barrier()
        with holdfast.Checkpointer("job") as ckpt:
            state = ranges(rank, blank=True)
            before = {name: each.tensor.data_ptr() for name, each in state["flat"].items()}
            assert ckpt.restore(state) == 8
            for name, (_, _, parts) in WHOLE.items():
                start, length = parts[rank]
                got = state["flat"][name]
                assert bits(got.tensor) == bits(whole(name).view(-1)[start : start + length])
                assert got.tensor.data_ptr() == before[name]
            assert state["step"] == 7

    run_ranks(2, work)


def test_each_rank_gets_its_ranges_back_and_the_parts_make_the_whole(daemon: Daemon) -> None:
    save_by_two(daemon)
    with holdfast.open("job") as saved:
        assert saved.keys() == sorted(f"flat.{name}" for name in WHOLE)
        assert [info.flat for info in saved._views[1].tensors if info.name == "flat.weight"] == [
            (22, 38)
        ]
        for name, (shape, _, _) in WHOLE.items():
            assert saved.shape(f"flat.{name}") == shape
            assert bits(saved.tensor(f"flat.{name}")) == bits(whole(name))
            assert bits(saved.value(f"flat.{name}", rank=1)) == bits(whole(name))


@pytest.mark.parametrize("world", [1, 3])
def test_dcp_reshards_ranges(daemon: Daemon, world: int) -> None:
    save_by_two(daemon)

    def work(rank: int) -> None:
        mesh = init_device_mesh("cpu", (world,))
        state: dict[str, Any] = {"flat": {}, "step": 0}
        for name, (shape, dtype, _) in WHOLE.items():
            state["flat"][name] = distribute_tensor(
                torch.zeros(shape, dtype=dtype), mesh, [Shard(len(shape) - 1)]
            )
        dcp.load(state, storage_reader=Reader("job", adopt=False))
        for name in WHOLE:
            place = distribute_tensor(whole(name), mesh, [Shard(len(WHOLE[name][0]) - 1)])
            assert bits(state["flat"][name].to_local()) == bits(place.to_local()), name
        assert state["step"] == 7
        replica = {"flat": {name: torch.zeros_like(whole(name)) for name in WHOLE}}
        dcp.load(replica, storage_reader=Reader("job", adopt=False))
        for name in WHOLE:
            assert bits(replica["flat"][name]) == bits(whole(name))

    run_ranks(world, work)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_ranges_with_a_gap_are_no_tensor(daemon: Daemon) -> None:
    with holdfast.Checkpointer("job") as ckpt:
        part = holdfast.Range(torch.ones(4), (3, 2), 1)
        ckpt.save(1, {"a": part, "b": torch.ones(2)}, wait="committed")
    state = {"b": torch.zeros(2)}
    dcp.load(state, storage_reader=Reader("job", adopt=False))
    assert state["b"].eq(1).all()
    with pytest.raises(
        CheckpointException, match="a: tensor .a. .* elements .* no rank saved them"
    ):
        dcp.load({"a": torch.zeros(3, 2)}, storage_reader=Reader("job", adopt=False))
    with holdfast.open("job") as saved:
        with pytest.raises(holdfast.NotFoundError, match="4 of its elements"):
            saved.tensor("a")


class Wrapper:
    """An optimizer of somebody's own making, with its state in ranges."""

    def __init__(self, values: torch.Tensor) -> None:
        self.values = values

    def state_dict(self) -> dict[str, Any]:
        part = holdfast.Range(self.values, (9,), 2)
        return {"main": part, "again": part, "none": holdfast.Range(self.values[:0], (9,), 0)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert str(state["main"]) == "elements 2 to 7 of torch.float32 [9]"
        assert str(state["none"]) == "elements 0 to 0 of torch.float32 [9]"
        self.values.copy_(state["again"].tensor)


def test_ranges_in_what_objects_say_of_themselves(daemon: Daemon) -> None:
    with holdfast.Checkpointer("job") as ckpt:
        ckpt.save(1, {"wrapped": Wrapper(torch.arange(5.0))})
        blank = Wrapper(torch.zeros(5))
        assert ckpt.restore({"wrapped": blank}) == 2
        assert blank.values.tolist() == [0, 1, 2, 3, 4]


def zero(rank: int, steps: int) -> tuple[torch.nn.Parameter, torch.optim.Optimizer, dict[str, Any]]:
    """A parameter of 11 elements, of which two ranks have 7 and 4, and its optimizer after some steps."""
    start, end = ((0, 7), (7, 11))[rank]
    mine = torch.nn.Parameter(torch.arange(11.0)[start:end].clone())
    optim = torch.optim.AdamW([mine], lr=0.1)
    for step in range(steps):
        optim.zero_grad()
        (mine - step).square().sum().backward()
        optim.step()
    return mine, optim, {"master": holdfast.Range(mine, (11,), start), "optim": optim}


def test_the_state_of_an_optimizer_over_ranges_is_ranges(daemon: Daemon) -> None:
    def work(rank: int) -> tuple[bytes, ...]:
        mine, optim, state = zero(rank, 3)
        saved = {"mine": mine, **optim.state[mine]}
        saved = {name: bits(value) for name, value in saved.items()}
        with holdfast.Checkpointer("job") as ckpt:
            ckpt.save(7, state, wait="committed")
        dist.barrier()
        with holdfast.Checkpointer("job") as ckpt:
            for steps in (0, 1):  # into an optimizer without state, and into one with some
                mine, optim, state = zero(rank, steps)
                before = {name: value.data_ptr() for name, value in optim.state[mine].items()}
                assert ckpt.restore(state) == 8
                got = optim.state[mine]
                assert {n: bits(v) for n, v in {"mine": mine, **got}.items()} == saved
                assert all(got[name].data_ptr() == before[name] for name in before)
            state["master"] = holdfast.Range(mine, (12,), state["master"].start)
            with pytest.raises(
                holdfast.InvalidArgumentError, match=r"master: .* wanted is .* \[12\]"
            ):
                ckpt.restore(state)
            mine, optim, state = zero(rank, 0)
            ckpt.restore({"optim": optim})  # a part of the state
            assert {name: bits(value) for name, value in optim.state[mine].items()} == {
                name: value for name, value in saved.items() if name != "mine"
            }
        return saved["mine"], saved["exp_avg"], saved["step"]

    parts = run_ranks(2, work)
    with holdfast.open("job") as opened:
        assert bits(opened.tensor("master")) == parts[0][0] + parts[1][0]
        assert bits(opened.tensor("optim.state.master.exp_avg")) == parts[0][1] + parts[1][1]
        assert bits(opened.tensor("optim.state.master.step")) == parts[0][2]


def test_the_optimizers_own_memory_is_copied_beside_the_loop() -> None:
    parameter, other = torch.nn.Parameter(torch.zeros(5)), torch.zeros(5)
    optim = torch.optim.SGD([parameter], lr=0.1)
    state = {"optim": optim, "a": holdfast.Range(parameter, (9,), 1), "b": holdfast.Range(other, (9,), 1)}  # fmt: skip
    flat = Flattener(allow_pickle=False, fences=lambda _: True).run(state)
    assert [flat.specs[i][0] for i in flat.copy_first] == ["b"]
    # Described once, as long as nothing changes; and anew when only the start has.
    again = Flattener(allow_pickle=False, fences=lambda _: True, before=flat.described).run(state)
    assert again.described is flat.described
    state["a"] = holdfast.Range(parameter, (9,), 2)
    moved = Flattener(allow_pickle=False, fences=lambda _: True, before=flat.described).run(state)
    assert moved.specs[0][6] == (2, 5)


def test_tied_ranges_are_saved_once(daemon: Daemon) -> None:
    values = torch.arange(4.0)
    part = holdfast.Range(values, (8,), 4)
    with holdfast.Checkpointer("job") as ckpt:
        ckpt.save(1, {"a": part, "b": holdfast.Range(values, (8,), 4)})
        one, other = torch.zeros(4), torch.zeros(4)
        ckpt.restore({"a": holdfast.Range(one, (8,), 4), "b": holdfast.Range(other, (8,), 4)})
        assert one.tolist() == other.tolist() == [0, 1, 2, 3]
        assert len(holdfast.open("job")._views[0].tensors) == 1
        # Two parts of what is one: each gets its own elements, if they are others, and there are such.
        with pytest.raises(
            holdfast.InvalidArgumentError, match="b: was saved as elements 4 to 8 of F32"
        ):
            ckpt.restore({"a": part, "b": holdfast.Range(other, (8,), 3)})
        low, high = torch.zeros(1), torch.zeros(2)
        ckpt.restore({"a": holdfast.Range(low, (8,), 4), "b": holdfast.Range(high, (8,), 6)})
        assert low.tolist() == [0] and high.tolist() == [2, 3]


def test_memory_that_a_range_shares(daemon: Daemon) -> None:
    """Parameters that are views of the flat buffer, of which a part is a range: saved as two, and restored as one memory."""
    flat = torch.arange(6.0)
    state = {"flat": flat, "part": holdfast.Range(flat[:4], (8,), 4), "view": flat[1:3]}
    with holdfast.Checkpointer("job") as ckpt:
        ckpt.save(1, state)
        flat.zero_()
        assert ckpt.restore(state) == 2
        assert flat.tolist() == [0, 1, 2, 3, 4, 5]
        ckpt.save(
            2, {"a": holdfast.Range(flat[:4], (8,), 4), "b": holdfast.Range(flat[2:], (8,), 4)}
        )
        ckpt.save(
            3,
            {"one": holdfast.Range(flat, (12,), 0), "other": holdfast.Range(flat, (12,), 6)},
            wait="committed",
        )
        saved = holdfast.open("job", step=3)._views[0].tensors
        assert {info.name: info.flat for info in saved} == {"one": (0, 6), "other": (6, 6)}
        twice = holdfast.Range(flat[:4], (8,), 4)
        with pytest.raises(holdfast.InvalidArgumentError, match="a and b: lie in the same memory"):
            ckpt.restore({"a": twice, "b": twice}, step=2)


@pytest.mark.parametrize(
    "tensor, shape, start, said",
    [
        (torch.zeros(2, 3), (9,), 0, r"one dimension, not \[2, 3\] torch.strided: flatten it"),
        (torch.tensor(1.0), (9,), 0, r"one dimension, not \[\]"),
        (torch.zeros(8)[::2], (9,), 0, "contiguous tensor, not of one with stride 2"),
        (torch.zeros(4), (9,), 6, r"elements 6 to 10 are not within a tensor of shape \[9\], which has 9"),
        (torch.zeros(4), (9,), -1, "elements -1 to 3 are not within"),
        (torch.zeros(4), (-3, -3), 0, "are not within"),
        (torch.zeros(4), (9,), 0.5, "a sequence of integers and an integer"),
        (torch.zeros(4), 9, 0, "a sequence of integers and an integer"),
        (torch.zeros(4).numpy(), (9,), 0, "not of a ndarray .torch.from_numpy"),
        (torch.zeros(4).to_sparse(), (9,), 0, r"strided tensor with one dimension, not \[4\] torch.sparse_coo"),
        (torch.masked.masked_tensor(torch.zeros(2), torch.ones(2).bool()), (9,), 0, "plain tensor, not of a MaskedTensor"),
    ],
)  # fmt: skip
@pytest.mark.filterwarnings("ignore:The PyTorch API of MaskedTensors")
def test_what_is_no_range_is_refused(tensor: Any, shape: Any, start: Any, said: str) -> None:
    with pytest.raises(holdfast.InvalidArgumentError, match=said):
        holdfast.Range(tensor, shape, start)


def test_a_range_that_has_been_resized_is_named(daemon: Daemon) -> None:
    values = torch.zeros(4)
    part = holdfast.Range(values, (4,), 0)
    values.resize_(5)
    with holdfast.Checkpointer("job") as ckpt:
        with pytest.raises(
            holdfast.InvalidArgumentError, match=r"opt\.master: elements 0 to 5 are not within"
        ):
            ckpt.save(1, {"opt": {"master": part}})
        with pytest.raises(holdfast.InvalidArgumentError, match=r"opt\.master: .*meta device"):
            ckpt.save(
                1, {"opt": {"master": holdfast.Range(torch.zeros(4, device="meta"), (4,), 0)}}
            )
        values.resize_(4)
        ckpt.save(1, {"opt": {"master": part}})
        values.resize_(5)
        with pytest.raises(
            holdfast.InvalidArgumentError, match=r"opt\.master: elements 0 to 5 are not within"
        ):
            ckpt.restore({"opt": {"master": part}})


def test_what_differs_from_the_saved_range_is_named(daemon: Daemon) -> None:
    with holdfast.Checkpointer("job") as ckpt:
        saved = {
            "part": holdfast.Range(torch.ones(4), (9,), 2),
            "none": holdfast.Range(torch.ones(0), (9,), 2),
            "plain": torch.ones(4),
            "value": 3,
        }
        ckpt.save(1, saved)

        def refused(key: str, wanted: Any, said: str) -> None:
            with pytest.raises(holdfast.InvalidArgumentError, match=said):
                ckpt.restore({key: wanted})

        was = r"part: was saved as elements 2 to 6 of F32 \[9\], wanted is "
        of = r"of torch.float32 \[9\]"
        refused("part", holdfast.Range(torch.ones(4), (9,), 3), was + "elements 3 to 7 " + of)
        less = torch.zeros(3)
        ckpt.restore({"part": holdfast.Range(less, (9,), 2)})  # what it has of it, it gives
        assert less.tolist() == [1, 1, 1]
        refused("part", holdfast.Range(torch.ones(4), (3, 3), 2), was + r".* \[3, 3\]")
        refused("part", holdfast.Range(torch.ones(4).int(), (9,), 2), was + ".* of torch.int32")
        ckpt.restore({"part": holdfast.Range(torch.ones(0), (9,), 2)})
        refused(
            "part", torch.ones(4), was + r"a Tensor of torch.float32 \[4\]: give the holdfast.Range"
        )
        refused("part", torch.ones(9), was + r"a Tensor of torch.float32 \[9\]")
        refused("none", holdfast.Range(torch.ones(1), (9,), 2), "as elements 2 to 2 of F32")
        refused("none", torch.ones(9), "none: was saved as elements 2 to 2 of F32")
        whole = torch.zeros(4)
        ckpt.restore({"plain": holdfast.Range(whole, (4,), 0)})
        assert whole.tolist() == [1, 1, 1, 1]
        refused("value", holdfast.Range(torch.ones(4), (4,), 0), "saved as a value, wanted is")
