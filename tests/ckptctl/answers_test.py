"""Exit codes and --json of every command, against no daemon, a real one that refuses, one that answers, and with wrong arguments.
docs/ckptctl.md says which exit code is right."""

from __future__ import annotations

import json
import pathlib
import re
import struct
import subprocess
import sys

import pytest
from programs import ROOT, ckptctl

NOBODY = "/nonexistent/admin.sock"

# Of a job, node or tier that there is not.
MISSING = {
    "status": ["nojob"],
    "fabric": ["nonode"],
    "list": ["nojob"],
    "inspect": ["nojob"],
    "verify": ["nojob"],
    "scrub": ["nojob"],
    "repair": ["nojob"],
    "restore": ["nojob", "--step", "1"],
    "where": ["nojob"],
    "explain": ["nojob"],
    "plan": ["nojob", "--layout", "LAYOUT"],
    "timeline": ["nojob"],
    "top": ["nojob", "--once"],
    "export": ["nojob", "OUT"],
    "stats": ["nojob"],
    "diff": ["nojob", "1", "2"],
    "backup": ["nojob", "HERE"],
    "restore-backup": ["BACKUP", "nojob", "--to", "HERE"],
    "gc": ["nojob"],
    "pin": ["nojob", "--step", "1"],
    "unpin": ["nojob", "--step", "1"],
    "replace": ["nonode", "--with", "node-a"],
    "drain": ["nonode"],
    "rm": ["nojob", "--yes"],
    "forget-drive": ["0123abcd", "--yes"],
    "adopt-remote": ["0" * 32, "--yes"],
    "rebuild": ["--tier", "nvme"],
    "set": ["nojob", "nvme.every_steps=1"],
}

# That can be done, in this order: what `pin` does `unpin` takes back.
POSSIBLE = {
    "status": ["llama-7b"],
    "jobs": [],
    "nodes": [],
    "fabric": [],
    "list": ["llama-7b"],
    "inspect": ["llama-7b"],
    "verify": ["llama-7b"],
    "scrub": ["llama-7b"],
    "repair": ["llama-7b"],
    "restore": ["llama-7b", "--clear"],
    "where": ["llama-7b"],
    "explain": ["llama-7b"],
    "plan": ["llama-7b", "--layout", "LAYOUT"],
    "timeline": ["llama-7b"],
    "top": ["llama-7b", "--once"],
    "events": ["llama-7b"],
    "export": ["llama-7b", "OUT", "--only", "model"],
    "stats": ["llama-7b"],
    "diff": ["llama-7b", "900", "900@1"],
    "backup": ["llama-7b", "HERE"],
    "restore-backup": ["BACKUP", "llama-7b", "--to", "HERE"],
    "import": ["imported", "WEIGHTS", "--step", "1", "--client-socket", "CLIENT"],
    "gc": ["--dry-run"],
    "pin": ["llama-7b", "--step", "900"],
    "unpin": ["llama-7b", "--step", "900"],
    "replace": ["node-a", "--forget"],
    "drain": ["node-a", "--undo"],
    "rebuild": [],
    "set": ["llama-7b", "nvme.keep_last=3"],
    "plan-capacity": ["--params", "7B", "--ranks", "8", "--step-time", "9s", "--save-every", "9"],
    "completion": ["bash"],
    "man": [],
}

OWN = ("restore-backup", "import", "plan-capacity", "completion", "man")  # they ask no daemon


def table() -> dict[str, tuple[str, str, str]]:
    """Of each command: its codes without ckptd, of what there is not, and what its code 1 says."""
    text = (ROOT / "docs/ckptctl.md").read_text().split("## Exit codes of each command")[1]
    lines = [line for line in text.split("\n## ")[0].splitlines() if line.startswith("| `")]
    rows = [[cell.strip(" `") for cell in line.strip("|").split("|")] for line in lines]
    return {command: (without, missing, says) for command, without, missing, says in rows}


TABLE = table()


def commands() -> list[str]:
    listed = ckptctl("--help").stdout.split("Subcommands:")[1].split("Start here:")[0]
    return re.findall(r"^  ([a-z-]+) +\S", listed, re.M)


