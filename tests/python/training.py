"""examples/train_gpt.py under torchrun, and as it is when nobody disturbs it."""

from __future__ import annotations

import importlib.util
import os
import pathlib
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

from ranks import run_ranks

from daemons import DEADLINE_S, WHOLE_LINES

EXAMPLE = pathlib.Path(__file__).resolve().parents[2] / "examples" / "train_gpt.py"
# Tiny, so that a step takes milliseconds.
SMALL = [
    "--device=cpu",
    "--layers=2",
    "--dim=32",
    "--heads=2",
    "--context=32",
    "--batch=4",
    "--print-every=1000000",
]
_PAUSE_S = 0.005
# Of what these tests leave to chance; they print it.
SEED = int(os.environ.get("HOLDFAST_TEST_SEED", "20250704"))


def wait_until(
    what: str,
    holds: Callable[[], Any],
    deadline_s: float = DEADLINE_S,
    said: Callable[[], str] = str,
) -> Any:
    """The first true answer of `holds`; fails after the deadline, with what `said` tells."""
    end = time.monotonic() + deadline_s
    while True:
        answer = holds()
        if answer:
            return answer
        assert time.monotonic() < end, f"not within {deadline_s} s: {what}\n{said()}"
        time.sleep(_PAUSE_S)


def listens(endpoint: str) -> bool:
    """Whether a process listens at that port of this machine."""
    port = f":{int(endpoint.rpartition(':')[2]):04X}"
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in pathlib.Path(table).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[1].endswith(port) and fields[3] == "0A":
                return True
    return False


def read_losses(path: pathlib.Path) -> list[tuple[int, str]]:
    """(step, loss) in the order in which they were written; a line that is being written is left out."""
    if not path.exists():
        return []
    lines = path.read_text().split("\n")[:-1]
    return [(int(step), loss) for step, loss in (line.split() for line in lines)]


def undisturbed(
    steps: int,
    path: pathlib.Path,
    ranks: int = 1,
    group: bool = False,
    arguments: tuple[str, ...] = (),
) -> dict[int, str]:
    """The losses of a run of so many steps that is never interrupted. `group`: under torchrun even if it is one rank."""

    def work(rank: int) -> None:
        spec = importlib.util.spec_from_file_location("train_gpt", EXAMPLE)
        assert spec is not None and spec.loader is not None
        example = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(example)
        if ranks == 1 and not group:
            for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
                os.environ.pop(name, None)
        sys.argv = [
            "train_gpt.py",
            *SMALL,
            f"--job=undisturbed-{path.name}",
            f"--steps={steps}",
            f"--losses={path}",
            *arguments,
        ]
        with open(path.with_suffix(".out"), "w") as out:
            os.dup2(out.fileno(), 1)
            example.main()

    run_ranks(ranks, work, group=False, deadline_s=600)
    losses = read_losses(path)
    assert [step for step, _ in losses] == list(range(steps))
    return dict(losses)


