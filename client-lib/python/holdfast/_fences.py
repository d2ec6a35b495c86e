"""Which optimizers' step() waits for the copy of what it is about to change."""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from holdfast._described import torch_module
from holdfast._errors import InvalidArgumentError
from holdfast._optimizers import stepped_by

_log = logging.getLogger("holdfast")


class Fences:
    """Of one Checkpointer. `wait()` returns when what is being copied may be changed.

    fences = Fences(wait, overlap=True)
    fences.watch(optim)     # from now on its step() waits
    fences.hold(optim)      # True: its step() has waited since this was asked before
    """

    def __init__(self, wait: Callable[[], None], *, overlap: bool) -> None:
        self._wait = wait
        self._overlap = overlap
        self._hooks: weakref.WeakKeyDictionary[Any, _StepHook] = weakref.WeakKeyDictionary()
        self._added: weakref.WeakSet[Any] = weakref.WeakSet()

    def add(self, optimizer: Any) -> None:
        """One that no state shows: `added` from now on."""
        inside = list(stepped_by(optimizer))
        for each in inside:
            self.watch(each)
        refused = [each for each in inside if self._overlap and not self._hooks[each].registered]
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
        if self._overlap and optimizer not in self._hooks:
            self._hooks[optimizer] = _StepHook(self._wait, optimizer)

    @contextlib.contextmanager
    def no_training(self) -> Iterator[None]:
        """Steps within are none of the training: that a hook runs there says nothing."""
        before = [(hook, hook.ran) for hook in self._hooks.values()]
        try:
            yield
        finally:
            for hook, ran in before:
                hook.ran = ran

    def hold(self, optimizer: Any) -> bool:
        """Whether its step() waits for the copy of what it is about to change. A hook sees to that; and that the hook is run is
        not taken for granted: it must have been since the save before (or since restore was called). A step that is replayed
        as a part of a CUDA graph runs none, nor does one that somebody has put in step's place."""
        if not self._overlap:
            return False
        hook = self._hooks.get(optimizer)
        if hook is None:
            self.watch(optimizer)
            return False
        ran, hook.ran = hook.ran, False
        return ran and not hook.captured

    def remove(self) -> None:
        for hook in self._hooks.values():
            hook.remove()
        self._hooks.clear()


class _StepHook:
    """Before an optimizer's step(): waits for the copy, and notes that it was run."""

    def __init__(self, wait: Callable[[], None], optimizer: Any) -> None:
        self.ran = False
        # A graph that is captured is replayed later, without hooks. Some optimizers say so themselves.
        self.captured = any(group.get("capturable", False) for group in optimizer.param_groups)

        def before_step(*_: Any) -> None:
            self.ran = True
            torch = torch_module()
            if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
                self.captured = True
            wait()

        try:
            self._registered: Any = optimizer.register_step_pre_hook(before_step)
        except Exception as error:  # a wrapper that is an Optimizer by name
            self._registered = None
            _log.warning(
                "%s takes no hook (%s): what it changes is copied before save returns. Call fence() of the Checkpointer with "
                "the optimizer inside of it",
                type(optimizer).__name__,
                error,
            )

    @property
    def registered(self) -> bool:
        return self._registered is not None

    def remove(self) -> None:
        if self._registered is not None:
            self._registered.remove()
