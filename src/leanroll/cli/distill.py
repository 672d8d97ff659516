"""`leanroll distill`: on-policy distillation from a recipe, or a suite of such runs."""

from __future__ import annotations

import argparse

from leanroll.cli import training
from leanroll.cli.training import EXIT_FAILURE, EXIT_INTERRUPTED, read_config, write_page
from leanroll.config import DistillConfig
from leanroll.errors import ConfigError

HELP = "Distil a teacher into a student on the beginnings of the student's own completions, as the recipe says."
SCHEMA = DistillConfig


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments besides the options of the recipe."""
    training.add_arguments(parser)
    parser.add_argument(
        "--suite",
        metavar="FILE",
        help="TOML file with a base recipe, arms and seeds: train every arm with every seed, then compare them; give it again to "
        "go on with what is not finished (options change the base, --train.run_dir is the folder of all)",
    )


def run(arguments: argparse.Namespace, overrides: list[tuple[str, str]]) -> int:
    """Train; returns the exit code."""
    if arguments.suite is not None:
        if arguments.recipe is not None or arguments.resume:
            got = "--resume" if arguments.resume else f"the recipe {arguments.recipe!r}"
            raise ConfigError(
                f"{got} has no effect beside --suite, whose file names the recipe and which always goes on; leave it out."
            )
        from leanroll.cli import suite

        return suite.run(arguments.suite, overrides)
    config = read_config(SCHEMA, arguments.recipe, arguments.resume, overrides)
    from leanroll.train import distill

    summary = distill.run(config, resume=arguments.resume, at_end=write_page)
    if summary.halted is not None:
        return EXIT_FAILURE
    return EXIT_INTERRUPTED if summary.interrupted else 0
