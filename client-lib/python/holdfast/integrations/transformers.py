"""Hugging Face's Trainer: kill the run at any moment, start the same command again, and see the same losses, bit for bit.

    from holdfast.integrations.transformers import HoldfastCallback

    trainer = Trainer(model, args, train_dataset=data)
    checkpoints = HoldfastCallback(trainer, "my-run")
    trainer.train(resume_from_checkpoint=checkpoints.last_checkpoint())

`last_checkpoint()` returns a directory with nothing but the Trainer's own `trainer_state.json`: from that the Trainer finds the
epoch and the batches to skip. The callback fills everything else in place when the model is wrapped and the optimizer exists.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import tempfile
from typing import Any

import torch
import transformers
from transformers import EarlyStoppingCallback, Trainer, TrainerCallback, TrainerState
from transformers.trainer_callback import ExportableState, TrainerControl
from transformers.trainer_utils import has_length

from holdfast import _jobs
from holdfast._checkpointer import Checkpointer
from holdfast._errors import InvalidArgumentError, RefusedError
from holdfast._handle import Stage
from holdfast.integrations import _random
from holdfast.integrations._drawing_collator import DrawingCollator

_log = logging.getLogger("holdfast")

_OLDEST = (5, 3)  # before that the sum of the losses since the last log is a local variable
_STATE_FILE = "trainer_state.json"
_HISTORY = "log_history"
_SUMMARY = {"train_loss", "train_runtime"}  # of a whole run, in its last log entry


class HoldfastCallback(TrainerCallback):  # type: ignore[misc]
    """Save a Trainer's run after each step, and resume it. Make it once the Trainer is made; it adds itself.

        checkpoints = HoldfastCallback(trainer, "my-run", policy=holdfast.Policy(remote_every_ms="10min"))
        trainer.train(resume_from_checkpoint=checkpoints.last_checkpoint())
        if checkpoints.preempted:
            raise SystemExit(75)  # the scheduler starts the same command again

    `job`: the name of the run. The same name resumes, another name is another run.
    `every`: save each so many steps; the last step of a run is always saved.
    `options`: what `holdfast.Checkpointer` takes besides.

    `checkpointer`: the Checkpointer that saves. Code that writes weights by hand calls its `wait_snapshot()` first.
    `preempted`: the job was told to end, and `train` has ended after a last save.
    """

    def __init__(self, trainer: Trainer, job: str, *, every: int = 1, **options: Any) -> None:
        if _jobs.unsigned("HoldfastCallback", "every", every) == 0:
            raise InvalidArgumentError(
                f"HoldfastCallback of job {job!r}: every=0: it is at least 1"
            )
        _refuse_unsupported(trainer, job)
        self.preempted = False
        self.checkpointer = Checkpointer(job, **options)
        self._job = job
        self._trainer = trainer
        self._every = every
        self._devices = _devices(trainer.args)
        self._asked = False
        self._found: Any = None  # what is resumed from
        self._resuming: dict[str, Any] | None = None  # what one rank needs at its first step
        self._saved = 0  # the newest step that was saved or restored
        self._epoch_random: dict[str, Any] = {}
        self._lost_position = False
        self._is_over = False  # since before this start
        self._history = _History()
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        _check_place(trainer.args, self.checkpointer)
        self._collator: DrawingCollator | None = None
        self._load_weights_here(trainer)
        self._collate_here(trainer)
        trainer.add_callback(self)

    # ---- resuming ----

    def last_checkpoint(self) -> str | None:
        """What `train(resume_from_checkpoint=…)` takes: None at the first start. All ranks call it."""
        saved: dict[str, Any] = {}
        self.checkpointer.restore({"trainer": saved}, merge={"trainer": lambda states: states[0]})
        self._asked = True
        self._found = self.checkpointer.last_restored
        if self._found is None:
            return None
        self._refuse_other_data(saved)
        state = TrainerState(**json.loads(saved["state"]))
        state.log_history = self._history.load(saved[_HISTORY])
        self._callbacks = json.loads(saved["callbacks"])
        self._flos = saved["flos"]
        self._last_logged = saved["last_logged"]
        self._folder = tempfile.TemporaryDirectory(prefix="holdfast-trainer-")
        state.save_to_json(os.path.join(self._folder.name, _STATE_FILE))
        return self._folder.name

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> Any:
        if not self._asked:
            raise RefusedError(
                f"train of job {self._job!r}: the Trainer would begin at its first batch, whatever was saved. "
                "Call trainer.train(resume_from_checkpoint=checkpoints.last_checkpoint()), and for another training "
                "make another Trainer and HoldfastCallback"
            )
        self._asked = False
        found = self._found
        if state.global_step != (0 if found is None else found.step):
            raise RefusedError(
                f"train of job {self._job!r}: the Trainer begins at step {state.global_step}, and the newest checkpoint is "
                + ("none" if found is None else f"step {found.step}")
                + ". Pass what last_checkpoint() returns as resume_from_checkpoint"
            )
        if state.is_hyper_param_search:
            raise RefusedError(
                f"train of job {self._job!r}: a search over hyperparameters is many runs. Add the callback to single runs"
            )
        if found is not None:
            self._fill(found)
            if state.global_step >= state.max_steps or self._stopped_early():
                self._is_over = control.should_training_stop = True
                _give_no_batches(self._trainer)
        self.checkpointer.prepare(self._state(state))
        return control

    def _fill(self, found: Any) -> None:
        """All that was saved, but for what the Trainer has read already."""
        rank = self.checkpointer.rank
        own: dict[str, Any] = {}

        def of_old_ranks(states: list[Any]) -> Any:
            losses = torch.stack([each["loss"] for each in states])
            return {**states[rank % len(states)], "loss": losses.mean(0)}

        self.checkpointer.restore(
            {**self._of_training(), "rank": own},
            step=found.step,
            attempt=found.attempt,
            merge={"rank": of_old_ranks},
        )
        trainer = self._trainer
        trainer._tr_loss.copy_(own["loss"])
        trainer._globalstep_last_logged = self._last_logged
        # The mean that train() returns is that of the steps since this start, as ever.
        trainer._total_loss_scalar = -float(own["loss"])
        trainer.current_flos = self._flos
        for (name, attributes), callback in zip(
            self._callbacks, self._stateful_callbacks(), strict=False
        ):
            if name == type(callback).__name__:
                for attribute, value in attributes.items():
                    setattr(callback, attribute, value)
        self._saved = found.step
        self._resuming = own
        if self._folder is not None:
            self._folder.cleanup()

    def _load_weights_here(self, trainer: Trainer) -> None:
        """The Trainer looks for weights in the directory that it resumes from, and fails without. Ours come in place, later."""
        load = trainer._load_from_checkpoint

        def unless_ours(resume_from_checkpoint: str, *others: Any, **named: Any) -> None:
            if self._folder is None or resume_from_checkpoint != self._folder.name:
                load(resume_from_checkpoint, *others, **named)

        trainer._load_from_checkpoint = unless_ours

    def _collate_here(self, trainer: Trainer) -> None:
        if trainer.args.dataloader_num_workers or isinstance(
            trainer.train_dataset, torch.utils.data.IterableDataset
        ):
            return  # elsewhere, or not one batch for each that this process trains on
        make = trainer.get_train_dataloader

        def made(*others: Any, **named: Any) -> Any:
            collate = trainer.data_collator
            self._collator = DrawingCollator(collate, self._devices)
            trainer.data_collator = self._collator
            try:
                return make(*others, **named)
            finally:
                trainer.data_collator = collate  # of evaluations

        trainer.get_train_dataloader = made

    # ---- the loop ----
    #
    # A step is saved when all that follows it has been done (its log, its evaluation), which is where the next one begins.

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self._collator is not None:
            self._collator.begin_epoch()
        if self._resuming is not None:
            self._epoch_random = self._resuming["epoch_random"]
            _random.set_to(self._epoch_random, self._devices)
            if self._collator is not None:
                self._collator.draw_again(self._resuming["draws"])
            if not _within_epoch(state):
                self._resuming = None
            return
        if _within_epoch(state) and not self._lost_position:
            self._lost_position = True
            _log.warning(
                "job '%s': the Trainer begins another pass over its data at epoch %s: saves from here on cannot be resumed, "
                "because it finds its place in the data by whole passes",
                self._job,
                state.epoch,
            )
        self._epoch_random = _random.captured(self._devices)
        self._save(state)

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self._resuming is not None:
            _random.set_to(self._resuming["random"], self._devices)
            self._resuming = None
        self._save(state)

    def on_substep_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self._collator is not None:
            self._collator.trained()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> Any:
        if self._collator is not None:
            self._collator.trained()
        if self.checkpointer.preempted(state.global_step):
            self.preempted = True
            control.should_training_stop = True
            self._hurry(state, control)
        return control

    def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> Any:
        if self._is_over:
            control.should_log = control.should_evaluate = control.should_save = False
        elif self.preempted:
            self._hurry(state, control)
        return control

    @staticmethod
    def _hurry(state: Any, control: Any) -> None:
        """What takes long is left out where the job is about to be killed. The end of a run comes only once, and is not."""
        if state.global_step < state.max_steps:
            control.should_evaluate = control.should_save = False

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        # The Trainer's last words: all steps are done, and the best weights not yet put in the place of the last.
        if logs is not None and logs.keys() >= _SUMMARY:
            self._save(state, last=True)
            if self.preempted:
                stages = self.checkpointer.drain()
                _log.warning(
                    "job '%s': told to end: step %d is the last one (%s)",
                    self._job,
                    state.global_step,
                    ", ".join(stages) or "not saved",
                )

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.checkpointer.close()

    # ---- what is saved ----

    def _save(self, state: Any, last: bool = False) -> None:
        step = state.global_step
        if step > self._saved and (last or step % self._every == 0):
            self._saved = step
            wait: Stage | None = "committed" if last and not self.preempted else None
            self.checkpointer.save(step, self._state(state, last), wait=wait)

    def _state(self, state: Any, last: bool = False) -> dict[str, Any]:
        trainer = self._trainer
        fields = {
            each.name: getattr(state, each.name)
            for each in dataclasses.fields(state)
            if each.name != _HISTORY
        }
        callbacks = [
            [type(each).__name__, each.state()["attributes"]] for each in self._stateful_callbacks()
        ]
        random = _random.captured(self._devices)
        return {
            **self._of_training(),
            "rank": {
                "random": random,
                "epoch_random": self._epoch_random if _within_epoch(state) else random,
                "draws": [] if self._collator is None else self._collator.draws(),
                "loss": trainer._tr_loss,
            },
            "trainer": {
                "state": json.dumps(fields),
                _HISTORY: self._history.text(state.log_history[: -1 if last else None]),
                "callbacks": json.dumps(callbacks),
                "flos": trainer.current_flos,
                "last_logged": trainer._globalstep_last_logged,
                "lost_position": self._lost_position,
                "data": _data_of(trainer),
            },
        }

    def _of_training(self) -> dict[str, Any]:
        trainer = self._trainer
        state = {
            "model": trainer.model,
            "optimizer": trainer.optimizer,
            "scheduler": trainer.lr_scheduler,
        }
        scaler = getattr(trainer.accelerator, "scaler", None)
        return state if scaler is None else {**state, "scaler": scaler}

    def _stateful_callbacks(self) -> list[Any]:
        """Those whose counters belong to the run (early stopping); not the switches of the loop."""
        return [
            each
            for each in self._trainer.callback_handler.callbacks
            if isinstance(each, ExportableState) and not isinstance(each, TrainerControl)
        ]

    def _stopped_early(self) -> bool:
        return any(
            each.early_stopping_patience_counter >= each.early_stopping_patience
            for each in self._stateful_callbacks()
            if isinstance(each, EarlyStoppingCallback)
        )

    def _refuse_other_data(self, saved: dict[str, Any]) -> None:
        what = f"resume of job {self._job!r} after step {self._found.step}"
        if saved["lost_position"]:
            raise RefusedError(
                f"{what}: the run had begun another pass over its data before the end of one, so the Trainer cannot find its "
                "place. Give the dataset a length, or resume an older step: `ckptctl restore`"
            )
        now = _data_of(self._trainer)
        for name, value in saved["data"].items():
            if now[name] != value:
                raise RefusedError(
                    f"{what}: {name} was {value} and is {now[name]}: the Trainer would skip other samples than those seen. "
                    f"{_FIXES[name]}, or start another job"
                )


class _History:
    """The log's history as one text, which grows by what is new: a run may have 100,000 entries, and each step saves them."""

    def __init__(self) -> None:
        self._lines: list[str] = []
        self._text = ""

    def text(self, history: list[Any]) -> str:
        if len(history) < len(self._lines):
            self._lines, self._text = [], ""
        new = [json.dumps(each) + "\n" for each in history[len(self._lines) :]]
        self._lines += new
        self._text += "".join(new)
        return self._text

    def load(self, text: str) -> list[Any]:
        self._lines, self._text = text.splitlines(keepends=True), text
        return [json.loads(each) for each in self._lines]


