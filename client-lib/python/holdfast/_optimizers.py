"""Optimizers as frameworks hand them over: wrapped, or several as one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from holdfast._described import torch_module
from holdfast._errors import HoldfastError, InvalidArgumentError


def is_optimizer(value: Any) -> bool:
    torch = torch_module()
    return torch is not None and isinstance(value, torch.optim.Optimizer)


def reads_plainly(optimizer: Any) -> bool:
    """Whether its state is what torch.optim.Optimizer keeps, with no word of its own in saving and loading."""
    base = torch_module().optim.Optimizer
    kind = type(optimizer)
    return (
        kind.state_dict is base.state_dict
        and kind.load_state_dict is base.load_state_dict
        and not getattr(optimizer, "_optimizer_state_dict_pre_hooks", None)
        and not getattr(optimizer, "_optimizer_state_dict_post_hooks", None)
        and not getattr(optimizer, "_optimizer_load_state_dict_pre_hooks", None)
        and not getattr(optimizer, "_optimizer_load_state_dict_post_hooks", None)
        and all(isinstance(key, torch_module().Tensor) for key in optimizer.state)
    )


def unwrapped_optimizer(value: Any) -> Any:
    """What is saved and restored in its place: the optimizer that accelerate's wrapper stands around, the list of those in a
    container that says nothing of its own. Everything else is itself."""
    while is_optimizer(value):
        inner = _accelerated(value)
        if inner is None:
            break
        value = inner
    inside = contained(value) if is_optimizer(value) else []
    return inside if inside and reads_plainly(value) else value


def _accelerated(wrapper: Any) -> Any:
    """Of accelerate's AcceleratedOptimizer, whose state is its inner optimizer's and nothing else; None: it is none."""
    for kind in type(wrapper).__mro__:
        if kind.__name__ == "AcceleratedOptimizer":
            inner = getattr(wrapper, "optimizer", None)
            alike = type(wrapper).state_dict is kind.state_dict  # type: ignore[attr-defined]
            return inner if alike and is_optimizer(inner) else None
    return None


def contained(value: Any) -> list[Any]:
    """The optimizers that a container (torchtitan's OptimizersContainer) steps; [] if it is none."""
    inside = getattr(value, "optimizers", None)
    if isinstance(inside, (list, tuple)) and all(map(is_optimizer, inside)):
        return list(inside)
    return []


def parts_of_merged(value: Any) -> list[Any]:
    """The optimizers of which `holdfast.merged` made one; [] if it did not."""
    return list(getattr(value, "merged_optimizers", ()))


def assign_state(optimizer: Any, state: dict[Any, dict[str, Any]]) -> None:
    """`state`: of all parameters."""
    for each in parts_of_merged(optimizer) or [optimizer]:
        own = {id(parameter) for group in each.param_groups for parameter in group["params"]}
        each.state.clear()
        each.state.update((key, value) for key, value in state.items() if id(key) in own)


def stepped_by(value: Any) -> Iterator[Any]:
    """The optimizers whose step() changes what it has: those that wrappers and containers have inside, else itself."""
    value = unwrapped_optimizer(value)
    inside = value if isinstance(value, list) else contained(value) or parts_of_merged(value)
    for each in inside:
        yield from stepped_by(each)
    if is_optimizer(value) and not inside:
        yield value


def held_by(value: Any) -> list[Any]:
    """All optimizers that an object has to do with: itself, its attributes, those in lists and dictionaries among them."""
    found: dict[int, Any] = {}
    waiting = [value]
    while waiting:
        each = waiting.pop()
        if id(each) in found:
            continue
        found[id(each)] = each
        for inside in vars(each).values() if hasattr(each, "__dict__") else ():
            several: Iterable[Any] = [inside]
            if isinstance(inside, (list, tuple, dict)):
                several = inside.values() if isinstance(inside, dict) else inside
            waiting += [one for one in several if is_optimizer(one)]
    return [
        each
        for each in found.values()
        if is_optimizer(each)
        and hasattr(each, "param_groups")
        and _accelerated(each) is None
        and not contained(each)
        and not parts_of_merged(each)
    ]


def by_position(
    saved: list[dict[str, Any]], groups: list[dict[str, Any]], names: dict[int, str]
) -> dict[int, str]:
    """Names of parameters as they were saved, where only one side had the module or part to take a name from."""
    had = [name for one in saved for name in one["params"]]
    if [len(one["params"]) for one in saved] != [len(group["params"]) for group in groups]:
        return names
    parameters = [parameter for group in groups for parameter in group["params"]]
    wanted = [names[id(parameter)] for parameter in parameters]
    if had == wanted or any(
        before != now and not (before.startswith("#") or now.startswith("#"))
        for before, now in zip(had, wanted, strict=True)
    ):
        return names
    return {id(parameter): name for parameter, name in zip(parameters, had, strict=True)}


def state_of(value: Any, path: str) -> Any:
    """value.state_dict(), whose errors name the place where it is an optimizer's."""
    try:
        return value.state_dict()
    except HoldfastError:
        raise
    except Exception as error:
        if not is_optimizer(value):
            raise
        raise InvalidArgumentError(
            f"{path}: state_dict of this {type(value).__qualname__} raised {type(error).__name__}: {error}"
        ) from error
