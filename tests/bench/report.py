"""The table of results."""

from __future__ import annotations

import statistics
import sys
from dataclasses import dataclass, field


@dataclass
class Row:
    what: str
    ours: str
    reference: str
    ratio: float
    median: float | None      # the ratio of the medians, where there are several measurements
    limit: float | None       # none: reported only
    at_least: bool = False    # the limit is a lower one

    @property
    def ok(self) -> bool:
        if self.limit is None:
            return True
        return self.ratio >= self.limit if self.at_least else self.ratio <= self.limit

    def cells(self) -> list[str]:
        bound = "–" if self.limit is None else f"{'≥' if self.at_least else '≤'} {number(self.limit)}"
        mark = "" if self.limit is None else ("✓" if self.ok else "**✗**")
        median = "" if self.median is None else number(self.median)
        return [self.what, self.ours, self.reference, number(self.ratio), median, bound, mark]


@dataclass
class Table:
    rows: list[Row] = field(default_factory=list)

    def add(self, row: Row) -> None:
        self.rows.append(row)
        progress("  " + "; ".join(cell for cell in row.cells() if cell))

    def compare(self, what: str, ours: list[float], reference: list[float], limit: float | None = None) -> None:
        """Milliseconds of both sides, taken in turns. The ratio is that of the fastest ones: what disturbs a
        measurement only ever adds to it."""
        self.add_times(what, min(ours), min(reference), statistics.median(ours) / statistics.median(reference), limit)

    def compare_runs(self, what: str, ours: list[list[float]], reference: list[list[float]],
                     limit: float | None = None) -> None:
        """Runs of several steps: milliseconds per step of a run of which each step is the fastest of its place."""
        def per_step(runs, choose) -> float:
            return statistics.mean(choose(step) for step in zip(*runs))
        median = per_step(ours, statistics.median) / per_step(reference, statistics.median)
        self.add_times(what, per_step(ours, min), per_step(reference, min), median, limit)

    def add_times(self, what: str, ours: float, reference: float, median: float, limit: float | None) -> None:
        self.add(Row(what, f"{number(ours)} ms", f"{number(reference)} ms", ours / reference, median, limit))

    def markdown(self) -> str:
        head = ["measured", "latentd", "reference", "ratio", "of medians", "limit", ""]
        lines = [head, ["---"] * len(head), *(row.cells() for row in self.rows)]
        return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def progress(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def number(value: float) -> str:
    """Three digits; nothing for what was not measured."""
    if value != value:
        return ""
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"
