"""Which steps go to which tier, and how long they stay there."""

from __future__ import annotations

import dataclasses
import datetime
import re
from collections.abc import Callable, Mapping

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


_TIERS = ("nvme", "remote")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Policy:
    """Which steps of a job go to which tier, and how long they stay. ckptd's settings decide what is left out.

        Policy(replicas=1, nvme_every_steps=1, nvme_keep_last=2, remote_every_ms="10min", remote_keep_last=5)

    Options are named as in ckptd.yaml and `ckptctl set`: `nvme_keep_last` is `policy.nvme.keep_last` there.
    `…_every_steps`: store the first of so many steps, 0: never by count.
    `…_every_ms`: and one whenever this much time has passed, 0: never by time. An int counts milliseconds; a text like "90s",
    "10min", "2h" or a timedelta is a time.
    `…_keep_last`: so many of the newest steps stay, at least 1.
    `…_keep_every_steps`: steps that this number divides stay for ever, 0: none.
    `…_bytes_max`: limit of this job in that tier, an int or a text like "500GiB", 0: no limit of its own.
    `replicas`: how many other nodes keep each shard of the newest step in memory, 0: none.
    """

    nvme_every_steps: int | None = None
    nvme_every_ms: int | str | datetime.timedelta | None = None
    nvme_keep_last: int | None = None
    nvme_keep_every_steps: int | None = None
    nvme_bytes_max: int | str | None = None
    remote_every_steps: int | None = None
    remote_every_ms: int | str | datetime.timedelta | None = None
    remote_keep_last: int | None = None
    remote_keep_every_steps: int | None = None
    remote_bytes_max: int | str | None = None
    replicas: int | None = None

    def to_core(self) -> dict[str, dict[str, int]]:
        """As the extension module takes it. Raises holdfast.InvalidArgumentError, naming the field."""
        tiers: dict[str, dict[str, int]] = {}
        for tier in _TIERS:
            fields = {
                name: parse(f"{tier}_{name}", value)
                for name, parse in _OPTIONS.items()
                if (value := getattr(self, f"{tier}_{name}")) is not None
            }
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


def _milliseconds(name: str, value: object) -> int:
    if isinstance(value, datetime.timedelta):
        seconds = value.total_seconds()
    elif isinstance(value, str):
        seconds = duration(f"Policy: {name}", value)
    else:
        return _count(name, value)
    if seconds < 0:
        raise InvalidArgumentError(f"Policy: {name}={value!r} is below 0")
    return max(1, round(seconds * 1000)) if seconds else 0


def _size(name: str, value: object) -> int:
    return (
        int(_parse(f"Policy: {name}", value, _BYTES, "500GiB"))
        if isinstance(value, str)
        else _count(name, value)
    )


# Of each tier; the names are those of the settings (proto/holdfast/v1/policy.proto).
_OPTIONS: dict[str, Callable[[str, object], int]] = {
    "every_steps": _count,
    "every_ms": _milliseconds,
    "keep_last": _count,
    "keep_every_steps": _count,
    "bytes_max": _size,
}
