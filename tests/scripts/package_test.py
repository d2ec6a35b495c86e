"""scripts/package: what it refuses, and which layers of scripts/setup it asks for. What it makes: tests/python/packages_test.py,
tests/aarch64."""

from __future__ import annotations

import shutil

import pytest
from conftest import ROOT, Tree


@pytest.fixture
def x86(tree: Tree) -> Tree:
    """A machine whose scripts/setup says what it is asked for, and fails."""
    shutil.copy(ROOT / "CMakeLists.txt", tree.place)
    tree.fake("uname", "echo ${MACHINE:-x86_64}")
    tree.write("scripts/setup", '#!/bin/bash\necho "asked for: $@"\nexit 1')
    return tree


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("", "which of client, daemon, tarball, deb?"),
        ("--arch aarch64", "which of client, daemon, tarball, deb?"),
        ("rpm", "unknown argument 'rpm'"),
        ("--deb", "unknown argument '--deb'"),
        ("deb --arch", "--arch needs a value"),
        ("deb --arch riscv64", "nothing is made for 'riscv64': x86_64 or aarch64"),
        ("deb --wheel x.whl", "--wheel is for the tarball"),
        ("tarball client --wheel x.whl", "--wheel is for the tarball"),
    ],
)
def test_what_it_refuses(x86: Tree, arguments: str, says: str) -> None:
    done = x86.run("scripts/package", *arguments.split())
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"scripts/package: {says}") and done.stderr.count("\n") == 1


def test_aarch64_makes_no_daemon_for_x86_64(x86: Tree) -> None:
    done = x86.run("scripts/package", "--arch", "x86_64", "deb", MACHINE="aarch64")
    assert done.returncode == 2
    assert "only the client is made for x86_64 on this machine" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "machine", "layers"),
    [
        ("deb", "x86_64", "deb"),
        ("deb", "aarch64", "deb"),
        ("client --arch aarch64", "x86_64", "wheel"),
        ("client --arch amd64", "aarch64", "wheel"),
        ("deb --arch arm64", "x86_64", "deb arm64"),
        ("client daemon tarball deb --arch aarch64", "x86_64", "wheel deb arm64"),
        ("client daemon tarball deb --arch aarch64", "aarch64", "wheel deb"),
    ],
)
def test_it_installs_what_the_kinds_need_and_no_more(
    x86: Tree, arguments: str, machine: str, layers: str
) -> None:
    done = x86.run("scripts/package", *arguments.split(), MACHINE=machine)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.splitlines()[0] == f"asked for: {layers}"
