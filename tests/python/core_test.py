"""The extension module by itself: what holdfast/_core.pyi promises, on a real daemon, with NumPy alone."""

from __future__ import annotations

import _thread
import functools
import operator
import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import holdfast
from daemons import DEADLINE_S, Daemon, run_python
from holdfast import _core


def tensors_of(arrays: dict[str, np.ndarray]) -> tuple[_core.TensorList, list[int]]:
    tensors = _core.TensorList()
    for name, array in arrays.items():
        tensors.add(name, "F32", array.shape)
    return tensors, [array.ctypes.data for array in arrays.values()]


def into(arrays: dict[str, np.ndarray]):
    """A `choose` that takes the arrays' names."""
    return lambda saved, objects, of_all: tensors_of(arrays)


def test_what_was_saved_comes_back(daemon: Daemon) -> None:
    job = _core.Job("core", rank=0, world_size=1)
    assert job.attempt == 1
    w = np.arange(100_000, dtype=np.float32)
    tensors, addresses = tensors_of({"w": w})
    save = job.save(
        7, tensors, addresses, [("note", b'{"a": 1}', None), ("raw", b"\0\1", "test.1")]
    )
    save.wait("committed", 60)
    assert save.done("snapshot") and save.done("sealed")
    times = save.times()
    assert list(times) == ["snapshot", "sealed", "committed"]
    assert 0 <= times["snapshot"] <= times["sealed"]
    assert save.nbytes > w.nbytes

    back = np.zeros_like(w)
    seen = []

    def choose(saved, objects, of_all):
        seen.append((saved, objects))
        return tensors_of({"w": back})

    restored = job.restore(choose)
    assert (restored.step, restored.attempt, restored.source) == (7, 1, "memory")
    np.testing.assert_array_equal(back, w)
    saved, objects = seen[0]
    assert [(t.name, t.dtype, t.shape, t.offset, t.flat, t.nbytes) for t in saved] == [
        ("w", "F32", (100_000,), None, None, 400_000)
    ]
    assert objects == [("note", b'{"a": 1}', None), ("raw", b"\0\1", "test.1")]


def test_nothing_to_restore_is_an_exception_of_its_own(daemon: Daemon) -> None:
    job = _core.Job("core", rank=0, world_size=1)
    with pytest.raises(holdfast.NothingToRestoreError):
        job.restore(into({}))


def test_what_choose_raises_comes_out(daemon: Daemon) -> None:
    job = _core.Job("core", rank=0, world_size=1)
    tensors, addresses = tensors_of({"w": np.ones(3, np.float32)})
    job.save(1, tensors, addresses, []).wait("sealed", 60)

    def choose(saved, objects, of_all):
        raise KeyError("no such parameter")

    with pytest.raises(KeyError, match="no such parameter"):
        job.restore(choose)
    with pytest.raises(holdfast.InvalidArgumentError, match="must return"):
        job.restore(lambda saved, objects, of_all: 5)
    job.restore(into({}))  # and the job goes on


def test_what_choose_raises_is_told_without_its_frames(daemon: Daemon) -> None:
    job = _core.Job("core", rank=0, world_size=1)
    tensors, addresses = tensors_of({"w": np.ones(3, np.float32)})
    job.save(1, tensors, addresses, []).wait("sealed", 60)

    def choose(saved, objects, of_all):
        raise KeyError("no such parameter")

    with pytest.raises(KeyError):
        job.restore(choose)
    refused = job.save(2, tensors, addresses, [])
    with pytest.raises(holdfast.HoldfastError) as told:
        refused.wait("sealed", 60)
    assert "no such parameter" in str(told.value)
    assert "core_test.py" not in str(told.value) and "\n" not in str(told.value)


