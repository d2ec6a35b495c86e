"""What the package shows: to the linker, to type checkers, to launchers, and on a machine without a daemon."""

from __future__ import annotations

import ast
import copy
import inspect
import os
import pathlib
import pickle
import subprocess
from typing import Any

import pytest
import torch
from daemon_test import Machine, machine  # noqa: F401

import holdfast
from daemons import Daemon
from holdfast import _core


def test_the_module_exports_its_entry_and_nothing_else() -> None:
    said = subprocess.run(
        ["nm", "-D", "--defined-only", _core.__file__], capture_output=True, text=True, check=True
    ).stdout
    assert [line.split()[-1] for line in said.splitlines()] == ["PyInit__core"]


def parameters(function: ast.FunctionDef) -> list[tuple[str, bool]]:
    """Name, and whether it may be left out; without self."""
    plain, named = function.args.args, function.args.kwonlyargs
    optional = len(plain) - len(function.args.defaults)
    found = [(each.arg, number >= optional) for number, each in enumerate(plain)]
    found += [
        (each.arg, default is not None)
        for each, default in zip(named, function.args.kw_defaults, strict=True)
    ]
    return [each for each in found if each[0] != "self"]


def bound(function: Any) -> list[tuple[str, bool]]:
    """The same of a function or a type of the module."""
    found = inspect.signature(function).parameters.values()
    return [(each.name, each.default is not each.empty) for each in found if each.name != "self"]


def public(names: Any) -> set[str]:
    return {name for name in names if not name.startswith("_")}


def test_the_stub_is_the_module() -> None:
    assert holdfast.__file__ is not None
    stub = ast.parse(pathlib.Path(holdfast.__file__).with_name("_core.pyi").read_text())
    classes = {node.name: node for node in stub.body if isinstance(node, ast.ClassDef)}
    functions = {node.name: node for node in stub.body if isinstance(node, ast.FunctionDef)}
    assert set(classes) | set(functions) == public(dir(_core))
    for name, function in functions.items():
        assert bound(getattr(_core, name)) == parameters(function), name
    for name, node in classes.items():
        kind = getattr(_core, name)
        methods = {each.name: each for each in node.body if isinstance(each, ast.FunctionDef)}
        fields = {each.target.id for each in node.body if isinstance(each, ast.AnnAssign)}  # type: ignore[union-attr]
        properties = {
            each for each, method in methods.items() if any(method.decorator_list)
        } | fields
        assert public({*methods, *fields}) == public(vars(kind)), name
        for each, method in methods.items():
            if each in properties:
                assert inspect.isgetsetdescriptor(inspect.getattr_static(kind, each)), (
                    f"{name}.{each}"
                )
            elif not each.startswith("__") or each == "__init__":
                function = kind if each == "__init__" else getattr(kind, each)
                assert bound(function) == parameters(method), f"{name}.{each}"


