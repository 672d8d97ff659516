"""Continuous batching on a paged KV pool: prompts in, groups of completions out.

The engine runs the live modules of a `Policy` (no copy of the weights, LoRA unmerged), so it samples the very policy
that is trained. Prompts are prefilled once per group with dense attention, and pages of equal beginnings are shared;
samples are decoded together, each under its own page budget. A sequence is admitted only when the pages it may ever
need are reserved, and is never prefilled again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace

import torch

from leanroll.errors import ConfigError
from leanroll.kernels.dispatch import get_backend
from leanroll.kernels.scorers import get_scorer
from leanroll.models.fast import fast_decode
from leanroll.models.policy import Policy
from leanroll.rollout.batching import Batcher, RolloutProgress
from leanroll.rollout.pages import PagePool, pages_for_memory
from leanroll.rollout.sampling import check_sampling
from leanroll.rollout.schedule import BudgetSchedule
from leanroll.rollout.sequence import PromptState
from leanroll.types import Prompt, RolloutFailure, RolloutGroup, SamplingParams


class RolloutEngine:
    """Samples completions with block-sparse attention under a budget schedule.

    Args:
        policy: model, head and tokenizer; shared with the trainer.
        schedule: pages by length; `BudgetSchedule.dense()` for ordinary attention.
        kv_memory_gib: memory for keys, values and landmarks. The pool takes no more than the largest call needs.
        kernel: "auto", "reference", "cpu" or "triton".
        max_batch_size: sequences decoded together.
        prefill_tokens: prompt tokens per prefill forward; longer prompts take several.
        accelerate_modules: with the cpu kernels, replace small matrix products and norms of the decode step by ours
            where they agree. The reference backend is plain torch throughout.

    Raises:
        ConfigError: the memory does not hold one page, or the schedule does not fit the model's layers.
        BackendUnavailable: the kernel is not available on this machine.
    """

    def __init__(
        self,
        policy: Policy,
        schedule: BudgetSchedule,
        *,
        kv_memory_gib: float = 2.0,
        kernel: str = "auto",
        max_batch_size: int = 64,
        kv_dtype: torch.dtype | None = None,
        prefill_tokens: int = 2048,
        accelerate_modules: bool = True,
    ) -> None:
        if max_batch_size < 1 or prefill_tokens < 1:
            raise ConfigError(
                f"max_batch_size is {max_batch_size} and prefill_tokens {prefill_tokens}; expected at least 1 of each."
            )
        spec = policy.spec
        layers = schedule.sparse_layers(spec.windows)
        self.policy, self.schedule = policy, schedule
        self.max_batch_size, self.prefill_tokens = max_batch_size, prefill_tokens
        self.backend = get_backend(kernel, policy.device)
        self.accelerate_modules = accelerate_modules and self.backend.name == "cpu"
        self.scorer = get_scorer(schedule.scorer)
        self.sparse_layers: tuple[int, ...] = () if schedule.is_dense else layers
        self.kv_dtype = kv_dtype or policy.dtype
        self._max_pages = pages_for_memory(
            kv_memory_gib,
            page_size=schedule.page_size,
            num_layers=spec.num_layers,
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            dtype=self.kv_dtype,
            scorer=self.scorer,
            num_sparse_layers=len(self.sparse_layers),
        )
        self._kv_memory_gib = kv_memory_gib
        self._pool: PagePool | None = None

    @property
    def pool(self) -> PagePool | None:
        """The page pool; None before the first call. Empty between calls."""
        return self._pool

    def use_schedule(self, schedule: BudgetSchedule) -> None:
        """Read other numbers of pages from the next call on.

        Raises:
            ConfigError: the schedule differs in more than its budgets, or only one of the two is dense throughout.
        """
        budgets_only = replace(
            schedule, pages=self.schedule.pages, target=self.schedule.target, quantile=self.schedule.quantile
        )
        if not budgets_only.same_reading(self.schedule) or schedule.is_dense != self.schedule.is_dense:
            raise ConfigError(
                f"schedule {schedule.name!r} differs from the engine's {self.schedule.name!r} in more than its budgets (page size, "
                "reserved pages, dense layers, bins and scorer are part of the page pool); build a new engine for it."
            )
        self.schedule = schedule

    def generate(
        self,
        prompts: Sequence[Prompt],
        sampling: SamplingParams,
        num_samples: int,
        *,
        step: int = 0,
        progress: Callable[[RolloutProgress], None] | None = None,
        allow_none: bool = False,
    ) -> list[RolloutGroup]:
        """Complete every prompt `num_samples` times.

        Args:
            prompts: in any order and number; groups come back in the same order.
            sampling: how tokens are drawn; its seed, `step`, the prompt's index and the sample index key the draws.
            progress: called after every decode step.
            allow_none: no error where no sample at all can be generated; the failures say why.

        Returns:
            One group per prompt. A sample that cannot be generated (it does not fit in the context or in the pool) is
            in `failures` of its group.

        Raises:
            ConfigError: sampling parameters that make no sense, or no sample at all can be generated.
            RolloutError: the policy's weights changed while the engine was generating.
        """
        if num_samples < 1:
            raise ConfigError(f"num_samples is {num_samples}; expected at least 1.")
        sources = [PromptState.of(i, p, range(num_samples), sampling) for i, p in enumerate(prompts)]
        runnable = self._runnable(sources, sampling, allow_none)
        if runnable:
            self._pool = self._pool_for(runnable, num_samples)
            batcher = Batcher(
                self.policy,
                self._pool,
                self.backend,
                self.scorer,
                self.schedule,
                sampling,
                step=step,
                max_batch_size=self.max_batch_size,
                prefill_tokens=self.prefill_tokens,
                progress=progress,
            )
            modules = fast_decode(self.policy) if self.accelerate_modules else nullcontext()
            with torch.inference_mode(), modules:
                batcher.run(runnable)
        return [
            RolloutGroup(
                prompt=s.prompt,
                rollouts=tuple(s.done[i] for i in sorted(s.done)),
                failures=tuple(s.failed),
            )
            for s in sources
        ]

    def check(self, prompts: Sequence[Prompt], sampling: SamplingParams) -> None:
        """Raise the ConfigError that `generate` would raise before it generates anything."""
        self._runnable([PromptState.of(i, p, [0], sampling) for i, p in enumerate(prompts)], sampling)

    def _runnable(
        self, sources: list[PromptState], sampling: SamplingParams, allow_none: bool = False
    ) -> list[PromptState]:
        check_sampling(sampling, self.policy.spec.vocab_size)
        runnable = [s for s in sources if self._admissible(s, sampling)]
        if sources and not runnable and not allow_none:
            raise ConfigError(f"No prompt can be completed. The first one: {sources[0].failed[0].reason}")
        return runnable

    def _admissible(self, source: PromptState, sampling: SamplingParams) -> bool:
        """Whether the prompt's samples can ever run; otherwise they fail here, alone."""
        size, most = self.schedule.page_size, sampling.max_completion_length
        total = source.length + source.limit
        needed = source.num_prompt_pages(size) + source.num_sample_pages(size)
        limit = self.policy.spec.max_position
        outside = [i for i in source.prompt.token_ids if not 0 <= i < self.policy.spec.vocab_size]
        if source.length == 0:
            reason = "the prompt has no tokens; give at least one (a BOS token, say)."
        elif not 1 <= source.limit <= most:
            reason = f"the prompt's own max_completion_length is {source.limit}; expected 1 to {most}, the sampling's."
        elif outside:
            reason = (
                f"the prompt holds token id {outside[0]}, but the model's vocabulary has {self.policy.spec.vocab_size} "
                "entries; encode it with the model's own tokenizer."
            )
        elif total > limit:
            reason = (
                f"prompt of {source.length} tokens + max_completion_length {source.limit} = {total} "
                "tokens, but "
                f"the model's context holds {limit}; shorten the prompt or the completion."
            )
        elif needed > self._max_pages:
            reason = (
                f"a sequence of up to {total} tokens needs {needed} pages of {self.schedule.page_size} tokens, but "
                "kv_memory_gib="
                f"{self._kv_memory_gib} holds {self._max_pages}; raise kv_memory_gib or shorten the sequence."
            )
        else:
            return True
        source.failed += [RolloutFailure(source.prompt.index, i, reason) for i in source.waiting]
        source.waiting.clear()
        return False

    def _pool_for(self, sources: list[PromptState], num_samples: int) -> PagePool:
        """The pool, allocated or grown (it is empty between calls) to what these prompts can use and the memory
        allows."""
        size = self.schedule.page_size
        needs = sorted(
            (s.num_prompt_pages(size) + num_samples * s.num_sample_pages(size) for s in sources), reverse=True
        )
        # Beyond max_batch_size samples nothing runs at once; one more prompt may wait, prefilled.
        wanted = min(self._max_pages, sum(needs[: -(-self.max_batch_size // num_samples) + 1]))
        if self._pool is not None and self._pool.num_pages >= wanted:
            return self._pool
        spec = self.policy.spec
        self._pool = None  # free the old one first
        return PagePool(
            num_pages=wanted,
            page_size=size,
            num_layers=spec.num_layers,
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            dtype=self.kv_dtype,
            device=self.policy.device,
            scorer=self.scorer,
            sparse_layers=self.sparse_layers,
        )
