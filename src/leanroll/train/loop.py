"""The one step loop of every trainer.

    for step: batch = algorithm.collect(step) → algorithm.update(step, batch) → evaluate → log → checkpoint

Order matters for exact resume: a step's metrics are on disk before its checkpoint, so a checkpoint of step k implies
the metrics of steps ≤ k, and a resumed run cuts metrics.jsonl back to k and repeats the rest with the same draws.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import FrameType
from typing import Any, Protocol, TypeVar

from leanroll.errors import LeanrollError, StorageError
from leanroll.train.progress import RunDisplay

BatchT = TypeVar("BatchT")
Metrics = dict[str, float]


@dataclass(frozen=True, slots=True)
class Halt:
    """Why training stops by itself. roll_back_to: the step of the last checkpoint to keep, where the current one is not to be
    saved."""

    reason: str
    roll_back_to: int | None = None


class Algorithm(Protocol[BatchT]):
    """What a trainer does; the loop decides when. Steps count from 1."""

    @property
    def num_updates(self) -> int:
        """Optimizer updates so far; tells whether a diverged step had already changed the parameters."""
        ...

    @property
    def halt(self) -> Halt | None:
        """Set by `update` when training should not go on after this step."""
        ...

    def collect(self, step: int) -> BatchT:
        """Make the step's training batch (roll out, score)."""
        ...

    def update(self, step: int, batch: BatchT) -> Metrics:
        """Update the policy; return the step's metrics. Raises TrainingDiverged before a non-finite update is
        applied."""
        ...

    def evaluate(self, step: int) -> Metrics:
        """Metrics on held-out prompts; step 0 is the policy before training."""
        ...


@dataclass(frozen=True, slots=True)
class LoopPlan:
    """When things happen. `eval_every`, `save_every`: in steps; 0 means only after the last step."""

    first_step: int
    num_steps: int
    eval_every: int
    save_every: int


@dataclass(frozen=True, slots=True)
class LoopResult:
    """Where the loop stopped. interrupted: by Ctrl-C, after finishing and saving `last_step`. halted: why it stopped by itself."""

    last_step: int
    interrupted: bool
    halted: str | None = None


def run_loop(
    algorithm: Algorithm[Any],
    plan: LoopPlan,
    display: RunDisplay,
    *,
    log: Callable[[int, Mapping[str, float]], None],
    save: Callable[[int], None],
    forget: Callable[[int], None],
    summarise: Callable[[int, Mapping[str, float]], str],
    agree: Callable[[bool], bool] = bool,
    rescue: Callable[[int, LeanrollError], None] | None = None,
) -> LoopResult:
    """Run steps `plan.first_step` … `plan.num_steps`. A first Ctrl-C finishes the step, saves and returns; a second
    one aborts.

    forget: drops the checkpoints later than a step. agree: whether any process of the run says yes, asked once a step.
    rescue: saves the last step when the next one failed with this error; None: as `save` does.

    Raises:
        LeanrollError: from the algorithm (it diverged, a reward failed, …); the last step's state is saved first when this
            one had not changed it.
        StorageError: the disk refuses what is written, or what was to be saved because of another error, which it then names.
    """
    last = plan.first_step - 1
    saved = last
    with GracefulStop(display.say) as stop:
        for step in range(plan.first_step, plan.num_steps + 1):
            updates_before = algorithm.num_updates
            try:
                metrics = algorithm.update(step, algorithm.collect(step))
            except StorageError:
                raise  # a checkpoint needs more room than what did not fit
            except LeanrollError as error:
                if algorithm.num_updates == updates_before and saved < last:
                    try:
                        save(last) if rescue is None else rescue(last, error)
                    except StorageError as refused:
                        raise StorageError(
                            f"{refused}\nIt was to be saved because of another error:\n{error}"
                        ) from error
                raise
            final = step == plan.num_steps
            if final or _due(step, plan.eval_every):
                metrics |= algorithm.evaluate(step)
            seconds = display.clock.take()
            metrics |= {f"time/{name}_s": value for name, value in seconds.items()}
            metrics["time/step_s"] = sum(seconds.values())
            log(step, metrics)
            last = step
            halt = algorithm.halt
            if halt is not None:
                if halt.roll_back_to is None:
                    save(step)
                else:
                    forget(halt.roll_back_to)
                display.step_done(step, summarise(step, metrics))
                return LoopResult(last, interrupted=False, halted=halt.reason)
            # Asked once: what comes from here on stops the next step.
            stopping = agree(stop.requested) and not final
            if final or stopping or _due(step, plan.save_every):
                save(step)
                saved = step
            display.step_done(step, summarise(step, metrics))
            if stopping:
                return LoopResult(last, interrupted=True)
    return LoopResult(last, interrupted=False)


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


class GracefulStop:
    """While active, the first SIGINT sets `requested`; the second raises KeyboardInterrupt.

    Signals reach only the main thread; elsewhere this does nothing and `requested` stays False.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self.requested = False
        self._say = say
        self._previous: Any = None
        self._active = threading.current_thread() is threading.main_thread()

    def __enter__(self) -> GracefulStop:
        if self._active:
            self._previous = signal.signal(signal.SIGINT, self._handle)
        return self

    def __exit__(self, *exc: object) -> None:
        if self._active:
            signal.signal(signal.SIGINT, self._previous)

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True
        self._say("Interrupted: finishing this step and saving. Press Ctrl-C again to abort at once.")
