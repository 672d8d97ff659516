"""Time of one decode step of the whole engine, dense against sparse: scoring, selection, sampling and bookkeeping included.

    python -m benchmarks.engine_decode --batch 8 --context 8000 --pages 64

Correctness comes first; nothing is timed when it fails:
- with a budget that no sequence reaches, the sparse engine gives the dense engine's tokens and log-probs (I1);
- with a small budget, its log-probs are those of parallel sparse re-scoring on the recorded pages (I2).

Then one engine per variant, each with its own copy of the model, prefills the same prompts (all different, so that no
memory is shared) and the engines take turns of a few decode steps in one process: A B C A B C … A step is what lies
between two calls of the engine's progress callback.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from functools import partial

import torch

from benchmarks._common import Turns, print_result, progress, wait_for_idle
from leanroll.calibrate.agreement import (
    NEVER_REACHED,
    ROUNDING,
    TOLERANCE,
    as_prompts,
    largest_difference,
    rescoring_differences,
)
from leanroll.calibrate.speed import text_prompts
from leanroll.calibrate.summary import Summary
from leanroll.measure.selection import SparsePlan
from leanroll.models.load import load_policy
from leanroll.models.policy import Policy
from leanroll.rollout.batching import RolloutProgress
from leanroll.rollout.engine import RolloutEngine
from leanroll.rollout.schedule import BudgetSchedule
from leanroll.types import RolloutGroup, SamplingParams

SHORT_CONTEXT, SHORT_TOKENS, SHORT_PAGES = 600, 24, 12


@dataclass(frozen=True, slots=True)
class Variant:
    """pages: budget of every length; None is dense. scorer: of a sparse one."""

    pages: int | None = None
    scorer: str = "mean"

    @property
    def name(self) -> str:
        return "dense" if self.pages is None else f"sparse-{self.pages}-{self.scorer}"

    def schedule(self, page_size: int) -> BudgetSchedule:
        if self.pages is None:
            return BudgetSchedule.dense(page_size)
        return BudgetSchedule(name=self.name, page_size=page_size, pages=(self.pages,), scorer=self.scorer)


def make_engine(
    policy: Policy, variant: Variant, batch: int, *, page_size: int = 16, kernel: str = "auto"
) -> RolloutEngine:
    """An engine with room for the batch; the pool takes only what the prompts need. A prompt is prefilled in one forward."""
    return RolloutEngine(
        policy,
        variant.schedule(page_size),
        kv_memory_gib=16.0,
        max_batch_size=batch,
        kernel=kernel,
        prefill_tokens=policy.spec.max_position,
    )


def check(model: str, kernel: str, page_size: int, scorers: list[str]) -> dict[str, float]:
    """Run I1 and I2 on short prompts in fp32 and bf16; exit with 1 on a difference above the tolerance."""
    found: dict[str, float] = {}
    failed = False
    for dtype in (torch.float32, torch.bfloat16):
        policy = load_policy(model, dtype=dtype)
        prompts = as_prompts(text_prompts(policy.tokenizer, 2, SHORT_CONTEXT))
        sampling = SamplingParams(max_completion_length=SHORT_TOKENS, ignore_stop=True, record_pages=True)
        run = partial(RolloutEngine.generate, prompts=prompts, sampling=sampling, num_samples=1)
        engine = partial(make_engine, policy, batch=2, page_size=page_size, kernel=kernel)

        def rescored(groups: list[RolloutGroup], plan: SparsePlan | None, policy: Policy = policy) -> float:
            return rescoring_differences(policy, groups, plan, 2 * SHORT_CONTEXT).max().item()

        dense = run(engine(Variant()))
        dense_difference = rescored(dense, None)
        kind = str(dtype).removeprefix("torch.")
        found[f"{kind} dense: decoding against parallel re-scoring"] = dense_difference
        for scorer in scorers:
            full = run(engine(Variant(NEVER_REACHED, scorer)))
            same = [g.rollouts[0].token_ids for g in full] == [g.rollouts[0].token_ids for g in dense]
            variant = Variant(SHORT_PAGES, scorer)
            sparse = run(engine(variant))
            plan = SparsePlan.of(policy.spec, variant.schedule(page_size), kv_dtype=dtype, recorded=True)
            full_difference, sparse_difference = largest_difference(full, dense), rescored(sparse, plan)
            found[f"{kind} {scorer}: full budget against dense"] = full_difference
            found[f"{kind} {scorer}: decoding against parallel re-scoring"] = sparse_difference
            failed |= dtype == torch.float32 and not same
            failed |= full_difference > TOLERANCE[dtype]
            failed |= sparse_difference > max(TOLERANCE[dtype], ROUNDING * dense_difference)
    for name, value in found.items():
        progress(f"largest log-prob difference, {name}: {value:.2e}")
    if failed:
        print(f"correctness check failed: {found}; expected at most {TOLERANCE}. Nothing was timed.", file=sys.stderr)
        raise SystemExit(1)
    return found


def measure(
    variants: list[Variant], model: str, prompts: list[list[int]], *, turns: int, turn: int, page_size: int, kernel: str
) -> dict[str, list[float]]:
    """Seconds per decode step of the full batch, per variant; the engines take turns of `turn` steps."""
    clock = Turns([v.name for v in variants], turn)
    sampling = SamplingParams(max_completion_length=turns * turn + 1, ignore_stop=True)

    def call(variant: Variant) -> None:
        policy = load_policy(model, dtype=torch.bfloat16)
        engine = make_engine(policy, variant, len(prompts), page_size=page_size, kernel=kernel)

        def after_step(now: RolloutProgress) -> None:
            if now.num_tokens == 2 * len(prompts):
                progress(f"{variant.name}: prefilled, {now.seconds:.0f} s after its start")
            if now.num_running == len(prompts):
                clock.step(variant.name)

        engine.generate(as_prompts(prompts), sampling, 1, progress=after_step)

    clock.run({v.name: partial(call, v) for v in variants})
    return clock.seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--context", type=int, default=8000, help="prompt tokens of each sequence")
    parser.add_argument("--pages", type=int, nargs="+", default=[64], help="page budgets to measure")
    parser.add_argument("--scorers", nargs="+", default=["softmax", "mean"])
    parser.add_argument("--page-size", type=int, default=16)
    parser.add_argument("--turns", type=int, default=10, help="turns of each variant")
    parser.add_argument("--turn", type=int, default=8, help="decode steps per turn; the first of each is not timed")
    parser.add_argument("--kernel", default="auto")
    parser.add_argument("--skip-check", action="store_true", help="only for looking around: the result then says so")
    parser.add_argument("--most-load", type=float, default=0.5, help="wait until the machine's load average is below")
    parser.add_argument("--patience", type=float, default=0.0, help="seconds to wait for that")
    options = parser.parse_args()

    checked = None if options.skip_check else check(options.model, options.kernel, options.page_size, options.scorers)
    variants = [Variant()] + [Variant(pages, scorer) for scorer in options.scorers for pages in options.pages]
    load = wait_for_idle(options.most_load, options.patience)
    tokenizer = load_policy(options.model).tokenizer
    seconds = measure(
        variants,
        options.model,
        text_prompts(tokenizer, options.batch, options.context),
        turns=options.turns,
        turn=options.turn,
        page_size=options.page_size,
        kernel=options.kernel,
    )
    steps = {name: Summary.of(values).scaled(1e3) for name, values in seconds.items()}
    dense = steps["dense"].median
    print(f"{'variant':<24} {'ms per step':<28} {'tokens/s':>9} {'against dense':>14}")
    for name, step in steps.items():
        print(f"{name:<24} {step!s:<28} {options.batch / step.median * 1e3:>9.0f} {dense / step.median:>13.2f}x")
    print_result(
        "engine_decode",
        {
            "options": vars(options),
            "step_ms": {name: step.as_dict(3) for name, step in steps.items()},
            "speedup": {name: round(dense / step.median, 3) for name, step in steps.items()},
            "largest_logprob_difference": checked,
            "load_before": round(load, 2),
            "threads": torch.get_num_threads(),
        },
    )


if __name__ == "__main__":
    main()
