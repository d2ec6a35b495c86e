"""Parameters of a test of which some always run, and the whole only by `scripts/test --slow`.

@pytest.mark.parametrize("point", matrix("daemon.seal.received", whole=["daemon.begin.granted"]))
"""

from __future__ import annotations

from collections.abc import Iterable

import pytest


def matrix(*always: object, whole: Iterable[object]) -> list[object]:
    return [*always, *(pytest.param(one, marks=pytest.mark.whole) for one in whole)]
