"""`leanroll report`: a run (of `rl` or `distill`), calibration or profile directory as one HTML page."""

from __future__ import annotations

import argparse

from rich.console import Console

from leanroll.cli.output import check_output

HELP = (
    "Write a run (of `rl` or `distill`), calibration or profile directory as one self-contained HTML page (needs the extra "
    "`report`)."
)
SCHEMA = None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The verb has no recipe options."""
    parser.add_argument("run_dir", help="folder of `leanroll rl`, `distill`, `calibrate` or `profile`")
    parser.add_argument(
        "--output",
        "-o",
        metavar="FILE",
        help="HTML file (default: report.html in RUN_DIR; profile.html of a profile)",
    )


def run(arguments: argparse.Namespace, overrides: list[tuple[str, str]]) -> int:
    """Write the page; returns the exit code."""
    from leanroll.report import (
        is_calibration,
        is_profile,
        write_calibration_report,
        write_profile_report,
        write_report,
    )
    from leanroll.rundir import PROFILE_PAGE, REPORT, RunDir

    run_dir = RunDir.open(arguments.run_dir)
    profile = is_profile(run_dir.path)
    output = check_output(arguments.output or str(run_dir.path / (PROFILE_PAGE if profile else REPORT)))
    if is_calibration(run_dir.path):
        write_calibration_report(run_dir.path, output)
    elif profile:
        write_profile_report(run_dir.path, output)
    else:
        write_report(run_dir, output)
    Console(stderr=True, soft_wrap=True).print(f"Wrote {output}", markup=False)
    return 0
