"""DCP through Holdfast over several ranks: what two saved is loaded by two, one and four."""

from __future__ import annotations

import multiprocessing
import os
import pathlib
import shutil
import signal
import sys
from collections.abc import Iterator

import dcp_rank
import pytest

from daemons import DEADLINE_S, Daemon

KINDS = ["plain", "ddp", "fsdp", "tp"]


class Ranks:
    """Processes that are forked from one that has imported torch: it takes seconds."""

    def __init__(self, folder: pathlib.Path) -> None:
        self.folder = folder
        self.runs = 0
        self.context = multiprocessing.get_context("forkserver")
        self.context.set_forkserver_preload(["dcp_rank"])

    def run(self, world: int, command: str, *kinds: str, dies: tuple[int, ...] = ()) -> None:
        self.runs += 1
        store = str(self.folder / f"store-{self.runs}")
        logs = [self.folder / f"log-{self.runs}-{rank}" for rank in range(world)]
        ranks = [
            self.context.Process(
                target=dcp_rank.run,
                args=(rank, world, command, str(self.folder), store, list(kinds), str(logs[rank])),
            )
            for rank in range(world)
        ]
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join(DEADLINE_S)
        codes = [rank.exitcode for rank in ranks]
        for rank in ranks:
            rank.kill()
            rank.join()
        expected = [-signal.SIGKILL if rank in dies else 0 for rank in range(world)]
        told = "\n".join(
            f"rank {i} of {world}: {log.read_text()[-6000:]}" for i, log in enumerate(logs)
        )
        assert codes == expected, told


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    """Steps of every kind, saved by two ranks both ways."""
    root, memory = tmp_path_factory.mktemp("dcp"), pathlib.Path(f"/dev/shm/hf-dcp-{os.getpid()}")
    daemon = Daemon(root, memory)
    daemon.start()
    environ = dict(os.environ)
    os.environ["PYTHONPATH"] = os.pathsep.join(
        sys.path
    )  # else it silently imports nothing (Python 3.11)
    os.environ["HOLDFAST_SOCKET"] = str(
        daemon.socket
    )  # the processes have it from here, through the one they are forked from
    try:
        ranks = Ranks(tmp_path_factory.mktemp("files"))
        ranks.run(2, "save", *KINDS)
        yield ranks
    finally:
        os.environ.clear()
        os.environ.update(environ)
        daemon.stop()
        shutil.rmtree(memory, ignore_errors=True)


@pytest.mark.parametrize("world", [2, 1, 4])
def test_bit_for_bit_what_dcps_files_give(saved: Ranks, world: int) -> None:
    saved.run(world, "load", *KINDS)


def test_what_fails_on_one_rank_is_told_to_all_and_leaves_nothing_behind(saved: Ranks) -> None:
    saved.run(2, "fail")


def test_a_rank_dies_in_async_save_and_the_run_goes_on(saved: Ranks) -> None:
    """Adoption: each restart's steps descend from what it loaded, by however many ranks."""
    saved.run(2, "begin", dies=(1,))
    saved.run(2, "go_on", "newest", "2", "4")
    saved.run(2, "go_on", "newest", "4", "5")
    saved.run(2, "go_on", "2", "2", "6")  # back to step 2: 4 and 5 are of a branch that was left
    saved.run(2, "go_on", "newest", "6", "7")
    saved.run(1, "go_on", "newest", "7", "8")
    saved.run(4, "go_on", "newest", "8", "9")
    saved.run(2, "go_on", "newest", "9", "10")


def test_sharded_tensors(saved: Ranks) -> None:
    saved.run(2, "sharded")


def test_fsdp_over_tensor_parallel(saved: Ranks) -> None:
    saved.run(4, "save", "2d")
    saved.run(4, "load", "2d")
    saved.run(2, "load", "2d")
