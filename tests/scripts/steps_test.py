"""scripts/progress: steps show that they go on, and failures why. And shellcheck has nothing to say of the scripts."""

from __future__ import annotations

import subprocess

import pytest
from conftest import DEADLINE_S, ROOT, Tree, without_times


def until_shown(text: str, meanwhile: str = "") -> str:
    return f"until grep -q '{text}' shown; do {meanwhile} /bin/sleep 0.01; done"


def step(tree: Tree, command: str) -> subprocess.CompletedProcess[str]:
    """What the script says goes to the file `shown`, for which the steps here wait, and to `stderr`. Five seconds are short."""
    tree.fake("sleep", 'exec /bin/sleep "0.0$1"')
    tree.write(
        "steps",
        f"#!/bin/bash\nset -euo pipefail\ncd {tree.place}\n. scripts/progress\nexec 2>shown\n{command}\n",
    )
    done = tree.run("steps")
    done.stderr = without_times((tree.place / "shown").read_text())
    return done


def test_a_step_shows_how_far_it_is(tree: Tree) -> None:
    log = f"echo '12 of 310 steps: a.cc'; echo 'a.cc: warning: 3 of 4 steps'; {until_shown('12 of')}; echo end"
    done = step(tree, f'run_step "building" logs/log bash -c "{log}"')
    assert (done.returncode, done.stdout) == (0, "")
    lines = done.stderr.splitlines()
    assert "building: 12 of 310 steps, TIME" in done.stderr
    assert lines[-1].startswith("building: done, TIME")
    assert (tree.place / "logs/log").read_text().endswith("end\n")


def test_a_step_that_counts_nothing_shows_its_last_line(tree: Tree) -> None:
    log = f"echo Unpacking one; {until_shown('one')}"
    done = step(tree, f'run_step packages log bash -c "{log}"')
    assert "packages: Unpacking one, TIME" in done.stderr


def test_a_step_that_fails_shows_the_end_of_its_log(tree: Tree) -> None:
    done = step(tree, "run_step packing log bash -c 'seq 100; exit 3'\necho never")
    assert (done.returncode, done.stdout) == (3, "")
    lines = done.stderr.splitlines()
    assert lines[:40] == [str(number) for number in range(61, 101)]
    assert lines[40:] == ["packing: failed after TIME. Its whole log: log"]


def test_a_step_that_shows_itself_keeps_its_output_and_status(tree: Tree) -> None:
    done = step(tree, "show_step tests log bash -c 'echo one; echo two >&2; exit 4'")
    assert (done.returncode, done.stdout) == (4, "one\ntwo\n")
    assert done.stderr == "tests: failed after TIME. Its whole log: log\n"
    assert (tree.place / "log").read_text() == "one\ntwo\n"


def test_silence_is_filled(tree: Tree) -> None:
    # Its log is as old as if it had been silent for long.
    log = f"echo '  3/9 Test  #3: a_test'; {until_shown('3 of', 'touch -d yesterday log;')}"
    done = step(tree, f'show_step tests log bash -c "{log}"')
    assert "tests: 3 of 9 tests, TIME" in done.stderr


def test_what_is_not_silent_is_left_alone(tree: Tree) -> None:
    done = step(
        tree, "show_step tests log bash -c 'for i in 1 2 3 4; do echo; /bin/sleep 0.1; done'"
    )
    assert done.stderr.startswith("tests: done, TIME")


@pytest.mark.parametrize(
    ("spent", "shown"), [(0, "0:00"), (59, "0:59"), (485, "8:05"), (3600, "60:00")]
)
def test_minutes(tree: Tree, spent: int, shown: str) -> None:
    assert step(tree, f"minutes {spent}").stdout == shown


def test_a_new_tree_needs_room(tree: Tree) -> None:
    tree.write("scripts/setup", "#!/bin/bash\n")
    tree.fake("df", "echo heading; echo x x x 900 x")
    done = tree.run("scripts/build", "test", "ckptd")
    assert done.returncode == 1
    assert done.stderr == (
        "scripts/build: building ckptd needs 1000 MB in .: it has 900 MB free. Free some, or use a clone on a larger disk.\n"
    )
    assert "building all of the preset release needs 6000 MB" in tree.run("scripts/build").stderr


def test_shellcheck_finds_nothing() -> None:
    scripts = [
        path
        for path in [*(ROOT / "scripts").iterdir(), ROOT / ".ci/run"]
        if path.is_file() and path.read_text().startswith("#!/usr/bin/env bash")
    ]
    assert len(scripts) >= 12
    # (SC2012: the names that `ls` lists are ours.)
    command = ["shellcheck", "--external-sources", "--exclude=SC2012", *scripts]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=DEADLINE_S)
    assert done.returncode == 0, done.stdout
