"""The closed loop on a budget schedule: from the acceptance of a few trajectories per step to the budgets of the next step.

Pure arithmetic: no model, no files, no random numbers. Every length bin of the schedule climbs a ladder of budgets of its own:

- up, at once, when the lower bound of its tail falls under the target: by one rung, or by as many as the gap asks for;
- down, after `calm_steps` calm steps in a row: steps after which a smaller budget is predicted to keep the tail above the target;
- a rung that failed is not tried again for a while, and longer each time, so that a bin comes to rest.

A bin's evidence is that of the steps since it came to its rung, older steps weighing less; so a bin with few tokens gathers them
over steps, and stays where it is until they say something. Budgets never decrease with length: a bin is lifted to its predecessor.

Source of the target on a quantile: Sparrow, arXiv 2606.08446, which fixes its schedules before training.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal

import numpy as np

from leanroll.errors import ConfigError
from leanroll.measure.evidence import TailEstimate, TailScale

Reason = Literal["below", "calm", "order"]
"""Why a bin moved: its tail is under the target; it was calm for long enough; its predecessor needs as much (or, where nothing was
measured, no longer does)."""

_EXPONENT = 0.8
"""1 - tail falls with about this power of the budget on the default model (as in `calibrate.search`); only the size of a move
depends on it."""
_GENTLE = 0.5
"""The exponent for going down a single rung: optimistic, since the next steps tell, and a rung that fails is remembered."""
_MEMORY = 0.8
"""Weight of a step's tokens relative to those of the step after it."""
_HORIZON = 16
"""Steps after which tokens are forgotten; they would weigh 3 %."""
_Z = 0.5
"""Standard errors from the tail to its bounds: one-sided 69 %. They are looked at in every step, on evidence that adds up:
wider ones would sooner or later lift every bin by a rung or two more than it needs."""
_MAX_RAISE, _MAX_LOWER = 4, 2
"""Rungs in one move; on a ladder of two per doubling budgets grow to four times at most, or halve."""
_MIN_EFFECTIVE = 80.0
"""Independent tokens before a bound counts: four are expected in the tail."""
_MIN_CLEAR = 20.0
"""The same for a tail that is under the target beyond doubt."""
_MAX_WAIT = 64
"""Longest time, in steps, for which a rung that failed is left alone."""


@dataclass(frozen=True, slots=True)
class Ladder:
    """Budgets that may be chosen, in pages.

    pages: ascending. lowest, highest: per bin, the rungs it may use; both never decrease. The highest one of a bin reads all of its
    pages unless a limit forbids.
    """

    pages: tuple[int, ...]
    lowest: tuple[int, ...]
    highest: tuple[int, ...]

    def __post_init__(self) -> None:
        ordered = all(a < b for a, b in zip(self.pages, self.pages[1:], strict=False))
        inside = all(0 <= a <= b < len(self.pages) for a, b in zip(self.lowest, self.highest, strict=True))
        rising = list(self.lowest) == sorted(self.lowest) and list(self.highest) == sorted(self.highest)
        if not (self.lowest and ordered and inside and rising):
            raise ConfigError(
                f"ladder of pages {self.pages} with lowest rungs {self.lowest} and highest {self.highest}; expected ascending "
                "pages and, for at least one bin, rungs among them that do not decrease with length."
            )

    @property
    def num_bins(self) -> int:
        return len(self.lowest)


@dataclass(frozen=True, slots=True)
class Move:
    """One bin's change of budget. old, new: rungs of the ladder."""

    bin: int
    old: int
    new: int
    reason: Reason


@dataclass(frozen=True, slots=True)
class Decision:
    """What a step's tokens led to.

    rungs: per bin, those the tokens were sampled with. estimates: per bin, all its evidence at that rung, this step's included;
    None where there is none. moves: towards the next step's rungs. at_limit: bins under the target at the highest rung they may
    have.
    """

    rungs: tuple[int, ...]
    estimates: tuple[TailEstimate | None, ...]
    moves: tuple[Move, ...]
    at_limit: tuple[int, ...]


@dataclass(slots=True)
class _Bin:
    """calm: steps in a row. failed: highest rung that is known to fail (-1: none), left alone until step `retry_at`; strikes: how
    often it failed. good: the rung it was last lowered from (-1: it was raised since). since: step of the last move.
    measured: had tokens once.
    rows: int64 [R, 2 + width], the step and the rung of a trajectory's tokens, then their counts."""

    rung: int
    rows: np.ndarray
    calm: int = 0
    failed: int = -1
    retry_at: int = 0
    strikes: int = 0
    good: int = -1
    since: int = 0
    measured: bool = False


