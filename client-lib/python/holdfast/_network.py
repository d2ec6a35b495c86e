"""`Checkpointer.network_busy`: when the training itself needs the network."""

from __future__ import annotations

from types import TracebackType

from holdfast import _core


class NetworkBusy:
    """One window, or many one after the other or at a time, of a job in this process.

    busy = ckpt.network_busy()
    with busy:
        all_reduce(gradients)
    """

    __slots__ = ("_job",)

    def __init__(self, job: _core.Job) -> None:
        self._job = job

    def __enter__(self) -> None:
        self._job.enter_network_busy()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._job.leave_network_busy()
