"""Wall clocks that are off, by libfaketime: monotonic clocks stay true, as on a machine whose clock was set wrong.

node.run(["date", "+%s"], clock_offset_s=-300)     # five minutes ago
"""

from __future__ import annotations

import pathlib
import platform


def library() -> str:
    """The library that a program with threads wants."""
    machine = platform.machine()
    path = pathlib.Path(f"/usr/lib/{machine}-linux-gnu/faketime/libfaketimeMT.so.1")
    if not path.exists():
        raise FileNotFoundError(f"{path}: run scripts/setup test (package libfaketime)")
    return str(path)


def shifted(offset_s: float) -> dict[str, str]:
    """The environment of a program whose wall clock is `offset_s` ahead of the machine's (negative: behind)."""
    if offset_s == 0:
        return {}
    return {
        "LD_PRELOAD": library(),
        "FAKETIME": f"{offset_s:+.3f}s",
        "FAKETIME_DONT_FAKE_MONOTONIC": "1",
        "DONT_FAKE_MONOTONIC": "1",  # its name in other versions
    }
