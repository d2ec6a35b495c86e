"""The names under which DCP's users ask for what an optimizer has.

A Checkpointer calls it by the parameter's name in the whole state: `optim.state.model.0.weight.exp_avg`,
where the module is `model`. Users of DCP have one of

    get_optimizer_state_dict        optim.state.0.weight.exp_avg    optim.param_groups.0.lr, .params: names
      flattened                     the same                        optim.param_groups.0.weight.lr
    optimizer.state_dict()          optim.state.0.exp_avg           optim.param_groups.0.lr, .params: numbers

These are other names of the same tensors, and of values of the tree. What two things would be
called alike has no such name.
"""

from __future__ import annotations

import collections
import dataclasses
import json
from collections.abc import Iterator, Set
from typing import Any

from holdfast._errors import CorruptError
from holdfast.dcp._tree import Tree, walk


@dataclasses.dataclass
class Params:
    """`params` of a group: parameters by name, or by number where the plan wants the state so."""

    names: bytes
    numbers: bytes
    named: set[str]  # entries of the state
    numbered: set[str]

    def wanted(self, plan: Set[str]) -> bytes:
        by_number = not self.numbered.isdisjoint(plan) and self.named.isdisjoint(plan)
        return self.numbers if by_number else self.names


class Names:
    """Of all ranks' optimizers.

    names = Names()
    names.add(tree, "rank 0")
    for name, content in names.found(): ...     # what it stands for: as an entry of a tree
    """

    def __init__(self) -> None:
        self._contents: dict[str, str | bytes | None] = {}  # None: two things
        self.params: dict[str, Params] = {}
        self._seen: set[str] = set()

    def add(self, tree: Tree, where: str) -> None:
        for path, content in tree.optimizers:
            try:
                self._add(path, content, tree.modules)
            except (ValueError, TypeError, LookupError, AttributeError) as error:
                raise CorruptError(f"{where}: {path}: the optimizer is none: {error}") from error

    def found(self) -> Iterator[tuple[str, str | bytes]]:
        for name, content in self._contents.items():
            if content is not None:
                yield name, content

    def _put(self, name: str, content: str | bytes) -> None:
        if self._contents.setdefault(name, content) != content:
            self._contents[name] = None
            self.params.pop(name, None)

    def _add(self, path: str, content: dict[str, Any], modules: list[str]) -> None:
        groups, states, rest = content["groups"], content["states"], content["rest"]
        # Ranks differ in what they have nothing of, and else not at all, mostly.
        rest = {
            name: {key: node for key, node in nodes.items() if "absent" not in node}
            for name, nodes in rest.items()
        }
        text = json.dumps([path, modules, groups, states, {n: r for n, r in rest.items() if r}])
        if text in self._seen:
            return
        self._seen.add(text)
        order = [name for group in groups for name in group["params"]]
        numbers = {name: number for number, name in enumerate(order)}
        inner = {name: _within(name, modules) for name in order}
        times = collections.Counter(each for names in inner.values() for each in names)
        inner = {name: [n for n in names if times[n] == 1] for name, names in inner.items()}
        named: set[str] = set()
        numbered: set[str] = set()
        for kind in states:
            for name in kind["params"]:
                for key in kind["keys"]:
                    own = f"{path}.state.{name}.{key}"
                    node = rest.get(name, {}).get(key, {"tensor": own})
                    named.add(own)
                    for each in inner[name]:
                        named.update(self._stands_for(node, f"{path}.state.{each}.{key}"))
                    numbered.update(self._stands_for(node, f"{path}.state.{numbers[name]}.{key}"))
        for number, group in enumerate(groups):
            fields = [entry for key, node in group["fields"] for entry in walk(node, key)]
            owners = [number, *(each for name in group["params"] for each in inner[name])]
            for owner in owners:
                for key, value in fields:
                    self._put(f"{path}.param_groups.{owner}.{key}", value)
            self._put_params(
                f"{path}.param_groups.{number}.params",
                [inner[name] for name in group["params"]],
                [numbers[name] for name in group["params"]],
                named,
                numbered,
            )

    def _stands_for(self, node: Any, name: str) -> list[str]:
        found = list(walk(node, name))
        for entry, content in found:
            self._put(entry, content)
        return [entry for entry, _ in found]

    def _put_params(
        self,
        name: str,
        names: list[list[str]],
        numbers: list[int],
        named: set[str],
        numbered: set[str],
    ) -> None:
        by_number = json.dumps(numbers).encode()
        if not all(len(each) == 1 for each in names):
            self._put(name, by_number)
        elif named.isdisjoint(numbered):  # else the plan does not say which are wanted
            by_name = json.dumps([each for (each,) in names]).encode()
            both = self.params.setdefault(name, Params(by_name, by_number, set(), set()))
            both.named |= named
            both.numbered |= numbered
            self._put(name, by_name if both.numbers == by_number else by_number)


def _within(name: str, modules: list[str]) -> list[str]:
    """A parameter's names in the modules that may have it."""
    return [name[len(path) + 1 :] for path in modules if name.startswith(f"{path}.")]
