"""Many short jobs of several users in a memory of few slots: who has to get room, and whose steps have to stay.

Some jobs end in order, some are killed, some live on, and every now and then one that has ended is started again. The
judge is Room: it knows who lives, how each of the others ended, and how many slots they may have; not what ckptd does.
"""

from __future__ import annotations

import concurrent.futures
import random
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from campaign import RECOVERY_S, Campaign, Job
from ledger import Fault
from ranks import Hung, Rank

USERS = (1001, 1002, 1003)
SLOTS_OF_A_RANK = 2  # memory.slots_per_rank: one is written while the other has the newest step
_SLOT_MIB = 2
_DRAIN_S = 45  # kDrainIsAwaited of recovery/eviction.h, and what a slow machine takes


@dataclass(eq=False)
class Tenant:
    """A job, as far as it takes room."""

    user: int
    world: int
    ended: int | None = None  # by a clock that counts what happened; None: it lives
    left: bool = False  # it ended in order
    unsure: bool = False  # how it ended may be forgotten, as ckptd was started again since
    may_go: bool = False  # its newest step, where memory alone has it

    def slots(self) -> int:
        """At most, but for steps that a newer one covers."""
        return self.world * (SLOTS_OF_A_RANK if self.ended is None else 1)


@dataclass
class Room:
    """These users share the memory, and each has so many slots for sure. All jobs are younger than ten minutes."""

    users: Sequence[int]
    share: int
    limit: int = 0  # memory.bytes_per_uid_max, in slots; 0: none
    tenants: list[Tenant] = field(default_factory=list)

    @property
    def budget(self) -> int:
        return self.share * len(self.users)

    def living_slots(self, user: int) -> int:
        return sum(t.slots() for t in self.tenants if t.user == user and t.ended is None)

    def must_save(self, user: int) -> bool:
        """Whether every save of this user's living jobs gets room: they fit into its share, and the others have left it that.

        Beyond its user's share a job that ended in order gives way to others; one that died does not, for ten minutes.
        """
        own = self.living_slots(user)
        others = sum(max(self._firm_slots(v), self.share) for v in self.users if v != user)
        return own <= min(self.share, self.limit or self.share) and own + others <= self.budget

    def _firm_slots(self, user: int) -> int:
        return sum(
            t.slots()
            for t in self.tenants
            if t.user == user and (t.ended is None or not t.left or t.unsure)
        )

    def all_save(self) -> None:
        """All that live are about to save: notes whose newest step may go for that."""
        full = self._most_slots(self.users) > self.budget
        savers = {t.user for t in self.tenants if t.ended is None}
        for tenant in self.tenants:
            if tenant.ended is None:
                continue
            own_full = 0 < self.limit < self._most_slots([tenant.user])
            for_own = tenant.user in savers and (full or own_full)
            for_others = bool(savers - {tenant.user}) and full and self._beyond_share(tenant)
            tenant.may_go = tenant.may_go or for_own or for_others

    def _most_slots(self, users: Sequence[int]) -> int:
        return sum(t.world * SLOTS_OF_A_RANK for t in self.tenants if t.user in users)

    def _beyond_share(self, tenant: Tenant) -> bool:
        """Whether its user has too much, even when all that goes before it is gone: what ended before it, in order."""
        if not tenant.left and not tenant.unsure:
            return False
        assert tenant.ended is not None
        stay = [
            t
            for t in self.tenants
            if t.user == tenant.user
            and (t.ended is None or not t.left or t.ended >= tenant.ended or tenant.unsure)
        ]
        return sum(t.slots() for t in stay) > self.share


class Run(Job):
    """A job of one user, from its first rank until nobody knows it any more."""

    def __init__(self, campaign: Starvation, name: str, tenant: Tenant) -> None:
        super().__init__(campaign, name, tenant.world, tenant.user)
        self.tenant = tenant

    def launch(self, draw: random.Random) -> None:
        self.kill_all()
        self.ranks = [self._rank(rank) for rank in range(self.world)]


