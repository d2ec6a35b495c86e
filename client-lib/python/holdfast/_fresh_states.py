"""The state of optimizers that have made no step yet, over DTensors.

How state that is not shaped like its parameter (factored, layer-wise) is sharded only the optimizer knows. So it makes it: by one
step with gradients and a learning rate of zero, as torch.distributed.checkpoint has it.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from holdfast._core import TensorInfo
from holdfast._described import plain_types, torch_module
from holdfast._errors import HoldfastError, InvalidArgumentError
from holdfast._optimizers import held_by, is_optimizer
from holdfast._state import is_tensor, join

_log = logging.getLogger("holdfast")


def _is_dtensor(value: Any) -> bool:
    from holdfast import _torch_types

    return _torch_types.is_dtensor(value)


def _parameters(optimizers: list[Any]) -> list[Any]:
    every = [each for one in optimizers for group in one.param_groups for each in group["params"]]
    return list({id(each): each for each in every}.values())


class FreshStates:
    """Of one restore, however many copies it tries: such a step may communicate, and so each rank must make it exactly once.

    fresh = FreshStates()
    fresh.of(optim)[parameter]["row_var"]     # made as the optimizer makes it; `optim` itself is as it was
    """

    def __init__(self) -> None:
        self._made: dict[int, tuple[Any, dict[Any, Any]]] = {}
        self._errors: dict[int, str] = {}

    def of(self, optimizer: Any) -> dict[Any, Any]:
        """{} where it has a state, no DTensor, or cannot make a step."""
        self._make([optimizer])
        return self._made[id(optimizer)][1]

    def why_not(self, optimizer: Any) -> str:
        return self._errors.get(id(optimizer), "")

    def shown(self, target: Any) -> Callable[[], Any]:
        """What its state_dict() shows once the optimizers within it have a state; None if it fails."""

        @functools.cache
        def state() -> Any:
            optimizers = held_by(target)
            self._make(optimizers)
            filled = [each for each in optimizers if not each.state]
            for each in filled:
                each.state.update(self._made[id(each)][1])
            try:
                return target.state_dict()
            except Exception:  # it has none yet, perhaps
                return None
            finally:
                for each in filled:
                    each.state.clear()

        return state

    def _make(self, optimizers: list[Any]) -> None:
        new = [each for each in optimizers if id(each) not in self._made]
        parameters = _parameters(new)
        fresh = [
            each for each in new if not each.state and any(map(_is_dtensor, _parameters([each])))
        ]
        if any(each.device.type == "meta" for each in parameters):
            fresh = []  # where they are restored it is said that they have no memory
        if fresh:
            # (It may communicate. Where a rank failed before it came here, the others wait for it in vain.)
            _log.info(
                "restore: %d optimizers make their state by a step without gradients, which waits for all ranks: if one of them "
                "failed before, end this process",
                len(fresh),
            )
        try:
            with _unchanged(fresh) if fresh else contextlib.nullcontext():
                for each in fresh:
                    try:
                        if not each.state:  # else the step of one around it has made it
                            _step(each)
                    except Exception as error:
                        each.state.clear()
                        self._errors[id(each)] = f"{type(error).__name__}: {error}"
            for each in new:
                self._made[id(each)] = each, dict(each.state) if each in fresh else {}
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
    """With gradients and learning rates of zero; afterwards parameters, gradients, groups and random states are as before."""
    torch = torch_module()
    parameters = _parameters(optimizers)
    before = [each.detach().clone() for each in parameters]
    gradients = [each.grad for each in parameters]
    groups = [(group, dict(group)) for one in optimizers for group in one.param_groups]
    devices = sorted({each.device.index for each in parameters if each.device.type == "cuda"})
    with torch.random.fork_rng(devices), torch.no_grad():
        try:
            for each in parameters:
                each.grad = torch.zeros_like(each) if each.requires_grad else None
            for group, _ in groups:
                if "lr" in group:
                    group["lr"] = torch.zeros_like(group["lr"]) if is_tensor(group["lr"]) else 0.0
            yield
        finally:
            for group, values in groups:
                group.clear()
                group.update(values)
            for each, value, gradient in zip(parameters, before, gradients, strict=True):
                each.grad = gradient
                each.copy_(value)


def is_laid_out(
    node: dict[str, Any], saved: Mapping[str, TensorInfo], parameters: Mapping[str, Any], path: str
) -> bool:
    """Whether an optimizer's saved state can be placed without asking it: each entry of a DTensor is one number, or is shaped as
    the DTensor is. The answer is the same on all ranks, also on those that have no element of some parameters."""
    if plain_types().issuperset(map(type, parameters.values())):
        return True
    for kind in node["states"]:
        for name in kind["params"]:
            if not _is_dtensor(parameters.get(name)):
                continue
            for key in kind["keys"]:
                full = f"{path}.state.{name}.{key}"
                entry = node["rest"].get(name, {}).get(key, {"tensor": full})
                if "list" in entry or "tuple" in entry or "dict" in entry:
                    return False  # of tensors: else it would be one value
                shape: Any = entry.get("absent")
                if "tensor" in entry and entry["tensor"] in saved:
                    shape = saved[entry["tensor"]].shape
                if shape and tuple(shape) != tuple(parameters[name].shape):
                    return False
    return True


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
