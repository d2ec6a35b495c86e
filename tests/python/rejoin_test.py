"""A process that leaves its job and joins it again, in another process group (restarts within a process): nothing hangs, and
nothing is left behind."""

from __future__ import annotations

import gc
import os
import pathlib
import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from ranks import run_ranks
from torch.distributed.checkpoint.api import CheckpointException
from torch.testing._internal.distributed.fake_pg import FakeStore

import holdfast
import holdfast.dcp
from daemons import DEADLINE_S, Daemon
from holdfast import _jobs

RANKS = 3
ROUNDS = 20
EARLY = 5  # by then everything has been made that is made once
BIG = 4_000_000


class Gate:
    """All ranks wait for each other, without a process group."""

    def __init__(self, path: pathlib.Path, ranks: int) -> None:
        self._store, self._ranks, self._number = dist.FileStore(str(path), ranks), ranks, 0

    def wait(self) -> None:
        self._number += 1
        key = f"gate-{self._number}"
        if self._store.add(key, 1) == self._ranks:
            self._store.set(f"{key}-open", "")
        self._store.wait([f"{key}-open"])


def held(optim: torch.optim.Optimizer | None = None) -> dict[str, int]:
    """What this process has: file descriptors (with them sockets), mappings of slots, threads, hooks of an optimizer."""
    gc.collect()
    self = pathlib.Path("/proc/self")
    files = [each.split(maxsplit=5)[5:] for each in (self / "maps").read_text().splitlines()]
    return {
        "descriptors": len(list((self / "fd").iterdir())),
        # (Others come and go with malloc.)
        "mappings": sum(bool(path) and path[0].startswith(("/", "[anon:")) for path in files),
        "threads": len(list((self / "task").iterdir())),
        "threads of Python": threading.active_count(),
        "hooks": 0 if optim is None else len(optim._optimizer_step_pre_hooks),
    }


def no_launcher() -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        os.environ.pop(name, None)


def begin_group(path: pathlib.Path, rank: int, ranks: int) -> None:
    store = dist.FileStore(str(path), ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)


def made() -> dict[str, Any]:
    model = torch.nn.Linear(4, 4)
    return {"model": model, "optim": torch.optim.AdamW(model.parameters())}


def train(state: dict[str, Any]) -> None:
    state["optim"].zero_grad()
    state["model"](torch.ones(4)).sum().backward()
    state["optim"].step()


def went_on_from(ckpt: holdfast.Checkpointer, state: dict[str, Any]) -> int:
    """-1: from scratch."""
    ckpt.restore(state)
    return -1 if ckpt.last_restored is None else ckpt.last_restored.step


def test_rounds_with_other_numbers_of_ranks(daemon: Daemon, tmp_path: pathlib.Path) -> None:
    def work(rank: int) -> list[dict[str, int]]:
        no_launcher()
        gate = Gate(tmp_path / "gate", RANKS)
        torch.manual_seed(1)
        state = made()
        counts = []
        for number in range(ROUNDS):
            ranks = 1 + number % RANKS
            if rank < ranks:
                begin_group(tmp_path / f"round-{number}", rank, ranks)
                ckpt = holdfast.Checkpointer("job")
                assert (ckpt.rank, ckpt.world_size) == (rank, ranks)
                assert went_on_from(ckpt, state) == number - 1
                ckpt.prepare(state)
                train(state)
                ckpt.save(number, state, wait="committed", timeout=DEADLINE_S)
                assert ckpt.failed_saves == 0
                ckpt.close()
                dist.destroy_process_group()
                del ckpt
            gate.wait()
            counts.append(held(state["optim"]))
            gate.wait()
        return counts

    for counts in run_ranks(RANKS, work, group=False):
        # Rounds with as many ranks.
        late = EARLY + (ROUNDS - EARLY - 1) // RANKS * RANKS
        assert counts[late] == counts[EARLY]


def test_checkpointers_that_are_dropped_in_the_middle_of_a_save(
    daemon: Daemon, tmp_path: pathlib.Path
) -> None:
    """As by an exception in the loop: nobody closes anything, and the ranks change places."""

    def work(rank: int) -> list[dict[str, int]]:
        no_launcher()
        gate = Gate(tmp_path / "gate", 2)
        torch.manual_seed(1)
        state = {**made(), "big": torch.zeros(BIG)}
        counts = []
        steps = [-1]
        for number in range(8):
            ckpt = holdfast.Checkpointer("job", rank=(rank + number) % 2, world_size=2)
            steps.append(went_on_from(ckpt, state))
            train(state)
            ckpt.save(steps[-1] + 1, state, wait="committed", timeout=DEADLINE_S)
            assert ckpt.failed_saves == 0
            train(state)
            ckpt.save(steps[-1] + 2, state)
            del ckpt
            counts.append(held(state["optim"]))
            gate.wait()
        for before, after in zip(steps[1:], steps[2:], strict=False):
            assert after in (before + 1, before + 2)
        return counts

    for counts in run_ranks(2, work, group=False):
        assert counts[-1] == counts[3]


