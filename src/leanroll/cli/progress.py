"""A progress line on stderr while an engine generates."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

if TYPE_CHECKING:
    from leanroll.rollout.batching import RolloutProgress


@contextlib.contextmanager
def generation_progress(label: str) -> Iterator[Callable[[RolloutProgress], None]]:
    """Shows finished completions and tokens/s; hand the callback to `RolloutEngine.generate`."""
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[speed]}"),
    )
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        bar = progress.add_task(label, total=None, speed="")

        def update(state: RolloutProgress) -> None:
            speed = f"{state.tokens_per_second:.0f} tokens/s, {state.num_running} running"
            progress.update(bar, completed=state.num_finished, total=state.num_samples, speed=speed)

        yield update


@contextlib.contextmanager
def status(label: str) -> Iterator[None]:
    """A spinner for a step of unknown length; one plain line where stderr is not a terminal."""
    console = Console(stderr=True)
    if console.is_terminal:
        with console.status(label):
            yield
    else:
        console.print(label)
        yield


@contextlib.contextmanager
def pass_progress(
    label: str = "trajectories",
) -> Iterator[tuple[Callable[[int, int, str], None], Callable[[str], None]]]:
    """A bar over the trajectories of a calibration pass (or what `label` says), and a function that leaves a line above it."""
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}"),
    )
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        bar = progress.add_task(label, total=None, note="")

        def advance(done: int, total: int, note: str) -> None:
            if done == 0:
                progress.reset(bar, total=total)
            progress.update(bar, completed=done, total=total, note=note)

        yield advance, lambda line: console.print(line, markup=False)
