"""The controller of the budgets against worlds whose acceptance is known."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import ndtr

from leanroll.calibrate.search import default_budgets
from leanroll.errors import ConfigError
from leanroll.train.control import BudgetController, Ladder

TARGET, HIGH = 0.9, 0.3
STEPS, SETTLED = 45, 15


@dataclass(frozen=True)
class World:
    """Known alpha(length, budget). In bin i the 5th percentile of 1 - alpha is (1 - TARGET) (need_i / pages)^exponent, 0 where
    all pages are read. A share HIGH of the tokens is accepted, the others follow a Beta distribution on [0, 0.999] (Sparrow,
    section 3); tokens of a trajectory correlate.

    need: pages that just meet the target. all_pages: of each bin. trajectories: per step and bin. tokens: of each."""

    need: tuple[float, ...] = (34, 60, 96, 110, 136, 160)
    exponent: float = 0.8
    all_pages: tuple[int, ...] = (127, 255, 383, 511, 639, 767)
    trajectories: tuple[int, ...] = (8,) * 6
    tokens: int = 100
    correlation: float = 0.1
    _none: tuple[np.ndarray, ...] = field(
        default=(np.zeros(0), np.zeros(0, dtype=int), np.zeros(0, dtype=int)), repr=False
    )

    def mismatch(self, bin_: int, pages: int) -> float:
        if pages >= self.all_pages[bin_]:
            return 0.0
        return float(min((1 - TARGET) * (self.need[bin_] / pages) ** self.exponent, 0.95))

    def sample(self, rng: np.random.Generator, pages: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        parts = [self._none]
        for i, budget in enumerate(pages):
            shape = (self.trajectories[i], self.tokens)
            common = np.sqrt(self.correlation) * rng.normal(size=(shape[0], 1))
            u = ndtr(common + np.sqrt(1 - self.correlation) * rng.normal(size=shape)).ravel()
            delta = self.mismatch(i, budget)
            alpha = np.ones(len(u))
            if delta:
                # Beta(a, 1) has the quantile function u^(1/a); a puts the 5th percentile of all tokens at 1 - delta.
                a = np.log(0.05 / (1 - HIGH)) / np.log(min((1 - delta) / 0.999, 0.9999))
                alpha = np.where(u < 1 - HIGH, 0.999 * (u / (1 - HIGH)) ** (1 / a), 0.9995)
            parts.append((alpha, np.full(len(u), i), np.repeat(np.arange(shape[0]), shape[1])))
        alpha, bins, owners = (np.concatenate(column) for column in zip(*parts, strict=True))
        return alpha, bins, owners

    def ladder(self, lowest: int = 0, highest: int | None = None) -> Ladder:
        pages = default_budgets(self.all_pages[-1], 3, per_doubling=2)
        dense = [next(r for r, p in enumerate(pages) if p >= most) for most in self.all_pages]
        top = tuple(r if highest is None else min(r, highest) for r in dense)
        return Ladder(pages, tuple(min(lowest, r) for r in top), top)

    def right(self, ladder: Ladder) -> np.ndarray:
        """Smallest rung per bin that meets the target, or the end of its ladder; non-decreasing."""
        found = []
        for i, (low, high) in enumerate(zip(ladder.lowest, ladder.highest, strict=True)):
            meets = (r for r in range(low, high + 1) if self.mismatch(i, ladder.pages[r]) <= 1 - TARGET + 1e-9)
            found.append(max([next(meets, high), *found[-1:]]))
        return np.array(found)


def simulate(
    worlds: list[World], ladder: Ladder, start: tuple[int, ...], seed: int
) -> tuple[np.ndarray, BudgetController]:
    """Rungs after each step [steps, bins], one world per step."""
    rng = np.random.default_rng(seed)
    controller = BudgetController(ladder, start, target=TARGET)
    rungs = []
    for step, world in enumerate(worlds, 1):
        controller.observe(step, *world.sample(rng, controller.pages))
        rungs.append(controller.rungs)
    return np.array(rungs), controller


def near(rungs: np.ndarray, right: np.ndarray) -> np.ndarray:
    return abs(rungs - right) <= 1


@pytest.mark.parametrize("start", ["far too aggressive", "far too lenient"])
@pytest.mark.parametrize(("exponent", "share"), [(0.5, 0.9), (0.8, 0.97), (1.2, 0.97)])
def test_reaches_the_right_rung_in_15_steps_and_stays(start: str, exponent: float, share: float) -> None:
    world = World(exponent=exponent)
    ladder = world.ladder()
    right = world.right(ladder)
    begin = (0,) * 6 if start == "far too aggressive" else ladder.highest
    assert min(abs(np.array(begin) - right)) >= 3, "the start is far away"
    runs = [simulate([world] * STEPS, ladder, begin, seed)[0] for seed in range(3)]
    assert np.mean([near(r[SETTLED - 1], right) for r in runs]) >= share
    assert np.mean([near(r[SETTLED:], right) for r in runs]) >= share
    moves = np.mean([(np.diff(r[SETTLED:], axis=0) != 0).sum(axis=0).mean() for r in runs])
    assert moves <= 5, "per bin in 30 steps: it comes to rest"


def test_bins_that_few_trajectories_reach() -> None:
    world = World(trajectories=(8, 8, 8, 4, 3, 2))
    ladder = world.ladder()
    right = world.right(ladder)
    for begin in ((0,) * 6, ladder.highest):
        runs = [simulate([world] * STEPS, ladder, begin, seed)[0] for seed in range(3)]
        assert np.mean([near(r[SETTLED:], right) for r in runs]) >= 0.9


def test_bins_that_nothing_reaches_stay_and_keep_the_order() -> None:
    world = World(trajectories=(8, 8, 0, 0, 8, 0))
    ladder = world.ladder()
    right = world.right(ladder)
    rungs, _ = simulate([world] * STEPS, ladder, (0, 0, 0, 1, 1, 9), 0)
    assert (np.diff(rungs, axis=1) >= 0).all()
    assert near(rungs[SETTLED:, [0, 1]], right[[0, 1]]).mean() > 0.95
    start = np.array([0, 1, 9])
    assert (rungs[:, [2, 3, 5]] == np.maximum(start, rungs[:, [1, 1, 4]])).all(), "lifted, and back when that is over"


def test_limits_are_the_end_of_the_ladder() -> None:
    world = World()
    for limits in ({"highest": 6}, {"lowest": 8}):
        ladder = world.ladder(**limits)
        rungs, controller = simulate([world] * 25, ladder, (0,) * 6, 1)
        assert (rungs >= np.array(ladder.lowest)).all()
        assert (rungs <= np.array(ladder.highest)).all()
        assert near(rungs[SETTLED:], world.right(ladder)).mean() > 0.95
    ladder = world.ladder(highest=6)
    controller = BudgetController(ladder, ladder.highest, target=TARGET)
    decision = controller.observe(1, *world.sample(np.random.default_rng(0), controller.pages))
    assert decision.at_limit == (1, 2, 3, 4, 5)
    assert decision.moves == ()


@pytest.mark.parametrize("factor", [2.5, 0.4])
def test_a_shift_is_answered(factor: float) -> None:
    before = World()
    after = replace(before, need=tuple(factor * n for n in before.need))
    ladder = before.ladder()
    for seed in range(2):
        rungs, _ = simulate([before] * 20 + [after] * 30, ladder, tuple(before.right(ladder)), seed)
        if factor > 1:
            assert (rungs[21] > before.right(ladder)).mean() > 0.6, "at once"
        assert near(rungs[20 + SETTLED :], after.right(ladder)).mean() > 0.9


def test_a_slow_drift_is_followed() -> None:
    worlds = [World(need=tuple(n * 1.02**step for n in World().need)) for step in range(60)]
    ladder = worlds[0].ladder()
    rungs, _ = simulate(worlds, ladder, tuple(worlds[0].right(ladder)), 0)
    ahead = np.array([rungs[step] - worlds[step].right(ladder) for step in range(SETTLED, 60)])
    assert (abs(ahead) <= 1).mean() > 0.9


def steady(mismatch: float, bins: int = 1, trajectories: int = 8, tokens: int = 100) -> tuple[np.ndarray, ...]:
    """The same rates in every bin: 5th percentile 1 - mismatch without noise."""
    u = (np.arange(tokens) + 0.5) / tokens
    alpha = 1.0 + mismatch * np.log(1 - u) / np.log(20)
    values = np.tile(np.maximum(alpha, 0.0), bins * trajectories)
    return values, np.repeat(np.arange(bins), trajectories * tokens), np.tile(
        np.repeat(np.arange(trajectories), tokens), bins
    )  # fmt: skip


LADDER = Ladder(tuple(range(10, 30)), (0, 0), (15, 19))


def test_raises_at_once_and_lowers_after_calm_steps() -> None:
    controller = BudgetController(LADDER, (5, 5), target=TARGET, calm_steps=4)
    (move, second) = controller.observe(1, *steady(0.12, bins=2)).moves
    assert move.bin == 0
    assert (move.old, move.reason, second.bin) == (5, "below", 1)
    assert move.new > 5
    controller = BudgetController(LADDER, (5, 5), target=TARGET, calm_steps=4)
    moves = [controller.observe(step, *steady(0.03, bins=2)).moves for step in range(1, 6)]
    assert [len(m) for m in moves] == [0, 0, 0, 2, 0]
    assert {m.reason for m in moves[3]} == {"calm"}
    assert controller.rungs == (3, 3)


def test_further_below_is_further_up() -> None:
    jumps = []
    ladder = World().ladder()
    for mismatch in (0.105, 0.12, 0.2, 0.6):
        controller = BudgetController(ladder, (5,) * 6, target=TARGET)
        controller.observe(1, *steady(mismatch, bins=2))
        jumps.append(controller.rungs[0] - 5)
    assert jumps[0] == 1
    assert 1 < jumps[2] < 4
    assert jumps == sorted(jumps)
    assert jumps[-1] == 4, "bounded"


def test_a_rung_that_failed_waits_longer_each_time() -> None:
    """Rung 5 fails, 6 is calm enough to go down: the times between trials grow."""
    controller = BudgetController(LADDER, (6, 6), target=TARGET, cooldown=4)
    tried = []
    for step in range(1, 60):
        decision = controller.observe(step, *steady(0.12 if controller.rungs[0] == 5 else 0.09, bins=2))
        assert 5 <= controller.rungs[0] <= 6
        tried += [step for move in decision.moves if move.bin == 0 and move.reason == "calm"]
    gaps = np.diff(tried)
    assert len(gaps) >= 3
    assert list(gaps) == sorted(gaps)
    assert gaps[-1] > 2 * gaps[0]


def test_few_tokens_are_gathered_over_steps() -> None:
    few = steady(0.2, trajectories=2, tokens=8)
    controller = BudgetController(LADDER, (5, 5), target=TARGET)
    first = controller.observe(1, *few)
    assert first.moves == ()
    assert first.estimates[1] is None
    raised = [bool(controller.observe(step, *few).moves) for step in range(2, 12)]
    assert any(raised)


def test_a_longer_bin_is_lifted() -> None:
    controller = BudgetController(LADDER, (5, 5), target=TARGET)
    alpha, bins, owners = steady(0.2)
    moves = controller.observe(1, alpha, bins, owners).moves
    assert [(m.bin, m.reason) for m in moves] == [(0, "below"), (1, "order")]
    assert controller.rungs[0] == controller.rungs[1] > 5


@st.composite
def streams(draw: st.DrawFn) -> tuple[Ladder, list[int], int, int]:
    num_bins = draw(st.integers(1, 5))
    size = draw(st.integers(2, 12))
    pages = tuple(np.cumsum(draw(st.lists(st.integers(1, 9), min_size=size, max_size=size))).tolist())
    highest = sorted(draw(st.lists(st.integers(0, size - 1), min_size=num_bins, max_size=num_bins)))
    lowest = [min(draw(st.integers(0, size - 1)), highest[0])] * num_bins
    start = draw(st.lists(st.integers(0, size - 1), min_size=num_bins, max_size=num_bins))
    return Ladder(pages, tuple(lowest), tuple(highest)), start, draw(st.integers(0, 10_000)), draw(st.integers(1, 9))


@settings(max_examples=60, deadline=None)
@given(streams())
def test_whatever_is_measured_budgets_are_in_order_inside_limits_and_reproducible(
    case: tuple[Ladder, list[int], int, int],
) -> None:
    ladder, start, seed, cut = case
    rng = np.random.default_rng(seed)
    one, two = (BudgetController(ladder, start, target=TARGET) for _ in range(2))
    for step in range(1, 12):
        count = int(rng.integers(0, 300))
        alpha = 1.0 - np.minimum(rng.exponential(10.0 ** rng.uniform(-3, 0), count), 1.0)
        tokens = alpha, rng.integers(0, ladder.num_bins + 1, count), rng.integers(0, 5, count)
        old = one.rungs
        decision = one.observe(step, *tokens)
        again = two.observe(step, *tokens)
        assert decision == again
        if step == cut:
            restored = BudgetController(ladder, (0,) * ladder.num_bins, target=TARGET)
            restored.load_state(two.state())
            two = restored
        assert decision.rungs == old
        assert list(one.rungs) == sorted(one.rungs)
        assert all(low <= r <= high for low, r, high in zip(ladder.lowest, one.rungs, ladder.highest, strict=True))
        moved = {m.bin: (m.old, m.new) for m in decision.moves}
        assert moved == {i: (a, b) for i, (a, b) in enumerate(zip(old, one.rungs, strict=True)) if a != b}


@pytest.mark.parametrize(
    ("pages", "lowest", "highest"),
    [((3, 2), (0,), (1,)), ((2, 3), (1,), (0,)), ((2, 3), (0, 0), (1, 0)), ((2,), (), ())],
)
def test_ladders_that_make_no_sense(pages: tuple[int, ...], lowest: tuple[int, ...], highest: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match="expected ascending"):
        Ladder(pages, lowest, highest)
