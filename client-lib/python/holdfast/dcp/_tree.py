"""What holdfast.Checkpointer saved, under the names that DCP would have given it.

A Checkpointer's tensors are named as DCP names them; its values lie in one object, the tree of the
state (holdfast/_state.py). So a model that it saved is loaded by dcp.load, with the values beside
it. Optimizers have names of their own there.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from torch.distributed.checkpoint._nested_dict import flatten_state_dict

from holdfast import _json
from holdfast._errors import Corrupt, HoldfastError

_DEPTH_MAX = 150


def entries(data: bytes, where: str) -> Iterator[tuple[str, str | bytes]]:
    """Each name of the tree: with the name of the tensor that it stands for (tied tensors are saved
    once), or with JSON.

    >>> list(entries(b'{"dict":[["w",{"tensor":"v"}],["n",{"value":3}]]}', "rank 0"))
    [('w', 'v'), ('n', b'3')]
    """
    try:
        yield from _walk(json.loads(data), "", 0)
    except HoldfastError:
        raise
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        raise Corrupt(f"{where}: the tree of the state is none: {error}") from error


def _walk(node: Any, path: str, depth: int) -> Iterator[tuple[str, str | bytes]]:
    if depth > _DEPTH_MAX:
        raise ValueError(f"deeper than {_DEPTH_MAX} levels")
    ((kind, content),) = node.items()
    if kind == "dict":
        for key, child in content:
            yield from _walk(child, _join(path, _json.decode(json.dumps(key).encode())), depth + 1)
    elif kind == "list":
        for i, child in enumerate(content):
            yield from _walk(child, _join(path, i), depth + 1)
    elif kind == "module":
        for key, child in content.items():
            yield from _walk(child, _join(path, key), depth + 1)
    elif kind == "stateful":
        yield from _walk(content, path, depth + 1)
    elif kind == "tensor" and content != path:
        yield path, str(content)
    elif kind == "value":
        value = _json.decode(json.dumps(content).encode())
        flat, _ = flatten_state_dict({path: value})
        for name, leaf in flat.items():
            yield name, _json.encode(leaf, name)


def _join(path: str, key: object) -> str:
    return f"{path}.{key}" if path else str(key)
