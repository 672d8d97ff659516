"""How far into the student's completions the teacher can still help (D1): it continues from the student's first k tokens.

A(k) tends to the student's own reward once completions have ended, and long completions belong to harder prompts. So every k is
measured on the prompts whose completion is longer than k, beside three controls on the very same prompts: the student's
completion, the teacher's own (A(0)), and the teacher continuing its own first k tokens. All have the same total budget.

Worked example: student completions of 3 and 9 tokens, k = 5, at most 12 tokens: only the second prompt counts; the teacher gets its
prompt and the 5 tokens, and generates at most 7 more; the reward sees all of them.

Source: early-stopped rollouts, arXiv 2605.27028.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from leanroll.config import ProfileConfig
from leanroll.measure.positions import decay_threshold
from leanroll.rollout.engine import RolloutEngine
from leanroll.rollout.schedule import BudgetSchedule
from leanroll.tasks import TaskItem
from leanroll.tasks.metrics import Interval, bootstrap_mean, paired_difference
from leanroll.tasks.rewards import RewardRunner
from leanroll.train import setup
from leanroll.train.evaluation import score_groups
from leanroll.train.progress import RunDisplay
from leanroll.train.teacher import Teacher
from leanroll.types import Prompt, RolloutGroup

_KIND = "kind"
"""Column of task items that A(k) is broken down by, where the task has it."""
_LEAST_PROMPTS = 2


@dataclass(frozen=True, slots=True)
class KindDecay:
    """Mean rewards of one kind of prompt at one k. A prefix can put its constraint out of reach: then continued is low."""

    continued: float
    own_prefix: float
    student: float
    num_prompts: int


@dataclass(frozen=True, slots=True)
class DecayPoint:
    """Mean rewards at one k, all on the `num_prompts` prompts whose student completion is longer than k tokens.

    continued: A(k), the teacher after the student's first k tokens. at_zero: A(0), the teacher alone. student: the student alone.
    own_prefix: the teacher after its own first k tokens (its whole completion where that is no longer). difference: continued -
    at_zero, paired. by_kind: where the task has kinds.
    """

    k: int
    num_prompts: int
    continued: Interval
    at_zero: Interval
    student: Interval
    own_prefix: Interval
    difference: Interval
    by_kind: dict[str, KindDecay]

    @property
    def gap(self) -> float:
        """The teacher's lead over the student."""
        return self.at_zero.mean - self.student.mean


@dataclass(frozen=True, slots=True)
class Decay:
    """points: by k, ascending from 0. threshold: tokens, None where there is none; `notes` say why, and what weakens it."""

    points: tuple[DecayPoint, ...]
    threshold: int | None
    notes: tuple[str, ...]


def prefix_lengths(lengths: Sequence[int], decay_tokens: Sequence[int], num_points: int) -> list[int]:
    """The k at which to measure, ascending from 0; each leaves at least two completions that are longer.

    Quantiles of the lengths; where too many of them coincide (completions cut at the cap), even parts of the longest.

    Args:
        lengths: tokens per completion. decay_tokens: the k above 0 as the recipe names them, else empty. num_points: k above 0.
    """

    def usable(ks: Sequence[int]) -> list[int]:
        return sorted({int(k) for k in ks if k > 0 and sum(n > k for n in lengths) >= _LEAST_PROMPTS})

    if decay_tokens:
        return [0, *usable(decay_tokens)]
    parts = [i / (num_points + 1) for i in range(1, num_points + 1)]
    found = usable(np.quantile(lengths, parts, method="lower").tolist())
    if len(found) < num_points:
        even = usable([int(max(lengths) * part) for part in parts])
        found = even if len(even) > len(found) else found
    return [0, *found]


def measure_decay(
    config: ProfileConfig,
    teacher: Teacher,
    rewards: RewardRunner,
    items: Sequence[TaskItem],
    prompts: Sequence[Prompt],
    groups: Sequence[RolloutGroup],
    display: RunDisplay,
) -> Decay:
    """Let the teacher continue the student's completions.

    Args:
        items, prompts, groups: [P], the task's items, the teacher's prompts, and the student's groups of one completion each.

    Raises:
        RewardError: a reward failed and the recipe does not say to go on.
    """
    options = config.profile
    with teacher.scoring() as policy:
        # Its log-probs are not trained on, so dense attention is the only fair reading.
        engine = setup.build_engine(
            policy, BudgetSchedule.dense(), config.rollout.model_copy(update={"schedule": "dense"})
        )
        measure = _Measurement(config, teacher, engine, rewards, items, prompts, display)
        student = measure.rewards_of(range(len(items)), groups)
        own = measure.complete(range(len(items)), [()] * len(items), 0)
        at_zero = measure.rewards_of(range(len(items)), own)
        prefixes = [g.rollouts[0].token_ids for g in groups]
        own_prefixes = [g.rollouts[0].token_ids if g.rollouts else () for g in own]
        points = []
        for step, k in enumerate(
            prefix_lengths([len(p) for p in prefixes], options.decay_tokens, options.decay_points)
        ):
            rows = [i for i, prefix in enumerate(prefixes) if len(prefix) > k]
            continued, control = at_zero.copy(), at_zero.copy()
            if k:
                longer = [i for i in rows if len(own_prefixes[i]) > k]
                for values, which, source in ((continued, rows, prefixes), (control, longer, own_prefixes)):
                    made = measure.complete(which, [source[i][:k] for i in which], step)
                    values[which] = measure.rewards_of(which, made)
            points.append(_point(k, rows, items, continued, at_zero, student, control, options.level, options.seed))
    return _read(tuple(points), options.delta)


