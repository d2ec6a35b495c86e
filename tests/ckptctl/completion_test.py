"""Completion as the shells do it: each one has the installed script, and a line is completed at its end by what the shell binds to a key."""

from __future__ import annotations

import os
import pathlib
import pty
import select
import subprocess

import pytest
from programs import DEADLINE_S, Remote, ckptctl

# A line, and what may follow it: all of it, or (with "...") some of it. In a shell whose daemon has the job llama-7b on node-a.
LINES = [
    ("ckptctl ver", ["verify"]),
    ("ckptctl pla", ["plan", "plan-capacity"]),
    ("ckptctl complete", []),  # hidden: for scripts only
    ("ckptctl --v", ["--version"]),
    ("ckptctl --json sta", ["stats", "status"]),
    ("ckptctl stats ll", ["llama-7b"]),
    ("ckptctl export llama-7b /usr/sha", ["/usr/share"]),
    ("ckptctl restore-backup /usr/sha", ["/usr/share"]),
    ("ckptctl restore-backup /usr/share llama-7b --to /usr/sha", ["/usr/share"]),
    ("ckptctl verify --t", ["--tier", "--timeout", "--tls"]),
    ("ckptctl verify --tier ", ["memory", "nvme", "remote"]),
    ("ckptctl verify --tier n", ["nvme"]),
    ("ckptctl verify --tier=n", ["--tier=nvme"]),
    ("ckptctl verify ", ["llama-7b"]),
    ("ckptctl verify --socket ADMIN ll", ["llama-7b"]),
    ("ckptctl --socket=ADMIN verify ll", ["llama-7b"]),
    ("ckptctl verify --address HOST --tls FOLDER ll", ["llama-7b"]),
    ("ckptctl --address=HOST verify --tls=FOLDER --tier nvme ll", ["llama-7b"]),
    ("ckptctl --tls FOLDER --address HOST replace n", ["node-a"]),
    ("ckptctl verify --tier nvme lla", ["llama-7b"]),
    ("ckptctl verify llama-7b --a", ["--address", "--all", "--attempt"]),
    ("ckptctl list llama-7b l", []),  # it has one JOB
    ("ckptctl replace n", ["node-a"]),
    ("ckptctl replace node-x --with n", ["node-a"]),
    ("ckptctl replace node-x --job l", ["llama-7b"]),
    ("ckptctl restore llama-7b --from", ["--from-scratch"]),
    ("ckptctl plan-capacity --profile fp", ["fp32-adam", "fp32-momentum"]),
    ("ckptctl completion ", ["bash", "fish", "zsh"]),
]


class Terminal:
    """A shell on a terminal of its own."""

    def __init__(self, arguments: list[str], environment: dict[str, str], folder: pathlib.Path):
        self.master, terminal = pty.openpty()
        self.process = subprocess.Popen(
            arguments,
            env=environment,
            cwd=folder,
            stdin=terminal,
            stdout=terminal,
            stderr=terminal,
            start_new_session=True,
        )
        os.close(terminal)
        self.seen = b""

    def type(self, keys: str) -> None:
        os.write(self.master, keys.encode())

    def words_from(self, pipe: pathlib.Path, keys: str) -> list[str]:
        """What the line that `keys` makes writes to the pipe. Shells print as they go: that is read meanwhile."""
        # For writing, too: so there is no end of it before somebody has begun to write.
        reader = os.open(pipe, os.O_RDWR | os.O_NONBLOCK)
        try:
            self.type(keys)
            written = b""
            while not written.endswith(b"end\n"):
                ready, _, _ = select.select([reader, self.master], [], [], DEADLINE_S)
                assert ready, f"nothing comes from the shell: {self.seen[-2000:]!r}"
                if self.master in ready:
                    self.seen += os.read(self.master, 65536)
                if reader in ready:
                    written += os.read(reader, 65536)
            return written.decode().split()[:-1]
        finally:
            os.close(reader)

    def close(self) -> None:
        self.process.kill()
        self.process.wait(DEADLINE_S)
        os.close(self.master)


