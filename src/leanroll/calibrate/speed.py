"""Timing decode steps at any context without minutes of prefill: the page pool is filled with random keys and values.

How long a step takes does not depend on the numbers in the cache, only on how many of them it reads.
"""

from __future__ import annotations

import itertools
import math
import os
import sysconfig
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from leanroll.errors import ConfigError
from leanroll.kernels.scorers import bytes_per_page, get_scorer
from leanroll.models.policy import Policy
from leanroll.rollout.batching import RolloutProgress
from leanroll.rollout.contexts import PrefillContext
from leanroll.rollout.engine import RolloutEngine
from leanroll.rollout.pages import GIB, PagePool
from leanroll.rollout.schedule import BudgetSchedule
from leanroll.types import Prompt, SamplingParams

UNTIMED_STEPS = 4
"""Steps around the timed ones: three before, in which caches and threads warm up, and the last."""
_PATTERN = 1 << 20  # random numbers that are repeated over the pool
_SLACK_GIB = 0.1


class Tokenizer(Protocol):
    """The part of a Hugging Face tokenizer that is needed here."""

    def __call__(self, text: str) -> Any: ...


def text_prompts(tokenizer: Tokenizer, count: int, length: int) -> list[list[int]]:
    """`count` different prompts of `length` tokens each: stretches of Python's own standard library, in a fixed order.

    Different texts, so that prefix sharing cannot make several sequences read the same memory.

    Raises:
        ConfigError: the library has not that much text.
    """
    library = Path(sysconfig.get_paths()["stdlib"])
    prompts: list[list[int]] = []
    pending: list[int] = []
    for path in sorted(library.glob("*.py")):
        pending += tokenizer(path.read_text(encoding="utf-8", errors="replace"))["input_ids"]
        while len(pending) >= length:
            prompts.append(pending[:length])
            pending = pending[length:]
            if len(prompts) == count:
                return prompts
    raise ConfigError(
        f"the standard library gives {len(prompts)} prompts of {length} tokens; expected {count}. Use a smaller batch or "
        "shorter lengths."
    )


def fill_pool(engine: RolloutEngine, pool: PagePool, seed: int = 0) -> None:
    """Random keys and values in every page, and the landmarks that belong to them."""
    pattern = torch.randn(_PATTERN, generator=torch.Generator().manual_seed(seed)).to(pool.k)
    for cache in (pool.k, pool.v):
        for part in cache.view(-1).split(_PATTERN):
            part.copy_(pattern[: part.numel()])
    pages = torch.arange(pool.num_pages, dtype=torch.int32, device=pool.k.device)
    for layer in pool.layers:
        if layer.landmarks is not None:
            engine.backend.update_landmarks(layer, pages, engine.scorer)


@contextmanager
def random_prefill(policy: Policy, engine: RolloutEngine, seed: int = 0) -> Iterator[None]:
    """While active, a prefill computes nothing: the first one fills the pool, and the hidden states are random.

    Afterwards `policy.hidden` is what it was, whatever happened inside.
    """
    decode = policy.hidden
    replaced = policy.__dict__.get("hidden")  # something else's replacement, in which this one is nested
    filled: list[PagePool] = []
    drawn = torch.randn(policy.spec.hidden_size, generator=torch.Generator().manual_seed(seed))
    state = drawn.to(device=policy.device, dtype=policy.dtype)

    def hidden(input_ids: Tensor, position_ids: Tensor, ctx: object) -> Tensor:
        if not isinstance(ctx, PrefillContext):
            return decode(input_ids, position_ids, ctx)  # type: ignore[arg-type]
        pool = engine.pool
        assert pool is not None, "the engine allocates its pool before the first prefill"
        if pool not in filled:
            fill_pool(engine, pool, seed)
            filled.append(pool)
        return state.expand(*input_ids.shape, -1)

    policy.hidden = hidden  # type: ignore[method-assign]
    try:
        yield
    finally:
        if replaced is None:
            del policy.hidden
        else:
            policy.hidden = replaced  # type: ignore[method-assign]


