"""The table of docs/python.md: which optimizers come back, under which sharding, in which dtypes.

Each cell is run: ranks train, save, and end without a word; fresh ones restore, compare bit for bit, and train on.

    found = run_cells(ROWS, COLUMNS, DTYPES, folder)        # needs a daemon
    print(table(found, NOTES))
"""

from __future__ import annotations

import dataclasses
import logging
import pathlib
import re
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from parallel_test import assert_same
from ranks import run_ranks
from supported_optimizers import Row
from supported_shardings import Column, Leg

import holdfast
from daemons import DEADLINE_S

STEP = 3
RANKS_DEADLINE_S = 1200
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

# ---- what becomes of it ----


@dataclasses.dataclass(frozen=True)
class Outcome:
    """`what`: "yes", or what did not work: "step" (of PyTorch), "save", "restore", "compare"; `said`: how."""

    what: str
    said: str = ""


YES = Outcome("yes")


def attempt(*steps: tuple[str, Callable[[], Any]]) -> Outcome:
    """One after the other, on all ranks, up to the first that failed on one of them."""
    for what, work in steps:
        mine = YES
        try:
            work()
        except Exception as error:
            mine = Outcome(what, f"{type(error).__name__}: {error}")
        every: list[Outcome] = [mine] * dist.get_world_size()
        dist.all_gather_object(every, mine)
        failed = [each for each in every if each != YES]
        if failed:
            return failed[0]
    return YES


Cells = Sequence[tuple[Row, str]]  # and a dtype


def _place(folder: pathlib.Path, leg: Leg, row: Row, dtype: str) -> pathlib.Path:
    """Where the state is that was saved, and that of a step later. Its name is the job's."""
    letters = re.sub("[^a-z0-9]+", "-", row.name.lower()).strip("-")
    return folder / f"{leg[0].__name__}-{leg[1]}-{letters}-{dtype}".replace("_", "-")


def _save(leg: Leg, cells: Cells, folder: pathlib.Path) -> list[Outcome]:
    def one(row: Row, dtype: str) -> Outcome:
        place = _place(folder, leg, row, dtype)
        run: Any = None

        def begin() -> None:
            nonlocal run
            run = leg[0](row, DTYPES[dtype], 0)
            run.train(0, 2)

        def save() -> None:
            ckpt = holdfast.Checkpointer(place.name)  # which nobody closes
            ckpt.save(STEP, run.state, wait="committed", timeout=DEADLINE_S)

        def go_on() -> None:
            states = [run.whole()]
            run.train(2, 1)
            states.append(run.whole())
            if dist.get_rank() == 0:
                torch.save(states, place)

        return attempt(("step", begin), ("save", save), ("step", go_on))

    return _on_ranks(leg, cells, one)


def _restore(leg: Leg, saved: Leg, cells: Cells, folder: pathlib.Path) -> list[Outcome]:
    def one(row: Row, dtype: str) -> Outcome:
        place = _place(folder, saved, row, dtype)
        run: Any = None

        def begin() -> None:
            nonlocal run
            run = leg[0](row, DTYPES[dtype], 7)

        def restore() -> None:
            ckpt = holdfast.Checkpointer(place.name)
            ckpt.restore(run.state, timeout=DEADLINE_S)
            assert ckpt.last_restored is not None and ckpt.last_restored.step == STEP

        found: list[Any] = []

        def go_on() -> None:
            found.append(run.whole())
            run.train(2, 1)
            found.append(run.whole())

        def compare() -> None:  # no collectives: it may fail on some ranks
            then, later = torch.load(place, weights_only=False)
            assert_same(then, found[0])
            if leg == saved:
                assert_same(later, found[1])

        return attempt(
            ("step", begin), ("restore", restore), ("compare", go_on), ("compare", compare)
        )

    return _on_ranks(leg, cells, one)


def _on_ranks(leg: Leg, cells: Cells, one: Callable[[Row, str], Outcome]) -> list[Outcome]:
    if not cells:
        return []

    def work(rank: int) -> list[Outcome]:
        warnings.simplefilter("ignore")
        logging.getLogger("torch.distributed").setLevel(logging.ERROR)
        return [one(row, dtype) for row, dtype in cells]

    found: list[Outcome] = run_ranks(leg[1], work, deadline_s=RANKS_DEADLINE_S)[0]
    return found


Found = dict[tuple[str, str, str], Outcome]


