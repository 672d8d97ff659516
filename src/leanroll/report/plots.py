"""Plots as PNGs inside the page, drawn with matplotlib."""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Sequence
from typing import Any

from leanroll.errors import MissingExtra
from leanroll.report.layout import figure

_WIDTH, _HEIGHT, _DPI = 4.4, 3.0, 180
"""Inches. A plot fills a phone's width, where text of 8 points is as large as the page's captions."""
_MARKED_POINTS = 60
"""Longer lines are drawn without markers."""


def plot(
    title: str,
    paint: Callable[[Any], None],
    *,
    note: str = "",
    x_label: str = "",
    y_label: str = "",
    legend: str | None = None,
) -> str:
    """An HTML figure of one pair of axes.

    paint: draws on the matplotlib axes; what it labels is in the legend below them. legend: its title.

    Raises:
        MissingExtra: matplotlib is not installed.
    """
    drawing = new_figure(_WIDTH, _HEIGHT)
    axes = drawing.add_subplot()
    paint(axes)
    axes.set_xlabel(x_label, fontsize=8)
    axes.set_ylabel(y_label, fontsize=8)
    axes.tick_params(labelsize=8)
    axes.grid(alpha=0.25)
    _legend_below(drawing, axes, legend)
    return figure(title, figure_png(drawing), note)


def step_axis(axes: Any, last: int) -> None:
    """Steps from 0 to `last` on the x axis, so that all plots of a run have the same one."""
    from matplotlib.ticker import MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator(nbins=8, integer=True))
    margin = 0.02 * last + 0.5
    axes.set_xlim(-margin, last + margin)


def line_style(num_points: int) -> dict[str, Any]:
    """Of a curve over steps: thin, with markers where they do not run into each other."""
    return {"linewidth": 1.2, "marker": "." if num_points <= _MARKED_POINTS else None, "markersize": 3.5}


def shade(index: int, count: int) -> Any:
    """Colour of one of `count` ordered series, from dark to light."""
    from matplotlib import colormaps

    return colormaps["viridis"](0.85 * index / max(count - 1, 1))


def some_labels(labels: Sequence[str], at_most: int = 6) -> list[str]:
    """The labels with all but about `at_most`, evenly spread, replaced by none (matplotlib leaves those out of legends)."""
    every = -(-len(labels) // at_most)
    return [label if i % every == 0 or i == len(labels) - 1 else "_" for i, label in enumerate(labels)]


def length_bins(starts: Sequence[int]) -> list[tuple[int, str, Any]]:
    """Per bin of total length: its first length, its label (see `some_labels`) and its colour. starts: ascending."""
    labels = some_labels([f"from {start} tokens" for start in starts])
    return [(start, label, shade(i, len(starts))) for i, (start, label) in enumerate(zip(starts, labels, strict=True))]


def new_figure(width: float, height: float) -> Any:
    """An empty matplotlib figure, in inches.

    Raises:
        MissingExtra: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingExtra(
            "Reports need matplotlib, which is not installed; run `pip install 'leanroll[report]'`."
        ) from error
    # A Figure of its own, without pyplot: no display, no global state.
    return Figure(figsize=(width, height), layout="constrained")


def figure_png(drawing: Any) -> str:
    """Base64 text of the figure as a PNG."""
    buffer = io.BytesIO()
    drawing.savefig(buffer, format="png", dpi=_DPI)
    return base64.b64encode(buffer.getvalue()).decode("ascii")


def _legend_below(drawing: Any, axes: Any, title: str | None) -> None:
    """Below the axes, where it covers no line."""
    handles, labels = axes.get_legend_handles_labels()
    if not handles:
        return
    longest = max(map(len, labels))
    columns = min(len(labels), 4 if longest <= 9 else 3 if longest <= 16 else 2 if longest <= 26 else 1)
    drawing.legend(
        handles, labels, loc="outside lower center", ncols=columns, fontsize=7.5, title=title, title_fontsize=7.5,
        frameon=False, handlelength=1.6, columnspacing=1.2, borderpad=0.0,
    )  # fmt: skip
