"""The build backend of `pip install ./client-lib/python`: scikit-build-core's, which is asked only
inside a checkout.

The extension module is built from the whole tree (base/, tiers/, recovery/, client-lib/),
by its CMakeLists.txt two folders above this package's. What is copied elsewhere, or unpacked from a
source archive of this folder alone, lacks it.
"""

from __future__ import annotations

import os
import sys
import sysconfig
from typing import Any

from scikit_build_core import build as _real


class NotInTheTree(RuntimeError):
    """The package is being built without the rest of its sources."""


class NoHeaders(RuntimeError):
    """The Python that builds the package cannot compile extension modules."""


def _check() -> None:
    tree = os.path.dirname(os.path.dirname(os.getcwd()))
    wanted = os.path.join(tree, "CMakeLists.txt")
    if not os.path.isfile(wanted) or not os.path.isdir(os.path.join(tree, "base")):
        raise NotInTheTree(
            f"build holdfast-ckpt in '{os.getcwd()}': '{wanted}' and the C++ sources beside it are "
            "missing: this folder is a "
            "part of Holdfast's tree and is built inside a checkout of it: pip install "
            "./client-lib/python there, or install "
            "a wheel (scripts/package client makes one)"
        )
    headers = os.path.join(sysconfig.get_path("include"), "Python.h")
    if not os.path.isfile(headers):
        raise NoHeaders(
            f"build holdfast-ckpt: {sys.executable} has no headers ('{headers}'). Install them "
            "(Debian: python3-dev), use another Python, or install a wheel's file: that needs none"
        )
    # ccache shares objects between checkouts, and with the other builds of this one.
    os.environ.setdefault("CCACHE_BASEDIR", tree)
    os.environ.setdefault("CCACHE_NOHASHDIR", "1")


def get_requires_for_build_wheel(config_settings: dict[str, Any] | None = None) -> list[str]:
    _check()
    return _real.get_requires_for_build_wheel(config_settings)


def prepare_metadata_for_build_wheel(
    metadata_directory: str, config_settings: dict[str, Any] | None = None
) -> str:
    _check()
    return _real.prepare_metadata_for_build_wheel(metadata_directory, config_settings)


def build_wheel(
    wheel_directory: str,
    config_settings: dict[str, Any] | None = None,
    metadata_directory: str | None = None,
) -> str:
    _check()
    return _real.build_wheel(wheel_directory, config_settings, metadata_directory)


def get_requires_for_build_sdist(config_settings: dict[str, Any] | None = None) -> list[str]:
    return []


def build_sdist(sdist_directory: str, config_settings: dict[str, Any] | None = None) -> str:
    raise NotInTheTree(
        "build a source archive of holdfast-ckpt: there is none of this folder alone, since the "
        "package is built from the whole "
        "tree: archive the tree (git archive), or make a wheel: scripts/package client"
    )