_FIXES = {
    "samples per step": "Choose per_device_train_batch_size and gradient_accumulation_steps so that the product with the "
    "number of ranks stays",
    "samples in the dataset": "Pass the same dataset",
    "seed": "Set the same seed",
    "data_seed": "Set the same data_seed",
}


def _data_of(trainer: Trainer) -> dict[str, Any]:
    """What the place of a step in the data depends on."""
    data = trainer.train_dataset
    return {
        "samples per step": trainer.get_total_train_batch_size(trainer.args),
        "samples in the dataset": len(data) if data is not None and has_length(data) else None,
        "seed": trainer.args.seed,
        "data_seed": trainer.args.data_seed,
    }


def _devices(args: Any) -> list[torch.device]:
    """Those that this process draws random numbers on, beside the CPU."""
    device = torch.device(args.device)
    if device.type == "cpu":
        return []
    if args.n_gpu > 1:  # DataParallel
        return [torch.device(device.type, each) for each in range(args.n_gpu)]
    return [device]


def _check_place(args: Any, checkpointer: Checkpointer) -> None:
    ours, theirs = (
        (checkpointer.rank, checkpointer.world_size),
        (args.process_index, args.world_size),
    )
    if ours != theirs:
        raise RefusedError(
            f"HoldfastCallback of job {checkpointer.job!r}: the launcher's environment says rank {ours[0]} of {ours[1]}, and the "
            f"Trainer is rank {theirs[0]} of {theirs[1]}. Pass rank={theirs[0]}, world_size={theirs[1]}"
        )


