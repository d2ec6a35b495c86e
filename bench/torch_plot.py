"""torch_plot.py RESULT PICTURE: bars of what scripts/bench torch has measured, for docs/torch_bench.png."""

from __future__ import annotations

import json
import pathlib
import sys

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot  # noqa: E402

OURS, OTHERS, COPY = "#1f6f8b", "#b9b9b9", "#3a3a3a"


def bars(axes, rows: list[dict], state: str, kind: str) -> None:
    """The rows "STATE: KIND, WAY", and the plain copy beside them."""
    prefix = f"{state}: {kind}, "
    shown = [
        (row["name"].removeprefix(prefix), row)
        for row in rows
        if row["name"].startswith(prefix) and not row["ceiling"]  # a time, no ratio
    ]
    shown += [("plain copy", row) for row in rows if row["name"] == f"{state}: plain copy"]
    shown.reverse()
    values = [row["value"] for _, row in shown]
    colors = [
        COPY
        if name == "plain copy"
        else OURS
        if "Checkpointer" in name or "holdfast" in name
        else OTHERS
        for name, _ in shown
    ]
    low = [row["value"] - row["ratio_low"] for _, row in shown]
    high = [row["ratio_high"] - row["value"] for _, row in shown]
    axes.barh(
        [name for name, _ in shown],
        values,
        color=colors,
        xerr=[low, high],
        error_kw={"elinewidth": 0.8, "ecolor": "#777777"},
    )
    for place, (_, row) in enumerate(shown):
        axes.annotate(
            f"{row['value']:,.0f} ms" if row["value"] >= 10 else f"{row['value']:.1f} ms",
            (row["ratio_high"], place), xytext=(4, 0), textcoords="offset points", va="center", fontsize=8,
        )  # fmt: skip
    axes.set_xscale("log")
    axes.set_xlim(left=min(values) / 2, right=max(row["ratio_high"] for _, row in shown) * 6)
    titles = {
        "blocked": "the loop stands still",
        "durable": "until on the drive",
        "restore": "restore",
    }
    axes.set_title(f"{state}: {titles[kind]}", fontsize=10)
    axes.tick_params(labelsize=8)
    axes.spines[["top", "right"]].set_visible(False)


def main() -> None:
    result, picture = map(pathlib.Path, sys.argv[1:])
    rows = json.loads(result.read_text())["rows"]
    end = ": plain copy"  # of the states that are saved in all ways
    states = [row["name"].removesuffix(end) for row in rows if row["name"].endswith(end)]
    kinds = ["blocked", "durable", "restore"]
    figure, grid = pyplot.subplots(len(kinds), len(states), figsize=(12, 9), squeeze=False)
    for across, state in enumerate(states):
        for down, kind in enumerate(kinds):
            bars(grid[down][across], rows, state, kind)
    figure.suptitle(
        "scripts/bench torch: median milliseconds (logarithmic), with the best and the worst round; shorter is better",
        fontsize=11,
    )
    figure.tight_layout()
    figure.savefig(picture, dpi=110)


if __name__ == "__main__":
    main()
