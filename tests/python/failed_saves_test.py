"""Saves that fail: what the first one of a process raises, who is told of the others, and how often."""

from __future__ import annotations

import logging
import pathlib
import types
from collections.abc import Callable

import pytest
import torch

import holdfast
from daemons import DEADLINE_S, Daemon, run_python
from holdfast import _torch_types
from holdfast._skipped import SkippedSaves

SMALL = {"w": torch.ones(1000)}
LARGE = {"w": torch.ones(8 << 20)}  # 32 MiB


@pytest.fixture
def small_daemon(make_daemon: Callable[..., Daemon], monkeypatch: pytest.MonkeyPatch) -> Daemon:
    one = make_daemon(memory_bytes="16MiB")
    monkeypatch.setenv("HOLDFAST_SOCKET", str(one.socket))
    return one


def saved_once(job: str) -> None:
    with holdfast.Checkpointer(job, rank=0, world_size=1) as ckpt:
        ckpt.save(0, SMALL, wait="committed", timeout=DEADLINE_S)


def test_a_state_that_can_never_fit_raises_in_the_first_save(small_daemon: Daemon) -> None:
    with holdfast.Checkpointer("job", rank=0, world_size=1) as ckpt:
        for step in range(2):  # until one is saved
            with pytest.raises(holdfast.NoRoomError, match=r"16 MiB \(memory.bytes_max\)"):
                ckpt.save(step, LARGE)
        assert ckpt.failed_saves == 2
        ckpt.save(2, SMALL, wait="sealed", timeout=DEADLINE_S)
        handle = ckpt.save(3, LARGE, wait="sealed", timeout=DEADLINE_S)
        assert isinstance(handle.error, holdfast.NoRoomError)


def test_a_process_that_has_restored_goes_on(small_daemon: Daemon) -> None:
    saved_once("job")
    with holdfast.Checkpointer("job", rank=0, world_size=1) as ckpt:
        assert ckpt.restore({"w": torch.zeros(1000)}) == 1
        handle = ckpt.save(1, LARGE)
        with pytest.raises(holdfast.NoRoomError):
            handle.wait("sealed", DEADLINE_S)
        ckpt.save(2, SMALL, wait="sealed", timeout=DEADLINE_S)
        assert ckpt.failed_saves == 1


def test_a_forgotten_restore_raises_in_the_first_save(daemon: Daemon) -> None:
    saved_once("job")
    with holdfast.Checkpointer("job", rank=0, world_size=1) as ckpt:
        with pytest.raises(holdfast.RefusedError, match="has not restored anything") as refused:
            ckpt.save(1, SMALL)
        assert refused.value.reason == "NOT_RESTORED"
        assert ckpt.restore({"w": torch.zeros(1000)}) == 1
        assert ckpt.save(1, SMALL, wait="sealed", timeout=DEADLINE_S).error is None


def test_a_memory_that_is_full_now_never_raises(small_daemon: Daemon) -> None:
    with holdfast.Checkpointer("hog", rank=0, world_size=1) as hog:
        for step in range(2):
            hog.save(step, {"w": torch.ones(900_000)}, wait="committed", timeout=DEADLINE_S)
        with holdfast.Checkpointer("late", rank=0, world_size=1) as late:
            handle = late.save(0, {"w": torch.ones(2_500_000)})
            with pytest.raises(holdfast.NoRoomError):
                handle.wait("sealed", DEADLINE_S)
            late.save(1, {"w": torch.ones(2_500_000)})


def test_a_daemon_that_is_away_never_raises(daemon: Daemon) -> None:
    with holdfast.Checkpointer("job", rank=0, world_size=1) as ckpt:
        daemon.kill()
        for step in range(2):
            assert isinstance(ckpt.save(step, SMALL).error, holdfast.UnavailableError)
        daemon.start()
        assert ckpt.save(2, SMALL, wait="sealed", timeout=DEADLINE_S).error is None


