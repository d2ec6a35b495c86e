"""64-bit ARM, as far as a machine without it can tell. scripts/package cross-compiles everything that is handed out. The client's
wheel runs in qemu-user, with this machine's ckptd and with the daemon wheel's; the loops written for the processor agree with the
portable ones. The Debian package's programs start in qemu-user; the tarball's save, flush and restore in an emulated machine.

    tests/aarch64/run build/test aarch64_test.py

It makes all that first, or takes what the folder HOLDFAST_TEST_AARCH64 has.
qemu-user maps no memory a second time, so nothing is staged there. It has no io_uring.
"""

from __future__ import annotations

import os
import pathlib
import re
import shlex
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
BUILD_DEADLINE_S = 5400
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
    assert ckpt.restore(back) == 8 and back == state, back
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
def made() -> Iterator[dict[str, pathlib.Path]]:
    """What is handed out, by its kind: client, daemon, tarball, holdfast and holdfast-dev."""
    version = run(TREE / "scripts/version").strip()
    names = {
        "client": f"holdfast_ckpt-{version}-cp310-abi3-manylinux_2_28_aarch64.whl",
        "daemon": f"holdfast_ckptd-{version}-py3-none-manylinux_2_28_aarch64.whl",
        "tarball": f"holdfast-{version}-linux-aarch64.tar.gz",
        "holdfast": f"holdfast_{version}_arm64.deb",
        "holdfast-dev": f"holdfast-dev_{version}_arm64.deb",
    }
    with tempfile.TemporaryDirectory(prefix="holdfast-aarch64-") as out:
        folder = pathlib.Path(os.environ.get("HOLDFAST_TEST_AARCH64", out))
        if folder == pathlib.Path(out):
            said = run(
                *(TREE / "scripts/package", "client", "daemon", "tarball", "deb"),
                *("--arch", "aarch64", "--out", out),
                deadline=BUILD_DEADLINE_S,
            )
            assert {pathlib.Path(line).name for line in said.splitlines()} == set(names.values())
        yield {kind: folder / name for kind, name in names.items()}


@pytest.fixture(scope="session")
def wheel(made: dict[str, pathlib.Path]) -> pathlib.Path:
    return made["client"]


def test_the_loops_for_the_processor_agree_with_the_portable_ones(wheel: pathlib.Path) -> None:
    place = TREE / "build/package/aarch64"  # (scripts/package left the compilers there)
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


@pytest.fixture(scope="session")
def daemon_files(
    made: dict[str, pathlib.Path], tmp_path_factory: pytest.TempPathFactory
) -> pathlib.Path:
    """The daemon's wheel, unpacked, and a file `emulated` that starts its ckptd. That has its own glibc: the emulator is
    given nothing of a system."""
    place = tmp_path_factory.mktemp("daemon")
    run(TREE / "build/wheel-tools/bin/wheel", "unpack", "-d", place, made["daemon"])
    [files] = place.glob("*/holdfast_ckptd")
    (files / "emulated").write_text(
        f'#!/bin/sh\nexec {shlex.join(emulated(files, "ckptd"))} "$@"\n'
    )
    (files / "emulated").chmod(0o755)
    return files


def emulated(files: pathlib.Path, program: str) -> list[str]:
    [loader] = (files / "glibc").glob("ld-linux-*")
    libraries = f"{files}/glibc:{files}/lib"
    return [EMULATOR, str(loader), "--library-path", libraries, str(files / "programs" / program)]


@pytest.mark.parametrize("daemon", ["this machine's", "emulated"])
def test_the_client_saves_and_restores(
    wheel: pathlib.Path, daemon_files: pathlib.Path, tmp_path: pathlib.Path, daemon: str
) -> None:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    python = "python{}.{}".format(*sys.version_info[:2])
    place = tempfile.mkdtemp(prefix="holdfast-test-", dir="/dev/shm")
    here = f"{os.environ['HOLDFAST_TEST_BIN']}/ckptd"
    try:
        said = run(
            EMULATOR,
            "-L",
            ROOT,
            ROOT / "usr/bin" / python,
            "-c",
            SMOKE,
            HOLDFAST_PRIVATE_DIR=place,
            HOLDFAST_CKPTD=str(daemon_files / "emulated") if daemon == "emulated" else here,
            PYTHONPATH=str(tmp_path),
            HOME=str(tmp_path),
        )
        assert said.endswith("saved and restored\n")
    finally:
        lock = pathlib.Path(place, "memory/lock")
        if lock.exists():
            os.kill(int(lock.read_text()), 15)
        shutil.rmtree(place, ignore_errors=True)


def test_the_daemons_wheel_has_the_glibc_that_it_was_built_with(daemon_files: pathlib.Path) -> None:
    assert "status" in run(*emulated(daemon_files, "ckptctl"), "--help")
    built_with = re.search(r"Version: 2\.(\d+)", known("-s", "libc6"))
    assert built_with is not None
    assert f'"$minor" -lt {built_with[1]} ]' in (daemon_files / "bin/ckptd").read_text()


def known(*asked: str | os.PathLike[str]) -> str:
    """What dpkg knows of the packages for arm64."""
    return run("dpkg-query", *asked, DPKG_ADMINDIR=str(ROOT / "var/lib/dpkg"))


def test_the_debian_packages_are_for_arm64(
    made: dict[str, pathlib.Path], tmp_path: pathlib.Path
) -> None:
    for name in ("holdfast", "holdfast-dev"):
        assert run("dpkg-deb", "--field", made[name], "Architecture") == "arm64\n"
        run("dpkg-deb", "--extract", made[name], tmp_path)
    depends = run("dpkg-deb", "--field", made["holdfast"], "Depends").strip().split(", ")
    names = {re.split("[ (]", word)[0] for word in depends}
    for name, option in (("ckptd", "--version"), ("ckptctl", "--help")):
        program = tmp_path / "usr/bin" / name
        assert name in run(EMULATOR, "-L", ROOT, program, option)
        for library in re.findall(r"NEEDED.*\[(\S+)\]", run("readelf", "-d", program)):
            if not library.startswith("ld-linux"):
                owner = known("-S", ROOT / "usr/lib/aarch64-linux-gnu" / library).split(":")[0]
                provided = known("--show", "--showformat=${Package} ${Provides}", owner)
                assert names & set(re.split("[ ,(]+", provided)), library
    assert any(word.startswith("libc6 (>= 2.") for word in depends), depends
    # A library with text relocations could not be loaded: the unit has MemoryDenyWriteExecute=.
    [loader] = ROOT.glob("lib/ld-linux-*")
    loaded = run(EMULATOR, "-L", ROOT, loader, "--list", tmp_path / "usr/bin/ckptd")
    libraries = re.findall(r"=> (/lib/\S+)", loaded)
    assert len(libraries) > len(names)
    for path in libraries:
        assert "TEXTREL" not in run("readelf", "-d", f"{ROOT}{path}"), path


def test_the_daemon_saves_flushes_and_restores_in_an_emulated_machine(
    made: dict[str, pathlib.Path], tmp_path: pathlib.Path
) -> None:
    run("tar", "-xzf", made["tarball"], "-C", tmp_path, "--strip-components=1")
    [wheel] = (tmp_path / "wheel").iterdir()
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
