"""A run from recipe to closing line: the run directory, its lock, resuming, the report at the end. The same for every trainer."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, Protocol, TypeVar

from leanroll.config import DistillConfig, RLConfig, read_resolved, resume_conflicts, to_toml
from leanroll.environment import describe
from leanroll.errors import LeanrollError, ResumeError, StorageError
from leanroll.models import Policy
from leanroll.rollout.schedule import BudgetSchedule
from leanroll.rundir import SCHEDULE, ReadOnlyRunDir, RunDir, write_text
from leanroll.rundir_lock import run_lock
from leanroll.rundir_storage import storing
from leanroll.train import setup
from leanroll.train.loop import LoopResult
from leanroll.train.progress import RunDisplay
from leanroll.train.ranks import Ranks
from leanroll.train.trainer import Trainer

AtEnd = Callable[[RunDir, Callable[[str], None]], None]
"""What a caller of `run` does with the run directory at the end; the second argument prints a line."""


class Summary(Protocol):
    """What a run came to."""

    def line(self) -> str:
        """The closing line."""
        ...


TrainerT = TypeVar("TrainerT", bound=Trainer[Any, Any])
SummaryT = TypeVar("SummaryT", bound=Summary)
ConfigT = TypeVar("ConfigT", RLConfig, DistillConfig)


def run_session(
    config: ConfigT,
    build: Callable[[BudgetSchedule, RunDisplay, Ranks], TrainerT],
    summarise: Callable[[TrainerT, RunDir, LoopResult, float], SummaryT],
    *,
    resume: bool,
    quiet: bool,
    at_end: AtEnd | None,
) -> SummaryT:
    """Train, in a new run directory or in the one to resume; see `rl.run` for arguments and errors.

    build: makes the trainer, before anything is written. summarise: what the finished or interrupted run came to; its last
        argument is the seconds since the start.

    Several processes (see `train.ranks`) call this together; the main one writes, locks and shows.

    Raises:
        RankError: another process of the run is gone, or does not go the same way.
    """
    began = time.perf_counter()
    ranks = Ranks.join(setup.device_of(config.model), config.train.sharding)
    with ExitStack() as stack:
        stack.enter_context(ranks.session())
        ranks.check_equal(f"{to_toml(config)}resume = {resume}\nsharded = {ranks.sharded}", "options")
        schedule = setup.build_schedule(config.rollout)
        path = config.train.run_dir or f"runs/{config.name}-{time.strftime('%Y%m%d-%H%M%S')}"
        display = stack.enter_context(RunDisplay(config.train.steps, 1, quiet=quiet or not ranks.is_main))
        previous = None
        if resume and ranks.is_main:
            _check_resumable(config)
            stack.enter_context(run_lock(path))
            previous = _open_run(path, config, schedule)
            if previous is None:
                display.say(f"{path} holds no run yet; starting from the beginning.")
        elif ranks.is_main:
            RunDir.check_free(path)  # before a large model is read
        with display.phase("load"):
            trainer = build(schedule, display, ranks)
        with trainer.rewards:
            with display.phase("load"):
                trainer.rewards.start()
            if ranks.is_main:
                if not resume:
                    stack.enter_context(run_lock(path))
                previous = previous or _create_run(path, config, schedule, trainer.policy, ranks)
            run_dir = _shared_run(previous, ranks)
            try:
                summary = summarise(trainer, run_dir, trainer.train(run_dir), began)
            except StorageError:
                raise  # where no record could be written, a page cannot either
            except LeanrollError:
                _finish(at_end, run_dir, display, ranks)
                raise
            _finish(at_end, run_dir, display, ranks)
        display.say(summary.line())
    return summary


def _finish(at_end: AtEnd | None, run_dir: RunDir, display: RunDisplay, ranks: Ranks) -> None:
    if at_end is not None and ranks.is_main:
        with display.phase("report"):
            at_end(run_dir, display.say)


def _check_resumable(config: ConfigT) -> None:
    """Raise ResumeError unless the run directory is a run's; a folder of something else is not even locked."""
    if config.train.run_dir is None:
        raise ResumeError("Nothing to resume: train.run_dir is not set; give the run directory to continue.")
    if not RunDir.is_unstarted(config.train.run_dir):
        RunDir.open(config.train.run_dir)


def _open_run(path: str, config: ConfigT, schedule: BudgetSchedule) -> RunDir | None:
    """The run to continue; None when it was killed before its recipe was written, so that there is nothing to continue."""
    if RunDir.is_unstarted(path):
        return None
    run = RunDir.open(path)
    steps_done = max(run.checkpoint_steps(), default=0)
    conflicts = resume_conflicts(read_resolved(type(config), run.config_path), config, steps_done)
    if conflicts:
        changes = "; ".join(f"{key}: {old!r} → {new!r}" for key, (old, new) in conflicts.items())
        raise ResumeError(
            f"Cannot resume {run.path}: {len(conflicts)} options changed since the run began ({changes}). Undo the changes, or "
            "start a new run directory."
        )
    saved = run.path / SCHEDULE
    if saved.is_file() and not schedule.same_reading(BudgetSchedule.load(saved)):
        raise ResumeError(
            f"Cannot resume {run.path}: the content of rollout.schedule {schedule.name!r} differs from the run's "
            f"{SCHEDULE}. Restore the schedule, or start a new run directory."
        )
    try:
        write_text(run.config_path, to_toml(config))
        write_text(saved, schedule.to_json() + "\n")
    except OSError as error:
        raise ResumeError(
            f"Cannot resume {run.path}: it cannot be written ({error.strerror or error}). Make it writable, or copy it to a "
            "place that is."
        ) from error
    return run


def _shared_run(own: RunDir | None, ranks: Ranks) -> RunDir:
    """The main rank's run directory; for the others one that they only read."""
    path = ranks.from_main(None if own is None else own.path, "run directory")
    assert path is not None
    return own or ReadOnlyRunDir(path)


def _create_run(path: str, config: ConfigT, schedule: BudgetSchedule, policy: Policy, ranks: Ranks) -> RunDir:
    environment = describe(
        {
            "device": str(policy.device),
            "dtype": str(policy.dtype).removeprefix("torch."),
            "num_processes": ranks.size,
            "sharding": "fsdp2" if ranks.sharded else "none",
        }
    )
    run = RunDir.create(path, config_toml=to_toml(config), environment=environment)
    with storing(run.path / SCHEDULE):
        write_text(run.path / SCHEDULE, schedule.to_json() + "\n")
    return run
