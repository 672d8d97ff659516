"""Page scorers: which pages a query is likely to attend to, judged from small landmarks of each page.

| name | a page's landmark | its score |
|---|---|---|
| mean | mean key | product with the group's mean query, unscaled |
| softmax | mean key | softmax over the candidate pages per query head, summed over the group |
| minmax | smallest and largest value per dimension | upper bound of any key's product, then as softmax |
| sub4-int4, sub4-int8, sub8-int4 | means of 4 or 8 runs of its tokens, quantised | log-sum-exp over the runs, then as softmax |
| keys-int4 | every key, quantised | log-sum-exp over the keys, then as softmax |
| peak4-int4, peak8-int4 | as sub4-int4, sub8-int4 | how near its best run comes to the best of all pages, nearest query head |
| oracle-mass | none; reads every key | the true attention mass: a yardstick, reference kernels only |

A scorer owns the layout of its landmarks. The code here is the truth in plain torch; backends may bring faster versions
of a scorer they know by type.

Sources: `mean`, Sparrow, arXiv 2606.08446 (block top-k). `minmax`, Quest, arXiv 2406.10774.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from leanroll.errors import ConfigError
from leanroll.kernels.landmarks import pack, packed_bytes, unpack, unpack_codes, whole_queries
from leanroll.kernels.layout import DecodeBatch, PagedLayer


class Scorer(Protocol):
    """Landmark storage and page scores of a sparse layer."""

    name: str

    def storage(
        self, num_kv_heads: int, head_dim: int, page_size: int, dtype: torch.dtype
    ) -> tuple[tuple[int, ...], torch.dtype]:
        """Shape and dtype of one page's landmarks, for a cache of `dtype`."""
        ...

    def allocate(
        self, num_pages: int, num_kv_heads: int, head_dim: int, page_size: int, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """Landmark storage for `num_pages` physical pages, [P, *shape of one page], contents undefined."""
        ...

    def update(self, layer: PagedLayer, page_ids: Tensor) -> None:
        """Write the landmarks of full physical pages, page_ids int32 or int64 [n]."""
        ...

    def score(self, q: Tensor, layer: PagedLayer, batch: DecodeBatch) -> Tensor:
        """q [B, Hq, D] → float32 [B, Hk, Nmax]; -inf on pages that are not candidates."""
        ...

    def rows(self, layer: PagedLayer, pages: Tensor) -> Tensor:
        """What queries are multiplied with, float32 [..., Hk, R, width] of physical pages [...]."""
        ...

    def score_rows(self, q: Tensor, rows: Tensor, batch: DecodeBatch, page_size: int) -> Tensor:
        """`score`, given the rows [B, Nmax, Hk, R, width] of every sequence's pages, or [Nmax, Hk, R, width] of all sequences."""
        ...


def candidate_mask(batch: DecodeBatch, page_size: int) -> Tensor:
    """Pages that compete for a place, [first, N - last): bool [B, Nmax]."""
    pages = torch.arange(batch.block_table.shape[1], device=batch.lengths.device)
    ends = batch.num_pages(page_size) - batch.last_pages
    return (pages >= batch.first_pages) & (pages < ends[:, None])


class _RowScorer:
    """Scores from products of queries with rows: per query head a softmax over the rows of all candidate pages, added up over a
    page's rows (the softmax of their log-sum-exp) and over the group's query heads."""

    name = ""

    def storage(
        self, num_kv_heads: int, head_dim: int, page_size: int, dtype: torch.dtype
    ) -> tuple[tuple[int, ...], torch.dtype]:
        raise NotImplementedError

    def rows(self, layer: PagedLayer, pages: Tensor) -> Tensor:
        raise NotImplementedError

    def allocate(
        self, num_pages: int, num_kv_heads: int, head_dim: int, page_size: int, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        shape, stored = self.storage(num_kv_heads, head_dim, page_size, dtype)
        return torch.empty(num_pages, *shape, dtype=stored, device=device)

    def score(self, q: Tensor, layer: PagedLayer, batch: DecodeBatch) -> Tensor:
        pages = torch.where(self._read(batch, layer.page_size), batch.block_table, 0).long()
        return self.score_rows(q, self.rows(layer, pages), batch, layer.page_size)

    def score_rows(self, q: Tensor, rows: Tensor, batch: DecodeBatch, page_size: int) -> Tensor:
        num_seqs, num_heads, head_dim = q.shape
        num_kv_heads = rows.shape[-3]
        grouped = self._queries(q.float().view(num_seqs, num_kv_heads, num_heads // num_kv_heads, head_dim))
        equation = "bhgd,nhrd->bhgnr" if rows.ndim == 4 else "bhgd,bnhrd->bhgnr"
        scores = self._combine(torch.einsum(equation, grouped, rows) * self._scale(head_dim), batch, page_size)
        return scores.masked_fill(~candidate_mask(batch, page_size)[:, None], -torch.inf)

    def _read(self, batch: DecodeBatch, page_size: int) -> Tensor:
        """Pages whose rows count, bool [B, Nmax]."""
        return candidate_mask(batch, page_size)

    def _queries(self, grouped: Tensor) -> Tensor:
        """Queries [B, Hk, G, D] → what is multiplied with rows, [B, Hk, G, width]."""
        return grouped

    def _scale(self, head_dim: int) -> float:
        return head_dim**-0.5

    def _combine(self, products: Tensor, batch: DecodeBatch, page_size: int) -> Tensor:
        """Scaled products [B, Hk, G, Nmax, R] → scores [B, Hk, Nmax], anything on pages that are not candidates."""
        return self._masses(products, candidate_mask(batch, page_size)[:, :, None])

    @staticmethod
    def _masses(products: Tensor, counted: Tensor) -> Tensor:
        """Softmax over the rows counted, bool [B, Nmax, R or 1]. Nothing counted: NaN, which the caller overwrites."""
        logits = products.masked_fill(~counted[:, None, None], -torch.inf)
        return logits.flatten(-2).softmax(dim=-1).view(products.shape).sum(dim=(2, 4))


class _MeanKeyScorer(_RowScorer):
    """Landmark of a page = mean of its S cached keys, summed in float32, stored [P, Hk, D] in the cache's dtype."""

    def storage(
        self, num_kv_heads: int, head_dim: int, page_size: int, dtype: torch.dtype
    ) -> tuple[tuple[int, ...], torch.dtype]:
        return (num_kv_heads, head_dim), dtype

    def update(self, layer: PagedLayer, page_ids: Tensor) -> None:
        landmarks = landmarks_of(layer)
        pages = page_ids.long()
        landmarks[pages] = layer.k[pages].float().mean(dim=2).to(landmarks.dtype)

    def rows(self, layer: PagedLayer, pages: Tensor) -> Tensor:
        return landmarks_of(layer)[pages].float().unsqueeze(-2)


class MeanScorer(_MeanKeyScorer):
    """The paper's score: <mean over the group's query heads, landmark>, no scaling."""

    name = "mean"

    def _queries(self, grouped: Tensor) -> Tensor:
        return grouped.mean(dim=2, keepdim=True)

    def _scale(self, head_dim: int) -> float:
        return 1.0

    def _combine(self, products: Tensor, batch: DecodeBatch, page_size: int) -> Tensor:
        return products[:, :, 0, :, 0]


class SoftmaxScorer(_MeanKeyScorer):
    """Softmax of q·landmark / sqrt(D) over the candidate pages per query head, summed over the group's query heads."""

    name = "softmax"


class MinMaxScorer(_RowScorer):
    """Landmarks [P, Hk, 2, D] in the cache's dtype: the smallest and the largest value of each dimension.

    The largest product that a key within these bounds can have is sum_d max(q_d * min_d, q_d * max_d), which is the product
    of (min(q, 0), max(q, 0)) with (min, max).
    """

    name = "minmax"

    def storage(
        self, num_kv_heads: int, head_dim: int, page_size: int, dtype: torch.dtype
    ) -> tuple[tuple[int, ...], torch.dtype]:
        return (num_kv_heads, 2, head_dim), dtype

    def update(self, layer: PagedLayer, page_ids: Tensor) -> None:
        pages = page_ids.long()
        low, high = layer.k[pages].aminmax(dim=2)
        landmarks_of(layer)[pages] = torch.stack([low, high], dim=2)

    def rows(self, layer: PagedLayer, pages: Tensor) -> Tensor:
        return landmarks_of(layer)[pages].float().flatten(-2).unsqueeze(-2)

    def _queries(self, grouped: Tensor) -> Tensor:
        return torch.cat([grouped.clamp(max=0.0), grouped.clamp(min=0.0)], dim=-1)


class QuantisedScorer(_RowScorer):
    """Sub-landmarks, the means of equal runs of a page's tokens, quantised; uint8 [P, Hk, bytes], see `landmarks.py`.

    Args:
        bits: 4 or 8.
        num_runs: runs per page; None takes every key as one.
    """

    def __init__(self, name: str, bits: int, num_runs: int | None) -> None:
        self.name, self.bits, self._num_runs = name, bits, num_runs

    def num_rows(self, page_size: int) -> int:
        """Sub-landmarks of a page."""
        return self._num_runs or page_size

    def storage(
        self, num_kv_heads: int, head_dim: int, page_size: int, dtype: torch.dtype
    ) -> tuple[tuple[int, ...], torch.dtype]:
        return (num_kv_heads, packed_bytes(self.num_rows(page_size), head_dim, self.bits)), torch.uint8

    def update(self, layer: PagedLayer, page_ids: Tensor) -> None:
        pages = page_ids.long()
        landmarks_of(layer)[pages] = pack(layer.k[pages], self.num_rows(layer.page_size), self.bits)

    def rows(self, layer: PagedLayer, pages: Tensor) -> Tensor:
        packed = landmarks_of(layer)[pages]
        return unpack(packed, self.num_rows(layer.page_size), layer.head_dim, self.bits)


class PeakScorer(QuantisedScorer):
    """Int4 sub-landmarks as `QuantisedScorer`, without exponentials: score = max over query heads and runs of (x - best x of that
    head on any candidate page), x the product of a query rounded to int8 with a sub-landmark. So 0 is a page that holds some
    head's best run, and the others follow by how far they stay behind.

    For the same tail it needs 2 to 6 % more bytes than the softmax over the same rows; scoring takes half its time (docs/LOG.md).
    Sums are whole numbers that float32 holds, so every CPU gets the same scores to the last bit.
    """

    def __init__(self, name: str, num_runs: int) -> None:
        super().__init__(name, 4, num_runs)

    def rows(self, layer: PagedLayer, pages: Tensor) -> Tensor:
        """Codes, and the row's scale behind them: [..., Hk, R, D + 1]."""
        codes, scales = unpack_codes(
            landmarks_of(layer)[pages], self.num_rows(layer.page_size), layer.head_dim, self.bits
        )
        return torch.cat([codes, scales[..., None]], dim=-1)

    def score_rows(self, q: Tensor, rows: Tensor, batch: DecodeBatch, page_size: int) -> Tensor:
        num_seqs, num_heads, head_dim = q.shape
        num_kv_heads = rows.shape[-3]
        queries, query_scales = whole_queries(q.view(num_seqs, num_kv_heads, num_heads // num_kv_heads, head_dim))
        shared = rows.ndim == 4
        equation = "bhgd,nhrd->bhgnr" if shared else "bhgd,bnhrd->bhgnr"
        whole = torch.einsum(equation, queries, rows[..., :-1])
        row_scales = rows[..., -1].permute(1, 0, 2)[None] if shared else rows[..., -1].permute(0, 2, 1, 3)
        products = whole * (row_scales[:, :, None] * query_scales[..., None, None])
        candidate = candidate_mask(batch, page_size)[:, None]
        best = products.amax(dim=-1).masked_fill(~candidate[:, :, None], -torch.inf)
        behind = best - best.amax(dim=-1, keepdim=True)  # NaN where nothing competes, overwritten below
        return behind.amax(dim=2).masked_fill(~candidate, -torch.inf)


class OracleScorer(_RowScorer):
    """True attention mass of a page over all visible tokens, summed over the group's query heads. For diagnosis: it reads what a
    sparse layer wants to spare. It ignores softcapping, and the mass of a page says nothing of its values, so it is a strong
    yardstick but not an upper bound."""

    name = "oracle-mass"

    def storage(
        self, num_kv_heads: int, head_dim: int, page_size: int, dtype: torch.dtype
    ) -> tuple[tuple[int, ...], torch.dtype]:
        return (num_kv_heads, 0), dtype

    def update(self, layer: PagedLayer, page_ids: Tensor) -> None:
        """Nothing to write."""

    def rows(self, layer: PagedLayer, pages: Tensor) -> Tensor:
        return layer.k[pages].float()

    def _read(self, batch: DecodeBatch, page_size: int) -> Tensor:
        pages = torch.arange(batch.block_table.shape[1], device=batch.lengths.device)
        return pages < batch.num_pages(page_size)[:, None]

    def _combine(self, products: Tensor, batch: DecodeBatch, page_size: int) -> Tensor:
        num_pages = products.shape[-2]
        tokens = torch.arange(num_pages * page_size, device=products.device).view(num_pages, page_size)
        return self._masses(products, tokens < batch.lengths[:, None, None])


def landmarks_of(layer: PagedLayer) -> Tensor:
    """The layer's landmarks; it is a bug of ours to score a layer that has none."""
    assert layer.landmarks is not None, "a dense layer has no landmarks to score"
    return layer.landmarks


def bytes_per_page(scorer: Scorer, num_kv_heads: int, head_dim: int, page_size: int, dtype: torch.dtype) -> int:
    """Landmark bytes of one page of one sparse layer, for a cache of `dtype`."""
    shape, stored = scorer.storage(num_kv_heads, head_dim, page_size, dtype)
    return math.prod(shape) * stored.itemsize


_SCORERS: dict[str, Callable[[], Scorer]] = {
    "mean": MeanScorer,
    "softmax": SoftmaxScorer,
    "minmax": MinMaxScorer,
    "sub4-int4": partial(QuantisedScorer, "sub4-int4", 4, 4),
    "sub4-int8": partial(QuantisedScorer, "sub4-int8", 8, 4),
    "sub8-int4": partial(QuantisedScorer, "sub8-int4", 4, 8),
    "keys-int4": partial(QuantisedScorer, "keys-int4", 4, None),
    "peak4-int4": partial(PeakScorer, "peak4-int4", 4),
    "peak8-int4": partial(PeakScorer, "peak8-int4", 8),
    "oracle-mass": OracleScorer,
}


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
