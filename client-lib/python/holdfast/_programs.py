"""The console scripts `ckptd` and `ckptctl`: the programs that the wheel carries.

$ ckptctl status        # the same as <site-packages>/holdfast/bin/ckptctl status
"""

from __future__ import annotations

import os
import sys
from typing import NoReturn


def carried(name: str) -> str:
    """Where the package's own copy of a program is, if it has one."""
    return os.path.join(os.path.dirname(os.path.abspath(__file__)), "bin", name)


def _become(name: str) -> NoReturn:
    path = carried(name)
    try:
        os.execv(path, [name, *sys.argv[1:]])
    except OSError as error:
        sys.exit(
            f"{name}: run '{path}': {error.strerror}: the package was installed without its "
            "programs. Install the wheel's file again (pip install --force-reinstall FILE)."
        )


def ckptd() -> NoReturn:
    _become("ckptd")


def ckptctl() -> NoReturn:
    _become("ckptctl")
