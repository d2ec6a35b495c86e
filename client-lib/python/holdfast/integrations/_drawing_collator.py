"""A collator that draws random numbers (the masks of masked language modeling), and draws the same ones after a restart.

A Trainer has fetched batches ahead when a step is saved. After a restart it fetches them again, and the generators hold something
else by then. So what they held before each of those batches is saved, and set again.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Sequence
from typing import Any

import torch

from holdfast.integrations import _random


class DrawingCollator:
    """Around the collator of the training data, in the process that trains.

    collator = DrawingCollator(inner, devices=[])
    collator.trained()              # the oldest batch is done with
    draws = collator.draws()        # of the batches that are not: what the generators held before each
    collator.draw_again(draws)      # after a restart, before the first batch is fetched
    """

    def __init__(self, collate: Callable[[Any], Any], devices: Sequence[torch.device]) -> None:
        self._collate = collate
        self._devices = devices
        self._draws_numbers = False
        self._before: collections.deque[dict[str, Any]] = collections.deque()
        self._again: collections.deque[dict[str, Any]] = collections.deque()

    def __call__(self, samples: Any) -> Any:
        if self._again:
            _random.set_to(self._again.popleft(), self._devices)
        before = _random.captured(self._devices)
        self._before.append(before)
        batch = self._collate(samples)
        if not self._draws_numbers:
            self._draws_numbers = not _random.same(before, _random.captured(self._devices))
        return batch

    def begin_epoch(self) -> None:
        self._before.clear()

    def trained(self) -> None:
        if self._before:
            self._before.popleft()

    def draws(self) -> list[dict[str, Any]]:
        """Nothing for a collator that draws none."""
        return list(self._before) if self._draws_numbers else []

    def draw_again(self, draws: Sequence[dict[str, Any]]) -> None:
        self._again = collections.deque(draws)
        self._draws_numbers = bool(draws)
