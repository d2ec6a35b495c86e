"""The table of docs/python.md is what a run says: here of a few optimizers in fp32, of all of them in supported_slow_test.py."""

from __future__ import annotations

import pathlib
from collections.abc import Callable

import pytest
from supported import NOTES, PAGE, YES, Outcome, documented, run_cells, symbol
from supported_optimizers import ROWS
from supported_shardings import COLUMNS

from daemons import Daemon

# One of each kind: of a state like its parameter's, of two optimizers, of a state of its own shape, of what is refused.
FAST = [row for row in ROWS if row.fast]


def test_a_run_says_what_the_page_says(
    make_daemon: Callable[..., Daemon], monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    daemon = make_daemon(memory_bytes="16GiB")
    monkeypatch.setenv("HOLDFAST_SOCKET", str(daemon.socket))
    said = documented(PAGE.read_text())
    found = run_cells(FAST, COLUMNS, ["fp32"], tmp_path)
    assert len(found) == len(FAST) * len(COLUMNS)
    wrong = {
        key: (symbol(outcome, NOTES), outcome)
        for key, outcome in found.items()
        if symbol(outcome, NOTES) != said[key[:2]]
    }
    assert not wrong


def test_the_page_has_all_of_the_list() -> None:
    said = documented(PAGE.read_text())
    assert set(said) == {(row.name, column.name) for row in ROWS for column in COLUMNS}


def test_what_no_note_explains_is_a_failure() -> None:
    assert symbol(YES, NOTES) == "yes" and symbol(Outcome("step", "TypeError: x"), NOTES) == "–"
    with pytest.raises(AssertionError, match="that no note explains: compare: the bits differ"):
        symbol(Outcome("compare", "the bits differ"), NOTES)
