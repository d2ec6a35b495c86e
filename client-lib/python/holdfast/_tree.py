"""Whose the tensors of a tree (holdfast/_state.py) are: the tree names those of a module or optimizer only by their prefix."""

from __future__ import annotations

from typing import Any

from holdfast._state import join
from holdfast._subclasses import tensor_names


class Owners:
    """Of one tree.

    owners = Owners(tree)
    owners.are("model.ema.weight", "model")    # False, where there is a key "model.ema" beside "model"
    """

    def __init__(self, tree: dict[str, Any]) -> None:
        self._named: set[str] = set()  # by a node of their own
        self._prefixes: list[str] = []
        self._walk(tree, "")

    def are(self, name: str, path: str) -> bool:
        """Whether that tensor is of the module, or optimizer, at this path."""
        prefix = f"{path}."
        return (
            name.startswith(prefix)
            and name not in self._named
            and not any(
                other.startswith(prefix) and name.startswith(other) and other != prefix
                for other in self._prefixes
            )
        )

    def _walk(self, node: Any, path: str) -> None:
        ((kind, content),) = node.items()
        if kind in ("tensor", "array"):
            if content == path:  # else it is a module's, and tied
                self._named.add(content)
        elif kind in ("module", "optimizer"):
            self._prefixes.append(f"{path}.")
            if kind == "module":
                for each in content.values():
                    self._named.update(tensor_names(each))
        elif kind == "dict":
            for key, each in content:
                self._walk(each, join(path, key))
        elif kind in ("list", "tuple"):
            for i, each in enumerate(content):
                self._walk(each, join(path, i))
        elif kind == "stateful":
            self._walk(content, path)
