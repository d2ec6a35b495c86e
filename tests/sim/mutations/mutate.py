#!/usr/bin/env python3
"""Applies the mutations of a catalogue to copies of the sources, all of them at once, each behind its own switch.

  mutate.py --catalogue mutations.txt --root SOURCE_DIR --out OUT_DIR SOURCE...

Writes OUT_DIR/SOURCE for every source named, mutated or as it is, and OUT_DIR/mutations.inc, the list that the test runs
through. Fails when a text to be replaced does not occur exactly once: a mutation must not rot.
"""

import argparse
import pathlib
import re
import sys


class Mutation:
    def __init__(self, name):
        self.name = name
        self.says = []
        self.world = "anywhere"  # or in worlds of that kind only: an enumerator of the test's Where
        self.edits = []  # [source, was, now]


def parse(path):
    mutations = []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        if not line.strip() or line.startswith("#"):
            continue
        word, _, rest = line.strip().partition(" ")
        rest = rest.strip()
        where = f"{path}:{number}"
        if word == "mutation":
            if not re.fullmatch(r"[A-Z][A-Za-z0-9]*", rest) or any(
                m.name == rest for m in mutations
            ):
                sys.exit(f"{where}: '{rest}' is not a new name in CamelCase")
            mutations.append(Mutation(rest))
        elif not mutations:
            sys.exit(f"{where}: '{word}' before the first mutation")
        elif word == "says":
            mutations[-1].says.append(rest)
        elif word == "world" and re.fullmatch(r"[a-z]+", rest):
            mutations[-1].world = rest
        elif word == "in":
            mutations[-1].edits.append([rest, "", ""])
        elif word in ("was", "now") and mutations[-1].edits:
            edit = mutations[-1].edits[-1]
            if word == "was" and edit[2]:  # a further place in the same file
                edit = [edit[0], "", ""]
                mutations[-1].edits.append(edit)
            edit[1 if word == "was" else 2] += rest + "\n"
        else:
            sys.exit(f"{where}: expected mutation, says, world, in, was or now, not '{word}'")
    for m in mutations:
        if not m.edits or not m.says or any(not was or "$M" not in now for _, was, now in m.edits):
            sys.exit(
                f"{path}: mutation {m.name} needs says, in, was, and a now that holds the switch $M"
            )
    return mutations


def find_once(text, was, what):
    """Where `was` lies in `text`, whatever the spaces and line breaks between its characters."""
    places = [i for i, c in enumerate(text) if not c.isspace()]
    dense = "".join(text[i] for i in places)
    wanted = "".join(was.split())
    first = dense.find(wanted)
    if first < 0 or dense.find(wanted, first + 1) >= 0:
        print(
            f"{what}: this text occurs {'not at all' if first < 0 else 'more than once'}, it must occur exactly once "
            f"(the source has changed: mend the mutation):\n{was}",
            file=sys.stderr,
        )
        return None
    return places[first], places[first + len(wanted) - 1] + 1


def mutate(source, text, mutations):
    """The mutated text; None, after having said why, if that is not possible."""
    edits = []
    rotten = False
    for number, m in enumerate(mutations, 1):
        for name, was, now in m.edits:
            if name == source:
                found = find_once(text, was, f"mutation {m.name}, {source}")
                rotten = rotten or found is None
                begin, end = found or (0, 0)
                switch = f"::holdfast::sim::Mutated({number})"
                edits.append((begin, end, now.rstrip("\n").replace("$M", switch), m.name))
    if rotten:
        return None
    edits.sort()
    for before, after in zip(edits, edits[1:]):
        if after[0] < before[1]:
            sys.exit(f"mutations {before[3]} and {after[3]} overlap in {source}")
    for begin, end, now, _ in reversed(edits):
        text = text[:begin] + now + text[end:]
    if edits:
        text = (
            f'namespace holdfast::sim {{\nbool Mutated(int number);\n}}\n#line 1 "{source}"\n'
            + text
        )
    return text


def write(path, text):
    if not path.exists() or path.read_text() != text:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--catalogue", type=pathlib.Path, required=True)
    parser.add_argument("--root", type=pathlib.Path, required=True)
    parser.add_argument("--out", type=pathlib.Path, required=True)
    parser.add_argument("sources", nargs="+")
    args = parser.parse_args()
    mutations = parse(args.catalogue)
    for m in mutations:
        for source, _, _ in m.edits:
            if source not in args.sources:
                sys.exit(
                    f"{args.catalogue}: mutation {m.name} changes {source}, which is no source of the core"
                )
    mutated = {
        source: mutate(source, (args.root / source).read_text(), mutations)
        for source in args.sources
    }
    if None in mutated.values():
        sys.exit(1)
    for source, text in mutated.items():
        write(args.out / source, text)
    rows = "".join(
        f'{{"{m.name}", "{" ".join(m.says)}", Where::k{m.world.capitalize()}}},\n'
        for m in mutations
    )
    write(args.out / "mutations.inc", rows)


if __name__ == "__main__":
    main()
