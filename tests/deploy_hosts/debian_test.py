"""The Debian packages: what is in them, and what installing, upgrading, removing and purging do.

tests/deploy_hosts/run build/test debian_test.py
"""

from __future__ import annotations

import pathlib
import re
import shutil
import subprocess

import pytest
from conftest import BUILD
from installed import Host
from machine import Machine

DEADLINE_S = 120


def said(*command: str | pathlib.Path) -> str:
    return subprocess.check_output(command, text=True)


def field(package: pathlib.Path, name: str) -> str:
    return said("dpkg-deb", "--field", package, name).strip()


def contents(package: pathlib.Path) -> dict[str, str]:
    """The files' modes, with whom they belong to, by their paths."""
    listing = said("dpkg-deb", "--contents", package)
    lines = [line.split(None, 5) for line in listing.splitlines()]
    return {line[5].removeprefix("."): f"{line[0]} {line[1]}" for line in lines}


def test_what_is_in_them(packages: dict[str, pathlib.Path]) -> None:
    files = contents(packages["holdfast"])
    for program in ("/usr/bin/ckptd", "/usr/bin/ckptctl"):
        assert files[program] == "-rwxr-xr-x root/root"
    for text in (
        "/etc/holdfast/ckptd.yaml",
        "/usr/lib/systemd/system/ckptd.service",
        "/usr/share/doc/holdfast/examples/tiers.conf",
        "/usr/share/doc/holdfast/examples/user.conf",
        "/usr/share/holdfast/slurm/settings.sh",
    ):
        assert files[text] == "-rw-r--r-- root/root"
    assert files["/usr/share/holdfast/slurm/prolog"] == "-rwxr-xr-x root/root"
    development = contents(packages["holdfast-dev"])
    assert "/usr/include/holdfast/holdfast.h" in development
    assert "/usr/lib/cmake/Holdfast/HoldfastConfig.cmake" in development
    assert not {path for path in files if not path.endswith("/")} & set(development)


def test_dependencies_are_those_of_the_programs(packages: dict[str, pathlib.Path]) -> None:
    depends = {
        re.split("[ (]", word)[0] for word in field(packages["holdfast"], "Depends").split(", ")
    }
    program = BUILD / "bin/ckptd"
    paths = dict(re.findall("(\\S+) => (/\\S+)", said("ldd", program)))
    needed = re.findall("NEEDED +(\\S+)", said("objdump", "-p", program))
    assert "liburing.so.2" in needed
    for library in needed:
        if library.startswith("ld-linux"):
            continue
        # (By its name, as /lib and /usr/lib are one and the same.)
        owners = re.findall(
            "(?m)^([^:]+):.*/" + re.escape(library) + "$", said("dpkg", "-S", library)
        )
        names = said("dpkg-query", "--show", "--showformat=${Package} ${Provides} ", *owners)
        assert depends & set(re.split("[ ,(]+", names)), (library, paths[library])
    version = field(packages["holdfast"], "Version")
    assert field(packages["holdfast-dev"], "Depends") == f"holdfast (= {version})"


@pytest.fixture
def by_hand(tmp_path: pathlib.Path) -> pathlib.Path:
    """What scripts/package puts into a tarball, but the libraries."""
    install = ["/usr/bin/cmake", "--install", BUILD, "--prefix", "/opt/holdfast"]
    for component in ("daemon", "service"):
        command = [*install, "--component", component]
        subprocess.run(command, check=True, env={"DESTDIR": str(tmp_path)}, capture_output=True)
    return tmp_path / "opt/holdfast"


