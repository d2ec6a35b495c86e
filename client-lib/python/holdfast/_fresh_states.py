"""The state of optimizers that have made no step yet, over DTensors.

How state that is not shaped like its parameter (factored, layer-wise) is sharded only the optimizer knows. So it makes it: by one
step with gradients and a learning rate of zero, as torch.distributed.checkpoint has it.

Such a step may communicate, so all ranks make it or none: before the restore begins, whatever was saved. A rank that finds later
that its state does not fit has made it, too.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from holdfast._described import torch_module
from holdfast._errors import HoldfastError, InvalidArgumentError
from holdfast._optimizers import (
    held_by,
    is_optimizer,
    reads_plainly,
    stepped_by,
    unwrapped_optimizer,
)
from holdfast._part import PARTS
from holdfast._state import is_module, is_stateful, is_tensor, join

_log = logging.getLogger("holdfast")

# Of torch.optim: a tensor of their state is one number, or like its parameter. (Not so Adafactor's and LBFGS's.)
_LIKE_PARAMETERS = frozenset(
    "ASGD Adadelta Adagrad Adam AdamW Adamax Muon NAdam RAdam RMSprop Rprop SGD SparseAdam".split()
)


def _is_dtensor(value: Any) -> bool:
    from holdfast import _torch_types

    return _torch_types.is_dtensor(value)


def _parameters(optimizers: list[Any]) -> list[Any]:
    every = [each for one in optimizers for group in one.param_groups for each in group["params"]]
    return list({id(each): each for each in every}.values())


def _needs_no_step(optimizer: Any) -> bool:
    """Whether its state can be made of the parameters and of what was saved: known by its class, and so on all ranks alike."""
    kind = type(optimizer)
    of_torch = getattr(torch_module().optim, kind.__name__, None) is kind
    return reads_plainly(optimizer) and (
        (of_torch and kind.__name__ in _LIKE_PARAMETERS)
        # Those of torchao, whose state is quantized: a first step would be compiled.
        or any(
            each.__name__ == "_AdamBase" and each.__module__.startswith("torchao.")
            for each in kind.__mro__
        )
    )


def _asked(state: Any) -> Iterator[Any]:
    """The optimizers in a state whose place for what was saved only they can say, or an object that has them."""
    if is_tensor(state) or is_module(state) or isinstance(state, PARTS):
        return
    state = unwrapped_optimizer(state)
    if is_optimizer(state):
        if reads_plainly(state):
            yield from (each for each in stepped_by(state) if not _needs_no_step(each))
        else:
            yield from held_by(state)
    elif type(state) in (dict, list, tuple) or (
        isinstance(state, Mapping) and not is_stateful(state)
    ):
        for each in state.values() if isinstance(state, Mapping) else state:
            yield from _asked(each)
    elif is_stateful(state):
        yield from held_by(state)


class FreshStates:
    """Of one restore, however many copies it tries. Made before it begins, on all ranks.

    fresh = FreshStates({"model": model, "optim": optim})
    fresh.of(optim)[parameter]["row_var"]     # made as the optimizer makes it; `optim` itself is as it was
    """

    def __init__(self, state: Any) -> None:
        self._made: dict[int, tuple[Any, dict[Any, Any]]] = {}
        self._errors: dict[int, str] = {}
        if torch_module() is not None:
            self._make(list({id(each): each for each in _asked(state)}.values()))

    def of(self, optimizer: Any) -> dict[Any, Any]:
        """{} where it has a state, no DTensor, needs no step, or cannot make one."""
        made: dict[Any, Any] = {}
        for each in stepped_by(optimizer):
            made.update(self._made.get(id(each), (each, {}))[1])
        return made

    def why_not(self, optimizer: Any) -> str:
        return next(filter(None, map(self._errors.get, map(id, stepped_by(optimizer)))), "")

    def shown(self, target: Any) -> Callable[[], Any]:
        """What its state_dict() shows once the optimizers within it have a state; None if it fails."""

        @functools.cache
        def state() -> Any:
            filled = [each for each in held_by(target) if not each.state]
            for each in filled:
                each.state.update(self.of(each))
            try:
                return target.state_dict()
            except Exception:  # it has none yet, perhaps
                return None
            finally:
                for each in filled:
                    each.state.clear()

        return state

    def _make(self, optimizers: list[Any]) -> None:
        fresh = [
            each
            for each in optimizers
            if not each.state and any(map(_is_dtensor, _parameters([each])))
        ]
        # (Where parameters on the meta device are restored it is said that they have no memory.)
        if not fresh or any(each.device.type == "meta" for each in _parameters(fresh)):
            return
        _log.info(
            "restore: %d optimizers make their state, by a step without gradients", len(fresh)
        )
        try:
            with _unchanged(fresh):
                for each in fresh:
                    try:
                        if not each.state:  # else the step of one around it has made it
                            _step(each)
                    except Exception as error:
                        each.state.clear()
                        self._errors[id(each)] = f"{type(error).__name__}: {error}"
                for each in fresh:
                    self._made[id(each)] = each, dict(each.state)
        finally:
            for each in fresh:
                each.state.clear()


def _step(optimizer: Any) -> None:
    """Without the hooks: they are about steps of the training."""
    step = type(optimizer).step
    if getattr(step, "hooked", False):  # by torch.optim.Optimizer, around the optimizer's own
        step = step.__wrapped__
    step(optimizer)


@contextlib.contextmanager
def _unchanged(optimizers: list[Any]) -> Iterator[None]:
    """With gradients and learning rates of zero; afterwards parameters, gradients, groups, attributes and random states are as
    before."""
    torch = torch_module()
    parameters = _parameters(optimizers)
    before = [each.detach().clone() for each in parameters]
    gradients = [each.grad for each in parameters]
    groups = [(group, dict(group)) for one in optimizers for group in one.param_groups]
    attributes = [(vars(one), dict(vars(one))) for one in optimizers]
    devices = sorted({each.device.index for each in parameters if each.device.type == "cuda"})
    with torch.random.fork_rng(devices), torch.no_grad():
        try:
            for each in parameters:
                each.grad = torch.zeros_like(each) if each.requires_grad else None
            for group, values in groups:
                group.update(
                    (key, value.clone()) for key, value in values.items() if is_tensor(value)
                )
                if "lr" in group:
                    group["lr"] = torch.zeros_like(group["lr"]) if is_tensor(group["lr"]) else 0.0
            yield
        finally:
            for now, values in groups + attributes:
                now.clear()
                now.update(values)
            for each, value, gradient in zip(parameters, before, gradients, strict=True):
                each.grad = gradient
                each.copy_(value)


def check_plain(parameter: Any, shape: tuple[int, ...], path: str, why_not: str) -> None:
    """That a tensor may be made for an entry of that shape: not where the parameter is a DTensor, for then it is one, too."""
    if shape and _is_dtensor(parameter):
        cause = f": {why_not}" if why_not else ""
        raise InvalidArgumentError(
            f"{path}: has another shape than its parameter, which is a DTensor, and a step with gradients of zero has not made a "
            f"tensor to fill{cause}. Make one step of the training before restoring"
        )


def check_no_whole(loaded: Any, shown: Callable[[], Any], target: Any, path: str) -> None:
    """That no rank is given all of what belongs to a DTensor. `loaded`: what `target` is to be given; `shown`: what is there."""
    shapes = {tuple(each.shape) for each in _parameters(held_by(target)) if _is_dtensor(each)}
    if shapes:
        _check_no_whole(loaded, shown, shapes, target, path)


def _check_no_whole(
    loaded: Any, there: Callable[[], Any], shapes: set[tuple[int, ...]], target: Any, path: str
) -> None:
    if is_tensor(loaded):
        if tuple(loaded.shape) in shapes and not _is_dtensor(loaded) and not is_tensor(there()):
            raise InvalidArgumentError(
                f"{path}: belongs to a DTensor, and the {type(target).__qualname__} shows no tensor to fill: every rank would get "
                "all of it. Pass the torch.optim.Optimizer inside of it, or make one step of the training before restoring"
            )
        return
    items: Any = ()
    if isinstance(loaded, Mapping):
        items = loaded.items()
    elif isinstance(loaded, (list, tuple)):
        items = enumerate(loaded)
    for key, value in items:
        child = functools.partial(_child, there, key)
        _check_no_whole(value, child, shapes, target, join(path, key))


def _child(there: Callable[[], Any], key: Any) -> Any:
    try:
        return there()[key]
    except (KeyError, IndexError, TypeError):
        return None


def load_into(target: Any, state: Any, path: str, **options: Any) -> None:
    """target.load_state_dict(state), whose errors name the place. What an object of the user's raises stays what it is."""
    try:
        target.load_state_dict(state, **options)
    except HoldfastError:
        raise
    except Exception as error:
        if not is_optimizer(target):
            if sys.version_info >= (3, 11):
                error.add_note(
                    f"{path}: raised by load_state_dict of this {type(target).__qualname__}"
                )
            raise
        raise InvalidArgumentError(
            f"{path}: load_state_dict of this {type(target).__qualname__} raised {type(error).__name__}: {error}"
        ) from error
