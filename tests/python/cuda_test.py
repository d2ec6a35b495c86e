"""holdfast.Checkpointer and holdfast.dcp with PyTorch on a CUDA device (tests/gpu/README.md); skipped without one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from checkpointer_test import bits

import holdfast
import holdfast.dcp
from daemons import DEADLINE_S, Daemon

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device for PyTorch")
CYCLES = 400_000_000  # of the device's clock: some tenths of a second


@pytest.fixture
def ckpt(daemon: Daemon):
    one = holdfast.Checkpointer("job", rank=0, world_size=1, on_error="raise")
    yield one
    one.close()


def training(seed: int, **options: Any) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = torch.nn.Sequential(
        torch.nn.Linear(64, 256), torch.nn.BatchNorm1d(256), torch.nn.Linear(256, 8)
    ).cuda()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2, **options)


def step(model: torch.nn.Module, optim: torch.optim.Optimizer) -> None:
    optim.zero_grad()
    model(torch.randn(32, 64, device="cuda")).square().mean().backward()
    optim.step()


def snapshot(model: torch.nn.Module, optim: torch.optim.Optimizer) -> Any:
    torch.cuda.synchronize()
    return bits([model.state_dict(), optim.state_dict()])


@pytest.mark.parametrize("options", [{}, {"fused": True}, {"capturable": True}, {"foreach": True}])
def test_a_run_goes_on_bit_for_bit(ckpt: holdfast.Checkpointer, options: dict[str, bool]) -> None:
    model, optim = training(1, **options)
    state = {"model": model, "optim": optim}
    ckpt.restore(state)
    expected = []
    for number in range(6):
        step(model, optim)
        expected.append(snapshot(model, optim))
        torch.cuda._sleep(
            CYCLES
        )  # the device is behind: what is saved is what comes before the call
        ckpt.save(number, state)
        model(torch.randn(32, 64, device="cuda"))  # BatchNorm's statistics change at once
    ckpt.wait_snapshot()
    for number in (5, 3):  # memory alone keeps the last three
        other, others = training(2, **options)
        assert ckpt.restore({"model": other, "optim": others}, step=number) == number + 1
        assert snapshot(other, others) == expected[number]


def test_save_does_not_wait_for_the_device(ckpt: holdfast.Checkpointer) -> None:
    model, optim = training(1)
    state = {"model": model, "optim": optim}
    ckpt.restore(state)
    step(model, optim)
    ckpt.save(0, state, wait="sealed", timeout=DEADLINE_S)  # slots are mapped and pinned
    step(model, optim)
    expected = snapshot(model, optim)
    done = torch.cuda.Event()
    torch.cuda._sleep(10 * CYCLES)
    done.record()
    handle = ckpt.save(1, state)
    assert not done.query()
    model(torch.randn(32, 64, device="cuda"))
    step(model, optim)
    assert not done.query()  # nor did step(): its work is behind the copy, on the device
    handle.wait("sealed", DEADLINE_S)
    other, others = training(2)
    ckpt.restore({"model": other, "optim": others}, step=1)
    assert snapshot(other, others) == expected


def test_memory_that_the_allocator_gives_out_again(ckpt: holdfast.Checkpointer) -> None:
    for number in range(20):
        w = torch.full((4 << 20,), float(number), device="cuda")
        handle = ckpt.save(number, {"w": w})
        del w
        torch.full((4 << 20,), -1.0, device="cuda")
        handle.wait("sealed", DEADLINE_S)
        target = torch.empty(4 << 20, device="cuda")
        ckpt.restore({"w": target})
        assert bool((target == number).all())


def test_a_step_that_is_a_graph(ckpt: holdfast.Checkpointer) -> None:
    model, optim = training(1, capturable=True)
    data = torch.randn(32, 64, device="cuda")
    state = {"model": model, "optim": optim}
    ckpt.restore(state)

    def captured() -> None:
        optim.zero_grad(set_to_none=True)
        model(data).square().mean().backward()
        optim.step()

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            captured()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured()
    for number in range(5):
        graph.replay()
        expected = snapshot(model, optim)
        ckpt.save(number, state)
        graph.replay()  # right behind it, without any hook
        other, others = training(2, capturable=True)
        ckpt.restore({"model": other, "optim": others}, step=number)
        assert snapshot(other, others) == expected
        ckpt.restore(state, step=number)


def test_through_dcp(daemon: Daemon) -> None:
    model, optim = training(1)
    step(model, optim)
    expected = bits(model.state_dict())
    future = dcp.async_save(
        {"model": model.state_dict()}, storage_writer=holdfast.dcp.Writer("dcp", step=1)
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    future.result()
    other, _ = training(2)
    target = {"model": other.state_dict()}
    dcp.load(target, storage_reader=holdfast.dcp.Reader("dcp"))
    assert bits(target["model"]) == expected
