"""`leanroll profile`: where along the student's completions a teacher disagrees and still helps, and what a step will cost."""

from __future__ import annotations

import argparse
from pathlib import Path

from leanroll.config import ProfileConfig, load_config

HELP = "Before distilling: KL by position, the number of tokens N, the teacher's decay, and seconds per step. Trains nothing."
SCHEMA = ProfileConfig


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments besides the options of the recipe."""
    parser.add_argument("recipe", nargs="?", help="TOML file of `leanroll distill`; tables of training are left aside")


def run(arguments: argparse.Namespace, overrides: list[tuple[str, str]]) -> int:
    """Profile; returns the exit code."""
    config = load_config(ProfileConfig, arguments.recipe, overrides)
    from leanroll.report import write_profile_report
    from leanroll.report.plots import new_figure
    from leanroll.rundir import PROFILE_PAGE
    from leanroll.train import profile

    new_figure(1.0, 1.0)  # a missing matplotlib is better met before the measurement

    def write_page(folder: Path) -> None:
        write_profile_report(folder, folder / PROFILE_PAGE)

    profile.run(config, at_end=write_page)
    return 0
