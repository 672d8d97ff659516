"""Kill a training run with SIGKILL at random moments, resume it, and compare it with an uninterrupted one (invariant
I4).

    python -m tests.invariants.kill_and_resume recipe.toml WORK_DIR [--kills 3] [--seed 0] [--section.option VALUE ...]

Both runs go to WORK_DIR (`straight`, `killed`). Prints what differs and exits with 1, or prints that nothing does.
Every attempt is a forked process, so that importing torch is paid once; run it with OMP_NUM_THREADS=1 when cores are
busy.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch

from leanroll.config import RLConfig, load_config, split_overrides
from leanroll.rundir import RunDir
from leanroll.rundir_metrics import is_timing
from leanroll.train import rl


def attempt(config: RLConfig, *, resume: bool, kill_after: float | None) -> bool:
    """Run in a forked process; returns False if it was killed after `kill_after` seconds (None: never)."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            rl.run(config, resume=resume, quiet=True)
            code = 0
        finally:
            sys.stderr.flush()
            os._exit(code)
    deadline = None if kill_after is None else time.monotonic() + kill_after
    while True:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            if os.waitstatus_to_exitcode(status) != 0:
                raise RuntimeError(f"the run failed by itself ({status}); its error is above")
            return True
        if deadline is not None and time.monotonic() >= deadline:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            return False
        time.sleep(0.005)


def run_with_kills(config: RLConfig, seconds: float, kills: int, seed: int) -> int:
    """Kill up to `kills` times at random moments of a run that takes `seconds`; returns how many attempts were
    killed."""
    run_dir = Path(str(config.train.run_dir))
    rng = random.Random(seed)
    # Later kills are aimed later: a resumed run has less to do, and every part of a run should be hit.
    killed = 0
    for number in range(kills):
        low, high = 0.9 * number / kills, 0.9 * (number + 1) / kills
        begun = progress(run_dir)
        if attempt(config, resume=run_dir.is_dir(), kill_after=max(0.0, rng.uniform(low, high) - begun) * seconds):
            return killed
        killed += 1
    attempt(config, resume=run_dir.is_dir(), kill_after=None)
    return killed


def progress(run_dir: Path) -> float:
    """Roughly the share of the run that a resumed attempt need not repeat."""
    if not (run_dir / "config.toml").is_file():
        return 0.0
    run = RunDir.open(run_dir)
    steps = run.checkpoint_steps()
    return steps[-1] / run.read_config()["train"]["steps"] if steps else 0.0


def differences(left: Path, right: Path) -> list[str]:
    """What differs between two runs, timings and memory aside."""
    found: list[str] = []
    a, b = (
        [{k: v for k, v in r.items() if not is_timing(k)} for r in RunDir.open(path).read_metrics()]
        for path in (left, right)
    )
    if len(a) != len(b):
        found.append(f"metrics.jsonl has {len(a)} and {len(b)} records")
    for one, other in zip(a, b, strict=False):
        keys = [k for k in sorted(one.keys() | other.keys()) if one.get(k) != other.get(k)]
        found += [f"step {one['step']}, {k}: {one.get(k)} and {other.get(k)}" for k in keys]
    for folder in ("rollouts", "eval"):
        for path in sorted({p.name for run in (left, right) for p in (run / folder).iterdir()}):
            texts = [
                (run / folder / path).read_text() if (run / folder / path).exists() else None for run in (left, right)
            ]
            if texts[0] != texts[1]:
                found.append(f"{folder}/{path}")
    states = [torch.load(run / "checkpoints/latest/trainer.pt", weights_only=True) for run in (left, right)]
    found += [f"trainer.pt: {path}" for path in unequal(*states)]
    return found


def unequal(a: Any, b: Any, path: str = "") -> list[str]:
    """Places where two nested structures of tensors and plain values differ, bit for bit."""
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return [] if torch.equal(a, b) else [path]
    if isinstance(a, dict) and isinstance(b, dict) and a.keys() == b.keys():
        return [p for k in a for p in unequal(a[k], b[k], f"{path}/{k}")]
    if isinstance(a, list | tuple) and isinstance(b, list | tuple) and len(a) == len(b):
        return [p for i, (x, y) in enumerate(zip(a, b, strict=True)) for p in unequal(x, y, f"{path}/{i}")]
    return [] if type(a) is type(b) and a == b else [path]


def main(arguments: list[str]) -> int:
    """The command line of the module docstring."""
    rest, overrides = split_overrides(arguments, RLConfig)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe")
    parser.add_argument("work_dir", type=Path)
    parser.add_argument("--kills", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parsed = parser.parse_args(rest)
    configs = [
        load_config(RLConfig, parsed.recipe, [*overrides, ("train.run_dir", str(parsed.work_dir / name))])
        for name in ("straight", "killed")
    ]
    start = time.monotonic()
    attempt(configs[0], resume=False, kill_after=None)
    killed = run_with_kills(configs[1], time.monotonic() - start, parsed.kills, parsed.seed)
    found = differences(parsed.work_dir / "straight", parsed.work_dir / "killed")
    print("\n".join(found) if found else "no difference", f"({killed} attempts killed)")
    return 1 if found or not killed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
