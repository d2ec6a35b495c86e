"""Python values as JSON that comes back exactly: the same types, the same values.

What JSON has is written as it is (None, booleans, numbers, strings, lists, dictionaries with string
keys), so that any program reads it. The rest is an object with one key that begins with `$`:

    (1, 2)             {"$tuple":[1,2]}
    {3: "x"}           {"$dict":[[3,"x"]]}
    float("nan")       {"$float":"nan"}
    b"ab"              {"$bytes":"YWI="}
    numpy.float32(1)   {"$numpy":["<f4",null,"AACAPw=="]}
    bfloat16(1)        {"$ml_dtypes":["bfloat16",null,"gD8="]}
    torch.float32      {"$torch.dtype":"float32"}

Nothing here runs code that the data names.
"""

from __future__ import annotations

import base64
import collections
import json
import math
import struct
import sys
from collections.abc import Callable
from typing import Any

from holdfast._arrays import ml_dtype
from holdfast._errors import CorruptError, RefusedError

# The library reads no JSON deeper than 512 levels, and a level here may be three there.
_DEPTH_MAX = 150
# Python itself reads no decimal number of more than 4300 digits.
_INT_BITS_MAX = 4096


class NotJson(RefusedError):
    """A value that cannot be JSON and come back equal; says where it is and what it is."""


def _text(value: bytes) -> str:
    return base64.b64encode(value).decode("ascii")


def _is_plain_text(value: str) -> bool:
    # Lone surrogates (of file names that are no UTF-8) have no place in JSON that other programs
    # read.
    return value.isascii() or not any("\ud800" <= c <= "\udfff" for c in value)


def _numpy_tag(value: Any) -> tuple[str, str] | None:
    """The tag, and what it calls the dtype; None: it is no number or text of NumPy's."""
    numpy = sys.modules.get("numpy")
    if numpy is None or not (isinstance(value, numpy.generic) or type(value) is numpy.ndarray):
        return None
    dtype = value.dtype
    if dtype.type.__module__ == "ml_dtypes":  # their kinds and codes say nothing, or another type
        return "$ml_dtypes", dtype.name
    if dtype.names is None and dtype.subdtype is None and dtype.kind in "biufcSUmM":
        return "$numpy", dtype.str
    return None


# Of these exact types, each value is JSON.
_SCALARS = frozenset((type(None), bool, int, float, str))


def _scalar(value: Any) -> Any:
    kind = type(value)
    if kind is int:
        return value if value.bit_length() <= _INT_BITS_MAX else {"$int": hex(value)}
    if kind is float:
        if math.isfinite(value):
            return value
        for name in ("nan", "inf", "-inf"):
            if struct.pack("<d", value) == struct.pack("<d", float(name)):
                return {"$float": name}
        return {"$float": struct.pack(">d", value).hex()}
    if kind is str:
        return (
            value
            if _is_plain_text(value)
            else {"$str": _text(value.encode("utf-8", "surrogatepass"))}
        )
    return value


def _elements(values: list[Any] | tuple[Any, ...], path: str, depth: int) -> list[Any]:
    return [
        # A path only where it may be needed: lists of thousands of numbers are common.
        _scalar(each) if type(each) in _SCALARS else _tree(each, f"{path}[{i}]", depth)
        for i, each in enumerate(values)
    ]


def _tree(value: Any, path: str, depth: int) -> Any:
    """The value as what json.dumps knows; exact types only, for a subclass would not come back."""
    kind = type(value)
    if kind in _SCALARS:
        return _scalar(value)
    if depth >= _DEPTH_MAX:
        raise NotJson(f"{path}: nested deeper than {_DEPTH_MAX} levels (or it contains itself)")
    if kind is list:
        return _elements(value, path, depth + 1)
    if kind is tuple:
        return {"$tuple": _elements(value, path, depth + 1)}
    if kind is dict and all(
        type(key) is str and not key.startswith("$") and _is_plain_text(key) for key in value
    ):
        return {key: _tree(each, f"{path}[{key!r}]", depth + 1) for key, each in value.items()}
    if kind in (dict, collections.OrderedDict, collections.Counter):
        pairs = [
            [
                _tree(key, f"{path}: key {key!r}", depth + 1),
                _tree(each, f"{path}[{key!r}]", depth + 1),
            ]
            for key, each in value.items()
        ]
        return {f"${kind.__name__}": pairs}
    if kind is bytes:
        return {"$bytes": _text(value)}
    if kind is bytearray:
        return {"$bytearray": _text(bytes(value))}
    if kind is complex:
        return {
            "$complex": [_tree(value.real, path, depth + 1), _tree(value.imag, path, depth + 1)]
        }
    if kind is set or kind is frozenset:
        return {
            f"${kind.__name__}": [_tree(each, f"{path}: {each!r}", depth + 1) for each in value]
        }
    tag = _numpy_tag(value)
    if tag is not None:
        shape = list(value.shape) if type(value).__name__ == "ndarray" else None
        return {tag[0]: [tag[1], shape, _text(value.tobytes())]}
    torch = sys.modules.get("torch")
    if torch is not None:
        if kind is torch.dtype:
            return {"$torch.dtype": str(value).removeprefix("torch.")}
        if kind is torch.Size:
            return {"$torch.Size": list(value)}
        if kind is torch.device:
            return {"$torch.device": str(value)}
    raise NotJson(
        f"{path}: a {kind.__module__}.{kind.__qualname__} is not JSON and would have to be "
        "pickled: "
        "save numbers, strings, lists and dictionaries instead, or allow it with allow_pickle=True"
    )


