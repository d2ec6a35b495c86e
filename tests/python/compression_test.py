"""policy.remote.compression: what lies in the remote tier is compressed, and everybody who reads it reads what was saved."""

from __future__ import annotations

import pathlib
import subprocess
from typing import Any

import pytest
import torch
from ranks import run_ranks
from safetensors.torch import load_file
from split_state import answer, ckptctl, same_bits

import holdfast
from daemons import DEADLINE_S, Daemon
from holdfast import dcp

RANKS = 3
ROWS = 1200  # of 2 KiB: each rank's part has more than one frame
COLUMNS = 1024
POLICY = holdfast.Policy(remote_every_steps=1)
SETTINGS = (
    "remote: {dir: ROOT/remote}\npolicy: {remote: {every_steps: 1, compression: zstd, OTHERS}}\n"
)


def settings(others: str = "verify: all") -> str:
    return SETTINGS.replace("OTHERS", others)


@pytest.fixture
def compressed(make_daemon, monkeypatch: pytest.MonkeyPatch) -> Daemon:
    daemon = make_daemon(settings(), ["remote"])
    monkeypatch.setenv("HOLDFAST_SOCKET", str(daemon.socket))
    return daemon


def weights(seed: int = 0) -> dict[str, torch.Tensor]:
    """As models have them: bf16 around zero, whose exponents are few."""
    torch.manual_seed(seed)
    return {
        "model.split": (torch.randn(ROWS, COLUMNS) * 0.02).to(torch.bfloat16),
        "model.alike": torch.randn(1 << 20) * 0.02,
        "optim.moment": torch.rand(3, 1 << 19).to(torch.bfloat16),
    }


def state_of(rank: int, ranks: int, whole: dict[str, torch.Tensor]) -> dict[str, Any]:
    each = ROWS // ranks
    rows = whole["model.split"][rank * each : (rank + 1) * each].clone()
    part = holdfast.Part(rows, shape=(ROWS, COLUMNS), offset=(rank * each, 0))
    return {
        "model": {"split": part, "alike": whole["model.alike"].clone()},
        "optim": {"moment": whole["optim.moment"].clone()},
        "extra": {"epoch": 3},
    }


def save(whole: dict[str, torch.Tensor], ranks: int = RANKS, step: int = 7) -> None:
    def work(rank: int) -> None:
        with holdfast.Checkpointer("job", policy=POLICY) as ckpt:
            ckpt.save(step, state_of(rank, ranks, whole), wait="remote", timeout=DEADLINE_S)

    run_ranks(ranks, work, group=False)


def zeros() -> dict[str, torch.Tensor]:
    return {name: torch.zeros_like(each) for name, each in weights().items()}


def restore(ranks: int, whole: dict[str, torch.Tensor]) -> None:
    """On so many ranks: each has what it saved, or would have saved."""

    def work(rank: int) -> None:
        got, wanted = state_of(rank, ranks, zeros()), state_of(rank, ranks, whole)
        with holdfast.Checkpointer("job", policy=POLICY) as ckpt:
            assert ckpt.restore(got) == 8
        for top, key in (("model", "split"), ("model", "alike"), ("optim", "moment")):
            one, other = got[top][key], wanted[top][key]
            if isinstance(one, holdfast.Part):
                one, other = one.tensor, other.tensor
            assert same_bits(one, other), (rank, key)
        assert got["extra"]["epoch"] == 3

    run_ranks(ranks, work, group=False)


def forget_memory(daemon: Daemon) -> None:
    daemon.stop()
    for slot in daemon.memory.iterdir():
        slot.unlink() if slot.is_file() else None
    daemon.start()


def images(daemon: Daemon) -> list[pathlib.Path]:
    return sorted((daemon.root / "remote" / "job" / "7-a1").glob("shard-*.safetensors*"))


def test_zstd_gives_back_the_very_safetensors_files(
    compressed: Daemon, tmp_path: pathlib.Path
) -> None:
    whole = weights()
    save(whole)
    assert [path.name for path in images(compressed)] == [
        f"shard-{rank:05}-of-00003.safetensors.zst" for rank in range(RANKS)
    ]
    found: dict[str, torch.Tensor] = {}
    for path in images(compressed):
        plain = tmp_path / path.name.removesuffix(".zst")
        subprocess.run(["zstd", "-q", "-d", path, "-o", plain], check=True)
        assert path.stat().st_size < plain.stat().st_size * 0.95
        found |= load_file(plain)
    assert same_bits(found["model.alike"], whole["model.alike"])
    text = ckptctl(compressed, "status").stdout
    assert "compressed (zstd, level 3)" in text and "saved by compression" in text
    assert ckptctl(compressed, "verify", "job", "--all").returncode == 0


@pytest.mark.parametrize("ranks", [RANKS, 1, 2, 4])
def test_restored_on_any_number_of_ranks(compressed: Daemon, ranks: int) -> None:
    whole = weights()
    save(whole)
    forget_memory(compressed)
    restore(ranks, whole)


