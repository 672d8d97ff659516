"""Whether decoding is right, on prompts short enough to check before anything is timed.

- with a budget that no sequence reaches, the sparse path gives the dense engine's tokens and log-probs;
- with a small budget, its log-probs are those of parallel sparse re-scoring on the recorded pages;
- what another engine picks greedily is what this policy finds likeliest, up to rounding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from leanroll.calibrate.speed import pool_gib, text_prompts
from leanroll.errors import ConfigError, RolloutError
from leanroll.measure.logprobs import batch_hidden, score
from leanroll.measure.packing import pack_tokens
from leanroll.measure.selection import SparsePlan
from leanroll.models.policy import Policy
from leanroll.rollout.engine import RolloutEngine
from leanroll.rollout.schedule import BudgetSchedule
from leanroll.types import Prompt, RolloutGroup, SamplingParams

TOLERANCE = {torch.float32: 2e-4, torch.float16: 0.02, torch.bfloat16: 0.05}
"""Largest difference of a log-prob that is always accepted, by the dtype of the model or of its cache, whichever is coarser."""
ROUNDING = 3.0
"""Sparse decoding may differ from its re-scoring by this many times what dense decoding differs from dense re-scoring: in bf16 the
layers of the two ways round differently, whatever the attention. Not less, because the two are measured on different tokens, each
on its own draws, and on few: the default model has 0.21 and 0.19, in the mean 0.038 and 0.021. In fp32 TOLERANCE decides."""
MEAN_SHARE = 0.1
"""Of the tolerance, that the mean difference may reach in any case: a few tokens round badly, most do not."""
NUM_PROMPTS, NUM_TOKENS = 2, 24
NEVER_REACHED = 2**20  # a finite budget, so that the engine takes its sparse path
_SHORT_TOKENS, _SHORT_PAGES = 384, 18  # of a prompt, at least one of them
_SHARE_READ = 1 / 3


@dataclass(frozen=True, slots=True)
class Agreement:
    """Differences of log-probs, and what the largest may be.

    same_tokens: share of tokens before the first different one, full budget against dense.
    full_against_dense: largest over those tokens. dense_rescored, sparse_rescored: largest between decoding and scoring in
    parallel; dense_mean, sparse_mean: the mean of the same.
    prompt_length, pages: of the check; pages is the small budget.
    """

    same_tokens: float
    full_against_dense: float
    dense_rescored: float
    sparse_rescored: float
    dense_mean: float
    sparse_mean: float
    tolerance: float
    prompt_length: int
    pages: int

    def is_right(self, exact: bool) -> bool:
        """Whether the differences are those of rounding. exact: tokens must be equal."""
        if exact and self.same_tokens < 1:
            return False
        return (
            self.full_against_dense <= self.tolerance
            and self.sparse_rescored <= max(self.tolerance, ROUNDING * self.dense_rescored)
            and self.sparse_mean <= max(MEAN_SHARE * self.tolerance, ROUNDING * self.dense_mean)
        )


def as_prompts(token_ids: Sequence[Sequence[int]]) -> list[Prompt]:
    """Prompts of given ids."""
    return [Prompt(index=i, token_ids=tuple(ids)) for i, ids in enumerate(token_ids)]


def largest_difference(a: Sequence[RolloutGroup], b: Sequence[RolloutGroup]) -> float:
    """Largest difference between the log-probs of two runs over the tokens before their first different one."""
    worst = 0.0
    for group_a, group_b in zip(a, b, strict=True):
        for x, y in zip(group_a.rollouts, group_b.rollouts, strict=True):
            n = num_equal(x.token_ids, y.token_ids)
            worst = max([worst, *(abs(p - q) for p, q in zip(x.logprobs[:n], y.logprobs[:n], strict=True))])
    return worst


def num_equal(a: Sequence[int], b: Sequence[int]) -> int:
    """Tokens before the first different one."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def rescoring_differences(
    policy: Policy, groups: Sequence[RolloutGroup], plan: SparsePlan | None, max_tokens: int
) -> Tensor:
    """Absolute differences between the log-probs of decoding and those of scoring the same tokens in parallel, flat."""
    scores = score(policy, groups, temperature=1.0, max_tokens=max_tokens, plan=plan, with_entropy=False)
    return torch.cat(
        [
            (torch.tensor(group.rollouts[0].logprobs) - again.cpu()).abs()
            for group, again in zip(groups, scores.logprobs, strict=True)
        ]
    )


