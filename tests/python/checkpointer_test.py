"""holdfast.Checkpointer on plain modules, optimizers and values: what was saved comes back bit for bit."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import datetime
import gc
import itertools
import logging
import os
import pathlib
import signal
import threading
from typing import Any

import numpy as np
import pytest
import torch
from training import wait_until

import holdfast
from daemons import DEADLINE_S, Daemon, run_python
from holdfast import _jobs


@pytest.fixture
def ckpt(daemon: Daemon):
    one = holdfast.Checkpointer("job", rank=0, world_size=1)
    yield one
    one.close()


def model_of(seed: int = 0) -> torch.nn.Module:
    torch.manual_seed(seed)
    return torch.nn.Sequential(
        torch.nn.Linear(8, 16), torch.nn.BatchNorm1d(16), torch.nn.ReLU(), torch.nn.Linear(16, 4)
    )


def train(model: torch.nn.Module, optim: torch.optim.Optimizer, steps: int = 1) -> list[float]:
    losses = []
    for _ in range(steps):
        optim.zero_grad()
        loss = model(torch.randn(5, 8)).square().mean()
        loss.backward()
        optim.step()
        losses.append(loss.item())
    return losses


def bits(value: Any) -> Any:
    """Something that is equal exactly when all bits are."""
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu().contiguous()
        return (
            str(value.dtype),
            tuple(value.shape),
            bytes(value.view(-1).view(torch.uint8).numpy()) if value.numel() else b"",
        )
    if isinstance(value, np.ndarray):
        return (str(value.dtype), value.shape, value.tobytes())
    if isinstance(value, dict):
        return {key: bits(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(bits(each) for each in value)
    return value


def test_a_closed_checkpointer_says_so(daemon: Daemon) -> None:
    """Also while another one of this process has the job."""
    state = {"w": torch.zeros(2)}
    one, other = (holdfast.Checkpointer("job", rank=0, world_size=1) for _ in range(2))
    for closed in (one, other):
        closed.save(1 if closed is one else 2, state, wait="sealed")
        closed.close()
        error = closed.save(3, state).error
        assert isinstance(error, holdfast.RefusedError)
        assert str(error).startswith("save step 3 of job 'job': this Checkpointer was closed. Make")
        for what, call in (
            ("restore", lambda to=closed: to.restore(state)),
            ("prepare", lambda to=closed: to.prepare(state)),
        ):
            with pytest.raises(
                holdfast.RefusedError, match=f"{what} of job 'job': .* was closed. Make another"
            ):
                call()
        closed.close()  # twice is once


def test_the_last_checkpointer_of_a_job_that_is_closed_leaves_it(daemon: Daemon) -> None:
    state = {"w": torch.ones(3)}
    one, other = holdfast.Checkpointer("job"), holdfast.Checkpointer("job")
    one.close()
    one.close()  # counts once
    other.save(1, state, wait="committed", timeout=60)
    with holdfast.Checkpointer("job") as third:
        third.save(2, state, wait="committed", timeout=60)
    other.save(3, state, wait="committed", timeout=60)
    other.close()
    assert _jobs.open_job("job") is None
    with holdfast.Checkpointer("job") as again:
        assert again.restore({"w": torch.zeros(3)}) == 4
        one.close()
        other.close()  # of the job before
        again.save(4, state, wait="committed", timeout=60)


def test_a_checkpointer_that_is_gone_keeps_no_job_open(daemon: Daemon) -> None:
    one, dropped = holdfast.Checkpointer("job"), holdfast.Checkpointer("job")
    del dropped
    gc.collect()
    one.close()
    assert _jobs.open_job("job") is None


def test_a_child_that_is_forked_while_the_job_is_in_use_is_told(daemon: Daemon) -> None:
    code = """
import os, signal, threading
import numpy as np
import holdfast
ckpt = holdfast.Checkpointer("job", on_error="raise")
ckpt.save(1, {"w": np.ones(3)}, wait="committed")
held, release = threading.Event(), threading.Event()

def hold():
    with ckpt._shared.lock:
        held.set()
        release.wait()

thread = threading.Thread(target=hold)
thread.start()
held.wait()
child = os.fork()
if child == 0:
    signal.alarm(60)
    code = 1
    try:
        ckpt.save(2, {"w": np.ones(3)}, wait="sealed")
    except holdfast.ForkedError:
        code = 0
    os._exit(code)
