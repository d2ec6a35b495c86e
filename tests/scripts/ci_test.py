"""scripts/ci: its legs, one at a time and all of them."""

from __future__ import annotations

import re

import pytest
from conftest import ROOT, Tree

LEGS = ["format", "plain", "demo", "nodes", "asan", "tsan"]


@pytest.fixture
def calls(tree: Tree) -> Tree:
    """What the legs call says so in a file, makes its tree, and fails if $FAILS is its name."""
    for script in ("setup", "check-format", "test", "demo"):
        tree.write(
            f"scripts/{script}",
            f'#!/bin/bash\ncd {tree.place}\necho "{script} $*" >>calls\n'
            f'case "{script} $*" in *asan) name=asan ;; *tsan) name=tsan ;; *) name=test ;; esac\n'
            '[ "${0##*/}" = setup ] || mkdir -p build/$name\n'
            f'[ "${{FAILS:-}}" != "{script}" ]\n',
        )
    return tree


def called(tree: Tree) -> list[str]:
    return [line.strip() for line in (tree.place / "calls").read_text().splitlines()]


def test_the_list_has_each_leg_its_minutes_and_its_command(tree: Tree) -> None:
    done = tree.run("scripts/ci", "--list")
    assert done.returncode == 0
    heading, *rows = done.stdout.splitlines()
    assert heading.split() == ["leg", "minutes", "command", "checks"]
    assert [row.split()[0] for row in rows] == LEGS
    for row in rows:
        assert re.fullmatch(r"\w+ +\d+  (scripts/\S+|setup|format|&&|--?\w+| |4)+ +\S.*", row), row
        for script in re.findall(r"scripts/[a-z-]+", row):
            assert (ROOT / script).exists(), script


def test_ci_runs_all_of_them(calls: Tree) -> None:
    assert '"$(dirname "$0")/../scripts/ci" all' in (ROOT / ".ci/run").read_text()
    done = calls.run("scripts/ci", "all")
    assert done.returncode == 0, done.stdout + done.stderr
    assert called(calls) == ["setup format", "check-format", "test --plain", "demo", "demo --nodes 4", "test --asan", "test --tsan"]  # fmt: skip
    assert [line.split()[1].strip(":") for line in done.stdout.splitlines()[::2]] == LEGS
    assert re.search(r"^=== asan: passed, \d+:\d\d, \S+ in build/asan$", done.stdout, re.M)
    assert (calls.place / "build/asan").exists()


def test_some_legs(calls: Tree) -> None:
    assert calls.run("scripts/ci", "tsan", "format").returncode == 0
    assert called(calls) == ["test --tsan", "setup format", "check-format"]


def test_in_ci_a_tree_goes_after_the_last_leg_that_uses_it(calls: Tree) -> None:
    calls.write(
        "scripts/check-format", f"#!/bin/bash\nls {calls.place}/build >>{calls.place}/trees\n"
    )
    done = calls.run("scripts/ci", "plain", "format", "nodes", "format", "asan", CI="true")
    assert done.returncode == 0, done.stderr
    # After test there is a leg that uses its tree, after nodes there is none.
    assert (calls.place / "trees").read_text() == "test\n"
    assert list((calls.place / "build").iterdir()) == []


def test_a_leg_that_fails_ends_the_run_and_keeps_its_tree(calls: Tree) -> None:
    done = calls.run("scripts/ci", "all", CI="true", FAILS="demo")
    assert done.returncode == 1
    assert called(calls)[-1] == "demo"
    assert "=== demo: FAILED, " in done.stdout.splitlines()[-1]
    assert (calls.place / "build/test").exists()


def test_bad_arguments(calls: Tree) -> None:
    done = calls.run("scripts/ci")
    assert done.returncode == 2 and "scripts/ci LEG" in done.stderr and done.stdout == ""
    done = calls.run("scripts/ci", "plain", "everything")
    assert done.returncode == 2
    assert "unknown leg 'everything'. Legs: format plain demo nodes asan tsan" in done.stderr
    assert not (calls.place / "calls").exists()
