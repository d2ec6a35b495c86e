"""The demo's story: scripts/demo builds and then runs this. Standard library only.

Every process is a real one; every event that the timeline shows was printed by the process that it is about. Waits are for
those events, with a deadline; nothing sleeps. Where the demo plays fate (memory, drives, a bit) it does it to files, while
the daemon is down.
"""

import argparse
import glob
import json
import os
import queue
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time

JOB = "demo"
DEADLINE_S = 120
SLOTS_PER_RANK = 16


def room_for(state_bytes):
    """Of all slots of both ranks."""
    return (state_bytes + (8 << 20)) * (2 * SLOTS_PER_RANK + 1)


def fitting_bytes(wanted):
    """`wanted`, or what half of the free shared memory has room for; None if that is too little for anything."""
    shm = os.statvfs("/dev/shm")
    free = shm.f_bavail * shm.f_frsize // 2
    while wanted >= 1 << 20 and room_for(wanted) > free:
        wanted //= 2
    return wanted if wanted >= 1 << 20 else None


class Wrong(Exception):
    """Something that the demo claims is not so."""


def check(claim, holds, detail=""):
    if not holds:
        raise Wrong(f"{claim}: {detail}")
    print(f"  \u2713 {claim}")


class Timeline:
    """What happened, in order, for the table at the end."""

    def __init__(self):
        self.began = time.monotonic()
        self.rows = []
        self.lock = threading.Lock()

    def add(self, who, event, step=None, ms=None, rate=None):
        with self.lock:
            self.rows.append((time.monotonic() - self.began, who, event, step, ms, rate))

    def print(self):
        print(f"\n{'at':>9}  {'who':<8} {'event':<52} {'step':>5} {'ms':>9} {'speed':>11}")
        for at, who, event, step, ms, rate in self.rows:
            print(
                f"{at * 1000:7.0f} ms  {who:<8} {event:<52} {'' if step is None else step:>5} "
                f"{'' if ms is None else format(ms, '.1f'):>9} {'' if rate is None else format(rate / 1e9, '.2f') + ' GB/s':>11}"
            )


class Lockstep:
    """What a gradient exchange does to real ranks: nobody begins a step before everybody is ready for it."""

    def __init__(self):
        self.lock = threading.Lock()
        self.waiting = {}

    def arrive(self, rank, step):
        with self.lock:
            self.waiting[rank.rank] = (rank, step)
            arrived = list(self.waiting.values())
            if len(arrived) < 2 or len({s for _, s in arrived}) != 1:
                return
            self.waiting = {}
            for other, _ in arrived:
                other.go()


class FirstCommit:
    """Prints once how long a user has waited for a committed step, packages and building included."""

    def __init__(self, began):
        self.began = began
        self.lock = threading.Lock()
        self.seen = False

    def on_committed(self):
        with self.lock:
            if self.seen:
                return
            self.seen = True
        minutes, seconds = divmod(int(time.time() - self.began), 60)
        print(f"  first committed step after {minutes}:{seconds:02}", flush=True)


