"""holdfast.importing: weights of torch.save, DCP and safetensors become a step from which a run goes on, bit for bit; and what is
hostile in them is refused before it does anything."""

from __future__ import annotations

import contextlib
import copyreg
import enum
import io
import json
import os
import pathlib
import pickle
import re
import signal
import socket
import struct
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from ranks import run_ranks
from torch.distributed.checkpoint import metadata as dcp_metadata
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

import holdfast
from daemons import BIN, DEADLINE_S, Daemon
from holdfast import _daemon, _weights, importing


def model_of(seed: int) -> torch.nn.Module:
    torch.manual_seed(seed)
    model = torch.nn.Sequential(
        torch.nn.Linear(8, 16), torch.nn.BatchNorm1d(16), torch.nn.Linear(16, 4).bfloat16()
    )
    model[1].running_mean.normal_()
    return model


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return (
        a.dtype == b.dtype
        and a.shape == b.shape
        and a.contiguous()
        .view(-1)
        .view(torch.uint8)
        .equal(b.contiguous().view(-1).view(torch.uint8))
    )


def restored(job: str) -> torch.nn.Module:
    """A model as a run finds it that goes on from the import."""
    model = model_of(999)
    with holdfast.Checkpointer(job, rank=0, world_size=1) as ckpt:
        assert ckpt.restore({"model": model}) > 0
    return model


def is_of(model: torch.nn.Module, seed: int) -> bool:
    wanted = model_of(seed).state_dict()
    return wanted.keys() == model.state_dict().keys() and all(
        same(tensor, wanted[key]) for key, tensor in model.state_dict().items()
    )


# ---- what is right ----


@pytest.mark.parametrize("legacy", [False, True], ids=["zip", "legacy"])
def test_a_state_dict_of_torch_save(daemon: Daemon, tmp_path: pathlib.Path, legacy: bool) -> None:
    path = tmp_path / "weights.pt"
    torch.save(model_of(1).state_dict(), path, _use_new_zipfile_serialization=not legacy)
    imported = importing.import_weights("job", path, step=7)
    assert (imported.step, imported.tensors, imported.left_out) == (7, 9, ())
    assert "committed" in imported.stages
    assert is_of(restored("job"), 1)
    with holdfast.open("job") as saved:
        assert saved.step == 7


def test_the_model_of_a_whole_training_state(daemon: Daemon, tmp_path: pathlib.Path) -> None:
    path = tmp_path / "last.ckpt"
    model = model_of(2)
    optim = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.save(
        {"epoch": 3, "state_dict": model.state_dict(), "optim": optim.state_dict(), "none": []},
        path,
    )
    imported = importing.import_weights("job", path, step=0, only="state_dict")
    assert imported.tensors == 9
    assert {"epoch", "none", "optim.param_groups.0.lr"} <= set(imported.left_out)
    assert is_of(restored("job"), 2)


def test_every_dtype_of_a_safetensors_file(daemon: Daemon, tmp_path: pathlib.Path) -> None:
    names = ["float32", "float16", "bfloat16", "float64", "int8", "int64", "uint8", "bool"]
    names += ["float8_e4m3fn", "float8_e5m2", "uint16", "int32"]
    tensors = {
        name: torch.arange(1, 7).reshape(2, 3).to(getattr(torch, name)).clone() for name in names
    }
    tensors |= {"scalar": torch.tensor(2.5), "nothing": torch.empty(0, 4), "a/b.c": torch.ones(2)}
    safetensors.torch.save_file(tensors, tmp_path / "w.safetensors", metadata={"format": "pt"})
    imported = importing.import_weights("job", tmp_path / "w.safetensors", step=1, key="weights")
    assert imported.tensors == len(tensors)
    with holdfast.open("job") as saved:
        assert saved.keys() == sorted(f"weights.{name}" for name in tensors)
        for name, tensor in tensors.items():
            assert same(saved.tensor(f"weights.{name}"), tensor), name


def hub(folder: pathlib.Path, seed: int) -> pathlib.Path:
    """As model hubs have it: two files and an index."""
    folder.mkdir()
    state = {key: tensor.contiguous() for key, tensor in model_of(seed).state_dict().items()}
    files = {
        key: f"model-0000{1 + number % 2}-of-00002.safetensors" for number, key in enumerate(state)
    }
    for file in set(files.values()):
        safetensors.torch.save_file(
            {key: state[key] for key, place in files.items() if place == file}, folder / file
        )
    index = {"metadata": {"total_size": 1}, "weight_map": files}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def test_a_directory_with_an_index(daemon: Daemon, tmp_path: pathlib.Path) -> None:
    importing.import_weights("job", hub(tmp_path / "hub", 3), step=0)
    assert is_of(restored("job"), 3)


def test_a_directory_without_an_index(daemon: Daemon, tmp_path: pathlib.Path) -> None:
    folder = hub(tmp_path / "hub", 4)
    (folder / "model.safetensors.index.json").unlink()
    importing.import_weights("job", folder, step=0)
    assert is_of(restored("job"), 4)


