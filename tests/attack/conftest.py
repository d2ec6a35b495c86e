"""What one may say to the campaigns: --seed and --rounds."""

from __future__ import annotations

import random

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--seed", type=int, help="of a campaign; by default a new one each time")
    parser.addoption("--rounds", type=int, help="of a campaign")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "slow: not in every run (label slow of ctest)")


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """What this machine does not allow is no success: ctest says "Skipped"."""
    said = session.config.pluginmanager.get_plugin("terminalreporter").stats
    if exitstatus == 0 and said.get("skipped") and not said.get("passed"):
        session.exitstatus = 77


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int:
    given = request.config.getoption("--seed")
    return random.SystemRandom().randrange(1, 1 << 32) if given is None else int(given)


@pytest.fixture
def rounds(request: pytest.FixtureRequest) -> int | None:
    given = request.config.getoption("--rounds")
    return None if given is None else int(given)
