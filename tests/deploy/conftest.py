"""What the tests of deploy/ share."""

from __future__ import annotations

import pathlib
import shutil
import tempfile
from collections.abc import Iterator

import pytest


@pytest.fixture
def node() -> Iterator[pathlib.Path]:
    """A directory that stands for a node's root; its name is short, as a socket's path must be."""
    place = tempfile.mkdtemp(prefix="hf-node-", dir="/tmp")
    yield pathlib.Path(place)
    shutil.rmtree(place)