def test_a_set_that_is_not_complete_is_refused(tmp_path: pathlib.Path) -> None:
    folder = hub(tmp_path / "hub", 4)
    (folder / "model.safetensors.index.json").unlink()
    (folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(
        holdfast.NotFoundError, match="model-00002-of-00002.safetensors' is missing"
    ):
        _weights.read(folder)


def tied_model(seed: int) -> torch.nn.Module:
    torch.manual_seed(seed)
    model = torch.nn.ModuleDict(
        {"embedding": torch.nn.Embedding(5, 3), "head": torch.nn.Linear(3, 5)}
    )
    model["head"].weight = model["embedding"].weight
    return model


@pytest.mark.parametrize("file_bytes", ["5GB", "64B"], ids=["one file", "several"])
@pytest.mark.parametrize("only", [True, False], ids=["model", "whole"])
def test_what_was_exported(
    daemon: Daemon, tmp_path: pathlib.Path, only: bool, file_bytes: str
) -> None:
    model = tied_model(1)
    optim = torch.optim.SGD(model.parameters(), lr=0.1)
    with holdfast.Checkpointer("job", rank=0, world_size=1) as ckpt:
        ckpt.save(3, {"model": model, "optim": optim, "extra": {"epoch": 1}}, wait="committed")
    folder = tmp_path / "exported"
    daemon.ctl(
        "export", "job", str(folder), f"--max-file-bytes={file_bytes}", *(["--only=model"] * only)
    )
    imported = importing.import_weights("other", folder, step=4, only=None if only else "model")
    assert imported.tensors == 3  # the head's weight is the embedding's
    assert any("holdfast.state" in name for name in imported.left_out) != only
    found = tied_model(2)
    with holdfast.Checkpointer("other", rank=0, world_size=1) as ckpt:
        assert ckpt.restore({"model": found}) == 5
    for key, tensor in model.state_dict().items():
        assert same(found.state_dict()[key], tensor), key


def test_data_that_lie_at_odd_places(tmp_path: pathlib.Path) -> None:
    header = b'{"w":{"dtype":"F32","shape":[2],"data_offsets":[1,9]},"b":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}'
    path = tmp_path / "odd.safetensors"
    path.write_bytes(struct.pack("<Q", len(header)) + header + b"\7" + struct.pack("<2f", 1.5, -2))
    found = _weights.read(path).tensors
    assert found["w"].tolist() == [1.5, -2.0] and found["b"].tolist() == [7]


def sharded(folder: pathlib.Path) -> dict[str, torch.Tensor]:
    """What two ranks save by DCP: split by rows, by columns, unevenly, and replicated; and what is no tensor."""
    torch.manual_seed(5)
    whole = {
        "rows": torch.randn(6, 4),
        "columns": torch.randn(3, 8, dtype=torch.float64),
        "uneven": torch.randn(5, 2).bfloat16(),
        "same": torch.randn(3),
    }

    def save(_rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,))
        placed = {
            "rows": [Shard(0)], "columns": [Shard(1)], "uneven": [Shard(0)], "same": [Replicate()],
        }  # fmt: skip
        state: dict[str, Any] = {
            "model": {
                key: dist.tensor.distribute_tensor(tensor, mesh, placed[key])
                for key, tensor in whole.items()
            },
            "epoch": 4,
        }
        assert isinstance(state["model"]["rows"], DTensor)
        dcp.save(state, checkpoint_id=folder)

    run_ranks(2, save)
    return whole


def test_a_directory_of_dcp(daemon: Daemon, tmp_path: pathlib.Path) -> None:
    whole = sharded(tmp_path / "dcp")
    imported = importing.import_weights("job", tmp_path / "dcp", step=1000, only="model")
    assert (imported.tensors, imported.left_out) == (4, ("epoch",))
    with holdfast.open("job") as saved:
        for key, tensor in whole.items():
            assert same(saved.tensor(f"model.{key}"), tensor), key


def test_a_run_on_other_ranks_goes_on_from_it(daemon: Daemon, tmp_path: pathlib.Path) -> None:
    importing.import_weights("job", hub(tmp_path / "hub", 6), step=10)

    def go_on(_rank: int) -> bool:
        model = model_of(999)
        with holdfast.Checkpointer("job") as ckpt:
            return ckpt.restore({"model": model}) == 11 and is_of(model, 6)

    assert run_ranks(2, go_on) == [True, True]


def test_where_something_was_saved_nothing_is_imported(
    daemon: Daemon, tmp_path: pathlib.Path
) -> None:
    torch.save(model_of(1).state_dict(), tmp_path / "w.pt")
    importing.import_weights("job", tmp_path / "w.pt", step=5)
    with pytest.raises(holdfast.HoldfastError, match="from-scratch|restore"):
        importing.import_weights("job", tmp_path / "w.pt", step=6)
    assert is_of(restored("job"), 1)


# ---- what is not ----


