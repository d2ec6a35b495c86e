"""What the adapters of frameworks are made of, without the frameworks: tests of each framework have those."""

from __future__ import annotations

import importlib
import pathlib
import random
import sys
from typing import Any

import numpy
import pytest
import torch

import holdfast
from daemons import Daemon, run_python
from holdfast.integrations import _random
from holdfast.integrations._drawing_collator import DrawingCollator

ROOT = pathlib.Path(__file__).resolve().parents[2]


def drawn() -> list[float]:
    return [
        random.random(), random.gauss(0, 1), float(numpy.random.rand()), float(numpy.random.randn()), torch.rand(()).item(),
    ]  # fmt: skip


def test_importing_holdfast_imports_no_framework() -> None:
    done = run_python(
        "import sys, holdfast, holdfast.integrations; print(sorted({'torch', 'transformers', 'accelerate'} & set(sys.modules)))"
    )
    assert done.stdout.strip() == "[]", done.stderr


@pytest.mark.parametrize("framework", ["transformers", "lightning"])
def test_without_the_framework_the_module_says_what_is_missing(framework: str) -> None:
    assert framework not in sys.modules
    with pytest.raises(ModuleNotFoundError, match=f"'{framework}'"):
        importlib.import_module(f"holdfast.integrations.{framework}")


def test_generators_draw_the_same_again() -> None:
    drawn()  # an odd number of normal deviates: each generator keeps one for the next call
    state = _random.captured()
    expected = drawn()
    assert not _random.same(state, _random.captured())
    _random.set_to(state)
    assert _random.same(state, _random.captured())
    assert drawn() == expected


def test_generators_go_through_a_checkpoint(daemon: Daemon) -> None:
    drawn()
    with holdfast.Checkpointer("generators") as ckpt:
        ckpt.save(1, {"own": {"random": _random.captured()}}, wait="committed")
        expected = drawn()
        own: dict[str, Any] = {}
        assert ckpt.restore({"own": own}) == 2
    _random.set_to(own["random"])
    assert drawn() == expected


@pytest.mark.parametrize(
    "draw",
    [random.random, numpy.random.rand, lambda: torch.rand(()).item()],
    ids=["python", "numpy", "torch"],
)
def test_batches_that_were_fetched_ahead_are_drawn_again(draw: Any) -> None:
    collator = DrawingCollator(lambda samples: [draw() for _ in samples], devices=[])
    fetched = [collator([1, 2]) for _ in range(4)]
    collator.trained()
    draw()  # the training itself
    fetched.append(collator([1, 2]))
    collator.trained()
    draws = collator.draws()
    assert len(draws) == 3
    other = DrawingCollator(lambda samples: [draw() for _ in samples], devices=[])
    other.draw_again(draws)
    random.seed(0)
    numpy.random.seed(0)
    torch.manual_seed(0)
    assert [other([1, 2]) for _ in range(3)] == fetched[2:]
    assert len(other.draws()) == 3
    other.begin_epoch()
    assert other.draws() == []


def test_a_collator_that_draws_nothing_has_nothing_saved() -> None:
    collator = DrawingCollator(list, devices=[])
    assert collator([1, 2]) == [1, 2]
    assert collator.draws() == []


@pytest.mark.parametrize("framework", ["transformers", "lightning"])
def test_the_page_has_the_example(framework: str) -> None:
    example = (ROOT / f"examples/train_{framework}.py").read_text()
    assert example in (ROOT / f"docs/frameworks/{framework}.md").read_text()