class Torchrun:
    """torchrun with the example; `close` ends it with all of its workers. `launcher`: torchrun's own options; None: no torchrun,
    one process by itself.

        run = Torchrun(tmp_path / "run", "job", steps=100)
        run.await_step(20)
        os.kill(run.workers()[0], signal.SIGKILL)
        assert run.wait() == 0
    """

    def __init__(
        self,
        root: pathlib.Path,
        job: str,
        *,
        steps: int,
        ranks: int = 1,
        restarts: int = 100,
        arguments: tuple[str, ...] = (),
        launcher: tuple[str, ...] | None = ("--standalone",),
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.output, self.losses_path = root.with_suffix(".out"), root.with_suffix(".losses")
        torchrun = [
            "-m",
            "torch.distributed.run",
            *(launcher or ()),
            f"--nproc-per-node={ranks}",
            f"--max-restarts={restarts}",
            f"--log-dir={root.with_suffix('.launcher')}",  # by itself it leaves one in /tmp
        ]
        command = [
            sys.executable, *(() if launcher is None else torchrun), str(EXAMPLE), *SMALL, f"--job={job}", f"--steps={steps}", f"--losses={self.losses_path}", *arguments,
        ]  # fmt: skip
        with open(self.output, "ab") as out:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                env={**os.environ, **WHOLE_LINES, "OMP_NUM_THREADS": "1", **(environment or {})},
            )

    def said(self) -> str:
        return self.output.read_text(errors="replace")[-6000:]

    def losses(self) -> list[tuple[int, str]]:
        return read_losses(self.losses_path)

    def newest(self) -> int:
        losses = self.losses()
        return losses[-1][0] if losses else -1

    def resumed(self) -> list[int]:
        """After which steps the workers went on, in the order of their starts; -1: from scratch."""
        found = re.findall(
            r"resumed after step (\d+) from \w+|^(from scratch)$",  # (torchrun runs its workers with -u)
            self.output.read_text(errors="replace"),
            re.MULTILINE,
        )
        return [-1 if scratch else int(step) for step, scratch in found]

    def workers(self, after_restart: int = -1) -> dict[int, int]:
        """Process ids of the workers that run now, by rank; those that were started after so many restarts alone."""
        found = {}
        for task in pathlib.Path(f"/proc/{self.process.pid}/task").iterdir():
            for child in _read(task / "children").split():
                environment = dict(
                    each.split("=", 1)
                    for each in _read(pathlib.Path(f"/proc/{child}/environ")).split("\0")
                    if "=" in each
                )
                if (
                    "RANK" in environment
                    and int(environment["TORCHELASTIC_RESTART_COUNT"]) > after_restart
                ):
                    found[int(environment["RANK"])] = int(child)
        return found

    def await_true(self, what: str, holds: Callable[[], Any]) -> Any:
        def holds_or_ended() -> Any:
            answer = holds()
            assert answer or self.process.poll() is None, (
                f"torchrun ended with {self.process.returncode} before: {what}\n{self.said()}"
            )
            return answer

        return wait_until(what, holds_or_ended, said=self.said)

    def await_step(self, step: int) -> None:
        """Until the loss of this step, or of a later one, was written."""
        self.await_true(f"step {step}", lambda: self.newest() >= step)

    def await_steps_more(self, steps: int) -> None:
        """Until so many losses more than now were written."""
        known = len(self.losses())
        self.await_true(f"{steps} steps more", lambda: len(self.losses()) >= known + steps)

    def wait(self) -> int:
        return self.process.wait(DEADLINE_S)

    def kill(self) -> None:
        """SIGKILL of the agent and its workers: as if its machine had died. Workers have sessions of their own."""
        self.process.send_signal(signal.SIGSTOP)  # it starts no others meanwhile
        for pid in self.workers().values() if self.process.poll() is None else ():
            os.kill(pid, signal.SIGKILL)
        self.process.kill()
        self.process.wait(DEADLINE_S)

    def close(self) -> None:
        if self.process.poll() is None:
            self.kill()


def _read(path: pathlib.Path) -> str:
    try:
        return path.read_text(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return ""


# The last save may not be copied yet, and the one before not sealed, when a worker dies.
LOST_MAX = 2


def check_losses(run: Torchrun, reference: dict[int, str], starts: int) -> None:
    """Every loss of every incarnation is the undisturbed run's, no step is left out, and none of them began from scratch but the
    first: each of `starts` went on from where the one before was."""
    losses = run.losses()
    wrong = [(step, loss, reference[step]) for step, loss in losses if reference[step] != loss]
    assert not wrong, f"losses that differ: {wrong[:5]}\n{run.said()}"
    assert {step for step, _ in losses} == set(range(max(step for step, _ in losses) + 1))
    resumed = run.resumed()
    assert resumed[0] == -1 and -1 not in resumed[1:], resumed
    assert len(resumed) >= starts, resumed
    newest = -1
    for (before, _), (step, _) in zip(losses, losses[1:], strict=False):
        newest = max(newest, before)
        if step != before + 1:
            assert step - 1 in resumed, (
                f"step {step} after {before}: no start resumed after {step - 1}: {resumed}"
            )
            assert step - 1 >= newest - LOST_MAX, (
                f"resumed after {step - 1}, where {newest} had been made"
            )