class Runs:
    """Makes a file when it is unpickled."""

    def __init__(self, path: pathlib.Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def test_a_pickle_that_would_run_something_runs_nothing(tmp_path: pathlib.Path) -> None:
    ran = tmp_path / "ran"
    torch.save({"w": torch.ones(2), "x": Runs(ran)}, tmp_path / "w.pt")
    with pytest.raises(holdfast.RefusedError, match="could run any code"):
        _weights.read(tmp_path / "w.pt")
    (tmp_path / "plain.pt").write_bytes(pickle.dumps(Runs(ran)))
    with pytest.raises(holdfast.HoldfastError):
        _weights.read(tmp_path / "plain.pt")
    (tmp_path / "dcp").mkdir()
    (tmp_path / "dcp/.metadata").write_bytes(pickle.dumps(Runs(ran)))
    with pytest.raises(holdfast.RefusedError, match=r"posix\.mkdir"):
        _weights.read(tmp_path / "dcp")
    # Through getattr, as which some Pythons pickle members of enumerations.
    program = b"cbuiltins\ngetattr\nctorch\nSize\n\x8c\x09__class__\x86R."
    (tmp_path / "dcp/.metadata").write_bytes(program)
    with pytest.raises(holdfast.InvalidArgumentError, match="not DCP's metadata"):
        _weights.read(tmp_path / "dcp")
    assert not ran.exists()


def one_chunk(folder: pathlib.Path, **changed: Any) -> None:
    """A DCP directory of one tensor of [4], with something in it that is not as it should be."""
    folder.mkdir()
    data = io.BytesIO()
    torch.save(changed.get("stored", torch.arange(4.0)), data)
    (folder / "data").write_bytes(data.getvalue())
    size = torch.Size(changed.get("size", [4]))
    offset = torch.Size(changed.get("offset", [0]))
    chunk = dcp_metadata.ChunkStorageMetadata(offset, torch.Size(changed.get("sizes", [4])))
    info = _StorageInfo(
        changed.get("path", "data"),
        changed.get("at", 0),
        changed.get("length", len(data.getvalue())),
    )
    info.transform_descriptors = changed.get("transforms")
    properties = dcp_metadata.TensorProperties(dtype=torch.float32)
    metadata = dcp_metadata.Metadata(
        {
            "w": dcp_metadata.TensorStorageMetadata(
                properties, size, [chunk] * changed.get("times", 1)
            )
        },
        storage_data={dcp_metadata.MetadataIndex(changed.get("name", "w"), offset): info},
    )
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def text(value: str) -> bytes:
    return b"\x8c" + bytes([len(value)]) + value.encode()


# What DCP's metadata are made of, as a pickle names it.
NAMED = [
    (dcp_metadata.__name__, "Metadata"),
    (dcp_metadata.__name__, "MetadataIndex"),
    (dcp_metadata.__name__, "TensorStorageMetadata"),
    (dcp_metadata.__name__, "BytesStorageMetadata"),
    (dcp_metadata.__name__, "ChunkStorageMetadata"),
    (dcp_metadata.__name__, "TensorProperties"),
    (dcp_metadata.__name__, "StorageMeta"),
    (dcp_metadata.__name__, "_MEM_FORMAT_ENCODING"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("collections", "OrderedDict"),
    ("pathlib", "Path"),
    ("pathlib", "PosixPath"),
]


@pytest.mark.parametrize(("module", "name"), NAMED)
@pytest.mark.parametrize("called", [b"", b")R", b")\x81"], ids=["itself", "called", "made"])
def test_no_pickle_changes_a_class(
    tmp_path: pathlib.Path, module: str, name: str, called: bytes
) -> None:
    named = getattr(sys.modules[module], name)
    before = dict(vars(named))
    attribute = text("is_file") + b"K\x05"
    (tmp_path / ".metadata").write_bytes(
        b"\x80\x04" + text(module) + text(name) + b"\x93" + called
        # Its state is (None, {"is_file": 5}), then {"is_file": 5}.
        + b"N}" + attribute + b"s\x86b" + b"}" + attribute + b"sb."
    )  # fmt: skip
    try:
        with pytest.raises(holdfast.InvalidArgumentError, match="not DCP's metadata"):
            _weights.read(tmp_path)
        assert dict(vars(named)) == before
    finally:
        for attribute_name in vars(named).keys() - before.keys() - {"_hash", "_str"}:
            delattr(named, attribute_name)
        if not isinstance(named, enum.EnumMeta) and before.get("is_file"):
            named.is_file = before["is_file"]


def test_no_pickle_leads_out_of_the_directory(tmp_path: pathlib.Path) -> None:
    one_chunk(tmp_path / "other")
    one_chunk(tmp_path / "dcp", path=f"{tmp_path}/other/data")
    good = (tmp_path / "dcp/.metadata").read_bytes()
    truediv = pathlib.PosixPath.__truediv__
    # PosixPath.__truediv__ = PosixPath; then what was there.
    path = text("pathlib") + text("PosixPath") + b"\x93"
    attack = path + b"N}" + text("__truediv__") + path + b"s\x86b0"
    (tmp_path / "dcp/.metadata").write_bytes(b"\x80\x04" + attack + good)
    try:
        with pytest.raises(holdfast.HoldfastError):
            _weights.read(tmp_path / "dcp")
        assert pathlib.PosixPath.__truediv__ is truediv
    finally:
        pathlib.PosixPath.__truediv__ = truediv  # type: ignore[method-assign]


SIZE = text("torch") + text("Size") + b"\x93"


@pytest.mark.parametrize(
    "program",
    [
        b"\x82\xf0.",  # EXT1: of the process's own registry
        b"\x83\xf0\0.",
        b"\x84\xf0\0\0\0.",
        b"(itorch\nSize\n.",
        b"(" + SIZE + b"o.",
        SIZE + b")}\x92.",  # NEWOBJ_EX
        b"Pother\n.",
        b"N" + b"Q.",
        b"\x8f(K\x01\x90.",  # a set
    ],
)
def test_what_a_pickle_of_dcp_has_no_need_of(tmp_path: pathlib.Path, program: bytes) -> None:
    (tmp_path / ".metadata").write_bytes(b"\x80\x04" + program)
    copyreg.add_extension("torch", "Size", 0xF0)  # type: ignore[no-untyped-call]
    try:
        with pytest.raises(holdfast.RefusedError, match="no need of"):
            _weights.read(tmp_path)
    finally:
        copyreg.remove_extension("torch", "Size", 0xF0)  # type: ignore[no-untyped-call]


@pytest.mark.parametrize(
    "program",
    [
        b".",
        b"N",
        b"0.",
        b"R.",
        b"NNR.",
        b"]]b.",
        b"Ns.",
        b"NNNs.",
        b"NNa.",
        b"\x86.",
        b"h\x07.",
        b"\x8e" + b"\xff" * 8 + b".",  # bytes of a length that is not there
        b"X\xff\xff\xff\x7f.",
        b"\x8c\x02\xff\xfe.",
        b"Nr\xff\xff\xff\xff.",  # a place of 64 GiB in the memo of Python's own
        b"(" * 100_000 + b"t" * 100_000 + b".",
        # {((((), ()), …), …): None}: 2^60 steps for whoever wants the key's hash.
        b"})" + b"".join(b"\x94h" + bytes([n]) + b"\x86" for n in range(60)) + b"Ns.",
    ],
)  # fmt: skip
def test_pickles_that_make_no_sense(tmp_path: pathlib.Path, program: bytes) -> None:
    (tmp_path / ".metadata").write_bytes(b"\x80\x04" + program)
    with pytest.raises(
        (holdfast.InvalidArgumentError, holdfast.RefusedError), match=r"\.metadata'"
    ):
        _weights.read(tmp_path)


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_metadata_of_each_protocol(tmp_path: pathlib.Path, protocol: int) -> None:
    one_chunk(tmp_path / "dcp")
    path = tmp_path / "dcp/.metadata"
    metadata = pickle.loads(path.read_bytes())
    metadata.planner_data = {"w": ("w", 0, 1.5, 1 << 40, True, None)}
    metadata.storage_meta = dcp_metadata.StorageMeta(pathlib.Path("/a/b"), "1", "2", ["m"])
    path.write_bytes(pickle.dumps(metadata, protocol))
    assert _weights.read(tmp_path / "dcp").tensors["w"].tolist() == [0, 1, 2, 3]


def test_one_chunk_as_it_should_be(tmp_path: pathlib.Path) -> None:
    one_chunk(tmp_path / "dcp")
    assert _weights.read(tmp_path / "dcp").tensors["w"].tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"path": "../data"}, "no file of its directory"),
        ({"path": "/etc/passwd"}, "no file of its directory"),
        ({"path": ".."}, "no file of its directory"),
        ({"path": "other"}, "no such file"),
        ({"at": 1 << 40}, "beyond its end"),
        ({"at": -1}, "beyond its end"),
        ({"length": 1 << 40}, "beyond its end"),
        ({"length": 40}, "a part is damaged"),
        ({"length": 1 << 63, "size": [1 << 60]}, "64 bits"),
        ({"length": (1 << 63) - 1, "size": [1 << 60]}, "beyond its end"),
        ({"length": 1 << 62, "size": [1 << 60], "at": 1 << 62}, "beyond its end"),
        ({"size": [1 << 62, 0, 1 << 62], "sizes": [1 << 62, 0, 1 << 62]}, "contradicts itself"),
        ({"size": [1] * 1000}, "contradicts itself"),
        ({"stored": torch.arange(4.0).to_sparse()}, "no tensor with plain memory"),
        ({"stored": torch.empty(4, device="meta")}, "no tensor with plain memory"),
        ({"name": "v"}, "contradicts itself"),
        ({"offset": [1]}, "is not in"),
        ({"offset": [-1]}, "is not in"),
        ({"sizes": [5]}, "is not in"),
        ({"size": [5]}, "only"),
        ({"size": [5], "times": 2}, "only"),
        ({"size": [1 << 50]}, "bytes are stored of a tensor"),
        ({"size": [-4]}, "no shape|contradicts itself"),
        ({"size": [2, 2]}, "contradicts itself|is not in"),
        ({"stored": torch.arange(4)}, "the part at"),
        ({"stored": torch.ones(3)}, "the part at"),
        ({"stored": [1, 2]}, "no tensor"),
        ({"transforms": ["zstd"]}, "transformed"),
    ],
)
def test_hostile_directories_of_dcp(tmp_path: pathlib.Path, changed: Any, says: str) -> None:
    (tmp_path / "data").write_bytes(b"not this one")
    one_chunk(tmp_path / "dcp", **changed)
    with pytest.raises(holdfast.HoldfastError, match=says):
        _weights.read(tmp_path / "dcp")


