"""PyTorch Lightning: a run that is killed can be started again, and continues after its last committed step.

    trainer = L.Trainer(max_epochs=3, callbacks=[HoldfastCallback("my-run")])
    trainer.fit(model, train_dataloaders=StatefulDataLoader(...))

Start the same script again, and it trains on behind the last committed step: weights, optimizers, schedulers, random states, the
position in the epoch and in the data. docs/frameworks/lightning.md has more.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from typing import Any

import holdfast
from holdfast._errors import InvalidArgumentError
from holdfast.integrations import _random

if "pytorch_lightning" in sys.modules and "lightning" not in sys.modules:
    import pytorch_lightning as L
else:
    import lightning.pytorch as L

_log = logging.getLogger("holdfast")

# (FSDPStrategy is FSDP1; DeepSpeed keeps the optimizer to itself.)
_STRATEGIES = ("SingleDeviceStrategy", "DDPStrategy", "ModelParallelStrategy")


class _Pair:
    """Two functions as what a Checkpointer saves and fills."""

    def __init__(self, save: Callable[[], Any], load: Callable[[Any], None]) -> None:
        self.state_dict, self.load_state_dict = save, load


class HoldfastCallback(L.Callback):  # type: ignore[misc]
    """Saves each step that `trainer.global_step` counts, and restores the newest when `fit` begins.

    `every`: save after so many optimizer steps. A save costs the loop milliseconds. What is lost by a kill is what
    was trained since.
    `options`: of holdfast.Checkpointer: `policy`, `fresh`, `on_error`, …

    The batch behind which validation runs, and the last one of an epoch, are saved behind the batch that follows: so each
    validation and each end of an epoch runs as in a run without interruption.
    """

    def __init__(self, job: str, *, every: int = 1, **options: Any) -> None:
        if every < 1:
            raise InvalidArgumentError(f"HoldfastCallback: every={every}: it is at least 1")
        self.checkpointer: holdfast.Checkpointer | None = None
        self._job, self._every, self._options = job, every, options
        self._saved = 0  # the newest global step that was saved or restored
        # Restored, to be used when the loop begins.
        self._random: dict[str, Any] | None = None
        self._loaders: list[Any] | None = None
        self._epoch: dict[str, Any] = {}  # what the order of this epoch was drawn from

    # ---- Lightning's hooks ----

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        _check(trainer)
        ckpt = holdfast.Checkpointer(
            self._job, rank=trainer.global_rank, world_size=trainer.world_size, **self._options
        )
        self.checkpointer = ckpt
        ckpt.preempted(0)  # Lightning keeps a handler of SIGTERM that is there before its own
        rank = trainer.global_rank
        ckpt.restore(
            self._state(trainer, pl_module),
            merge={
                "random": lambda values: values[rank % len(values)],
                "loaders": lambda _: None,
            },
        )
        if ckpt.last_restored is None:
            return
        if trainer.ckpt_path is not None:
            raise InvalidArgumentError(
                f"fit(ckpt_path={trainer.ckpt_path!r}): job {self._job!r} continues from its own step {ckpt.last_restored.step}: "
                "leave ckpt_path out, or take another job name for a new run"
            )
        self._saved = trainer.global_step
        if self._loaders is None:
            _log.warning(
                "job %s: another number of ranks: the epoch begins again, as positions in the data are not known",
                self._job,
            )
            _begin_epoch(trainer.fit_loop)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        _check_loaders(trainer)
        if self._loaders is not None:
            # (Under DDP the order of an epoch is drawn by a sampler that its loader does not see.)
            _random.set_to(self._epoch["random"], _devices(trainer))
            for generator, state in zip(
                _generators(trainer), self._epoch["generators"], strict=False
            ):
                generator.set_state(state)
            _give_loaders(trainer, self._loaders)
            self._loaders = None
        if self._random is not None:
            _random.set_to(self._random, _devices(trainer))
            self._random = None

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        self._epoch = {
            "random": _random.captured(_devices(trainer)),
            "generators": [each.get_state() for each in _generators(trainer)],
        }

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        assert self.checkpointer is not None
        trainer._signal_connector.received_sigterm = False  # the job ends where all ranks agree
        step = trainer.global_step
        if step == self._saved:
            return  # in the middle of an accumulation: gradients are not saved
        last = self.checkpointer.preempted(step)
        due = step - self._saved >= self._every and not _something_follows(trainer)
        if last or due:
            self.checkpointer.save(step, self._state(trainer, pl_module))
            self._saved = step
        if last:
            _log.warning(
                "job %s: ends behind step %d, which is in %s",
                self._job,
                step,
                self.checkpointer.drain(),
            )
            trainer.should_stop = True

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        assert self.checkpointer is not None
        if trainer.global_step > self._saved:
            self._saved = trainer.global_step
            self.checkpointer.save(self._saved, self._state(trainer, pl_module), wait="committed")

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        if self.checkpointer is not None:
            self.checkpointer.close()
            self.checkpointer = None

    # ---- what is saved ----

    def _state(self, trainer: Any, module: Any) -> dict[str, Any]:
        loop = trainer.fit_loop
        others = [each for each in trainer.callbacks if each is not self]
        state = {
            "model": module,
            "optimizers": list(trainer.optimizers),
            "schedulers": [config.scheduler for config in trainer.lr_scheduler_configs],
            "precision": trainer.precision_plugin,
            "callbacks": _Pair(
                lambda: {each.state_key: each.state_dict() for each in others},
                lambda states: _give_callbacks(others, states),
            ),
            "loop": _Pair(lambda: _loop_state(loop), loop.load_state_dict),
            "loaders": _Pair(lambda: loop._combined_loader._state_dicts(), self._keep_loaders),
            "random": _Pair(
                lambda: {"now": _random.captured(_devices(trainer)), "epoch": self._epoch},
                self._keep_random,
            ),
        }
        if trainer.datamodule is not None:
            state["datamodule"] = _Pair(
                trainer.datamodule.state_dict, trainer.datamodule.load_state_dict
            )
        if type(module).on_save_checkpoint is not L.LightningModule.on_save_checkpoint:
            state["notes"] = _Pair(lambda: _notes_of(module), module.on_load_checkpoint)
        return state

    def _keep_loaders(self, states: list[Any] | None) -> None:
        self._loaders = states

    def _keep_random(self, states: dict[str, Any]) -> None:
        self._random, self._epoch = states["now"], states["epoch"]


def _devices(trainer: Any) -> list[Any]:
    device = trainer.strategy.root_device
    return [] if device.type == "cpu" else [device]


def _loop_state(loop: Any) -> dict[str, Any]:
    """Without its loaders: their positions are each rank's own."""
    state: dict[str, Any] = loop.state_dict()
    state["state_dict"] = {
        name: value for name, value in state["state_dict"].items() if name != "combined_loader"
    }
    return state


