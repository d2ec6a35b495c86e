"""A state that three ranks have split in every way there is, saved by three processes; and ckptctl, run on what they saved."""

from __future__ import annotations

import json
import os
import subprocess
from typing import Any

import torch
from ranks import run_ranks

import holdfast
from daemons import BIN, DEADLINE_S, Daemon

RANKS = 3
TIERS = "nvme: {dirs: [ROOT/nvme]}\nremote: {dir: ROOT/remote}\n"
POLICY = holdfast.Policy(nvme_every_steps=1, remote_every_steps=1)
CKPTCTL = BIN.resolve() / "ckptctl"


def whole(seed: int = 0) -> dict[str, torch.Tensor]:
    """What the ranks have together, by name: rows, columns, flat ranges, what all have; several types and shapes."""
    torch.manual_seed(seed)
    return {
        "model.rows": torch.randn(24, 7),
        "model.columns": torch.randn(5, 24).to(torch.bfloat16),
        "model.flat": torch.randn(11, 3).to(torch.float16),
        "model.norm.weight": torch.randn(300_000),
        "model.scale": torch.tensor(3.5, dtype=torch.float64),
        "model.empty": torch.zeros(0, 4),
        "model.f8": torch.randn(33).to(torch.float8_e4m3fn),
        "model.mask": torch.randn(9) > 0,
        "optim.moment": torch.randint(-(2**62), 2**62, (4, 5)),
    }


def part_of(rank: int, tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    """The state of one of them."""
    state: dict[str, Any] = {"extra": {"epoch": 3}}
    for name, tensor in tensors.items():
        top, _, key = name.partition(".")
        mine: Any = tensor
        if key == "rows":
            rows = tensor[rank * 8 : rank * 8 + 8].clone()
            mine = holdfast.Part(rows, shape=tensor.shape, offset=(rank * 8, 0))
        elif key == "columns":
            columns = tensor[:, rank * 8 : rank * 8 + 8].contiguous()
            mine = holdfast.Part(columns, shape=tensor.shape, offset=(0, rank * 8))
        elif key == "flat":
            flat = tensor.flatten()[rank * 11 : rank * 11 + 11].clone()
            mine = holdfast.Range(flat, shape=tensor.shape, start=rank * 11)
        state.setdefault(top, {})[key] = mine
    return state


def save_split(
    step: int = 7,
    tensors: dict[str, torch.Tensor] | None = None,
    *,
    own: bool = False,
    wait: str = "remote",
) -> dict[str, torch.Tensor]:
    """Saves it as that step of the job "job", and says what it was. `own`: each rank has values of its own, too."""
    saved = whole() if tensors is None else tensors

    def work(rank: int) -> None:
        state = part_of(rank, saved)
        if own:
            state["rng"] = {"cpu": torch.full((4,), rank, dtype=torch.uint8), "seed": rank}
        with holdfast.Checkpointer("job", policy=POLICY) as ckpt:
            ckpt.save(step, state, wait=wait, timeout=60)

    run_ranks(RANKS, work, group=False)
    return saved


def ckptctl(
    daemon: Daemon, *arguments: object, before: tuple[str, ...] = (), **variables: str
) -> subprocess.CompletedProcess[str]:
    """`before`: the program that runs it."""
    return subprocess.run(
        [*before, str(CKPTCTL), *map(str, arguments), "--socket", str(daemon.admin)],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )


def answer(daemon: Daemon, *arguments: object) -> dict[str, Any]:
    """What it says with --json; fails when it fails."""
    done = ckptctl(daemon, *arguments, "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return False
    one, other = (
        each.contiguous().flatten().view(torch.uint8).numpy().tobytes() for each in (a, b)
    )
    return one == other
