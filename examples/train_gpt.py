"""A small GPT that learns to add, and goes on where it was when it is killed: bit for bit.

    python examples/train_gpt.py                                         # one process, CPU or CUDA
    torchrun --nproc-per-node=2 --max-restarts=100 examples/train_gpt.py # DistributedDataParallel
    torchrun --nproc-per-node=2 --max-restarts=100 examples/train_gpt.py --fsdp
    torchrun --nproc-per-node=3 examples/train_gpt.py --fsdp             # the same job on three: it goes on

Kill a worker (kill -9) whenever you like: torchrun starts the workers again, `restore` finds the last step that all of them
had saved in this machine's memory, and the losses (`--losses FILE`) are those of a run that nobody disturbed. What Holdfast
has to do with it is marked with [holdfast]. Start it again under another `--job` to begin from scratch.
"""

from __future__ import annotations

import argparse
import contextlib
import os
from typing import Any

# cuBLAS is deterministic with this alone; it must be set before CUDA is.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import holdfast  # [holdfast]

ALPHABET = "0123456789+=\n"


class Text:
    """An endless text of additions ("47+5=52"), cut into pieces; `position` counts the pieces that all ranks have read."""

    def __init__(self, rank: int, world_size: int, batch: int, context: int) -> None:
        self.rank, self.world_size, self.batch, self.context = rank, world_size, batch, context
        self.position = 0

    def _piece(self, number: int) -> list[int]:
        numbers = torch.Generator().manual_seed(number)
        text = ""
        while len(text) <= self.context:
            a, b = torch.randint(100, (2,), generator=numbers).tolist()
            text += f"{a}+{b}={a + b}\n"
        return [ALPHABET.index(character) for character in text[: self.context + 1]]

    def next(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """This rank's part of the next batch: what is read, and what comes after each character."""
        first = self.position + self.rank * self.batch
        pieces = torch.tensor([self._piece(first + i) for i in range(self.batch)], device=device)
        self.position += self.batch * self.world_size
        return pieces[:, :-1], pieces[:, 1:]

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


class Block(nn.Module):
    def __init__(self, dim: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, dim = x.shape
        q, k, v = (
            self.qkv(self.norm_1(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        )
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.dropout(self.out(seen.transpose(1, 2).reshape(batch, length, dim)))
        return x + self.dropout(self.down(F.gelu(self.up(self.norm_2(x)))))


class GPT(nn.Module):
    def __init__(
        self, layers: int, dim: int, heads: int, context: int, dropout: float = 0.1
    ) -> None:
        super().__init__()
        self.characters, self.places = nn.Embedding(len(ALPHABET), dim), nn.Embedding(context, dim)
        self.blocks = nn.ModuleList(Block(dim, heads, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, len(ALPHABET), bias=False)
        self.head.weight = self.characters.weight  # tied: saved once, restored as one
        nn.init.normal_(self.characters.weight, std=0.02)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        x = self.characters(text) + self.places(torch.arange(text.shape[1], device=text.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def parallel(model: GPT, arguments: argparse.Namespace, device: torch.device) -> nn.Module:
    """The model as this run's ranks share it."""
    if not dist.is_initialized():
        return model
    if not arguments.fsdp:
        return DistributedDataParallel(
            model, device_ids=[device.index] if device.type == "cuda" else None
        )
    for block in model.blocks:
        fully_shard(block)
    return fully_shard(model)


def rng_state(device: torch.device) -> dict[str, torch.Tensor]:
    """Of this rank's generators: dropout draws from them."""
    state = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def set_rng_state(state: dict[str, torch.Tensor], device: torch.device) -> None:
    torch.set_rng_state(state["cpu"])
    if device.type == "cuda":
        torch.cuda.set_rng_state(state["cuda"], device)


def mean_over_ranks(loss: torch.Tensor) -> float:
    loss = loss.detach().clone()
    if dist.is_initialized():
        dist.all_reduce(loss)
        loss /= dist.get_world_size()
    return loss.item()


def train(arguments: argparse.Namespace, device: torch.device) -> None:
    rank, world_size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    torch.manual_seed(arguments.seed)  # the same weights everywhere
    model = parallel(
        GPT(arguments.layers, arguments.dim, arguments.heads, arguments.context).to(device),
        arguments,
        device,
    )
    optim = torch.optim.AdamW(model.parameters(), lr=3e-3)
    torch.manual_seed(arguments.seed + 1 + rank)  # dropout of its own for each rank
    text = Text(rank, world_size, arguments.batch, arguments.context)

    ckpt = holdfast.Checkpointer(arguments.job)  # [holdfast] rank and world size are torchrun's
    extra: dict[str, Any] = {}
    # [holdfast] 0: nothing was saved yet. On another number of ranks each takes one of the old ranks' generators.
    start = ckpt.restore(
        {"model": model, "optim": optim, "extra": extra},
        merge={"extra.rng": lambda states: states[rank % len(states)]},
    )
    if start > 0:
        set_rng_state(extra["rng"], device)
        text.load_state_dict(extra["text"])
    if rank == 0:
        print(
            "from scratch"
            if ckpt.last_restored is None
            else f"resumed after step {ckpt.last_restored.step} from {ckpt.last_restored.source}",
            flush=True,
        )

    with contextlib.ExitStack() as files:
        losses = (
            files.enter_context(open(arguments.losses, "a"))
            if arguments.losses and rank == 0
            else None
        )
        for step in range(start, arguments.steps):
            read, wanted = text.next(device)
            loss = F.cross_entropy(model(read).flatten(0, 1), wanted.flatten())
            optim.zero_grad()
            loss.backward()
            optim.step()  # waits, should the last save's copy not be done yet
            mean = mean_over_ranks(loss)
            if losses is not None:
                losses.write(f"{step} {mean.hex()}\n")
                losses.flush()
            if rank == 0 and step % arguments.print_every == 0:
                print(f"step {step}: loss {mean:.4f}", flush=True)
            extra = {"rng": rng_state(device), "text": text.state_dict()}
            ckpt.save(
                step, {"model": model, "optim": optim, "extra": extra}
            )  # [holdfast] returns within milliseconds
    ckpt.close()  # [holdfast]


def join_group(backend: str) -> None:
    """A process group of the workers that this start has. torchrun keeps its store over restarts: without a part of its own for
    each start, workers find addresses of dead ones there and cannot connect. (Only torchrun with several agents needs more,
    since those count restarts differently: export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 where you start it.)
    """
    store, rank, world_size = next(dist.rendezvous("env://"))
    if (
        os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        and os.environ["GROUP_WORLD_SIZE"] == "1"
    ):
        store = dist.PrefixStore(f"start-{os.environ['TORCHELASTIC_RESTART_COUNT']}", store)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--job", default="train-gpt", help="its name: the same at every start")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument(
        "--losses", metavar="FILE", help="append 'STEP LOSS' lines, the loss as a hexadecimal float"
    )
    parser.add_argument("--print-every", type=int, default=100)
    parser.add_argument(
        "--fsdp", action="store_true", help="shard parameters and optimizer state (FSDP2)"
    )
    parser.add_argument(
        "--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--context", type=int, default=64)
    parser.add_argument(
        "--batch", type=int, default=16, help="pieces of text for each rank and step"
    )
    arguments = parser.parse_args()

    torch.use_deterministic_algorithms(True)
    device = torch.device(arguments.device)
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(device)
    if "WORLD_SIZE" in os.environ:  # torchrun started us
        join_group("nccl" if device.type == "cuda" else "gloo")
    train(arguments, device)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
