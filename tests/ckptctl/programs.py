"""The built programs, for the tests of ckptctl as an operator has it."""

from __future__ import annotations

import contextlib
import dataclasses
import pathlib
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT / "tests/python"))

from daemons import BIN, DEADLINE_S, Daemon, own_daemon, run_python  # noqa: E402

__all__ = [
    "ADMIN_TLS",
    "BIN",
    "CKPTCTL",
    "DEADLINE_S",
    "Daemon",
    "ROOT",
    "Remote",
    "ckptctl",
    "daemon_with_a_job",
    "make_certificates",
    "own_daemon",
    "remote_of",
    "run_python",
]

CKPTCTL = BIN.resolve() / "ckptctl"

SAVE = """
import numpy as np
from holdfast import _core
job = _core.Job("llama-7b", rank=0, world_size=1)
w = np.ones(1000, np.float32)
tensors = _core.TensorList()
tensors.add("model.w", "F32", w.shape)
job.save(900, tensors, [w.ctypes.data], []).wait("committed", 60)
"""


def ckptctl(*arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [CKPTCTL, *arguments], input=stdin, capture_output=True, text=True, timeout=DEADLINE_S
    )


@dataclasses.dataclass
class Remote:
    """How the daemon is reached from other machines."""

    address: str
    certificates: pathlib.Path  # as --tls takes it


def make_certificates(folder: pathlib.Path) -> None:
    """One that is the authority, this host, and an operator."""
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"]
        + ["-nodes", "-days", "2", "-subj", "/CN=operator"]
        + ["-addext", "subjectAltName=IP:127.0.0.1"]
        + ["-keyout", folder / "tls.key", "-out", folder / "tls.crt"],
        check=True,
        capture_output=True,
        timeout=DEADLINE_S,
    )
    shutil.copy(folder / "tls.crt", folder / "ca.crt")


ADMIN_TLS = """
admin:
  tls:
    address: "127.0.0.1:0"
    ca_file: FOLDER/ca.crt
    cert_file: FOLDER/tls.crt
    key_file: FOLDER/tls.key
    users: [{certificate: operator, uid: 0}]
"""


def remote_of(daemon: Daemon, certificates: pathlib.Path) -> Remote:
    port = re.search(r"admin_tls_port=(\d+)", daemon.log())
    assert port, daemon.log()
    return Remote(f"127.0.0.1:{port[1]}", certificates)


@contextlib.contextmanager
def daemon_with_a_job(settings: str = "") -> Iterator[Daemon]:
    """node-a's, that has step 900 of the job llama-7b, of a process that has ended."""
    with own_daemon("node_name: node-a\n" + settings) as one:
        saved = run_python(SAVE, HOLDFAST_SOCKET=str(one.socket))
        assert saved.returncode == 0, saved.stderr
        yield one
