"""deploy/container/Containerfile, as far as it can be tried without a container engine: its packages are there and suffice,
it makes and installs the Debian package of the image's processor, it holds no secret and no root. What the package has and
depends on: tests/deploy_hosts/debian_test.py, tests/aarch64."""

from __future__ import annotations

import json
import os
import pathlib
import re
import shlex
import shutil
import subprocess

import pytest
from rendered import DEADLINE_S, TREE

FILE = TREE / "deploy/container/Containerfile"
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


def of(stage: list[tuple[str, str]], wanted: str) -> list[str]:
    """What follows each such instruction."""
    return [rest for instruction, rest in stage if instruction == wanted]


def packages(runtime: list[tuple[str, str]]) -> list[str]:
    """The names, and the path of Holdfast's own."""
    (command,) = of(runtime, "RUN")
    words = re.search(r"apt-get install -y --no-install-recommends(.*?)&&", command)
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
    _, runtime = stages()
    wanted = [name for name in packages(runtime) if "/" not in name]
    shown = output("apt-cache", "show", "--no-all-versions", *wanted)
    known = set(re.findall(r"^Package: (\S+)$", shown, re.M))
    assert set(wanted) <= known, set(wanted) - known


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


def test_it_makes_and_installs_the_package_of_the_images_processor() -> None:
    build, runtime = stages()
    (command,) = of(build, "RUN")
    script, *arguments = shlex.split(command)
    assert arguments[:2] == ["--arch", "$TARGETARCH"] and arguments[-1] == "deb"
    made = arguments[arguments.index("--out") + 1]
    (installing,) = of(runtime, "RUN")
    mount = f"--mount=type=bind,from=build,source={made},target={made} "
    assert installing.startswith(mount)
    assert f"{made}/holdfast_*.deb" in packages(runtime)
    # The names that engines give, and the script takes.
    for name, right in (("amd64", True), ("arm64", True), ("riscv64", False)):
        done = subprocess.run(
            [TREE / script, "--arch", name], capture_output=True, text=True, timeout=DEADLINE_S
        )
        assert done.returncode == 2
        assert (f"nothing is made for '{name}'" in done.stderr) == (not right), done.stderr


def test_what_it_leaves_out_is_not_part_of_the_tree() -> None:
    left_out = {line.strip("/") for line in (TREE / ".dockerignore").read_text().splitlines()}
    ignored = {line.strip("/") for line in (TREE / ".gitignore").read_text().splitlines()}
    assert {name for name in left_out if not name.startswith("#")} <= ignored | {".git"}


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


def test_it_runs_as_a_number_that_is_not_root_and_holds_no_secret() -> None:
    build, runtime = stages()
    (user,) = [rest for instruction, rest in runtime if instruction == "USER"]
    assert re.fullmatch(r"[1-9][0-9]*:[1-9][0-9]*", user)
    assert of(build, "ARG") == ["TARGETARCH"] and not of(runtime, "ARG")
    for stage in (build, runtime):
        assert not {"ENV", "ADD", "VOLUME", "HEALTHCHECK"} & {one for one, _ in stage}
    assert of(runtime, "COPY")
    assert not [sources for sources, _ in copied(runtime) if "." in sources or "/" in sources]


def test_the_manifests_call_what_the_image_has() -> None:
    _, runtime = stages()
    called = {f"{target}{pathlib.PurePath(source).name}" for sources, target in copied(runtime) for source in sources}  # fmt: skip
    (entry,) = of(runtime, "ENTRYPOINT")
    called |= set(json.loads(entry))
    pods = (TREE / "deploy/helm/holdfast/templates/_pod.tpl").read_text()
    pods += (TREE / "deploy/helm/holdfast/templates/daemonset.yaml").read_text()
    for program in ("/usr/bin/ckptd", "/usr/libexec/holdfast/node-config"):
        assert program in called and program in pods, program
