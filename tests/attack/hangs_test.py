"""A ckptd that does not answer: one that stands still, and one that was killed and cannot end, as a call of a file system
does not return (hostile_fs.py). Ranks are training loops in Python (looping_rank.py), with the settings that users have.

Judged as every campaign is, and: a loop goes on while nobody answers it, its saves are committed again once somebody
does, and no other ckptd takes the place of one that only stands still.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import random
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Iterator

import pytest
from campaign import EXIT_S, RECOVERY_S, Campaign, Job, play, play_long
from hostile_fs import HostileFs, hangs, own_mounts, why_impossible
from ledger import TIERS, Fault
from ranks import Hung, LoopingRank, where_it_waits

_SHORT_ROUNDS = 6
_LONG_ROUNDS = 200
_LOOP_STEPS = 60
# A second once, and much for a slow machine; a second for each save would be three times as much.
_LOOP_S = 20
_HANG_S = 60  # until a call of ckptd hangs, while saves go on


class LoopingJob(Job):
    rank_kind = LoopingRank

    def begin_loop(self) -> None:
        """Many steps in a row, each of which is saved; whatever becomes of the saves, the loop goes on."""
        command = f"loop {_LOOP_STEPS} {self.step + 1}"
        self.step += _LOOP_STEPS
        for rank in self.ranks:
            rank.tell(command)

    def end_loop(self, within_s: float = _LOOP_S) -> None:
        for rank in self.ranks:
            answer = rank.answer(within_s)
            if not answer.startswith("ok "):
                raise Fault(f"rank {rank.rank} of {self.name}: a loop ended with '{answer}'")
        self.campaign.done["loops that went on"] += 1

    def recovers(self) -> None:
        """Saves of the same ranks are committed again."""
        until = time.monotonic() + RECOVERY_S
        while not self.save(()):
            if not all(self.answers):
                raise Fault(f"a rank of {self.name} ended by itself")
            if time.monotonic() > until:
                raise Hung(f"{self.name}: no save within {RECOVERY_S} s: {self.answers}")
            time.sleep(0.05)  # as a loop does that has something to compute

    def comes_to(self, tier: str) -> None:
        until = time.monotonic() + RECOVERY_S
        while not self.save((tier,)) or self.answers != [f"ok {tier}"] * self.world:
            if time.monotonic() > until:
                raise Hung(f"{self.name}: nothing in {tier} within {RECOVERY_S} s: {self.answers}")


class Hangs(Campaign):
    """One whose ckptd stands still, for longer than a loop may wait."""

    test = "hangs_test.py -k test_short"

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.looping = [LoopingJob(self, job.name, job.world) for job in self.jobs]
        self.jobs = list(self.looping)
        self.actions = {
            self.loops_while_ckptd_stands_still: 5,
            self.ckptd_stands_still_while_ranks_save: 3,
            self.ckptd_stands_still_while_ranks_restore: 3,
            self.ckptd_stands_still_while_it_starts: 2,
            self.ckptd_stands_still_and_is_killed: 2,
            self.another_ckptd_while_it_stands_still: 2,
        }

    @contextlib.contextmanager
    def _standing_still(self) -> Iterator[None]:
        process = self.daemon.process
        assert process is not None
        process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            process.send_signal(signal.SIGCONT)

    def _stands_still_later(self, draw: random.Random) -> threading.Thread:
        """In a thread: from a moment on that the seed chose, for a time that it chose."""
        process = self.daemon.process
        assert process is not None
        after_s, for_s = draw.random() * 0.3, draw.random() * 2.5

        def stop() -> None:
            time.sleep(after_s)
            process.send_signal(signal.SIGSTOP)
            time.sleep(for_s)
            process.send_signal(signal.SIGCONT)

        thread = threading.Thread(target=stop)
        thread.start()
        return thread

    def loops_while_ckptd_stands_still(self, draw: random.Random) -> None:
        for job in self.looping:
            job.end_work()
        looping = [job for job in self.looping if not job.lost_sight]
        first = draw.random() < 0.5
        if not first:
            for job in looping:
                job.begin_loop()
            time.sleep(draw.random() * 0.05)  # a moment that the seed chose
        with self._standing_still():
            if first:
                for job in looping:
                    job.begin_loop()
            for job in looping:
                job.end_loop()

    def ckptd_stands_still_while_ranks_save(self, draw: random.Random) -> None:
        self._stands_still_later(draw).join()

    def ckptd_stands_still_while_ranks_restore(self, draw: random.Random) -> None:
        for job in self.jobs:
            job.end_work()
            job.launch(draw)
        thread = self._stands_still_later(draw)
        try:
            for job in self.jobs:
                job.resume()
        finally:
            thread.join()

    def ckptd_stands_still_while_it_starts(self, draw: random.Random) -> None:
        self.daemon.kill()
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            ready = pool.submit(self.daemon.start)
            while self.daemon.process is None and not ready.done():
                time.sleep(0.001)
            if self.daemon.process is not None:
                self._stands_still_later(draw).join()
            ready.result()

    def ckptd_stands_still_and_is_killed(self, draw: random.Random) -> None:
        assert self.daemon.process is not None
        self.daemon.process.send_signal(signal.SIGSTOP)
        time.sleep(draw.random())
        self.ckptd_killed(draw)

    def another_ckptd_while_it_stands_still(self, draw: random.Random) -> None:
        """It is not let in: the first one has all that it had."""
        with self._standing_still():
            other = self.daemon.spawn()
            try:
                code = other.wait(1 + draw.random())
            except subprocess.TimeoutExpired:
                other.kill()
                code = other.wait()
            if code == 0:
                raise Fault("another ckptd ran and ended beside one that stands still")

    def play_round(self, draw: random.Random) -> None:
        super().play_round(draw)
        for job in self.looping:
            job.recovers()


def test_short(seed: int, rounds: int | None, capsys: pytest.CaptureFixture[str]) -> None:
    campaign = play(seed, rounds or _SHORT_ROUNDS, Hangs)
    with capsys.disabled():
        print("\n" + campaign.summary())


@pytest.mark.slow
def test_long(seed: int, rounds: int | None, capsys: pytest.CaptureFixture[str]) -> None:
    play_long(seed, rounds or _LONG_ROUNDS, Hangs, capsys)


def test_a_loop_goes_on_while_ckptd_stands_still(seed: int) -> None:
    campaign = Hangs(seed)
    try:
        campaign.start()
        campaign.loops_while_ckptd_stands_still(random.Random(seed))
        for job in campaign.looping:
            job.recovers()
        for job in campaign.looping:
            job.launch(random.Random(seed))
            job.resume()
    finally:
        campaign.close()


def test_the_judge_sees_a_loop_that_is_held(seed: int) -> None:
    campaign = Hangs(seed)
    try:
        campaign.start()
        job = campaign.looping[0]
        job.ranks[0].signal(signal.SIGSTOP)
        job.begin_loop()
        with pytest.raises(Hung, match="rank 0 of alpha: no answer to 'loop"):
            job.end_loop(within_s=0.2)
    finally:
        campaign.close()


# A ckptd that was killed and cannot end.

_WITH_FUSE = pytest.mark.skipif(bool(why_impossible()), reason=why_impossible())


@pytest.fixture(scope="session")
def mounts() -> None:
    own_mounts()


class Zombies(Hangs):
    """A campaign whose ckptd is killed while a call of it hangs, which keeps the process until it is answered."""

    test = "hangs_test.py -k test_zombies_short"
    kept_at_least = 1  # a removal that hung ends later, when keep_last may be larger
    settings = Campaign.settings.replace("4GiB}", "4GiB, stall_timeout_ms: 500}").replace(
        "/remote}", "/remote, stall_timeout_ms: 500}"
    )

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.systems = [
            HostileFs(self.root / name, killable=False) for name in ("d0", "d1", "remote")
        ]
        for system in self.systems:
            system.mount()
        self.zombies: list[subprocess.Popen[bytes]] = []
        self.actions = {
            self.killed_while_a_write_hangs: 3,
            self.killed_while_a_read_hangs: 2,
            self.ckptd_killed: 1,
        }

    def await_hanging(self) -> bool:
        """False: nothing that was to hang was called."""
        until = time.monotonic() + _HANG_S
        while not any(system.is_hanging() for system in self.systems):
            if time.monotonic() > until:
                return False
            time.sleep(0.01)
        return True

    def hang_once(self, call: str) -> None:
        rule = hangs(call, "*/*-a*/*", times=1)
        for system in self.systems:
            system.rules.append(rule)

    def kill_for_good(self) -> bool:
        """Whether ckptd is there all the same."""
        process = self.daemon.process
        assert process is not None
        process.kill()
        try:
            process.wait(0.5)
            return False
        except subprocess.TimeoutExpired:
            self.zombies.append(process)
            return True
        finally:
            self.daemon.process = None

    def let_zombies_end(self) -> None:
        for system in self.systems:
            system.release()
        for process in self.zombies:
            try:
                process.wait(EXIT_S)
            except subprocess.TimeoutExpired:
                raise Hung(f"a zombie does not end\n{where_it_waits(process.pid)}") from None
        self.zombies = []
        self.await_catalog()

    def await_catalog(self) -> None:
        """A zombie has it. What a tier is said to have meanwhile is noted in memory alone, which a loss of power takes."""
        until = time.monotonic() + EXIT_S
        log = self.root / "log"
        while True:
            text = log.read_text(errors="replace")
            if text.rfind("go on without the catalog") <= text.rfind(
                "the catalog is written again"
            ):
                return
            if time.monotonic() > until:
                raise Hung("the catalog is not written again")
            time.sleep(0.05)

    def _next_one_starts(self, what: str) -> None:
        """Beside the last one, if that cannot end."""
        is_zombie = self.kill_for_good()
        self.done[f"zombies: {what}" if is_zombie else "zombies that ended at once"] += 1
        self.daemon.start()

    def killed_while_a_write_hangs(self, draw: random.Random) -> None:
        self.hang_once(draw.choice(["write", "fsync"]))
        if not self.await_hanging():
            return self.let_zombies_end()
        self._next_one_starts("while a write hung")
        for job in self.looping:
            job.end_work()
        if draw.random() < 0.5:
            for job in self.looping:
                job.launch(draw)
                job.resume()
        # Nobody waits for the call: neither new ranks nor those that lost their ckptd.
        for job in self.looping:
            if not job.lost_sight:
                job.recovers()
        self.let_zombies_end()

    def killed_while_a_read_hangs(self, draw: random.Random) -> None:
        """What is read into memory comes late, when another one may have that memory."""
        for job in self.jobs:
            job.end_work()
        if not any(job.ledger.promised_durably() for job in self.jobs):
            return
        self.lose_power()
        self.hang_once("read")
        self.daemon.start()
        for job in self.looping:
            job.launch(draw)
            for command in ("open", "restore"):
                for rank in job.ranks:
                    rank.tell(command)
        if self.await_hanging():
            self._next_one_starts("while a read hung")
            time.sleep(draw.random())
        for job in self.looping:
            job.kill_all()
        self.let_zombies_end()

    def close(self, *, keep: bool = False) -> None:
        for system in self.systems:
            system.release()
        self.end_processes()
        for system in self.systems:
            if keep:
                shutil.copytree(system.directory, f"{system.directory}.kept")
            system.unmount()
        for process in self.zombies:
            process.wait(EXIT_S)
        super().close(keep=keep)


@_WITH_FUSE
def test_zombies_short(
    mounts: None, seed: int, rounds: int | None, capsys: pytest.CaptureFixture[str]
) -> None:
    campaign = play(seed, rounds or 3, Zombies)
    with capsys.disabled():
        print("\n" + campaign.summary())


@_WITH_FUSE
@pytest.mark.slow
def test_zombies_long(
    mounts: None, seed: int, rounds: int | None, capsys: pytest.CaptureFixture[str]
) -> None:
    play_long(seed, rounds or _LONG_ROUNDS, Zombies, capsys)


@_WITH_FUSE
def test_a_ckptd_that_cannot_end_is_no_reason_to_wait(mounts: None, seed: int) -> None:
    campaign = Zombies(seed)
    try:
        campaign.start()
        for job in campaign.looping:
            job.recovers()
        campaign.hang_once("write")
        for job in campaign.looping:
            job.begin_work(random.Random(seed))
        assert campaign.await_hanging(), "no call hangs"
        is_zombie = campaign.kill_for_good()
        campaign.daemon.start()
        for job in campaign.looping:
            job.end_work()
        if not is_zombie:
            pytest.skip("a process whose call hangs ends here when it is killed")
        for job in campaign.looping:
            job.launch_with(dict.fromkeys(TIERS, 1), dict.fromkeys(TIERS, 3))
            job.resume()
            job.recovers()
        assert campaign.zombies[0].poll() is None
        campaign.let_zombies_end()
        for job in campaign.looping:
            for tier in TIERS:
                job.comes_to(tier)
    finally:
        campaign.close()
