"""Two nodes that keep each other's shards: what their metrics say of the peer tier, and of a node that is lost."""

from __future__ import annotations

from collections.abc import Iterator

import files
import pytest
from node import Node, Rank
from prometheus import Prometheus, free_port, wait_until

JOB = "replicated"
STEPS = 3


@pytest.fixture(scope="module")
def nodes() -> Iterator[list[Node]]:
    """node-0 hosts the job, as the first of the list does."""
    ports = [free_port(), free_port()]
    members = ", ".join(
        f'{{name: node-{i}, address: "127.0.0.1:{port}"}}' for i, port in enumerate(ports)
    )
    made: list[Node] = []
    try:
        for i, port in enumerate(ports):
            settings = (
                f"node_name: node-{i}\n"
                "policy: {replicas: 1}\n"
                f'cluster: {{listen_address: "127.0.0.1:{port}", members: [{members}]}}\n'
            )
            made.append(Node(settings))
            made[-1].start()
        yield made
    finally:
        for one in made:
            one.close()


@pytest.fixture(scope="module", autouse=True)
def prometheus(nodes: list[Node], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    """It has seen how a rank on each node saved."""
    targets = {"holdfast": [node.metrics_address for node in nodes]}
    root = tmp_path_factory.mktemp("prometheus")
    with Prometheus(root, targets, files.RULES.read_text()) as server:
        server.wait_for('count(up{job="holdfast"} == 1) == 2')
        for i, node in enumerate(nodes):
            node.ranks = [Rank(node, JOB, i, 2, "launch")]
        everywhere(nodes, "open", "ok attempt=1")
        everywhere(nodes, "restore", None)  # there is nothing yet
        server.wait_for(f'holdfast_job_ranks_alive{{job_name="{JOB}"}} == 2')
        for step in range(1, STEPS + 1):
            everywhere(nodes, f"save {step}", "ok sealed")
            everywhere(nodes, "tier peer", "ok peer")
        server.wait_for(f'sum(holdfast_step_tier_seconds_count{{tier="peer"}}) == {STEPS}')
        yield server


def everywhere(nodes: list[Node], command: str, answer: str | None) -> None:
    ranks = [rank for node in nodes for rank in node.ranks]
    for rank in ranks:
        rank.send(command)
    answers = [rank.answer() for rank in ranks]
    assert answer is None or answers == [answer] * len(ranks)


def by_node(prometheus: Prometheus, nodes: list[Node], expression: str) -> list[float | None]:
    values = {
        one["metric"]["instance"]: float(one["value"][1]) for one in prometheus.query(expression)
    }
    return [values.get(node.metrics_address) for node in nodes]


def test_replicas_are_counted_where_they_come_to(nodes: list[Node], prometheus: Prometheus) -> None:
    def each_has_what_the_other_saved() -> bool:
        sealed = by_node(prometheus, nodes, "holdfast_sealed_bytes_total")
        replicas = by_node(prometheus, nodes, 'holdfast_fetched_bytes_total{use="replica"}')
        return all(sealed) and replicas == sealed[::-1]

    wait_until("each node has what the other one saved", each_has_what_the_other_saved)
    assert by_node(
        prometheus, nodes, 'holdfast_fetched_bytes_total{tier="peer", use="restore"}'
    ) == [0, 0]
    prometheus.wait_for('count(holdfast_tier_used_bytes{tier="peer"} > 0) == 2')
    assert by_node(prometheus, nodes, 'holdfast_tier_flushing_bytes{tier="peer"}') == [0, 0]


def test_what_concerns_the_job_is_counted_where_it_is_hosted(
    nodes: list[Node], prometheus: Prometheus
) -> None:
    for expression, of_host, of_other in (
        ('holdfast_tier_commits_total{tier="peer"}', STEPS, 0),
        ('holdfast_tier_commits_total{tier="remote"}', 0, 0),
        ("holdfast_step_commit_seconds_count", STEPS, 0),
        ("holdfast_save_seconds_count", STEPS, STEPS),
        (f'holdfast_job_ranks_alive{{job_name="{JOB}"}}', 2, None),
    ):
        assert by_node(prometheus, nodes, expression) == [of_host, of_other], expression


# The last one: a node is lost.
def test_a_lost_node_shows_in_what_the_next_one_would_cost(
    nodes: list[Node], prometheus: Prometheus
) -> None:
    saved = f'holdfast_job_loss_from_timestamp_seconds{{job_name="{JOB}", failure="node"}}'
    of_process = saved.replace('"node"', '"process"')
    before = prometheus.wait_for(saved)[0]["value"][1]
    assert before == prometheus.query(of_process)[0]["value"][1]  # nothing would be lost
    nodes[1].end_ranks()
    nodes[1].kill()

    # The rest is on one node: with it all would be lost since the attempt began, before that save.
    def moved_back() -> bool:
        now = prometheus.query(saved)
        return bool(now) and float(now[0]["value"][1]) < float(before)

    wait_until("less survives the next node", moved_back)
