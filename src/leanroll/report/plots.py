"""Curves of metrics over steps, drawn with matplotlib into a PNG."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from leanroll.errors import ConfigError
from leanroll.rundir_metrics import describe_metric

_COLUMNS = 3


@dataclass(frozen=True, slots=True)
class Panel:
    """One plot: a title and the metrics it shows."""

    title: str
    metrics: tuple[str, ...]


def draw_panels(panels: Sequence[Panel], records: Sequence[dict[str, Any]]) -> str:
    """Plot the panels that have data; base64 text of a PNG.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    present = [panel for panel in panels if any(name in record for name in panel.metrics for record in records)]
    rows = max(1, -(-len(present) // _COLUMNS))
    figure = new_figure(4.2 * _COLUMNS, 2.9 * rows)
    for index, panel in enumerate(present):
        axes = figure.add_subplot(rows, _COLUMNS, index + 1)
        for name in panel.metrics:
            points = [(record["step"], record[name]) for record in records if name in record]
            if points:
                axes.plot(*zip(*points, strict=True), marker=".", markersize=3, linewidth=1.2, label=name)
        first = describe_metric(panel.metrics[0])
        axes.set_title(panel.title, fontsize=10)
        axes.set_ylabel("" if first is None or first.unit == "1" else first.unit, fontsize=8)
        axes.set_xlabel("step", fontsize=8)
        axes.tick_params(labelsize=8)
        axes.grid(alpha=0.25)
        axes.legend(fontsize=7)
    return figure_png(figure)


def new_figure(width: float, height: float) -> Any:
    """An empty matplotlib figure, in inches.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError(
            "Reports need matplotlib, which is not installed; run `pip install 'leanroll[report]'`."
        ) from error
    # A Figure of its own, without pyplot: no display, no global state.
    return Figure(figsize=(width, height), layout="constrained")


def figure_png(figure: Any) -> str:
    """Base64 text of the figure as a PNG."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=110)
    return base64.b64encode(buffer.getvalue()).decode("ascii")