def test_boxes_and_ranges(daemon: Daemon) -> None:
    job = _core.Job("core", rank=0, world_size=1)
    rows, flat = np.ones((2, 4), np.float32), np.ones(5, np.float32)
    tensors = _core.TensorList()
    tensors.add("rows", "F32", (8, 4), offset=(3, 0), local_shape=(2, 4))
    tensors.add("flat", "F32", (8, 4), flat=(11, 5))
    assert len(tensors) == 2
    job.save(1, tensors, [rows.ctypes.data, flat.ctypes.data], []).wait("sealed", 60)
    seen = []
    job.restore(lambda saved, objects, of_all: (seen.extend(saved), (_core.TensorList(), []))[1])
    by_name = {t.name: t for t in seen}
    assert (by_name["rows"].offset, by_name["rows"].local_shape) == ((3, 0), (2, 4))
    assert by_name["flat"].flat == (11, 5)


def test_bad_arguments_are_refused_before_anything_happens(daemon: Daemon) -> None:
    job = _core.Job("core", rank=0, world_size=1)
    tensors = _core.TensorList()
    with pytest.raises(holdfast.InvalidArgumentError, match="no dtype 'F31'"):
        tensors.add("w", "F31", (2,))
    with pytest.raises(holdfast.InvalidArgumentError, match="go together"):
        tensors.add("w", "F32", (2,), offset=(0,))
    tensors.add("w", "F32", (2,))
    with pytest.raises(holdfast.InvalidArgumentError, match="0 addresses for 1 tensors"):
        job.save(1, tensors, [], [])
    with pytest.raises((TypeError, OverflowError)):
        job.save(1, tensors, ["here"], [])
    with pytest.raises(holdfast.InvalidArgumentError, match="no stage 'durable'"):
        job.save(1, tensors, [np.ones(2, np.float32).ctypes.data], []).wait("durable", 1)
    with pytest.raises(holdfast.InvalidArgumentError, match="no tier 'tape'"):
        _core.Job("core", rank=0, world_size=1, policy={"tape": {}})
    with pytest.raises(holdfast.InvalidArgumentError, match="no 'when'"):
        _core.Job("core", rank=0, world_size=1, policy={"nvme": {"when": 1}})


def test_a_failing_save_says_so_in_its_handle(daemon: Daemon) -> None:
    job = _core.Job("core", rank=0, world_size=1)
    w = np.ones(1000, np.float32)
    tensors, addresses = tensors_of({"w": w})
    job.save(5, tensors, addresses, []).wait("sealed", 60)
    again = job.save(5, tensors, addresses, [])
    with pytest.raises(holdfast.InvalidArgumentError, match="save step 5.*steps must grow"):
        again.wait("sealed", 60)
    assert job.failed_saves == 1


def test_a_held_save_is_sealed_or_given_up(daemon: Daemon) -> None:
    job = _core.Job("core", rank=0, world_size=1)
    w, v = np.arange(1000, dtype=np.float32), np.arange(7, dtype=np.float32)
    arrays = {"w": w, "empty": np.zeros((0, 3), np.float32), "v": v}
    tensors, addresses = tensors_of(arrays)
    save = job.save(1, tensors, addresses, [], hold=True)
    save.wait("snapshot", 60)
    view, offsets, sizes = save.staged()
    expected = [array.tobytes() for array in arrays.values()]
    w[:], v[:] = 0, 0
    assert view.readonly and sizes == [4000, 0, 28]
    assert [bytes(view[at : at + size]) for at, size in zip(offsets, sizes)] == expected
    assert view.nbytes == max(at + size for at, size in zip(offsets, sizes)) and min(offsets) == 0
    save.seal(60)
    save.wait("committed", 60)
    given_up = job.save(2, tensors, addresses, [], hold=True)
    given_up.discard()
    with pytest.raises(holdfast.AbandonedError):
        given_up.wait("sealed", 60)
    with pytest.raises(holdfast.RefusedError):
        save.staged()
    job.close()
    # Looked at after the job and the save are gone: still memory of this process.
    del save, given_up
    assert len(bytes(view)) == view.nbytes


