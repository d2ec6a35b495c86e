"""Which rank of how many a process is, by its launcher's environment; what is installed beside it."""

from __future__ import annotations

import pathlib

import pytest

from holdfast import InvalidArgumentError, _namesake, _programs
from holdfast._environment import Environment, detect

TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "TORCHELASTIC_RESTART_COUNT": "2",
    "TORCHELASTIC_RUN_ID": "none",
}
SLURM = {
    "SLURM_PROCID": "1",
    "SLURM_NTASKS": "2",
    "SLURM_LOCALID": "0",
    "SLURM_JOB_ID": "77",
    "SLURM_STEP_ID": "3",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "4",
    "OMPI_COMM_WORLD_SIZE": "6",
    "OMPI_COMM_WORLD_LOCAL_RANK": "0",
}
PMI = {"PMI_RANK": "0", "PMI_SIZE": "2", "MPI_LOCALRANKID": "0"}


def test_nothing_is_rank_0_of_1() -> None:
    assert detect({}) == Environment(0, 1, "", "")


def test_torchrun_without_a_launch_id() -> None:
    # Its restart count differs between agents when one of two was restarted.
    assert detect(TORCHRUN) == Environment(3, 8, "", "torchrun")


def test_slurm_with_its_step_and_restart_as_launch_id() -> None:
    assert detect(SLURM) == Environment(1, 2, "77.3.0", "Slurm")
    assert detect({**SLURM, "SLURM_RESTART_COUNT": "5"}).launch == "77.3.5"


@pytest.mark.parametrize("step", [None, "4294967291", "4294967290"])
def test_a_batch_script_or_an_interactive_shell_is_no_srun_task(step: str | None) -> None:
    environ = {"SLURM_PROCID": "0", "SLURM_NTASKS": "64", "SLURM_JOB_ID": "77"}
    if step is not None:
        environ["SLURM_STEP_ID"] = step
    assert detect(environ) == Environment()


def test_mpi() -> None:
    assert detect(OPEN_MPI) == Environment(4, 6, "", "Open MPI")
    assert detect(PMI) == Environment(0, 2, "", "PMI")


def test_the_inner_launcher_counts() -> None:
    assert detect({**SLURM, **OPEN_MPI, **PMI, **TORCHRUN}).launcher == "torchrun"
    assert detect({**SLURM, **PMI, **OPEN_MPI}) == Environment(4, 6, "", "Open MPI")


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        ({"RANK": "0"}, "RANK is set and WORLD_SIZE is not"),
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE is set and RANK is not"),
        ({"RANK": "zero", "WORLD_SIZE": "2"}, "RANK='zero' is not a number"),
        ({"RANK": "-1", "WORLD_SIZE": "2"}, "RANK='-1' is not a number"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "contradict each other"),
        ({"RANK": "0", "WORLD_SIZE": "0"}, "contradict each other"),
        ({**SLURM, "SLURM_NTASKS": ""}, "SLURM_PROCID is set and SLURM_NTASKS is not"),
        ({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "1"}, "contradict each other"),
        ({"PMI_SIZE": "1"}, "PMI_SIZE is set and PMI_RANK is not"),
    ],
)
def test_what_cannot_be_is_an_error_with_a_way_out(environ: dict[str, str], words: str) -> None:
    with pytest.raises(InvalidArgumentError, match=words):
        detect(environ)
    assert detect(environ, rank=0, world_size=1).world_size == 1


def test_what_is_given_wins() -> None:
    assert detect(TORCHRUN, rank=0, world_size=2, launch="mine") == Environment(
        0, 2, "mine", "torchrun"
    )
    assert detect({}, rank=1, world_size=2) == Environment(1, 2, "", "")
    assert detect(TORCHRUN, rank=5).rank == 5
    with pytest.raises(InvalidArgumentError, match="rank 8 of 8"):
        detect(TORCHRUN, rank=8)
    with pytest.raises(InvalidArgumentError, match="rank 1 of 1"):
        detect({}, rank=1)
    with pytest.raises(InvalidArgumentError, match="not an int"):
        detect({}, rank=True, world_size=2)


def test_the_namesake_is_told_of(tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "holdfast_ckpt-0.1.0.dist-info").mkdir()
    _namesake.warn_of_namesake(str(tmp_path))
    _namesake.warn_of_namesake("/nowhere")
    assert not caplog.records
    (tmp_path / "holdfast-1.2.dist-info").mkdir()
    _namesake.warn_of_namesake(str(tmp_path))
    [record] = caplog.records
    assert f"'{tmp_path}' has PyPI's package holdfast 1.2 too" in record.getMessage()


def test_the_daemons_distribution_is_found(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert _programs.carried("ckptd") is None
    program = tmp_path / "holdfast_ckptd/bin/ckptd"
    program.parent.mkdir(parents=True)
    (tmp_path / "holdfast_ckptd/__init__.py").touch()
    program.touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    assert _programs.carried("ckptd") is None  # cannot be run
    program.chmod(0o755)
    assert _programs.carried("ckptd") == str(program)
    assert _programs.carried("ckptctl") is None
