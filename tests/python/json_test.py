"""Python values that come back exactly as JSON, and those that do not and are refused."""

from __future__ import annotations

import collections
import enum
import json
import math
import random
import struct
from typing import Any

import numpy
import pytest
import torch

from holdfast import CorruptError, RefusedError
from holdfast._json import decode, encode
from holdfast._objects import PICKLE, from_object, to_object


def same(a: Any, b: Any) -> bool:
    """Types and values, all the way down; floats by their bits."""
    if type(a) is not type(b):
        return False
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        return len(a) == len(b) and all(map(same, a.items(), b.items()))
    if isinstance(a, float) and not isinstance(a, numpy.generic):
        return struct.pack("<d", a) == struct.pack("<d", b)
    if isinstance(a, complex) and not isinstance(a, numpy.generic):
        return same((a.real, a.imag), (b.real, b.imag))
    if isinstance(a, (numpy.ndarray, numpy.generic)):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    return bool(a == b)


VALUES = [
    None,
    True,
    0,
    -(2**63),
    10**30,
    7**100_000,
    0.1,
    -0.0,
    5e-324,
    float("nan"),
    float("inf"),
    -float("inf"),
    struct.unpack("<d", b"\x01\x00\x00\x00\x00\x00\xf8\x7f")[0],
    "",
    'quotes " and \\ and \x00 and ü and 😀',
    "a lone \udc80 surrogate",
    "\ud83d\ude00",
    [],
    [1, [2, [3.0]]],
    (),
    (1, (2,), [3]),
    {},
    {"a": 1, "b": {"c": (1, 2)}},
    {1: "int", "1": "str", None: 0, (1, 2): [3], 2.5: 0},
    {"$tuple": [1]},
    {"$": 1, "b": 2},
    {"\udc80": 1},
    collections.OrderedDict([("z", 1), ("a", 2)]),
    b"",
    b"\x00\xff",
    bytearray(b"xy"),
    complex(1.5, float("nan")),
    {1, 2, 3},
    frozenset({"a"}),
    random.Random(3).getstate(),
    numpy.random.RandomState(3).get_state(),
    numpy.float64(0.1),
    numpy.float32("nan"),
    numpy.int8(-3),
    numpy.bool_(True),
    numpy.complex64(1 + 2j),
    numpy.float16(1.5),
    numpy.datetime64("2026-01-02"),
    numpy.str_("text"),
    numpy.arange(6, dtype=">i4").reshape(2, 3),
    numpy.zeros((0, 3)),
    numpy.array(3.5),
    torch.float32,
    torch.float8_e4m3fn,
    torch.Size([2, 3]),
    torch.Size([]),
    torch.device("cpu"),
    torch.device("cuda", 1),
]


