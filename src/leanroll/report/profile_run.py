"""What the page of a profile after training shows: the cascade, commitment, lengths, signs of collapse, categories of tokens."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from typing import Any

from leanroll.report.layout import grid, table
from leanroll.report.plots import plot

_WHOSE = (("base", "before training", "C0"), ("trained", "after training", "C1"), ("teacher", "teacher", "0.45"))
_RANKS = (("rank_1", "teacher's likeliest"), ("rank_2_to_5", "its rank 2 to 5"), ("rank_above_5", "above rank 5"))
_POSITION = "position in the completion, tokens"


def run_parts(found: dict[str, Any]) -> list[str]:
    """Parts of the page below its findings."""
    return [
        "<h2>Divergence by position</h2>",
        grid(_cascade_figures(found)),
        "<h2>Commitment</h2>",
        grid([_commitment_figure(found)]),
        _commitment_table(found),
        "<h2>Completions</h2>",
        grid([*_length_figures(found), *_stop_figure(found)]),
        _collapse_table(found),
        _how_stops_count(found),
        "<h2>Categories of tokens</h2>",
        grid(_category_figures(found)),
        _category_table(found),
    ]


def run_overview(found: dict[str, Any]) -> str:
    """The figures that the rest explains, as a table."""
    base, own = found["cascade"]["base"], found["cascade"]["own"]
    share, level = found["untrained_share"], f"{found['level']:.0%}"
    n = found["trained_tokens"]
    rows = [
        ["trained tokens N", str(n), f"{share:.0%} of the positions of the base completions lie beyond"],
        ["KL after / before, trained", _estimate(base["trained_ratio"]), f"base completions, below position {n}, {level} interval"],
        ["KL after / before, untrained", _estimate(base["untrained_ratio"]), f"base completions, from position {n} on"],
        ["the same on own completions", _estimate(own["untrained_ratio"]),
         f"per token from {n} on, each student on its own"],
    ]  # fmt: skip
    reports = {name: found["completions"][name]["report"] for name, _, _ in _WHOSE if name in found["completions"]}
    for label, unit, text in (
        ("median length, tokens", "p50", "before → after, teacher"),
        ("completions that end in a loop", "periodic_tail", "three or more repeats of up to 60 tokens"),
        ("completions cut at the limit", "cap_rate", f"at {found['max_completion_length']} tokens"),
    ):
        values = [
            f"{r['lengths']['p50']:.0f}" if unit == "p50" else f"{r[unit]:.0%}" for r in reports.values()
        ]  # fmt: skip
        rows.append([label, " → ".join(values[:2]) + "".join(f", {value}" for value in values[2:]), text])
    return table(["", "", ""], rows)


def run_title(found: dict[str, Any]) -> str:
    """Whose profile it is."""
    return (
        f"profile after step {found['step']} of {found['num_steps']} of {found['run']}: {found['model']}, teacher: "
        f"{found['teacher']}, {found['num_prompts']} held-out prompts"
    )


def _shade(axes: Any, found: dict[str, Any], longest: float) -> None:
    """The trained region."""
    axes.axvspan(0, min(found["trained_tokens"], longest), color="0.9", linewidth=0, zorder=0, label="trained")
    axes.set_xlim(0, longest)


def _steps(axes: Any, edges: Sequence[float], values: Sequence[float | None], **style: Any) -> None:
    """One level per bin, without values nothing."""
    axes.stairs([math.nan if v is None else v for v in values], edges, baseline=None, linewidth=1.6, **style)


def _cascade_figures(found: dict[str, Any]) -> list[str]:
    base, own = found["cascade"]["base"], found["cascade"]["own"]
    edges, longest = [*base["starts"], base["stops"][-1]], base["stops"][-1]
    level, width = f"{found['level']:.0%}", found["bin_tokens"]

    def same(axes: Any) -> None:
        _shade(axes, found, longest)
        for side, (_, label, color) in zip(("before", "after"), _WHOSE, strict=False):
            _steps(axes, edges, base[side], label=label, color=color)
        axes.set_ylim(0, None)

    def ratios(axes: Any) -> None:
        _shade(axes, found, longest)
        axes.axhline(1.0, color="0.5", linewidth=0.8, linestyle=":")
        _steps(axes, edges, base["ratio"], label="after / before", color="C3")
        axes.set_ylim(0, max([1.1, *(1.05 * r for r in base["ratio"] if r is not None)]))

    def counts(axes: Any) -> None:
        _shade(axes, found, longest)
        axes.stairs(base["num_trajectories"], edges, fill=True, color="C0", alpha=0.5)
        axes.set_ylim(0, None)

    def fresh(axes: Any) -> None:
        ends = [curves["starts"][-1] + curves["bin_tokens"] for curves in (own["before"], own["after"])]
        _shade(axes, found, max(ends))
        for side, (_, label, color) in zip(("before", "after"), _WHOSE, strict=False):
            _curve(axes, own[side], label, color)
        axes.set_ylim(0, None)

    return [
        plot(
            "KL on the base completions", same,
            note="KL(student ‖ teacher) per token on the same completions, those of the student before training; shaded: trained",
            x_label=_POSITION, y_label="nats per token",
        ),
        plot(
            "KL after / before by position", ratios,
            note="The same tokens under both students; below 1 the student came nearer to the teacher, also beyond the shaded "
            "region, where nothing was trained", x_label=_POSITION, y_label="ratio",
        ),
        plot(
            "Base completions by position", counts,
            note=f"n_t: completions with a token in the bin of {width} positions; ratios on the right rest on few",
            x_label=_POSITION, y_label="completions",
        ),
        plot(
            "KL on own completions", fresh,
            note=f"Each student on its own completions of the same prompts, with the {level} interval over completions",
            x_label=_POSITION, y_label="nats per token",
        ),
    ]  # fmt: skip


def _curve(axes: Any, curves: dict[str, Any], label: str, color: str) -> None:
    kl, half = curves["reverse_kl"], curves["bin_tokens"] / 2
    x = [start + half for start in curves["starts"]]
    axes.plot(x, kl["mean"], label=label, color=color, linewidth=1.6, marker="." if len(x) <= 60 else None)
    known = [i for i, low in enumerate(kl["low"]) if low is not None]
    axes.fill_between(
        [x[i] for i in known], [kl["low"][i] for i in known], [kl["high"][i] for i in known], color=color, alpha=0.2,
        linewidth=0,
    )  # fmt: skip


def _commitment_rows(found: dict[str, Any]) -> list[tuple[str, str, dict[str, Any]]]:
    models = found["commitment"]["models"]
    return [
        (label, where, models[name][key])
        for key, where in (("own", "own positions"), ("common", "common positions"))
        for name, label, _ in _WHOSE
        if name in models
    ]


def _commitment_figure(found: dict[str, Any]) -> str:
    rows = _commitment_rows(found)[::-1]

    def paint(axes: Any) -> None:
        labels = [f"{label},\n{where}" for label, where, _ in rows]
        left = [0.0] * len(rows)
        for number, (key, name) in enumerate(_RANKS):
            shares = [row[key] for _, _, row in rows]
            axes.barh(labels, shares, left=left, height=0.6, label=name, color=("C2", "C8", "C3")[number], zorder=2)
            left = [a + b for a, b in zip(left, shares, strict=True)]
        axes.set_xlim(0, 1)

    share = f"{found['commitment']['top_share']:.0%}"
    return plot(
        "Where the student's likeliest token stands with the teacher", paint,
        note=f"At the {share} of the base completions' tokens with the largest KL: each student's own such tokens, and one set for "
        "both", x_label="share of these tokens",
    )  # fmt: skip


def _commitment_table(found: dict[str, Any]) -> str:
    head = ["student", "at", "tokens", "its largest probability", *(name for _, name in _RANKS)]
    rows = [
        [label, where, str(row["num_positions"]), f"{row['top1']:.3f}", *(f"{row[key]:.3f}" for key, _ in _RANKS)]
        for label, where, row in _commitment_rows(found)
    ]
    return table(head, rows)


def _length_figures(found: dict[str, Any]) -> list[str]:
    completions = found["completions"]
    limit = found["max_completion_length"]
    groups = [(label, color, completions[name]) for name, label, color in _WHOSE if name in completions]

    def shares(axes: Any) -> None:
        for label, color, made in groups:
            lengths = sorted(made["lengths"])
            steps = [i / len(lengths) for i in range(len(lengths) + 1)]
            axes.stairs(
                steps,
                [0, *lengths, max(limit, lengths[-1]) + 1],
                baseline=None,
                label=label,
                color=color,
                linewidth=1.6,
            )
        axes.axvline(found["trained_tokens"], color="0.5", linewidth=0.9, linestyle=":", label="N")
        axes.set_xlim(0, limit)
        axes.set_ylim(0, 1.02)

    def quantiles(axes: Any) -> None:
        for number, (_, color, made) in enumerate(groups):
            stats = made["report"]["lengths"]
            axes.bar(number, stats["p50"], width=0.5, color=color, alpha=0.6, zorder=2)
            whiskers = [[stats["p50"] - stats["p10"]], [stats["p90"] - stats["p50"]]]
            axes.errorbar(number, stats["p50"], whiskers, color="0.2", capsize=4, linewidth=1.0, zorder=3)
        axes.set_xticks(range(len(groups)), [label for label, _, _ in groups])
        axes.set_ylim(0, None)

    return [
        plot("Completion length", shares, note="Share of the completions that are no longer than so many tokens; they are cut at "
             f"{limit}", x_label="tokens", y_label="share of completions"),
        plot("Completion length, quantiles", quantiles, note="Bar: median; whiskers: 10th and 90th percentile", y_label="tokens"),
    ]  # fmt: skip


def _collapse_table(found: dict[str, Any]) -> str:
    whose = [(name, label) for name, label, _ in _WHOSE if name in found["completions"]]
    on_base = found.get("stops", {}).get("models", {})  # not in profiles of older versions

    def of_model(label: str, value: Any, form: str = ".3f") -> list[str]:
        cells = [value(name, found["completions"][name]) for name, _ in whose]
        return [label, *("n/a" if cell is None else format(cell, form) for cell in cells)]

    def row(label: str, value: Any, form: str = ".3f") -> list[str]:
        return of_model(label, lambda _, made: value(made["report"]), form)

    def accuracy(label: str, key: str) -> list[str]:
        return of_model(label, lambda _, made: (made.get("boxed_accuracy") or {}).get(key))

    def boxed(key: str) -> Any:
        return lambda r: None if r["boxed"] is None else r["boxed"][key]

    rows = [
        row("completions", lambda r: r["num_completions"], "d"),
        *(row(f"length {label}, tokens", lambda r, key=key: r["lengths"][key], ".0f") for key, label in (
            ("p10", "10th percentile"), ("p50", "median"), ("p90", "90th percentile"), ("mean", "mean"))),
        row("cut at the limit, share", lambda r: r["cap_rate"]),
        row("end in a loop, share", lambda r: r["periodic_tail"]),
        row("tokens in repeated blocks, share", lambda r: r["repeated"]),
        row("different pairs of tokens, share", lambda r: r["distinct_2"]),
        row(r"\boxed per completion", boxed("mean_count"), ".2f"),
        row(r"with two \boxed or more, share", boxed("share_many")),
        accuracy(r"first \boxed right, share", "first"),
        accuracy(r"last \boxed right, share", "last"),
        accuracy(r"any \boxed right, share", "relaxed"),
        row("P(EOS) per token", lambda r: r["eos_prob"], ".3g"),
        of_model("P(EOS) per token, base completions", lambda name, _: on_base.get(name, {}).get("mean"), ".3g"),
    ]  # fmt: skip
    return table(["", *(label for _, label in whose)], rows)


def _stop_figure(found: dict[str, Any]) -> list[str]:
    """Nothing for a profile of an older version."""
    if "stops" not in found:
        return []
    width, models = found["bin_tokens"], found["stops"]["models"]

    def paint(axes: Any) -> None:
        for name, label, color in _WHOSE:
            values = models[name]["by_position"]
            _steps(axes, [i * width for i in range(len(values) + 1)], values, label=label, color=color)
        _shade(axes, found, width * len(values))
        axes.set_ylim(0, None)

    note = (
        "Probability that a stop token is drawn at this token, mean over the completions that go so far, in bins of "
        f"{width} positions; shaded: trained"
    )
    return [plot("P(EOS) on the base completions", paint, note=note, x_label=_POSITION, y_label="probability")]


def _how_stops_count(found: dict[str, Any]) -> str:
    if "stops" not in found:
        return ""
    what = (
        "P(EOS) is the probability, before a token is drawn, that it is a stop token (all of the model's together), at temperature "
        f"{found['stops']['temperature']:g} and before top-k, top-p and min-p; mean over tokens. Base completions: the same tokens "
        r"for all, those of the student before training. A completion without a \boxed counts as not right."
    )
    return f"<p>{html.escape(what)}</p>"


def _category_figures(found: dict[str, Any]) -> list[str]:
    categories = found["categories"]
    names = [row["category"] for row in categories["before"]["rows"] if row["num_tokens"]]
    starts, width = categories["before"]["starts"], found["bin_tokens"]

    def rows_of(side: str) -> list[dict[str, Any]]:
        return [row for row in categories[side]["rows"] if row["category"] in names]

    def means(axes: Any) -> None:
        for number, (side, (_, label, color)) in enumerate(zip(("before", "after"), _WHOSE, strict=False)):
            y = [i + (number - 0.5) * 0.36 for i in range(len(names))]
            estimates = [row["mean"] for row in rows_of(side)]
            axes.barh(y, [e["value"] for e in estimates], height=0.34, label=label, color=color, zorder=2)
            for place, e in zip(y, estimates, strict=True):
                if e["low"] is not None:
                    axes.plot([e["low"], e["high"]], [place, place], color="0.2", linewidth=1.0, zorder=3)
        axes.set_yticks(range(len(names)), names)
        axes.invert_yaxis()
        axes.set_xlim(0, None)

    def heat(side: str, key: str, highest: float) -> Any:
        def paint(axes: Any) -> None:
            values = [[math.nan if v is None else v for v in row[key]] for row in rows_of(side)]
            edges = [*starts, starts[-1] + width]
            mesh = axes.pcolormesh(edges, range(len(names) + 1), values, vmin=0, vmax=highest or None, zorder=2)
            bar = axes.figure.colorbar(mesh, ax=axes)
            bar.set_label("nats per token" if key == "bin_mean" else "share of all KL", fontsize=8)
            bar.ax.tick_params(labelsize=8)
            axes.set_yticks([i + 0.5 for i in range(len(names))], names)
            axes.invert_yaxis()

        return paint

    # One scale for both times, so that colours can be compared.
    highest = max(
        (v for side in ("before", "after") for row in rows_of(side) for v in row["bin_mean"] if v is not None),
        default=0,
    )
    where = f"on the base completions, in bins of {width} positions. Blank: no such token"
    return [
        plot("KL by category", means, note=f"KL(student ‖ teacher) per token; line: {found['level']:.0%} interval over "
             "completions", x_label="nats per token"),
        plot("KL by category and position, before", heat("before", "bin_mean", highest), note=f"Per token {where}",
             x_label=_POSITION),
        plot("KL by category and position, after", heat("after", "bin_mean", highest), note=f"Per token {where}",
             x_label=_POSITION),
        plot("Share of the KL by category and position", heat("before", "bin_share", 0),
             note=f"Of all KL before training, {where}", x_label=_POSITION),
    ]  # fmt: skip


def _category_table(found: dict[str, Any]) -> str:
    categories = found["categories"]
    head = [
        "category", "tokens", "share of tokens", "share of KL, before", "share of KL, after", "KL before, nats", "KL after, nats",
        "after / before",
    ]  # fmt: skip
    rows = []
    for before, after in zip(categories["before"]["rows"], categories["after"]["rows"], strict=True):
        shares = [before["token_share"], before["kl_share"], after["kl_share"]]
        rows.append([
            before["category"], str(before["num_tokens"]),
            *("n/a" if not before["num_tokens"] or share is None else f"{share:.3f}" for share in shares),
            _estimate(before["mean"]), _estimate(after["mean"]), _estimate(categories["ratios"][before["category"]]),
        ])  # fmt: skip
    what = "Read from each token's text in the completion; how is said in the module leanroll.measure.categories."
    return f"<p>{html.escape(what)}</p>" + table(head, rows)


def _estimate(value: dict[str, Any] | None) -> str:
    """A value with its interval; n/a where there are no such tokens."""
    if value is None or value["value"] is None:
        return "n/a"
    text = f"{value['value']:.3f}"
    return text if value["low"] is None else f"{text} [{value['low']:.3f}, {value['high']:.3f}]"
