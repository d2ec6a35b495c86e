"""`Checkpointer(fresh='LABEL')`: the job starts over once per label."""

from __future__ import annotations

import logging
import re
import shutil
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from ranks import run_ranks

import holdfast
import holdfast.dcp
from daemons import Daemon
from holdfast import _core

NVME = "nvme: {dirs: [ROOT/nvme]}\n"


def state(value: float) -> dict[str, Any]:
    return {"w": torch.full((100,), value), "extra": {"value": value}}


class Run:
    """One start of the script: restores, and says which step it went on from."""

    def __init__(self, fresh: str | None = None, job: str = "job", **options: Any) -> None:
        self.ckpt = holdfast.Checkpointer(job, fresh=fresh, **options)
        self.state = state(-1)
        try:
            self.ckpt.restore(self.state)
        except BaseException:
            self.ckpt.close()
            raise
        last = self.ckpt.last_restored
        self.last = None if last is None else last.step
        if self.last is not None:
            assert self.state["w"].tolist() == [self.state["extra"]["value"]] * 100

    def save(self, *steps: int, wait: str = "committed") -> Run:
        for step in steps:
            self.ckpt.save(step, state(step), wait=wait, timeout=60)  # type: ignore[arg-type]
        return self

    def end(self) -> int | None:
        self.ckpt.close()
        return self.last


def started_over(caplog: pytest.LogCaptureFixture) -> int:
    return sum("starts over" in each.getMessage() for each in caplog.records)


def test_once_per_label(daemon: Daemon, caplog) -> None:
    assert Run().save(5, 9).end() is None
    first = Run("run-2")
    assert first.last is None and first.state["w"].tolist() == [-1] * 100
    assert started_over(caplog) == 1
    assert first.save(0, 1).end() is None
    assert Run("run-2").save(2).end() == 1
    assert Run("run-2").end() == 2
    assert started_over(caplog) == 1
    assert Run("run-3").save(0).end() is None
    assert Run("run-3").end() == 0
    # What was there is kept, off the line (in memory as far as the slots go).
    there = {(each.attempt, each.step, each.on_line) for each in holdfast.checkpoints("job")}
    assert (3, 2, False) in there and (2, 1, False) in there


def test_a_job_that_never_existed(daemon: Daemon, caplog) -> None:
    assert Run("run-1").save(0).end() is None
    assert Run("run-1").end() == 0
    assert started_over(caplog) == 0


def test_a_start_that_ends_before_its_first_commit(daemon: Daemon) -> None:
    Run().save(5).end()
    assert Run("run-2").end() is None
    assert Run("run-2").end() is None
    assert Run("run-2").save(0).end() is None
    assert Run("run-2").end() == 0


def test_a_restart_that_needs_no_label_keeps_it(daemon: Daemon) -> None:
    Run("run-2").save(0).end()
    assert Run().save(1).end() == 0
    assert Run("run-2").end() == 1
    assert Run("run-3").end() is None


def test_without_a_restore_the_first_save_starts_over(daemon: Daemon) -> None:
    Run().save(5).end()
    with holdfast.Checkpointer("job", fresh="run-2") as ckpt:
        ckpt.save(0, state(0), wait="committed")
        ckpt.save(1, state(1), wait="committed")
        assert ckpt.failed_saves == 0
    # Now there is something to restore.
    with holdfast.Checkpointer("job", fresh="run-2") as ckpt:
        with pytest.raises(holdfast.RefusedError, match="Call restore before the first save"):
            ckpt.save(0, state(0), wait="committed")
        ckpt.restore(state(-1))
        assert ckpt.last_restored is not None and ckpt.last_restored.step == 1


def test_a_label_that_was_left_is_refused(daemon: Daemon) -> None:
    Run("a").save(0, 1).end()
    Run("b").save(0).end()
    with pytest.raises(holdfast.RefusedError, match="Choose a new label") as refused:
        Run("a")
    way_back = "ckptctl restore job --step 1 --attempt 1"
    assert way_back in str(refused.value), refused.value
    assert Run("b").end() == 0
    daemon.ctl(*way_back.split()[1:])
    assert Run("a").end() == 1


