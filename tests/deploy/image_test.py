"""deploy/container/Containerfile, as far as it can be tried without a container engine: its packages are there and suffice,
the sources that it copies suffice, it holds no secret and no root."""

from __future__ import annotations

import os
import pathlib
import re
import shlex
import shutil
import subprocess

import pytest
from rendered import DEADLINE_S, TREE

BIN = pathlib.Path(os.environ["HOLDFAST_TEST_BIN"])
FILE = TREE / "deploy/container/Containerfile"
# Loaded at run time, or called: what ldd does not see.
BESIDE_LIBRARIES = {"libfabric1", "ibverbs-providers", "ca-certificates", "bash", "coreutils", "curl", "jq"}  # fmt: skip
# Debian's packages have these names in the release that the image is made of, and other ones elsewhere.
_RELEASE = pathlib.Path("/etc/os-release").read_text()
debian_12 = pytest.mark.skipif(
    not re.search(r"^ID=debian$", _RELEASE, re.M) or 'VERSION_ID="12"' not in _RELEASE,
    reason="the image's packages are Debian 12's",
)


def stages() -> list[list[tuple[str, str]]]:
    """Each stage's instructions."""
    text = re.sub(r"^\s*#.*\n", "", FILE.read_text(), flags=re.M).replace("\\\n", " ")
    found: list[list[tuple[str, str]]] = []
    for line in filter(None, map(str.strip, text.splitlines())):
        instruction, _, rest = line.partition(" ")
        if instruction == "FROM":
            found.append([])
        found[-1].append((instruction, rest.strip()))
    return found


def packages(stage: list[tuple[str, str]]) -> list[str]:
    (words,) = [
        re.search(r"apt-get install -y --no-install-recommends(.*?)&&", rest)
        for instruction, rest in stage
        if instruction == "RUN" and "apt-get install" in rest
    ]
    assert words is not None
    return words[1].split()


def output(*command: str | pathlib.Path) -> str:
    return subprocess.run(
        command, capture_output=True, text=True, check=True, timeout=DEADLINE_S
    ).stdout