def test_close_after_a_failure(daemon: Daemon) -> None:
    """A daemon that is gone, a save and a restore that raise: close() returns, and the next Checkpointer goes on."""
    state = {**made(), "big": torch.zeros(BIG)}
    counts = []
    for number in range(8):
        with holdfast.Checkpointer("job", rank=0, world_size=1, on_error="raise") as ckpt:
            assert went_on_from(ckpt, state) == number - 1
            train(state)
            ckpt.save(number, state, wait="committed", timeout=DEADLINE_S)
            with pytest.raises(holdfast.NotFoundError):
                ckpt.restore(state, step=1000)
        ckpt = holdfast.Checkpointer("job", rank=0, world_size=1, on_error="raise")
        assert went_on_from(ckpt, state) == number
        train(state)
        daemon.kill()
        with pytest.raises(holdfast.UnavailableError):
            ckpt.save(1000, state, wait="sealed", timeout=0.5)
        ckpt.close()
        ckpt.close()
        daemon.start()
        del ckpt
        counts.append(held(state["optim"]))
    assert counts[-1] == counts[3]


def test_a_job_is_not_open_in_two_places_at_once(daemon: Daemon) -> None:
    one = holdfast.Checkpointer("job", rank=0, world_size=1)
    for options in ({"rank": 0, "world_size": 2}, {"rank": 1, "world_size": 2}):
        said = r"open in this process.*close\(\) its Checkpointers first"
        with pytest.raises(holdfast.InvalidArgumentError, match=said):
            holdfast.Checkpointer("job", **options)
        writer = holdfast.dcp.Writer("job", step=0, **options)
        with pytest.raises(CheckpointException, match=said):
            dcp.save({"w": torch.ones(1)}, storage_writer=writer)
    one.close()
    with holdfast.Checkpointer("job", rank=0, world_size=2) as two:
        assert (two.rank, two.world_size) == (0, 2)
        with pytest.raises(holdfast.InvalidArgumentError, match="world_size=2: it cannot be 1"):
            holdfast.Checkpointer("job", rank=0, world_size=1)


def test_the_place_in_a_new_process_group(daemon: Daemon) -> None:
    """Where rank and world size are the group's, an open job does not take part in another one."""

    def group(rank: int, ranks: int) -> None:
        dist.init_process_group("fake", rank=rank, world_size=ranks, store=FakeStore())

    group(0, 2)
    try:
        one = holdfast.Checkpointer("job")
        assert holdfast.Checkpointer("job").world_size == 2
        dist.destroy_process_group()
        group(1, 3)
        with pytest.raises(holdfast.InvalidArgumentError, match="with rank=0: it cannot be 1 as"):
            holdfast.Checkpointer("job")
        one.close()
        with holdfast.Checkpointer("job") as two:
            assert (two.rank, two.world_size) == (1, 3)
    finally:
        dist.destroy_process_group()


def test_dcp_joins_again_in_a_new_process_group(daemon: Daemon, tmp_path: pathlib.Path) -> None:
    """Writers and Readers have no close(): a job that only they used is left when it is joined in another place."""

    def work(process: int) -> list[dict[str, int]]:
        no_launcher()
        gate = Gate(tmp_path / "gate", 2)
        counts = []
        for number in range(12):
            # Two ranks, the same in other places, one alone.
            ranks = 1 if number % 3 == 2 else 2
            rank = 1 - process if number % 3 == 1 else process
            if rank < ranks:
                begin_group(tmp_path / f"round-{number}", rank, ranks)
                # Each second time the place is said as well.
                place = {"rank": rank, "world_size": ranks} if number // 3 % 2 else {}
                state = {"w": torch.full((100,), -1.0)}
                reader = holdfast.dcp.Reader("job", **place)
                assert reader.find() == (number - 1 if number else None)
                if number:
                    dcp.load(state, storage_reader=reader)
                    assert torch.equal(state["w"], torch.full((100,), number - 1.0))
                state["w"].fill_(number)
                writer = holdfast.dcp.Writer("job", step=number, wait="committed", **place)
                if number % 2:
                    dcp.save(state, storage_writer=writer)
                else:
                    dcp.async_save(state, storage_writer=writer).result()
                dist.destroy_process_group()
                del reader, writer
            else:  # it is not needed any more
                holdfast.Checkpointer("job").close()
            gate.wait()
            counts.append(held())
            gate.wait()
        return counts

    for counts in run_ranks(2, work, group=False):
        assert counts[-1] == counts[-7]


def test_a_reader_of_an_open_job_may_be_anybody(daemon: Daemon) -> None:
    with holdfast.Checkpointer("job", rank=0, world_size=1) as ckpt:
        ckpt.save(0, {"w": torch.ones(3)}, wait="committed", timeout=DEADLINE_S)
        state = {"w": torch.zeros(3)}
        reader = holdfast.dcp.Reader("job", adopt=False, rank=0, world_size=4)
        dcp.load(state, storage_reader=reader)
        assert torch.equal(state["w"], torch.ones(3)) and _jobs.open_job("job") is ckpt._shared
