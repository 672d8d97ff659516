"""`leanroll VERB …`: parsing, dispatch, and what the user sees when something is wrong.

Exit codes: 0 done, 1 our fault or a run that failed, 2 the user's mistake, 130 interrupted.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from types import ModuleType

from rich.console import Console

from leanroll import __version__
from leanroll.cli import bench, calibrate, distill, doctor, evaluate, profile, report, rl, rollout
from leanroll.cli.help import options_text, wants_help
from leanroll.cli.training import EXIT_INTERRUPTED
from leanroll.config import split_overrides
from leanroll.environment import limit_spinning
from leanroll.errors import LeanrollError, UserError

# The modules of the verbs import torch only when they run, so that --help and errors in options are quick.
VERBS: dict[str, ModuleType] = {
    "rl": rl,
    "distill": distill,
    "profile": profile,
    "rollout": rollout,
    "eval": evaluate,
    "calibrate": calibrate,
    "bench": bench,
    "doctor": doctor,
    "report": report,
}

EXIT_FAILURE, EXIT_USER = 1, 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code (argparse itself exits with 2 on a wrong verb or flag)."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    limit_spinning()
    try:
        return _run(arguments)
    except UserError as error:
        _complain(error)
        return EXIT_USER
    except LeanrollError as error:
        _complain(error)
        return EXIT_FAILURE
    except KeyboardInterrupt:
        Console(stderr=True).print("Interrupted.")
        return EXIT_INTERRUPTED


def _run(arguments: list[str]) -> int:
    # The verb comes first: its schema says which of the other arguments are options of the recipe.
    verb = arguments[0] if arguments and arguments[0] in VERBS else None
    overrides: list[tuple[str, str]] = []
    if verb is not None and VERBS[verb].SCHEMA is not None and not wants_help(arguments):
        arguments, overrides = split_overrides(arguments, VERBS[verb].SCHEMA)
    parsed = _parser().parse_args(arguments)
    code: int = VERBS[parsed.verb].run(parsed, overrides)
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="leanroll", description="Post-training of language models with lean rollouts.", allow_abbrev=False
    )
    parser.add_argument("--version", action="version", version=f"leanroll {__version__}")
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    for name, module in VERBS.items():
        sub = verbs.add_parser(
            name,
            help=module.HELP.replace("%", "%%"),  # argparse formats this one
            description=module.HELP,
            epilog=None if module.SCHEMA is None else options_text(module.SCHEMA),
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        module.add_arguments(sub)
    return parser


def _complain(error: LeanrollError) -> None:
    console = Console(stderr=True, soft_wrap=True, highlight=False)
    console.print("[bold red]error:[/] ", end="")
    console.print(str(error), markup=False)


if __name__ == "__main__":
    sys.exit(main())