def packages_of(paths: set[str]) -> dict[str, str]:
    """path -> package. /usr is merged: dpkg knows a file under one of its names."""
    names = {path: {path, real := os.path.realpath(path), real.removeprefix("/usr")} for path in paths}  # fmt: skip
    # It fails for the names that it does not know.
    done = subprocess.run(
        ["dpkg", "-S", *set().union(*names.values())],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    owners = dict(reversed(line.split(": ", 1)) for line in done.stdout.splitlines())
    found = {}
    for path, all_names in names.items():
        packages_of_it = {owners[name].split(":")[0] for name in all_names if name in owners}
        assert len(packages_of_it) == 1, f"{path} belongs to {packages_of_it}"
        (found[path],) = packages_of_it
    return found


@debian_12
def test_apt_knows_each_package() -> None:
    if not any(pathlib.Path("/var/lib/apt/lists").glob("*_Packages*")):
        pytest.skip("this machine's lists of packages were removed")
    wanted = [name for stage in stages() for name in packages(stage)]
    shown = output("apt-cache", "show", "--no-all-versions", *wanted)
    known = set(re.findall(r"^Package: (\S+)$", shown, re.M))
    assert set(wanted) <= known, set(wanted) - known


@debian_12
def test_the_runtime_has_the_libraries_of_the_programs_and_no_others() -> None:
    libraries = set()
    for program in ("ckptd", "ckptctl"):
        for line in output("ldd", BIN / program).splitlines():
            assert "not found" not in line, line
            if found := re.search(r"=> (/\S+)", line):
                libraries.add(found[1])
    needed = set(packages_of(libraries).values())
    _, runtime = stages()
    listed = packages(runtime)
    assert set(listed) - BESIDE_LIBRARIES == needed
    assert len(listed) == len(set(listed))
    assert BESIDE_LIBRARIES <= set(listed)


@debian_12
def test_the_runtime_has_what_node_config_calls() -> None:
    text = (TREE / "deploy/container/node-config").read_text()
    _, runtime = stages()
    called = ("bash", "curl", "jq", "mv", "sleep")
    for program in called:
        assert re.search(rf"(^|[\s($/]){program}\b", text, re.M), f"{program} is not called"
    where = {str(shutil.which(program)) for program in called}
    # The name that libfabric is opened by, and what the DaemonSet's init container calls.
    where |= {"/usr/lib/x86_64-linux-gnu/libfabric.so.1", "/usr/bin/chown"}
    assert set(packages_of(where).values()) <= set(packages(runtime))


def test_what_it_builds_with_is_what_setup_installs() -> None:
    installed = output(TREE / "scripts/setup", "--list", "build").split()
    build, _ = stages()
    assert set(packages(build)) <= set(installed)


def copied(stage: list[tuple[str, str]]) -> list[tuple[list[str], str]]:
    """Sources in the tree, and where they go."""
    found = []
    for instruction, rest in stage:
        if instruction == "COPY" and "--from=" not in rest:
            *sources, target = shlex.split(rest)
            found.append((sources, target))
    return found


def test_what_it_copies_is_there_and_tracked() -> None:
    for stage in stages():
        for sources, _ in copied(stage):
            for source in sources:
                assert (TREE / source).exists(), source


def test_the_sources_that_it_copies_suffice(tmp_path: pathlib.Path) -> None:
    """They configure, with the image's own command, and each file that the programs are built of is there."""
    build, _ = stages()
    for sources, target in copied(build):
        for source in sources:
            place = tmp_path / "src" / target
            if (TREE / source).is_dir():
                shutil.copytree(TREE / source, place)
            else:
                place.mkdir(parents=True, exist_ok=True)
                shutil.copy(TREE / source, place)
    (command,) = [
        rest for instruction, rest in build if instruction == "RUN" and "cmake -S" in rest
    ]
    configure, make, strip = command.split("&&")
    configure = configure.replace("-B /build", f"-B {tmp_path}/build")
    environment = os.environ | {"PATH": f"/usr/bin:{os.environ['PATH']}"}
    for line in (configure, f"ninja -C {tmp_path}/build -n ckptd ckptctl"):
        done = subprocess.run(
            shlex.split(line),
            cwd=tmp_path / "src",
            env=environment,
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
        )
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "bin/ckptd" in done.stdout and "bin/ckptctl" in done.stdout
    # The rest of that command builds and strips what is copied from there.
    assert shlex.split(make) == ["cmake", "--build", "/build", "--target", "ckptd", "ckptctl"]
    assert shlex.split(strip) == ["strip", "/build/bin/ckptd", "/build/bin/ckptctl"]
    _, runtime = stages()
    (from_build,) = [rest for instruction, rest in runtime if "--from=build" in rest]
    assert shlex.split(from_build)[1:] == [*shlex.split(strip)[1:], "/usr/bin/"]


def test_it_runs_as_a_number_that_is_not_root_and_holds_no_secret() -> None:
    build, runtime = stages()
    (user,) = [rest for instruction, rest in runtime if instruction == "USER"]
    assert re.fullmatch(r"[1-9][0-9]*:[1-9][0-9]*", user)
    for stage in (build, runtime):
        assert not {"ARG", "ENV", "ADD", "VOLUME", "HEALTHCHECK"} & {one for one, _ in stage}
    assert {instruction for instruction, _ in runtime if instruction == "COPY"}
    assert not [sources for sources, _ in copied(runtime) if "." in sources or "/" in sources]


def test_the_manifests_call_what_the_image_has() -> None:
    _, runtime = stages()
    targets = {
        target + source.rsplit("/", 1)[-1]
        for instruction, rest in runtime
        if instruction == "COPY"
        for *sources, target in [[word for word in shlex.split(rest) if not word.startswith("--")]]
        for source in sources
    }
    pods = (TREE / "deploy/helm/holdfast/templates/_pod.tpl").read_text()
    pods += (TREE / "deploy/helm/holdfast/templates/daemonset.yaml").read_text()
    for program in ("/usr/bin/ckptd", "/usr/libexec/holdfast/node-config"):
        assert program in targets and program in pods, program
