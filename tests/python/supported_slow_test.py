"""All of the table of docs/python.md, in all dtypes: the page has what a run prints. The page is written again by

HOLDFAST_TEST_WRITE=1 tests/python/run build/test supported_slow_test.py
"""

from __future__ import annotations

import os
import pathlib
from collections.abc import Callable

import pytest
from supported import DTYPES, NOTES, PAGE, run_cells, table, with_table
from supported_optimizers import ROWS
from supported_shardings import COLUMNS

from daemons import Daemon


def test_the_page_has_what_a_run_prints(
    make_daemon: Callable[..., Daemon], monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    daemon = make_daemon(memory_bytes="16GiB")
    monkeypatch.setenv("HOLDFAST_SOCKET", str(daemon.socket))
    made = table(run_cells(ROWS, COLUMNS, DTYPES, tmp_path), NOTES)
    page = PAGE.read_text()
    if os.environ.get("HOLDFAST_TEST_WRITE"):
        PAGE.write_text(with_table(page, made))
        return
    assert with_table(page, made) == page, f"another table than this one:\n{made}"
