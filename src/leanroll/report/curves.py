"""Curves of metrics over the steps of a run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from leanroll.report.plots import line_style, plot, step_axis
from leanroll.rundir_metrics import describe_metric

Records = Sequence[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Panel:
    """One plot: a title and the metrics it shows, each with its label. Metrics of one panel have one unit."""

    title: str
    lines: tuple[tuple[str, str], ...]
    note: str = ""


def draw_panel(panel: Panel, records: Records) -> str:
    """The HTML figure; empty when the run has none of the metrics.

    Raises:
        MissingExtra: matplotlib is not installed.
    """
    present = [(name, label) for name, label in panel.lines if any(name in record for record in records)]
    if not present:
        return ""

    def paint(axes: Any) -> None:
        for name, label in present:
            points = [(record["step"], record[name]) for record in records if name in record]
            # The title says what a single line is.
            axes.plot(
                *zip(*points, strict=True), label=label if len(panel.lines) > 1 else None, **line_style(len(points))
            )
        step_axis(axes, records[-1]["step"])

    names = ", ".join(name for name, _ in present)
    note = f"{panel.note} ({names})" if panel.note else names
    return plot(panel.title, paint, note=note, x_label="step", y_label=unit_label(present[0][0]))


def unit_label(name: str) -> str:
    """Unit of a metric for an axis; empty for numbers without dimension."""
    metric = describe_metric(name)
    return "" if metric is None or metric.unit in ("1", "share") else metric.unit


def draw_rewards(records: Records) -> str:
    """Training and held-out reward over steps, the latter with its interval; empty when there is none."""
    training = [(r["step"], r["reward/mean"]) for r in records if "reward/mean" in r]
    held_out = [r for r in records if "eval/reward/mean" in r]
    if not training and not held_out:
        return ""

    def paint(axes: Any) -> None:
        if training:
            axes.plot(*zip(*training, strict=True), label="training", **line_style(len(training)))
        if held_out:
            means = [r["eval/reward/mean"] for r in held_out]
            low = [max(0.0, m - r.get("eval/low_95", m)) for m, r in zip(means, held_out, strict=True)]
            high = [max(0.0, r.get("eval/high_95", m) - m) for m, r in zip(means, held_out, strict=True)]
            steps = [r["step"] for r in held_out]
            axes.errorbar(
                steps, means, [low, high], label="held out", marker="s", markersize=4, capsize=3, linewidth=1.2
            )
        step_axis(axes, records[-1]["step"])

    note = "Mean over completions; held out with its 95 % interval (reward/mean, eval/reward/mean)"
    return plot("Reward", paint, note=note, x_label="step", y_label="reward")


def draw_phases(records: Records) -> str:
    """Time per step, phases on top of each other; empty without steps. The evaluation before training is left out."""
    steps = [r for r in records if r["step"] > 0]
    names = [name for name in _PHASES if any(f"time/{name}_s" in r for r in steps)]
    if not names:
        return ""

    def paint(axes: Any) -> None:
        edges = [r["step"] - 0.5 for r in steps] + [steps[-1]["step"] + 0.5]
        below = [0.0] * len(steps)
        for number, name in enumerate(names):
            top = [base + r.get(f"time/{name}_s", 0.0) for base, r in zip(below, steps, strict=True)]
            axes.stairs(top, edges, baseline=below, fill=True, color=f"C{number}", label=name)
            below = top
        axes.set_ylim(0, None)
        step_axis(axes, records[-1]["step"])

    note = "Wall time of each step, phases stacked (time/<phase>_s)"
    return plot("Time per phase", paint, note=note, x_label="step", y_label="s")


_PHASES = ("rollout", "reward", "score", "update", "measure", "eval", "checkpoint")
