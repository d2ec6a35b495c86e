"""Where the daemon's programs are, which another distribution installs.

    path = carried("ckptd")     # None, unless holdfast-ckptd is installed
    path = program("ckptctl")   # that one, or else the one on PATH

The distribution `holdfast-ckptd` has them in the folder `bin` of its package `holdfast_ckptd`.
"""

from __future__ import annotations

import importlib.util
import os
import shutil


def carried(name: str) -> str | None:
    """The path of a program of the distribution holdfast-ckptd, if that is installed."""
    package = importlib.util.find_spec("holdfast_ckptd")
    for folder in (package and package.submodule_search_locations) or ():
        path = os.path.join(folder, "bin", name)
        if os.access(path, os.X_OK):
            return path
    return None


def program(name: str) -> str | None:
    return carried(name) or shutil.which(name)
