"""Weights from elsewhere as a step of a job, from which a run goes on, on any number of ranks.

    python -m holdfast import llama-7b consolidated.00.pth --step 0
    python -m holdfast import llama-7b ./dcp-1000 --step 1000 --only model
    python -m holdfast import llama-7b ./a-model-hubs-directory --step 0

    from holdfast import importing
    importing.import_weights("llama-7b", "consolidated.00.pth", step=0)

    model = …
    ckpt = holdfast.Checkpointer("llama-7b")
    ckpt.restore({"model": model})          # the imported weights; what is not in there (an optimizer) begins from nothing

What is no tensor is left out, and said. Nothing that a source holds is executed.
"""

from __future__ import annotations

import dataclasses
import errno
import math
import os
import time
from typing import Any

import torch

from holdfast import _daemon, _jobs, _weights
from holdfast._checkpointer import Checkpointer
from holdfast._errors import DeadlineExceededError, InvalidArgumentError, UnavailableError
from holdfast._handle import Stage
from holdfast._state import Flattener

__all__ = ["Imported", "import_weights"]

_SHOWN = 8
# A training process outlives its daemon's restart, and waits for it; an import is looked on at, as every command of ckptctl is.
_DAEMON_S = 10.0
_CALL_S = 30.0  # of one that is there: it makes room for a shard of any size
_MOMENT_S = 1.0  # even where nobody wants to wait
_NAMED_BY = "ckptctl import --client-socket, python -m holdfast import --socket, HOLDFAST_SOCKET"


@dataclasses.dataclass(frozen=True)
class Imported:
    """What an import has come to."""

    job: str
    step: int
    tensors: int
    nbytes: int
    left_out: tuple[str, ...]  # names of what is no tensor, or not `only`'s
    stages: tuple[Stage, ...]  # "committed", "nvme", "remote", …

    def __str__(self) -> str:
        text = (
            f"imported {self.tensors} tensors, {self.nbytes} bytes, as step {self.step} of '{self.job}': "
            f"{', '.join(self.stages)}"
        )
        if self.left_out:
            shown = ", ".join(
                name if name.isprintable() else ascii(name) for name in self.left_out[:_SHOWN]
            )
            more = len(self.left_out) - _SHOWN
            text += f"\nleft out: {shown}" + (f" and {more} more" if more > 0 else "")
        return text


class _Saved(torch.nn.Module):
    """Saved as the module is that has these weights."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        super().__init__()
        self._tensors = tensors

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, torch.Tensor]:  # type: ignore[override]
        return dict(self._tensors)


def import_weights(
    job: str,
    source: str | os.PathLike[str],
    *,
    step: int,
    key: str = "model",
    only: str | None = None,
    timeout: float | None = None,
    socket: str | os.PathLike[str] | None = None,
    **options: Any,
) -> Imported:
    """Saves the weights as a step of the job, which must be new, and returns when they lie in every tier that its policy names.

    `source`: a file of torch.save, a directory of torch.distributed.checkpoint, a safetensors file, or a directory of such with or
    without an index. `key`: the key of the state under which a run restores them. `only`: of the source, what is called "<only>.…",
    without that. `timeout`: of all that comes after the reading of the source, in seconds. `socket`, `options`: as Checkpointer
    has them (policy, …); but a daemon that is not there is not waited for, and one that does not answer for 10 s at most.
    """
    step = _jobs.unsigned("import", "step", step)
    limit = math.inf if timeout is None else _jobs.seconds("import", "timeout", timeout)
    if not isinstance(key, str) or not key:
        raise InvalidArgumentError(f"import: key={key!r} is not a key of a state")
    named = None if socket is None else os.fspath(socket)
    if known := _daemon.known_socket(named):
        _check_listens(known)  # it may take long to read the source
    tensors, left_out = _read(source, only)
    end = time.monotonic() + limit
    state = {key: _Saved(tensors)}
    try:
        # What no step can hold is refused before there is a job, which would stay behind without one.
        allow_pickle = bool(options.get("allow_pickle"))
        Flattener(allow_pickle=allow_pickle, fences=lambda _: False).run(state)
        with _joined(job, named, limit, options) as ckpt:
            ckpt.save(step, state, wait="committed", timeout=_left(end))
            stages = ckpt.drain(_left(end))
    except (MemoryError, RuntimeError) as error:
        raise _weights.of_memory(f"import '{source}'", error) or error from None
    nbytes = sum(tensor.nbytes for tensor in tensors.values())
    return Imported(job, step, len(tensors), nbytes, tuple(sorted(left_out)), stages)


def _left(end: float) -> float | None:
    return None if end == math.inf else max(0.0, end - time.monotonic())


def _read(
    source: str | os.PathLike[str], only: str | None
) -> tuple[dict[str, torch.Tensor], list[str]]:
    """The tensors by the names that they get, and the names of what is left out."""
    found = _weights.read(source)
    tensors, left_out = found.tensors, list(found.left_out)
    if only is not None:
        prefix = f"{only}."
        left_out += [name for name in tensors if not name.startswith(prefix)]
        tensors = {
            name.removeprefix(prefix): tensor
            for name, tensor in tensors.items()
            if name.startswith(prefix)
        }
    if not tensors:
        called = "" if only is None else f" that is called '{only}.…'"
        raise InvalidArgumentError(f"import: there is no tensor in '{source}'{called}")
    return tensors, left_out


def _joined(job: str, socket: str | None, limit: float, options: dict[str, Any]) -> Checkpointer:
    patience = max(_MOMENT_S, min(_DAEMON_S, limit))
    path = _daemon.ensure_daemon(
        socket, start=options.get("start_daemon") is not False, timeout=patience
    )
    _check_listens(path)
    waits = {"open_timeout": patience, "call_timeout": max(_MOMENT_S, min(_CALL_S, limit))}
    try:
        return Checkpointer(
            job, rank=0, world_size=1, socket=path, on_error="raise", **{**waits, **options}
        )
    except DeadlineExceededError as error:
        raise UnavailableError(
            f"{error} ('{path}', within {patience:g} s): see its log, or name another one's socket ({_NAMED_BY})"
        ) from None


def _check_listens(path: str) -> None:
    """(Of a path that cannot be one, and of a socket that this user may not use, the library says more.)"""
    error = _daemon.connect_error(path)
    if error is not None and error.errno not in (None, errno.EACCES, errno.EPERM):
        raise UnavailableError(
            f"import: connect to ckptd at '{path}': {error.strerror}: is ckptd running? Start it, or name its socket "
            f"({_NAMED_BY})"
        )
