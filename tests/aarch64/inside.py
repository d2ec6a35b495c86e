"""What runs in the emulated machine: a daemon, and a training process that saves, is killed, and restores.

    inside.py       with ckptd and ckptctl in /run/share/bin, and the client's package in /run/share/site

It writes what it saw to /run/share/answer.
"""

from __future__ import annotations

import ctypes
import json
import os
import pathlib
import platform
import shutil
import signal
import subprocess
import sys
import time

SHARE = pathlib.Path("/run/share")
PLACE = pathlib.Path("/run/holdfast")
MEMORY = pathlib.Path("/dev/shm/holdfast")
ELEMENTS = 2_000_000
DEADLINE_S = 600
SETTINGS = f"""
memory: {{dir: {MEMORY}, bytes_max: 256MiB}}
state_dir: {PLACE}/state
socket: {{path: {PLACE}/ckptd.sock}}
admin: {{path: {PLACE}/admin.sock}}
nvme: {{dirs: [{PLACE}/nvme], bytes_max: 256MiB}}
policy: {{nvme: {{every_steps: 1}}}}
"""


def start() -> subprocess.Popen[bytes]:
    PLACE.mkdir(mode=0o755, exist_ok=True)
    (PLACE / "nvme").mkdir(mode=0o700, exist_ok=True)
    (PLACE / "ckptd.yaml").write_text(SETTINGS)
    with open(SHARE / "ckptd.log", "ab") as log:
        daemon = subprocess.Popen(
            [SHARE / "bin/ckptd", "--config", PLACE / "ckptd.yaml"], stdout=log, stderr=log
        )
    until = time.monotonic() + DEADLINE_S
    while subprocess.run(
        [SHARE / "bin/ckptctl", "status", "--socket", PLACE / "admin.sock"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        check=False,
    ).returncode:
        assert daemon.poll() is None and time.monotonic() < until, "ckptd does not answer"
        time.sleep(0.5)
    return daemon


def state(step: int) -> tuple[object, ctypes.Array[ctypes.c_float]]:
    from holdfast import _core  # type: ignore[import-not-found]

    tensors = _core.TensorList()
    tensors.add("w", "F32", (ELEMENTS,))
    return tensors, (ctypes.c_float * ELEMENTS)(*(float(step + i % 1000) for i in range(ELEMENTS)))


def trainer(step: int) -> None:
    """Saves, then waits to be killed."""
    from holdfast import NothingToRestore, _core

    job = _core.Job("job", rank=0, world_size=1, socket=str(PLACE / "ckptd.sock"))
    try:
        restore(job)
    except NothingToRestore:
        pass
    tensors, memory = state(step)
    job.save(step, tensors, [ctypes.addressof(memory)], [], hold=False).wait("nvme", DEADLINE_S)
    print("saved", flush=True)
    signal.pause()


def restore(job: object) -> tuple[int, str, bytes]:
    tensors, memory = state(0)
    restored = job.restore(lambda saved, objects, of_all: (tensors, [ctypes.addressof(memory)]))  # type: ignore[attr-defined]
    return restored.step, restored.source, bytes(memory)


def kill(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()


def main() -> None:
    from holdfast import _core

    answer: dict[str, object] = {"machine": platform.machine()}
    daemon = start()
    training = subprocess.Popen([sys.executable, __file__, "3"], stdout=subprocess.PIPE)
    assert training.stdout is not None
    assert training.stdout.readline() == b"saved\n"
    kill(training)
    kill(daemon)
    for what in ("from_memory", "from_nvme"):
        if what == "from_nvme":
            shutil.rmtree(MEMORY)
        daemon = start()
        job = _core.Job("job", rank=0, world_size=1, socket=str(PLACE / "ckptd.sock"))
        step, source, content = restore(job)
        answer[what] = {"step": step, "source": source, "same": content == bytes(state(3)[1])}
        job.close()
        kill(daemon)
    daemon = start()
    asked = [SHARE / "bin/ckptctl", "verify", "job", "--socket", PLACE / "admin.sock"]
    answer["verify"] = subprocess.run(asked, check=False).returncode
    kill(daemon)
    (SHARE / "answer").write_text(json.dumps(answer))


if __name__ == "__main__":
    os.environ["PYTHONPATH"] = str(SHARE / "site")
    sys.path.insert(0, str(SHARE / "site"))
    if len(sys.argv) > 1:
        trainer(int(sys.argv[1]))
    else:
        main()
