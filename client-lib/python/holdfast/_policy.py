"""Which steps go to which tier, and how long they stay there."""

from __future__ import annotations

import dataclasses
import datetime
import re
from collections.abc import Mapping

from holdfast._errors import InvalidArgumentError

_SECONDS = {"ms": 0.001, "s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
_BYTES = {
    "": 1,
    "KiB": 1 << 10,
    "MiB": 1 << 20,
    "GiB": 1 << 30,
    "TiB": 1 << 40,
    "kB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Policy:
    """What a job says of its copies; what is left out holds as ckptd's configuration says.

        Policy(replicas=1, nvme_every=1, keep_nvme=2, remote_every="10min", keep_remote=5)

    `…_every`: an int is a number of steps (each so many steps, one), a text like "90s", "10min", "2h" or a timedelta a time;
    0: none. `keep_…`: so many of the newest steps stay, at least 1. `keep_…_every`: steps that it divides stay for ever.
    `…_bytes_max`: of this job in that tier, an int or a text like "500GiB"; 0: no limit of its own.
    `replicas`: in the memory of how many other nodes each shard of the newest step is kept, too; 0: none.
    """

    nvme_every: int | str | datetime.timedelta | None = None
    keep_nvme: int | None = None
    keep_nvme_every: int | None = None
    nvme_bytes_max: int | str | None = None
    remote_every: int | str | datetime.timedelta | None = None
    keep_remote: int | None = None
    keep_remote_every: int | None = None
    remote_bytes_max: int | str | None = None
    replicas: int | None = None

    def to_core(self) -> dict[str, dict[str, int]]:
        """As the extension module takes it. Raises holdfast.InvalidArgumentError, naming the field."""
        tiers: dict[str, dict[str, int]] = {}
        for tier in ("nvme", "remote"):
            fields: dict[str, int] = {}
            every = getattr(self, f"{tier}_every")
            if every is not None:
                fields["every_steps"], fields["every_ms"] = _every(f"{tier}_every", every)
            for name, here in (
                ("keep_last", f"keep_{tier}"),
                ("keep_every_steps", f"keep_{tier}_every"),
            ):
                if getattr(self, here) is not None:
                    fields[name] = _count(here, getattr(self, here))
            limit = getattr(self, f"{tier}_bytes_max")
            if limit is not None:
                fields["bytes_max"] = _size(f"{tier}_bytes_max", limit)
            if fields:
                tiers[tier] = fields
        if self.replicas is not None:
            tiers["peer"] = {"replicas": _count("replicas", self.replicas)}
        return tiers


def as_core(
    policy: Policy | Mapping[str, Mapping[str, int]] | None,
) -> Mapping[str, Mapping[str, int]] | None:
    """What Policy.to_core() gives, of a Policy or of that itself."""
    return policy.to_core() if isinstance(policy, Policy) else policy


def _count(name: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise InvalidArgumentError(f"Policy: {name}={value!r} is not a number from 0")
    return value


def _parse(name: str, text: str, units: dict[str, float] | dict[str, int], example: str) -> float:
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    if match is None or match[2] not in units:
        raise InvalidArgumentError(
            f"{name}={text!r}: write a number and one of {', '.join(u for u in units if u)}, as in {example!r}"
        )
    return float(match[1]) * units[match[2]]


def duration(name: str, text: str) -> float:
    """A text like "90s", "10min", "2h" in seconds."""
    return _parse(name, text, _SECONDS, "10min")


def _every(name: str, value: int | str | datetime.timedelta) -> tuple[int, int]:
    """(every_steps, every_ms)"""
    if isinstance(value, datetime.timedelta):
        seconds = value.total_seconds()
    elif isinstance(value, str):
        seconds = duration(f"Policy: {name}", value)
    else:
        return _count(name, value), 0
    if seconds < 0:
        raise InvalidArgumentError(f"Policy: {name}={value!r} is below 0")
    return 0, max(1, round(seconds * 1000)) if seconds else 0


def _size(name: str, value: int | str) -> int:
    return (
        int(_parse(f"Policy: {name}", value, _BYTES, "500GiB"))
        if isinstance(value, str)
        else _count(name, value)
    )
