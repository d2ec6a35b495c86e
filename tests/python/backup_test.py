"""ckptctl backup and restore-backup: a whole job to a directory, and from there into another cluster, bit for bit."""

from __future__ import annotations

import json
import os
import pathlib
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch
from ranks import free_port, run_ranks
from safetensors.torch import load_file
from split_state import CKPTCTL, TIERS, answer, ckptctl, same_bits
from training import wait_until

import holdfast
from daemons import DEADLINE_S, Daemon, own_daemon
from holdfast import _core

RANKS = (
    3  # the first and the last one are replicas, which write what they have to the remote tier once
)
STEPS = (10, 20, 30)
POLICY = holdfast.Policy(
    nvme_every_steps=1, nvme_keep_last=9, remote_every_steps=1, remote_keep_last=9
)
REMOTE = "remote: {dir: ROOT/remote}\n"
MARK = b"in each rank's image, and alike: "


def tensors_of(step: int) -> dict[str, torch.Tensor]:
    """What the job has at that step. Ranks have halves of `rows`; what else there is, more than a digest block, each has."""
    torch.manual_seed(step)
    mark = torch.frombuffer(bytearray(MARK + bytes([step] * 40)), dtype=torch.uint8)
    return {"rows": torch.randn(24, 7), "norm": torch.randn(300_000), "mark": mark}


