"""`leanroll profile`: where a teacher disagrees and still helps before a distillation, and what it changed afterwards."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from leanroll.config import ProfileConfig, RunProfileConfig, load_config
from leanroll.errors import ConfigError
from leanroll.rundir import RunDir

HELP = (
    "Before distilling (a recipe): KL by position, the number of tokens N, the teacher's decay, seconds per step. After it (the "
    "run's folder): how far the KL fell, also where nothing was trained, and what became of the completions. Trains nothing."
)
SCHEMA = ProfileConfig

_AFTER = ("rollout.kernel", "rollout.kv_memory_gib", "rollout.max_batch_size", "rollout.max_completion_length",
          "model.device", "teacher.offload")  # fmt: skip
"""Options besides [profile] that may differ from the run's: where and how long completions are generated, not what is compared."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments besides the options of the recipe."""
    parser.add_argument(
        "recipe",
        nargs="?",
        metavar="RECIPE | RUN_DIR",
        help="TOML file of `leanroll distill` (tables of training are left aside), or the folder of a run of it that has a "
        f"checkpoint; with a folder, options are those of [profile] and {', '.join(_AFTER)}",
    )
    parser.add_argument("--step", type=int, metavar="N", help="checkpoint of a RUN_DIR (default: the latest)")


def run(arguments: argparse.Namespace, overrides: list[tuple[str, str]]) -> int:
    """Profile; returns the exit code."""
    if arguments.recipe is not None and Path(arguments.recipe).is_dir():
        return _after(RunDir.open(arguments.recipe), arguments.step, overrides)
    if arguments.step is not None:
        raise ConfigError(
            f"--step is {arguments.step}, but there is no run with checkpoints; give the folder of a run, or leave it out."
        )
    config = load_config(ProfileConfig, arguments.recipe, overrides)
    _need_plots()
    from leanroll.train import profile

    profile.run(config, at_end=_write_page)
    return 0


def _after(run_dir: RunDir, step: int | None, overrides: Sequence[tuple[str, str]]) -> int:
    tables = run_dir.read_config()
    if not {"distill", "train"} <= tables.keys():
        what = "a run of `leanroll rl`" if "rl" in tables else "no training run"
        raise ConfigError(
            f"{str(run_dir.path)!r} is {what}; expected a run directory of `leanroll distill`, since a profile compares a student "
            "with its teacher."
        )
    fixed = [key for key, _ in overrides if not key.startswith("profile.") and key not in _AFTER]
    if fixed:
        raise ConfigError(
            f"--{fixed[0]} is set, but the run was trained with its own; after training only options of [profile] and "
            f"{', '.join(_AFTER)} can be given. Leave it out."
        )
    config = load_config(RunProfileConfig, run_dir.config_path, overrides)
    _need_plots()
    from leanroll.train import profile_run

    profile_run.run(run_dir, config, step=step, at_end=_write_page)
    return 0


def _need_plots() -> None:
    from leanroll.report.plots import new_figure

    new_figure(1.0, 1.0)  # a missing matplotlib is better met before the measurement


def _write_page(folder: Path) -> None:
    from leanroll.report import write_profile_report
    from leanroll.rundir import PROFILE_PAGE

    write_profile_report(folder, folder / PROFILE_PAGE)
