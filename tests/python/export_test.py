"""ckptctl export: a step as one set of safetensors files, which safetensors' own reader loads bit for bit."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import signal
import subprocess
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from ranks import free_port
from safetensors import safe_open
from safetensors.torch import load_file
from split_state import (
    CKPTCTL,
    POLICY,
    RANKS,
    TIERS,
    answer,
    ckptctl,
    same_bits,
    save_split,
)
from training import wait_until

import holdfast
from daemons import DEADLINE_S, Daemon
from holdfast import _core

INDEX = "model.safetensors.index.json"
STATE = ".holdfast-export.json"
SMALL = ("--max-file-bytes", "1KB")  # each tensor of more has a file of its own


@pytest.fixture
def tiers(make_daemon, monkeypatch: pytest.MonkeyPatch) -> Daemon:
    daemon = make_daemon(TIERS, ["nvme", "remote"])
    monkeypatch.setenv("HOLDFAST_SOCKET", str(daemon.socket))
    return daemon


def load_set(folder: pathlib.Path) -> dict[str, torch.Tensor]:
    """As those who load from a model hub do: the index says which file has what."""
    if not (folder / INDEX).exists():
        return load_file(folder / "model.safetensors")
    index = json.loads((folder / INDEX).read_text())
    loaded: dict[str, torch.Tensor] = {}
    for name in sorted(set(index["weight_map"].values())):
        of_file = load_file(folder / name)
        assert {each for each, file in index["weight_map"].items() if file == name} == set(of_file)
        loaded |= of_file
    size = sum(tensor.nbytes for tensor in loaded.values())
    assert index["metadata"]["total_size"] == size
    return loaded


def is_same(loaded: dict[str, torch.Tensor], saved: dict[str, torch.Tensor]) -> None:
    """Bit for bit, but for what is no tensor of the state."""
    tensors = {name: each for name, each in loaded.items() if not name.startswith("holdfast:")}
    assert set(tensors) == set(saved)
    assert [name for name in saved if not same_bits(tensors[name], saved[name])] == []


def names_in(folder: pathlib.Path) -> set[str]:
    return {path.name for path in folder.iterdir()} - {STATE}


def test_what_ranks_have_split_is_one_file(tiers: Daemon, tmp_path: pathlib.Path) -> None:
    saved = save_split()
    said = answer(tiers, "export", "job", tmp_path / "deep" / "set")
    folder = tmp_path / "deep" / "set"
    assert names_in(folder) == {"model.safetensors"}
    loaded = load_set(folder)
    is_same(loaded, saved)
    assert (said["step"], said["attempt"], said["tensors"], said["index"]) == (
        7,
        1,
        len(saved),
        "",
    )
    # All ranks have the same tree: it is there once.
    tree = loaded["holdfast:0000000:json:holdfast.state"].numpy().tobytes()
    assert ["extra", {"value": {"epoch": 3}}] in json.loads(tree)["dict"]
    assert said["objects"] == 1
    with safe_open(folder / "model.safetensors", "pt") as file:
        metadata = file.metadata()
    assert (metadata["format"], metadata["holdfast_job"], metadata["holdfast_step"]) == (
        "pt",
        "job",
        "7",
    )
    assert metadata["holdfast_ranks holdfast:0000000:json:holdfast.state"] == "0 to 2"
    assert os.stat(folder / "model.safetensors").st_mode & 0o777 == 0o666 & ~umask()


def umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def test_several_files_and_their_index(tiers: Daemon, tmp_path: pathlib.Path) -> None:
    saved = save_split()
    said = answer(tiers, "export", "job", tmp_path / "set", *SMALL)
    files = [file["name"] for file in said["files"]]
    count = len(files)
    assert count > 2 and files[0] == f"model-00001-of-{count:05}.safetensors"
    assert names_in(tmp_path / "set") == {*files, INDEX}
    is_same(load_set(tmp_path / "set"), saved)
    for file in said["files"]:
        assert (tmp_path / "set" / file["name"]).stat().st_size == file["bytes"]


def start_and_look(tiers: Daemon) -> None:
    """Until the daemon has read what lies on its drive."""
    tiers.start()
    wait_until(
        "step on nvme",
        lambda: any("nvme" in found.tiers for found in holdfast.checkpoints("job")),
    )


def lose_memory(tiers: Daemon) -> None:
    tiers.stop()
    for slot in tiers.memory.iterdir():
        slot.unlink() if slot.is_file() else None


def test_from_each_tier(tiers: Daemon, tmp_path: pathlib.Path) -> None:
    saved = save_split()
    answer(tiers, "export", "job", tmp_path / "memory")
    lose_memory(tiers)
    start_and_look(tiers)
    answer(tiers, "export", "job", tmp_path / "nvme")
    for image in (tiers.root / "nvme").rglob("*.safetensors"):
        image.unlink()
    answer(tiers, "export", "job", tmp_path / "remote")
    for tier in ("memory", "nvme", "remote"):
        is_same(load_set(tmp_path / tier), saved)
    one, *others = ((tmp_path / tier / "model.safetensors").read_bytes() for tier in os.listdir(tmp_path) if tier in ("memory", "nvme", "remote"))  # fmt: skip
    assert all(other == one for other in others)


def test_from_another_nodes_memory(
    make_daemon: Callable[..., Daemon], monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    """What lies in one node's memory alone, asked of another one's daemon."""
    ports = {name: free_port() for name in ("n1", "n2")}
    members = ", ".join(f'{{name: {name}, address: "127.0.0.1:{port}"}}' for name, port in ports.items())  # fmt: skip
    nodes = [
        make_daemon(
            f"node_name: {name}\n"
            f'cluster: {{listen_address: "127.0.0.1:{port}", members: [{members}]}}\n'
        )
        for name, port in ports.items()
    ]
    monkeypatch.setenv("HOLDFAST_SOCKET", str(nodes[0].socket))
    saved = save_split(own=True, wait="committed")
    monkeypatch.delenv("HOLDFAST_SOCKET")
    said = answer(nodes[1], "export", "job", tmp_path / "set", "--max-file-bytes", "100KB")
    assert len(said["files"]) > 1
    is_same(load_set(tmp_path / "set"), saved)
    with holdfast.open("job", socket=str(nodes[1].socket)) as opened:
        assert set(opened.tiers) == {"peer"}, "it was not here"
    assert answer(nodes[1], "diff", "job", "7", "7")["not_equal"] == 0


def test_a_flipped_bit_is_passed_over_and_never_exported(
    tiers: Daemon, tmp_path: pathlib.Path
) -> None:
    # All ranks have the same bytes, which lie in each of their copies on the drive, and in remote once.
    mark = torch.frombuffer(bytearray(b"only here, once: " + bytes(range(256))), dtype=torch.uint8)
    saved = save_split(tensors={"model.rows": torch.randn(24, 7), "model.mark": mark})
    lose_memory(tiers)
    for image in (tiers.root / "nvme").rglob("*.safetensors"):
        flip(image, b"only here, once")
        flip(image, b'"epoch":3')  # of what is no tensor
    start_and_look(tiers)
    answer(tiers, "export", "job", tmp_path / "good")
    loaded = load_set(tmp_path / "good")
    is_same(loaded, saved)
    assert b'"epoch":3' in loaded["holdfast:0000000:json:holdfast.state"].numpy().tobytes()
    for image in (tiers.root / "remote").rglob("*.safetensors"):
        if image.read_bytes().count(b"only here, once"):
            flip(image, b"only here, once")
    done = ckptctl(tiers, "export", "job", tmp_path / "bad")
    assert done.returncode == 1, done.stderr
    assert "model.mark" in done.stderr and "digest" in done.stderr, done.stderr
    assert names_in(tmp_path / "bad") == set()
    # What is whole can still be had.
    answer(tiers, "export", "job", tmp_path / "rows", "--only", "model.rows")
    assert same_bits(load_set(tmp_path / "rows")["model.rows"], saved["model.rows"])


def flip(path: pathlib.Path, what: bytes) -> None:
    data = path.read_bytes()
    assert data.count(what) == 1
    path.write_bytes(data.replace(what, bytes([what[0] ^ 1]) + what[1:]))


def test_one_key_loses_its_name_and_two_keep_theirs(daemon: Daemon, tmp_path: pathlib.Path) -> None:
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8))
    other = torch.nn.Linear(3, 3)
    state = {"model": model, "other": other, "model2": torch.nn.Linear(2, 2), "w": torch.ones(2)}
    with holdfast.Checkpointer("job") as ckpt:
        ckpt.save(1, state, wait="committed", timeout=60)
    said = answer(daemon, "export", "job", tmp_path / "one", "--only", "model")
    assert said["objects"] == 0
    again = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8))
    again.load_state_dict(load_set(tmp_path / "one"))
    for name, value in model.state_dict().items():
        assert same_bits(again.state_dict()[name], value)
    answer(daemon, "export", "job", tmp_path / "two", "--only", "model", "--only", "other")
    assert set(load_set(tmp_path / "two")) == {
        *(f"model.{name}" for name in model.state_dict()),
        *(f"other.{name}" for name in other.state_dict()),
    }
    answer(daemon, "export", "job", tmp_path / "deep", "--only", "model.1")
    assert set(load_set(tmp_path / "deep")) == set(model[1].state_dict())
    answer(daemon, "export", "job", tmp_path / "itself", "--only", "w")
    assert load_set(tmp_path / "itself")["w"].tolist() == [1, 1]
    done = ckptctl(daemon, "export", "job", tmp_path / "none", "--only", "mod")
    assert done.returncode == 4 and "'mod'" in done.stderr and "model, model2" in done.stderr
    assert not (tmp_path / "none").exists()


def test_tied_weights_are_written_once(daemon: Daemon, tmp_path: pathlib.Path) -> None:
    model = torch.nn.Sequential(torch.nn.Embedding(9, 4), torch.nn.Linear(4, 9, bias=False))
    model[1].weight = model[0].weight
    state = {"model": model, "head": torch.nn.ModuleList([model[1]])}
    with holdfast.Checkpointer("job") as ckpt:
        ckpt.save(1, state, wait="committed", timeout=60)
    done = ckptctl(daemon, "export", "job", tmp_path / "all")
    assert "left out: model.1.weight, which is the same tensor as model.0.weight" in done.stdout
    assert "left out: head.0.weight, which is the same tensor as model.0.weight" in done.stdout
    tensors = {name for name in load_set(tmp_path / "all") if not name.startswith("holdfast:")}
    assert tensors == {"model.0.weight"}
    # As safetensors' own save_model says it, so that its load_model fills both.
    from safetensors.torch import load_model

    said = answer(daemon, "export", "job", tmp_path / "model", "--only", "model")
    assert said["left_out"] == [{"name": "1.weight", "same_as": "0.weight"}]
    again = torch.nn.Sequential(torch.nn.Embedding(9, 4), torch.nn.Linear(4, 9, bias=False))
    again[1].weight = again[0].weight
    load_model(again, tmp_path / "model" / "model.safetensors")
    assert same_bits(again[1].weight.detach(), model[0].weight.detach())
    # Under a key where it has its further name alone it is written under that.
    answer(daemon, "export", "job", tmp_path / "head", "--only", "head")
    assert same_bits(load_set(tmp_path / "head")["0.weight"], model[0].weight.detach())


def test_what_ranks_have_of_their_own(tiers: Daemon, tmp_path: pathlib.Path) -> None:
    saved = save_split(own=True, wait="committed")
    answer(tiers, "export", "job", tmp_path / "all")
    loaded = load_set(tmp_path / "all")
    for rank in range(RANKS):
        assert loaded[f"holdfast:{rank:07}:own:rng.cpu"].tolist() == [rank] * 4
        tree = loaded[f"holdfast:{rank:07}:json:holdfast.state"].numpy().tobytes()
        assert f'["seed",{{"value":{rank}}}]'.encode() in tree
    is_same(loaded, saved)
    answer(tiers, "export", "job", tmp_path / "rank", "--rank", "1")
    loaded = load_set(tmp_path / "rank")
    assert loaded["rng.cpu"].tolist() == [1] * 4
    assert [name for name in loaded if name.startswith("holdfast:")] == [
        "holdfast:0000001:json:holdfast.state"
    ]
    done = ckptctl(tiers, "export", "job", tmp_path / "rng", "--only", "rng")
    assert done.returncode == 4 and "rng.cpu" in done.stderr and "--rank" in done.stderr
    answer(tiers, "export", "job", tmp_path / "rng", "--only", "rng", "--rank", "2")
    assert load_set(tmp_path / "rng")["cpu"].tolist() == [2] * 4
    done = ckptctl(tiers, "export", "job", tmp_path / "no", "--rank", "3")
    assert done.returncode == 4 and "there is no rank 3" in done.stderr


def test_what_is_not_whole_is_refused_by_name(tiers: Daemon, tmp_path: pathlib.Path) -> None:
    jobs = [_core.Job("job", rank=rank, world_size=2) for rank in range(2)]
    part = torch.ones(3)
    saves = []
    for rank, job in enumerate(jobs):
        tensors = _core.TensorList()
        tensors.add("a.hole", "F32", (9,), offset=(rank * 4,), local_shape=(3,))
        tensors.add("b.good", "F32", (3,))
        saves.append(job.save(3, tensors, [part.data_ptr(), part.data_ptr()], []))
    for one in saves:
        one.wait("committed", 60)
    done = ckptctl(tiers, "export", "job", tmp_path / "set")
    assert done.returncode == 4
    assert "a.hole" in done.stderr and "no rank saved them" in done.stderr, done.stderr
    assert not (tmp_path / "set").exists()
    answer(tiers, "export", "job", tmp_path / "set", "--only", "b")
    assert load_set(tmp_path / "set")["good"].tolist() == [1, 1, 1]


@pytest.mark.parametrize("same", [True, False])
def test_parts_that_overlap_must_agree(same: bool, tiers: Daemon, tmp_path: pathlib.Path) -> None:
    whole = torch.arange(9.0)
    jobs = [_core.Job("job", rank=rank, world_size=2) for rank in range(2)]
    parts = [whole[:6].clone(), whole[4:].clone()]
    if not same:
        parts[1][1] += 1  # element 5, of which both say something
    saves = []
    for job, part, offset in zip(jobs, parts, (0, 4), strict=True):
        tensors = _core.TensorList()
        tensors.add("w", "F32", (9,), offset=(offset,), local_shape=tuple(part.shape))
        saves.append(job.save(3, tensors, [part.data_ptr()], []))
    for one in saves:
        one.wait("committed", 60)
    done = ckptctl(tiers, "export", "job", tmp_path / "set")
    if same:
        assert done.returncode == 0, done.stderr
        assert load_set(tmp_path / "set")["w"].tolist() == whole.tolist()
    else:
        assert done.returncode == 4 and "'w'" in done.stderr and "different" in done.stderr
        assert names_in(tmp_path / "set") == set()


HOSTILE = [
    "../../../evil",
    "/etc/evil",
    "..",
    ".",
    "a/b/c",
    "model-00001-of-00002.safetensors",
    "model.safetensors.index.json",
    STATE,
    "\x1b[2J\r\n\u202e",
    'quo"te\\',
    "nul\x00",
    "h\u00f6lle.\U0001f4a5",
    "x" * 9000,
]


def test_hostile_names_are_names_of_tensors_alone(daemon: Daemon, tmp_path: pathlib.Path) -> None:
    values = {name: torch.full((300,), float(i)) for i, name in enumerate(HOSTILE)}
    job = _core.Job("job", rank=0, world_size=1)
    tensors = _core.TensorList()
    for name, value in values.items():
        tensors.add(name, "F32", value.shape)
    job.save(1, tensors, [value.data_ptr() for value in values.values()], []).wait("committed", 60)
    folder = tmp_path / "a" / "b" / "set"
    said = answer(daemon, "export", "job", folder, *SMALL)
    is_same(load_set(folder), values)
    count = len(said["files"])
    assert count == len(HOSTILE)
    assert names_in(folder) == {
        INDEX,
        *(f"model-{i + 1:05}-of-{count:05}.safetensors" for i in range(count)),
    }
    assert [path for path in tmp_path.rglob("*") if "evil" in path.name] == []
    shown = ckptctl(daemon, "stats", "job").stdout
    assert "\x1b" not in shown and "\u202e" not in shown and "\\x1b[2J" in shown


def test_a_name_that_no_file_may_have_is_refused(daemon: Daemon, tmp_path: pathlib.Path) -> None:
    job = _core.Job("job", rank=0, world_size=1)
    part = torch.ones(2)
    tensors = _core.TensorList()
    names = ["a.__metadata__", "b.holdfast:0000000:json:x", "c.", "d", "d.d"]
    for name in names:
        tensors.add(name, "F32", (2,))
    job.save(1, tensors, [part.data_ptr()] * len(names), []).wait("committed", 60)
    for key in "abcd":
        done = ckptctl(daemon, "export", "job", tmp_path / key, "--only", key)
        assert done.returncode == 4 and "would be called" in done.stderr, done.stderr
    answer(daemon, "export", "job", tmp_path / "all")
    assert set(load_set(tmp_path / "all")) == set(names)


def test_memory_is_bounded_whatever_a_tensor_has(daemon: Daemon, tmp_path: pathlib.Path) -> None:
    """A tensor and an object of several windows each, with less memory than either has."""
    large = torch.arange(48 << 20, dtype=torch.int64).view(torch.uint8)
    text = json.dumps("0123456789abcdef" * (10 << 20)).encode()
    job = _core.Job("job", rank=0, world_size=1)
    tensors = _core.TensorList()
    tensors.add("large", "U8", large.shape)
    job.save(1, tensors, [large.data_ptr()], [("text", text, None)]).wait("committed", 60)
    assert large.nbytes > 300 << 20 and len(text) > 150 << 20
    limited = ("prlimit", f"--data={260 << 20}")
    done = ckptctl(daemon, "export", "job", tmp_path / "set", before=limited)
    assert done.returncode == 0, done.stderr
    with safe_open(tmp_path / "set" / "model.safetensors", "pt") as file:
        assert torch.equal(file.get_tensor("large"), large)
        assert file.get_tensor("holdfast:0000000:json:text").numpy().tobytes() == text


# ---- ended and gone on with ----

POINTS = [
    "begun:kill",
    "written:kill",
    "written:kill@4",
    "synced:kill",
    "synced:kill@2",
    "renamed:kill",
    "renamed:kill@2",
    "file_done:kill",
    "file_done:kill@3",
    "index_written:kill",
]


def test_all_points_are_tried() -> None:
    listed = (pathlib.Path(__file__).parents[1] / "sync_points.txt").read_text().split()
    ours = {name for name in listed if name.startswith("ckptctl.export.")}
    assert ours == {f"ckptctl.export.{point.partition(':')[0]}" for point in POINTS}


@pytest.fixture(scope="module")
def saved_once() -> Iterator[tuple[Daemon, dict[str, torch.Tensor]]]:
    from daemons import own_daemon

    with own_daemon(TIERS, ["nvme", "remote"]) as daemon:
        before = os.environ.get("HOLDFAST_SOCKET")
        os.environ["HOLDFAST_SOCKET"] = str(daemon.socket)
        try:
            yield daemon, save_split(wait="committed")
        finally:
            os.environ.pop("HOLDFAST_SOCKET")
            if before is not None:
                os.environ["HOLDFAST_SOCKET"] = before


def files_of(folder: pathlib.Path) -> dict[str, int]:
    """What has its name already, and its inode."""
    return {path.name: path.stat().st_ino for path in folder.glob("model-*.safetensors")}


@pytest.mark.parametrize("point", POINTS)
def test_killed_anywhere_it_goes_on(point: str, saved_once, tmp_path: pathlib.Path) -> None:
    daemon, saved = saved_once
    folder = tmp_path / "set"
    where = {"HOLDFAST_SYNC_POINT": f"ckptctl.export.{point}"}
    killed = ckptctl(daemon, "export", "job", folder, *SMALL, **where)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    # A set without its index is none, and what has a file's name is a whole file.
    assert (folder / INDEX).exists() == point.startswith("index_written")
    before = files_of(folder)
    for name in before:
        for key, tensor in load_file(folder / name).items():
            assert key.startswith("holdfast:") or same_bits(tensor, saved[key])
    said = answer(daemon, "export", "job", folder, *SMALL)
    is_same(load_set(folder), saved)
    complete = [file["name"] for file in said["files"] if file["was_complete"]]
    # All but that whose completion was not noted yet, which is written again.
    unnoted = 1 if point.startswith("renamed") else 0
    assert len(complete) == len(before) - unnoted
    assert all(files_of(folder)[name] == before[name] for name in complete)
    assert names_in(folder) == {INDEX, *(file["name"] for file in said["files"])}


def test_a_file_that_is_not_what_it_was_is_written_again(
    saved_once, tmp_path: pathlib.Path
) -> None:
    daemon, saved = saved_once
    folder = tmp_path / "set"
    said = answer(daemon, "export", "job", folder, *SMALL)
    names = [file["name"] for file in said["files"]]
    first, second, third, *others = (folder / name for name in names)
    data = bytearray(first.read_bytes())
    data[-1] ^= 1
    first.write_bytes(data)
    os.truncate(second, second.stat().st_size - 1)
    third.unlink()
    third.symlink_to("/etc/passwd")
    again = answer(daemon, "export", "job", folder, *SMALL)
    assert [file["was_complete"] for file in again["files"]] == [False] * 3 + [True] * len(others)
    is_same(load_set(folder), saved)
    assert not third.is_symlink() and pathlib.Path("/etc/passwd").read_text().startswith("root:")
    done = ckptctl(daemon, "export", "job", folder, *SMALL)
    assert "is already in" in done.stdout and f"{len(names)} files were complete" in done.stdout


def test_a_directory_with_something_else_is_refused(saved_once, tmp_path: pathlib.Path) -> None:
    daemon, _ = saved_once
    folder = tmp_path / "set"

    def refused(*why: str, arguments: tuple[str, ...] = SMALL) -> None:
        there = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
        done = ckptctl(daemon, "export", "job", folder, *arguments)
        assert done.returncode == 4, done.stdout + done.stderr
        assert [each for each in why if each not in done.stderr] == [], done.stderr
        files = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
        assert {path for path in files if path.is_file()} == {p for p in there if p.is_file()}

    folder.write_text("a file")
    refused("Not a directory")
    folder.unlink()
    folder.mkdir()
    (folder / "model.safetensors").write_text("somebody's")
    refused("has something else in it (model.safetensors)", "name a directory")
    assert (folder / "model.safetensors").read_text() == "somebody's"
    (folder / "model.safetensors").unlink()
    answer(daemon, "export", "job", folder, *SMALL)
    refused("with other options", "or remove", arguments=("--only", "model"))
    (folder / "notes.txt").write_text("mine")
    refused("has something else in it (notes.txt)")
    (folder / "notes.txt").unlink()
    state = json.loads((folder / STATE).read_text())
    (folder / STATE).write_text(json.dumps({**state, "step": 6}))
    refused("an export of step 6 (attempt 1) of job job")
    (folder / STATE).write_text(json.dumps({**state, "holdfast_export": 2}))
    refused("of a newer ckptctl")
    for broken in ("", "{", "[]", json.dumps({**state, "plan": 7}), '{"holdfast_export":1}'):
        (folder / STATE).write_text(broken)
        refused("is damaged", "or remove")
    # What it says of files is compared, and believed of nothing that is not planned.
    odd = [{"name": "../x", "bytes": 1, "digest": "0"}, {"name": 3}, 7, {"name": "y", "bytes": -1}]
    (folder / STATE).write_text(json.dumps({**state, "files": odd}))
    said = answer(daemon, "export", "job", folder, *SMALL)
    assert not any(file["was_complete"] for file in said["files"])


@pytest.mark.parametrize("command", ["export", "stats"])
def test_on_a_terminal_it_shows_how_far_it_is(
    command: str, saved_once, tmp_path: pathlib.Path
) -> None:
    daemon, _ = saved_once
    to = [tmp_path / "set"] if command == "export" else []
    for options, shown in (([], True), (["--json"], False)):
        screen, terminal = os.openpty()
        done = subprocess.run(
            [CKPTCTL, command, "job", *to, *options, f"--socket={daemon.admin}"],
            stdout=subprocess.PIPE,
            stderr=terminal,
            timeout=DEADLINE_S,
        )
        os.write(terminal, b"end")
        drawn = b""
        while not drawn.endswith(b"end"):
            drawn += os.read(screen, 65536)
        os.close(terminal)
        os.close(screen)
        assert done.returncode == 0
        assert (f"{command} job [".encode() in drawn and b"%  " in drawn) == shown, drawn
        assert drawn.endswith(b"\r\x1b[Kend" if shown else b"end"), "the line goes"


@pytest.fixture(autouse=True)
def nobody_stays_stopped() -> Iterator[None]:
    """Also after a test that failed."""
    yield
    for process in STOPPED:
        if process.poll() is None:
            process.kill()
            process.communicate(timeout=DEADLINE_S)
    STOPPED.clear()


STOPPED: list[subprocess.Popen[str]] = []


def stopped(daemon: Daemon, point: str, *arguments: object) -> subprocess.Popen[str]:
    """A ckptctl that has come as far as that, and stands there."""
    process = subprocess.Popen(
        [CKPTCTL, *map(str, arguments), f"--socket={daemon.admin}"],
        env={**os.environ, "HOLDFAST_SYNC_POINT": f"ckptctl.export.{point}"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    STOPPED.append(process)
    _, status = os.waitpid(process.pid, os.WUNTRACED)
    assert os.WIFSTOPPED(status), status
    return process


def ended(process: subprocess.Popen[str]) -> tuple[int, str]:
    os.kill(process.pid, signal.SIGCONT)
    _, said = process.communicate(timeout=DEADLINE_S)
    return process.returncode, said


def test_one_at_a_time_has_a_directory(saved_once, tmp_path: pathlib.Path) -> None:
    daemon, saved = saved_once
    folder = tmp_path / "set"
    first = stopped(daemon, "written:stop@3", "export", "job", folder, *SMALL)
    second = ckptctl(daemon, "export", "job", folder, *SMALL)
    assert second.returncode == 4 and f"held by pid {first.pid}" in second.stderr, second.stderr
    code, said = ended(first)
    assert code == 0, said
    is_same(load_set(folder), saved)
    assert names_in(folder) == {INDEX, *files_of(folder)}


def test_interrupted_it_ends_and_goes_on(saved_once, tmp_path: pathlib.Path) -> None:
    daemon, saved = saved_once
    folder = tmp_path / "set"
    process = stopped(daemon, "written:stop@4", "export", "job", folder, *SMALL)
    os.kill(process.pid, signal.SIGINT)
    code, said = ended(process)
    assert code == 130 and "the same command goes on behind the" in said, said
    assert not list(folder.glob("*.part")) and not (folder / INDEX).exists()
    answer(daemon, "export", "job", folder, *SMALL)
    is_same(load_set(folder), saved)


def test_a_step_that_goes_away_in_the_middle(tiers: Daemon, tmp_path: pathlib.Path) -> None:
    save_split(7, wait="committed")
    process = stopped(tiers, "file_done:stop", "export", "job", tmp_path / "set", *SMALL)
    done = ckptctl(tiers, "rm", "job", "--step", "7", "--force")
    assert done.returncode == 0, done.stderr
    code, said = ended(process)
    assert code == 4, said
    for word in ("export step 7 (attempt 1) of job job into", "is it gone meanwhile", "pin"):
        assert word in said, said
    assert not (tmp_path / "set" / INDEX).exists()


def test_a_daemon_that_goes_away_in_the_middle(tiers: Daemon, tmp_path: pathlib.Path) -> None:
    saved = save_split(wait="committed")
    process = stopped(tiers, "file_done:stop", "export", "job", tmp_path / "set", *SMALL)
    tiers.kill()
    code, said = ended(process)
    assert code == 3 and "goes on behind the 1 file" in said, said
    tiers.start()
    said_then = answer(tiers, "export", "job", tmp_path / "set", *SMALL)
    assert [file["was_complete"] for file in said_then["files"]][:2] == [True, False]
    is_same(load_set(tmp_path / "set"), saved)


def test_a_daemon_that_says_nothing_is_not_waited_for(
    tiers: Daemon, tmp_path: pathlib.Path
) -> None:
    save_split(wait="committed")
    assert tiers.process is not None
    os.kill(tiers.process.pid, signal.SIGSTOP)
    try:
        done = ckptctl(tiers, "stats", "job", "--timeout", "300ms")
        assert done.returncode == 3 and "did not answer in time" in done.stderr, done.stderr
        waiting = subprocess.Popen(
            [CKPTCTL, "stats", "job", f"--socket={tiers.admin}", "--timeout=1h"],
            stderr=subprocess.PIPE,
            text=True,
        )
        # Until it waits for an answer, which does not come.
        wait_until("it asks", lambda: is_connected(waiting.pid))
        os.kill(waiting.pid, signal.SIGINT)
        _, said = waiting.communicate(timeout=DEADLINE_S)
        assert waiting.returncode in (130, -signal.SIGINT), said
    finally:
        os.kill(tiers.process.pid, signal.SIGCONT)


def is_connected(pid: int) -> bool:
    for fd in pathlib.Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # it was closed just now
            if os.readlink(fd).startswith("socket:"):
                return True
    return False


# A directory of the test's own file system, which nobody else sees.
IN_A_FILE_SYSTEM = """
set -e
folder=$1 size=$2 out=$3; shift 3
mount -t tmpfs -o size=$size tmpfs $folder
code=0; "$@" || code=$?
ls -A $folder/set > $out/names
if [ $code != 0 ]; then
  mount -o remount,size=64M $folder
  "$@" > $out/second
