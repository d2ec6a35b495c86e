"""The damage matrix: each kind of file × each kind of damage × state kept or lost.

Steps 1 and 2 lie whole in nvme (two drives) and in remote, or in one of the two. The node loses power; one thing is
damaged; ckptd starts, the ranks restore what they can and save a step. Then the damaged thing is put back, and ckptd
starts again.

Judged from outside: nothing but the damaged thing has changed at any time, a run never starts from scratch, every rank
is told which step was passed over, and once the thing is back every step is whole again wherever it was.
"""

from __future__ import annotations

import itertools
import os
import pathlib
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
from _pytest.mark import ParameterSet
from node import JOB, Node, saved_node


def _the(node: Node, pattern: str) -> pathlib.Path:
    found = sorted(node.root.glob(pattern))
    assert found, f"{pattern}: nothing there"
    return found[0]


# Where it lies: a pattern below the node's root. Shards of one step are spread over both drives.
TARGETS = {
    "nvme-JOB": f"d0/{JOB}/JOB",
    "nvme-image": f"d?/{JOB}/2-a1/1.safetensors",
    "nvme-record": f"d?/{JOB}/2-a1/1.record",
    "nvme-older-record": f"d?/{JOB}/1-a1/0.record",
    "nvme-step": f"d0/{JOB}/2-a1",
    "nvme-job": f"d0/{JOB}",
    "remote-JOB": f"remote/{JOB}/JOB",
    "remote-claim": f"remote/{JOB}/attempt-1",
    "remote-image": f"remote/{JOB}/2-a1/shard-00001-of-00002.safetensors",
    "remote-record": f"remote/{JOB}/2-a1/shard-00001-of-00002.record",
    "remote-MANIFEST": f"remote/{JOB}/2-a1/MANIFEST",
    "remote-older-MANIFEST": f"remote/{JOB}/1-a1/MANIFEST",
    "remote-step": f"remote/{JOB}/2-a1",
    "remote-job": f"remote/{JOB}",
}


