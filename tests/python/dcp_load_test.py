"""What dcp.load reads: of all ranks' shards the parts that it wants, and of all of them the same."""

from __future__ import annotations

import gc
import logging
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from relay import ATTACH, READ_RECORDS, relayed
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.logger import _dcp_logger
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

import holdfast
from daemons import DEADLINE_S, Daemon
from holdfast import _core, _jobs
from holdfast.dcp import Reader, Writer, _reads
from holdfast.dcp._layout import MAPPINGS, encode_mappings

_dcp_logger.setLevel(logging.ERROR)
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

# Of a tensor: its whole shape, and where this rank's part of it begins or which range it is.
Saved = tuple[torch.Tensor, Sequence[int], dict[str, Any]]


@pytest.fixture(autouse=True)
def no_job_is_left(daemon: Daemon) -> Iterator[None]:
    yield
    _jobs._close_all()
    _jobs._loaded.clear()
    gc.collect()


def whole(tensor: torch.Tensor) -> Saved:
    return tensor, tuple(tensor.shape), {}


def box(of: torch.Tensor, *slices: slice) -> Saved:
    part = of[slices].contiguous()
    offset = [each.start or 0 for each in slices] + [0] * (of.dim() - len(slices))
    return part, tuple(of.shape), {"offset": offset, "local_shape": tuple(part.shape)}


def flat(of: torch.Tensor, start: int, length: int) -> Saved:
    part = of.reshape(-1)[start : start + length].contiguous()
    return part, tuple(of.shape), {"flat": (start, length)}


NAMES = {torch.float32: "F32", torch.float64: "F64", torch.int64: "I64"}


def save(job: str, ranks: Sequence[dict[str, Saved]]) -> None:
    """Step 1, each rank's part of it."""
    jobs = [_core.Job(job, rank=rank, world_size=len(ranks)) for rank in range(len(ranks))]
    saves = []
    for one, state in zip(jobs, ranks, strict=True):
        tensors = _core.TensorList()
        for name, (part, shape, place) in state.items():
            tensors.add(name, NAMES[part.dtype], shape, **place)
        addresses = [part.data_ptr() for part, _, _ in state.values()]
        objects = [(MAPPINGS, encode_mappings({name: (name,) for name in state}), None)]
        saves.append(one.save(1, tensors, addresses, objects))
    for each in saves:
        each.wait("committed", DEADLINE_S)
    for one in jobs:
        one.close()


class Boxes(DefaultLoadPlanner):
    """Wants boxes: by name in the state that is loaded, which tensor, and where the box begins."""

    def __init__(self, boxes: dict[str, tuple[str, Sequence[int]]]) -> None:
        super().__init__()
        self.boxes = boxes
        self.keys: dict[int, str] = {}  # by item

    def create_local_plan(self) -> LoadPlan:
        items = []
        assert self.metadata is not None
        for key, tensor in self.state_dict.items():
            name, offset = self.boxes[key]
            chunk = ChunkStorageMetadata(torch.Size(offset), tensor.size())
            metadata = self.metadata.state_dict_metadata[name]
            for item in create_read_items_for_chunk_list(name, metadata, [chunk]):  # type: ignore[arg-type]
                items.append(item)
                self.keys[id(item)] = key
        return LoadPlan(items)

    def resolve_tensor(self, item: Any) -> torch.Tensor:
        target = self.state_dict[self.keys[id(item)]]
        assert isinstance(target, torch.Tensor)
        for dimension, (offset, length) in enumerate(zip(item.dest_offsets, item.lengths)):
            target = target.narrow(dimension, offset, length)
        return target


def load(job: str, state: dict[str, Any], planner: DefaultLoadPlanner | None = None) -> None:
    dcp.load(state, storage_reader=Reader(job, adopt=False), planner=planner, no_dist=True)


def refusal(job: str, state: dict[str, Any]) -> BaseException:
    with pytest.raises(CheckpointException) as raised:
        load(job, state)
    ((error, _),) = raised.value.failures.values()
    return error


