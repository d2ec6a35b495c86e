"""What docs/python.md, docs/formats.md and README.md say of Python is true: their blocks run, and what they quote is there."""

from __future__ import annotations

import collections
import dataclasses
import doctest
import importlib
import json
import os
import pathlib
import re
import signal
import subprocess
import sys

import ml_dtypes
import numpy
import pytest
import torch

import holdfast
from daemons import BIN, DEADLINE_S, WHOLE_LINES, Daemon
from holdfast import _errors, _json

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
TIERS = "nvme: {dirs: [ROOT/nvme]}\nremote: {dir: ROOT/remote}\n"


@dataclasses.dataclass(frozen=True)
class Block:
    section: str
    language: str
    text: str


def blocks_of(page: str) -> list[Block]:
    """The fenced blocks of a page, with the heading that they stand under."""
    section, language, lines = "", None, []
    blocks: list[Block] = []
    for line in (ROOT / page).read_text().splitlines():
        if language is not None:
            if line == "```":
                blocks.append(Block(section, language, "\n".join(lines) + "\n"))
                language, lines = None, []
            else:
                lines.append(line)
        elif line.startswith("```"):
            language = line[3:]
        elif line.startswith("#"):
            section = line.lstrip("# ")
    assert language is None, f"{page}: a block without an end"
    return blocks


@pytest.fixture
def newcomer(make_daemon, tmp_path: pathlib.Path) -> tuple[Daemon, dict[str, str]]:
    """A daemon where the package finds it by itself, and a shell's variables in which `python` is this one."""
    daemon = make_daemon(TIERS, ["nvme", "remote"])
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in ("RANK", "WORLD_SIZE", "XDG_RUNTIME_DIR", "HOLDFAST_SOCKET")
    }
    programs = [str(BIN.resolve()), str(pathlib.Path(sys.executable).parent), environment["PATH"]]
    environment |= WHOLE_LINES | {
        "HOLDFAST_PRIVATE_DIR": str(daemon.root),
        "PATH": ":".join(programs),
    }
    return daemon, environment


def run(arguments: list[str], folder: pathlib.Path, environment: dict[str, str]) -> str:
    process = subprocess.Popen(
        arguments,
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        printed, _ = process.communicate(timeout=DEADLINE_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # workers, too
        printed, _ = process.communicate()
        raise AssertionError(f"{' '.join(arguments)} did not end:\n{printed}") from None
    assert process.returncode == 0, f"{' '.join(arguments)}:\n{printed}"
    return printed


def run_blocks(blocks: list[Block], folder: pathlib.Path, environment: dict[str, str]) -> None:
    """Python blocks are programs; one that begins with a file's name is saved, and run by the commands that follow. What a
    comment behind a command says is printed, with … for anything."""
    for number, block in enumerate(blocks):
        if block.language == "python":
            named = re.match(r"# (\w+\.py)\n", block.text)
            path = folder / (named[1] if named else f"block_{number}.py")
            path.write_text(block.text)
            if named is None:
                run([sys.executable, path.name], folder, environment)
        elif block.language == "bash":
            for line in block.text.splitlines():
                command, _, expected = line.partition(" # ")
                printed = run(["bash", "-c", command], folder, environment)
                if expected.strip().startswith("started at"):
                    for part in expected.split("…"):
                        part = part.strip(" ,").partition(": ")[0]
                        assert part in printed, f"{line}: printed was {printed}"


def test_the_blocks_of_the_manual_run(
    newcomer: tuple[Daemon, dict[str, str]], tmp_path: pathlib.Path
) -> None:
    blocks = blocks_of("docs/python.md")
    assert len([block for block in blocks if block.language == "python"]) >= 8
    run_blocks(blocks, tmp_path, newcomer[1])


def test_the_python_of_the_readme_runs(
    newcomer: tuple[Daemon, dict[str, str]], tmp_path: pathlib.Path
) -> None:
    blocks = [block for block in blocks_of("README.md") if block.section == "Use it"]
    run_blocks([block for block in blocks if block.language == "python"], tmp_path, newcomer[1])
    assert [block.language for block in blocks].count("python") == 1


def said_in_sources() -> str:
    """The string literals of all sources, in one line each, as far as they are next to one another."""
    text = []
    for folder in ("client-lib", "server", "base", "tiers"):
        for path in sorted((ROOT / folder).rglob("*")):
            if path.suffix in (".py", ".cc", ".h"):
                text.append(re.sub(r'"\s*\n\s*f?"', "", path.read_text()))
    return "\n".join(text)


def test_the_symptoms_are_what_is_said() -> None:
    page = (ROOT / "docs/python.md").read_text()
    symptoms = page[page.index("## Symptoms") :]
    quoted = [
        text
        for line in symptoms.splitlines()
        if line.startswith("| `")
        for text in re.findall(r"`([^`]+)`", line.split("|")[1])
    ]
    assert len(quoted) > 15
    sources = said_in_sources()
    assert [text for text in quoted if text not in sources] == []


def test_every_exception_is_explained() -> None:
    page = (ROOT / "docs/python.md").read_text()
    for kind in vars(_errors).values():
        if isinstance(kind, type) and issubclass(kind, holdfast.HoldfastError):
            assert f"`{kind.__name__}" in page or f"holdfast.{kind.__name__}`" in page


def test_the_worked_example_of_the_formats(
    newcomer: tuple[Daemon, dict[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOLDFAST_PRIVATE_DIR", str(newcomer[0].root))
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    section = "The state of Python programs"
    blocks = [block for block in blocks_of("docs/formats.md") if block.section == section]
    (program,) = [block.text for block in blocks if block.language == "python"]
    (tree,) = [block.text for block in blocks if block.language == "json"]
    names: dict[str, object] = {"__name__": "formats"}
    exec(program, names)
    with holdfast.open("formats") as saved:
        (text,) = [
            data for name, data, codec in saved._views[0].objects if name == "holdfast.state"
        ]
        assert json.loads(text) == json.loads(tree)
        assert saved.keys() == names["tensors"]
        assert saved.value("extra") == {"epoch": 3, "betas": (0.9, 0.95), "seen": {1, 2}}


def test_the_tags_of_the_formats() -> None:
    page = (ROOT / "docs/formats.md").read_text()
    section = page[page.index("## The state of Python programs") :]
    for tag in _json._DECODERS:
        assert f"`{tag}`" in section, tag
    for value, text in re.findall(r"^\| `[$.\w]+` \| `([^`]+)` \| `([^`]+)` \|$", section, re.M):
        modules = {"torch": torch, "np": numpy, "ml_dtypes": ml_dtypes, "collections": collections}
        value = eval(value, modules)
        assert _json.encode(value, "").decode() == text


@pytest.mark.parametrize(
    "module", ["_environment", "_json", "_objects", "_torch_types", "_whole_state", "dcp._layout"]
)
def test_the_examples_of_docstrings(module: str) -> None:
    results = doctest.testmod(importlib.import_module(f"holdfast.{module}"))
    assert results.failed == 0 and results.attempted > 0