def test_a_part_that_several_tensors_claim(tmp_path: pathlib.Path) -> None:
    one_chunk(tmp_path / "dcp")
    path = tmp_path / "dcp/.metadata"
    metadata = pickle.loads(path.read_bytes())
    for number in range(1000):  # each of them would be memory of its own
        metadata.state_dict_metadata[f"w{number}"] = metadata.state_dict_metadata["w"]
        index = dcp_metadata.MetadataIndex(f"w{number}", torch.Size([0]))
        metadata.storage_data[index] = next(iter(metadata.storage_data.values()))
    path.write_bytes(pickle.dumps(metadata))
    with pytest.raises(holdfast.InvalidArgumentError, match="more of it than it has"):
        _weights.read(tmp_path / "dcp")


@pytest.mark.parametrize("size", [4, 5])
def test_parts_that_leave_something_out(tmp_path: pathlib.Path, size: int) -> None:
    one_chunk(tmp_path / "dcp", stored=torch.ones(2), sizes=[2], size=[size])
    path = tmp_path / "dcp/.metadata"
    metadata = pickle.loads(path.read_bytes())
    at = torch.Size([2])
    metadata.state_dict_metadata["w"].chunks.append(
        dcp_metadata.ChunkStorageMetadata(at, torch.Size([2]))
    )
    data = (tmp_path / "dcp/data").read_bytes()
    (tmp_path / "dcp/more").write_bytes(data)
    metadata.storage_data[dcp_metadata.MetadataIndex("w", at)] = _StorageInfo("more", 0, len(data))
    path.write_bytes(pickle.dumps(metadata))
    if size == 4:
        assert _weights.read(tmp_path / "dcp").tensors["w"].tolist() == [1] * 4
    else:
        with pytest.raises(holdfast.InvalidArgumentError, match="do not make up"):
            _weights.read(tmp_path / "dcp")


