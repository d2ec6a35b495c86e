#!/usr/bin/env python3
"""Answers by itself, slowly and by docs/formats.md ("Ownership of identical slices") alone, who owns
which slice, and compares that with the fixtures, with the example in that document, and with what the
program under test says of random cases. It also checks what the document promises of the answers.

usage: ownership_reference.py check <folder of fixtures> <docs/formats.md> <print_ownership_cases>
       ownership_reference.py answer <file of cases>     (prints it with these answers)

A file of cases has lines, with words separated by one space; '#' begins a comment line:

    case <title>
    layout <hash>                               the slices that follow are this layout's
    tensor <name> <dtype> <shape> <place>       place: whole, box:<offset>:<shape>, flat:<start>:<length>
    object <name> <bytes>
    ranks <first> <last> <hash>                 these have that layout
    owners <rank> <owner>:<slice> ...           of each slice, and which of the owner's slices it is
    bytes <rank> <bytes>                        that the rank owns
    without <ranks> <rank> <slice> <owner>:<slice>|nobody     the slice's owner when these cannot be it

Lists of numbers have commas; '-' is the empty one.
"""

from __future__ import annotations

import math
import pathlib
import subprocess
import sys

RANDOM_CASES = 150
RANDOM_SEEDS = (1, 2, 3)

DTYPE_BYTES = {"F64": 8, "I64": 8, "F32": 4, "I32": 4, "BF16": 2, "F16": 2, "U8": 1, "BOOL": 1}
PLACE_KINDS = {"whole": 0, "box": 1, "flat": 2}


def numbers(word: str) -> tuple[int, ...]:
    return () if word == "-" else tuple(int(part) for part in word.split(","))


class Tensor:
    def __init__(self, name: str, dtype: str, shape: str, place: str) -> None:
        kind, *rest = place.split(":")
        self.name = name
        self.element = DTYPE_BYTES[dtype]
        if kind == "flat":
            where = (int(rest[0]), int(rest[1]))
            elements = where[1]
        else:
            where = tuple(numbers(part) for part in rest)
            elements = math.prod(where[1] if kind == "box" else numbers(shape))
        self.bytes = elements * self.element
        self.place = (PLACE_KINDS[kind], where)
        self.identity = (name, dtype, numbers(shape), self.place)

    def order(self) -> tuple:
        return (-self.bytes, -self.element, self.name.encode(), self.place)


class Case:
    def __init__(self, title: str) -> None:
        self.title = title
        self.layouts: dict[str, list[Tensor | None]] = {}  # None: an object
        self.ranks: dict[int, str] = {}
        self.expected: list[list[str]] = []

    def read(self, words: list[str]) -> None:
        slices = list(self.layouts.values())[-1] if self.layouts else []
        if words[0] == "layout":
            self.layouts[words[1]] = []
        elif words[0] == "tensor":
            slices.append(Tensor(*words[1:]))
        elif words[0] == "object":
            slices.append(None)
        elif words[0] == "ranks":
            for rank in range(int(words[1]), int(words[2]) + 1):
                self.ranks[rank] = words[3]
        elif words[0] in ("owners", "bytes", "without"):
            self.expected.append(words)
        else:
            raise ValueError(f"no such line: {' '.join(words)}")

    def solve(self) -> None:
        # Every rank with every slice: the point of this program is to be plain.
        self.where = {
            rank: {s.identity: i for i, s in enumerate(self.layouts[layout]) if s is not None}
            for rank, layout in self.ranks.items()
        }
        self.tensors: dict[tuple, Tensor] = {}
        for layout in self.ranks.values():
            for tensor in self.layouts[layout]:
                if tensor is not None:
                    self.tensors[tensor.identity] = tensor
        self.holders = {
            identity: sorted(rank for rank in self.ranks if identity in self.where[rank])
            for identity in self.tensors
        }
        self.owner: dict[tuple, int] = {}
        self.turn: dict[tuple, int] = {}
        self.load = dict.fromkeys(self.ranks, 0)
        self.given: dict[int, list[Tensor]] = {rank: [] for rank in self.ranks}
        for identity, tensor in self.tensors.items():
            if len(self.holders[identity]) == 1:
                self.owner[identity] = self.holders[identity][0]
                self.load[self.owner[identity]] += tensor.bytes
        shared = [t for t in self.tensors.values() if len(self.holders[t.identity]) > 1]
        for tensor in sorted(shared, key=Tensor.order):
            rank = min(self.holders[tensor.identity], key=lambda r: (self.load[r], r))
            self.owner[tensor.identity] = rank
            self.turn[tensor.identity] = len(self.given[rank])
            self.given[rank].append(tensor)
            self.load[rank] += tensor.bytes

    def answer(self, words: list[str]) -> list[str]:
        """The line that `words` should have been."""
        if words[0] == "bytes":
            return ["bytes", words[1], str(self.load[int(words[1])])]
        if words[0] == "owners":
            rank = int(words[1])
            slices = range(len(self.layouts[self.ranks[rank]]))
            return ["owners", words[1], *(self.owner_of(rank, i, ()) for i in slices)]
        return [*words[:4], self.owner_of(int(words[2]), int(words[3]), numbers(words[1]))]

    def owner_of(self, rank: int, slice_: int, excluded: tuple[int, ...]) -> str:
        tensor = self.layouts[self.ranks[rank]][slice_]
        if tensor is None:
            return "nobody" if rank in excluded else f"{rank}:{slice_}"
        h = self.holders[tensor.identity]
        n = len(h)
        candidates = [self.owner[tensor.identity]]
        if n > 1:
            k = h.index(candidates[0])
            t = self.turn[tensor.identity]
            candidates += [h[(k + 1 + (t + i) % (n - 1)) % n] for i in range(n - 1)]
            assert sorted(candidates) == h
        for candidate in candidates:
            if candidate not in excluded:
                return f"{candidate}:{self.where[candidate][tensor.identity]}"
        return "nobody"

    def check_promise(self) -> None:
        for a, given in self.given.items():
            for b in self.ranks:
                if given and all(b in self.holders[t.identity] for t in given):
                    assert self.load[a] <= self.load[b] + min(t.bytes for t in given), self.title

    def all_questions(self) -> list[list[str]]:
        questions = []
        for rank in sorted(self.ranks):
            questions += [["owners", str(rank)], ["bytes", str(rank)]]
        for identity in sorted(self.turn):
            gone = str(self.owner[identity])
            asked = self.holders[identity][-1]
            questions.append(["without", gone, str(asked), str(self.where[asked][identity])])
        return questions


