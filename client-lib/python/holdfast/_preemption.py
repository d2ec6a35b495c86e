"""That the job is to end: the signals that say so, and how long it then lives."""

from __future__ import annotations

import os
import signal
import threading
import weakref
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any, Protocol

from holdfast._errors import HoldfastError, InvalidArgument
from holdfast._policy import duration

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
        except InvalidArgument as error:
            raise InvalidArgument(f"{who}: {error}") from None
    return _seconds(f"{who}: grace", grace)


def _seconds(name: str, value: object) -> float:
    if isinstance(value, str):
        try:
            return float(int(value))
        except ValueError:
            return duration(name, value)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < 1e9:
        raise InvalidArgument(
            f"{name}={value!r} is neither a number of seconds nor a time like '90s'"
        )
    return float(value)


def stop_signals(who: str, signals: Iterable[int]) -> tuple[signal.Signals, ...]:
    try:
        chosen = tuple(signal.Signals(number) for number in signals)
    except (TypeError, ValueError):
        raise InvalidArgument(
            f"{who}: stop_signals={signals!r} is not a list of signals, such as [signal.SIGTERM]"
        ) from None
    for number in chosen:
        if number in (signal.SIGKILL, signal.SIGSTOP, signal.SIGINT):
            raise InvalidArgument(f"{who}: stop_signals: {number.name} cannot be one of them")
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
    for user, grace in list(_told.items()):
        try:
            user.notice_stop(grace)
        except HoldfastError:
            pass  # it was closed a moment ago
    before: Callable[[int, FrameType | None], Any] | int | None = _handlers.get(number)
    if callable(before):
        before(number, frame)
