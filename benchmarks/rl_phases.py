"""Time per phase of a training step, dense against sparse rollouts, on one recipe.

    python -m benchmarks.rl_phases [recipes/long_context.toml] [--work-dir runs/rl_phases] [--steps N]

Trains the recipe with its own schedule and with `dense`, prints a table of mean seconds per step and phase (steps
after the first), and ends with a JSON line. Finished runs in the work directory are not done again.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks._common import print_result
from benchmarks._rl import finish_run, mean_of, phase_seconds

DEFAULT = Path(__file__).parent.parent / "recipes" / "long_context.toml"


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line of the module docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", type=Path, nargs="?", default=DEFAULT)
    parser.add_argument("--work-dir", type=Path, default=Path("runs/rl_phases"))
    parser.add_argument("--steps", type=int, help="steps per run (default: the recipe's)")
    options = parser.parse_args(arguments)
    steps = [] if options.steps is None else [("train.steps", str(options.steps))]
    result: dict[str, Any] = {"recipe": options.recipe.name}
    for name, schedule in (("dense", [("rollout.schedule", "dense")]), ("sparse", [])):
        run = finish_run(options.recipe, options.work_dir / f"{options.recipe.stem}-{name}", [*steps, *schedule])
        records = [r for r in run.read_metrics() if r["step"] > 0]
        result[name] = {
            "seconds": {phase: round(seconds, 3) for phase, seconds in phase_seconds(records).items()},
            "tokens_per_second": round(mean_of(records[1:] or records, "tokens_per_second"), 1),
            "kv_share_read": round(mean_of(records, "kv_share_read"), 4),
            "prompt_tokens": round(mean_of(records, "prompt_length/mean"), 1),
            "completion_tokens": round(mean_of(records, "completion_length/mean"), 1),
            "steps": len(records),
        }
    print(f"{'seconds per step':20}{'dense':>10}{'sparse':>10}")
    for phase in sorted(result["dense"]["seconds"] | result["sparse"]["seconds"]):
        row = [result[name]["seconds"].get(phase, 0.0) for name in ("dense", "sparse")]
        print(f"{phase:20}{row[0]:10.2f}{row[1]:10.2f}")
    for name in ("tokens_per_second", "kv_share_read"):
        print(f"{name:20}{result['dense'][name]:10.2f}{result['sparse'][name]:10.2f}")
    print_result("rl_phases", result)


if __name__ == "__main__":
    main()
