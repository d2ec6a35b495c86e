"""The built programs, for the tests of ckptctl as an operator has it."""

from __future__ import annotations

import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT / "tests/python"))

from daemons import BIN, DEADLINE_S, Daemon, run_python  # noqa: E402

__all__ = ["BIN", "CKPTCTL", "DEADLINE_S", "Daemon", "ROOT", "SAVE", "ckptctl", "run_python"]

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
