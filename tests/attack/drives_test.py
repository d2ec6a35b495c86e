"""Drives and a remote directory that are gone at a start, alone and together with the state directory.

A restore never says that nothing was saved, and never takes an older step without a word, while a drive is absent. Once the
drive is back every step is there. Once it is forgotten the run goes on with what is left.
"""

from __future__ import annotations

import json
import os
import pathlib
import re
import shutil
import subprocess
import time

import pytest
from node import JOB, RANKS, Node, saved_node

from daemons import BIN, DEADLINE_S


def _all_ok(answers: list[str]) -> bool:
    return all(answer.startswith("ok ") for answer in answers)


def _id_of(place: pathlib.Path) -> str:
    return (place / ".holdfast/id").read_text().strip()


def _notes(node: Node) -> str:
    status = json.loads(node.daemon.ctl("status", "--json"))
    tiers = status["daemon"]["tiers"]
    return "\n".join([t["state"] + "\n" + "\n".join(t["notes"]) for t in tiers])


def _forget(node: Node, drive: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [BIN / "ckptctl", "forget-drive", drive, "--yes", "--socket", str(node.daemon.admin)],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )


def _take_away(node: Node, how: str, name: str = "d0") -> None:
    place = node.root / name
    place.rename(node.root / "away")
    if how == "empty":
        place.mkdir(mode=0o700)


def _put_back(node: Node, name: str = "d0") -> None:
    shutil.rmtree(node.root / name, ignore_errors=True)
    (node.root / "away").rename(node.root / name)


def _launch_and_restore(node: Node) -> list[str]:
    opened = node.launch()
    return node.restore_when_ready() if _all_ok(opened) else opened


def _restore_until_ok(node: Node) -> list[str]:
    """As a launcher does that starts the ranks again: what could not be read is looked for every 10 s."""
    until = time.monotonic() + DEADLINE_S
    while True:
        answers = _launch_and_restore(node)
        if _all_ok(answers):
            return answers
        assert time.monotonic() < until, answers
        for rank in node.ranks:
            rank.kill()
        node.ranks = []


@pytest.mark.parametrize("how", ["gone", "empty"])
@pytest.mark.parametrize("state", ["kept", "lost"])
def test_nvme_alone_waits_for_its_drive(how: str, state: str) -> None:
    with saved_node(("nvme",)) as node:
        drive = _id_of(node.root / "d0")
        _take_away(node, how)
        if state == "lost":
            node.lose_state()
        node.start()
        answers = _launch_and_restore(node)
        assert all("error " in answer for answer in answers), answers
        assert not any("NOTHING_TO_RESTORE" in answer for answer in answers), answers
        assert any(f"forget-drive {drive[:8]}" in answer for answer in answers), answers
        assert f"forget-drive {drive[:8]}" in _notes(node)
        node.crash()

        _put_back(node)
        node.start()
        assert all("step=2" in answer for answer in _launch_and_restore(node))
        node.wait_for_whole({1, 2}, ["nvme"])
        assert "forget-drive" not in _notes(node)
        node.save_everywhere(3)


def test_what_was_acknowledged_a_moment_before_the_power_went_is_known_to_be_there() -> None:
    with saved_node(("nvme",)) as node:
        drive = _id_of(node.root / "d0")
        for step in range(3, 9):
            node.start()
            assert all(f"step={step - 1}" in answer for answer in _launch_and_restore(node))
            node.save_everywhere(step)
            node.crash()
            _take_away(node, "gone")
            node.start()
            answers = _launch_and_restore(node)
            assert all("error " in answer for answer in answers), answers
            assert all(f"forget-drive {drive[:8]}" in answer for answer in answers), answers
            node.crash()
            _put_back(node)


@pytest.mark.parametrize("state", ["kept", "lost"])
def test_what_lay_on_one_drive_alone_is_not_nothing(state: str) -> None:
    """The other drive has no file of the job. What it says of the first one is all that tells of it."""
    with saved_node(("nvme",)) as node:
        drive = _id_of(node.root / "d0")
        shutil.rmtree(node.root / "d1" / JOB)
        _take_away(node, "gone")
        if state == "lost":
            node.lose_state()
        node.start()
        answers = _launch_and_restore(node)
        assert not any("NOTHING_TO_RESTORE" in answer for answer in answers), answers
        assert any(f"forget-drive {drive[:8]}" in answer for answer in answers), answers