class BudgetController:
    """Holds the tail of every length bin at a target.

    Args:
        ladder: budgets and bins. start: rung per bin; put inside its limits, and lifted where it decreases.
        target: of the tail. quantile: the share of tokens in it.
        calm_steps: before a bin is lowered. cooldown: steps for which a rung that failed once is left alone.
    """

    def __init__(
        self,
        ladder: Ladder,
        start: Sequence[int],
        *,
        target: float,
        quantile: float = 0.05,
        calm_steps: int = 2,
        cooldown: int = 8,
    ) -> None:
        self.ladder = ladder
        self._scale = TailScale(target, quantile=quantile, z=_Z)
        self._target, self._calm_steps, self._cooldown = target, calm_steps, cooldown
        self._bins: list[_Bin] = []
        below = 0
        for rung, low, high in zip(start, ladder.lowest, ladder.highest, strict=True):
            below = min(max(rung, low, below), high)
            self._bins.append(_Bin(below, self._no_rows()))
        self._start = self.rungs

    @property
    def rungs(self) -> tuple[int, ...]:
        """Rung per bin, as the next step is to sample; non-decreasing."""
        return tuple(b.rung for b in self._bins)

    @property
    def pages(self) -> tuple[int, ...]:
        """Budget per bin, in pages."""
        return tuple(self.ladder.pages[rung] for rung in self.rungs)

    def observe(self, step: int, alpha: np.ndarray, bins: np.ndarray, owners: np.ndarray) -> Decision:
        """Take in the tokens of a step that was sampled with `pages`, and move.

        step: larger than in the call before. alpha: float [T], acceptance rates. bins: int [T], the length bin of each token;
        tokens of bins that are not on the ladder are left aside. owners: int [T], the number of its trajectory in this step.
        """
        before = self.rungs
        estimates: list[TailEstimate | None] = []
        moves: list[Move] = []
        at_limit: list[int] = []
        floor = 0
        for i, b in enumerate(self._bins):
            inside = bins == i
            b.measured |= bool(inside.any())
            self._take_in(b, step, alpha[inside], owners[inside])
            estimate = self._estimate(b, step)
            estimates.append(estimate)
            # What no token has reached is only ever lifted, and comes back when that is over.
            wanted: int = b.rung if b.measured else self._start[i]
            reason: Reason = "below" if b.measured else "order"
            if estimate is not None and inside.any():
                if self._fails(estimate):
                    wanted = self._raised(i, b, estimate, step)
                    if b.rung == self.ladder.highest[i]:
                        at_limit.append(i)
                else:
                    wanted, reason = self._lowered(i, b, estimate, step), "calm"
            if wanted < floor:
                reason = reason if wanted > b.rung or floor <= b.rung else "order"
                wanted = floor
            floor = wanted
            if wanted != b.rung:
                moves.append(Move(i, b.rung, wanted, reason))
                b.good = b.rung if reason == "calm" else -1 if reason == "below" else b.good
                b.rung, b.since, b.calm = wanted, step, 0
        return Decision(before, tuple(estimates), tuple(moves), tuple(at_limit))

    def state(self) -> list[dict[str, Any]]:
        """Everything that the next decisions depend on, per bin: plain values, and `rows` as int64."""
        return [{f.name: getattr(b, f.name) for f in fields(b)} for b in self._bins]

    def load_state(self, state: Sequence[Mapping[str, Any]]) -> None:
        """Continue where `state` was taken, with the same ladder and settings."""
        assert len(state) == len(self._bins)
        self._bins = [_Bin(**b) for b in state]

    def _no_rows(self) -> np.ndarray:
        return np.zeros((0, 2 + self._scale.width), dtype=np.int64)

    def _take_in(self, b: _Bin, step: int, alpha: np.ndarray, owners: np.ndarray) -> None:
        counts = self._scale.count(alpha, owners)
        stamp = np.tile(np.array([step, b.rung], dtype=np.int64), (len(counts), 1))
        kept = b.rows[b.rows[:, 0] > step - _HORIZON]
        b.rows = np.concatenate([kept, np.concatenate([stamp, counts], axis=1)])

    def _estimate(self, b: _Bin, step: int) -> TailEstimate | None:
        rows = b.rows[b.rows[:, 1] == b.rung]
        return self._scale.estimate(rows[:, 2:], _MEMORY ** (step - rows[:, 0]).astype(np.float64))

    def _fails(self, e: TailEstimate) -> bool:
        if e.effective >= _MIN_EFFECTIVE:
            return e.low < self._target
        return e.effective >= _MIN_CLEAR and e.high < self._target

    def _raised(self, i: int, b: _Bin, e: TailEstimate, step: int) -> int:
        b.calm = 0
        if b.rung == self.ladder.highest[i]:
            return b.rung
        b.strikes = b.strikes + 1 if b.rung == b.failed else 1
        b.failed = b.rung
        b.retry_at = step + min(self._cooldown * 2 ** (b.strikes - 1), _MAX_WAIT)
        wanted = self._rung_for(b.rung, (1.0 - e.tail) / (1.0 - self._target))
        wanted = min(max(wanted, b.rung + 1), b.rung + _MAX_RAISE)
        if b.good > b.rung:
            wanted = min(wanted, b.good)
        return min(wanted, self.ladder.highest[i])

    def _lowered(self, i: int, b: _Bin, e: TailEstimate, step: int) -> int:
        lowest = max(self.ladder.lowest[i], b.rung - _MAX_LOWER)
        if b.rung > b.failed:
            # Where a rung failed, the next one down is that one, and only when its time has come.
            lowest = max(lowest, b.failed + (step < b.retry_at))
        elif step >= b.since + self._cooldown:
            b.failed, b.strikes = -1, 0  # it has held for long enough now
        wanted = self._rung_for(b.rung, (1.0 - e.low) / (1.0 - self._target))
        if self._rung_for(b.rung, (1.0 - e.tail) / (1.0 - self._target), _GENTLE) < b.rung:
            wanted = min(wanted, b.rung - 1)
        wanted = max(wanted, lowest)
        if e.effective < _MIN_EFFECTIVE or wanted >= b.rung:
            b.calm = 0
            return b.rung
        b.calm += 1
        return wanted if b.calm >= self._calm_steps else b.rung

    def _rung_for(self, rung: int, gap: float, exponent: float = _EXPONENT) -> int:
        """The smallest rung whose tail is expected to reach the target, where that of `rung` has `gap` times the mismatch."""
        wanted = self.ladder.pages[rung] * gap ** (1.0 / exponent)
        return int(np.searchsorted(np.asarray(self.ladder.pages), wanted * (1.0 - 1e-9)))
