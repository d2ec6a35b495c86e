"""The demo's elastic part, run by scripts/demo.py with build/python: a GPT that is sharded by FSDP2 is trained by 4 ranks, then by
3, then by 4 again. After each start all of its state, put together, is compared with what the ranks before had.

The daemon is the demo's (HOLDFAST_SOCKET).
"""

from __future__ import annotations

import hashlib
import importlib.util
import pathlib
import sys
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests" / "python"))

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from ranks import run_ranks  # noqa: E402
from torch.distributed.fsdp import fully_shard  # noqa: E402
from torch.distributed.tensor import DTensor  # noqa: E402

import holdfast  # noqa: E402

STAGES = (4, 3, 4)  # ranks
STEPS = 5


def example() -> Any:
    spec = importlib.util.spec_from_file_location("train_gpt", ROOT / "examples" / "train_gpt.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def digest(model: torch.nn.Module, optim: torch.optim.Optimizer) -> str:
    """Of every parameter and all that the optimizer has for it, put together."""
    found = hashlib.sha256()
    for name, parameter in model.named_parameters():
        for key, value in [(name, parameter), *optim.state[parameter].items()]:
            whole = value.full_tensor() if isinstance(value, DTensor) else value
            found.update(key.encode())
            found.update(whole.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()[:16]


def train(rank: int) -> tuple[int, str | None, str, str]:
    """One start of the job: its first step, the restored digest (None: from scratch), why from there, and the digest that it left."""
    gpt = example()
    device = torch.device("cpu")
    torch.manual_seed(0)
    model = gpt.GPT(2, 64, 2, 32)
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    optim = torch.optim.AdamW(model.parameters(), lr=3e-3)
    text = gpt.Text(rank, dist.get_world_size(), 4, 32)
    with holdfast.Checkpointer("elastic") as ckpt:
        start = ckpt.restore({"model": model, "optim": optim, "text": text})
        restored = ckpt.last_restored
        found = None if restored is None else digest(model, optim)
        for step in range(start, start + STEPS):
            read, wanted = text.next(device)
            loss = torch.nn.functional.cross_entropy(model(read).flatten(0, 1), wanted.flatten())
            optim.zero_grad()
            loss.backward()
            optim.step()
            wait = "committed" if step == start + STEPS - 1 else None
            ckpt.save(step, {"model": model, "optim": optim, "text": text}, wait=wait)
        why = "" if restored is None else restored.why
        return start, found, why, digest(model, optim)


def main() -> int:
    before = None
    for number, ranks in enumerate(STAGES):
        results = run_ranks(ranks, train)
        start, found, why, left = results[0]
        if start == 0:
            print(f"    {ranks} ranks from scratch, {STEPS} steps: the state is {left}", flush=True)
        else:
            print(f"    {ranks} ranks: step {start - 1}, {why}", flush=True)
            print(f"      restored {found}, {STEPS} steps on: {left}", flush=True)
        if any(each[1] != before for each in results) or start != number * STEPS:
            print(f"it should have been {before}: {results}", file=sys.stderr)
            return 1
        before = left
    return 0


if __name__ == "__main__":
    sys.exit(main())
