"""The page of a profile: findings, and before training KL and entropies by position, N, the teacher's decay, the cost of a step
(after training: `report.profile_run`)."""

from __future__ import annotations

import html
import json
from pathlib import Path
from typing import Any

from leanroll.report.layout import grid, page, table
from leanroll.report.plots import plot
from leanroll.report.profile_run import run_overview, run_parts, run_title
from leanroll.rundir import CONFIG, ENVIRONMENT, PROFILE, write_text

_DECAY = (
    ("continued", "A(k), student's prefix", "C0", "o"),
    ("own_prefix", "teacher's own prefix", "C2", "s"),
    ("at_zero", "A(0), teacher alone", "0.45", "D"),
    ("student", "student alone", "C3", "v"),
)


def is_profile(folder: Path) -> bool:
    """Whether a folder was written by `leanroll profile`."""
    return (folder / PROFILE).is_file()


def write_profile_report(folder: Path, output: Path) -> None:
    """Write the page of a profile's folder, of either kind, atomically.

    Raises:
        MissingExtra: matplotlib is not installed.
    """
    found = json.loads((folder / PROFILE).read_text(encoding="utf-8"))
    if found.get("kind") == "after":
        title, overview, parts = run_title(found), run_overview(found), run_parts(found)
    else:
        title = f"profile of {found['model']}, teacher: {found['teacher']}"
        overview = _overview(found)
        parts = ["<h2>Curves</h2>", grid(_figures(found)), _decay_table(found), _cost_table(found)]
    parts = [
        f"<h1>{html.escape(found['name'])} <small>{html.escape(title)}</small></h1>",
        overview,
        "<h2>Findings</h2>",
        table(
            ["what", "", "finding"],
            [[f["name"], f["level"], f["text"]] for f in sorted(found["findings"], key=_weight)],
        ),
        *parts,
    ]
    for heading, name in (("Recipe", CONFIG), ("Environment", ENVIRONMENT)):
        file = folder / name
        if file.is_file():
            parts.append(f"<h2>{heading}</h2><pre>{html.escape(file.read_text(encoding='utf-8'))}</pre>")
    write_text(output, page(f"{found['name']} profile", "\n".join(parts)))


def _weight(finding: dict[str, Any]) -> int:
    return ("error", "warning", "ok").index(finding["level"])


def _overview(found: dict[str, Any]) -> str:
    choice, lengths, costs = found["choice"], found["lengths"], found["costs"]
    interval = "" if choice["low"] is None else f" [{choice['low']}, {choice['high']}]"
    short, full = costs[0], costs[-1]
    rows = [
        [
            "proposed N, tokens",
            f"{choice['num_tokens']}{interval}",
            f"first tokens with {choice['share']:.0%} of the total KL",
        ],
        ["knee, tokens", "" if choice["knee"] is None else str(choice["knee"]), "where the cumulative KL bends most"],
    ]
    if found["decay"] is not None:
        threshold = found["decay"]["threshold"]
        why = "none, see the findings; " if threshold is None else ""
        rows.append([
            "decay threshold, tokens", "" if threshold is None else str(threshold),
            why + f"largest k at which the teacher has lost at most {found['delta']:.0%} of its lead",
        ])  # fmt: skip
    rows += [
        ["length of full completions", f"{lengths['p50']:.0f} [{lengths['p10']:.0f}, {lengths['p90']:.0f}]",
         f"median, 10th and 90th percentile of {lengths['num']}; {lengths['capped_share']:.0%} were cut at "
         f"{found['max_completion_length']}"],
        ["seconds per step at N", f"{short['step_s']:.2f}", f"forecast; {full['step_s'] / short['step_s']:.1f}x as fast as full"],
        ["seconds per step, full", f"{full['step_s']:.2f}", ""],
    ]  # fmt: skip
    return table(["", "", ""], rows)