release.set()
thread.join()
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
ckpt.save(2, {"w": np.ones(3)}, wait="committed")
ckpt.close()
"""
    done = run_python(code)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_loop_of_the_manual(daemon: Daemon) -> None:
    def run(stop: int) -> list[float]:
        ckpt = holdfast.Checkpointer("loop")
        model = model_of()
        optim = torch.optim.AdamW(model.parameters(), lr=1e-2)
        extra: dict[str, Any] = {}
        start = ckpt.restore({"model": model, "optim": optim, "extra": extra})
        if start > 0:
            torch.set_rng_state(torch.tensor(extra["rng"], dtype=torch.uint8))
            assert extra["losses"] == losses[:start]
        else:
            torch.manual_seed(1)
        got = list(extra.get("losses", []))
        for step in range(start, stop):
            got += train(model, optim)
            ckpt.save(
                step,
                {
                    "model": model,
                    "optim": optim,
                    "extra": {"rng": torch.get_rng_state().tolist(), "losses": got},
                },
            )
        ckpt.close()
        return got

    losses: list[float] = run(6)
    assert run(6) == losses
    # Longer, in one go or two, is the same.
    resumed = run(12)
    ckpt = holdfast.Checkpointer("whole")
    model = model_of()
    optim = torch.optim.AdamW(model.parameters(), lr=1e-2)
    torch.manual_seed(1)
    assert train(model, optim, 12) == resumed
    ckpt.close()


@pytest.mark.parametrize(
    "kind",
    [
        torch.optim.SGD,
        torch.optim.Adam,
        torch.optim.AdamW,
        torch.optim.Adagrad,
        torch.optim.RMSprop,
        torch.optim.LBFGS,
    ],
)
def test_every_optimizer(ckpt: holdfast.Checkpointer, kind: type) -> None:
    options = {"momentum": 0.9} if kind in (torch.optim.SGD, torch.optim.RMSprop) else {}
    model = model_of()
    optim = kind(model.parameters(), lr=1e-2, **options)
    if kind is torch.optim.LBFGS:
        x = torch.randn(5, 8)
        optim.step(
            lambda: (optim.zero_grad(), (loss := model(x).square().mean()).backward(), loss)[2]
        )
    else:
        train(model, optim, 3)
    ckpt.save(3, {"model": model, "optim": optim}, wait="committed", timeout=60)
    fresh = model_of(7)
    other = kind(fresh.parameters(), lr=0.5, **options)
    assert ckpt.restore({"model": fresh, "optim": other}) == 4
    assert bits(fresh.state_dict()) == bits(model.state_dict())
    assert bits(other.state_dict()) == bits(optim.state_dict())


def test_an_optimizer_that_has_state_is_filled_in_place(ckpt: holdfast.Checkpointer) -> None:
    model = model_of()
    optim = torch.optim.AdamW(model.parameters())
    train(model, optim, 2)
    ckpt.save(1, {"model": model, "optim": optim})
    expected = bits(copy.deepcopy(optim.state_dict()))
    addresses = {k: v["exp_avg"].data_ptr() for k, v in optim.state_dict()["state"].items()}
    train(model, optim, 2)
    assert bits(optim.state_dict()) != expected
    ckpt.restore({"model": model, "optim": optim})
    assert bits(optim.state_dict()) == expected
    assert {k: v["exp_avg"].data_ptr() for k, v in optim.state_dict()["state"].items()} == addresses


def test_moments_keep_their_type_where_parameters_have_another(ckpt: holdfast.Checkpointer) -> None:
    """torch's own load_state_dict would cast them to the parameter's."""
    model = torch.nn.Linear(4, 4, dtype=torch.bfloat16)
    optim = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for parameter in model.parameters():
        optim.state[parameter]["momentum_buffer"] = torch.randn(
            parameter.shape, dtype=torch.float32
        )
    ckpt.save(0, {"m": model, "o": optim})
    expected = bits(optim.state_dict())
    fresh = torch.nn.Linear(4, 4, dtype=torch.bfloat16)
    other = torch.optim.SGD(fresh.parameters(), lr=0.1, momentum=0.9)
    ckpt.restore({"m": fresh, "o": other})
    assert bits(other.state_dict()) == expected


DTYPES = [
    "bool", "uint8", "int8", "float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu", "uint16", "int16", "float16", "bfloat16",
    "uint32", "int32", "float32", "uint64", "int64", "float64", "complex64",
]  # fmt: skip


def test_every_dtype_and_shape(ckpt: holdfast.Checkpointer) -> None:
    tensors = {}
    # (PyTorch 2.6 has not all of them: torch_versions_test.py.)
    known = [name for name in DTYPES if hasattr(torch, name)]
    assert known == DTYPES or torch.__version__.startswith("2.6.")
    for name in known:
        dtype = getattr(torch, name)
        raw = torch.randint(0, 2 if name == "bool" else 256, (6 * 8,), dtype=torch.uint8)
        tensors[name] = raw.view(dtype)
        tensors[name + "_scalar"] = raw[: dtype.itemsize].clone().view(dtype).reshape(())
        tensors[name + "_empty"] = torch.empty((0, 3), dtype=dtype)
    ckpt.save(0, tensors)
    fresh = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    ckpt.restore(fresh)
    assert bits(fresh) == bits(tensors)


def test_a_dtype_without_a_place_is_named(ckpt: holdfast.Checkpointer) -> None:
    with pytest.raises(holdfast.InvalidArgumentError, match=r"a\.b: tensors of torch.complex128"):
        ckpt.save(0, {"a": {"b": torch.zeros(2, dtype=torch.complex128)}})


def test_tensors_that_are_not_contiguous(ckpt: holdfast.Checkpointer) -> None:
    base = torch.arange(24.0).reshape(4, 6)
    state = {
        "transposed": base.t(),
        "strided": base[:, ::2],
        "expanded": torch.tensor([3.0]).expand(5),
        "channels": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "conjugated": torch.randn(3, dtype=torch.complex64).conj(),
    }
    expected = bits({k: v.clone() for k, v in state.items()})
    conv = torch.nn.Conv2d(3, 8, 3).to(memory_format=torch.channels_last)
    weights = bits(conv.weight)
    ckpt.save(0, {**state, "conv": conv})
    fresh = {
        "transposed": torch.zeros(4, 6).t(),
        "strided": torch.zeros(4, 6)[:, ::2],
        "expanded": torch.zeros(5),
        "channels": torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "conjugated": torch.zeros(3, dtype=torch.complex64),
    }
    other = torch.nn.Conv2d(3, 8, 3).to(memory_format=torch.channels_last)
    ckpt.restore({**fresh, "conv": other})
    assert bits({k: v.clone() for k, v in fresh.items()}) == expected
    assert bits(other.weight) == weights
    assert other.weight.is_contiguous(memory_format=torch.channels_last)


def test_meta_tensors_are_a_clear_error(ckpt: holdfast.Checkpointer) -> None:
    with torch.device("meta"):
        model = torch.nn.Linear(2, 2)
    with pytest.raises(
        holdfast.InvalidArgumentError, match="model.weight: a tensor on the meta device"
    ):
        ckpt.save(0, {"model": model})
    ckpt.save(1, {"model": torch.nn.Linear(2, 2)})
    with pytest.raises(
        holdfast.InvalidArgumentError, match="model.weight: a tensor on the meta device"
    ):
        ckpt.restore({"model": model})


class Tied(torch.nn.Module):
    def __init__(self, tie: bool = True) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(100, 4)
        self.head = torch.nn.Linear(4, 100, bias=False)
        if tie:
            self.head.weight = self.embed.weight


def test_tied_weights_are_saved_once(ckpt: holdfast.Checkpointer) -> None:
    model = Tied()
    handle = ckpt.save(0, {"model": model}, wait="sealed", timeout=60)
    assert (
        handle.nbytes
        <= ckpt.save(1, {"model": Tied(tie=False)}, wait="sealed", timeout=60).nbytes - 1400
    )
    ckpt.save(2, {"model": model})
    other = Tied()
    ckpt.restore({"model": other})
    assert bits(other.state_dict()) == bits(model.state_dict())
    assert other.head.weight is other.embed.weight
    apart = Tied(tie=False)
    ckpt.restore({"model": apart})
    assert bits(apart.state_dict()) == bits(model.state_dict())


def test_values_come_back_as_they_were(ckpt: holdfast.Checkpointer) -> None:
    extra = {
        "epoch": 3, "lr": 1e-3, "nan": float("inf"), "none": None, "flag": True, "name": "größe", "tuple": (1, (2, 3)),
        "nested": {"deep": [1, 2, {"x": -1}]}, 5: "int key", "numpy": np.float32(0.1), "bytes": b"\0\xff",
        "size": torch.Size([2, 3]), "dtype": torch.bfloat16,
    }  # fmt: skip
    ckpt.save(0, {"extra": extra})
    back: dict[Any, Any] = {"stale": 1}
    state = {"extra": back}
    ckpt.restore(state)
    assert back == extra and state["extra"] is back
    assert [type(v) for v in back.values()] == [type(v) for v in extra.values()]
    state = {"extra": None}
    ckpt.restore(state)
    assert state["extra"] == extra


def test_values_at_the_top(ckpt: holdfast.Checkpointer) -> None:
    ckpt.save(0, {"epoch": 3, "names": ["a", "b"], "w": torch.ones(2)})
    names: list[str] = []
    state = {"epoch": None, "names": names, "w": None}
    ckpt.restore(state)
    assert state["epoch"] == 3 and names == ["a", "b"]
    assert bits(state["w"]) == bits(torch.ones(2))


def test_numpy_arrays(ckpt: holdfast.Checkpointer) -> None:
    arrays = {
        "a": np.arange(12.0).reshape(3, 4).T,
        "b": np.array(7, np.int64),
        "c": np.zeros((0, 2), np.uint8),
    }
    ckpt.save(0, {"x": arrays})
    into = {"a": np.zeros((4, 3)), "b": None, "c": None}
    place = into["a"]
    ckpt.restore({"x": into})
    np.testing.assert_array_equal(into["a"], arrays["a"])
    assert into["a"] is place
    assert bits({"b": into["b"], "c": into["c"]}) == bits({"b": arrays["b"], "c": arrays["c"]})


class Loader:
    def __init__(self) -> None:
        self.at, self.order = 0, torch.arange(3)

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at, "order": self.order}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at, self.order = state["at"], state["order"]


def test_objects_with_a_state_of_their_own(ckpt: holdfast.Checkpointer) -> None:
    model = model_of()
    optim = torch.optim.SGD(model.parameters(), lr=1.0)
    schedule = torch.optim.lr_scheduler.StepLR(optim, 1, gamma=0.5)
    loader = Loader()
    loader.at, loader.order = 9, torch.tensor([2, 0, 1])
    optim.step()
    schedule.step()
    ckpt.save(0, {"schedule": schedule, "loader": loader, "optim": optim})
    other = torch.optim.SGD(model.parameters(), lr=1.0)
    fresh, again = Loader(), torch.optim.lr_scheduler.StepLR(other, 1, gamma=0.5)
    ckpt.restore({"schedule": again, "loader": fresh, "optim": other})
    assert (fresh.at, fresh.order.tolist()) == (9, [2, 0, 1])
    assert again.state_dict() == schedule.state_dict()
    assert other.param_groups[0]["lr"] == 0.5


class Extra(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(2, 2)
        self.scale: Any = 0

    def get_extra_state(self) -> Any:
        return self.scale

    def set_extra_state(self, state: Any) -> None:
        self.scale = state


def test_extra_state_of_modules(ckpt: holdfast.Checkpointer) -> None:
    for step, scale in ((1, {"amax": [1.0, 2.0]}), (2, torch.tensor([3.0, 4.0]))):
        model = torch.nn.Sequential(Extra())
        model[0].scale = scale
        ckpt.save(step, {"model": model})
        other = torch.nn.Sequential(Extra())
        if isinstance(scale, torch.Tensor):
            other[0].scale = torch.zeros(2)
        ckpt.restore({"model": other})
        assert bits(other[0].scale) == bits(scale)


class Opaque:
    def __init__(self, x: int) -> None:
        self.x = x

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Opaque) and other.x == self.x


def test_nothing_is_pickled_unless_allowed_on_both_sides(daemon: Daemon) -> None:
    ckpt = holdfast.Checkpointer("job")
    with pytest.raises(holdfast.RefusedError, match=r"extra\.thing: a .*Opaque.*allow_pickle=True"):
        ckpt.save(0, {"extra": {"thing": Opaque(1)}})
    ckpt.close()
    ckpt = holdfast.Checkpointer("job", allow_pickle=True)
    ckpt.save(1, {"extra": {"thing": Opaque(5), "n": 2}}, wait="sealed", timeout=60)
    ckpt.close()
    ckpt = holdfast.Checkpointer("job")
    with pytest.raises(holdfast.RefusedError, match=r"extra\.thing.*allow_pickle=True"):
        ckpt.restore({"extra": {}})
    ckpt.close()
    ckpt = holdfast.Checkpointer("job", allow_pickle=True)
    extra: dict[str, Any] = {}
    assert ckpt.restore({"extra": extra}) == 2
    assert extra == {"thing": Opaque(5), "n": 2}
    ckpt.close()


def test_what_does_not_fit_is_said_and_nothing_is_skipped(ckpt: holdfast.Checkpointer) -> None:
    model = model_of()
    optim = torch.optim.AdamW(model.parameters())
    train(model, optim)
    ckpt.save(0, {"model": model, "optim": optim, "d": {"w": torch.ones(2), "v": torch.ones(2)}})

    def refused(state: dict[str, Any], match: str, **options: Any) -> None:
        with pytest.raises(holdfast.InvalidArgumentError, match=match):
            ckpt.restore(state, **options)

    refused({"modle": model}, "'modle' was not saved; what was: 'model', 'optim', 'd'")
    refused(
        {"model": torch.nn.Sequential(*model, torch.nn.Linear(4, 4))},
        r"model: not saved: model\.4\.weight, model\.4\.bias",
    )
    refused(
        {"model": torch.nn.Sequential(*list(model)[:3])}, r"model: saved and not wanted: model\.3"
    )
    smaller = torch.nn.Sequential(torch.nn.Linear(8, 8), *list(model_of())[1:])
    refused(
        {"model": smaller},
        r"'model\.0\.weight' was saved as F32 \[16, 8\], wanted is F32 \[8, 8\]",
        strict=False,
    )
    refused({"model": model.double()}, r"was saved as F32 .*, wanted is F64")
    refused({"model": optim}, "model: saved was a module, wanted is a AdamW")
    refused({"d": model}, "d: wanted is a Sequential")
    two = [{"params": [p]} for p in list(model.parameters())[:2]]
    refused(
        {"model": model_of(), "optim": torch.optim.AdamW(two)},
        "saved were 1 groups of parameters, wanted are 2",
    )
    refused({"d": {"w": torch.zeros(2)}}, "d: the keys differ: .*saved and not wanted: 'v'")
    d = {"w": torch.zeros(2), "z": torch.zeros(2)}
    ckpt.restore({"d": d}, strict=False)
    assert d["w"].tolist() == [1, 1] and d["z"].tolist() == [0, 0]


def test_parts_of_the_state_are_enough(ckpt: holdfast.Checkpointer) -> None:
    model = model_of()
    ckpt.save(0, {"model": model, "extra": {"a": 1}})
    other = model_of(3)
    ckpt.restore({"model": other})
    assert bits(other.state_dict()) == bits(model.state_dict())


def test_two_names_that_are_one_are_refused(ckpt: holdfast.Checkpointer) -> None:
    with pytest.raises(
        holdfast.InvalidArgumentError, match="two parts of the state are called 'a.b'"
    ):
        ckpt.save(0, {"a": {"b": torch.ones(1)}, "a.b": torch.zeros(2)})


def test_going_back(ckpt: holdfast.Checkpointer) -> None:
    w = torch.zeros(3)
    for step in range(3):
        w.fill_(step)
        ckpt.save(step, {"w": w}, wait="committed", timeout=60)
    assert ckpt.restore({"w": w}, step=1) == 2
    assert w.tolist() == [1, 1, 1]
    assert ckpt.last_restored is not None
    assert (ckpt.last_restored.step, ckpt.last_restored.source) == (1, "memory")
    with pytest.raises(holdfast.NotFoundError):
        ckpt.restore({"w": w}, step=77)


def test_restore_returns_the_next_step(ckpt: holdfast.Checkpointer) -> None:
    """A job whose only step is 0 is told from one that saved nothing."""
    w = torch.zeros(1)
    assert ckpt.restore({"w": w}) == 0
    assert ckpt.last_restored is None
    for step in (0, 41):
        ckpt.save(step, {"w": w}, wait="committed", timeout=60)
        attempt = ckpt.attempt  # a restore begins the next one
        assert ckpt.restore({"w": w}) == step + 1
        assert ckpt.last_restored is not None
        assert (ckpt.last_restored.step, ckpt.last_restored.attempt) == (step, attempt)


def test_a_step_that_is_not_there_raises(ckpt: holdfast.Checkpointer) -> None:
    with pytest.raises(holdfast.HoldfastError):
        ckpt.restore({"w": torch.zeros(1)}, step=3)


def test_compiled_and_wrapped_modules_have_the_same_names(ckpt: holdfast.Checkpointer) -> None:
    model = model_of()
    ckpt.save(0, {"model": torch.compile(model)})
    other = model_of(5)
    ckpt.restore({"model": other})
    assert bits(other.state_dict()) == bits(model.state_dict())


def test_the_handle_tells_stages_and_times(make_daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    daemon = make_daemon(
        "nvme: {dirs: [ROOT/nvme]}\nremote: {dir: ROOT/remote}\n", ["nvme", "remote"]
    )
    monkeypatch.setenv("HOLDFAST_SOCKET", str(daemon.socket))
    with holdfast.Checkpointer(
        "job", policy=holdfast.Policy(nvme_every_steps=1, remote_every_steps=1)
    ) as ckpt:
        handle = ckpt.save(4, {"w": torch.ones(1000)}, wait="remote", timeout=60)

        def tells_those_before() -> bool:
            handle.wait("remote", 60)  # asks for them in passing: not of a daemon that is slow
            return {"snapshot", "sealed", "committed", "remote"} <= set(handle.times)

        wait_until("the times of all stages", tells_those_before, said=lambda: str(handle.times))
        times = handle.times
        handle.wait("nvme", 60)
        handle.wait("remote", 60)  # whoever asks late is told the same
        again = handle.times
        assert list(again) == ["snapshot", "sealed", "committed", "nvme", "remote"]
        assert list(again.values()) == sorted(again.values())
        assert times.items() <= again.items()
        assert handle.nbytes > 4000 and handle.error is None and handle.done()
        assert "step 4: remote" in repr(handle)


def test_a_daemon_that_is_slow_is_waited_for(make_daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    daemon = make_daemon("nvme: {dirs: [ROOT/nvme]}\n", ["nvme"])
    monkeypatch.setenv("HOLDFAST_SOCKET", str(daemon.socket))
    with holdfast.Checkpointer("job", policy=holdfast.Policy(nvme_every_steps=1)) as ckpt:
        handle = ckpt.save(1, {"w": torch.ones(1000)}, wait="sealed", timeout=60)
        daemon.process.send_signal(signal.SIGSTOP)
        try:
            with pytest.raises(holdfast.DeadlineExceededError):
                handle.wait("nvme", 2)
        finally:
            daemon.process.send_signal(signal.SIGCONT)
        handle.wait("nvme", 60)


def test_what_changes_between_saves_is_saved_as_it_is_then(ckpt: holdfast.Checkpointer) -> None:
    """What the last save found out of the tensors is not believed of others."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Conv2d(4, 4, 2))
    optim = torch.optim.AdamW(model.parameters())
    state: dict[str, Any] = {"model": model, "optim": optim, "w": torch.ones(4, 4)}
    steps = itertools.count()

    def is_saved() -> None:
        def fresh() -> dict[str, Any]:
            other = copy.deepcopy(model)
            for parameter in other.parameters():
                torch.nn.init.zeros_(parameter)
            return {"model": other, "optim": torch.optim.AdamW(other.parameters()), "w": None}

        ckpt.save(next(steps), state, wait="committed", timeout=60)
        back = fresh()
        ckpt.restore(back)
        assert bits(back["model"].state_dict()) == bits(model.state_dict())
        assert bits(back["optim"].state_dict()["state"]) == bits(optim.state_dict()["state"])
        assert bits(back["w"]) == bits(state["w"])

    is_saved()
    is_saved()
    for parameter in model.parameters():  # the optimizer has a state now
        parameter.grad = torch.randn_like(parameter)
    optim.step()
    is_saved()
    model[0].weight.data = model[0].weight.data.clone()  # elsewhere
    is_saved()
    model[0].bias.data = model[0].bias.data.view(torch.int32).view(torch.float32) + 1
    is_saved()
    model[1].to(memory_format=torch.channels_last)  # scattered
    is_saved()
    with torch.no_grad():
        model[1].weight += 1
    is_saved()
    state["w"] = state["w"].view(torch.int32)  # the same memory, other values
    is_saved()
    state["w"] = state["w"].view(2, 8)
    is_saved()
    state["w"] = state["w"].t()
    is_saved()
    state["w"] = model[0].weight.detach()  # tied
    is_saved()
    state["w"] = state["w"].clone()
    is_saved()
    model[0].half()
    is_saved()


