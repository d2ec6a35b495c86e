"""The files that a platform team gets, and the metrics that they name."""

from __future__ import annotations

import json
import pathlib
import re
from collections.abc import Iterator

TREE = pathlib.Path(__file__).resolve().parents[2]
RULES = TREE / "deploy/prometheus/alerts.yaml"
DASHBOARD = TREE / "deploy/grafana/holdfast.json"
ALERTS_DOC = TREE / "docs/alerts.md"
OPERATIONS_DOC = TREE / "docs/operations.md"

# What Grafana puts in their place.
VARIABLES = {
    "$__rate_interval": "5m",
    "$cluster": ".*",
    "$node": ".*",
    "$job": ".*",
}
HISTOGRAM_PARTS = ("_bucket", "_sum", "_count")


def alerts() -> list[str]:
    return re.findall(r"^ *- alert: (\S+)$", RULES.read_text(), re.MULTILINE)


def recorded() -> list[str]:
    return re.findall(r"^ *- record: (\S+)$", RULES.read_text(), re.MULTILINE)


def metrics_in(text: str) -> set[str]:
    """Names of series that it has, those that are recorded too."""
    return set(re.findall(r"\bholdfast[_:][a-z0-9_:]*[a-z0-9]", text))


def panels(dashboard: dict) -> Iterator[dict]:
    """Those that show something: not the rows."""
    for panel in dashboard["panels"]:
        if panel["type"] == "row":
            assert not panel.get("panels"), "rows are open: their panels follow them"
        else:
            yield panel


def dashboard() -> dict:
    return json.loads(DASHBOARD.read_text())


def filled_in(query: str) -> str:
    for variable, value in VARIABLES.items():
        query = query.replace(variable, value)
    assert "$" not in query, f"{query}: which variable is that?"
    return query


def metrics_section() -> str:
    text = OPERATIONS_DOC.read_text()
    begin = text.index("\n## Metrics\n")
    return text[begin : text.index("\n## ", begin + 1)]


def documented() -> dict[str, set[str]]:
    """Of each metric in the tables of docs/operations.md its labels."""
    found: dict[str, set[str]] = {}
    for line in metrics_section().splitlines():
        if line.startswith("| `"):
            for name, labels in re.findall(
                r"`(holdfast_[a-z_]+)(?:\{([a-z_,]+)\})?`", line.split("|")[1]
            ):
                assert name not in found, f"{name} is documented twice"
                found[name] = set(labels.split(",")) if labels else set()
    return found
