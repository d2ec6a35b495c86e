"""A tree with the scripts alone, and programs that stand in for the system's."""

from __future__ import annotations

import os
import pathlib
import re
import shutil
import subprocess

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
DEADLINE_S = 60


def without_times(text: str) -> str:
    return re.sub(r"\b\d+:\d\d\b", "TIME", text)


class Tree:
    """`fake("df", "echo 1")` puts a program before the system's; `run("scripts/setup", "demo")` runs a script of the tree."""

    def __init__(self, place: pathlib.Path) -> None:
        self.place = place
        self.programs = place / "programs"
        self.programs.mkdir(parents=True)
        shutil.copytree(ROOT / "scripts", place / "scripts")
        for file in ("tests/python/requirements.txt", "client-lib/python/wheel-tools.txt"):
            (place / file).parent.mkdir(parents=True)
            shutil.copy(ROOT / file, place / file)
        self.path = f"{self.programs}:/usr/bin:/bin"

    def fake(self, name: str, text: str) -> None:
        self.write(f"programs/{name}", f"#!/bin/bash\n{text}\n")

    def write(self, name: str, text: str) -> None:
        path = self.place / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)

    def run(self, *command: str, **env: str) -> subprocess.CompletedProcess[str]:
        """With TIME instead of each elapsed time on stderr."""
        done = subprocess.run(
            [str(self.place / command[0]), *command[1:]],
            env={k: v for k, v in os.environ.items() if k != "CI"} | {"PATH": self.path} | env,
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
        )
        done.stderr = without_times(done.stderr)
        return done


@pytest.fixture
def tree(tmp_path: pathlib.Path) -> Tree:
    return Tree(tmp_path / "tree")