def test_a_rank_attaches_the_shards_it_wants_however_many_there_are(
    daemon: Daemon, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = {}
    for world in (3, 12):
        rows = torch.arange(world * 8.0).reshape(world * 4, 2)
        same = torch.arange(5.0)
        save(
            f"job-{world}",
            [
                {"rows": box(rows, slice(4 * rank, 4 * rank + 4)), "same": whole(same)}
                for rank in range(world)
            ],
        )
        with relayed(tmp_path / f"{world}.sock", daemon.socket) as relay:
            monkeypatch.setenv("HOLDFAST_SOCKET", str(tmp_path / f"{world}.sock"))
            # As rank 2 of as many.
            state = {"rows": torch.zeros(4, 2), "same": torch.zeros(5)}
            load(f"job-{world}", state, Boxes({"rows": ("rows", (8, 0)), "same": ("same", (0,))}))
            assert torch.equal(state["rows"], rows[8:12]) and torch.equal(state["same"], same)
            asked[world] = relay.requests[ATTACH], relay.requests[READ_RECORDS]
        monkeypatch.setenv("HOLDFAST_SOCKET", str(daemon.socket))
    assert asked[3] == asked[12], asked
    attaches, records = asked[12]
    # Of rank 0 to choose the step and for names and paths, of rank 2, and of whom "same" comes from.
    assert attaches <= 4 and records == 1, asked


def test_a_planner_that_makes_the_plan_last_gets_the_values_too(daemon: Daemon) -> None:
    class Late(DefaultLoadPlanner):
        def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
            return LoadPlan(self.create_local_plan().items)

    state: dict[str, Any] = {"n": 3, "w": torch.arange(2.0)}
    dcp.save(state, storage_writer=Writer("job", step=1, wait="committed"), no_dist=True)
    found: dict[str, Any] = {"n": 0, "w": torch.zeros(2)}
    load("job", found, Late())
    assert found["n"] == 3 and torch.equal(found["w"], state["w"])


def test_what_two_ranks_saved_differently_is_refused_by_name(daemon: Daemon) -> None:
    ranks = []
    for rank in range(2):
        own = torch.full((3,), float(rank))
        odd = torch.ones(4, dtype=(torch.float32, torch.float64)[rank])
        ranks.append({"own": whole(own), "odd": whole(odd), "same": whole(torch.ones(2))})
    save("job", ranks)
    state = {"same": torch.zeros(2)}
    load("job", state)
    assert state["same"].tolist() == [1, 1]
    for name, told in [
        ("own", "ranks 0, 1 saved different values"),
        ("odd", r"ranks 0, 1 saved .*F32 \[4\], F64 \[4\]\."),
    ]:
        state = {"same": torch.zeros(2), name: torch.full((4 if name == "odd" else 3,), 7.0)}
        error = refusal("job", state)
        assert isinstance(error, holdfast.RefusedError)
        with pytest.raises(holdfast.RefusedError, match=f"{name}: {told}"):
            raise error
        assert state[name].eq(7).all() and state["same"].eq(0).all()
    with holdfast.open("job") as saved:
        assert saved.shape("own") == (3,)
        for read in (saved.tensor, saved.numpy):
            assert read("same").tolist() == [1, 1]
            with pytest.raises(
                holdfast.InvalidArgumentError, match="own: .* rank 0 and rank 1 .* values"
            ):
                read("own")
            assert [read("own", rank=rank).tolist() for rank in range(2)] == [[0] * 3, [1] * 3]


@pytest.mark.parametrize("agree", [True, False])
def test_parts_that_overlap_are_compared(daemon: Daemon, agree: bool) -> None:
    """No digest says it: the parts begin at different rows."""
    values = torch.arange(24.0).reshape(8, 3)
    values[4] = float("nan")
    other = values.clone()
    if not agree:
        other[4, 1] = -1
    parts = [
        {"w": box(values, slice(0, 5)), "v": flat(values, 0, 15)},
        {"w": box(other, slice(3, 8)), "v": flat(other, 9, 15)},
    ]
    save("job", parts)
    for name in ("w", "v"):
        state = {name: torch.zeros(8, 3)}
        if not agree:
            error = refusal("job", state)
            assert isinstance(error, holdfast.InvalidArgumentError) and name in str(error)
            assert "with different values" in str(error)
            with holdfast.open("job") as saved:
                for read in (saved.tensor, saved.numpy):
                    with pytest.raises(
                        holdfast.InvalidArgumentError, match=f"{name}: ranks disagree"
                    ):
                        read(name)
            continue
        load("job", state)
        assert state[name].view(torch.int32).equal(values.view(torch.int32))
        with holdfast.open("job") as saved:
            assert saved.tensor(name).view(torch.int32).equal(values.view(torch.int32))
            assert saved.numpy(name).tobytes() == values.numpy().tobytes()


def test_elements_that_no_rank_saved_are_refused_where_they_are_wanted(daemon: Daemon) -> None:
    rows = torch.arange(12.0).reshape(6, 2)
    save("job", [{"hole": box(rows, slice(0, 2))}, {"hole": box(rows, slice(3, 6))}])
    error = refusal("job", {"hole": torch.zeros(6, 2)})
    assert isinstance(error, holdfast.RefusedError) and "hole" in str(error)


@pytest.mark.parametrize("batch_bytes", [1, 1 << 28])
def test_any_boxes_of_what_ranks_have_split(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch, batch_bytes: int
) -> None:
    """Also such as share elements, into tensors that are strided, or of another type."""
    monkeypatch.setattr(_reads, "_BATCH_BYTES", batch_bytes)
    rows = torch.arange(60.0).reshape(10, 6)
    ranges = torch.arange(100, dtype=torch.int64).reshape(10, 10)
    one = torch.tensor(5.0)
    save(
        "job",
        [
            {"rows": box(rows, slice(0, 7)), "ranges": flat(ranges, 0, 33), "one": whole(one)},
            {"rows": box(rows, slice(7, 10)), "ranges": flat(ranges, 33, 67), "one": whole(one)},
        ],
    )
    state = {
        "across": torch.zeros(4, 3),
        "shares": torch.zeros(6, 6),
        "the same": torch.zeros(4, 3),
        "strided": torch.zeros(6, 10).t(),
        "other type": torch.zeros(2, 2, dtype=torch.float64),
        "ranges": torch.zeros(3, 4, dtype=torch.int64),
        "none": torch.zeros(0, 6),
        "one": torch.zeros(()),
    }
    planner = Boxes(
        {
            "across": ("rows", (5, 2)),
            "shares": ("rows", (4, 0)),
            "the same": ("rows", (5, 2)),
            "strided": ("rows", (0, 0)),
            "other type": ("rows", (8, 4)),
            "ranges": ("ranges", (2, 1)),
            "none": ("rows", (3, 0)),
            "one": ("one", ()),
        }
    )
    load("job", state, planner)
    assert state["across"].equal(rows[5:9, 2:5])
    assert state["shares"].equal(rows[4:10])
    assert state["the same"].equal(rows[5:9, 2:5])
    assert state["strided"].equal(rows)
    assert state["other type"].equal(rows[8:, 4:].double())
    assert state["ranges"].equal(ranges[2:5, 1:5])
    assert state["one"].item() == 5


def test_what_goes_on_to_a_gpu_is_read_into_pinned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    make = torch.empty

    def empty(*shape: Any, pin_memory: bool, **options: Any) -> torch.Tensor:
        asked.append(pin_memory)
        return make(*shape, **options)

    monkeypatch.setattr(torch, "empty", empty)
    part = _reads.Part("w", torch.float32, _reads.Place((2,), (0,), (2,)))
    for device in ("cuda", "cpu"):
        _reads._beside(part, torch.device(device))
    assert asked == [True, False]