@pytest.mark.parametrize("state", ["kept", "lost"])
def test_a_step_that_is_whole_elsewhere_does_not_wait_and_saves_go_on(state: str) -> None:
    with saved_node() as node:
        drive = _id_of(node.root / "d0")
        _take_away(node, "gone")
        if state == "lost":
            node.lose_state()
        node.start()
        answers = _launch_and_restore(node)
        if state == "kept":
            # The state says that 2 is the newest, and remote has it.
            assert all("step=2" in answer for answer in answers), answers
            node.save_everywhere(3)  # onto what is in the drive's place, too
        else:
            assert not any("NOTHING_TO_RESTORE" in answer for answer in answers), answers
            assert not any("step=1" in answer for answer in answers), answers
        assert f"forget-drive {drive[:8]}" in _notes(node)


@pytest.mark.parametrize("state", ["kept", "lost"])
def test_a_forgotten_drive_is_not_waited_for(state: str) -> None:
    with saved_node() as node:
        drive = _id_of(node.root / "d0")
        _take_away(node, "empty")
        if state == "lost":
            node.lose_state()
        node.start()
        there = _forget(node, _id_of(node.root / "d1"))
        assert there.returncode == 4 and "is here" in there.stderr, there.stderr
        unknown = _forget(node, "0" * 32)
        assert unknown.returncode == 4 and drive[:8] in unknown.stderr, unknown.stderr
        done = _forget(node, drive[:8])
        assert done.returncode == 0, done.stderr
        assert drive in done.stdout and (state == "lost" or JOB in done.stdout), done.stdout
        assert all("step=2" in answer for answer in _restore_until_ok(node))
        node.save_everywhere(3)
        assert "forget-drive" not in _notes(node)
        node.crash()
        node.start()
        assert all("step=3" in answer for answer in _launch_and_restore(node))


def test_a_forgotten_drive_that_comes_back_is_read() -> None:
    with saved_node(("nvme",)) as node:
        drive = _id_of(node.root / "d0")
        _take_away(node, "empty")
        node.start()
        assert _forget(node, drive).returncode == 0
        node.crash()
        _put_back(node)
        node.start()
        assert all("step=2" in answer for answer in _launch_and_restore(node))
        node.wait_for_whole({1, 2}, ["nvme"])


@pytest.mark.parametrize("state", ["kept", "lost"])
def test_remote_is_known_by_its_id(state: str) -> None:
    """With the state lost it is the drives that know it."""
    with saved_node() as node:
        remote = _id_of(node.root / "remote")
        if state == "lost":
            # Nothing that is left has step 2, but remote.
            for name in ("d0", "d1"):
                shutil.rmtree(node.root / name / JOB)
            node.lose_state()
        _take_away(node, "empty", "remote")
        node.start()
        answers = _launch_and_restore(node)
        assert not any("NOTHING_TO_RESTORE" in answer for answer in answers), answers
        if state == "lost":
            assert any(f"forget-drive {remote[:8]}" in answer for answer in answers), answers
        assert sorted(os.listdir(node.root / "remote")) == [], "nothing is made there"
        assert re.search(f"not the directory that this node used before.*{remote}", _notes(node))
        node.crash()
        _put_back(node, "remote")
        node.start()
        assert all("step=2" in answer for answer in _launch_and_restore(node))
        node.wait_for_whole({1, 2}, ["remote"])


def test_a_remote_directory_that_was_replaced_for_good_is_forgotten() -> None:
    with saved_node() as node:
        remote = _id_of(node.root / "remote")
        _take_away(node, "empty", "remote")
        node.start()
        done = _forget(node, remote)
        assert done.returncode == 0, done.stderr
        assert all("step=2" in answer for answer in _restore_until_ok(node))
        node.save_everywhere(3)
        assert len(node.ranks) == RANKS