def test_a_failing_save_is_logged_once_and_counted(
    ckpt: holdfast.Checkpointer, daemon: Daemon, caplog: pytest.LogCaptureFixture
) -> None:
    state = {"w": torch.ones(10)}
    ckpt.save(5, state, wait="sealed", timeout=60)
    with caplog.at_level(logging.ERROR, "holdfast"):
        handle = ckpt.save(5, state)  # steps must grow
        with pytest.raises(holdfast.InvalidArgumentError):
            handle.wait("sealed", 60)
        ckpt.save(6, state, wait="sealed", timeout=60)
        bad = ckpt.save(
            7, {"w": torch.ones(1, dtype=torch.complex128)}
        )  # no state like this, in the middle of a run
        ckpt.save(8, state, wait="sealed", timeout=60)
    assert isinstance(handle.error, holdfast.InvalidArgumentError) and isinstance(
        bad.error, holdfast.InvalidArgumentError
    )
    assert ckpt.failed_saves == 2
    lines = [record.message for record in caplog.records]
    assert [line.split(":")[1] for line in lines if "was not saved" in line] == [
        " step 5 was not saved",
        " step 7 was not saved",
    ]


def test_failures_are_raised_when_asked_for(daemon: Daemon) -> None:
    with holdfast.Checkpointer("job", on_error="raise") as ckpt:
        state = {"w": torch.ones(10)}
        ckpt.save(5, state)
        with pytest.raises(holdfast.InvalidArgumentError):
            ckpt.save(5, state, wait="sealed")
        with pytest.raises(
            holdfast.InvalidArgumentError
        ):  # of this call, or of the one in which it is known
            ckpt.save(4, state)
            for step in range(6, 100):
                ckpt.save(step, state, wait="sealed")
        assert ckpt.failed_saves == 2


