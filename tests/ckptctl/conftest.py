"""What the tests of ckptctl as an operator has it share: a real ckptd with a job, and what cmake installs."""

from __future__ import annotations

import os
import pathlib
import shutil
import subprocess
import tempfile
from collections.abc import Iterator

import pytest
from programs import BIN, CKPTCTL, DEADLINE_S, SAVE, Daemon, run_python


@pytest.fixture(scope="session")
def daemon() -> Iterator[Daemon]:
    """A daemon that has step 900 of the job llama-7b, of a process that has ended."""
    root = pathlib.Path(tempfile.mkdtemp(prefix="hf-ctl-"))
    memory = pathlib.Path(tempfile.mkdtemp(prefix="hf-ctl-", dir="/dev/shm"))
    one = Daemon(root, memory, "node_name: node-a\n")
    try:
        one.start()
        saved = run_python(SAVE, HOLDFAST_SOCKET=str(one.socket))
        assert saved.returncode == 0, saved.stderr
        yield one
    finally:
        one.stop()
        shutil.rmtree(root, ignore_errors=True)
        shutil.rmtree(memory, ignore_errors=True)


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
