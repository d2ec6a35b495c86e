"""64-bit ARM, as far as a machine without it can tell. The client's wheel is cross-compiled and runs in qemu-user, beside this
machine's ckptd; the loops written for the processor agree with the portable ones. ckptd and ckptctl are cross-compiled against
the distribution's libraries, and save, flush and restore in an emulated machine.

    tests/aarch64/run build/test aarch64_test.py

qemu-user maps no memory a second time, so nothing is staged there.
"""

from __future__ import annotations

import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator

import pytest
from guests.guest import ARM64, Guest

TREE = pathlib.Path(__file__).resolve().parents[2]
ROOT = TREE / "build/arm64-root"
EMULATOR = "qemu-aarch64-static"
BUILD_DEADLINE_S = 3000
GUEST_DEADLINE_S = 1800
DEADLINE_S = 600

SMOKE = """
import ctypes, platform, uuid
import holdfast
from holdfast import _core, _daemon
assert platform.machine() == "aarch64"
_daemon.SYSTEM_SOCKET = _daemon.SYSTEM_CONFIG = "/nowhere"
job = uuid.uuid4().hex
state = {"n": 7, "words": ["a", "b"]}
with holdfast.Checkpointer(job, on_error="raise") as ckpt:
    ckpt.save(7, state, wait="committed")
with holdfast.Checkpointer(job, on_error="raise") as ckpt:
    back = {"n": 0, "words": []}
    assert ckpt.restore(back) == 7 and back == state, back
memory = (ctypes.c_float * 3_000_000)(*range(3_000_000))
tensors = _core.TensorList()
tensors.add("w", "F32", (3_000_000,))
with_tensors = _core.Job(job + "t", rank=0, world_size=1, socket=_daemon.ensure_daemon())
save = with_tensors.save(1, tensors, [ctypes.addressof(memory)], [], hold=False)
save.wait("committed", 60)
back = (ctypes.c_float * 3_000_000)()
restored = with_tensors.restore(lambda saved, objects, of_all: (tensors, [ctypes.addressof(back)]))
assert restored.step == 1 and bytes(back) == bytes(memory)
with_tensors.close()
print("saved and restored")
"""


def run(
    *command: str | os.PathLike[str],
    deadline: float = DEADLINE_S,
    cwd: pathlib.Path | None = None,
    **variables: str,
) -> str:
    done = subprocess.run(
        [str(word) for word in command],
        capture_output=True,
        text=True,
        timeout=deadline,
        check=False,
        env=os.environ | variables,
        cwd=cwd,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return done.stdout


@pytest.fixture(scope="session", autouse=True)
def emulator() -> None:
    if shutil.which(EMULATOR) is None:
        pytest.fail(f"there is no {EMULATOR}: run scripts/setup slow")
    run(TREE / "scripts/arm64-root", ROOT)


@pytest.fixture(scope="session")
def wheel() -> Iterator[pathlib.Path]:
    with tempfile.TemporaryDirectory(prefix="holdfast-aarch64-") as out:
        said = run(
            TREE / "scripts/wheel", "--arch", "aarch64", "--out", out, deadline=BUILD_DEADLINE_S
        )
        yield pathlib.Path(said.splitlines()[-1])


def test_the_loops_for_the_processor_agree_with_the_portable_ones(wheel: pathlib.Path) -> None:
    place = TREE / "build/wheel/aarch64"  # (scripts/wheel left the compilers there)
    build = place / "tests"
    run(
        *("/usr/bin/cmake", "-G", "Ninja", "-S", TREE, "-B", build),
        *("--toolchain", TREE / "cmake/zig_toolchain.cmake"),
        *(f"-DHOLDFAST_ZIG={place}/zig", "-DHOLDFAST_ZIG_ARCH=aarch64"),
        *("-DHOLDFAST_CLIENT_ONLY=ON", "-DHOLDFAST_CLIENT_TESTS=ON"),
        *("-DCMAKE_BUILD_TYPE=RelWithDebInfo", "-DCMAKE_CXX_FLAGS_RELWITHDEBINFO=-O2"),
        f"-DHOLDFAST_CLIENT_SOURCES={TREE}/build/client-sources",
    )
    run("/usr/bin/ninja", "-C", build, "client_tests", deadline=BUILD_DEADLINE_S)
    [program] = build.rglob("client_tests")
    said = run(EMULATOR, "-L", ROOT, program)
    assert "CopyTest.AgreesBitByBitAtRandomLengthsAndAlignments/neon" in said
    assert "[  PASSED  ]" in said


def test_the_client_saves_and_restores(wheel: pathlib.Path, tmp_path: pathlib.Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    python = "python{}.{}".format(*sys.version_info[:2])
    place = tempfile.mkdtemp(prefix="holdfast-test-", dir="/dev/shm")
    try:
        said = run(
            EMULATOR,
            "-L",
            ROOT,
            ROOT / "usr/bin" / python,
            "-c",
            SMOKE,
            HOLDFAST_PRIVATE_DIR=place,
            HOLDFAST_CKPTD=f"{os.environ['HOLDFAST_TEST_BIN']}/ckptd",
            PYTHONPATH=str(tmp_path),
            HOME=str(tmp_path),
        )
        assert said.endswith("saved and restored\n")
    finally:
        lock = pathlib.Path(place, "memory/lock")
        if lock.exists():
            os.kill(int(lock.read_text()), 15)
        shutil.rmtree(place, ignore_errors=True)


def test_the_daemon_saves_flushes_and_restores_in_an_emulated_machine(
    wheel: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    build = TREE / "build/arm64"
    run(
        *("/usr/bin/cmake", "--preset", "release", "-B", build, "-DHOLDFAST_BUILD_TESTS=OFF"),
        *("--toolchain", TREE / "cmake/aarch64_toolchain.cmake", f"-DHOLDFAST_SYSROOT={ROOT}"),
        *("-DHOLDFAST_BUILD_BENCH=OFF", "-DHOLDFAST_BUILD_PYTHON=OFF"),
        cwd=TREE,
    )
    run("ninja", "-C", build, "ckptd", "ckptctl", deadline=BUILD_DEADLINE_S)
    (tmp_path / "bin").mkdir()
    for program in ("ckptd", "ckptctl"):
        run("aarch64-linux-gnu-strip", "-o", tmp_path / "bin" / program, build / "bin" / program)
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
    shutil.copy(pathlib.Path(__file__).with_name("inside.py"), tmp_path)
    guest = Guest(tmp_path, ARM64)
    answer = guest.run(["/usr/bin/python3", "/run/share/inside.py"], deadline_s=GUEST_DEADLINE_S)
    assert answer == {
        "machine": "aarch64",
        "from_memory": {"step": 3, "source": "memory", "same": True},
        "from_nvme": {"step": 3, "source": "nvme", "same": True},
        "verify": 0,
    }, guest.said()
