"""`leanroll rl`: reinforcement learning from a recipe."""

from __future__ import annotations

import argparse

from leanroll.cli.training import EXIT_FAILURE, EXIT_INTERRUPTED, add_arguments, read_config, write_page
from leanroll.config import RLConfig

__all__ = ["HELP", "SCHEMA", "add_arguments", "run"]

HELP = "Train a policy with verifiable rewards: rollouts, rewards, scoring, updates, as the recipe says."
SCHEMA = RLConfig


def run(arguments: argparse.Namespace, overrides: list[tuple[str, str]]) -> int:
    """Train; returns the exit code."""
    config = read_config(SCHEMA, arguments.recipe, arguments.resume, overrides)
    from leanroll.train import rl

    summary = rl.run(config, resume=arguments.resume, at_end=write_page)
    if summary.halted is not None:
        return EXIT_FAILURE
    return EXIT_INTERRUPTED if summary.interrupted else 0