class RankProcess:
    """One training process; its JSON lines arrive in a queue."""

    def __init__(self, demo, rank, arguments, sync_point=""):
        self.demo, self.rank = demo, rank
        self.events = queue.Queue()
        self.seen = []
        environment = dict(os.environ)
        environment.pop("HOLDFAST_SYNC_POINT", None)
        if sync_point:
            environment["HOLDFAST_SYNC_POINT"] = sync_point
        command = [
            demo.program("holdfast_train_example"),
            "--job",
            JOB,
            "--rank",
            str(rank),
            "--world",
            "2",
            "--bytes",
            str(demo.bytes),
            "--socket",
            demo.socket,
            "--reserve",
            "--await-commit",
            "--lockstep",
            *arguments,
        ]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self):
        for line in self.process.stdout:
            event = json.loads(line)
            self._show(event)
            if event["event"] == "committed":
                self.demo.first_commit.on_committed()
            self.events.put(event)
            if event["event"] == "ready":
                self.demo.lockstep.arrive(self, event["step"])
        self.events.put({"event": "eof"})

    def _show(self, event):
        names = {
            "open": "joined attempt {attempt}",
            "restore": "resumed from {source} (saved by attempt {from_attempt})",
            "whole": "whole in {tier}",
            "scratch": "nothing to restore: a first start",
            "save": "saved",
            "committed": "committed (all ranks sealed)",
            "reserve": "slots ready: {ready} of {wanted}",
            "error": "{during} failed: {code}",
        }
        name = names.get(event["event"])
        if name:
            self.demo.timeline.add(
                f"rank {self.rank}",
                name.format(**event),
                event.get("step"),
                event.get("ms"),
                event.get("bytes_per_s"),
            )

    def go(self):
        try:
            self.process.stdin.write("g")
            self.process.stdin.flush()
        except OSError:
            pass  # it was killed: its end is noticed elsewhere

    def wait_for(self, wanted, **fields):
        """The next event of this name (and with these fields), or Wrong."""
        end = time.monotonic() + DEADLINE_S
        while True:
            try:
                event = self.events.get(timeout=max(0.01, end - time.monotonic()))
            except queue.Empty:
                raise Wrong(
                    f"rank {self.rank} did not say '{wanted}' within {DEADLINE_S} s"
                ) from None
            self.seen.append(event)
            if event["event"] == wanted and all(event.get(k) == v for k, v in fields.items()):
                return event
            if event["event"] == "eof":
                raise Wrong(
                    f"rank {self.rank} ended before it said '{wanted}': its last words were {self.seen[-3:]}"
                )

    def wait_killed(self):
        code = self.process.wait(timeout=DEADLINE_S)
        if code != -signal.SIGKILL:
            raise Wrong(f"rank {self.rank} ended with {code}, not by SIGKILL")

    def wait_for_end(self):
        """Takes in all that it said before it ended."""
        while self.seen[-1:] != [{"event": "eof"}]:
            try:
                self.seen.append(self.events.get(timeout=DEADLINE_S))
            except queue.Empty:
                raise Wrong(f"rank {self.rank} never ended") from None

    def kill(self):
        self.process.kill()
        self.process.wait(timeout=DEADLINE_S)


class Demo:
    def __init__(self, bin_directory, state_bytes, began):
        self.bin, self.bytes = os.path.abspath(bin_directory), state_bytes
        self.first_commit = FirstCommit(began)
        self.timeline = Timeline()
        self.memory = tempfile.mkdtemp(prefix="holdfast-demo-", dir="/dev/shm")
        self.work = tempfile.mkdtemp(prefix="holdfast-demo-")
        self.nvme = [os.path.join(self.work, f"nvme{i}") for i in range(2)]
        self.remote = os.path.join(self.work, "remote")
        for directory in [*self.nvme, self.remote]:
            os.mkdir(directory)
        self.socket = os.path.join(self.work, "ckptd.sock")
        self.admin = os.path.join(self.work, "admin.sock")
        self.config = os.path.join(self.work, "ckptd.yaml")
        with open(self.config, "w", encoding="utf-8") as file:
            file.write(
                f"state_dir: {self.work}/state\nsocket: {{path: {self.socket}}}\nadmin: {{path: {self.admin}}}\n"
                f"metrics: {{address: 'off'}}\nlog: {{level: warning}}\n"
                f"memory: {{dir: {self.memory}, slots_per_rank: {SLOTS_PER_RANK}, bytes_max: {room_for(self.bytes)}}}\n"
                f"nvme: {{dirs: [{', '.join(self.nvme)}], bytes_max: {room_for(self.bytes)}}}\n"
                f"remote: {{dir: {self.remote}}}\n"
                "policy: {nvme: {every_steps: 1, keep_last: 2}, remote: {every_steps: 2, every_ms: 0, keep_last: 2}}\n"
            )
        self.log = open(os.path.join(self.work, "ckptd.log"), "a+", encoding="utf-8")
        self.daemon = None
        self.lockstep = Lockstep()
        self.ranks = []

    def program(self, name):
        return os.path.join(self.bin, name)

    def start_daemon(self):
        path = os.path.join(self.work, "notify.sock")
        if os.path.exists(path):
            os.unlink(path)
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as ready:
            ready.bind(path)
            began = time.monotonic()
            self.daemon = subprocess.Popen(
                [self.program("ckptd"), "--config", self.config],
                env={**os.environ, "NOTIFY_SOCKET": path},
                stdout=subprocess.DEVNULL,
                stderr=self.log,
            )
            self._await_ready(ready)
        self.timeline.add("ckptd", "ready", ms=(time.monotonic() - began) * 1000)

    def _await_ready(self, ready):
        """Until the daemon says so, or has ended."""
        end = os.pidfd_open(self.daemon.pid)
        try:
            readable, _, _ = select.select([ready, end], [], [], DEADLINE_S)
        finally:
            os.close(end)
        if ready not in readable:
            raise Wrong(f"ckptd {'ended' if readable else 'was not ready'} within {DEADLINE_S} s")

    def start_ranks(self, *arguments, sync_points=("", "")):
        self.lockstep = Lockstep()
        self.ranks = [RankProcess(self, rank, arguments, sync_points[rank]) for rank in range(2)]
        return self.ranks

    def kill_ranks(self):
        for rank in self.ranks:
            rank.kill()
        self.timeline.add("launcher", "both ranks gone (SIGKILL)")

    def ctl(self, *arguments):
        command = [self.program("ckptctl"), *arguments, "--socket", self.admin]
        return subprocess.run(
            command, check=True, capture_output=True, text=True, timeout=DEADLINE_S
        ).stdout

    def committed(self):
        """(attempt, step, on the line) of every committed checkpoint."""
        answer = json.loads(self.ctl("list", JOB, "--json"))
        return {
            (int(c["attempt"]), int(c["step"]), bool(c["on_line"]))
            for c in answer["checkpoints"]
            if c["state"] == "committed"
        }

    def close(self):
        for rank in self.ranks:
            if rank.process.poll() is None:
                rank.kill()
        if self.daemon is not None and self.daemon.poll() is None:
            self.daemon.terminate()
            self.daemon.wait(timeout=DEADLINE_S)
        self.log.close()
        shutil.rmtree(self.memory, ignore_errors=True)
        shutil.rmtree(self.work, ignore_errors=True)


