"""Tokens per second of dense and sparse decoding, side by side: the same prompts, the same number of tokens, the same
policy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from leanroll.config import RolloutConfig
from leanroll.models import Policy
from leanroll.rollout.engine import RolloutEngine
from leanroll.rollout.schedule import BudgetSchedule
from leanroll.train.setup import build_engine
from leanroll.types import Prompt, SamplingParams


@dataclass(frozen=True, slots=True)
class Speed:
    """Tokens per second, prefill included."""

    dense: float
    sparse: float


def compare_speed(
    policy: Policy,
    schedule: BudgetSchedule,
    rollout: RolloutConfig,
    prompts: Sequence[Prompt],
    sampling: SamplingParams,
    *,
    num_samples: int,
    num_tokens: int,
) -> Speed:
    """Decode `num_tokens` for each of the samples with either schedule, never stopping early.

    Both engines get a short unmeasured call first, so that neither pays for allocating its pool. One call each: a
    figure for a closing line, not a benchmark.
    """
    rates = {}
    length = replace(sampling, max_completion_length=num_tokens, ignore_stop=True)
    for name, budget in (("dense", BudgetSchedule.dense(schedule.page_size)), ("sparse", schedule)):
        engine = build_engine(policy, budget, rollout)
        engine.generate(prompts, replace(length, max_completion_length=min(4, num_tokens)), num_samples)
        rates[name] = _rate(engine, prompts, length, num_samples)
    return Speed(**rates)


def _rate(engine: RolloutEngine, prompts: Sequence[Prompt], sampling: SamplingParams, num_samples: int) -> float:
    rates: list[float] = []
    engine.generate(prompts, sampling, num_samples, progress=lambda p: rates.append(p.tokens_per_second))
    return rates[-1] if rates else 0.0