class _Measurement:
    """Teacher completions from prefixes, and their rewards."""

    def __init__(
        self,
        config: ProfileConfig,
        teacher: Teacher,
        engine: RolloutEngine,
        rewards: RewardRunner,
        items: Sequence[TaskItem],
        prompts: Sequence[Prompt],
        display: RunDisplay,
    ) -> None:
        self._policy, self._engine, self._rewards = teacher.policy, engine, rewards
        self._items, self._prompts, self._display = items, prompts, display
        self._sampling = setup.sampling_params(teacher.policy, config.rollout, seed=config.profile.seed)

    def complete(self, rows: Sequence[int], prefixes: Sequence[tuple[int, ...]], step: int) -> list[RolloutGroup]:
        """Whole completions, prefixes included; one length of prefix per call. step: of the draws."""
        if not len(rows):
            return []
        prompts = [
            replace(self._prompts[i], token_ids=(*self._prompts[i].token_ids, *prefix))
            for i, prefix in zip(rows, prefixes, strict=True)
        ]
        most = self._sampling.max_completion_length - len(prefixes[0])
        with self._display.phase(f"teacher after {len(prefixes[0])} tokens", total=len(prompts)):
            groups = self._engine.generate(
                prompts,
                replace(self._sampling, max_completion_length=most),
                1,
                step=step,
                progress=self._display.show_rollout,
            )
        return [self._whole(group, prefix) for group, prefix in zip(groups, prefixes, strict=True)]

    def _whole(self, group: RolloutGroup, prefix: tuple[int, ...]) -> RolloutGroup:
        if not prefix or not group.rollouts:
            return group
        token_ids = (*prefix, *group.rollouts[0].token_ids)
        # Decoded as one text: a token of the prefix may be half of a character.
        rollout = replace(group.rollouts[0], token_ids=token_ids, text=self._policy.decode(token_ids))
        return replace(group, rollouts=(rollout,))

    def rewards_of(self, rows: Sequence[int], groups: Sequence[RolloutGroup]) -> np.ndarray:
        """Total rewards, float64 [len(rows)]; NaN where a completion is missing."""
        if not any(group.rollouts for group in groups):
            return np.full(len(rows), np.nan)
        with self._display.phase("reward"):
            total, _, _ = score_groups(self._rewards, [self._items[i] for i in rows], groups, 1)
        return total[:, 0]


def _point(
    k: int,
    rows: Sequence[int],
    items: Sequence[TaskItem],
    continued: np.ndarray,
    at_zero: np.ndarray,
    student: np.ndarray,
    own_prefix: np.ndarray,
    level: float,
    seed: int,
) -> DecayPoint:
    # A prompt counts for all four or for none.
    known = ~np.isnan(continued + at_zero + student + own_prefix)
    used = np.array([i for i in rows if known[i]], dtype=int)

    def interval(values: np.ndarray) -> Interval:
        return bootstrap_mean(values[used], level=level, seed=seed)

    kinds = sorted({str(items[i].columns[_KIND]) for i in used if _KIND in items[i].columns})
    by_kind = {}
    for kind in kinds:
        of_kind = [i for i in used if str(items[i].columns.get(_KIND)) == kind]
        means = [float(values[of_kind].mean()) for values in (continued, own_prefix, student)]
        by_kind[kind] = KindDecay(means[0], means[1], means[2], len(of_kind))
    return DecayPoint(
        k=k,
        num_prompts=len(used),
        continued=interval(continued),
        at_zero=interval(at_zero),
        student=interval(student),
        own_prefix=interval(own_prefix),
        difference=paired_difference(continued[used], at_zero[used], level=level, seed=seed),
        by_kind=by_kind,
    )


def _read(points: tuple[DecayPoint, ...], delta: float) -> Decay:
    """The threshold, and what to think of it."""
    first, notes = points[0], []
    if not first.gap > 0:
        note = (
            f"On {first.num_prompts} prompts the teacher's mean reward is {first.at_zero.mean:.3f} and the student's "
            f"{first.student.mean:.3f}; expected the teacher's to be higher. There is no lead that could decay: take a better "
            "teacher, or more prompts."
        )
        return Decay(points, None, (note,))
    used = [p for p in points if p.gap > 0]
    if len(used) < len(points):
        left_out = ", ".join(str(p.k) for p in points if not p.gap > 0)
        notes.append(
            f"At k = {left_out} the teacher does not beat the student on the prompts left, so that k was left out."
        )
    threshold = decay_threshold(
        [p.k for p in used],
        [p.continued.mean for p in used],
        [p.gap for p in used],
        delta,
        at_zero=[p.at_zero.mean for p in used],
    )
    wide = [p for p in used if p.k and (p.difference.high - p.difference.low) / 2 > p.gap]
    if wide:
        notes.append(
            f"At k = {', '.join(str(p.k) for p in wide)} the interval of A(k) - A(0) is wider than the teacher's lead itself, so "
            "that the decay threshold is a guess: measure more prompts (profile.num_prompts)."
        )
    return Decay(points, threshold, tuple(notes))
