"""What the tests on several nodes share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from .network import Network


@pytest.fixture
def network() -> Iterator[Network]:
    """A network without nodes; gone after the test, which, if it fails, shows the ends of all logs."""
    with Network() as one:
        yield one
        print(one.logs())
