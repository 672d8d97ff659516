"""`leanroll distill --suite`: every arm with every seed, one after the other, and what they come to against a reference arm.

The last checkpoint of every run counts; the best one is never picked on the held-out prompts. What is finished is kept, what was
broken off goes on where it stopped.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import signal
import socket
import threading
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from leanroll.cli.training import EXIT_INTERRUPTED, write_page
from leanroll.config import Suite, SuiteRun, changed_options, load_suite, read_resolved, resume_conflicts
from leanroll.environment import describe
from leanroll.errors import ConfigError, ResumeError
from leanroll.rundir import EVAL, TEACHER_EVAL, RunDir, write_json, write_text
from leanroll.rundir_lock import run_lock
from leanroll.tasks.metrics import Interval, bootstrap_mean, mean_at_k

RESULT, PAGE = "suite.json", "suite.md"

_AFTER_THE_START = ("name", "train.", "distill.", "optimizer.", "guard.", "adapt.")
"""Options that change nothing before the first step. (A new adapter changes nothing either, whatever its seed.)"""

TRAINING_PHASES = ("time/rollout_s", "time/teacher_s", "time/score_s", "time/update_s")
"""What a second of training is: evaluations, checkpoints and loading do not count."""


def run(path: str, overrides: Sequence[tuple[str, str]]) -> int:
    """Train what is missing, then compare; returns the exit code.

    Raises:
        ConfigError: see `load_suite`; the folder belongs to a single run.
        ResumeError: a run in the folder was made with other options.
        What `distill.run` raises; the run that failed is the last one named.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ConfigError(
            f"--suite was started by a launcher of {os.environ['WORLD_SIZE']} processes; expected one process. Launch the "
            "runs of the suite one by one, or leave the launcher out."
        )
    suite = load_suite(path, overrides)
    _check_folder(suite)
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    with run_lock(suite.folder):
        missing = [item for item in suite.runs if not _is_finished(item)]
        if len(missing) < len(suite.runs):
            console.print(f"{len(suite.runs) - len(missing)} of {len(suite.runs)} runs are finished.", markup=False)
        with _Interrupts() as interrupts:
            for number, item in enumerate(missing, start=1):
                console.print(f"run {number} of {len(missing)} · {item.arm}, seed {item.seed}", markup=False)
                interrupted = _train(item, _twin(suite, item))
                if interrupted or (interrupts.seen and number < len(missing)):
                    console.print(f"Interrupted; the same command goes on with {path} in {suite.folder}.", markup=False)
                    return EXIT_INTERRUPTED
        result = compare(suite)
        write_json(suite.folder / RESULT, result)
        write_text(suite.folder / PAGE, page(result))
    _print(result)
    console.print(f"{suite.folder / RESULT} · {suite.folder / PAGE}", markup=False)
    return 0


def _train(item: SuiteRun, twin: RunDir | None) -> bool:
    """Train to the end; returns whether Ctrl-C stopped it before."""
    from leanroll.train import distill

    summary = distill.run(item.config, resume=item.path.exists(), at_end=write_page, twin=twin)
    gc.collect()  # a trainer has reference cycles; the next run's model is not to stand beside this one's
    return summary.interrupted


def _twin(suite: Suite, item: SuiteRun) -> RunDir | None:
    """A finished run that began where this one begins, so that student and teacher need no second evaluation."""
    for other in suite.runs:
        changes = changed_options(other.config, item.config)
        if all(key.startswith(_AFTER_THE_START) for key in changes) and _is_finished(other):
            return RunDir.open(other.path)
    return None


# -- before training --------------------------------------------------------------------------------------------------


