"""holdfast.open and holdfast.checkpoints: a step to look at, from whatever tier is nearest."""

from __future__ import annotations

import pathlib
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
from training import wait_until

import holdfast
from daemons import DEADLINE_S, Daemon
from holdfast import _core

TIERS = "nvme: {dirs: [ROOT/nvme]}\nremote: {dir: ROOT/remote}\n"
POLICY = holdfast.Policy(nvme_every_steps=1, remote_every_steps=1)


@pytest.fixture
def tiers(make_daemon, monkeypatch: pytest.MonkeyPatch) -> Daemon:
    daemon = make_daemon(TIERS, ["nvme", "remote"])
    monkeypatch.setenv("HOLDFAST_SOCKET", str(daemon.socket))
    return daemon


def state_of(seed: int = 0) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8))
    optim = torch.optim.AdamW(model.parameters())
    model(torch.randn(3, 4)).sum().backward()
    optim.step()
    extra = {"epoch": 3, "betas": (0.9, 0.95), "order": torch.arange(5), "np": np.arange(3.0)}
    return {"model": model, "optim": optim, "extra": extra}


def save(state: dict[str, Any], *steps: int) -> None:
    with holdfast.Checkpointer("job", policy=POLICY) as ckpt:
        for step in steps:
            ckpt.save(step, state, wait="remote", timeout=60)


def test_names_types_and_tensors(daemon: Daemon) -> None:
    state = state_of()
    with holdfast.Checkpointer("job") as ckpt:
        ckpt.save(7, state, wait="committed", timeout=60)
    with holdfast.open("job") as saved:
        assert (saved.step, saved.attempt, saved.world_size, saved.tiers) == (7, 1, 1, ["memory"])
        assert "model.0.weight" in saved and "nothing" not in saved
        assert list(saved) == saved.keys() and len(saved) == len(saved.keys())
        assert saved.shape("model.0.weight") == (8, 4)
        assert saved.dtype("model.0.weight") == "F32"
        for name, value in state["model"].state_dict().items():
            assert torch.equal(saved.tensor(f"model.{name}"), value)
            np.testing.assert_array_equal(saved.numpy(f"model.{name}"), value.numpy())
        with pytest.raises(
            holdfast.NotFoundError, match="no tensor 'weight' in step 7; perhaps 'model"
        ):
            saved.tensor("weight")
    with pytest.raises(holdfast.InvalidArgumentError, match="closed"):
        saved.tensor("model.0.weight")


def test_values(daemon: Daemon) -> None:
    state = state_of()
    with holdfast.Checkpointer("job") as ckpt:
        ckpt.save(7, state, wait="committed", timeout=60)
    with holdfast.open("job") as saved:
        extra = saved.value("extra")
        assert extra["epoch"] == 3 and extra["betas"] == (0.9, 0.95)
        assert extra["order"].tolist() == [0, 1, 2, 3, 4]
        assert saved.value("extra.betas.1") == 0.95
        assert saved.value("extra.np").tolist() == [0, 1, 2]
        assert set(saved.value("model")) == set(state["model"].state_dict())
        optim = saved.value("optim")
        moment = state["optim"].state[state["model"][0].weight]["exp_avg"]
        assert torch.equal(optim["state"]["model.0.weight"]["exp_avg"], moment)
        assert optim["param_groups"][0]["lr"] == 1e-3
        assert set(saved.value()) == {"model", "optim", "extra"}
        with pytest.raises(holdfast.NotFoundError, match="'extra.lr' was not saved; under 'extra'"):
            saved.value("extra.lr")
        with pytest.raises(holdfast.NotFoundError, match="1 ranks saved"):
            saved.value("extra", rank=1)


def test_what_is_read_outlives_the_checkpoint(daemon: Daemon) -> None:
    state = state_of()
    with holdfast.Checkpointer("job") as ckpt:
        ckpt.save(7, state, wait="committed", timeout=60)
    with holdfast.open("job") as saved:
        weight = saved.tensor("model.0.weight")
    assert torch.equal(weight, state["model"][0].weight)


def start_and_look(tiers: Daemon) -> None:
    """Until the daemon has read what lies on its drive: before that it knows of remote alone, perhaps."""
    tiers.start()
    wait_until(
        "step on nvme",
        lambda: any("nvme" in found.tiers for found in holdfast.checkpoints("job")),
    )


def test_the_nearest_tier(tiers: Daemon) -> None:
    state = state_of()
    save(state, 1, 2)
    weight = state["model"][0].weight

    def check(tier: str) -> None:
        with holdfast.open("job") as saved:
            assert (saved.step, saved.tiers) == (2, [tier])
            assert torch.equal(saved.tensor("model.0.weight"), weight)
            saved.verify()

    check("memory")
    tiers.stop()
    for slot in tiers.memory.iterdir():
        slot.unlink() if slot.is_file() else None
    start_and_look(tiers)
    check("nvme")
    for image in (tiers.root / "nvme").rglob("*.safetensors"):
        image.unlink()
    check("remote")


def test_a_flipped_bit_is_found(tiers: Daemon) -> None:
    marked = torch.frombuffer(bytearray(b"weights!"), dtype=torch.uint8)
    save({**state_of(), "marked": marked}, 1)
    tiers.stop()
    for slot in tiers.memory.iterdir():
        slot.unlink() if slot.is_file() else None
    (nvme,) = (tiers.root / "nvme").rglob("*.safetensors")
    (remote,) = (tiers.root / "remote").rglob("*.safetensors")
    flip(nvme, b"weights!")
    start_and_look(tiers)
    with holdfast.open("job") as saved:
        assert saved.tiers == ["nvme"]
        with pytest.raises(holdfast.CorruptError, match="marked"):
            saved.verify()
        # The good copy is further away.
        assert bytes(saved.tensor("marked").numpy()) == b"weights!"
        assert saved.tiers == ["remote"]
    flip(remote, b"weights!")
    with holdfast.open("job") as saved:
        with pytest.raises(holdfast.CorruptError, match="marked"):
            saved.tensor("marked")
        assert saved.tensor("model.0.weight").shape == (8, 4)
    # What is no tensor is looked at first: the copy is not used at all.
    flip(nvme, b'"epoch"')
    with holdfast.open("job") as saved:
        assert saved.tiers == ["remote"]
        assert saved.value("extra.epoch") == 3