def title(text):
    print(f"\n== {text}")


def saves(rank):
    """Digest of the state by step, as this rank printed it when it had saved."""
    return {e["step"]: e["digest"] for e in rank.seen if e["event"] == "save"}


def same_step(ranks):
    """Both ranks' restore events; Wrong unless verified and of one step."""
    events = [rank.wait_for("restore") for rank in ranks]
    check(
        f"both ranks resume at step {events[0]['step']}",
        events[0]["step"] == events[1]["step"],
        str(events),
    )
    check(
        "every byte is what this history must have made of it",
        all(e["verified"] for e in events),
        str(events),
    )
    return events


def killed_in_the_middle_of_a_save(demo):
    title("A rank is killed in the middle of a save")
    first = demo.start_ranks(
        "--steps", "100000", sync_points=("", "client.save.half_copied:kill@6")
    )
    first[1].wait_killed()
    demo.timeline.add("rank 1", "killed (SIGKILL) half-way through copying", 5)
    first[0].wait_for("error")  # of its save, or of the commit that it waits for
    demo.kill_ranks()
    first[1].wait_for_end()
    before = [saves(rank) for rank in first]
    check("five steps (0 to 4) were committed before", len(before[1]) == 5, str(before[1]))
    title("The job starts again")
    ranks = demo.start_ranks("--steps", "100000")
    events = same_step(ranks)
    check("it is the last step that both had saved", events[0]["step"] == 4, str(events))
    check(
        "bit for bit: the digests are those printed when step 4 was saved",
        [e["digest"] for e in events] == [b[4] for b in before],
        f"{events} against {before}",
    )
    for rank in ranks:
        rank.wait_for("committed", step=6)
    return ranks


def daemon_killed(demo, ranks):
    title("ckptd is killed while the job trains, and started again")
    demo.daemon.send_signal(signal.SIGKILL)
    demo.daemon.wait(timeout=DEADLINE_S)
    demo.timeline.add("ckptd", "killed (SIGKILL)")
    demo.start_daemon()
    known = {step for _, step, _ in demo.committed()}
    told = {e["step"] for e in ranks[0].seen + ranks[1].seen if e["event"] == "committed"}
    newest = max(told)
    check(f"step {newest}, committed before, is still there", newest in known, f"{known}")
    for rank in ranks:  # they reconnect by themselves and go on
        rank.wait_for("committed")
    check("both ranks saved on without being restarted", True)
    demo.kill_ranks()
    ranks = demo.start_ranks("--steps", "3", "--wait-stdin")
    events = same_step(ranks)
    check("nothing sealed was lost", events[0]["step"] >= newest, str(events))
    for rank in ranks:
        rank.wait_for("done")
    demo.kill_ranks()


