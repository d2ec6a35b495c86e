"""What the tests of the Python package share: a real ckptd for each test that wants one."""

from __future__ import annotations

import os
import pathlib
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

import pytest

from daemons import Daemon

if TYPE_CHECKING:
    from training import Torchrun


@pytest.fixture
def make_daemon() -> Iterator[Callable[..., Daemon]]:
    """make_daemon(settings="…ROOT/nvme…", ["nvme"]): a daemon that runs, with these folders under ROOT; all gone after the test."""
    made: list[Daemon] = []
    folders: list[str] = []

    def make(settings: str = "", inside: Iterable[str] = ()) -> Daemon:
        root = tempfile.mkdtemp(prefix="hf-py-")
        memory = tempfile.mkdtemp(prefix="hf-py-", dir="/dev/shm")
        folders.extend([root, memory])
        for name in inside:
            (pathlib.Path(root) / name).mkdir()
        daemon = Daemon(pathlib.Path(root), pathlib.Path(memory), settings.replace("ROOT", root))
        made.append(daemon)
        daemon.start()
        return daemon

    yield make
    for daemon in made:
        daemon.stop()
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)


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
