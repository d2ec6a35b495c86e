"""Holdfast keeps the state of long training runs safe without making them wait."""

import sys

# `python -m holdfast` has the working directory before everything else in its path: files there, which may have been downloaded a
# moment ago, must not stand in for the modules that are imported from here on. (What PYTHONPATH names comes after it, and stays.)
if (
    sys.argv[:1] == ["-m"]
    and sys.orig_argv[-len(sys.argv)] in ("holdfast", "-mholdfast")
    and not sys.flags.isolated
    and not getattr(sys.flags, "safe_path", False)  # Python 3.11
):
    del sys.path[0]

import importlib
from types import ModuleType

from holdfast import _namesake
from holdfast._checkpointer import Checkpointer
from holdfast._core import __version__
from holdfast._errors import (
    AbandonedError,
    CorruptError,
    DeadlineExceededError,
    ForkedError,
    HoldfastError,
    InternalError,
    InvalidArgumentError,
    NoRoomError,
    NotFoundError,
    NothingToRestoreError,
    RefusedError,
    ShedError,
    StepLostError,
    SupersededError,
    TopologyError,
    UnavailableError,
    UnreadableError,
)
from holdfast._handle import Handle
from holdfast._part import Part
from holdfast._policy import Policy
from holdfast._progress import RestoreProgress
from holdfast._range import Range
from holdfast._reader import Checkpoint, checkpoints, open
from holdfast.layouts import merged

__all__ = [
    "AbandonedError",
    "Checkpoint",
    "Checkpointer",
    "CorruptError",
    "DeadlineExceededError",
    "ForkedError",
    "Handle",
    "HoldfastError",
    "InternalError",
    "InvalidArgumentError",
    "NoRoomError",
    "NotFoundError",
    "NothingToRestoreError",
    "Policy",
    "Part",
    "Range",
    "RefusedError",
    "RestoreProgress",
    "ShedError",
    "StepLostError",
    "SupersededError",
    "TopologyError",
    "UnavailableError",
    "UnreadableError",
    "__version__",
    "checkpoints",
    "merged",
    "open",
]


def __getattr__(name: str) -> ModuleType:
    """holdfast.dcp and the like without an import of their own."""
    if name in ("dcp", "importing", "layouts"):
        return importlib.import_module(f"holdfast.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


_namesake.warn_of_namesake()