def test_a_gpu_without_a_driver_raises_in_the_first_save(
    daemon: Daemon, tmp_path: pathlib.Path
) -> None:
    """The tensor is in host memory and is said to be on a GPU; nothing gets so far as to read it."""
    (tmp_path / "libcuda.so.1").touch()  # in front of one that this machine may have
    code = """
import torch
import holdfast
from holdfast import _checkpointer, _torch_types
_torch_types.device_ordinal = lambda tensor, path: 0
_checkpointer.streams_of = lambda devices: []
ckpt = holdfast.Checkpointer("gpu", rank=0, world_size=1)
try:
    ckpt.save(0, {"w": torch.ones(10)})
except holdfast.InternalError as error:
    assert "the CUDA driver cannot be loaded" in str(error), error
    print("raised")
"""
    done = run_python(code, LD_LIBRARY_PATH=str(tmp_path))
    assert done.stdout == "raised\n", done.stderr


def test_an_amd_gpu_is_refused_and_libcuda_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = types.SimpleNamespace(device=torch.device("cuda", 1))
    assert _torch_types.device_ordinal(tensor, "model.w") == 1
    monkeypatch.setattr(torch.version, "hip", "6.4")
    with pytest.raises(holdfast.InvalidArgumentError, match=r"^model\.w: is on an AMD GPU"):
        _torch_types.device_ordinal(tensor, "model.w")
    assert _torch_types.device_ordinal(torch.ones(1), "model.w") == -1


def test_a_function_is_told_of_each_save_that_failed(
    daemon: Daemon, caplog: pytest.LogCaptureFixture
) -> None:
    told: list[tuple[int, holdfast.HoldfastError]] = []
    with holdfast.Checkpointer(
        "job", rank=0, world_size=1, on_error=lambda step, error: told.append((step, error))
    ) as ckpt:
        ckpt.save(5, SMALL, wait="sealed", timeout=DEADLINE_S)
        for step in (3, 4):  # steps must grow
            ckpt.save(step, SMALL, wait="sealed", timeout=DEADLINE_S)
        ckpt.save(6, SMALL, wait="remote", timeout=DEADLINE_S)  # there is none
    assert [(step, type(error)) for step, error in told] == [
        (3, holdfast.InvalidArgumentError),
        (4, holdfast.InvalidArgumentError),
        (6, holdfast.RefusedError),
    ]
    lines = [record.message for record in caplog.records if "was not saved" in record.message]
    assert len(lines) == 1 and "step 3 was not saved" in lines[0]


def test_on_error_is_one_of_three() -> None:
    with pytest.raises(holdfast.InvalidArgumentError, match="on_error='ignore'"):
        holdfast.Checkpointer("job", on_error="ignore")  # type: ignore[arg-type]


def test_each_cause_is_said_once() -> None:
    skipped = SkippedSaves()

    def line(step: int, text: str) -> object:
        return skipped.line(step, holdfast.InvalidArgumentError(text.format(step)), 1000.0 + step)

    said = {step for step in range(100) if line(step, "save step {}: extra: a Sampler") is not None}
    assert said == {0}
    assert line(100, "save step {}: w: complex128") == (
        logging.ERROR,
        "step 100 was not saved: save step 100: w: complex128",
    )
    assert skipped.line(101, None, 1101.0) is None
    assert line(102, "save step {}: extra: a Sampler") is None


def test_a_job_has_no_checkpoints_before_it_was_joined_and_after(daemon: Daemon) -> None:
    assert holdfast.checkpoints("job") == []
    with holdfast.Checkpointer("job", rank=0, world_size=1) as ckpt:
        assert holdfast.checkpoints("job") == []
        ckpt.save(3, SMALL, wait="committed", timeout=DEADLINE_S)
        assert [found.step for found in holdfast.checkpoints("job")] == [3]
    with pytest.raises(holdfast.NothingToRestoreError):
        holdfast.open("another")
