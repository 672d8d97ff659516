"""Page scorers: which pages a query is likely to attend to, judged from a small landmark per page.

A scorer owns the layout of its landmarks. The code here is the truth in plain torch; backends may bring faster versions
of a scorer they know by type.

Source of `mean`: Sparrow, arXiv 2606.08446 (block top-k).
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from leanroll.errors import ConfigError
from leanroll.kernels.layout import DecodeBatch, PagedLayer


class Scorer(Protocol):
    """Landmark storage and page scores of a sparse layer."""

    name: str

    def allocate(
        self, num_pages: int, num_kv_heads: int, head_dim: int, page_size: int, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """Landmark storage for `num_pages` physical pages, contents undefined."""
        ...

    def update(self, layer: PagedLayer, page_ids: Tensor) -> None:
        """Write the landmarks of full physical pages, page_ids int32 or int64 [n]."""
        ...

    def score(self, q: Tensor, layer: PagedLayer, batch: DecodeBatch) -> Tensor:
        """q [B, Hq, D] → float32 [B, Hk, Nmax]; -inf on pages that are not candidates."""
        ...


def candidate_mask(batch: DecodeBatch, page_size: int) -> Tensor:
    """Pages that compete for a place, [first, N - last): bool [B, Nmax]."""
    pages = torch.arange(batch.block_table.shape[1], device=batch.lengths.device)
    ends = batch.num_pages(page_size) - batch.last_pages
    return (pages >= batch.first_pages) & (pages < ends[:, None])


class _MeanKeyScorer:
    """Landmark of a page = mean of its S cached keys, summed in float32, stored [P, Hk, D] in the cache's dtype."""

    name = ""

    def allocate(
        self, num_pages: int, num_kv_heads: int, head_dim: int, page_size: int, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        return torch.empty(num_pages, num_kv_heads, head_dim, dtype=dtype, device=device)

    def update(self, layer: PagedLayer, page_ids: Tensor) -> None:
        landmarks = landmarks_of(layer)
        pages = page_ids.long()
        landmarks[pages] = layer.k[pages].float().mean(dim=2).to(landmarks.dtype)

    def _products(self, q: Tensor, layer: PagedLayer, batch: DecodeBatch) -> tuple[Tensor, Tensor]:
        """q·landmark, float32 [B, Hk, G, Nmax], and the candidate mask [B, 1, 1, Nmax]."""
        num_seqs, num_heads, head_dim = q.shape
        mask = candidate_mask(batch, layer.page_size)
        pages = torch.where(mask, batch.block_table, 0).long()
        landmarks = landmarks_of(layer)[pages].float()  # [B, Nmax, Hk, D]
        grouped = q.float().view(num_seqs, layer.num_kv_heads, num_heads // layer.num_kv_heads, head_dim)
        return torch.einsum("bhgd,bnhd->bhgn", grouped, landmarks), mask[:, None, None]


class MeanScorer(_MeanKeyScorer):
    """The paper's score: <mean over the group's query heads, landmark>, no scaling."""

    name = "mean"

    def score(self, q: Tensor, layer: PagedLayer, batch: DecodeBatch) -> Tensor:
        products, mask = self._products(q, layer, batch)
        return products.mean(dim=2).masked_fill(~mask[:, 0], -torch.inf)


class SoftmaxScorer(_MeanKeyScorer):
    """Softmax of q·landmark / sqrt(D) over the candidate pages per query head, summed over the group's query heads."""

    name = "softmax"

    def score(self, q: Tensor, layer: PagedLayer, batch: DecodeBatch) -> Tensor:
        products, mask = self._products(q, layer, batch)
        logits = (products * q.shape[-1] ** -0.5).masked_fill(~mask, -torch.inf)
        # A sequence without candidates has a row of -inf, whose softmax is NaN; the mask below overwrites it.
        return logits.softmax(dim=-1).sum(dim=2).masked_fill(~mask[:, 0], -torch.inf)


def landmarks_of(layer: PagedLayer) -> Tensor:
    """The layer's landmarks; it is a bug of ours to score a layer that has none."""
    assert layer.landmarks is not None, "a dense layer has no landmarks to score"
    return layer.landmarks


_SCORERS: dict[str, type[MeanScorer] | type[SoftmaxScorer]] = {"mean": MeanScorer, "softmax": SoftmaxScorer}


def scorer_names() -> tuple[str, ...]:
    """Names that `get_scorer` knows."""
    return tuple(_SCORERS)


def get_scorer(name: str) -> Scorer:
    """Scorer by name.

    Raises:
        ConfigError: the name is unknown.
    """
    if name not in _SCORERS:
        raise ConfigError(f"page scorer {name!r} is unknown; expected one of {', '.join(_SCORERS)}.")
    return _SCORERS[name]()
