"""The page of a calibration: schedules, tail against target, mean against tail, the distribution of alpha."""

from __future__ import annotations

import html
import itertools
import json
import math
from pathlib import Path
from typing import Any

from leanroll.errors import ResumeError
from leanroll.report.layout import grid, page, table
from leanroll.report.plots import plot, shade, some_labels
from leanroll.rundir import CALIBRATION, ENVIRONMENT, write_text

_MEASURED = (("fit", "fitted on", "o"), ("held_out", "held out", "s"), ("continuations", "sparse continuations", "^"))


def is_calibration(folder: Path) -> bool:
    """Whether a folder was written by `leanroll calibrate`."""
    return (folder / CALIBRATION).is_file()


def write_calibration_report(folder: Path, output: Path) -> None:
    """Write the page of a calibration folder, atomically.

    Raises:
        ResumeError: no target is finished. MissingExtra: matplotlib is not installed.
    """
    summary = json.loads((folder / CALIBRATION).read_text(encoding="utf-8"))
    targets = summary["targets"]
    if not targets:
        raise ResumeError(f"Calibration {str(folder)!r} has no finished target yet.")
    parts = [
        f"<h1>{html.escape(summary['name'])} <small>{html.escape(summary['model'])}, scorer {summary['scorer']}</small></h1>",
        f"<p>Budgets for which the {_percentile(summary)} of the acceptance rate reaches a target in every length bin, at the "
        f"lower bound of a {100 * summary['confidence']:g} % interval over trajectories. Lengths beyond {summary['max_tokens']} "
        "tokens were not measured: there the schedules read everything.</p>",
        _overview(summary),
        grid(_figures(summary)),
        *(_target_table(summary, result) for result in targets),
        _sources(summary),
    ]
    environment = folder / ENVIRONMENT
    if environment.is_file():
        parts.append(f"<h2>Environment</h2><pre>{html.escape(environment.read_text(encoding='utf-8'))}</pre>")
    write_text(output, page(summary["name"], "\n".join(parts)))


def _overview(summary: dict[str, Any]) -> str:
    head = [
        "target",
        "KV share read",
        "predicted speed-up",
        "measured speed-up",
        "passes",
        "minutes",
        "exhaustive sweep, minutes",
    ]
    rows = []
    for result in summary["targets"]:
        rows.append([
            f"{result['target']:g}", f"{result['kv_share']:.3f}", *speed_cells(result.get("speed")),
            str(result["passes"]), f"{result['seconds'] / 60:.1f}", f"{result['exhaustive_seconds'] / 60:.1f}",
        ])  # fmt: skip
    missing = summary["targets_missing"]
    note = f"<p>Not finished in time: targets {missing}.</p>" if missing else ""
    return table(head, rows) + note


def speed_cells(speed: dict[str, Any] | None) -> tuple[str, str]:
    """Predicted and measured speed-up of a target (`speed` in calibration.json), or why there is none."""
    if speed is None:
        return "none yet", "none yet"
    predicted, measured = f"none ({speed['prediction'] or 'not tried'})", f"none ({speed['reason']})"
    if speed["predicted"] is not None:
        predicted = f"{speed['predicted']:.2f}x"
    if speed["measured"] is not None:
        measured = f"{speed['measured']:.2f}x [{speed['measured_low']:.2f}, {speed['measured_high']:.2f}]"
    return predicted, measured


def speed_line(speed: dict[str, Any]) -> str:
    """Both speed-ups of a target in words, with batch and lengths."""
    predicted, measured = speed_cells(speed)
    if not speed["prediction"]:
        return f"no speed-up measured ({speed['reason']})"
    timed = f" (steps timed at {', '.join(map(str, speed['lengths']))} tokens)" if speed["rows"] else ""
    span = f"at batch {speed['batch']} from {speed['prompt_length']} to {speed['max_length']} tokens"
    return f"speed-up {span} predicted {predicted}, measured {measured}{timed}"