def test_losing_the_daemon_costs_one_save(ckpt: holdfast.Checkpointer, daemon: Daemon) -> None:
    state = {"w": torch.ones(1000)}
    ckpt.save(1, state, wait="committed", timeout=60)
    daemon.kill()
    with pytest.raises(holdfast.UnavailableError):
        ckpt.save(2, state).wait("sealed", 60)
    daemon.start()
    ckpt.save(3, state, wait="committed", timeout=60).wait("committed", 60)
    assert ckpt.failed_saves == 1
    daemon.kill()
    daemon.start()
    assert ckpt.restore(state) == 4


def test_the_package_needs_neither_torch_nor_numpy(daemon: Daemon) -> None:
    code = """
import sys
for name in ("torch", "numpy"):
    sys.modules[name] = None
import holdfast
with holdfast.Checkpointer("plain") as ckpt:
    ckpt.save(1, {"epoch": 3, "x": {"y": [1, 2]}}, wait="committed", timeout=60)
    state = {"epoch": 0, "x": {}}
    assert ckpt.restore(state) == 2
    assert state == {"epoch": 3, "x": {"y": [1, 2]}}, state
"""
    done = run_python(code)
    assert done.returncode == 0, done.stderr


def test_policies_say_what_is_wrong_with_them() -> None:
    assert holdfast.Policy(
        remote_every_steps=100,
        remote_every_ms="10min",
        remote_keep_last=5,
        nvme_every_steps=3,
        nvme_every_ms=1500,
        nvme_keep_every_steps=1000,
        nvme_bytes_max="2GiB",
        replicas=1,
    ).to_core() == {
        "nvme": {
            "every_steps": 3,
            "every_ms": 1500,
            "keep_every_steps": 1000,
            "bytes_max": 2 << 30,
        },
        "remote": {"every_steps": 100, "every_ms": 600_000, "keep_last": 5},
        "peer": {"replicas": 1},
    }
    hour = datetime.timedelta(hours=1)
    assert holdfast.Policy(nvme_every_ms=hour).to_core() == {"nvme": {"every_ms": 3_600_000}}
    for wrong in (
        {"remote_every_ms": "10 parsecs"},
        {"remote_every_ms": datetime.timedelta(seconds=-1)},
        {"nvme_keep_last": -1},
        {"nvme_bytes_max": "lots"},
        {"nvme_every_steps": True},
        {"nvme_every_steps": "10min"},
    ):
        with pytest.raises(holdfast.InvalidArgumentError, match=next(iter(wrong))):
            holdfast.Policy(**wrong).to_core()  # type: ignore[arg-type]


