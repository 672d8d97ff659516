"""What `leanroll profile` writes: findings about the decay, statistics of lengths, and JSON-ready records."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, is_dataclass
from typing import Any

import numpy as np

from leanroll.config import ProfileConfig
from leanroll.measure.positions import NumTokensChoice
from leanroll.train.preflight import Finding
from leanroll.train.teacher_decay import Decay
from leanroll.types import RolloutGroup

CURVES = ("reverse_kl", "student_entropy", "teacher_entropy")
"""Statistics kept per token, nats; fields of `losses.distill.Divergence`."""
_DIGITS = 6  # significant ones of a value per token


def decay_findings(decay: Decay, choice: NumTokensChoice) -> list[Finding]:
    """How far the teacher holds, and whether N goes beyond."""
    found = [Finding("teacher's decay", "warning", note) for note in decay.notes]
    if decay.threshold is None:
        return found
    last = decay.points[-1].k
    text = f"The teacher makes good what the student began up to k = {decay.threshold}"
    text += ", the last length measured." if decay.threshold == last else f"; at k = {last} it no longer does."
    if choice.num_tokens > decay.threshold and decay.threshold < last:
        text += f" N = {choice.num_tokens} lies beyond: the last of these tokens teach little."
        return [*found, Finding("teacher's decay", "warning", text, choice.num_tokens, decay.threshold)]
    return [*found, Finding("teacher's decay", "ok", text)]


def teacher_name(config: ProfileConfig) -> str:
    """The teacher in words."""
    options = config.teacher
    parts = [options.model or "the student's base"]
    if options.adapter is not None:
        parts.append(f"adapter {options.adapter}")
    if options.privileged:
        parts.append("privileged prompt")
    if options.system_prompt is not None:
        parts.append("system prompt of its own")
    return ", ".join(parts)


def length_statistics(lengths: np.ndarray, num_capped: int) -> dict[str, float]:
    """Of full completions, tokens (D7)."""
    p10, p50, p90 = (float(x) for x in np.quantile(lengths, [0.1, 0.5, 0.9]))
    mean, share = float(lengths.mean()), num_capped / len(lengths)
    return {"num": len(lengths), "p10": p10, "p50": p50, "p90": p90, "mean": mean, "capped_share": share}


def cumulative_kl(reverse_kl: Sequence[np.ndarray]) -> list[float]:
    """Share of the total KL in the first 1, 2, … tokens."""
    total = np.zeros(max(map(len, reverse_kl)))
    for values in reverse_kl:
        total[: len(values)] += values
    return (np.cumsum(total) / total.sum()).tolist()


def records(
    groups: Sequence[RolloutGroup], curves: Mapping[str, Sequence[np.ndarray]], **facts: str
) -> Iterator[dict[str, Any]]:
    """The lines of trajectories.jsonl. curves: per statistic, one array per group, each of one completion. facts: of every line."""
    for i, group in enumerate(groups):
        rollout = group.rollouts[0]
        yield {
            **facts,
            "prompt_index": group.prompt.index,
            "prompt": group.prompt.text,
            "completion": rollout.text,
            "finish_reason": rollout.finish_reason,
            "token_ids": list(rollout.token_ids),
            **{name: [_short(x) for x in values[i].tolist()] for name, values in curves.items()},
        }


def _short(value: float | int) -> float | int:
    return value if isinstance(value, int) else float(f"{value:.{_DIGITS}g}")


def plain(value: Any) -> Any:
    """JSON-ready; NaN becomes null."""
    if is_dataclass(value) and not isinstance(value, type):
        return plain(asdict(value))
    if isinstance(value, dict):
        return {key: plain(inner) for key, inner in value.items()}
    if isinstance(value, np.ndarray):
        return plain(value.tolist())
    if isinstance(value, list | tuple):
        return [plain(inner) for inner in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
