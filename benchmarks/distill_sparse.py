"""DistillSparse by itself: how far an adapter of the sampler lifts the tail of acceptance at a fixed schedule.

    python -m benchmarks.distill_sparse [--texts FILES] [--schedule smollm2-135m-0.80] [--steps 60] [--out FOLDER]

Trains the adapter on some texts (windows of --tokens tokens, scored in place) and measures exact acceptance on others, whole files
apart, before and along the way. Then the tail under budgets 0.5 to 1.6 times the schedule's, with the adapter and without: pages
saved at the same tail, interpolated between these budgets. Without --texts the standard library's Python sources are read. The
gate: the dense pass is the same to the bit before and after training (I8). --out keeps the adapter in peft's format.
"""

from __future__ import annotations

import argparse
import sysconfig
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks._common import print_result, progress
from leanroll.calibrate.trajectories import Trajectory, from_texts, split, to_groups
from leanroll.config import SamplerAdapterConfig
from leanroll.kernels.dispatch import get_backend
from leanroll.measure.document import document_acceptance, document_hidden, first_sparse_position
from leanroll.measure.selection import SparsePlan
from leanroll.models import LoraSpec, Policy, load_policy
from leanroll.rollout.schedule import BudgetSchedule
from leanroll.train.sampler_adapter import train_sampler_adapter

SCALES = (0.5, 0.7, 1.0, 1.3, 1.6)


class Tail:
    """The tail on held-out texts, over the tokens whose step reads only a part of the pages."""

    def __init__(self, policy: Policy, plan: SparsePlan, texts: Sequence[Trajectory], kernel: str) -> None:
        self._policy, self._plan, self._texts = policy, plan, texts
        self._backend = get_backend(kernel, policy.device)
        self.dense = [document_hidden(policy, t.token_ids, self._backend) for t in texts]

    def measure(self, scale: float = 1.0) -> dict[str, float]:
        """5th percentile, mean, and share above 0.999, with budgets `scale` times the schedule's; of the tokens that are sparse
        under the schedule itself."""
        rates, plan = [], replace(self._plan, schedule=scaled(self._plan.schedule, scale))
        for text, dense in zip(self._texts, self.dense, strict=True):
            alpha = document_acceptance(
                self._policy, text.token_ids, self._backend, plan, temperature=1.0, dense_hidden=dense
            )
            rates.append(alpha[first_sparse_position(len(alpha), self._plan) :])
        alpha = np.concatenate(rates)
        values = {"p05": np.quantile(alpha, 0.05), "mean": alpha.mean(), "share_above_0999": (alpha > 0.999).mean()}
        return {name: round(float(value), 4) for name, value in values.items()} | {"tokens": alpha.size}

    def check_dense(self) -> None:
        """Raise unless the dense pass is what it was."""
        for text, dense in zip(self._texts, self.dense, strict=True):
            if not torch.equal(document_hidden(self._policy, text.token_ids, self._backend), dense):
                raise RuntimeError("The dense policy changed; nothing is reported.")


def scaled(schedule: BudgetSchedule, scale: float) -> BudgetSchedule:
    """Every budget times `scale`, rounded."""
    return schedule if scale == 1.0 else replace(schedule, pages=tuple(round(scale * p) for p in schedule.pages))


def pages_saved(without: Sequence[float], with_adapter: Sequence[float]) -> float | None:
    """The share of the schedule's budget that the adapter saves at the tail which the schedule has without it.

    Tails are those of SCALES; None when the smallest of these budgets already reaches it (more is saved than was measured).
    """
    reached = without[SCALES.index(1.0)]
    if with_adapter[0] >= reached:
        return None
    rising = np.maximum.accumulate(with_adapter)
    return float(1.0 - np.interp(reached, rising, SCALES))