@pytest.mark.parametrize("error", [RuntimeError("can't allocate memory"), MemoryError()])
def test_where_there_is_no_memory_it_is_said(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def full(*_arguments: Any, **_options: Any) -> None:
        raise error

    one_chunk(tmp_path / "dcp")
    monkeypatch.setattr(torch, "empty", full)
    with pytest.raises(holdfast.NoRoomError, match=r"dcp': 'w': no memory for it .*on a host"):
        _weights.read(tmp_path / "dcp")


def nested(levels: int, within: Any) -> Any:
    for _ in range(levels):
        within = [within, within]
    return within


@pytest.mark.parametrize("levels", [22, 40])
@pytest.mark.parametrize("within", ["no tensor", torch.ones(1)], ids=["text", "tensor"])
def test_values_that_are_there_again_and_again(
    tmp_path: pathlib.Path, levels: int, within: Any
) -> None:
    torch.save({"w": torch.ones(1), "x": nested(levels, within)}, tmp_path / "w.pt")
    with pytest.raises(holdfast.InvalidArgumentError, match=r"w\.pt': more than 1000000 values"):
        _weights.read(tmp_path / "w.pt")


def test_names_that_take_too_much(tmp_path: pathlib.Path) -> None:
    state = {"w": torch.ones(1), "x" * 1_000_000: dict.fromkeys(map(str, range(100_000)), [1, [2]])}
    torch.save(state, tmp_path / "w.pt")
    with pytest.raises(holdfast.InvalidArgumentError, match="bytes of names"):
        _weights.read(tmp_path / "w.pt")


def test_many_values_that_are_no_tensors_have_one_name(tmp_path: pathlib.Path) -> None:
    state = {"w": torch.ones(1), "losses": [0.5] * 2_000_000, "lr": [0.1, 0.2]}
    torch.save(state, tmp_path / "w.pt")
    assert _weights.read(tmp_path / "w.pt").left_out == ["losses", "lr.0", "lr.1"]


def test_containers_within_themselves_are_left_out(tmp_path: pathlib.Path) -> None:
    shared = {"w": torch.ones(1)}
    state: dict[str, Any] = {"a": shared, "b": [shared, shared]}
    state |= {"self": state, "list": [state, 7]}
    ring = state["ring"] = {"v": torch.ones(2), "next": {}}
    ring["next"]["next"] = ring
    torch.save(state, tmp_path / "w.pt")
    found = _weights.read(tmp_path / "w.pt")
    assert sorted(found.tensors) == ["a.w", "b.0.w", "b.1.w", "ring.v"]
    assert sorted(found.left_out) == ["list.0", "list.1", "ring.next.next", "self"]


def test_keys_that_are_no_names(tmp_path: pathlib.Path) -> None:
    key: Any = ("a",)
    for _ in range(18):
        key = (key, key)
    state = {"w": torch.ones(1), key: torch.ones(1), ("a", 1): 1, 7: torch.ones(1), None: 1}
    torch.save(state, tmp_path / "w.pt")
    found = _weights.read(tmp_path / "w.pt")
    assert sorted(found.tensors) == ["7", "w"]
    assert sorted(found.left_out) == ["('a', 1)", "<a tuple>", "None"]


def nameless(count: int) -> dict[Any, Any]:
    return {((number,),): 1 for number in range(count)} | {"k": [1]}


@pytest.mark.parametrize(
    "content",
    [{"y" * 100_000: nameless(3000)}, {"x": [nameless(900)] * 2000}],
    ids=["long", "many"],
)
def test_keys_that_are_no_names_count(tmp_path: pathlib.Path, content: Any) -> None:
    torch.save(content, tmp_path / "w.pt")
    with pytest.raises(holdfast.InvalidArgumentError, match="more than 1000000 values, or"):
        _weights.read(tmp_path / "w.pt")


def test_archives_whose_end_says_something_else(tmp_path: pathlib.Path) -> None:
    """Python and torch would take another list of contents for the archive's."""
    path = tmp_path / "w.pt"
    torch.save({"w": torch.ones(1)}, path)
    data = path.read_bytes()
    start = int.from_bytes(data[-6:-2], "little")
    contents, end = data[start:-22], data[-22:]
    for forged, what in [
        (data[:start] + contents + contents + end, "not where it says"),
        (data[:-2] + b"\1\0#", "something follows"),
    ]:
        path.write_bytes(forged)
        with pytest.raises(holdfast.InvalidArgumentError, match=what):
            _weights.read(path)
    path.write_bytes(data)
    assert _weights.read(path).tensors.keys() == {"w"}


def test_pickles_of_more_than_a_limit(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.save({"w": torch.ones(1), "many": list(range(1000))}, tmp_path / "w.pt")
    (tmp_path / "dcp").mkdir()
    (tmp_path / "dcp/.metadata").write_bytes(b"}" * 1001 + b".")
    monkeypatch.setattr(_weights, "_PICKLE_BYTES_MAX", 1000)
    for source, what in [("w.pt", "no tensor has more than 1000"), ("dcp", "more than 1000 bytes")]:
        with pytest.raises(holdfast.InvalidArgumentError, match=what):
            _weights.read(tmp_path / source)


def test_tensors_that_claim_more_than_there_is(tmp_path: pathlib.Path) -> None:
    torch.save({"w": torch.ones(1).expand(1 << 40)}, tmp_path / "w.pt")
    with pytest.raises(holdfast.InvalidArgumentError, match="tensors of more than"):
        _weights.read(tmp_path / "w.pt")
    expanded = {"w": torch.ones(1).expand(1000), "v": torch.ones(4)[::2]}
    torch.save(expanded, tmp_path / "w.pt")
    assert _weights.read(tmp_path / "w.pt").tensors["w"].sum() == 1000


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_nested_tensors_are_refused(tmp_path: pathlib.Path, layout: torch.layout) -> None:
    parts = [torch.ones(2), torch.ones(3)]
    tensor = torch.nested.nested_tensor(parts, layout=layout)
    torch.save({"w": tensor, "v": torch.ones(1)}, tmp_path / "w.pt")
    with pytest.raises(holdfast.HoldfastError, match=r"w\.pt': ('w': a nested|it holds more)"):
        _weights.read(tmp_path / "w.pt")


def test_what_is_compressed_is_not_unpacked(tmp_path: pathlib.Path) -> None:
    torch.save({"w": torch.zeros(1 << 20)}, tmp_path / "plain.pt")
    with (
        zipfile.ZipFile(tmp_path / "plain.pt") as plain,
        zipfile.ZipFile(tmp_path / "w.pt", "w", zipfile.ZIP_DEFLATED) as packed,
    ):
        for entry in plain.namelist():
            packed.writestr(entry, plain.read(entry))
    with pytest.raises(holdfast.InvalidArgumentError, match="compressed"):
        _weights.read(tmp_path / "w.pt")


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x05",
        struct.pack("<Q", 1 << 40),
        struct.pack("<Q", 10) + b"{}",
        struct.pack("<Q", 2) + b"[]",
        struct.pack("<Q", 4) + b"\xff\xfe{}",
        *(
            struct.pack("<Q", len(header)) + header + bytes(8)
            for header in (
                b'{"w":7}',
                b'{"w":{"dtype":"F32","shape":[2]}}',
                b'{"w":{"dtype":"F32","shape":[2],"data_offsets":[0]}}',
                b'{"w":{"dtype":"F32","shape":[3],"data_offsets":[0,8]}}',
                b'{"w":{"dtype":"F32","shape":[4],"data_offsets":[0,16]}}',
                b'{"w":{"dtype":"F32","shape":[-2],"data_offsets":[8,0]}}',
                b'{"w":{"dtype":"F32","shape":[2.0],"data_offsets":[0,8]}}',
                b'{"w":{"dtype":"F33","shape":[2],"data_offsets":[0,8]}}',
                b'{"w":{"dtype":["F32"],"shape":[2],"data_offsets":[0,8]}}',
                b'{"w":{"dtype":"F32","shape":[0,%d,%d],"data_offsets":[0,0]}}'
                % (1 << 62, 1 << 62),
                b'{"w":{"dtype":"F32","shape":[0,%d],"data_offsets":[0,0]}}' % (1 << 64),
                b'{"w":{"dtype":"F32","shape":[2%s],"data_offsets":[0,8]}}' % (b",1" * 64),
                b'{"w":{"dtype":"F32","shape":[0%s],"data_offsets":[0,0]}}' % (b",9" * 99999),
                b'{"w":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},'
                b'"v":{"dtype":"F32","shape":[1],"data_offsets":[1,5]}}',
                b'{"\\ud800":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}',
                b"[" * 90_000,
            )
        ),
    ],
)
def test_damaged_safetensors(tmp_path: pathlib.Path, content: bytes) -> None:
    path = tmp_path / "w.safetensors"
    path.write_bytes(content)
    with pytest.raises(holdfast.InvalidArgumentError, match=r"w\.safetensors"):
        _weights.read(path)


