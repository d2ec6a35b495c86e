"""Several ranks of one job, as children forked from the test: they need not import torch again, which takes seconds.

    assert run_ranks(2, lambda rank: rank * 10) == [0, 10]

The test's own process must not have used autograd or a process group before: neither survives a fork.
"""

from __future__ import annotations

import errno
import os
import pickle
import random
import select
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from daemons import DEADLINE_S

# Below those that the kernel gives to connections, any of which might take it before the test does.
_PORTS = range(20_000, 32_000)


def free_port() -> int:
    while True:
        port = random.choice(_PORTS)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
                return port
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise


def run_ranks(
    count: int, work: Callable[[int], Any], *, group: bool = True, deadline_s: float = DEADLINE_S
) -> list[Any]:
    """What `work(rank)` returns on each of `count` ranks, in a gloo group if `group`, with torchrun's environment in any case.

    Fails with a rank's traceback when one raises, and ends them all.
    """
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="hf-ranks-") as folder:
        variables = {
            "WORLD_SIZE": str(count),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port()),
        }
        children = {}
        for rank in range(count):
            pid = os.fork()
            if pid == 0:
                _child(
                    rank,
                    {**variables, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                    folder,
                    work,
                    group,
                )
            children[pid] = rank
        try:
            _await(children, folder, deadline_s)
            return [_result(folder, rank) for rank in range(count)]
        finally:
            for pid in children:
                os.kill(pid, 9)
                os.waitpid(pid, 0)


def _child(
    rank: int, variables: dict[str, str], folder: str, work: Callable[[int], Any], group: bool
) -> None:
    code = 1
    try:
        os.environ.update(variables)
        if group:
            dist.init_process_group(
                "gloo",
                rank=rank,
                world_size=int(variables["WORLD_SIZE"]),
                store=dist.FileStore(f"{folder}/store", -1),
            )
        done: tuple[str, Any] = ("returned", work(rank))
        if dist.is_initialized():
            dist.destroy_process_group()
        code = 0
    except BaseException:
        done = ("raised", traceback.format_exc())
    with open(f"{folder}/{rank}.new", "wb") as file:
        pickle.dump(done, file)
    os.rename(f"{folder}/{rank}.new", f"{folder}/{rank}")
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _await(children: dict[int, int], folder: str, deadline_s: float) -> None:
    """Until all have ended well; raises when one has not."""
    ends = {os.pidfd_open(pid): pid for pid in children}
    deadline = time.monotonic() + deadline_s
    try:
        waiting = set(ends)
        while waiting:
            readable, _, _ = select.select(
                list(waiting), [], [], max(0.0, deadline - time.monotonic())
            )
            if not readable:
                raise AssertionError(
                    f"ranks {sorted(children[ends[fd]] for fd in waiting)} did not end within {deadline_s} s"
                )
            for fd in readable:
                waiting.discard(fd)
                status = os.waitid(os.P_PIDFD, fd, os.WEXITED | os.WNOWAIT)
                assert status is not None
                if status.si_status != 0:
                    rank = children[ends[fd]]
                    said = (
                        _result(folder, rank)
                        if os.path.exists(f"{folder}/{rank}")
                        else "it said nothing"
                    )
                    raise AssertionError(f"rank {rank} ended with {status.si_status}: {said}")
    finally:
        for fd in ends:
            os.close(fd)


def _result(folder: str, rank: int) -> Any:
    with open(f"{folder}/{rank}", "rb") as file:
        return pickle.load(file)[1]
