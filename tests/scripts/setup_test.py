"""scripts/setup: what each layer installs, and the line that people get where it cannot."""

from __future__ import annotations

import fcntl
import importlib
import shutil
import sys
import sysconfig
import types

import pytest
from conftest import ROOT, Tree

LAYERS = (
    *("build", "demo", "nodes", "docs", "test", "clang", "format"),
    *("deb", "wheel", "arm64", "bench", "slow"),
)
SIZES = (
    "Need to get 86.4 MB/143 MB of archives.\n"
    "After this operation, 1,609 MB of additional disk space will be used."
)


def listed(tree: Tree, *layers: str) -> set[str]:
    done = tree.run("scripts/setup", "--list", *layers)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


@pytest.fixture
def bare(tree: Tree) -> Tree:
    """A machine of root's where nothing is installed, and apt does what $APT says: prints it, and fails."""
    tree.fake("dpkg-query", 'echo "ii  bash"; [ -z "$DPKG" ] || echo "$DPKG"')
    tree.fake("dpkg", "echo amd64")
    tree.fake("id", "echo ${UID_IS:-0}")
    tree.fake("sudo", "exit 1")
    tree.fake("df", "echo heading; echo x x x ${FREE_MB:-99999} x")
    tree.fake("getconf", "echo glibc ${GLIBC:-2.36}")
    tree.fake(
        "apt-get",
        f'echo "$@" >>{tree.place}/apt\n'
        f'case "$*" in *--assume-no*) echo "${{SIZES:-{SIZES}}}"; exit 1 ;; *" install "*) echo "$APT"; exit ${{APT_RC:-100}} ;; esac',
    )
    return tree


def fault(tree: Tree, *layers: str, **env: str) -> str:
    """The last line of a scripts/setup that fails."""
    done = tree.run("scripts/setup", *layers, **env)
    assert done.returncode == 1, (done.stdout, done.stderr)
    assert done.stdout == ""
    return done.stderr.splitlines()[-1]


def test_without_a_layer_it_says_which_there_are(tree: Tree) -> None:
    done = tree.run("scripts/setup")
    assert done.returncode == 2
    assert all(f"\n  {layer} " in done.stderr for layer in LAYERS)
    assert tree.run("scripts/setup", "--list").returncode == 2


def test_an_unknown_layer_is_named(tree: Tree) -> None:
    done = tree.run("scripts/setup", "build", "everything")
    assert (done.returncode, done.stderr) == (
        2,
        "scripts/setup: unknown layer 'everything' (see scripts/setup --help)\n",
    )


def test_each_layer_has_what_its_name_needs_and_no_more(tree: Tree) -> None:
    build, demo, test, slow = (listed(tree, name) for name in ("build", "demo", "test", "slow"))
    assert {"g++", "ninja-build", "libgrpc++-dev", "python3-dev"} <= build
    assert {line.split("==")[0] for line in demo - build} == {"numpy", "torch"}
    assert listed(tree, "nodes") - build == {"etcd-server", "iproute2", "nftables"}
    assert {"chromium", "prometheus", "golang-go", "slurmd", "man-db", "zsh"} <= test - demo
    assert not {package for package in test if "clang" in package}
    assert {"man-db", "mandoc", "zsh", "fish"} <= listed(tree, "docs")
    assert "chromium" not in listed(tree, "docs", "clang", "format", "wheel", "bench")
    assert {package for package in listed(tree, "clang") if "clang" in package}
    assert listed(tree, "deb") - build == {"dpkg-dev", "file"}
    assert listed(tree, "arm64") - listed(tree, "deb") == {
        "g++-aarch64-linux-gnu",
        "qemu-user-static",
    }
    assert listed(tree, "arm64") <= slow
    assert {"fio", "xfsprogs", "dpkg-dev"} <= slow and test <= slow
    assert {line.split("==")[0] for line in slow if "==" in line} >= {"auditwheel", "pytest"}


