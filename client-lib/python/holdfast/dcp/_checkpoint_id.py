"""DCP's `checkpoint_id`. Frameworks pass it to every storage: a path that ends in the step."""

from __future__ import annotations

import os
import re


def names_step(checkpoint_id: str | os.PathLike[str], step: int) -> bool:
    """Whether the last number in the last part of the path is this step.

    >>> names_step("outputs/checkpoint/step-100", 100), names_step("outputs/100/model", 100)
    (True, False)
    """
    name = str(os.fspath(checkpoint_id)).rstrip("/").rpartition("/")[2]
    numbers = re.findall("[0-9]+", name)
    return bool(numbers) and int(numbers[-1]) == step