def _speed_table(speed: dict[str, Any] | None) -> str:
    """Step times by length, where they were measured."""
    if speed is None or not speed["rows"]:
        return ""
    head = ["tokens", "pages read", "dense, ms", "sparse, ms", "speed-up", "predicted"]
    rows = []
    for row in speed["rows"]:
        predicted = f"{row['predicted_speedup']:.2f}" if "predicted_speedup" in row else ""
        rows.append([
            str(row["length"]), f"{row['budget']} of {row['num_pages']}", f"{row['dense_ms']['median']:.2f}",
            f"{row['sparse_ms']['median']:.2f}", f"{row['speedup']['median']:.2f}", predicted,
        ])  # fmt: skip
    text = (
        f"Decode steps of {speed['batch']} sequences. The speed-ups of the first table sum them from {speed['prompt_length']} to "
        f"{speed['max_length']} tokens, interpolated between these lengths. Prediction: {speed['prediction']}."
    )
    return f"<p>{html.escape(text)}</p>" + table(head, rows)


def _figures(summary: dict[str, Any]) -> list[str]:
    targets = summary["targets"]
    alphas = [s["tail_low"] for r in targets for name, _, _ in _MEASURED for s in r.get(name, []) if s is not None]
    low = min([*alphas, *(r["target"] for r in targets)]) - 0.02
    figures = [
        plot(
            "Schedules", lambda axes: _draw_schedules(axes, summary), x_label="tokens", y_label="pages read",
            note="KV pages read per token by total length",
        )
    ]  # fmt: skip
    for result in targets:
        figures.append(_tail_figure(summary, result, low))
    figures += [_budget_figure(summary, "tail", "Tail by budget"), _budget_figure(summary, "mean", "Mean by budget")]
    for result in targets:
        figures.append(_distribution_figure(result))
    return figures


def _draw_schedules(axes: Any, summary: dict[str, Any]) -> None:
    edges, size = summary["edges"], summary["page_size"]
    axes.plot([0, edges[-1]], [0, edges[-1] / size], color="0.6", linestyle=":", label="all pages")
    for result in summary["targets"]:
        axes.stairs(result["pages"], edges, label=f"target {result['target']:g}", linewidth=1.8, baseline=None)
    axes.set_xlim(0, edges[-1])
    axes.set_ylim(0, None)


def _tail_figure(summary: dict[str, Any], result: dict[str, Any], low: float) -> str:
    """low: bottom of the axis, the same for all targets."""
    edges = summary["edges"]
    middles = [(left + right) / 2 for left, right in itertools.pairwise(edges)]

    def paint(axes: Any) -> None:
        for shift, (name, label, marker) in enumerate(_MEASURED):
            points = [(x, s) for x, s in zip(middles, result.get(name, []), strict=False) if s is not None]
            if not points:
                continue
            x = [p + (shift - 1) * 0.012 * edges[-1] for p, _ in points]
            y = [s["tail"] for _, s in points]
            # A tail can lie outside its own bootstrap interval in a bin of few trajectories.
            error = [
                [max(0.0, s["tail"] - s["tail_low"]) for _, s in points],
                [max(0.0, s["tail_high"] - s["tail"]) for _, s in points],
            ]
            axes.errorbar(x, y, error, marker=marker, markersize=4, linestyle="none", capsize=2, label=label)
        axes.axhline(result["target"], color="crimson", linewidth=1, label="target")
        axes.set_xlim(0, edges[-1])
        axes.set_ylim(low, 1.005)

    interval = f"{100 * summary['confidence']:g} % interval over trajectories"
    note = f"{_percentile(summary)} of alpha per length bin, with its {interval}"
    title = f"Tail by length, target {result['target']:g}"
    return plot(title, paint, note=note, x_label="tokens", y_label=f"{_percentile(summary)} of alpha")