def _check_folder(suite: Suite) -> None:
    """Raise unless every run that is there already can be kept or continued."""
    if (suite.folder / "config.toml").is_file():
        raise ConfigError(
            f"{str(suite.folder)!r} is the directory of a single run; expected a folder for the suite. Choose another run_dir."
        )
    for item in suite.runs:
        if not item.path.exists() or RunDir.is_unstarted(item.path):
            continue
        found = RunDir.open(item.path)
        done = max(found.checkpoint_steps(), default=0)
        conflicts = resume_conflicts(read_resolved(type(item.config), found.config_path), item.config, done)
        if done > item.config.train.steps:
            conflicts = {"train.steps": (done, item.config.train.steps)}
        if conflicts:
            changes = "; ".join(f"{key}: {old!r} → {new!r}" for key, (old, new) in conflicts.items())
            raise ResumeError(
                f"{item.path} was run with other options ({changes}). Undo the changes, remove that folder, or choose another "
                "run_dir for the suite."
            )


def _is_finished(item: SuiteRun) -> bool:
    if not (item.path / "config.toml").is_file():
        return False
    return item.config.train.steps in RunDir.open(item.path).checkpoint_steps()


class _Interrupts:
    """Whether Ctrl-C was pressed at all. A run that was in its last step then ends as if nothing had happened, so its summary does
    not say."""

    def __enter__(self) -> _Interrupts:
        self._ends = socket.socketpair()
        for end in self._ends:
            end.setblocking(False)
        self._seen = False
        self._active = threading.current_thread() is threading.main_thread()
        if self._active:
            # Written to whichever handler is installed at the time (a run has its own).
            self._previous = signal.set_wakeup_fd(self._ends[1].fileno(), warn_on_full_buffer=False)
        return self

    def __exit__(self, *exc: object) -> None:
        if self._active:
            signal.set_wakeup_fd(self._previous)
        for end in self._ends:
            end.close()

    @property
    def seen(self) -> bool:
        """Since the block began."""
        with contextlib.suppress(BlockingIOError):  # nothing was written
            self._seen |= signal.SIGINT in self._ends[0].recv(4096)
        return self._seen


# -- afterwards -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RunRecord:
    """A finished run, for S steps and P held-out prompts.

    rewards: step of an evaluation → mean reward per prompt [P], NaN where all its completions are missing; step 0 is before
        training. seconds: of training, [S].
    """

    prompts: tuple[int, ...]
    rewards: dict[int, np.ndarray]
    seconds: np.ndarray
    generated_tokens: int
    trained_tokens: int
    teacher: float | None

    @classmethod
    def read(cls, item: SuiteRun) -> RunRecord:
        """Raises ResumeError when the last evaluation is missing."""
        found = RunDir.open(item.path)
        rewards, prompts = {}, ()
        for step in found.eval_steps():
            rows = json.loads(found.eval_path(step).read_text(encoding="utf-8"))["per_prompt"]
            prompts = tuple(row["index"] for row in rows)
            values = [[np.nan if r is None else r for r in row["rewards"]] for row in rows]
            rewards[step] = mean_at_k(np.array(values, dtype=np.float64))
        last = item.config.train.steps
        if not {0, last} <= rewards.keys():
            raise ResumeError(
                f"{item.path} has no evaluation of step {0 if last in rewards else last}; expected {found.eval_path(last).name} in "
                "its folder eval. Remove the run, and it is done again."
            )
        steps = [r for r in found.read_metrics() if r["step"] > 0]
        teacher = found.path / EVAL / TEACHER_EVAL
        return cls(
            prompts=prompts,
            rewards=rewards,
            seconds=np.array([sum(r.get(phase, 0.0) for phase in TRAINING_PHASES) for r in steps]),
            generated_tokens=int(sum(r.get("generated_tokens", 0) for r in steps)),
            trained_tokens=int(sum(r.get("trained_tokens", 0) for r in steps)),
            teacher=json.loads(teacher.read_text(encoding="utf-8"))["mean_reward"] if teacher.is_file() else None,
        )

    def step_at(self, seconds: float) -> int:
        """The last evaluated step that was reached within `seconds` of training."""
        spent = np.concatenate([[0.0], np.cumsum(self.seconds)])
        return max(step for step in self.rewards if spent[step] <= seconds)


