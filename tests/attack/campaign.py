"""Kills, stops and losses of power at random moments of the work of one node, judged by what was acknowledged.

One ckptd with two drives and a remote directory, and one or two jobs of two or three ranks that save under changing
policies. Each round something happens to ckptd, to ranks or to the node; then the jobs go on, mostly by a restore. A
restored step is checked bit for bit by the ranks, and against the job's ledger (ledger.py); so is what lies in the
tiers, as files.

A seed decides what happens, when, and to whom. What the processes make of it depends on their speed, so the same seed
need not take the same path twice; a fault that a seed shows is mostly found again within a few tries.
"""

from __future__ import annotations

import collections
import json
import os
import random
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Sequence

import pytest
from ledger import TIERS, Fault, Ledger, Step
from ranks import ANSWER_S, Hung, Rank, ask_all, where_it_waits

from daemons import BIN, Daemon, own_folders

_BYTES = 200_000  # of one rank's state: several digest blocks
_KEEP_LAST_MAX = 3
_SETTINGS = f"""\
nvme: {{dirs: [ROOT/d0, ROOT/d1], bytes_max: 4GiB}}
remote: {{dir: ROOT/remote}}
policy:
  nvme: {{every_steps: 1, keep_last: {_KEEP_LAST_MAX}}}
  remote: {{every_steps: 1, every_ms: 0, keep_last: {_KEEP_LAST_MAX}}}
"""
# Nothing here damages a byte, and no client misbehaves: whoever says so is wrong.
_NEVER = {"copy_bad", "slot_lost", "protocol_error", "copy_unmended"}
RECOVERY_S = 120  # from the end of what happened until all ranks have restored
EXIT_S = 60
_ROUNDS_OF_A_NODE = 100  # then a new one, with other jobs
_TIER_MS = 5000  # that long a job waits for a tier, which may hang; then it goes on
_FAILURES_MAX = 3  # steps in a row that fail before a job is started again


