"""NumPy's dtypes and safetensors' names of them; those of ml_dtypes (bfloat16, float8) too."""

from __future__ import annotations

import importlib
import sys
from typing import Any

from holdfast._errors import InvalidArgumentError

_NAMES = {
    "b1": "BOOL", "u1": "U8", "i1": "I8", "u2": "U16", "i2": "I16", "f2": "F16",
    "u4": "U32", "i4": "I32", "f4": "F32", "u8": "U64", "i8": "I64", "f8": "F64", "c8": "C64",
}  # fmt: skip
_CODES = {name: f"<{code}" for code, name in _NAMES.items()}
_OF_ML_DTYPES = {
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "float8_e8m0fnu": "F8_E8M0",
    "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
}
_ML_DTYPES = {name: kind for kind, name in _OF_ML_DTYPES.items()}


def is_array(value: Any) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and type(value) is numpy.ndarray


def _name(dtype: Any) -> str | None:
    if dtype.type.__module__ == "ml_dtypes":
        return _OF_ML_DTYPES.get(dtype.name)
    return _NAMES.get(dtype.str[1:]) if dtype.str[0] in "<|" else None


def ml_dtype(name: str) -> Any:
    """That type of the package ml_dtypes; None: it is not installed, or does not have it."""
    try:
        import numpy

        dtype = numpy.dtype(getattr(importlib.import_module("ml_dtypes"), name))
    except (ImportError, AttributeError):
        return None
    return dtype if dtype.type.__module__ == "ml_dtypes" else None


def has_place(dtype: Any) -> bool:
    """Whether safetensors has a name for a NumPy dtype."""
    return _name(dtype) is not None


def array_dtype(dtype: Any, path: str) -> str:
    """safetensors' name of a NumPy dtype."""
    name = _name(dtype)
    if name is None:
        raise InvalidArgumentError(f"{path}: arrays of {dtype} have no place in a safetensors file")
    return name


def numpy_dtype(name: str, path: str) -> Any:
    """The NumPy dtype of safetensors' name."""
    import numpy

    if name in _CODES:
        return numpy.dtype(_CODES[name])
    if name in _ML_DTYPES:
        dtype = ml_dtype(_ML_DTYPES[name])
        if dtype is not None:
            return dtype
        raise InvalidArgumentError(
            f"{path}: NumPy itself has no dtype for {name}: install ml_dtypes, or read it as a tensor of torch"
        )
    raise InvalidArgumentError(f"{path}: NumPy has no dtype for {name}: read it with tensor()")