def compare(suite: Suite) -> dict[str, Any]:
    """What is written to suite.json: per arm the held-out reward after the last step, what it cost, and the difference to the
    reference arm; with compare_at_seconds, rewards and differences at that time as well."""
    config = suite.config
    records = {arm.name: [RunRecord.read(item) for item in suite.of_arm(arm.name)] for arm in config.arms}
    every = [record for group in records.values() for record in group]
    if len({record.prompts for record in every}) > 1:
        raise ResumeError(
            f"The runs in {suite.folder} were evaluated on different held-out prompts, so there are no pairs to compare (was a "
            "file of the task changed?). Choose another run_dir, and run the suite again."
        )
    last = {name: [max(r.rewards) for r in group] for name, group in records.items()}
    teachers = [record.teacher for record in every if record.teacher is not None]
    result: dict[str, Any] = {
        "name": config.name,
        "reference": config.reference_arm,
        "seeds": list(config.seeds),
        "num_prompts": len(every[0].prompts),
        "before": _number(np.nanmean([np.nanmean(r.rewards[0]) for r in every])),
        "teacher": _number(np.mean(teachers)) if teachers else None,
        "compare_at_seconds": config.compare_at_seconds,
        "arms": [],
        "environment": describe({}),
    }
    at_time = {}
    if config.compare_at_seconds is not None:
        limit = config.compare_at_seconds
        at_time = {name: [r.step_at(limit) for r in group] for name, group in records.items()}
    for arm in config.arms:
        group = records[arm.name]
        entry = {
            "name": arm.name,
            "overrides": arm.overrides,
            "steps": int(np.mean([len(r.seconds) for r in group])),
            "hours": _number(np.mean([r.seconds.sum() for r in group]) / 3600),
            "generated_tokens": int(np.mean([r.generated_tokens for r in group])),
            "trained_tokens": int(np.mean([r.trained_tokens for r in group])),
            "step_s": _number(np.median(np.concatenate([r.seconds for r in group]))),
            **_scores(records, last, arm.name, config.reference_arm),
        }
        if at_time:
            spent = [float(r.seconds[:step].sum()) for r, step in zip(group, at_time[arm.name], strict=True)]
            entry["at_seconds"] = {
                "steps": at_time[arm.name],
                "seconds": [round(s, 1) for s in spent],
                **_scores(records, at_time, arm.name, config.reference_arm),
            }
        result["arms"].append(entry)
    return result


def _scores(
    records: Mapping[str, Sequence[RunRecord]], steps: Mapping[str, Sequence[int]], arm: str, reference: str
) -> dict[str, Any]:
    """Rewards of an arm's runs at `steps`, and minus those of the reference at its own."""
    ours, theirs = (
        np.stack([record.rewards[step] for record, step in zip(records[name], steps[name], strict=True)])
        for name in (arm, reference)
    )
    scores = {"reward": _interval(over_prompts(ours)), "reward_by_seed": [_number(np.nanmean(row)) for row in ours]}
    if arm == reference:
        return scores | {"difference": None, "difference_by_seed": None}
    pairs = ours - theirs
    return scores | {
        "difference": _interval(over_prompts(pairs)),
        "difference_by_seed": [_number(np.nanmean(row)) for row in pairs],
    }


def over_prompts(values_SP: np.ndarray) -> Interval:
    """Mean of float [S seeds, P prompts], NaN left out, and its bootstrap interval; a resampled prompt brings all its seeds."""
    return bootstrap_mean(mean_at_k(values_SP.T))


def _interval(interval: Interval) -> dict[str, float | None]:
    return {key: _number(value) for key, value in asdict(interval).items()}


def _number(value: Any) -> float | None:
    return round(float(value), 6) if np.isfinite(value) else None


# -- output -----------------------------------------------------------------------------------------------------------