def file_of(path: pathlib.Path, header: str, data: bytes) -> pathlib.Path:
    """A safetensors file that says this."""
    text = header.encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


def at(first: int, end: int) -> str:
    return f'{{"dtype":"U8","shape":[{end - first}],"data_offsets":[{first},{end}]}}'


@pytest.mark.parametrize(
    ("header", "twice"),
    [
        (f'{{"w":{at(0, 4)},"w":{at(4, 8)}}}', "w"),
        (f'{{"w":{at(0, 4)},"\\u0077":{at(0, 4)}}}', "w"),
        ('{"w":{"dtype":"U8","shape":[4],"shape":[8],"data_offsets":[0,8]}}', "shape"),
        (f'{{"__metadata__":{{"a":"w","a":"v"}},"w":{at(0, 8)}}}', "a"),
        (f'{{"__metadata__":{{}},"w":{at(0, 8)},"__metadata__":{{}}}}', "__metadata__"),
    ],
)
def test_names_that_a_header_says_twice(tmp_path: pathlib.Path, header: str, twice: str) -> None:
    file_of(tmp_path / "w.safetensors", header, bytes(8))
    with pytest.raises(
        holdfast.InvalidArgumentError, match=rf"w\.safetensors'.*: it says '{twice}' twice"
    ):
        _weights.read(tmp_path)


def test_names_that_an_index_says_twice(tmp_path: pathlib.Path) -> None:
    for file in ("one", "two"):
        safetensors.torch.save_file({"w": torch.ones(2)}, tmp_path / f"{file}.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(
        '{"weight_map":{"w":"one.safetensors","w":"two.safetensors"}}'
    )
    with pytest.raises(holdfast.InvalidArgumentError, match=r"index\.json'.*: it says 'w' twice"):
        _weights.read(tmp_path)


@pytest.mark.parametrize("places", [[(0, 4), (2, 6)], [(2, 6), (0, 4)], [(0, 6), (2, 3), (6, 7)]])
def test_tensors_that_lie_over_each_other(
    tmp_path: pathlib.Path, places: list[tuple[int, int]]
) -> None:
    header = ",".join(f'"{number}":{at(*place)}' for number, place in enumerate(places))
    file_of(tmp_path / "w.safetensors", f"{{{header}}}", bytes(8))
    with pytest.raises(
        holdfast.InvalidArgumentError, match="several of its tensors lie in the same"
    ):
        _weights.read(tmp_path)


def test_tensors_with_something_between_them(tmp_path: pathlib.Path) -> None:
    header = f'{{"b":{at(5, 8)},"a":{at(1, 4)},"none":{at(2, 2)}}}'
    path = file_of(tmp_path / "w.safetensors", header, bytes(range(9)))
    found = {name: tensor.tolist() for name, tensor in _weights.read(path).tensors.items()}
    assert found == {"a": [1, 2, 3], "b": [5, 6, 7], "none": []}


