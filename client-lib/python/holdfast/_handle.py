"""A save under way, as the loop holds it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal

from holdfast import _core
from holdfast._described import torch_module
from holdfast._errors import (
    DeadlineExceededError,
    HoldfastError,
    InvalidArgumentError,
    RefusedError,
)
from holdfast._jobs import seconds

Stage = Literal["snapshot", "sealed", "committed", "peer", "nvme", "remote"]
STAGES: tuple[str, ...] = ("snapshot", "sealed", "committed", "peer", "nvme", "remote")

_LOOK_S = 0.001


def streams_of(devices: set[int]) -> list[_core.Stream]:
    """PyTorch's current stream of each device."""
    if not devices:
        return []
    torch = torch_module()
    return [(device, torch.cuda.current_stream(device).cuda_stream) for device in sorted(devices)]


class Handle:
    """How far a save has come. Made by `Checkpointer.save`.

        handle = ckpt.save(step, state)
        ...                           # the next forward and backward pass
        handle.wait_snapshot()        # from here on the tensors may be written by hand
        handle.wait("remote", timeout=600)
        print(handle.times)           # {'snapshot': 0.31, 'sealed': 0.32, 'committed': 0.33, 'remote': 41.2}

    Threads: any. Waits end with KeyboardInterrupt, as every wait here.
    """

    def __init__(
        self,
        step: int,
        save: _core.Save | None,
        keep: Any,
        error: HoldfastError | None,
        devices: set[int],
        *,
        at_once: bool = False,
        changes: Callable[[], object] | None = None,
    ) -> None:
        """`at_once`: everything is copied before save() returns, and no step() will find out that it is.
        `changes`: called before an optimizer changes what was saved."""
        self.step = step
        self._save = save
        self._keep = keep  # the tensors: nobody else may get their memory before the snapshot
        self._error = error
        self._devices = devices
        self._at_once = at_once
        self._changes = changes

    def wait(self, stage: Stage = "sealed", timeout: float | None = None) -> None:
        """Returns when the save has come that far: "snapshot" (the tensors may change), "sealed" (a crash of this process
        loses nothing), "committed" (all ranks have sealed it), "peer" (every shard lies in another node's memory, too), "nvme", "remote".

        Raises what became of the save if it never will; DeadlineExceededError after `timeout` seconds (None: no limit).
        """
        if stage not in STAGES:
            raise InvalidArgumentError(f"there is no stage {stage!r}: {', '.join(STAGES)}")
        limit = math.inf if timeout is None else seconds("wait", "timeout", timeout)
        if self._save is None:
            assert self._error is not None
            raise self._error
        # What a later stage says (not by this policy, not yet, no daemon) takes nothing from a save that is sealed.
        self._save.wait(stage, limit)
        self._keep = None

    def wait_snapshot(self, timeout: float | None = None) -> None:
        """Returns when the tensors may be changed: they have been copied, or will not be any more, since the save failed."""
        try:
            self.wait("snapshot", timeout)
        except DeadlineExceededError:
            raise
        except HoldfastError:
            pass

    def _wait_first(self) -> None:
        """Until what save() promises to have copied when it returns has been."""
        if self._save is not None:
            self._save.wait_first(math.inf)
            if self._at_once:
                self.wait_snapshot()

    def _wait_for_slot(self) -> None:
        """Until ckptd has given it a slot, or has refused it."""
        while self._save is not None and not self._save.done("snapshot"):
            try:
                self._save.wait("snapshot", _LOOK_S)
            except DeadlineExceededError as error:
                if error.reason == "COPYING":
                    return
            except HoldfastError:
                return  # as `error` says

    def _before_change(self) -> None:
        """By an optimizer that is about to change what is being copied: on devices its work is put behind the copy, and what
        is in this process's memory has been copied by then."""
        self._wait_before_change()
        if self._changes is not None:
            self._changes()

    def _wait_before_change(self) -> None:
        if self._save is None or self.done("snapshot"):
            return
        if self._devices:
            try:
                self._save.fence(streams_of(self._devices), math.inf)
                return
            except HoldfastError:
                pass  # a stream that is being captured, a device in trouble
        self.wait_snapshot()

    def done(self, stage: Literal["snapshot", "sealed"] = "sealed") -> bool:
        """Whether it has come that far, or failed; asks nobody."""
        done = self._save is None or self._save.done(stage)
        if done:
            self._keep = None
        return done

    @property
    def error(self) -> HoldfastError | None:
        """Why the save failed, as far as is known now; None: it has not."""
        if self._error is None and self._save is not None and self._save.done("sealed"):
            try:
                self._save.wait("sealed", 0)
            except HoldfastError as error:
                self._error = error
        return self._error

    @property
    def times(self) -> dict[str, float]:
        """Seconds from the call of save to each stage that is known to be reached: after "sealed", to those that were waited
        for and those before them. A stage whose time the daemon does not know (it was restarted since) is left out."""
        return {} if self._save is None else self._save.times()

    @property
    def nbytes(self) -> int:
        """Of the image; 0 before the snapshot."""
        return 0 if self._save is None else self._save.nbytes

    def __reduce__(self) -> Any:
        raise RefusedError(f"step {self.step}: a Handle cannot be copied, or go to another process")

    def __repr__(self) -> str:
        known = self.times
        state = (
            f"failed: {self._error}"
            if self._error
            else (max(known, key=STAGES.index) if known else "copying")
        )
        return f"<holdfast.Handle step {self.step}: {state}>"
