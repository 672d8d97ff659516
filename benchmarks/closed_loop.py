"""The closed loop on the default model: does every length bin find the smallest budget that meets the target, and stay there?

    python -m benchmarks.closed_loop [--work-dir runs/closed_loop] [--steps 15] [--shift 4] [--after 8] [--starts low high]

RL on `ifollow` with `rollout.control = "hold"`, once from the smallest budgets and once from all pages. After --steps steps the
truth is measured: new completions are sampled with the held schedule, and their exact acceptance under it and under budgets one
and two rungs away gives the tail of every populated bin. A bin is where it should be if its budget is the smallest rung that meets
the target, ±1, or an end of the ladder. The run from the smallest budgets then goes on: --shift steps with 20 times the learning
rate, --after more without, and the truth again. The last line is one JSON object. Finished runs are not done again.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks._common import print_result, progress
from leanroll.calibrate.passes import bin_edges
from leanroll.config import RLConfig, load_config
from leanroll.measure.acceptance import TAIL_QUANTILE, acceptance
from leanroll.measure.evidence import TailScale
from leanroll.rollout.schedule import BudgetSchedule
from leanroll.rundir import RunDir, write_text
from leanroll.train.collect import RLBatch
from leanroll.train.loop import LoopResult
from leanroll.train.rl import RLTrainer
from leanroll.train.session import run_session

RECIPE = Path(__file__).parent.parent / "recipes" / "quickstart.toml"
LR_FACTOR = 20.0
PAGE, BIN_PAGES = 8, 6
_UNSEEN = 1_000_000
"""Training prompts from here on are used for the truth alone."""
_MIN_TOKENS = 300
"""Of a populated bin: 15 are expected in its tail."""
_OFFSETS = (-2, -1, 0, 1)


def start_schedule(start: str, longest: int) -> BudgetSchedule:
    """Bins of 48 tokens; `low`: six pages everywhere, `high`: every page of the longest sequence."""
    bins = -(-longest // (PAGE * BIN_PAGES))
    pages = 6 if start == "low" else bins * BIN_PAGES
    return BudgetSchedule(
        name=f"start-{start}",
        page_size=PAGE,
        first_pages=1,
        last_pages=2,
        dense_layers=(),
        bin_pages=BIN_PAGES,
        pages=(pages,) * bins,
        scorer="keys-int4",
    )


class WatchedTrainer(RLTrainer):
    """Measures the truth after given steps, and learns faster in some. `measured` is kept in the run directory."""

    def __init__(self, *args: Any, checks: Sequence[int], shift: Sequence[int], samples: int, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._checks, self._shift, self._samples = checks, shift, samples

    def update(self, step: int, batch: RLBatch) -> dict[str, float]:
        optimizer = self.stepper.optimizer
        usual = optimizer.lr
        optimizer.lr = usual * (LR_FACTOR if step in self._shift else 1.0)
        try:
            return super().update(step, batch)
        finally:
            optimizer.lr = usual

    def step_line(self, step: int, metrics: Mapping[str, float]) -> str:
        """Called when everything of the step is done; budgets are those of the next one."""
        if step in self._checks:
            path = self.run.path / f"truth-{step}.json"
            write_text(path, json.dumps(self.truth(), indent=1) + "\n")
            progress(f"step {step}: {path.read_text()}")
        return super().step_line(step, metrics)

    def truth(self) -> list[dict[str, Any]]:
        """Per populated bin: the held budget, tails at neighbouring rungs with their one-sided 90 % bounds, and the verdict."""
        assert self.held is not None
        assert self.plan is not None
        items = [self.task.train_item(_UNSEEN + i) for i in range(self._samples)]
        prompts = [replace(p, index=_UNSEEN + i) for i, p in enumerate(self.encoder.encode(items))]
        groups = self.engine.generate(prompts, self.sampling, num_samples=1)
        lengths = np.concatenate(
            [len(g.prompt.token_ids) + np.arange(1, len(r.token_ids)) for g in groups for r in g.rollouts]
        )
        owners = np.repeat(np.arange(len(groups)), [len(g.rollouts[0].token_ids) - 1 for g in groups])
        bins = self.schedule.bins(lengths)
        scale = TailScale(self.held.target, quantile=TAIL_QUANTILE, z=1.2816)
        pages, tails = {}, {}
        for offset in _OFFSETS:
            schedule = self.held.shifted(offset)
            pages[offset] = schedule.pages
            rates = acceptance(
                self.policy,
                groups,
                replace(self.plan, schedule=schedule),
                temperature=self.config.rollout.temperature,
                max_tokens=self.config.train.micro_batch_tokens,
            )
            alpha = np.concatenate([r[1:] for r in rates])
            for b in np.unique(bins):
                rows = scale.count(alpha[bins == b], owners[bins == b])
                tails[b, offset] = scale.estimate(rows, np.ones(len(rows)))
        found = []
        for b in np.unique(bins):
            if (bins == b).sum() < _MIN_TOKENS:
                continue
            tail = {offset: tails[b, offset].tail for offset in _OFFSETS}
            at_top, near_bottom = pages[1][b] == pages[0][b], pages[-2][b] == pages[-1][b]
            enough = at_top or tail[1] >= self.held.target
            not_too_much = near_bottom or tail[-2] < self.held.target
            found.append(
                {
                    "first_length": int(bin_edges(self.schedule)[b]),
                    "tokens": int((bins == b).sum()),
                    "pages": {f"{offset:+d}": int(pages[offset][b]) for offset in _OFFSETS},
                    "tail": {f"{offset:+d}": round(tail[offset], 4) for offset in _OFFSETS},
                    "bounds": [round(tails[b, 0].low, 4), round(tails[b, 0].high, 4)],
                    "within_one_rung": bool(enough and not_too_much),
                }
            )
        return found


@dataclass(frozen=True)
class Ended:
    """A session that is over; what it found is in the run directory."""

    run_dir: Path

    @classmethod
    def of(cls, trainer: WatchedTrainer, run: RunDir, result: LoopResult, began: float) -> Ended:
        return cls(run.path)

    def line(self) -> str:
        """The closing line."""
        return str(self.run_dir)


def run_from(start: str, options: argparse.Namespace) -> dict[str, Any]:
    """Train from one start, and read what the run left."""
    run_dir = options.work_dir / start
    shifted = start == "low" and options.shift > 0
    steps = options.steps + (options.shift + options.after if shifted else 0)
    longest = options.prompt_tokens + options.tokens
    options.work_dir.mkdir(parents=True, exist_ok=True)
    path = options.work_dir / f"start-{start}.json"
    write_text(path, start_schedule(start, longest).to_json() + "\n")
    overrides = {
        "model.name": options.model,
        "task.params.require_topic": "true",  # asks for more text than the constraint alone
        "rollout.schedule": str(path.resolve()),
        "rollout.control": "hold",
        "rollout.target": str(options.target),
        "rollout.max_completion_length": str(options.tokens),
        "rl.prompts_per_step": str(options.prompts),
        "rl.num_generations": "4",
        "measure.alpha_every": "1",
        "measure.alpha_trajectories": str(4 * options.prompts),
        "optimizer.learning_rate": str(options.learning_rate),
        "alarm.on_alarm": "off",  # the shift is meant to hurt
        "eval.num_prompts": "8",
        "train.steps": str(steps),
        "train.save_every": "5",
        "train.run_dir": str(run_dir),
    }
    config = load_config(RLConfig, RECIPE, list(overrides.items()))
    shift = range(options.steps + 1, options.steps + options.shift + 1) if shifted else range(0)
    checks = {options.steps, steps}
    if not all((run_dir / f"truth-{step}.json").is_file() for step in checks):
        trainer = partial(WatchedTrainer, config, checks=sorted(checks), shift=shift, samples=options.samples)
        run_session(config, trainer, Ended.of, resume=(run_dir / "config.toml").is_file(), quiet=False, at_end=None)
    records = [r for r in RunDir.open(run_dir).read_metrics() if r["step"] > 0]
    firsts = [int(f) for f in bin_edges(start_schedule(start, longest))]
    return {
        "pages_by_step": {
            str(first): [int(r[f"control/bin_{first}/pages"]) for r in records]
            for first in firsts
            if all(f"control/bin_{first}/pages" in r for r in records)
        },
        "alpha_p05_by_step": [round(r["alpha/p05"], 3) for r in records],
        "kv_share_read_by_step": [round(r["kv_share_read"], 3) for r in records],
        "length_by_step": [round(r["completion_length/mean"]) for r in records],
        "reward_by_step": [round(r["reward/mean"], 3) for r in records],
        "shift_steps": list(shift),
        "truth": {str(step): json.loads((run_dir / f"truth-{step}.json").read_text()) for step in sorted(checks)},
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line of the module docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work-dir", type=Path, default=Path("runs/closed_loop"))
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--starts", nargs="+", choices=("low", "high"), default=["low", "high"])
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--shift", type=int, default=4, help="steps with 20 times the learning rate")
    parser.add_argument("--after", type=int, default=8, help="steps after them")
    parser.add_argument("--prompts", type=int, default=4, help="per step, 4 completions each")
    parser.add_argument("--tokens", type=int, default=128, help="of a completion, at most")
    parser.add_argument("--prompt-tokens", type=int, default=64, help="of a prompt, at most")
    parser.add_argument("--samples", type=int, default=48, help="completions for the truth")
    parser.add_argument("--target", type=float, default=0.90)
    parser.add_argument("--learning-rate", type=float, default=2e-4)
    options = parser.parse_args(arguments)
    result = {start: run_from(start, options) for start in options.starts}
    settings = {k: v if isinstance(v, (int, float, str, list)) else str(v) for k, v in vars(options).items()}
    print_result("closed_loop", {"settings": settings, **result})


if __name__ == "__main__":
    main()
