"""Hugging Face's Trainer itself, fetched for the test: runs that are killed and started again end with the history, the weights and the
optimizer of a run that nobody disturbed and that knows nothing of Holdfast, bit for bit."""

from __future__ import annotations

import json
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
from ranks import free_port, run_ranks
from training import SEED, wait_until

import holdfast
from daemons import Daemon

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[1]
EXAMPLE = ROOT / "examples" / "train_transformers.py"
VERSIONS = ["5.24.0", "5.23.0"]
INSTALL_DEADLINE_S = 1800
RUN_DEADLINE_S = 900
SAMPLES, LENGTH, WORDS = 10, 8, 20
EVENTS = ["on_step_begin", "on_pre_optimizer_step", "on_optimizer_step", "on_step_end", "on_log"]


def install(place: pathlib.Path, version: str) -> str:
    """Transformers of that version, into that folder."""
    subprocess.run(
        [sys.executable, "-m", "pip", "install", "-q", "--no-cache-dir", "--no-deps", "--target", str(place)]
        + ["-r", str(HERE / "transformers.txt"), f"transformers=={version}"],
        check=True,
        timeout=INSTALL_DEADLINE_S,
    )  # fmt: skip
    return str(place)


@pytest.fixture(scope="session")
def places(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """Where each version is."""
    known: dict[str, str] = {}

    def place_of(version: str) -> str:
        if version not in known:
            known[version] = install(tmp_path_factory.mktemp("transformers"), version)
        return known[version]

    return place_of


@pytest.fixture(scope="session")
def newest(places: Callable[[str], str]) -> None:
    """The newest version, imported here once: the ranks are forked from this process."""
    sys.path.append(places(VERSIONS[0]))
    import transformers

    assert transformers.__version__ == VERSIONS[0]
    assert transformers.Trainer and transformers.GPT2LMHeadModel and transformers.TrainingArguments
    import holdfast.integrations.transformers  # noqa: F401


def samples() -> list[dict[str, torch.Tensor]]:
    numbers = torch.Generator().manual_seed(5)
    texts = [torch.randint(WORDS, (LENGTH,), generator=numbers) for _ in range(SAMPLES)]
    return [{"input_ids": each, "labels": each} for each in texts]


class Stream(torch.utils.data.IterableDataset[Any]):
    """Without a length."""

    def __init__(self, rounds: int) -> None:
        self.rounds = rounds

    def __iter__(self) -> Any:
        for _ in range(self.rounds):
            yield from samples()


def masked(batch: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """A collator that draws from the generators of torch and Python."""
    inputs = torch.stack([each["input_ids"] for each in batch])
    labels = torch.stack([each["labels"] for each in batch])
    hidden = torch.rand(inputs.shape) < 0.4
    return {
        "input_ids": inputs.masked_fill(hidden, random.randrange(WORDS)),
        "labels": labels.masked_fill(~hidden, -100),
    }


def model_of(seed: int, dropout: float) -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(seed)
    config = GPT2Config(
        vocab_size=WORDS, n_positions=LENGTH, n_embd=16, n_layer=2, n_head=2, bos_token_id=0,
        eos_token_id=0, resid_pdrop=dropout, embd_pdrop=dropout, attn_pdrop=dropout,
    )  # fmt: skip
    return GPT2LMHeadModel(config)


def signalling(event: str, step: int, number: signal.Signals) -> Any:
    """A callback that sends its own process that signal, at that event of that step."""
    from transformers import TrainerCallback

    class Signalling(TrainerCallback):  # type: ignore[misc]
        pass

    def send(self: Any, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == step:
            os.kill(os.getpid(), number)

    setattr(Signalling, event, send)
    return Signalling()


def shard(trainer: Any) -> None:
    """FSDP2 as Accelerate does it. On a CPU it has no switch for that, so its state is set as it is on GPUs."""
    from accelerate import FullyShardedDataParallelPlugin
    from accelerate.state import AcceleratorState
    from accelerate.utils import DistributedType

    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["GPT2Block"],
        cpu_ram_efficient_loading=False,
    )
    AcceleratorState._shared_state["fsdp_plugin"] = plugin
    AcceleratorState._shared_state["distributed_type"] = DistributedType.FSDP
    trainer.is_fsdp_enabled = True


def train(
    folder: pathlib.Path,
    job: str | None,
    send: tuple[str, int, signal.Signals] | None = None,
    *,
    spoil: Callable[[Any, Any], None] | None = None,
    collator: Any = None,
    callbacks: Callable[[], list[Any]] = list,
    scaler: dict[str, Any] | None = None,
    dropout: float = 0.1,
    sharded: bool = False,
    stream: int = 0,
    **arguments: Any,
) -> dict[str, Any]:
    """In a rank: a run, with everything by which two runs are compared. `job` None: without Holdfast."""
    from transformers import Trainer, TrainingArguments, set_seed

    settings = {
        "output_dir": str(folder / str(job)), "use_cpu": True, "num_train_epochs": 3, "learning_rate": 0.01,
        "per_device_train_batch_size": 2, "logging_steps": 1, "save_strategy": "no", "report_to": "none",
        "disable_tqdm": True, "dataloader_pin_memory": False, "ddp_find_unused_parameters": False,
    }  # fmt: skip
    args = TrainingArguments(**{**settings, **arguments})
    set_seed(11)
    data = samples()
    trainer = Trainer(
        model_of(3, dropout),
        args,
        data_collator=collator,
        train_dataset=Stream(stream) if stream else data,
        eval_dataset=data[:4],
        callbacks=callbacks(),
    )
    if sharded:
        shard(trainer)
    if scaler is not None:
        trainer.accelerator.scaler = torch.amp.GradScaler("cpu", **scaler)
    callback, last = None, None
    if job is not None:
        from holdfast.integrations.transformers import HoldfastCallback

        callback = HoldfastCallback(trainer, job)
        last = callback.last_checkpoint()
        if spoil is not None:
            spoil(trainer, callback)
    if send is not None:
        trainer.add_callback(signalling(*send))
    trainer.train(resume_from_checkpoint=last)
    found = callback and callback.checkpointer.last_restored
    scaled = trainer.accelerator.scaler
    return {
        "resumed": 0 if found is None else found.step,
        "preempted": callback is not None and callback.preempted,
        "sharded": any(hasattr(each, "to_local") for each in trainer.model.parameters()),
        "history": [timeless(each) for each in trainer.state.log_history],
        "best": (trainer.state.best_metric, trainer.state.best_global_step),
        "tokens": trainer.state.num_input_tokens_seen,
        "flos": trainer.state.total_flos,
        "model": {name: own(each) for name, each in trainer.model.state_dict().items()},
        "optimizer": {
            number: {name: own(each) for name, each in state.items()}
            for number, state in trainer.optimizer.state_dict()["state"].items()
        },
        "rate": trainer.lr_scheduler.get_last_lr(),
        "scale": None if scaled is None else scaled.state_dict(),
    }


def own(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of it."""
    return tensor.to_local().clone() if hasattr(tensor, "to_local") else tensor.clone()


def timeless(entry: dict[str, float]) -> dict[str, float]:
    """Without what depends on the clock, and without the mean loss since the last start."""
    return {
        name: value
        for name, value in entry.items()
        if "runtime" not in name and "per_second" not in name and name != "train_loss"
    }


def assert_same(expected: dict[str, Any], found: dict[str, Any]) -> None:
    assert found["history"] == expected["history"]
    for name in ("best", "tokens", "flos", "rate", "scale"):
        assert found[name] == expected[name], name
    for name, each in expected["model"].items():
        assert torch.equal(found["model"][name], each), name
    for number, tensors in expected["optimizer"].items():
        for name, each in tensors.items():
            assert torch.equal(found["optimizer"][number][name], each), (number, name)


def in_ranks(ranks: int, work: Callable[[int], Any]) -> list[Any]:
    return run_ranks(ranks, work, group=False, deadline_s=RUN_DEADLINE_S)


def killed(ranks: int, work: Callable[[int], Any]) -> None:
    with pytest.raises(AssertionError, match="ended with 9"):
        in_ranks(ranks, work)


def patient() -> list[Any]:
    from transformers import EarlyStoppingCallback

    return [EarlyStoppingCallback(early_stopping_patience=5)]


BEST = {"eval_strategy": "steps", "eval_steps": 2, "metric_for_best_model": "loss"}
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulated": {
        "gradient_accumulation_steps": 2, "logging_steps": 2, "include_num_input_tokens_seen": "all",
        "num_train_epochs": 4,
    },
    "evaluated": {**BEST, "logging_steps": 3, "max_steps": 14},
    "evaluated after epochs": {**BEST, "eval_strategy": "epoch", "logging_steps": 4},
    "stopped early": {**BEST, "learning_rate": 0.0, "num_train_epochs": 8, "callbacks": patient},  # after 12 steps
    "best at the end": {**BEST, "save_strategy": "steps", "save_steps": 2, "load_best_model_at_end": True},
    "order from the global generator": {"accelerator_config": {"use_seedable_sampler": False}},
    "masked": {"collator": masked, "gradient_accumulation_steps": 2, "num_train_epochs": 4},
    "streamed": {"stream": 3, "max_steps": 14},
    "scaled": {"scaler": {"init_scale": 64.0, "growth_interval": 3}},
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_killed_anywhere(daemon: Daemon, newest: None, tmp_path: pathlib.Path, case: str) -> None:
    def run(job: str | None, kill: tuple[str, int] | None = None) -> Callable[[int], Any]:
        send = None if kill is None else (*kill, signal.SIGKILL)
        return lambda rank: train(tmp_path, job, send, **CASES[case])

    [expected] = in_ranks(1, run(None))
    dice = random.Random(f"{SEED} {case}")
    steps = int(expected["history"][-1]["step"])
    per_epoch = -(-SAMPLES // 2 // CASES[case].get("gradient_accumulation_steps", 1))
    # In the first epoch, behind its end, and anywhere in the last ones.
    for kill in [
        (dice.choice(EVENTS[:4]), dice.randrange(2, per_epoch)),
        ("on_step_begin", per_epoch),
        (dice.choice(EVENTS[:4]), dice.randrange(per_epoch + 2, steps - 1)),
    ]:
        print(f"seed {SEED}: killed at {kill}")
        killed(1, run("job", kill))
    [found] = in_ranks(1, run("job"))
    assert found["resumed"] > 0
    assert_same(expected, found)
    # When all is done, starting it again changes nothing.
    [again] = in_ranks(1, run("job"))
    assert again["resumed"] == steps
    assert_same(expected, again)


@pytest.mark.parametrize("sharded", [False, True], ids=["ddp", "fsdp2"])
def test_two_ranks(daemon: Daemon, newest: None, tmp_path: pathlib.Path, sharded: bool) -> None:
    """Over gloo; one of the ranks is killed in the second epoch."""

    def run(job: str | None, kill: tuple[str, int] | None = None) -> Callable[[int], Any]:
        def work(rank: int) -> Any:
            send = None if kill is None or rank == 0 else (*kill, signal.SIGKILL)
            place = tmp_path / str(rank)
            return train(place, job, send, per_device_train_batch_size=1, sharded=sharded)

        return work

    expected = in_ranks(2, run(None))
    dice = random.Random(f"{SEED} ranks")
    kill = (dice.choice(EVENTS[:4]), dice.randrange(7, 10))
    print(f"seed {SEED}: killed at {kill}")
    killed(2, run("job", kill))
    found = in_ranks(2, run("job"))
    assert found[0]["resumed"] == found[1]["resumed"] in range(5, 10)
    assert len({str(each["history"]) for each in expected}) == 1
    for one, other in zip(expected, found, strict=True):
        assert one["sharded"] == other["sharded"] == sharded
        assert_same(one, other)


def test_another_number_of_ranks(daemon: Daemon, newest: None, tmp_path: pathlib.Path) -> None:
    """As many samples make a step: the run goes on where it was. Otherwise it is refused."""

    def run(job: str | None, kill: bool = False, **arguments: Any) -> Callable[[int], Any]:
        def work(rank: int) -> Any:
            send = ("on_step_begin", 7, signal.SIGKILL) if kill and rank == 0 else None
            return train(tmp_path / str(rank), job, send, dropout=0.0, **arguments)

        return work

    [expected, _] = in_ranks(2, run(None, per_device_train_batch_size=1))
    killed(2, run("job", kill=True, per_device_train_batch_size=1))
    with pytest.raises(AssertionError, match="samples per step was 2 and is 1"):
        in_ranks(1, run("job", per_device_train_batch_size=1))
    accumulated = run("job", per_device_train_batch_size=1, gradient_accumulation_steps=2)
    [found] = in_ranks(1, accumulated)
    assert found["resumed"] in (6, 7)
    losses = [[each.get("loss") for each in run["history"]] for run in (expected, found)]
    assert losses[1] == pytest.approx(losses[0])


def test_a_stream_that_is_read_again(daemon: Daemon, newest: None, tmp_path: pathlib.Path) -> None:
    """The Trainer counts whole passes of a length, and finds no place in the second of a stream: that is said, and refused."""

    def run(kill: bool = False) -> Callable[[int], Any]:
        send = ("on_step_begin", 8, signal.SIGKILL) if kill else None
        return lambda rank: train(tmp_path, "job", send, stream=1, max_steps=14)

    killed(1, run(kill=True))
    with pytest.raises(AssertionError, match="had begun another pass over its data"):
        in_ranks(1, run())


def test_without_any_of_it_the_losses_differ(
    daemon: Daemon, newest: None, tmp_path: pathlib.Path
) -> None:
    """What the other tests would not notice they would not test."""
    from holdfast.integrations import _random

    def data_not_skipped(trainer: Any, callback: Any) -> None:
        trainer.args.ignore_data_skip = True

    def generators_not_set(trainer: Any, callback: Any) -> None:
        _random.set_to = lambda *_: None

    def run(job: str | None, kill: bool = False, spoil: Any = None) -> Callable[[int], Any]:
        send = ("on_step_begin", 8, signal.SIGKILL) if kill else None
        return lambda rank: train(tmp_path, job, send, spoil=spoil)

    def losses_of(found: dict[str, Any]) -> list[float]:
        return [each["loss"] for each in found["history"] if "loss" in each][:15]

    [expected] = in_ranks(1, run(None))
    for job, spoil in (("data", data_not_skipped), ("generators", generators_not_set)):
        killed(1, run(job, kill=True))
        [found] = in_ranks(1, run(job, spoil=spoil))
        before = found["resumed"]
        assert losses_of(found)[:before] == losses_of(expected)[:before]
        assert losses_of(found)[before + 1 :] != losses_of(expected)[before + 1 :], job


@pytest.mark.parametrize("ranks", [1, 2])
def test_told_to_end(daemon: Daemon, newest: None, tmp_path: pathlib.Path, ranks: int) -> None:
    """One rank is told; all end after the same step, which is saved, and go on from there."""

    def run(job: str | None, told: bool = False) -> Callable[[int], Any]:
        def work(rank: int) -> Any:
            send = ("on_step_begin", 7, signal.SIGTERM) if told and rank == ranks - 1 else None
            return train(tmp_path / str(rank), job, send, per_device_train_batch_size=2 // ranks)

        return work

    expected = in_ranks(ranks, run(None))
    told = in_ranks(ranks, run("job", told=True))
    found = in_ranks(ranks, run("job"))
    for one, ended, other in zip(expected, told, found, strict=True):
        assert ended["preempted"] and not other["preempted"]
        assert other["resumed"] == ended["history"][-1]["step"] < 15
        assert_same(one, other)


def test_what_does_not_work_is_refused(
    daemon: Daemon, newest: None, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(rank: int) -> list[str]:
        from transformers import Trainer, TrainingArguments

        from holdfast.integrations import transformers as adapter

        def trainer_with(**arguments: Any) -> Any:
            args = TrainingArguments(
                output_dir=str(tmp_path), use_cpu=True, report_to="none", max_steps=2, save_strategy="no",
                **arguments,
            )  # fmt: skip
            return Trainer(model_of(3, 0.0), args, train_dataset=samples())

        said: list[str] = []

        def attempt(work: Callable[[], Any]) -> None:
            try:
                work()
            except holdfast.RefusedError as error:
                said.append(str(error))
            else:
                said.append("nothing")

        for arguments in (
            {"ignore_data_skip": True},
            {"auto_find_batch_size": True},
            {"optim": "galore_adamw_layerwise", "optim_target_modules": ["attn"]},
        ):
            attempt(lambda with_=arguments: adapter.HoldfastCallback(trainer_with(**with_), "no"))
        engine = trainer_with()
        engine.is_deepspeed_enabled = True
        attempt(lambda: adapter.HoldfastCallback(engine, "no"))
        trainer = trainer_with()
        callback = adapter.HoldfastCallback(trainer, "forgotten")
        attempt(trainer.train)
        trainer.train(resume_from_checkpoint=callback.last_checkpoint())
        attempt(trainer.train)
        other = trainer_with(seed=5)
        attempt(adapter.HoldfastCallback(other, "forgotten").last_checkpoint)
        adapter.transformers.__version__ = "5.2.0"
        attempt(lambda: adapter.HoldfastCallback(trainer_with(), "no"))
        return said

    [said] = in_ranks(1, refused)
    expected = [
        "ignore_data_skip=True",
        "auto_find_batch_size=True",
        "optim=galore_adamw_layerwise",
        "DeepSpeed",
        "last_checkpoint()",
        "last_checkpoint()",
        "seed was 42 and is 5",
        "Install 5.3 or newer",
    ]
    assert len(said) == len(expected)
    for text, line in zip(expected, said, strict=True):
        assert text in line


# ---- the example ----


def start_example(
    place: str, ranks: int, job: str, output: pathlib.Path
) -> subprocess.Popen[bytes]:
    launcher = ["-m", "torch.distributed.run", f"--nproc-per-node={ranks}", f"--master-port={free_port()}"]  # fmt: skip
    command = [sys.executable, *(launcher if ranks > 1 else ()), str(EXAMPLE)]
    output.mkdir(exist_ok=True)
    with open(output / "printed", "ab") as printed:
        return subprocess.Popen(
            [*command, f"--job={job}", f"--output={output}"],
            env={
                **os.environ, "PYTHONPATH": f"{os.environ['PYTHONPATH']}:{place}", "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1",
            },
            stdin=subprocess.DEVNULL,
            stdout=printed,
            stderr=printed,
            start_new_session=True,
        )  # fmt: skip


def history_of(output: pathlib.Path) -> list[dict[str, float]]:
    history = json.loads((output / "trainer_state.json").read_text())["log_history"]
    return [timeless(each) for each in history]


@pytest.mark.parametrize("version", VERSIONS)
def test_the_example(
    daemon: Daemon, places: Callable[[str], str], tmp_path: pathlib.Path, version: str
) -> None:
    place = places(version)
    undisturbed, output = tmp_path / "undisturbed", tmp_path / "killed"
    alone = start_example(place, 1, "undisturbed", undisturbed)
    assert alone.wait(RUN_DEADLINE_S) == 0, (undisturbed / "printed").read_text()[-3000:]
    dice = random.Random(f"{SEED} {version}")
    for _ in range(2):
        printed = output / "printed"
        before = printed.read_text().count("'loss'") if printed.exists() else 0
        run = start_example(place, 1, "killed", output)
        try:
            steps = before + dice.randrange(2, 12)
            wait_until(
                f"{steps} steps",
                lambda steps=steps: printed.read_text().count("'loss'") >= steps,
                deadline_s=RUN_DEADLINE_S,
                said=lambda: printed.read_text()[-3000:],
            )
        finally:
            os.killpg(run.pid, signal.SIGKILL)
            run.wait()
    last = start_example(place, 1, "killed", output)
    assert last.wait(RUN_DEADLINE_S) == 0, (output / "printed").read_text()[-3000:]
    assert len(history_of(output)) == 49  # 48 steps, and the summary
    assert history_of(output) == history_of(undisturbed)


def test_the_example_under_torchrun(
    daemon: Daemon, places: Callable[[str], str], tmp_path: pathlib.Path
) -> None:
    for _ in range(2):  # and again, when all is done
        run = start_example(places(VERSIONS[0]), 2, "ranks", tmp_path)
        assert run.wait(RUN_DEADLINE_S) == 0, (tmp_path / "printed").read_text()[-3000:]
        assert len(history_of(tmp_path)) == 25
    assert (tmp_path / "printed").read_text().count("'loss'") == 24
    steps = json.loads(daemon.ctl("list", "ranks", "--json"))["checkpoints"]
    assert max(int(each["step"]) for each in steps if each["state"] == "committed") == 24