fi
cp -r $folder/set $out/set
exit $code
"""

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="root may mount")


@needs_root
def test_a_full_disk(saved_once, tmp_path: pathlib.Path) -> None:
    daemon, saved = saved_once
    folder, out = tmp_path / "disk", tmp_path / "out"
    folder.mkdir()
    out.mkdir()
    own = ("unshare", "--mount", "sh", "-c", IN_A_FILE_SYSTEM, "sh", str(folder), "600k", str(out))
    done = ckptctl(daemon, "export", "job", folder / "set", *SMALL, before=own)
    assert done.returncode == 4, done.stderr
    for word in (
        "No space left",
        "ENOSPC",
        f"into '{folder}/set'",
        "make room for",
        "goes on behind",
    ):
        assert word in done.stderr, done.stderr
    # Nothing half is left, which would take the room.
    names = (out / "names").read_text().split()
    assert INDEX not in names and not [name for name in names if name.endswith(".part")], names
    assert "complete already" in (out / "second").read_text()
    is_same(load_set(out / "set"), saved)


@needs_root
def test_a_directory_that_cannot_be_written(saved_once, tmp_path: pathlib.Path) -> None:
    daemon, _ = saved_once
    (tmp_path / "disk").mkdir()
    mount = 'mount -t tmpfs -o ro tmpfs "$1"; shift; exec "$@"'
    own = ("unshare", "--mount", "sh", "-c", mount, "sh", str(tmp_path / "disk"))
    for name in ("disk", "disk/set"):
        done = ckptctl(daemon, "export", "job", tmp_path / name, before=own)
        assert done.returncode == 4 and "EROFS" in done.stderr, done.stderr
        assert f"into '{tmp_path / name}'" in done.stderr


def test_another_users_job_is_not_exported(
    make_daemon: Callable[..., Daemon], tmp_path: pathlib.Path
) -> None:
    if os.geteuid() != 0:
        pytest.skip("root may be somebody else")
    # (Where an unprivileged user can run the program at all.)
    code = subprocess.run([CKPTCTL, "--version"], user=65534, capture_output=True, check=False)
    if code.returncode != 0:
        pytest.skip("nobody may not run the built programs")
    daemon = make_daemon()
    os.environ["HOLDFAST_SOCKET"] = str(daemon.socket)
    save_split(wait="committed")
    os.chmod(daemon.root, 0o755)
    done = subprocess.run(
        [CKPTCTL, "stats", "job", f"--client-socket={daemon.socket}"],
        user=65534,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    assert done.returncode == 4 and "another user" in done.stderr, done.stderr


def test_where_the_client_socket_is(tiers: Daemon, tmp_path: pathlib.Path) -> None:
    def run(*arguments: object, **variables: str) -> subprocess.CompletedProcess[str]:
        env = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), **variables}
        return subprocess.run(
            [CKPTCTL, "stats", "job", *map(str, arguments)],
            env=env, capture_output=True, text=True, timeout=DEADLINE_S,
        )  # fmt: skip

    save_split(wait="committed")
    assert run("--client-socket", tiers.socket).returncode == 0
    assert run("--socket", tiers.admin).returncode == 0
    assert run(HOLDFAST_SOCKET=str(tiers.socket)).returncode == 0
    assert run(HOLDFAST_ADMIN_SOCKET=str(tiers.admin)).returncode == 0
    # What is said goes before what is in the environment.
    assert run("--socket", tiers.admin, HOLDFAST_SOCKET="/none").returncode == 0
    none = run("--socket", "/none/admin.sock", HOLDFAST_SOCKET=str(tiers.socket))
    assert none.returncode == 3
    assert "/none/ckptd.sock" in none.stderr and "--client-socket" in none.stderr, none.stderr
    there = run("--address", "host:1", "--tls", tmp_path)
    assert there.returncode == 2 and "run it on a node of the cluster" in there.stderr
    # The sockets may lie apart.
    moved = tiers.root / "elsewhere.sock"
    os.rename(tiers.socket, moved)
    lost = ckptctl(tiers, "stats", "job")
    assert lost.returncode == 3 and "ckptd.sock" in lost.stderr
    assert ckptctl(tiers, "stats", "job", "--client-socket", moved).returncode == 0


def test_a_step_by_number_and_attempt(tiers: Daemon, tmp_path: pathlib.Path) -> None:
    def save(step: int, value: float, restore: int | None = None) -> None:
        with holdfast.Checkpointer("job", policy=POLICY) as ckpt:
            state: dict[str, Any] = {"w": torch.full((3,), value)}
            if restore is not None:
                ckpt.restore({"w": torch.zeros(3)}, step=restore)
            ckpt.save(step, state, wait="remote", timeout=60)

    save(1, 1.0)
    save(2, 2.0, restore=1)
    save(2, 3.0, restore=1)  # the other step 2 is on no line of descent any more

    def exported(name: str, *arguments: str) -> float:
        answer(tiers, "export", "job", tmp_path / name, *arguments)
        return float(load_set(tmp_path / name)["w"][0])

    assert exported("newest") == 3.0
    assert exported("first", "--step", "1") == 1.0
    assert exported("branch", "--step", "2", "--attempt", "2") == 2.0
    done = ckptctl(tiers, "export", "job", tmp_path / "none", "--step", "9")
    assert done.returncode == 4 and "has no step 9 on its line of descent" in done.stderr
    # The same numbers of a job that was made anew are another step.
    folder = tmp_path / "again"
    answer(tiers, "export", "job", folder, "--step", "1")
    tiers.ctl("rm", "job", "--yes")
    save(1, 5.0)
    done = ckptctl(tiers, "export", "job", folder, "--step", "1")
    assert done.returncode == 4 and "of other content" in done.stderr, done.stderr