@pytest.mark.parametrize(
    ("weight_map", "says"),
    [
        ({"w": "../w.safetensors"}, "no file of its directory"),
        ({"w": "/etc/passwd"}, "no file of its directory"),
        ({"w": ""}, "no file of its directory"),
        ({"w": "other.safetensors"}, "no such file"),
        ({"w": "w.safetensors", "v": "w.safetensors"}, "'v' is not in 'w.safetensors'"),
        ([], "not an index"),
        (7, "not an index"),
    ],
)
def test_hostile_indices(tmp_path: pathlib.Path, weight_map: Any, says: str) -> None:
    folder = tmp_path / "hub"
    folder.mkdir()
    for place in (tmp_path, folder):
        safetensors.torch.save_file({"w": torch.ones(2)}, place / "w.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(holdfast.HoldfastError, match=says):
        _weights.read(folder)


@pytest.mark.parametrize("name", ["model.safetensors.index.json", "w.safetensors"])
def test_what_is_no_file_is_not_opened(tmp_path: pathlib.Path, name: str) -> None:
    safetensors.torch.save_file({"w": torch.ones(2)}, tmp_path / "v.safetensors")
    os.mkfifo(tmp_path / name)  # nobody will ever write to it
    with pytest.raises(holdfast.InvalidArgumentError, match=f"{name}': not a file"):
        _weights.read(tmp_path)


def test_an_index_that_is_too_long(tmp_path: pathlib.Path) -> None:
    with open(tmp_path / "model.safetensors.index.json", "wb") as index:
        index.truncate(1 << 40)
    with pytest.raises(holdfast.InvalidArgumentError, match="an index of more than"):
        _weights.read(tmp_path)


def test_a_set_of_many_files_that_says_it_has_more(tmp_path: pathlib.Path) -> None:
    for number in range(1, 3000):
        (tmp_path / f"w-{number:05}-of-99999.safetensors").touch()
    with pytest.raises(holdfast.NotFoundError, match="w-03000-of-99999.safetensors' is missing"):
        _weights.read(tmp_path)


def test_names_that_cannot_be_told_apart(tmp_path: pathlib.Path) -> None:
    torch.save({"a.b": torch.ones(1), "a": {"b": torch.ones(1)}}, tmp_path / "w.pt")
    with pytest.raises(holdfast.InvalidArgumentError, match=r"two tensors are called 'a\.b'"):
        _weights.read(tmp_path / "w.pt")
    for name in ("one", "two"):
        safetensors.torch.save_file({"w": torch.ones(2)}, tmp_path / f"{name}.safetensors")
    with pytest.raises(holdfast.InvalidArgumentError, match="two tensors are called 'w'"):
        _weights.read(tmp_path)


def test_what_holds_no_weights_is_said(tmp_path: pathlib.Path) -> None:
    with pytest.raises(holdfast.NotFoundError, match="no weights in it"):
        _weights.read(tmp_path)
    with pytest.raises(holdfast.NotFoundError, match="no file and no directory"):
        _weights.read(tmp_path / "none")
    torch.save([torch.ones(1)], tmp_path / "list.pt")
    with pytest.raises(holdfast.InvalidArgumentError, match="a dictionary of tensors is wanted"):
        _weights.read(tmp_path / "list.pt")
    torch.save({"w": torch.ones(1)}, tmp_path / "w.pt")
    with pytest.raises(holdfast.InvalidArgumentError, match=r"called 'model\.…'"):
        importing.import_weights("job", tmp_path / "w.pt", step=1, only="model")


# ---- daemons that are not there ----

LOOKS_ON_S = 30  # that nobody waits who looks on, with room for a machine that is busy


@contextlib.contextmanager
def who_looks_on(says: str) -> Iterator[None]:
    began = time.monotonic()
    with pytest.raises(holdfast.UnavailableError, match=says):
        yield
    assert time.monotonic() - began < LOOKS_ON_S


@pytest.mark.parametrize("dead", [False, True], ids=["none", "dead"])
def test_where_nobody_listens_it_says_so_at_once(tmp_path: pathlib.Path, dead: bool) -> None:
    path = tmp_path / "c.sock"
    if dead:
        with socket.socket(socket.AF_UNIX) as left:
            left.bind(str(path))
    # Before the source is read, which may take long.
    with who_looks_on(r"c\.sock'.*ckptctl import --client-socket"):
        importing.import_weights("job", tmp_path / "none", step=0, socket=path)


def test_where_no_daemon_is_found_or_started(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_daemon, "SYSTEM_SOCKET", str(tmp_path / "system.sock"))
    monkeypatch.setenv("HOLDFAST_PRIVATE_DIR", str(tmp_path / "private"))
    for name in ("HOLDFAST_SOCKET", "XDG_RUNTIME_DIR"):
        monkeypatch.delenv(name, raising=False)
    torch.save({"w": torch.ones(1)}, tmp_path / "w.pt")
    with who_looks_on(r"system\.sock'.*ckptctl import --client-socket"):
        importing.import_weights("job", tmp_path / "w.pt", step=0, start_daemon=False)


def test_a_daemon_that_hangs_is_given_up(daemon: Daemon, tmp_path: pathlib.Path) -> None:
    torch.save({"w": torch.ones(1)}, tmp_path / "w.pt")
    assert daemon.process is not None
    daemon.process.send_signal(signal.SIGSTOP)
    try:
        with who_looks_on(r"in time.*ckptd\.sock.*ckptctl import --client-socket"):
            importing.import_weights("job", tmp_path / "w.pt", step=0, timeout=0.5)
    finally:
        daemon.process.send_signal(signal.SIGCONT)


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"step": -1}, "step=-1 is not"),
        ({"timeout": -1}, "timeout=-1 is not"),
        ({"tensor": torch.ones(2, dtype=torch.complex128)}, "no place in a safetensors file"),
        ({"tensor": torch.ones(2, device="meta")}, "meta device"),
    ],
)
def test_what_cannot_be_saved_makes_no_job(
    daemon: Daemon, tmp_path: pathlib.Path, changed: dict[str, Any], says: str
) -> None:
    asked = {"step": 0} | changed
    torch.save({"w": asked.pop("tensor", torch.ones(2))}, tmp_path / "w.pt")
    with pytest.raises(holdfast.InvalidArgumentError, match=says):
        importing.import_weights("job", tmp_path / "w.pt", **asked)
    assert json.loads(daemon.ctl("status", "--json"))["jobs"] == []


# ---- from a shell ----


def shell(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "holdfast", *arguments],
        capture_output=True, text=True, timeout=DEADLINE_S, **options,
    )  # fmt: skip


def test_the_command(daemon: Daemon, tmp_path: pathlib.Path) -> None:
    source = str(hub(tmp_path / "hub", 8))
    done = shell("import", "job", source, "--step", "12", "--json")
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert (said["job"], said["step"], said["tensors"]) == ("job", 12, 9)
    assert is_of(restored("job"), 8)
    # What goes wrong has ckptctl's exit codes.
    for arguments, code, says in (
        (("import", "other", str(tmp_path / "none"), "--step=1"), 4, "no file and no directory"),
        (("import", "other", source), 2, "--step"),
        (("import", "other", source, "--step=-1"), 2, "step"),
        (("import", "other", source, "--step=1", f"--socket={tmp_path}/none.sock"), 3, "none.sock"),
    ):
        done = shell(*arguments)
        assert done.returncode == code and says in done.stderr, (arguments, done)
    assert "import llama-7b" in shell("--help").stdout
    done = shell("import", "other", str(tmp_path / "none"), "--step=1", "--json")
    error = json.loads(done.stdout)["error"]
    assert (error["code"], error["exit_code"]) == ("NOT_FOUND", 4)
    assert error["message"] in done.stderr