def test_an_installation_by_hand_names_its_place_and_no_other(
    by_hand: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    assert [path.name for path in tmp_path.iterdir()] == ["opt"]
    unit = (tmp_path / "opt/holdfast/share/holdfast/ckptd.service").read_text()
    program = "/opt/holdfast/bin/ckptd"
    assert f"\nExecStart={program}\n" in unit
    assert (tmp_path / program[1:]).exists()
    documentation = re.findall("(?m)^Documentation=file://(.*)$", unit)[0]
    assert (tmp_path / documentation[1:]).exists()


def test_an_installation_by_hand_is_a_service_where_a_link_leads_to_it(
    machine: Machine, by_hand: pathlib.Path
) -> None:
    machine.run("cp", "-a", by_hand, "/opt/holdfast-1")
    machine.run("ln", "-s", "holdfast-1", "/opt/holdfast")
    machine.run("systemctl", "enable", "--now", "/opt/holdfast/share/holdfast/ckptd.service")
    assert machine.run("systemctl", "is-active", "ckptd") == "active\n"
    assert machine.run("systemctl", "is-enabled", "ckptd") == "enabled\n"
    machine.run("/opt/holdfast/bin/ckptctl", "status")


def test_its_settings_are_good_and_nothing_starts(host: Host) -> None:
    run = host.machine.run
    assert run("ckptd", "--version").startswith("ckptd ")
    run("ckptd", "--check-config")
    assert run("systemctl", "show", "ckptd", "--property=ActiveState", "--value") == "inactive\n"
    assert host.machine.attempt("systemctl", "is-enabled", "ckptd").stdout == "disabled\n"
    run("systemctl", "enable", "ckptd")


def test_the_development_package_compiles_a_program(
    host: Host, packages: dict[str, pathlib.Path], tmp_path: pathlib.Path
) -> None:
    host.install(packages["holdfast-dev"])
    host.machine.write(
        "/root/CMakeLists.txt",
        "cmake_minimum_required(VERSION 3.22)\nproject(P CXX)\nfind_package(Holdfast REQUIRED)\n"
        "add_executable(p p.cc)\ntarget_link_libraries(p Holdfast::holdfast)\n",
    )
    host.machine.write(
        "/root/p.cc",
        "#include <holdfast/holdfast.h>\nint main() {\n"
        '  auto job = holdfast::Job::Open({.job = "p", .rank = 0, .world_size = 1});\n'
        "  return job.ok() ? 0 : 3;\n}\n",
    )
    host.configure(settings="memory: {bytes_max: 64MiB}")
    host.start()
    host.machine.run(
        "sh",
        "-euc",
        "cd /root; /usr/bin/cmake -S . -B b; /usr/bin/cmake --build b; b/p",
        deadline_s=DEADLINE_S,
    )


def newer(package: pathlib.Path, folder: pathlib.Path) -> pathlib.Path:
    """The same package with a higher version."""
    tree = folder / "tree"
    tree.mkdir(parents=True)
    subprocess.run(["dpkg-deb", "--raw-extract", package, tree], check=True)
    control = tree / "DEBIAN/control"
    control.write_text(re.sub("(?m)^Version: .*$", "Version: 99", control.read_text()))
    made = folder / "newer.deb"
    subprocess.run(
        ["dpkg-deb", "-Zgzip", "-z1", "--build", tree, made], check=True, stdout=subprocess.DEVNULL
    )
    shutil.rmtree(tree)
    return made


@pytest.mark.parametrize("asked", [False, True])
def test_the_life_of_an_installation(
    host: Host, packages: dict[str, pathlib.Path], tmp_path: pathlib.Path, asked: bool
) -> None:
    host.configure(settings="memory: {bytes_max: 64MiB}")
    host.start()
    rank = host.rank()
    rank.do("open", "save 5", "committed 5")

    # An upgrade keeps what was changed, and replaces the daemon that runs.
    before = host.property("MainPID")
    host.install(newer(packages["holdfast"], tmp_path))
    assert host.property("MainPID") not in (before, "0")
    assert "64MiB" in host.machine.read("/etc/holdfast/ckptd.yaml")
    rank.do("save 6", "committed 6")
    rank.end()

    # Removed: it is stopped; settings and checkpoints stay, and serve when it is installed again.
    host.machine.run("dpkg", "--remove", "holdfast")
    assert host.machine.attempt("pgrep", "-x", "ckptd").returncode == 1
    host.install(packages["holdfast"])
    host.machine.run("systemctl", "daemon-reload")
    host.start()
    again = host.rank()
    again.do("open")
    assert again.do("restore") == "ok attempt=1 step=6"
    again.end()

    # Purged: so do checkpoints, if nobody asks for more.
    variables = ("env", f"HOLDFAST_PURGE_CHECKPOINTS={int(asked)}")
    host.machine.run(*variables, "dpkg", "--purge", "holdfast")
    for gone in ("/etc/holdfast", "/var/log/holdfast"):
        assert host.machine.attempt("test", "-e", gone).returncode == 1, gone
    for kept in ("/dev/shm/holdfast", "/var/lib/holdfast"):
        assert (host.machine.attempt("test", "-e", kept).returncode == 1) == asked, kept


def test_an_upgrade_ends_whole_when_the_daemon_does_not_come_up(
    host: Host, packages: dict[str, pathlib.Path], tmp_path: pathlib.Path
) -> None:
    host.configure(settings="memory: {bytes_max: 64MiB}")
    host.start()
    # As a setting that the new version refuses.
    host.machine.write("/etc/holdfast/ckptd.yaml", "memory: {bytes_mox: 64MiB}\n")
    package = newer(packages["holdfast"], tmp_path / "newer")
    done = host.machine.attempt("dpkg", "--install", package)
    assert done.returncode == 0, done.stderr
    assert "ckptd did not start again" in done.stderr
    state = host.machine.run("dpkg-query", "--show", "--showformat=${db:Status-Status}", "holdfast")
    assert state == "installed"
    host.machine.write("/etc/holdfast/ckptd.yaml", "memory: {bytes_max: 64MiB}\n")
    host.start()