def test_a_held_save_of_nothing(daemon: Daemon) -> None:
    job = _core.Job("core", rank=0, world_size=1)
    for step, arrays in enumerate([{}, {"empty": np.zeros((0, 3), np.float32)}]):
        tensors, addresses = tensors_of(arrays)
        save = job.save(step, tensors, addresses, [("n", b"1", None)], hold=True)
        save.wait("snapshot", 60)
        view, offsets, sizes = save.staged()
        assert (view.nbytes, offsets, sizes) == (0, [0] * len(arrays), [0] * len(arrays))
        save.seal(60)


def test_copy_first_may_change_at_once(daemon: Daemon) -> None:
    job = _core.Job("core", rank=0, world_size=1)
    for size in (1000, 6_000_000):  # set aside; into the slot first
        w = np.arange(size, dtype=np.float32)
        tensors, addresses = tensors_of({"w": w})
        save = job.save(size, tensors, addresses, [], copy_first=[0])
        w[:] = -1
        save.wait("committed", 60)
        back = np.zeros_like(w)
        job.restore(into({"w": back}), step=size)
        np.testing.assert_array_equal(back, np.arange(size, dtype=np.float32))


def test_a_closed_job_refuses(daemon: Daemon) -> None:
    job = _core.Job("core", rank=0, world_size=1)
    job.close()
    job.close()
    with pytest.raises(holdfast.RefusedError, match="closed"):
        job.attempt


WAIT_S = DEADLINE_S


class World:
    """What the waits below start from. `stop` SIGSTOPs the daemon: it takes connections and requests, and answers none."""

    def __init__(self, daemon: Daemon) -> None:
        self.daemon = daemon
        self.big = np.ones(6_000_000, np.float32)  # more than is set aside
        self.kept: list[Any] = []

    def job(self, world_size: int = 1) -> _core.Job:
        job = _core.Job("core", rank=0, world_size=world_size, call_timeout=WAIT_S)
        self.kept.append(job)
        return job

    def saved(self) -> _core.Job:
        job = self.job()
        self.save(job, 1).wait("committed", 60)
        return job

    def save(self, job: _core.Job, step: int, **options: Any) -> _core.Save:
        """One that waits for a slot waits for a daemon that hangs, too."""
        tensors, addresses = tensors_of({"w": self.big})
        return job.save(step, tensors, addresses, [], wait_for_room=WAIT_S, **options)

    def held(self) -> _core.Save:
        save = self.save(self.job(), 1, hold=True)
        save.wait("snapshot", 60)
        return save

    def views(self, count: int = 1) -> list[_core.View]:
        self.saved()
        return [_core.attach("core") for _ in range(count)]

    def stop(self) -> None:
        assert self.daemon.process is not None
        self.daemon.process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        assert self.daemon.process is not None
        self.daemon.process.send_signal(signal.SIGCONT)


# Each call that waits for somebody: what comes before, and the call, which would take WAIT_S.
Wait = Callable[[World], Callable[[], object]]
WAITS: dict[str, Wait] = {}


def wait(case: Wait) -> Wait:
    WAITS[case.__name__] = case
    return case


@wait
def opening_a_job(world: World) -> Callable[[], object]:
    world.stop()
    return lambda: _core.Job("core", rank=0, world_size=1, open_timeout=WAIT_S)


@wait
def a_place_that_is_taken(world: World) -> Callable[[], object]:
    world.job(world_size=2)
    return lambda: _core.Job("core", rank=0, world_size=2, open_timeout=WAIT_S)


@wait
def reserving(world: World) -> Callable[[], object]:
    job = world.job()
    tensors, addresses = tensors_of({"w": world.big})
    world.stop()
    return lambda: job.reserve(tensors, addresses, [], WAIT_S)


@wait
def a_snapshot(world: World) -> Callable[[], object]:
    job = world.job()
    world.stop()
    save = world.save(job, 1)
    return lambda: save.wait("snapshot", WAIT_S)


@wait
def the_seal_of_a_save(world: World) -> Callable[[], object]:
    job = world.job()
    world.stop()
    save = world.save(job, 1)
    return lambda: save.wait("sealed", WAIT_S)


