"""A ckptd on each node: what it needs of one, and what it does with one that dies."""

from __future__ import annotations

from .daemon import Daemon
from .network import Network
from .process import KILLED_WITH_ITS_NODE
from .rank import USER, Rank, ask_all, start_ranks

EVERY_STEP = "remote.every_steps=1"


def test_a_job_saved_on_a_node_that_died_is_found_through_remote_by_another(
    network: Network,
) -> None:
    a, b = network.add_node("a"), network.add_node("b")
    Daemon(a).start()
    there = Daemon(b).start()
    ranks = start_ranks([a], "job", per_node=2, policy=EVERY_STEP)
    assert ask_all(ranks, "open") == ["ok attempt=1"] * 2
    assert all("NOTHING_TO_RESTORE" in said for said in ask_all(ranks, "restore"))
    for step in (1, 2):
        assert ask_all(ranks, f"save {step}") == ["ok sealed"] * 2
    assert ask_all(ranks, "tier remote") == ["ok remote"] * 2
    a.kill()
    assert [rank.process.wait() for rank in ranks] == [KILLED_WITH_ITS_NODE] * 2
    again = start_ranks([b], "job", per_node=2, policy=EVERY_STEP)
    assert ask_all(again, "open") == ["ok attempt=2"] * 2
    # The rank compares every bit with what it saved.
    assert all(
        said.startswith("ok attempt=1 step=2 source=remote") for said in ask_all(again, "restore")
    )
    assert ask_all(again, "save 3") == ["ok sealed"] * 2
    assert ask_all(again, "tier remote") == ["ok remote"] * 2
    status = there.ctl("status", "job")
    assert "on b:" in status and "step 3 (attempt 2)" in status, status


def test_a_reboot_takes_memory_and_leaves_the_drive(network: Network) -> None:
    node = network.add_node("a")
    daemon = Daemon(node, {"remote": None}).start()
    rank = Rank(node, "job")
    for command in ("open", "restore", "save 1", "committed", "tier nvme", "save 2", "committed"):
        rank.ask(command)
    daemon.kill()
    daemon.start()
    assert Rank(node, "other").ask("open") == "ok attempt=1"
    rank.kill()
    again = Rank(node, "job")
    assert again.ask("open") == "ok attempt=2"
    assert again.ask("restore") == "ok attempt=1 step=2", "memory outlives the daemon"
    assert again.ask("save 3") == "ok sealed"
    assert again.ask("tier nvme") == "ok nvme"
    node.reboot()
    daemon.start()
    last = Rank(node, "job")
    assert last.ask("open") == "ok attempt=3"
    said = last.ask("restore")
    assert said.startswith("ok attempt=2 step=3 source=nvme") and "rebooted" in said


def test_jobs_belong_to_uids_that_are_the_same_on_all_nodes(network: Network) -> None:
    a, b = network.add_node("a"), network.add_node("b")
    Daemon(a).start()
    Daemon(b).start()
    owner = Rank(a, "job", policy=EVERY_STEP)
    for command in ("open", "restore", "save 1", "tier remote"):
        said = owner.ask(command)
    assert said == "ok remote"
    step = network.remote / "job" / "1-a1" / "shard-00000-of-00001.safetensors"
    assert (step.stat().st_uid, step.parent.stat().st_uid) == (USER, 0)
    assert "REFUSED" in Rank(b, "job", uid=USER + 1).ask("open")
    same = Rank(b, "job")
    assert same.ask("open") == "ok attempt=2"
    assert same.ask("restore").startswith("ok attempt=1 step=1 source=remote")


def test_settings_are_laid_over_section_by_section(network: Network) -> None:
    node = network.add_node("a")
    daemon = Daemon(node, {"nvme": None, "memory": {"slots_per_rank": 2}})
    assert daemon.settings["memory"]["dir"] == "/dev/shm/holdfast"
    assert daemon.settings["memory"]["slots_per_rank"] == 2
    assert "nvme" not in daemon.settings
    assert daemon.start().terminate() == 0