def test_policies_name_their_options_as_the_settings_do() -> None:
    settings = (pathlib.Path(__file__).parents[2] / "docs" / "configuration.md").read_text()
    tiers = {f"policy.{tier}.": f"{tier}_" for tier in ("nvme", "remote")}
    for field in dataclasses.fields(holdfast.Policy):
        name = f"policy.{field.name}"
        for setting, option in tiers.items():
            if field.name.startswith(option):
                name = setting + field.name.removeprefix(option)
        assert f"`{name}`" in settings, f"{field.name}: there is no setting {name}"


def test_numpy_alone_without_torch(daemon: Daemon, tmp_path: pathlib.Path) -> None:
    code = """
import sys
sys.modules["torch"] = None
import numpy as np
import holdfast
with holdfast.Checkpointer("plain") as ckpt:
    w = np.arange(10.)
    ckpt.save(1, {"w": w}, wait="committed", timeout=60)
    back = np.zeros(10)
    ckpt.restore({"w": back})
    assert (back == w).all()
"""
    done = run_python(code)
    assert done.returncode == 0, done.stderr


def test_a_state_that_grows_and_shrinks_goes_on_being_saved(ckpt: holdfast.Checkpointer) -> None:
    step = 0
    for mib in (1, 9, 10, 30, 2, 1):
        for _ in range(5):
            state = {"w": torch.full((mib << 18,), float(step))}
            handle = ckpt.save(step, state, wait="committed", timeout=60)
            assert handle.error is None, f"step {step}, {mib} MiB: {handle.error}"
            step += 1
    back = {"w": torch.zeros(1 << 18)}
    assert ckpt.restore(back) == step
    assert bool((back["w"] == step - 1).all())


