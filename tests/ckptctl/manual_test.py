"""The manual pages that cmake installs: well formed, and whole."""

from __future__ import annotations

import json
import os
import re
import subprocess

import pytest
from programs import BIN, DEADLINE_S, ckptctl

PAGES = ["share/man/man1/ckptctl.1", "share/man/man8/ckptd.8"]


def words_of(page) -> str:
    """As it is read: one line a paragraph, without breaks inside words."""
    done = subprocess.run(
        ["man", "--warnings=w", "-l", page],
        env={**os.environ, "MANWIDTH": "500", "LC_ALL": "C.UTF-8", "MANPAGER": "cat"},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    assert (done.returncode, done.stderr) == (0, "")
    return re.sub(r"\s+", " ", done.stdout)


@pytest.mark.parametrize("page", PAGES)
def test_pages_are_well_formed(installed, page) -> None:
    done = subprocess.run(
        ["mandoc", "-Tlint", "-Wwarning", installed / page],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    # A page is as old as its program, whose version it names.
    complaints = [line for line in done.stdout.splitlines() if "missing date" not in line]
    assert complaints == []


def test_ckptctls_page_has_all_commands_and_what_their_help_says(installed) -> None:
    text = words_of(installed / PAGES[0])
    listed = ckptctl("--help").stdout.split("Subcommands:")[1].split("Start here:")[0]
    commands = re.findall(r"^  ([a-z-]+) +\S", listed, re.M)
    assert len(commands) > 20
    for command in commands:
        help_text = ckptctl(command, "--help").stdout
        about, rest = help_text.split("\n", 1)
        assert about in text, command
        for option in re.findall(r"(?<![\w-])--[a-z-]+", rest.split("Example:")[0]):
            assert option in text, (command, option)
        example = help_text.split("Example:\n")[1].strip()
        assert example in text, command
    for code in ("0 all is well", "2 wrong arguments", "130 interrupted"):
        assert code in text


def test_ckptds_page_has_all_that_its_help_says(installed) -> None:
    text = words_of(installed / PAGES[1])
    shown = subprocess.run(
        [BIN / "ckptd", "--help"], capture_output=True, text=True, timeout=DEADLINE_S
    ).stdout
    options = re.findall(r"^  (?:-\w,)?(--[a-z-]+)(?: ([A-Z]+))? +(\S.*)$", shown, re.M)
    assert len(options) >= 8
    for name, value, about in options:
        assert f"{name} {value}".strip() + " " + about in text


def test_a_page_of_something_else_is_refused() -> None:
    for nonsense in ("", "what is this\n", "x" * 2_000_000):
        done = ckptctl("man", "ckptd", stdin=nonsense)
        assert done.returncode == 2
        assert "ckptd --help | ckptctl man ckptd" in done.stderr


def test_json_has_the_same_text(installed) -> None:
    answer = json.loads(ckptctl("man", "--json").stdout)
    assert answer == {"name": "ckptctl.1", "text": (installed / PAGES[0]).read_text()}