def _refuse_unsupported(trainer: Trainer, job: str) -> None:
    args = trainer.args
    version = tuple(int(each) for each in transformers.__version__.split(".")[:2])
    optim = str(getattr(args.optim, "value", args.optim))
    stateful = getattr(args.accelerator_config, "use_stateful_dataloader", False)
    refused = {
        f"transformers {transformers.__version__} keeps the sum of the losses where nobody can save it. "
        f"Install {'.'.join(map(str, _OLDEST))} or newer": version < _OLDEST,
        "DeepSpeed shards the optimizer in its own engine. Run without args.deepspeed": trainer.is_deepspeed_enabled,
        "FSDP1 is not supported. Set fsdp_version: 2 in args.fsdp_config": trainer.is_fsdp_enabled
        and getattr(trainer.accelerator.state.fsdp_plugin, "fsdp_version", 1) != 2,
        "XLA devices are not supported": torch.device(args.device).type == "xla",
        "ignore_data_skip=True trains on batches that were seen. Remove it": args.ignore_data_skip,
        "auto_find_batch_size=True changes the place of a step in the data. Set per_device_train_batch_size": args.auto_find_batch_size,
        f"optim={optim} has an optimizer for each layer that the Trainer does not show. Use one that is not layerwise": "layerwise"
        in optim,
        "use_stateful_dataloader=True: the Trainer skips batches itself. Remove it from accelerator_config": stateful,
    }
    for cause, holds in refused.items():
        if holds:
            raise RefusedError(f"HoldfastCallback of job {job!r}: {cause}")


def _within_epoch(state: Any) -> bool:
    """The Trainer counts an epoch that was read to its end as 1.0, exactly."""
    return bool(state.epoch % 1)


def _give_no_batches(trainer: Trainer) -> None:
    """The run is at its end: where that is within an epoch, the Trainer would go on at each start, by a step at least."""
    trainer.get_batch_samples = lambda *_, **__: ([], None)
