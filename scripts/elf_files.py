"""What is wrong with the programs and libraries of a folder that is handed out: scripts/check-wheel
and scripts/check-tarball.

    problems = check(root, name="x86_64", baseline=MANYLINUX, tree="/home/me")   # [] when all is well

Standard library, and `readelf` and `nm` (binutils).
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator

# What every glibc Linux has (PEP 600). Anything else is carried.
GLIBC = frozenset(
    "libc.so.6 libm.so.6 libdl.so.2 librt.so.1 libpthread.so.0 libutil.so.1 libresolv.so.2 "
    "libnsl.so.1 "
    "ld-linux-x86-64.so.2 ld-linux-aarch64.so.1".split()
)
BASELINE = GLIBC | {"libgcc_s.so.1", "libstdc++.so.6"}
MANYLINUX = BASELINE | {"libz.so.1"}

# As the names of files have the processors, and as the headers of programs have them.
MACHINES = {"x86_64": 62, "aarch64": 183}

_DYNAMIC = re.compile(r"\((NEEDED|RPATH|RUNPATH|TEXTREL|SONAME)\)\s*(?:[^\[]*\[(.*)\])?")
_STACK = re.compile(r"GNU_STACK\s+(?:0x[0-9a-f]+\s+){5}(\w[\w ]*?)\s+(?:0x|0$)", re.MULTILINE)
_GLIBC_VERSION = re.compile(r"\(GLIBC_(\d+)\.(\d+)[.\d]*\)|Name: GLIBC_(\d+)\.(\d+)")
# A source file of this tree behind an absolute path, in a file of ours.
_OURS = re.compile(r"holdfast/|holdfast_ckptd/programs/|bin/|lib/libholdfast")
_SOURCE = re.compile(
    rb"(?<![\w./+~-])(?!/usr/)/[\w./+~-]+/"
    rb"(?:base|ckptctl|client-lib|proto|recovery|server|tiers)/[\w/.-]+\.(?:cc|h)\b"
)


def _run(*command: str) -> str:
    return subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, check=True
    ).stdout


def elf_files(root: str) -> Iterator[str]:
    """Paths below root, relative, of all ELF files that are no links."""
    for folder, _, names in os.walk(root):
        for name in sorted(names):
            path = os.path.join(folder, name)
            if os.path.islink(path) or not os.path.isfile(path):
                continue
            with open(path, "rb") as file:
                if file.read(4) == b"\x7fELF":
                    yield os.path.relpath(path, root)


def exported(path: str) -> set[str]:
    """The names that a library defines for others, without versions."""
    lines = _run("nm", "-D", "--defined-only", path).splitlines()
    return {line.split()[-1].split("@")[0] for line in lines if line.split()}


def imported(path: str, prefix: str) -> set[str]:
    """The names with this prefix (a regular expression) that a library wants of others."""
    lines = _run("nm", "-D", "--undefined-only", path).splitlines()
    names = {line.split()[-1].split("@")[0] for line in lines if line.split()}
    return {name for name in names if re.match(prefix, name)}


def glibc_needed(path: str) -> tuple[int, int]:
    """The newest version of glibc that a symbol is wanted of."""
    found = _GLIBC_VERSION.findall(_run("readelf", "-VW", path))
    return max([(int(a or c), int(b or d)) for a, b, c, d in found], default=(0, 0))


def glibc_defined(path: str) -> tuple[int, int]:
    """The version of a libc.so.6: the newest that it defines."""
    names = re.findall(r"Name: GLIBC_(\d+)\.(\d+)$", _run("readelf", "-VW", path), re.MULTILINE)
    return max([(int(major), int(minor)) for major, minor in names], default=(0, 0))


def _directories(path: str, root: str, search: str, problems: list[str]) -> list[str]:
    """Where its libraries are looked for; all must be below root."""
    below = os.path.dirname(os.path.join(root, path))
    found = []
    for entry in search.split(":"):
        where = os.path.normpath(entry.replace("$ORIGIN", below))
        if not entry.startswith("$ORIGIN") or os.path.relpath(where, root).startswith(".."):
            problems.append(f"{path}: looks for libraries outside: RPATH '{entry}'")
        else:
            found.append(where)
    return found


def check(root: str, *, name: str, baseline: frozenset[str], tree: str) -> list[str]:
    """What is wrong with the ELF files below root, one line each. `name` says the processor."""
    problems: list[str] = []
    machines = {number for machine, number in MACHINES.items() if machine in name}
    root = os.path.realpath(root)
    for path in elf_files(root):
        full = os.path.join(root, path)
        needed, search = [], []
        for kind, value in _DYNAMIC.findall(_run("readelf", "-dW", full)):
            if kind == "NEEDED":
                needed.append(value)
            elif kind in ("RPATH", "RUNPATH"):
                search += _directories(path, root, value, problems)
            elif kind == "TEXTREL":
                problems.append(f"{path}: its code is relocated when it is loaded (TEXTREL)")
        for library in needed:
            if library not in baseline and not any(
                os.path.exists(os.path.join(where, library)) for where in search
            ):
                problems.append(
                    f"{path}: needs {library}, which is neither carried where it looks nor on every "
                    "machine"
                )
        stack = _STACK.search(_run("readelf", "-lW", full))
        if not stack or "E" in stack.group(1):
            problems.append(f"{path}: wants an executable stack")
        with open(full, "rb") as file:
            content = file.read()
        if int.from_bytes(content[18:20], "little") not in machines:
            problems.append(f"{path}: is for another processor than the file's name says")
        if tree.encode() + b"/" in content:
            problems.append(f"{path}: names the folder that it was built in, {tree}")
        elif _OURS.match(path) and (source := _SOURCE.search(content)):
            problems.append(
                f"{path}: names a source file where it was built: {source.group().decode()}"
            )
    return problems