_COLUMNS = (
    "arm", "reward", "by seed", "difference", "95 % interval", "steps", "hours", "tokens generated", "trained", "s per step",
)  # fmt: skip
_TIME_COLUMNS = ("arm", "step", "seconds", "reward", "by seed", "difference", "95 % interval")


def _rows(result: Mapping[str, Any]) -> list[list[str]]:
    return [
        [
            arm["name"],
            *_score_cells(arm),
            str(arm["steps"]),
            _text(arm["hours"], ".3f"),
            f"{arm['generated_tokens']:,}",
            f"{arm['trained_tokens']:,}",
            _text(arm["step_s"], ".2f"),
        ]
        for arm in result["arms"]
    ]


def _time_rows(result: Mapping[str, Any]) -> list[list[str]]:
    return [
        [
            arm["name"],
            " ".join(map(str, arm["at_seconds"]["steps"])),
            " ".join(f"{s:.0f}" for s in arm["at_seconds"]["seconds"]),
            *_score_cells(arm["at_seconds"]),
        ]
        for arm in result["arms"]
    ]


def _score_cells(scores: Mapping[str, Any]) -> list[str]:
    by_seed = " ".join(_text(value, ".3f") for value in scores["reward_by_seed"])
    difference = scores["difference"]
    if difference is None:
        return [_text(scores["reward"]["mean"], ".3f"), by_seed, "reference", ""]
    interval = f"{_text(difference['low'], '+.3f')} … {_text(difference['high'], '+.3f')}"
    return [_text(scores["reward"]["mean"], ".3f"), by_seed, _text(difference["mean"], "+.3f"), interval]


def _text(value: float | None, form: str) -> str:
    return "n/a" if value is None else format(value, form)


def _intro(result: Mapping[str, Any]) -> str:
    seeds = ", ".join(map(str, result["seeds"]))
    teacher = "" if result["teacher"] is None else f", teacher {result['teacher']:.3f}"
    return (
        f"Held-out reward after the last step on {result['num_prompts']} prompts, mean over the seeds {seeds}; before training "
        f"{_text(result['before'], '.3f')}{teacher}. Differences are to `{result['reference']}`, over pairs of a seed and a prompt."
    )


def page(result: Mapping[str, Any]) -> str:
    """suite.md."""
    lines = [
        f"# {result['name']}",
        "",
        _intro(result),
        "",
        "Intervals resample the prompts, each with all its seeds; they say nothing of new seeds. Hours and seconds are those of "
        "training (rollout, teacher, score, update), per run; hours and tokens are means over seeds, seconds per step the median.",
        "",
        *_markdown(_COLUMNS, _rows(result)),
    ]
    if result["compare_at_seconds"] is not None:
        lines += [
            "",
            f"## After {result['compare_at_seconds']:g} seconds of training",
            "",
            "Every run at its last evaluation up to there (step 0: before training), or at its end where that came first.",
            "",
            *_markdown(_TIME_COLUMNS, _time_rows(result)),
        ]
    lines += ["", "## Arms", "", "| arm | differs from the base in |", "|---|---|"]
    lines += [f"| {arm['name']} | `{arm['overrides']}` |" for arm in result["arms"]]
    return "\n".join(lines) + "\n"


def _markdown(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(cells)} |" for cells in (columns, ["---"] * len(columns), *rows)]


def _print(result: Mapping[str, Any]) -> None:
    console = Console(highlight=False)
    console.print(_intro(result), markup=False)
    tables: list[tuple[Sequence[str], list[list[str]], str]] = [(_COLUMNS, _rows(result), "after the last step")]
    if result["compare_at_seconds"] is not None:
        tables.append(
            (_TIME_COLUMNS, _time_rows(result), f"after {result['compare_at_seconds']:g} seconds of training")
        )
    for columns, rows, title in tables:
        table = Table(title=title)
        for column in columns:
            table.add_column(column, justify="left" if column == "arm" else "right", overflow="fold")
        for row in rows:
            table.add_row(*row)
        console.print(table)
