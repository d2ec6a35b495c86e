"""scripts/bench torch: what a save costs a PyTorch loop, and a restore, beside what torch itself has for it.

Every round measures, one after the other on the same state: the plain copies, which are the ceiling; Checkpointer overlapped
and blocking; holdfast.dcp; torch.save with fsync; torch's dcp.save, dcp.async_save, and that with DCP's asynchronous staging.
"blocked" is how long the loop stands still, "durable" how long until the step is on the drive (for Holdfast: stage "nvme"), both
from the call.

Then states of many tensors, saved and restored by Checkpointer in turns with the plain copies; and how much is copied before `save`
returns where AdamW is wrapped by accelerate or torchtitan (wrapped_optimizers.py).
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import dataclasses
import gc
import logging
import math
import mmap
import os
import pathlib
import select
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as torch_dcp
import wrapped_optimizers
from report import Row, print_report
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

import holdfast
import holdfast.dcp as holdfast_dcp

ROOT = pathlib.Path(__file__).resolve().parent.parent
RESULT = ROOT / "build/torch_bench.json"
FRAMEWORKS = ROOT / "build/frameworks"  # scripts/bench fetches them
MIB, GIB = 1 << 20, 1 << 30
DEADLINE_S = 600.0
SLOTS = 2  # of each of the two jobs: every save waits until the one before is on the drive
SLOT_EXTRA_BYTES = 64 * MIB

OVERLAP_BAR_MS, OVERLAP_BAR_MS_PER_TENSOR = 5.0, 0.005
OVERLAP_GOAL_MS, OVERLAP_GOAL_MS_PER_TENSOR = 2.0, 0.001
COPY_BAR, COPY_GOAL = 0.80, 0.95
RESTORE_BAR = 0.85
DCP_BAR = 1.5  # times as long as Checkpointer keeps the loop
MANY_SAVE_BAR, MANY_RESTORE_BAR = 9.0, 26.0  # times as long as the plain copy takes

OVERLAPPED, BLOCKING = "Checkpointer, overlapped", "Checkpointer, blocking"
OURS_ASYNC, THEIRS_ASYNC = "holdfast.dcp, dcp.async_save", "dcp.async_save, staged beside the loop"


# ---- what is told ----


def seconds_row(name: str, seconds: list[float], note: str = "") -> Row:
    """Milliseconds, reported only."""
    ms = [each * 1e3 for each in seconds]
    value = statistics.median(ms)
    return Row(name, "ms", value, 0.0, value, min(ms), max(ms), higher_is_better=False, note=note)


def times_row(
    name: str, seconds: list[float], than: list[float], bar: float = 0.0, note: str = ""
) -> Row:
    """How many times as long as something else in the same round."""
    ratios = [each / other for each, other in zip(seconds, than, strict=True)]
    return Row(
        name,
        "ms",
        statistics.median(seconds) * 1e3,
        statistics.median(than) * 1e3,
        statistics.median(ratios),
        min(ratios),
        max(ratios),
        bar,
        bar,
        higher_is_better=False,
        note=note,
    )


def rate_row(
    name: str, nbytes: int, seconds: list[float], ceiling: list[float], bar: float, note: str
) -> Row:
    ratios = [top / each for top, each in zip(ceiling, seconds, strict=True)]
    return Row(
        name,
        "GB/s",
        nbytes / statistics.median(seconds) / 1e9,
        nbytes / statistics.median(ceiling) / 1e9,
        statistics.median(ratios),
        min(ratios),
        max(ratios),
        bar,
        COPY_GOAL if bar else 0.0,
        note=note,
    )


class Progress:
    """A line on stderr that is redrawn, when that is a terminal."""

    def __init__(self, total: int) -> None:
        self._done, self._total = 0, total

    def advance(self, doing: str) -> None:
        self._done += 1
        if sys.stderr.isatty():
            print(f"\rtorch {self._done}/{self._total} {doing:<60.60}", end="", file=sys.stderr)

    def end(self) -> None:
        if sys.stderr.isatty():
            print(f"\r{'':<80}\r", end="", file=sys.stderr)


# ---- the states ----


@dataclasses.dataclass
class State:
    name: str
    model: torch.nn.Module
    optim: torch.optim.Optimizer
    is_large: bool

    @property
    def holdfast(self) -> dict[str, Any]:
        return {"model": self.model, "optim": self.optim}

    @property
    def torch(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optim": self.optim.state_dict()}

    def tensors(self) -> list[torch.Tensor]:
        parameters = list(self.model.parameters())
        entries = [value for state in self.optim.state.values() for value in state.values()]
        return [tensor.detach() for tensor in parameters + entries]


class Block(torch.nn.Module):
    """The large tensors of a transformer's layer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv = torch.nn.Parameter(torch.randn(3 * width, width))
        self.out = torch.nn.Parameter(torch.randn(width, width))
        self.up = torch.nn.Parameter(torch.randn(4 * width, width))
        self.down = torch.nn.Parameter(torch.randn(width, 4 * width))


