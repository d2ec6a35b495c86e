"""torch.distributed.checkpoint into Holdfast and back, in one process with a real daemon."""

from __future__ import annotations

import collections
import functools
import gc
import io
import logging
import pickle
import signal
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    _EmptyStateDictLoadPlanner,
)
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.logger import _dcp_logger
from torch.distributed.checkpoint.planner import LoadPlan
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.testing._internal.two_tensor import TwoTensor

import holdfast
from daemons import DEADLINE_S, Daemon, run_python
from holdfast import _core, _held, _jobs
from holdfast.dcp import Reader, Stager, Writer

# DCP logs each of its functions' begin and end.
_dcp_logger.setLevel(logging.ERROR)
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.fixture(autouse=True)
def no_job_is_left(daemon: Daemon):
    yield
    _jobs._close_all()
    _jobs._loaded.clear()
    gc.collect()
    assert not _held._live


class Color:
    def __eq__(self, other: object) -> bool:
        return isinstance(other, Color)


def a_model() -> torch.nn.Module:
    torch.manual_seed(7)
    return torch.nn.Sequential(
        torch.nn.Linear(5, 7), torch.nn.BatchNorm1d(7), torch.nn.Linear(7, 3).to(torch.bfloat16)
    )


def a_state() -> dict[str, Any]:
    """Of everything something: types, shapes, nesting, objects."""
    torch.manual_seed(3)
    model = a_model()
    adam = torch.optim.AdamW(model.parameters())
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    adam.step()
    return {
        "model": model.state_dict(),
        "optim": adam.state_dict(),
        "types": {
            str(dtype).removeprefix("torch."): torch.randint(
                0, 255, (3, 16), dtype=torch.uint8
            ).view(dtype)
            for dtype in (
                torch.int8,
                torch.int16,
                torch.float16,
                torch.bfloat16,
                torch.float8_e4m3fn,
                torch.uint16,
                torch.uint64,
                torch.complex64,
            )
        },
        "shapes": {
            "scalar": torch.tensor(2.5, dtype=torch.float64),
            "empty": torch.zeros(0, 4),
            "column": torch.arange(12.0).reshape(3, 4).t(),
            "bools": torch.tensor([True, False]),
            "conjugated": torch.randn(3, dtype=torch.complex64).conj(),
        },
        "list": [torch.ones(2), {"in": torch.zeros(3, dtype=torch.int64)}, 5],
        "step": 100,
        "extra": {
            "lr": 0.1,
            "nan": float("nan"),
            "betas": (0.9, 0.95),
            "by int": {3: "three"},
            "names": ["a", "b"],
            "none": None,
            "nothing": {},
            "numpy": __import__("numpy").random.RandomState(1).get_state(),
        },
    }


