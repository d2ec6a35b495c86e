"""What DCP's planners make of objects, as objects of a shard."""

from __future__ import annotations

import io
from typing import Any, TypeGuard

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlanner, WriteItem

from holdfast import _json, _objects
from holdfast._errors import RefusedError

# Bytes of a planner's own making, which its load_bytes understands; those of DCP's planners
# unpickle.
PLANNER_BYTES = "torch.dcp.bytes.1"


def resolves_plainly(planner: SavePlanner) -> TypeGuard[DefaultSavePlanner]:
    """Whether the planner writes objects as DCP's default one does: torch.save of what
    lookup_object finds.
    """
    kind = type(planner)
    return (
        issubclass(kind, DefaultSavePlanner)
        and kind.resolve_data is DefaultSavePlanner.resolve_data
        and kind.transform_object is DefaultSavePlanner.transform_object
    )


def object_of(
    item: WriteItem, planner: SavePlanner, *, allow_pickle: bool
) -> tuple[str, bytes, str | None]:
    """The object that a BYTE_IO item stands for. Its value where the planner's bytes can be told to
    be one, since nothing but values is safe to read back; else the planner's bytes, if pickles are
    allowed.
    """
    name = item.index.fqn
    if resolves_plainly(planner):
        return _objects.to_object(
            name, planner.lookup_object(item.index), allow_pickle=allow_pickle
        )
    data = planner.resolve_data(item)
    assert isinstance(data, io.BytesIO)
    raw = data.getvalue()
    try:
        value = torch.load(io.BytesIO(raw), map_location="cpu", weights_only=True)
        return name, _json.encode(value, name), None
    except Exception as error:
        if not allow_pickle:
            raise RefusedError(
                f"{name}: {type(planner).__qualname__} makes bytes of it that are no plain value; "
                "reading them may run any code: "
                "allow it with allow_pickle=True"
            ) from error
    return name, raw, PLANNER_BYTES


def bytes_for(name: str, data: bytes, codec: str | None, *, allow_pickle: bool) -> io.BytesIO:
    """What a planner's load_bytes is given: torch.save of the value, made here and now, so that
    nothing else is unpickled.
    """
    if codec == PLANNER_BYTES:
        if not allow_pickle:
            raise RefusedError(
                f"{name}: was saved as bytes of a planner, which may run any code when they are "
                "read: allow_pickle=True if you trust them"
            )
        return io.BytesIO(data)
    return saved(_objects.from_object(name, data, codec, allow_pickle=allow_pickle))


def saved(value: Any) -> io.BytesIO:
    stream = io.BytesIO()
    torch.save(value, stream)
    stream.seek(0)
    return stream
