"""What the training benchmarks share: run a recipe to its end in a process of its own, picking up where it stopped."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks._common import progress
from leanroll.config import RLConfig, load_config
from leanroll.rundir import RunDir

Overrides = Sequence[tuple[str, str]]


def finish_run(recipe: Path, run_dir: Path, overrides: Overrides, threads: int | None = None) -> RunDir:
    """Train unless `run_dir` holds the finished run; a run that was broken off goes on from its last checkpoint.

    threads: of one of several training processes, whose output then goes to a file beside the run directory. None: it is the
        only one, and OMP_NUM_THREADS counts.

    Raises:
        CalledProcessError: training failed; its message is on stderr.
    """
    options = [*overrides, ("train.run_dir", str(run_dir))]
    config = load_config(RLConfig, recipe, options)
    started = (run_dir / "config.toml").is_file()
    if started and last_step(run_dir) == config.train.steps:
        progress(f"{run_dir.name}: finished before")
        return RunDir.open(run_dir)
    progress(f"{run_dir.name}: {'resuming' if started else 'starting'}, {config.train.steps} steps")
    arguments = [part for key, value in options for part in (f"--{key}", value)]
    resume = ["--resume"] if started else []
    command = [sys.executable, "-m", "leanroll.cli.main", "rl", str(recipe), *resume, *arguments]
    if threads is None:
        subprocess.run(command, check=True)
    else:
        run_dir.parent.mkdir(parents=True, exist_ok=True)
        with run_dir.with_name(f"{run_dir.name}.log").open("a") as log:
            variables = os.environ | {"OMP_NUM_THREADS": str(threads)}
            subprocess.run(command, check=True, env=variables, stdout=log, stderr=subprocess.STDOUT)
    return RunDir.open(run_dir)


def last_step(run_dir: Path) -> int:
    """Step of the newest checkpoint, 0 without one."""
    return max(RunDir.open(run_dir).checkpoint_steps(), default=0)


def final_adapter(run: RunDir) -> Path:
    """Folder of the policy after the last step."""
    return run.checkpoint_path(last_step(run.path)) / "policy"


def phase_seconds(records: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Mean seconds per step of every phase but the evaluations, over steps after the first (which warms up)."""
    steps = [r for r in records if r["step"] > 1] or [r for r in records if r["step"] == 1]
    names = sorted({k for r in steps for k in r if k.startswith("time/")} - {"time/eval_s", "time/step_s"})
    return {n.removeprefix("time/").removesuffix("_s"): sum(r.get(n, 0.0) for r in steps) / len(steps) for n in names}


def mean_of(records: Sequence[dict[str, Any]], name: str) -> float:
    """Mean of a metric over the steps that have it."""
    values = [r[name] for r in records if name in r]
    return sum(values) / len(values)
