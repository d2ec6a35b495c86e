#!/usr/bin/env python3
"""Answers by itself, slowly and by docs/formats.md ("Placement of replicas") alone, where replicas lie, and compares
that with the fixtures, with the example in that document, and with what the program under test says of random cases.
It also checks what the document promises of the answers.

usage: placement_reference.py check <folder of fixtures> <docs/formats.md> <print_placement_cases>
       placement_reference.py answer <file of cases>     (prints them with these answers)

A file of cases has lines, with words separated by one space; '#' begins a comment line:

    case <title>
    job <uuid>
    replicas <number>
    node <name> <bytes lent> <value per level, or '-'> ...
    shards <first rank> <last rank> <home, or '-'> <bytes of each>
    hash <rank> <node> <hash, hexadecimal> <draw>
    limit <node> <limit> <step>                 in units
    targets <rank> <node> ...
    load <node> <units>
"""

from __future__ import annotations

import functools
import pathlib
import subprocess
import sys
import uuid
from fractions import Fraction

RANDOM_CASES = 120
RANDOM_SEEDS = (1, 2, 3)

UNIT = 2 << 20
MASK = (1 << 64) - 1


@functools.cache
def logarithm(i: int) -> int:
    return ((256 + i) ** 65536).bit_length() - 524_289


def mix(z: int) -> int:
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & MASK
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB & MASK
    return z ^ (z >> 31)


def hash_of_pair(shard: int, node: int) -> int:
    z = (shard ^ node) * 0xBF58476D1CE4E5B9 & MASK
    return (z ^ (z >> 32)) * 0x94D049BB133111EB & MASK


def draw_of(hash_: int) -> int:
    h = hash_ | 1
    c = 64 - h.bit_length()
    m = h << c
    i = m >> 55 & 0xFF
    f = m >> 23 & 0xFFFFFFFF
    return (c + 1 << 48) - (logarithm(i) << 32) - (logarithm(i + 1) - logarithm(i)) * f


class Node:
    def __init__(self, name: str, lent: str, *values: str) -> None:
        self.name = name
        self.key = name.encode()
        self.lent = int(lent) // UNIT
        self.values = values
        self.load = 0
        h = 0xCBF29CE484222325
        for byte in self.key:
            h = (h ^ byte) * 0x100000001B3 & MASK
        self.hash = mix(h)

    def shares(self, other: Node, level: int) -> bool:
        return self.values[level] != "-" and self.values[level] == other.values[level]


