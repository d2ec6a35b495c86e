"""What happens to people: a laptop, two users, a job that crash-loops, a directory that is away or was removed by hand, a
job that is started over. Of one node; judged as the damage matrix is."""

from __future__ import annotations

import os
import pathlib
import random
import shutil
import signal
import subprocess
import time

import pytest
from node import JOB, RANKS, Node, saved_node
from ranks import Rank, ask_all

from daemons import BIN, DEADLINE_S, own_daemon


def _unharmed(before: dict[pathlib.Path, str], node: Node) -> None:
    now = node.files()
    assert {path: now.get(path) for path in before} == before


def _restarted(node: Node) -> list[str]:
    node.start()
    opened = node.launch()
    assert all("ok attempt=" in answer for answer in opened), opened
    return node.restore_when_ready()


# A laptop: one user, one drive, a lid that is closed, a battery that runs out.
def test_a_laptop() -> None:
    with own_daemon("nvme: {dirs: [ROOT/d0]}\n", inside=["d0"]) as daemon:
        step = 0
        for _ in range(4):
            rank = Rank(daemon.socket, JOB, 0, 1, 100_000, "nvme.every_steps=1")
            (opened,) = ask_all([rank], "open")
            assert opened.startswith("ok attempt="), opened
            (restored,) = ask_all([rank], "restore")
            assert (f"step={step}" if step else "NOTHING_TO_RESTORE") in restored, restored
            assert daemon.process is not None
            for process in (daemon.process, rank.process):
                process.send_signal(signal.SIGSTOP)
            for process in (rank.process, daemon.process):
                process.send_signal(signal.SIGCONT)
            step += 1
            assert ask_all([rank], f"save {step}") == ["ok sealed"]
            assert ask_all([rank], "tier nvme") == ["ok nvme"]
            rank.close()
            daemon.kill()
            for entry in daemon.memory.iterdir():
                entry.unlink()
            daemon.start()


# Each rank ends when it has restored, or in the middle of that, and so does ckptd; nothing is saved meanwhile.
@pytest.mark.parametrize("times", [5, pytest.param(200, marks=pytest.mark.slow)])
@pytest.mark.parametrize("memory", ["kept", "lost"])
def test_a_job_that_crash_loops_keeps_its_steps(memory: str, times: int, seed: int) -> None:
    draw = random.Random(seed)
    with saved_node() as node:
        before = node.files()
        for time_ in range(times):
            restored = _restarted(node)
            assert all("step=2" in answer for answer in restored), (seed, time_, restored)
            for rank in node.ranks:
                rank.tell("open" if draw.random() < 0.5 else "restore")
            time.sleep(draw.random() * 0.02)  # a moment that the seed chose
            if memory == "lost":
                node.crash()
                continue
            for rank in draw.sample(node.ranks, RANKS):
                rank.kill()
            if draw.random() < 0.5:
                node.daemon.kill()
            else:
                node.daemon.stop()
        node.crash()
        _unharmed(before, node)
        restored = _restarted(node)
        assert all("step=2" in answer for answer in restored), (seed, restored)
        node.wait_for_whole({1, 2}, ["nvme", "remote"])
        node.save_everywhere(3)
        # An attempt that saved nothing leaves a claim behind at most, and the newest are kept.
        assert len(list((node.root / "remote" / JOB).glob("attempt-*"))) <= 256 + RANKS


@pytest.mark.parametrize("instead", ["nothing", "an empty directory"])
@pytest.mark.parametrize("state", ["kept", "lost"])
def test_a_remote_directory_that_is_not_mounted_at_the_start(instead: str, state: str) -> None:
    """It alone has step 2."""
    with saved_node() as node:
        for drive in ("d0", "d1"):
            shutil.rmtree(node.root / drive / JOB / "2-a1")
        before = node.files()
        (node.root / "remote").rename(node.root / "away")
        if instead != "nothing":
            (node.root / "remote").mkdir()
        if state == "lost":
            node.lose_state()
        node.start()
        opened = node.launch()
        if all(answer.startswith("ok ") for answer in opened):
            restored = node.all("restore")
            assert not any("NOTHING_TO_RESTORE" in answer for answer in restored), restored
            for answer, notes in zip(restored, node.all("notes"), strict=True):
                # Refused, or step 1, of which the rank is told that it is not the newest.
                assert answer.startswith("error ") or "passed over" in notes, (answer, notes)
        node.crash()
        shutil.rmtree(node.root / "remote", ignore_errors=True)
        (node.root / "away").rename(node.root / "remote")
        node.start()
        opened = node.launch()
        assert all("ok attempt=" in answer for answer in opened), opened
        restored = node.restore_when_ready()
        assert all("ok " in answer for answer in restored), restored
        node.wait_for_whole({1, 2}, ["remote"])
        node.crash()
        _unharmed(before, node)


