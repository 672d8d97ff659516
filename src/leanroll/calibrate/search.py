"""Which budgets to measure next, and which schedule the measurements support. Pure arithmetic, no model.

A pass measures one whole *schedule*: every length bin at a budget of its own, on the same trajectories. So one pass tests one rung
of the ladder in every bin at once, and a target is reached in about log2(rungs) passes where a sweep of fixed budgets takes one
pass per rung. It is also the fairer measurement: in bin b the keys and values of earlier tokens come from the smaller budgets that
the schedule gives them, as they will in rollouts, and not from a budget that only bin b needs.

Whether a pass decides a bin for a target: its interval lies above (the budget suffices) or below it (it does not). A bin whose
interval straddles the target after all trajectories counts as not sufficing. Passes made for one target count for all others.

Legend: a rung is an index into the ladder of budgets, which ascends. A bin's ceiling is its first rung that reads every page:
alpha is 1 there, so it always suffices.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from leanroll.rollout.schedule import UNLIMITED, BudgetSchedule

_EXPONENT = 0.8
"""1 - tail falls with about this power of the budget on the default model; only guesses depend on it."""
_MAX_POINTS = 4
"""Rungs that are chosen by interpolation in a bin; if they did not decide it, the bracket is halved."""


@dataclass(frozen=True, slots=True)
class BinEstimate:
    """Tail of alpha in one length bin of one pass.

    rung: the bin's budget in this pass. tail: the quantile; low, high: its interval. num_trajectories: that reach the bin.
    """

    rung: int
    tail: float
    low: float
    high: float
    num_trajectories: int

    def suffices(self, target: float, min_trajectories: int) -> bool | None:
        """True or False when the interval decides, else None."""
        if self.num_trajectories < min_trajectories or self.low < target <= self.high:
            return None
        return self.low >= target


Pass = Sequence[BinEstimate | None]
"""One estimate per bin, ascending; None where nothing was measured."""


@dataclass(frozen=True, slots=True)
class Bracket:
    """Rungs between which a bin's smallest sufficient budget lies: `low` does not suffice (-1: none is known that does not), `high`
    does."""

    low: int
    high: int

    @property
    def is_closed(self) -> bool:
        """Nothing is left to measure."""
        return self.high - self.low <= 1


@dataclass(frozen=True, slots=True)
class Ladder:
    """The budgets that may be chosen, and the bins they are chosen for.

    pages: ascending. ceilings: per bin, its first rung that reads every page. fittable: per bin, whether enough trajectories
    reach it; a bin that is not gets its ceiling. min_trajectories: before an interval decides.
    """

    pages: tuple[int, ...]
    ceilings: tuple[int, ...]
    fittable: tuple[bool, ...]
    min_trajectories: int

    @classmethod
    def of(
        cls, pages: Sequence[int], *, num_bins: int, bin_pages: int, coverage: Sequence[int], min_trajectories: int
    ) -> Ladder:
        """coverage: trajectories that reach each bin. The last rung must read all pages of the last bin."""
        ceilings = []
        for i in range(num_bins):
            most = (i + 1) * bin_pages - 1  # pages of the longest sequence in the bin
            ceilings.append(next(r for r, p in enumerate(pages) if p >= most))
        return cls(tuple(pages), tuple(ceilings), tuple(n >= min_trajectories for n in coverage), min_trajectories)

    @property
    def num_bins(self) -> int:
        """Bins that are fitted."""
        return len(self.ceilings)

    def bracket(self, passes: Sequence[Pass], index: int, target: float) -> Bracket:
        """What all passes say about one bin. Where they contradict each other (a rung suffices below one that does not), the
        larger budget is believed."""
        ceiling = self.ceilings[index]
        if not self.fittable[index]:
            return Bracket(ceiling - 1, ceiling)
        low, high = -1, ceiling
        measured = [e for p in passes if (e := p[index]) is not None and e.rung < ceiling]
        for estimate in measured:
            if not estimate.suffices(target, self.min_trajectories):
                low = max(low, estimate.rung)
        for estimate in measured:
            if estimate.suffices(target, self.min_trajectories) and estimate.rung > low:
                high = min(high, estimate.rung)
        return Bracket(low, high)

    def propose(self, passes: Sequence[Pass], target: float, guess: Sequence[int]) -> tuple[int, ...] | None:
        """Rung per bin of the next pass; None when every bin's bracket is closed.

        A bin that is decided keeps its sufficient rung, so that later bins see the history they will have. An undecided one takes
        the rung that interpolation expects to suffice, inside its bracket. Rungs never decrease with length.

        Args:
            guess: rung per bin to begin with, where nothing has been measured.
        """
        brackets: list[Bracket] = []
        floor = 0  # no rung below it can be used here: an earlier bin needs as much
        for i in range(self.num_bins):
            b = self.bracket(passes, i, target)
            brackets.append(Bracket(max(b.low, floor - 1), max(b.high, floor)))
            floor = brackets[-1].low + 1
        if all(b.is_closed for b in brackets):
            return None
        rungs: list[int] = []
        for i, b in enumerate(brackets):
            rung = b.high if b.is_closed else self._expected(passes, i, target, b, guess[i])
            rungs.append(max([rung, *rungs[-1:]]))
        return tuple(rungs)

    def conclude(self, passes: Sequence[Pass], target: float) -> tuple[int, ...]:
        """Smallest rung per bin that the passes show to suffice (its ceiling where none does), made non-decreasing with length."""
        rungs: list[int] = []
        for i in range(self.num_bins):
            rungs.append(max([self.bracket(passes, i, target).high, *rungs[-1:]]))
        return tuple(rungs)

    def budgets(self, rungs: Sequence[int]) -> tuple[int, ...]:
        """Pages per bin as a schedule holds them: beyond the last bin, where nothing was measured, all pages are read."""
        return (*(self.pages[rung] for rung in rungs), UNLIMITED)

    def rungs_of(self, schedule: BudgetSchedule, bin_pages: int) -> list[int]:
        """Per bin of bin_pages pages, the first rung that is not below a known schedule's budget at the bin's end."""
        wanted = [schedule.budget(((i + 1) * bin_pages - 1) * schedule.page_size) for i in range(self.num_bins)]
        return [next((r for r, p in enumerate(self.pages) if p >= w), len(self.pages) - 1) for w in wanted]

    def _expected(self, passes: Sequence[Pass], index: int, target: float, b: Bracket, guess: int) -> int:
        """A rung strictly inside the bracket, where 1 - tail as a power of the budget expects the target to be reached."""
        first, last = b.low + 1, b.high - 1
        points: dict[int, float] = {}
        for p in passes:
            estimate = p[index]
            if estimate is not None and estimate.rung < self.ceilings[index]:
                points[estimate.rung] = max(1.0 - estimate.tail, 1e-4)  # of the latest pass: its history is the nearest
        below, above = [r for r in points if r <= b.low], [r for r in points if r >= b.high]
        if not points:
            return min(max(guess, first), last)
        if len(points) >= _MAX_POINTS:
            return (first + last) // 2
        near = max(below) if below else min(above)
        exponent = _EXPONENT
        if below and above:
            r0, r1 = max(below), min(above)
            if points[r0] > points[r1]:
                exponent = math.log(points[r0] / points[r1]) / math.log(self.pages[r1] / self.pages[r0])
        wanted = self.pages[near] * (points[near] / (1.0 - target)) ** (1.0 / exponent)
        rung = next((r for r in range(first, last + 1) if self.pages[r] >= wanted), last)
        return min(max(rung, first), last)


def default_budgets(max_pages: int, reserved: int, per_doubling: int = 4) -> tuple[int, ...]:
    """Budgets about 19 % apart (four per doubling), from a few more than the reserved pages up to all of them."""
    budgets: list[int] = []
    step = 0
    while not budgets or budgets[-1] < max_pages:
        pages = min(round((reserved + 3) * 2.0 ** (step / per_doubling)), max_pages)
        if not budgets or pages > budgets[-1]:
            budgets.append(pages)
        step += 1
    return tuple(budgets)
