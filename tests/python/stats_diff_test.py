"""ckptctl stats and diff: what they say of tensors of every type is what torch says of the same bits."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from split_state import RANKS, TIERS, answer, ckptctl, save_split, whole

import holdfast
from daemons import Daemon
from holdfast import _core

FLOATS = {
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
}
INTEGERS = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "U16": torch.uint16,
    "I16": torch.int16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "U64": torch.uint64,
    "I64": torch.int64,
}


def every_pattern(dtype: torch.dtype) -> torch.Tensor:
    """Of one byte and two bytes every value that there is; of more many, the odd ones among them."""
    if dtype.itemsize == 1:
        return torch.arange(256, dtype=torch.uint8).view(dtype)
    if dtype.itemsize == 2:
        return torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16).view(dtype)
    torch.manual_seed(dtype.itemsize)
    random = torch.randint(-(2**63), 2**63 - 1, (5000,)).view(dtype)
    odd = [0.0, -0.0, math.inf, -math.inf, math.nan, torch.finfo(dtype).max, torch.finfo(dtype).min]
    return torch.cat([random, torch.tensor(odd, dtype=dtype)])


def some_integers(dtype: torch.dtype) -> torch.Tensor:
    if dtype == torch.bool:
        return torch.tensor([True, False, True, True])
    info = torch.iinfo(dtype)
    return torch.tensor([info.min, info.max, 0, 1, info.max, 0], dtype=dtype)


def save(step: int, tensors: dict[str, torch.Tensor], job: Any = None) -> Any:
    job = job or _core.Job("job", rank=0, world_size=1)
    names = {dtype: name for name, dtype in {**FLOATS, **INTEGERS, "C64": torch.complex64}.items()}
    planned = _core.TensorList()
    for name, tensor in tensors.items():
        planned.add(name, names[tensor.dtype], tensor.shape)
    job.save(step, planned, [t.data_ptr() for t in tensors.values()], []).wait("committed", 60)
    return job


def by_name(said: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {tensor["name"]: tensor for tensor in said["tensors"]}


def doubles(tensor: torch.Tensor) -> list[float]:
    """Exact: every float type fits."""
    return (
        tensor.flatten().to(torch.float32 if tensor.element_size() < 4 else tensor.dtype).tolist()
    )


def test_stats_of_every_float_type(daemon: Daemon) -> None:
    tensors = {name: every_pattern(dtype) for name, dtype in FLOATS.items()}
    save(1, tensors)
    said = by_name(answer(daemon, "stats", "job"))
    assert set(said) == set(FLOATS)
    for name, tensor in tensors.items():
        values = doubles(tensor)
        finite = [value for value in values if math.isfinite(value)]
        told = said[name]
        assert (told["dtype"], told["shape"], told["elements"]) == (name, list(tensor.shape), len(values))  # fmt: skip
        assert told["nan"] == sum(math.isnan(value) for value in values), name
        assert told["inf"] == sum(math.isinf(value) for value in values), name
        assert told["zeros"] == sum(value == 0 for value in values), name
        assert (told["min"], told["max"]) == (min(finite), max(finite)), name
        assert told["abs_max"] == max(abs(value) for value in finite), name
        # In twice the precision that the mean has: what it is off by is rounding alone.
        mean = math.fsum(value / len(finite) for value in finite)
        assert math.isclose(told["mean"], mean, rel_tol=1e-9, abs_tol=1e-9 * told["abs_max"]), name


def test_stats_of_integers_are_exact(daemon: Daemon) -> None:
    tensors = {name: some_integers(dtype) for name, dtype in INTEGERS.items()}
    save(1, tensors)
    said = by_name(answer(daemon, "stats", "job"))
    for name, tensor in tensors.items():
        values = [int(value) for value in tensor.tolist()]
        told = said[name]
        assert (told["nan"], told["inf"], told["zeros"]) == (0, 0, values.count(0)), name
        assert (told["min"], told["max"]) == (min(values), max(values)), name
        assert told["abs_max"] == max(map(abs, values)), name
        assert told["mean"] == sum(values) / len(values), name


def test_stats_of_complex_numbers_and_of_nothing(daemon: Daemon) -> None:
    odd = torch.tensor(
        [complex(3, -4), 0, complex(math.nan, 1), complex(1, math.inf), complex(math.nan, math.inf)]
    ).to(torch.complex64)
    save(1, {"c": odd, "empty": torch.zeros(0, 3), "nan": torch.tensor(math.nan)})
    said = by_name(answer(daemon, "stats", "job"))
    c = said["c"]
    assert (c["nan"], c["inf"], c["zeros"], c["abs_max"]) == (2, 1, 1, 5.0)
    assert (c["min"], c["max"], c["mean"]) == (None, None, None)
    for name, nan in (("empty", 0), ("nan", 1)):
        told = said[name]
        assert (told["nan"], told["min"], told["max"], told["mean"], told["abs_max"]) == (
            nan, None, None, None, None,
        )  # fmt: skip
    assert said["empty"]["shape"] == [0, 3] and said["nan"]["shape"] == []


@pytest.fixture
def tiers(make_daemon, monkeypatch: pytest.MonkeyPatch) -> Daemon:
    daemon = make_daemon(TIERS, ["nvme", "remote"])
    monkeypatch.setenv("HOLDFAST_SOCKET", str(daemon.socket))
    return daemon


def test_stats_of_what_ranks_have_split(tiers: Daemon) -> None:
    saved = save_split(own=True, wait="committed")
    said = answer(tiers, "stats", "job", "--only", "model")
    assert (said["step"], said["attempt"], said["nan"], said["inf"]) == (7, 1, 0, 0)
    told = by_name(said)
    assert set(told) == {name for name in saved if name.startswith("model.")}
    rows = saved["model.rows"].double()
    assert told["model.rows"]["min"] == rows.min().item()
    assert math.isclose(told["model.rows"]["mean"], rows.mean().item(), rel_tol=1e-9)
    assert told["model.norm.weight"]["elements"] == 300_000
    own = answer(tiers, "stats", "job", "--tensor", "rng.*")["tensors"]
    assert [(each["name"], each["rank"], each["min"]) for each in own] == [
        ("rng.cpu", rank, rank) for rank in range(RANKS)
    ]
    assert "rng.cpu (rank 2)" in ckptctl(tiers, "stats", "job").stdout
    weights = answer(tiers, "stats", "job", "--only", "model", "--tensor", "*.w?ight")
    assert list(by_name(weights)) == ["model.norm.weight"]
    none = ckptctl(tiers, "stats", "job", "--tensor", "norm*")
    assert none.returncode == 4 and "'norm*'" in none.stderr


def test_the_bad_step_is_found(daemon: Daemon) -> None:
    weights = {f"layer.{i}": torch.ones(4) for i in range(3)}
    job = save(1, weights)
    weights["layer.2"][1] = math.nan
    weights["layer.2"][2] = -math.inf
    save(2, weights, job)
    assert "; no NaN, no Inf\n" in ckptctl(daemon, "stats", "job", "--step", "1").stdout
    lines = ckptctl(daemon, "stats", "job").stdout.splitlines()
    assert lines[0].endswith("3 tensors, 12 elements; 1 NaN and 1 Inf in 1 tensor")
    assert lines[2].split()[:2] == ["1", "1"] and lines[2].endswith("layer.2"), "it comes first"


def test_a_tensor_that_is_not_whole_is_named(tiers: Daemon) -> None:
    jobs = [_core.Job("job", rank=rank, world_size=2) for rank in range(2)]
    part = torch.ones(3)
    saves = []
    for rank, job in enumerate(jobs):
        tensors = _core.TensorList()
        tensors.add("hole", "F32", (9,), offset=(rank * 4,), local_shape=(3,))
        tensors.add("good", "F32", (3,))
        saves.append(job.save(3, tensors, [part.data_ptr(), part.data_ptr()], []))
    for one in saves:
        one.wait("committed", 60)
    said = by_name(answer(tiers, "stats", "job"))
    assert "no rank saved them" in said["hole"]["problem"] and said["good"]["problem"] == ""
    assert said["good"]["min"] == 1
    assert "PROBLEM: tensor" in ckptctl(tiers, "stats", "job").stdout
    verdicts = by_name(answer(tiers, "diff", "job", "3", "3"))
    assert (verdicts["hole"]["verdict"], verdicts["good"]["verdict"]) == ("problem", "equal")


# ---- diff ----


def compared(daemon: Daemon, a: torch.Tensor, b: torch.Tensor) -> dict[str, Any]:
    job = save(1, {"t": a})
    save(2, {"t": b}, job)
    return by_name(answer(daemon, "diff", "job", "1", "2"))["t"]


@pytest.mark.parametrize("name", FLOATS)
def test_diff_of_every_float_type(name: str, daemon: Daemon) -> None:
    a = every_pattern(FLOATS[name])
    torch.manual_seed(3)
    b = a[torch.randperm(len(a))]
    b[: len(b) // 2] = a[: len(a) // 2]
    told = compared(daemon, a, b)
    pairs = list(zip(doubles(a), doubles(b), strict=True))
    raw = [x.contiguous().view(torch.uint8).reshape(len(x), -1) for x in (a, b)]
    assert told["elements_differing"] == int((raw[0] != raw[1]).any(1).sum()) > 0
    assert told["verdict"] == "different"
    assert told["nan_a"] == sum(math.isnan(x) for x, _ in pairs)
    assert told["nan_b"] == sum(math.isnan(y) for _, y in pairs)
    assert told["inf_a"] == sum(math.isinf(x) for x, _ in pairs)
    assert told["inf_b"] == sum(math.isinf(y) for _, y in pairs)
    both = [(x, y) for x, y in pairs if math.isfinite(x) and math.isfinite(y)]
    if name == "F64":  # differences and squares that are no doubles
        assert told["max_abs_difference"] is None or told["max_abs_difference"] > 1e308
        return
    assert told["max_abs_difference"] == max(abs(x - y) for x, y in both)
    apart = math.fsum((x - y) ** 2 for x, y in both)
    norm = math.fsum(x * x for x, _ in both)
    assert math.isclose(told["relative_norm"], math.sqrt(apart / norm), rel_tol=1e-9)


def test_diff_of_integers(daemon: Daemon) -> None:
    a = torch.tensor([-(2**63), 0, 5, 7])
    b = torch.tensor([2**63 - 1, 0, 4, 7])
    told = compared(daemon, a, b)
    assert (told["elements"], told["elements_differing"]) == (4, 2)
    assert told["max_abs_difference"] == float(2**64 - 1)
    assert math.isclose(told["relative_norm"], 2.0, rel_tol=1e-12)


def test_diff_by_hand(daemon: Daemon) -> None:
    a = torch.tensor([3.0, 4.0, math.nan, 0.0, math.inf, 1.0, 0.0])
    b = torch.tensor([3.0, 4.5, math.nan, -0.0, 1.0, math.nan, -0.0])
    told = compared(daemon, a, b)
    # 4 and 4.5, twice the zeros, Inf and 1, 1 and NaN; the two NaN have the same bits.
    assert told["elements_differing"] == 5
    assert (told["nan_a"], told["nan_b"], told["inf_a"], told["inf_b"]) == (1, 2, 1, 0)
    assert told["max_abs_difference"] == 0.5
    assert told["relative_norm"] == 0.1  # 0.5 / ||(3, 4, 0)||
    zero = compared_again(daemon, torch.zeros(2), torch.tensor([0.0, 1.0]))
    assert (zero["max_abs_difference"], zero["relative_norm"]) == (1.0, None)
    none = compared_again(daemon, torch.full((2,), math.nan), torch.zeros(2))
    assert (none["max_abs_difference"], none["relative_norm"]) == (None, None)
    c = compared_again(daemon, torch.tensor([3 + 4j]), torch.tensor([0j]))
    assert (c["max_abs_difference"], c["relative_norm"], c["elements_differing"]) == (5.0, 1.0, 1)


def compared_again(daemon: Daemon, a: torch.Tensor, b: torch.Tensor) -> dict[str, Any]:
    daemon.ctl("rm", "job", "--yes")
    return compared(daemon, a, b)


def test_diff_of_other_tensors_types_and_shapes(daemon: Daemon) -> None:
    same = torch.arange(5.0)
    job = save(1, {"m.same": same, "m.gone": same, "m.type": same, "m.shape": same, "x": same})
    now = {"m.same": same, "m.new": same, "m.type": same.double(), "m.shape": same[:4].clone()}
    save(2, {**now, "x": same + 1}, job)
    said = answer(daemon, "diff", "job", "1", "2")
    assert (said["a"], said["b"]) == ({"step": 1, "attempt": 1}, {"step": 2, "attempt": 1})
    assert (said["equal"], said["not_equal"]) == (1, 5)
    verdicts = {name: each["verdict"] for name, each in by_name(said).items()}
    assert verdicts == {
        "m.gone": "only_a",
        "m.new": "only_b",
        "m.same": "equal",
        "m.shape": "other_type",
        "m.type": "other_type",
        "x": "different",
    }
    text = ckptctl(daemon, "diff", "job", "1", "2").stdout
    for line in (
        "A: step 1 (attempt 1) of job job",
        "1 of 6 tensors are the same, bit for bit",
        "only in A: m.gone, F32 [5]",
        "only in B: m.new, F32 [5]",
        "m.shape is F32 [5] in A and F32 [4] in B",
        "m.type is F32 [5] in A and F64 [5] in B",
    ):
        assert line in text, text
    only = by_name(answer(daemon, "diff", "job", "1", "2", "--only", "m", "--tensor", "*.same"))
    assert list(only) == ["m.same"]
    # What one of them has nothing of is no mistake; what neither has is.
    assert list(by_name(answer(daemon, "diff", "job", "1", "2", "--tensor", "*.new"))) == ["m.new"]
    none = ckptctl(daemon, "diff", "job", "1", "2", "--only", "y")
    assert none.returncode == 4 and "'y'" in none.stderr
    assert "all 6 tensors are the same" not in text
    assert "all 5 tensors are the same" in ckptctl(daemon, "diff", "job", "1", "1").stdout


def test_diff_of_another_layout_and_of_branches(tiers: Daemon) -> None:
    """The same tensors, split by three ranks and then whole on one, in several windows; one element is another one."""
    large = torch.arange(20 << 20, dtype=torch.int32).reshape(-1, 32)  # 80 MiB
    tensors = {**whole(), "model.large": large}
    save_split(7, tensors, wait="committed")
    changed = {name: tensor.clone() for name, tensor in tensors.items()}
    changed["model.large"][-1, -1] += 2
    state: dict[str, Any] = {"extra": {"epoch": 3}}
    for name, tensor in changed.items():
        top, _, key = name.partition(".")
        state.setdefault(top, {})[key] = tensor
    with holdfast.Checkpointer("job", rank=0, world_size=1) as ckpt:
        assert ckpt.restore({"optim": {"moment": torch.zeros_like(tensors["optim.moment"])}}) == 8
        ckpt.save(7, state, wait="committed", timeout=60)
    said = answer(tiers, "diff", "job", "7@1", "7@2")
    assert (said["a"]["attempt"], said["b"]["attempt"]) == (1, 2)
    told = by_name(said)
    different = [name for name, each in told.items() if each["verdict"] != "equal"]
    assert different == ["model.large"]
    assert (told["model.large"]["elements_differing"], told["model.large"]["max_abs_difference"]) == (1, 2.0)  # fmt: skip
