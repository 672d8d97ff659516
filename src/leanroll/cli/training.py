"""What the verbs that train have in common: their arguments, the recipe of a new or resumed run, the page at the end."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from leanroll.config import DistillConfig, RLConfig, load_config
from leanroll.errors import ConfigError, MissingExtra, ResumeError
from leanroll.report import write_report
from leanroll.rundir import REPORT, RunDir

EXIT_FAILURE = 1
"""The run stopped by itself."""

EXIT_INTERRUPTED = 130
"""As a shell reports Ctrl-C; the run has been saved."""

ConfigT = TypeVar("ConfigT", RLConfig, DistillConfig)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments besides the options of the recipe."""
    parser.add_argument(
        "recipe", nargs="?", help="TOML file; with --resume also a run directory; without it: defaults and options only"
    )
    parser.add_argument(
        "--resume", action="store_true", help="continue the run in the run directory from its last checkpoint"
    )


def read_config(schema: type[ConfigT], recipe: str | None, resume: bool, overrides: list[tuple[str, str]]) -> ConfigT:
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
        return load_config(schema, run.config_path, [("train.run_dir", str(run.path)), *overrides])
    config = load_config(schema, recipe, overrides)
    if resume and config.train.run_dir is None:
        raise ResumeError("--resume does not say which run; give its folder as the recipe, or --train.run_dir.")
    return config


def write_page(run: RunDir, say: Callable[[str], None]) -> None:
    """Write the run's page, or say why there is none; without a finished step there is nothing to show."""
    if not run.read_metrics():
        return
    try:
        write_report(run, run.path / REPORT)
    except MissingExtra as error:
        say(f"No {REPORT} written. {error}")
    except OSError as error:  # the run itself is complete, and every number of the page is in it
        say(f"No {REPORT} written ({error.strerror or error}). Run `leanroll report {run.path}` once there is room.")