def zeros_like(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return torch.zeros_like(value)
    if isinstance(value, dict):
        return {key: zeros_like(each) for key, each in value.items()}
    if isinstance(value, list):
        return [zeros_like(each) for each in value]
    return None


def bits(tensor: torch.Tensor) -> tuple[Any, ...]:
    plain = tensor.detach().resolve_conj().contiguous().reshape(-1)
    return tensor.dtype, tuple(tensor.shape), plain.view(torch.uint8).numpy().tobytes()


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and bits(a) == bits(b)
    if isinstance(a, dict):
        return isinstance(b, dict) and list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and repr(a) == repr(b)


def through_files(state: dict[str, Any], folder: str, planner: Any = None) -> dict[str, Any]:
    """What DCP's own files give back."""
    dcp.save(state, storage_writer=FileSystemWriter(folder))
    target = zeros_like(state)
    dcp.load(target, storage_reader=FileSystemReader(folder), planner=planner)
    return target


def saved_by_stager(state: dict[str, Any], writer: Writer) -> None:
    saving = dcp.async_save(state, storage_writer=writer, async_stager=Stager("job"))
    # Newer versions of PyTorch return two futures.
    getattr(saving, "upload_completion", saving).result()


def how(name: str):
    """Ways to save."""

    def save(state: dict[str, Any], step: int, **options: Any) -> None:
        if name == "save":
            dcp.save(state, storage_writer=Writer("job", step=step, **options))
        elif name == "async with Stager":
            saved_by_stager(state, Writer("job", step=step, **options))
        elif name == "async":
            dcp.async_save(state, storage_writer=Writer("job", step=step, **options)).result()
        else:
            stager = DefaultStager(StagingOptions(False, False, False, False))
            dcp.async_save(
                state, storage_writer=Writer("job", step=step, **options), async_stager=stager
            ).result()
            stager.close()

    return save


WAYS = ["save", "async with Stager", "async", "async with DCP's stager"]


@pytest.mark.parametrize("way", WAYS)
def test_everything_comes_back_as_from_dcps_own_files(way: str, tmp_path) -> None:
    state = a_state()
    if way == "async with DCP's stager":
        del state["shapes"]["conjugated"]  # it forgets the conjugation
    how(way)(state, 100)
    target = zeros_like(state)
    dcp.load(target, storage_reader=Reader("job"))
    # Keys are text to DCP, whoever stores them.
    files = through_files(state, str(tmp_path))
    assert same(target, files)
    assert same(target["model"], dict(state["model"])) and target["extra"]["betas"] == (0.9, 0.95)


@pytest.mark.parametrize("way", WAYS)
def test_without_a_state_to_load_into(way: str) -> None:
    """As dcp_to_torch_save does it: the flatten mappings are part of what is saved."""
    state = a_state()
    how(way)(state, 100)
    whole: dict[str, Any] = {}
    dcp.state_dict_loader._load_state_dict(
        whole, storage_reader=Reader("job"), planner=_EmptyStateDictLoadPlanner(), no_dist=True
    )
    assert same(whole["model"], dict(state["model"]))
    assert same(whole["list"], state["list"]) and same(whole["types"], state["types"])
    assert whole["step"] == 100 and whole["extra"]["names"] == ["a", "b"]
    some: dict[str, Any] = {}
    planner = _EmptyStateDictLoadPlanner(keys={"model.0.weight", "extra"})
    dcp.state_dict_loader._load_state_dict(
        some, storage_reader=Reader("job"), planner=planner, no_dist=True
    )
    assert set(some) == {"model", "extra"} and set(some["model"]) == {"0.weight"}


def test_the_state_is_copied_once_and_the_loop_may_go_on(daemon: Daemon) -> None:
    """async_save's state lies in the slot itself; what training does then is not in it."""
    size = 4 << 20
    state = {
        "model": {"w": torch.full((size,), 1.0), "v": torch.full((size,), 2.0)},
        "data": {"seen": [1, 2]},
    }
    gate, seen = threading.Event(), []

    class Waits(DefaultSavePlanner):
        def create_local_plan(self):
            assert gate.wait(60)
            seen.append(
                {
                    name: mapping_of(value.data_ptr())
                    for name, value in self.state_dict.items()
                    if isinstance(value, torch.Tensor)
                }
            )
            return super().create_local_plan()

    held = resident_anonymous()
    writer = Writer("job", step=1)
    future = dcp.async_save(state, storage_writer=writer, planner=Waits())
    grown = resident_anonymous() - held
    assert grown < size, f"{grown} bytes of private memory more for a state of {8 * size}"
    state["model"]["w"].fill_(9.0)
    state["model"]["v"].fill_(9.0)
    state["data"]["seen"].append(3)
    gate.set()
    future.result()
    # Where they lay: in a mapping of the daemon's tmpfs.
    assert len(seen[0]) == 2
    for mapping in seen[0].values():
        assert str(daemon.memory) in mapping
    target = {"model": {"w": torch.zeros(size), "v": torch.zeros(size)}, "data": {"seen": None}}
    dcp.load(target, storage_reader=Reader("job"))
    assert target["model"]["w"].eq(1.0).all() and target["model"]["v"].eq(2.0).all()
    assert target["data"]["seen"] == [1, 2]


def test_staging_leaves_the_collector_as_it_was() -> None:
    try:
        for step, on in ((1, True), (2, False)):
            (gc.enable if on else gc.disable)()
            how("async")({"w": torch.ones(10)}, step)
            assert gc.isenabled() is on
            Writer("job", step=5).stage({"w": torch.empty(2, device="meta")})
            assert gc.isenabled() is on
    finally:
        gc.enable()


def resident_anonymous() -> int:
    with open("/proc/self/status", encoding="ascii") as status:
        for line in status:
            if line.startswith("RssAnon:"):
                return int(line.split()[1]) << 10
    raise AssertionError("no RssAnon")


def mapping_of(address: int) -> str:
    with open("/proc/self/maps", encoding="utf-8") as maps:
        for line in maps:
            begin, end = (int(part, 16) for part in line.split()[0].split("-"))
            if begin <= address < end:
                return line
    return "none"


def test_dcp_save_copies_from_where_the_tensors_lie() -> None:
    size = 4 << 20
    state = {"w": torch.full((size,), 1.0), "v": torch.full((size,), 2.0)}
    held = resident_anonymous()
    dcp.save(state, storage_writer=Writer("job", step=1))
    grown = resident_anonymous() - held
    assert grown < size


def test_steps_follow_each_other_and_the_newest_is_loaded() -> None:
    for step in range(1, 6):
        how("async" if step % 2 else "save")(
            {"w": torch.full((1000,), float(step)), "step": step}, step
        )
    target = {"w": torch.zeros(1000), "step": 0}
    dcp.load(target, storage_reader=Reader("job"))
    assert target["step"] == 5 and target["w"].eq(5.0).all()
    target = {"w": torch.zeros(1000), "step": 0}
    dcp.load(target, storage_reader=Reader("job", step=4, adopt=False))
    assert target["step"] == 4 and target["w"].eq(4.0).all()


def raised(call) -> BaseException:
    """What a rank raised, out of DCP's own exception."""
    with pytest.raises(CheckpointException) as error:
        call()
    (inner, _) = error.value.failures[0]
    pickle.loads(pickle.dumps(inner))  # DCP sends it to the other ranks
    return inner


def test_nothing_to_restore_is_said_as_such() -> None:
    inner = raised(lambda: dcp.load({"w": torch.zeros(1)}, storage_reader=Reader("job")))
    assert isinstance(inner, holdfast.NothingToRestoreError), inner
    assert Reader("job").find() is None


def test_find_says_what_load_will_load() -> None:
    how("save")({"w": torch.ones(1)}, 3)
    reader = Reader("job")
    assert reader.find() == 3 and reader.step == 3
    how("save")({"w": torch.ones(1) * 2}, 4)
    target = {"w": torch.zeros(1)}
    dcp.load(target, storage_reader=Reader("job", adopt=False))
    assert target["w"].item() == 2


@pytest.mark.parametrize("way", WAYS)
def test_objects_that_are_not_json_need_leave(way: str) -> None:
    state = {"w": torch.ones(2), "extra": {"color": Color()}}
    inner = raised(lambda: how(way)(state, 1))
    assert (
        isinstance(inner, holdfast.RefusedError)
        and "extra.color" in str(inner)
        and "allow_pickle" in str(inner)
    )
    how(way)(state, 2, allow_pickle=True)
    target = {"w": torch.zeros(2), "extra": {"color": None}}
    inner = raised(lambda: dcp.load(target, storage_reader=Reader("job")))
    assert isinstance(inner, holdfast.RefusedError) and "extra.color" in str(inner)
    dcp.load(target, storage_reader=Reader("job", allow_pickle=True))
    assert target["extra"]["color"] == Color() and target["w"].eq(1).all()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("tensor", "words"),
    [
        (torch.ones(2, dtype=torch.complex128), "complex128"),
        (torch.empty(2, device="meta"), "meta"),
        (torch.eye(2).to_sparse(), "sparse"),
    ],
)
def test_tensors_that_have_no_place_are_errors_with_their_path(
    way: str, tensor: torch.Tensor, words: str
) -> None:
    if words != "complex128" and way == "async with DCP's stager":
        way = "async"  # DCP's own stager refuses it before anybody is asked
    inner = raised(lambda: how(way)({"model": {"w": tensor}}, 1))
    assert (
        isinstance(inner, holdfast.HoldfastError)
        and "model.w" in str(inner)
        and words in str(inner)
    )


@pytest.mark.parametrize("way", WAYS)
def test_tensor_subclasses_are_errors_with_a_way_out(way: str) -> None:
    if way == "async with DCP's stager":
        way = "async"  # it loses the subclass
    state = {"model": {"w": TwoTensor(torch.ones(3), torch.zeros(3))}}
    inner = raised(lambda: how(way)(state, 1))
    assert isinstance(inner, holdfast.RefusedError)
    for words in (
        "model.w: ",
        "torch.testing._internal.two_tensor.TwoTensor",
        "no plain memory of its own",
        "holdfast.Checkpointer",
    ):
        assert words in str(inner)


class Doubles(DefaultSavePlanner):
    """Writes something else than what is in the state."""

    def transform_object(self, write_item, object):
        object = super().transform_object(write_item, object)
        return object * 2 if isinstance(object, torch.Tensor) else object


class Renames(DefaultSavePlanner):
    def set_up_planner(self, state_dict, storage_meta=None, is_coordinator=False):
        super().set_up_planner(
            {"x_" + key: value for key, value in state_dict.items()}, storage_meta, is_coordinator
        )


@pytest.mark.parametrize("planner", [Doubles, Renames])
def test_planners_that_write_something_else(planner) -> None:
    """What is in the slot by then is not what they want: that step is lost and said to be, never the state as it was before
    the planner. The next ones go the ordinary way."""
    state = {"w": torch.ones(1000), "n": 5}
    assert (
        how("save")
        and dcp.save(state, storage_writer=Writer("job", step=1), planner=planner()) is not None
    )
    inner = raised(
        lambda: dcp.async_save(
            state, storage_writer=Writer("job", step=2), planner=planner()
        ).result()
    )
    assert isinstance(inner, holdfast.RefusedError) and planner.__name__ in str(inner)
    dcp.async_save(state, storage_writer=Writer("job", step=3), planner=planner()).result()
    name = "x_w" if planner is Renames else "w"
    target = {name: torch.zeros(1000)}
    for step in (1, 3):
        dcp.load(
            target,
            storage_reader=Reader("job", step=step, adopt=False),
            planner=DefaultLoadPlanner(allow_partial_load=True),
        )
        assert target[name].eq(1.0 if planner is Renames else 2.0).all()


