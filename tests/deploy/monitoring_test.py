"""What the Prometheus operator makes of the chart's PodMonitor and PrometheusRule: the alerts about daemons that are missing, and
that they name nodes. A real Prometheus has the operator's part in its settings."""

from __future__ import annotations

import json
import pathlib
import re
import sys
from typing import Any

import rendered
import yaml
from rendered import TREE, merged, only, render

sys.path.append(str(TREE / "tests/observability"))
from prometheus import Prometheus, free_port, wait_until  # noqa: E402

RULES = TREE / "deploy/prometheus/alerts.yaml"


def test_the_rule_is_the_file_that_the_tree_has() -> None:
    (text,) = rendered.objects_of(RULES.read_text())
    assert only(render("everything"), "PrometheusRule")["spec"] == text
    # By which an operator picks it up.
    assert only(render("everything"), "PrometheusRule")["metadata"]["labels"]["release"] == "prometheus"  # fmt: skip


def of_operator(monitor: rendered.Object) -> dict[str, Any]:
    """The scrape job that the operator writes, with the targets that Kubernetes would name: one, and nobody listens there."""
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    metadata = monitor["metadata"]
    snake = re.compile("(?<=[a-z])(?=[A-Z])")
    return {
        "job_name": f"podMonitor/{metadata['namespace']}/{metadata['name']}/0",
        "static_configs": [
            {
                "targets": [f"127.0.0.1:{free_port()}"],
                "labels": {
                    "__meta_kubernetes_namespace": metadata["namespace"],
                    "__meta_kubernetes_pod_name": "holdfast-x7k2p",
                    "__meta_kubernetes_pod_node_name": "gpu-17",
                },
            }
        ],
        "relabel_configs": [
            {"source_labels": ["__meta_kubernetes_pod_name"], "target_label": "pod"},
            {
                "target_label": "job",
                "replacement": f"{metadata['namespace']}/{metadata['name']}",
            },
            *(
                {snake.sub("_", name).lower(): value for name, value in rule.items()}
                for rule in endpoint["relabelings"]
            ),
        ],
    }


def test_a_daemon_that_is_down_is_told_of_by_its_node(tmp_path: pathlib.Path) -> None:
    values = merged(rendered.values_of("everything"), {"fullnameOverride": "checkpoints"})
    objects = rendered.objects_of(rendered.render_text(values))
    rules = yaml.safe_dump(only(objects, "PrometheusRule")["spec"])
    soon = re.sub(r"\bfor: \d+m\b", "for: 1s", rules)
    scrape = of_operator(only(objects, "PodMonitor"))
    with Prometheus(tmp_path, {}, soon, more=[scrape]) as prometheus:
        prometheus.wait_for('up{job="holdfast", instance="gpu-17"} == 0')
        (fired,) = wait_until("the alert fires", lambda: prometheus.firing("HoldfastDaemonDown"))
        assert fired["annotations"]["summary"] == "ckptd on gpu-17 does not answer", fired
        # (Both are judged at once: its group is one.)
        assert prometheus.firing("HoldfastNoDaemons") == []
        panel = json.loads((TREE / "deploy/grafana/holdfast.json").read_text())
        (shown,) = [one for one in panel["panels"] if one["title"] == "Daemons"]
        query = shown["targets"][0]["expr"].replace("$cluster", ".*").replace("$node", ".*")
        assert prometheus.query(query), "the dashboard shows it"