def flip(path: pathlib.Path, what: bytes) -> None:
    data = path.read_bytes()
    assert data.count(what) == 1
    path.write_bytes(data.replace(what, bytes([what[0] ^ 1]) + what[1:]))


def test_parts_of_several_ranks_are_put_together(daemon: Daemon) -> None:
    whole = torch.arange(40.0).reshape(8, 5)
    flat = torch.arange(100, dtype=torch.int16)
    jobs = [_core.Job("job", rank=rank, world_size=2) for rank in range(2)]
    keep = []
    saves = []
    for rank, job in enumerate(jobs):
        rows = whole[rank * 4 : rank * 4 + 4].contiguous()
        part = flat[rank * 60 : rank * 60 + (60 if rank == 0 else 40)].contiguous()
        hole = torch.ones(3)
        tensors = _core.TensorList()
        tensors.add("rows", "F32", (8, 5), offset=(rank * 4, 0), local_shape=(4, 5))
        tensors.add("flat", "I16", (10, 10), flat=(rank * 60, len(part)))
        tensors.add("same", "F32", (3,))
        tensors.add("hole", "F32", (9,), offset=(rank * 4,), local_shape=(3,))
        keep += [rows, part, hole]
        addresses = [rows.data_ptr(), part.data_ptr(), hole.data_ptr(), hole.data_ptr()]
        saves.append(job.save(3, tensors, addresses, []))
    for one in saves:
        one.wait("committed", 60)
    with holdfast.open("job") as saved:
        assert saved.world_size == 2
        assert torch.equal(saved.tensor("rows"), whole)
        assert torch.equal(saved.tensor("flat"), flat.reshape(10, 10))
        np.testing.assert_array_equal(saved.numpy("rows"), whole.numpy())
        assert saved.tensor("same").tolist() == [1, 1, 1]
        with pytest.raises(holdfast.NotFoundError, match="hole: .* 6 of its elements"):
            saved.tensor("hole")


def test_what_ranks_have_of_their_own(daemon: Daemon) -> None:
    """Under one name: each rank's value is its own; types that differ are never put together."""
    ranks = [
        subprocess.Popen([sys.executable, "-c", OWN, str(rank)], stderr=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    for one in ranks:
        _, errors = one.communicate(timeout=DEADLINE_S)
        assert one.returncode == 0, errors
    with holdfast.open("own") as saved:
        for rank in range(2):
            value = saved.value("extra", rank=rank)
            assert value["rng"].tolist() == [rank] * 3 and value["n"] == rank
            assert value["np"].tolist() == [rank] * 2
            assert saved.tensor("extra.rng", rank=rank).tolist() == [rank] * 3
            assert saved.value("extra.odd", rank=rank).dtype == (torch.float32, torch.float64)[rank]
        with pytest.raises(holdfast.InvalidArgumentError, match="ranks disagree: rank 0 saved F32"):
            saved.tensor("extra.odd")
        with pytest.raises(holdfast.NotFoundError, match="rank 1 saved no tensor 'extra.only'"):
            saved.tensor("extra.only", rank=1)


OWN = """
import sys, numpy as np, torch, holdfast
rank = int(sys.argv[1])
extra = {"rng": torch.full((3,), float(rank)), "np": np.full(2, rank), "n": rank}
extra["odd"] = torch.ones(4, dtype=(torch.float32, torch.float64)[rank])
if rank == 0:
    extra["only"] = torch.ones(1)
with holdfast.Checkpointer("own", rank=rank, world_size=2) as ckpt:
    ckpt.save(0, {"extra": extra}, wait="committed", timeout=60)
"""


def test_an_attempt_without_a_step_is_refused(daemon: Daemon) -> None:
    save_memory()
    with pytest.raises(holdfast.InvalidArgumentError, match="of which step"):
        holdfast.open("job", attempt=1)


def save_memory() -> None:
    with holdfast.Checkpointer("job") as ckpt:
        ckpt.save(1, {"w": torch.ones(2)}, wait="committed", timeout=60)
        with pytest.raises(holdfast.InvalidArgumentError, match="of which step"):
            ckpt.restore({"w": torch.ones(2)}, attempt=1)


def test_a_step_by_name_and_the_list_of_steps(tiers: Daemon) -> None:
    save(state_of(), 1, 2, 3)
    with holdfast.open("job", step=2) as saved:
        assert saved.step == 2
    found = holdfast.checkpoints("job")
    assert [(c.step, c.attempt, c.on_line) for c in found][0] == (3, 1, True)
    assert [c.step for c in found] == sorted((c.step for c in found), reverse=True)
    assert "remote" in found[0].tiers and found[0].world_size == 1
    with pytest.raises(holdfast.NotFoundError):
        holdfast.open("job", step=99)
    with pytest.raises(holdfast.HoldfastError):
        holdfast.open("nobody")


def test_without_a_daemon_it_says_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    monkeypatch.setenv("HOLDFAST_SOCKET", str(tmp_path / "none.sock"))
    with pytest.raises(holdfast.UnavailableError):
        holdfast.open("job", timeout=1)
