"""The interpreter ends while dcp.async_save is under way, or with a state that was staged and never saved."""

from __future__ import annotations

import re

import pytest

import holdfast
from daemons import Daemon, run_python

BEGIN = """
import logging, os, sys, threading, warnings
warnings.simplefilter("ignore")
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.logger import _dcp_logger
import holdfast
from holdfast.dcp import Reader, Writer
_dcp_logger.setLevel(logging.ERROR)
step = int(sys.argv[1])
state = {"w": torch.full((2_000_000,), float(step)), "t": torch.ones(300, 400).t(), "n": step}

class GoesOnAtTheEnd(DefaultSavePlanner):
    # Waits until the main thread has come to the end of the program, and waits for the others.
    def create_local_plan(self):
        assert at_the_end.wait(60)
        return super().create_local_plan()

at_the_end = threading.Event()
import concurrent.futures.thread
threading._register_atexit(at_the_end.set)

Reader("job", adopt=True).find()
"""
SAVE = """
dcp.async_save(state, storage_writer=Writer("job", step=step), planner=GoesOnAtTheEnd())
"""
STAGE = """
writer = Writer("job", step=step)
staged = writer.stage(state)
"""
ENDS = {"the end": ("", 0), "exit": ("sys.exit(3)", 3), "an error": ("raise KeyError(7)", 1)}


@pytest.mark.parametrize("end", ENDS)
def test_an_async_save_that_is_under_way_at_the_end_is_committed(daemon: Daemon, end: str) -> None:
    code, status = ENDS[end]
    for step in (1, 2):
        done = run_python(BEGIN + SAVE + code, str(step))
        assert done.returncode == status, done.stderr
        assert done.stdout == ""
        lines = done.stderr.splitlines()
        assert lines[-1:] == (["KeyError: 7"] if end == "an error" else []), done.stderr
        assert done.stderr.count("Traceback") == (end == "an error"), done.stderr
    assert [each.step for each in holdfast.checkpoints("job")] == [2, 1]
    with holdfast.open("job") as saved:
        assert saved.tensor("w").eq(2).all() and saved.value("n") == 2


def test_a_staged_state_that_is_never_saved_gives_its_slot_back_at_the_end(daemon: Daemon) -> None:
    """More often than there are slots."""
    for step, (code, status) in enumerate([*ENDS.values(), ("os._exit(4)", 4)], 1):
        done = run_python(BEGIN + STAGE + code, str(step))
        assert done.returncode == status, done.stderr
        if status == 4:
            assert done.stderr == ""
            continue
        told = [line for line in done.stderr.splitlines() if "job job" in line]
        assert len(told) == 1 and re.search(
            f"job job: step {step} was staged and is not sealed yet: given up", told[0]
        ), done.stderr
        assert done.stderr.count("Traceback") == (status == 1), done.stderr
    assert holdfast.checkpoints("job") == []
    done = run_python(BEGIN + SAVE, "9")
    assert done.returncode == 0 and done.stderr == "", done.stderr
    assert [each.step for each in holdfast.checkpoints("job")] == [9]
    assert len(list(daemon.memory.glob("slot-??????"))) <= 3
