"""Holdfast keeps the state of long training runs safe without making them wait."""

import importlib
from types import ModuleType

from holdfast._checkpointer import Checkpointer
from holdfast._core import __version__
from holdfast._errors import (
    Abandoned,
    Corrupt,
    DeadlineExceeded,
    Forked,
    HoldfastError,
    Internal,
    InvalidArgument,
    NoRoom,
    NotFound,
    NothingToRestore,
    Refused,
    Shed,
    StepLost,
    Superseded,
    Topology,
    Unavailable,
    Unreadable,
)
from holdfast._handle import Handle
from holdfast._part import Part
from holdfast._policy import Policy
from holdfast._progress import RestoreProgress
from holdfast._range import Range
from holdfast._reader import Checkpoint, checkpoints, open

__all__ = [
    "Abandoned",
    "Checkpoint",
    "Checkpointer",
    "Corrupt",
    "DeadlineExceeded",
    "Forked",
    "Handle",
    "HoldfastError",
    "Internal",
    "InvalidArgument",
    "NoRoom",
    "NotFound",
    "NothingToRestore",
    "Policy",
    "Part",
    "Range",
    "Refused",
    "RestoreProgress",
    "Shed",
    "StepLost",
    "Superseded",
    "Topology",
    "Unavailable",
    "Unreadable",
    "__version__",
    "checkpoints",
    "open",
]


def __getattr__(name: str) -> ModuleType:
    """holdfast.dcp and the like without an import of their own."""
    if name in ("dcp", "importing", "layouts"):
        return importlib.import_module(f"holdfast.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