@pytest.mark.parametrize("what", ["d0/job", "d1/job/2-a1", "remote/job", "remote/job/2-a1"])
def test_a_directory_that_is_removed_by_hand_while_the_job_runs(what: str) -> None:
    with saved_node() as node:
        restored = _restarted(node)
        assert all("step=2" in answer for answer in restored), restored
        before = {
            path: digest
            for path, digest in node.files().items()
            if not path.is_relative_to(node.root / what)
        }
        shutil.rmtree(node.root / what)
        # Saves go on in memory and in the other tier, and the removed place is used again.
        tier, other = ("remote", "nvme") if what.startswith("remote") else ("nvme", "remote")
        assert node.all("save 3") == ["ok sealed"] * RANKS
        assert node.all(f"tier {other}") == [f"ok {other}"] * RANKS
        node.collect_garbage()
        node.crash()
        _unharmed(before, node)
        restored = _restarted(node)
        assert all("step=3" in answer for answer in restored), restored
        node.save_everywhere(4)
        node.wait_for_whole({4}, [tier])


def test_a_job_that_is_started_over_counts_its_steps_from_the_first_again() -> None:
    with saved_node() as node:
        before = node.files()
        node.start()
        node.daemon.ctl("restore", JOB, "--from-scratch", "--yes")
        opened = node.launch()
        assert all("ok attempt=2" in answer for answer in opened), opened
        assert all("NOTHING_TO_RESTORE" in answer for answer in node.restore_when_ready())
        node.save_everywhere(1)
        node.collect_garbage()
        node.crash()
        _unharmed(before, node)
        # The newest of the new line, although the old one has a step of a larger number …
        restored = _restarted(node)
        assert all("attempt=2 step=1" in answer for answer in restored), restored
        # … which can still be chosen.
        node.daemon.ctl("restore", JOB, "--step", "2", "--attempt", "1")
        for rank in node.ranks:
            rank.kill()
        opened = node.launch()
        assert all("ok attempt=" in answer for answer in opened), opened
        restored = node.restore_when_ready()
        assert all("attempt=1 step=2" in answer for answer in restored), restored


# Two users on one node: neither sees, takes or removes what is the other's.


class _User:
    def __init__(self, uid: int, root: pathlib.Path) -> None:
        self.uid = uid
        self.root = root

    def run(self, *words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [BIN / "ckptctl", *words, f"--socket={self.root / 'admin.sock'}"],
            user=self.uid,
            group=self.uid,
            extra_groups=[],
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
        )

    def rank(self, job: str) -> Rank:
        return Rank(self.root / "ckptd.sock", job, 0, 1, 100_000, "", user=self.uid)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to be two users")