def rolled_back(demo):
    title("Back to an older step, on from there, and a crash")
    line = sorted((step, attempt) for attempt, step, on_line in demo.committed() if on_line)
    (old, _), (newest, _) = line[-3], line[-1]
    demo.ctl("restore", JOB, "--step", str(old))
    demo.timeline.add("operator", f"ckptctl restore {JOB} --step {old}", old)
    ranks = demo.start_ranks("--steps", "2", "--wait-stdin")
    events = same_step(ranks)
    check(
        f"that is the step asked for, {newest - old} before the newest",
        events[0]["step"] == old,
        str(events),
    )
    for rank in ranks:
        rank.wait_for("committed", step=old + 2)
    attempt = max(attempt for attempt, _, _ in demo.committed())
    demo.kill_ranks()
    title("It starts once more")
    ranks = demo.start_ranks("--steps", "0", "--wait-stdin")
    events = same_step(ranks)
    check(
        f"it goes on from the new branch: step {old + 2} of attempt {attempt}",
        events[0]["from_attempt"] == attempt,
        str(events),
    )
    listed = demo.committed()
    discarded = {(a, s) for a, s, on_line in listed if not on_line}
    check(
        f"the discarded branch ({', '.join(f'step {s} of attempt {a}' for a, s in sorted(discarded)) or 'already gone'}) is no candidate any more",
        all(a == attempt or s <= old for a, s, on_line in listed if on_line),
        str(listed),
    )


def stop_daemon(demo, why):
    demo.kill_ranks()
    demo.daemon.send_signal(signal.SIGKILL)
    demo.daemon.wait(timeout=DEADLINE_S)
    demo.timeline.add("fate", why)


def empty(directory):
    for name in os.listdir(directory):
        path = os.path.join(directory, name)
        shutil.rmtree(path) if os.path.isdir(path) else os.unlink(path)


def resume(demo, tier, steps="0"):
    """Both ranks' restore events, which must name the tier."""
    ranks = demo.start_ranks("--steps", steps, "--wait-stdin")
    events = same_step(ranks)
    for event in events:
        print(f"    restored step {event['step']} from {event['source']}: {event['why']}")
    check(f"from {tier}", all(e["source"] == tier for e in events), str(events))
    return events


def memory_lost(demo):
    title("Two more steps, as far as the remote tier; then the node's memory is gone")
    demo.kill_ranks()
    ranks = demo.start_ranks("--steps", "2", "--await-tier", "nvme", "--wait-stdin")
    same_step(ranks)
    newest = [rank.wait_for("done") and max(saves(rank)) for rank in ranks][0]
    digests = [saves(rank)[newest] for rank in ranks]
    print(demo.ctl("status", JOB))
    stop_daemon(demo, "power cut: memory is gone, the drives stay")
    empty(demo.memory)
    demo.start_daemon()
    events = resume(demo, "nvme")
    check(f"nothing was lost: step {newest}", events[0]["step"] == newest, str(events))
    check("bit for bit", [e["digest"] for e in events] == digests, f"{events} against {digests}")


def newest_in_remote(demo):
    """The newest step with a manifest there; the daemon may have published it after the status was asked for."""
    found = glob.glob(os.path.join(demo.remote, JOB, "*", "MANIFEST"))
    names = [os.path.basename(os.path.dirname(path)).split("-a") for path in found]
    return max(((int(attempt), int(step)) for step, attempt in names), default=(0, -1))[1]


def drives_lost(demo):
    title("Memory and drives are gone, and all that the daemon knew")
    demo.kill_ranks()
    ranks = demo.start_ranks("--steps", "2", "--await-tier", "nvme", "--wait-stdin")
    same_step(ranks)
    for rank in ranks:
        rank.wait_for("done")
    demo.kill_ranks()
    ranks = demo.start_ranks("--steps", "1", "--await-tier", "remote", "--wait-stdin")
    same_step(ranks)
    for rank in ranks:
        rank.wait_for("done")
    told = {e["step"] for rank in ranks for e in rank.seen if e["event"] == "whole"}
    before = json.loads(demo.ctl("status", JOB, "--json"))
    there = {
        p["kind"]: int(p["step"])
        for p in before["jobs"][0]["protection"]
        if p.get("any", True) and "step" in p
    }
    stop_daemon(demo, "another machine: only the remote directory is left")
    left = newest_in_remote(demo)
    for directory in [demo.memory, *demo.nvme, os.path.join(demo.work, "state")]:
        empty(directory)
    demo.start_daemon()
    events = resume(demo, "remote")
    check(
        # (One that lacked nothing but its manifest gets that now.)
        "that is the newest there, no older than the table had promised for the loss of all nodes",
        events[0]["step"] >= left >= there["all_nodes"],
        f"{events} {left} {there} {told}",
    )


