"""What the closed loop on the schedule did: budgets by length over steps, and the tails that it went by."""

from __future__ import annotations

from typing import Any

from leanroll.report.curves import Records
from leanroll.report.plots import length_bins, plot, step_axis
from leanroll.report.positions import bin_starts

_PREFIX = "control/bin_"
_MARK_SIZE = 22


def draw_budgets(records: Records) -> str:
    """Pages per length bin over steps, moves marked where they were decided; empty without a closed loop."""
    starts = _seen(records)
    if not starts:
        return ""

    def paint(axes: Any) -> None:
        for start, label, color in length_bins(starts):
            pages = f"{_PREFIX}{start}/pages"
            points = [(r["step"], r[pages], r.get(f"{_PREFIX}{start}/next_pages")) for r in records if pages in r]
            steps, budgets, _ = zip(*points, strict=True)
            axes.step(steps, budgets, where="mid", color=color, linewidth=1.2, label=label)
            for marker, moves in (
                ("^", [(s, b) for s, b, after in points if after is not None and after > b]),
                ("v", [(s, b) for s, b, after in points if after is not None and after < b]),
            ):
                if moves:
                    axes.scatter(*zip(*moves, strict=True), s=_MARK_SIZE, marker=marker, color=color, zorder=3)
        axes.set_yscale("log", base=2)
        axes.yaxis.set_major_formatter("{x:g}")
        step_axis(axes, records[-1]["step"])

    note = (
        "Pages that each bin of total length may read (control/bin_<start>/pages), bins with tokens only. ▲ raised, ▼ lowered "
        "for the next step."
    )
    return plot("Budgets by length", paint, note=note, x_label="step", y_label="pages")


def draw_held_tails(records: Records) -> str:
    """The tail per length bin that moves were decided by, with its target; empty without a closed loop."""
    starts = _seen(records)
    if not starts:
        return ""

    def paint(axes: Any) -> None:
        for start, label, color in length_bins(starts):
            name = f"{_PREFIX}{start}/tail"
            found = [(r["step"], r[name], r[f"{name}_low"]) for r in records if name in r]
            steps, tails, low = zip(*found, strict=True)
            axes.plot(steps, tails, color=color, linewidth=1.2, marker=".", markersize=3.5, label=label)
            axes.plot(steps, low, color=color, linewidth=0.8, linestyle=":")
        targets = [(r["step"], r["control/target"]) for r in records if "control/target" in r]
        axes.plot(*zip(*targets, strict=True), color="crimson", linewidth=1, linestyle="--", label="target")
        step_axis(axes, records[-1]["step"])

    note = (
        "5th percentile of acceptance since the bin came to its budget, and its lower bound (dotted), per bin of total length "
        "(control/bin_<start>/tail, tail_low). A bound under the target raises the budget."
    )
    return plot("Held tail by length", paint, note=note, x_label="step")


def _seen(records: Records) -> list[int]:
    """First lengths of the bins that had tokens in any step."""
    return [s for s in bin_starts(records, _PREFIX) if any(f"{_PREFIX}{s}/tail" in r for r in records)]
