"""Where along a completion the teacher disagrees: curves by position, the choice of N, and what training changed.

Everything takes per-trajectory arrays [T_i] of one statistic (`losses.distill.Divergence`, split by sample), position 0 first; a
natural stop is a position like any other. D1 to D4 are the diagnostics of early-stopped rollouts, arXiv 2605.27028; D6 is in
`measure.commitment`.

Intervals are percentile bootstraps over whole trajectories, since tokens of one are not independent. Neither are several
completions of one prompt: pass one per prompt, or read the intervals as too narrow.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from leanroll.errors import ConfigError, UserError
from leanroll.measure.bootstrap import (
    Estimate,
    check_same_lengths,
    check_settings,
    column_quantiles,
    length_mask,
    pad_trajectories,
    ratio_estimate,
    resample_counts,
    safe_ratio,
    trajectory_lengths,
)

KL_SHARE = 0.45
"""Share of the total KL that the first N tokens are to hold (paper)."""
MAX_FIRST_SHARE = 0.05
"""Share of the total KL at position 0 above which a template mismatch is likely."""
MAX_MEDIAN_SHARE = 0.25
"""N above this share of the median length saves little."""
_SLACK = 1e-12
_COLUMNS, _ROWS = 512, 64  # of one block of resampled sums: bounded memory


@dataclass(frozen=True, slots=True)
class Curve:
    """A mean over the tokens of each bin and its bootstrap interval, float64 [B] each, the statistic's unit (nats).

    low, high: NaN where fewer than two trajectories have tokens.
    """

    mean: np.ndarray
    low: np.ndarray
    high: np.ndarray


@dataclass(frozen=True, slots=True)
class PositionCurves:
    """Means by position (D2), in B bins of `bin_tokens` positions from 0 to the longest trajectory.

    With bin_tokens 1 and trajectories of 3 and 1 tokens: starts [0, 1, 2], num_trajectories = num_tokens = n_t = [2, 1, 1].

    starts: int64 [B], first position of each bin. num_trajectories: int64 [B], those with a token in the bin.
    num_tokens: int64 [B], tokens in the bin. student_entropy, teacher_entropy: None where not given. level: of the intervals.
    """

    bin_tokens: int
    starts: np.ndarray
    num_trajectories: np.ndarray
    num_tokens: np.ndarray
    level: float
    reverse_kl: Curve
    student_entropy: Curve | None = None
    teacher_entropy: Curve | None = None

    @classmethod
    def of(
        cls,
        reverse_kl: Sequence[np.ndarray],
        student_entropy: Sequence[np.ndarray] | None = None,
        teacher_entropy: Sequence[np.ndarray] | None = None,
        *,
        bin_tokens: int = 1,
        level: float = 0.95,
        num_resamples: int = 1000,
        seed: int = 0,
    ) -> PositionCurves:
        """From arrays [T_i] in nats, one per trajectory and in one order. The same values and seed give the same curves.

        Raises:
            ConfigError: bin_tokens, level or num_resamples out of range.
            UserError: no trajectories, an empty one, values that are not finite, or statistics of different lengths.
        """
        check_settings(level, num_resamples, bin_tokens)
        lengths = trajectory_lengths(reverse_kl, "reverse_kl")
        starts = np.arange(0, lengths.max(), bin_tokens)
        counts = np.add.reduceat(length_mask(lengths).astype(np.float64), starts, axis=1)
        draws = resample_counts(len(lengths), num_resamples, seed)

        def curve(name: str, values: Sequence[np.ndarray]) -> Curve:
            check_same_lengths(lengths, "reverse_kl", trajectory_lengths(values, name), name)
            sums = np.add.reduceat(pad_trajectories(values, lengths), starts, axis=1)
            return _curve(sums, counts, draws, level)

        return cls(
            bin_tokens=bin_tokens,
            starts=starts,
            num_trajectories=(counts > 0).sum(axis=0),
            num_tokens=counts.sum(axis=0).astype(np.int64),
            level=level,
            reverse_kl=curve("reverse_kl", reverse_kl),
            student_entropy=None if student_entropy is None else curve("student_entropy", student_entropy),
            teacher_entropy=None if teacher_entropy is None else curve("teacher_entropy", teacher_entropy),
        )


@dataclass(frozen=True, slots=True)
class NumTokensChoice:
    """The number of tokens N to roll out (D3), with what it depends on.

    num_tokens: smallest N whose first N tokens hold `share` of the total KL; low, high: its bootstrap interval at `level`, None
    with fewer than two trajectories.
    knee: tokens up to the knee of the cumulative KL, None where that nowhere lies above its chord.
    median_length: tokens. first_share: of the total KL, at position 0. num_capped: trajectories cut at the cap.
    warnings: sentences; empty if nothing speaks against N.
    """

    num_tokens: int
    low: int | None
    high: int | None
    level: float
    share: float
    knee: int | None
    median_length: float
    first_share: float
    num_capped: int
    num_trajectories: int
    warnings: tuple[str, ...]


def choose_num_tokens(
    reverse_kl: Sequence[np.ndarray],
    finish_reasons: Sequence[str],
    *,
    share: float = KL_SHARE,
    level: float = 0.95,
    num_resamples: int = 1000,
    seed: int = 0,
) -> NumTokensChoice:
    """Smallest N with sum_{t<=N} n_t K_t >= share of the total (D3), n_t K_t being the KL summed over the n_t trajectories.

    N depends on the cap of the rollouts, on the chat template and on the estimator of the KL: fix all three when comparing.

    The knee is the point of the cumulative curve furthest above the chord from (0, 0) to (longest length, total): Kneedle
    (Satopää et al., 2011) without its smoothing and sensitivity threshold. It needs no share, but moves with the longest rollout.

    Args:
        reverse_kl: nats, [T_i] per trajectory, of full rollouts. finish_reasons: "stop" or "length" of each.
        share: in (0, 1].

    Raises:
        ConfigError: share, level or num_resamples out of range.
        UserError: trajectories are missing, empty or not finite; there is no KL to share out; numbers of entries differ.
    """
    check_settings(level, num_resamples)
    if not 0.0 < share <= 1.0:
        raise ConfigError(
            f"share is {share}; expected a share of the total KL above 0 and at most 1, such as {KL_SHARE}."
        )
    lengths = trajectory_lengths(reverse_kl, "reverse_kl")
    _check_finish_reasons(finish_reasons, len(lengths))
    padded = pad_trajectories(reverse_kl, lengths)
    by_position = padded.sum(axis=0)
    cumulative = np.cumsum(by_position)
    if not cumulative[-1] > 0:
        raise UserError(
            f"The KL of {len(lengths)} trajectories sums to {cumulative[-1]:g}; expected more than 0. Student and teacher agree "
            "everywhere, so no N follows: check that they are two different models (or contexts)."
        )
    num_tokens = int(_first_to_hold(cumulative, share))
    low = high = None
    draws = resample_counts(len(lengths), num_resamples, seed)
    chosen = np.concatenate([_chosen(draws[i : i + _ROWS] @ padded, share) for i in range(0, len(draws), _ROWS)])
    if len(lengths) > 1 and len(chosen):
        ends = [(1.0 - level) / 2.0, (1.0 + level) / 2.0]
        low, high = (int(n) for n in np.quantile(chosen, ends, method="inverted_cdf"))  # an N that was drawn
    num_capped = sum(reason == "length" for reason in finish_reasons)
    return NumTokensChoice(
        num_tokens=num_tokens,
        low=low,
        high=high,
        level=level,
        share=share,
        knee=_knee(cumulative),
        median_length=float(np.median(lengths)),
        first_share=float(by_position[0] / cumulative[-1]),
        num_capped=num_capped,
        num_trajectories=len(lengths),
        warnings=_warnings(by_position, lengths, num_tokens, num_capped, share),
    )


def decay_threshold(
    ks: Sequence[int],
    accuracies: Sequence[float],
    gap: float | Sequence[float],
    delta: float,
    *,
    at_zero: Sequence[float] | None = None,
) -> int:
    """Largest k with A(k) >= A(0) - delta · gap (D1): so far the teacher still makes good what the student began.

    A(k), the accuracy when the teacher continues from the student's first k tokens, tends to the student's own by construction
    once rollouts have finished. So measure it on rollouts longer than k, and pass what the same prompts give at each k.

    Args:
        ks: prefix lengths in tokens, ascending from 0. accuracies: A(k), [K], in the unit of gap; NaN where not measured.
        gap: teacher's minus student's accuracy, above 0; one for all, or [K] on the prompts of each k.
        delta: share of the gap that may be lost, from 0 to 1.
        at_zero: A(0) on the prompts of each k, [K]. None: accuracies[0] for all.

    Raises:
        ConfigError: ks not ascending from 0, gap or delta out of range.
        UserError: lengths differ, A(0) is missing.
    """
    k = np.asarray(ks, dtype=np.int64)
    if not len(k) or k[0] != 0 or (np.diff(k) <= 0).any():
        raise ConfigError(f"ks is {list(ks)}; expected prefix lengths that ascend from 0, such as 0, 50, 100, 200.")
    if not 0.0 <= delta <= 1.0:
        raise ConfigError(f"delta is {delta}; expected the share of the gap that may be lost, from 0 to 1.")
    values = np.asarray(accuracies, dtype=np.float64)
    reference = values[:1] if at_zero is None else np.asarray(at_zero, dtype=np.float64)
    gaps = np.asarray(gap, dtype=np.float64)
    for name, array, alone in (
        ("accuracies", values, False),
        ("at_zero", reference, at_zero is None),
        ("gap", gaps, True),
    ):
        if array.shape != k.shape and not (alone and array.size == 1):
            raise UserError(f"{name} has {array.size} entries for {len(k)} prefix lengths; expected one for each.")
    if not (gaps > 0).all():
        raise ConfigError(
            f"gap is {gap}; expected the teacher's accuracy minus the student's, above 0: else nothing decays."
        )
    if np.isnan(values[0]) or np.isnan(reference[0]):
        raise UserError(
            "A(0) is missing (NaN); measure the teacher without a prefix too, everything is compared with it."
        )
    kept = values >= reference - delta * gaps - _SLACK
    # k = 0 always is kept, unless at_zero contradicts accuracies.
    return int(k[kept].max(initial=0))


@dataclass(frozen=True, slots=True)
class Cascade:
    """KL before and after training on the same rollouts (D4), in B bins; one edge lies at N, so that no bin is half trained.

    starts, stops: int64 [B], positions [start, stop). num_trajectories, num_tokens: int64 [B].
    before, after: float64 [B], mean KL, nats. ratio: float64 [B], after / before, NaN where before is 0.
    trained: bool [B], whether the bin's tokens were in the loss (stop <= N).
    trained_ratio, untrained_ratio: all KL after / all KL before at positions below N and from N on, with a paired interval; None
    where there are no such tokens.
    """

    starts: np.ndarray
    stops: np.ndarray
    num_trajectories: np.ndarray
    num_tokens: np.ndarray
    before: np.ndarray
    after: np.ndarray
    ratio: np.ndarray
    trained: np.ndarray
    trained_ratio: Estimate | None
    untrained_ratio: Estimate | None


def cascade(
    before: Sequence[np.ndarray],
    after: Sequence[np.ndarray],
    bin_tokens: int,
    trained: int,
    *,
    level: float = 0.95,
    num_resamples: int = 1000,
    seed: int = 0,
) -> Cascade:
    """How far KL fell, also where nothing was trained (D4). Published: by 30 to 40 % at positions from N on.

    Args:
        before, after: reverse KL in nats, [T_i] per trajectory, of the same tokens under the student before and after training.
        trained: N, tokens per trajectory that were in the loss.

    Raises:
        ConfigError: bin_tokens, trained, level or num_resamples out of range.
        UserError: no trajectories, an empty one, values that are not finite, or the two sides differ in length.
    """
    check_settings(level, num_resamples, bin_tokens)
    if trained < 0:
        raise ConfigError(f"trained is {trained}; expected the number of tokens in the loss, 0 or more.")
    lengths = trajectory_lengths(before, "before")
    check_same_lengths(lengths, "before", trajectory_lengths(after, "after"), "after")
    longest = int(lengths.max())
    starts = np.union1d(np.arange(0, longest, bin_tokens), [trained] if trained < longest else []).astype(np.int64)
    stops = np.append(starts[1:], longest)
    sums = [np.add.reduceat(pad_trajectories(side, lengths), starts, axis=1) for side in (before, after)]
    counts = np.add.reduceat(length_mask(lengths).astype(np.int64), starts, axis=1)
    num_tokens, inside = counts.sum(axis=0), stops <= trained
    mean_before, mean_after = (side.sum(axis=0) / num_tokens for side in sums)
    draws = resample_counts(len(lengths), num_resamples, seed)

    def ratio_of(bins: np.ndarray) -> Estimate | None:
        if not bins.any():
            return None
        b, a = (side[:, bins].sum(axis=1) for side in sums)
        return ratio_estimate(a, b, counts[:, bins].sum(axis=1) > 0, draws, level)

    return Cascade(
        starts=starts,
        stops=stops,
        num_trajectories=(counts > 0).sum(axis=0),
        num_tokens=num_tokens,
        before=mean_before,
        after=mean_after,
        ratio=safe_ratio(mean_after, mean_before),
        trained=inside,
        trained_ratio=ratio_of(inside),
        untrained_ratio=ratio_of(~inside),
    )


@dataclass(frozen=True, slots=True)
class OwnCascade:
    """KL of each student on its own completions of the same prompts (D4, fresh rollouts): its tokens and lengths change too.

    before, after: curves by position. trained_ratio, untrained_ratio: mean KL per token after / before at positions below N and
    from N on, with an interval paired by prompt; None where either side has no such tokens.
    """

    before: PositionCurves
    after: PositionCurves
    trained_ratio: Estimate | None
    untrained_ratio: Estimate | None


def own_cascade(
    before: Sequence[np.ndarray],
    after: Sequence[np.ndarray],
    bin_tokens: int,
    trained: int,
    *,
    level: float = 0.95,
    num_resamples: int = 1000,
    seed: int = 0,
) -> OwnCascade:
    """Whether the student is nearer to the teacher where it goes itself. Unlike in `cascade`, the two sides differ in tokens.

    Args:
        before, after: reverse KL in nats, [T_i] per prompt, in one order of prompts.
        trained: N, tokens per trajectory that were in the loss.

    Raises:
        ConfigError: bin_tokens, trained, level or num_resamples out of range.
        UserError: no trajectories, an empty one, values that are not finite, or the two sides differ in number.
    """
    if trained < 0:
        raise ConfigError(f"trained is {trained}; expected the number of tokens in the loss, 0 or more.")
    settings = {"level": level, "num_resamples": num_resamples, "seed": seed}
    curves = [PositionCurves.of(side, bin_tokens=bin_tokens, **settings) for side in (before, after)]  # type: ignore[arg-type]
    if len(before) != len(after):
        raise UserError(
            f"before has {len(before)} trajectories and after {len(after)}; expected one of each prompt, in one order."
        )
    draws = resample_counts(len(before), num_resamples, seed)

    def ratio_of(part: slice) -> Estimate | None:
        cut = [[np.asarray(values, dtype=np.float64)[part] for values in side] for side in (before, after)]
        (b, a), (num_b, num_a) = (np.array([[f(v) for v in side] for side in cut]) for f in (np.sum, len))
        if not num_b.sum() or not num_a.sum():
            return None
        value = float(safe_ratio(a.sum() / num_a.sum(), b.sum() / num_b.sum()))
        if min((num_b > 0).sum(), (num_a > 0).sum()) < 2:
            return Estimate(value, np.nan, np.nan, level)
        drawn = safe_ratio(safe_ratio(draws @ a, draws @ num_a), safe_ratio(draws @ b, draws @ num_b))
        low, high = column_quantiles(drawn[:, None], level)
        return Estimate(value, float(low[0]), float(high[0]), level)

    return OwnCascade(curves[0], curves[1], ratio_of(slice(trained)), ratio_of(slice(trained, None)))


def _first_to_hold(cumulative: np.ndarray, share: float) -> np.ndarray:
    """[..., L] with a positive last entry → [...]: entries up to the first that holds the share."""
    # The slack keeps rounding of a sum from costing a token.
    return (cumulative >= share * cumulative[..., -1:] * (1.0 - _SLACK)).argmax(axis=-1) + 1


def _chosen(by_position: np.ndarray, share: float) -> np.ndarray:
    """N of each resample: KL by position [draws, L] → [draws with KL]; a draw of trajectories that agree everywhere has no N."""
    cumulative = np.cumsum(by_position, axis=1)
    return _first_to_hold(cumulative[cumulative[:, -1] > 0], share)


def _knee(cumulative: np.ndarray) -> int | None:
    """Entries up to the largest distance above the chord. (Perpendicular or vertical: the same point, one is a multiple.)"""
    distance = cumulative / cumulative[-1] - np.arange(1, len(cumulative) + 1) / len(cumulative)
    best = int(distance.argmax())
    return best + 1 if distance[best] > 1e-9 else None


def _warnings(
    by_position: np.ndarray, lengths: np.ndarray, num_tokens: int, num_capped: int, share: float
) -> tuple[str, ...]:
    found, total = [], by_position.sum()
    first = by_position[0] / total
    if first > MAX_FIRST_SHARE:
        rest = np.cumsum(by_position[1:])
        without = f"; without it N would be {_first_to_hold(rest, share) + 1}" if len(rest) and rest[-1] > 0 else ""
        found.append(
            f"Position 0 holds {first:.1%} of the total KL ({by_position[0] / len(lengths):.3g} nats on average); expected at most "
            f"{MAX_FIRST_SHARE:.0%} (an even spread gives {len(lengths) / lengths.sum():.1%}){without}. Often the chat templates "
            "of the two sides do not match: run the doctor on the pair and measure again."
        )
    if num_capped:
        found.append(
            f"{num_capped} of {len(lengths)} trajectories ({num_capped / len(lengths):.1%}) were cut at the cap, so N would be "
            "another with another cap; compare N only between runs of one cap, or raise it until completions end by themselves."
        )
    median = float(np.median(lengths))
    if num_tokens > MAX_MEDIAN_SHARE * median:
        found.append(
            f"N = {num_tokens} is {num_tokens / median:.0%} of the median length {median:g}; expected at most "
            f"{MAX_MEDIAN_SHARE:.0%}. KL is spread over the completion, so stopping at N saves little: choose a smaller share, or "
            "check by training that a smaller N does as well."
        )
    return tuple(found)


def _curve(sums: np.ndarray, counts: np.ndarray, draws: np.ndarray, level: float) -> Curve:
    """Sums and token counts per trajectory and bin [R, B], draws [num_resamples, R] → curve over B bins."""
    num_bins = sums.shape[1]
    low, high = np.full(num_bins, np.nan), np.full(num_bins, np.nan)
    for start in range(0, num_bins, _COLUMNS):
        block = slice(start, start + _COLUMNS)
        low[block], high[block] = column_quantiles(safe_ratio(draws @ sums[:, block], draws @ counts[:, block]), level)
    alone = (counts > 0).sum(axis=0) < 2
    low[alone] = high[alone] = np.nan
    return Curve(sums.sum(axis=0) / counts.sum(axis=0), low, high)


def _check_finish_reasons(reasons: Sequence[str], num_trajectories: int) -> None:
    unknown = sorted(set(reasons) - {"stop", "length"})
    if len(reasons) != num_trajectories or unknown:
        raise UserError(
            f"{len(reasons)} finish reasons for {num_trajectories} trajectories{f', among them {unknown}' if unknown else ''}; "
            'expected "stop" or "length" for each: pass those of the same rollouts.'
        )