def short_sparse(schedule: BudgetSchedule, max_position: int) -> tuple[int, BudgetSchedule]:
    """Prompt length of the check, and the schedule with a budget that such prompts exceed.

    Raises:
        ConfigError: the model's context is too short to be ever sparse with these reserved pages.
    """
    size = schedule.page_size
    length = min(max(_SHORT_TOKENS, _SHORT_PAGES * size), max_position - NUM_TOKENS)
    num_pages, reserved = -(-length // size), schedule.first_pages + schedule.last_pages
    pages = max(reserved + 1, int(num_pages * _SHARE_READ))
    if length < 1 or pages >= num_pages:
        raise ConfigError(
            f"schedule {schedule.name!r} reserves {reserved} pages of {size} tokens, and the model's context of {max_position} "
            "tokens leaves none to choose from; use smaller pages."
        )
    return length, replace(schedule, pages=(pages,))


def check_decoding(
    policy: Policy,
    schedule: BudgetSchedule,
    *,
    kernel: str = "auto",
    kv_dtype: torch.dtype | None = None,
    seed: int = 0,
) -> Agreement:
    """Decode two short prompts of real text dense, with a budget that is never reached, and with a small one; compare.

    The schedule gives page size, reserved pages, dense layers and scorer; budgets are set for the short prompts.

    Raises:
        RolloutError: a difference above the tolerance; the message has them all.
        ConfigError: the context is too short for a sparse step.
    """
    length, sparse = short_sparse(schedule, policy.spec.max_position)
    prompts = as_prompts(text_prompts(policy.tokenizer, NUM_PROMPTS, length))
    sampling = SamplingParams(max_completion_length=NUM_TOKENS, ignore_stop=True, record_pages=True, seed=seed)
    cached = kv_dtype or policy.dtype

    def decode(under: BudgetSchedule) -> list[RolloutGroup]:
        memory = pool_gib(policy, under, NUM_PROMPTS, length + NUM_TOKENS, cached) + 0.1
        engine = RolloutEngine(
            policy, under, kv_memory_gib=memory, kernel=kernel, kv_dtype=cached, max_batch_size=NUM_PROMPTS
        )
        return engine.generate(prompts, sampling, 1)

    dense = decode(BudgetSchedule.dense(schedule.page_size))
    full = decode(replace(schedule, pages=(NEVER_REACHED,)))
    few = decode(sparse)
    plan = SparsePlan.of(policy.spec, sparse, kv_dtype=cached, recorded=True)
    most = NUM_PROMPTS * (length + NUM_TOKENS)
    equal = [
        num_equal(x.rollouts[0].token_ids, y.rollouts[0].token_ids) / NUM_TOKENS
        for x, y in zip(full, dense, strict=True)
    ]
    dense_again = rescoring_differences(policy, dense, None, most)
    sparse_again = rescoring_differences(policy, few, plan, most)
    found = Agreement(
        same_tokens=sum(equal) / len(equal),
        full_against_dense=largest_difference(full, dense),
        dense_rescored=dense_again.max().item(),
        sparse_rescored=sparse_again.max().item(),
        dense_mean=dense_again.mean().item(),
        sparse_mean=sparse_again.mean().item(),
        tolerance=max(TOLERANCE[policy.dtype], TOLERANCE[cached]),
        prompt_length=length,
        pages=sparse.pages[0],
    )
    # In fp32 the draws are the same; a coarser type may round a token's probability across its draw.
    exact = policy.dtype == cached == torch.float32
    if not found.is_right(exact):
        raise RolloutError(
            f"decoding of {policy.name!r} with schedule {schedule.name!r} is not right, so nothing was timed: {found}; "
            f"expected differences of log-probs of at most {found.tolerance:g}, {MEAN_SHARE * found.tolerance:g} in the mean, or "
            f"{ROUNDING:g} times those of dense decoding{', and equal tokens' if exact else ''}. Please report this."
        )
    return found


def greedy_regret(policy: Policy, prompts: Sequence[Sequence[int]], completions: Sequence[Sequence[int]]) -> float:
    """Largest gap between the log-prob of this policy's likeliest token and that of the token of a completion.

    0 when another engine, decoding greedily, picks what this policy would; near-ties round to about the tolerance.
    """
    most = sum(map(len, prompts)) + sum(map(len, completions))
    worst = 0.0
    with torch.inference_mode():
        for batch in pack_tokens(prompts, [[c] for c in completions], most):
            logits = policy.head.logits(batch_hidden(policy, batch))
            chosen = logits.gather(-1, batch.targets.to(logits.device)[:, None])[:, 0]
            worst = max(worst, (logits.amax(-1) - chosen).max().item())
    return worst
