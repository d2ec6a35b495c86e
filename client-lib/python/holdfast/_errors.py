"""What can go wrong, as exceptions. Each carries the daemon's or the library's own words: operation, thing, cause, way out.

try:
    start = ckpt.restore(state)
except holdfast.CorruptError as error:
    print(error.code, error)      # CORRUPT restore: attempt 3 step 1200 …
"""

from __future__ import annotations


class HoldfastError(Exception):
    """The root of all errors of this package. `code` is the name that the C++ library gives it.

    `reason` tells apart causes that share a code: NOT_RESTORED, OTHER_OWNER, TOO_LARGE, NO_DRIVER, NOT_YET, COPYING, or "".
    """

    code = "INTERNAL"
    reason = ""


class InvalidArgumentError(HoldfastError, ValueError):
    """What was asked for makes no sense; nothing was touched."""

    code = "INVALID_ARGUMENT"


class NothingToRestoreError(HoldfastError):
    """The job has never committed anything on this line of descent: start from scratch."""

    code = "NOTHING_TO_RESTORE"


class UnreadableError(HoldfastError):
    """There are checkpoints, but none can be read now. Never start from scratch because of it."""

    code = "UNREADABLE"


class CorruptError(HoldfastError):
    """Bytes contradict their digests."""

    code = "CORRUPT"


class SupersededError(HoldfastError):
    """A newer attempt of this job is running: end this process."""

    code = "SUPERSEDED"


class StepLostError(HoldfastError):
    """This step will never be a checkpoint. Later ones may."""


class ShedError(StepLostError):
    """The step was given up to make room for a newer one."""

    code = "SHED"


class AbandonedError(StepLostError):
    """The step can never become complete: a rank died, skipped it, or failed to save it."""

    code = "ABANDONED"


class NoRoomError(HoldfastError):
    """No slot for this save, or it is larger than the budget."""

    code = "NO_ROOM"


class RefusedError(HoldfastError):
    """Not allowed: another user's job, a rank that lives elsewhere, a wrong order of calls, an object that would have to be pickled."""

    code = "REFUSED"


class TopologyError(HoldfastError):
    """Ranks or world sizes contradict each other."""

    code = "TOPOLOGY"


class UnavailableError(HoldfastError):
    """The daemon cannot be reached, or went away during the call."""

    code = "UNAVAILABLE"


class DeadlineExceededError(HoldfastError, TimeoutError):
    """Not so by the deadline that was given."""

    code = "DEADLINE_EXCEEDED"


class ForkedError(HoldfastError):
    """This process was forked from the one that opened the job; it has no part in it."""

    code = "FORKED"


class NotFoundError(HoldfastError, LookupError):
    """There is no such step, rank, tensor or job."""

    code = "NOT_FOUND"


class InternalError(HoldfastError):
    """A fault of Holdfast itself, or a contradiction that nobody foresaw."""

    code = "INTERNAL"


_BY_CODE: dict[str, type[HoldfastError]] = {
    kind.code: kind
    for kind in (
        InvalidArgumentError,
        NothingToRestoreError,
        UnreadableError,
        CorruptError,
        SupersededError,
        ShedError,
        AbandonedError,
        NoRoomError,
        RefusedError,
        TopologyError,
        UnavailableError,
        DeadlineExceededError,
        ForkedError,
        NotFoundError,
        InternalError,
    )
}


def error_of(code: str, message: str, reason: str) -> HoldfastError:
    """The exception for a status of the C++ library; the extension module raises it."""
    error = _BY_CODE.get(code, InternalError)(message)
    error.reason = reason
    return error


def not_in_shard(message: str) -> InvalidArgumentError:
    """This rank's own shard does not have what it wants, or not as it wants it; other ranks' may: the extension module has them
    looked at before this is raised."""
    error = InvalidArgumentError(message)
    error.may_be_elsewhere = True  # type: ignore[attr-defined]
    return error
