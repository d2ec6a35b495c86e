"""What the tests on several nodes share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from .network import Network


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "whole: runs with `scripts/test --slow` only (matrix.py)")


@pytest.fixture
def network() -> Iterator[Network]:
    """A network without nodes; gone after the test, which, if it fails, shows the ends of all logs."""
    with Network() as one:
        yield one
        print(one.logs())
