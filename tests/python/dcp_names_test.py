"""What DCP and other tools call a step and its tensors: checkpoint_id, storage_meta, tied names."""

from __future__ import annotations

import logging
import pathlib
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.logger import _dcp_logger

import holdfast
from daemons import Daemon
from holdfast import _jobs
from holdfast.dcp import Reader, Writer
from holdfast.dcp._staging import Flattened

_dcp_logger.setLevel(logging.ERROR)
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.fixture(autouse=True)
def no_job_is_left(daemon: Daemon):
    yield
    _jobs._close_all()
    _jobs._loaded.clear()


def state(value: float) -> dict[str, Any]:
    return {"w": torch.full((3,), value)}


def ids(step: int) -> list[Any]:
    """As frameworks name a step."""
    return [
        str(step),
        f"job/{step}",
        f"outputs/checkpoint/step-{step}",
        pathlib.Path(f"/mnt/runs/2024/epoch=1-step={step}.ckpt"),
        f"gs://bucket/run-7/{step}/",
    ]


def test_an_id_that_ends_in_the_step_is_accepted() -> None:
    for step, checkpoint_id in enumerate(ids(0), 10):
        checkpoint_id = ids(step)[step - 10]
        dcp.save(state(step), checkpoint_id=checkpoint_id, storage_writer=Writer("job", step=step))
        for found in (False, True):
            reader = Reader("job", step=None if found else step, adopt=False)
            assert not found or reader.find() == step
            loaded = state(0)
            dcp.load(loaded, checkpoint_id=checkpoint_id, storage_reader=reader)
            assert loaded["w"].eq(step).all()


def test_an_id_of_another_step_is_refused() -> None:
    dcp.save(state(1), storage_writer=Writer("job", step=1))
    for checkpoint_id in ("2", "step-1/model", "/some/path", "step-11", pathlib.Path("job/2")):
        with pytest.raises(
            holdfast.InvalidArgumentError, match="checkpoint_id.*step 1 of job 'job'"
        ):
            dcp.load(state(0), checkpoint_id=checkpoint_id, storage_reader=Reader("job", step=1))
    # The newest might be another than the one that is named.
    with pytest.raises(
        holdfast.InvalidArgumentError, match="checkpoint_id.*the newest of job 'job'"
    ):
        dcp.load(state(0), checkpoint_id="1", storage_reader=Reader("job", adopt=False))
    for checkpoint_id in ("3", "/some/path", "step-2/rank-0"):
        with pytest.raises(
            holdfast.InvalidArgumentError, match="checkpoint_id.*saves, 2 of job 'job'"
        ):
            dcp.save(state(2), checkpoint_id=checkpoint_id, storage_writer=Writer("job", step=2))


def test_storage_meta_names_the_step() -> None:
    writer = Writer("job", step=1)
    metadata = dcp.save(state(1), storage_writer=writer)
    saved = metadata.storage_meta
    assert saved is not None and saved.checkpoint_id == "job/1"
    assert saved.save_id and saved.save_id == writer.storage_meta().save_id
    readers = [Reader("job", step=1, adopt=False) for _ in range(2)]
    found = [reader.read_metadata().storage_meta for reader in readers]
    for each, reader in zip(found, readers, strict=True):
        assert each is not None and each.checkpoint_id == "job/1"
        reader.reset()
    assert found[0].load_id and found[0].load_id != found[1].load_id


def test_other_readers_find_tied_tensors_by_the_name_that_comes_first(
    make_daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file of safetensors has one name for a tensor. A module's parameters come once, too."""
    # Not in PyTorch 2.6.
    HuggingFaceStorageReader = pytest.importorskip(
        "torch.distributed.checkpoint.hf_storage"
    ).HuggingFaceStorageReader

    class Tied(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = torch.nn.Embedding(5, 3)
            self.norm = torch.nn.BatchNorm1d(3)
            self.head = torch.nn.Linear(3, 5, bias=False)
            self.head.weight = self.embed.weight

    daemon = make_daemon("nvme: {dirs: [ROOT/nvme]}\n", inside=["nvme"])
    monkeypatch.setenv("HOLDFAST_SOCKET", str(daemon.socket))
    model, other = Tied(), Tied()
    with holdfast.Checkpointer("tied", policy=holdfast.Policy(nvme_every_steps=1)) as ckpt:
        ckpt.save(1, {"model": model}, wait="nvme")
    (step,) = daemon.root.glob("nvme/**/1-a1")
    named = [*other.named_parameters(), *other.named_buffers()]
    loaded = {f"model.{name}": each.detach() for name, each in named}
    dcp.load(loaded, storage_reader=HuggingFaceStorageReader(str(step)), no_dist=True)
    assert len(loaded) < len(model.state_dict())
    for name, value in model.state_dict().items():
        assert torch.equal(other.state_dict()[name], value), name


W, V = torch.ones(2), torch.zeros(3)


@pytest.mark.parametrize(
    "nested",
    [
        {"model": {"w": W, "v": torch.nn.Parameter(V)}, "epoch": 3},
        {"optim": {"state": {0: {"step": W, "m": V}, 1: {}}, "groups": [{"lr": 0.1, "p": [0, 1]}]}},
        {"a": [1, 2], "b": [W, 3, [V]], "c": [[1], [2]], "d": (W, V), "e": [], "f": {}},
        {"a": [[], {}], "b": [{"x": [W]}], 7: {None: W, True: V, 1.5: "text"}},
    ],
)
def test_a_staged_state_has_the_names_that_dcp_gives_it(nested: dict[Any, Any]) -> None:
    flat = Flattened(nested)
    values, mappings = flatten_state_dict(nested)
    assert flat.names == list(values)
    assert all(a is b for a, b in zip(flat.values, values.values(), strict=True))
    assert flat.mappings == mappings
    flat.fill(flat.values)
    again, _ = flatten_state_dict(dict(flat.outline))
    assert list(again) == list(values)
    assert all(again[name] is values[name] for name in values)


def test_a_name_that_is_made_twice_is_refused_as_dcp_does() -> None:
    nested = {"a": {"b": W}, "a.b": V}
    for flatten in (flatten_state_dict, Flattened):
        with pytest.raises(ValueError, match=r"duplicated flatten key a\.b"):
            flatten(nested)


def test_tensors_that_change_names_between_saves_are_saved_under_the_new_ones() -> None:
    """All look alike, so that only the names say that this is not the state of the save before."""

    def tensor(value: float) -> torch.Tensor:
        return torch.full((3,), value)

    states: list[dict[str, Any]] = [
        {"a": tensor(1), "b": tensor(2), "c": 3},
        {"b": tensor(4), "a": tensor(5), "c": 3},
        {"a": tensor(6), "b": 7, "c": tensor(8)},
        {"a": tensor(9), "b": 7, "c": tensor(10).to(torch.float64)},
        {"a": tensor(11), "b": 7, "c": tensor(12).to(torch.float64)},
    ]
    for step, nested in enumerate(states):
        dcp.async_save(nested, storage_writer=Writer("job", step=step)).result()
        loaded = {
            name: torch.zeros_like(each) if isinstance(each, torch.Tensor) else None
            for name, each in nested.items()
        }
        dcp.load(loaded, storage_reader=Reader("job", step=step, adopt=False))
        for name, each in nested.items():
            assert (
                torch.equal(loaded[name], each)
                if isinstance(each, torch.Tensor)
                else loaded[name] == each
            ), (step, name)
