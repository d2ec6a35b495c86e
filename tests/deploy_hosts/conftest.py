"""What the tests of what is installed share."""

from __future__ import annotations

import os
import pathlib
import re
import subprocess
from collections.abc import Iterator

import pytest
from installed import Host
from machine import Machine

TREE = pathlib.Path(__file__).resolve().parents[2]
BUILD = pathlib.Path(os.environ.get("HOLDFAST_TEST_BUILD", TREE / "build/test"))
PACKAGING_DEADLINE_S = 300


@pytest.fixture(scope="session")
def packages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, pathlib.Path]:
    """The Debian packages of this build, by their names."""
    made = os.environ.get("HOLDFAST_TEST_PACKAGES")  # by ctest, once for all files
    folder = pathlib.Path(made or tmp_path_factory.mktemp("packages"))
    if not made:
        done = subprocess.run(
            ["/usr/bin/cpack", "-G", "DEB", "-B", folder, "--config", BUILD / "CPackConfig.cmake"],
            capture_output=True,
            text=True,
            timeout=PACKAGING_DEADLINE_S,
        )
        assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    found = {re.sub("_.*", "", path.name): path for path in folder.glob("*.deb")}
    assert sorted(found) == ["holdfast", "holdfast-dev"]
    return found


@pytest.fixture
def machine(tmp_path: pathlib.Path) -> Iterator[Machine]:
    # Other users look into it.
    for folder in (tmp_path, *tmp_path.parents[:2]):
        folder.chmod(0o755)
    with Machine(tmp_path, {BUILD: "/opt/build", TREE / "deploy": "/opt/deploy"}) as one:
        yield one


@pytest.fixture
def host(
    machine: Machine, tmp_path: pathlib.Path, packages: dict[str, pathlib.Path]
) -> Iterator[Host]:
    """A machine with the package installed and a drive; ckptd does not run yet."""
    one = Host(machine, tmp_path)
    one.install(packages["holdfast"])
    yield one
    print(one.log())
