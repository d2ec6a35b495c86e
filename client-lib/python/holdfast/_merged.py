"""What several ranks saved, as one state: for a restore that puts together what it wants out of all their shards.

Each rank's tree (holdfast/_state.py) says what it had. The merged one has what any of them had; what is not the same in all is
marked, and refused by name where it is wanted, unless the user says what becomes of it.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

from holdfast import _json, _subclasses
from holdfast._errors import InvalidArgumentError
from holdfast._state import TREE, join

# (name, bytes, codec, ranks): one of the contents that an object has, and who had it.
Content = tuple[str, bytes, str | None, list[int]]
Node = dict[str, Any]
# What one rank gets of what all old ranks had under a path, in their order.
Merge = Callable[[list[Any]], Any]

DIFFERS = "differs"  # a node of no rank's own: they contradict each other
AS_VALUE = (
    "as_value"  # beside a dict with other keys in different ranks: this rank's own node, or None
)


@dataclasses.dataclass
class OfAll:
    """What `core.restore` tells of a step that is put together out of several shards."""

    attempt: int
    step: int
    saved_by: int
    contents: list[Content]
    of_every_rank: set[str]  # tensors that each of them has, or a part of them

    def objects(
        self, own: list[tuple[str, bytes, str | None]]
    ) -> list[tuple[str, bytes, str | None]]:
        """As one rank would have them. `own`: this rank's, if as many saved the step: what it says itself is right for it."""
        known = {name for name, _, _ in own}
        merged = list(own)
        for name, data, codec, _ in self.contents:
            if name not in known:
                known.add(name)
                merged.append((name, data, codec))
        return merged

    def differing(self, own: list[tuple[str, bytes, str | None]]) -> set[str]:
        """Names of objects that are not the same in all ranks that had them; but for this rank's own."""
        times = collections.Counter(name for name, _, _, _ in self.contents)
        twice = {name for name, count in times.items() if count > 1}
        return twice - {TREE} - {name for name, _, _ in own}

    def tree(self, own: list[tuple[str, bytes, str | None]]) -> Node | None:
        """None: no rank saved one."""
        mine = {data for name, data, _ in own if name == TREE}
        trees = [
            (_json.decode(data), data in mine) for name, data, _, _ in self.contents if name == TREE
        ]
        return _merged(trees, "") if trees else None


def refusal(path: str, *, of_optimizer: bool = False) -> InvalidArgumentError:
    """`of_optimizer`: what is no value of its own, so nobody can merge it."""
    way_out = (
        "restore without the optimizer"
        if of_optimizer
        else "say what each rank gets now: "
        f"merge={{{path!r}: function of the list of all old ranks' values}}"
    )
    return InvalidArgumentError(f"{path}: is not the same in all ranks that saved it: {way_out}")


def _merged(nodes: list[tuple[Node, bool]], path: str) -> Node:
    """One of several ranks' nodes of a place; the flag marks this rank's own."""
    distinct: dict[str, tuple[Node, bool]] = {}
    for node, own in nodes:
        # (As text: 1 is not True then, and NaN is itself.)
        key = repr(node)
        distinct[key] = node, own or (key in distinct and distinct[key][1])
    # Of a DTensor a rank may have no element.
    found = list(distinct.values())
    present = [each for each in found if "absent" not in each[0]] or found[:1]
    if len(present) == 1:
        return present[0][0]
    if all("dict" in node or isinstance(node.get("value"), dict) for node, _ in present):
        present = [(_entries(node), own) for node, own in present]
    kind = next(iter(present[0][0]))
    merge = _MERGES.get(kind)
    mine = next((node for node, own in present if own), None)
    if merge is not None and all(kind in node for node, _ in present):
        made = merge([(node[kind], own) for node, own in present], path)
        if made is not None:
            merged = {kind: made}
            if (
                kind == "dict"
                and len({repr([key for key, _ in node[kind]]) for node, _ in present}) > 1
            ):
                # Good for filling places; as a value it is none that any rank had.
                merged[AS_VALUE] = mine
            return merged
    return mine or {DIFFERS: path}


def _entries(node: Node) -> Node:
    """A dictionary of values, as one whose entries have nodes of their own."""
    if "dict" in node:
        return node
    return {"dict": [[key, {"value": each}] for key, each in node["value"].items()]}


def _pairs(every: list[tuple[list[Any], bool]], path: str) -> list[Any]:
    """Lists of keys and nodes: every key that any has, in the order in which they came."""
    found: dict[Any, list[tuple[Node, bool]]] = {}
    for pairs, own in every:
        for key, node in pairs:
            found.setdefault(key, []).append((node, own))
    return [[key, _merged(nodes, join(path, key))] for key, nodes in found.items()]


def _named(every: list[tuple[dict[str, Node], bool]], path: str) -> dict[str, Node]:
    pairs = _pairs([(list(named.items()), own) for named, own in every], path)
    return {key: node for key, node in pairs}


def _sequence(every: list[tuple[list[Node], bool]], path: str) -> list[Node] | None:
    if len({len(nodes) for nodes, _ in every}) > 1:
        return None
    flags = [own for _, own in every]
    return [
        _merged(list(zip(nodes, flags, strict=True)), join(path, i))
        for i, nodes in enumerate(zip(*(nodes for nodes, _ in every), strict=True))
    ]


def _once(names: Iterable[str], seen: set[str]) -> list[str]:
    new = [name for name in dict.fromkeys(names) if name not in seen]
    seen.update(new)
    return new


def _optimizer(every: list[tuple[dict[str, Any], bool]], path: str) -> dict[str, Any] | None:
    if len({len(one["groups"]) for one, _ in every}) > 1:
        return None
    groups = []
    for number in range(len(every[0][0]["groups"])):
        of_ranks = [(one["groups"][number], own) for one, own in every]
        seen: set[str] = set()
        groups.append(
            {
                "params": [name for group, _ in of_ranks for name in _once(group["params"], seen)],
                "fields": _pairs([(group["fields"], own) for group, own in of_ranks], path),
            }
        )
    taken: set[str] = set()
    kinds: dict[tuple[str, ...], list[str]] = {}
    for one, _ in every:
        for kind in one["states"]:
            kinds.setdefault(tuple(kind["keys"]), []).extend(_once(kind["params"], taken))
    rest: dict[str, list[tuple[dict[str, Node], bool]]] = {}
    for one, own in every:
        for name, named in one["rest"].items():
            rest.setdefault(name, []).append((named, own))
    alike = len({repr([group["params"] for group in one["groups"]]) for one, _ in every}) == 1
    return {
        "by_position": alike,  # whether it says anything where a parameter stands
        "groups": groups,
        "states": [{"keys": list(keys), "params": params} for keys, params in kinds.items()],
        "rest": {name: _named(named, f"{path}.state.{name}") for name, named in rest.items()},
    }


_MERGES: dict[str, Callable[[list[tuple[Any, bool]], str], Any]] = {
    "dict": _pairs,
    "list": _sequence,
    "tuple": _sequence,
    "stateful": _merged,
    "module": _named,
    "optimizer": _optimizer,
    "subclass": lambda every, path: _subclasses.merged(every, path, _merged),
}
