"""Kill a training run with SIGKILL at random moments, resume it, and compare it with an uninterrupted one (invariant
I4).

    python -m tests.invariants.kill_and_resume recipe.toml WORK_DIR [--verb distill] [--kills 3] [--by-phase] [--seed 0]
        [--section.option VALUE ...]

Both runs go to WORK_DIR (`straight`, `killed`). Prints what differs and exits with 1, or prints that nothing does.
With --by-phase every kill is aimed into one phase, at a random moment of it, and the phases of the run take turns
(rollout, reward, score, update, eval, checkpoint, …); the counts that are printed say where the kills fell. A run has to
have more steps than kills for all of them. Every attempt is a forked process, so that importing torch is paid once; run it
with OMP_NUM_THREADS=1 when cores are busy.
"""

from __future__ import annotations

import argparse
import contextlib
import mmap
import os
import random
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from leanroll.config import DistillConfig, RLConfig, load_config, split_overrides
from leanroll.rundir import RunDir
from leanroll.rundir_metrics import is_timing
from leanroll.train import distill, rl
from leanroll.train.progress import RunDisplay

_NAME_BYTES = 64
_LONGEST_DELAY_S = 0.2


@dataclass(frozen=True)
class Aim:
    """Kill `delay_s` seconds after phase `phase` began for the `count`-th time in an attempt."""

    phase: str
    count: int
    delay_s: float


class PhaseWatch:
    """The phase that an attempt is in, in memory that it shares with its parent and that outlives it."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, _NAME_BYTES)

    def read(self) -> str:
        return self._memory[:].rstrip(b"\0").decode() or "between phases"

    def write(self, name: str) -> None:
        self._memory[:] = name.encode().ljust(_NAME_BYTES, b"\0")

    def install(self, aim: Aim | None) -> None:
        """Follow the phases of this process from now on, and kill it where `aim` says."""
        original, begun = RunDisplay.phase, Counter[str]()

        @contextlib.contextmanager
        def phase(display: RunDisplay, name: str, total: float | None = None) -> Iterator[None]:
            outer = self._memory[:]
            self.write(name)
            begun[name] += 1
            if aim is not None and (name, begun[name]) == (aim.phase, aim.count):
                threading.Timer(aim.delay_s, os.kill, (os.getpid(), signal.SIGKILL)).start()
            try:
                with original(display, name, total):
                    yield
            finally:
                self._memory[:] = outer

        RunDisplay.phase = phase  # type: ignore[method-assign,assignment]


def attempt(
    config: RLConfig | DistillConfig,
    *,
    resume: bool,
    kill_after: float | None = None,
    aim: Aim | None = None,
    watch: PhaseWatch | None = None,
) -> bool:
    """Run in a forked process; returns False if it was killed, after `kill_after` seconds or where `aim` says."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            if watch is not None:
                watch.write("")
                watch.install(aim)
            if isinstance(config, RLConfig):
                rl.run(config, resume=resume, quiet=True)
            else:
                distill.run(config, resume=resume, quiet=True)
            code = 0
        finally:
            sys.stderr.flush()
            os._exit(code)
    deadline = None if kill_after is None else time.monotonic() + kill_after
    while True:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            code = os.waitstatus_to_exitcode(status)
            if aim is not None and code == -signal.SIGKILL:
                return False
            if code != 0:
                raise RuntimeError(f"the run failed by itself ({status}); its error is above")
            return True
        if deadline is not None and time.monotonic() >= deadline:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            return False
        time.sleep(0.005)


def run_with_kills(config: RLConfig | DistillConfig, seconds: float, kills: int, seed: int) -> Counter[str]:
    """Kill up to `kills` times at random moments of a run that takes `seconds`; returns the number of kills by the
    phase they fell in."""
    run_dir = Path(str(config.train.run_dir))
    rng = random.Random(seed)
    # Later kills are aimed later: a resumed run has less to do, and every part of a run should be hit.
    watch, found = PhaseWatch(), Counter[str]()
    for number in range(kills):
        low, high = 0.9 * number / kills, 0.9 * (number + 1) / kills
        begun = progress(run_dir)
        delay = max(0.0, rng.uniform(low, high) - begun) * seconds
        if attempt(config, resume=run_dir.is_dir(), kill_after=delay, watch=watch):
            return found
        found[watch.read()] += 1
    attempt(config, resume=run_dir.is_dir())
    return found


def run_with_kills_by_phase(
    config: RLConfig | DistillConfig, seconds: dict[str, float], kills: int, seed: int
) -> Counter[str]:
    """Kill up to `kills` times, in one phase after the other; seconds: how long each of them takes. Returns the number of
    kills by the phase they fell in: a phase may be over when the signal comes."""
    run_dir = Path(str(config.train.run_dir))
    rng = random.Random(seed)
    order = sorted(seconds)
    rng.shuffle(order)
    watch, found = PhaseWatch(), Counter[str]()
    for number in range(kills):
        name = order[number % len(order)]
        # Some phases come once in several steps: a second one of those would cost many steps per kill.
        count = 1 if name in ("eval", "checkpoint") else rng.randint(1, 2)
        aim = Aim(name, count, rng.uniform(0.0, min(seconds[name], _LONGEST_DELAY_S)))
        if attempt(config, resume=run_dir.is_dir(), aim=aim, watch=watch):
            return found
        found[watch.read()] += 1
    attempt(config, resume=run_dir.is_dir())
    return found


def phase_seconds(run_dir: Path) -> dict[str, float]:
    """Mean seconds of each phase in the steps that have it."""
    times: dict[str, list[float]] = {}
    for record in RunDir.open(run_dir).read_metrics()[1:]:
        for name, value in record.items():
            if name.startswith("time/") and name != "time/step_s":
                times.setdefault(name.removeprefix("time/").removesuffix("_s"), []).append(value)
    return {name: sum(values) / len(values) for name, values in times.items()}


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
    verb = argparse.ArgumentParser(add_help=False)
    verb.add_argument("--verb", choices=["rl", "distill"], default="rl")
    chosen, arguments = verb.parse_known_args(arguments)
    schema: type[RLConfig] | type[DistillConfig] = RLConfig if chosen.verb == "rl" else DistillConfig
    rest, overrides = split_overrides(arguments, schema)
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, parents=[verb]
    )
    parser.add_argument("recipe")
    parser.add_argument("work_dir", type=Path)
    parser.add_argument("--kills", type=int, default=3)
    parser.add_argument("--by-phase", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    parsed = parser.parse_args(rest)
    straight, killed = parsed.work_dir / "straight", parsed.work_dir / "killed"
    configs = [
        load_config(schema, parsed.recipe, [*overrides, ("train.run_dir", str(path))]) for path in (straight, killed)
    ]
    start = time.monotonic()
    attempt(configs[0], resume=False)
    if parsed.by_phase:
        kills = run_with_kills_by_phase(configs[1], phase_seconds(straight), parsed.kills, parsed.seed)
    else:
        kills = run_with_kills(configs[1], time.monotonic() - start, parsed.kills, parsed.seed)
    found = differences(straight, killed)
    where = ", ".join(f"{count} in {name}" for name, count in sorted(kills.items()))
    print("\n".join(found) if found else "no difference", f"({kills.total()} attempts killed: {where})")
    return 1 if found or not kills else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