def by_ckptctl(
    *arguments: str, cwd: pathlib.Path | None = None, **variables: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [BIN / "ckptctl", "import", *arguments], cwd=cwd,
        env={**os.environ, "HOLDFAST_PYTHON": sys.executable, **variables},
        capture_output=True, text=True, timeout=DEADLINE_S,
    )  # fmt: skip


def test_by_ckptctl(daemon: Daemon, tmp_path: pathlib.Path) -> None:
    source = tmp_path / "two words $(false).safetensors"
    state = {f"net.{key}": value.contiguous() for key, value in model_of(9).state_dict().items()}
    safetensors.torch.save_file({**state, "other": torch.ones(2)}, source)
    done = by_ckptctl("job", str(source), "--step", "12", "--only=net", "--wait=2min", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    said = json.loads(done.stdout)
    assert (said["job"], said["step"], said["tensors"]) == ("job", 12, 9)
    assert said["left_out"] == ["other"]
    assert is_of(restored("job"), 9)
    done = by_ckptctl("second", str(source), "--step=1", f"--client-socket={tmp_path}/none.sock")
    assert done.returncode == 3, done
    assert "none.sock" in done.stderr and "--client-socket" in done.stderr
    done = by_ckptctl("second", str(tmp_path / "none"), "--step=1")
    assert done.returncode == 4 and "no file and no directory" in done.stderr
    # A Python that has no package, whatever lies in the folder it is called from.
    bare = ("second", str(source), "--step=1")
    done = by_ckptctl(*bare, PYTHONPATH="", HOLDFAST_PYTHON="/usr/bin/python3")
    assert done.returncode == 4 and "has no package holdfast: pip install" in done.stderr


def downloaded(folder: pathlib.Path, *modules: str) -> pathlib.Path:
    """Weights, and modules beside them that make a file when they are imported."""
    folder.mkdir()
    safetensors.torch.save_file({"w": torch.ones(2)}, folder / "w.safetensors")
    for module in modules:
        path = folder / f"{module}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"open({str(folder / 'ran')!r}, 'a').write({module!r})")
    return folder


MODULES = ["torch", "numpy", "safetensors", "json", "argparse", "dataclasses", "logging"]


def test_ckptctl_runs_nothing_of_the_working_directory(
    daemon: Daemon, tmp_path: pathlib.Path
) -> None:
    # With what Python needs to run a module, and what it looks for when it starts.
    more = ["types", "runpy", "importlib/__init__", "sitecustomize", "usercustomize"]
    package = ["holdfast/__init__", "holdfast/__main__"]
    folder = downloaded(tmp_path / "downloaded", *MODULES, *more, *package)
    # (An entry of PYTHONPATH that is empty is the working directory, too.)
    paths = f":{os.environ['PYTHONPATH']}:"
    done = by_ckptctl("job", ".", "--step=0", cwd=folder, PYTHONPATH=paths)
    assert (done.returncode, done.stderr) == (0, "")
    assert not (folder / "ran").exists(), (folder / "ran").read_text()
    # A package there is none, unless the user names the folder.
    place = pathlib.Path(os.environ["PYTHONPATH"])
    done = by_ckptctl("other", str(folder), "--step=0", cwd=place, PYTHONPATH=":")
    assert done.returncode == 4 and "has no package holdfast" in done.stderr
    for named in (str(place), "."):
        done = by_ckptctl(
            f"job-{len(named)}", str(folder), "--step=0", cwd=place, PYTHONPATH=f"/none:{named}"
        )
        assert (done.returncode, done.stderr) == (0, "")


def test_the_command_runs_nothing_of_the_working_directory(
    daemon: Daemon, tmp_path: pathlib.Path
) -> None:
    folder = downloaded(tmp_path / "downloaded", *MODULES)
    done = shell("import", "job", ".", "--step=0", cwd=folder)
    assert (done.returncode, done.stderr) == (0, "")
    assert not (folder / "ran").exists(), (folder / "ran").read_text()
    # The package itself may lie there, and what PYTHONPATH names is kept.
    place = os.environ["PYTHONPATH"]
    bare = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    for env in (bare, bare | {"PYTHONPATH": place}, bare | {"PYTHONSAFEPATH": "1"}):
        done = shell("--version", cwd=place, env=env)
        assert ("PYTHONSAFEPATH" in env) == ("No module named holdfast" in done.stderr), done
    # Of another program nothing is taken away.
    (tmp_path / "program.py").write_text("import holdfast, sys; print(sys.path[0])")
    done = subprocess.run(
        [sys.executable, "-m", "program"], cwd=place, capture_output=True, text=True,
        env=bare | {"PYTHONPATH": f"{place}:{tmp_path}"},
    )  # fmt: skip
    assert done.stdout.strip() == os.path.realpath(place), done.stderr


def test_names_are_shown_as_text(tmp_path: pathlib.Path) -> None:
    shown = str(importing.Imported("job", 1, 2, 8, ("a b", "\x1b[2J", "\ud800"), ("committed",)))
    assert shown.splitlines()[1] == r"left out: a b, '\x1b[2J', '\ud800'"


def test_ckptctl_has_each_option_of_the_package() -> None:
    of_package = set(re.findall(r"--[a-z-]+", shell("import", "--help").stdout))
    of_ckptctl = set(re.findall(r"--[a-z-]+", by_ckptctl("--help").stdout))
    renamed = {"--socket": "--client-socket", "--timeout": "--wait"}
    assert {renamed.get(option, option) for option in of_package} == of_ckptctl
