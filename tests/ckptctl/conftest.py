"""What the tests of ckptctl as an operator has it share: a real ckptd with a job, and what cmake installs."""

from __future__ import annotations

import os
import pathlib
import subprocess
from collections.abc import Iterator

import pytest
from programs import (
    ADMIN_TLS,
    BIN,
    CKPTCTL,
    DEADLINE_S,
    Daemon,
    Remote,
    daemon_with_a_job,
    make_certificates,
    remote_of,
)


@pytest.fixture(scope="session")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    folder = tmp_path_factory.mktemp("certificates")
    make_certificates(folder)
    return folder


@pytest.fixture(scope="session")
def daemon(certificates: pathlib.Path) -> Iterator[Daemon]:
    with daemon_with_a_job(ADMIN_TLS.replace("FOLDER", str(certificates))) as one:
        yield one


@pytest.fixture(scope="session")
def remote(daemon: Daemon, certificates: pathlib.Path) -> Remote:
    return remote_of(daemon, certificates)


@pytest.fixture(scope="session")
def installed(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """What cmake installs of ckptctl."""
    prefix = tmp_path_factory.mktemp("installed")
    subprocess.run(
        [
            "cmake",
            f"-DCMAKE_INSTALL_PREFIX={prefix}",
            "-DCMAKE_INSTALL_COMPONENT=daemon",
            "-P",
            BIN.resolve().parent / "ckptctl/cmake_install.cmake",
        ],
        check=True,
        capture_output=True,
        timeout=DEADLINE_S,
    )
    return prefix


@pytest.fixture
def shell_environment(daemon: Daemon, tmp_path: pathlib.Path) -> dict[str, str]:
    """Of a user who has ckptctl in PATH, and whose daemon it is."""
    return {
        "PATH": f"{CKPTCTL.parent}:{os.environ['PATH']}",
        "HOME": str(tmp_path),
        "TERM": "xterm",
        "LC_ALL": "C.UTF-8",
        "HOLDFAST_ADMIN_SOCKET": str(daemon.admin),
    }
