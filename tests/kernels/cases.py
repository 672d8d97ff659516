"""Random decoding batches for kernel tests: unused slots and pages are poisoned with NaN, pages are scattered over the pool."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from hypothesis import strategies as st
from torch import Tensor

from leanroll.kernels.layout import DecodeBatch, PagedLayer
from leanroll.kernels.scorers import Scorer, get_scorer, scorer_names

HEAD_DIMS = (64, 80, 96, 128, 256)


@dataclass(frozen=True)
class Shape:
    """One drawn configuration; lengths include the current token, budgets are in pages."""

    lengths: tuple[int, ...]
    budgets: tuple[int, ...]
    num_kv_heads: int
    group: int
    head_dim: int
    page_size: int
    first_pages: int
    last_pages: int
    kv_dtype: torch.dtype
    q_dtype: torch.dtype
    scorer: str
    softcap: float
    window: int
    seed: int


@st.composite
def shapes(draw: st.DrawFn) -> Shape:
    page_size = draw(st.sampled_from((8, 16, 32, 64, 128)))
    first, last = draw(st.integers(0, 2)), draw(st.integers(1, 3))
    # Up to some twenty pages, so that chunks of 512 tokens, partial pages and full pages all occur.
    longest = min(22 * page_size, 1300)
    lengths = draw(
        st.lists(st.integers(1, longest) | st.sampled_from((1, page_size, 2 * page_size)), min_size=1, max_size=4)
    )
    budget = st.integers(first + last, first + last + 12) | st.just(2**30)
    dtypes = draw(
        st.sampled_from(
            ((torch.bfloat16, torch.bfloat16), (torch.float32, torch.float32), (torch.bfloat16, torch.float32))
        )
    )
    return Shape(
        lengths=tuple(lengths),
        budgets=tuple(draw(budget) for _ in lengths),
        num_kv_heads=draw(st.integers(1, 3)),
        group=draw(st.integers(1, 8)),
        head_dim=draw(st.sampled_from(HEAD_DIMS)),
        page_size=page_size,
        first_pages=first,
        last_pages=last,
        kv_dtype=dtypes[0],
        q_dtype=dtypes[1],
        scorer=draw(st.sampled_from(scorer_names())),
        softcap=draw(st.sampled_from((0.0, 0.0, 20.0))),
        window=draw(st.sampled_from((0, 0, 1, 77, 600))),
        seed=draw(st.integers(0, 2**16)),
    )


def poison_bytes(landmarks: Tensor) -> None:
    """All bits set: NaN in every floating-point type, and in the scales of packed landmarks."""
    landmarks.view(torch.uint8).fill_(0xFF)


class Case:
    """Tensors for a shape: keys and values of tokens [0, L) of every sequence; everything else in the pool is NaN.

    With `pending`, the current token is not in the pool yet but in k, v [B, Hk, D], and full pages have their landmarks except
    the one that the current token fills.
    """

    def __init__(self, shape: Shape, *, pending: bool = False) -> None:
        generator = torch.Generator().manual_seed(shape.seed)

        def normal(*size: int, dtype: torch.dtype) -> Tensor:
            return torch.randn(*size, generator=generator).to(dtype)

        self.shape, self.scale = shape, shape.head_dim**-0.5
        self.scorer: Scorer = get_scorer(shape.scorer)
        size, heads, dim = shape.page_size, shape.num_kv_heads, shape.head_dim
        num_pages = [-(-length // size) for length in shape.lengths]
        pool = sum(num_pages) + 2
        poison = torch.full((pool, heads, size, dim), torch.nan, dtype=shape.kv_dtype)
        self.layer = PagedLayer(poison.clone(), poison.clone())
        self.layer.landmarks = self.scorer.allocate(pool, heads, dim, size, shape.kv_dtype, torch.device("cpu"))
        poison_bytes(self.layer.landmarks)

        # Entries beyond a sequence's pages are out of range: nobody may follow them.
        table = torch.full((len(num_pages), max(num_pages) + 1), 2**30, dtype=torch.int32)
        order = torch.randperm(pool, generator=generator).int()
        full: list[Tensor] = []
        at = 0
        for b, (length, count) in enumerate(zip(shape.lengths, num_pages, strict=True)):
            pages = order[at : at + count]
            table[b, :count] = pages
            at += count
            written = length - 1 if pending else length
            full.append(pages[: written // size])
            for pool_tensor in (self.layer.k, self.layer.v):
                tokens = normal(count * size, heads, dim, dtype=shape.kv_dtype)
                tokens[written:] = torch.nan
                pool_tensor[pages.long()] = tokens.view(count, size, heads, dim).transpose(1, 2)
        self.full_pages = torch.cat(full)
        self.scorer.update(self.layer, self.full_pages)
        self.batch = DecodeBatch(
            table,
            torch.tensor(shape.lengths, dtype=torch.int32),
            torch.tensor(shape.budgets, dtype=torch.int32),
            shape.first_pages,
            shape.last_pages,
        )
        size_b = len(shape.lengths)
        self.q = normal(size_b, heads * shape.group, dim, dtype=shape.q_dtype)
        self.k = normal(size_b, heads, dim, dtype=shape.q_dtype)
        self.v = normal(size_b, heads, dim, dtype=shape.q_dtype)

    def copy_of_layer(self) -> PagedLayer:
        """The same contents in other memory."""
        assert self.layer.landmarks is not None
        return PagedLayer(self.layer.k.clone(), self.layer.v.clone(), self.layer.landmarks.clone())

    @property
    def score_scale(self) -> float:
        """Size of what a page score is made of: a query times a mean key; 1 for a probability."""
        if self.shape.scorer != "mean":
            return 1.0
        return float(self.q.float().norm(dim=-1).mean()) * (self.shape.head_dim / self.shape.page_size) ** 0.5

    def sequence(self, b: int) -> tuple[DecodeBatch, slice]:
        """Sequence b as a batch of its own, and its slice of q, k and v."""
        rows = slice(b, b + 1)
        batch = self.batch
        alone = DecodeBatch(
            batch.block_table[rows], batch.lengths[rows], batch.budgets[rows], batch.first_pages, batch.last_pages
        )
        return alone, rows

    def random_selection(self) -> Tensor:
        """int32 [B, Hk, K]: random ascending pages that include the current one, -1 padded."""
        generator = torch.Generator().manual_seed(self.shape.seed + 1)
        counts = self.batch.num_pages(self.shape.page_size)
        width = int(counts.max())
        selected = torch.full((self.batch.size, self.shape.num_kv_heads, width), -1, dtype=torch.int32)
        for b in range(self.batch.size):
            for h in range(self.shape.num_kv_heads):
                kept = torch.rand(int(counts[b]), generator=generator) < 0.5
                kept[-1] = True
                pages = kept.nonzero()[:, 0].int()
                selected[b, h, : len(pages)] = pages
        return selected