def _give_callbacks(callbacks: list[Any], states: dict[str, Any]) -> None:
    for each in callbacks:
        if each.state_key in states:
            each.load_state_dict(states[each.state_key])


def _notes_of(module: Any) -> dict[str, Any]:
    """What on_save_checkpoint of a module adds to a checkpoint."""
    checkpoint = {"state_dict": module.state_dict()}
    module.on_save_checkpoint(checkpoint)
    del checkpoint["state_dict"]
    return checkpoint


def _samplers(trainer: Any) -> list[Any]:
    loaders = trainer.fit_loop._combined_loader.flattened
    batches = [getattr(each, "batch_sampler", None) for each in loaders]
    return [getattr(each, "sampler", None) for each in [*loaders, *batches]]


def _generators(trainer: Any) -> list[Any]:
    """Of samplers that Lightning has wrapped for DDP: their loader does not see them, so their state is not in its own."""
    wrapped = [getattr(each, "dataset", None) for each in _samplers(trainer)]
    inner = [getattr(each, "_sampler", None) for each in wrapped]
    generators = [getattr(each, "generator", None) for each in inner]
    return [each for each in generators if each is not None]


def _give_loaders(trainer: Any, states: list[Any]) -> None:
    """Lightning makes the iterators before it tells the samplers the epoch: too early for a run that resumes within an epoch."""
    loop = trainer.fit_loop
    for sampler in _samplers(trainer):
        set_epoch = getattr(sampler, "set_epoch", None)
        if set_epoch is not None:
            set_epoch(trainer.current_epoch)
    loop._combined_loader._load_state_dicts(states)
    iter(loop._data_fetcher)


def _begin_epoch(loop: Any) -> None:
    """The batch behind which it was saved is complete, and the next one is the first."""
    inner = loop.epoch_loop
    inner.batch_progress.increment_completed()
    inner.batch_progress.reset_on_run()
    inner._batches_that_stepped += 1


def _something_follows(trainer: Any) -> bool:
    """Behind this batch come validation, or the end of the epoch."""
    loop = trainer.fit_loop
    inner = loop.epoch_loop
    return bool(
        inner.batch_progress.is_last_batch
        or inner._num_ready_batches_reached()
        or inner._should_check_val_fx(loop._data_fetcher)
    )


def _check(trainer: Any) -> None:
    strategy = trainer.strategy
    if type(strategy).__name__ not in _STRATEGIES:
        raise InvalidArgumentError(
            f"HoldfastCallback: strategy {type(strategy).__name__} is none of {', '.join(_STRATEGIES)}: what it shards itself "
            "cannot be restored. For FSDP use ModelParallelStrategy, for DeepSpeed holdfast.Range (docs/elastic.md)"
        )


def _check_loaders(trainer: Any) -> None:
    loop = trainer.fit_loop
    for loader in loop._combined_loader.flattened:
        if not hasattr(loader, "state_dict"):
            raise InvalidArgumentError(
                f"HoldfastCallback: a {type(loader).__name__} cannot say which batch comes next, so a run that resumes within an "
                "epoch would train on other data. Use torchdata.stateful_dataloader.StatefulDataLoader, with the same arguments"
            )
    if getattr(loop._data_fetcher, "batches", None):
        raise InvalidArgumentError(
            "HoldfastCallback: the data has no length, so Lightning reads it one batch ahead, and that batch would be lost: "
            "give the dataset a __len__"
        )
