"""Timing decode steps at any context without minutes of prefill: the page pool is filled with random keys and values."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from leanroll.models.policy import Policy
from leanroll.rollout.batching import RolloutProgress
from leanroll.rollout.contexts import PrefillContext
from leanroll.rollout.engine import RolloutEngine
from leanroll.rollout.pages import PagePool
from leanroll.rollout.schedule import BudgetSchedule
from leanroll.types import Prompt, SamplingParams

_PATTERN = 1 << 20  # random numbers that are repeated over the pool


def fill_pool(engine: RolloutEngine, pool: PagePool) -> None:
    """Random keys and values in every page, and the landmarks that belong to them."""
    pattern = torch.randn(_PATTERN, generator=torch.Generator().manual_seed(0)).to(pool.k.dtype)
    for cache in (pool.k, pool.v):
        for part in cache.view(-1).split(_PATTERN):
            part.copy_(pattern[: part.numel()])
    pages = torch.arange(pool.num_pages, dtype=torch.int32)
    for layer in pool.layers:
        if layer.landmarks is not None:
            engine.backend.update_landmarks(layer, pages, engine.scorer)


@contextmanager
def random_prefill(policy: Policy, engine: RolloutEngine) -> Iterator[None]:
    """While active, a prefill computes nothing: the first one fills the pool, and the hidden states are random."""
    decode = policy.hidden
    filled: list[PagePool] = []

    def hidden(input_ids: Tensor, position_ids: Tensor, ctx: object) -> Tensor:
        if not isinstance(ctx, PrefillContext):
            return decode(input_ids, position_ids, ctx)  # type: ignore[arg-type]
        pool = engine.pool
        assert pool is not None, "the engine allocates its pool before the first prefill"
        if pool not in filled:
            fill_pool(engine, pool)
            filled.append(pool)
        return torch.randn(policy.spec.hidden_size).to(policy.dtype).expand(*input_ids.shape, -1)

    policy.hidden = hidden  # type: ignore[method-assign]
    try:
        yield
    finally:
        del policy.hidden


def pool_gib(policy: Policy, schedule: BudgetSchedule, batch: int, context: int) -> float:
    """Memory of the keys and values of a batch of sequences, landmarks of the size of one key per page included."""
    tokens = batch * (context + 2 * schedule.page_size)
    landmarks = 1.0 if schedule.is_dense else 1.0 + 0.5 / schedule.page_size
    return tokens * policy.spec.kv_bytes_per_token(policy.dtype) * landmarks / 2**30


def available_gib() -> float:
    """Memory that can be had without swapping, in GiB."""
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30


def typical_length(context: int, num_steps: int) -> int:
    """Tokens in the cache, the current one included, in the middle of the steps that `decode_seconds` times."""
    return context - 2 - num_steps // 2


def decode_seconds(
    policy: Policy, schedule: BudgetSchedule, *, batch: int, context: int, num_steps: int, kernel: str = "auto"
) -> list[float]:
    """Seconds of `num_steps` decode steps of `batch` sequences that end with `context` tokens; see `typical_length`.

    Three steps come first and one last that are not timed: a step is what lies between two reports, and caches and threads
    warm up.
    """
    steps = num_steps + 4
    engine = RolloutEngine(
        policy,
        schedule,
        kv_memory_gib=pool_gib(policy, schedule, batch, context) + 0.1,
        max_batch_size=batch,
        kernel=kernel,
        prefill_tokens=batch * context,
    )
    length = context - steps - 1  # the last token drawn counts, too
    if length < 1:
        raise ValueError(f"a context of {context} tokens is too short for {steps} steps.")
    vocab = policy.spec.vocab_size
    # All different from the first page on, so that no pages are shared.
    prompts = [Prompt(i, tuple((i + 31 * t) % vocab for t in range(length))) for i in range(batch)]
    ends: list[float] = []

    def after_step(now: RolloutProgress) -> None:
        if now.num_running == batch:
            ends.append(time.perf_counter())

    with random_prefill(policy, engine):
        sampling = SamplingParams(max_completion_length=steps + 1, ignore_stop=True)
        engine.generate(prompts, sampling, 1, progress=after_step)
    return [end - start for start, end in itertools.pairwise(ends[2:])]
