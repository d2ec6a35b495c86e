"""holdfast.importing: weights of torch.save, DCP and safetensors become a step from which a run goes on, bit for bit; and what is
hostile in them is refused before it does anything."""

from __future__ import annotations

import io
import json
import os
import pathlib
import pickle
import re
import struct
import subprocess
import sys
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
from holdfast import _weights, importing


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
        assert ckpt.restore({"model": model}) is not None
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
    with pytest.raises(holdfast.NotFound, match="model-00002-of-00002.safetensors' is missing"):
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
        assert ckpt.restore({"model": found}) == 4
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
            return ckpt.restore({"model": model}) == 10 and is_of(model, 6)

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
    with pytest.raises(holdfast.Refused, match="could run any code"):
        _weights.read(tmp_path / "w.pt")
    (tmp_path / "plain.pt").write_bytes(pickle.dumps(Runs(ran)))
    with pytest.raises(holdfast.HoldfastError):
        _weights.read(tmp_path / "plain.pt")
    (tmp_path / "dcp").mkdir()
    (tmp_path / "dcp/.metadata").write_bytes(pickle.dumps(Runs(ran)))
    with pytest.raises(holdfast.Refused, match=r"posix\.mkdir"):
        _weights.read(tmp_path / "dcp")
    # Through getattr, as which members of enumerations are pickled.
    program = b"cbuiltins\ngetattr\n(ctorch\nSize\nS'__class__'\ntR."
    (tmp_path / "dcp/.metadata").write_bytes(program)
    with pytest.raises(holdfast.Refused, match="no member of an enumeration"):
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
        ({"name": "v"}, "contradicts itself"),
        ({"offset": [1]}, "is not in"),
        ({"offset": [-1]}, "is not in"),
        ({"sizes": [5]}, "is not in"),
        ({"size": [5]}, "only"),
        ({"size": [5], "times": 2}, "do not make up"),
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
                b"[" * 90_000,
            )
        ),
    ],
)
def test_damaged_safetensors(tmp_path: pathlib.Path, content: bytes) -> None:
    path = tmp_path / "w.safetensors"
    path.write_bytes(content)
    with pytest.raises(holdfast.InvalidArgument, match=r"w\.safetensors"):
        _weights.read(path)


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


def test_names_that_cannot_be_told_apart(tmp_path: pathlib.Path) -> None:
    torch.save({"a.b": torch.ones(1), "a": {"b": torch.ones(1)}}, tmp_path / "w.pt")
    with pytest.raises(holdfast.InvalidArgument, match=r"two tensors are called 'a\.b'"):
        _weights.read(tmp_path / "w.pt")
    for name in ("one", "two"):
        safetensors.torch.save_file({"w": torch.ones(2)}, tmp_path / f"{name}.safetensors")
    with pytest.raises(holdfast.InvalidArgument, match="two tensors are called 'w'"):
        _weights.read(tmp_path)


def test_what_holds_no_weights_is_said(tmp_path: pathlib.Path) -> None:
    with pytest.raises(holdfast.NotFound, match="no weights in it"):
        _weights.read(tmp_path)
    with pytest.raises(holdfast.NotFound, match="no file and no directory"):
        _weights.read(tmp_path / "none")
    torch.save([torch.ones(1)], tmp_path / "list.pt")
    with pytest.raises(holdfast.InvalidArgument, match="a dictionary of tensors is wanted"):
        _weights.read(tmp_path / "list.pt")
    torch.save({"w": torch.ones(1)}, tmp_path / "w.pt")
    with pytest.raises(holdfast.InvalidArgument, match=r"called 'model\.…'"):
        importing.import_weights("job", tmp_path / "w.pt", step=1, only="model")


# ---- from a shell ----


def shell(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "holdfast", *arguments],
        capture_output=True, text=True, timeout=DEADLINE_S,
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


def by_ckptctl(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [BIN / "ckptctl", "import", *arguments],
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
    assert done.returncode == 3 and "none.sock" in done.stderr
    done = by_ckptctl("second", str(tmp_path / "none"), "--step=1")
    assert done.returncode == 4 and "no file and no directory" in done.stderr
    # A Python that has no package, whatever lies in the folder it is called from.
    bare = ("second", str(source), "--step=1")
    done = by_ckptctl(*bare, PYTHONPATH="", HOLDFAST_PYTHON="/usr/bin/python3")
    assert done.returncode == 4 and "has no package holdfast: pip install" in done.stderr


def test_ckptctl_has_each_option_of_the_package() -> None:
    of_package = set(re.findall(r"--[a-z-]+", shell("import", "--help").stdout))
    of_ckptctl = set(re.findall(r"--[a-z-]+", by_ckptctl("--help").stdout))
    renamed = {"--socket": "--client-socket", "--timeout": "--wait"}
    assert {renamed.get(option, option) for option in of_package} == of_ckptctl
