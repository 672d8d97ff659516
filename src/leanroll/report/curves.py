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
    """One plot: a title and the metrics it shows, each with its label. Metrics of one panel have one unit.

    dashed: names among them that are a limit or a reference. from_zero: the axis starts there.
    """

    title: str
    lines: tuple[tuple[str, str], ...]
    note: str = ""
    dashed: tuple[str, ...] = ()
    from_zero: bool = False


LENGTHS = (
    ("completion_length/mean", "mean"),
    ("completion_length/p50", "median"),
    ("completion_length/max", "longest"),
)
GRADIENT = Panel("Gradient norm", (("grad_norm", "before clipping"),))
SPEED = Panel("Speed of rollouts", (("tokens_per_second", "generated"),))
PHASES = ("rollout", "reward", "teacher", "score", "update", "measure", "probe", "eval", "checkpoint")
"""Of a training step, in order."""


@dataclass(frozen=True, slots=True)
class Reference:
    """A held-out reward to compare with, and its 95 % interval. label: whose, "teacher" say."""

    label: str
    mean: float
    low: float
    high: float


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
            style = line_style(len(points))
            if name in panel.dashed:
                style |= {"linestyle": "--", "color": "0.35", "marker": None}
            # The title says what a single line is.
            axes.plot(*zip(*points, strict=True), label=label if len(panel.lines) > 1 else None, **style)
        step_axis(axes, records[-1]["step"])
        if panel.from_zero:
            axes.set_ylim(0, 1.05 * axes.get_ylim()[1])  # a flat line would lie on the frame

    names = ", ".join(name for name, _ in present)
    note = f"{panel.note} ({names})" if panel.note else names
    return plot(panel.title, paint, note=note, x_label="step", y_label=unit_label(present[0][0]))


def unit_label(name: str) -> str:
    """Unit of a metric for an axis; empty for numbers without dimension."""
    metric = describe_metric(name)
    return "" if metric is None or metric.unit in ("1", "share") else metric.unit


def rewards_by_name(records: Records, prefix: str, note: str) -> Panel:
    """Of metrics `<prefix><name>`; without lines where there is only one reward, which is the total's plot."""
    names = sorted({name.removeprefix(prefix) for r in records for name in r if name.startswith(prefix)} - {*_TOTALS})
    lines = tuple((prefix + name, name) for name in names) if len(names) > 1 else ()
    return Panel("Rewards by name", lines, note)


_TOTALS = ("mean", "std", "min", "max")


def draw_rewards(records: Records, reference: Reference | None = None) -> str:
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
            color = "C1" if training else "C0"
            axes.errorbar(
                steps, means, [low, high], label="held out", marker="s", markersize=4, capsize=3, linewidth=1.2, color=color
            )  # fmt: skip
            bottom, top = ([r.get(key, m) for m, r in zip(means, held_out, strict=True)] for key in _INTERVAL)
            axes.fill_between(steps, bottom, top, color=color, alpha=0.12, linewidth=0)
        if reference is not None:
            axes.axhline(reference.mean, color="crimson", linewidth=1.2, linestyle="--", label=reference.label)
            axes.axhspan(reference.low, reference.high, color="crimson", alpha=0.1, linewidth=0)
        step_axis(axes, records[-1]["step"])

    names = [name for name, found in (("reward/mean", training), ("eval/reward/mean", held_out)) if found]
    note = f"Mean over completions; held out with its 95 % interval ({', '.join(names)})"
    if reference is not None:
        note += f". Dashed: {reference.label}, with its 95 % interval"
    return plot("Reward", paint, note=note, x_label="step", y_label="reward")


_INTERVAL = ("eval/low_95", "eval/high_95")


def draw_phases(records: Records) -> str:
    """Time per step, phases on top of each other; empty without steps. The evaluation before training is left out."""
    steps = [r for r in records if r["step"] > 0]
    names = [name for name in PHASES if any(f"time/{name}_s" in r for r in steps)]
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
