"""How far the sampler was from the policy: tail acceptance per length over steps, KL and ratio by position."""

from __future__ import annotations

from typing import Any

from leanroll.report.curves import Records
from leanroll.report.layout import table
from leanroll.report.plots import length_bins, plot, step_axis
from leanroll.report.positions import bin_starts, draw_by_position, measured, thirds

EXACT_TARGET = 0.90
"""Default target of `leanroll calibrate`, on the exact scale that training measures on."""
PUBLISHED_TARGET = 0.86
"""Target of the published schedules, on the paper's own scale: there dense tokens read about 0.945, here 1."""

_FEW_TOKENS = 100
"""Below this the 5th percentile rests on fewer than five tokens; such points are hollow."""
_BINS = "mismatch/pos_"


def draw_tails(records: Records, target: float | None) -> str:
    """5th percentile of alpha per length bin over steps, with target lines; empty when it was never measured.

    target: that of the run's schedule, None when it was not calibrated.
    """
    starts = bin_starts(records, "alpha/bin_")
    if not starts:
        return ""

    def paint(axes: Any) -> None:
        for start, label, color in length_bins(starts):
            points = [
                (r["step"], r[f"alpha/bin_{start}/p05"], r.get(f"alpha/bin_{start}/tokens", 0))
                for r in records
                if f"alpha/bin_{start}/p05" in r
            ]
            steps, tails, tokens = zip(*points, strict=True)
            axes.plot(steps, tails, color=color, linewidth=1.0, label=label)
            faces = ["white" if count < _FEW_TOKENS else color for count in tokens]
            axes.scatter(steps, tails, s=14, c=faces, edgecolors=[color], linewidths=0.9, zorder=3)
        axes.axhline(EXACT_TARGET, color="crimson", linewidth=1, label=f"{EXACT_TARGET:.2f} exact")
        axes.axhline(
            PUBLISHED_TARGET, color="crimson", linewidth=1, linestyle=":", label=f"{PUBLISHED_TARGET:.2f} published"
        )
        if target is not None and target not in (EXACT_TARGET, PUBLISHED_TARGET):
            axes.axhline(target, color="darkorange", linewidth=1, linestyle="--", label=f"{target:g} schedule")
        step_axis(axes, records[-1]["step"])

    note = (
        f"5th percentile over tokens, per bin of total length (alpha/bin_<start>/p05). Hollow: fewer than {_FEW_TOKENS} tokens. "
        f"{EXACT_TARGET:.2f} is the default target on this exact scale; {PUBLISHED_TARGET:.2f} the published one on the paper's "
        "scale, where dense tokens read about 0.945 instead of 1, so that here it is laxer."
    )
    return plot("Tail acceptance by length", paint, note=note, x_label="step")


def acceptance_table(records: Records) -> str:
    """Acceptance per length bin at the last measurement, with counts; empty when it was never measured."""
    measured = [r for r in records if bin_starts([r], "alpha/bin_")]
    if not measured:
        return ""
    last = measured[-1]
    columns = {
        "p05": "5th percentile",
        "mean": "mean",
        "share_above_0999": "share > 0.999",
        "tokens": "tokens measured",
    }
    rows = []
    for start in bin_starts([last], "alpha/bin_"):
        values = [last.get(f"alpha/bin_{start}/{column}") for column in columns]
        rows.append([f"from {start}", *("" if value is None else f"{value:.4g}" for value in values)])
    title = f"<h2>Acceptance by total length, step {last['step']}</h2>"
    return title + table(["length, tokens", *columns.values()], rows)


def draw_kl_by_position(records: Records, bin_tokens: int) -> str:
    """KL of the sampler to the policy by position in the completion, for parts of the run; empty when not logged."""
    note = (
        "KL(sampler ‖ policy) per token by the estimator k3, mean of r - log r - 1 with r = p_old / q_sampler, in bins of "
        f"{bin_tokens} tokens, weighted by tokens over the steps (mismatch/pos_<start>/kl)."
    )
    lines = (("kl", "-"),)
    stages = thirds(measured(records, _BINS, "kl"))
    return draw_by_position(
        "Sampler KL by position", stages, _BINS, bin_tokens, lines, note=note, y_label="nats per token", from_zero=True
    )


def draw_ratio_by_position(records: Records, bin_tokens: int) -> str:
    """Importance ratio by position in the completion, for parts of the run; empty when not logged."""
    note = (
        f"r = p_old / q_sampler in bins of {bin_tokens} tokens: mean (solid), 5th and 95th percentile (dotted), weighted by "
        "tokens over the steps (mismatch/pos_<start>/ratio_*)."
    )
    lines = (("ratio_mean", "-"), ("ratio_p05", ":"), ("ratio_p95", ":"))
    stages = thirds(measured(records, _BINS, "ratio_mean"))
    return draw_by_position("Importance ratio by position", stages, _BINS, bin_tokens, lines, note=note)
