"""Which rank of how many this process is, as its launcher says: torchrun, Open MPI, PMI (MPICH,
Hydra, Intel MPI) or Slurm.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping

from holdfast._errors import InvalidArgumentError

# srun numbers its steps from 0; the batch script, an interactive shell and the external step have
# numbers near 2^32. What runs there directly was not started by srun, and is a process of its own,
# whatever SLURM_NTASKS says of the allocation.
_SLURM_FIRST_SPECIAL_STEP = 0xFFFFFFF0


_WORLD_SIZE_MAX = 2**32 - 1
_DIGITS_MAX = 10
_SHOWN = 40  # of what somebody has put there


@dataclasses.dataclass(frozen=True)
class Environment:
    """A process's place among those that were started together.

    >>> detect({"RANK": "1", "WORLD_SIZE": "4"})
    Environment(rank=1, world_size=4, launch='', launcher='torchrun')
    """

    rank: int = 0
    world_size: int = 1
    # The same for all ranks of one start and new at every restart, or "" where the launcher has no
    # such thing.
    launch: str = ""
    # "": none was recognised.
    launcher: str = ""


@dataclasses.dataclass(frozen=True)
class _Launcher:
    name: str
    rank: str
    world_size: str


# The innermost first: torchrun may have been started by srun or mpirun, and mpirun by Slurm; never
# the other way round.
_LAUNCHERS = (
    _Launcher("torchrun", "RANK", "WORLD_SIZE"),
    _Launcher("Open MPI", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    _Launcher("PMI", "PMI_RANK", "PMI_SIZE"),
    _Launcher("Slurm", "SLURM_PROCID", "SLURM_NTASKS"),
)


def _number(environ: Mapping[str, str], name: str) -> int | None:
    text = environ.get(name, "").strip()
    if not text:
        return None
    if not (text.isascii() and text.isdigit() and len(text) <= _DIGITS_MAX):
        raise InvalidArgumentError(
            f"environment: {name}={environ[name][:_SHOWN]!r} is not a number that could be: unset it, or pass "
            "rank= and world_size= yourself"
        )
    return int(text)


def _in_srun_step(environ: Mapping[str, str]) -> bool:
    step = _number(environ, "SLURM_STEP_ID")
    return step is not None and step < _SLURM_FIRST_SPECIAL_STEP


def _slurm_launch(environ: Mapping[str, str]) -> str:
    job = environ.get("SLURM_JOB_ID", "").strip()
    if not job:
        return ""
    restarts = environ.get("SLURM_RESTART_COUNT", "").strip() or "0"
    return f"{job}.{environ['SLURM_STEP_ID'].strip()}.{restarts}"


def _read(environ: Mapping[str, str]) -> Environment:
    for launcher in _LAUNCHERS:
        if launcher.name == "Slurm" and not _in_srun_step(environ):
            continue
        rank, world_size = _number(environ, launcher.rank), _number(environ, launcher.world_size)
        if rank is None and world_size is None:
            continue
        if rank is None or world_size is None:
            there, missing = (
                (launcher.world_size, launcher.rank)
                if rank is None
                else (launcher.rank, launcher.world_size)
            )
            raise InvalidArgumentError(
                f"environment: {there} is set and {missing} is not: set both, as {launcher.name} "
                "does, or pass rank= and world_size="
            )
        if rank >= world_size:
            raise InvalidArgumentError(
                f"environment: {launcher.rank}={rank} and {launcher.world_size}={world_size} "
                "contradict each other: "
                "ranks count from 0 to the world size less one"
            )
        # No launch id of torchrun's: its restart count differs between agents when one of two was
        # restarted, and one that the ranks of a start do not share would keep them apart for ever
        # (docs/protocol.md §2, rule 5 does without). Those of MPI may come again when process ids
        # do.
        launch = _slurm_launch(environ) if launcher.name == "Slurm" else ""
        return Environment(rank, world_size, launch, launcher.name)
    return Environment()


def detect(
    environ: Mapping[str, str] | None = None,
    *,
    rank: int | None = None,
    world_size: int | None = None,
    launch: str | None = None,
) -> Environment:
    """The place that the environment gives this process; what is given here wins. With rank and
    world size given, what the environment says of them is not even looked at.

    >>> detect({"RANK": "1", "WORLD_SIZE": "2"}, rank=0).rank
    0
    """
    environ = os.environ if environ is None else environ
    for what, value in (("rank", rank), ("world_size", world_size)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
            raise InvalidArgumentError(f"{what}={value!r} is not an int")
    try:
        found = _read(environ)
    except InvalidArgumentError:
        if rank is None or world_size is None:
            raise
        found = Environment()
    rank = found.rank if rank is None else rank
    world_size = found.world_size if world_size is None else world_size
    if not 0 <= rank < world_size <= _WORLD_SIZE_MAX:
        raise InvalidArgumentError(
            f"rank {rank} of {world_size} cannot be"
            + (
                f" (of {found.launcher} in the environment: rank {found.rank} of "
                f"{found.world_size})"
                if found.launcher
                else ""
            )
            + ": ranks count from 0 to the world size less one"
        )
    return dataclasses.replace(
        found, rank=rank, world_size=world_size, launch=found.launch if launch is None else launch
    )
