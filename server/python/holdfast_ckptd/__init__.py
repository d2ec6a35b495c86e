"""ckptd and ckptctl as a Python distribution. There is nothing to import: the programs are in `bin`.

$ ckptctl status        # a console script: the same as <site-packages>/holdfast_ckptd/bin/ckptctl status
"""

from __future__ import annotations

import os
import sys
from typing import NoReturn


def _become(name: str) -> NoReturn:
    path = os.path.join(os.path.dirname(os.path.abspath(__file__)), "bin", name)
    try:
        os.execv(path, [name, *sys.argv[1:]])
    except OSError as error:
        sys.exit(
            f"{name}: run '{path}': {error.strerror}. Install the wheel of holdfast-ckptd again: "
            "pip install --force-reinstall FILE"
        )


def ckptd() -> NoReturn:
    """The console script `ckptd`."""
    _become("ckptd")


def ckptctl() -> NoReturn:
    """The console script `ckptctl`."""
    _become("ckptctl")