def _bit(path: pathlib.Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def _truncate(path: pathlib.Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def _extend(path: pathlib.Path) -> None:
    with path.open("ab") as file:
        file.write(b"x" * 4096)


def _delete(path: pathlib.Path) -> None:
    shutil.rmtree(path) if path.is_dir() else path.unlink()


def _zero(path: pathlib.Path) -> None:
    path.write_bytes(bytes(path.stat().st_size))


def _swap(path: pathlib.Path) -> None:
    """With the bytes of a file of another kind."""
    path.write_bytes(b"not what belongs here\n" * 40)


FILE_DAMAGE: dict[str, Callable[[pathlib.Path], None]] = {
    "bit": _bit,
    "truncate": _truncate,
    "extend": _extend,
    "delete": _delete,
    "swap": _swap,
    "zero": _zero,
}


@dataclass(frozen=True)
class Case:
    target: str
    damage: str
    state: str
    alone: bool  # no other tier has anything

    def __str__(self) -> str:
        return f"{self.target}-{self.damage}-{self.state}-{'alone' if self.alone else 'both'}"

    @property
    def tiers(self) -> tuple[str, ...]:
        return (self.target.split("-")[0],) if self.alone else ("nvme", "remote")


# Of these nothing in the world tells any more, until they are put back.
def _nothing_tells(case: Case) -> bool:
    return case.state == "lost" and case.alone and case.target in ("remote-step", "remote-job")


CASES = [
    Case(target, damage, state, alone)
    for target in TARGETS
    for damage in (["delete"] if target.split("-")[-1] in ("step", "job") else list(FILE_DAMAGE))
    for state in ("kept", "lost")
    for alone in (False, True)
]
CASES = [case for case in CASES if not _nothing_tells(case)]


def _marked() -> Iterator[ParameterSet]:
    """Of each thing and damage one case always runs, in turn with the state kept or lost, alone or not; the rest is slow."""
    by_damage = itertools.groupby(CASES, key=lambda case: (case.target, case.damage))
    for turn, (_, cases) in enumerate(by_damage):
        of_one = list(cases)
        always = turn % len(of_one)
        for number, case in enumerate(of_one):
            marks = [] if number == always else [pytest.mark.slow]
            yield pytest.param(case, marks=marks, id=str(case))


def _all_ok(answers: list[str]) -> bool:
    return all(answer.startswith("ok ") for answer in answers)


def _unharmed(
    before: dict[pathlib.Path, str], now: dict[pathlib.Path, str], but: pathlib.Path
) -> None:
    for path, digest in before.items():
        if path == but or but in path.parents:
            continue
        assert path in now, f"{path} is gone"
        assert now[path] == digest, f"{path} was changed"


@pytest.mark.parametrize("case", list(_marked()))
def test_what_is_put_back_is_there_again(case: Case, tmp_path: pathlib.Path) -> None:
    with saved_node(case.tiers) as node:
        before = node.files()
        target = _the(node, TARGETS[case.target])
        kept = tmp_path / "kept"
        shutil.copytree(target, kept) if target.is_dir() else shutil.copy2(target, kept)
        owner = target.stat()
        FILE_DAMAGE[case.damage](target)
        if case.state == "lost":
            node.lose_state()

        node.start()
        opened = node.launch()
        restored = node.restore_when_ready() if _all_ok(opened) else opened
        assert not any("NOTHING_TO_RESTORE" in answer for answer in restored), restored
        if not case.alone:
            # The other tier has it. (Where nobody can say whose a directory is, the ranks are told that, too.)
            assert all("step=2" in a or "file JOB" in a for a in restored), restored
        if _all_ok(restored):
            if all("step=1" in answer for answer in restored):
                for notes in node.all("notes"):
                    # (A rank that found the damage itself says so in its own words.)
                    assert "step 2" in notes and "passed over" in notes, notes
            else:
                assert all("step=2" in answer for answer in restored), restored
            node.save_everywhere(3)
        else:
            assert all("error " in answer for answer in restored), restored
        if _all_ok(opened):
            node.collect_garbage()
        node.crash()
        _unharmed(before, node.files(), target)

        if target.is_dir():
            shutil.rmtree(target)
        else:
            target.unlink(missing_ok=True)
        target.parent.mkdir(exist_ok=True)
        shutil.copytree(kept, target) if kept.is_dir() else shutil.copy2(kept, target)
        os.chown(target, owner.st_uid, owner.st_gid)
        node.start()
        opened = node.launch()
        assert all("ok attempt=" in answer for answer in opened), opened
        restored = node.restore_when_ready()
        assert all("ok " in answer for answer in restored), restored
        node.wait_for_whole({1, 2}, case.tiers)
        node.crash()
        _unharmed(before, node.files(), pathlib.Path("/nowhere"))


# One drive is not there, or an empty one is in its place, and then it is back.
@pytest.mark.parametrize("instead", ["nothing", "an empty directory"])
@pytest.mark.parametrize("state", ["kept", "lost"])
def test_a_drive_that_comes_back_has_all_its_steps(
    instead: str, state: str, tmp_path: pathlib.Path
) -> None:
    with saved_node() as node:
        before = node.files()
        (node.root / "d0").rename(node.root / "away")
        if instead != "nothing":
            (node.root / "d0").mkdir(mode=0o700)
        if state == "lost":
            node.lose_state()
        node.start()
        opened = node.launch()
        if _all_ok(opened):
            restored = node.restore_when_ready()
            assert not any("NOTHING_TO_RESTORE" in answer for answer in restored), restored
            node.collect_garbage()
        node.crash()
        if (node.root / "d0").exists():
            shutil.rmtree(node.root / "d0")
        (node.root / "away").rename(node.root / "d0")
        node.start()
        opened = node.launch()
        assert all("ok attempt=" in answer for answer in opened), opened
        restored = node.restore_when_ready()
        assert all("step=2" in answer for answer in restored), restored
        node.wait_for_whole({1, 2}, ["nvme"])
        node.crash()
        _unharmed(before, node.files(), pathlib.Path("/nowhere"))


# All was lost but what a crash left in remote of the very first step, before its MANIFEST; or that MANIFEST is lost.
@pytest.mark.parametrize("marked", [True, False])
def test_a_beginning_in_remote_is_nothing_that_was_saved(marked: bool) -> None:
    with saved_node(("remote",)) as node:
        step = node.root / "remote" / JOB / "1-a1"
        shutil.rmtree(step.parent / "2-a1")
        (step / "MANIFEST").unlink()
        assert not (step / "writing").exists()
        if marked:
            (step / "writing").touch()
        node.lose_state()
        before = node.files()
        node.start()
        assert _all_ok(node.launch())
        restored = node.restore_when_ready()
        assert all(("NOTHING_TO_RESTORE" in answer) == marked for answer in restored), restored
        if marked:
            node.save_everywhere(1)
        node.crash()
        _unharmed(before, node.files(), pathlib.Path("/nowhere"))


# Two things of the only step that there is, which nothing else tells of: a run never starts from scratch.
@pytest.mark.parametrize("damage", ["bit", "delete"])
@pytest.mark.parametrize(
    "targets",
    [
        ("MANIFEST", "*-00001-*.record"),
        ("MANIFEST", "*-00001-*.safetensors"),
        ("MANIFEST", "*.record"),
        ("MANIFEST", "../JOB"),
        ("*.record", "../JOB"),
    ],
    ids=" and ".join,
)
def test_what_lost_more_than_one_file_is_not_nothing(targets: tuple[str, ...], damage: str) -> None:
    with saved_node(("remote",)) as node:
        step = node.root / "remote" / JOB / "2-a1"
        shutil.rmtree(step.parent / "1-a1")
        for target in targets:
            for path in sorted(step.glob(target)):
                FILE_DAMAGE[damage](path)
        node.lose_state()
        before = node.files()
        node.start()
        opened = node.launch()
        restored = node.restore_when_ready() if _all_ok(opened) else opened
        assert not any("NOTHING_TO_RESTORE" in answer for answer in restored), restored
        if not all("step=2" in answer for answer in restored):
            assert all("error " in answer for answer in restored), restored
            assert any("ckptctl explain" in a or "ckptctl rebuild" in a for a in restored), restored
        node.crash()
        _unharmed(before, node.files(), step.parent / "JOB")  # (that is written again)


# Where the owners of the records say nothing a person says whose the job is.
@pytest.mark.skipif(os.geteuid() != 0, reason="only root's daemon gives files to their jobs' users")
def test_an_operator_says_whose_a_job_is_that_lost_its_file_job() -> None:
    with saved_node(("nvme",)) as node:
        job = node.root / "d0" / JOB
        owner = (job / "JOB").stat()
        (job / "JOB").unlink()
        os.chown(sorted(job.glob("*/*.record"))[0], 4711, 4711)
        node.lose_state()
        node.start()
        refused = node.launch()
        refused = node.restore_when_ready() if _all_ok(refused) else refused
        assert all(f"ckptctl rebuild {JOB} --owner UID:GID" in a for a in refused), refused
        said = node.daemon.ctl("rebuild", JOB, "--owner", f"{owner.st_uid}:{owner.st_gid}")
        assert f"{node.root}/d0: JOB was written" in said, said
        assert f"{node.root}/d1: JOB is as it was" in said, said
        for rank in node.ranks:
            rank.kill()
        assert _all_ok(node.launch())
        restored = node.restore_when_ready()
        assert all("step=2" in answer for answer in restored), restored
