"""Metrics by position in the completion: curves for parts of a run, and a map over all of its steps."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from leanroll.report.curves import Records
from leanroll.report.plots import plot, step_axis

_AXIS = "position in the completion, tokens"
_THIRDS = 3
_NARROW = 10
"""The first, middle and last stage of a run are each one step in so many."""


def bin_starts(records: Records, prefix: str) -> list[int]:
    """First token of every bin of metrics named `<prefix><start>/…`, ascending."""
    found = {name.removeprefix(prefix).split("/")[0] for r in records for name in r if name.startswith(prefix)}
    return sorted(int(start) for start in found)


@dataclass(frozen=True, slots=True)
class Stage:
    """Some consecutive steps. label: "steps 1–13"."""

    label: str
    records: Records

    @classmethod
    def of(cls, records: Records) -> Stage:
        first, last = records[0]["step"], records[-1]["step"]
        return cls(f"step {first}" if first == last else f"steps {first}–{last}", records)

    def mean(self, prefix: str, start: int, name: str) -> float | None:
        """Mean over the steps that have tokens in the bin, by their number; None without any."""
        key, count = f"{prefix}{start}/{name}", f"{prefix}{start}/tokens"
        found = [(r[key], r[count]) for r in self.records if key in r]
        tokens = sum(number for _, number in found)
        return sum(value * number for value, number in found) / tokens if tokens else None


def thirds(records: Records) -> list[Stage]:
    """The whole run in three parts; fewer in a run of fewer steps."""
    cuts = sorted({number * len(records) // _THIRDS for number in range(_THIRDS + 1)})
    return [Stage.of(records[low:high]) for low, high in itertools.pairwise(cuts)]


def first_middle_last(records: Records) -> list[Stage]:
    """A tenth of the steps, at least one, from the start, the middle and the end; none without steps."""
    if not records:
        return []
    width = max(1, len(records) // _NARROW)
    lows = sorted({0, (len(records) - width) // 2, len(records) - width})
    return [Stage.of(records[low : low + width]) for low in lows]


def measured(records: Records, prefix: str, name: str) -> Records:
    """The steps that have the metric in any bin."""
    return [r for r in records if any(key.startswith(prefix) and key.endswith(f"/{name}") for key in r)]


def draw_by_position(
    title: str,
    stages: Sequence[Stage],
    prefix: str,
    bin_tokens: int,
    lines: Sequence[tuple[str, str]],
    *,
    note: str,
    y_label: str = "",
    from_zero: bool = False,
) -> str:
    """One colour per stage; empty without stages.

    prefix: of the metrics `<prefix><start>/<name>`. lines: name and line style; the first one stands in the legend.
    """
    if not stages:
        return ""
    starts = bin_starts([r for stage in stages for r in stage.records], prefix)

    def paint(axes: Any) -> None:
        for number, stage in enumerate(stages):
            for name, style in lines:
                means = [(start + bin_tokens / 2, stage.mean(prefix, start, name)) for start in starts]
                x, y = zip(*((x, y) for x, y in means if y is not None), strict=True)
                label = stage.label if name == lines[0][0] else None
                axes.plot(x, y, marker=".", linewidth=1.2, linestyle=style, color=f"C{number}", label=label)
        axes.set_xlim(0, starts[-1] + bin_tokens)
        if from_zero:
            axes.set_ylim(0, None)

    return plot(title, paint, note=note, x_label=_AXIS, y_label=y_label)


def draw_position_map(
    title: str, records: Records, prefix: str, bin_tokens: int, name: str, *, note: str, unit: str
) -> str:
    """Colours over steps and positions, from 0; empty unless there are two steps and two bins to compare."""
    found = {r["step"]: r for r in measured(records, prefix, name)}
    starts = bin_starts(list(found.values()), prefix)
    if len(found) < 2 or len(starts) < 2:
        return ""
    steps = range(min(found), max(found) + 1)
    bins = range(0, starts[-1] + 1, bin_tokens)
    values = [[found.get(step, {}).get(f"{prefix}{start}/{name}", math.nan) for step in steps] for start in bins]

    def paint(axes: Any) -> None:
        # Above the grid; where nothing was generated the paper shows.
        mesh = axes.pcolormesh(
            [*(step - 0.5 for step in steps), steps[-1] + 0.5], [*bins, bins[-1] + bin_tokens], values, vmin=0, zorder=2
        )
        bar = axes.figure.colorbar(mesh, ax=axes)
        bar.set_label(unit, fontsize=8)
        bar.ax.tick_params(labelsize=8)
        step_axis(axes, records[-1]["step"])

    return plot(title, paint, note=note, x_label="step", y_label=_AXIS)
