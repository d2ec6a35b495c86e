"""A restore that cannot read a place which may have the newest step: it waits, and then it does not.

Step 3 is in nvme alone (remote takes every second step), and the node loses power. Where its drives cannot be read, the
restore waits for restore.wait_for_copies_ms; every rank then says which step was passed over.
"""

from __future__ import annotations

import contextlib
import pathlib
import time
from collections.abc import Iterator

from node import JOB, RANKS, Node

from daemons import DEADLINE_S


@contextlib.contextmanager
def _node(wait_for_copies_s: int) -> Iterator[Node]:
    node = Node(("nvme", "remote"))
    settings = node.daemon.config.read_text()
    for before, instead in (
        ("remote: {every_steps: 1", "remote: {every_steps: 2"),
        ("wait_for_copies_ms: 0", f"wait_for_copies_ms: {wait_for_copies_s}s"),
    ):
        assert before in settings
        settings = settings.replace(before, instead)
    node.daemon.config.write_text(settings)
    try:
        node.start()
        node.launch()
        assert all("NOTHING_TO_RESTORE" in answer for answer in node.all("restore"))
        node.save_everywhere(2)
        assert node.all("save 3") == ["ok sealed"] * RANKS
        assert node.all("tier nvme") == ["ok nvme"] * RANKS
        node.crash()
        yield node
    finally:
        node.close()


def _take_away(node: Node) -> list[tuple[pathlib.Path, pathlib.Path]]:
    """What tells whose the job's directories on the drives are: then nobody can read what else lies there."""
    kept = node.root / "kept"
    kept.mkdir()
    moved = []
    for drive in ("d0", "d1"):
        for path in [
            node.root / drive / JOB / "JOB",
            *(node.root / drive / JOB).glob("*/*.record"),
        ]:
            moved.append((path, kept / str(len(moved))))
            path.rename(moved[-1][1])
    assert len(moved) == 2 + 2 * RANKS, moved
    return moved


def _give_back(moved: list[tuple[pathlib.Path, pathlib.Path]]) -> None:
    for path, kept in reversed(moved):
        kept.rename(path)


def _wait_until_it_waits(node: Node) -> None:
    until = time.monotonic() + DEADLINE_S
    while "may be whole with what cannot be read now" not in node.daemon.log():
        assert time.monotonic() < until, node.daemon.log()
        time.sleep(0.05)


def test_what_comes_back_while_the_restore_waits_is_restored() -> None:
    with _node(600) as node:
        moved = _take_away(node)
        node.start()
        assert all("ok attempt=" in answer for answer in node.launch())
        for rank in node.ranks:
            rank.tell("restore")
        _wait_until_it_waits(node)
        _give_back(moved)
        restored = [rank.answer() for rank in node.ranks]
        assert all("step=3" in answer for answer in restored), restored


def test_what_does_not_come_back_is_passed_over_and_every_rank_says_so() -> None:
    with _node(1) as node:
        _take_away(node)
        node.start()
        assert all("ok attempt=" in answer for answer in node.launch())
        restored = node.all("restore")
        assert all("step=2" in answer for answer in restored), restored
        for notes in node.all("notes"):
            assert "step 3" in notes and "passed over" in notes, notes
