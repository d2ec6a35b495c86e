"""What the tests of the Python package share: a real ckptd for each test that wants one."""

from __future__ import annotations

import contextlib
import os
import pathlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import pytest

from daemons import Daemon, own_daemon

if TYPE_CHECKING:
    from training import Torchrun


@pytest.fixture
def make_daemon() -> Iterator[Callable[..., Daemon]]:
    """make_daemon(settings="…ROOT/nvme…", ["nvme"]): a daemon that runs, with these folders under ROOT; all gone after the test."""
    with contextlib.ExitStack() as made:
        yield lambda *settings, **others: made.enter_context(own_daemon(*settings, **others))


@pytest.fixture
def daemon(make_daemon, monkeypatch: pytest.MonkeyPatch) -> Daemon:
    """One daemon with memory alone, which this process's clients find by HOLDFAST_SOCKET."""
    one = make_daemon()
    monkeypatch.setenv("HOLDFAST_SOCKET", str(one.socket))
    for name in list(os.environ):
        if name in ("RANK", "WORLD_SIZE", "LOCAL_RANK") or name.startswith(
            ("SLURM_", "OMPI_", "PMI_")
        ):
            monkeypatch.delenv(name)
    return one


@pytest.fixture
def start(tmp_path: pathlib.Path) -> Iterator[Callable[..., Torchrun]]:
    """start("job", steps=100, …): a Torchrun that ends with the test."""
    from training import Torchrun  # and with it torch, which not all tests have

    runs: list[Torchrun] = []

    def begin(job: str, name: str = "run", **options: object) -> Torchrun:
        runs.append(Torchrun(tmp_path / name, job, **options))  # type: ignore[arg-type]
        return runs[-1]

    yield begin
    for run in runs:
        run.close()
