"""The modules of one rank of an interleaved pipeline, as one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from holdfast._errors import InvalidArgumentError
from holdfast._fsdp1 import refuse_fsdp1
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
