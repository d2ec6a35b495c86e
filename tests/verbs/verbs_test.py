"""Shards by verbs: two daemons and soft-RoCE in an emulated machine. inside.py is what is done there; here is what must come of it.

The machine is started once; each of its steps is a test, in their order. What it said is shown when any of them fails.
"""

from __future__ import annotations

import os
import pathlib
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from guests.guest import X86_64, Guest

BIN = pathlib.Path(os.environ["HOLDFAST_TEST_BIN"])
INSIDE = pathlib.Path(__file__).with_name("inside.py")
STEPS = ("shown", "measured", "restored", "dscp", "memlock", "all_devices", "cut", "pulls")
# It takes 10 minutes on a processor that does nothing else.
DEADLINE_S = 3000
# A packet carries 4096 bytes at the most.
PACKET_BYTES = 4096
DSCP = 26
# Of what connects and disconnects; a replica has thousands.
FEW_PACKETS = 100

Facts = dict[str, Any]


@pytest.fixture(scope="module")
def guest(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Guest, Facts]]:
    one = Guest(tmp_path_factory.mktemp("guest"), X86_64)
    answer = one.run([sys.executable, "-B", INSIDE, BIN, *STEPS], deadline_s=DEADLINE_S)
    yield one, answer


@pytest.fixture
def facts(request: pytest.FixtureRequest, guest: tuple[Guest, Facts]) -> Facts:
    """Of the step that the test is named after."""
    one, answer = guest
    step = request.node.name.removeprefix("test_")
    print(one.said())  # shown if it fails
    assert "failed" not in answer[step], answer[step]["failed"]
    return answer[step]


def test_shown(facts: Facts) -> None:
    for node, device in (("n1", "rxe1"), ("n2", "rxe2")):
        shown = facts["shown"][node]
        assert shown["provider"] == "verbs" and not shown["problem"], shown
        (opened,) = shown["devices"]
        assert opened["name"] == device, shown
        # The code reads back what the provider says to others, too.
        asked = facts["fi_info"][device]
        assert sorted(opened["registration"]) == asked["registration"], (opened, asked)
        assert opened["message_bytes_max"] == asked["message_bytes_max"], (opened, asked)
        assert opened["reads_max"] > 1, opened
    # Other than tcp's, which wants nothing: a test of tcp proves nothing for these.
    assert {"LOCAL", "VIRT_ADDR", "PROV_KEY"} <= set(facts["fi_info"]["rxe1"]["registration"])
    assert "REGISTRATION" in facts["people"] and "LOCAL,VIRT_ADDR" in facts["people"], facts


def test_measured(facts: Facts) -> None:
    said = facts["measured"]
    assert said["provider"] == "verbs" and not said["problem"], said
    assert said["bytes_per_s"] > 0 and said["latency_us"] > 0, said
    assert sum(facts["read_responses"].values()) > 0, facts


def test_restored(facts: Facts) -> None:
    assert "NOTHING_TO_RESTORE" in facts["nothing"], facts
    assert facts["copies"] == [[0, "memory", "n1"], [0, "peer", "n2"]], facts
    status = facts["status"]
    kinds = {one["kind"]: one for one in status["protection"]}
    assert (kinds["node"]["step"], kinds["node"]["from"]) == (1, "memory+peer"), status
    assert [one["step"] for one in status["tiers"] if one["tier"] == "peer"] == [1], status
    # The rank has compared every byte.
    assert facts["restored"].startswith("ok attempt=1 step=1 source=peer"), facts
    for packets in (facts["packets_replicated"], facts["packets_restored"]):
        assert packets * PACKET_BYTES > facts["state_bytes"], facts
    assert sum(facts["read_responses"].values()) > 0, facts
    for log in facts["logs"].values():
        assert "own connection" not in log, log


def test_dscp(facts: Facts) -> None:
    """What is said to be in force is what packets have. (libfabric 1.17 leaves it out.)"""
    (device,) = facts["shown"]["n1"]["devices"]
    assert device["name"] == "rxe1", "auto takes verbs"
    assert set(facts["before"]["responses"]) == {str(device["dscp"])}, facts
    told = f"'rxe1' is not given fabric.dscp {DSCP}" in facts["log"]
    assert told == (device["dscp"] != DSCP), facts
    # And what docs/fabric.md says of the system's own setting.
    assert set(facts["with_default_roce_tos"]["responses"]) == {str(DSCP)}, facts
    assert set(facts["with_default_roce_tos"]["requests"]) == {str(DSCP)}, facts


def test_memlock(facts: Facts) -> None:
    assert facts["shown_before"]["provider"] == "verbs", facts
    assert "cannot be pinned; this process may pin 256 KiB" in facts["shown"]["problem"], facts
    assert facts["copies"] == [[0, "memory", "n1"], [0, "peer", "n2"]], facts
    assert facts["restored"].startswith("ok attempt=1 step=1 source=peer"), facts
    assert facts["packets_replicated"] < FEW_PACKETS, facts
    assert facts["packets_restored"] < FEW_PACKETS, facts
    # Of n1's memory for others, and of where it reads into.
    lines = [line for line in facts["log"].splitlines() if "cannot be pinned" in line]
    assert any("shards go over the daemons' own connections" in line for line in lines), lines
    assert any("pull from n2" in line for line in lines), lines
    measured = facts["measured"]
    assert measured["provider"] == "" and measured["bytes_per_s"] > 0, measured
    assert "cannot be registered" in measured["problem"], measured


def test_all_devices(facts: Facts) -> None:
    assert [one["name"] for one in facts["shown"]["devices"]] == ["rxe1", "rxe2"], facts
    assert facts["measured"]["provider"] == "verbs", facts
    assert all(packets > FEW_PACKETS for packets in facts["packets"].values()), facts


def test_cut(facts: Facts) -> None:
    assert facts["peer"] == "ok peer", facts
    assert facts["copies"] == [[0, "memory", "n1"], [0, "peer", "n2"]], facts
    assert facts["measured"]["provider"] == "verbs", facts
    assert "fabric: pull from n1: read from 'n1': " in facts["logs"]["n2"], facts


def test_pulls(facts: Facts) -> None:
    for name in ("pull_test", "pull_faults_test", "fabric_test"):
        assert facts[name]["code"] == 0 and not facts[name]["failed"], facts[name]
        assert facts[name]["passed"], facts[name]
