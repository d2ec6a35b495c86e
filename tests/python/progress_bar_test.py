"""The bar of a restore that takes long, by the real rich and tqdm, on a terminal of the test's own."""

from __future__ import annotations

import fcntl
import os
import pathlib
import struct
import subprocess
import sys
import termios

import pytest

from daemons import DEADLINE_S

NEEDED = {"rich": ["rich", "pygments"], "tqdm": ["tqdm"]}
RESTORE = """
import logging
from holdfast import _progress
from holdfast._missing_ranks import MissingRanks
logging.basicConfig(level=logging.INFO)
_progress._BAR_AFTER_S = _progress._BETWEEN_LINES_S = 0
with _progress.Progress("run [1]", None, MissingRanks("run", "", 0, 1), bar=True) as progress:
    progress(True, 7, 1, 0, 4_000_000_000)
    progress(True, 7, 1, 3_000_000_000, 4_000_000_000)
print("done")
"""


@pytest.fixture(scope="module", params=sorted(NEEDED))
def package(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Where one of them is installed, and the other is not."""
    folder = str(tmp_path_factory.mktemp(request.param))
    subprocess.run(
        [
            *(sys.executable, "-m", "pip", "install", "--quiet", "--no-deps"),
            *("--target", folder, *NEEDED[request.param]),
        ],
        check=True,
        timeout=DEADLINE_S,
    )
    return folder


def restore(stderr: int, *packages: str) -> str:
    path = os.pathsep.join([os.environ["PYTHONPATH"], *packages])
    done = subprocess.run(
        [sys.executable, "-c", RESTORE],
        env={**os.environ, "PYTHONPATH": path, "TERM": "xterm"},
        stdout=subprocess.PIPE,
        stderr=stderr,
        text=True,
        timeout=DEADLINE_S,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "done\n"
    return done.stderr or ""


def shown_on_a_terminal(*packages: str) -> str:
    terminal, stderr = os.openpty()
    try:
        fcntl.ioctl(stderr, termios.TIOCSWINSZ, struct.pack("4H", 24, 100, 0, 0))
        restore(stderr, *packages)
        os.set_blocking(terminal, False)
        return os.read(terminal, 1 << 16).decode()
    finally:
        os.close(stderr)
        os.close(terminal)


def test_a_terminal_shows_a_bar(package: str) -> None:
    shown = shown_on_a_terminal(package)
    assert "job 'run [1]': restore step 7" in shown
    assert "3.0" in shown and "4.0" in shown  # of the bytes, in GB
    assert "INFO" not in shown


def test_a_file_gets_lines(package: str) -> None:
    lines = restore(subprocess.PIPE, package).splitlines()
    assert lines[-1] == (
        "INFO:holdfast:job 'run [1]': restore: loads step 7 of attempt 1: 3.0 of 4.0 GB"
    )


def test_a_terminal_without_either_package_gets_lines(tmp_path: pathlib.Path) -> None:
    for name in NEEDED:
        (tmp_path / f"{name}.py").write_text("raise ImportError\n")
    assert "loads step 7 of attempt 1: 3.0 of 4.0 GB" in shown_on_a_terminal(str(tmp_path))