class Job:
    """Its ranks, what they were promised, and the work that they do in a thread while things happen."""

    rank_kind = Rank

    def __init__(self, campaign: Campaign, name: str, world: int, user: int | None = None) -> None:
        self.campaign = campaign
        self.name = name
        self.world = world
        self.user = user  # uid; None: ours
        self.ledger = Ledger()
        self.ranks: list[Rank] = []
        self.answers: list[str] = []  # to the last that they were told while they worked
        self.attempt = 0
        self.step = 0
        # The least since the last audit but one: what an older policy let go may go a moment after an audit.
        self.keep_last = dict.fromkeys(TIERS, _KEEP_LAST_MAX)
        self._least = self.keep_last  # since the last audit
        self._keep = self.keep_last
        self._policy = ""
        self.lost_sight = True  # ranks are missing, or could not go on
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._fault: BaseException | None = None

    # Starting and restoring.

    def launch(self, draw: random.Random) -> None:
        """All ranks anew, as a launcher does, with a policy of their own."""
        keep = {tier: draw.randint(1, _KEEP_LAST_MAX) for tier in TIERS}
        every = {tier: draw.choice([1, 1, 1, 2, 3]) for tier in TIERS}
        self.launch_with(every, keep)

    def launch_with(self, every: dict[str, int], keep: dict[str, int]) -> None:
        self.kill_all()
        self.keep_last = {tier: min(keep[tier], self.keep_last[tier]) for tier in TIERS}
        self._least = {tier: min(keep[tier], self._least[tier]) for tier in TIERS}
        self._keep = keep
        self._policy = " ".join(
            f"{tier}.every_steps={every[tier]} {tier}.keep_last={keep[tier]}" for tier in TIERS
        )
        self.ranks = [self._rank(rank) for rank in range(self.world)]

    def _rank(self, rank: int) -> Rank:
        socket = self.campaign.daemon.socket
        return self.rank_kind(socket, self.name, rank, self.world, _BYTES, self._policy, self.user)

    def replace_dead(self) -> None:
        for index, rank in enumerate(self.ranks):
            if not rank.is_alive():
                rank.close()
                self.ranks[index] = self._rank(index)

    def kill_all(self) -> None:
        for rank in self.ranks:
            rank.close()
        self.ranks = []
        self.lost_sight = True

    def resume(self) -> None:
        """Until all ranks have restored one step; judged."""
        until = time.monotonic() + RECOVERY_S
        said: collections.Counter[str] = collections.Counter()
        while True:
            if self._tried(said):
                self.lost_sight = False
                self.campaign.done["restores"] += 1
                return
            self.campaign.done["restores tried again"] += 1
            if time.monotonic() > until:
                raise Hung(f"{self.name}: not restored within {RECOVERY_S} s: {dict(said)}")

    def _tried(self, said: collections.Counter[str]) -> bool:
        opened = self._ask("open", said)
        if not all(answer.startswith("ok attempt=") for answer in opened) or len(set(opened)) != 1:
            return False
        self.attempt = int(opened[0].split("=")[1])
        restored = self._ask("restore", said)
        sources: set[Step | None] = {
            _source(answer)
            for answer in restored
            if answer.startswith(("ok ", "error NOTHING_TO_RESTORE"))
        }
        if len(sources) > 1:
            raise Fault(f"attempt {self.attempt}: ranks restored different steps: {restored}")
        for source in sources:
            self.ledger.restored(self.attempt, source)
            self.step = source[1] if source else 0
        if any("UNREADABLE" in answer for answer in restored):
            if (promised := self.ledger.promised()) is not None:
                raise Fault(f"attempt {self.attempt}: {promised} was promised: {restored}")
            self.campaign.ctl("restore", self.name, "--from-scratch", "--yes")
            self.campaign.done["starts over after a loss of memory"] += 1
        return all(answer.startswith(("ok ", "error NOTHING_TO_RESTORE")) for answer in restored)

    def _ask(self, command: str, said: collections.Counter[str]) -> list[str]:
        answers = ask_all(self.ranks, command)
        for rank, answer in enumerate(answers):
            if not answer:
                raise Fault(f"rank {rank} of {self.name} ended by itself when told '{command}'")
            if "error CONTENT" in answer:
                raise Fault(f"rank {rank} of {self.name}: {answer}")
            if answer.startswith("error ") and "NOTHING_TO_RESTORE" not in answer:
                said[answer] += 1
        return answers

    def start_over(self) -> None:
        """By a person's order, with new ranks: nothing is restored, and steps count from 1 again."""
        self.campaign.ctl("restore", self.name, "--from-scratch", "--yes")
        until = time.monotonic() + RECOVERY_S
        said: collections.Counter[str] = collections.Counter()
        while True:
            opened = self._ask("open", said)
            if all(answer.startswith("ok ") for answer in opened) and len(set(opened)) == 1:
                restored = self._ask("restore", said)
                if all("NOTHING_TO_RESTORE" in answer for answer in restored):
                    self.attempt = int(opened[0].split("=")[1])
                    self.ledger.started_over(self.attempt)
                    self.step = 0
                    self.lost_sight = False
                    return
                if any(answer.startswith("ok ") for answer in restored):
                    raise Fault(f"{self.name}: told to start over, but restored: {restored}")
            if time.monotonic() > until:
                raise Hung(f"{self.name}: not started over within {RECOVERY_S} s: {dict(said)}")

    # Work.

    def begin_work(self, draw: random.Random) -> None:
        self._stop.clear()
        self._fault = None
        self._thread = threading.Thread(target=self._work, args=(draw,), daemon=True)
        self._thread.start()

    def end_work(self) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        if self._fault is not None:
            raise self._fault

    def _work(self, draw: random.Random) -> None:
        try:
            afterwards = draw.randint(0, 2)
            failures = 0
            while afterwards >= 0 and failures < _FAILURES_MAX:
                if self._stop.is_set():
                    afterwards -= 1
                tiers = [tier for tier in TIERS if draw.random() < 0.4]
                failures = 0 if self.save(tiers) else failures + 1
                if self.lost_sight:
                    return
            self.lost_sight = failures >= _FAILURES_MAX
        except BaseException as fault:
            self._fault = fault
        finally:
            self.campaign.heard()

    def save(self, tiers: Sequence[str]) -> bool:
        """The next step, until it is committed, and whole in these tiers if it goes there; whether it was committed."""
        self.step += 1
        where = (self.attempt, self.step)
        if not self._all_say(f"save {self.step}", lambda: None):
            return False
        if not self._all_say("committed", lambda: self.ledger.committed(where)):
            return False
        for tier in tiers:
            self._all_say(
                f"tier {tier} {_TIER_MS}", lambda tier=tier: self.ledger.whole_in(tier, where)
            )
        return True

    def _all_say(self, command: str, promise: Callable[[], None]) -> bool:
        answers = self.answers = ask_all(self.ranks, command)
        if any(answer.startswith("ok ") for answer in answers):
            promise()
            self.campaign.acknowledged(command.split()[0])
        if not all(answers):
            self.lost_sight = True
        for rank, answer in enumerate(answers):
            if answer.startswith("error "):
                self.campaign.refused(f"{command.split()[0]}: {answer.split()[1]}")
        return all(answer.startswith("ok ") for answer in answers)

    # The files, seen from outside.

    def audit(self, attempt: int | None = None) -> None:
        """`attempt`: as of Ledger.judge_missing."""
        for tier in TIERS:
            seen = self._whole_files(tier)
            missing = self.ledger.missing(tier, seen)
            if missing:  # what covers it was there when it went, so it, or a later one, is now
                seen |= self._whole_files(tier)
                keep = min(self.keep_last[tier], self.campaign.kept_at_least)
                self.ledger.judge_missing(tier, missing, seen, keep, attempt)
        self.keep_last = {tier: min(self._keep[tier], self._least[tier]) for tier in TIERS}
        self._least = dict(self._keep)

    def _whole_files(self, tier: str) -> set[Step]:
        root = self.campaign.root
        places = [root / "remote"] if tier == "remote" else [root / "d0", root / "d1"]
        found: dict[Step, set[str]] = collections.defaultdict(set)
        for place in places:
            for folder in (place / self.name).glob("*-a*"):
                step, attempt = folder.name.split("-a")
                with_files = found[int(attempt), int(step)]
                try:
                    with_files.update(os.listdir(folder))
                except FileNotFoundError:
                    continue  # removed just now
        return {where for where, names in found.items() if self._is_whole(tier, names)}

    def _is_whole(self, tier: str, names: set[str]) -> bool:
        if tier == "nvme":
            stems = [str(rank) for rank in range(self.world)]
        else:
            stems = [f"shard-{rank:05}-of-{self.world:05}" for rank in range(self.world)]
        wanted = {stem + end for stem in stems for end in (".record", ".safetensors")}
        return wanted <= names and (tier == "nvme" or "MANIFEST" in names)