def bit_flipped(demo):
    title("One bit flips in the newest copy on a drive")
    demo.kill_ranks()
    ranks = demo.start_ranks("--steps", "2", "--await-tier", "nvme", "--wait-stdin")
    same_step(ranks)
    newest = [rank.wait_for("done") and max(saves(rank)) for rank in ranks][0]
    copies = json.loads(demo.ctl("where", JOB, "--step", str(newest), "--json"))["copies"]
    victim = next(c["location"] for c in copies if c["tier"] == "nvme" and int(c["rank"]) == 1)
    stop_daemon(demo, "power cut, and one bit flips on a drive")
    empty(demo.memory)
    with open(victim, "r+b") as file:
        file.seek(os.path.getsize(victim) // 2)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 4]))
    demo.start_daemon()
    ranks = demo.start_ranks("--steps", "0", "--wait-stdin")
    events = same_step(ranks)
    for event in events:
        print(f"    restored step {event['step']} from {event['source']}: {event['why']}")
    status = json.loads(demo.ctl("status", JOB, "--json"))
    found = [e["text"] for e in status["jobs"][0]["events"] if "digest" in e["text"]]
    check("it was found", bool(found), str(status["jobs"][0]["events"]))
    print(f"    {found[0]}")
    skipped = events[0]["step"] < newest or any(e["source"] == "remote" for e in events)
    check(
        "and skipped: another copy, or the newest step that all ranks can load",
        skipped,
        str(events),
    )


def with_torch(demo, script):
    root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    return subprocess.run(
        [os.path.join(root, "build/python/bin/python"), os.path.join(root, "scripts", script)],
        env={
            **os.environ,
            "HOLDFAST_SOCKET": demo.socket,
            "PYTHONPATH": os.path.join(os.path.dirname(demo.bin), "python"),
            "OMP_NUM_THREADS": "1",
        },
        timeout=4 * DEADLINE_S,
    )


def torch_job_killed(demo):
    title("A small GPT trains under torchrun; one of its two workers is killed")
    began = time.monotonic()
    done = with_torch(demo, "demo_torch.py")
    check(
        "it resumed by itself, and its losses are bit for bit those of a run that nobody disturbed",
        done.returncode == 0,
        f"scripts/demo_torch.py ended with {done.returncode}",
    )
    demo.timeline.add(
        "torchrun", "killed, resumed, same losses", ms=(time.monotonic() - began) * 1000
    )


def other_numbers_of_ranks(demo):
    title("The same GPT, sharded by FSDP2, on 4 ranks, then on 3, then on 4")
    began = time.monotonic()
    done = with_torch(demo, "demo_elastic.py")
    check(
        "each number of ranks had, put together, bit for bit what the ranks before had saved",
        done.returncode == 0,
        f"scripts/demo_elastic.py ended with {done.returncode}",
    )
    demo.timeline.add("elastic", "4 ranks, 3 ranks, 4 ranks", ms=(time.monotonic() - began) * 1000)


def run(demo):
    title("ckptd starts")
    demo.start_daemon()
    ranks = killed_in_the_middle_of_a_save(demo)
    daemon_killed(demo, ranks)
    rolled_back(demo)
    memory_lost(demo)
    drives_lost(demo)
    bit_flipped(demo)
    demo.kill_ranks()
    torch_job_killed(demo)
    other_numbers_of_ranks(demo)
    title("What an operator sees")
    print(demo.ctl("status", JOB))
    print(demo.ctl("list", JOB))
    print(demo.ctl("verify", JOB))


def main():
    parser = argparse.ArgumentParser(prog="scripts/demo")
    parser.add_argument("bin")
    parser.add_argument("--bytes", type=int, default=64 << 20, help="of state per rank")
    parser.add_argument(
        "--began", type=int, default=int(time.time()), help="when it was asked for, in s since 1970"
    )
    arguments = parser.parse_args()
    state_bytes = fitting_bytes(arguments.bytes)
    if state_bytes is None:
        print(
            "scripts/demo: /dev/shm has too little room; as root: mount -o remount,size=2G /dev/shm",
            file=sys.stderr,
        )
        return 1
    demo = Demo(arguments.bin, state_bytes, arguments.began)
    try:
        run(demo)
        demo.timeline.print()
        print("\nAll of it held.")
        return 0
    except (Wrong, subprocess.SubprocessError, OSError) as problem:
        demo.timeline.print()
        print(f"\nscripts/demo: FAILED: {problem}", file=sys.stderr)
        if isinstance(problem, subprocess.CalledProcessError):
            print(problem.stderr, file=sys.stderr)
        demo.log.seek(0)
        print("ckptd's log:\n" + demo.log.read()[-8000:], file=sys.stderr)
        return 1
    finally:
        demo.close()


if __name__ == "__main__":
    sys.exit(main())
