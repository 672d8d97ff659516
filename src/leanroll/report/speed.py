"""The plot of `leanroll bench`: step time and speed-up by length, measured, predicted, and of other engines."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from leanroll.report.plots import new_figure
from leanroll.rundir import atomic_file

_KINDS = (("dense", "dense", "C0"), ("sparse", "sparse", "C1"))


def speed_figure() -> Any:
    """The empty figure, made before anything is measured. Raises MissingExtra when matplotlib is not installed."""
    return new_figure(10.0, 4.2)


def draw_speed(figure: Any, result: Mapping[str, Any], path: Path) -> None:
    """Draw what `SpeedTable.as_dict` gives into a PNG file, atomically."""
    rows, trajectory = result["rows"], result["trajectory"]
    lengths = [row["length"] for row in rows]
    times, ratio = figure.subplots(1, 2)
    for kind, label, colour in _KINDS:
        middle = [row[f"{kind}_ms"]["median"] for row in rows]
        low, high = ([row[f"{kind}_ms"][q] for row in rows] for q in ("q25", "q75"))
        times.plot(lengths, middle, marker="o", color=colour, label=label)
        times.fill_between(lengths, low, high, color=colour, alpha=0.2, linewidth=0)
        if f"predicted_{kind}_ms" in rows[0]:
            predicted = [row[f"predicted_{kind}_ms"] for row in rows]
            times.plot(lengths, predicted, linestyle="--", color=colour, label=f"{label}, predicted")
    for number, peer in enumerate(result["peers"]):
        steps = {int(length): step["median"] for length, step in peer["step_ms"].items()}
        if steps:
            times.plot(list(steps), list(steps.values()), marker="s", color=f"C{number + 2}", label=peer["name"])
    if any(peer["step_ms"] for peer in result["peers"]):
        times.set_yscale("log")
    else:
        times.set_ylim(bottom=0)
    times.set_ylabel("ms per decode step")
    times.legend(fontsize=8)

    ratio.plot(lengths, [row["speedup"]["median"] for row in rows], marker="o", color="C1", label="measured")
    low, high = ([row["speedup"][q] for row in rows] for q in ("q25", "q75"))
    ratio.fill_between(lengths, low, high, color="C1", alpha=0.2, linewidth=0)
    if "predicted_speedup" in rows[0]:
        predicted = [row["predicted_speedup"] for row in rows]
        ratio.plot(lengths, predicted, linestyle="--", color="C1", label="predicted")
    whole = trajectory["speedup"]["median"]
    span = f"{trajectory['prompt_length']} to {trajectory['max_length']} tokens"
    ratio.axhline(whole, color="0.4", linewidth=1, label=f"{whole:.2f}x over {span}")
    ratio.axhline(1.0, color="0.8", linewidth=1)
    ratio.set_ylim(bottom=0)
    ratio.set_ylabel("dense time / sparse time")
    ratio.legend(fontsize=8)
    for axes in (times, ratio):
        axes.set_xlabel("tokens per sequence")
        axes.grid(alpha=0.25)
    figure.suptitle(f"{result['model']}, {result['schedule']['name']}, batch {result['batch']}", fontsize=10)
    with atomic_file(path, "wb") as file:
        figure.savefig(file, format="png", dpi=130)
