"""The built programs, for the tests of ckptctl as an operator has it."""

from __future__ import annotations

import contextlib
import pathlib
import subprocess
import sys
from collections.abc import Iterator

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT / "tests/python"))

from daemons import BIN, DEADLINE_S, Daemon, own_daemon, run_python  # noqa: E402

__all__ = [
    "BIN",
    "CKPTCTL",
    "DEADLINE_S",
    "Daemon",
    "ROOT",
    "ckptctl",
    "daemon_with_a_job",
    "own_daemon",
    "run_python",
]

CKPTCTL = BIN.resolve() / "ckptctl"

SAVE = """
import numpy as np
from holdfast import _core
job = _core.Job("llama-7b", rank=0, world_size=1)
w = np.ones(1000, np.float32)
tensors = _core.TensorList()
tensors.add("w", "F32", w.shape)
job.save(900, tensors, [w.ctypes.data], []).wait("committed", 60)
"""


def ckptctl(*arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [CKPTCTL, *arguments], input=stdin, capture_output=True, text=True, timeout=DEADLINE_S
    )


@contextlib.contextmanager
def daemon_with_a_job() -> Iterator[Daemon]:
    """node-a's, that has step 900 of the job llama-7b, of a process that has ended."""
    with own_daemon("node_name: node-a\n") as one:
        saved = run_python(SAVE, HOLDFAST_SOCKET=str(one.socket))
        assert saved.returncode == 0, saved.stderr
        yield one