@wait
def a_commit(world: World) -> Callable[[], object]:
    save = world.save(world.job(world_size=2), 1)  # rank 1 never comes
    save.wait("sealed", 60)
    return lambda: save.wait("committed", WAIT_S)


@wait
def a_commit_that_nobody_tells(world: World) -> Callable[[], object]:
    save = world.save(world.job(), 1)
    save.wait("sealed", 60)
    world.stop()
    return lambda: save.wait("committed", WAIT_S)


@wait
def the_first_tensors(world: World) -> Callable[[], object]:
    job = world.job()
    world.stop()
    save = world.save(job, 1, copy_first=[0], wait_first=False)
    return lambda: save.wait_first(WAIT_S)


@wait
def a_save_with_first_tensors(world: World) -> Callable[[], object]:
    job = world.job()
    world.stop()
    return lambda: world.save(job, 1, copy_first=[0])


@wait
def a_save_behind_another(world: World) -> Callable[[], object]:
    job = world.job()
    world.stop()
    world.kept.append(world.save(job, 1))
    return lambda: world.save(job, 2)


@wait
def sealing_a_held_save(world: World) -> Callable[[], object]:
    save = world.held()
    world.stop()
    return lambda: save.seal(WAIT_S)


@wait
def sealing_what_is_not_copied(world: World) -> Callable[[], object]:
    job = world.job()
    world.stop()
    save = world.save(job, 1, hold=True)
    return lambda: save.seal(WAIT_S)


def restoring(world: World) -> Callable[[], object]:
    job = world.saved()
    world.stop()
    return lambda: job.restore(into({}), timeout=WAIT_S)


@wait
def a_session_without_the_others(world: World) -> Callable[[], object]:
    job = world.job(world_size=2)
    return lambda: job.restore(into({}), timeout=WAIT_S)


@wait
def adopting(world: World) -> Callable[[], object]:
    job = world.saved()
    world.stop()
    return lambda: job.adopt(timeout=WAIT_S)


@wait
def attaching(world: World) -> Callable[[], object]:
    world.stop()
    return lambda: _core.attach("core", timeout=WAIT_S)


@wait
def opening_a_checkpoint(world: World) -> Callable[[], object]:
    world.stop()
    return lambda: holdfast.open("core", timeout=WAIT_S)


@wait
def listing(world: World) -> Callable[[], object]:
    world.stop()
    return lambda: holdfast.checkpoints("core", timeout=WAIT_S)


@wait
def closing_a_job_that_saves(world: World) -> Callable[[], object]:
    job = world.job()
    world.stop()
    world.kept.append(world.save(job, 1))
    return job.close


@wait
def closing_views(world: World) -> Callable[[], object]:
    views = world.views(int(WAIT_S))  # each of them waits a second for the daemon to hear of it
    world.stop()
    return views.clear


@pytest.mark.parametrize("case", WAITS.values(), ids=WAITS)
def test_ctrl_c_ends_every_wait_and_other_threads_run_in_it(daemon: Daemon, case: Wait) -> None:
    world = World(daemon)
    turns = 0

    def interrupt() -> None:  # as long as the call keeps the GIL, not a line of this runs
        nonlocal turns
        until = time.monotonic() + 0.2
        while time.monotonic() < until:
            turns += 1
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    try:
        call = case(world)
        began = time.monotonic()
        thread.start()
        with pytest.raises(KeyboardInterrupt):
            call()
            for _ in range(1000):  # what a destructor leaves to be raised
                pass
        assert time.monotonic() - began < WAIT_S / 2
        assert turns > 1000
    finally:
        thread.join()
        world.go_on()


def test_an_interrupted_seal_goes_on(daemon: Daemon) -> None:
    world = World(daemon)
    save = world.held()
    world.stop()
    timer = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            save.seal(WAIT_S)
    finally:
        timer.join()
        world.go_on()
    save.discard()  # comes too late
    save.wait("committed", 60)


