"""PyTorch Lightning itself, fetched for the test: runs that are killed and started again print what a run prints that nobody
disturbed."""

from __future__ import annotations

import os
import pathlib
import random
import re
import signal
import subprocess
import sys

import pytest
from training import SEED

from daemons import DEADLINE_S, Daemon

HERE = pathlib.Path(__file__).resolve().parent
TREE = HERE.parents[1]
EXAMPLE = TREE / "examples/train_lightning.py"
INSTALL_DEADLINE_S = 1800
VERSIONS = ["2.6.6", "2.5.6"]
LINE = re.compile(r"rank \d+ step (\d+) (?:loss|val) .*")
EPOCH = 10  # steps of the example with one rank


@pytest.fixture(scope="session", params=VERSIONS)
def packages(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Where that version of Lightning is."""
    place = str(tmp_path_factory.mktemp("lightning"))
    subprocess.run(
        [sys.executable, "-m", "pip", "install", "-q", "--no-cache-dir", "--no-deps", "--target", place]
        + ["-r", str(HERE / "lightning.txt"), f"lightning=={request.param}"],
        check=True,
        timeout=INSTALL_DEADLINE_S,
    )  # fmt: skip
    return place


class Start:
    """One start of a script. `lines`: what it printed of its training until it ended, or until it was killed."""

    def __init__(
        self, packages: str, *words: str, script: str | None = None, kill_after: int | None = None
    ) -> None:
        path = os.pathsep.join([packages, *(each for each in sys.path if each)])
        program = [str(EXAMPLE)] if script is None else ["-c", script]
        process = subprocess.Popen(
            [sys.executable, *program, *words],
            env={**os.environ, "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ""},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        assert process.stdout is not None
        self.lines: list[str] = []
        self.said = ""
        for line in process.stdout:
            self.said += line
            self.lines += [line.strip()] if LINE.fullmatch(line.strip()) else []
            if kill_after is not None and len(self.lines) == kill_after:
                os.killpg(process.pid, signal.SIGKILL)  # all ranks
                break
        process.stdout.close()
        self.code = process.wait(DEADLINE_S)

    @property
    def first_step(self) -> int:
        found = LINE.fullmatch(self.lines[0])
        assert found
        return int(found[1])


def undisturbed(packages: str, *words: str) -> list[str]:
    start = Start(packages, "--job=undisturbed", *words)
    assert start.code == 0, start.said
    return start.lines


def killed_again_and_again(packages: str, kills: list[int], *words: str) -> list[str]:
    """All lines of starts of which each but the last is killed behind so many lines."""
    lines = []
    for kill_after in kills:
        start = Start(packages, *words, kill_after=kill_after)
        assert len(start.lines) == kill_after, start.said
        lines += start.lines
    last = Start(packages, *words)
    assert last.code == 0, last.said
    assert last.first_step > 0, "it began from scratch"
    return lines + last.lines


def test_a_run_that_is_killed_at_random_moments(daemon: Daemon, packages: str) -> None:
    whole = undisturbed(packages)
    assert len(whole) == len(set(whole)) == 3 * EPOCH + 3
    kills = random.Random(SEED).choices(range(3, 9), k=4)
    found = killed_again_and_again(packages, kills)
    assert set(found) == set(whole)
    # What is done again is what was on its way to be committed.
    assert len(found) <= len(whole) + 3 * len(kills)


@pytest.mark.parametrize("lines", [EPOCH, EPOCH + 1, EPOCH + 2])
def test_a_run_that_is_killed_where_an_epoch_ends(
    daemon: Daemon, packages: str, lines: int
) -> None:
    """The last step, the validation, the first step of the next epoch."""
    whole = undisturbed(packages)
    assert set(killed_again_and_again(packages, [lines])) == set(whole)


def test_two_ranks(daemon: Daemon, packages: str) -> None:
    words = ["--devices=2"]
    whole = undisturbed(packages, *words)
    assert {each.split()[1] for each in whole} == {"0", "1"}
    assert set(killed_again_and_again(packages, [9, 13], *words)) == set(whole)


def test_another_number_of_ranks(daemon: Daemon, packages: str) -> None:
    Start(packages, "--devices=2", kill_after=13)
    second = Start(packages)
    assert second.code == 0, second.said
    assert "the epoch begins again" in second.said
    assert second.first_step > 0


def test_a_finished_run_trains_nothing_and_may_be_made_longer(
    daemon: Daemon, packages: str
) -> None:
    two = Start(packages, "--epochs=2")
    again = Start(packages, "--epochs=2")
    assert (two.code, again.code, again.lines) == (0, 0, []), again.said
    three = Start(packages, "--epochs=3")
    assert three.code == 0, three.said
    assert three.first_step == 2 * EPOCH and len(three.lines) == EPOCH + 1


def test_what_is_told_to_end_ends_behind_a_saved_step(daemon: Daemon, packages: str) -> None:
    stop = "import os, signal; os.kill(os.getpid(), signal.SIGTERM)"
    script = EXAMPLE.read_text().replace(
        "        return loss\n\n    def validation",
        f"        if self.global_step == 4:\n            {stop}\n        return loss\n\n    def validation",
    )
    assert stop in script
    told = Start(packages, script=script)
    assert told.code == 0, told.said
    whole = undisturbed(packages)
    assert told.lines[:5] == whole[:5]
    assert len(told.lines) == 6 and "val" in told.lines[5]  # Lightning validates when it is stopped
    rest = Start(packages)
    assert told.lines[:5] + rest.lines == whole


REFUSED = {
    "a DataLoader cannot say which batch comes next": (
        "import StatefulDataLoader\n",
        "import StatefulDataLoader\nStatefulDataLoader = torch.utils.data.DataLoader\n",
    ),
    "the data has no length": (
        "StatefulDataLoader(Sums(), batch_size=4, shuffle=True)",
        "StatefulDataLoader(Endless(), batch_size=4)",
    ),
    "every=0: it is at least 1": (
        "HoldfastCallback(options.job)",
        "HoldfastCallback(options.job, every=0)",
    ),
}
ENDLESS = """
class Endless(torch.utils.data.IterableDataset):
    def __iter__(self):
        while True:
            yield Sums()[0]

"""


@pytest.mark.parametrize("said", REFUSED)
def test_what_cannot_resume_is_refused_at_once(daemon: Daemon, packages: str, said: str) -> None:
    before, after = REFUSED[said]
    script = EXAMPLE.read_text().replace(before, after)
    script = script.replace("parser = argparse", ENDLESS + "parser = argparse")
    start = Start(packages, script=script)
    assert start.code == 1 and start.lines == []
    assert said in start.said


def test_a_path_is_no_second_place_to_resume_from(
    daemon: Daemon, packages: str, tmp_path: pathlib.Path
) -> None:
    other = tmp_path / "other.ckpt"
    script = EXAMPLE.read_text().replace(
        "callbacks=[HoldfastCallback(options.job)]", "callbacks=[]"
    )
    assert Start(packages, script=script + f"trainer.save_checkpoint({str(other)!r})").code == 0
    script = EXAMPLE.read_text().replace(
        "batch_size=20),\n", f"batch_size=20),\n    ckpt_path={str(other)!r},\n"
    )
    script = script.replace("max_epochs=options.epochs", "max_epochs=5")
    first = Start(packages, script=script, kill_after=5)
    assert first.first_step == 3 * EPOCH  # a first start may begin with one
    again = Start(packages, script=script)
    assert again.code == 1 and again.lines == []
    assert "leave ckpt_path out" in again.said


def test_a_strategy_that_cannot_be_restored_is_refused(packages: str) -> None:
    script = """
from types import SimpleNamespace
from holdfast.integrations.lightning import HoldfastCallback
class FSDPStrategy: pass
HoldfastCallback("job").on_fit_start(SimpleNamespace(strategy=FSDPStrategy()), None)
"""
    start = Start(packages, script=script)
    assert start.code == 1 and "strategy FSDPStrategy is none of" in start.said
