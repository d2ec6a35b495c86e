"""Alerts, recorded series and the dashboard as files: each is well formed, documented, and fires when it should."""

from __future__ import annotations

import json
import pathlib
import re
import subprocess

import files
import pytest
from alert_cases import CASES, Case

PROMTOOL_S = 60


def promtool(*words: str | pathlib.Path) -> str:
    done = subprocess.run(
        ["promtool", *words],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=PROMTOOL_S,
    )
    assert done.returncode == 0, f"promtool {words[0]} {words[1]}: {done.stdout}{done.stderr}"
    return done.stdout


def unit_tests(tmp_path: pathlib.Path, tests: list[dict]) -> None:
    path = tmp_path / "tests.yaml"  # JSON is YAML, too
    path.write_text(
        json.dumps({"rule_files": [str(files.RULES)], "evaluation_interval": "1m", "tests": tests})
    )
    promtool("test", "rules", path)


def series(values: dict[str, str]) -> list[dict]:
    return [{"series": name, "values": text} for name, text in values.items()]


def test_the_rules_are_well_formed() -> None:
    assert "SUCCESS" in promtool("check", "rules", files.RULES)


def test_each_alert_has_its_case_and_its_section() -> None:
    alerts = files.alerts()
    assert len(alerts) == len(set(alerts)) > 0
    assert sorted(case.alert for case in CASES) == sorted(alerts)
    sections = re.findall(r"^## (\S+)$", files.ALERTS_DOC.read_text(), re.MULTILINE)
    assert sections == alerts, "docs/alerts.md: one section for each, in the rules' order"


def test_each_section_says_what_to_do() -> None:
    for section in files.ALERTS_DOC.read_text().split("\n## ")[1:]:
        name = section.splitlines()[0]
        marks = re.findall(r"^\*\*(\w+):\*\* \S", section, re.MULTILINE)
        assert marks == ["Means", "See", "Do"], f"docs/alerts.md, {name}"


def test_links_of_the_page_lead_somewhere() -> None:
    for page, anchor in re.findall(
        r"\]\(([a-z]*(?:\.md)?)#([a-z0-9-]+)\)", files.ALERTS_DOC.read_text()
    ):
        text = (files.ALERTS_DOC.parent / (page or "alerts.md")).read_text()
        anchors = {
            re.sub(r"[^a-z0-9 -]", "", heading.lower()).replace(" ", "-")
            for heading in re.findall(r"^#+ (.+)$", text, re.MULTILINE)
        }
        assert anchor in anchors, f"docs/alerts.md: no {page}#{anchor}"


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.alert)
def test_an_alert_fires_and_says_why(case: Case, tmp_path: pathlib.Path) -> None:
    expected = {
        "exp_labels": {**case.labels, "severity": case.severity},
        "exp_annotations": {
            "summary": case.summary,
            "description": case.description,
            "runbook": f"docs/alerts.md#{case.alert.lower()}",
        },
    }
    fires = {"eval_time": f"{case.at}m", "alertname": case.alert, "exp_alerts": [expected]}
    at_first = {"eval_time": "0m", "alertname": case.alert, "exp_alerts": []}
    unit_tests(
        tmp_path,
        [
            {
                "interval": "1m",
                "input_series": series(case.fires),
                "alert_rule_test": [at_first, fires],
            }
        ],
    )


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.alert)
def test_an_alert_is_quiet_without_its_cause(case: Case, tmp_path: pathlib.Path) -> None:
    assert case.quiet
    unit_tests(
        tmp_path,
        [
            {
                "interval": "1m",
                "input_series": series(quiet),
                "alert_rule_test": [
                    {"eval_time": f"{minute}m", "alertname": case.alert, "exp_alerts": []}
                    for minute in range(case.at + 1)
                ],
            }
            for quiet in case.quiet
        ],
    )


def test_what_a_drive_does_is_recorded_while_it_works(tmp_path: pathlib.Path) -> None:
    labels = '{tier="nvme", directory="/mnt/0"}'
    unit_tests(
        tmp_path,
        [
            {  # 600 MB a minute, in 12 s of it, up to minute 10
                "interval": "1m",
                "input_series": series(
                    {
                        f"holdfast_drive_written_bytes_total{labels}": "0+600000000x10 6000000000x20",
                        f"holdfast_drive_write_seconds_total{labels}": "0+12x10 120x20",
                        f"holdfast_drive_read_bytes_total{labels}": "0+60000000x10 600000000x20",
                        f"holdfast_drive_read_seconds_total{labels}": "0+30x10 300x20",
                    }
                ),
                "promql_expr_test": [
                    {
                        "expr": f"round(holdfast:drive_{way}_bytes_per_second)",
                        "eval_time": "8m",
                        "exp_samples": [{"labels": labels, "value": rate}],
                    }
                    for way, rate in (("write", 50000000), ("read", 2000000))
                ]
                + [
                    {
                        "expr": "holdfast:drive_write_bytes_per_second",
                        "eval_time": "25m",
                        "exp_samples": [],
                    }
                ],
            }
        ],
    )


def test_the_files_name_only_metrics_that_are_documented() -> None:
    known = set(files.recorded())
    for name in files.documented():
        known.update([name, *(name + part for part in files.HISTOGRAM_PARTS)])
    for path in (files.RULES, files.DASHBOARD, files.ALERTS_DOC):
        assert files.metrics_in(path.read_text()) - known == set(), path


def test_the_dashboard_asks_its_five_questions() -> None:
    board = files.dashboard()
    rows = [panel["title"] for panel in board["panels"] if panel["type"] == "row"]
    assert rows == [
        "What would I lose now?",
        "How long do saves block, and take?",
        "How far does each tier lag?",
        "Which node or drive is slow?",
        "Is anything corrupt?",
    ]
    assert {variable["name"] for variable in board["templating"]["list"]} == {
        "datasource",
        "cluster",
        "node",
        "job",
    }


def test_the_dashboards_panels_are_whole() -> None:
    board = files.dashboard()
    ids = [panel["id"] for panel in board["panels"]]
    assert len(ids) == len(set(ids))
    taken: set[tuple[int, int]] = set()
    for panel in board["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert place["x"] + place["w"] <= 24 and not cells & taken, panel["title"]
        taken |= cells
    for panel in files.panels(board):
        assert panel["datasource"]["uid"] == "${datasource}", panel["title"]
        assert panel["description"] and panel["fieldConfig"]["defaults"]["unit"], panel["title"]
        assert panel["targets"], panel["title"]
        for target in panel["targets"]:
            assert "$node" in target["expr"] and "$cluster" in target["expr"], panel["title"]


def test_a_panel_shows_what_its_axis_is_of() -> None:
    for panel in files.panels(files.dashboard()):
        defaults = panel["fieldConfig"]["defaults"]
        kind = {"bytes": "bytes", "Bps": "bytes", "s": "seconds"}.get(defaults["unit"], "")
        for target in panel["targets"]:
            assert kind in target["expr"], f"{panel['title']}: {target['expr']}"
