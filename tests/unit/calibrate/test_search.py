"""The search for budgets, against models of acceptance that are known exactly: no policy, no kernels."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from leanroll.calibrate.fit import Search
from leanroll.calibrate.passes import SchedulePass, bin_edges
from leanroll.calibrate.search import BinEstimate, Ladder, default_budgets
from leanroll.calibrate.trajectories import Trajectory
from leanroll.measure.acceptance import AcceptanceStats
from leanroll.rollout.schedule import UNLIMITED, BudgetSchedule

BIN_PAGES, NUM_BINS = 64, 8
BUDGETS = default_budgets(NUM_BINS * BIN_PAGES, 3)
TEMPLATE = BudgetSchedule("fit", bin_pages=BIN_PAGES)


@dataclass
class SimulatedRunner:
    """Stands in for `PassRunner`: 1 - tail = hardness · length^0.6 / pages^0.8, with a known interval around it.

    noise: half width of the interval with one trajectory; the middle is off by a fixed share of it.
    """

    hardness: float = 0.05
    noise: float = 0.0
    history: float = 0.0
    quantile: float = 0.05
    seconds: float = 0.0
    num_scored: int = 0
    passes: list[tuple[tuple[int, ...], int]] = field(default_factory=list)

    def tail(self, schedule: BudgetSchedule, i: int) -> float:
        pages, held = schedule.pages[i], (i + 1) * BIN_PAGES - 1
        if pages >= held:
            return 1.0
        earlier = np.mean(schedule.pages[: i + 1]) / pages  # smaller budgets before cost a little
        return float(1.0 - self.hardness * held**0.6 / pages**0.8 * (1.0 + self.history * (1.0 - earlier)))

    def run(self, schedule, trajectories, *, enough=None, check_from=1, progress=None):
        edges = bin_edges(schedule)
        for number in range(1, len(trajectories) + 1):
            self.num_scored += 1
            self.seconds += 1.0
            bins = []
            for i in range(len(schedule.pages)):
                tail = self.tail(schedule, i) if i < NUM_BINS else 1.0
                half = 0.0 if tail == 1.0 else self.noise / number**0.5
                bins.append(
                    AcceptanceStats(edges[i], edges[i + 1], 100, number, 1.0, tail, tail - half, tail + half, 0.9)
                )
            result = SchedulePass(schedule, tuple(trajectories[:number]), (), tuple(bins), 1.0)
            if enough is not None and number >= check_from and enough(result):
                break
        self.passes.append((schedule.pages, number))
        return result


def search(runner: SimulatedRunner, num_trajectories: int = 8, **options) -> Search:
    ladder = Ladder.of(
        BUDGETS, num_bins=NUM_BINS, bin_pages=BIN_PAGES, coverage=[num_trajectories] * NUM_BINS, min_trajectories=4
    )
    trajectories = [Trajectory(str(i), (0,) * 8192) for i in range(num_trajectories)]
    return Search(runner, TEMPLATE, ladder, trajectories, **options)


def smallest_sufficient(runner: SimulatedRunner, target: float) -> list[int]:
    """By trying every rung at every length, the last bin first being irrelevant: what an exhaustive sweep finds."""
    found = []
    for i in range(NUM_BINS):
        rungs = [r for r, p in enumerate(BUDGETS) if runner.tail(TEMPLATE_AT(p), i) >= target]
        found.append(max([min(rungs), *found[-1:]]))
    return found


def TEMPLATE_AT(pages: int) -> BudgetSchedule:
    return BudgetSchedule("fixed", bin_pages=BIN_PAGES, pages=(pages,) * NUM_BINS)


@settings(max_examples=60, deadline=None)
@given(hardness=st.floats(0.005, 0.6), target=st.sampled_from((0.8, 0.86, 0.9, 0.95)), guess=st.integers(0, 20))
def test_finds_what_an_exhaustive_sweep_finds_in_a_fraction_of_the_passes(hardness, target, guess) -> None:
    runner = SimulatedRunner(hardness)
    fit = search(runner).fit(target, [guess] * NUM_BINS)
    assert fit.complete
    assert list(fit.schedule.pages) == [*(BUDGETS[r] for r in smallest_sufficient(runner, target)), UNLIMITED]
    assert fit.num_passes <= 10
    assert len(fit.final.trajectories) == 8, "the reported pass is on all trajectories"


def test_typical_cost_is_a_quarter_of_the_sweep() -> None:
    runner = SimulatedRunner(0.05)
    s = search(runner)
    total = sum(s.fit(target, [6] * NUM_BINS).num_scored for target in (0.8, 0.86, 0.9, 0.92))
    assert total * 4 <= len(BUDGETS) * 8 * 4, "four targets, each against one sweep"
    first = search(SimulatedRunner(0.05)).fit(0.86, [6] * NUM_BINS).num_scored
    assert first * 4 <= len(BUDGETS) * 8


def test_passes_of_one_target_serve_the_next() -> None:
    s = search(SimulatedRunner(0.05))
    s.fit(0.86, [6] * NUM_BINS)
    again = s.fit(0.86, [6] * NUM_BINS)
    assert again.num_passes <= 1


def test_history_is_measured_not_assumed() -> None:
    """Later bins suffer from the small budgets of earlier ones: the final schedule reaches the target all the same."""
    runner = SimulatedRunner(0.05, history=0.5)
    fit = search(runner).fit(0.9, [6] * NUM_BINS)
    assert all(runner.tail(fit.schedule, i) >= 0.9 for i in range(NUM_BINS))


def test_an_interval_that_straddles_the_target_does_not_suffice() -> None:
    runner = SimulatedRunner(0.05, noise=0.05)
    fit = search(runner).fit(0.9, [6] * NUM_BINS)
    assert all(b.tail_low >= 0.9 for b in fit.final.bins[:-1])


def test_clear_passes_stop_early() -> None:
    runner = SimulatedRunner(0.05, noise=0.01)
    search(runner, num_trajectories=16).fit(0.9, [2] * NUM_BINS)
    assert runner.passes[0][1] < 16


def test_out_of_time_keeps_what_was_shown() -> None:
    runner = SimulatedRunner(0.05)
    fit = search(runner, deadline=-1.0).fit(0.9, [6] * NUM_BINS)
    assert not fit.complete
    assert all(runner.tail(fit.schedule, i) >= 0.9 for i in range(NUM_BINS))
    assert len(runner.passes) == 1


def test_a_bin_without_data_reads_everything() -> None:
    coverage = [8] * 6 + [2, 0]
    ladder = Ladder.of(BUDGETS, num_bins=NUM_BINS, bin_pages=BIN_PAGES, coverage=coverage, min_trajectories=4)
    assert ladder.bracket([], 6, 0.9).is_closed
    estimate = BinEstimate(5, 0.95, 0.94, 0.96, 8)
    rungs = ladder.conclude([[estimate] * 6 + [None, None]], 0.9)
    assert [BUDGETS[r] >= (i + 1) * BIN_PAGES - 1 for i, r in enumerate(rungs)][6:] == [True, True]
    assert rungs[5] == 5


def test_contradictions_go_to_the_larger_budget() -> None:
    ladder = Ladder.of(BUDGETS, num_bins=1, bin_pages=512, coverage=[8], min_trajectories=4)
    good, bad = BinEstimate(4, 0.95, 0.94, 0.96, 8), BinEstimate(7, 0.8, 0.79, 0.81, 8)
    b = ladder.bracket([[good], [bad]], 0, 0.9)
    assert (b.low, b.high) == (7, ladder.ceilings[0])


@given(most=st.integers(8, 4096), reserved=st.integers(1, 8))
def test_default_budgets(most: int, reserved: int) -> None:
    budgets = default_budgets(most, reserved)
    assert budgets[-1] == most
    assert list(budgets) == sorted(set(budgets))
    assert budgets[0] <= max(reserved + 3, most)


def test_bin_edges_follow_the_lookup() -> None:
    schedule = BudgetSchedule("edges", bin_pages=4, pages=(8, 9, 10))
    edges = bin_edges(schedule)
    for i in range(3):
        assert schedule.budget(edges[i]) == 8 + i
        assert i == 0 or schedule.budget(edges[i] - 1) == 7 + i


@pytest.mark.parametrize("guess", [0, 30])
def test_guesses_are_kept_inside_the_ladder(guess: int) -> None:
    fit = search(SimulatedRunner(0.05)).fit(0.86, [guess] * NUM_BINS)
    assert fit.complete