@pytest.mark.parametrize(
    "variables",
    [
        {"SLURM_PROCID": "1", "SLURM_NTASKS": "3", "SLURM_STEP_ID": "0", "SLURM_JOB_ID": "9"},
        {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "3"},
        {"PMI_RANK": "1", "PMI_SIZE": "3"},
        {"RANK": "1", "WORLD_SIZE": "3", "SLURM_PROCID": "0", "SLURM_NTASKS": "1"},
    ],
    ids=["slurm", "openmpi", "pmi", "torchrun"],
)
def test_the_launcher_says_who_this_is(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with holdfast.Checkpointer("job") as ckpt:
        assert (ckpt.rank, ckpt.world_size) == (1, 3)
    with holdfast.Checkpointer("other", rank=0, world_size=1) as ckpt:  # what is said here wins
        assert (ckpt.rank, ckpt.world_size) == (0, 1)
        ckpt.save(0, {"w": torch.ones(1)}, wait="committed", timeout=60)


SAVES = """
import torch, holdfast
try:
    with holdfast.Checkpointer("laptop", **json.loads(sys.argv[1])) as ckpt:
        w = torch.zeros(4)
        start = ckpt.restore({"w": w})
        ckpt.save(start, {"w": w + 1}, wait="committed", timeout=60)
    print(json.dumps({"start": start, "w": w.tolist()}))
except HoldfastError as error:
    print(json.dumps({"error": error.code, "text": str(error)}))
"""


def test_three_lines_on_a_machine_without_a_daemon(machine: Machine) -> None:  # noqa: F811
    machine.environment["OMP_NUM_THREADS"] = "1"
    assert machine.ensure(SAVES) == {"start": 0, "w": [0.0] * 4}
    assert machine.ensure(SAVES) == {"start": 1, "w": [1.0] * 4}
    assert len(machine.daemons()) == 1


def test_a_daemon_of_ones_own_can_be_declined(machine: Machine) -> None:  # noqa: F811
    said = machine.ensure(SAVES, start_daemon=False, open_timeout=0.1)
    assert said["error"] in ("UNAVAILABLE", "DEADLINE_EXCEEDED"), said
    assert machine.environment["TEST_SYSTEM_SOCKET"] in said["text"]
    assert machine.daemons() == [] and not os.path.exists(machine.place)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"job": None}, "job=None"),
        ({"job": ""}, "job=''"),
        ({"job": "\ud800"}, "is not the name of a job"),
        ({"launch": 3}, "launch=3 is not a text"),
        ({"socket": 3}, "socket=3 is not a text"),
        ({"policy": {}}, "policy={} is not a holdfast.Policy"),
        ({"policy": "10min"}, "policy='10min'"),
        ({"copy_threads": -1}, "copy_threads=-1"),
        ({"open_timeout": "x"}, "open_timeout='x' is not a number of seconds"),
        ({"call_timeout": None}, "call_timeout=None"),
        ({"rank": 0, "world_size": 10**20}, "rank 0 of 100000000000000000000"),
        ({"rank": "0"}, "rank='0' is not an int"),
    ],
)
def test_arguments_are_named(daemon: Daemon, arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(holdfast.InvalidArgumentError) as raised:
        holdfast.Checkpointer(**{"job": "job", **arguments})
    assert said in str(raised.value)


@pytest.mark.parametrize("digits", [20, 5000])
def test_an_environment_of_nonsense_is_named(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch, digits: int
) -> None:
    monkeypatch.setenv("RANK", "9" * digits)
    monkeypatch.setenv("WORLD_SIZE", "1" + "0" * digits)
    with pytest.raises(
        holdfast.InvalidArgumentError, match="environment: RANK='9+' is not a number"
    ):
        holdfast.Checkpointer("job")


def test_times_are_numbers(daemon: Daemon) -> None:
    with holdfast.Checkpointer("job") as ckpt:
        state = {"w": torch.ones(1)}
        handle = ckpt.save(0, state, wait="committed", timeout=60)
        calls: list[Any] = [
            lambda time: ckpt.save(1, state, wait="sealed", timeout=time),
            lambda time: ckpt.restore(state, timeout=time),
            lambda time: ckpt.prepare(state, timeout=time),
            lambda time: handle.wait("sealed", time),
            lambda time: holdfast.open("job", timeout=time),
            lambda time: holdfast.checkpoints("job", timeout=time),
        ]
        for call in calls:
            for time in ("x", -1, float("nan")):
                with pytest.raises(holdfast.InvalidArgumentError, match=f"timeout={time!r} is not"):
                    call(time)


def test_what_is_of_this_process_stays_in_it(daemon: Daemon) -> None:
    with holdfast.Checkpointer("job") as ckpt:
        handle = ckpt.save(0, {"w": torch.ones(1)})
        for each in (ckpt, handle):
            for copied in (copy.copy, copy.deepcopy, pickle.dumps):
                with pytest.raises(holdfast.RefusedError, match="another process"):
                    copied(each)
