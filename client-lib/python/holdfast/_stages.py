"""The modules of one rank of an interleaved pipeline, as one; and their optimizers, as one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from holdfast._errors import InvalidArgumentError
from holdfast._fsdp1 import refuse_fsdp1
from holdfast._optimizers import reads_plainly, stepped_by
from holdfast._state import unwrapped


class Merged(torch.nn.Module):
    """Made by `holdfast.merged`: for a state, not for training. What is asked of its state the modules themselves answer."""

    def __init__(self, parts: Sequence[Any]) -> None:
        super().__init__()
        self._parts: tuple[torch.nn.Module, ...] = tuple(unwrapped(part) for part in parts)
        found: dict[str, Any] = {}
        for number, part in enumerate(self._parts):
            if not isinstance(part, torch.nn.Module):
                raise InvalidArgumentError(
                    f"merged: part {number} is a {type(part).__name__}, where a module is wanted"
                )
            refuse_fsdp1(f"merged: part {number}", part)
            for name, value in part.state_dict(keep_vars=True).items():
                if found.setdefault(name, value) is not value:
                    raise InvalidArgumentError(
                        f"merged: part {number} and one before it both have {name!r}, but names must be those of the whole "
                        "model. holdfast.layouts.parts(part, rule, name=…) makes such names"
                    )

    def state_dict(self, *args: Any, **options: Any) -> Any:
        found: dict[str, Any] = {}
        for part in self._parts:
            found.update(part.state_dict(*args, **options))
        return found

    def named_parameters(self, *args: Any, **options: Any) -> Iterator[tuple[str, Any]]:
        found: dict[str, Any] = {}
        for part in self._parts:
            found.update(part.named_parameters(*args, **options))
        yield from found.items()

    def named_buffers(self, *args: Any, **options: Any) -> Iterator[tuple[str, Any]]:
        found: dict[str, Any] = {}
        for part in self._parts:
            found.update(part.named_buffers(*args, **options))
        yield from found.items()

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> None:
        for part in self._parts:
            own = {key: state_dict[key] for key in part.state_dict() if key in state_dict}
            part.load_state_dict(own, strict=strict, assign=assign)

    def get_submodule(self, target: str) -> torch.nn.Module:
        for part in self._parts:
            try:
                return part.get_submodule(target)
            except AttributeError:
                continue
        raise AttributeError(f"no part has a module {target!r}")


class MergedGroup(dict[str, Any]):
    """The groups of one number of several optimizers, to be read; what is to be written goes into `groups`."""

    def __init__(self, number: int, groups: Sequence[dict[str, Any]]) -> None:
        first = groups[0]
        super().__init__(first)
        self["params"] = [parameter for group in groups for parameter in group["params"]]
        self.groups = groups
        for part, group in enumerate(groups):
            different = sorted(
                str(key)
                for key in {*first, *group} - {"params"}
                if key not in first or key not in group or not _alike(first[key], group[key])
            )
            if different:
                raise InvalidArgumentError(
                    f"merged: group {number} of optimizer {part} and that of optimizer 0 differ in {', '.join(different)}, but one "
                    "value is saved for all. Make them alike, or give the optimizers to the state as a list"
                )


def _alike(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    return type(one) is type(other) and bool(one == other)


class MergedOptimizer(torch.optim.Optimizer):
    """Made by `holdfast.merged`: for a state, not for training. It has nothing of its own."""

    def __init__(self, parts: Sequence[Any]) -> None:
        self.merged_optimizers = [each for part in parts for each in stepped_by(part)]
        for number, each in enumerate(self.merged_optimizers):
            refuse_fsdp1(f"merged: optimizer {number}", each)
            if not reads_plainly(each):
                raise InvalidArgumentError(
                    f"merged: optimizer {number} is a {type(each).__qualname__} with a state_dict of its own, which cannot be put "
                    "together. Give the optimizers to the state as a list"
                )
            if len(each.param_groups) != len(self.merged_optimizers[0].param_groups):
                raise InvalidArgumentError(
                    f"merged: optimizer {number} has {len(each.param_groups)} groups of parameters, optimizer 0 has "
                    f"{len(self.merged_optimizers[0].param_groups)}. Make them alike (a group may be empty), or give the "
                    "optimizers to the state as a list"
                )
        found: dict[int, int] = {}
        for number, each in enumerate(self.merged_optimizers):
            for group in each.param_groups:
                for parameter in group["params"]:
                    if found.setdefault(id(parameter), number) != number:
                        raise InvalidArgumentError(
                            f"merged: optimizers {found[id(parameter)]} and {number} both have a parameter of shape "
                            f"{list(parameter.shape)}. Give it to one of them"
                        )
        _ = self.param_groups

    @property
    def param_groups(self) -> Any:  # type: ignore[override]
        every = (each.param_groups for each in self.merged_optimizers)
        return [MergedGroup(n, groups) for n, groups in enumerate(zip(*every, strict=True))]

    @property
    def state(self) -> Any:  # type: ignore[override]
        return {key: own for each in self.merged_optimizers for key, own in each.state.items()}