class Packed(torch.nn.Module):
    """Shows something else than its memory, as modules that quantise do."""

    def __init__(self, value: int) -> None:
        super().__init__()
        self.w = torch.full((4,), float(value))

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        destination[prefix + "packed"] = self.w.to(torch.int8)

    def _load_from_state_dict(self, state: Any, prefix: str, *_: Any) -> None:
        self.w = state[prefix + "packed"].float()


def test_modules_with_a_word_of_their_own_are_given_their_state(
    ckpt: holdfast.Checkpointer,
) -> None:
    def model_of_value(value: int) -> torch.nn.Module:
        cast = torch.nn.Linear(2, 2)
        torch.nn.init.constant_(cast.weight, value)
        cast.register_state_dict_post_hook(
            lambda module, state, prefix, local: state.update(
                {prefix + "weight": state[prefix + "weight"].detach().to(torch.bfloat16)}
            )
        )
        return torch.nn.ModuleList([Packed(value), cast])

    ckpt.save(0, {"model": model_of_value(5)})
    back = model_of_value(1)
    ckpt.restore({"model": back})
    assert back[0].w.tolist() == [5] * 4
    assert back[1].weight.tolist() == [[5, 5], [5, 5]]


def test_schedulers_keep_the_types_of_their_state(ckpt: holdfast.Checkpointer) -> None:
    optim = torch.optim.SGD(model_of().parameters(), lr=1.0)
    schedule = torch.optim.lr_scheduler.MultiStepLR(optim, [2, 4])
    optim.step()
    schedule.step()
    ckpt.save(0, {"schedule": schedule})
    again = torch.optim.lr_scheduler.MultiStepLR(optim, [7])
    ckpt.restore({"schedule": again})
    assert again.state_dict() == schedule.state_dict()
    assert type(again.milestones) is type(schedule.milestones)


