"""What the documents say of `ckptctl plan-capacity`: each command in them runs and prints the lines quoted below
it, the example's figures are what its formulas give, and the settings are such as ckptd takes."""

from __future__ import annotations

import json
import math
import pathlib
import re
import shlex
import subprocess
import tempfile

import pytest
from programs import BIN, DEADLINE_S, ROOT, ckptctl

PROMPT = "$ ckptctl plan-capacity "
PAGES = sorted(
    str(page.relative_to(ROOT))
    for page in [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")]
    if PROMPT in page.read_text()
)


def commands_of(page: str) -> list[tuple[str, list[str]]]:
    """Each command, and the lines quoted below it."""
    found: list[tuple[str, list[str]]] = []
    for block in re.findall(r"^```\w*\n(.*?)^```$", (ROOT / page).read_text(), re.M | re.S):
        quoted: list[str] | None = None  # of a command that is ours
        for line in block.replace("\\\n", " ").splitlines():
            if line.startswith("$ "):
                quoted = [] if line.startswith(PROMPT) else None
                if quoted is not None:
                    found.append((line[2:], quoted))
            elif quoted is not None and line != "…":  # which stands for lines that are left out
                quoted.append(line)
    return found


def answer_of(command: str, *more: str) -> subprocess.CompletedProcess[str]:
    return ckptctl(*shlex.split(command)[1:], *more)


def test_the_pages_are_found() -> None:
    assert {"docs/capacity.md", "docs/ckptctl.md", "docs/tuning.md"} <= set(PAGES)


@pytest.mark.parametrize("page", PAGES)
def test_commands_print_what_is_quoted(page) -> None:
    commands = commands_of(page)
    assert commands
    for command, quoted in commands:
        assert quoted, command
        answer = answer_of(command)
        assert answer.stderr == ""
        lines = iter(answer.stdout.splitlines())
        for line in quoted:
            assert line in lines, f"{command}: not there, or not in this order: {line}"
        fits = "PROBLEM:" not in answer.stdout
        assert answer.returncode == (0 if fits else 1), command
        assert json.loads(answer_of(command, "--json").stdout)["fits"] == fits


def test_problems_of_the_documents_are_quoted() -> None:
    """No recommendation is given that does not fit."""
    for page in PAGES:
        for command, quoted in commands_of(page):
            shown = answer_of(command).stdout.count("PROBLEM:")
            assert shown == sum(line.startswith("PROBLEM:") for line in quoted), command


def test_the_example_by_its_formulas() -> None:
    """docs/capacity.md's formulas, written down again from that page."""
    command, _ = commands_of("docs/capacity.md")[0]
    plan = json.loads(answer_of(command, "--json").stdout)
    state, ranks, a_node, nodes = 100e9 * 14, 80, 8, 10
    image = state / ranks
    slot = math.ceil(image / 2**21) * 2**21
    node = a_node * image
    assert plan["image_bytes"] == image
    assert plan["slots_bytes"] == a_node * 3 * slot
    assert plan["peer_bytes"] == 2 * 1 * a_node * slot
    assert plan["memory_bytes"] == a_node * 5 * slot
    assert plan["nvme_recycle_bytes"] == 4 * image
    assert plan["nvme_budget_bytes"] == math.ceil((node * (2 + 2) + 2 * 4 * image) / 0.9)
    assert plan["remote_capacity_bytes"] == (3 + 1) * state

    save, nvme_interval, remote_interval = 3 * 20, 6 * 20, 600
    copy, peer, nvme = node / 20e9, node / 10e9, node / 7e9
    remote = max(state / 20e9, state / nodes / 1e9)
    for name, time, interval, lag in (
        ("peers", peer, save, copy + peer),
        ("nvme", nvme, nvme_interval, copy + nvme),
        ("remote", remote, remote_interval, copy + nvme + remote),
    ):
        assert plan[name]["time_ms"] == time * 1000
        assert plan[name]["interval_ms"] == interval * 1000
        assert plan[name]["lag_ms"] == lag * 1000
        assert plan[name]["busy"] == pytest.approx(time / interval)
    assert plan["nvme_bytes_a_day"] == node * 86400 / nvme_interval
    assert plan["drive_writes_a_day"] == pytest.approx(node * 86400 / nvme_interval / 15.36e12)
    assert plan["remote_bytes_per_s"] == pytest.approx(state / remote_interval)

    def hours(factor: float) -> float:
        peer_loss = save / 2 * factor + (copy + peer) + (peer + copy)
        return (
            nodes * 365 / 250 * (save / 2 * factor + copy + copy)
            + (nodes * 365 / 500 + nodes * 365 / 1000 + 2 * 365 / 20000) * peer_loss
            + remote_interval / 2 * factor
            + (copy + nvme + remote)
            + (remote + copy)
        ) / 3600

    assert plan["hours_a_year"] == pytest.approx(hours(1))
    assert plan["hours_a_year_twice_as_often"] == pytest.approx(hours(0.5))
    assert plan["hours_a_year_half_as_often"] == pytest.approx(hours(2))


def test_the_figures_in_the_text_are_the_answers() -> None:
    """Of docs/capacity.md's tables: whole bytes, seconds and hours that the text names."""
    text = (ROOT / "docs/capacity.md").read_text()
    command, _ = commands_of("docs/capacity.md")[0]
    plan = json.loads(answer_of(command, "--json").stdout)
    for name in ("slot_bytes", "slots_bytes", "peer_bytes", "memory_bytes"):
        assert f"{plan[name]:,} bytes" in text, name
    assert f"remote: {(plan['remote']['lag_ms'] + plan['remote']['interval_ms']) // 1000} s" in text
    losses = {loss["kind"]: loss for loss in plan["losses"]}
    for kind, shown in (("process", "44 s"), ("reboot", "72 s"), ("all_nodes", "614 s")):
        parts = ("half_interval_ms", "lag_ms", "restore_ms")
        assert f"{sum(losses[kind][part] for part in parts) / 1000:g} s" == shown
        assert f"= {shown}" in text
    assert f"= {plan['hours_a_year']:.2f} h of the whole cluster" in text
    assert f"{plan['hours_a_year_twice_as_often']:.2f} h; with half as often" in text
    assert f"half as often {plan['hours_a_year_half_as_often']:.2f} h." in text


@pytest.mark.parametrize(
    "options",
    [
        ["--replicas", "1", "--nvme-drives", "2", "--remote-keep-every-steps", "1000"],
        [
            "--nvme-every-steps",
            "0",
            "--remote-share-replicas",
            "false",
            "--remote-every-ms",
            "1500ms",
        ],
        ["--nvme-every-ms", "7s", "--remote-every-steps", "100", "--slots-per-rank", "2"],
        ["--nvme-every-steps", "0", "--remote-every-ms", "0"],
    ],
)
def test_ckptd_takes_the_settings(options, tmp_path: pathlib.Path) -> None:
    answer = ckptctl(
        *["plan-capacity", "--state-bytes", "64MB", "--ranks", "8", "--step-time", "1s"],
        *["--rate", "remote-all=1GB/s", "--json", *options],
    )
    assert answer.returncode in (0, 1), answer.stderr
    settings = json.loads(answer.stdout)["settings"]
    assert (
        settings
        in ckptctl(
            *[
                "plan-capacity",
                "--state-bytes",
                "64MB",
                "--ranks",
                "8",
                "--step-time",
                "1s",
                *options,
            ]
        ).stdout
    )
    # Where it will run: its directories, and its memory on this machine's tmpfs.
    settings = settings.replace("/mnt/", f"{tmp_path}/")
    for folder in re.findall(rf"{re.escape(str(tmp_path))}/[\w/]+", settings):
        pathlib.Path(folder).mkdir(parents=True)
    with tempfile.TemporaryDirectory(prefix="hf-ctl-", dir="/dev/shm") as memory:
        config = tmp_path / "ckptd.yaml"
        config.write_text(settings)
        done = subprocess.run(
            [
                *[BIN / "ckptd", "--check-config", f"--config={config}", f"--memory-dir={memory}"],
                *[
                    f"--state-dir={tmp_path}/state",
                    f"--socket={tmp_path}/s",
                    f"--admin={tmp_path}/a",
                ],
            ],
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
        )
    assert done.returncode == 0, done.stderr + settings
