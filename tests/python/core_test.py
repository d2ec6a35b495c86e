"""The extension module by itself: what holdfast/_core.pyi promises, on a real daemon, with NumPy alone."""

from __future__ import annotations

import os
import signal
import threading

import numpy as np
import pytest

import holdfast
from daemons import Daemon, run_python
from holdfast import _core


def tensors_of(arrays: dict[str, np.ndarray]) -> tuple[_core.TensorList, list[int]]:
    tensors = _core.TensorList()
    for name, array in arrays.items():
        tensors.add(name, "F32", array.shape)
    return tensors, [array.ctypes.data for array in arrays.values()]


def into(arrays: dict[str, np.ndarray]):
    """A `choose` that takes the arrays' names."""
    return lambda saved, objects: tensors_of(arrays)


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

    def choose(saved, objects):
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
    with pytest.raises(holdfast.NothingToRestore):
        job.restore(into({}))


def test_what_choose_raises_comes_out(daemon: Daemon) -> None:
    job = _core.Job("core", rank=0, world_size=1)
    tensors, addresses = tensors_of({"w": np.ones(3, np.float32)})
    job.save(1, tensors, addresses, []).wait("sealed", 60)

    def choose(saved, objects):
        raise KeyError("no such parameter")

    with pytest.raises(KeyError, match="no such parameter"):
        job.restore(choose)
    with pytest.raises(holdfast.InvalidArgument, match="must return"):
        job.restore(lambda saved, objects: 5)
    job.restore(into({}))  # and the job goes on


def test_boxes_and_ranges(daemon: Daemon) -> None:
    job = _core.Job("core", rank=0, world_size=1)
    rows, flat = np.ones((2, 4), np.float32), np.ones(5, np.float32)
    tensors = _core.TensorList()
    tensors.add("rows", "F32", (8, 4), offset=(3, 0), local_shape=(2, 4))
    tensors.add("flat", "F32", (8, 4), flat=(11, 5))
    assert len(tensors) == 2
    job.save(1, tensors, [rows.ctypes.data, flat.ctypes.data], []).wait("sealed", 60)
    seen = []
    job.restore(lambda saved, objects: (seen.extend(saved), (_core.TensorList(), []))[1])
    by_name = {t.name: t for t in seen}
    assert (by_name["rows"].offset, by_name["rows"].local_shape) == ((3, 0), (2, 4))
    assert by_name["flat"].flat == (11, 5)


def test_bad_arguments_are_refused_before_anything_happens(daemon: Daemon) -> None:
    job = _core.Job("core", rank=0, world_size=1)
    tensors = _core.TensorList()
    with pytest.raises(holdfast.InvalidArgument, match="no dtype 'F31'"):
        tensors.add("w", "F31", (2,))
    with pytest.raises(holdfast.InvalidArgument, match="go together"):
        tensors.add("w", "F32", (2,), offset=(0,))
    tensors.add("w", "F32", (2,))
    with pytest.raises(holdfast.InvalidArgument, match="0 addresses for 1 tensors"):
        job.save(1, tensors, [], [])
    with pytest.raises((TypeError, OverflowError)):
        job.save(1, tensors, ["here"], [])
    with pytest.raises(holdfast.InvalidArgument, match="no stage 'durable'"):
        job.save(1, tensors, [np.ones(2, np.float32).ctypes.data], []).wait("durable", 1)
    with pytest.raises(holdfast.InvalidArgument, match="no tier 'tape'"):
        _core.Job("core", rank=0, world_size=1, policy={"tape": {}})
    with pytest.raises(holdfast.InvalidArgument, match="no 'when'"):
        _core.Job("core", rank=0, world_size=1, policy={"nvme": {"when": 1}})


def test_a_failing_save_says_so_in_its_handle(daemon: Daemon) -> None:
    job = _core.Job("core", rank=0, world_size=1)
    w = np.ones(1000, np.float32)
    tensors, addresses = tensors_of({"w": w})
    job.save(5, tensors, addresses, []).wait("sealed", 60)
    again = job.save(5, tensors, addresses, [])
    with pytest.raises(holdfast.InvalidArgument, match="save step 5.*steps must grow"):
        again.wait("sealed", 60)
    assert job.failed_saves == 1


def test_a_held_save_is_sealed_or_given_up(daemon: Daemon) -> None:
    job = _core.Job("core", rank=0, world_size=1)
    w = np.arange(1000, dtype=np.float32)
    tensors, addresses = tensors_of({"w": w})
    save = job.save(1, tensors, addresses, [], hold=True)
    save.wait("snapshot", 60)
    (view,) = save.staged()
    w[:] = 0
    assert view.readonly
    np.testing.assert_array_equal(
        np.frombuffer(view, np.float32), np.arange(1000, dtype=np.float32)
    )
    save.seal(60)
    save.wait("committed", 60)
    given_up = job.save(2, tensors, addresses, [], hold=True)
    given_up.discard()
    with pytest.raises(holdfast.Abandoned):
        given_up.wait("sealed", 60)
    with pytest.raises(holdfast.Refused):
        save.staged()
    job.close()
    # Looked at after the job and the save are gone: still memory of this process.
    del save, given_up
    assert len(bytes(view)) == 4000


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
    with pytest.raises(holdfast.Refused, match="closed"):
        job.attempt


def test_ctrl_c_ends_every_wait(daemon: Daemon) -> None:
    # Rank 1 never comes: the session waits for it, and so does the step's commit.
    job = _core.Job("core", rank=0, world_size=2)
    tensors, addresses = tensors_of({"w": np.ones(10, np.float32)})

    def interrupted(call) -> None:
        timer = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT))
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            call()
        timer.join()

    interrupted(lambda: job.restore(into({}), timeout=3600))
    save = job.save(1, tensors, addresses, [])
    save.wait("sealed", 60)
    interrupted(lambda: save.wait("committed", 3600))
    interrupted(
        lambda: _core.Job("core", rank=0, world_size=2, open_timeout=3600)
    )  # the rank is taken
    job.save(2, tensors, addresses, []).wait("sealed", 60)  # and the job goes on


def test_other_threads_run_while_one_waits(daemon: Daemon) -> None:
    job = _core.Job("core", rank=0, world_size=2)
    tensors, addresses = tensors_of({"w": np.ones(10, np.float32)})
    save = job.save(1, tensors, addresses, [])
    save.wait("sealed", 60)
    began, ended = threading.Event(), threading.Event()

    def wait() -> None:
        began.set()
        with pytest.raises(holdfast.DeadlineExceeded):
            save.wait("committed", 1)
        ended.set()

    thread = threading.Thread(target=wait)
    thread.start()
    assert began.wait(60)
    turns = 0
    while not ended.is_set():  # would be one turn, or none, if the GIL were kept
        turns += 1
    thread.join()
    assert turns > 1000


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
    except holdfast.Forked:
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
