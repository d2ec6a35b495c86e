"""A real Prometheus looks at a real ckptd, in which a real job saves: what it sees, and what it says when something goes wrong."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator

import files
import pytest
from node import Node
from prometheus import Prometheus, wait_until

JOB = "llama.7b_run-1"
RANKS = 2
STEPS = 3


def soon(rules: str) -> str:
    """The rules with a second in place of minutes, for what must have lasted a while."""
    hastened, count = re.subn(r"^( +)for: \d+m$", r"\1for: 1s", rules, flags=re.MULTILINE)
    assert count > 0
    return hastened


@pytest.fixture(scope="module")
def node() -> Iterator[Node]:
    one = Node()
    try:
        one.start()
        yield one
    finally:
        one.close()


@pytest.fixture(scope="module", autouse=True)
def prometheus(node: Node, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    """It has seen how a job saved, ended, and went on with what it had."""
    rules = soon(files.RULES.read_text())
    targets = {"holdfast": [node.metrics_address]}
    with Prometheus(tmp_path_factory.mktemp("prometheus"), targets, rules) as server:
        server.wait_for('up{job="holdfast"} == 1')
        node.start_job(JOB, RANKS, 1)
        node.ask("restore")  # there is nothing yet
        for step in range(1, STEPS + 1):
            node.save(step)
            assert node.ask("tier nvme") == ["ok nvme"] * RANKS
            assert node.ask("tier remote") == ["ok remote"] * RANKS
        node.end_ranks()
        node.start_job(JOB, RANKS, 2)
        assert node.ask("restore") == [f"ok attempt=1 step={STEPS}"] * RANKS
        node.ctl("verify", JOB, "--all")  # reads what lies on the drives
        # (What a job shows follows within a second.)
        server.wait_for(f'holdfast_step_tier_seconds_count{{tier="remote"}} == {STEPS}')
        server.wait_for(f'holdfast_job_ranks_alive{{job_name="{JOB}"}} == {RANKS}')
        yield server


def test_promtool_has_nothing_against_the_page(node: Node) -> None:
    done = subprocess.run(
        ["promtool", "check", "metrics"],
        input=node.metrics(),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_every_metric_is_documented_with_its_labels_and_there_is_no_other(node: Node) -> None:
    page = node.metrics()
    kinds = dict(re.findall(r"^# TYPE (holdfast_\S+) (\S+)$", page, re.MULTILINE))
    documented = files.documented()
    assert set(kinds) == set(documented)
    for name, kind in kinds.items():
        series = name + ("_count" if kind == "histogram" else "")
        samples = re.findall(rf"^{series}(?:\{{(.*)\}})? \S+$", page, re.MULTILINE)
        assert samples, name
        for labels in samples:
            assert set(re.findall(r'(\w+)="', labels)) == documented[name], f"{name}{{{labels}}}"


def test_what_the_job_did_is_what_is_counted(node: Node, prometheus: Prometheus) -> None:
    for expression, expected in {
        'holdfast_saves_total{outcome="sealed"}': RANKS * STEPS,
        "holdfast_save_wait_seconds_count": RANKS * STEPS,
        "holdfast_save_seconds_count": RANKS * STEPS,
        'holdfast_steps_total{outcome="committed"}': STEPS,
        "holdfast_step_commit_seconds_count": STEPS,
        'holdfast_step_tier_seconds_count{tier="nvme"}': STEPS,
        'holdfast_drive_writes_total{tier="nvme"}': RANKS * STEPS,
        'holdfast_restore_seconds_count{tier="memory"}': RANKS,
        f'holdfast_job_ranks_alive{{job_name="{JOB}"}}': RANKS,
        f'holdfast_job_tier_lag_seconds{{job_name="{JOB}", tier="remote"}}': 0,
        'holdfast_tier_flushing_bytes{tier="nvme"}': 0,
        "holdfast_cluster_member": 1,
    }.items():
        prometheus.wait_for(f"{expression} == {expected}")
    sealed = prometheus.wait_for("holdfast_sealed_bytes_total > 0")[0]["value"][1]
    prometheus.wait_for(f'holdfast_drive_written_bytes_total{{tier="nvme"}} == {sealed}')
    for metric in ("write_seconds", "read_bytes", "read_seconds"):
        prometheus.wait_for(f'holdfast_drive_{metric}_total{{tier="nvme"}} > 0')


def test_what_would_be_lost_is_counted_from_the_newest_step(prometheus: Prometheus) -> None:
    lost = prometheus.wait_for("holdfast:job_loss_seconds")
    # Each line of the protection table.
    assert {one["metric"]["failure"] for one in lost} == {
        "process",
        "reboot",
        "node",
        "domain",
        "all_nodes",
    }
    for one in lost:
        assert one["metric"]["job_name"] == JOB
        assert 0 <= float(one["value"][1]) < 600  # not since 1970, nor since the machine started


def test_all_rules_can_be_evaluated(prometheus: Prometheus) -> None:
    def evaluated() -> list[dict] | None:
        rules = [rule for group in prometheus.ask("rules")["groups"] for rule in group["rules"]]
        return rules if all(rule["health"] != "unknown" for rule in rules) else None

    rules = wait_until("each rule is evaluated", evaluated)
    assert {rule["name"] for rule in rules} == {*files.alerts(), *files.recorded()}
    for rule in rules:
        assert rule["health"] == "ok", rule


def test_the_dashboards_queries_are_answered(prometheus: Prometheus) -> None:
    for name in files.recorded():
        prometheus.wait_for(name)  # until it has been evaluated
    series = set(prometheus.ask("label/__name__/values"))
    empty: list[str] = []
    for panel in files.panels(files.dashboard()):
        shown = 0
        for target in panel["targets"]:
            query = files.filled_in(target["expr"])
            assert files.metrics_in(query) <= series, query
            shown += len(prometheus.query(query))
        if shown == 0:
            empty.append(panel["title"])
    assert empty == []


def test_a_tier_that_vanishes_fires_its_alert_until_it_is_back(
    node: Node, prometheus: Prometheus
) -> None:
    assert prometheus.firing("HoldfastTierUnhealthy") == []
    away = node.root / "away"
    node.remote.rename(away)
    node.save(STEPS + 1)
    fired = wait_until("the alert", lambda: prometheus.firing("HoldfastTierUnhealthy"))
    assert [one["labels"]["tier"] for one in fired] == ["remote"]
    assert fired[0]["labels"]["severity"] == "warning"
    assert fired[0]["annotations"] == {
        "summary": f"The remote tier of {node.metrics_address} fails",
        "description": "Its operations have failed or hung for 10 minutes. Saves go on; protection by that tier does not advance.",
        "runbook": "docs/alerts.md#holdfasttierunhealthy",
    }
    prometheus.wait_for(f'holdfast_job_tier_steps_waiting{{job_name="{JOB}", tier="remote"}} > 0')
    away.rename(node.remote)
    assert node.ask("tier remote") == ["ok remote"] * RANKS
    wait_until("it is over", lambda: prometheus.firing("HoldfastTierUnhealthy") == [])


# The last one: there is no daemon after it.
def test_a_daemon_that_dies_fires_its_alert(node: Node, prometheus: Prometheus) -> None:
    assert prometheus.firing("HoldfastDaemonDown") == []
    node.kill()
    fired = wait_until("the alert", lambda: prometheus.firing("HoldfastDaemonDown"))
    assert fired[0]["labels"]["severity"] == "critical"
