"""What the user sees while a run goes on, and where its time goes.

On a terminal: a live line with the phase and its own progress, and a bar over the steps with the time left. Anywhere
else (a log file, CI): one plain line per step. Either way every step leaves one line.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from leanroll.rollout.engine import RolloutProgress


class StepClock:
    """Seconds per phase of one step; phases of one name add up, nested phases are taken out of the outer one."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._inner = [0.0]

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count the time of the block as `name`."""
        start = time.perf_counter()
        self._inner.append(0.0)
        try:
            yield
        finally:
            elapsed = time.perf_counter() - start
            inner = self._inner.pop()
            self._inner[-1] += elapsed
            self.seconds[name] = self.seconds.get(name, 0.0) + elapsed - inner

    def take(self) -> dict[str, float]:
        """The seconds so far, and start over."""
        seconds, self.seconds = self.seconds, {}
        return seconds


class RunDisplay:
    """Progress of a run. Use as a context manager; `quiet` shows nothing."""

    def __init__(self, num_steps: int, first_step: int, *, quiet: bool = False) -> None:
        self.clock = StepClock()
        self.console = Console(quiet=quiet, file=sys.stderr, highlight=False, soft_wrap=True)
        self._live = self.console.is_terminal and not quiet
        self._progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(elapsed_when_finished=False),
            TextColumn("{task.fields[note]}"),
            console=self.console,
            transient=True,
            disable=not self._live,
            speed_estimate_period=3600,
        )
        self._steps = self._progress.add_task("step", total=num_steps, completed=first_step - 1, note="")
        self._phase = self._progress.add_task("start", total=None, note="", visible=False)

    def __enter__(self) -> RunDisplay:
        self._progress.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._progress.stop()

    @contextmanager
    def phase(self, name: str, total: float | None = None) -> Iterator[None]:
        """Time the block and show its name; `total` is what `advance` counts towards (None: unknown)."""
        self._progress.reset(self._phase, total=total, description=name, note="", visible=True)
        try:
            with self.clock.phase(name):
                yield
        finally:
            self._progress.update(self._phase, visible=False)

    def advance(self, completed: float, total: float | None = None, note: str = "") -> None:
        """Progress inside the current phase."""
        self._progress.update(self._phase, completed=completed, total=total, note=note)

    def show_rollout(self, progress: RolloutProgress) -> None:
        """Progress of a call to the engine."""
        self.advance(progress.num_finished, progress.num_samples, f"{progress.tokens_per_second:,.0f} tokens/s")

    def step_done(self, step: int, line: str) -> None:
        """Leave one line for a finished step."""
        self._progress.update(self._steps, completed=step)
        self.say(line)

    def say(self, line: str) -> None:
        """Print a line above the live display."""
        self.console.print(line, markup=False)
