"""Failures of a save that no later save can overcome. Where a process has neither restored nor saved
anything, the save raises them: a run that can never save must not go on for days and only log it.

    handle.wait_for_slot()  # ckptd has taken the save, or has refused it
    if not shared.has_a_step and never_heals(handle.error):
        raise handle.error
"""

from __future__ import annotations

from holdfast._errors import HoldfastError, InvalidArgumentError, SupersededError, TopologyError

_FINAL = (InvalidArgumentError, SupersededError, TopologyError)
_FINAL_REASONS = ("NOT_RESTORED", "OTHER_OWNER", "TOO_LARGE", "NO_DRIVER")


def never_heals(error: HoldfastError) -> bool:
    """Whether each later save of this process fails for the same reason, until somebody changes
    something.
    """
    return isinstance(error, _FINAL) or error.reason in _FINAL_REASONS