def _figures(found: dict[str, Any]) -> list[str]:
    curves, level = found["curves"], f"{found['curves']['level']:.0%}"
    width = curves["bin_tokens"]
    note = f"Mean over the tokens of {width} positions each, with its {level} interval over completions"
    figures = [
        plot(
            "KL by position", lambda axes: _curves(axes, found, {"reverse_kl": "KL(student ‖ teacher)"}),
            note=f"{note}; line: N", x_label="position", y_label="nats",
        ),
        plot(
            "Entropies by position",
            lambda axes: _curves(axes, found, {"student_entropy": "student", "teacher_entropy": "teacher"}),
            note=note, x_label="position", y_label="nats",
        ),
        plot(
            "Completions by position", lambda axes: _counts(axes, curves),
            note=f"n_t: completions with a token in the {width} positions; later curves rest on few", x_label="position",
            y_label="completions",
        ),
        plot(
            "Cumulative KL", lambda axes: _cumulative(axes, found),
            note="Share of the KL of all completions in the first tokens; shaded: interval of N", x_label="tokens", y_label="share",
        ),
    ]  # fmt: skip
    if found["decay"] is not None:
        figures.append(
            plot(
                "Teacher decay", lambda axes: _decay(axes, found),
                note=f"Mean reward with its {level} interval, on the prompts whose student completion is longer than k",
                x_label="k, tokens of prefix", y_label="reward",
            )
        )  # fmt: skip
    figures.append(
        plot(
            "Seconds per step", lambda axes: _phases(axes, found["costs"]), note="Forecast from the rates of this profile",
            x_label="tokens per completion at most", y_label="s",
        )
    )  # fmt: skip
    return figures


def _curves(axes: Any, found: dict[str, Any], names: dict[str, str]) -> None:
    curves = found["curves"]
    middles = [start + (curves["bin_tokens"] - 1) / 2 for start in curves["starts"]]
    for name, label in names.items():
        curve = curves[name]
        (line,) = axes.plot(middles, curve["mean"], label=label, linewidth=1.4, marker=".", markersize=4)
        known = [i for i, low in enumerate(curve["low"]) if low is not None]
        axes.fill_between(
            [middles[i] for i in known], [curve["low"][i] for i in known], [curve["high"][i] for i in known],
            color=line.get_color(), alpha=0.2, linewidth=0,
        )  # fmt: skip
    axes.axvline(found["choice"]["num_tokens"], color="crimson", linewidth=1)
    axes.set_ylim(0, None)
    axes.set_xlim(0, None)


def _counts(axes: Any, curves: dict[str, Any]) -> None:
    edges = [*curves["starts"], curves["starts"][-1] + curves["bin_tokens"]]
    axes.stairs(curves["num_trajectories"], edges, fill=True, color="0.7")
    axes.set_xlim(0, edges[-1])
    axes.set_ylim(0, None)


def _cumulative(axes: Any, found: dict[str, Any]) -> None:
    shares, choice = [0.0, *found["cumulative_kl"]], found["choice"]
    axes.plot(range(len(shares)), shares, linewidth=1.6)
    axes.plot([0, len(shares) - 1], [0, 1], color="0.6", linestyle=":", label="even spread")
    if choice["low"] is not None:
        axes.axvspan(choice["low"], choice["high"], color="crimson", alpha=0.12, linewidth=0)
    axes.axvline(choice["num_tokens"], color="crimson", linewidth=1.2, label=f"N = {choice['num_tokens']}")
    axes.axhline(choice["share"], color="crimson", linewidth=0.6, linestyle="--")
    if choice["knee"] is not None:
        axes.axvline(choice["knee"], color="C1", linewidth=1.2, linestyle="-.", label=f"knee {choice['knee']}")
    axes.set_xlim(0, len(shares) - 1)
    axes.set_ylim(0, 1.02)


