"""DCP's chunks as slices and back: functions without a daemon."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, TensorStorageMetadata

from holdfast import CorruptError
from holdfast.dcp._layout import (
    MAPPINGS,
    Item,
    Stored,
    decode_mappings,
    descriptions,
    encode_mappings,
    stored,
)


def tensor(
    name: str,
    shape: tuple[int, ...],
    dtype: str = "F32",
    ranks: tuple[int, ...] = (),
    problem: str = "",
) -> Item:
    return Item(name, dtype, shape, ranks, problem)


def told(*parts: Item | tuple[str, bytes, str | None, list[int]]) -> Stored:
    """Of tensors, and of objects with what is read of them."""
    items = [
        each if isinstance(each, Item) else Item(each[0], None, [], each[3], "") for each in parts
    ]
    contents = {
        index: each[:3]  # type: ignore[index]
        for index, each in enumerate(parts)
        if not isinstance(each, Item)
    }
    return stored(items, [contents[index] for index in descriptions(items)])  # type: ignore[misc]


def test_a_step_becomes_metadata() -> None:
    found = told(
        tensor("b", (6,)),
        tensor("s", (), "I64"),
        tensor("w", (4, 6)),
        ("epoch", b"1", None, [0]),
        ("epoch", b"2", None, [1]),
        ("other", b"x", "c.1", [1]),
    )
    metadata = found.metadata.state_dict_metadata
    assert list(metadata) == ["b", "s", "w", "epoch", "other"]
    w, s = metadata["w"], metadata["s"]
    assert isinstance(w, TensorStorageMetadata) and isinstance(s, TensorStorageMetadata)
    assert w.size == torch.Size([4, 6]) and w.properties.dtype == torch.float32
    assert [(tuple(c.offsets), tuple(c.sizes)) for c in w.chunks] == [((0, 0), (4, 6))]
    assert [(tuple(c.offsets), tuple(c.sizes)) for c in s.chunks] == [((), ())]
    assert isinstance(metadata["epoch"], BytesStorageMetadata)
    # Of values that ranks have of their own the lowest rank's.
    assert found.objects == {"epoch": 3, "other": 5}
    assert found.conflicts == {}


def test_what_ranks_hold_differently_under_one_name_is_a_conflict() -> None:
    found = told(
        tensor("gap", (9,), problem="elements 3 to 5 were saved by no rank"),
        tensor("mixed", (1,)),
        tensor("ok", (1,)),
        tensor("own", (3,), ranks=(0,)),
        tensor("own", (3,), ranks=(1,)),
        tensor("rng", (5056,), "U8", ranks=(0,)),
        tensor("rng", (816,), "U8", ranks=(1,)),
        ("mixed", b"1", None, [1]),
    )
    assert set(found.conflicts) == {"gap", "rng", "mixed", "own"}
    assert found.conflicts["gap"] == "elements 3 to 5 were saved by no rank"
    assert "ranks 0, 1 saved different values." in found.conflicts["own"]
    assert "U8 [5056], U8 [816]" in found.conflicts["rng"]
    assert "an object on rank 1" in found.conflicts["mixed"]


def test_mappings_come_back_and_cover_every_name() -> None:
    mappings = {"model.w": ("model", "w"), "list.0": ("list", 0), "dict.0": ("dict", "0")}
    data = encode_mappings(mappings)
    assert decode_mappings(data, "x") == mappings
    found = told(tensor("model.w", (1,)), tensor("plain", (1,)), (MAPPINGS, data, None, [0]))
    assert found.metadata.planner_data == {"model.w": ("model", "w"), "plain": ("plain",)}
    assert MAPPINGS not in found.metadata.state_dict_metadata


@pytest.mark.parametrize(
    "data", [b"", b"[]", b'{"a":1}', b'{"a":[]}', b'{"a":[1.5]}', b'{"a":[[1]]}']
)
def test_damaged_mappings_are_corrupt(data: bytes) -> None:
    with pytest.raises(CorruptError):
        decode_mappings(data, "rank 0")
