"""What a process holds: descriptors, threads, memory."""

from __future__ import annotations

import contextlib
import os
import pathlib
import re
from collections import Counter
from typing import NamedTuple

from .process import Process


class Held(NamedTuple):
    descriptors: Counter[str]  # by what they lead to
    threads: int
    kib: int  # of its own memory


def held_by(process: Process) -> Held:
    proc = pathlib.Path(f"/proc/{process.outer_pid()}")
    status = (proc / "status").read_text()
    threads = int(re.findall(r"^Threads:\s+(\d+)", status, re.M)[0])
    anonymous = int(re.findall(r"^RssAnon:\s+(\d+)", status, re.M)[0])
    descriptors: Counter[str] = Counter()
    for one in (proc / "fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            descriptors[re.sub(r"[0-9a-f]{4,}|\d+", "N", os.readlink(one))] += 1
    return Held(descriptors, threads, anonymous)