def told(line: str, environment: dict[str, str], remote: Remote) -> tuple[str, dict[str, str]]:
    """With ADMIN or HOST the daemon is found by what the line says, and by nothing else."""
    if "ADMIN" not in line and "HOST" not in line:
        return line, environment
    socket = environment["HOLDFAST_ADMIN_SOCKET"]
    nobody = {"HOLDFAST_ADMIN_SOCKET": "/nonexistent/admin.sock"}
    line = line.replace("ADMIN", socket).replace("HOST", remote.address)
    return line.replace("FOLDER", str(remote.certificates)), {**environment, **nobody}


@pytest.fixture
def pipe(tmp_path: pathlib.Path) -> pathlib.Path:
    path = tmp_path / "words"
    os.mkfifo(path)
    return path


def is_what_follows(words: list[str], line: str, expected: list[str]) -> None:
    typed = line.split()
    if not line.endswith(" "):
        typed = typed[:-1]
    assert words[: len(typed)] == typed, words
    # Shells may show that it is a directory.
    rest = sorted(word.rstrip("/") for word in words[len(typed) :])
    if not expected and not line.endswith(" "):
        expected = [line.split()[-1]]  # as it was typed
    assert rest == sorted(expected), line


@pytest.mark.parametrize("line,expected", LINES)
def test_bash(installed, shell_environment, remote, tmp_path, pipe, line, expected) -> None:
    line, shell_environment = told(line, shell_environment, remote)
    rc = tmp_path / "rc"
    script = installed / "share/bash-completion/completions/ckptctl"
    rc.write_text(
        f"source {script}\nsay() {{ printf '%s\\n' \"$@\" end >{pipe}; }}\n"
        "bind 'set enable-bracketed-paste off'\n"
    )
    shell = Terminal(["bash", "--rcfile", str(rc), "-i"], shell_environment, tmp_path)
    try:
        # Escape *: all that is possible is put into the line. Then, at its begin, what says it.
        words = shell.words_from(pipe, f"{line}\x1b*\x01say \n")
    finally:
        shell.close()
    is_what_follows(words, line, expected)


@pytest.mark.parametrize("line,expected", LINES)
def test_zsh(installed, shell_environment, remote, tmp_path, pipe, line, expected) -> None:
    line, shell_environment = told(line, shell_environment, remote)
    (tmp_path / ".zshrc").write_text(
        f"fpath=({installed}/share/zsh/site-functions $fpath)\n"
        "autoload -U compinit; compinit -u -D\n"
        "zle -C insert-all complete-word _generic\n"
        "zstyle ':completion:insert-all:*' completer _all_matches _complete\n"
        "zstyle ':completion:insert-all:*' insert yes\n"
        "zstyle ':completion:*' menu no\nunsetopt beep\nbindkey -e\nbindkey '^Xa' insert-all\n"
        f'say() {{ print -l -- "$@" end >{pipe} }}\n'
    )
    shell = Terminal(["zsh", "-i"], shell_environment, tmp_path)
    try:
        words = shell.words_from(pipe, f"{line}\x18a\x01say \n")
    finally:
        shell.close()
    is_what_follows(words, line, expected)


@pytest.mark.parametrize("line,expected", LINES)
def test_fish(installed, shell_environment, remote, tmp_path, line, expected) -> None:
    line, shell_environment = told(line, shell_environment, remote)
    script = installed / "share/fish/vendor_completions.d/ckptctl.fish"
    done = subprocess.run(
        ["fish", "--no-config", "-c", f"source {script}; complete -C {line!r}"],
        env=shell_environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    assert done.returncode == 0 and done.stderr == "", done.stderr
    # Each candidate with its description after a tab.
    words = [candidate.split("\t")[0].rstrip("/") for candidate in done.stdout.splitlines()]
    assert sorted(words) == sorted(expected)
    assert all("\t" in candidate for candidate in done.stdout.splitlines() if "--" in candidate)


def test_names_are_empty_where_there_is_no_daemon() -> None:
    for what in ("jobs", "nodes"):
        done = ckptctl("complete-names", what, "--socket", "/nonexistent/admin.sock")
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_names_of_a_daemon(daemon) -> None:
    for what, names in (("jobs", "llama-7b\n"), ("nodes", "node-a\n")):
        assert daemon.ctl("complete-names", what) == names
