"""coordinator_plot.py RESULT PICTURE: how the cost of a job's coordinator grows with its ranks, as scripts/bench coordinator
has measured it, for docs/coordinator_bench.svg. RESULT is the object that --json prints."""

from __future__ import annotations

import html
import json
import math
import pathlib
import sys

RANKS_PER_NODE = 8
WIDTH, HEIGHT = 940, 640
LEFT, RIGHT, TOP, BOTTOM = 70, 24, 46, 46
LINE, BAR, GRID, TEXT = "#1f6f8b", "#b5473c", "#dddddd", "#3a3a3a"
PANELS = [
    ("CPU a step", "CPU of one core for a step's bookkeeping, ms"),
    ("CPU to rebuild and choose", "CPU of one core to take the job over and choose a step, ms"),
    ("memory then", "memory of the coordinator then, MB"),
    ("messages a step and node", "messages a step, all nodes together"),
]

Row = dict[str, object]


def points(rows: list[Row], what: str) -> list[tuple[int, Row]]:
    """(ranks, row) of the rows "N ranks: WHAT", in order."""
    found = []
    for row in rows:
        ranks, _, name = str(row["name"]).partition(" ranks: ")
        if name == what:
            found.append((int(ranks), row))
    return sorted(found, key=lambda point: point[0])


def decades(low: float, high: float) -> tuple[int, int]:
    return math.floor(math.log10(low)), math.ceil(math.log10(high))


class Panel:
    """One diagram with logarithmic axes."""

    def __init__(self, at: tuple[float, float], size: tuple[float, float]) -> None:
        self.x0, self.y0 = at[0] + LEFT, at[1] + TOP
        self.width, self.height = size[0] - LEFT - RIGHT, size[1] - TOP - BOTTOM
        self.parts: list[str] = []

    def scale(self, ranks: list[int], values: list[float]) -> None:
        self.ranks = math.log10(ranks[0] / 1.5), math.log10(ranks[-1] * 1.5)
        self.values = decades(min(values), max(values))

    def x(self, ranks: float) -> float:
        low, high = self.ranks
        return self.x0 + (math.log10(ranks) - low) / (high - low) * self.width

    def y(self, value: float) -> float:
        low, high = self.values
        return self.y0 + self.height - (math.log10(value) - low) / (high - low) * self.height

    def line(self, a: tuple[float, float], b: tuple[float, float], style: str) -> None:
        self.parts.append(
            f'<line x1="{a[0]:.1f}" y1="{a[1]:.1f}" x2="{b[0]:.1f}" y2="{b[1]:.1f}" {style}/>'
        )

    def text(self, at: tuple[float, float], text: str, style: str = "") -> None:
        self.parts.append(
            f'<text x="{at[0]:.1f}" y="{at[1]:.1f}" {style}>{html.escape(text)}</text>'
        )

    def frame(self, title: str, ranks: list[int]) -> None:
        self.text((self.x0 - 50, self.y0 - 16), title, 'font-weight="bold"')
        grid = f'stroke="{GRID}" stroke-width="1"'
        for power in range(self.values[0], self.values[1] + 1):
            y = self.y(10**power)
            self.line((self.x0, y), (self.x0 + self.width, y), grid)
            self.text((self.x0 - 8, y + 4), f"{10**power:,g}", 'text-anchor="end"')
        for each in ranks:
            self.line((self.x(each), self.y0), (self.x(each), self.y0 + self.height), grid)
            self.text(
                (self.x(each), self.y0 + self.height + 18), f"{each:,}", 'text-anchor="middle"'
            )
        middle = self.x0 + self.width / 2
        self.text((middle, self.y0 + self.height + 36), "ranks", 'text-anchor="middle"')

    def curve(self, measured: list[tuple[int, float, float, float]]) -> None:
        """(ranks, value, lowest, highest) each."""
        path = " ".join(f"{self.x(r):.1f},{self.y(v):.1f}" for r, v, _, _ in measured)
        self.parts.append(
            f'<polyline points="{path}" fill="none" stroke="{LINE}" stroke-width="2"/>'
        )
        for ranks, value, low, high in measured:
            x = self.x(ranks)
            self.line((x, self.y(low)), (x, self.y(high)), f'stroke="{LINE}" stroke-width="1"')
            self.parts.append(
                f'<circle cx="{x:.1f}" cy="{self.y(value):.1f}" r="3.5" fill="{LINE}"/>'
            )
            told = f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
            self.text((x - 6, self.y(value) - 8), told, f'fill="{LINE}" text-anchor="end"')

    def bar(self, ranks: int, value: float) -> None:
        """What the bench fails above."""
        style = f'stroke="{BAR}" stroke-width="2"'
        self.line((self.x(ranks) - 14, self.y(value)), (self.x(ranks) + 14, self.y(value)), style)
        self.text(
            (self.x(ranks) - 18, self.y(value) + 4),
            f"at most {value:,.0f}",
            f'fill="{BAR}" text-anchor="end"',
        )


def panel(rows: list[Row], what: str, title: str, at: tuple[float, float]) -> list[str]:
    drawn = Panel(at, (WIDTH / 2, HEIGHT / 2))
    measured, bar = [], 0.0
    for ranks, row in points(rows, what):
        nodes = math.ceil(ranks / RANKS_PER_NODE) if "node" in what else 1
        low, high = float(row["ratio_low"]), float(row["ratio_high"])
        measured.append((ranks, float(row["value"]) * nodes, low * nodes, high * nodes))
        bar = float(row.get("bar") or 0)
    all_ranks = [ranks for ranks, _, _, _ in measured]
    values = [each for point in measured for each in point[1:]]
    drawn.scale(all_ranks, [*values, bar] if bar else values)
    drawn.frame(title, all_ranks)
    drawn.curve(measured)
    if bar:
        drawn.bar(all_ranks[-1], bar)
    return drawn.parts


def main() -> None:
    result, picture = map(pathlib.Path, sys.argv[1:])
    rows = json.loads(result.read_text())["rows"]
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        f'font-family="sans-serif" font-size="11" fill="{TEXT}">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
    ]
    for number, (what, title) in enumerate(PANELS):
        parts += panel(rows, what, title, (number % 2 * WIDTH / 2, number // 2 * HEIGHT / 2))
    picture.write_text("\n".join([*parts, "</svg>", ""]))


if __name__ == "__main__":
    main()