class Bytes(DefaultSavePlanner):
    """Makes bytes of objects in its own way."""

    def transform_object(self, write_item, object):
        return (
            io.BytesIO(b"own:" + repr(object).encode())
            if not isinstance(object, torch.Tensor)
            else object
        )


class OwnBytes(DefaultLoadPlanner):
    def load_bytes(self, read_item, value):
        self.original_state_dict[read_item.dest_index.fqn] = value.read()


def test_bytes_of_a_planners_own_making_need_leave() -> None:
    state = {"n": 5}
    inner = raised(lambda: dcp.save(state, storage_writer=Writer("job", step=1), planner=Bytes()))
    assert isinstance(inner, holdfast.RefusedError) and "n: Bytes" in str(inner)
    dcp.save(state, storage_writer=Writer("job", step=2, allow_pickle=True), planner=Bytes())
    target: dict[str, Any] = {"n": None}
    inner = raised(lambda: dcp.load(target, storage_reader=Reader("job"), planner=OwnBytes()))
    assert isinstance(inner, holdfast.RefusedError)
    dcp.load(target, storage_reader=Reader("job", allow_pickle=True), planner=OwnBytes())
    assert target["n"] == b"own:5"


def in_use(daemon: Daemon) -> list[str]:
    """Slots that are mapped in this process."""
    with open("/proc/self/maps", encoding="utf-8") as maps:
        return sorted({line.split()[-1] for line in maps if str(daemon.memory) in line})


def test_a_plan_that_fails_and_a_step_that_was_only_found_hold_no_slot(daemon: Daemon) -> None:
    how("save")({"w": torch.ones(1000)}, 1)
    _jobs._close_all()
    gc.collect()
    assert not in_use(daemon)
    reader = Reader("job", adopt=False)
    assert reader.find() == 1 and not in_use(daemon)
    failed = Reader("job", adopt=False)
    raised(functools.partial(dcp.load, {"nope": torch.zeros(1)}, storage_reader=failed))
    del failed
    gc.collect()
    assert not in_use(daemon)
    raised(lambda: dcp.load({"nope": torch.zeros(1)}, storage_reader=reader))
    target = {"w": torch.zeros(1000)}
    dcp.load(target, storage_reader=reader)
    assert target["w"].eq(1).all() and not in_use(daemon)


def test_what_is_loaded_is_the_step_whose_layout_was_planned() -> None:
    """Another one is saved while the load is being planned."""
    how("save")({"w": torch.full((1000,), 1.0)}, 1)

    class SavesMeanwhile(DefaultLoadPlanner):
        def create_local_plan(self):
            how("save")({"v": torch.zeros(3), "w": torch.full((1000,), 2.0)}, 2)
            return super().create_local_plan()

    target = {"w": torch.zeros(1000)}
    reader = Reader("job", adopt=False)
    dcp.load(target, storage_reader=reader, planner=SavesMeanwhile())
    assert reader.step == 1 and target["w"].eq(1).all()


def test_without_flattening() -> None:
    state = {"w": torch.ones(3), "extra": {"a": 1}}
    dcp.save(
        state,
        storage_writer=Writer("job", step=1),
        planner=DefaultSavePlanner(flatten_state_dict=False),
    )
    target = {"w": torch.zeros(3), "extra": None}
    dcp.load(
        target,
        storage_reader=Reader("job"),
        planner=DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False),
    )
    assert target["extra"] == {"a": 1} and target["w"].eq(1).all()


def test_cached_plans() -> None:
    for step in (1, 2, 3):
        planner = DefaultSavePlanner(enable_plan_caching=True)
        dcp.async_save(
            {"w": torch.full((3,), float(step))},
            storage_writer=Writer("job", step=step),
            planner=planner,
        ).result()
    target = {"w": torch.zeros(3)}
    dcp.load(target, storage_reader=Reader("job"))
    assert target["w"].eq(3).all()


class Fails(DefaultSavePlanner):
    def __init__(self, where: str) -> None:
        super().__init__()
        self.where = where

    def set_up_planner(self, state_dict, storage_meta=None, is_coordinator=False):
        if self.where == "set up":
            raise RuntimeError("boom")
        super().set_up_planner(state_dict, storage_meta, is_coordinator)

    def create_local_plan(self):
        if self.where == "local":
            raise RuntimeError("boom")
        return super().create_local_plan()

    def create_global_plan(self, plans):
        if self.where == "global":
            raise RuntimeError("boom")
        return super().create_global_plan(plans)

    def finish_plan(self, plan):
        if self.where == "finish":
            raise RuntimeError("boom")
        return super().finish_plan(plan)

    def resolve_data(self, item):
        if self.where == "resolve":
            raise RuntimeError("boom")
        return super().resolve_data(item)


def no_staged_save_is_left() -> None:
    for thread in threading.enumerate():
        if thread.name == "holdfast-staged":
            thread.join(60)
    assert not _held._live


@pytest.mark.parametrize("where", ["set up", "local", "global", "finish", "resolve"])
def test_what_fails_after_staging_gives_the_slot_back(where: str) -> None:
    state = {"w": torch.ones(1000)}
    errors = []
    for step in range(
        1, 8
    ):  # more than there are slots; the errors, and with them DCP's frames, are kept
        inner = raised(
            lambda: dcp.async_save(
                state, storage_writer=Writer("job", step=step), planner=Fails(where)
            ).result()
        )
        assert isinstance(inner, RuntimeError) and str(inner) == "boom"
        errors.append(inner)
        no_staged_save_is_left()
    how("async")(state, 9)
    reader = Reader("job")
    assert reader.find() == 9


def test_a_state_that_is_never_saved_gives_the_slot_back() -> None:
    for step in range(1, 8):
        Writer("job", step=step).stage({"w": torch.ones(1000)})
        gc.collect()
    writer = Writer("job", step=8)
    writer.stage({"w": torch.ones(1000)})
    writer.close()
    how("async")({"w": torch.ones(1000)}, 9)


class WaitsForTheGate(DefaultSavePlanner):
    """A save that goes on when the test says so."""

    def __init__(self, gate: threading.Event) -> None:
        super().__init__()
        self.gate = gate

    def create_local_plan(self):
        assert self.gate.wait(DEADLINE_S)
        return super().create_local_plan()


@pytest.fixture
def when_step_2_waits() -> Iterator[Callable[[Callable[[], None]], None]]:
    """Calls what it is given once step 2, or something else, has found that step 1 is not sealed."""
    calls: list[Callable[[], None]] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if " waits for step 1" in record.getMessage():
                for call in calls:
                    call()

    logger, handler = logging.getLogger("holdfast"), Handler()
    level = logger.level
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    yield calls.append
    logger.removeHandler(handler)
    logger.setLevel(level)


def step_loaded(step: int) -> float:
    target = {"w": torch.zeros(1000)}
    dcp.load(target, storage_reader=Reader("job", step=step, adopt=False))
    return target["w"][999].item()


def messages(caplog: pytest.LogCaptureFixture, level: int) -> list[str]:
    return [
        each.getMessage()
        for each in caplog.records
        if each.name == "holdfast" and each.levelno == level
    ]


