"""What is not a tensor, as an object of a shard: JSON where it comes back equal, else a pickle if
that was allowed.
"""

from __future__ import annotations

import pickle
from typing import Any

from holdfast import _json
from holdfast._errors import CorruptError, RefusedError

# Codecs are of [A-Za-z0-9._+-] (docs/formats.md).
PICKLE = "python.pickle.1"


def to_object(name: str, value: Any, *, allow_pickle: bool) -> tuple[str, bytes, str | None]:
    """The value as the extension module takes it. Raises holdfast.RefusedError, naming the place, for
    what would have to be pickled.

    >>> to_object("epoch", 3, allow_pickle=False)
    ('epoch', b'3', None)
    """
    try:
        return name, _json.encode(value, name), None
    except _json.NotJson:
        if not allow_pickle:
            raise
    try:
        return name, pickle.dumps(value, protocol=4), PICKLE
    except Exception as error:
        raise RefusedError(f"{name}: cannot be pickled: {type(error).__name__}: {error}") from error


def from_object(name: str, data: bytes, codec: str | None, *, allow_pickle: bool) -> Any:
    """What `to_object` was given. Nothing is unpickled unless that is allowed here, too."""
    if codec is None:
        try:
            return _json.decode(data)
        except CorruptError as error:
            raise CorruptError(f"{name}: {error}") from error
    if codec != PICKLE:
        raise RefusedError(f"{name}: is of codec {codec!r}, which this version does not know")
    if not allow_pickle:
        raise RefusedError(
            f"{name}: was saved as a pickle, which may run any code when it is read: allow it with "
            "allow_pickle=True if you trust it"
        )
    try:
        return pickle.loads(data)
    except Exception as error:
        raise RefusedError(
            f"{name}: cannot be unpickled here: {type(error).__name__}: {error}"
        ) from error