def _decay(axes: Any, found: dict[str, Any]) -> None:
    points = found["decay"]["points"]
    span = max(points[-1]["k"], 1)
    for number, (name, label, color, marker) in enumerate(_DECAY):
        known = [p for p in points if p[name]["mean"] is not None]
        # Side by side, so that no interval hides another.
        x = [p["k"] + (number - 1.5) * 0.012 * span for p in known]
        mean = [p[name]["mean"] for p in known]
        low = [max(0.0, p[name]["mean"] - p[name]["low"]) for p in known]
        high = [max(0.0, p[name]["high"] - p[name]["mean"]) for p in known]
        axes.errorbar(
            x,
            mean,
            [low, high],
            label=label,
            color=color,
            marker=marker,
            markersize=4,
            linewidth=1.2,
            elinewidth=0.8,
            capsize=2,
        )
    if found["decay"]["threshold"] is not None:
        axes.axvline(found["decay"]["threshold"], color="0.3", linewidth=0.8, linestyle=":", label="threshold")


def _phases(axes: Any, costs: list[dict[str, Any]]) -> None:
    labels = [str(cost["num_tokens"]) for cost in costs]
    bottom = [0.0] * len(costs)
    for name, label in (("rollout_s", "rollout"), ("teacher_s", "teacher"), ("update_s", "update (estimated)")):
        axes.bar(labels, [cost[name] for cost in costs], bottom=bottom, width=0.5, label=label)
        bottom = [below + cost[name] for below, cost in zip(bottom, costs, strict=True)]


def _decay_table(found: dict[str, Any]) -> str:
    decay = found["decay"]
    if decay is None:
        return ""
    head = ["k", "prompts", *(label for _, label, _, _ in _DECAY), "A(k) - A(0)"]
    rows = [
        [
            str(p["k"]),
            str(p["num_prompts"]),
            *(_interval(p[name]) for name, _, _, _ in _DECAY),
            _interval(p["difference"]),
        ]
        for p in decay["points"]
    ]
    text = "<h2>Teacher decay</h2>" + table(head, rows)
    kinds = sorted({kind for p in decay["points"] for kind in p["by_kind"]})
    if kinds:
        rows = [[kind, *(_kind_cell(p["by_kind"].get(kind)) for p in decay["points"])] for kind in kinds]
        text += (
            "<p>By kind of prompt: mean reward after the student's tokens / after the teacher's own, (prompts). Where the "
            "first falls and the second does not, the student's beginning puts the constraint out of reach.</p>"
        ) + table(["kind", *(f"k = {p['k']}" for p in decay["points"])], rows)
    return text


def _kind_cell(kind: dict[str, Any] | None) -> str:
    return "" if kind is None else f"{kind['continued']:.2f} / {kind['own_prefix']:.2f} ({kind['num_prompts']})"


def _interval(value: dict[str, Any]) -> str:
    return "" if value["mean"] is None else f"{value['mean']:.3f} [{value['low']:.3f}, {value['high']:.3f}]"


def _cost_table(found: dict[str, Any]) -> str:
    step, rates = found["step"], found["rates"]
    head = [
        "tokens at most", "generated", "teacher inputs", "student inputs", "rollout, s", "teacher, s", "update, s", "step, s",
    ]  # fmt: skip
    rows = [
        [
            str(c["num_tokens"]), *(f"{c[name]:,.0f}" for name in ("generated", "teacher_inputs", "student_inputs")),
            *(f"{c[name]:.2f}" for name in ("rollout_s", "teacher_s", "update_s", "step_s")),
        ]
        for c in found["costs"]
    ]  # fmt: skip
    text = (
        f"A step of {step['prompts_per_step']} prompts with {step['num_generations']} completions each. Rollouts were timed at "
        f"each length (full: {rates['full_rollout']:,.0f} tokens/s), scoring on full completions (teacher {rates['teacher']:,.0f}, "
        f"student with the divergence {rates['student']:,.0f} inputs/s). The update was not measured: it is taken as "
        f"{rates['update_factor']:g} times the student's scoring."
    )
    return f"<h2>Cost of a step</h2><p>{html.escape(text)}</p>" + table(head, rows)
