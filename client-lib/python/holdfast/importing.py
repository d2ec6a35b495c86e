"""Weights from elsewhere as a step of a job, from which a run goes on, on any number of ranks.

    python -m holdfast import llama-7b consolidated.00.pth --step 0
    python -m holdfast import llama-7b ./dcp-1000 --step 1000 --only model
    python -m holdfast import llama-7b ./a-model-hubs-directory --step 0

    from holdfast import importing
    importing.import_weights("llama-7b", "consolidated.00.pth", step=0)

    model = …
    ckpt = holdfast.Checkpointer("llama-7b")
    ckpt.restore({"model": model})          # the imported weights; what is not in there (an optimizer) begins anew

What is no tensor is left out, and said. Nothing that a source holds is executed.
"""

from __future__ import annotations

import dataclasses
import os
from typing import Any

import torch

from holdfast import _weights
from holdfast._checkpointer import Checkpointer
from holdfast._errors import InvalidArgument
from holdfast._handle import Stage

__all__ = ["Imported", "import_weights"]

_SHOWN = 8


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
    **options: Any,
) -> Imported:
    """Saves the weights as a step of the job, which must be new, and returns when they lie in every tier that its policy names.

    `source`: a file of torch.save, a directory of torch.distributed.checkpoint, a safetensors file, or a directory of such with or
    without an index. `key`: the key of the state under which a run restores them. `only`: of the source, what is called "<only>.…",
    without that. `options`: as Checkpointer has them (policy, socket, …).
    """
    if not isinstance(key, str) or not key:
        raise InvalidArgument(f"import: key={key!r} is not a key of a state")
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
        raise InvalidArgument(f"import: there is no tensor in '{source}'{called}")
    with Checkpointer(job, rank=0, world_size=1, on_error="raise", **options) as ckpt:
        try:
            ckpt.save(step, {key: _Saved(tensors)}, wait="committed", timeout=timeout)
        except (MemoryError, RuntimeError) as error:
            raise _weights.of_memory(f"import '{source}'", error) or error from None
        stages = ckpt.drain(timeout)
    nbytes = sum(tensor.nbytes for tensor in tensors.values())
    return Imported(job, step, len(tensors), nbytes, tuple(sorted(left_out)), stages)
