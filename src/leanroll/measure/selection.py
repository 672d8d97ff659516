"""Which pages a whole stretch of queries reads, computed at once; the same definitions that decoding uses, step by step.

Legend: T queries, Hq query heads, Hk KV heads, D head dimension, L tokens of the sequence, S page size, N pages.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from leanroll.errors import ConfigError
from leanroll.kernels.layout import DecodeBatch, PagedLayer
from leanroll.kernels.reference import select_pages
from leanroll.kernels.scorers import MeanScorer, Scorer, SoftmaxScorer, candidate_mask, get_scorer, landmarks_of
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
            ConfigError: the schedule keeps a layer dense that the model does not have, or the scorer is unknown.
        """
        num_layers = len(spec.windows)
        beyond = [i for i in schedule.dense_layers if not 0 <= i < num_layers]
        if beyond:
            raise ConfigError(
                f"schedule {schedule.name!r} keeps layers {beyond} dense; the model has layers 0 to {num_layers - 1}. "
                "Use a schedule made for a model of this depth."
            )
        name = scorer if scorer is not None else schedule.scorer
        get_scorer(name)
        layers = tuple(i for i, w in enumerate(spec.windows) if w == 0 and i not in schedule.dense_layers)
        return cls(schedule, layers, name, kv_dtype, recorded)


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
        self._landmarks: Tensor | None = None
        if type(self._scorer) in (MeanScorer, SoftmaxScorer):
            # The page being written has no landmark; zeros keep its product finite, the candidate mask removes it.
            landmarks_of(self._layer)[length // size :] = 0
            self._landmarks = landmarks_of(self._layer).float().permute(1, 2, 0).contiguous()  # [Hk, D, N]

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
        queries = q.detach().transpose(0, 1)
        if self._landmarks is None:
            scores = self._scorer.score(queries, self._layer, batch)
        else:
            scores = self._shared_scores(queries, batch)
        return page_mask(select_pages(scores, batch, self._schedule.page_size), self.num_pages).transpose(0, 1)

    def _shared_scores(self, q: Tensor, batch: DecodeBatch) -> Tensor:
        """`Scorer.score` for queries that share one sequence: one product instead of a gather of landmarks per query."""
        assert self._landmarks is not None
        num_queries, num_heads, dim = q.shape
        num_kv_heads = self._landmarks.shape[0]
        grouped = q.float().view(num_queries, num_kv_heads, num_heads // num_kv_heads, dim)
        mask = candidate_mask(batch, self._schedule.page_size)[:, None]
        if isinstance(self._scorer, MeanScorer):
            scores = torch.einsum("thd,hdn->thn", grouped.mean(dim=2), self._landmarks)
            return scores.masked_fill(~mask, -torch.inf)
        products = torch.einsum("thgd,hdn->thgn", grouped, self._landmarks) * dim**-0.5
        weights = products.masked_fill(~mask[:, :, None], -torch.inf).softmax(dim=-1)
        return weights.sum(dim=2).masked_fill(~mask, -torch.inf)


def page_mask(selected: Tensor, num_pages: int) -> Tensor:
    """Logical page ids [..., K], -1 padded, as a mask bool [..., num_pages]."""
    mask = torch.zeros(*selected.shape[:-1], num_pages + 1, dtype=torch.bool, device=selected.device)
    ids = selected.long()
    mask.scatter_(-1, ids.masked_fill(ids < 0, num_pages), True)
    return mask[..., :num_pages]