def parse(text: str) -> list[Case]:
    cases: list[Case] = []
    for line in text.splitlines():
        words = line.split(" ")
        if words[0] == "case":
            cases.append(Case(line[5:]))
        elif line and not line.startswith("#"):
            cases[-1].read(words)
    for case in cases:
        case.solve()
    return cases


def judge(text: str, origin: str) -> int:
    """Compares every line of answers with this program's; returns how many there were."""
    count = 0
    for case in parse(text):
        if not case.expected:
            sys.exit(f"{origin}: case '{case.title}' has no answers")
        case.check_promise()
        for words in case.expected:
            count += 1
            right = case.answer(words)
            if right != words:
                sys.exit(
                    f"{origin}: case '{case.title}':\n  it says    {' '.join(words)}\n"
                    f"  should be  {' '.join(right)}"
                )
    return count


def check(fixtures: pathlib.Path, document: pathlib.Path, program: str) -> None:
    files = sorted(fixtures.glob("*.txt"))
    if "example.txt" not in [file.name for file in files]:
        sys.exit(f"{fixtures}: no example.txt")
    for file in files:
        print(f"{file.name}: {judge(file.read_text(encoding='utf-8'), file.name)} answers agree")

    begin, end = "<!-- example.txt: begin -->\n```\n", "```\n<!-- example.txt: end -->"
    text = document.read_text(encoding="utf-8")
    shown = text[text.index(begin) + len(begin) : text.index(end)]
    if shown != (fixtures / "example.txt").read_text(encoding="utf-8"):
        sys.exit(f"{document}: the example of ownership is not example.txt")

    for seed in RANDOM_SEEDS:
        command = [program, str(seed), str(RANDOM_CASES)]
        done = subprocess.run(command, check=True, capture_output=True, encoding="utf-8")
        count = judge(done.stdout, " ".join(command))
        print(f"seed {seed}: {count} answers to {RANDOM_CASES} random cases agree")


def main() -> None:
    if len(sys.argv) == 5 and sys.argv[1] == "check":
        check(pathlib.Path(sys.argv[2]), pathlib.Path(sys.argv[3]), sys.argv[4])
    elif len(sys.argv) == 3 and sys.argv[1] == "answer":
        text = pathlib.Path(sys.argv[2]).read_text(encoding="utf-8")
        (case,) = parse(text)
        print(text, end="")
        for question in case.all_questions():
            print(" ".join(case.answer(question)))
    else:
        sys.exit(__doc__)


if __name__ == "__main__":
    main()
