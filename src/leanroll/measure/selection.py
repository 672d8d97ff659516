"""Which pages a whole stretch of queries reads, computed at once; the same definitions that decoding uses, step by step.

Legend: T queries, Hq query heads, Hk KV heads, D head dimension, L tokens of the sequence, S page size, N pages.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from leanroll.kernels.layout import DecodeBatch, PagedLayer
from leanroll.kernels.reference import select_pages
from leanroll.kernels.scorers import Scorer, get_scorer
from leanroll.rollout.schedule import BudgetSchedule


class HasWindows(Protocol):
    """The part of a model's spec that decides which layers can be sparse."""

    @property
    def windows(self) -> tuple[int, ...]:
        """Sliding window per layer, 0 = full attention."""
        ...


@dataclass(frozen=True, slots=True)
class SparsePlan:
    """How completion tokens attend when they are re-scored sparsely. Prompt tokens are always dense.

    schedule: budgets, page size, reserved pages and dense layers.
    sparse_layers: layers that select pages, ascending; their order is the layer axis of `Rollout.pages`.
    scorer: name of the page scorer.
    kv_dtype: keys and values are rounded to it first, as the engine's pool does; None leaves them as they are.
    recorded: attend to `Rollout.pages` instead of selecting again.
    """

    schedule: BudgetSchedule
    sparse_layers: tuple[int, ...]
    scorer: str = "mean"
    kv_dtype: torch.dtype | None = None
    recorded: bool = False

    @classmethod
    def of(
        cls,
        spec: HasWindows,
        schedule: BudgetSchedule,
        *,
        scorer: str | None = None,
        kv_dtype: torch.dtype | None = None,
        recorded: bool = False,
    ) -> SparsePlan:
        """The plan of a model: every layer with full attention that the schedule does not keep dense.

        Raises:
            ConfigError: the schedule does not fit the model's layers, or the scorer is unknown.
        """
        layers = schedule.sparse_layers(spec.windows)
        name = scorer if scorer is not None else schedule.scorer
        get_scorer(name)
        return cls(schedule, layers, name, kv_dtype, recorded)


def tokens_past_dense(plan: SparsePlan, prompt_length: int, num_tokens: int) -> np.ndarray:
    """Tokens of a completion whose distribution sparse attention can change, bool [num_tokens].

    From the first one on whose decode step reads only a part of the pages. The very first token comes from the prompt, which is
    dense.
    """
    part = plan.schedule.reads_part(prompt_length + np.arange(num_tokens))
    part[:1] = False
    return np.asarray(np.logical_or.accumulate(part))


class PageIndex:
    """Landmarks of one sequence's pages in one layer, and the selection of its queries.

    Args:
        keys: [Hk, L, D], as cached (rounded to the cache's dtype); not differentiated.
    """

    def __init__(self, keys: Tensor, schedule: BudgetSchedule, scorer_name: str) -> None:
        self._schedule = schedule
        self._scorer: Scorer = get_scorer(scorer_name)
        size = schedule.page_size
        num_heads, length, dim = keys.shape
        self.num_pages = -(-length // size)
        padded = keys.new_zeros(num_heads, self.num_pages * size, dim)
        padded[:, :length] = keys.detach()
        paged = padded.view(num_heads, self.num_pages, size, dim).transpose(0, 1).contiguous()
        landmarks = self._scorer.allocate(self.num_pages, num_heads, dim, size, keys.dtype, keys.device)
        self._layer = PagedLayer(paged, paged, landmarks)
        self._scorer.update(self._layer, torch.arange(length // size, dtype=torch.int32, device=keys.device))
        # All queries share these rows: one product instead of a gather of landmarks per query. The page being written has no
        # landmark, whatever stands there; scorers mask it.
        self._rows = self._scorer.rows(self._layer, torch.arange(self.num_pages, device=keys.device))

    def select(self, q: Tensor, lengths: np.ndarray) -> Tensor:
        """Pages read by queries q [Hq, T, D], whose sequence has `lengths` [T] tokens at their step → bool [Hk, T, N]."""
        device = q.device
        num_queries = q.shape[1]
        batch = DecodeBatch(
            block_table=torch.arange(self.num_pages, dtype=torch.int32, device=device).repeat(num_queries, 1),
            lengths=torch.as_tensor(lengths, dtype=torch.int32, device=device),
            budgets=torch.as_tensor(self._schedule.budgets(lengths), dtype=torch.int32, device=device),
            first_pages=self._schedule.first_pages,
            last_pages=self._schedule.last_pages,
        )
        scores = self._scorer.score_rows(q.detach().transpose(0, 1), self._rows, batch, self._schedule.page_size)
        return page_mask(select_pages(scores, batch, self._schedule.page_size), self.num_pages).transpose(0, 1)


def page_mask(selected: Tensor, num_pages: int) -> Tensor:
    """Logical page ids [..., K], -1 padded, as a mask bool [..., num_pages]."""
    mask = torch.zeros(*selected.shape[:-1], num_pages + 1, dtype=torch.bool, device=selected.device)
    ids = selected.long()
    mask.scatter_(-1, ids.masked_fill(ids < 0, num_pages), True)
    return mask[..., :num_pages]