def run(args: argparse.Namespace) -> dict[str, Any]:
    policy = load_policy(args.model, dtype=args.dtype, device=args.device)
    paths = [Path(p) for p in args.texts] or sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    paths = [p for p in paths if p.stat().st_size > 6 * args.tokens]
    found = from_texts(
        paths, policy.tokenizer, max_tokens=args.tokens, min_tokens=args.tokens, per_file=2, seed=args.seed
    )
    training, held_out = split(found, args.train, args.held_out)
    schedule = BudgetSchedule.load(args.schedule)
    if min(scaled(schedule, SCALES[0]).pages) <= schedule.first_pages + schedule.last_pages:
        raise SystemExit(f"half of the budgets of {schedule.name} leave no page to choose; take a larger schedule.")
    plan = SparsePlan.of(policy.spec, schedule)
    policy.add_sampler(LoraSpec(r=args.r, alpha=2.0 * args.r, seed=args.seed))
    if args.checkpointing:
        policy.enable_gradient_checkpointing()
    tail = Tail(policy, plan, held_out, args.kernel)
    curve = [{"step": 0, **tail.measure()}]
    progress(f"before: {curve[0]}")
    config = SamplerAdapterConfig(
        r=args.r,
        learning_rate=args.learning_rate,
        **({"tail_weighting": args.tail_weighting} if args.tail_weighting != "none" else {}),
    )
    began, measuring = time.perf_counter(), 0.0

    def after_step(step: int, metrics: dict[str, float]) -> None:
        nonlocal measuring
        note = f"step {step}: KL {metrics['sampler_adapter/kl']:.4f}, {time.perf_counter() - began - measuring:.0f} s"
        if step % args.eval_every == 0 or step == args.steps:
            start = time.perf_counter()
            curve.append({"step": step, "kl": round(metrics["sampler_adapter/kl"], 5), **tail.measure()})
            measuring += time.perf_counter() - start
            note += f", held out {curve[-1]}"
        progress(note)

    train_sampler_adapter(
        policy,
        to_groups(training),
        plan,
        config=config,
        steps=args.steps,
        groups_per_step=args.groups_per_step,
        max_tokens=args.tokens,
        seed=args.seed,
        after_step=after_step,
    )
    seconds = time.perf_counter() - began - measuring
    tail.check_dense()
    assert policy.sampler is not None
    if args.out is not None:
        policy.sampler.save(Path(args.out))
    budgets: dict[str, list[float]] = {}
    for name, context in (("without", policy.sampler.disabled()), ("with", nullcontext())):
        with context:
            budgets[name] = [tail.measure(scale)["p05"] for scale in SCALES]
        progress(f"tails with budgets × {SCALES}, {name} the adapter: {budgets[name]}")
    saved = pages_saved(budgets["without"], budgets["with"])
    before, after = curve[0], curve[-1]
    progress(
        f"5th percentile {before['p05']:.3f} → {after['p05']:.3f}, mean {before['mean']:.3f} → {after['mean']:.3f}"
    )
    return {
        "settings": {k: v for k, v in vars(args).items() if k != "texts"},
        "files": {"train": len({t.source for t in training}), "held_out": len({t.source for t in held_out})},
        "before": before,
        "after": after,
        "curve": curve,
        "budgets": {"scale": list(SCALES), **budgets},
        "pages_saved_at_equal_tail": None if saved is None else round(saved, 3),
        "train_seconds": round(seconds, 1),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line of the module docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--kernel", default="auto")
    parser.add_argument("--texts", nargs="+", default=[])
    parser.add_argument("--schedule", default="smollm2-135m-0.80")
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--train", type=int, default=64)
    parser.add_argument("--held-out", type=int, default=8)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--groups-per-step", type=int, default=4)
    parser.add_argument("--eval-every", type=int, default=10)
    parser.add_argument("--r", type=int, default=32)
    parser.add_argument("--learning-rate", type=float, default=2e-4)
    parser.add_argument("--tail-weighting", choices=("none", "cvar", "one_minus_alpha"), default="none")
    parser.add_argument("--checkpointing", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out")
    print_result("distill_sparse", run(parser.parse_args(arguments)))


if __name__ == "__main__":
    main()