def test_what_is_discarded_waits_for_no_slot(daemon: Daemon) -> None:
    world = World(daemon)
    job = world.job()
    world.stop()
    try:
        save = world.save(job, 1, hold=True)
        began = time.monotonic()
        save.discard()
        assert time.monotonic() - began < WAIT_S / 2
        with pytest.raises(holdfast.AbandonedError):
            save.wait("sealed", 60)
    finally:
        world.go_on()
    world.save(job, 2).wait("committed", 60)


def in_one_call(*calls: Callable[[], object]) -> None:
    """One after the other, without a moment in which Python itself would look for signals or give the GIL away."""
    list(map(operator.call, calls))


# Calls that copy or read, once: a signal that came before is seen by the call itself.
COPIES: dict[str, Wait] = {}


def copy(case: Wait) -> Wait:
    COPIES[case.__name__] = case
    return case


@copy
def reading(world: World) -> Callable[[], object]:
    (view,) = world.views()
    to = np.zeros_like(world.big)
    read = functools.partial(view.read, 0, to.ctypes.data)
    world.kept += [view, to]
    return read


@copy
def verifying(world: World) -> Callable[[], object]:
    (view,) = world.views()
    return view.verify


@copy
def restoring_bytes(world: World) -> Callable[[], object]:
    job = world.saved()
    return functools.partial(job.restore, into({"w": np.zeros_like(world.big)}))


@pytest.mark.parametrize("case", COPIES.values(), ids=COPIES)
def test_ctrl_c_ends_what_copies(daemon: Daemon, case: Wait) -> None:
    world = World(daemon)
    call = case(world)
    done: list[int] = []
    with pytest.raises(KeyboardInterrupt):
        in_one_call(_thread.interrupt_main, call, functools.partial(done.append, 1))
    assert not done
    call()  # and it can be done again


@pytest.mark.parametrize("case", COPIES.values(), ids=COPIES)
def test_other_threads_run_while_one_copies(daemon: Daemon, case: Wait) -> None:
    world = World(daemon)
    call = case(world)
    until = time.monotonic() + DEADLINE_S
    turns = 0
    while turns == 0:  # the other thread may be slow to wake
        assert time.monotonic() < until
        go, over = threading.Lock(), threading.Lock()
        go.acquire()
        over.acquire()

        def count(go: Any = go, over: Any = over) -> None:
            nonlocal turns
            with go:
                while over.locked():
                    turns += 1

        thread = threading.Thread(target=count)
        thread.start()
        in_one_call(go.release, call, over.release)
        thread.join()


def test_a_forked_child_has_no_part_in_the_job(daemon: Daemon) -> None:
    code = """
import os, sys
import numpy as np
import holdfast
from holdfast import _core
job = _core.Job("core", rank=0, world_size=1)
w = np.ones(1000, np.float32)
tensors = _core.TensorList()
tensors.add("w", "F32", w.shape)
save = job.save(1, tensors, [w.ctypes.data], [])
child = os.fork()
if child == 0:
    try:
        job.save(2, tensors, [w.ctypes.data], []).wait("sealed", 5)
    except holdfast.ForkedError:
        sys.exit(0)     # and the destructors run
    sys.exit(1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
save.wait("committed", 60)
job.save(3, tensors, [w.ctypes.data], []).wait("committed", 60)
"""
    done = run_python(code)
    assert done.returncode == 0, done.stderr


def test_the_interpreter_ends_in_the_middle_of_a_save(daemon: Daemon) -> None:
    code = """
import numpy as np
from holdfast import _core
job = _core.Job("core", rank=0, world_size=1)
w = np.ones(20_000_000, np.float32)
tensors = _core.TensorList()
tensors.add("w", "F32", w.shape)
save = job.save(1, tensors, [w.ctypes.data], [], hold=%r)
"""
    for hold in (False, True):
        done = run_python(code % hold)
        assert done.returncode == 0, done.stderr
        assert done.stderr == ""
