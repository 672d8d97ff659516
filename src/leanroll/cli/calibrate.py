"""`leanroll calibrate`: from a model and texts (or a task) to budget schedules for given targets."""

from __future__ import annotations

import argparse
import glob
import json
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from leanroll.cli.calibrate_sampler import add_trained_sampler, training_part
from leanroll.cli.progress import generation_progress, pass_progress, status
from leanroll.config import CalibrateConfig, load_config, to_toml
from leanroll.config.resolved import changed_options, read_resolved
from leanroll.environment import describe
from leanroll.errors import ConfigError, ResumeError
from leanroll.report.calibration import speed_line
from leanroll.rundir import CONFIG, ENVIRONMENT, REPORT, write_json, write_text
from leanroll.rundir_lock import LOCK, run_lock

if TYPE_CHECKING:
    from leanroll.calibrate.trajectories import Trajectory
    from leanroll.models import Policy

HELP = "Measure acceptance by budget and length, and fit the smallest schedule that reaches each target."
SCHEMA = CalibrateConfig

FREE_ON_RESUME = frozenset(
    {
        "calibrate.run_dir",
        "calibrate.time_budget_min",
        "calibrate.targets",
        "calibrate.measure_speed",
        "calibrate.speed_batch_size",
        "rollout.kv_memory_gib",
    }
)
"""Options that may change when a calibration is continued: what has been measured stays valid."""
DENSE_ROLLOUTS = "rollouts.jsonl"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments besides the options of the recipe."""
    parser.add_argument("recipe", nargs="?", help="TOML file; tables that only training uses are left aside")
    parser.add_argument("--targets", nargs="+", metavar="ALPHA", help="short for --calibrate.targets")
    parser.add_argument("--texts", nargs="+", metavar="FILE", help="short for --calibrate.texts")
    parser.add_argument("--max-tokens", metavar="N", help="short for --calibrate.max_tokens")
    parser.add_argument("--time-budget", metavar="MINUTES", help="short for --calibrate.time_budget_min")
    parser.add_argument("--distill-sparse", metavar="STEPS", help="short for --calibrate.distill_steps")
    parser.add_argument("--resume", action="store_true", help="continue the calibration in calibrate.run_dir")


def run(arguments: argparse.Namespace, overrides: list[tuple[str, str]]) -> int:
    """Calibrate; returns the exit code."""
    config = load_config(CalibrateConfig, arguments.recipe, [*overrides, *_shorthands(arguments)])
    settings = config.calibrate
    _reject_inert(config, [key for key, _ in overrides])
    paths = _texts(settings.texts)

    from leanroll.calibrate.run import Calibration, check_settings
    from leanroll.calibrate.trajectories import split
    from leanroll.report import write_calibration_report
    from leanroll.train import setup

    folder = _prepare_folder(config, arguments.resume)
    with status(f"Loading {config.model.name} …"):
        policy = setup.build_policy(config.model, config.adapter, training=False)
        engine = setup.build_engine(policy, setup.BudgetSchedule.dense(settings.page_size), config.rollout)
    check_settings(settings, policy.spec)
    facts = {"device": str(policy.device), "dtype": str(policy.dtype).removeprefix("torch.")}
    # Texts are looked at before anything is written: most mistakes show here.
    trajectories = _from_texts(config, policy, paths) if paths else []
    parts = split(trajectories, settings.trajectories, settings.held_out) if paths else None
    training = training_part(config, trajectories, parts) if parts is not None else []
    with run_lock(folder):
        write_json(folder / ENVIRONMENT, describe(facts))
        write_text(folder / CONFIG, to_toml(config))
        if parts is None:
            trajectories = _from_task(config, policy, folder)
            parts = split(trajectories, settings.trajectories, settings.held_out)
            training = training_part(config, trajectories, parts)
        fitting, held_out = parts
        with pass_progress() as (advance, say):
            add_trained_sampler(config, policy, training, folder, say)
            calibration = Calibration(
                policy=policy,
                backend=engine.backend,
                make_engine=lambda schedule: setup.build_engine(policy, schedule, config.rollout),
                settings=settings,
                name=config.name,
                temperature=config.rollout.temperature,
                folder=folder,
                say=say,
                progress=advance,
                kv_memory_gib=config.rollout.kv_memory_gib,
            )
            summary = calibration.run(fitting, held_out)
        write_calibration_report(folder, folder / REPORT)
    _print(summary, folder)
    return 0


def _reject_inert(config: CalibrateConfig, keys: list[str]) -> None:
    """Raise ConfigError for options given that do nothing here. What a training recipe sets besides is left aside."""
    because = {"rollout.scorer": "the scorer is calibrate.scorer"}
    if not config.calibrate.distill_steps:
        because["rollout.schedule"] = "the schedule is what is made"
        reason = "no sampler adapter is trained (calibrate.distill_steps is 0)"
        because |= {k: reason for k in keys if k.startswith("sampler_adapter.") and k != "sampler_adapter.path"}
    else:
        because["sampler_adapter.ppo_weight"] = "there are no rewards"
    if not config.calibrate.measure_speed:
        because["calibrate.speed_batch_size"] = "calibrate.measure_speed is false"
    if config.calibrate.texts:
        reason = "calibrate.texts are scored in place and no task is asked"
        because |= {k: reason for k in keys if k.startswith("task.") or k == "rollout.max_completion_length"}
    elif "windows_per_file" in config.calibrate.model_fields_set:
        raise ConfigError("calibrate.windows_per_file is set but has no effect without calibrate.texts; remove it.")
    for key in keys:
        if key in because:
            raise ConfigError(f"{key} has no effect, because {because[key]}; leave it out.")


def _shorthands(arguments: argparse.Namespace) -> list[tuple[str, str]]:
    found = []
    if arguments.targets is not None:
        found.append(("calibrate.targets", f"[{', '.join(arguments.targets)}]"))
    if arguments.texts is not None:
        # A JSON list of strings is a TOML one.
        found.append(("calibrate.texts", json.dumps(arguments.texts, ensure_ascii=False)))
    if arguments.max_tokens is not None:
        found.append(("calibrate.max_tokens", arguments.max_tokens))
    if arguments.time_budget is not None:
        found.append(("calibrate.time_budget_min", arguments.time_budget))
    if arguments.distill_sparse is not None:
        found.append(("calibrate.distill_steps", arguments.distill_sparse))
    return found


def _texts(patterns: tuple[str, ...]) -> list[Path]:
    """The files that the patterns name.

    Raises:
        ConfigError: a pattern that matches nothing.
    """
    found: list[Path] = []
    for pattern in patterns:
        files = [
            Path(f).resolve() for f in glob.glob(str(Path(pattern).expanduser()), recursive=True) if Path(f).is_file()
        ]
        if not files:
            raise ConfigError(f"calibrate.texts: no file matches {pattern!r}.")
        found += files
    return sorted(set(found))


def _prepare_folder(config: CalibrateConfig, resume: bool) -> Path:
    """Where the results go. Raises ConfigError or ResumeError when that is not possible; writes nothing."""
    named = config.calibrate.run_dir
    if named is None:
        if resume:
            raise ResumeError("--resume does not say which calibration; give --calibrate.run_dir.")
        return Path("runs") / f"{config.name}-{datetime.now():%Y%m%d-%H%M%S}"
    folder = Path(named).absolute()
    if resume:
        if not (folder / CONFIG).is_file():
            raise ResumeError(f"No calibration in {str(folder)!r}: expected a folder with a {CONFIG}.")
        changes = changed_options(read_resolved(CalibrateConfig, folder / CONFIG), config)
        conflicts = {key: values for key, values in changes.items() if key not in FREE_ON_RESUME}
        if conflicts:
            listed = "; ".join(f"{key} was {old!r}, is {new!r}" for key, (old, new) in conflicts.items())
            raise ResumeError(
                f"The calibration in {str(folder)!r} was made with other options: {listed}. Start a new one."
            )
    elif folder.exists() and (not folder.is_dir() or any(entry.name != LOCK for entry in folder.iterdir())):
        raise ConfigError(
            f"Folder {str(folder)!r} is not empty; choose another calibrate.run_dir, or continue what is in it with --resume."
        )
    return folder


def _from_texts(config: CalibrateConfig, policy: Policy, paths: list[Path]) -> list[Trajectory]:
    from leanroll.calibrate.trajectories import from_texts

    settings = config.calibrate
    return from_texts(
        paths,
        policy.tokenizer,
        max_tokens=settings.max_tokens,
        min_tokens=settings.max_tokens,
        per_file=settings.windows_per_file,
        seed=settings.seed,
    )


def _from_task(config: CalibrateConfig, policy: Policy, folder: Path) -> list[Trajectory]:
    """From dense rollouts of the task, made once."""
    from leanroll.calibrate.trajectories import Trajectory, from_groups
    from leanroll.rundir import read_jsonl, write_jsonl
    from leanroll.train import setup

    settings = config.calibrate
    saved = folder / DENSE_ROLLOUTS
    if saved.is_file():
        return [Trajectory(r["source"], tuple(r["token_ids"]), r["prompt_length"]) for r in read_jsonl(saved)]
    task = setup.build_task(config.task)
    extra = settings.distill_trajectories if settings.distill_steps else 0
    items = [task.train_item(i) for i in range(settings.trajectories + settings.held_out + extra)]
    prompts = setup.PromptEncoder(policy, config.task).encode(items)
    engine = setup.build_engine(policy, setup.BudgetSchedule.dense(settings.page_size), config.rollout)
    sampling = setup.sampling_params(policy, config.rollout, seed=settings.seed)
    with generation_progress("dense rollouts") as progress:
        groups = engine.generate(prompts, sampling, 1, progress=progress)
    found = from_groups(groups, settings.max_tokens)
    write_jsonl(
        saved, ({"source": t.source, "prompt_length": t.prompt_length, "token_ids": list(t.token_ids)} for t in found)
    )
    return found


def _print(summary: dict[str, Any], folder: Path) -> None:
    """Per target: the schedule, and the achieved tail per bin against the target."""
    console = Console()
    edges = summary["edges"]
    for result in summary["targets"]:
        table = Table(title=f"target {result['target']:g}")
        columns = ("length", "pages", "fitted on", "held out", "continuations")
        for column in columns:
            table.add_column(column, justify="right")
        for i, pages in enumerate(result["pages"]):
            cells = []
            for name in ("fit", "held_out", "continuations"):
                stats = result.get(name, [None] * len(result["pages"]))[i]
                cells.append(
                    "" if stats is None else f"{stats['tail']:.3f} [{stats['tail_low']:.3f}, {stats['tail_high']:.3f}]"
                )
            shown = f"{pages} (all)" if i in result["dense_bins"] else str(pages)
            table.add_row(f"{edges[i]}-{edges[i + 1] - 1}", shown, *cells)
        console.print(table)
    if summary["targets_missing"]:
        console.print(f"Targets not reached in time: {summary['targets_missing']}")
    for result in summary["targets"]:
        saved = result["exhaustive_seconds"] / max(result["seconds"], 1e-9)
        line = (
            f"target {result['target']:g}: {result['kv_share']:.2f} of the KV read over {summary['max_tokens']} tokens; "
            f"{speed_line(result['speed'])}; {result['passes']} passes, {result['seconds'] / 60:.1f} min, an exhaustive sweep "
            f"{saved:.1f}x as much"
        )
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    console.print(f"Schedules, table and report in {folder}")
