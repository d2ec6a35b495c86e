"""That the job is to end: the signals that say so, and how long it then lives."""

from __future__ import annotations

import logging
import os
import signal
import threading
import weakref
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any, Protocol

from holdfast._errors import InvalidArgumentError
from holdfast._policy import duration

_log = logging.getLogger("holdfast")

DEFAULT_GRACE_S = 30.0  # what Kubernetes gives a pod, and Slurm (KillWait) a job


class Told(Protocol):
    def notice_stop(self, grace: float | None = None, /) -> None: ...


_told: weakref.WeakKeyDictionary[Told, float] = weakref.WeakKeyDictionary()  # and their grace
_handlers: dict[int, Any] = {}  # the ones that were there before ours


def grace_of(who: str, grace: float | str | None) -> float:
    """In seconds: what was said, or HOLDFAST_GRACE, or 30."""
    if grace is None:
        text = os.environ.get("HOLDFAST_GRACE", "").strip()
        if not text:
            return DEFAULT_GRACE_S
        try:
            return _seconds("HOLDFAST_GRACE", text)
        except InvalidArgumentError as error:
            raise InvalidArgumentError(f"{who}: {error}") from None
    return _seconds(f"{who}: grace", grace)


def _seconds(name: str, value: object) -> float:
    number = value
    if isinstance(value, str):
        try:
            number = float(value)
        except ValueError:
            number = duration(name, value)
    if isinstance(value, bool) or not isinstance(number, (int, float)) or not 0 <= number < 1e9:
        raise InvalidArgumentError(
            f"{name}={value!r} is neither a number of seconds nor a time like '90s'"
        )
    return float(number)


def stop_signals(who: str, signals: Iterable[int]) -> tuple[signal.Signals, ...]:
    try:
        chosen = tuple(signal.Signals(number) for number in signals)
    except (TypeError, ValueError):
        raise InvalidArgumentError(
            f"{who}: stop_signals={signals!r} is not a list of signals, such as [signal.SIGTERM]"
        ) from None
    for number in chosen:
        if number in (signal.SIGKILL, signal.SIGSTOP, signal.SIGINT):
            raise InvalidArgumentError(f"{who}: stop_signals: {number.name} cannot be one of them")
    return chosen


def watch(user: Told, grace: float, signals: Iterable[signal.Signals]) -> None:
    """From now on each of the signals tells `user`, instead of ending the process at once. A handler of the program's
    own is still called, after that; a signal that the program ignores stays ignored."""
    _told[user] = grace
    if threading.current_thread() is not threading.main_thread():
        return  # (Python lets no other thread set handlers: the program calls notice_stop)
    for number in signals:
        before = signal.getsignal(number)
        if number in _handlers or before is signal.SIG_IGN or before is None:
            continue
        _handlers[number] = before
        signal.signal(number, _on_signal)


def unwatch(user: Told) -> None:
    """With the last one the handlers go that were put there, unless somebody has put others there since."""
    _told.pop(user, None)
    if _told or threading.current_thread() is not threading.main_thread():
        return
    for number, before in list(_handlers.items()):
        if signal.getsignal(number) is _on_signal:
            signal.signal(number, before)
        del _handlers[number]


def _on_signal(number: int, frame: FrameType | None) -> None:
    told = False
    why = "the Checkpointers that wanted to hear it are gone"
    for user, grace in list(_told.items()):
        try:
            user.notice_stop(grace)
            told = True
        except (
            Exception
        ) as error:  # it was closed a moment ago; whatever it is, the training goes on
            why = str(error) or type(error).__name__
    before: Callable[[int, FrameType | None], Any] | int | None = _handlers.get(number)
    if not told and number in _handlers:
        _give_back(number, why)
    if callable(before):
        before(number, frame)


def _give_back(number: int, why: str) -> None:
    """Nobody hears the signal: it does again what it does without us. A process that a signal neither ends nor tells anything
    can only be killed."""
    before = _handlers.pop(number)
    _log.error(
        "%s: no job could be told that it is to end: %s; the signal does what it did before `preempted` took it "
        "(close a Checkpointer that is not needed any more)",
        signal.Signals(number).name,
        why,
    )
    if signal.getsignal(number) is _on_signal:  # else somebody's own handler has called this one
        signal.signal(number, before)
        if before == signal.SIG_DFL:
            signal.raise_signal(number)


_forking = threading.local()  # .mask: what the thread that forks had blocked before


def _before_fork() -> None:
    # A signal that comes to the child before it has its handlers waits until then: Python would forget it.
    _forking.mask = signal.pthread_sigmask(signal.SIG_BLOCK, _handlers)


def _after_fork_in_parent() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _forking.mask)


def _after_fork_in_child() -> None:
    # A child has no part in the job, and does what the program said of the signal. With our handler it would not end by
    # SIGTERM, and who terminates it and waits, as multiprocessing does at exit, would wait for ever.
    _told.clear()
    for number, before in _handlers.items():
        if signal.getsignal(number) is _on_signal:
            signal.signal(number, before)
    _handlers.clear()
    signal.pthread_sigmask(signal.SIG_SETMASK, _forking.mask)


os.register_at_fork(
    before=_before_fork,
    after_in_parent=_after_fork_in_parent,
    after_in_child=_after_fork_in_child,
)
