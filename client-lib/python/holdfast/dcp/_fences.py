"""Which tensors of a state only change in an optimizer's step(), and how that step() waits for a copy.

DCP is given tensors and no optimizers. But every optimizer runs the hooks that torch has for all
of them. So what an optimizer changes is known once it has made a step, and may be copied beside
the loop: the hook waits before the next step.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import torch
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from holdfast._jobs import SharedJob
from holdfast._torch_types import is_dtensor


class Copying(Protocol):
    """A copy that is under way."""

    def before_change(self) -> None:
        """Returns when an optimizer may change what is copied."""


_copying: weakref.WeakSet[Copying] = weakref.WeakSet()
_steps: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
# A graph that is captured is replayed later, without hooks.
_captured: weakref.WeakSet[Optimizer] = weakref.WeakSet()
_lock = threading.Lock()
_hook: Any = None
_PLAIN = (torch.Tensor, torch.nn.Parameter)


def install() -> None:
    """From now on optimizers are seen, and wait."""
    global _hook
    with _lock:
        if _hook is None:
            _hook = register_optimizer_step_pre_hook(_before_step)


def _before_step(optimizer: Optimizer, *_: Any) -> None:
    _steps[optimizer] = _steps.get(optimizer, 0) + 1
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        _captured.add(optimizer)
    before_change()


def before_change() -> None:
    """Returns when what is being copied may be changed."""
    with _lock:
        copying = list(_copying)
    for each in copying:
        each.before_change()


def add(copying: Copying) -> None:
    with _lock:
        _copying.add(copying)


def forget_all() -> None:
    """In a forked child: the copies are its parent's, and threads of it may have held the lock."""
    global _lock
    _lock = threading.Lock()
    _copying.clear()


class Fences:
    """Of one job.

        Fences.of(shared).addresses()  # of what only a step() changes, and how many bytes it has

    That an optimizer's hook runs is not taken for granted: it must have run since the save before.
    """

    def __init__(self) -> None:
        self._seen: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()

    @staticmethod
    def of(shared: SharedJob) -> Fences:
        return _of_jobs.setdefault(shared, Fences())

    def addresses(self) -> dict[int, int]:
        found: dict[int, int] = {}
        for optimizer, steps in list(_steps.items()):
            ran = steps != self._seen.get(optimizer, 0)
            self._seen[optimizer] = steps
            if (
                ran
                and optimizer not in _captured
                and not any(group.get("capturable", False) for group in optimizer.param_groups)
            ):
                found.update(
                    (tensor.data_ptr(), tensor.nbytes)
                    for tensor in map(_local, _tensors_of(optimizer))
                    if type(tensor) in _PLAIN and tensor.layout is torch.strided
                )
        return found


_of_jobs: weakref.WeakKeyDictionary[SharedJob, Fences] = weakref.WeakKeyDictionary()


def _tensors_of(optimizer: Optimizer) -> Iterator[torch.Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]
    for values in optimizer.state.values():
        if isinstance(values, Mapping):
            yield from (each for each in values.values() if isinstance(each, torch.Tensor))


def _local(tensor: Any) -> Any:
    return tensor._local_tensor if is_dtensor(tensor) else tensor
