"""From a target to a schedule that has been measured to reach it.

for each target: propose a schedule → measure it → … until every bin is decided → measure the schedule that results, on all
trajectories; a bin that misses the target there goes up a rung.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from leanroll.calibrate.passes import PassRunner, SchedulePass
from leanroll.calibrate.search import BinEstimate, Ladder
from leanroll.calibrate.trajectories import Trajectory
from leanroll.rollout.schedule import BudgetSchedule

MAX_PASSES = 24
"""Passes per target; a search that needs more is not converging, and what is decided by then is used."""


@dataclass(frozen=True, slots=True)
class Fit:
    """A target's schedule.

    final: the pass that measured it on all trajectories. num_passes, num_scored: passes and scorings of a trajectory that this
    target took beyond those of earlier ones. seconds: their model time. complete: False when time ran out, and undecided bins
    kept the smallest budget that was shown to suffice.
    """

    target: float
    schedule: BudgetSchedule
    final: SchedulePass
    num_passes: int
    num_scored: int
    seconds: float
    complete: bool


@dataclass
class Search:
    """All passes of a calibration; each target of `fit` uses those of the others.

    template: everything of the schedule but its pages. ladder: budgets that may be chosen, and the bins.
    deadline: time.monotonic() after which no new pass begins. say: receives one line per pass.
    """

    runner: PassRunner
    template: BudgetSchedule
    ladder: Ladder
    trajectories: Sequence[Trajectory]
    deadline: float | None = None
    say: Callable[[str], None] = lambda line: None
    progress: Callable[[int, int, str], None] | None = None
    passes: list[list[BinEstimate | None]] = field(default_factory=list)
    history: list[SchedulePass] = field(default_factory=list)

    def fit(self, target: float, guess: Sequence[int]) -> Fit:
        """The smallest budgets that reach the target; `guess` are rungs to begin with. Lengths beyond the last bin are dense."""
        before, scored_before, first_pass = self.runner.seconds, self.runner.num_scored, len(self.passes)
        final: SchedulePass | None = None
        final_rungs: tuple[int, ...] | None = None
        complete = True
        while True:
            rungs = self.ladder.propose(self.passes, target, guess)
            concluded = self.ladder.conclude(self.passes, target)
            if rungs is None and final_rungs == concluded:
                break
            out_of_time = self.deadline is not None and time.monotonic() > self.deadline
            if out_of_time or len(self.passes) - first_pass >= MAX_PASSES:
                complete = False
            if rungs is None or not complete:
                # What has been concluded is measured as a whole, on all trajectories: this is the pass that is reported.
                rungs, early = concluded, None
            else:
                early = self._decided(target, concluded, rungs)
            measured = self._measure(rungs, target, early)
            if early is None:
                final, final_rungs = measured, rungs
            if not complete:
                break
        assert final is not None
        return Fit(
            target=target,
            schedule=replace(final.schedule, target=target),
            final=final,
            num_passes=len(self.passes) - first_pass,
            num_scored=self.runner.num_scored - scored_before,
            seconds=self.runner.seconds - before,
            complete=complete,
        )

    def sweep(self, rungs: Sequence[int]) -> None:
        """The exhaustive way, to compare with: every rung at every length, on all trajectories."""
        for rung in rungs:
            self._measure((rung,) * self.ladder.num_bins, None, None)

    def _measure(
        self, rungs: tuple[int, ...], target: float | None, enough: Callable[[SchedulePass], bool] | None
    ) -> SchedulePass:
        schedule = replace(self.template, pages=self.ladder.budgets(rungs))
        result = self.runner.run(
            schedule, self.trajectories, enough=enough, check_from=self.ladder.min_trajectories, progress=self.progress
        )
        self.passes.append(result.estimates(self.ladder.pages))
        self.history.append(result)
        tails = " ".join("-" if b is None else f"{b.tail:.3f}" for b in result.bins[:-1])
        aim = "" if target is None else f" for {target:g}"
        shown = " ".join(str(p) for p in schedule.pages[:-1])
        self.say(
            f"pass {len(self.passes)}{aim}: pages {shown} → quantile {self.runner.quantile:g} of alpha {tails} "
            f"({len(result.trajectories)} trajectories)"
        )
        return result

    def _decided(
        self, target: float, concluded: tuple[int, ...], rungs: tuple[int, ...]
    ) -> Callable[[SchedulePass], bool]:
        """Whether every bin that this pass tests is decided for the target."""
        tested = [i for i in range(self.ladder.num_bins) if rungs[i] < concluded[i]]

        def enough(result: SchedulePass) -> bool:
            estimates = result.estimates(self.ladder.pages)
            return all(
                (e := estimates[i]) is None or e.suffices(target, self.ladder.min_trajectories) is not None
                for i in tested
            )

        return enough