def test_what_a_person_orders_counts(daemon: Daemon) -> None:
    """A restore point of another run is not passed over, and a start from scratch needs no new label."""
    Run().save(5).end()
    Run("b").save(0).end()
    daemon.ctl("restore", "job", "--step", "5", "--attempt", "1")
    with pytest.raises(holdfast.RefusedError, match="ckptctl restore job --clear"):
        Run("c")
    with pytest.raises(holdfast.RefusedError, match="--step 0 --attempt 2"):
        Run("b")
    daemon.ctl("restore", "job", "--from-scratch", "--yes")
    assert Run("b").end() is None
    assert Run("b").save(7).end() is None
    assert Run("b").end() == 7


def test_a_step_of_another_run_by_name(daemon: Daemon) -> None:
    Run().save(5).end()
    with holdfast.Checkpointer("job", fresh="run-2") as ckpt:
        into = state(-1)
        with pytest.raises(holdfast.RefusedError, match="saved with no label"):
            ckpt.restore(into, step=5)
        assert into["extra"] == {"value": -1}
        ckpt.restore(into)
        assert ckpt.last_restored is None
        ckpt.save(0, into, wait="committed")
        with pytest.raises(holdfast.RefusedError, match="saved with no label"):
            ckpt.restore(into, step=5, attempt=1)


def test_only_a_printable_text_is_a_label(daemon: Daemon) -> None:
    for label in ("", "x" * 129, "a\nb", 5, "\ud800"):
        with pytest.raises(holdfast.InvalidArgumentError, match="fresh="):
            holdfast.Checkpointer("job", fresh=label)  # type: ignore[arg-type]


def test_a_process_has_one_label_for_a_job(daemon: Daemon) -> None:
    with holdfast.Checkpointer("job"):
        with pytest.raises(holdfast.InvalidArgumentError, match="fresh=None"):
            holdfast.Checkpointer("job", fresh="run-2")


def labels(daemon: Daemon, step: int) -> list[bytes]:
    view = _core.attach("job", step=step, attempt=0, socket=str(daemon.socket))
    return [data for name, data, _ in view.objects if name == "holdfast.fresh"]


def test_the_label_is_no_part_of_what_is_loaded(daemon: Daemon) -> None:
    run = Run("run-2").save(0)
    assert labels(daemon, 0) == [b'"run-2"']
    with holdfast.open("job") as saved:
        assert sorted(saved.state()) == ["extra", "w"]
    found = holdfast.dcp.Reader("job", adopt=False)
    assert "holdfast.fresh" not in found.read_metadata().state_dict_metadata
    # What is saved by DCP in such a run belongs to it.
    torch.distributed.checkpoint.save(
        {"w": torch.ones(3)}, storage_writer=holdfast.dcp.Writer("job", step=1), no_dist=True
    )
    assert labels(daemon, 1) == [b'"run-2"']
    run.end()


# ---- Several ranks ----


def starts(label: Callable[[int], str | None], *steps: int) -> Callable[[int], Any]:
    """What a rank comes to: the step that it went on from, or the error."""

    def work(rank: int) -> Any:
        try:
            return Run(label(rank)).save(*steps).end()
        except holdfast.HoldfastError as error:
            return f"{type(error).__name__}: {error}"

    return work


def test_all_ranks_start_over_together(daemon: Daemon) -> None:
    def first(rank: int) -> None:
        run = Run().save(5)
        if rank == 0:  # never committed
            run.save(6, wait="sealed")

    run_ranks(2, first, group=False)
    assert run_ranks(2, starts(lambda _: "run-2", 0, 1), group=False) == [None, None]
    assert run_ranks(2, starts(lambda _: "run-2", 2), group=False) == [1, 1]
    # On another number of ranks it is the same run, or a new one.
    assert run_ranks(3, starts(lambda _: "run-2", 3), group=False) == [2, 2, 2]
    assert run_ranks(2, starts(lambda _: "run-3", 0), group=False) == [None, None]
    assert run_ranks(2, starts(lambda _: "run-3"), group=False) == [0, 0]


@pytest.mark.parametrize("other", ["run-3", None])
def test_ranks_that_say_different_labels(daemon: Daemon, other: str | None) -> None:
    run_ranks(2, starts(lambda _: None, 5), group=False)
    for said in run_ranks(2, starts(lambda rank: "run-2" if rank == 0 else other), group=False):
        assert "InvalidArgumentError" in said and "must ask for the same" in said, said
        assert "fresh='run-2'" in said and "rank 0" in said and "rank 1" in said, said
    assert run_ranks(2, starts(lambda _: None), group=False) == [5, 5]