def warnings_but_of_waits(caplog: pytest.LogCaptureFixture) -> list[str]:
    """On a slow machine a wait takes more than a second, and says so."""
    lines = messages(caplog, logging.WARNING)
    return [
        each for each in lines if " still waits for " not in each and " has waited " not in each
    ]


@pytest.mark.parametrize("way", WAYS)
def test_a_save_that_begins_before_the_last_one_is_done_waits_for_it(
    way: str, when_step_2_waits, caplog
) -> None:
    """DCP's own writers allow it."""
    gate = threading.Event()
    when_step_2_waits(gate.set)
    first = dcp.async_save(
        {"w": torch.full((1000,), 1.0)},
        storage_writer=Writer("job", step=1),
        planner=WaitsForTheGate(gate),
    )
    how(way)({"w": torch.full((1000,), 2.0)}, 2)
    gate.set()
    first.result()
    assert step_loaded(1) == 1.0 and step_loaded(2) == 2.0
    assert not warnings_but_of_waits(caplog)


def restores(ckpt: holdfast.Checkpointer) -> None:
    with pytest.raises(
        holdfast.InvalidArgumentError, match="was not saved by holdfast.Checkpointer"
    ):
        ckpt.restore({"w": torch.zeros(1000)})


CHECKPOINTERS = {
    "step 2": lambda ckpt: ckpt.save(2, {"w": torch.full((1000,), 2.0)}, wait="committed"),
    "a restore": restores,
    "prepare": lambda ckpt: ckpt.prepare({"w": torch.zeros(5000)}),
    "the end of the job in this process": lambda ckpt: ckpt.close(),
}


@pytest.mark.parametrize("what", CHECKPOINTERS)
def test_a_checkpointer_waits_for_the_async_save_that_is_under_way(
    what: str, when_step_2_waits, caplog
) -> None:
    ckpt = holdfast.Checkpointer("job")
    gate = threading.Event()
    when_step_2_waits(gate.set)
    first = dcp.async_save(
        {"w": torch.full((1000,), 1.0)},
        storage_writer=Writer("job", step=1),
        planner=WaitsForTheGate(gate),
    )
    CHECKPOINTERS[what](ckpt)
    told = gate.is_set()
    gate.set()
    first.result()
    assert told and step_loaded(1) == 1.0
    (waits,) = [each for each in messages(caplog, logging.INFO) if " waits for " in each]
    assert f"{what} waits for step 1" in waits
    assert not warnings_but_of_waits(caplog)
    if what == "step 2":
        assert step_loaded(2) == 2.0
    ckpt.close()


def test_a_job_that_is_closed_says_which_step_is_given_up(caplog) -> None:
    writer = Writer("job", step=1)
    writer.stage({"w": torch.ones(10)})
    shared = _jobs.open_job("job")
    assert shared is not None
    shared.close()
    (warning,) = warnings_but_of_waits(caplog)
    assert "step 1 was staged and is not sealed yet" in warning and "the end of the job" in warning


def test_a_save_that_has_waited_in_vain_says_which_step_it_gave_up(
    when_step_2_waits, caplog, monkeypatch
) -> None:
    now = [0.0]
    clock = types.SimpleNamespace(monotonic=lambda: now[0])
    monkeypatch.setattr(_held, "time", clock, raising=False)
    when_step_2_waits(lambda: now.append(now.pop() + 601.0))
    gate = threading.Event()
    first = dcp.async_save(
        {"w": torch.full((1000,), 1.0)},
        storage_writer=Writer("job", step=1),
        planner=WaitsForTheGate(gate),
    )
    how("async")({"w": torch.full((1000,), 2.0)}, 2)
    gate.set()
    inner = raised(first.result)
    assert isinstance(inner, holdfast.RefusedError) and "step 1" in str(inner), inner
    warnings = warnings_but_of_waits(caplog)
    assert len(warnings) == 1 and "job job: step 1" in warnings[0] and "step 2" in warnings[0]
    assert step_loaded(2) == 2.0


def test_ctrl_c_ends_the_wait_for_the_save_before(when_step_2_waits) -> None:
    main = threading.get_ident()

    def interrupt() -> None:
        signal.pthread_kill(main, signal.SIGINT)

    # By a thread: in the handler itself it would come before the wait.
    when_step_2_waits(lambda: threading.Thread(target=interrupt).start())
    gate = threading.Event()
    first = dcp.async_save(
        {"w": torch.full((1000,), 1.0)},
        storage_writer=Writer("job", step=1),
        planner=WaitsForTheGate(gate),
    )
    with pytest.raises(KeyboardInterrupt):
        how("async")({"w": torch.full((1000,), 2.0)}, 2)
    gate.set()
    first.result()
    assert step_loaded(1) == 1.0
    how("async")({"w": torch.full((1000,), 3.0)}, 3)


def test_a_state_that_nobody_can_save_any_more_is_not_waited_for(when_step_2_waits) -> None:
    """The Writer is gone before it, or something else has taken the slot."""
    written = Writer("job", step=0)
    written.stage({"w": torch.ones(1000)})
    shared = _jobs.open_job("job")
    assert shared is not None and written._staged is not None
    shared.core.reserve(_core.TensorList(), [], [("n", b"1", None)], 60.0)
    assert written._staged.held.save.done("sealed")
    waited = threading.Event()
    when_step_2_waits(waited.set)
    dropped = [Writer("job", step=1)]
    dropped[0].stage({"w": torch.ones(1000)})
    when_step_2_waits(dropped.clear)
    how("async")({"w": torch.full((1000,), 2.0)}, 2)
    assert waited.is_set() and step_loaded(2) == 2.0


def test_a_seal_that_did_not_get_its_turn_leaves_no_slot_held() -> None:
    class Late:
        """A save whose seal comes too late."""

        def __init__(self, save: _core.Save) -> None:
            self.save = save

        def seal(self, timeout: float) -> None:
            raise holdfast.DeadlineExceededError("something was still under way")

        def __getattr__(self, name: str) -> Any:
            return getattr(self.save, name)

    gate = threading.Event()
    writer = Writer("job", step=1)
    future = dcp.async_save(
        {"w": torch.ones(1000)}, storage_writer=writer, planner=WaitsForTheGate(gate)
    )
    assert writer._staged is not None
    save = writer._staged.held.save
    writer._staged.held.save = Late(save)  # type: ignore[assignment]
    gate.set()
    assert isinstance(raised(future.result), holdfast.DeadlineExceededError)
    with pytest.raises(holdfast.AbandonedError, match="given up"):
        save.wait("sealed", 0)


class SavesWith:
    """A job's core whose saves are wrapped."""

    def __init__(self, core: _core.Job, wrap: Callable[[_core.Save, list[int]], Any]) -> None:
        self._core = core
        self._wrap = wrap

    def save(
        self, step: int, tensors: _core.TensorList, addresses: list[int], *rest: Any, **options: Any
    ) -> Any:
        save = self._core.save(step, tensors, addresses, *rest, **options)
        return self._wrap(save, list(addresses))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._core, name)


