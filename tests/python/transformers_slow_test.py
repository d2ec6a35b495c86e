"""Hugging Face's Trainer itself, fetched for the test: runs that are killed and started again end with the history, the weights and the
optimizer of a run that nobody disturbed and that knows nothing of Holdfast, bit for bit."""

from __future__ import annotations

import os
import pathlib
import random
import signal
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from ranks import run_ranks
from training import SEED

import holdfast
from daemons import Daemon

HERE = pathlib.Path(__file__).resolve().parent
INSTALL_DEADLINE_S = 1800
VERSIONS = ["5.24.0", "5.23.0"]
SAMPLES, LENGTH, WORDS = 10, 8, 20


def install(place: pathlib.Path, version: str) -> str:
    """Into that folder; returns it as a path for PYTHONPATH."""
    given = os.environ.get(f"HOLDFAST_TEST_TRANSFORMERS_{version.replace('.', '_')}")
    if given:
        return given
    subprocess.run(
        [sys.executable, "-m", "pip", "install", "-q", "--no-cache-dir", "--no-deps", "--target", str(place)]
        + ["-r", str(HERE / "transformers.txt"), f"transformers=={version}"],
        check=True,
        timeout=INSTALL_DEADLINE_S,
    )  # fmt: skip
    return str(place)


@pytest.fixture(scope="session", autouse=True)
def newest(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The newest version, imported here once: the ranks are forked from this process."""
    place = install(tmp_path_factory.mktemp("transformers"), VERSIONS[0])
    sys.path.append(place)
    import transformers

    assert transformers.__version__ == VERSIONS[0]
    assert transformers.Trainer and transformers.GPT2LMHeadModel and transformers.TrainingArguments
    import holdfast.integrations.transformers  # noqa: F401

    return place


def samples() -> list[dict[str, torch.Tensor]]:
    numbers = torch.Generator().manual_seed(5)
    texts = [
        torch.randint(WORDS, (LENGTH - n % 3,), generator=numbers).repeat(2)[:LENGTH]
        for n in range(SAMPLES)
    ]
    return [{"input_ids": each, "labels": each} for each in texts]


def model_of(seed: int) -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(seed)
    return GPT2LMHeadModel(
        GPT2Config(vocab_size=WORDS, n_positions=LENGTH, n_embd=16, n_layer=2, n_head=2)
    )  # with dropout


def killer(event: str, step: int) -> Any:
    """A callback that ends its process at that event of that step."""
    from transformers import TrainerCallback

    class Killer(TrainerCallback):  # type: ignore[misc]
        pass

    def kill(self: Any, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == step:
            os.kill(os.getpid(), signal.SIGKILL)

    setattr(Killer, event, kill)
    return Killer()


EVENTS = ["on_step_begin", "on_pre_optimizer_step", "on_optimizer_step", "on_step_end", "on_log"]


def train(
    folder: pathlib.Path,
    *,
    job: str | None,
    kill: tuple[str, int] | None = None,
    prepare: Callable[[Any, Any], None] = lambda trainer, callback: None,
    **arguments: Any,
) -> dict[str, Any]:
    """In a rank: a run, with everything by which two runs are compared. `job` None: without Holdfast."""
    from transformers import Trainer, TrainingArguments, set_seed

    settings = {
        "output_dir": str(folder), "use_cpu": True, "num_train_epochs": 3, "per_device_train_batch_size": 2,
        "logging_steps": 1, "save_strategy": "no", "report_to": "none", "disable_tqdm": True, "learning_rate": 0.01,
        "dataloader_pin_memory": False,
    }  # fmt: skip
    args = TrainingArguments(**{**settings, **arguments})
    set_seed(11)
    data = samples()
    trainer = Trainer(model_of(3), args, train_dataset=data, eval_dataset=data[:4])
    last = None
    if job is not None:
        from holdfast.integrations.transformers import HoldfastCallback

        callback = HoldfastCallback(trainer, job)
        prepare(trainer, callback)
        last = callback.last_checkpoint()
    if kill is not None:
        trainer.add_callback(killer(*kill))
    if last is not None:
        found = callback.checkpointer.last_restored.step
    trainer.train(resume_from_checkpoint=last)
    return {
        "resumed": 0 if last is None else found,
        "history": [timeless(each) for each in trainer.state.log_history],
        "best": (trainer.state.best_metric, trainer.state.best_global_step),
        "tokens": trainer.state.num_input_tokens_seen,
        "flos": trainer.state.total_flos,
        "model": {name: each.clone() for name, each in trainer.model.state_dict().items()},
        "optimizer": trainer.optimizer.state_dict()["state"],
        "rate": trainer.lr_scheduler.get_last_lr(),
    }


def timeless(entry: dict[str, float]) -> dict[str, float]:
    """Without what depends on the clock, and without the mean loss since the last start."""
    return {
        name: value
        for name, value in entry.items()
        if "runtime" not in name and "per_second" not in name and name != "train_loss"
    }


def assert_same(expected: dict[str, Any], found: dict[str, Any]) -> None:
    assert found["history"] == expected["history"]
    for name in ("best", "tokens", "flos", "rate"):
        assert found[name] == expected[name], name
    for name, each in expected["model"].items():
        assert torch.equal(found["model"][name], each), name
    for number, tensors in expected["optimizer"].items():
        for name, each in tensors.items():
            assert torch.equal(found["optimizer"][number][name], each), (number, name)


def steps_of(history: list[dict[str, float]]) -> int:
    return int(history[-1]["step"])


def killed(ranks: int, work: Callable[[int], Any]) -> None:
    with pytest.raises(AssertionError, match="ended with 9"):
        run_ranks(ranks, work, group=False)


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulated": {"gradient_accumulation_steps": 2, "logging_steps": 3, "include_num_input_tokens_seen": "all"},
    "evaluated": {"eval_strategy": "steps", "eval_steps": 4, "metric_for_best_model": "loss"},
    "evaluated after epochs": {"eval_strategy": "epoch", "metric_for_best_model": "loss", "logging_steps": 4},
    "order drawn from the global generator": {"accelerator_config": {"use_seedable_sampler": False}},
    "ends within an epoch": {"max_steps": 17},
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_killed_anywhere(daemon: Daemon, tmp_path: pathlib.Path, case: str) -> None:
    arguments = CASES[case]

    def run(job: str | None, kill: tuple[str, int] | None = None) -> Callable[[int], Any]:
        return lambda rank: train(tmp_path, job=job, kill=kill, **arguments)

    [expected] = run_ranks(1, run(None), group=False)
    dice = random.Random(f"{SEED} {case}")
    steps = steps_of(expected["history"])
    per_epoch = -(-SAMPLES // 2 // arguments.get("gradient_accumulation_steps", 1))
    # In the first epoch, behind the end of an epoch, and anywhere behind that.
    for kill in [
        (dice.choice(EVENTS), dice.randrange(2, per_epoch)),
        ("on_step_begin", per_epoch),
        ("on_log", dice.randrange(per_epoch + 2, steps - 1)),
    ]:
        print(f"seed {SEED}: killed at {kill}")
        killed(1, run("job", kill))
    [found] = run_ranks(1, run("job"), group=False)
    assert found["resumed"] > 0
    assert_same(expected, found)
    # And once more, when all is done: nothing changes.
    [again] = run_ranks(1, run("job"), group=False)
    assert again["resumed"] == steps
    assert_same(expected, again)
