"""`rollout.control = "hold"` in a run: the next step's schedule from the acceptance of this one. `train.control` has the rules."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from leanroll.calibrate.passes import bin_edges
from leanroll.calibrate.search import default_budgets
from leanroll.config import RolloutConfig
from leanroll.errors import ConfigError
from leanroll.measure.acceptance import TAIL_QUANTILE
from leanroll.rollout.schedule import BudgetSchedule
from leanroll.train.control import BudgetController, Decision, Ladder, Move
from leanroll.types import RolloutGroup

DEFAULT_TARGET = 0.90
"""Of schedules that name none; the default of `leanroll calibrate`."""

_SUFFIX = "-held"

_PER_DOUBLING = 2
"""Rungs of the ladder: 41 % apart. A training step measures a tenth of what a calibration does; it cannot tell finer ones apart."""


class HeldSchedule:
    """The schedule of a run whose budgets follow acceptance."""

    def __init__(
        self, schedule: BudgetSchedule, rollout: RolloutConfig, longest: int, *, with_sampler_adapter: bool = False
    ) -> None:
        """schedule: budgets to start with, rounded up to the ladder. longest: tokens that a sequence of the run can have.
        with_sampler_adapter: the sampler has one, without which the budgets are too small; the schedule says so.

        Bins that begin beyond `longest` keep their budgets, or follow the last one that is held.

        Raises:
            ConfigError: the schedule is dense, its target is for another quantile, or no budget lies inside the limits.
        """
        if schedule.is_dense:
            raise ConfigError(
                f"rollout.control is 'hold', but schedule {schedule.name!r} reads every page at every length and has no bins to "
                "move; start with finite budgets (ones larger than any completion start dense)."
            )
        self._start, self._with_sampler_adapter = schedule, with_sampler_adapter
        self.target = rollout.target if rollout.target is not None else _own_target(schedule)
        self._last_step = 0
        most = -(-longest // schedule.page_size)
        num_bins = int(schedule.bins(np.array([longest]))[0]) + 1
        self._first_lengths = bin_edges(schedule)[:num_bins]
        ladder = _ladder(schedule, rollout, num_bins, most)
        start = np.searchsorted(np.asarray(ladder.pages), np.asarray(schedule.pages[:num_bins])).tolist()
        self._controller = BudgetController(
            ladder, start, target=self.target, quantile=TAIL_QUANTILE, calm_steps=rollout.calm_steps
        )

    @property
    def schedule(self) -> BudgetSchedule:
        """What the next step samples with."""
        held = self._controller.pages
        rest = tuple(max(pages, held[-1]) for pages in self._start.pages[len(held) :])
        return replace(
            self._start,
            name=f"{self._start.name.removesuffix(_SUFFIX)}{_SUFFIX}",
            pages=held + rest,
            target=self.target,
            quantile=TAIL_QUANTILE,
            provenance={
                "made_by": "leanroll rl, rollout.control = hold",
                "after_step": self._last_step,
                "started_from": self._start.name,
                **({"with_sampler_adapter": True} if self._with_sampler_adapter else {}),
            },
        )

    def shifted(self, rungs: int) -> BudgetSchedule:
        """`schedule` with every held budget this many rungs higher on its ladder (lower if negative), inside its limits."""
        ladder, now = self._controller.ladder, self.schedule
        moved = tuple(
            ladder.pages[min(max(rung + rungs, low), high)]
            for rung, low, high in zip(self._controller.rungs, ladder.lowest, ladder.highest, strict=True)
        )
        # Budgets beyond the held ones do not matter here, but must not decrease.
        rest = tuple(max(pages, moved[-1]) for pages in now.pages[len(moved) :])
        return replace(now, name=f"{now.name}{rungs:+d}", pages=moved + rest)

    def observe(
        self, step: int, groups: Sequence[RolloutGroup], rates: Sequence[np.ndarray]
    ) -> tuple[dict[str, float], list[str]]:
        """Take in what was measured of a step that sampled with `schedule`, and move; returns metrics, and the moves in words.

        rates: alpha per rollout of the flattened groups. A completion's first token, from the dense prefill, does not count.
        """
        prompts = [len(g.prompt.token_ids) for g in groups for _ in g.rollouts]
        later = [np.asarray(r[1:], dtype=np.float64) for r in rates]
        owners = np.repeat(np.arange(len(later)), np.array([len(r) for r in later], dtype=np.int64))
        lengths = [p + 1 + np.arange(len(r)) for p, r in zip(prompts, later, strict=True)]
        nothing = np.zeros(0, dtype=np.int64)
        decision = self._controller.observe(
            step, np.concatenate([nothing, *later]), self._start.bins(np.concatenate([nothing, *lengths])), owners
        )
        self._last_step = step
        return self._metrics(decision), [self._text(move, decision) for move in decision.moves]

    def state(self) -> dict[str, Any]:
        """For a checkpoint: tensors and plain values."""
        state = self._controller.state()
        bins = [{**b, "rows": torch.from_numpy(b["rows"])} for b in state]
        return {"bins": bins, "last_step": self._last_step}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continue where `state` was taken."""
        self._controller.load_state([{**b, "rows": b["rows"].numpy()} for b in state["bins"]])
        self._last_step = state["last_step"]

    def _metrics(self, decision: Decision) -> dict[str, float]:
        pages = self._controller.ladder.pages
        metrics: dict[str, float] = {
            "control/target": self.target,
            "control/raised": sum(m.new > m.old for m in decision.moves),
            "control/lowered": sum(m.new < m.old for m in decision.moves),
            "control/at_limit": len(decision.at_limit),
        }
        for first, rung, estimate in zip(self._first_lengths, decision.rungs, decision.estimates, strict=True):
            metrics[f"control/bin_{first}/pages"] = pages[rung]
            if estimate is not None:
                metrics[f"control/bin_{first}/tail"] = estimate.tail
                metrics[f"control/bin_{first}/tail_low"] = estimate.low
                metrics[f"control/bin_{first}/effective_tokens"] = estimate.effective
        for move in decision.moves:
            metrics[f"control/bin_{self._first_lengths[move.bin]}/next_pages"] = pages[move.new]
        return metrics

    def _text(self, move: Move, decision: Decision) -> str:
        pages = self._controller.ladder.pages
        text = f"from {self._first_lengths[move.bin]} tokens: {pages[move.old]} → {pages[move.new]} pages"
        estimate = decision.estimates[move.bin]
        if move.reason == "order":
            return f"{text} (as shorter lengths need)"
        assert estimate is not None
        return f"{text} (tail {estimate.tail:.3f}, at least {estimate.low:.3f})"