class WaitEndsEarly:
    """A save while the daemon does not answer, whose wait is ended by the error."""

    def __init__(
        self, save: _core.Save, sources: list[int], daemon: Daemon, error: BaseException
    ) -> None:
        self.save = save
        self.sources = sources
        self.daemon = daemon
        self.error = error
        self.sources_when_discarded: list[int] = []

    def wait(self, stage: str, timeout: float) -> None:
        raise self.error

    def discard(self) -> None:
        self.sources_when_discarded = alive(self.sources)
        resume(self.daemon)
        self.save.discard()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.save, name)


def alive(addresses: list[int]) -> list[int]:
    """Those at which a tensor's memory begins."""
    begins = {
        each.data_ptr()
        for each in gc.get_objects()
        if type(each) is torch.Tensor and torch._C._has_storage(each)
    }
    return [each for each in addresses if each in begins]


def resume(daemon: Daemon) -> None:
    assert daemon.process is not None
    daemon.process.send_signal(signal.SIGCONT)


@pytest.mark.parametrize("way", ["save", "async", "async with DCP's stager"])
@pytest.mark.parametrize("error", [KeyboardInterrupt(), holdfast.DeadlineExceededError("not yet")])
def test_a_save_whose_wait_ends_early_reads_no_freed_memory_and_commits_nothing(
    daemon: Daemon, way: str, error: BaseException
) -> None:
    state = {f"w{i}": torch.ones(500, 500).t() for i in range(3)}  # copied to be dense
    how(way)(state, 0)
    shared = _jobs.open_job("job")
    assert shared is not None
    saves: list[WaitEndsEarly] = []

    def wrap(save: _core.Save, sources: list[int]) -> WaitEndsEarly:
        saves.append(WaitEndsEarly(save, sources, daemon, error))
        return saves[-1]

    core = shared.core
    shared.core = SavesWith(core, wrap)  # type: ignore[assignment]
    assert daemon.process is not None
    daemon.process.send_signal(signal.SIGSTOP)
    try:
        with pytest.raises((KeyboardInterrupt, CheckpointException)):
            how(way)(state, 1)
        gc.collect()
        junk = [torch.full((500, 500), 7.0) for _ in range(6)]
    finally:
        resume(daemon)
    shared.core = core
    (save,) = saves
    with pytest.raises(holdfast.AbandonedError):
        save.save.wait("sealed", 60)
    assert save.sources_when_discarded == save.sources
    del junk
    how(way)(state, 2)
    assert [each.step for each in holdfast.checkpoints("job")] == [2, 0]


def test_a_stager_takes_the_step_from_the_writer_of_the_call() -> None:
    stager = Stager("job")
    with pytest.raises(holdfast.InvalidArgumentError, match="no Writer of job 'job'"):
        stager.stage({"w": torch.ones(1)})
    Writer("job", step=1)  # made and dropped
    with pytest.raises(holdfast.InvalidArgumentError, match="no Writer"):
        stager.stage({"w": torch.ones(1)})
    used = Writer("job", step=2)
    dcp.save({"w": torch.ones(1)}, storage_writer=used)
    with pytest.raises(holdfast.InvalidArgumentError, match="no Writer"):
        stager.stage({"w": torch.ones(1)})
    other = Writer("other", step=3)
    with pytest.raises(holdfast.InvalidArgumentError, match="no Writer"):
        dcp.async_save({"w": torch.ones(1)}, storage_writer=other, async_stager=stager)


def test_two_writers_are_not_mixed_up() -> None:
    wrong, right = Writer("job", step=1), Writer("job", step=2)
    inner = raised(lambda: saved_by_stager({"w": torch.ones(3)}, wrong))
    assert isinstance(
        inner, holdfast.RefusedError
    ) and "step 2 by another Writer than this one of step 1" in str(inner)
    del right
    how("async with Stager")({"w": torch.ones(3)}, 3)


def test_a_writer_saves_once() -> None:
    writer = Writer("job", step=1)
    dcp.async_save({"w": torch.ones(3)}, storage_writer=writer).result()
    with pytest.raises(holdfast.InvalidArgumentError, match="make one for each save"):
        dcp.async_save({"w": torch.ones(3)}, storage_writer=writer)
    with pytest.raises(CheckpointException):
        dcp.save({"w": torch.ones(3)}, storage_writer=writer)


def test_arguments_that_make_no_sense() -> None:
    for step in (-1, 1.5, True, "3", np.float64(3), np.True_, np.int64(-1), 2**64, 10**30, [3]):
        with pytest.raises(holdfast.InvalidArgumentError, match="Writer: .*step.* from 0 to"):
            Writer("job", step=step)  # type: ignore[arg-type]
        with pytest.raises(holdfast.InvalidArgumentError, match="Reader: .*step.* from 0 to"):
            Reader("job", step=step)  # type: ignore[arg-type]
    for attempt in (-1, True, 2**64, "3"):
        with pytest.raises(holdfast.InvalidArgumentError, match="Reader: .*attempt.* from 0 to"):
            Reader("job", step=1, attempt=attempt)  # type: ignore[arg-type]
    with pytest.raises(holdfast.InvalidArgumentError, match="Writer: .*step"):
        Writer("job", step=None)  # type: ignore[arg-type]
    with pytest.raises(holdfast.InvalidArgumentError, match="snapshot"):
        Writer("job", step=1, wait="snapshot")
    with pytest.raises(holdfast.InvalidArgumentError, match="attempt"):
        Reader("job", attempt=3)
    with pytest.raises(holdfast.InvalidArgumentError, match="checkpoint_id"):
        dcp.save({}, checkpoint_id="/some/path", storage_writer=Writer("job", step=1))
    with pytest.raises(holdfast.InvalidArgumentError, match="checkpoint_id"):
        dcp.load({}, checkpoint_id="/some/path", storage_reader=Reader("job"))
    with pytest.raises(holdfast.RefusedError, match="another process"):
        pickle.dumps(Writer("job", step=1))


@pytest.mark.parametrize("way", WAYS)
def test_a_step_is_any_integer_in_range(way: str) -> None:
    """NumPy's, too; and the last one there is."""
    for step in (np.int64(3), np.uint8(4), torch.tensor(5), 2**64 - 1):
        state = {"w": torch.full((1000,), float(step))}
        how(way)(state, step)
        reader = Reader("job", step=step, adopt=False)
        target = {"w": torch.zeros(1000)}
        dcp.load(target, storage_reader=reader)
        assert type(reader.step) is int and reader.step == int(step)
        assert target["w"].equal(state["w"])


@pytest.mark.parametrize("kind", [Writer, Reader])
def test_a_policy_is_holdfasts_own(make_daemon, monkeypatch, kind: type) -> None:
    daemon = make_daemon("nvme: {dirs: [ROOT/nvme]}\n", inside=["nvme"])
    monkeypatch.setenv("HOLDFAST_SOCKET", str(daemon.socket))
    policy = holdfast.Policy(nvme_every_steps=2, nvme_keep_last=1)
    if kind is Reader:
        with pytest.raises(CheckpointException):  # nothing is there
            dcp.load({}, storage_reader=Reader("job", policy=policy, adopt=True))
    for step in (1, 2):
        dcp.save({"w": torch.ones(1)}, storage_writer=Writer("job", step=step, policy=policy))
    shared = _jobs.open_job("job")
    assert shared is not None and shared.policy == policy.to_core()
    assert Writer("job", step=3, policy=policy.to_core())._shared() is shared
    with pytest.raises(holdfast.InvalidArgumentError, match="Policy: nvme_keep_last=-1"):
        kind("job", step=1, policy=holdfast.Policy(nvme_keep_last=-1))


