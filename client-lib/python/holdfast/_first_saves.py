"""Failures of a save that no later save can overcome. Where a process has neither restored nor saved
anything, the save raises them: a run that can never save must not go on for days and only log it.

    handle.wait_for_slot()  # ckptd has taken the save, or has refused it
    if not shared.has_a_step and never_heals(handle.error):
        raise handle.error
"""

from __future__ import annotations

from holdfast._errors import (
    HoldfastError,
    InternalError,
    InvalidArgumentError,
    NoRoomError,
    RefusedError,
    SupersededError,
    TopologyError,
)

_FINAL = (InvalidArgumentError, SupersededError, TopologyError)
# Of the refusals (server/coordinator_saves.cc): a restore that was forgotten, another user's job. Others heal: a restore that is
# under way, a rank whose last process is still ending.
_REFUSED_FOR_GOOD = ("has not restored anything", "belongs to uid")
# ckptd says NO_ROOM, too, of a state that would not fit if all its memory was free
# (Agent::OnBeginSave).
_NEVER_FITS = "more than all of its user's slots on this node may hold"
# The library has no code of its own for a driver that cannot be loaded or started
# (client-lib/src/cuda_driver.cc).
_DRIVER = "the CUDA driver"


def never_heals(error: HoldfastError) -> bool:
    """Whether each later save of this process fails for the same reason, until somebody changes
    something: a restore that was forgotten, another user's job, a state larger than all slots can
    be, a GPU without a driver.
    """
    if isinstance(error, RefusedError):
        return any(text in str(error) for text in _REFUSED_FOR_GOOD)
    if isinstance(error, NoRoomError):
        return _NEVER_FITS in str(error)
    if isinstance(error, InternalError):
        return _DRIVER in str(error)
    return isinstance(error, _FINAL)
