"""DCP's chunks as slices and back: functions without a daemon."""

from __future__ import annotations

import dataclasses
import itertools
import math

import pytest
import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    MetadataIndex,
    TensorStorageMetadata,
)

from holdfast import CorruptError, InvalidArgumentError
from holdfast.dcp._layout import MAPPINGS, boxes_of_range, decode_mappings, encode_mappings, stored


@dataclasses.dataclass
class Info:
    name: str
    shape: tuple[int, ...]
    offset: tuple[int, ...] | None = None
    local_shape: tuple[int, ...] | None = None
    flat: tuple[int, int] | None = None
    dtype: str = "F32"


def test_ranges_become_boxes() -> None:
    for shape in [(7,), (3, 4), (2, 3, 4), (2, 1, 3, 2), (1, 1), (5, 1)]:
        size = math.prod(shape)
        whole = torch.arange(size).reshape(shape)
        for start, end in itertools.combinations(range(size + 1), 2):
            boxes = list(boxes_of_range(shape, start, end - start))
            assert len(boxes) <= max(1, 2 * len(shape) - 1)
            got = []
            for offset, box, first in boxes:
                assert first == len(got)
                got += whole[tuple(slice(o, o + n) for o, n in zip(offset, box))].flatten().tolist()
            assert got == list(range(start, end)), (shape, start, end, boxes)
    assert list(boxes_of_range((), 0, 1)) == [((), (), 0)]
    assert list(boxes_of_range((3, 4), 5, 0)) == []


def test_shards_become_metadata() -> None:
    found = stored(
        [
            (
                [Info("w", (4, 6), (0, 0), (2, 6)), Info("b", (6,)), Info("s", (), dtype="I64")],
                [("epoch", b"1", None)],
            ),
            (
                [Info("b", (6,)), Info("w", (4, 6), (2, 0), (2, 6))],
                [("epoch", b"2", None), ("other", b"x", "c.1")],
            ),
        ]
    )
    metadata = found.metadata.state_dict_metadata
    assert list(metadata) == ["w", "b", "s", "epoch", "other"]
    w = metadata["w"]
    assert isinstance(w, TensorStorageMetadata)
    assert w.size == torch.Size([4, 6]) and w.properties.dtype == torch.float32
    assert [(tuple(c.offsets), tuple(c.sizes)) for c in w.chunks] == [
        ((0, 0), (2, 6)),
        ((2, 0), (2, 6)),
    ]
    # A replica is one chunk, of the lowest rank.
    b = metadata["b"]
    assert isinstance(b, TensorStorageMetadata) and len(b.chunks) == 1
    source = found.source(MetadataIndex("b", torch.Size([0])))
    assert (source.rank, source.index, source.whole) == (0, 1, True)
    assert isinstance(metadata["epoch"], BytesStorageMetadata)
    assert found.objects == {"epoch": (0, b"1", None), "other": (1, b"x", "c.1")}
    assert found.conflicts == {}
    second = found.source(MetadataIndex("w", torch.Size([2, 0]), 1))
    assert (second.rank, second.index) == (1, 1)
    # A wrong hint is only a hint.
    assert found.source(MetadataIndex("w", torch.Size([2, 0]), 0)) == second
    with pytest.raises(InvalidArgumentError, match="where none was saved"):
        found.source(MetadataIndex("w", torch.Size([1, 0])))


def test_chunks_that_begin_alike_are_told_apart() -> None:
    found = stored([([Info("w", (4,))], []), ([Info("w", (4,), (0,), (2,))], [])])
    w = found.metadata.state_dict_metadata["w"]
    assert isinstance(w, TensorStorageMetadata)
    assert [tuple(c.sizes) for c in w.chunks] == [(4,), (2,)]
    assert found.source(MetadataIndex("w", torch.Size([0]), 1)).rank == 1


def test_flat_ranges_become_chunks() -> None:
    found = stored([([Info("w", (3, 4), flat=(0, 6))], []), ([Info("w", (3, 4), flat=(6, 6))], [])])
    w = found.metadata.state_dict_metadata["w"]
    assert isinstance(w, TensorStorageMetadata)
    assert sum(math.prod(c.sizes) for c in w.chunks) == 12
    source = found.source(MetadataIndex("w", torch.Size([1, 0])))
    assert (source.rank, source.elements, source.first, source.place.local_shape, source.whole) == (
        0,
        6,
        4,
        (1, 2),
        False,
    )


def test_what_ranks_hold_differently_under_one_name_is_a_conflict() -> None:
    found = stored(
        [
            ([Info("rng", (5056,), dtype="U8"), Info("ok", (1,)), Info("mixed", (1,))], []),
            ([Info("rng", (816,), dtype="U8"), Info("ok", (1,))], [("mixed", b"1", None)]),
        ]
    )
    assert set(found.conflicts) == {"rng", "mixed"}
    assert (
        "(5056,) on rank 0" in found.conflicts["rng"]
        and "(816,) on rank 1" in found.conflicts["rng"]
    )
    assert "an object on rank 1" in found.conflicts["mixed"]


def test_mappings_come_back_and_cover_every_name() -> None:
    mappings = {"model.w": ("model", "w"), "list.0": ("list", 0), "dict.0": ("dict", "0")}
    data = encode_mappings(mappings)
    assert decode_mappings(data, "x") == mappings
    found = stored([([Info("model.w", (1,)), Info("plain", (1,))], [(MAPPINGS, data, None)])])
    assert found.metadata.planner_data == {"model.w": ("model", "w"), "plain": ("plain",)}
    assert MAPPINGS not in found.metadata.state_dict_metadata


@pytest.mark.parametrize(
    "data", [b"", b"[]", b'{"a":1}', b'{"a":[]}', b'{"a":[1.5]}', b'{"a":[[1]]}']
)
def test_damaged_mappings_are_corrupt(data: bytes) -> None:
    with pytest.raises(CorruptError):
        decode_mappings(data, "rank 0")


def test_thousands_of_ranks_take_linear_time() -> None:
    """A dictionary for each step, no scan: work counted by the chunks that are looked at."""
    ranks = 2000
    found = stored(([Info("w", (ranks, 2), (rank, 0), (1, 2))], []) for rank in range(ranks))
    w = found.metadata.state_dict_metadata["w"]
    assert isinstance(w, TensorStorageMetadata) and len(w.chunks) == ranks
    assert found.source(MetadataIndex("w", torch.Size([1999, 0]), 1999)).rank == 1999