def test_waiting_for_more_than_sealed() -> None:
    writer = Writer("job", step=1, wait="committed")
    dcp.save({"w": torch.ones(1)}, storage_writer=writer)
    writer.wait("committed")
    with pytest.raises(holdfast.HoldfastError):  # there is no such tier here
        writer.wait("nvme")
    assert isinstance(
        raised(
            lambda: dcp.save(
                {"w": torch.ones(1)}, storage_writer=Writer("job", step=2, wait="remote")
            )
        ),
        holdfast.HoldfastError,
    )
    with pytest.raises(holdfast.RefusedError, match="has not been saved"):
        Writer("job", step=3).wait()


def test_a_daemon_killed_during_async_save(daemon: Daemon) -> None:
    state = {"w": torch.ones(100_000)}
    how("async")(state, 1)
    gate = threading.Event()

    class Waits(DefaultSavePlanner):
        def create_local_plan(self):
            assert gate.wait(60)
            return super().create_local_plan()

    future = dcp.async_save(state, storage_writer=Writer("job", step=2), planner=Waits())
    daemon.kill()
    gate.set()
    inner = raised(future.result)
    assert isinstance(inner, holdfast.UnavailableError), inner
    no_staged_save_is_left()
    # Nobody there at all: the loop goes on, and the future says so.
    inner = raised(dcp.async_save(state, storage_writer=Writer("job", step=3)).result)
    assert isinstance(inner, holdfast.UnavailableError), inner
    daemon.start()
    state["w"].fill_(4.0)
    how("async")(state, 4)
    target = {"w": torch.zeros(100_000)}
    dcp.load(target, storage_reader=Reader("job"))
    assert target["w"].eq(4.0).all()


def test_parts_of_a_tensor_and_other_types_are_loaded_through_a_verified_copy() -> None:
    w = torch.arange(24.0).reshape(4, 6)
    how("save")({"w": w}, 1)
    half = {"w": torch.zeros(4, 6, dtype=torch.float64)}
    dcp.load(half, storage_reader=Reader("job"))
    assert torch.equal(half["w"], w.double())
    column = {"w": torch.zeros(6, 4).t()}
    dcp.load(column, storage_reader=Reader("job"))
    assert torch.equal(column["w"], w)


def flip(daemon: Daemon, text: bytes) -> None:
    """A bit of memory goes wrong, in the data of the one step that is there."""
    _jobs._close_all()
    flipped = 0
    for slot in daemon.memory.glob("slot-??????"):
        image = slot.read_bytes()
        at = image.find(text, 4096)
        if at >= 0 and slot.with_name(slot.name + ".record").exists():
            with open(slot, "r+b") as file:
                file.seek(at)
                file.write(bytes([text[0] ^ 1]))
            flipped += 1
    assert flipped == 1


def test_a_flipped_bit_is_corrupt_and_never_silent(daemon: Daemon) -> None:
    # Values of a tensor, an object, and the names and paths of all.
    for case in range(3):
        name = f"job-{case}"
        w = torch.full((100_000,), 1.5)
        w[777] = 3.25 + case
        state: dict[str, Any] = {"model": {f"w{case}": w}}
        if case < 2:
            state["extra"] = {"name": f"something{case}"}
        text = [w[777:779].numpy().tobytes(), b"something1", b'"w2"]'][case]
        dcp.save(state, storage_writer=Writer(name, step=1))
        whole: dict[str, Any] = {}
        load = dcp.state_dict_loader._load_state_dict
        planner = _EmptyStateDictLoadPlanner()
        load(whole, storage_reader=Reader(name, adopt=False), planner=planner, no_dist=True)
        assert same(whole, state)
        flip(daemon, text)
        whole = {}
        inner = raised(
            lambda: load(
                whole, storage_reader=Reader(name, adopt=False), planner=planner, no_dist=True
            )
        )
        assert isinstance(inner, holdfast.CorruptError), (text, inner)


def test_a_damaged_copy_gives_way_to_the_next_tiers(make_daemon, monkeypatch) -> None:
    settings = "nvme: {dirs: [ROOT/nvme]}\npolicy: {nvme: {every_steps: 1}}\n"
    daemon = make_daemon(settings, inside=["nvme"])
    monkeypatch.setenv("HOLDFAST_SOCKET", str(daemon.socket))
    w = torch.arange(100_000.0)
    dcp.save({"w": w, "n": 5}, storage_writer=Writer("job", step=1, wait="nvme"))
    flip(daemon, w[777:779].numpy().tobytes())
    target = {"w": torch.zeros(100_000), "n": 0}
    dcp.load(target, storage_reader=Reader("job", adopt=False))
    assert torch.equal(target["w"], w) and target["n"] == 5


def test_ranks_that_found_different_steps_do_not_load_a_mix() -> None:
    reader = Reader("job", adopt=False)
    same_step = [LoadPlan([], storage_data=(1, 2)), LoadPlan([], storage_data=(1, 2))]
    assert [plan.items for plan in reader.prepare_global_plan(same_step)] == [[], []]
    with pytest.raises(holdfast.RefusedError, match="step 2 of attempt 1, step 3 of attempt 1"):
        reader.prepare_global_plan([*same_step, LoadPlan([], storage_data=(1, 3))])


def test_one_job_per_process_and_name() -> None:
    how("save")({"w": torch.ones(1)}, 1)
    shared = _jobs.open_job("job")
    how("async")({"w": torch.ones(1)}, 2)
    assert _jobs.open_job("job") is shared and _jobs.job_for("job") is shared
    with pytest.raises(holdfast.InvalidArgumentError, match="rank=0"):
        _jobs.job_for("job", rank=1, world_size=2)
    assert shared is not None
    shared.close()
    assert _jobs.open_job("job") is None


def test_locks_that_other_threads_held_at_a_fork_hold_up_no_child(daemon: Daemon) -> None:
    code = """
import os, signal, threading
import torch
import torch.distributed.checkpoint as dcp
import holdfast
from holdfast import _held, _jobs
from holdfast.dcp import Writer, _staging
writer = Writer("job", step=1)
staged = writer.stage({"w": torch.ones(10)})
shared = _jobs.open_job("job")
held, release = threading.Event(), threading.Event()

def hold():
    with shared.lock, _jobs._lock, _staging._announced_lock, _held._live_changed:
        held.set()
        release.wait()

thread = threading.Thread(target=hold)
thread.start()
held.wait()
child = os.fork()
if child == 0:
    signal.alarm(60)
    code = 1
    try:
        try:
            writer._staged.held.seal(10)
        except holdfast.ForkedError:
            code = 0
        assert _held.holder_of(staged["w"].data_ptr()) is None  # the parent's
        dcp.save({"w": torch.ones(1)}, storage_writer=Writer("own", step=1))
    except BaseException as error:
        print(repr(error), flush=True)
        code = 2
    os._exit(code)
release.set()
thread.join()
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
writer._staged.held.seal(60)
writer._staged.held.save.wait("committed", 60)
"""
    done = run_python(code)
    assert done.returncode == 0, done.stdout + done.stderr


