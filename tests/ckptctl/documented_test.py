"""Every command that README.md and docs/ show is run: here, by the test that ELSEWHERE names, or, of a few, not at all (CANNOT).

Commands of Holdfast's own programs, in blocks and in passing (`ckptctl set JOB replicas=1`), are run as they stand, by a real daemon
that has the jobs they speak of and another node beside it."""

from __future__ import annotations

import contextlib
import os
import pathlib
import re
import shlex
import socket
import subprocess
from collections.abc import Iterator

import pytest
from programs import BIN, CKPTCTL, DEADLINE_S, ROOT, Daemon, own_daemon, run_python

PAGES = ["README.md", *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").glob("*.md"))]

PROGRAMS = (
    "ckptctl|ckptd|scripts/[a-z-]+|bin/[a-z_]+|pip|python|torchrun|tar|apt|editor|systemctl|kill|mount|docker|helm|kubectl|cd|"
    r"\$EDITOR|sbatch|scontrol|git|cmake|curl|~/anywhere/\S+"
)
COMMAND = re.compile(rf"(?:\$ )?((?:sudo )?(?:{PROGRAMS})(?: .*)?)$")
# A program's own output, a picture, a table of files.
NO_COMMAND = re.compile(
    r"ckptd 0\.1\.0 on |ckptctl/ |cd ~|ckptd \[--config|ckptd --version \|"
    r"|ckptd is away"
)

# By whom a command is run that this file does not run, and words of it that are there.
ELSEWHERE: list[tuple[str, str, tuple[str, ...]]] = [
    (
        r"python (train|pretrained)\.py|python -m holdfast import .*|torchrun .*",
        "tests/python/docs_test.py",
        ("docs/python.md", "run_blocks"),
    ),
    (r"ckptctl import .*", "tests/python/importing_test.py", ("by_ckptctl", "--step")),
    (r"python -c 'import holdfast; .*|pip install .*", "tests/python/packages_test.py", ("pip",)),
    (r"tar -xzf .*|~/anywhere/\S+ --version", "scripts/check-tarball", ("ckptd", "tar")),
    (r"scripts/package .*", "tests/aarch64/aarch64_test.py", ("scripts/package", "--arch")),
    (
        r"scripts/demo\b.*|scripts/test\b.*|scripts/setup\b.*",
        "scripts/ci",
        ("scripts/demo", "scripts/test", "scripts/setup"),
    ),
    (r"ckptctl adopt-remote .*", "tests/cluster/remote_owner_test.py", ("adopt-remote", "--yes")),
    (r"ckptctl .*--address .*", "tests/integration/admin_tls_test.cc", ("--address", "--tls")),
    (
        r"apt install .*",
        "tests/deploy_hosts/debian_test.py",
        ("dpkg-deb", "host.install"),
    ),
    (
        r"systemctl enable --now ckptd.*",
        "tests/deploy_hosts/debian_test.py",
        ('"enable", "ckptd"', "host.start()"),
    ),
    (
        r"systemctl enable --now /opt/holdfast/share/holdfast/ckptd.service",
        "tests/deploy_hosts/debian_test.py",
        ("/opt/holdfast/share/holdfast/ckptd.service", "--now"),
    ),
    (r"systemctl reload ckptd.*", "tests/deploy_hosts/systemd_test.py", ('"reload", "ckptd"',)),
    (r"sbatch .*|scontrol requeue .*", "tests/deploy_hosts/slurm_test.py", ("sbatch", "requeue")),
    (
        r"ckptctl plan-capacity .*",
        "tests/ckptctl/capacity_docs_test.py",
        ("tuning.md", "capacity.md"),
    ),
    (
        r"ckptd --help \| ckptctl man ckptd \| man -l -|ckptctl man \| man -l -",
        "tests/ckptctl/manual_test.py",
        ("man",),
    ),
    (r"ckptctl completion bash > .*", "tests/ckptctl/completion_test.py", ("bash",)),
]

# What nobody can run on a machine without a cluster, and why.
CANNOT = {
    r"docker (build|push) .*": "it takes a container engine and a registry; tests/deploy/image_test.py reads the recipe",
    r"helm (install|upgrade|uninstall) .*": "it takes a cluster; tests/deploy/chart_test.py renders the chart, by helm where there is one",
    r"editor .*|\$EDITOR .*": "a person does",
}


def commands() -> list[tuple[str, str]]:
    """(page, command) of all blocks, each command once a page; without its comment."""
    found: dict[tuple[str, str], None] = {}
    for page in PAGES:
        text = (ROOT / page).read_text()
        for language, body in re.findall(r"^ *```(\w*)\n(.*?)^ *```", text, re.S | re.M):
            if language not in ("", "bash", "sh", "console"):
                continue
            for line in re.sub(r" *\\\n *", " ", body).splitlines():
                match = COMMAND.match(line.strip())
                if match is None or NO_COMMAND.match(match[1]):
                    continue
                # Its comment, or what stands behind two blanks or more.
                command = re.split(r"\s+#\s|\s{3,}", match[1])[0].strip()
                found[page, command.removeprefix("sudo ")] = None
    return list(found)


def in_passing() -> dict[str, list[str]]:
    """Of each command between backquotes the pages that have it."""
    found: dict[str, list[str]] = {}
    for page in PAGES:
        text = re.sub(r"^ *```.*?^ *```", "", (ROOT / page).read_text(), flags=re.S | re.M)
        for command in re.findall(r"`((?:ckptctl|ckptd|kubectl) [a-z-][^`\n]*)`", text):
            if not NO_COMMAND.match(command) and page not in found.setdefault(command, []):
                found[command].append(page)
    return found


# With what a reader puts in its place, or shorter. MEMORY: memory.dir of a daemon of the test's own.
RUN_AS = {
    "ckptd --check-config [--config FILE …]": "ckptd --check-config",
    "ckptctl drain n3 --wait 5min": "ckptctl drain n3 --wait 100ms; code=$?; ckptctl drain n3 --undo; exit $code",
    "ckptctl forget-drive OLD-ID": "ckptctl forget-drive 0123abcd --yes || test $? = 4",
    "ckptctl forget-drive OLD-ID --yes": "ckptctl forget-drive 0123abcd --yes || test $? = 4",
    "ckptctl restore <job> --from-scratch": "ckptctl restore JOB --from-scratch --yes",
    "ckptctl forget-drive 3f2a91c0 --yes": "ckptctl forget-drive 3f2a91c0 --yes || test $? = 4",
    "ckptctl drain NODE": "ckptctl drain n2; code=$?; ckptctl drain n2 --undo; exit $code",
    "ckptctl events --least warning --follow": "timeout 1 ckptctl events --least warning --follow; [ $? = 124 ]",
    "ckptctl completion fish > ~/.config/fish/completions/ckptctl.fish": "mkdir -p ~/.config/fish/completions; "
    "ckptctl completion fish > ~/.config/fish/completions/ckptctl.fish",
    # Where the machine has such mounts.
    "ckptctl backup llama-7b /mnt/backup": "mkdir backup; ckptctl backup llama-7b backup",
    "ckptctl restore-backup /mnt/backup llama-7b --to /mnt/new/holdfast": "mkdir backup new; ckptctl backup llama-7b backup; "
    "ckptctl restore-backup backup llama-7b --to new",
    "ckptctl rm <job>": "ckptctl rm JOB --yes",  # as who is asked says
    "ckptctl rm JOB": "ckptctl rm JOB --yes",
    "kill $(cat /dev/shm/holdfast-private-$(id -u)/memory/lock)": "kill $(cat MEMORY/lock)",
    # In namespaces of its own.
    "mount -t tmpfs -o noswap,huge=within_size,size=512G,mode=0755 tmpfs /mnt/slots": "unshare --mount sh -ec '"
    "mount -t tmpfs tmpfs /mnt; mkdir /mnt/slots; "
    "mount -t tmpfs -o noswap,huge=within_size,size=512G,mode=0755 tmpfs /mnt/slots'",
}
PLACEHOLDERS = {
    r"\bNODE\b": "n2",
    r"\bPOD\b": "holdfast-x7k2p",
    r"\bSPARE\b": "n9",
    r"--step N\b": "--step 880",
    r"--attempt A\b": "--attempt 1",
    r"\bDIR/": "./",
    r"=…": "=1GiB",
    r"\bUID:GID\b": "$(id -u):$(id -g)",
}
OF_A_JOB = re.compile(r"\bJOB\b|<job>|\"\$HOLDFAST_JOB\"")
JOBS = ("llama-7b", "llama-70b", "my-run", "first-run", "old-run", "slurm-hills-4711")

ALL = commands()
IN_PASSING = in_passing()
# What it does to its job is to hinder no other one.
JOB_OF = {
    command: f"passing-{i}" for i, command in enumerate(IN_PASSING) if OF_A_JOB.search(command)
}


def elsewhere(command: str) -> tuple[str, tuple[str, ...]] | None:
    for pattern, path, words in ELSEWHERE:
        if re.fullmatch(pattern, command):
            return path, words
    return None


def cannot(command: str) -> bool:
    return any(re.fullmatch(pattern, command) for pattern in CANNOT)


HERE = [(page, one) for page, one in ALL if elsewhere(one) is None and not cannot(one)]

SAVE_ALL = """
import sys
import numpy as np
from holdfast import _core
w = np.ones(1000, np.float32)
for name in sys.argv[1:]:
    job = _core.Job(name, rank=0, world_size=1)
    for step in (880, 900):
        tensors = _core.TensorList()
        tensors.add("model.w", "F32", w.shape)
        save = job.save(step, tensors, [w.ctypes.data], [])
        for stage in ("committed", "nvme", "remote"):
            save.wait(stage, 60)
"""


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


@pytest.fixture
def another() -> Iterator[Daemon]:
    """One that a command may end."""
    with own_daemon() as one:
        yield one


@pytest.fixture(scope="module")
def world() -> Iterator[Daemon]:
    """The daemon of n3, which has all tiers and the jobs of which the pages speak, each with steps 880 and 900; and n2's."""
    ports = {"n3": free_port(), "n2": free_port()}
    members = ", ".join(f'{{name: {name}, address: "127.0.0.1:{port}"}}' for name, port in ports.items())  # fmt: skip
    with contextlib.ExitStack() as nodes:
        made: list[Daemon] = []
        for name, port in ports.items():
            settings = (
                f"node_name: {name}\n"
                "nvme: {dirs: [ROOT/nvme]}\n"
                f"remote: {{dir: {made[0].root if made else 'ROOT'}/remote}}\n"
                "policy: {nvme: {every_steps: 1}, remote: {every_steps: 1, keep_last: 2}}\n"
                f'cluster: {{listen_address: "127.0.0.1:{port}", members: [{members}]}}\n'
            )
            made.append(nodes.enter_context(own_daemon(settings, ["nvme", "remote"])))
        jobs = [*JOBS, *JOB_OF.values()]
        saved = run_python(SAVE_ALL, *jobs, HOLDFAST_SOCKET=str(made[0].socket))
        assert saved.returncode == 0, saved.stderr
        yield made[0]


def test_there_are_commands() -> None:
    assert len(ALL) > 80
    assert {page for page, _ in ALL} >= {"README.md", "docs/install.md", "docs/kubernetes.md"}


@pytest.mark.parametrize(("page", "command"), [each for each in ALL if elsewhere(each[1])])
def test_what_is_run_elsewhere(page: str, command: str) -> None:
    found = elsewhere(command)
    assert found is not None
    path, words = found
    assert not path.startswith("docs/"), "a page runs nothing"
    text = (ROOT / path).read_text()
    assert [word for word in words if word not in text] == [], f"{page}: {command}: {path}"


def test_what_cannot_be_run_is_little_and_is_in_the_pages() -> None:
    assert len(CANNOT) <= 3
    for pattern in CANNOT:
        assert [one for _, one in ALL if re.fullmatch(pattern, one)], f"{pattern}: no page has it"


def run_in(
    world: Daemon, tmp_path: pathlib.Path, command: str, **variables: str
) -> tuple[int, str]:
    """Its exit code, and what it said of errors."""
    (tmp_path / "new.yaml").write_text("mesh: [{name: dp, ranks: 1}]\n")
    done = subprocess.run(
        ["bash", "-c", command],
        env={
            "PATH": f"{CKPTCTL.parent}:/usr/sbin:/usr/bin:/sbin:/bin",
            "HOME": str(tmp_path),
            "HOLDFAST_ADMIN_SOCKET": str(world.admin),
            "LC_ALL": "C.UTF-8",
            **variables,
        },
        cwd=tmp_path,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    return done.returncode, done.stderr


@pytest.mark.parametrize(("page", "command"), HERE)
def test_a_documented_command_runs(
    page: str, command: str, world: Daemon, another: Daemon, tmp_path: pathlib.Path
) -> None:
    command = as_in_the_pod(command, tmp_path)
    words = shlex.split(command)
    if words[0].startswith("bin/"):
        return has_options(BIN / words[0].removeprefix("bin/"), words[1:])
    if words[0] == "cd":
        assert (ROOT / words[1]).is_dir(), f"{page}: {command}"
        return None
    if words[0] == "kubectl":
        return by_kubectl(command, tmp_path)
    if words[0] == "mount" and (os.geteuid() != 0 or kernel() < (6, 4)):
        pytest.skip("root may, and a kernel from 6.4 on knows noswap")
    assert words[0] in ("ckptctl", "ckptd", "kill", "mount"), (
        f"{page}: nobody runs {command!r}: add it to ELSEWHERE, or here"
    )
    as_reader = RUN_AS.get(command, command).replace("MEMORY", str(another.memory))
    code, said = run_in(world, tmp_path, as_reader)
    if words[0] == "kill":
        assert code == 0 and another.process is not None and another.process.wait(DEADLINE_S) == 0
        return None
    # 1: doctor judges this machine; nothing is drained so soon. 4: of a node or a rank that these jobs have not.
    assert code in (0, 1, 4), f"{page}: {command}: {code}: {said}"
    assert code != 4 or re.search("n9|--rank 1", command), f"{page}: {command}: {said}"
    assert code != 1 or re.search("doctor|drain", command), f"{page}: {command}: {said}"
    return None


@pytest.mark.parametrize("command", IN_PASSING)
def test_what_is_said_in_passing_runs(command: str, world: Daemon, tmp_path: pathlib.Path) -> None:
    pages = ", ".join(IN_PASSING[command])
    as_reader = RUN_AS.get(command, command)
    for pattern, value in PLACEHOLDERS.items():
        as_reader = re.sub(pattern, value, as_reader)
    as_reader = as_in_the_pod(as_reader, tmp_path)
    if as_reader.startswith("kubectl "):
        return by_kubectl(as_reader, tmp_path)
    named = OF_A_JOB.search(as_reader) is not None
    as_reader = OF_A_JOB.sub(JOB_OF.get(command, ""), as_reader)
    code, said = run_in(world, tmp_path, as_reader)
    # A command's name alone, `ckptctl rm`, is no command. (That its options exist is tested below.)
    if code == 2 and not named and re.search("required|needs|tell the size", said):
        return None
    assert code in (0, 1, 4), f"{pages}: {as_reader}: {code}: {said}"
    assert code != 4 or "n9" in as_reader, f"{pages}: {as_reader}: {said}"
    assert code != 1 or re.search("doctor|drain", as_reader), f"{pages}: {as_reader}: {said}"
    return None


def as_in_the_pod(command: str, tmp_path: pathlib.Path) -> str:
    """What is run in a pod is run here; that the pod has it is tests/deploy/pod_test.py's."""
    inside = re.fullmatch(r"kubectl .* exec .* -- (.*)", command)
    if inside is None:
        return command
    by_kubectl(command, tmp_path)
    return inside[1]


def kernel() -> tuple[int, int]:
    major, minor = os.uname().release.split(".")[:2]
    return int(major), int(minor)


def by_kubectl(command: str, tmp_path: pathlib.Path) -> None:
    """kubectl itself reads the command, and what it names; there is no cluster to do it."""
    config = tmp_path / "kubeconfig"
    config.write_text(
        "apiVersion: v1\nkind: Config\ncurrent-context: none\n"
        "clusters: [{name: none, cluster: {server: 'http://127.0.0.1:1'}}]\n"
        "contexts: [{name: none, context: {cluster: none, user: none}}]\n"
        "users: [{name: none, user: {}}]\n"
    )
    done = subprocess.run(
        shlex.split(command),
        env={"PATH": os.environ["PATH"], "HOME": str(tmp_path), "KUBECONFIG": str(config)},
        # Where the page has gone to before it.
        cwd=ROOT / "deploy/kustomize/overlays/single-etcd" if " -k " in command else ROOT,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    assert done.returncode != 0 and "127.0.0.1:1" in done.stderr, f"{command}: {done.stderr}"
    assert "refused" in done.stderr, f"{command}: {done.stderr}"


def has_options(program: pathlib.Path, words: list[str]) -> None:
    """Hours of simulation are for the slow suite; that the options are there is for here."""
    if not program.exists():
        pytest.skip(f"{program} is not built")
    done = subprocess.run(
        [program, "--help"], capture_output=True, text=True, timeout=DEADLINE_S, check=False
    )
    told = done.stdout + done.stderr
    assert [word for word in words if word.startswith("--") and word not in told] == []


def test_what_the_pages_say_in_passing_is_there() -> None:
    """`ckptctl …` between backquotes: its command and its options exist."""
    help_of: dict[str, str] = {}
    wrong = []
    for page in PAGES:
        for words in re.findall(r"`ckptctl ([a-z][^`]*)`", (ROOT / page).read_text()):
            command, *rest = words.split()
            if command not in help_of:
                done = subprocess.run(
                    [CKPTCTL, command, "--help"], capture_output=True, text=True, timeout=DEADLINE_S
                )
                help_of[command] = done.stdout if done.returncode == 0 else ""
            if not help_of[command]:
                wrong.append(f"{page}: ckptctl {words}: no such command")
            for option in re.findall(r"--[a-z][a-z-]*", " ".join(rest)):
                if option not in help_of[command]:
                    wrong.append(f"{page}: ckptctl {words}: it has no {option}")
    assert wrong == []