@pytest.mark.parametrize(
    "value", VALUES, ids=[f"{i}-{type(v).__name__}" for i, v in enumerate(VALUES)]
)
def test_comes_back_with_its_types(value: Any) -> None:
    data = encode(value, "x")
    json.loads(data.decode("utf-8"), parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert same(decode(data), value), data
    assert same(decode(encode({"in": [value]}, "x")), {"in": [value]})


def test_random_trees_come_back() -> None:
    rng = random.Random(20)
    leaves = [
        v
        for v in VALUES
        if not isinstance(v, (list, dict, tuple, set, frozenset))
        and not (isinstance(v, int) and v > 2**2000)
    ]

    def tree(depth: int) -> Any:
        kind = rng.randrange(6) if depth < 5 else 5
        if kind == 0:
            return [tree(depth + 1) for _ in range(rng.randrange(4))]
        if kind == 1:
            return tuple(tree(depth + 1) for _ in range(rng.randrange(4)))
        if kind == 2:
            return {
                rng.choice(["a", "$b", "c", ""]) + str(i): tree(depth + 1)
                for i in range(rng.randrange(4))
            }
        if kind == 3:
            return {
                rng.choice([i, float(i), str(i), (i,)]): tree(depth + 1)
                for i in range(rng.randrange(4))
            }
        return rng.choice(leaves)

    for _ in range(300):
        value = tree(0)
        assert same(decode(encode(value, "x")), value)


def test_plain_json_is_plain() -> None:
    value = {"epoch": 3, "lr": 0.1, "names": ["a", "ü"], "done": False, "none": None}
    assert json.loads(encode(value, "x")) == value
    assert decode(b' {"anybody": [1, 2.5]} ') == {"anybody": [1, 2.5]}


class Color(enum.IntEnum):
    RED = 1


class Text(str):
    pass


Point = collections.namedtuple("Point", "x y")


@pytest.mark.parametrize(
    ("value", "place"),
    [
        (object(), "extra"),
        ({"a": [1, {2}, object()]}, r"extra\['a'\]\[2\]"),
        ({"a": Color.RED}, r"extra\['a'\]: a json_test.Color"),
        (Text("x"), "extra: a json_test.Text"),
        (Point(1, 2), "extra: a json_test.Point"),
        ((1, torch.zeros(1)), r"extra\[1\]: a torch.Tensor"),
        (collections.defaultdict(int, a=1), "extra: a collections.defaultdict"),
        ({object(): 1}, "extra: key"),
        (numpy.array([object()]), "extra: a numpy.ndarray"),
        (print, "extra"),
    ],
)
def test_what_would_not_come_back_is_refused_with_its_place(value: Any, place: str) -> None:
    with pytest.raises(RefusedError, match=place + ".*allow_pickle|" + place):
        encode(value, "extra")


def test_what_contains_itself_or_is_too_deep_is_refused() -> None:
    circle: list[Any] = []
    circle.append(circle)
    with pytest.raises(RefusedError, match="contains itself"):
        encode(circle, "x")
    deep: Any = {0: 1}
    for _ in range(140):
        deep = {0: deep}
    assert decode(encode(deep, "x")) == deep


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        b"\xff",
        b'{"$tuple":1}',
        b'{"$float":"0"}',
        b'{"$float":"zz"}',
        b'{"$numpy":["O",null,"AAAAAAAAAAA="]}',
        b'{"$numpy":["<f4",[3],"AACAPw=="]}',
        b'{"$numpy":["<f4",null,"AAA"]}',
        b'{"$numpy":["nonsense",null,""]}',
        b'{"$dict":[[[1],2]]}',
        b'{"$dict":[1]}',
        b'{"$torch.dtype":"save"}',
        b'{"$torch.dtype":"nothing"}',
        b'{"$torch.device":"nowhere"}',
        b'{"$set":[[1]]}',
        b'{"$int":"x"}',
        b"[" * 100_000,
    ],
)
def test_damaged_values_are_corrupt(data: bytes) -> None:
    with pytest.raises(CorruptError):
        decode(data)


def test_a_tag_of_a_later_version_is_refused() -> None:
    with pytest.raises(RefusedError, match="newer"):
        decode(b'[{"$later":1}]')


def test_pickles_need_leave_on_both_sides() -> None:
    value = {"a": Color.RED}
    with pytest.raises(RefusedError, match="allow_pickle"):
        to_object("extra", value, allow_pickle=False)
    name, data, codec = to_object("extra", value, allow_pickle=True)
    assert (name, codec) == ("extra", PICKLE)
    with pytest.raises(RefusedError, match="extra.*allow_pickle"):
        from_object(name, data, codec, allow_pickle=False)
    assert from_object(name, data, codec, allow_pickle=True) == value
    # What is JSON stays JSON even then.
    assert to_object("n", 1, allow_pickle=True) == ("n", b"1", None)
    with pytest.raises(RefusedError, match="cannot be pickled"):
        to_object("f", lambda: 0, allow_pickle=True)
    with pytest.raises(RefusedError, match="codec 'other.1'"):
        from_object("x", b"", "other.1", allow_pickle=True)
    with pytest.raises(CorruptError, match="n: "):
        from_object("n", b"{", None, allow_pickle=False)


def test_nan_is_nan() -> None:
    assert math.isnan(decode(encode(float("nan"), "x")))
