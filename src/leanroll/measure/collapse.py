r"""Signs that a policy is collapsing, read from its completions: no more stops, loops, blown-up lengths (D7, D8; arXiv 2605.27028).

Compare completions of the same prompts at the same cap. Early-stopped training rollouts hit their cap by design, so their cap rate
says nothing: judge them on full completions, such as those of an evaluation.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np

from leanroll.errors import ConfigError, UserError
from leanroll.types import Rollout

MAX_PERIOD = 60
MIN_REPEATS = 3
BLOCK_TOKENS = 16
"""A block this long recurs verbatim by looping or copying, rarely by chance."""

# A doubled backslash also counts, as it does where answers are graded; any other escape hides its brace.
_BOX_PARTS = re.compile(r"\\{1,2}boxed\s*\{|\\.|[{}]", re.DOTALL)


def periodic_tail(token_ids: Sequence[int], max_period: int = MAX_PERIOD, min_repeats: int = MIN_REPEATS) -> int:
    """Smallest period p such that the completion ends in >= min_repeats repeats of a block of p <= max_period tokens; 0 if none.

    [5, 1, 2, 1, 2, 1, 2] → 2. A stop token counts, so a completion that stopped by itself ends no loop. Cost does not depend
    on the completion's length.

    Raises:
        ConfigError: max_period below 1 or min_repeats below 2.
    """
    if max_period < 1 or min_repeats < 2:
        raise ConfigError(f"max_period={max_period}, min_repeats={min_repeats}; expected at least 1 and 2.")
    end = np.asarray(token_ids[max(len(token_ids) - max_period * min_repeats, 0) :])
    for period in range(1, len(end) // min_repeats + 1):
        tail = end[len(end) - period * min_repeats :]
        if (tail[period:] == tail[:-period]).all():
            return period
    return 0


def repeated_blocks(token_ids: Sequence[int], block_tokens: int = BLOCK_TOKENS) -> float:
    """Share of the tokens that lie in a block of `block_tokens` that occurred before in the completion (and may overlap it).

    Also finds loops that changed a little, or ended. 0 for completions of at most `block_tokens`.

    Raises:
        ConfigError: block_tokens below 1.
    """
    if block_tokens < 1:
        raise ConfigError(f"block_tokens is {block_tokens}; expected at least 1.")
    ids, seen = tuple(token_ids), set()
    num_covered = covered_to = 0
    for start in range(len(ids) - block_tokens + 1):
        stop = start + block_tokens
        block = ids[start:stop]
        if block in seen:
            num_covered += stop - max(covered_to, start)
            covered_to = stop
        seen.add(block)
    return num_covered / len(ids) if ids else 0.0


def distinct_n(token_ids: Sequence[int], n: int) -> float | None:
    """Distinct n-grams / n-grams, in (0, 1]; None below n tokens. It falls with length by itself: compare similar lengths.

    Raises:
        ConfigError: n below 1.
    """
    if n < 1:
        raise ConfigError(f"n is {n}; expected at least 1.")
    count = len(token_ids) - n + 1
    return len(set(zip(*(token_ids[i:] for i in range(n)), strict=False))) / count if count > 0 else None


def boxed(text: str) -> tuple[str, ...]:
    r"""Contents of every \boxed{…} in order, braces matched (`\{` and `\}` are text); a box inside a box belongs to the outer one.

    Boxes that never close are left out, so a completion cut off inside a box has only its earlier ones. Linear in the text.
    """
    found: list[tuple[int, int]] = []
    open_braces: list[int | None] = []  # where the content begins, None for a plain brace
    for part in _BOX_PARTS.finditer(text):
        token = part.group()
        if token == "{":
            open_braces.append(None)
        elif token.endswith("{") and "boxed" in token:
            open_braces.append(part.end())
        elif token == "}" and open_braces:
            start = open_braces.pop()
            if start is not None:
                while found and found[-1][0] > start:
                    found.pop()
                found.append((start, part.start()))
    return tuple(text[start:stop] for start, stop in found)


def first_boxed(text: str) -> str | None:
    r"""Content of the first complete \boxed{…}, or None."""
    return next(iter(boxed(text)), None)


def last_boxed(text: str) -> str | None:
    r"""Content of the last complete \boxed{…}, or None."""
    return next(reversed(boxed(text)), None)


@dataclass(frozen=True, slots=True)
class LengthStats:
    """Tokens per completion, a natural stop token included; never padding."""

    p10: float
    p50: float
    p90: float
    mean: float


@dataclass(frozen=True, slots=True)
class BoxedStats:
    r"""Over all completions. share_many: those with two \boxed or more. mean_count: \boxed per completion."""

    share_many: float
    mean_count: float


@dataclass(frozen=True, slots=True)
class CollapseReport:
    r"""What a set of completions shows; shares are of completions.

    max_completion_length: the cap they were sampled with. cap_rate: share that the cap cut (finish reason "length").
    periodic_tail: share that ends in a loop. repeated: mean share of tokens in repeated blocks.
    distinct_2: mean of distinct_n(·, 2), None where no completion has two tokens.
    eos_prob: mean over all tokens of P(any stop token), None where not given. boxed: None where no text has a \boxed.
    """

    num_completions: int
    max_completion_length: int
    cap_rate: float
    periodic_tail: float
    repeated: float
    distinct_2: float | None
    lengths: LengthStats
    eos_prob: float | None = None
    boxed: BoxedStats | None = None

    @classmethod
    def of(
        cls,
        rollouts: Sequence[Rollout],
        max_completion_length: int,
        *,
        eos_probs: Sequence[np.ndarray] | None = None,
    ) -> CollapseReport:
        """From completions sampled with one cap.

        Args:
            max_completion_length: the cap, tokens.
            eos_probs: per rollout [T_i], the policy's probability of stopping at each token; of all stop tokens together.

        Raises:
            UserError: no completions, an empty one, one longer than the cap, or eos_probs of another shape or outside 0 to 1.
        """
        if not rollouts:
            raise UserError("There are no completions to judge; sample some first.")
        lengths = np.asarray([len(r.token_ids) for r in rollouts])
        if lengths.min() < 1 or lengths.max() > max_completion_length:
            raise UserError(
                f"Completions have {lengths.min()} to {lengths.max()} tokens; expected 1 to max_completion_length="
                f"{max_completion_length}: pass the cap that they were sampled with."
            )
        counts = np.asarray([len(boxed(r.text)) for r in rollouts])
        distinct = [d for r in rollouts if (d := distinct_n(r.token_ids, 2)) is not None]
        p10, p50, p90 = np.quantile(lengths, [0.1, 0.5, 0.9])
        return cls(
            num_completions=len(rollouts),
            max_completion_length=max_completion_length,
            cap_rate=float(np.mean([r.finish_reason == "length" for r in rollouts])),
            periodic_tail=float(np.mean([periodic_tail(r.token_ids) > 0 for r in rollouts])),
            repeated=float(np.mean([repeated_blocks(r.token_ids) for r in rollouts])),
            distinct_2=float(np.mean(distinct)) if distinct else None,
            lengths=LengthStats(float(p10), float(p50), float(p90), float(lengths.mean())),
            eos_prob=None if eos_probs is None else _mean_eos(eos_probs, lengths),
            boxed=BoxedStats(float((counts >= 2).mean()), float(counts.mean())) if counts.any() else None,
        )


@dataclass(frozen=True, slots=True)
class CollapseLimits:
    r"""How far each statistic may move from the baseline before it is an alarm. 0 allows no change, None does not look at it.

    cap_rate, periodic_tail, repeated, boxed_many: allowed rise, absolute. distinct_2: allowed fall, absolute.
    length_factor: the median length may grow or shrink to this multiple or its inverse, at least 1.
    eos_factor: the mean P(EOS) may fall to its baseline divided by this, at least 1.
    """

    cap_rate: float | None = 0.2
    periodic_tail: float | None = 0.1
    repeated: float | None = 0.2
    distinct_2: float | None = 0.2
    boxed_many: float | None = 0.3
    length_factor: float | None = 3.0
    eos_factor: float | None = 4.0

    def __post_init__(self) -> None:
        for field in fields(self):
            value, least = getattr(self, field.name), 1.0 if field.name.endswith("_factor") else 0.0
            if value is not None and not value >= least:
                raise ConfigError(f"{field.name} is {value}; expected {least:g} or more, or None to leave it out.")


@dataclass(frozen=True, slots=True)
class Alarm:
    """A statistic that moved too far. reason: one line in words, with both values and what was allowed."""

    statistic: str
    before: float
    now: float
    reason: str


def compare(baseline: CollapseReport, now: CollapseReport, limits: CollapseLimits | None = None) -> list[Alarm]:
    r"""Alarms of `now` against `baseline`, the worst-known signs first; empty if all is within the limits.

    What is not available on either side (P(EOS), \boxed) is not compared; no \boxed on one side counts as a share of 0.

    Raises:
        UserError: the reports are of different caps.
    """
    limits = limits or CollapseLimits()
    if baseline.max_completion_length != now.max_completion_length:
        raise UserError(
            f"The baseline was sampled with a cap of {baseline.max_completion_length} tokens, the completions to judge with "
            f"{now.max_completion_length}; expected one cap, since cap rate and lengths depend on it: sample one of them again."
        )
    many_before, many_now = (0.0 if r.boxed is None else r.boxed.share_many for r in (baseline, now))
    checks = (
        _rise("cap rate", baseline.cap_rate, now.cap_rate, limits.cap_rate),
        _rise(
            "share of completions that end in a loop", baseline.periodic_tail, now.periodic_tail, limits.periodic_tail
        ),
        _rise("share of tokens in repeated blocks", baseline.repeated, now.repeated, limits.repeated),
        _fall("distinct-2", baseline.distinct_2, now.distinct_2, limits.distinct_2),
        _factor("mean P(EOS)", baseline.eos_prob, now.eos_prob, limits.eos_factor, grow=False),
        _factor("median length", baseline.lengths.p50, now.lengths.p50, limits.length_factor, grow=True),
        _rise(r"share of completions with two \boxed or more", many_before, many_now, limits.boxed_many),
    )
    return [alarm for alarm in checks if alarm is not None]


_SLACK = 1e-9  # 0.3 - 0.1 is not 0.2


def _rise(name: str, before: float, now: float, allowed: float | None) -> Alarm | None:
    if allowed is None or now - before <= allowed + _SLACK:
        return None
    return Alarm(name, before, now, f"{name} rose from {before:.2f} to {now:.2f}; allowed {allowed:g} more")


def _fall(name: str, before: float | None, now: float | None, allowed: float | None) -> Alarm | None:
    if allowed is None or before is None or now is None or before - now <= allowed + _SLACK:
        return None
    return Alarm(name, before, now, f"{name} fell from {before:.2f} to {now:.2f}; allowed {allowed:g} less")


def _factor(name: str, before: float | None, now: float | None, allowed: float | None, *, grow: bool) -> Alarm | None:
    """grow: whether growth beyond the factor is an alarm too."""
    if allowed is None or before is None or now is None:
        return None
    fell = now * allowed < before * (1.0 - _SLACK)
    if not fell and not (grow and now > allowed * before * (1.0 + _SLACK)):
        return None
    limit = f"{before / allowed:.3g} or more" if fell else f"{before * allowed:.3g} or less"
    return Alarm(
        name, before, now, f"{name} {'fell' if fell else 'rose'} from {before:.3g} to {now:.3g}; allowed {limit}"
    )


def _mean_eos(eos_probs: Sequence[np.ndarray], lengths: np.ndarray) -> float:
    got = [np.shape(p) for p in eos_probs]
    if got != [(n,) for n in lengths]:
        raise UserError(
            f"eos_probs has shapes {got[:4]}… for completions of {lengths[:4]}… tokens; expected one value per token."
        )
    values = np.concatenate(eos_probs).astype(np.float64)
    if not ((values >= 0) & (values <= 1 + 1e-6)).all():
        raise UserError("eos_probs has values outside 0 to 1; expected probabilities, not log-probs.")
    return float(values.mean())