def test_what_a_forked_worker_has_of_its_parents(daemon: Daemon) -> None:
    """As docs/python.md says it. (That no slot is mapped there: tests/client-lib/fork_test.cc.)"""
    code = """
import os, signal
import torch
import holdfast
from holdfast.dcp import Writer
with holdfast.Checkpointer("saved") as ckpt:
    ckpt.save(1, {"w": torch.ones(10)}, wait="committed", timeout=60)
saved = holdfast.open("saved")
read = saved.tensor("w")
writer = Writer("job", step=1)
cloned = writer.stage({"w": torch.ones(10)})["w"].clone()

def in_worker(work):
    child = os.fork()
    if child == 0:
        signal.alarm(60)
        code = 1
        try:
            code = 0 if work().eq(1).all() else 2
        except holdfast.ForkedError:
            code = 3
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

assert in_worker(lambda: read) == 0
assert in_worker(lambda: cloned) == 0
assert in_worker(lambda: saved.tensor("w")) == 3
assert in_worker(lambda: holdfast.open("saved").tensor("w")) == 0
assert saved.tensor("w").eq(1).all()
"""
    done = run_python(code)
    assert done.returncode == 0, done.stdout + done.stderr


def test_what_was_loaded_without_joining_is_what_the_first_save_goes_on_from(
    daemon: Daemon,
) -> None:
    """Reading takes no part in the job; a run that then saves descends from what it read."""
    for step in (1, 2, 3):
        how("save")({"w": torch.full((4,), float(step))}, step)
    _jobs._close_all()
    target = {"w": torch.zeros(4)}
    dcp.load(target, storage_reader=Reader("job", step=2))  # a rollback
    assert _jobs.open_job("job") is None and target["w"].eq(2).all()
    how("save")({"w": torch.full((4,), 30.0)}, 5)
    _jobs._close_all()
    reader = Reader("job", adopt=True)
    assert reader.find() == 5
    # Step 3 is of the branch that was left.
    assert isinstance(
        raised(lambda: dcp.load(target, storage_reader=Reader("job", step=3, adopt=True))),
        holdfast.NotFoundError,
    )


def test_reading_for_evaluation_discards_nothing(daemon: Daemon) -> None:
    for step in (1, 2, 3):
        how("save")({"w": torch.full((4,), float(step))}, step)
    _jobs._close_all()
    target = {"w": torch.zeros(4)}
    dcp.load(target, storage_reader=Reader("job", step=1))
    dcp.load(target, storage_reader=Reader("job", step=1, adopt=False))
    assert _jobs.open_job("job") is None
    _jobs._loaded.clear()  # another process, as it were
    assert Reader("job", adopt=True).find() == 3


def a_run(*steps: int) -> holdfast.Checkpointer:
    ckpt = holdfast.Checkpointer("job")
    for step in steps:
        ckpt.save(step, {"w": torch.full((4,), float(step))}, wait="committed")
    return ckpt


@pytest.mark.parametrize("step", [0, None])
def test_reading_in_the_middle_of_a_run_discards_nothing(step: int | None, caplog) -> None:
    """Evaluation of an older step beside the training, in the same process."""
    caplog.set_level(logging.INFO, "holdfast")
    ckpt = a_run(0, 1)
    attempt = ckpt.attempt
    target = {"w": torch.zeros(4)}
    reader = Reader("job", step=step)
    dcp.load(target, storage_reader=reader)
    assert reader.step == (1 if step is None else 0) and target["w"].eq(reader.step).all()
    assert ckpt.attempt == attempt
    level = logging.INFO if step is None else logging.WARNING
    assert [each for each in messages(caplog, level) if "adopt=True" in each]
    caplog.clear()
    ckpt.save(2, target, wait="committed")
    ckpt.close()
    holdfast.Checkpointer("job").close()  # a later one in this process joins again
    assert [(each.step, each.on_line) for each in holdfast.checkpoints("job")] == [
        (2, True),
        (1, True),
        (0, True),
    ]
    assert Reader("job", adopt=True).find() == 2  # nor did it remember what was only read
    assert not warnings_but_of_waits(caplog)


def test_going_back_in_the_middle_of_a_run_says_what_is_discarded(caplog) -> None:
    ckpt = a_run(0, 1, 2)
    attempt = ckpt.attempt
    target = {"w": torch.ones(4)}
    dcp.load(target, storage_reader=Reader("job", step=0, adopt=True))
    assert target["w"].eq(0).all() and ckpt.attempt == attempt + 1
    (warning,) = warnings_but_of_waits(caplog)
    assert "step 0 of attempt 1" in warning and "steps 1, 2 " in warning
    ckpt.save(1, target, wait="committed")
    ckpt.close()


def test_a_run_that_has_not_begun_goes_on_from_what_it_loads(caplog) -> None:
    a_run(0, 1, 2).close()
    ckpt = holdfast.Checkpointer("job")
    target = {"w": torch.zeros(4)}
    dcp.load(target, storage_reader=Reader("job"))
    ckpt.save(3, target, wait="committed")
    assert target["w"].eq(2).all() and not warnings_but_of_waits(caplog)
    ckpt.close()


def test_what_was_saved_last_is_what_is_loaded_next() -> None:
    """It is sealed when dcp.save returns; a load waits until it is committed."""
    for step in range(20):
        how("save")({"w": torch.full((4,), float(step))}, step)
        reader = Reader("job")
        dcp.load({"w": torch.zeros(4)}, storage_reader=reader)
        assert reader.step == step


def test_a_run_that_does_not_say_where_it_comes_from_is_refused() -> None:
    how("save")({"w": torch.ones(1)}, 1)
    _jobs._close_all()
    dcp.load({"w": torch.zeros(1)}, storage_reader=Reader("job", adopt=False))
    assert isinstance(raised(lambda: how("save")({"w": torch.ones(1)}, 2)), holdfast.RefusedError)


def test_a_holdfast_image_is_what_dcp_saved() -> None:
    """Names, types and shapes as any other save of Holdfast's has them."""
    state = a_state()
    how("async")(state, 1)
    view = _core.attach("job", rank=0)
    tensors = {tensor.name: tensor for tensor in view.tensors}
    assert tensors["model.0.weight"].dtype == "F32" and tensors["model.0.weight"].shape == (7, 5)
    assert tensors["model.2.weight"].dtype == "BF16" and tensors["model.2.weight"].offset is None
    objects = {name: (data, codec) for name, data, codec in view.objects}
    assert objects["step"] == (b"100", None)
    assert objects["extra.betas"] == (b'{"$tuple":[0.9,0.95]}', None)


def test_ordered_and_odd_containers() -> None:
    state = {
        "a": collections.OrderedDict([("z", torch.ones(1)), ("b", 2)]),
        "l": [torch.ones(1), [], [torch.zeros(2), 3]],
        7: torch.ones(2),
        "t": (1, [2, 3]),
    }
    how("async")(state, 1)
    whole: dict[str, Any] = {}
    dcp.state_dict_loader._load_state_dict(
        whole, storage_reader=Reader("job"), planner=_EmptyStateDictLoadPlanner(), no_dist=True
    )
    assert whole["t"] == (1, [2, 3]) and whole["7"].eq(1).all() and whole["l"][2][1] == 3
    del state[7]
    state["a"]["nothing"] = {}  # DCP knows of no empty dictionaries; they are no harm
    how("async")(state, 2)
    target = {
        "a": {"z": torch.zeros(1), "b": 0},
        "l": [torch.zeros(1), None, [torch.ones(2), 0]],
        "t": None,
    }
    dcp.load(target, storage_reader=Reader("job"))
    assert same(
        target,
        {
            "a": {"z": torch.ones(1), "b": 2},
            "l": [torch.ones(1), [], [torch.zeros(2), 3]],
            "t": (1, [2, 3]),
        },
    )


