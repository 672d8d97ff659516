"""How far the sampler was from the policy: tail acceptance per length over steps, KL and ratio by position."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from leanroll.report.curves import Records
from leanroll.report.layout import table
from leanroll.report.plots import plot, shade, some_labels, step_axis

EXACT_TARGET = 0.90
"""Default target of `leanroll calibrate`, on the exact scale that training measures on."""
PUBLISHED_TARGET = 0.86
"""Target of the published schedules, on the paper's own scale: there dense tokens read about 0.945, here 1."""

_FEW_TOKENS = 100
"""Below this the 5th percentile rests on fewer than five tokens; such points are hollow."""
_STAGES = 3
"""Parts of a run whose steps are averaged."""


def bin_starts(records: Records, prefix: str) -> list[int]:
    """First token of every bin of metrics named `<prefix><start>/…`, ascending."""
    found = {name.removeprefix(prefix).split("/")[0] for r in records for name in r if name.startswith(prefix)}
    return sorted(int(start) for start in found)


def draw_tails(records: Records, target: float | None) -> str:
    """5th percentile of alpha per length bin over steps, with target lines; empty when it was never measured.

    target: that of the run's schedule, None when it was not calibrated.
    """
    starts = bin_starts(records, "alpha/bin_")
    if not starts:
        return ""

    def paint(axes: Any) -> None:
        labels = some_labels([f"from {start} tokens" for start in starts])
        for number, (start, label) in enumerate(zip(starts, labels, strict=True)):
            points = [
                (r["step"], r[f"alpha/bin_{start}/p05"], r.get(f"alpha/bin_{start}/tokens", 0))
                for r in records
                if f"alpha/bin_{start}/p05" in r
            ]
            steps, tails, tokens = zip(*points, strict=True)
            color = shade(number, len(starts))
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


@dataclass(frozen=True, slots=True)
class _Stage:
    """Some consecutive steps. label: "steps 1–13"."""

    label: str
    records: Records

    def mean(self, start: int, name: str) -> float | None:
        """Mean over the steps that have tokens in the bin, by their number; None without any."""
        prefix = f"mismatch/pos_{start}/"
        found = [(r[prefix + name], r[prefix + "tokens"]) for r in self.records if prefix + name in r]
        tokens = sum(count for _, count in found)
        return sum(value * count for value, count in found) / tokens if tokens else None


def _stages(records: Records, starts: Sequence[int]) -> list[_Stage]:
    measured = [r for r in records if any(f"mismatch/pos_{start}/kl" in r for start in starts)]
    count = min(_STAGES, len(measured))
    stages = []
    for number in range(count):
        part = measured[number * len(measured) // count : (number + 1) * len(measured) // count]
        first, last = part[0]["step"], part[-1]["step"]
        stages.append(_Stage(f"step {first}" if first == last else f"steps {first}–{last}", part))
    return stages


def draw_kl_by_position(records: Records, bin_tokens: int) -> str:
    """KL of the sampler to the policy by position in the completion, for parts of the run; empty when not logged."""
    note = (
        "KL(sampler ‖ policy) per token by the estimator k3, mean of r - log r - 1 with r = p_old / q_sampler, in bins of "
        f"{bin_tokens} tokens, weighted by tokens over the steps (mismatch/pos_<start>/kl)."
    )
    lines = (("kl", "-"),)
    title = "Sampler KL by position"
    return _draw_by_position(title, records, bin_tokens, lines, note=note, y_label="nats per token", from_zero=True)


def draw_ratio_by_position(records: Records, bin_tokens: int) -> str:
    """Importance ratio by position in the completion, for parts of the run; empty when not logged."""
    note = (
        f"r = p_old / q_sampler in bins of {bin_tokens} tokens: mean (solid), 5th and 95th percentile (dotted), weighted by "
        "tokens over the steps (mismatch/pos_<start>/ratio_*)."
    )
    lines = (("ratio_mean", "-"), ("ratio_p05", ":"), ("ratio_p95", ":"))
    return _draw_by_position("Importance ratio by position", records, bin_tokens, lines, note=note)


def _draw_by_position(
    title: str,
    records: Records,
    bin_tokens: int,
    lines: Sequence[tuple[str, str]],
    *,
    note: str,
    y_label: str = "",
    from_zero: bool = False,
) -> str:
    """lines: name of the metric in its bin, and line style; the first one stands in the legend."""
    starts = bin_starts(records, "mismatch/pos_")
    if not starts:
        return ""

    def paint(axes: Any) -> None:
        for number, stage in enumerate(_stages(records, starts)):
            for name, style in lines:
                means = [(start + bin_tokens / 2, stage.mean(start, name)) for start in starts]
                x, y = zip(*((x, y) for x, y in means if y is not None), strict=True)
                label = stage.label if name == lines[0][0] else None
                axes.plot(x, y, marker=".", linewidth=1.2, linestyle=style, color=f"C{number}", label=label)
        axes.set_xlim(0, starts[-1] + bin_tokens)
        if from_zero:
            axes.set_ylim(0, None)

    return plot(title, paint, note=note, x_label="position in the completion, tokens", y_label=y_label)