def _source(answer: str) -> Step | None:
    if answer.startswith("error "):
        return None
    words = dict(word.split("=", 1) for word in answer.split()[1:3])
    return int(words["attempt"]), int(words["step"])


class Campaign:
    """One node and its jobs, for as many rounds as are asked for."""

    test = "campaign_test.py -k test_short"  # what repeats it
    settings = _SETTINGS
    memory_bytes = "4GiB"
    kept_at_least = _KEEP_LAST_MAX  # if less, whatever keep_last says: where room may be short

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.round = 0
        self.what = "the first start"
        self.done: collections.Counter[str] = collections.Counter()
        self.refusals: collections.Counter[str] = collections.Counter()
        self._lock = threading.Condition()
        self._heard = 0
        self.root, self.memory = own_folders(["d0", "d1", "remote"])
        settings = self.settings.replace("ROOT", str(self.root))
        self.daemon = Daemon(self.root, self.memory, settings, memory_bytes=self.memory_bytes)
        draw = random.Random(f"{seed} jobs")
        self.jobs = [Job(self, "alpha", draw.choice([2, 3]))]
        if draw.random() < 0.5:
            self.jobs.append(Job(self, "beta", 2))
        self.actions: dict[Callable[[random.Random], None], int] = {
            self.ckptd_killed: 8,
            self.ckptd_killed_while_it_starts: 4,
            self.ckptd_in_a_crash_loop: 1,
            self.ckptd_terminated: 5,
            self.ckptd_stands_still: 4,
            self.a_rank_killed_while_ckptd_stands_still: 4,
            self.a_rank_killed: 6,
            self.a_rank_terminated: 2,
            self.a_rank_stands_still: 4,
            self.all_ranks_killed: 5,
            self.ranks_and_ckptd_killed: 4,
            self.reboot: 6,
            self.reboot_and_state_lost: 3,
            self.state_lost: 3,
            self.started_over: 1,
            self.nothing: 2,
        }

    # What is counted, by the jobs' threads.

    def acknowledged(self, what: str) -> None:
        with self._lock:
            self.done[f"acknowledged: {what}"] += 1
        self.heard()

    def refused(self, what: str) -> None:
        with self._lock:
            self.refusals[what] += 1

    def heard(self) -> None:
        with self._lock:
            self._heard += 1
            self._lock.notify_all()

    def ctl(self, *arguments: str) -> str:
        """Repeated while ckptd is not ready for it."""
        until = time.monotonic() + RECOVERY_S
        while True:
            done = subprocess.run(
                [BIN / "ckptctl", *arguments, f"--socket={self.daemon.admin}"],
                capture_output=True,
                text=True,
                timeout=RECOVERY_S,
            )
            if done.returncode == 0:
                return done.stdout
            if time.monotonic() > until:
                raise Hung(f"ckptctl {' '.join(arguments)}: {done.stdout}{done.stderr}")

    # What happens.

    def nothing(self, draw: random.Random) -> None:
        pass

    def ckptd_killed(self, draw: random.Random) -> None:
        self.daemon.kill()
        self.daemon.start()

    def ckptd_killed_while_it_starts(self, draw: random.Random) -> None:
        self.daemon.kill()
        for _ in range(draw.randint(1, 3)):
            self._start_and_kill(draw.random() * 0.3)
        self.daemon.start()

    def ckptd_in_a_crash_loop(self, draw: random.Random) -> None:
        self.daemon.kill()
        for _ in range(draw.randint(5, 10)):
            self._start_and_kill(draw.random() * 0.15)
        self.daemon.start()

    def _start_and_kill(self, after_s: float) -> None:
        process = self.daemon.spawn()
        time.sleep(after_s)  # a moment of its start that the seed chose
        process.kill()
        process.wait()

    def ckptd_terminated(self, draw: random.Random) -> None:
        process = self.daemon.process
        assert process is not None
        process.terminate()
        try:
            code = process.wait(EXIT_S)
        except subprocess.TimeoutExpired:
            raise Hung(
                f"ckptd: SIGTERM did not end it in {EXIT_S} s\n" + where_it_waits(process.pid)
            ) from None
        if code != 0:
            raise Fault(f"ckptd ended with {code} after SIGTERM")
        self.daemon.start()

    def ckptd_stands_still(self, draw: random.Random) -> None:
        process = self.daemon.process
        assert process is not None
        process.send_signal(signal.SIGSTOP)
        time.sleep(draw.random() * 0.3)
        process.send_signal(signal.SIGCONT)

    def _some_rank(self, draw: random.Random) -> Rank:
        return draw.choice(draw.choice(self.jobs).ranks)

    def a_rank_killed(self, draw: random.Random) -> None:
        self._some_rank(draw).kill()

    def a_rank_killed_while_ckptd_stands_still(self, draw: random.Random) -> None:
        process = self.daemon.process
        assert process is not None
        process.send_signal(signal.SIGSTOP)
        rank = self._some_rank(draw)
        rank.process.kill()
        time.sleep(draw.random() * 0.1)
        if draw.random() < 0.3:
            self.ckptd_killed(draw)
        process.send_signal(signal.SIGCONT)
        rank.process.wait()

    def a_rank_terminated(self, draw: random.Random) -> None:
        rank = self._some_rank(draw)
        rank.signal(signal.SIGTERM)
        rank.process.wait(EXIT_S)

    def a_rank_stands_still(self, draw: random.Random) -> None:
        rank = self._some_rank(draw)
        rank.signal(signal.SIGSTOP)
        time.sleep(draw.random() * 0.3)
        rank.signal(signal.SIGCONT)

    def all_ranks_killed(self, draw: random.Random) -> None:
        for job in self.jobs if draw.random() < 0.5 else [draw.choice(self.jobs)]:
            for rank in draw.sample(job.ranks, job.world):
                rank.process.kill()
            for rank in job.ranks:
                rank.process.wait()

    def ranks_and_ckptd_killed(self, draw: random.Random) -> None:
        victims = [self.daemon.process, *(r.process for r in draw.choice(self.jobs).ranks)]
        draw.shuffle(victims)
        for victim in victims:
            assert victim is not None
            victim.kill()
        for victim in victims:
            assert victim is not None
            victim.wait()
        self.daemon.start()

    def lose_power(self) -> None:
        """The files stay as they are (what was not synced is the hostile file system's to lose)."""
        assert self.daemon.process is not None
        processes = [rank.process for job in self.jobs for rank in job.ranks]
        for process in [*processes, self.daemon.process]:
            process.kill()
        for process in [*processes, self.daemon.process]:
            process.wait()
        for job in self.jobs:
            job.end_work()
            job.ledger.memory_lost()
        for entry in self.memory.iterdir():
            shutil.rmtree(entry) if entry.is_dir() else entry.unlink()

    def lose_state(self) -> None:
        shutil.rmtree(self.root / "state", ignore_errors=True)

    def reboot(self, draw: random.Random) -> None:
        self.lose_power()
        self.daemon.start()

    def reboot_and_state_lost(self, draw: random.Random) -> None:
        """(Whose newest attempt has nothing durable, and was started over, would be told of the line before.)"""
        self.lose_power()
        if all(job.ledger.promised_durably() for job in self.jobs):
            self.lose_state()
            for job in self.jobs:
                job.ledger.all_but_files_lost()
            self.done["state directory lost with the memory"] += 1
        self.daemon.start()

    def state_lost(self, draw: random.Random) -> None:
        """While ranks and memory stay."""
        self.daemon.kill()
        self.lose_state()
        self.daemon.start()

    def started_over(self, draw: random.Random) -> None:
        job = draw.choice(self.jobs)
        for rank in job.ranks:
            rank.process.kill()
        job.end_work()
        before = job.ledger.newest
        job.launch(draw)
        job.start_over()
        until = time.monotonic() + RECOVERY_S
        while "is being removed" in self.ctl("gc", job.name, "--dry-run"):  # of before
            if time.monotonic() > until:
                raise Hung(f"{job.name}: a removal does not end")
        job.audit(before)  # from now on nothing of that line goes

    # Rounds.

    def start(self) -> None:
        self.daemon.start()
        for job in self.jobs:
            job.launch(random.Random(f"{self.seed} launch {job.name}"))
            job.resume()

    def run(self, rounds: int) -> None:
        self.start()
        for self.round in range(1, rounds + 1):
            self.play_round(random.Random(f"{self.seed} {self.round}"))
        self.done["rounds"] += rounds

    def play_round(self, draw: random.Random) -> None:
        action = draw.choices(list(self.actions), list(self.actions.values()))[0]
        self.what = action.__name__
        self.done[f"action: {self.what}"] += 1
        with self._lock:
            self._heard = 0
        for job in self.jobs:
            job.begin_work(random.Random(f"{self.seed} {self.round} {job.name}"))
        self._wait_heard(draw.randint(0, 12))
        time.sleep(draw.random() * 0.03)  # a moment between two answers that the seed chose
        action(draw)
        for job in self.jobs:
            job.end_work()
        for job in self.jobs:
            job.audit()
        for job in self.jobs:
            self._go_on(job, draw)
        for job in self.jobs:
            job.audit()
        self._nobody_speaks_of_damage()

    def _wait_heard(self, answers: int) -> None:
        """Until so many things were acknowledged, or the jobs have come to their end."""
        with self._lock:
            if not self._lock.wait_for(lambda: self._heard >= answers, ANSWER_S):
                raise Hung(f"{self._heard} of {answers} acknowledgements in {ANSWER_S} s")

    def _go_on(self, job: Job, draw: random.Random) -> None:
        if job.lost_sight or draw.random() < 0.4:
            some_live = any(rank.is_alive() for rank in job.ranks)
            if some_live and draw.random() < 0.5:
                job.replace_dead()  # the others restore again in their processes
            else:
                job.launch(draw)
            job.resume()

    def _nobody_speaks_of_damage(self) -> None:
        told = json.loads(self.ctl("events", "--json"))["events"]
        wrong = [event for event in told if event["kind"] in _NEVER and not self.may_say(event)]
        if wrong:
            raise Fault(f"nothing was damaged, but: {wrong}")

    def may_say(self, event: dict[str, str]) -> bool:
        """Whether it speaks of damage for a reason."""
        return False

    def summary(self) -> str:
        lines = [f"seed {self.seed}, jobs {[(job.name, job.world) for job in self.jobs]}"]
        lines += [f"  {count:6} {what}" for what, count in sorted(self.done.items())]
        lines += [f"  {count:6} refused {what}" for what, count in sorted(self.refusals.items())]
        return "\n".join(lines)

    def close(self, *, keep: bool = False) -> None:
        """Ends what runs, and takes the directories away."""
        self.end_processes()
        if not keep:
            shutil.rmtree(self.root)
            shutil.rmtree(self.memory)

    def end_processes(self) -> None:
        for job in self.jobs:
            for rank in job.ranks:
                rank.close()
        if self.daemon.process is not None:
            self.daemon.kill()