def test_a_step_of_the_checkpointer_is_loaded_by_dcp() -> None:
    model = a_model()
    tied = torch.arange(3.0)
    extra = {
        "lr": 0.1,
        "betas": (0.9, 0.95),
        "seen": [1, 2],
        "nested": {"a": {"b": None}},
        3: "three",
    }
    state = {
        "model": model,
        "extra": extra,
        "step": 7,
        "tensors": {"a": tied, "b": tied},
        "mixed": [torch.ones(2), 5],
    }
    ckpt = holdfast.Checkpointer("job")
    ckpt.save(7, state, wait="committed")
    target = {
        "model": zeros_like(dict(model.state_dict())),
        "extra": {"lr": None, "betas": None, "seen": None, "nested": {"a": {"b": 1}}, "3": None},
        "step": None,
        "tensors": {"a": torch.zeros(3), "b": torch.zeros(3)},
        "mixed": [torch.zeros(2), None],
    }
    dcp.load(target, storage_reader=Reader("job", adopt=False))
    assert same(target["model"], dict(model.state_dict()))
    assert (
        target["extra"] == {str(key): value for key, value in extra.items()} and target["step"] == 7
    )
    assert target["tensors"]["a"].equal(tied) and target["tensors"]["b"].equal(tied)
    assert target["mixed"][0].eq(1).all() and target["mixed"][1] == 5
    ckpt.close()


def test_a_step_of_dcp_is_restored_by_the_checkpointer_with_what_is_shared() -> None:
    """One job for both in one process; each goes on where the other was."""
    how("save")({"model": a_model().state_dict(), "n": 1}, 1)
    ckpt = holdfast.Checkpointer("job")
    assert ckpt._shared is _jobs.open_job("job")
    ckpt.save(2, {"model": a_model()}, wait="committed")
    how("async")({"model": a_model().state_dict(), "n": 3}, 3)
    reader = Reader("job", adopt=False)
    assert reader.find() == 3


@pytest.mark.parametrize("way", WAYS)
def test_an_empty_state_is_a_step_too(way: str) -> None:
    how(way)({}, 1)
    assert Reader("job", adopt=False).find() == 1
    dcp.load({}, storage_reader=Reader("job", adopt=False))
    with pytest.raises(CheckpointException):
        dcp.load({"w": torch.zeros(1)}, storage_reader=Reader("job", adopt=False))
    planner = DefaultSavePlanner(flatten_state_dict=False)
    dcp.save({}, storage_writer=Writer("job", step=2), planner=planner)
    assert Reader("job", adopt=False).find() == 2


@pytest.mark.parametrize("name", ["holdfast.state", "torch.distributed.checkpoint/planner_data"])
def test_names_that_are_holdfasts_own_are_refused(name: str) -> None:
    state: dict[str, Any] = {name: 3, "w": torch.ones(1)}
    with pytest.raises(CheckpointException, match="keeps this name for itself"):
        dcp.save(state, storage_writer=Writer("job", step=1))
    future = dcp.async_save(state, storage_writer=Writer("job", step=2))
    with pytest.raises(CheckpointException, match="keeps this name for itself"):
        future.result()
    dcp.save({"w": torch.ones(1)}, storage_writer=Writer("job", step=3))


def test_loading_under_another_default_device() -> None:
    saved = {"w": torch.arange(12.0).view(3, 4), "e": torch.empty(0)}
    dcp.async_save(saved, storage_writer=Writer("job", step=1)).result()
    target = {"w": torch.zeros(4, 3).t(), "e": torch.empty(0)}
    with torch.device("meta"):
        dcp.load(target, storage_reader=Reader("job"))
    assert torch.equal(target["w"], saved["w"])


def test_a_job_that_is_closed_in_the_middle_of_a_save_is_not_joined_anew(daemon: Daemon) -> None:
    state = {"w": torch.ones(4)}
    with holdfast.Checkpointer("job"):
        future = dcp.async_save(state, storage_writer=Writer("job", step=1))
    future.result()  # close has waited for it
    assert _jobs.open_job("job") is None
    with holdfast.Checkpointer("job"):
        assert Reader("job").find() == 1
        writer = Writer("job", step=2)
        dcp.save(state, storage_writer=writer)
    # As the thread of a save finds it that was closed under it.
    with pytest.raises(holdfast.RefusedError, match="closed"):
        writer._shared().core.save(3, _core.TensorList(), [], [])
    assert _jobs.open_job("job") is None


def test_a_load_does_not_wait_for_what_is_never_committed(daemon: Daemon) -> None:
    """Of two ranks one saved step 1; the other never will."""
    jobs = [_core.Job("job", rank=rank, world_size=2) for rank in (0, 1)]
    shared = types.SimpleNamespace(last_sealed=None)
    w = np.ones(3, np.float32)
    tensors = _core.TensorList()
    tensors.add("w", "F32", w.shape)
    save = jobs[0].save(1, tensors, [w.ctypes.data], [])
    save.wait("sealed", DEADLINE_S)
    shared.last_sealed = 1, save
    _jobs.SharedJob.wait_committed(shared, None, 100 * DEADLINE_S)  # type: ignore[arg-type]
    with pytest.raises(holdfast.DeadlineExceededError):
        save.wait("committed", 0)


def test_a_load_keeps_what_it_plans_to_read(daemon: Daemon) -> None:
    """Beside a run that saves on, into as few slots as there are."""
    dcp.save({"w": torch.full((4,), 1.0)}, storage_writer=Writer("job", step=1))

    class Meanwhile(DefaultLoadPlanner):
        def finish_plan(self, central_plan):
            for step in range(2, 8):
                w = torch.full((4,), float(step))
                dcp.save({"w": w}, storage_writer=Writer("job", step=step))
            return super().finish_plan(central_plan)

    target = {"w": torch.zeros(4)}
    reader = Reader("job", adopt=False)
    dcp.load(target, storage_reader=reader, planner=Meanwhile())
    assert reader.step == 1 and target["w"].eq(1).all()
    with pytest.raises(holdfast.NotFoundError):  # it was only kept
        Reader("job", step=1, adopt=False).find()


@pytest.mark.parametrize(
    ("kind", "arguments"),
    [
        (Writer, {"job": 5, "step": 1}),
        (Writer, {"job": "job", "step": 1, "timeout": "x"}),
        (Writer, {"job": "job", "step": 1, "wait_for_room": -1}),
        (Reader, {"job": ""}),
        (Reader, {"job": "job", "timeout": None}),
    ],
)
def test_arguments_are_refused_where_they_are_given(kind: Any, arguments: dict[str, Any]) -> None:
    with pytest.raises(holdfast.InvalidArgumentError, match=kind.__name__):
        kind(**arguments)
