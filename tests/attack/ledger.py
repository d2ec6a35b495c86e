"""What a job was promised, and what may be gone of it: the judge of the campaign.

It hears only answers that ranks got, and what was done to the node. It knows nothing of the product's code.
"""

from __future__ import annotations

from dataclasses import dataclass, field

Step = tuple[int, int]  # (attempt, step): it orders the steps of one line of descent

TIERS = ("nvme", "remote")


class Fault(AssertionError):
    """The product broke a promise."""


@dataclass
class Ledger:
    """Steps are on a line of descent: of each attempt it is known which step it went on from."""

    parents: dict[int, Step | None] = field(default_factory=dict)
    newest: int = 0  # the newest attempt that is known to have restored
    in_memory: set[Step] = field(default_factory=set)
    durable: dict[str, set[Step]] = field(default_factory=lambda: {tier: set() for tier in TIERS})
    forgotten: set[int] = field(
        default_factory=set
    )  # attempts that left no trace: numbers may come again

    def committed(self, step: Step) -> None:
        self.in_memory.add(step)

    def whole_in(self, tier: str, step: Step) -> None:
        self.in_memory.add(step)
        self.durable[tier].add(step)

    def memory_lost(self) -> None:
        self.in_memory.clear()

    def all_but_files_lost(self) -> None:
        """Memory and state directory. What an attempt has in no tier, nobody can know."""
        self.memory_lost()
        known = max((step[0] for steps in self.durable.values() for step in steps), default=0)
        self.forgotten = {attempt for attempt in self.parents if attempt > known}

    def is_on_line(self, where: Step, attempt: int | None = None) -> bool:
        at = self.newest if attempt is None else attempt
        last: int | None = None
        while True:
            if where[0] == at:
                return last is None or where[1] <= last
            parent = self.parents.get(at)
            if parent is None:
                return False
            at, last = parent

    def promised(self) -> Step | None:
        """The newest step that must still be there."""
        every = self.in_memory.union(*self.durable.values())
        return max((step for step in every if self.is_on_line(step)), default=None)

    def promised_durably(self) -> Step | None:
        every = set[Step]().union(*self.durable.values())
        return max((step for step in every if self.is_on_line(step)), default=None)

    def restored(self, attempt: int, source: Step | None) -> None:
        """An attempt has restored this step; None: it was told that nothing was saved."""
        promised = self.promised()
        if source is None:
            if promised is not None:
                raise Fault(f"attempt {attempt}: 'nothing was saved', but {promised} was promised")
        elif not self.is_on_line(source):
            raise Fault(f"attempt {attempt}: {source} is not on the line of attempt {self.newest}")
        elif promised is not None and source < promised:
            raise Fault(f"attempt {attempt}: {source} was restored, but {promised} was promised")
        self._begins(attempt, source)

    def started_over(self, attempt: int) -> None:
        """By a person's order: the old line is a branch that was left, whose durable steps stay."""
        self.in_memory.clear()
        self._begins(attempt, None)

    def _begins(self, attempt: int, source: Step | None) -> None:
        known = self.parents.get(attempt, source)
        if known != source and attempt not in self.forgotten:
            raise Fault(f"attempt {attempt}: ranks restored both {known} and {source}")
        if attempt < self.newest and self.newest not in self.forgotten:
            raise Fault(f"attempt {attempt} has restored after attempt {self.newest}")
        self.forgotten.discard(attempt)
        self.parents[attempt] = source
        self.newest = attempt

    def missing(self, tier: str, whole: set[Step]) -> set[Step]:
        """What was promised there and is not."""
        return self.durable[tier] - whole

    def judge_missing(
        self,
        tier: str,
        missing: set[Step],
        whole: set[Step],
        keep: int,
        attempt: int | None = None,
    ) -> None:
        """`whole`: what was whole there at any time since; `keep`: the least `keep_last` since the last time.

        `attempt`: whose line was the job's until now, if another has just begun.
        """
        later = sorted(
            step for step in whole | self.durable[tier] if self.is_on_line(step, attempt)
        )
        for step in sorted(missing):
            covering = [other for other in later if other > step]
            if not self.is_on_line(step, attempt):
                raise Fault(f"{tier}: {step}, of a branch that was left, is gone")
            if len(covering) < keep:
                raise Fault(
                    f"{tier}: {step} is gone, keep_last is {keep}, and later are only {covering}"
                )
        self.durable[tier] -= missing  # what was covered once may go
