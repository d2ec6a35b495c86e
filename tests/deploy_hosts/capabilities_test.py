"""Each capability that the unit has is needed: what is missing without it shows.

tests/deploy_hosts/run build/test capabilities_test.py
"""

from __future__ import annotations

import pathlib
import re
from collections.abc import Callable

import pytest
from conftest import TREE
from installed import USER, Host

UNIT = (TREE / "deploy/systemd/ckptd.service.in").read_text()
CAPABILITIES = re.findall("^CapabilityBoundingSet=(.*)$", UNIT, re.MULTILINE)[0].split()


def copies_are_the_users(host: Host, copy: pathlib.Path) -> bool:
    return copy.stat().st_uid == USER


def copies_have_their_mode(host: Host, copy: pathlib.Path) -> bool:
    return copy.stat().st_mode & 0o777 == 0o640


def copies_are_read_again(host: Host, copy: pathlib.Path) -> bool:
    return host.machine.attempt("ckptctl", "verify", "run", "--tier", "nvme").returncode == 0


def threads_get_less_nice(host: Host, copy: pathlib.Path) -> bool:
    host.machine.run("ckptctl", "set", "nvme.nice=0")
    # (The thread has done it, or said that it could not, before it takes up the next copy.)
    rank = host.rank("other", "nvme.every_steps=1")
    rank.do("open", "save 1", "tier nvme")
    rank.end()
    return "the priority stays as it was" not in host.log()


WITH: dict[str, Callable[[Host, pathlib.Path], bool]] = {
    "CAP_CHOWN": copies_are_the_users,
    "CAP_FOWNER": copies_have_their_mode,
    "CAP_DAC_OVERRIDE": copies_are_read_again,
    "CAP_SYS_NICE": threads_get_less_nice,
}


def test_all_are_known() -> None:
    assert sorted(CAPABILITIES) == sorted(WITH)


@pytest.mark.parametrize("missing", ["", *CAPABILITIES])
def test_what_is_missing_without_one(host: Host, missing: str) -> None:
    drive = host.mount("nvme0")
    kept = " ".join(name for name in CAPABILITIES if name != missing)
    host.configure(
        "tiers.conf",
        settings="memory: {bytes_max: 256MiB}\nnvme: {dirs: [/mnt/nvme0/holdfast], bytes_max: 256MiB}\n",
        more=f"CapabilityBoundingSet=\nCapabilityBoundingSet={kept}\n",
    )
    host.start()
    rank = host.rank(settings="nvme.every_steps=1")
    rank.do("open", "save 5", "tier nvme")
    rank.end()
    copy = drive / "holdfast/run/5-a1/0.safetensors"
    for capability, works in WITH.items():
        assert works(host, copy) == (capability != missing), capability