def encode(value: Any, path: str) -> bytes:
    """JSON of which `decode` makes an equal value of the same types. Raises NotJson, a
    holdfast.RefusedError, that names the place.

    >>> encode({"epoch": 3, "betas": (0.9, 0.95)}, "extra")
    b'{"epoch":3,"betas":{"$tuple":[0.9,0.95]}}'
    """
    tree = _tree(value, path, 0)
    return json.dumps(tree, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode(
        "utf-8"
    )


def _torch(tag: str) -> Any:
    try:
        import torch
    except ImportError as error:
        raise RefusedError(
            f"decode: this value has a {tag[1:]}, and torch is not installed here"
        ) from error
    return torch


def _decode_float(value: Any) -> float:
    if value in ("nan", "inf", "-inf"):
        return float(value)
    number: float
    (number,) = struct.unpack(">d", bytes.fromhex(value))
    return number


def _decode_numpy(value: Any) -> Any:
    try:
        import numpy
    except ImportError as error:
        raise RefusedError(
            "decode: this value has NumPy numbers, and NumPy is not installed here"
        ) from error
    name, shape, text = value
    dtype = numpy.dtype(name)
    if dtype.kind not in "biufcSUmM":
        raise ValueError(f"NumPy dtype {dtype}")
    if dtype.itemsize == 0:  # an empty text: NumPy has none of no length
        dtype = numpy.dtype(f"{dtype.kind}1")
    return _numpy_value(dtype, shape, text)


def _decode_ml_dtypes(value: Any) -> Any:
    name, shape, text = value
    dtype = ml_dtype(name)
    if dtype is None:
        raise RefusedError(
            f"decode: this value is a {name} of the package ml_dtypes, which is not installed "
            "here, or is too old: pip install -U ml_dtypes"
        )
    return _numpy_value(dtype, shape, text)


def _numpy_value(dtype: Any, shape: Any, text: str) -> Any:
    import numpy

    data = base64.b64decode(text, validate=True)
    # frombuffer's arrays are read-only: what was saved was not.
    array = (
        numpy.frombuffer(data, dtype=dtype).copy()
        if data
        else numpy.zeros(shape or (1,), dtype=dtype)
    )
    if shape is None:
        (scalar,) = array
        return scalar
    return array.reshape(shape)


def _decode_dtype(value: Any) -> Any:
    torch = _torch("$torch.dtype")
    dtype = getattr(torch, value)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"torch.{value} is not a dtype")
    return dtype


_DECODERS: dict[str, Callable[[Any], Any]] = {
    "$int": lambda value: int(value, 16),
    "$float": _decode_float,
    "$str": lambda value: base64.b64decode(value, validate=True).decode("utf-8", "surrogatepass"),
    "$tuple": tuple,
    "$dict": lambda value: {key: each for key, each in value},
    "$Counter": lambda value: collections.Counter({key: each for key, each in value}),
    "$OrderedDict": lambda value: collections.OrderedDict((key, each) for key, each in value),
    "$bytes": lambda value: base64.b64decode(value, validate=True),
    "$bytearray": lambda value: bytearray(base64.b64decode(value, validate=True)),
    "$complex": lambda value: complex(*value),
    "$set": set,
    "$frozenset": frozenset,
    "$numpy": _decode_numpy,
    "$ml_dtypes": _decode_ml_dtypes,
    "$torch.dtype": _decode_dtype,
    "$torch.Size": lambda value: _torch("$torch.Size").Size(value),
    "$torch.device": lambda value: _torch("$torch.device").device(value),
}


def _untag(pairs: list[tuple[str, Any]]) -> Any:
    if len(pairs) == 1 and pairs[0][0].startswith("$"):
        tag, value = pairs[0]
        decoder = _DECODERS.get(tag)
        if decoder is None:
            raise RefusedError(
                f"decode: {tag!r} is not known: this was written by a newer holdfast"
            )
        return decoder(value)
    return dict(pairs)


def decode(data: bytes) -> Any:
    """What `encode` was given. JSON that anybody else wrote comes back as json.loads has it. Raises
    holdfast.CorruptError.

    >>> decode(b'{"$tuple":[0.9,0.95]}')
    (0.9, 0.95)
    """
    try:
        return json.loads(data.decode("utf-8"), object_pairs_hook=_untag)
    except RefusedError:
        raise
    except (
        ValueError,
        TypeError,
        AttributeError,
        LookupError,
        ArithmeticError,
        RecursionError,
        RuntimeError,
        struct.error,
    ) as error:
        raise CorruptError(
            f"decode: {len(data)} bytes are not the JSON of a saved value: {error}"
        ) from error


def tree_of(value: Any, path: str) -> Any:
    """The value as what json.dumps knows: a part of a larger JSON text, which `decode` reads with
    the rest.
    """
    return _tree(value, path, 0)
