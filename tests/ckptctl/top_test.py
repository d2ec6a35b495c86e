"""`ckptctl top` on a real terminal and in a pipe, over a daemon that goes away and comes back."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import select
import signal
import struct
import subprocess
import termios
import time
from collections.abc import Callable, Iterator

import pytest
from programs import CKPTCTL, DEADLINE_S, Daemon, ckptctl, daemon_with_a_job

ENTER = "\x1b[?1049h\x1b[?25l"
LEAVE = "\x1b[?25h\x1b[?1049l"


class Terminal:
    """ckptctl top on a terminal of its own, until the end of the block."""

    def __init__(self, daemon: Daemon, *words: str, rows: int = 40, columns: int = 120) -> None:
        self.master, slave = pty.openpty()
        self.resize(rows, columns)
        self.text = ""
        self.process = subprocess.Popen(
            [CKPTCTL, "top", *(words or ("--every", "100ms")), f"--socket={daemon.admin}"],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            env={**os.environ, "TERM": "xterm", "LC_ALL": "C.UTF-8"},
        )
        os.close(slave)

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait(DEADLINE_S)
        os.close(self.master)

    def resize(self, rows: int, columns: int) -> None:
        fcntl.ioctl(self.master, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def read_until(self, found: Callable[[str], bool], what: str) -> None:
        end = time.monotonic() + DEADLINE_S
        while not found(self.text):
            readable, _, _ = select.select([self.master], [], [], max(0, end - time.monotonic()))
            assert readable, f"{what} did not come: {self.text[-2000:]!r}"
            try:
                data = os.read(self.master, 65536)
            except OSError:  # nobody has the other side any more
                data = b""
            self.text += data.decode(errors="replace")
            assert data or found(self.text), f"{what} did not come before the end: {self.text!r}"

    def read_new(self, pattern: str) -> None:
        """Until what comes from now on has it."""
        seen = len(self.text)
        self.read_until(lambda text: re.search(pattern, text[seen:]) is not None, pattern)

    def frames(self) -> list[list[str]]:
        """Whole ones, without the sequences that draw."""
        whole = [
            part for part in self.text.replace("\r\r", "\r").split("\x1b[H")[1:] if "\x1b[J" in part
        ]
        return [part.split("\x1b[J")[0].replace("\x1b[K", "").split("\r\n") for part in whole]


@pytest.fixture
def mortal_daemon() -> Iterator[Daemon]:
    """One that a test may stop."""
    with daemon_with_a_job() as one:
        yield one


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_the_terminal_is_as_it_was_after_a_signal(daemon: Daemon, how: signal.Signals) -> None:
    with Terminal(daemon) as top:
        top.read_until(lambda _: len(top.frames()) >= 2, "a second frame")
        assert any("llama-7b" in line for line in top.frames()[1])
        assert top.text.count(ENTER) == 1
        assert LEAVE not in top.text
        top.process.send_signal(how)
        top.read_until(lambda text: LEAVE in text, "the end")
        assert top.process.wait(DEADLINE_S) == 0
        assert top.text.endswith(LEAVE)


def test_the_terminal_is_as_it_was_after_the_last_frame(daemon: Daemon) -> None:
    with Terminal(daemon, "--every", "100ms", "--count", "3") as top:
        top.read_until(lambda text: LEAVE in text, "the end")
        assert top.process.wait(DEADLINE_S) == 0
        assert top.text.startswith(ENTER)
        assert len(top.frames()) == 3


def test_ctrl_z_gives_the_terminal_back_for_as_long(daemon: Daemon) -> None:
    with Terminal(daemon) as top:
        top.read_new("llama-7b")
        top.process.send_signal(signal.SIGTSTP)
        top.read_until(lambda text: text.endswith(LEAVE), "the terminal")
        _, status = os.waitpid(top.process.pid, os.WUNTRACED)
        assert os.WIFSTOPPED(status)
        top.process.send_signal(signal.SIGCONT)
        top.read_new(re.escape(ENTER) + "(?s:.)*llama-7b")


def test_it_fits_the_terminal_also_when_that_changes(daemon: Daemon) -> None:
    with Terminal(daemon, "--every", "1h", rows=40, columns=120) as top:
        top.read_new("NODES(?s:.)*\x1b\\[J")
        assert max(len(line) for line in top.frames()[-1]) <= 120
        assert len(top.frames()[-1]) > 10
        top.resize(rows=10, columns=30)
        top.read_new("\x1b\\[J")
        assert len(top.frames()[-1]) == 10
        assert max(len(line) for line in top.frames()[-1]) == 30
        assert "more" in top.frames()[-1][-1]


def test_a_daemon_that_goes_away_is_shown_so_until_it_is_back(mortal_daemon: Daemon) -> None:
    with Terminal(mortal_daemon) as top:
        top.read_new("llama-7b")
        mortal_daemon.kill()
        top.read_new("AWAY for .*below is what it said last: nobody listens (?s:.)*llama-7b")
        mortal_daemon.start()
        top.read_until(
            lambda text: (
                "AWAY" not in text.split("\x1b[H")[-2] and "llama-7b" in text.split("\x1b[H")[-2]
            ),
            "a frame of a daemon that is back",
        )
        assert top.process.poll() is None


def test_a_daemon_that_was_never_there_is_an_error_on_the_screen_as_it_was() -> None:
    class Nobody:
        admin = "/nonexistent/admin.sock"

    with Terminal(Nobody()) as top:
        top.read_until(lambda text: "ckptctl: " in text, "the error")
        assert top.process.wait(DEADLINE_S) == 3
        assert "\x1b" not in top.text


def test_a_pipe_gets_one_frame_after_the_other_without_escapes(daemon: Daemon) -> None:
    done = ckptctl("top", "--every", "100ms", "--count", "3", "--socket", str(daemon.admin))
    assert (done.returncode, done.stderr) == (0, "")
    assert "\x1b" not in done.stdout
    assert len(re.findall(r"^ckptd .* on node-a, up ", done.stdout, re.M)) == 3
    assert len(re.findall(r"^  llama-7b +ended +0 of 1 +900 ", done.stdout, re.M)) == 3


def test_json_is_an_object_a_line_with_rates_from_the_second_on(daemon: Daemon) -> None:
    done = ckptctl(
        "top", "--every", "100ms", "--count", "2", "--json", "--socket", str(daemon.admin)
    )
    assert (done.returncode, done.stderr) == (0, "")
    first, second = [json.loads(line) for line in done.stdout.splitlines()]
    assert first["interval_ms"] == 0
    assert second["interval_ms"] > 0
    assert second["jobs"][0]["job"] == "llama-7b"
    assert [tier["tier"] for tier in second["tiers"]] == ["memory"]
    assert second["nodes"][0]["here"] is True


def test_a_pipe_ends_with_an_interrupt(daemon: Daemon) -> None:
    with subprocess.Popen(
        [CKPTCTL, "top", "--every", "1h", f"--socket={daemon.admin}"],
        stdout=subprocess.PIPE,
        text=True,
    ) as top:
        assert top.stdout is not None
        assert top.stdout.readline().startswith("ckptd ")
        top.send_signal(signal.SIGINT)
        assert top.wait(DEADLINE_S) == 0
