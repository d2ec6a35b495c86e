"""Which optimizers' step() waits for the copies of what it is about to change.

    _fences.add(handle)     # from now on every step() waits for that copy
    fences = Fences()       # of one Checkpointer, or of one job of DCP's
    fences.hold(optim)      # True: its step() has waited since this was asked before

Every optimizer runs the hooks that torch has for all of them, and nothing is put on the optimizers themselves. That the hook is run
is not taken for granted: a step that is replayed as a part of a CUDA graph runs none, nor does one that somebody has put in step's
place. So steps are counted.
"""

from __future__ import annotations

import contextlib
import logging
import operator
import os
import threading
import weakref
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from holdfast import _subclasses
from holdfast._described import local_parts, plain_types, torch_module
from holdfast._errors import InvalidArgumentError
from holdfast._optimizers import stepped_by

if TYPE_CHECKING:
    from holdfast._handle import Handle

_log = logging.getLogger("holdfast")
_NBYTES = operator.attrgetter("nbytes")

_lock = threading.Lock()
_hook: Any = None
_copying: weakref.WeakSet[Handle] = weakref.WeakSet()
_steps: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
# A graph that is captured is replayed later, without hooks.
_captured: weakref.WeakSet[Any] = weakref.WeakSet()


def install() -> None:
    """From now on optimizers are seen, and wait; not before the program has imported torch."""
    global _hook
    with _lock:
        if _hook is None and torch_module() is not None:
            from torch.optim.optimizer import register_optimizer_step_pre_hook

            _hook = register_optimizer_step_pre_hook(_before_step)


def _before_step(optimizer: Any, *_: Any) -> None:
    _steps[optimizer] = _steps.get(optimizer, 0) + 1
    torch = torch_module()
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        _captured.add(optimizer)
    before_change()


def before_change() -> None:
    """Returns when what is being copied may be changed by an optimizer."""
    with _lock:
        copying = list(_copying)
    for each in copying:
        each._before_change()
        if each.done("snapshot"):
            with _lock:
                _copying.discard(each)


def add(handle: Handle) -> None:
    with _lock:
        _copying.add(handle)


@contextlib.contextmanager
def no_training() -> Iterator[None]:
    """Steps within are none of the training: that the hook runs there says nothing."""
    before = dict(_steps.items())
    try:
        yield
    finally:
        _steps.clear()
        _steps.update(before)


def _takes_hooks(optimizer: Any) -> bool:
    """Not a wrapper that is an Optimizer by name."""
    return hasattr(optimizer, "_optimizer_step_pre_hooks")


class Fences:
    def __init__(self, *, overlap: bool = True) -> None:
        self._overlap = overlap
        self._seen: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._added: weakref.WeakSet[Any] = weakref.WeakSet()

    def add(self, optimizer: Any) -> None:
        """One that no state shows: `added` from now on."""
        inside = list(stepped_by(optimizer))
        for each in inside:
            self.watch(each)
        refused = [each for each in inside if not _takes_hooks(each)]
        if not inside or refused:
            raise InvalidArgumentError(
                f"fence: a {type(refused[0] if refused else optimizer).__qualname__} takes no hook before its step(): pass "
                "the torch.optim.Optimizer inside of it whose step() changes the parameters"
            )
        self._added.update(inside)

    @property
    def added(self) -> Iterable[Any]:
        return list(self._added)

    def watch(self, optimizer: Any) -> None:
        """Its steps count from now on."""
        install()
        if optimizer in self._seen:
            return
        self._seen[optimizer] = _steps.get(optimizer, 0)
        if self._overlap and not _takes_hooks(optimizer):
            _log.warning(
                "%s takes no hook: what it changes is copied before save returns. Call fence() of the Checkpointer with the "
                "optimizer inside of it",
                type(optimizer).__name__,
            )

    def hold(self, optimizer: Any) -> bool:
        """Whether its step() waits for the copy of what it is about to change, as seen since this was asked, or it was given to
        `watch`, before."""
        if not self._overlap:
            return False
        self.watch(optimizer)
        steps = _steps.get(optimizer, 0)
        ran = steps != self._seen[optimizer]
        self._seen[optimizer] = steps
        # Some optimizers say themselves that they are captured.
        captured = optimizer in _captured or any(
            group.get("capturable", False) for group in optimizer.param_groups
        )
        return ran and not captured

    def held(self) -> dict[int, int]:
        """The memory of all optimizers that hold now, where no state names them. Their steps count from `install` on."""
        memory: dict[int, int] = {}
        for optimizer in list(_steps):
            self._seen.setdefault(optimizer, 0)
            if self.hold(optimizer):
                memory.update(memory_of(optimizer))
        return memory


def memory_of(optimizer: Any) -> dict[int, int]:
    """What only its step() changes: addresses, and how many bytes lie there."""
    values = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for state in optimizer.state.values():
        if isinstance(state, Mapping):
            values += state.values()
    if not plain_types().issuperset(map(type, values)):
        tensor = torch_module().Tensor
        values = local_parts([value for value in values if isinstance(value, tensor)])
        values = list(_subclasses.plain_tensors(values))
    try:
        addresses = list(map(torch_module().Tensor.data_ptr, values))
    except (RuntimeError, ValueError):
        return {}  # one of them has no memory: where it is described it is said which
    return dict(zip(addresses, map(_NBYTES, values), strict=True))


def _after_fork() -> None:
    """The copies are the parent's, and threads of it may have held the lock."""
    global _lock
    _lock = threading.Lock()
    _copying.clear()


os.register_at_fork(after_in_child=_after_fork)