class Counting(torch.optim.SGD):
    """Keeps something that belongs to no parameter."""

    def step(self, closure: Any = None) -> Any:
        self.state["all"]["steps"] = self.state["all"].get("steps", 0) + 1
        return super().step(closure)


def test_an_optimizer_keeps_what_belongs_to_no_parameter(ckpt: holdfast.Checkpointer) -> None:
    model = model_of()
    optim = Counting(model.parameters(), lr=0.1, momentum=0.9)
    train(model, optim, 3)
    ckpt.save(0, {"model": model, "optim": optim})
    fresh = model_of(2)
    other = Counting(fresh.parameters(), lr=0.1, momentum=0.9)
    ckpt.restore({"model": fresh, "optim": other})
    assert bits(other.state_dict()) == bits(optim.state_dict())


def test_what_does_not_fit_is_never_cast_spread_or_mixed(ckpt: holdfast.Checkpointer) -> None:
    model = Tied()
    state = {
        "tied": model, "apart": Tied(tie=False), "list": [torch.ones(2)], "array": np.arange(6.0), "value": {"a": 1},
    }  # fmt: skip
    ckpt.save(0, state)

    def refused(wanted: dict[str, Any], match: str) -> None:
        with pytest.raises(holdfast.InvalidArgumentError, match=match):
            ckpt.restore(wanted)

    wider = Tied(tie=False)
    wider.head = torch.nn.Linear(4, 100, bias=False, dtype=torch.bfloat16)
    refused({"tied": wider}, "is wanted as torch.float32 .* here as torch.bfloat16")
    refused({"apart": Tied()}, "what was saved was not tied, what is wanted is")
    refused(
        {"list": [torch.ones(2), torch.ones(2)]},
        "list: wanted is a list of 2 with tensors to be filled, saved was a list of 1",
    )
    refused(
        {"array": np.zeros(3)},
        r"array: was saved as F64 \[6\], wanted is an array of float64 \[3\]",
    )
    refused({"value": {"a": torch.ones(1)}}, "value: wanted is a dict of 1 with tensors")


def test_reading_the_count_hides_no_failure(
    ckpt: holdfast.Checkpointer, caplog: pytest.LogCaptureFixture
) -> None:
    state = {"w": torch.ones(10)}
    ckpt.save(5, state, wait="sealed", timeout=60)
    with caplog.at_level(logging.ERROR, "holdfast"):
        handle = ckpt.save(4, state)
        while not handle.done():
            pass
        assert ckpt.failed_saves == 1
        ckpt.save(6, state)
    assert sum("was not saved" in record.message for record in caplog.records) == 1


def test_a_stage_that_never_comes_does_not_unmake_a_save(daemon: Daemon) -> None:
    with holdfast.Checkpointer("job", on_error="raise") as ckpt:
        with pytest.raises(holdfast.RefusedError, match="remote"):  # there is none
            ckpt.save(1, {"w": torch.ones(10)}, wait="remote", timeout=60)
        assert ckpt.failed_saves == 0
        assert ckpt.restore({"w": torch.zeros(10)}) == 2


def test_a_state_that_raises_is_a_failed_save(ckpt: holdfast.Checkpointer) -> None:
    loader = Loader()
    with pytest.raises(ZeroDivisionError):
        loader.state_dict = lambda: 1 // 0  # type: ignore[method-assign, assignment]
        ckpt.save(0, {"loader": loader})
    ckpt.save(1, {"loader": Loader()}, wait="sealed", timeout=60)
    handle = ckpt.save(2, {"loader": loader})
    assert isinstance(handle.error, holdfast.InternalError) and "ZeroDivisionError" in str(
        handle.error
    )


def test_ctrl_c_ends_a_save_that_waits_for_a_stopped_daemon(daemon: Daemon) -> None:
    ckpt = holdfast.Checkpointer("job", overlap=False, call_timeout=60.0)
    state = {"w": torch.ones(5 << 20)}  # more than is set aside: it waits for a slot
    ckpt.save(0, state, wait="sealed", timeout=60)
    assert daemon.process is not None
    daemon.process.send_signal(signal.SIGSTOP)
    try:
        timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            ckpt.save(1, state)
        timer.join()
    finally:
        daemon.process.send_signal(signal.SIGCONT)
    handle = ckpt.save(2, state)
    handle.wait("committed", 60)
    ckpt.close()


