"""NumPy's arrays, scalars and parts of arrays with the types of ml_dtypes (bfloat16, float8): every bit comes back."""

from __future__ import annotations

import sys
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from ranks import run_ranks

import holdfast
from daemons import Daemon
from holdfast import _json

# Those that safetensors has a name for.
PLACED = ["bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu", "float8_e4m3fnuz", "float8_e5m2fnuz"]  # fmt: skip
OTHERS = ["int4", "uint2", "float4_e2m1fn", "float8_e3m4", "float8_e4m3b11fnuz"]


def values(name: str) -> Any:
    """24 of them, of different bits where the type has so many."""
    dtype = np.dtype(getattr(ml_dtypes, name))
    if name in PLACED:
        bits = np.arange(1, 25, dtype=np.uint8 if dtype.itemsize == 1 else np.uint16)
        return bits.view(dtype).reshape(4, 6)
    return (np.arange(24) % 2).astype(dtype).reshape(4, 6)


def same(one: Any, other: Any) -> bool:
    return (
        type(one) is type(other)
        and one.dtype == other.dtype
        and one.shape == other.shape
        and one.tobytes() == other.tobytes()
    )


@pytest.mark.parametrize("name", PLACED)
def test_arrays(daemon: Daemon, name: str) -> None:
    saved = values(name)
    dtype = saved.dtype
    with holdfast.Checkpointer("job", rank=0, world_size=1) as ckpt:
        state = {
            "whole": saved,
            "scattered": saved.T,
            "one": saved[2:3, 3].reshape(()),
            "part": holdfast.Part(saved, (8, 6), (4, 0)),
            "rest": holdfast.Part(saved, (4, 6), (0, 0)),
        }
        ckpt.save(0, {**state, "extra": {"fresh": saved, "one": state["one"]}}, wait="committed")
        zeros = np.zeros_like(saved)
        target: dict[str, Any] = {
            "whole": zeros.copy(),
            "scattered": zeros.T.copy(),
            "one": np.zeros((), dtype),
            "part": holdfast.Part(zeros.copy(), (8, 6), (4, 0)),
            "rest": holdfast.Part(zeros.copy(), (4, 6), (0, 0)),
            "extra": {},
        }
        ckpt.restore(target)
    found = [target["whole"], target["scattered"].T, target["part"].tensor, target["rest"].tensor]
    for each in (*found, target["extra"]["fresh"]):
        assert each.dtype == dtype and each.tobytes() == saved.tobytes()
    assert same(target["one"], state["one"]) and same(target["extra"]["one"], state["one"])
    with holdfast.open("job") as step:
        assert step.numpy("whole").dtype == dtype
        # The same bits for torch.
        assert step.tensor("whole").view(torch.uint8).numpy().tobytes() == saved.tobytes()


@pytest.mark.parametrize("name", [*PLACED, *OTHERS])
def test_scalars_and_what_has_no_place_in_a_safetensors_file(daemon: Daemon, name: str) -> None:
    saved = values(name)
    state = {"at the top": saved[1, 1], "extra": {"one": saved[2, 3], "some": [saved[0, 1], 1.5]}}
    if name in OTHERS:
        state["array"] = saved
        state["none"] = saved[:0]
    with holdfast.Checkpointer("job", rank=0, world_size=1) as ckpt:
        ckpt.save(0, state, wait="committed")
        target: dict[str, Any] = {"at the top": None, "extra": {}}
        if name in OTHERS:
            target |= {"array": np.zeros_like(saved), "none": None}
        place = target.get("array")
        ckpt.restore(target)
    assert same(target["at the top"], saved[1, 1])
    assert same(target["extra"]["one"], saved[2, 3])
    assert same(target["extra"]["some"][0], saved[0, 1]) and target["extra"]["some"][1] == 1.5
    if name in OTHERS:
        assert target["array"] is place and same(place, saved) and same(target["none"], saved[:0])


@pytest.mark.parametrize("name", PLACED)
def test_parts_on_other_numbers_of_ranks(daemon: Daemon, name: str) -> None:
    whole = values(name)

    def state(rank: int, ranks: int, fill: bool) -> dict[str, Any]:
        columns = np.array_split(np.arange(6), ranks)[rank]
        mine = whole[:, columns].copy()
        local = mine if fill else np.zeros_like(mine)
        # Padding, which nobody saves.
        rows = np.concatenate([whole if fill else np.zeros_like(whole), whole])
        return {
            "w": holdfast.Part(local, (4, 6), (0, int(columns[0]))),
            "v": holdfast.Part(rows, (4, 6), (0, 0), valid=4),
            "extra": {"scale": whole[1, 2]} if fill else {},
        }

    def run(ranks: int, fill: bool) -> Any:
        def work(rank: int) -> Any:
            mine = state(rank, ranks, fill)
            with holdfast.Checkpointer("job") as ckpt:
                if fill:
                    ckpt.save(1, mine, wait="committed")
                else:
                    ckpt.restore(mine)
            found = mine["w"].tensor, mine["v"].tensor, mine["extra"]["scale"]
            return [each.tobytes() for each in found], found[0].shape, str(found[2].dtype)

        return run_ranks(ranks, work, group=False)

    run(2, fill=True)
    for ranks in (2, 3):
        found = run(ranks, fill=False)
        local = [np.frombuffer(each[0], whole.dtype).reshape(shape) for each, shape, _ in found]
        assert np.concatenate(local, 1).tobytes() == whole.tobytes()
        for each, _, dtype in found:
            assert each[1:] == [whole.tobytes() * 2, whole[1, 2].tobytes()] and dtype == name
    with holdfast.open("job") as step:
        assert step.numpy("w").tobytes() == whole.tobytes()


def test_a_value_of_a_package_that_is_not_installed_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    data = _json.encode(ml_dtypes.bfloat16(1), "")
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)
    with pytest.raises(holdfast.RefusedError, match="a bfloat16 of the package ml_dtypes"):
        _json.decode(data)
    monkeypatch.undo()
    with pytest.raises(holdfast.RefusedError, match="a float3 of the package ml_dtypes"):
        _json.decode(data.replace(b"bfloat16", b"float3"))