class Shard:
    def __init__(self, rank: int, home: Node | None, size: int) -> None:
        self.rank = rank
        self.home = home
        self.size = max(1, -(-size // UNIT))
        self.targets: list[Node] = []

    def has(self, node: Node) -> bool:
        return node is self.home or node in self.targets


class Case:
    def __init__(self, title: str) -> None:
        self.title = title
        self.lines: list[str] = []
        self.nodes: dict[str, Node] = {}
        self.shards: dict[int, Shard] = {}
        self.expected: list[list[str]] = []
        self.tries = 0
        self.exchanges = 0

    def read(self, words: list[str]) -> None:
        if words[0] in ("hash", "limit", "targets", "load"):
            self.expected.append(words)
            return
        self.lines.append(" ".join(words))
        if words[0] == "job":
            raw = uuid.UUID(words[1]).bytes
            a, b = int.from_bytes(raw[:8], "little"), int.from_bytes(raw[8:], "little")
            self.seed = mix(mix(a) ^ b)
        elif words[0] == "replicas":
            self.replicas = int(words[1])
        elif words[0] == "node":
            self.nodes[words[1]] = Node(*words[1:])
        elif words[0] == "shards":
            home = None if words[3] == "-" else self.nodes[words[3]]
            for rank in range(int(words[1]), int(words[2]) + 1):
                self.shards[rank] = Shard(rank, home, int(words[4]))
        else:
            raise ValueError(f"no such line: {' '.join(words)}")

    def pair(self, shard: Shard, node: Node) -> int:
        return hash_of_pair(
            mix(self.seed + 0x9E3779B97F4A7C15 * (shard.rank + 1) & MASK), node.hash
        )

    def order(self, shard: Shard, node: Node) -> tuple:
        return (Fraction(draw_of(self.pair(shard, node)), node.lent), node.key)

    @staticmethod
    def crowd(shard: Shard, node: Node, without: Node | None = None) -> tuple[int, ...]:
        copies = [n for n in [shard.home, *shard.targets] if n is not None and n is not without]
        return tuple(
            sum(node.shares(copy, level) for copy in copies) for level in range(len(node.values))
        )

    @staticmethod
    def fullness(shard: Shard, node: Node) -> int:
        over = node.load + shard.size - node.limit
        return 0 if over <= 0 else 1 + (over - 1) // node.step

    @staticmethod
    def has_room(shard: Shard, node: Node) -> bool:
        return node.load + shard.size <= node.lent

    def solve(self) -> None:
        shards = [self.shards[rank] for rank in sorted(self.shards)]
        sizes = [shard.size for shard in shards]
        for node in self.nodes.values():
            node.lent = node.lent if sizes and node.lent >= min(sizes) else 0
        self.lenders = [node for node in self.nodes.values() if node.lent > 0]
        self.demand = self.replicas * sum(sizes)
        self.lent = sum(node.lent for node in self.lenders)
        for node in self.lenders:
            node.limit = 17 * self.demand * node.lent // (16 * self.lent) + (
                max(sizes) * (hash_of_pair(self.seed, node.hash) >> 32) >> 32
            )
            node.step = max(1, self.demand * node.lent // (8 * self.lent))
        for _ in range(self.replicas):
            without = []
            for shard in shards:
                if not self.place(shard):
                    without.append(shard)
            for shard in without:
                if not self.place(shard):
                    self.exchange(shard, shards)

    def place(self, s: Shard) -> bool:
        free = [n for n in self.lenders if self.has_room(s, n) and not s.has(n)]
        if free:
            self.give(
                s,
                min(free, key=lambda n: (self.crowd(s, n), self.fullness(s, n), self.order(s, n))),
            )
        return bool(free)

    @staticmethod
    def give(shard: Shard, node: Node) -> None:
        shard.targets.append(node)
        node.load += shard.size

    def exchange(self, s: Shard, shards: list[Shard]) -> None:
        q_all = [q for q in self.lenders if self.has_room(s, q)]
        assert all(s.has(q) for q in q_all)
        if not q_all or self.tries == 1024:
            return
        self.tries += 1
        copies = {n.name: [t for t in shards if n in t.targets][:64] for n in self.lenders}
        moves = [
            (self.crowd(s, n), self.crowd(t, q, n), self.order(s, n), t.rank, q.key, n, t, q)
            for n in self.lenders
            if not s.has(n)
            for t in copies[n.name]
            if t.size >= s.size
            for q in q_all
            if self.has_room(t, q) and not t.has(q)
        ]
        if moves:
            *_, n, t, q = min(moves, key=lambda move: move[:5])
            t.targets[t.targets.index(n)] = q
            n.load -= t.size
            q.load += t.size
            self.give(s, n)
            self.exchanges += 1

    def answer(self, words: list[str]) -> list[str]:
        """The line that `words` should have been."""
        if words[0] == "targets":
            return ["targets", words[1], *(n.name for n in self.shards[int(words[1])].targets)]
        if words[0] == "hash":
            hash_ = self.pair(self.shards[int(words[1])], self.nodes[words[2]])
            return [*words[:3], f"{hash_:016x}", str(draw_of(hash_))]
        node = self.nodes[words[1]]
        if words[0] == "limit":
            return ["limit", words[1], str(node.limit), str(node.step)]
        return ["load", words[1], str(node.load)]

    def check_promise(self) -> None:
        alike = len({shard.size for shard in self.shards.values()}) == 1
        for node in self.nodes.values():
            on = [shard for shard in self.shards.values() if node in shard.targets]
            assert node.load == sum(shard.size for shard in on) <= node.lent, self.title
            assert all(node is not shard.home for shard in on), self.title
        for s in self.shards.values():
            assert len(set(s.targets)) == len(s.targets) <= self.replicas, self.title
            if len(s.targets) < self.replicas and self.exchanges == 0:
                assert all(s.has(n) or not self.has_room(s, n) for n in self.lenders), self.title
            if self.exchanges > 0 and not alike:
                continue
            # Loads only grow: who has room at the end had it before.
            placed = Shard(s.rank, s.home, 0)
            for target in s.targets:
                crowd = self.crowd(placed, target)
                for n in self.lenders:
                    if not s.has(n) and self.has_room(s, n):
                        assert self.crowd(placed, n) >= crowd, (self.title, s.rank, n.name)
                placed.targets.append(target)

    def all_questions(self) -> list[list[str]]:
        ranks = sorted(self.shards)
        pairs = [(r, n) for r in ranks for n in self.nodes] if len(ranks) <= 6 else []
        return [
            *(["hash", str(rank), name] for rank, name in pairs),
            *(["limit", node.name] for node in self.lenders),
            *(["targets", str(rank)] for rank in ranks),
            *(["load", name] for name in self.nodes),
        ]


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


def judge(text: str, origin: str) -> tuple[int, int]:
    """Compares every line of answers with this program's; returns how many there were, and how many exchanges."""
    count = 0
    exchanges = 0
    for case in parse(text):
        if not case.expected:
            sys.exit(f"{origin}: case '{case.title}' has no answers")
        case.check_promise()
        exchanges += case.exchanges
        for words in case.expected:
            count += 1
            right = case.answer(words)
            if right != words:
                sys.exit(
                    f"{origin}: case '{case.title}':\n  it says    {' '.join(words)}\n"
                    f"  should be  {' '.join(right)}"
                )
    return count, exchanges


def check(fixtures: pathlib.Path, document: pathlib.Path, program: str) -> None:
    files = sorted(fixtures.glob("*.txt"))
    if "example.txt" not in [file.name for file in files]:
        sys.exit(f"{fixtures}: no example.txt")
    for file in files:
        count, _ = judge(file.read_text(encoding="utf-8"), file.name)
        print(f"{file.name}: {count} answers agree")

    begin = "<!-- placement/example.txt: begin -->\n```\n"
    end = "```\n<!-- placement/example.txt: end -->"
    text = document.read_text(encoding="utf-8")
    shown = text[text.index(begin) + len(begin) : text.index(end)]
    if shown != (fixtures / "example.txt").read_text(encoding="utf-8"):
        sys.exit(f"{document}: the example of placement is not example.txt")

    for seed in RANDOM_SEEDS:
        command = [program, str(seed), str(RANDOM_CASES)]
        done = subprocess.run(command, check=True, capture_output=True, encoding="utf-8")
        count, exchanges = judge(done.stdout, " ".join(command))
        if exchanges == 0:
            sys.exit(f"{' '.join(command)}: no case has an exchange")
        print(
            f"seed {seed}: {count} answers to {RANDOM_CASES} random cases agree, {exchanges} exchanges"
        )


def main() -> None:
    if len(sys.argv) == 5 and sys.argv[1] == "check":
        check(pathlib.Path(sys.argv[2]), pathlib.Path(sys.argv[3]), sys.argv[4])
    elif len(sys.argv) == 3 and sys.argv[1] == "answer":
        text = pathlib.Path(sys.argv[2]).read_text(encoding="utf-8")
        for line in text.splitlines():
            if line.startswith("#"):
                print(line)
        for case in parse(text):
            print("\n".join([f"case {case.title}", *case.lines]))
            for question in case.all_questions():
                print(" ".join(case.answer(question)))
    else:
        sys.exit(__doc__)


if __name__ == "__main__":
    main()
