"""Every command that README.md and docs/ show is run, here or by the test that is named here: none that nobody has tried.

Commands of Holdfast's own programs are run as they stand, by a real daemon that has the jobs they speak of. What needs a cluster,
a package or root is run elsewhere (ELSEWHERE): the file that is named must be there and have the words of it."""

from __future__ import annotations

import pathlib
import re
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Iterator

import pytest
from programs import BIN, CKPTCTL, DEADLINE_S, ROOT, SAVE, Daemon, run_python

PAGES = ["README.md", *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").glob("*.md"))]

PROGRAMS = (
    "ckptctl|ckptd|scripts/[a-z-]+|bin/[a-z_]+|pip|python|torchrun|tar|apt|editor|systemctl|kill|mount|docker|helm|kubectl|cd|"
    r"\$EDITOR|sbatch|scontrol|git|cmake|curl|~/anywhere/\S+"
)
COMMAND = re.compile(rf"(?:\$ )?((?:sudo )?(?:{PROGRAMS})(?: .*)?)$")
# A program's own output, a picture, a table of files.
NO_COMMAND = re.compile(
    r"ckptd 0\.1\.0 on |ckptd: who may|ckptctl: status, where|ckptctl/ |cd ~|ckptd \[--config|ckptd --version \|"
)

# By whom a command is run that this file does not run, and words of it that are there.
ELSEWHERE: list[tuple[str, str, tuple[str, ...]]] = [
    (
        r"python train\.py|torchrun .*",
        "tests/python/docs_test.py",
        ("docs/python.md", "run_blocks"),
    ),
    (r"python -c 'import holdfast; .*|pip install .*", "tests/python/packages_test.py", ("pip",)),
    (r"tar -xzf .*|~/anywhere/\S+ --version", "scripts/check-tarball", ("ckptd", "tar")),
    (
        r"scripts/demo\b.*|scripts/test\b.*|scripts/setup\b.*",
        ".ci/run",
        ("scripts/demo", "scripts/test", "scripts/setup"),
    ),
    (r"scripts/package --deb.*|apt install .*", "tests/deploy_hosts/debian_test.py", ("dpkg-deb",)),
    (
        r"systemctl enable --now ckptd.*",
        "tests/deploy_hosts/debian_test.py",
        ('"enable", "ckptd"',),
    ),
    (r"systemctl reload ckptd.*", "tests/deploy_hosts/systemd_test.py", ('"reload", "ckptd"',)),
    (r"(sudo )?editor .*|\$EDITOR .*", "tests/deploy_hosts/installed.py", ("ckptd.yaml",)),
    (r"kill \$\(cat .*", "tests/python/daemon_test.py", ("memory", "lock")),
    (r"mount -t tmpfs .*", "docs/operations.md", ("noswap",)),  # (kernels from 6.4 on)
    (r"docker (build|push) .*", "tests/deploy/image_test.py", ("Containerfile",)),
    (r"helm (install|upgrade|uninstall) .*", "tests/deploy/chart_test.py", ("helm",)),
    (
        r"kubectl apply -k .*|cd deploy/kustomize/.*",
        "tests/deploy/kustomize_test.py",
        ("kustomize",),
    ),
    (r"kubectl .*", "tests/deploy/pod_test.py", ("ckptctl",)),
    (r"sbatch .*|scontrol requeue .*", "tests/deploy_hosts/slurm_test.py", ("sbatch", "requeue")),
    (
        r"ckptctl (fabric n2|replace .*|status slurm-.*)",
        "tests/ckptctl/program_test.cc",
        ("replace", "fabric"),
    ),
    (r"ckptctl plan .*", "tests/ckptctl/answers_test.py", ('"plan"',)),
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


# With what a reader puts in its place, or shorter.
RUN_AS = {
    "ckptd --check-config [--config FILE …]": "ckptd --check-config",
    "ckptctl drain n3 --wait 5min": "ckptctl drain n3 --wait 100ms; code=$?; ckptctl drain n3 --undo; exit $code",
}

ALL = commands()


def elsewhere(command: str) -> tuple[str, tuple[str, ...]] | None:
    for pattern, path, words in ELSEWHERE:
        if re.fullmatch(pattern, command):
            return path, words
    return None


HERE = [(page, command) for page, command in ALL if elsewhere(command) is None]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """A daemon that has the jobs of which the pages speak, each with step 900."""
    root = pathlib.Path(tempfile.mkdtemp(prefix="hf-docs-"))
    memory = pathlib.Path(tempfile.mkdtemp(prefix="hf-docs-", dir="/dev/shm"))
    one = Daemon(root, memory, "node_name: n3\n")
    try:
        one.start()
        for job in ("llama-7b", "my-run", "first-run", "old-run"):
            saved = run_python(SAVE.replace("llama-7b", job), HOLDFAST_SOCKET=str(one.socket))
            assert saved.returncode == 0, saved.stderr
        yield one
    finally:
        one.stop()
        shutil.rmtree(root, ignore_errors=True)
        shutil.rmtree(memory, ignore_errors=True)


def test_there_are_commands() -> None:
    assert len(ALL) > 80
    assert {page for page, _ in ALL} >= {"README.md", "docs/install.md", "docs/kubernetes.md"}


@pytest.mark.parametrize(("page", "command"), [each for each in ALL if elsewhere(each[1])])
def test_what_is_run_elsewhere(page: str, command: str) -> None:
    found = elsewhere(command)
    assert found is not None
    path, words = found
    text = (ROOT / path).read_text()
    assert [word for word in words if word not in text] == [], f"{page}: {command}: {path}"


@pytest.mark.parametrize(("page", "command"), HERE)
def test_a_documented_command_runs(
    page: str, command: str, world: Daemon, tmp_path: pathlib.Path
) -> None:
    words = shlex.split(command)
    if words[0] == "scripts/package":
        pytest.fail(f"{page}: nobody runs {command!r}")
    if words[0].startswith("bin/"):
        return has_options(BIN / words[0].removeprefix("bin/"), words[1:])
    assert words[0] in ("ckptctl", "ckptd"), (
        f"{page}: nobody runs {command!r}: add it to ELSEWHERE, or here"
    )
    environment = {
        "PATH": f"{CKPTCTL.parent}:/usr/bin:/bin",
        "HOME": str(tmp_path),
        "HOLDFAST_ADMIN_SOCKET": str(world.admin),
        "LC_ALL": "C.UTF-8",
    }
    done = subprocess.run(
        ["bash", "-c", RUN_AS.get(command, command)],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    # 1: doctor judges this machine; a node that is alone cannot be drained. 4: of a step or a rank that these jobs have not.
    assert done.returncode in (0, 1, 4), f"{page}: {command}: {done.returncode}: {done.stderr}"
    assert done.returncode != 4 or re.search("880|n9|--rank 1", command), (
        f"{page}: {command}: {done.stderr}"
    )
    assert done.returncode != 1 or re.search("doctor|drain", command), (
        f"{page}: {command}: {done.stderr}"
    )


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
