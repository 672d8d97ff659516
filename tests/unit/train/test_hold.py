"""From a schedule and a recipe to the controller's ladder, and back to a schedule."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from leanroll.config import RolloutConfig
from leanroll.errors import ConfigError
from leanroll.rollout.schedule import UNLIMITED, BudgetSchedule
from leanroll.rundir_metrics import describe_metric
from leanroll.train.hold import HeldSchedule
from leanroll.types import Prompt, Rollout, RolloutGroup

SCHEDULE = BudgetSchedule("s", page_size=8, bin_pages=8, pages=(6, 6, 6, 40, UNLIMITED), dense_layers=(0,), target=0.88)
"""Bins begin at 1, 57, 121, 185 and 249 tokens."""


def hold(schedule: BudgetSchedule = SCHEDULE, longest: int = 184, **options: Any) -> HeldSchedule:
    return HeldSchedule(schedule, RolloutConfig(schedule="s", control="hold", **options), longest)


def sampled(prompt: int, *alphas: np.ndarray) -> tuple[list[RolloutGroup], list[np.ndarray]]:
    """One group with a prompt of so many tokens; the dense first tokens are put before the rates given."""
    rates = [np.concatenate([[0.0], a]) for a in alphas]  # a first token that would count would be seen
    rollouts = tuple(Rollout(0, i, (5,) * len(r), (-1.0,) * len(r), "length") for i, r in enumerate(rates))
    return [RolloutGroup(Prompt(0, (5,) * prompt), rollouts)], rates


def test_the_schedule_says_whether_it_needs_a_sampler_adapter() -> None:
    rollout = RolloutConfig(schedule="s", control="hold")
    held = HeldSchedule(SCHEDULE, rollout, 184, with_sampler_adapter=True)
    assert held.schedule.provenance["with_sampler_adapter"] is True
    assert "with_sampler_adapter" not in hold(held.schedule).schedule.provenance, "the next run has none"


def test_only_bins_within_reach_are_held() -> None:
    held = hold()
    assert held.schedule.pages == (6, 6, 6, 40, UNLIMITED)
    assert (held.schedule.target, held.schedule.quantile, held.schedule.name) == (0.88, 0.05, "s-held")
    groups, rates = sampled(20, *[np.full(160, 0.3)] * 8)
    metrics, moves = held.observe(1, groups, rates)
    first, second, third, fourth, last = held.schedule.pages
    assert first == 8, "the first rung that has all 7 pages of bin 0 is its last"
    assert first <= second <= third <= 23
    assert third > 12
    assert (fourth, last) == (max(40, third), UNLIMITED)
    assert len(moves) == 3
    assert "from 57 tokens: 6 → " in moves[1]
    assert metrics["control/raised"] == 3
    assert [n for n in metrics if n.endswith("/pages")] == [f"control/bin_{s}/pages" for s in (1, 57, 121)]
    assert all(describe_metric(name) is not None for name in metrics)
    assert metrics["control/bin_57/next_pages"] == second
    assert metrics["control/bin_57/tail"] < 0.5


def test_tokens_fall_into_the_bin_that_their_budget_was_looked_up_in() -> None:
    """A prompt of 54 tokens: 55 and 56 tokens are 7 pages, bin 0; 57 tokens are 8 pages, bin 1."""
    held = hold()
    groups, rates = sampled(54, *[np.array([1.0, 1.0, *[0.2] * 20])] * 8)
    metrics, _ = held.observe(1, groups, rates)
    assert metrics["control/bin_1/tail"] > 0.99
    assert metrics["control/bin_57/tail"] < 0.25
    assert "control/bin_121/tail" not in metrics
    assert held.schedule.pages[0] == 6


def test_nothing_measured_changes_nothing() -> None:
    held = hold()
    metrics, moves = held.observe(1, [], [])
    assert moves == []
    assert metrics["control/raised"] == metrics["control/lowered"] == 0
    assert held.schedule.pages == SCHEDULE.pages


def test_state_round_trip() -> None:
    one, two = hold(), hold()
    rng = np.random.default_rng(0)
    steps = [sampled(20, *(1 - np.minimum(rng.exponential(0.06, (8, 160)), 1))) for _ in range(8)]
    for step, (groups, rates) in enumerate(steps[:4], 1):
        one.observe(step, groups, rates)
    two.load_state(one.state())
    assert two.schedule == one.schedule != hold().schedule
    for step, (groups, rates) in enumerate(steps[4:], 5):
        assert one.observe(step, groups, rates) == two.observe(step, groups, rates)
    assert two.schedule == one.schedule
    assert BudgetSchedule.from_dict(json.loads(one.schedule.to_json()), "x") == one.schedule


def test_targets() -> None:
    assert hold().target == 0.88
    assert hold(target=0.93).target == 0.93
    assert hold(BudgetSchedule("s", pages=(32,))).target == 0.90
    with pytest.raises(ConfigError, match=r"quantile 0\.01.*rollout\.target"):
        hold(BudgetSchedule("s", pages=(32,), target=0.9, quantile=0.01))
    assert hold(BudgetSchedule("s", pages=(32,), target=0.9, quantile=0.01), target=0.9).target == 0.9


def test_limits_bound_the_start_and_the_moves() -> None:
    held = hold(min_pages=8, max_pages=12)
    assert held.schedule.pages[:3] == (8, 8, 8)
    groups, rates = sampled(20, *[np.full(160, 0.3)] * 8)
    metrics, _ = held.observe(1, groups, rates)
    metrics, _ = held.observe(2, groups, rates)
    assert held.schedule.pages[:3] == (8, 12, 12)
    assert metrics["control/at_limit"] == 3
    with pytest.raises(ConfigError, match="no budget of the ladder 6, 8, 12"):
        hold(min_pages=9, max_pages=11)


def test_an_open_last_bin_is_held_up_to_the_longest_sequence() -> None:
    schedule = BudgetSchedule("s", page_size=8, bin_pages=8, pages=(6, 6), dense_layers=(0,))
    held = hold(schedule, longest=800)
    groups, rates = sampled(200, *[np.full(500, 0.1)] * 8)
    for step in range(1, 9):
        held.observe(step, groups, rates)
    assert held.schedule.pages == (6, 100)
    assert hold(BudgetSchedule("s", page_size=8, pages=(UNLIMITED - 1,)), longest=800).schedule.pages == (100,)


def test_shifted_budgets_stay_on_the_ladder_and_inside_its_limits() -> None:
    held = hold(replace(SCHEDULE, pages=(8, 12, 12, 40, UNLIMITED)), min_pages=8)
    assert held.shifted(0).pages == held.schedule.pages
    assert held.shifted(1).pages == (8, 17, 17, 40, UNLIMITED), "bin 0 has all its pages already"
    assert held.shifted(2).pages == (8, 17, 23, 40, UNLIMITED), "bin 1 too"
    assert held.shifted(-2).pages == (8, 8, 8, 40, UNLIMITED)
    assert held.schedule.pages == (8, 12, 12, 40, UNLIMITED), "nothing moved"


def test_a_dense_schedule_has_no_bins() -> None:
    with pytest.raises(ConfigError, match="no bins to move"):
        hold(BudgetSchedule("mine"))
