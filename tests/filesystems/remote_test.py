"""The remote tier on GlusterFS and CephFS: a server dies in the middle of a flush and of a restore, the mount is cut off, the file
system is full. Training saves on, what is lost is said, and what was agreed comes back bit for bit."""

from __future__ import annotations

import concurrent.futures
import contextlib
import pathlib
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import safetensors.numpy
from ceph import Ceph
from gluster import Gluster
from mounted import DEADLINE_S, Mounted, wait_until

import holdfast
from daemons import Daemon, own_daemon

STATE_MIB = 96
FLOATS = STATE_MIB << 18
POLICY = holdfast.Policy(remote_every_steps=1, nvme_every_steps=0)


@pytest.fixture(scope="module", params=[Gluster, Ceph], ids=["gluster", "ceph"])
def mounted(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Mounted]:
    with contextlib.closing(request.param(tmp_path_factory.mktemp("servers"))) as one:
        yield one


@pytest.fixture
def start(
    mounted: Mounted, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., Daemon]]:
    """start("more: settings"): a daemon whose remote directory lies there; one of its own for each test."""
    remote = mounted.path / request.node.originalname
    remote.mkdir()
    with contextlib.ExitStack() as made:

        def begin(more: str = "") -> Daemon:
            one = made.enter_context(own_daemon(f"remote: {{dir: {remote}{more}}}\n"))
            monkeypatch.setenv("HOLDFAST_SOCKET", str(one.socket))
            return one

        yield begin
    shutil.rmtree(remote)


def state(step: int) -> dict[str, np.ndarray]:
    return {"w": np.random.default_rng(step).random(FLOATS, dtype=np.float32)}


def saved(ckpt: holdfast.Checkpointer, step: int, wait: str | None = None) -> holdfast.Handle:
    handle = ckpt.save(step, state(step), wait=wait, timeout=DEADLINE_S)  # type: ignore[arg-type]
    assert handle.error is None
    return handle


def after_a_reboot(daemon: Daemon, mounted: Mounted) -> None:
    """The daemon again, on a machine whose memory is empty, caches of files included."""
    daemon.stop()
    for path in daemon.memory.iterdir():
        path.unlink()
    mounted.mount_anew()
    daemon.start()


def is_stopped(daemon: Daemon) -> bool:
    """By a signal, as base/sync_point.h has it."""
    assert daemon.process is not None
    said = pathlib.Path(f"/proc/{daemon.process.pid}/stat").read_text()
    return said.rpartition(")")[2].split()[0] == "T"


def go_on(daemon: Daemon) -> None:
    assert daemon.process is not None
    daemon.process.send_signal(signal.SIGCONT)


def check_restored(step: int) -> None:
    found = {"w": np.zeros(FLOATS, np.float32)}
    with holdfast.Checkpointer("job", rank=0, world_size=1, policy=POLICY) as ckpt:
        assert ckpt.restore(found) == step + 1
    assert found["w"].tobytes() == state(step)["w"].tobytes()


def files_under_way(remote: pathlib.Path) -> list[pathlib.Path]:
    return [path for path in remote.glob("job/*/.*.tmp") if path.stat().st_size > 0]


def said_of_remote(daemon: Daemon) -> str:
    return "\n".join(
        line for line in daemon.ctl("status").splitlines() if "problem" in line and "remote" in line
    )


def remote_of(daemon: Daemon) -> pathlib.Path:
    (line,) = [
        line for line in daemon.config.read_text().splitlines() if line.startswith("remote:")
    ]
    return pathlib.Path(line.split("dir: ")[1].split(",")[0].rstrip("}"))


def test_a_step_comes_there_and_back(start: Callable[..., Daemon], mounted: Mounted) -> None:
    daemon = start()
    with holdfast.Checkpointer("job", rank=0, world_size=1, policy=POLICY) as ckpt:
        for step in (1, 2):
            saved(ckpt, step, wait="remote")
    # As anybody reads it.
    (image,) = remote_of(daemon).glob("job/2-a1/*.safetensors")
    assert safetensors.numpy.load_file(image)["w"].tobytes() == state(2)["w"].tobytes()
    after_a_reboot(daemon, mounted)
    check_restored(2)
    assert "every digest is right" in daemon.ctl("verify", "job", "--all", "--tier", "remote")
    assert said_of_remote(daemon) == ""


def test_a_server_dies_in_the_middle_of_a_flush(
    start: Callable[..., Daemon], mounted: Mounted
) -> None:
    daemon = start(", bandwidth_bytes_per_s_max: 16MiB")
    with holdfast.Checkpointer("job", rank=0, world_size=1, policy=POLICY) as ckpt:
        handle = saved(ckpt, 1, wait="committed")
        wait_until("the flush has begun", lambda: bool(files_under_way(remote_of(daemon))))
        mounted.lose_a_server()
        handle.wait("remote", timeout=DEADLINE_S)
    after_a_reboot(daemon, mounted)
    check_restored(1)
    mounted.bring_it_back()
    assert "every digest is right" in daemon.ctl("verify", "job", "--all", "--tier", "remote")