def test_nothing_is_done_when_all_is_there(bare: Tree) -> None:
    everything = listed(bare, "slow")
    installed = [name for name in everything if "==" not in name and name != "ninja-build"]
    # One is held, some are known by their architecture, one is there for another one.
    states = "\n".join(["hi  ninja-build", *(f"ii  {name}:amd64" for name in installed)])
    states += "\niU  libssl-dev:arm64\nrc  nano"
    for place in ("python", "wheel-tools"):
        pins = "\n".join(name for name in everything if "==" in name)
        bare.write(f"build/{place}/installed.txt", f"# a comment\n{pins}\n")
    done = bare.run("scripts/setup", "slow", DPKG=states, UID_IS="1000")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert not (bare.place / "apt").exists()


def test_only_what_is_missing_is_installed(bare: Tree) -> None:
    missing = listed(bare, "nodes") - listed(bare, "build")
    states = "\n".join(f"ii  {name}" for name in listed(bare, "build"))
    done = bare.run("scripts/setup", "nodes", DPKG=states, APT_RC="0")
    assert done.returncode == 0, done.stderr
    assert "3 packages: done, TIME" in done.stderr
    last = (bare.place / "apt").read_text().splitlines()[-1]
    assert set(last.split("--no-install-recommends ")[1].split()) == missing


def test_no_network(bare: Tree) -> None:
    text = "W: Failed to fetch http://x: Temporary failure resolving 'x'\nE: Unable to locate package g++"
    done = bare.run("scripts/setup", "build", APT=f"{text}\n" + "more\n" * 60 + "more")
    assert done.returncode == 1
    last = done.stderr.splitlines()[-2:]
    assert "packages: failed after TIME" in last[0] and "build/setup-apt.log" in last[0]
    assert last[1] == (
        "scripts/setup: installing packages: no package server answers. Check the network, http_proxy and "
        "/etc/apt/sources.list. Then again: scripts/setup build"
    )
    assert done.stderr.count("more\n") == 40


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("E: Unable to locate package libgrpc++-dev", "Use Debian 12 or Ubuntu 24.04"),
        ("E: You don't have enough free space in /var/cache/apt/archives/.", "the disk is full"),
        ("E: dpkg was interrupted, you must manually run", "dpkg --configure -a"),
        ("E: Failed to fetch http://x/g++.deb: Could not resolve 'x'", "no package server answers"),
        ("Err: Temporary failure resolving 'x'", "no package server answers"),
        ("E: Unable to connect to x:http:", "no package server answers"),
        ("Err: Connection timed out", "no package server answers"),
        ("Segmentation fault", "Its log says why"),
    ],
)
def test_apt_fails(bare: Tree, text: str, says: str) -> None:
    assert says in fault(bare, "build", APT=text)


def test_no_root(bare: Tree) -> None:
    line = fault(bare, "build", UID_IS="1000")
    assert line.startswith("scripts/setup: no root, and no sudo. As root: apt-get install ")
    assert {"g++", "python3-dev"} <= set(line.split())
    assert not (bare.place / "apt").exists()


@pytest.mark.parametrize("state", ["iF", "iU", "iH", "iHR", "iiR"])
def test_a_package_is_half_installed(bare: Tree, state: str) -> None:
    line = fault(bare, "build", DPKG=f"{state} libssl-dev:amd64")
    assert "libssl-dev" in line and "half installed. As root: dpkg --configure -a" in line
    assert not (bare.place / "apt").exists()


def test_the_disk_is_nearly_full(bare: Tree) -> None:
    line = fault(bare, "build", FREE_MB="1694")
    assert "installing 30 packages needs 1695 MB in /usr: it has 1694 MB free. Free some" in line
    assert " install -y " not in (bare.place / "apt").read_text()
    assert "1695 MB" not in fault(bare, "build", FREE_MB="1695")


@pytest.mark.parametrize(
    ("need", "used", "sum_mb"),
    [
        ("943 kB", "3,062 kB", 4),
        ("0 B/88.0 MB", "522 MB", 522),
        ("1,012 MB/1,100 MB", "3.5 GB", 4512),
    ],
)
def test_it_reads_apts_sizes(bare: Tree, need: str, used: str, sum_mb: int) -> None:
    sizes = f"Need to get {need} of archives.\nAfter this operation, {used} of additional disk space will be used."
    assert f"needs {sum_mb} MB" in fault(bare, "build", SIZES=sizes, FREE_MB="3")


