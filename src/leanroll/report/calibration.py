"""The page of a calibration: schedules, tail against target, mean against tail, the distribution of alpha."""

from __future__ import annotations

import html
import itertools
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from leanroll.errors import ResumeError
from leanroll.report.layout import page, table
from leanroll.report.plots import figure_png, new_figure
from leanroll.rundir import CALIBRATION, ENVIRONMENT, write_text

_MEASURED = (("fit", "fitted on", "o"), ("held_out", "held out", "s"), ("continuations", "sparse continuations", "^"))


def is_calibration(folder: Path) -> bool:
    """Whether a folder was written by `leanroll calibrate`."""
    return (folder / CALIBRATION).is_file()


def write_calibration_report(folder: Path, output: Path) -> None:
    """Write the page of a calibration folder, atomically.

    Raises:
        ResumeError: no target is finished. ConfigError: matplotlib is not installed.
    """
    summary = json.loads((folder / CALIBRATION).read_text(encoding="utf-8"))
    targets = summary["targets"]
    if not targets:
        raise ResumeError(f"Calibration {str(folder)!r} has no finished target yet.")
    percent = f"{100 * summary['quantile']:g}th percentile"
    parts = [
        f"<h1>{html.escape(summary['name'])} <small>{html.escape(summary['model'])}, scorer {summary['scorer']}</small></h1>",
        f"<p>Budgets for which the {percent} of the acceptance rate reaches a target in every length bin, at the lower bound of a "
        f"{100 * summary['confidence']:g} % interval over trajectories. Lengths beyond {summary['max_tokens']} tokens were not "
        "measured: there the schedules read everything.</p>",
        _overview(summary),
        "<h2>Schedules</h2>",
        _image("pages by length, per target", lambda figure: _draw_schedules(figure, summary)),
        "<h2>Tail by length</h2>",
        _image("tail of alpha by length against the target", lambda figure: _draw_tails(figure, summary)),
        "<h2>Mean against tail, by budget</h2>",
        "<p>Every pass of the search: the mean hardly moves where the tail decides.</p>",
        _image("mean and tail of alpha by budget", lambda figure: _draw_budgets(figure, summary)),
        "<h2>Distribution of alpha</h2>",
        _image("histogram of alpha with the Beta fit", lambda figure: _draw_distribution(figure, summary)),
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


def _middles(summary: dict[str, Any]) -> list[float]:
    edges = summary["edges"]
    return [(low + high) / 2 for low, high in itertools.pairwise(edges)]


def _draw_schedules(figure: Any, summary: dict[str, Any]) -> None:
    axes = figure.add_subplot()
    edges, size = summary["edges"], summary["page_size"]
    axes.plot([0, edges[-1]], [0, edges[-1] / size], color="0.6", linestyle=":", label="all pages")
    for result in summary["targets"]:
        axes.stairs(result["pages"], edges, label=f"target {result['target']:g}", linewidth=1.8, baseline=None)
    axes.set_xlabel("tokens")
    axes.set_ylabel("pages read")
    axes.set_ylim(0, None)
    axes.legend()


def _draw_tails(figure: Any, summary: dict[str, Any]) -> None:
    targets, middles = summary["targets"], _middles(summary)
    low = min(s["tail_low"] for r in targets for name, _, _ in _MEASURED for s in r.get(name, []) if s is not None)
    for number, result in enumerate(targets, start=1):
        axes = figure.add_subplot(1, len(targets), number)
        for shift, (name, label, marker) in enumerate(_MEASURED):
            points = [(x, s) for x, s in zip(middles, result.get(name, []), strict=False) if s is not None]
            if not points:
                continue
            x = [p + (shift - 1) * 0.012 * summary["edges"][-1] for p, _ in points]
            y = [s["tail"] for _, s in points]
            error = [[s["tail"] - s["tail_low"] for _, s in points], [s["tail_high"] - s["tail"] for _, s in points]]
            axes.errorbar(x, y, error, marker=marker, markersize=4, linestyle="none", capsize=2, label=label)
        axes.axhline(result["target"], color="crimson", linewidth=1, label="target")
        axes.set_ylim(min(low, min(r["target"] for r in targets)) - 0.02, 1.005)
        axes.set_xlabel("tokens")
        axes.set_title(f"target {result['target']:g}", fontsize=10)
        if number == 1:
            axes.set_ylabel("5th percentile of alpha" if summary["quantile"] == 0.05 else "quantile of alpha")
            axes.legend(fontsize=7)


def _draw_budgets(figure: Any, summary: dict[str, Any]) -> None:
    edges = summary["edges"]
    tails, means = figure.add_subplot(1, 2, 1), figure.add_subplot(1, 2, 2, sharey=None)
    for i in range(len(edges) - 1):
        points = sorted(
            (p["pages"][i], p["bins"][i]["tail"], p["bins"][i]["mean"])
            for p in summary["passes"]
            if p["bins"][i] is not None
        )
        if not points:
            continue
        pages, tail, mean = zip(*points, strict=True)
        shade = 0.15 + 0.75 * i / max(len(edges) - 2, 1)
        for axes, values in ((tails, tail), (means, mean)):
            color = (0.1, 0.75 - 0.65 * shade, shade)
            axes.plot(pages, values, marker=".", linewidth=1, color=color, label=f"to {edges[i + 1] - 1}")
    for axes, title in ((tails, "tail"), (means, "mean")):
        axes.set_xscale("log", base=2)
        axes.set_xlabel("pages read")
        axes.set_title(f"{title} of alpha", fontsize=10)
        for result in summary["targets"]:
            axes.axhline(result["target"], color="crimson", linewidth=0.8)
    bottom = min(axes.get_ylim()[0] for axes in (tails, means))
    for axes in (tails, means):
        axes.set_ylim(bottom, 1.005)
    means.legend(fontsize=7, title="tokens", title_fontsize=7)


def _draw_distribution(figure: Any, summary: dict[str, Any]) -> None:
    targets = summary["targets"]
    for number, result in enumerate(targets, start=1):
        axes = figure.add_subplot(1, len(targets), number)
        counts = result["histogram"]
        width = 1.0 / len(counts)
        x = [(i + 0.5) * width for i in range(len(counts))]
        axes.bar(x, counts, width=width, color="0.75")
        beta = result["beta"]
        if beta is not None:
            axes.plot(x, [beta["num_tokens"] * width * _beta_density(v, beta["a"], beta["b"]) for v in x], color="crimson",
                      label=f"Beta({beta['a']:.2f}, {beta['b']:.2f}), KS {beta['ks']:.3f}")  # fmt: skip
            axes.legend(fontsize=7)
        axes.set_yscale("log")
        axes.set_ylim(0.5, None)
        axes.set_xlabel("alpha")
        axes.set_ylabel("tokens" if number == 1 else "")
        axes.set_title(f"target {result['target']:g}", fontsize=10)


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


def _image(alt: str, draw: Callable[[Any], None], size: Sequence[float] = (9.5, 3.6)) -> str:
    figure = new_figure(*size)
    draw(figure)
    return f'<img alt="{html.escape(alt)}" src="data:image/png;base64,{figure_png(figure)}">'