def test_a_server_dies_in_the_middle_of_a_restore(
    start: Callable[..., Daemon], mounted: Mounted, monkeypatch: pytest.MonkeyPatch
) -> None:
    daemon = start()
    with holdfast.Checkpointer("job", rank=0, world_size=1, policy=POLICY) as ckpt:
        saved(ckpt, 1, wait="remote")
    with monkeypatch.context() as armed:
        # It stops where so many MiB of the image have come, and no more are asked for.
        armed.setenv("HOLDFAST_SYNC_POINT", f"daemon.fetch.part_arrived:stop@{STATE_MIB // 4}")
        after_a_reboot(daemon, mounted)
    found = {"w": np.zeros(FLOATS, np.float32)}
    with (
        concurrent.futures.ThreadPoolExecutor(1) as threads,
        holdfast.Checkpointer("job", rank=0, world_size=1, policy=POLICY) as ckpt,
    ):
        restored = threads.submit(ckpt.restore, found)
        try:
            wait_until("a part has been read", lambda: restored.done() or is_stopped(daemon))
            assert not restored.done(), "it is done, or has failed, before it could be held up"
            mounted.lose_a_server()
            assert is_stopped(daemon) and not restored.done()
        finally:
            go_on(daemon)
        assert restored.result(DEADLINE_S) == 2  # the rest has come from the other servers
    assert found["w"].tobytes() == state(1)["w"].tobytes()
    after_a_reboot(daemon, mounted)
    check_restored(1)  # from what is left
    mounted.bring_it_back()


def test_saves_go_on_while_the_mount_is_cut_off(
    start: Callable[..., Daemon], mounted: Mounted
) -> None:
    daemon = start()
    with holdfast.Checkpointer("job", rank=0, world_size=1, policy=POLICY) as ckpt:
        saved(ckpt, 1, wait="remote")
        mounted.cut_off()
        try:
            for step in (2, 3):
                saved(ckpt, step, wait="committed")
            wait_until("it is said that remote is away", lambda: bool(said_of_remote(daemon)))
        finally:
            mounted.reconnect()
        # By itself, as soon as it can.
        handle = saved(ckpt, 4, wait="committed")
        handle.wait("remote", timeout=DEADLINE_S)
    wait_until("nothing is said of it any more", lambda: not said_of_remote(daemon))
    after_a_reboot(daemon, mounted)
    check_restored(4)


def test_a_process_is_not_held_up_by_a_mount_that_hangs(
    start: Callable[..., Daemon], mounted: Mounted
) -> None:
    """A run that comes back while the mount hangs restores from memory."""
    daemon = start()
    with holdfast.Checkpointer("job", rank=0, world_size=1, policy=POLICY) as ckpt:
        saved(ckpt, 1, wait="remote")
        saved(ckpt, 2, wait="committed").wait("remote", timeout=DEADLINE_S)
    mounted.cut_off()
    try:
        program = f"""
import numpy as np, holdfast
found = {{"w": np.zeros({FLOATS}, np.float32)}}
policy = holdfast.Policy(remote_every_steps=1, nvme_every_steps=0)
with holdfast.Checkpointer("job", rank=0, world_size=1, policy=policy) as ckpt:
    print(ckpt.restore(found), ckpt.last_restored.step, ckpt.last_restored.source, flush=True)
    ckpt.save(3, found, wait="committed")
"""
        done = subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, timeout=DEADLINE_S
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout == "3 2 memory\n"
    finally:
        mounted.reconnect()
    wait_until(
        "step 3 is in remote, too",
        lambda: (remote_of(daemon) / "job/3-a2/MANIFEST").exists(),
    )


def test_a_full_file_system_is_said_and_used_again(
    start: Callable[..., Daemon], mounted: Mounted
) -> None:
    daemon = start()
    with holdfast.Checkpointer("job", rank=0, world_size=1, policy=POLICY) as ckpt:
        saved(ckpt, 1, wait="remote")
        mounted.limit(FLOATS)  # a quarter of what a step needs
        try:
            for step in (2, 3):
                saved(ckpt, step, wait="committed")
            wait_until("it is said that remote is full", lambda: bool(said_of_remote(daemon)))
            assert any(word in said_of_remote(daemon) for word in ("space", "quota", "full")), (
                said_of_remote(daemon)
            )
            # What was there is as good as ever.
            assert "every digest is right" in daemon.ctl("verify", "job", "--step", "1", "--tier", "remote")  # fmt: skip
        finally:
            mounted.lift_limit()
        saved(ckpt, 4, wait="committed").wait("remote", timeout=DEADLINE_S)
    after_a_reboot(daemon, mounted)
    check_restored(4)
    # Nothing half written is left.
    assert files_under_way(remote_of(daemon)) == []