def run_cells(
    rows: Sequence[Row], columns: Sequence[Column], dtypes: Iterable[str], folder: pathlib.Path
) -> Found:
    """By row, column and dtype; of several legs the first that fails."""
    cells = [(row, dtype) for row in rows for dtype in dtypes]
    saved: dict[tuple[Leg, Row, str], Outcome] = {}
    found: Found = {}
    for column in columns:
        outcomes = {
            each: YES if column.name in each[0].only or not each[0].only else Outcome("step")
            for each in cells
        }

        def left(outcomes: dict[tuple[Row, str], Outcome] = outcomes) -> Cells:
            return [each for each, outcome in outcomes.items() if outcome == YES]

        for leg, others in column.legs:
            new = [each for each in left() if (leg, *each) not in saved]
            for each, outcome in zip(new, _save(leg, new, folder), strict=True):
                saved[(leg, *each)] = outcome
            outcomes.update({each: saved[(leg, *each)] for each in left()})
            for other in others:
                outcomes.update(zip(left(), _restore(other, leg, left(), folder), strict=True))
        for (row, dtype), outcome in outcomes.items():
            found[row.name, column.name, dtype] = outcome
    return found


# ---- the table ----

PAGE = pathlib.Path(__file__).resolve().parents[2] / "docs" / "python.md"
BEGIN = "<!-- Made by tests/python/supported_slow_test.py, whose first lines say how. -->\n"
END = "<!-- End of what the test made. -->\n"


@dataclasses.dataclass(frozen=True)
class Note:
    """An outcome that is known: what it is in the table, and below it. One that is not is a failure of the test."""

    what: str
    says: str  # what the error says
    text: str


NOTES = [
    Note(
        "save",
        "is an FSDP1 module",
        "Refused by the first `restore` or `save`: `is an FSDP1 module`. See [many ranks](#many-ranks-ddp-fsdp2-tensor-parallel) for the way out.",
    ),
    Note(
        "save",
        "are not sharded as it is, so no other number of ranks could read it",
        "Refused by the first `save`: `are not sharded as it is`. See [tensor subclasses](#tensor-subclasses).",
    ),
    Note(
        "save",
        "is of a plain tensor, not of",
        "Refused by the first `save`: `is of a plain tensor`. A part or range of a tensor subclass cannot be cut.",
    ),
    Note(
        "save",
        "is an LBFGS over DTensors",
        "Refused by the first `restore` or `save`: `is an LBFGS over DTensors`. Its state is one flat tensor of all parameters.",
    ),
    Note(
        "save",
        "state_dict of this ZeroRedundancyOptimizer raised RuntimeError",
        "Refused by the first `save`: `raised RuntimeError: Optimizer state has not been consolidated`. Shard with FSDP2.",
    ),
    Note(
        "restore",
        "the replicas have diverged|another number of ranks has saved this state",
        "Each rank gets its own back. The first `save` warns that `only as many ranks as now can restore` it, and `restore` refuses "
        "another number. Such a state is of a rank's part of a parameter, and not of each element.",
    ),
]


def _known(outcome: Outcome, notes: Sequence[Note]) -> int:
    for number, note in enumerate(notes):
        if note.what == outcome.what and re.search(note.says, outcome.said):
            return number
    raise AssertionError(f"an outcome that no note explains: {outcome.what}: {outcome.said}")


def symbol(outcome: Outcome, notes: Sequence[Note]) -> str:
    """What stands in the table."""
    if outcome == YES:
        return "yes"
    return "–" if outcome.what == "step" else f"no ({_known(outcome, notes) + 1})"


def table(found: Found, notes: Sequence[Note]) -> str:
    rows = list(dict.fromkeys(row for row, _, _ in found))
    columns = list(dict.fromkeys(column for _, column, _ in found))
    symbols: dict[tuple[str, str], str] = {}
    for (row, column, dtype), outcome in found.items():
        one = symbol(outcome, notes)
        assert symbols.setdefault((row, column), one) == one, f"{row}, {column}: {dtype} differs"
    lines = [["", *columns], ["---"] * (len(columns) + 1)]
    lines += [[row, *(symbols[row, column] for column in columns)] for row in rows]
    below = [f"{number}. {note.text}" for number, note in enumerate(notes, 1)]
    return "\n".join(["| " + " | ".join(line) + " |" for line in lines] + ["", *below]) + "\n"


def with_table(page: str, made: str) -> str:
    """The page, with this table in place of its own."""
    before, rest = page.split(BEGIN)
    return before + BEGIN + made + END + rest.split(END)[1]


def documented(page: str) -> dict[tuple[str, str], str]:
    """By row and column, of the page's table."""
    text = page[page.index(BEGIN) : page.index(END)]
    lines = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("|")]
    columns = lines[0]
    return {
        (row, column): each
        for row, *cells in lines[2:]
        for column, each in zip(columns, cells, strict=True)
    }