class Starvation(Campaign):
    """Without `room` the seed says how large the memory is, and whether there are drives."""

    test = "starvation_test.py -k test_short"

    def __init__(self, seed: int, room: Room | None = None, keep_ended: str = "24h") -> None:
        self.drives = False
        if room is None:
            draw = random.Random(f"{seed} room")
            room = Room(USERS[: draw.choice([2, 3])], draw.choice([4, 6]))
            room.limit = draw.choice([0, 0, room.share + 2])
            self.drives = draw.random() < 0.4
        self.room = room
        # (A MiB beside the slots, for what else is counted: records.)
        self.memory_bytes = f"{room.budget * _SLOT_MIB + 1}MiB"
        memory = f"slots_per_rank: {SLOTS_OF_A_RANK}, keep_ended_ms: {keep_ended}"
        if room.limit:
            memory += f", bytes_per_uid_max: {room.limit * _SLOT_MIB + 1}MiB"
        self.settings = f"memory: {{{memory}}}\n"
        if self.drives:
            self.settings += (
                "nvme: {dirs: [ROOT/d0, ROOT/d1], bytes_max: 4GiB}\n"
                "policy: {nvme: {every_steps: 1, keep_last: 3}}\n"
            )
        super().__init__(seed)
        self.root.chmod(0o755)
        self.runs: list[Run] = []
        self.jobs = []
        self._clock = 0
        self._names = 0
        self._killed = False  # somebody, since all saved the last time
        self.actions: dict[Callable[[random.Random], None], int] = {
            self.a_run_starts: 10,
            self.a_run_ends_in_order: 3,
            self.a_run_is_killed: 3,
            self.a_run_is_killed_while_it_saves: 2,
            self.an_ended_run_goes_on: 4,
            self.a_living_run_restores_again: 2,
            self.an_ended_run_is_removed: 1,
            self.ckptd_killed_between_saves: 1,
            self.nothing: 1,
        }

    # Runs, one by one.

    def living(self) -> list[Run]:
        return [run for run in self.runs if run.tenant.ended is None]

    def ended(self) -> list[Run]:
        return [run for run in self.runs if run.tenant.ended is not None]

    def start_run(self, user: int, world: int) -> Run:
        self._names += 1
        run = Run(self, f"run{self._names}", Tenant(user, world))
        self.runs.append(run)
        self.jobs.append(run)
        self.room.tenants.append(run.tenant)
        run.launch(random.Random())
        run.resume()
        return run

    def end_run(self, run: Run, *, left: bool) -> None:
        if left:
            answers = [rank.answer() for rank in _told(run, "close")]
            if any(not answer.startswith("ok") for answer in answers):
                raise Fault(f"{run.name} cannot leave: {answers}")
        else:
            self._killed = True
        run.kill_all()
        self._clock += 1
        run.tenant.ended = self._clock
        run.tenant.left = left
        run.tenant.unsure = run.tenant.may_go = False

    def go_on(self, run: Run) -> None:
        """A run that has ended is started again, and restores; judged by its ledger."""
        if run.tenant.may_go:
            run.ledger.memory_lost()
            self.done["started again: its step might have gone"] += 1
        else:
            self.done["started again: its step had to be there"] += 1
        run.tenant.ended, run.tenant.may_go = None, False
        if self.drives:
            self.room.all_save()  # what is brought into memory takes room, as a save does
        run.launch(random.Random())
        run.resume()

    def forget_run(self, run: Run) -> None:
        self.ctl("rm", run.name, "--yes")
        self.runs.remove(run)
        self.jobs.remove(run)
        self.room.tenants.remove(run.tenant)

    def _fits(self, user: int, world: int) -> bool:
        more = world * SLOTS_OF_A_RANK
        return self.room.living_slots(user) + more <= self.room.share

    def _can_go_on(self, run: Run) -> bool:
        """(What is in memory needs no more room to be restored; what the drives alone have does.)"""
        ended, run.tenant.ended = run.tenant.ended, None
        must = self.room.must_save(run.tenant.user)
        run.tenant.ended = ended
        return must

    # What happens.

    def a_run_starts(self, draw: random.Random) -> None:
        user, world = draw.choice(self.room.users), draw.choice([1, 1, 2])
        greedy = draw.random() < 0.15
        own = [run for run in self.living() if run.tenant.user == user]
        draw.shuffle(own)
        while own and not greedy and not self._fits(user, world):
            self.end_run(own.pop(), left=draw.random() < 0.5)
        self.start_run(user, world)

    def _one_of(self, runs: list[Run], draw: random.Random) -> list[Run]:
        return [draw.choice(runs)] if runs else []

    def a_run_ends_in_order(self, draw: random.Random) -> None:
        for run in self._one_of(self.living(), draw):
            self.end_run(run, left=True)

    def a_run_is_killed(self, draw: random.Random) -> None:
        for run in self._one_of(self.living(), draw):
            self.end_run(run, left=False)

    def a_run_is_killed_while_it_saves(self, draw: random.Random) -> None:
        for run in self._one_of(self.living(), draw):
            self.room.all_save()
            run.step += 1
            _told(run, f"save {run.step}")
            time.sleep(draw.random() * 0.02)  # a moment that the seed chose
            self.end_run(run, left=False)

    def an_ended_run_goes_on(self, draw: random.Random) -> None:
        for run in self._one_of([run for run in self.ended() if self._can_go_on(run)], draw):
            self.go_on(run)

    def a_living_run_restores_again(self, draw: random.Random) -> None:
        for run in self._one_of(self.living(), draw):
            run.resume()

    def an_ended_run_is_removed(self, draw: random.Random) -> None:
        for run in self._one_of(self.ended(), draw):
            self.forget_run(run)

    def ckptd_killed_between_saves(self, draw: random.Random) -> None:
        self.daemon.kill()
        self.daemon.start()
        for run in self.ended():
            run.tenant.unsure = True
        self.room.all_save()
        for run in self.living():
            self._save_again(run)

    def _save_again(self, run: Run) -> None:
        """A daemon that dies may cost a save."""
        until = time.monotonic() + RECOVERY_S
        while not run.save(()) and self.room.must_save(run.tenant.user):
            if time.monotonic() > until:
                raise Hung(f"{run.name}: nothing saved within {RECOVERY_S} s: {run.answers}")

    # Rounds.

    def run(self, rounds: int) -> None:
        super().run(rounds)
        self.what = "the end"
        self.roll_call(random.Random(f"{self.seed} end"))

    def play_round(self, draw: random.Random) -> None:
        for user in self.room.users:
            own = [run for run in self.living() if run.tenant.user == user]
            if self.room.living_slots(user) > self.room.share and draw.random() < 0.5:
                self.end_run(draw.choice(own), left=draw.random() < 0.5)
        action = draw.choices(list(self.actions), list(self.actions.values()))[0]
        self.what = action.__name__
        self.done[f"action: {self.what}"] += 1
        action(draw)
        self.save_all(self.living(), draw.randint(1, 3))
        self._nobody_speaks_of_damage()

    def save_all(self, runs: Iterable[Run], steps: int) -> None:
        """Side by side. Whoever has to get room gets it."""
        saving = list(runs)
        if not saving:
            return
        self.room.all_save()
        must = {run: self.room.must_save(run.tenant.user) for run in saving}
        killed, self._killed = self._killed, False
        with concurrent.futures.ThreadPoolExecutor(len(saving)) as pool:
            futures = [pool.submit(self._saves, run, steps, must[run], killed) for run in saving]
            for future in futures:
                future.result()

    def _saves(self, run: Run, steps: int, must: bool, killed: bool) -> None:
        tiers = ["nvme"] if self.drives and run.step % 2 else []
        for _ in range(steps):
            if run.save(tiers):
                continue
            if not all(run.answers):
                raise Fault(f"a rank of {run.name} ended by itself")
            if not must:
                return
            refused = run.answers
            if killed:  # a moment ago: then ckptd may not have noticed yet
                self.ctl("status")
            # The last step of an ended run is let finish on its way to a drive, for 30 s at most.
            until = time.monotonic() + (_DRAIN_S if self.drives else 0)
            saved = killed and run.save(tiers)
            while not saved and time.monotonic() < until:
                time.sleep(0.1)
                saved = run.save(tiers)
            if saved:
                continue
            raise Fault(
                f"{run.name} of user {run.user} fits into its share of {self.room.share} slots, but: {refused}"
            )

    def roll_call(self, draw: random.Random) -> None:
        """All runs end, and each is started again for a moment."""
        for run in self.living():
            self.end_run(run, left=draw.random() < 0.5)
        for run in draw.sample(self.runs, len(self.runs)):
            if not self.drives or self._can_go_on(run):
                self.go_on(run)
                self.end_run(run, left=True)

    def summary(self) -> str:
        room = self.room
        return (
            f"{super().summary()}\n  {len(room.users)} users of {room.share} slots each, "
            f"{'with' if self.drives else 'without'} drives: {self.settings.splitlines()[0]}"
        )


def _told(run: Run, command: str) -> list[Rank]:
    for rank in run.ranks:
        rank.tell(command)
    return run.ranks
