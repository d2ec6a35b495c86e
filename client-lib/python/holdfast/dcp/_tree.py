"""What holdfast.Checkpointer saved, under the names that DCP would have given it.

A Checkpointer's tensors are named as DCP names them; its values lie in one object, the tree of the
state (holdfast/_state.py). So a model that it saved is loaded by dcp.load, with the values beside
it. Optimizers have other names there: _optimizers.py.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from typing import Any

from torch.distributed.checkpoint._nested_dict import flatten_state_dict

from holdfast import _json
from holdfast._errors import CorruptError, HoldfastError

_DEPTH_MAX = 150


@dataclasses.dataclass
class Tree:
    """A rank's tree.

    >>> read(b'{"dict":[["w",{"tensor":"v"}],["n",{"value":3}]]}', "rank 0").entries
    [('w', 'v'), ('n', b'3')]
    """

    # Each name: with the name of the tensor or object that it stands for (tied tensors are saved
    # once), or with JSON.
    entries: list[tuple[str, str | bytes]]
    modules: list[str]  # their paths
    optimizers: list[tuple[str, dict[str, Any]]]  # path and content of each


def read(data: bytes, where: str) -> Tree:
    tree = Tree([], [], [])
    try:
        tree.entries += walk(json.loads(data), "", tree)
    except HoldfastError:
        raise
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        raise CorruptError(f"{where}: the tree of the state is none: {error}") from error
    return tree


def walk(
    node: Any, path: str, tree: Tree | None = None, depth: int = 0
) -> Iterator[tuple[str, str | bytes]]:
    """The entries of a node, with its path. `tree` is told of modules and optimizers."""
    if depth > _DEPTH_MAX:
        raise ValueError(f"deeper than {_DEPTH_MAX} levels")
    ((kind, content),) = node.items()
    if kind == "dict":
        for key, child in content:
            name = _join(path, _json.decode(json.dumps(key).encode()))
            yield from walk(child, name, tree, depth + 1)
    elif kind == "list":
        for i, child in enumerate(content):
            yield from walk(child, _join(path, i), tree, depth + 1)
    elif kind == "module":
        if tree is not None:
            tree.modules.append(path)
        for key, child in content.items():
            yield from walk(child, _join(path, key), tree, depth + 1)
    elif kind == "optimizer" and tree is not None:
        tree.optimizers.append((path, content))
    elif kind == "stateful":
        yield from walk(content, path, tree, depth + 1)
    elif kind == "subclass":
        for attribute, child in content["tensors"]:
            yield from walk(child, _join(path, attribute), tree, depth + 1)
    elif kind in ("tensor", "array", "object") and content != path:
        yield path, str(content)
    elif kind == "value":
        value = _json.decode(json.dumps(content).encode())
        flat, _ = flatten_state_dict({path: value})
        for name, leaf in flat.items():
            yield name, _json.encode(leaf, name)


def _join(path: str, key: object) -> str:
    return f"{path}.{key}" if path else str(key)
