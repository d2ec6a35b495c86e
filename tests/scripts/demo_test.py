"""scripts/demo, up to the demo itself: its steps, and PyTorch that is installed while the compilers run."""

from __future__ import annotations

import re
import sys
import time

import pytest
from conftest import ROOT, Tree


@pytest.fixture
def steps(tree: Tree) -> Tree:
    tree.write(
        "scripts/setup",
        '#!/bin/bash\necho "setup $*" >>calls\n'
        'if [ "$1" = demo ]; then until [ -e built ]; do sleep 0.01; done; echo "torch: ${TORCH:-0}"; exit ${TORCH:-0}; fi\n',
    )
    tree.write("scripts/build", '#!/bin/bash\necho "build $1" >>calls\ntouch built\n')
    tree.fake("python3", 'echo "$@"')
    return tree


def test_torch_is_installed_while_it_is_built(steps: Tree) -> None:
    done = steps.run("scripts/demo", "--bytes", "7")
    assert done.returncode == 0, done.stderr
    assert done.stderr.splitlines()[:-1] == [
        "1 of 4: packages",
        "2 of 4: building (build/test)",
        "3 of 4: PyTorch",
        "torch: 0",
        "4 of 4: the demo",
    ]
    began = re.fullmatch(
        r"-u scripts/demo\.py build/test/bin --began (\d+) --bytes 7\n", done.stdout
    )
    assert began is not None and abs(int(began[1]) - time.time()) < 60
    calls = (steps.place / "calls").read_text().splitlines()
    assert calls[0] == "setup build" and set(calls[1:]) == {"setup demo", "build test"}


def test_without_torch_there_is_no_demo(steps: Tree) -> None:
    done = steps.run("scripts/demo", TORCH="3")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.splitlines()[-1] == "torch: 3"


def test_how_long_the_first_committed_step_took(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "path", [str(ROOT / "scripts"), *sys.path])
    import demo

    waited = demo.FirstCommit(began=1000)
    monkeypatch.setattr(time, "time", lambda: 1485.9)
    waited.on_committed()
    waited.on_committed()
    assert capsys.readouterr().out == "  first committed step after 8:05\n"