def _own_target(schedule: BudgetSchedule) -> float:
    if schedule.target is None:
        return DEFAULT_TARGET
    if schedule.quantile not in (None, TAIL_QUANTILE) or not 0.0 < schedule.target < 1.0:
        raise ConfigError(
            f"schedule {schedule.name!r} was made for target {schedule.target} of quantile {schedule.quantile}; rollout.control = "
            f"'hold' holds the quantile {TAIL_QUANTILE} at a target between 0 and 1. Set rollout.target."
        )
    return schedule.target


def _ladder(schedule: BudgetSchedule, rollout: RolloutConfig, num_bins: int, most: int) -> Ladder:
    """most: pages of the longest sequence."""
    pages = default_budgets(most, schedule.first_pages + schedule.last_pages, _PER_DOUBLING)
    largest = pages[-1] if rollout.max_pages is None else rollout.max_pages
    allowed = [rung for rung, p in enumerate(pages) if rollout.min_pages <= p <= largest]
    if not allowed:
        raise ConfigError(
            f"no budget of the ladder {', '.join(map(str, pages))} lies from rollout.min_pages = {rollout.min_pages} to "
            f"rollout.max_pages = {rollout.max_pages}; widen the limits (sequences of this run have at most {most} pages)."
        )
    closed = [(i + 1) * schedule.bin_pages - 1 for i in range(len(schedule.pages) - 1)]
    ends = [min(end, most) for end in [*closed, most]][:num_bins]
    dense = [next(rung for rung, p in enumerate(pages) if p >= end) for end in ends]
    highest = tuple(min(rung, allowed[-1]) for rung in dense)
    return Ladder(pages, tuple(min(allowed[0], rung) for rung in highest), highest)
