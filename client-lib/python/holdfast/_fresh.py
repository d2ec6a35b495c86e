"""`Checkpointer(fresh='LABEL')`: the job starts over once per label.

Every state that is saved then has the label as an object of its own, and so does each copy of each rank's shard. The first
restore (or the first save, without one) looks at the newest step of the job's line. With this label the run goes on from
that step. With another one, or none, all ranks say so, and the daemon starts the job over, as `ckptctl restore JOB --from-scratch`
does: the old steps leave the line and stay for the grace time (docs/deletion.md, "Starting over").

    looks = Looks(shared)
    restored = looks.patiently(600.0, lambda left: shared.core.restore(choose, label=looks.label, timeout=left))
    # where `choose` begins with
    looks.at(objects, of_all)

A run never changes its label in the middle: without `fresh` it goes on under that of the step which it restored. So all steps of
a line have one label, and the newest one that can be read tells it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, TypeVar

from holdfast import _core, _json
from holdfast._errors import (
    HoldfastError,
    InvalidArgumentError,
    NothingToRestoreError,
    RefusedError,
    UnavailableError,
)
from holdfast._merged import OfAll
from holdfast._state import FRESH

if TYPE_CHECKING:
    from holdfast._jobs import SharedJob

_log = logging.getLogger("holdfast")
_BYTES_MAX = 128
_PAUSE_S = 2.0
_BETWEEN_LINES_S = 10.0
_LOOK_S = 10.0

_T = TypeVar("_T")


class OfAnotherRun(NothingToRestoreError):
    """The step has another label. The extension module has the daemon told (`of_another_run`)."""

    of_another_run = True


def checked(value: object) -> str | None:
    if value is None:
        return None
    if (
        isinstance(value, str)
        and value
        and value.isprintable()
        and len(value.encode(errors="replace")) <= _BYTES_MAX
    ):
        return value
    raise InvalidArgumentError(
        f"Checkpointer: fresh={value!r}: a label is a printable text of 1 to {_BYTES_MAX} bytes"
    )


def objects_of(label: str | None) -> list[_core.Object]:
    """What a state that is saved under that label has beside its tree."""
    return [] if label is None else [(FRESH, _json.encode(label, FRESH), None)]


def _labels_in(objects: Iterable[tuple[Any, ...]]) -> list[str]:
    return [str(_json.decode(data)) for name, data, *_ in objects if name == FRESH]


class Looks:
    """At what one restore, or one first save, is offered."""

    def __init__(self, shared: SharedJob) -> None:
        self._shared = shared
        self._starts_over: OfAnotherRun | None = None
        self._accepted = False
        self.label = shared.fresh or ""  # as the daemon is told it

    def at(
        self,
        objects: list[_core.Object],
        of_all: OfAll | None,
        *,
        step: int | None = None,
    ) -> None:
        """Raises OfAnotherRun if the step that is offered has another label. `step`: the caller asked for that one."""
        shared = self._shared
        found = _labels_in(objects) or _labels_in([] if of_all is None else of_all.contents)
        if shared.fresh is None:
            shared.label = found[0] if found else None
        elif shared.fresh not in found:
            self._refuse(shared.fresh, f"fresh={found[0]!r}" if found else "no label", step)
        self._accepted = True

    def _refuse(self, fresh: str, what: str, step: int | None) -> None:
        shared = self._shared
        if step is not None or shared.has_begun:
            raise RefusedError(
                f"job {shared.name!r}: the step was saved with {what}, and this run has fresh={fresh!r}. "
                "Say the label that the step has, or none, to go on from it"
            )
        used = _used(shared, fresh)
        if used is not None:
            raise RefusedError(
                f"job {shared.name!r}: fresh={fresh!r} was started before (step {used.step} of attempt {used.attempt}), and "
                f"the step to restore now has {what}. Choose a new label, or go back: ckptctl restore {shared.name} "
                f"--step {used.step} --attempt {used.attempt}"
            )
        self._starts_over = OfAnotherRun(
            f"its newest step has {what}, and this run has fresh={fresh!r}"
        )
        raise self._starts_over

    def patiently(self, timeout: float, restore: Callable[[float], _T]) -> _T:
        """Calls it, which is told how long it may take; and again, while a tier or a drive that may have steps of this run cannot
        be read.
        """
        until = time.monotonic() + timeout
        said_at: float | None = None
        while True:
            try:
                return restore(max(0.0, until - time.monotonic()))
            except UnavailableError as error:
                now = time.monotonic()
                if not self.label or self._accepted or now + _PAUSE_S >= until:
                    raise
                if said_at is None or now >= said_at + _BETWEEN_LINES_S:
                    said_at = now
                    _log.warning(
                        "job '%s': fresh='%s': waits %.0f s at most: %s",
                        self._shared.name,
                        self.label,
                        until - now,
                        error,
                    )
                time.sleep(_PAUSE_S)
            except NothingToRestoreError:
                if self._starts_over is not None:
                    _log.warning(
                        "job '%s': starts over: %s. The steps before stay for the grace time",
                        self._shared.name,
                        self._starts_over,
                    )
                raise


def begin(shared: SharedJob, timeout: float) -> None:
    """Before a save in a process that has restored nothing: the job starts over, or the restore was forgotten."""
    looks = Looks(shared)

    def choose(
        saved: list[_core.TensorInfo], objects: list[_core.Object], of_all: Any
    ) -> tuple[_core.TensorList, list[int]]:
        looks.at(objects, None if of_all is None else OfAll(*of_all))
        forgotten = RefusedError(
            f"job {shared.name!r}: this process has not restored anything, and the job has steps with "
            f"fresh={shared.fresh!r}. Call restore before the first save"
        )
        forgotten.reason = "NOT_RESTORED"
        raise forgotten

    try:
        looks.patiently(
            timeout, lambda left: shared.core.restore(choose, timeout=left, label=looks.label)
        )
    except NothingToRestoreError:
        pass


def _used(shared: SharedJob, label: str) -> _core.CheckpointInfo | None:
    """A step that has this label: of each attempt the newest one that can be read is looked at."""
    try:
        known = _core.list_checkpoints(shared.name, socket=shared.socket, timeout=_LOOK_S)
    except HoldfastError:
        # A tier is still being read. Then the daemon does not start over, and this is looked at again.
        return None
    looked: set[int] = set()
    for info in known:
        if info.attempt in looked:
            continue
        try:
            view = _core.attach(
                shared.name,
                rank=shared.rank % info.world_size,
                step=info.step,
                attempt=info.attempt,
                socket=shared.socket,
                timeout=_LOOK_S,
            )
        except HoldfastError:
            continue  # an older step of the attempt has the same label
        looked.add(info.attempt)
        if label in _labels_in(view.objects):
            return info
    return None