def test_two_users() -> None:
    settings = (
        "nvme: {dirs: [ROOT/d0], bytes_max: 1GiB}\nremote: {dir: ROOT/remote}\n"
        "policy: {nvme: {every_steps: 1}, remote: {every_steps: 1, every_ms: 0}}\n"
    )
    with own_daemon(settings, inside=["d0", "remote"]) as daemon:
        daemon.root.chmod(0o755)
        alice, bob = _User(1001, daemon.root), _User(1002, daemon.root)
        ranks = {user: user.rank(name) for user, name in ((alice, "hers"), (bob, "his"))}
        for rank in ranks.values():
            assert ask_all([rank], "open") == ["ok attempt=1"]
            ask_all([rank], "restore")
            assert ask_all([rank], "save 1") == ["ok sealed"]
            assert ask_all([rank], "tier nvme") == ["ok nvme"]
            assert ask_all([rank], "tier remote") == ["ok remote"]
        kept = {path for place in ("d0", "remote") for path in (daemon.root / place).rglob("*")}
        # His orders about her job change nothing.
        assert "hers" not in bob.run("status").stdout
        for order in (
            ["rm", "hers", "--yes"],
            ["rm", "hers", "--step", "1", "--yes"],
            ["restore", "hers", "--from-scratch", "--yes"],
            ["pin", "hers", "--step", "1"],
            ["set", "hers", "nvme.keep_last=1"],
        ):
            assert bob.run(*order).returncode != 0, order
        thief = bob.rank("hers")
        (refused,) = ask_all([thief], "open")
        assert "belongs to uid 1001" in refused, refused
        thief.close()
        assert all(path.exists() for path in kept)
        # Nor with a state directory that is lost, and a reboot.
        for rank in ranks.values():
            rank.close()
        daemon.kill()
        for entry in daemon.memory.iterdir():
            entry.unlink()
        shutil.rmtree(daemon.root / "state")
        daemon.start()
        thief = bob.rank("hers")
        (refused,) = ask_all([thief], "open")
        assert "belongs to uid 1001" in refused, refused
        thief.close()
        rank = alice.rank("hers")
        assert ask_all([rank], "open")[0].startswith("ok attempt=")
        assert "step=1" in ask_all([rank], "restore")[0]
        # Her own order is carried out, on her job alone.
        rank.close()
        done = alice.run("rm", "hers", "--yes")
        assert done.returncode == 0, done.stdout + done.stderr
        assert not (daemon.root / "remote" / "hers").exists()
        rank = bob.rank("his")
        assert ask_all([rank], "open")[0].startswith("ok attempt=")
        assert "step=1" in ask_all([rank], "restore")[0]
        rank.close()


# A person chooses an older step, and the node loses power: before the job is started, as its ranks have joined, when
# they have restored and saved nothing yet.
@pytest.mark.parametrize("when", ["before it starts", "when it has joined", "when it has restored"])
def test_what_a_person_chose_outlives_a_loss_of_power(when: str) -> None:
    with saved_node() as node:
        node.start()
        node.wait_for_whole({1, 2}, node.tiers)
        node.daemon.ctl("restore", JOB, "--step", "1")
        if when != "before it starts":
            node.launch()
        if when == "when it has restored":
            restored = node.restore_when_ready()
            assert all("step=1" in answer for answer in restored), restored
        node.crash()
        for _ in range(2):
            restored = _restarted(node)
            assert all("step=1" in answer for answer in restored), restored
            node.crash()


@pytest.mark.parametrize("what", ["remote/job", "remote/job/2-a1"])
def test_a_directory_that_became_a_link(what: str) -> None:
    """To where somebody made room. It is not followed, and it is not nothing."""
    with saved_node(("remote",)) as node:
        before = node.files()
        (node.root / what).rename(node.root / "elsewhere")
        (node.root / what).symlink_to(node.root / "elsewhere")
        node.lose_state()
        node.start()
        opened = node.launch()
        if all(answer.startswith("ok ") for answer in opened):
            restored = node.all("restore")
            assert not any("NOTHING_TO_RESTORE" in answer for answer in restored), restored
            for answer, notes in zip(restored, node.all("notes"), strict=True):
                assert answer.startswith("error ") or "is a link" in notes, (answer, notes)
        node.crash()
        (node.root / what).unlink()
        (node.root / "elsewhere").rename(node.root / what)
        _unharmed(before, node)


def test_a_run_whose_directory_was_away_is_not_forgotten_for_the_next_one() -> None:
    """The job starts from nothing while its directories have another name, and then they are back."""
    with saved_node() as node:
        before = node.files()
        for place in node.places():
            (place / JOB).rename(place / "another")
        node.lose_state()
        node.start()
        node.launch()
        node.all("restore")
        node.crash()
        for place in node.places():
            shutil.rmtree(place / JOB, ignore_errors=True)
            (place / "another").rename(place / JOB)
        node.start()
        opened = node.launch()
        restored = node.restore_when_ready() if "ok " in opened[0] else opened
        assert not any("NOTHING_TO_RESTORE" in answer for answer in restored), restored
        if not all("step=2" in answer for answer in restored):  # the new run was noted in time
            way_out = f"ckptctl rm {JOB} --yes"
            assert all("another run of job" in a and way_out in a for a in restored), restored
            for rank in node.ranks:
                rank.kill()
            node.ranks = []
            node.daemon.ctl("rm", JOB, "--yes")
            node.crash()
            restored = _restarted(node)
            assert all("step=2" in answer for answer in restored), restored
        node.crash()
        _unharmed(before, node)
