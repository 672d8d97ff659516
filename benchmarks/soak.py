"""A long run stays what it was: memory, open files, threads, processes, the engine's pages and the time of a step.

    python -m benchmarks.soak [--steps 2000] [--work-dir runs/soak] [--rss-mib 16] [--slower 1.5]

Reinforcement learning on a tiny random model with sparse rollouts, an adapter for the policy and one for the sampler,
rewards in a worker process, acceptance measured every 10 steps, a checkpoint every 25 and an evaluation every 50. Every 10
steps the process is looked at (/proc, so Linux only). From a tenth of the run on (step 200 of 2,000) these must hold, or the
script ends with exit code 1:

    resident memory, worker included    grows by at most --rss-mib over the rest of the run (line of least squares)
    open files, threads, processes      the same number in every look
    pages of the engine                 none in use between steps
    CPU seconds of an ordinary step     median of the last tenth at most --slower times that of the second tenth

The last line is one JSON object. Run it with OMP_NUM_THREADS=1: the model is too small to share between threads. A work
directory that holds a run is refused.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks._common import print_result, progress
from leanroll.rundir import RunDir
from leanroll.train.loop import LoopResult
from leanroll.train.rl import RLTrainer
from leanroll.train.session import run_session
from tests.recipe import HERE, save_tiny_model, tiny_recipe

_LOOK_EVERY, _MEASURE_EVERY, _SAVE_EVERY, _EVAL_EVERY = 10, 10, 25, 50


@dataclass(frozen=True, slots=True)
class Look:
    """The process after a step. rss_mib: resident memory of it and its children. pages: of the engine, in use or promised."""

    step: int
    rss_mib: float
    worker_mib: float
    files: int
    threads: int
    children: int
    pages: int


class WatchedTrainer(RLTrainer):
    """Looks at the process after every step."""

    looks: list[Look]
    cpu_s: list[float]
    """CPU seconds of each step, those of its evaluation and checkpoint included."""

    def collect(self, step: int) -> Any:
        if step == 1:
            self.looks, self.cpu_s = [], []
            self._began = time.perf_counter()
        self._cpu = time.process_time()
        return super().collect(step)

    def step_line(self, step: int, metrics: Mapping[str, float]) -> str:
        """Called when everything of the step is done."""
        self.cpu_s.append(time.process_time() - self._cpu)
        if step % _LOOK_EVERY == 0:
            pool = self.engine.pool
            assert pool is not None
            self.looks.append(look(step, pool.num_used + pool.num_reserved))
        if step % (10 * _LOOK_EVERY) == 0:
            seconds = time.perf_counter() - self._began
            progress(f"step {step} of {self.config.train.steps}, {seconds:.0f} s, {self.looks[-1]}")
        return super().step_line(step, metrics)


def look(step: int, pages: int) -> Look:
    """What /proc says of this process."""
    children = [int(pid) for task in Path("/proc/self/task").iterdir() for pid in _read(task / "children").split()]
    return Look(
        step,
        resident_mib("self"),
        sum(resident_mib(str(pid)) for pid in children),
        len(os.listdir("/proc/self/fd")),
        len(os.listdir("/proc/self/task")),
        len(children),
        pages,
    )


def resident_mib(pid: str) -> float:
    """Resident memory of a process."""
    return int(_read(Path("/proc") / pid / "statm").split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def _read(path: Path) -> str:
    return path.read_text(encoding="ascii")


@dataclass(frozen=True, slots=True)
class Found:
    """What the run came to; see the module docstring."""

    steps: int
    seconds: float
    rss_growth_mib: float
    worker_growth_mib: float
    first: Look
    last: Look
    cpu_s_early: float
    cpu_s_late: float
    wrong: tuple[str, ...]

    def line(self) -> str:
        """The closing line."""
        return "; ".join(self.wrong) or "nothing grew"


def judge(
    trainer: WatchedTrainer, run: RunDir, result: LoopResult, began: float, *, rss_mib: float, slower: float
) -> Found:
    """Hold what was seen against the limits."""
    steps, looks = result.last_step, trainer.looks
    settled = [one for one in looks if one.step >= steps // 10]
    at = [one.step for one in settled]
    grown = [
        float(np.polyfit(at, values, 1)[0]) * (at[-1] - at[0])
        for values in ([one.rss_mib for one in settled], [one.worker_mib for one in settled])
    ]
    plain = [
        (step, seconds)
        for step, seconds in enumerate(trainer.cpu_s, 1)
        # Measured are steps 1, 11, 21, …; the rest is counted from 1.
        if (step - 1) % _MEASURE_EVERY and step % _SAVE_EVERY and step % _EVAL_EVERY
    ]
    early, late = (
        float(np.median([s for step, s in plain if low < step <= high]))
        for low, high in ((steps // 10, steps // 5), (steps - steps // 10, steps))
    )
    wrong = []
    if sum(grown) > rss_mib:
        wrong.append(f"memory grew by {sum(grown):.1f} MiB, at most {rss_mib:g} expected")
    for name in ("files", "threads", "children"):
        seen = sorted({getattr(one, name) for one in settled})
        if len(seen) > 1:
            wrong.append(f"{name} went from {seen[0]} to {seen[-1]}, one number expected")
    if any(one.pages for one in looks):
        wrong.append(f"up to {max(one.pages for one in looks)} pages in use between steps, none expected")
    if late > slower * early:
        wrong.append(f"a step takes {late / early:.2f} times as long at the end, at most {slower:g} expected")
    if len(run.read_metrics()) != steps + 1:
        wrong.append(f"metrics.jsonl has {len(run.read_metrics())} records, {steps + 1} expected")
    return Found(
        steps,
        time.perf_counter() - began,
        *grown,
        settled[0],
        settled[-1],
        early,
        late,
        tuple(wrong),
    )


def soak(model: Path, run_dir: Path, steps: int, rss_mib: float, slower: float) -> Found:
    """Train for `steps` steps, at least 100, and judge.

    Raises:
        ConfigError: the run directory is not empty.
    """
    config = tiny_recipe(
        model,
        run_dir,
        rl__prompts_per_step=2,
        rollout__max_completion_length=10,
        sampler_adapter__r=4,
        # Small, so that the policy keeps writing completions of the same lengths.
        optimizer__learning_rate=1e-6,
        task__rewards=[{"function": f"{HERE / 'faulty_rewards.py'}:share_of_liked_ids"}],
        task__reward_workers=1,
        task__reward_timeout_s=60.0,
        train__steps=steps,
        train__save_every=_SAVE_EVERY,
        eval__every=_EVAL_EVERY,
        eval__num_prompts=2,
        measure__alpha_every=_MEASURE_EVERY,
        measure__alpha_trajectories=2,
    )
    end = partial(judge, rss_mib=rss_mib, slower=slower)
    return run_session(config, partial(WatchedTrainer, config), end, resume=False, quiet=True, at_end=None)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line of the module docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=2000, help="at least 100")
    parser.add_argument("--work-dir", type=Path, default=Path("runs/soak"))
    parser.add_argument("--rss-mib", type=float, default=16.0)
    parser.add_argument("--slower", type=float, default=1.5)
    options = parser.parse_args(arguments)
    if options.steps < 100:
        parser.error(f"--steps is {options.steps}; expected at least 100")
    with tempfile.TemporaryDirectory() as folder:
        model = save_tiny_model(Path(folder) / "model")
        found = soak(model, options.work_dir, options.steps, options.rss_mib, options.slower)
    print(found.line())
    print_result("soak", asdict(found))
    return 1 if found.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
