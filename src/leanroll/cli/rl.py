"""`leanroll rl`: reinforcement learning from a recipe."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

from leanroll.config import RLConfig, load_config
from leanroll.errors import ConfigError, MissingExtra, ResumeError
from leanroll.report import write_report
from leanroll.rundir import REPORT, RunDir

HELP = "Train a policy with verifiable rewards: rollouts, rewards, scoring, updates, as the recipe says."
SCHEMA = RLConfig

EXIT_INTERRUPTED = 130
"""As a shell reports Ctrl-C; the run has been saved."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments besides the options of the recipe."""
    parser.add_argument(
        "recipe", nargs="?", help="TOML file; with --resume also a run directory; without it: defaults and options only"
    )
    parser.add_argument(
        "--resume", action="store_true", help="continue the run in the run directory from its last checkpoint"
    )


def read_config(recipe: str | None, resume: bool, overrides: list[tuple[str, str]]) -> RLConfig:
    """The recipe of a new or resumed run.

    Raises:
        ConfigError: a bad recipe, or a run directory without --resume. ResumeError: no run to continue is named.
    """
    if recipe is not None and Path(recipe).is_dir():
        if not resume:
            raise ConfigError(
                f"{recipe!r} is a folder; expected a TOML file. Add --resume to continue the run in it, or give "
                f"{recipe}/config.toml and another --train.run_dir to start the same run again."
            )
        run = RunDir.open(recipe)
        return load_config(RLConfig, run.config_path, [("train.run_dir", str(run.path)), *overrides])
    config = load_config(RLConfig, recipe, overrides)
    if resume and config.train.run_dir is None:
        raise ResumeError(
            "--resume does not say which run; give its folder (leanroll rl RUN_DIR --resume) or --train.run_dir."
        )
    return config


def run(arguments: argparse.Namespace, overrides: list[tuple[str, str]]) -> int:
    """Train; returns the exit code."""
    config = read_config(arguments.recipe, arguments.resume, overrides)
    from leanroll.train import rl

    summary = rl.run(config, resume=arguments.resume, at_end=write_page)
    return EXIT_INTERRUPTED if summary.interrupted else 0


def write_page(run: RunDir, say: Callable[[str], None]) -> None:
    """Write the run's page, or say why there is none; without a finished step there is nothing to show."""
    if not run.read_metrics():
        return
    try:
        write_report(run, run.path / REPORT)
    except MissingExtra as error:
        say(f"No {REPORT} written. {error}")