def play(seed: int, rounds: int, kind: type[Campaign] = Campaign) -> Campaign:
    """A campaign that found nothing; else an error that says how to repeat it. Then its directories stay."""
    campaign = kind(seed)
    try:
        campaign.run(rounds)
    except BaseException as fault:
        ledgers = "\n".join(f"  {job.name}: {job.ledger}" for job in campaign.jobs)
        log = campaign.daemon.log()
        campaign.close(keep=True)
        raise AssertionError(
            f"seed {seed}, round {campaign.round} ({campaign.what}): {fault}\n"
            f"what the jobs were promised:\n{ledgers}\n{campaign.summary()}\n"
            f"left there: {campaign.root} {campaign.memory}\n"
            f"again: tests/attack/run build/test {campaign.test} --seed {seed} --rounds {rounds}\n"
            f"the end of ckptd's log:\n{log}"
        ) from fault
    campaign.close()
    return campaign


def play_long(
    seed: int, rounds: int, kind: type[Campaign], capsys: pytest.CaptureFixture[str]
) -> None:
    """New nodes one after the other; each is repeated by its own seed."""
    began = time.monotonic()
    draw = random.Random(seed)
    done: collections.Counter[str] = collections.Counter()
    refusals: collections.Counter[str] = collections.Counter()
    while done["rounds"] < rounds:
        left = rounds - done["rounds"]
        campaign = play(draw.randrange(1, 1 << 32), min(left, _ROUNDS_OF_A_NODE), kind)
        done += campaign.done
        refusals += campaign.refusals
        with capsys.disabled():
            print(f"\nseed {campaign.seed}: {done['rounds']} rounds clean", end="", flush=True)
    campaign.seed, campaign.done, campaign.refusals = seed, done, refusals
    with capsys.disabled():
        print(f"\n{time.monotonic() - began:.0f} s\n{campaign.summary()}")
