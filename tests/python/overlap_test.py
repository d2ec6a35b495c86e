"""Saves that are copied beside the loop: what is saved is all of one step, and nothing is left behind or held up."""

from __future__ import annotations

import gc
import json
import os
import pathlib
import signal
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from training import wait_until

import holdfast
from daemons import DEADLINE_S, Daemon, run_python
from holdfast import _fences, _jobs, _state

# Copied by one thread: tens of milliseconds, in which the loop goes on.
BIG = 24_000_000
TRIES_MAX = 20


@pytest.fixture
def ckpt(daemon: Daemon) -> Iterator[holdfast.Checkpointer]:
    torch.set_num_threads(1)
    one = holdfast.Checkpointer("job", rank=0, world_size=1, copy_threads=1)
    yield one
    one.close()


class Weights(torch.nn.Module):
    """Parameters that take long to copy; all elements are alike, so that a mix is seen."""

    def __init__(self, elements: int = BIG, value: float = 0.0) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(torch.full((elements,), float(value)))
        self.w.grad = torch.ones(1).expand(elements)  # an SGD of rate 1 counts down with each step


def sgd(module: torch.nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD([p for p in module.parameters() if p.grad is not None], lr=1.0)


def one_value(tensor: torch.Tensor) -> float:
    first = tensor.view(-1)[0].item()
    assert bool((tensor == first).all()), "elements of several steps"
    return first


def saved(ckpt: holdfast.Checkpointer, handle: holdfast.Handle, state: dict[str, Any]) -> None:
    """Fills the state with what that save saved."""
    handle.wait("committed", DEADLINE_S)
    assert ckpt.restore(state, step=handle.step) == handle.step + 1


def until_overlapped(attempt: Callable[[int], bool]) -> None:
    """Runs it until it says that the copy was still under way when the loop went on: mostly at once."""
    for step in range(TRIES_MAX):
        if attempt(step):
            return
    raise AssertionError(f"in {TRIES_MAX} saves the copy was never under way when save returned")


def test_after_a_waiting_save_everything_may_change(ckpt: holdfast.Checkpointer) -> None:
    model = Weights()
    optim = sgd(model)
    for step in range(5):
        with torch.no_grad():
            model.w.fill_(step)
            handle = ckpt.save(step, {"model": model, "optim": optim}, wait="snapshot")
            model.w.fill_(-1)  # by hand, where no hook waits
        saved(ckpt, handle, {"model": model, "optim": optim})
        assert one_value(model.w.detach()) == step


def test_without_overlap_everything_may_change_at_once(daemon: Daemon) -> None:
    with holdfast.Checkpointer("job", overlap=False, copy_threads=1) as ckpt:
        model = Weights(value=5)
        optim = sgd(model)
        handle = ckpt.save(0, {"model": model, "optim": optim})
        with torch.no_grad():
            model.w.fill_(-1)
        saved(ckpt, handle, {"model": model, "optim": optim})
        assert one_value(model.w.detach()) == 5


def test_the_optimizer_waits_for_the_copy(ckpt: holdfast.Checkpointer) -> None:
    model = Weights()
    optim = sgd(model)

    def attempt(step: int) -> bool:
        with torch.no_grad():
            model.w.fill_(step)
        handle = ckpt.save(step, {"model": model, "optim": optim})
        overlapped = not handle.done("snapshot")
        optim.step()
        assert handle.done("snapshot")
        assert one_value(model.w.detach()) == step - 1
        saved(ckpt, handle, {"model": model, "optim": optim})
        assert one_value(model.w.detach()) == step
        return overlapped

    until_overlapped(attempt)


def test_the_step_of_an_optimizer_that_the_state_lacks_waits_too(
    ckpt: holdfast.Checkpointer,
) -> None:
    """It may share a parameter with one that the state has."""
    model = Weights()
    optim, other = sgd(model), sgd(model)

    def attempt(step: int) -> bool:
        with torch.no_grad():
            model.w.fill_(step)
        handle = ckpt.save(step, {"model": model, "optim": optim})
        overlapped = not handle.done("snapshot")
        other.step()
        assert handle.done("snapshot")
        saved(ckpt, handle, {"model": model, "optim": optim})
        assert one_value(model.w.detach()) == step
        optim.step()
        return overlapped

    until_overlapped(attempt)


class Routed(Weights):
    """With what a forward pass changes: statistics of BatchNorm, and the bias that balances a router's load."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(100_000, affine=False, momentum=1.0)
        self.register_buffer("router_bias", torch.zeros(3_000_000))

    def forward(self, value: float) -> None:
        self.norm(torch.full((2, 100_000), float(value)))
        with torch.no_grad():
            self.router_bias.fill_(value)


def test_what_a_forward_pass_changes_is_of_the_same_step(ckpt: holdfast.Checkpointer) -> None:
    model = Routed()
    optim = sgd(model)
    seen: dict[str, Any] = {"list": [], "nested": {"amax": np.zeros(1000)}}

    def attempt(step: int) -> bool:
        with torch.no_grad():
            model.w.fill_(step)
        model(step)
        seen["list"].append(step)
        seen["nested"]["amax"][:] = step
        handle = ckpt.save(step, {"model": model, "optim": optim, "seen": seen})
        overlapped = not handle.done("snapshot")
        model(-7)
        seen["list"].append("later")
        seen["nested"]["amax"][:] = -7
        overlapped = overlapped and not handle.done("snapshot")
        optim.step()
        state = {"model": model, "optim": optim, "seen": seen}
        seen["nested"]["amax"] = np.zeros(1000)
        saved(ckpt, handle, state)
        assert one_value(model.w.detach()) == step
        assert one_value(model.router_bias) == step
        assert one_value(model.norm.running_mean) == step
        assert model.norm.num_batches_tracked.item() == step + 1
        assert seen["list"] == list(range(step + 1))
        assert seen["nested"]["amax"].tolist() == [step] * 1000
        return overlapped

    until_overlapped(attempt)


def test_each_of_two_optimizers_waits(ckpt: holdfast.Checkpointer) -> None:
    one, two = Weights(1000), Weights()
    optims = [sgd(one), sgd(two)]

    def attempt(step: int) -> bool:
        with torch.no_grad():
            one.w.fill_(step)
            two.w.fill_(step)
        state = {"models": [one, two], "optims": optims}
        handle = ckpt.save(step, state)
        overlapped = not handle.done("snapshot")
        optims[1].step()
        optims[0].step()
        saved(ckpt, handle, state)
        assert one_value(one.w.detach()) == one_value(two.w.detach()) == step
        return overlapped

    until_overlapped(attempt)


def test_an_optimizer_made_later_waits_too(ckpt: holdfast.Checkpointer) -> None:
    first = Weights(1000)
    early = sgd(first)
    ckpt.save(0, {"model": first, "optim": early})
    model = Weights()
    late = sgd(model)

    def attempt(step: int) -> bool:
        with torch.no_grad():
            model.w.fill_(step)
        handle = ckpt.save(step + 1, {"model": model, "optim": late})
        overlapped = not handle.done("snapshot")
        late.step()
        saved(ckpt, handle, {"model": model, "optim": late})
        assert one_value(model.w.detach()) == step
        return overlapped

    until_overlapped(attempt)


def test_a_capturable_optimizer_is_copied_before_save_returns(ckpt: holdfast.Checkpointer) -> None:
    """Its step may be replayed as a part of a CUDA graph, which runs no hook."""
    model = Weights(value=3)
    optim = torch.optim.Adam(model.parameters(), capturable=True)
    optim.state[model.w] = {"step": torch.tensor(1.0), "exp_avg": torch.full((BIG,), 3.0)}
    handle = ckpt.save(0, {"model": model, "optim": optim})
    with torch.no_grad():
        model.w.fill_(-1)
        optim.state[model.w]["exp_avg"].fill_(-1)
    saved(ckpt, handle, {"model": model, "optim": optim})
    assert one_value(model.w.detach()) == one_value(optim.state[model.w]["exp_avg"]) == 3


def test_a_plain_state_dict_beside_the_optimizer_overlaps(ckpt: holdfast.Checkpointer) -> None:
    model = Weights()
    optim = sgd(model)
    flat = _state.Flattener(allow_pickle=False, fences=lambda _: True).run(
        {"model": model.state_dict(), "optim": optim}
    )
    assert [spec[0] for spec in flat.specs] == ["model.w"] and flat.copy_first == []

    def attempt(step: int) -> bool:
        with torch.no_grad():
            model.w.fill_(step)
        handle = ckpt.save(step, {"model": model.state_dict(), "optim": optim})
        overlapped = not handle.done("snapshot")
        optim.step()
        saved(ckpt, handle, {"model": model.state_dict(), "optim": optim})
        assert one_value(model.w.detach()) == step
        return overlapped

    until_overlapped(attempt)


def test_without_its_optimizer_a_module_is_copied_before_save_returns(
    ckpt: holdfast.Checkpointer,
) -> None:
    model = Weights(value=3)
    optim = sgd(model)
    handle = ckpt.save(0, {"model": model})  # whose step nothing waits in
    optim.step()
    saved(ckpt, handle, {"model": model})
    assert one_value(model.w.detach()) == 3


def test_tensors_that_the_loop_drops_are_kept_until_copied(ckpt: holdfast.Checkpointer) -> None:
    def attempt(step: int) -> bool:
        model = Weights(value=step)
        optim = sgd(model)
        ckpt.save(2 * step, {"model": model, "optim": optim})
        optim.zero_grad()
        optim.step()  # changes nothing; from here on it is known to wait
        handle = ckpt.save(2 * step + 1, {"model": model, "optim": optim})
        overlapped = not handle.done("snapshot")
        del model, optim
        gc.collect()
        other = torch.full((BIG,), -1.0)  # in the same memory, were it free
        fresh = Weights()
        saved(ckpt, handle, {"model": fresh})
        assert one_value(fresh.w.detach()) == step and one_value(other) == -1
        return overlapped

    until_overlapped(attempt)


def test_memory_that_a_parameter_gives_up_is_kept_until_copied(ckpt: holdfast.Checkpointer) -> None:
    def attempt(step: int) -> bool:
        model = Weights(value=step)
        optim = sgd(model)
        ckpt.save(2 * step, {"model": model, "optim": optim})
        optim.zero_grad()
        optim.step()
        handle = ckpt.save(2 * step + 1, {"model": model, "optim": optim})
        overlapped = not handle.done("snapshot")
        model.half()  # the parameter stays, its memory goes
        other = torch.full((BIG,), -1.0)
        fresh = Weights()
        saved(ckpt, handle, {"model": fresh})
        assert one_value(fresh.w.detach()) == step and one_value(other) == -1
        return overlapped

    until_overlapped(attempt)


def test_a_step_that_runs_no_hook_guards_nothing(ckpt: holdfast.Checkpointer) -> None:
    """A CUDA graph's replay, a method put in step's place."""
    model = Weights()
    optim = sgd(model)
    state = {"model": model, "optim": optim}
    ckpt.save(0, state)
    optim.step()  # this one did
    for step in range(1, 6):
        handle = ckpt.save(step, state)
        if step > 1:  # nobody has seen the hook run since the save before
            with torch.no_grad():
                model.w.fill_(-step)
        fresh = Weights()
        saved(ckpt, handle, {"model": fresh})
        one_value(fresh.w.detach())
        with torch.no_grad():
            model.w.fill_(step)


def test_only_what_a_step_changes_is_guarded_by_it(ckpt: holdfast.Checkpointer) -> None:
    """A buffer that merely begins where a parameter does."""
    flat = torch.zeros(BIG)
    parameter = torch.nn.Parameter(flat[:4])
    optim = torch.optim.SGD([parameter], lr=0.1)
    for step in range(4):
        flat[4:] = step
        handle = ckpt.save(step, {"flat": flat, "optim": optim})
        flat[4:] = -1
        into = torch.zeros(BIG)
        handle.wait("sealed", DEADLINE_S)
        with holdfast.open("job", step=step) as opened:
            into = opened.tensor("flat")
        assert one_value(into[4:]) == step
        optim.step()


def test_nothing_is_put_on_optimizers(daemon: Daemon) -> None:
    model = Weights(10)
    optim = sgd(model)
    with holdfast.Checkpointer("job") as ckpt:
        ckpt.restore({"model": model, "optim": optim})
        ckpt.fence(optim)
        for step in range(3):
            ckpt.save(step, {"model": model, "optim": optim})
            assert len(optim._optimizer_step_pre_hooks) == 0
            optim.step()


def test_a_checkpointer_that_is_dropped_leaves_nothing_behind(daemon: Daemon) -> None:
    model = Weights(10)
    optim = sgd(model)
    ckpt = holdfast.Checkpointer("job")
    for step in range(2):
        ckpt.save(step, {"model": model, "optim": optim}).wait("sealed", DEADLINE_S)
        optim.step()
    gone = weakref.ref(ckpt)
    del ckpt
    gc.collect()
    assert gone() is None
    assert len(optim._optimizer_step_pre_hooks) == 0 and not list(_fences._copying)
    optim.step()
    job = _jobs.open_job("job")  # which is this process's, not that Checkpointer's
    assert job is not None
    job.close()


def test_data_loader_workers_forked_in_the_middle_of_a_save(daemon: Daemon) -> None:
    code = """
import torch, holdfast
torch.set_num_threads(1)
class Numbers(torch.utils.data.Dataset):
    def __len__(self): return 8
    def __getitem__(self, i): return torch.full((1000,), float(i))
ckpt = holdfast.Checkpointer("loader", copy_threads=1)
w = torch.nn.Parameter(torch.zeros(24_000_000))
w.grad = torch.ones(1).expand(w.shape)
optim = torch.optim.SGD([w], lr=1.0)
overlapped = 0
for step in range(6):
    loader = torch.utils.data.DataLoader(Numbers(), num_workers=2, multiprocessing_context="fork")
    handle = ckpt.save(step, {"w": w, "optim": optim})
    overlapped += not handle.done("snapshot")
    batches = iter(loader)  # forks
    optim.step()
    assert sorted(int(batch[0, 0]) for batch in batches) == list(range(8))
    handle.wait("committed", 60)
assert overlapped
fresh = torch.empty(w.shape)
assert ckpt.restore({"w": fresh}) == 6
assert bool((fresh == -5).all())
ckpt.close()
"""
    done = run_python(code, OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""


def test_an_exception_between_save_and_seal(daemon: Daemon) -> None:
    model = Weights(value=4)
    optim = sgd(model)
    with (
        pytest.raises(ZeroDivisionError),
        holdfast.Checkpointer("job", copy_threads=1) as ckpt,
    ):
        ckpt.save(1, {"model": model, "optim": optim})
        raise ZeroDivisionError
    with torch.no_grad():
        model.w.fill_(0)
    with holdfast.Checkpointer("job") as ckpt:
        assert ckpt.restore({"model": model, "optim": optim}) == 2
        assert one_value(model.w.detach()) == 4


def test_an_exception_in_the_loop_that_goes_on(ckpt: holdfast.Checkpointer) -> None:
    model = Weights(value=4)
    optim = sgd(model)
    try:
        handle = ckpt.save(1, {"model": model, "optim": optim})
        raise RuntimeError("out of memory")
    except RuntimeError:
        optim.step()  # the fence holds all the same
    saved(ckpt, handle, {"model": model, "optim": optim})
    assert one_value(model.w.detach()) == 4


def test_ctrl_c_in_each_wait_and_the_save_goes_on(
    ckpt: holdfast.Checkpointer, daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Weights(1000)
    optim = sgd(model)
    state = {"model": model, "optim": optim}
    ckpt.save(0, state, wait="committed", timeout=DEADLINE_S)
    started = ckpt._started  # each save waits for the daemon, as if it were one with `wait`
    monkeypatch.setattr(
        ckpt, "_started", lambda step, flat, tensors, _: started(step, flat, tensors, DEADLINE_S)
    )
    assert daemon.process is not None
    daemon.process.send_signal(signal.SIGSTOP)  # it grants no slot
    try:
        handle = ckpt.save(1, state)

        def interrupted(call: Callable[[], object]) -> None:
            timer = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT))
            timer.start()
            with pytest.raises(KeyboardInterrupt):
                call()
            timer.join()

        interrupted(lambda: handle.wait("snapshot"))
        interrupted(handle.wait_snapshot)
        interrupted(lambda: handle.wait("sealed", 3600))
        interrupted(optim.step)
        assert one_value(model.w.detach()) == 0
        interrupted(lambda: ckpt.save(2, state))
        interrupted(lambda: ckpt.restore(state))
        interrupted(ckpt.close)
    finally:
        daemon.process.send_signal(signal.SIGCONT)
    saved(ckpt, handle, state)
    optim.step()
    ckpt.save(2, state, wait="committed", timeout=DEADLINE_S)
    assert ckpt.failed_saves == 0


def test_the_interpreter_ends_in_the_middle_of_a_save(daemon: Daemon) -> None:
    code = """
import sys, torch, holdfast
ckpt = holdfast.Checkpointer("exits", copy_threads=1)
w = torch.nn.Parameter(torch.full((24_000_000,), 2.0))
w.grad = torch.ones(1).expand(w.shape)
optim = torch.optim.SGD([w], lr=1.0)
step = int(sys.argv[1])
assert ckpt.restore({"w": torch.empty(w.shape)}) == step
ckpt.save(step, {"w": w, "optim": optim})
if sys.argv[2] == "exception":
    raise SystemExit(3)
if sys.argv[2] == "dropped":
    del ckpt, w, optim
"""
    for step, way in enumerate(["exception", "dropped"]):
        done = run_python(code, str(step), way, OMP_NUM_THREADS="1")
        assert (done.returncode, done.stderr) == (3 if way == "exception" else 0, "")
        with holdfast.Checkpointer("exits") as ckpt:
            w = torch.zeros(24_000_000)
            assert ckpt.restore({"w": w}) == step + 1
            assert one_value(w) == 2


def test_a_save_that_fails_at_the_very_end_is_reported_all_the_same(daemon: Daemon) -> None:
    code = """
import sys, holdfast
ckpt = holdfast.Checkpointer(sys.argv[1])
ckpt.save(1, {"epoch": 1}, wait="sealed")
ckpt.save(int(sys.argv[2]), {"epoch": 2})
"""
    assert run_python(code, "goes-on", "2").stderr == ""
    done = run_python(code, "exits", "1")  # refused by the daemon: steps must grow
    assert done.returncode == 0
    assert "job 'exits': step 1 was not saved: " in done.stderr
    assert "Traceback" not in done.stderr


def _kib(name: str) -> int:
    for line in pathlib.Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1])
    raise KeyError(name)


def _descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def _threads() -> int:
    return len(os.listdir("/proc/self/task"))


def await_no_more(files: int, threads: int) -> None:
    """A thread that has been joined is listed for a moment more."""
    wait_until(
        f"at most {files} files and {threads} threads",
        lambda: _descriptors() <= files and _threads() <= threads,
        said=lambda: f"{_descriptors()} files, {_threads()} threads",
    )


GROWTH_MAX_KIB = 2048


def test_memory_does_not_grow(ckpt: holdfast.Checkpointer) -> None:
    model = torch.nn.Sequential(
        *[torch.nn.Linear(16, 16) for _ in range(4)], torch.nn.BatchNorm1d(16)
    )
    optim = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    extra: dict[str, Any] = {}

    def saves(first: int, count: int) -> None:
        for step in range(first, first + count):
            optim.step()
            extra.update(step=step, text="x" * (1000 + step % 100), rng=torch.get_rng_state())
            ckpt.save(step, {"model": model, "optim": optim, "extra": extra})

    def restores(count: int) -> None:
        for _ in range(count):
            ckpt.restore({"model": model, "optim": optim, "extra": {}})

    saves(0, 200)
    restores(20)
    gc.collect()
    before, files, threads = _kib("RssAnon"), _descriptors(), _threads()
    saves(200, 1000)
    gc.collect()
    assert _kib("RssAnon") - before < GROWTH_MAX_KIB
    restores(100)
    gc.collect()
    assert _kib("RssAnon") - before < GROWTH_MAX_KIB
    await_no_more(files, threads)
    assert ckpt.failed_saves == 0


def test_nothing_is_left_after_close(daemon: Daemon) -> None:
    model = Weights()
    files, threads = _descriptors(), _threads()
    for step in range(3):
        ckpt = holdfast.Checkpointer("job", copy_threads=3)
        ckpt.restore({"model": model})
        ckpt.save(step, {"model": model, "optim": sgd(model)})
        assert _threads() > threads
        ckpt.close()
        await_no_more(files, threads)


def test_fifty_interpreters_that_die_in_mid_save_leak_no_slot(daemon: Daemon) -> None:
    """Forked ones: they have torch already. What a dead writer left is given to the next."""
    model = Weights(3_000_000)
    state = {"model": model, "optim": sgd(model)}
    # What torch imports when it is first needed is imported here, and not fifty times.
    _state.Flattener(allow_pickle=False, fences=lambda _: True).run(state)
    slots_max, copying = 0, 0
    for number in range(50):
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            ckpt = holdfast.Checkpointer("dies", copy_threads=1)
            ckpt.restore({"model": model})
            if number % 10 == 0:
                ckpt.save(2 * number, {"model": model}, wait="committed", timeout=DEADLINE_S)
            handle = ckpt.save(2 * number + 1, state)
            os.write(writer, b"s" if handle.done("snapshot") else b"c")
            os.kill(os.getpid(), signal.SIGKILL)
        os.close(writer)
        with os.fdopen(reader, "rb") as said:
            copying += said.read() == b"c"
        assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
        slots_max = max(slots_max, slots_of(daemon))
    assert copying > 0, "none of them died while it copied"
    with holdfast.Checkpointer("dies") as ckpt:
        start = ckpt.restore({"model": model})
        assert start > 80
        ckpt.save(start + 1000, {"model": model}, wait="committed", timeout=DEADLINE_S)
    assert slots_of(daemon) <= SLOTS_MAX and slots_max <= SLOTS_MAX


# Three a rank, and the one that a process wrote until the daemon has noticed that it is dead.
SLOTS_MAX = 4


def slots_of(daemon: Daemon) -> int:
    return int(json.loads(daemon.ctl("status", "--json"))["daemon"]["slots"])