def large(gib: float) -> State:
    """Parameters and both moments of AdamW together are of this size."""
    width = 1024
    layers = max(1, round(gib * GIB / (3 * 4 * 12 * width * width)))
    model = torch.nn.Module()
    model.layers = torch.nn.ModuleList(Block(width) for _ in range(layers))
    optim = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        optim.state[parameter] = {
            "step": torch.tensor(1.0),
            "exp_avg": torch.randn_like(parameter, requires_grad=False),
            "exp_avg_sq": torch.rand_like(parameter, requires_grad=False),
        }
    return State(f"{gib:g} GiB", model, optim, is_large=True)


def small(count: int, kib: float = 1) -> State:
    elements = round(kib * 256)
    layers = [
        torch.nn.ParameterList(torch.randn(elements) for _ in range(100))
        for _ in range(count // 100)
    ]
    model = torch.nn.ModuleList(layers)
    return State(
        f"{count:,} x {kib:g} KiB",
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        is_large=False,
    )


# ---- the ceiling ----


class PlainCopies:
    """Those of bench/plain_copy.h: libc's and the streaming ones of this CPU."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL(str(ROOT / "build/release/bench/plain_copies.so"))
        self._library.plain_copies.restype = ctypes.c_size_t
        self._library.plain_copy_name.restype = ctypes.c_char_p
        self._library.plain_copy_seconds.restype = ctypes.c_double
        self.names = [
            self._library.plain_copy_name(copy).decode()
            for copy in range(self._library.plain_copies())
        ]

    def seconds(
        self, copy: int, pairs: list[tuple[torch.Tensor, torch.Tensor]], threads: int
    ) -> float:
        count = len(pairs)
        to = (ctypes.c_void_p * count)(*(to.data_ptr() for to, _ in pairs))
        source = (ctypes.c_void_p * count)(*(source.data_ptr() for _, source in pairs))
        nbytes = (ctypes.c_size_t * count)(*(to.nbytes for to, _ in pairs))
        return self._library.plain_copy_seconds(
            ctypes.c_size_t(copy), ctypes.c_size_t(count), to, source, nbytes, ctypes.c_int(threads)
        )


class Ceiling:
    """Plain copies between the tensors and ready, populated memory of the kind that slots are made of."""

    def __init__(self, tensors: list[torch.Tensor], threads: int) -> None:
        self._threads = threads
        self._copies = PlainCopies()
        total = sum(-(-tensor.nbytes // 64) * 64 for tensor in tensors)
        with tempfile.TemporaryFile(dir="/dev/shm") as file:
            file.truncate(total)
            self._memory = mmap.mmap(file.fileno(), total, flags=mmap.MAP_SHARED)
        whole = torch.frombuffer(self._memory, dtype=torch.uint8)
        whole.zero_()
        self._pairs = []
        at = 0
        for tensor in tensors:
            part = whole[at : at + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            self._pairs.append((part, tensor))
            at += -(-tensor.nbytes // 64) * 64
        names = ["copy_", *self._copies.names]
        self.saving: dict[str, list[float]] = {name: [] for name in names}
        self.restoring: dict[str, list[float]] = {name: [] for name in names}

    def measure_saving(self) -> None:
        self._measure(self._pairs, self.saving)

    def measure_restoring(self) -> None:
        self._measure([(tensor, part) for part, tensor in self._pairs], self.restoring)

    def _measure(
        self, pairs: list[tuple[torch.Tensor, torch.Tensor]], seconds: dict[str, list[float]]
    ) -> None:
        seconds["copy_"].append(self._copy(pairs))
        for copy, name in enumerate(self._copies.names):
            seconds[name].append(self._copies.seconds(copy, pairs, self._threads))

    @staticmethod
    def best(seconds: dict[str, list[float]]) -> str:
        return min(seconds, key=lambda name: statistics.median(seconds[name]))

    @staticmethod
    def _copy(pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> float:
        began = time.perf_counter()
        for to, source in pairs:
            to.copy_(source)
        return time.perf_counter() - began


# ---- the ways to save ----


@contextlib.contextmanager
def daemon(folder: pathlib.Path, slot_bytes: int) -> Iterator[str]:
    """A ckptd with memory for two jobs and a drive in `folder`; its socket."""
    memory = tempfile.mkdtemp(prefix="holdfast-bench-", dir="/dev/shm")
    (folder / "nvme").mkdir()
    config = folder / "ckptd.yaml"
    config.write_text(
        f"state_dir: {folder}/state\n"
        f"socket: {{path: {folder}/ckptd.sock}}\n"
        f"admin: {{path: {folder}/admin.sock}}\n"
        "metrics: {address: 'off'}\n"
        f"memory: {{dir: {memory}, bytes_max: {2 * SLOTS * slot_bytes}, slots_per_rank: {SLOTS}}}\n"
        f"nvme: {{dirs: [{folder}/nvme]}}\n"
        "log: {level: warning}\n"
    )
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as ready:
        ready.bind(str(folder / "notify.sock"))
        process = subprocess.Popen(
            [ROOT / "build/release/bin/ckptd", f"--config={config}"],
            env={**os.environ, "NOTIFY_SOCKET": str(folder / "notify.sock")},
        )
        if not select.select([ready], [], [], 60)[0]:
            raise SystemExit("torch_bench: ckptd was not ready within 60 s")
    try:
        yield str(folder / "ckptd.sock")
    finally:
        process.terminate()
        process.wait(60)
        shutil.rmtree(memory, ignore_errors=True)


def fsync(path: pathlib.Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class Bench:
    """All ways to save one state, and to get it back."""

    def __init__(self, state: State, folder: pathlib.Path, socket_path: str, threads: int) -> None:
        self._state = state
        self._folder = folder
        self._socket = socket_path
        self._step = 0
        self._policy = holdfast.Policy(nvme_every_steps=1, nvme_keep_last=1)
        self.checkpointer = holdfast.Checkpointer(
            "large" if state.is_large else "small",
            rank=0,
            world_size=1,
            socket=socket_path,
            copy_threads=threads,
            policy=self._policy,
            on_error="raise",
        )
        self.checkpointer.prepare(state.holdfast, DEADLINE_S)
        # By way, right behind a save beside the loop: seconds until step() has returned, or may be called.
        self.stepped: dict[str, list[float]] = {
            name: [] for name in (OVERLAPPED, OURS_ASYNC, THEIRS_ASYNC)
        }
        # (Nothing here is on a device: pinned memory and copies on streams are for those.)
        on_device = torch.cuda.is_available()
        self._stager = DefaultStager(
            StagingOptions(
                use_pinned_memory=on_device,
                use_shared_memory=False,
                use_async_staging=True,
                use_non_blocking_copy=on_device,
            )
        )
        self.ways: dict[str, Callable[[], tuple[float, float]]] = {
            OVERLAPPED: lambda: self._checkpointer(None),
            BLOCKING: lambda: self._checkpointer("snapshot"),
            "torch.save and fsync": self._torch_save,
            "dcp.save": self._dcp_save,
            "dcp.async_save": self._dcp_async_save,
            "holdfast.dcp, dcp.save": self._holdfast_dcp_save,
            OURS_ASYNC: self._holdfast_dcp_async_save,
            THEIRS_ASYNC: self._dcp_staged_save,
        }
        self.restores: dict[str, Callable[[], float]] = {
            "Checkpointer.restore": self._restore,
            "holdfast.dcp, dcp.load": self._holdfast_dcp_load,
            "torch.load and copy_": self._torch_load,
            "dcp.load": self._dcp_load,
        }

    def close(self) -> None:
        self.checkpointer.close()
        self._stager.close()

    def _next(self) -> int:
        self._step += 1
        return self._step

    def _checkpointer(self, wait: Any) -> tuple[float, float]:
        self._state.optim.step()  # as in a loop; without gradients it changes nothing
        began = time.perf_counter()
        handle = self.checkpointer.save(self._next(), self._state.holdfast, wait=wait)
        blocked = time.perf_counter() - began
        if wait is None:
            self._state.optim.step()
            self.stepped[OVERLAPPED].append(time.perf_counter() - began - blocked)
        handle.wait("nvme", DEADLINE_S)
        return blocked, time.perf_counter() - began

    def _writer(self) -> Any:
        return holdfast_dcp.Writer(
            "dcp-large" if self._state.is_large else "dcp-small",
            step=self._next(),
            rank=0,
            world_size=1,
            socket=self._socket,
            policy=self._policy.to_core(),
        )

    def _holdfast_dcp_save(self) -> tuple[float, float]:
        began = time.perf_counter()
        writer = self._writer()
        torch_dcp.save(self._state.torch, storage_writer=writer)
        blocked = time.perf_counter() - began
        writer.wait("nvme", DEADLINE_S)
        return blocked, time.perf_counter() - began

    def _holdfast_dcp_async_save(self) -> tuple[float, float]:
        self._state.optim.step()
        began = time.perf_counter()
        writer = self._writer()
        future = torch_dcp.async_save(self._state.torch, storage_writer=writer)
        blocked = time.perf_counter() - began
        self._state.optim.step()
        self.stepped[OURS_ASYNC].append(time.perf_counter() - began - blocked)
        future.result()
        writer.wait("nvme", DEADLINE_S)
        return blocked, time.perf_counter() - began

    def _torch_save(self) -> tuple[float, float]:
        path = self._folder / "torch.pt"
        path.unlink(missing_ok=True)
        began = time.perf_counter()
        torch.save(self._state.torch, path)
        fsync(path)
        fsync(self._folder)
        took = time.perf_counter() - began
        return took, took

    def _dcp_save(self) -> tuple[float, float]:
        path = self._folder / "dcp"
        shutil.rmtree(path, ignore_errors=True)
        began = time.perf_counter()
        torch_dcp.save(self._state.torch, storage_writer=torch_dcp.FileSystemWriter(path))
        took = time.perf_counter() - began
        return took, took

    def _dcp_async_save(self) -> tuple[float, float]:
        path = self._folder / "dcp"
        shutil.rmtree(path, ignore_errors=True)
        began = time.perf_counter()
        future = torch_dcp.async_save(
            self._state.torch, storage_writer=torch_dcp.FileSystemWriter(path)
        )
        blocked = time.perf_counter() - began
        future.result()
        return blocked, time.perf_counter() - began

    def _dcp_staged_save(self) -> tuple[float, float]:
        """As fast for the loop as DCP itself has it. It is the loop that waits before it calls step()."""
        path = self._folder / "dcp"
        shutil.rmtree(path, ignore_errors=True)
        began = time.perf_counter()
        saving: Any = torch_dcp.async_save(
            self._state.torch,
            storage_writer=torch_dcp.FileSystemWriter(path),
            async_stager=self._stager,
        )
        blocked = time.perf_counter() - began
        saving.staging_completion.result()
        self.stepped[THEIRS_ASYNC].append(time.perf_counter() - began - blocked)
        saving.upload_completion.result()
        return blocked, time.perf_counter() - began

    def _restore(self) -> float:
        began = time.perf_counter()
        self.checkpointer.restore(self._state.holdfast)
        return time.perf_counter() - began

    def _holdfast_dcp_load(self) -> float:
        began = time.perf_counter()
        job = "dcp-large" if self._state.is_large else "dcp-small"
        reader = holdfast_dcp.Reader(job, adopt=False, socket=self._socket)
        torch_dcp.load(self._state.torch, storage_reader=reader)
        return time.perf_counter() - began

    def _torch_load(self) -> float:
        tensors = self._state.tensors()
        began = time.perf_counter()
        loaded = torch.load(self._folder / "torch.pt", weights_only=True)
        values = list(loaded["model"].values())
        values += [value for each in loaded["optim"]["state"].values() for value in each.values()]
        for tensor, value in zip(tensors, values, strict=True):
            tensor.copy_(value)
        return time.perf_counter() - began

    def _dcp_load(self) -> float:
        began = time.perf_counter()
        torch_dcp.load(
            self._state.torch, storage_reader=torch_dcp.FileSystemReader(self._folder / "dcp")
        )
        return time.perf_counter() - began


def measure(
    make: Callable[[], State], folder: pathlib.Path, threads: int, rounds: int, progress: Progress
) -> list[Row]:
    state = make()
    tensors = state.tensors()
    nbytes = sum(tensor.nbytes for tensor in tensors)
    slot_bytes = math.ceil(nbytes / (2 * MIB)) * 2 * MIB + SLOT_EXTRA_BYTES
    ceiling = Ceiling(tensors, threads)
    with daemon(folder, slot_bytes) as socket_path:
        bench = Bench(state, folder, socket_path, threads)
        # Everybody once for nothing: slots are mapped, layouts and staging buffers made.
        for way in bench.ways.values():
            way()
        for load in bench.restores.values():
            load()
        blocked: dict[str, list[float]] = {name: [] for name in bench.ways}
        durable: dict[str, list[float]] = {name: [] for name in bench.ways}
        restored: dict[str, list[float]] = {name: [] for name in bench.restores}
        for _ in range(rounds):
            ceiling.measure_saving()  # right before what is compared with it
            for name, way in bench.ways.items():
                gc.collect()
                held, safe = way()
                blocked[name].append(held)
                durable[name].append(safe)
                progress.advance(f"{state.name}: {name}")
            ceiling.measure_restoring()
            for name, load in bench.restores.items():
                gc.collect()
                restored[name].append(load())
                progress.advance(f"{state.name}: {name}")
        bench.close()
    there, back = ceiling.best(ceiling.saving), ceiling.best(ceiling.restoring)
    saving, restoring = ceiling.saving[there], ceiling.restoring[back]
    rows = [seconds_row(f"{state.name}: plain copy", saving, f"{there}, {threads} threads")]
    for name in bench.ways:
        row = seconds_row(f"{state.name}: blocked, {name}", blocked[name])
        if name == OVERLAPPED:
            row.bar = OVERLAP_BAR_MS + OVERLAP_BAR_MS_PER_TENSOR * len(tensors)
            row.goal = OVERLAP_GOAL_MS + OVERLAP_GOAL_MS_PER_TENSOR * len(tensors)
            row.note = f"{len(tensors)} tensors"
        rows.append(row)
    stepped = {name: waits[1:] for name, waits in bench.stepped.items()}
    rows += [
        seconds_row(f"{state.name}: until step() right behind it has run, {name}", waits)
        for name, waits in stepped.items()
    ]
    rows.append(
        times_row(
            f"{state.name}: blocked, holdfast.dcp / Checkpointer",
            blocked[OURS_ASYNC],
            blocked[OVERLAPPED],
            DCP_BAR,
        )
    )
    # Where tensors are many and small, DCP's staging thread takes the time from the loop after the call.
    rows.append(
        times_row(
            f"{state.name}: blocked, holdfast.dcp / DCP's staging",
            blocked[OURS_ASYNC],
            blocked[THEIRS_ASYNC],
            1.0 if state.is_large else 0.0,
            "the call alone",
        )
    )
    rows.append(
        times_row(
            f"{state.name}: and until step(), likewise",
            [sum(both) for both in zip(blocked[OURS_ASYNC], stepped[OURS_ASYNC], strict=True)],
            [sum(both) for both in zip(blocked[THEIRS_ASYNC], stepped[THEIRS_ASYNC], strict=True)],
            1.0,
        )
    )
    rows += [seconds_row(f"{state.name}: durable, {name}", durable[name]) for name in bench.ways]
    rows += [
        seconds_row(f"{state.name}: restore, {name}", restored[name]) for name in bench.restores
    ]
    rows.append(
        rate_row(
            f"{state.name}: {BLOCKING} / copy",
            nbytes,
            blocked[BLOCKING],
            saving,
            bar=COPY_BAR if state.is_large else 0.0,
            note=there,
        )
    )
    rows.append(
        rate_row(
            f"{state.name}: Checkpointer.restore / copy",
            nbytes,
            restored["Checkpointer.restore"],
            restoring,
            bar=RESTORE_BAR if state.is_large else 0.0,
            note=back,
        )
    )
    return rows


# ---- many tensors ----


class Many:
    """A state of Checkpointer's alone, beside its plain copies."""

    def __init__(self, state: State, job: str, socket_path: str, threads: int) -> None:
        self.state = state
        self.tensors = len(state.tensors())
        self.ceiling = Ceiling(state.tensors(), threads)
        self.saved: list[float] = []
        self.restored: list[float] = []
        self._step = 0
        self._checkpointer = holdfast.Checkpointer(
            job,
            rank=0,
            world_size=1,
            socket=socket_path,
            copy_threads=threads,
            on_error="raise",
        )
        self._checkpointer.prepare(state.holdfast, DEADLINE_S)
        self._round()  # for nothing: slots are mapped, layouts made
        self.saved.clear()
        self.restored.clear()

    def round(self) -> None:
        self.ceiling.measure_saving()
        self.ceiling.measure_restoring()
        self._round()

    def close(self) -> None:
        self._checkpointer.close()

    def _round(self) -> None:
        self._step += 1
        gc.collect()
        began = time.perf_counter()
        handle = self._checkpointer.save(self._step, self.state.holdfast, wait="snapshot")
        self.saved.append(time.perf_counter() - began)
        handle.wait("committed", DEADLINE_S)
        gc.collect()
        began = time.perf_counter()
        self._checkpointer.restore(self.state.holdfast)
        self.restored.append(time.perf_counter() - began)

    def each(self) -> list[float]:
        """Seconds that a restore took for each tensor."""
        return [seconds / self.tensors for seconds in self.restored]

    def rows(self, *, bar: bool) -> list[Row]:
        name = self.state.name
        there = self.ceiling.best(self.ceiling.saving)
        back = self.ceiling.best(self.ceiling.restoring)
        return [
            times_row(
                f"{name}: {BLOCKING}, times plain copy",
                self.saved,
                self.ceiling.saving[there],
                MANY_SAVE_BAR if bar else 0.0,
                there,
            ),
            times_row(
                f"{name}: restore, times plain copy",
                self.restored,
                self.ceiling.restoring[back],
                MANY_RESTORE_BAR if bar else 0.0,
                back,
            ),
        ]


def measure_many(
    folder: pathlib.Path, threads: int, rounds: int, progress: Progress, max_gib: float
) -> list[Row]:
    """In turns: few and many tensors of one size, and of one state's."""
    kib = min(48.0, max_gib * GIB / 20_000 / 1024)
    states = [small(20_000, kib), small(200_000, kib / 10), small(20_000), small(200_000)]
    nbytes = max(sum(each.nbytes for each in state.tensors()) for state in states)
    slot_bytes = math.ceil(nbytes / (2 * MIB)) * 2 * MIB + 4 * SLOT_EXTRA_BYTES
    with daemon(folder, 2 * slot_bytes) as socket_path:
        every = [Many(state, f"many-{i}", socket_path, threads) for i, state in enumerate(states)]
        for _ in range(rounds):
            for many in every:
                many.round()
                progress.advance(many.state.name)
        for many in every:
            many.close()
    few, same_state, few_small, same_size = every
    return [
        *few.rows(bar=True),
        *few_small.rows(bar=False),
        times_row(
            "200,000 / 20,000 tensors: restore, each, same state",
            same_state.each(),
            few.each(),
            1.0,
            "of 1 tensor",
        ),
        times_row(
            "200,000 / 20,000 tensors: restore, each, 1 KiB",
            same_size.each(),
            few_small.each(),
            note="of 1 tensor",
        ),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/bench torch")
    parser.add_argument("--json", action="store_true", help="one object as the last line")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--max-gib", type=float, default=2.0, help="size of the large state")
    parser.add_argument(
        "--dir", type=pathlib.Path, default=ROOT / "build", help="on the drive that is judged"
    )
    for other in ("--piece-kib", "--depth"):  # of other cases: `scripts/bench all` passes them on
        parser.add_argument(other, type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    warnings.filterwarnings("ignore")  # torch's, of its own checkpoints
    logging.getLogger("torch.distributed").setLevel(logging.ERROR)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    states = [lambda: large(min(2.0, options.max_gib)), lambda: small(20_000)]
    progress = Progress(len(states) * options.rounds * 12 + 4 * options.rounds)
    rows = []
    for make in states:
        with tempfile.TemporaryDirectory(prefix="torch-bench-", dir=options.dir) as folder:
            rows += measure(make, pathlib.Path(folder), options.threads, options.rounds, progress)
        gc.collect()
    with tempfile.TemporaryDirectory(prefix="torch-bench-", dir=options.dir) as folder:
        rows += measure_many(
            pathlib.Path(folder), options.threads, options.rounds, progress, options.max_gib
        )
    gc.collect()
    with (
        tempfile.TemporaryDirectory(prefix="torch-bench-", dir=options.dir) as folder,
        daemon(pathlib.Path(folder), 256 * MIB) as socket_path,
    ):
        wrapped, missing = wrapped_optimizers.measure(FRAMEWORKS, socket_path)
    rows += wrapped
    progress.end()
    RESULT.write_text(print_report("torch", rows, options.json))
    for line in missing:
        print(f"torch_bench: {line}", file=sys.stderr)
    dist.destroy_process_group()
    return 0 if not missing and all(row.passes for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