def test_a_daemon_that_hangs_for_long_costs_saves_and_hangs_nothing(daemon: Daemon) -> None:
    ckpt = holdfast.Checkpointer("job", call_timeout=1.0)
    model = model_of()
    optim = torch.optim.SGD(model.parameters(), lr=0.1)
    state = {"model": model, "optim": optim}

    def save_one(first: int) -> int:
        """The first step from there that is saved: on a machine that stands still for a second, too, a daemon hangs."""
        for step in range(first, first + 100):
            if ckpt.save(step, state, wait="sealed", timeout=60).error is None:
                return step
        pytest.fail(f"no step from {first} on is saved")

    step = save_one(0)
    failed = ckpt.failed_saves
    train(model, optim)
    assert daemon.process is not None
    daemon.process.send_signal(signal.SIGSTOP)
    try:
        handle = ckpt.save(step + 1, state)
        train(model, optim)  # its step waits for the copy, which has failed by then
        assert isinstance(handle.error, holdfast.UnavailableError)
        assert ckpt.failed_saves == failed + 1
    finally:
        daemon.process.send_signal(signal.SIGCONT)
    save_one(step + 2)
    ckpt.close()


def test_half_a_restored_state_is_not_saved(ckpt: holdfast.Checkpointer) -> None:
    loader = Loader()
    model = model_of()
    ckpt.save(0, {"loader": loader, "model": model}, wait="sealed", timeout=60)

    def fails(_: Any) -> None:
        raise ValueError("no such file")

    loader.load_state_dict = fails  # type: ignore[method-assign]
    with pytest.raises(ValueError, match="no such file"):
        ckpt.restore({"loader": loader, "model": model})
    assert isinstance(ckpt.save(1, {"model": model}).error, holdfast.RefusedError)
    ckpt.restore({"loader": Loader(), "model": model})
    assert ckpt.save(2, {"model": model}, wait="sealed", timeout=60).error is None


def test_names_that_would_be_read_as_tags_are_refused(ckpt: holdfast.Checkpointer) -> None:
    module = torch.nn.Module()
    module.register_buffer("$set", torch.ones(3))
    module.register_buffer("other", module.get_buffer("$set"))
    ckpt.save(0, {"module": module})  # by its path
    ckpt.restore({"module": module})
    module = torch.nn.Module()
    module.register_buffer("a", torch.ones(3))
    module.register_buffer("$set", module.get_buffer("a"))
    assert isinstance(ckpt.save(1, {"module": module}).error, holdfast.InvalidArgumentError)
    model = model_of()
    optim = torch.optim.SGD(model.parameters(), lr=0.1)
    optim.state[model[0].weight]["count"] = 3  # no tensor, and so named in the tree
    state = {"$m": model, "optim": optim}
    assert isinstance(ckpt.save(2, state).error, holdfast.InvalidArgumentError)


def test_threads_that_wait_when_the_interpreter_ends(daemon: Daemon) -> None:
    code = """
import threading
import torch
import holdfast
ckpt = holdfast.Checkpointer("end", rank=0, world_size=2)
handle = ckpt.save(0, {"w": torch.ones(10)}, wait="sealed")
threading.Thread(target=lambda: handle.wait("committed"), daemon=True).start()   # rank 1 never comes
"""
    for _ in range(3):
        done = run_python(code)
        assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("step", [True, -1, 2**64, 1.0, "1", None, torch.tensor([1, 2])])
def test_a_step_is_an_integer(ckpt: holdfast.Checkpointer, step: Any) -> None:
    state = {"w": torch.ones(1)}
    with pytest.raises(holdfast.InvalidArgumentError, match="save: step"):
        ckpt.save(step, state)
    if step is not None:
        with pytest.raises(holdfast.InvalidArgumentError, match="restore: step"):
            ckpt.restore(state, step=step)
        with pytest.raises(holdfast.InvalidArgumentError, match="open: step"):
            holdfast.open("job", step=step)
    assert ckpt.save(np.int64(3), state, wait="sealed", timeout=60).error is None


def test_a_save_that_is_waited_for_waits_for_its_slot_too(
    make_daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two slots, and readers hold what is in both: a save fails, unless it was told to wait."""
    one = make_daemon(memory_bytes="4MiB")
    monkeypatch.setenv("HOLDFAST_SOCKET", str(one.socket))
    state = {"w": torch.arange(1000.0)}
    with holdfast.Checkpointer("job") as ckpt, contextlib.ExitStack() as held:
        readers = []
        for step in (1, 2):
            ckpt.save(step, state, wait="committed")
            readers.append(held.enter_context(holdfast.open("job", step=step)))
        with pytest.raises(holdfast.NoRoomError):
            ckpt.save(3, state).wait("sealed", timeout=DEADLINE_S)
        begun = holdfast.Handle._wait_first

        def close_a_reader(handle: holdfast.Handle) -> None:
            one.ctl("status")  # the save has most likely asked for its slot by then
            readers[0].close()
            begun(handle)

        monkeypatch.setattr(holdfast.Handle, "_wait_first", close_a_reader)
        handle = ckpt.save(4, state, wait="committed", timeout=DEADLINE_S)
        assert handle.error is None and "committed" in handle.times
