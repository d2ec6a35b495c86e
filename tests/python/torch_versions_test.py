"""The versions of PyTorch that the package supports, each a real installation: the newest patch of each minor version, on which
the package's main tests run. The other tests run on the one that tests/python/requirements.txt names.

    tests/python/run build/test torch_versions_test.py -k 2.6.0

An installation takes 2 to 6 GB while its tests run.
"""

from __future__ import annotations

import os
import pathlib
import re
import shutil
import subprocess
import sys

import pytest

VERSIONS = (
    "2.6.0", "2.7.1", "2.8.0", "2.9.1", "2.10.0", "2.11.0", "2.12.1", "2.13.0", "2.14.1",
)  # fmt: skip
HERE = pathlib.Path(__file__).resolve().parent
TREE = HERE.parents[1]
TESTS = (
    "checkpointer_test.py",
    "restore_test.py",
    "tensor_kinds_test.py",
    "subclasses_test.py",
)
# What that PyTorch cannot do itself.
WITHOUT = {
    "2.6.0": "fsdp2 or lists_of_tensors",  # FSDP2 on a processor: 'Stream' has no 'record_event'
}
INSTALL_DEADLINE_S = 1800
TESTS_DEADLINE_S = 1800


def run(*command: str | os.PathLike[str], deadline: float, **options: object) -> str:
    done = subprocess.run(
        [str(word) for word in command],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=deadline,
        check=False,
        **options,
    )  # type: ignore[call-overload]
    assert done.returncode == 0, f"{command}\n{done.stdout[-6000:]}"
    return done.stdout


def test_the_oldest_is_what_the_package_asks_for() -> None:
    text = (TREE / "client-lib/python/pyproject.toml").read_text()
    assert re.findall(r'"torch>=([\d.]+)"', text) == [VERSIONS[0].removesuffix(".0")]


@pytest.mark.parametrize("version", VERSIONS)
def test_version(version: str, tmp_path: pathlib.Path) -> None:
    place = tmp_path / "venv"
    run(sys.executable, "-m", "venv", place, deadline=INSTALL_DEADLINE_S)
    others = [
        line
        for line in (HERE / "requirements.txt").read_text().splitlines()
        if re.match(r"(pytest|numpy|safetensors)==", line)
    ]
    python = place / "bin/python"
    try:
        run(
            python, "-m", "pip", "install", "-q", "--no-cache-dir", f"torch=={version}", *others,
            deadline=INSTALL_DEADLINE_S,
        )  # fmt: skip
        for test in TESTS:
            said = run(
                python, "-m", "pytest", "-q", "-p", "no:cacheprovider", HERE / test,
                *(["-k", f"not ({WITHOUT[version]})"] if version in WITHOUT else []),
                deadline=TESTS_DEADLINE_S, cwd=TREE,
            )  # fmt: skip
            assert " passed" in said
    finally:
        shutil.rmtree(place, ignore_errors=True)