def state_of(rank: int, ranks: int, tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    some = 24 if ranks == 1 else 12
    first = rank % 2 * some
    rows = tensors["rows"][first : first + some].clone()
    part = holdfast.Part(rows, shape=(24, 7), offset=(first, 0))
    same = {name: tensors[name].clone() for name in ("norm", "mark")}
    return {"model": {"rows": part, **same}, "extra": {"epoch": int(tensors["mark"][-1])}}


def save(daemon: Daemon, steps: Iterable[int] = STEPS, wait: str = "remote") -> None:
    """In an attempt that goes on from what there is."""

    def work(rank: int) -> None:
        os.environ["HOLDFAST_SOCKET"] = str(daemon.socket)
        with holdfast.Checkpointer("job", policy=POLICY) as ckpt:
            ckpt.restore(state_of(rank, RANKS, tensors_of(0)), timeout=120)
            for step in steps:
                ckpt.save(step, state_of(rank, RANKS, tensors_of(step)), wait=wait, timeout=120)

    run_ranks(RANKS, work, group=False)


def restore(daemon: Daemon, ranks: int, step: int | None = None) -> list[tuple[int, int]]:
    """By that many ranks: which step each got, in which attempt; every bit is that of the step."""

    def work(rank: int) -> tuple[int, int]:
        os.environ["HOLDFAST_SOCKET"] = str(daemon.socket)
        empty = {name: torch.zeros_like(tensor) for name, tensor in tensors_of(0).items()}
        state = state_of(rank, ranks, empty)
        with holdfast.Checkpointer("job", policy=POLICY) as ckpt:
            got = ckpt.restore(state, step=step, timeout=120) - 1
            assert got >= 0
            wanted = state_of(rank, ranks, tensors_of(got))
            for name in ("norm", "mark"):
                assert same_bits(state["model"][name], wanted["model"][name]), name
            assert same_bits(state["model"]["rows"].tensor, wanted["model"]["rows"].tensor)
            assert state["extra"] == wanted["extra"]
            return got, ckpt.attempt

    return run_ranks(ranks, work, group=False)


def file_of(folder: pathlib.Path, step: int, rank: int, attempt: int = 1) -> pathlib.Path:
    return folder / "job" / f"{step}-a{attempt}" / f"shard-{rank:05}-of-{RANKS:05}.safetensors"


def is_whole(folder: pathlib.Path, steps: Iterable[int] = STEPS, attempt: int = 1) -> None:
    """Files that safetensors' own reader loads, each with all that its rank saved."""
    for step in steps:
        tensors = tensors_of(step)
        for rank in range(RANKS):
            image = file_of(folder, step, rank, attempt)
            loaded = load_file(image)
            first = rank % 2 * 12
            assert same_bits(loaded["model.rows"], tensors["rows"][first : first + 12])
            assert same_bits(loaded["model.norm"], tensors["norm"])
            assert same_bits(loaded["model.mark"], tensors["mark"])
            assert image.with_suffix(".record").exists()
        assert (image.parent / "MANIFEST").exists()


def has_nothing_half_done(folder: pathlib.Path, steps: Iterable[int] = STEPS) -> None:
    assert [path for path in folder.rglob("*") if path.name.endswith((".tmp", ".intent"))] == []
    names = {f"{step}-a1" for step in steps} | {"JOB", "attempt-1"}
    assert {path.name for path in (folder / "job").iterdir()} == names


def states(said: dict[str, Any]) -> dict[int, str]:
    return {step["step"]: step["state"] for step in said["steps"]}


def restore_backup(
    folder: pathlib.Path, to: pathlib.Path, *arguments: str, **variables: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [CKPTCTL, "restore-backup", folder, "job", "--to", to, *arguments],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )


def brought(folder: pathlib.Path, to: pathlib.Path, *arguments: str) -> dict[str, Any]:
    done = restore_backup(folder, to, *arguments, "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture
def folder(tmp_path: pathlib.Path) -> pathlib.Path:
    (tmp_path / "backup").mkdir()
    return tmp_path / "backup"


@pytest.fixture
def remote(tmp_path: pathlib.Path) -> pathlib.Path:
    """Of another cluster, which has nothing yet."""
    (tmp_path / "remote").mkdir()
    return tmp_path / "remote"


def leave_only(tier: str, daemon: Daemon) -> None:
    """The tiers before that one are lost."""
    daemon.stop()
    for slot in daemon.memory.iterdir():
        slot.unlink() if slot.is_file() else None
    if tier == "remote":
        for path in (daemon.root / "nvme").rglob("*.*"):
            path.unlink() if path.suffix in (".safetensors", ".record") else None
    daemon.start()
    listed = lambda: {found.step: found.tiers for found in holdfast.checkpoints("job")}  # noqa: E731
    wait_until(f"steps in {tier}", lambda: all(tier in listed().get(step, []) for step in STEPS))


@pytest.mark.parametrize("tier", ["memory", "nvme", "remote"])
def test_to_a_directory_and_into_another_cluster(
    tier: str, make_daemon, folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = tier == "memory"
    old = make_daemon() if alone else make_daemon(TIERS, ["nvme", "remote"])
    monkeypatch.setenv("HOLDFAST_SOCKET", str(old.socket))
    save(old, wait="committed" if alone else "remote")
    if not alone:
        leave_only(tier, old)
    steps = [found.step for found in holdfast.checkpoints("job")]
    said = answer(old, "backup", "job", folder)
    assert states(said) == {step: "written" for step in steps}
    assert [step["step"] for step in said["steps"]] == sorted(steps, reverse=True)
    assert said["ok"] and said["bytes"] == sum(
        file_of(folder, step, rank).stat().st_size for step in steps for rank in range(RANKS)
    )
    is_whole(folder, steps)
    has_nothing_half_done(folder, steps)
    if alone:
        assert len(steps) >= 2
    else:
        assert steps == [30, 20, 10]
    # Another cluster, which has never heard of the job.
    new = make_daemon(REMOTE, ["remote"])
    said = brought(folder, new.root / "remote")
    assert states(said) == {step: "written" for step in steps}
    is_whole(new.root / "remote", steps)
    for step in steps:
        for name in ("shard-00000-of-00003.record", "MANIFEST"):
            paths = [place / "job" / f"{step}-a1" / name for place in (folder, new.root / "remote")]
            assert paths[0].read_bytes() == paths[1].read_bytes()
    assert restore(new, RANKS) == [(30, 2)] * RANKS
    assert restore(new, 1) == [(30, 3)]
    assert restore(new, 2, step=20) == [(20, 4)] * 2
    assert "every digest is right" in new.ctl("verify", "job", "--all", "--tier", "remote")


def test_a_cluster_that_runs_finds_it_by_rebuild(
    make_daemon, folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = make_daemon(REMOTE, ["remote"]), make_daemon(REMOTE, ["remote"])
    save(old)
    answer(old, "backup", "job", folder)
    brought(folder, new.root / "remote")
    assert ckptctl(new, "list", "job").returncode == 4
    new.ctl("rebuild", "--tier", "remote")
    listed = json.loads(new.ctl("list", "job", "--json"))
    assert [(each["step"], each["tiers"]) for each in listed["checkpoints"]] == [
        (step, ["remote"]) for step in (30, 20, 10)
    ]
    # What was made there comes back to the same directory, beside what was there.
    assert restore(new, RANKS) == [(30, 2)] * RANKS
    with monkeypatch.context() as there:
        there.setenv("HOLDFAST_SOCKET", str(new.socket))
        save(new, [40])
        assert states(answer(new, "backup", "job", folder)) == {
            40: "written",
            **dict.fromkeys((30, 20, 10), "was_there"),
        }


# ---- ended and gone on with ----


@pytest.fixture(scope="module")
def saved_once() -> Iterator[Daemon]:
    """Three steps, in all tiers; in remote each tensor that both ranks have alike is there once."""
    with own_daemon(TIERS, ["nvme", "remote"]) as daemon:
        save(daemon)
        sizes = [file_of(daemon.root / "remote", 10, rank).stat().st_size for rank in range(RANKS)]
        assert sizes[0] + sizes[2] < 1.1 * sizes[1], "nothing was left out"
        yield daemon


@pytest.fixture(scope="module")
def backed_up(saved_once: Daemon, tmp_path_factory) -> pathlib.Path:
    folder = tmp_path_factory.mktemp("backed-up")
    answer(saved_once, "backup", "job", folder)
    return folder


# Each rank's file is one window; the newest step comes first.
POINTS = [
    "begun:kill",
    "window_written:kill",
    "window_written:kill@5",
    "data_written:kill",
    "data_written:kill@2",
    "published:kill",
    "published:kill@4",
    "step_written:kill",
    "step_written:kill@3",
    "committed:kill",
    "committed:kill@2",
]


def inodes(folder: pathlib.Path) -> dict[pathlib.Path, int]:
    """Of what is published, and stays what it is."""
    return {
        path: path.stat().st_ino
        for path in folder.rglob("*")
        if path.suffix == ".record" or path.name == "MANIFEST"
    }


def check_gone_on_with(
    folder: pathlib.Path, before: dict[pathlib.Path, int], said: dict[str, Any]
) -> None:
    committed = {int(path.parent.name.split("-")[0]) for path in before if path.name == "MANIFEST"}
    assert states(said) == {step: "was_there" if step in committed else "written" for step in STEPS}
    after = inodes(folder)
    assert all(after[path] == inode for path, inode in before.items())
    is_whole(folder)
    has_nothing_half_done(folder)


@pytest.mark.parametrize("point", POINTS)
def test_a_backup_that_was_killed_goes_on(
    point: str, saved_once: Daemon, folder: pathlib.Path
) -> None:
    where = {"HOLDFAST_SYNC_POINT": f"ckptctl.backup.{point}"}
    killed = ckptctl(saved_once, "backup", "job", folder, **where)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    before = inodes(folder)
    check_gone_on_with(folder, before, answer(saved_once, "backup", "job", folder))


@pytest.mark.parametrize("point", [point for point in POINTS if "window" not in point])
def test_a_restore_that_was_killed_goes_on(
    point: str, backed_up: pathlib.Path, remote: pathlib.Path
) -> None:
    killed = restore_backup(backed_up, remote, HOLDFAST_SYNC_POINT=f"ckptctl.backup.{point}")
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    check_gone_on_with(remote, inodes(remote), brought(backed_up, remote))


def test_ctrl_c_says_how_to_go_on(saved_once: Daemon, folder: pathlib.Path) -> None:
    process = stopped(saved_once, "committed:stop", "backup", "job", folder)
    process.send_signal(signal.SIGINT)
    code, out, err = resumed(process)
    assert code == 130, err
    assert "interrupted; the same command goes on behind the 1 step that is whole" in err
    assert out == f"step 30 (attempt 1): 3 ranks, {size_of(folder, 30)}\n"
    check_gone_on_with(folder, inodes(folder), answer(saved_once, "backup", "job", folder))


def test_ctrl_c_of_a_restore(backed_up: pathlib.Path, remote: pathlib.Path) -> None:
    process = subprocess.Popen(
        [CKPTCTL, "restore-backup", backed_up, "job", "--to", remote],
        env={**os.environ, "HOLDFAST_SYNC_POINT": f"ckptctl.backup.data_written:stop@{RANKS + 1}"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    os.waitpid(process.pid, os.WUNTRACED)
    process.send_signal(signal.SIGINT)
    code, _, err = resumed(process)
    assert code == 130 and "goes on behind the 1 step that is whole" in err, err
    check_gone_on_with(remote, inodes(remote), brought(backed_up, remote))


def size_of(folder: pathlib.Path, step: int) -> str:
    bytes_ = sum(file_of(folder, step, rank).stat().st_size for rank in range(RANKS))
    return f"{bytes_ / (1 << 20):.1f} MiB"


def stopped(daemon: Daemon, point: str, *arguments: object) -> subprocess.Popen[str]:
    """A ckptctl that has come as far as that, and stands there."""
    process = subprocess.Popen(
        [CKPTCTL, *map(str, arguments), f"--socket={daemon.admin}"],
        env={**os.environ, "HOLDFAST_SYNC_POINT": f"ckptctl.backup.{point}"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    _, status = os.waitpid(process.pid, os.WUNTRACED)
    assert os.WIFSTOPPED(status)
    return process


def test_two_at_once_into_one_directory(saved_once: Daemon, folder: pathlib.Path) -> None:
    first = stopped(saved_once, "data_written:stop", "backup", "job", folder)
    second = ckptctl(saved_once, "backup", "job", folder)
    assert list(folder.rglob("*.tmp"))  # what the first one writes is not swept away
    code, _, err = resumed(first)
    refused(second, "another run writes of this job there just now")
    assert code == 0, err
    is_whole(folder)
    has_nothing_half_done(folder)


def test_single_steps_and_what_is_new(saved_once: Daemon, folder: pathlib.Path) -> None:
    said = answer(saved_once, "backup", "job", folder, "--step", "10", "--step", "30")
    assert states(said) == {30: "written", 10: "written"}
    has_nothing_half_done(folder, (10, 30))
    said = answer(saved_once, "backup", "job", folder)
    assert states(said) == {30: "was_there", 20: "written", 10: "was_there"}
    done = ckptctl(saved_once, "backup", "job", folder, "--step", "11")
    assert done.returncode == 4 and "has no step 11" in done.stderr
    done = ckptctl(saved_once, "backup", "job", folder)
    assert done.stdout.splitlines() == [
        *(f"step {step} (attempt 1): was there already" for step in (30, 20, 10)),
        f"3 steps of job job are in {folder}",
    ]


def test_single_steps_come_back(backed_up: pathlib.Path, remote: pathlib.Path) -> None:
    assert states(brought(backed_up, remote, "--step", "20")) == {20: "written"}
    has_nothing_half_done(remote, [20])
    done = restore_backup(backed_up, remote, "--step", "11")
    assert done.returncode == 4 and "has no step 11" in done.stderr


def resumed(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    process.send_signal(signal.SIGCONT)
    out, err = process.communicate(timeout=DEADLINE_S)
    return process.returncode, out, err


def test_steps_that_vanish_meanwhile(make_daemon, folder: pathlib.Path) -> None:
    daemon = make_daemon(TIERS, ["nvme", "remote"])
    save(daemon)
    # Of step 20 one rank's file is there when it goes, of step 10 nothing.
    process = stopped(daemon, f"published:stop@{RANKS + 1}", "backup", "job", folder)
    for step in ("20", "10"):
        daemon.ctl("rm", "job", "--step", step, "--force")
    code, out, err = resumed(process)
    assert code == 0, out + err
    for step in (20, 10):
        assert f"step {step} (attempt 1): left out, it was removed meanwhile" in out
    assert f"1 step of job job is in {folder}, 2 not" in out
    is_whole(folder, [30])
    has_nothing_half_done(folder, [30])


def test_what_was_begun_of_a_step_that_is_gone_by_then(make_daemon, folder: pathlib.Path) -> None:
    daemon = make_daemon(TIERS, ["nvme", "remote"])
    save(daemon)
    where = {"HOLDFAST_SYNC_POINT": f"ckptctl.backup.published:kill@{RANKS + 1}"}
    ckptctl(daemon, "backup", "job", folder, **where)
    assert file_of(folder, 20, 0).exists()
    daemon.ctl("rm", "job", "--step", "20", "--force")
    assert states(answer(daemon, "backup", "job", folder)) == {30: "was_there", 10: "written"}
    has_nothing_half_done(folder, (30, 10))


def test_a_daemon_that_goes_away_meanwhile(make_daemon, folder: pathlib.Path) -> None:
    daemon = make_daemon(TIERS, ["nvme", "remote"])
    save(daemon)
    process = stopped(daemon, "committed:stop", "backup", "job", folder)
    daemon.kill()
    code, _, err = resumed(process)
    assert code == 3 and "goes on behind the 1 step that is whole" in err, err
    daemon.start()
    check_gone_on_with(folder, inodes(folder), answer(daemon, "backup", "job", folder))


def test_what_takes_several_windows(
    make_daemon, folder: pathlib.Path, remote: pathlib.Path
) -> None:
    """In less memory than it has; the last window's copy in memory is bad, and only that comes from the drive."""
    daemon = make_daemon(TIERS, ["nvme", "remote"])
    torch.manual_seed(1)
    large = torch.randint(0, 256, (150 << 20,), dtype=torch.uint8)
    text = json.dumps("0123456789abcdef" * (2 << 20)).encode()
    policy = {"nvme": {"every_steps": 1}}
    job = _core.Job("job", rank=0, world_size=1, socket=str(daemon.socket), policy=policy)
    tensors = _core.TensorList()
    for name, tensor in (("a.small", large[:3]), ("large", large), ("z.small", large[3:9])):
        tensors.add(name, "U8", tensor.shape)
    addresses = [large.data_ptr(), large.data_ptr(), large[3:].data_ptr()]
    job.save(10, tensors, addresses, [("text", text, None)]).wait("nvme", 120)
    slot = next(each for each in daemon.memory.iterdir() if each.name.startswith("slot-") and "." not in each.name)  # fmt: skip
    with open(slot, "r+b") as file:
        file.seek(145 << 20)
        byte = file.read(1)
        file.seek(145 << 20)
        file.write(bytes([byte[0] ^ 1]))
    limited = ("prlimit", f"--data={260 << 20}")
    done = ckptctl(daemon, "backup", "job", folder, "--json", before=limited)
    assert done.returncode == 0, done.stderr
    assert "copy in memory" in json.loads(done.stdout)["steps"][0]["notes"][0]
    brought(folder, remote)
    for place in (folder, remote):
        loaded = load_file(place / "job" / "10-a1" / "shard-00000-of-00001.safetensors")
        assert torch.equal(loaded["large"], large)
        assert torch.equal(loaded["z.small"], large[3:9])
        assert loaded["holdfast:0000000:json:text"].numpy().tobytes() == text


def test_from_another_nodes_memory(make_daemon, folder: pathlib.Path) -> None:
    """What lies in one node's memory alone, asked of another one's daemon."""
    ports = {name: free_port() for name in ("n1", "n2")}
    members = ", ".join(f'{{name: {name}, address: "127.0.0.1:{port}"}}' for name, port in ports.items())  # fmt: skip
    nodes = [
        make_daemon(
            f"node_name: {name}\n"
            f'cluster: {{listen_address: "127.0.0.1:{port}", members: [{members}]}}\n'
        )
        for name, port in ports.items()
    ]
    save(nodes[0], wait="committed")
    said = answer(nodes[1], "backup", "job", folder)
    assert 30 in states(said)
    is_whole(folder, states(said))


def test_out_of_the_remote_directory_of_a_cluster(
    saved_once: Daemon, folder: pathlib.Path, remote: pathlib.Path
) -> None:
    """Whose files leave out what others have: they are brought as they are, and a backup of them is whole again."""
    brought(saved_once.root / "remote", remote)
    has_nothing_half_done(remote)
    for rank in range(RANKS):
        there = file_of(remote, 30, rank).read_bytes()
        assert there == file_of(saved_once.root / "remote", 30, rank).read_bytes()
    with own_daemon(REMOTE.replace("ROOT/remote", str(remote))) as new:
        new.ctl("rebuild", "--tier", "remote")
        assert states(answer(new, "backup", "job", folder)) == dict.fromkeys(STEPS, "written")
        is_whole(folder)
        assert restore(new, RANKS) == [(30, 2)] * RANKS
    # What lies there is of the same content, whatever its files leave out.
    assert states(brought(folder, remote)) == dict.fromkeys(STEPS, "was_there")


def test_a_backup_is_a_remote_directory(backed_up: pathlib.Path, remote: pathlib.Path) -> None:
    remote.rmdir()
    shutil.copytree(backed_up, remote)
    with own_daemon(REMOTE.replace("ROOT/remote", str(remote))) as new:
        assert restore(new, RANKS) == [(30, 2)] * RANKS
        assert "every digest is right" in new.ctl("verify", "job", "--all", "--tier", "remote")


# ---- damage ----


def flip(path: pathlib.Path) -> None:
    """One bit of what begins with MARK, which is there once."""
    data = path.read_bytes()
    assert data.count(MARK) == 1
    path.write_bytes(data.replace(MARK, bytes([MARK[0] ^ 1]) + MARK[1:]))


def test_a_bit_that_flipped_in_memory_is_passed_over(
    make_daemon, folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    daemon = make_daemon(TIERS, ["nvme", "remote"])
    save(daemon)
    for slot in daemon.memory.iterdir():
        if slot.is_file() and slot.read_bytes().count(MARK):
            with open(slot, "r+b") as file:
                file.seek(slot.read_bytes().find(MARK))
                file.write(bytes([MARK[0] ^ 1]))
    said = answer(daemon, "backup", "job", folder)
    assert states(said) == dict.fromkeys(STEPS, "written")
    assert any("memory" in note and "digest" in note for note in said["steps"][0]["notes"]), said
    is_whole(folder)


def test_what_is_bad_everywhere_is_named_and_the_rest_is_there(
    make_daemon, folder: pathlib.Path
) -> None:
    daemon = make_daemon(TIERS, ["nvme", "remote"])
    monkey = {"HOLDFAST_SOCKET": str(daemon.socket)}
    save(daemon)
    os.environ.update(monkey)
    leave_only("nvme", daemon)
    for path in (daemon.root / "nvme" / "job" / "20-a1").glob("*.safetensors"):
        flip(path)
    for path in (daemon.root / "remote" / "job" / "20-a1").glob("*.safetensors"):
        if path.read_bytes().count(MARK):
            flip(path)
    done = ckptctl(daemon, "backup", "job", folder)
    assert done.returncode == 1, done.stderr
    assert "step 20 (attempt 1): BAD: " in done.stdout and "model.mark" in done.stdout
    assert f"2 steps of job job are in {folder}, 1 not" in done.stdout
    is_whole(folder, (30, 10))
    assert not (folder / "job" / "20-a1" / "MANIFEST").exists()


def test_a_step_that_is_bad_everywhere_is_brought_back(
    make_daemon, folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As docs/operations.md has it ("Mend a copy")."""
    daemon = make_daemon(TIERS, ["nvme", "remote"])
    monkeypatch.setenv("HOLDFAST_SOCKET", str(daemon.socket))
    save(daemon)
    answer(daemon, "backup", "job", folder)
    leave_only("remote", daemon)
    remote = daemon.root / "remote"
    flip(file_of(remote, 20, 1))
    assert ckptctl(daemon, "verify", "job", "--step", "20").returncode == 1
    done = ckptctl(daemon, "repair", "job", "--step", "20")
    assert done.returncode == 1 and "there is no good copy of it anywhere" in done.stdout
    # What is there is told by its record, and never replaced.
    before = file_of(remote, 20, 1).read_bytes()
    assert states(brought(folder, remote, "--step", "20")) == {20: "was_there"}
    assert file_of(remote, 20, 1).read_bytes() == before
    daemon.ctl("rm", "job", "--step", "20", "--tier", "remote")
    wait_until("the step's files gone", lambda: not file_of(remote, 20, 1).parent.exists())
    # The cluster that has the attempt itself takes nothing of it from a program.
    refused(restore_backup(folder, remote, "--step", "20"), "was claimed by another opening")
    shutil.copytree(folder / "job" / "20-a1", daemon.root / "aside")
    (daemon.root / "aside").rename(remote / "job" / "20-a1")
    daemon.ctl("rebuild", "--tier", "remote")
    assert "every digest is right" in daemon.ctl("verify", "job", "--step", "20")
    assert restore(daemon, RANKS, step=20) == [(20, 2)] * RANKS


@pytest.fixture
def damaged(backed_up: pathlib.Path, folder: pathlib.Path) -> pathlib.Path:
    shutil.rmtree(folder)
    shutil.copytree(backed_up, folder)
    return folder


def test_a_bit_that_flipped_in_the_backup(damaged: pathlib.Path, remote: pathlib.Path) -> None:
    bad = file_of(damaged, 20, 1)
    flip(bad)
    done = restore_backup(damaged, remote)
    assert done.returncode == 1
    assert f"step 20 (attempt 1): BAD: '{bad}'" in done.stdout or str(bad) in done.stdout
    assert "step 30 (attempt 1): 3 ranks" in done.stdout
    is_whole(remote, (30, 10))
    has_nothing_half_done(remote, (30, 10))
    flip_back = bad.read_bytes().replace(bytes([MARK[0] ^ 1]) + MARK[1:], MARK)
    bad.write_bytes(flip_back)
    assert states(brought(damaged, remote)) == {30: "was_there", 20: "written", 10: "was_there"}
    is_whole(remote)


@pytest.mark.parametrize("what", ["cut", "gone", "record", "manifest", "no manifest"])
def test_other_damage_of_the_backup(what: str, damaged: pathlib.Path, remote: pathlib.Path) -> None:
    image = file_of(damaged, 20, 1)
    manifest = image.parent / "MANIFEST"
    if what == "cut":
        os.truncate(image, image.stat().st_size - 1)
    elif what == "gone":
        image.unlink()
    elif what == "record":
        record = image.with_suffix(".record")
        record.write_bytes(record.read_bytes()[:-1])
    elif what == "manifest":
        manifest.write_bytes(manifest.read_bytes()[:-9] + b"123456789")
    else:
        manifest.unlink()
    done = restore_backup(damaged, remote, "--json")
    said = json.loads(done.stdout)
    of_20 = next(step for step in said["steps"] if step["step"] == 20)
    if what == "no manifest":
        assert (done.returncode, of_20["state"]) == (0, "incomplete")
    else:
        assert (done.returncode, of_20["state"], of_20["damaged"]) == (1, "failed", True)
        named = manifest if what == "manifest" else image.with_suffix("")
        assert str(named) in of_20["why"], of_20
    is_whole(remote, (30, 10))
    has_nothing_half_done(remote, (30, 10))


def test_what_was_lost_of_a_backup_is_put_back(
    saved_once: Daemon, damaged: pathlib.Path, remote: pathlib.Path
) -> None:
    image = file_of(damaged, 20, 1)
    image.unlink()
    image.with_suffix(".record").unlink()
    assert states(answer(saved_once, "backup", "job", damaged))[20] == "written"
    is_whole(damaged)
    os.truncate(image, 5000)
    done = ckptctl(saved_once, "backup", "job", damaged)
    assert done.returncode == 1 and str(image) in done.stdout, done.stdout


# ---- directories that are not fit for it ----


def refused(done: subprocess.CompletedProcess[str], *words: object) -> None:
    assert done.returncode == 4, done.stdout + done.stderr
    assert [word for word in words if str(word) not in done.stderr] == [], done.stderr


def test_directories_that_will_not_do(
    saved_once: Daemon, backed_up: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    none, file = tmp_path / "none", tmp_path / "file"
    file.write_text("a file")
    for place, why in ((none, "mount it, or make it"), (file, "ot a directory")):
        refused(ckptctl(saved_once, "backup", "job", place), "back up job job into", place, why)
        refused(restore_backup(backed_up, place), "bring job job from", backed_up, place, why)
        refused(restore_backup(place, tmp_path), place, why)
    assert not none.exists()
    refused(restore_backup(tmp_path, tmp_path), "has no job 'job'; it has none at all")
    refused(restore_backup(backed_up, backed_up), "both are one directory")
    other = subprocess.run(
        [CKPTCTL, "restore-backup", backed_up, "jab", "--to", tmp_path],
        capture_output=True, text=True, timeout=DEADLINE_S,
    )  # fmt: skip
    refused(other, "has no job 'jab'; it has job")


def test_the_clusters_own_remote_directory_is_none(make_daemon) -> None:
    daemon = make_daemon(REMOTE, ["remote"])
    save(daemon, [10])
    image = file_of(daemon.root / "remote", 10, 0)
    for each in (image, image.with_suffix(".record"), image.parent / "MANIFEST"):
        each.unlink()
    done = ckptctl(daemon, "backup", "job", daemon.root / "remote")
    refused(done, "was claimed by another opening", "Name another directory")


def test_another_run_of_that_name(make_daemon, backed_up, tmp_path: pathlib.Path) -> None:
    other = make_daemon(REMOTE, ["remote"])
    save(other, [10])
    before = sorted(path for path in backed_up.rglob("*"))
    words = ("has another run of job 'job'", "name another directory")
    refused(ckptctl(other, "backup", "job", backed_up), *words)
    refused(restore_backup(backed_up, other.root / "remote"), *words)
    assert sorted(path for path in backed_up.rglob("*")) == before


def test_the_same_step_of_other_content(
    make_daemon, folder: pathlib.Path, remote: pathlib.Path
) -> None:
    """Two clusters went on with one job, each by itself."""
    one, other = make_daemon(REMOTE, ["remote"]), make_daemon(REMOTE, ["remote"])
    save(one, [10])
    answer(one, "backup", "job", folder)
    brought(folder, other.root / "remote")
    for daemon in (one, other):
        save(daemon, [20])
    steps = answer(one, "backup", "job", folder)
    assert steps["ok"]
    done = ckptctl(other, "backup", "job", folder)
    assert done.returncode == 4, done.stdout
    assert "FAILED: " in done.stdout and "is another save of that step" in done.stdout
    is_whole(folder, [10])


# A directory of the test's own file system, which nobody else sees.
IN_A_FILE_SYSTEM = """
set -e
folder=$1 size=$2 out=$3; shift 3
mount -t tmpfs -o size=$size tmpfs $folder
code=0; "$@" || code=$?
find $folder -name '*.safetensors' -o -name '*.tmp' > $out/names
mount -o remount,size=64M $folder
"$@" > $out/second
cp -r $folder/. $out/all
exit $code
"""

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="root may mount")


@needs_root
@pytest.mark.parametrize("command", ["backup", "restore-backup"])
def test_a_full_disk(
    command: str, saved_once: Daemon, backed_up: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    disk, out = tmp_path / "disk", tmp_path / "out"
    disk.mkdir()
    out.mkdir()
    words = (
        ["backup", "job", disk, f"--socket={saved_once.admin}"]
        if command == "backup"
        else ["restore-backup", backed_up, "job", "--to", disk]
    )
    own = ["unshare", "--mount", "sh", "-c", IN_A_FILE_SYSTEM, "sh", disk, "5M", out]
    done = subprocess.run(
        [*own, CKPTCTL, *words, "--step", "30", "--step", "20", "--step", "10"],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    refused(
        done, "No space left", "ENOSPC", f"into '{disk}'", "make room for", "1 step that is whole"
    )
    names = (out / "names").read_text()
    assert names.count(".safetensors") == len(names.split()) == 4, names
    assert "was there already" in (out / "second").read_text()
    is_whole(out / "all")
    has_nothing_half_done(out / "all")


@needs_root
def test_a_directory_that_cannot_be_written(
    saved_once: Daemon, backed_up: pathlib.Path, tmp_path: pathlib.Path, remote: pathlib.Path
) -> None:
    (tmp_path / "disk").mkdir()
    mount = 'mount -t tmpfs -o ro tmpfs "$1"; shift; exec "$@"'
    own = ("unshare", "--mount", "sh", "-c", mount, "sh", str(tmp_path / "disk"))
    done = ckptctl(saved_once, "backup", "job", tmp_path / "disk", before=own)
    refused(done, "EROFS", f"into '{tmp_path / 'disk'}'")
    # To read a backup it need not be.
    bind = 'mount --bind "$1" "$1"; mount -o remount,ro,bind "$1"; shift; exec "$@"'
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", bind, "sh", backed_up, CKPTCTL, "restore-backup",
         backed_up, "job", "--to", remote],
        capture_output=True, text=True, timeout=DEADLINE_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    is_whole(remote)


@needs_root
def test_whose_files_they_are(
    make_daemon: Callable[..., Daemon], folder: pathlib.Path, remote: pathlib.Path
) -> None:
    """The job's user reads them, here and there, and has the job in the other cluster."""
    user = group = 65_534  # whose group is of the same number, known or not
    daemon = make_daemon()
    os.chmod(daemon.root, 0o755)

    def work(rank: int) -> None:
        os.environ["HOLDFAST_SOCKET"] = str(daemon.socket)
        os.setegid(group)
        os.seteuid(user)
        with holdfast.Checkpointer("job", policy=POLICY) as ckpt:
            ckpt.save(10, state_of(rank, RANKS, tensors_of(10)), wait="committed", timeout=120)
        os.seteuid(0)

    run_ranks(RANKS, work, group=False)
    answer(daemon, "backup", "job", folder)
    brought(folder, remote)
    for place in (folder, remote):
        for path in place.joinpath("job").rglob("*"):
            stat = path.stat()
            mine = path.suffix in (".safetensors", ".record") or path.name.startswith(
                ("MAN", "man")
            )
            assert (stat.st_uid, stat.st_gid) == (user if mine else 0, group), path
            assert stat.st_mode & 0o7777 == (0o750 if path.is_dir() else 0o640), path
    with own_daemon(REMOTE.replace("ROOT/remote", str(remote))) as new:
        new.ctl("rebuild", "--tier", "remote")
        status = json.loads(new.ctl("status", "job", "--json"))["jobs"][0]
        assert status["uid"] == user
    given = restore_backup(folder, remote, "--owner", f"{user + 1}:{group}")
    refused(given, f"of uid {user} and gid {group} there already")
    shutil.rmtree(remote / "job")
    brought(folder, remote, "--owner", f"{user + 1}:{group + 1}")
    stat = file_of(remote, 10, 0).stat()
    assert (stat.st_uid, stat.st_gid) == (user + 1, group + 1)
    with own_daemon(REMOTE.replace("ROOT/remote", str(remote))) as new:
        new.ctl("rebuild", "--tier", "remote")
        assert json.loads(new.ctl("status", "job", "--json"))["jobs"][0]["uid"] == user + 1