def test_the_disk_has_no_room_for_torch(bare: Tree) -> None:
    states = "\n".join(f"ii  {name}" for name in listed(bare, "build"))
    line = fault(bare, "demo", DPKG=states, FREE_MB="1000")
    assert "installing Python packages needs 1500 MB in build: it has 1000 MB free" in line


def test_an_old_glibc(bare: Tree) -> None:
    line = fault(bare, "build", GLIBC="2.31")
    assert "has glibc 2.31" in line and "Install a wheel (docs/install.md)" in line
    assert "glibc" not in fault(bare, "build", GLIBC="2.39")


def test_musl(bare: Tree) -> None:
    bare.fake("ldd", 'echo "musl libc (x86_64)" >&2; exit 1')
    line = fault(bare, "build")
    assert "has musl, and Holdfast needs glibc. Use deploy/container/Containerfile" in line


def test_another_distribution(tree: Tree) -> None:
    for name in ("bash", "cat", "dirname", "env", "grep", "ldd", "sort"):
        (tree.programs / name).symlink_to(str(shutil.which(name, path="/usr/bin:/bin")))
    tree.path = str(tree.programs)
    line = fault(tree, "build")
    assert "has no apt" in line and "Install a wheel (docs/install.md)" in line
    assert {"g++", "librocksdb-dev"} <= set(line.split())


PIP = """case "$*" in
  "-c "*) exit 0 ;;
  *) cp "${@: -1}" "$0.asked"; echo "$PIP"; exit ${PIP_RC:-0} ;;
esac"""


@pytest.fixture
def with_python(bare: Tree) -> Tree:
    """All packages are there, and build/python with a pip that does what $PIP says."""
    names = listed(bare, "slow")
    bare.fake("dpkg-query", "\n".join(f'echo "ii  {name}"' for name in names))
    bare.write("build/python/bin/python", f"#!/bin/bash\n{PIP}\n")
    return bare


def test_python_packages_are_added_to_those_that_are_there(with_python: Tree) -> None:
    place = with_python.place / "build/python"
    (place / "installed.txt").write_text("numpy==1.0\n")
    done = with_python.run("scripts/setup", "demo")
    assert done.returncode == 0, done.stderr
    demo = {line for line in listed(with_python, "demo") if "==" in line}
    assert set((place / "bin/python.asked").read_text().split()) == demo
    assert set((place / "installed.txt").read_text().split()) == demo
    done = with_python.run("scripts/setup", "docs")
    assert done.returncode == 0, done.stderr
    asked = (place / "bin/python.asked").read_text()
    assert "pytest==" in asked and "torch" not in asked
    done = with_python.run("scripts/setup", "docs", PIP_RC="1")
    assert (done.returncode, done.stderr) == (0, "")


def test_what_compiles_does_not_wait_for_pip(with_python: Tree) -> None:
    with open(with_python.place / "build/setup.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert with_python.run("scripts/setup", "build").returncode == 0


def test_pip_has_no_network(with_python: Tree) -> None:
    text = "NewConnectionError('Failed to establish a new connection: [Errno -3]')"
    line = fault(with_python, "demo", PIP=text, PIP_RC="1")
    assert line == (
        "scripts/setup: installing Python packages into build/python: no package index answers. Check the network, "
        "https_proxy and PIP_INDEX_URL. Then again: scripts/setup demo"
    )
    assert not (with_python.place / "build/python/installed.txt").exists()


def test_pip_has_no_room(with_python: Tree) -> None:
    line = fault(with_python, "demo", PIP="OSError: No space left on device", PIP_RC="1")
    assert "set TMPDIR" in line


def test_pip_says_that_a_python_has_no_headers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "client-lib/python/backend")
    scikit = types.ModuleType("scikit_build_core")
    scikit.build = None  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "scikit_build_core", scikit)
    monkeypatch.chdir(ROOT / "client-lib/python")
    backend = importlib.import_module("holdfast_build")
    monkeypatch.setattr(sysconfig, "get_path", lambda _: "/nowhere")
    with pytest.raises(
        RuntimeError, match=r"has no headers \('/nowhere/Python.h'\)\. Install them"
    ):
        backend.get_requires_for_build_wheel()
