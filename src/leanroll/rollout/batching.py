"""Which sequences run when: admission, prefill, decoding and bookkeeping of one call to the engine."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from leanroll.errors import RolloutError
from leanroll.kernels.dispatch import KernelBackend
from leanroll.kernels.layout import DecodeBatch
from leanroll.kernels.scorers import Scorer
from leanroll.models.policy import Policy
from leanroll.rollout.contexts import DecodeContext, PrefillContext, PrefillSegment
from leanroll.rollout.pages import NO_PARENT, PagePool
from leanroll.rollout.sampling import draw, sequence_uniforms, top_logprobs
from leanroll.rollout.schedule import BudgetSchedule
from leanroll.rollout.sequence import PromptState, SequenceState, num_pages
from leanroll.types import FinishReason, SamplingParams


@dataclass(frozen=True, slots=True)
class RolloutProgress:
    """Where a call to `generate` stands.

    num_tokens: completion tokens so far, of finished and running samples. seconds: since the call began.
    """

    num_tokens: int
    num_finished: int
    num_samples: int
    num_running: int
    seconds: float

    @property
    def tokens_per_second(self) -> float:
        return self.num_tokens / self.seconds if self.seconds > 0 else 0.0


class Batcher:
    """Runs prompts through a page pool until every sample is done. One object per call to `RolloutEngine.generate`."""

    def __init__(
        self,
        policy: Policy,
        pool: PagePool,
        backend: KernelBackend,
        scorer: Scorer,
        schedule: BudgetSchedule,
        sampling: SamplingParams,
        *,
        step: int,
        max_batch_size: int,
        prefill_tokens: int,
        progress: Callable[[RolloutProgress], None] | None,
    ) -> None:
        self.policy, self.pool, self.backend, self.scorer = policy, pool, backend, scorer
        self.schedule, self.sampling, self.step = schedule, sampling, step
        self.max_batch_size, self.prefill_tokens, self.progress = max_batch_size, prefill_tokens, progress
        self.sparse_layers = [i for i, layer in enumerate(pool.layers) if layer.landmarks is not None]
        self.running: list[SequenceState] = []
        self.num_tokens = self.num_finished = self.num_samples = 0
        self._version, self._device = policy.version, policy.device
        self._began = time.perf_counter()
        self._stop_ids = frozenset(() if sampling.ignore_stop else sampling.stop_token_ids)
        self._stop_strings = () if sampling.ignore_stop else sampling.stop_strings
        # Texts leave special tokens out; a stop string that names one is looked for where they are kept.
        special = [str(t) for t in policy.tokenizer.added_tokens_decoder.values() if t.special]
        self._stop_strings_are_special = any(token in s for s in self._stop_strings for token in special)
        self._table = np.zeros((0, 0), dtype=np.int32)
        self._table_is_stale = True

    def run(self, sources: list[PromptState]) -> None:
        """Complete every waiting sample; the pool is empty again afterwards, also after an error."""
        self.num_samples = sum(len(s.waiting) for s in sources)
        try:
            self._run(deque(sources))
        finally:
            self._release(sources)

    def _run(self, queue: deque[PromptState]) -> None:
        ready: deque[PromptState] = deque()  # prefilled, with samples that have not started
        while queue or ready or self.running:
            finished = self.num_finished
            self._start_samples(ready)
            if queue and not ready and len(self.running) < self.max_batch_size and self._prefill(queue, ready):
                continue
            if self.running:
                self._decode()
            else:
                # Everything that could start may have ended with its first token; something must have started, though.
                assert self.num_finished > finished, "an admissible prompt found no room in an empty pool"
            self._report()
            if self.policy.version != self._version:
                raise RolloutError(
                    f"The policy's weights changed from version {self._version} to {self.policy.version} during "
                    "generation; the "
                    "cached keys and values are stale. Update weights only between calls."
                )

    def _release(self, sources: list[PromptState]) -> None:
        for sequence in self.running:
            self._give_back(sequence)
        self.running = []
        for source in sources:
            self._release_prompt(source)
        assert (self.pool.num_used, self.pool.num_reserved) == (0, 0), "the page pool leaked"

    def _release_prompt(self, source: PromptState) -> None:
        self.pool.release(source.pages)
        self.pool.unreserve(source.num_promised)
        source.pages, source.num_promised = [], 0

    # -- prefill -------------------------------------------------------------------------------------------------------

    def _prefill(self, queue: deque[PromptState], ready: deque[PromptState]) -> bool:
        """Run one prefill forward over prompts at the head of the queue; completed ones move to `ready`. False: no
        room."""
        segments: list[PrefillSegment] = []
        finished: list[tuple[int, PromptState]] = []  # (row of the last prompt token, prompt)
        token_ids: list[int] = []
        room = self.prefill_tokens
        slots = self.max_batch_size - len(self.running)
        while queue and room > 0 and slots > 0:
            source = queue[0]
            if not source.pages and not self._admit(source):
                break
            start = source.num_computed
            count = min(room, source.length - start)
            segments.append(PrefillSegment(len(token_ids), start, count, tuple(source.pages)))
            token_ids += source.prompt.token_ids[start : start + count]
            source.num_computed += count
            self._remember(source)
            room -= count
            if source.num_computed < source.length:
                break
            finished.append((len(token_ids) - 1, source))
            slots -= len(source.waiting)
            queue.popleft()
        if not segments:
            return False
        context = PrefillContext(segments, self.pool, self.backend, self.scorer)
        positions = np.concatenate([np.arange(s.start, s.start + s.count) for s in segments])
        hidden = self.policy.hidden(
            torch.as_tensor(token_ids, device=self._device)[None],
            torch.as_tensor(positions, device=self._device)[None],
            context,
        )[0]
        for row, source in finished:
            source.last_hidden = hidden[row].clone()
            ready.append(source)
        return True

    def _admit(self, source: PromptState) -> bool:
        """Give a prompt its pages, if its first sample's worst case can be reserved with them."""
        size = self.pool.page_size
        shared = self.pool.match_prefix(source.prompt.token_ids, (source.length - 1) // size)
        own = source.num_prompt_pages(size) - len(shared)
        first_sample = source.num_sample_pages(size)
        if not self.pool.reserve(own + first_sample):
            return False
        self.pool.share(shared)
        source.pages = shared + self.pool.take(own)
        source.num_computed, source.num_promised = len(shared) * size, first_sample
        return True

    def _remember(self, source: PromptState) -> None:
        size = self.pool.page_size
        for i in range(source.num_computed // size):
            parent = source.pages[i - 1] if i else NO_PARENT
            self.pool.remember_prefix(parent, source.prompt.token_ids[i * size : (i + 1) * size], source.pages[i])

    # -- samples -------------------------------------------------------------------------------------------------------

    def _start_samples(self, ready: deque[PromptState]) -> None:
        """Start waiting samples while pages and batch slots last; draw their first token from the prompt's last hidden
        state."""
        before = len(self.running)
        copies: tuple[list[int], list[int]] = ([], [])
        while ready and len(self.running) < self.max_batch_size:
            source = ready[0]
            sequence = self._start(source, copies)
            if sequence is None:
                break
            self.running.append(sequence)  # at once, so that an error below finds its pages
            if not source.waiting:
                ready.popleft()
        started = self.running[before:]
        if not started:
            return
        if copies[0]:
            self.pool.copy(*copies)
        hidden = torch.stack([s.source.last_hidden for s in started if s.source.last_hidden is not None])
        self._append_tokens(started, hidden)
        self.running[before:] = [s for s in started if not self._finish_if_done(s)]
        self._table_is_stale = True
        for sequence in started:
            if not sequence.source.waiting:
                self._release_prompt(sequence.source)

    def _start(self, source: PromptState, copies: tuple[list[int], list[int]]) -> SequenceState | None:
        size = self.pool.page_size
        needed = source.num_sample_pages(size)
        if source.num_promised:
            source.num_promised = 0
        elif not self.pool.reserve(needed):
            return None
        full = source.length // size
        shared = source.pages[:full]
        self.pool.share(shared)
        pages = list(shared)
        if source.length % size and needed:  # copy-on-write of the partial page
            (page,) = self.pool.take(1)
            copies[0].append(source.pages[full])
            copies[1].append(page)
            pages.append(page)
            needed -= 1
        index = source.waiting.popleft()
        uniforms = sequence_uniforms(self.sampling.seed, self.step, source.prompt.index, index, source.limit)
        return SequenceState(source, index, uniforms, pages, num_promised=needed)

    # -- decode --------------------------------------------------------------------------------------------------------

    def _decode(self) -> None:
        """Feed every running sequence its last token, draw the next one."""
        running = self.running
        self._grow_tables()
        lengths = np.array([s.length for s in running], dtype=np.int32)
        budgets = self.schedule.budgets(lengths)
        batch = DecodeBatch(
            block_table=torch.from_numpy(self._table).to(self._device),
            lengths=torch.from_numpy(lengths).to(self._device),
            budgets=torch.from_numpy(budgets).to(self._device),
            first_pages=self.schedule.first_pages,
            last_pages=self.schedule.last_pages,
        )
        records = self.sampling.record_pages and self.sparse_layers  # a dense engine selects nothing
        recorded = self._record_buffers(lengths, budgets) if records else None
        context = DecodeContext(
            batch, self.pool.layers, self.backend, self.scorer, recorded, sparse_rows=self._sparse_rows(lengths)
        )
        hidden = self.policy.hidden(
            torch.as_tensor([[s.token_ids[-1]] for s in running], device=self._device),
            torch.from_numpy(lengths.astype(np.int64) - 1)[:, None].to(self._device),
            context,
        )[:, 0]
        self._count_pages(lengths, budgets)
        if recorded is not None:
            stacked = torch.stack(list(recorded.values()), dim=1).cpu().numpy()
            for sequence, entry in zip(running, stacked, strict=True):
                sequence.recorded.append(entry)
        self._append_tokens(running, hidden)
        self.running = [s for s in running if not self._finish_if_done(s)]
        if len(self.running) != len(running):
            self._table_is_stale = True

    def _sparse_rows(self, lengths: np.ndarray) -> bool | Tensor:
        """Which sequences of this step attend sparsely: all, none, or a mask bool [B, 1]."""
        part = self.schedule.reads_part(lengths)
        if part.all() or not part.any():
            return bool(part.all())
        return torch.from_numpy(part)[:, None].to(self._device)

    def _grow_tables(self) -> None:
        """Give sequences that enter a new page one from their reservation, and keep the batch's block table current."""
        size = self.pool.page_size
        for row, sequence in enumerate(self.running):
            if num_pages(sequence.length, size) > len(sequence.pages):
                sequence.pages += self.pool.take(1)
                sequence.num_promised -= 1
                if not self._table_is_stale and len(sequence.pages) <= self._table.shape[1]:
                    self._table[row, len(sequence.pages) - 1] = sequence.pages[-1]
                else:
                    self._table_is_stale = True
        if self._table_is_stale:
            width = max(len(s.pages) for s in self.running)
            # A few spare columns, so that the table is not rebuilt for every new page.
            self._table = np.zeros((len(self.running), width + 8), dtype=np.int32)
            for row, sequence in enumerate(self.running):
                self._table[row, : len(sequence.pages)] = sequence.pages
            self._table_is_stale = False

    def _record_buffers(self, lengths: np.ndarray, budgets: np.ndarray) -> dict[int, Tensor]:
        num_pages = -(-lengths // self.pool.page_size)
        width = int(np.minimum(num_pages, budgets).max())
        shape = (len(lengths), self.policy.spec.num_kv_heads, width)
        return {i: torch.full(shape, -1, dtype=torch.int32, device=self._device) for i in self.sparse_layers}

    def _count_pages(self, lengths: np.ndarray, budgets: np.ndarray) -> None:
        """Add this step's pages read and held, over layers and KV heads; a sliding-window layer holds its window."""
        size, spec = self.pool.page_size, self.policy.spec
        num_pages = -(-lengths // size)
        total = np.zeros(len(lengths), dtype=np.int64)
        for window in spec.windows:
            if window == 0:
                total += num_pages
            else:
                total += num_pages - np.maximum(lengths - window, 0) // size
        saved = len(self.sparse_layers) * (num_pages - np.minimum(num_pages, budgets)).astype(np.int64)
        for sequence, held, skipped in zip(self.running, total.tolist(), saved.tolist(), strict=True):
            sequence.pages_total += held * spec.num_kv_heads
            sequence.pages_read += (held - skipped) * spec.num_kv_heads

    def _append_tokens(self, sequences: list[SequenceState], hidden: Tensor) -> None:
        """Draw one token per sequence from its hidden state [B, H]."""
        logits = self.policy.head.logits(hidden)
        uniforms = np.array([s.uniforms[len(s.token_ids)] for s in sequences])
        drawn = draw(logits, torch.from_numpy(uniforms).to(self._device), self.sampling, self.backend)
        ids, logprobs = drawn.token_ids.tolist(), drawn.logprobs.tolist()
        for sequence, token_id, logprob in zip(sequences, ids, logprobs, strict=True):
            sequence.token_ids.append(token_id)
            sequence.logprobs.append(logprob)
        if drawn.support is not None:
            for sequence, row in zip(sequences, drawn.support, strict=True):
                sequence.support.append(row.nonzero()[:, 0].to(torch.int32).cpu().numpy())
        if self.sampling.num_top_logprobs:
            top_ids, top_values = top_logprobs(logits, self.sampling.temperature, self.sampling.num_top_logprobs)
            for sequence, i, value in zip(sequences, top_ids.cpu().numpy(), top_values.cpu().numpy(), strict=True):
                sequence.top_token_ids.append(i)
                sequence.top_logprobs.append(value)
        self.num_tokens += len(sequences)

    def _finish_if_done(self, sequence: SequenceState) -> bool:
        reason = self._finish_reason(sequence)
        if reason is None:
            return False
        self._give_back(sequence)
        text = self.policy.decode(sequence.token_ids)
        sequence.source.done[sequence.sample_index] = sequence.to_rollout(reason, text, self._version, self.sampling)
        self.num_finished += 1
        return True

    def _finish_reason(self, sequence: SequenceState) -> FinishReason | None:
        if sequence.token_ids[-1] in self._stop_ids:
            return "stop"
        if self._stop_strings:
            longest = max(len(s.encode()) for s in self._stop_strings)
            # Every token carries at least one byte except special ones; the margin covers those and split characters.
            tail = self.policy.decode(
                sequence.token_ids[-(longest + 8) :], skip_special_tokens=not self._stop_strings_are_special
            )
            if any(s in tail for s in self._stop_strings):
                return "stop"
        if len(sequence.token_ids) >= sequence.source.limit:
            return "length"
        return None

    def _give_back(self, sequence: SequenceState) -> None:
        self.pool.release(sequence.pages)
        self.pool.unreserve(sequence.num_promised)
        sequence.pages, sequence.num_promised = [], 0

    def _report(self) -> None:
        if self.progress is not None:
            self.progress(
                RolloutProgress(
                    num_tokens=self.num_tokens,
                    num_finished=self.num_finished,
                    num_samples=self.num_samples,
                    num_running=len(self.running),
                    seconds=time.perf_counter() - self._began,
                )
            )