@pytest.mark.parametrize("shared", [True, False])
def test_whoever_reads_it(
    make_daemon, monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path, shared: bool
) -> None:
    """Of files that leave slices out, as other ranks' have them, and of those that do not."""
    daemon = make_daemon(settings(f"share_replicas: {str(shared).lower()}"), ["remote"])
    monkeypatch.setenv("HOLDFAST_SOCKET", str(daemon.socket))
    whole = weights()
    save(whole)
    forget_memory(daemon)
    # holdfast.open: one tensor of all ranks, and what is no tensor.
    with holdfast.open("job") as saved:
        assert saved.tiers == ["remote"] * RANKS
        for name, tensor in whole.items():
            assert same_bits(saved.tensor(name), tensor), name
        assert saved.value("extra.epoch", rank=2) == 3
        saved.verify()
    # The distributed checkpoint's reader.
    got = zeros()
    torch.distributed.checkpoint.load(got, storage_reader=dcp.Reader("job"), no_dist=True)
    assert [name for name in whole if not same_bits(got[name], whole[name])] == []
    # Programs beside the job.
    answer(daemon, "export", "job", tmp_path / "set")
    exported = load_file(tmp_path / "set" / "model.safetensors")
    assert [name for name in whole if not same_bits(exported[name], whole[name])] == []
    counted = answer(daemon, "stats", "job")
    assert {each["name"] for each in counted["tensors"]} >= set(whole)
    (tmp_path / "backup").mkdir()
    answer(daemon, "backup", "job", tmp_path / "backup")
    plain = sorted((tmp_path / "backup" / "job" / "7-a1").glob("shard-*"))
    assert sum(path.suffix == ".safetensors" for path in plain) == RANKS


def test_damage_is_found_by_whoever_reads_it(compressed: Daemon) -> None:
    whole = weights()
    save(whole)
    # Each in another rank's file: what is found is mended by itself, as a plain one.
    for path, damage in zip(images(compressed), ("frame", "seek table", "cut"), strict=True):
        content = bytearray(path.read_bytes())
        if damage == "cut":
            content.pop()
        else:
            content[len(content) // 2 if damage == "frame" else len(content) - 3] ^= 4
        path.write_bytes(content)
        done = ckptctl(compressed, "verify", "job", "--tier", "remote")
        assert done.returncode == 1 and str(path) in done.stdout, (damage, done.stdout)


def test_without_a_good_copy_a_step_is_not_restored(compressed: Daemon) -> None:
    whole = weights()
    save(whole)
    path = images(compressed)[0]
    content = bytearray(path.read_bytes())
    content[len(content) // 3] ^= 1
    path.write_bytes(content)
    forget_memory(compressed)

    def work(rank: int) -> int:
        with holdfast.Checkpointer("job", policy=POLICY) as ckpt:
            return ckpt.restore(state_of(rank, 1, zeros()))

    with pytest.raises(AssertionError, match="bad|damaged|corrupt"):
        run_ranks(1, work, group=False)


def test_what_does_not_compress_is_left_as_it_is(compressed: Daemon) -> None:
    noise = {
        "model.split": torch.randint(-(2**15), 2**15, (ROWS, COLUMNS), dtype=torch.int16).view(
            torch.bfloat16
        ),
        "model.alike": torch.randint(-(2**31), 2**31 - 1, (1 << 20,))
        .to(torch.int32)
        .view(torch.float32),
        "optim.moment": torch.randint(-(2**15), 2**15, (3, 1 << 19), dtype=torch.int16).view(
            torch.bfloat16
        ),
    }
    save(noise)
    assert {path.suffix for path in images(compressed)} == {".safetensors"}


def test_a_job_may_be_told_to_while_it_runs(make_daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    # (Not "job": what DCP has loaded of that in this process, its next Checkpointer goes on from.)
    daemon = make_daemon("remote: {dir: ROOT/remote}\n", ["remote"])
    monkeypatch.setenv("HOLDFAST_SOCKET", str(daemon.socket))
    state = state_of(0, 1, weights())
    folder = daemon.root / "remote" / "told"
    with holdfast.Checkpointer("told", policy=POLICY) as ckpt:
        ckpt.save(1, state, wait="remote", timeout=DEADLINE_S)
        daemon.ctl("set", "told", "remote.compression=zstd", "remote.compression_level=1")
        ckpt.save(2, state, wait="remote", timeout=DEADLINE_S)
        daemon.ctl("set", "told", "remote.compression=none")
        ckpt.save(3, state, wait="remote", timeout=DEADLINE_S)
    names = [next(iter(folder.glob(f"{step}-a1/shard-*.s*"))).name for step in (1, 2, 3)]
    assert [name.endswith(".zst") for name in names] == [False, True, False]


def test_a_remote_directory_of_both_forms_is_one_job(compressed: Daemon) -> None:
    """Whoever unpacks a file by hand, and forgets the other, has done no harm."""
    whole = weights()
    save(whole)
    first, second, _ = images(compressed)
    for path in (first, second):
        subprocess.run(["zstd", "-q", "-d", path], check=True)
    first.unlink()
    forget_memory(compressed)
    restore(RANKS, whole)
    assert ckptctl(compressed, "verify", "job", "--all").returncode == 0
    assert ckptctl(compressed, "rm", "job", "--yes").returncode == 0
    assert not (compressed.root / "remote" / "job").exists()