def _budget_figure(summary: dict[str, Any], statistic: str, title: str) -> str:
    """Every pass of the search: `tail` or `mean` against pages, one line per length bin."""
    edges, passes = summary["edges"], summary["passes"]
    # Both plots have one scale: the mean hardly moves where the tail decides.
    measured = [b for p in passes for b in p["bins"] if b is not None]
    bottom = min([b["tail"] for b in measured] + [r["target"] for r in summary["targets"]]) - 0.02

    def paint(axes: Any) -> None:
        labels = some_labels([f"to {edge - 1}" for edge in edges[1:]])
        for i, label in enumerate(labels):
            points = sorted((p["pages"][i], p["bins"][i][statistic]) for p in passes if p["bins"][i] is not None)
            if points:
                axes.plot(*zip(*points, strict=True), marker=".", linewidth=1, color=shade(i, len(labels)), label=label)
        for result in summary["targets"]:
            axes.axhline(result["target"], color="crimson", linewidth=0.8)
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter("{x:g}")
        axes.set_ylim(bottom, 1.005)

    note = (
        f"Every pass of the search: {statistic if statistic == 'mean' else _percentile(summary)} of alpha; red: targets"
    )
    return plot(title, paint, note=note, x_label="pages read", y_label=f"{statistic} of alpha", legend="tokens")


def _distribution_figure(result: dict[str, Any]) -> str:
    counts, beta = result["histogram"], result["beta"]
    width = 1.0 / len(counts)
    x = [(i + 0.5) * width for i in range(len(counts))]

    def paint(axes: Any) -> None:
        axes.bar(x, counts, width=width, color="0.75", label="measured")
        if beta is not None:
            fitted = [beta["num_tokens"] * width * _beta_density(v, beta["a"], beta["b"]) for v in x]
            label = f"Beta({beta['a']:.2f}, {beta['b']:.2f}), KS {beta['ks']:.3f}"
            axes.plot(x, fitted, color="crimson", linewidth=1.2, label=label)
        axes.set_yscale("log")
        axes.set_ylim(0.5, None)
        axes.set_xlim(0, 1)

    title = f"Distribution of alpha, target {result['target']:g}"
    note = "Tokens of the fit; Beta fitted to those below 0.999"
    return plot(title, paint, note=note, x_label="alpha", y_label="tokens")


def _percentile(summary: dict[str, Any]) -> str:
    return f"{100 * summary['quantile']:g}th percentile"


def _beta_density(x: float, a: float, b: float) -> float:
    log_norm = math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b)
    return math.exp(log_norm + (a - 1) * math.log(x) + (b - 1) * math.log(1 - x))


def _target_table(summary: dict[str, Any], result: dict[str, Any]) -> str:
    edges = summary["edges"]
    head = ["tokens", "pages", *(label for _, label, _ in _MEASURED), "mean", "share > 0.999", "tokens measured"]
    rows = []
    for i, pages in enumerate(result["pages"]):
        cells = []
        for name, _, _ in _MEASURED:
            stats = result.get(name, [None] * len(result["pages"]))[i]
            cells.append(
                "" if stats is None else f"{stats['tail']:.3f} [{stats['tail_low']:.3f}, {stats['tail_high']:.3f}]"
            )
        fit = result["fit"][i]
        rest = (
            ["", "", ""] if fit is None else [f"{fit['mean']:.3f}", f"{fit['share_high']:.2f}", str(fit["num_tokens"])]
        )
        shown = f"{pages} (all)" if i in result["dense_bins"] else str(pages)
        rows.append([f"{edges[i]}-{edges[i + 1] - 1}", shown, *cells, *rest])
    text = f"<h2>Target {result['target']:g}</h2>" + table(head, rows) + _speed_table(result.get("speed"))
    if not result["complete"]:
        text += "<p>Time ran out: undecided bins have the smallest budget that was shown to suffice.</p>"
    paper = result.get("paper")
    if paper:
        text += (
            f"<p>On the same held-out tokens: exact alpha {paper['exact']:.3f}, the paper's reading from top-20 log-probs "
            f"{paper['paper']:.3f}, its ceiling (two identical policies) {paper['ceiling']:.3f}.</p>"
        )
    correlation = result["length_correlation"]
    if correlation:
        text += (
            f"<p>Pearson's r with length: {correlation['per_token']:.2f} for alpha per token ({correlation['num_tokens']} tokens), "
            f"{correlation['per_window']:.2f} for the tail per window of 256 tokens ({correlation['num_windows']} windows).</p>"
        )
    return text


def _sources(summary: dict[str, Any]) -> str:
    rows = [[Path(name).name, "fit"] for name in summary["sources"]]
    rows += [[Path(name).name, "held out"] for name in summary["held_out_sources"]]
    return "<h2>Measured on</h2>" + table(["source", "used for"], rows)