def pool_gib(
    policy: Policy, schedule: BudgetSchedule, batch: int, context: int, kv_dtype: torch.dtype | None = None
) -> float:
    """Memory of the keys, values and landmarks of a batch of sequences, in GiB.

    kv_dtype: of the cache; None: the model's.
    """
    spec, size, dtype = policy.spec, schedule.page_size, kv_dtype or policy.dtype
    page = size * spec.kv_bytes_per_token(dtype)
    if not schedule.is_dense:
        num_sparse = sum(w == 0 and i not in schedule.dense_layers for i, w in enumerate(spec.windows))
        scorer = get_scorer(schedule.scorer)
        page += num_sparse * bytes_per_page(scorer, spec.num_kv_heads, spec.head_dim, size, dtype)
    # A prompt's last, partly filled page is copied, and the copy grows.
    return batch * (-(-context // size) + 2) * page / GIB


def available_gib(device: torch.device | str = "cpu") -> float:
    """Memory that can be had without swapping, in GiB; infinite where the system does not tell."""
    if torch.device(device).type == "cuda":
        return float(torch.cuda.mem_get_info(torch.device(device))[0]) / GIB
    # Linux: what is free and what the page cache would give up.
    info = Path("/proc/meminfo")
    if info.exists():
        for line in info.read_text(encoding="utf-8").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) / 2**20
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / GIB
    except (ValueError, OSError):
        return math.inf


def require_memory(
    policy: Policy, schedule: BudgetSchedule, *, batch: int, context: int, kv_dtype: torch.dtype | None = None
) -> None:
    """Raise ConfigError when the keys and values of such a batch do not fit in the memory that is free."""
    needed, room = pool_gib(policy, schedule, batch, context, kv_dtype) + _SLACK_GIB, available_gib(policy.device)
    if needed > room:
        raise ConfigError(
            f"{batch} sequences of {context} tokens need {needed:.2f} GiB of keys and values, but {room:.2f} GiB are free; use "
            "a smaller batch or shorter lengths."
        )


def typical_length(context: int, num_steps: int) -> int:
    """Tokens in the cache, the current one included, in the middle of the steps that `decode_seconds` times."""
    return context - 2 - num_steps // 2


def shortest_context(num_steps: int) -> int:
    """Tokens that a sequence must end with, so that `decode_seconds` can time `num_steps` steps of it."""
    return num_steps + UNTIMED_STEPS + 2


def decode_seconds(
    policy: Policy,
    schedule: BudgetSchedule,
    *,
    batch: int,
    context: int,
    num_steps: int,
    kernel: str = "auto",
    kv_dtype: torch.dtype | None = None,
    seed: int = 0,
) -> list[float]:
    """Seconds of `num_steps` decode steps of `batch` sequences that end with `context` tokens; see `typical_length`.

    Three steps come first and one last that are not timed: a step is what lies between two reports, and caches and threads
    warm up. seed: of the random keys and values, and of the draws.

    Raises:
        ConfigError: the context is too short for the steps or longer than the model's, or the memory does not hold the batch.
        BackendUnavailable: the kernel is not available on this machine.
    """
    steps = num_steps + UNTIMED_STEPS
    length = context - steps - 1  # the last token drawn counts, too
    if num_steps < 1 or length < 1:
        raise ConfigError(
            f"a context of {context} tokens is too short for {num_steps} timed steps; expected at least one step, and "
            f"{shortest_context(num_steps)} tokens."
        )
    require_memory(policy, schedule, batch=batch, context=context, kv_dtype=kv_dtype)
    engine = RolloutEngine(
        policy,
        schedule,
        kv_memory_gib=pool_gib(policy, schedule, batch, context, kv_dtype) + _SLACK_GIB,
        max_batch_size=batch,
        kernel=kernel,
        kv_dtype=kv_dtype,
        prefill_tokens=batch * context,
    )
    vocab = policy.spec.vocab_size
    # All different from the first page on, so that no pages are shared.
    prompts = [Prompt(i, tuple((i + 31 * t) % vocab for t in range(length))) for i in range(batch)]
    ends: list[float] = []

    def after_step(now: RolloutProgress) -> None:
        if now.num_running == batch:
            ends.append(time.perf_counter())

    with random_prefill(policy, engine, seed):
        sampling = SamplingParams(max_completion_length=steps + 1, ignore_stop=True, seed=seed)
        engine.generate(prompts, sampling, 1, progress=after_step)
    return [end - start for start, end in itertools.pairwise(ends[2:])]
