"""ckptctl backup into a directory in which somebody's hand was, on file systems with limits, and ended from outside: one damaged step
is named and the others go on, and nothing half done stays behind."""

from __future__ import annotations

import os
import pathlib
import shutil
import signal
import subprocess
from collections.abc import Callable

import pytest
from backup_test import (  # noqa: F401  (fixtures)
    RANKS,
    STEPS,
    answer,
    backed_up,
    ckptctl,
    file_of,
    folder,
    has_nothing_half_done,
    is_whole,
    remote,
    resumed,
    saved_once,
    states,
    stopped,
)
from programs import CKPTCTL, DEADLINE_S

from daemons import Daemon

IMAGE = file_of(pathlib.Path(), 20, 1).name
RECORD = IMAGE.replace(".safetensors", ".record")


def is_a_directory(path: pathlib.Path) -> None:
    path.unlink()
    path.mkdir()


def is_a_link(path: pathlib.Path) -> None:
    other = path.parent.parent.parent / "elsewhere"
    path.rename(other)
    path.symlink_to(other)


def is_a_file(step: pathlib.Path) -> None:
    shutil.rmtree(step)
    step.write_text("bla")


def of_other_bytes(path: pathlib.Path) -> None:
    path.write_bytes(os.urandom(path.stat().st_size))


# What is wrong then, and how it comes about.
DAMAGES: dict[str, tuple[str, Callable[[pathlib.Path], None]]] = {
    "garbage manifest": ("MANIFEST", lambda step: void((step / "MANIFEST").write_text("bla\n"))),
    "manifest is a directory": ("MANIFEST", lambda step: is_a_directory(step / "MANIFEST")),
    "manifest is a link": ("MANIFEST", lambda step: is_a_link(step / "MANIFEST")),
    "step is a link": ("", is_a_link),
    "step is a file": ("", is_a_file),
    "record gone": (IMAGE, lambda step: (step / RECORD).unlink()),
    "garbage record": (RECORD, lambda step: of_other_bytes(step / RECORD)),
    "record is a link": (RECORD, lambda step: is_a_link(step / RECORD)),
    "another's record": (
        RECORD,
        lambda step: void(shutil.copy(step / RECORD.replace("1-of", "0-of"), step / RECORD)),
    ),
    "image gone": (IMAGE, lambda step: (step / IMAGE).unlink()),
    "image is a link": (IMAGE, lambda step: is_a_link(step / IMAGE)),
    "image is a directory": (IMAGE, lambda step: is_a_directory(step / IMAGE)),
    "neither record, and the image is a directory": (
        IMAGE,
        lambda step: void((step / RECORD).unlink(), is_a_directory(step / IMAGE)),
    ),
}


def void(*_: object) -> None:
    return None


WITHOUT_MANIFEST = [(what, "without") for what in DAMAGES if "manifest" not in what]


@pytest.mark.parametrize(
    ("what", "manifest"), [(what, "with manifest") for what in DAMAGES] + WITHOUT_MANIFEST
)
def test_one_damaged_step_is_named_and_the_others_go_on(
    what: str,
    manifest: str,
    saved_once: Daemon,  # noqa: F811
    folder: pathlib.Path,  # noqa: F811
) -> None:
    answer(saved_once, "backup", "job", folder, "--step", "30", "--step", "20")
    step = folder / "job" / "20-a1"
    bad, damage = DAMAGES[what]
    if manifest == "without":
        (step / "MANIFEST").unlink()
    damage(step)
    before = sorted(step.iterdir()) if step.is_dir() else []
    for _ in range(2):
        done = ckptctl(saved_once, "backup", "job", folder)
        assert done.returncode == 1, done.stdout + done.stderr
        named = next(line for line in done.stdout.splitlines() if line.startswith("step 20"))
        assert "BAD: " in named and str(step / bad) in named, named
        assert f"move '{step}' elsewhere, and the same command writes the step anew" in named
        assert f"2 steps of job job are in {folder}, 1 not" in done.stdout
        is_whole(folder, (30, 10))
        assert (sorted(step.iterdir()) if step.is_dir() else []) == before
    step.rename(folder.parent / "aside")
    said = answer(saved_once, "backup", "job", folder)
    assert states(said) == {30: "was_there", 20: "written", 10: "was_there"}
    is_whole(folder)
    has_nothing_half_done(folder)


# ---- limits, and the end of the terminal ----


def with_small_files(*command: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", "-c", 'ulimit -f 1000; exec "$@"', "bash", CKPTCTL, *map(str, command)],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )


@pytest.mark.parametrize("command", ["backup", "restore-backup", "export"])
def test_a_limit_on_files_is_told(
    command: str,
    saved_once: Daemon,  # noqa: F811
    backed_up: pathlib.Path,  # noqa: F811
    folder: pathlib.Path,  # noqa: F811
) -> None:
    """The kernel's signal for it would end the program where it stands."""
    arguments = {
        "backup": ["backup", "job", folder, f"--socket={saved_once.admin}"],
        "restore-backup": ["restore-backup", backed_up, "job", "--to", folder],
        "export": ["export", "job", folder / "set", f"--socket={saved_once.admin}"],
    }
    done = with_small_files(*arguments[command])
    assert done.returncode == 4, done.stdout + done.stderr
    assert "File too large (EFBIG)" in done.stderr and str(folder) in done.stderr
    assert "ulimit -f" in done.stderr
    left = [path for path in folder.rglob("*") if path.name.endswith((".tmp", ".intent"))]
    assert left == []


def test_the_end_of_the_terminal_is_an_interrupt(
    saved_once: Daemon,  # noqa: F811
    folder: pathlib.Path,  # noqa: F811
) -> None:
    point = f"data_written:stop@{RANKS + 1}"
    process = stopped(saved_once, point, "backup", "job", folder)
    process.send_signal(signal.SIGHUP)
    process.send_signal(signal.SIGHUP)  # the shell's and the kernel's
    code, _, err = resumed(process)
    assert code == 130 and "goes on behind the 1 step that is whole" in err, err
    assert [path for path in folder.rglob("*") if path.name.endswith((".tmp", ".intent"))] == []


def test_under_nohup_it_goes_on(
    saved_once: Daemon,  # noqa: F811
    folder: pathlib.Path,  # noqa: F811
) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # which what is started has, too
    try:
        process = stopped(saved_once, "data_written:stop", "backup", "job", folder)
        process.send_signal(signal.SIGHUP)
        code, _, err = resumed(process)
    finally:
        signal.signal(signal.SIGHUP, before)
    assert code == 0, err
    is_whole(folder, STEPS)
