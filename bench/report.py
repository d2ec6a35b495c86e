"""How benchmarks in Python tell their figures, as bench/report.h does."""

from __future__ import annotations

import dataclasses
import json
from typing import Any


@dataclasses.dataclass
class Row:
    """As bench/report.h has it."""

    name: str
    unit: str
    value: float
    ceiling: float = 0.0
    ratio: float = 0.0
    ratio_low: float = 0.0
    ratio_high: float = 0.0
    bar: float = 0.0
    goal: float = 0.0
    higher_is_better: bool = True
    note: str = ""

    @property
    def passes(self) -> bool:
        return self.bar == 0 or (
            self.ratio >= self.bar if self.higher_is_better else self.ratio <= self.bar
        )

    @property
    def margin(self) -> float:
        return self.ratio / self.bar if self.higher_is_better else self.bar / max(self.ratio, 1e-12)

    def to_json(self) -> dict[str, Any]:
        fields = dataclasses.asdict(self)
        del fields["higher_is_better"]
        return {**fields, "pass": self.passes}


def print_report(name: str, rows: list[Row], as_json: bool) -> str:
    """Prints the table and returns the object that --json prints as the last line."""
    print(
        f"{name:<48} {'value':>12} {'ceiling':>12} {'ratio':>9} {'bar':>8} {'goal':>8} {'spread':>21}"
    )
    for row in rows:
        ceiling = f"{row.ceiling:.2f}" if row.ceiling else "-"
        bar, goal = (f"{row.bar:.2f}", f"{row.goal:.2f}") if row.bar else ("-", "-")
        spread = f"{row.ratio_low:.3f}..{row.ratio_high:.3f}"
        verdict = "reported" if not row.bar else "pass" if row.passes else "FAIL"
        print(
            f"{row.name:<48} {row.value:12.3f} {ceiling:>12} {row.ratio:9.3f} {bar:>8} {goal:>8} {spread:>21}"
            f"  {verdict} [{row.unit}] {row.note}"
        )
    worst = min((row for row in rows if row.bar), key=lambda row: row.margin, default=rows[0])
    report = {
        **worst.to_json(),
        "row": worst.name,
        "name": name,
        "pass": all(row.passes for row in rows),
        "rows": [row.to_json() for row in rows],
    }
    text = json.dumps(report)
    if as_json:
        print(text)
    return text