# ---- Tiers that cannot be read ----


@pytest.fixture
def drive(make_daemon, monkeypatch: pytest.MonkeyPatch) -> Iterator[Daemon]:
    """A daemon with a drive, on which each step is."""
    one = make_daemon(NVME, ["nvme"])
    monkeypatch.setenv("HOLDFAST_SOCKET", str(one.socket))
    yield one


EACH = holdfast.Policy(nvme_every_steps=1, nvme_keep_last=3)


def forget(daemon: Daemon) -> None:
    """A node that has lost all but its drive."""
    daemon.stop()
    shutil.rmtree(daemon.root / "state")
    for each in daemon.memory.iterdir():
        shutil.rmtree(each) if each.is_dir() else each.unlink()


def test_the_label_is_on_the_drive(drive: Daemon) -> None:
    Run(policy=EACH).save(5, wait="nvme").end()
    assert Run("run-2", policy=EACH).end() is None
    # Lost before anything of the new run was saved: the same again.
    forget(drive)
    drive.start()
    run = Run("run-2", policy=EACH)
    assert run.last is None
    run.save(0, 1, wait="nvme").end()
    forget(drive)
    drive.start()
    assert Run("run-2", policy=EACH).end() == 1


def take_away(daemon: Daemon) -> None:
    """The drive is not mounted when the daemon starts again."""
    daemon.stop()
    (daemon.root / "nvme").rename(daemon.root / "away")
    (daemon.root / "nvme").mkdir()
    daemon.start()


def test_a_drive_that_cannot_be_read_is_waited_for(drive: Daemon, caplog) -> None:
    Run(policy=EACH).save(5, wait="nvme").end()
    take_away(drive)
    with holdfast.Checkpointer("job", fresh="run-2", policy=EACH) as ckpt:
        with pytest.raises(holdfast.UnavailableError, match="cannot be read"):
            ckpt.restore(state(-1), timeout=5)
        said = [each.getMessage() for each in caplog.records if "waits" in each.getMessage()]
        assert any("fresh='run-2'" in each and "--from-scratch" in each for each in said), said
        drive.ctl("restore", "job", "--from-scratch", "--yes")
        ckpt.restore(state(-1))
        assert ckpt.last_restored is None
        ckpt.save(0, state(0), wait="committed")
    assert Run("run-2", policy=EACH).end() == 0


def give_up(daemon: Daemon, _: str) -> None:
    daemon.ctl("restore", "job", "--from-scratch", "--yes")


def forget_drive(daemon: Daemon, said: str) -> None:
    daemon.ctl("forget-drive", re.findall("forget-drive ([0-9a-f]+)", said)[0], "--yes")


class AtFirstWarning(logging.Handler):
    """Does something, once, when a wait is told, as an operator who reads the log."""

    def __init__(self, act: Callable[[str], None]) -> None:
        super().__init__(logging.WARNING)
        self.acted, self._act = False, act

    def emit(self, record: logging.LogRecord) -> None:
        said = record.getMessage()
        if "waits" in said and not self.acted:
            self.acted = True
            self._act(said)


@pytest.mark.parametrize("end", [give_up, forget_drive])
def test_the_wait_ends_with_its_cause(
    drive: Daemon, end: Callable[[Daemon, str], None], request: pytest.FixtureRequest
) -> None:
    Run("run-1", policy=EACH).save(5, wait="nvme").end()
    take_away(drive)
    operator = AtFirstWarning(lambda said: end(drive, said))
    logging.getLogger("holdfast").addHandler(operator)
    request.addfinalizer(lambda: logging.getLogger("holdfast").removeHandler(operator))
    assert Run("run-2", policy=EACH).save(0).end() is None
    assert operator.acted


def test_a_run_whose_own_step_can_be_read_does_not_wait(drive: Daemon, caplog) -> None:
    Run().save(5).end()
    Run("run-2", policy=EACH).save(0, wait="nvme").end()
    take_away(drive)
    assert Run("run-2", policy=EACH).end() == 0
    assert not [each for each in caplog.records if "waits" in each.getMessage()]
