"""AsyncCheckpointerType.PROCESS: DCP plans and saves in a process of its own, to which it sends the state and the Writer.

The state stays where it was staged, in the slot. This process seals the slot when DCP sends the Writer. The other process gets
an outline of the state without its bytes, and a Writer that only checks that DCP's plan wants what was sealed.
"""

from __future__ import annotations

from multiprocessing.reduction import ForkingPickler
from types import SimpleNamespace
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from holdfast._errors import HoldfastError, InternalError, InvalidArgumentError, RefusedError
from holdfast._torch_types import is_dtensor
from holdfast.dcp._staging import Outline, Sealed
from holdfast.dcp._writer import Writer


class SealedWriter(Writer):
    """In DCP's process: of a step that the training process has sealed, or of the error that kept it from doing so."""

    def __init__(
        self,
        job: str,
        step: int,
        save_id: str,
        ranks: tuple[int, int],
        sealed: Sealed | None,
        error: HoldfastError | None,
    ) -> None:
        self.job, self.step, self._save_id = job, step, save_id
        self._rank, self._world_size = ranks
        self._sealed, self._error = sealed, error
        self._planned_together = True
        self._wait = "sealed"

    def _shared(self) -> Any:
        return SimpleNamespace(rank=self._rank, world_size=self._world_size)

    def storage_meta(self) -> StorageMeta:
        return StorageMeta(checkpoint_id=self.checkpoint_id, save_id=self._save_id)

    def close(self) -> None:
        """Nothing is held here."""

    def set_up_storage_writer(
        self, is_coordinator: bool, *, use_collectives: bool = True, **kwargs: Any
    ) -> None:
        self._planned_together = use_collectives
        if self._error is not None:
            raise self._error

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        assert self._sealed is not None
        sizes = self._sealed.sizes_of(plan)
        if isinstance(sizes, str):
            raise RefusedError(
                f"Writer: save step {self.step} of job {self.job!r}: it was sealed before it was planned, and "
                f"{type(planner).__qualname__} plans {sizes}. Use AsyncCheckpointerType.THREAD with this planner"
            )
        return self._results(plan, sizes)


def _send_writer(writer: Writer) -> tuple[type[SealedWriter], tuple[Any, ...]]:
    """In the training process, by the thread that sends it. Errors go with it, so that DCP tells all ranks."""
    sealed: Sealed | None = None
    error: HoldfastError | None = None
    ranks = (0, 1)
    try:
        shared = writer._shared()
        ranks = shared.rank, shared.world_size
        if writer._wait != "sealed":
            raise InvalidArgumentError(
                f"Writer: wait={writer._wait!r} with AsyncCheckpointerType.PROCESS, whose process cannot wait for it: leave "
                f"it out, and call writer.wait({writer._wait!r}) when the future is done"
            )
        sealed = writer._seal_staged()
    except HoldfastError as failure:
        error = failure
    except Exception as failure:
        error = InternalError(f"{type(failure).__name__}: {failure}")
    if error is not None:
        writer.close()
    return SealedWriter, (writer.job, writer.step, writer._save_id, ranks, sealed, error)


def _send_outline(outline: Outline) -> tuple[type[dict[str, Any]], tuple[dict[str, Any]]]:
    return dict, (_without_bytes(dict(outline.items())),)


def _without_bytes(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_bytes(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_without_bytes(each) for each in value]
    if is_dtensor(value):
        from torch.distributed.tensor import DTensor

        local = _without_bytes(value._local_tensor)
        return DTensor(local, value._spec, requires_grad=False)  # type: ignore[no-untyped-call]
    if not isinstance(value, torch.Tensor):
        return value
    if type(value) is not torch.Tensor:
        raise RefusedError(
            f"dcp.async_save: a {type(value).__qualname__} cannot go to the process of AsyncCheckpointerType.PROCESS: use "
            "AsyncCheckpointerType.THREAD"
        )
    return torch.empty_like(value, device="meta")


def install() -> None:
    # By multiprocessing alone: for pickle and copy a Writer stays what cannot go elsewhere.
    ForkingPickler.register(Writer, _send_writer)
    ForkingPickler.register(Outline, _send_outline)