@pytest.fixture(scope="session")
def backed_up(daemon, tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    folder = tmp_path_factory.mktemp("backup")
    done = ckptctl("backup", "llama-7b", str(folder), "--socket", str(daemon.admin))
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture
def arguments_of(
    tmp_path: pathlib.Path, backed_up: pathlib.Path, daemon, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("HOLDFAST_PYTHON", sys.executable)
    weights = tmp_path / "w.safetensors"
    header = b'{"w":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}'
    weights.write_bytes(struct.pack("<Q", len(header)) + header + b"\1")
    layout = tmp_path / "layout.yaml"
    layout.write_text("mesh: [{name: dp, ranks: 1}]\n")
    (tmp_path / "here").mkdir()
    places = {
        "LAYOUT": str(layout),
        "OUT": str(tmp_path / "out"),
        "HERE": str(tmp_path / "here"),
        "BACKUP": str(backed_up),
        "WEIGHTS": str(weights),
        "CLIENT": str(daemon.socket),
    }
    return lambda words: [places.get(word, word) for word in words]


def is_error(done: subprocess.CompletedProcess[str], exit_code: int) -> None:
    """With --json: one line, one object, the same words on stderr."""
    assert done.returncode == exit_code, done.stderr
    assert done.stdout.count("\n") == 1
    error = json.loads(done.stdout)["error"]
    assert error["exit_code"] == exit_code
    assert re.fullmatch("[A-Z_]+", error["code"])
    assert error["message"] in done.stderr


def test_the_table_has_every_command() -> None:
    assert list(TABLE) == commands()
    # Why 1 comes is said where it does.
    assert {command for command, (_, _, says) in TABLE.items() if says} == {
        "inspect",
        "verify",
        "scrub",
        "repair",
        "plan",
        "export",
        "stats",
        "diff",
        "backup",
        "restore-backup",
        "drain",
        "rm",
        "rebuild",
        "doctor",
        "plan-capacity",
    }


@pytest.mark.parametrize("command", TABLE)
def test_without_a_daemon(command, arguments_of) -> None:
    expected = int(TABLE[command][0])
    words = arguments_of(
        {
            **POSSIBLE,
            "rm": ["llama-7b", "--yes"],
            "forget-drive": ["0123abcd", "--yes"],
            "adopt-remote": ["0" * 32, "--yes"],
            "doctor": [],
        }[command]
    )
    socket = [] if command in OWN else ["--socket", NOBODY]
    if command == "import":
        words[-1] = NOBODY
    done = ckptctl(command, *words, *socket)
    assert done.returncode == expected, done.stderr
    as_json = ckptctl(command, *words, *socket, "--json")
    if expected == 3:
        assert NOBODY in done.stderr and "ckptd" in done.stderr
        assert done.stdout == ""
        is_error(as_json, 3)
    else:
        assert as_json.returncode == expected
        assert isinstance(json.loads(as_json.stdout), dict)


@pytest.mark.parametrize("command", MISSING)
def test_of_what_there_is_not(command, arguments_of, daemon) -> None:
    words = [command, *arguments_of(MISSING[command])]
    if command not in OWN:
        words += ["--socket", str(daemon.admin)]
    done = ckptctl(*words)
    assert done.returncode == int(TABLE[command][1]), done.stderr
    assert done.stdout == ""
    assert re.search("no|none|alone", done.stderr)
    is_error(ckptctl(*words, "--json"), int(TABLE[command][1]))


def test_the_table_says_of_all_others_that_nothing_can_be_missing() -> None:
    for command, (_, missing, _) in TABLE.items():
        assert (missing == "") == (command not in MISSING), command


@pytest.mark.parametrize("command", TABLE)
def test_wrong_arguments(command) -> None:
    for wrong in (["--nonsense"], ["a", "b", "c", "d"]):
        done = ckptctl(command, *wrong)
        assert done.returncode == 2, done.stderr
        assert done.stdout == ""
        assert f"ckptctl {command} --help" in done.stderr
        is_error(ckptctl(command, *wrong, "--json"), 2)


@pytest.mark.parametrize("command", POSSIBLE)
def test_json_of_an_answer(command, arguments_of, daemon) -> None:
    words = [command, *arguments_of(POSSIBLE[command])]
    if command not in OWN:
        words += ["--socket", str(daemon.admin)]
    done = ckptctl(*words)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout
    if command == "import":
        words[1] = "imported-anew"  # a job of its own each time
    done = ckptctl(*words, "--json")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.isascii() and done.stdout.count("\n") == 1
    assert isinstance(json.loads(done.stdout), dict)


def test_a_daemon_refuses(daemon) -> None:
    at = ["--socket", str(daemon.admin)]
    for words, exit_code, why in (
        (["rm", "llama-7b"], 4, "nothing was removed"),
        (["rm", "llama-7b", "--step", "900"], 4, "--force"),
        (["restore", "llama-7b", "--step", "7"], 4, "7"),
        (["explain", "llama-7b", "--step", "7"], 4, "7"),
        (["inspect", "llama-7b", "--rank", "5"], 4, "5"),
        (["pin", "llama-7b", "--step", "7"], 4, "7"),
        (["forget-drive", "0123abcd"], 4, "nothing was changed"),
        (["set", "nvme.nosuch=1"], 2, "nvme.nosuch"),
        (["set", "llama-7b", "nvme.keep_last=0"], 2, "keep_last"),
    ):
        done = ckptctl(*words, *at)
        assert done.returncode == exit_code, (words, done.stderr, done.stdout)
        assert why in done.stderr, words
        is_error(ckptctl(*words, *at, "--json"), exit_code)


def test_what_does_not_fit_is_one() -> None:
    words = [*POSSIBLE["plan-capacity"], "--memory", "1GB"]
    assert ckptctl("plan-capacity", *words).returncode == 1
    done = ckptctl("plan-capacity", *words, "--json")
    assert done.returncode == 1
    assert json.loads(done.stdout)["problems"][0]["what"].startswith("memory of a node")


def test_rm_of_a_whole_job_at_the_end(daemon) -> None:
    """The daemon's job goes here: no test of this file that is run after this one may want it."""
    done = ckptctl("rm", "llama-7b", "--yes", "--json", "--socket", str(daemon.admin))
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["bytes_freed"] > 0
