"""What kernels work on: one layer's pages, and the batch of sequences that decode one token each.

Legend: B sequences, T tokens, Hq query heads, Hk KV heads, G = Hq / Hk, D head dimension, S tokens per page, P physical
pages in the pool, N = ceil(L / S) logical pages of a sequence of L tokens, K width of a selection.

Worked example, S = 16, a sequence of L = 40 tokens with the current one: N = 3 logical pages;
`block_table[b] = [7, 2, 9, ...]` says that tokens 0..15 live in physical page 7, 16..31 in page 2 and 32..39 in page 9,
whose other 8 slots are unused and may hold anything, NaN included. Token 39 is in slot 9 * 16 + 7.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from leanroll.errors import UserError

MIN_PAGE_SIZE, MAX_PAGE_SIZE = 8, 128


@dataclass(slots=True)
class PagedLayer:
    """The KV cache of one layer.

    k, v: [P, Hk, S, D], bfloat16 or float32, contiguous.
    landmarks: storage of the layer's page scorer (`Scorer.allocate`), or None on a layer that is always dense.
    """

    k: Tensor
    v: Tensor
    landmarks: Tensor | None = None

    def __post_init__(self) -> None:
        if self.k.ndim != 4 or self.k.shape != self.v.shape or self.k.dtype != self.v.dtype:
            raise UserError(
                f"KV pool: k is {tuple(self.k.shape)} {self.k.dtype}, v is {tuple(self.v.shape)} {self.v.dtype}; "
                "expected both [pages, KV heads, page size, head dim] of one dtype."
            )

    @property
    def num_kv_heads(self) -> int:
        return self.k.shape[1]

    @property
    def page_size(self) -> int:
        return self.k.shape[2]

    @property
    def head_dim(self) -> int:
        return self.k.shape[3]


@dataclass(frozen=True, slots=True)
class DecodeBatch:
    """B sequences, each with one current token.

    block_table: int32 [B, Nmax], physical page of every logical page; entries at or above N are ignored.
    lengths: int32 [B], tokens in the cache including the current one, at least 1.
    budgets: int32 [B], pages a sparse layer may read, reserved pages included.
    first_pages, last_pages: reserved pages at the start and at the end; last_pages >= 1, since the page being written
        has no landmark.

    Raises:
        UserError: wrong dtypes, shapes, or a budget smaller than the reserved pages. Values are checked for CPU tensors
            only: on a GPU that would stop the queue.
    """

    block_table: Tensor
    lengths: Tensor
    budgets: Tensor
    first_pages: int = 1
    last_pages: int = 2

    def __post_init__(self) -> None:
        for name in ("block_table", "lengths", "budgets"):
            tensor: Tensor = getattr(self, name)
            ndim = 2 if name == "block_table" else 1
            if tensor.dtype != torch.int32 or tensor.ndim != ndim or not tensor.is_contiguous():
                raise UserError(
                    f"{name} is {tensor.dtype} {tuple(tensor.shape)}; expected a contiguous int32 tensor of {ndim} dimensions."
                )
        if not self.block_table.shape[0] == self.lengths.shape[0] == self.budgets.shape[0]:
            raise UserError(
                f"block_table has {self.block_table.shape[0]} sequences, lengths {self.lengths.shape[0]}, budgets "
                f"{self.budgets.shape[0]}; expected the same number."
            )
        if self.first_pages < 0 or self.last_pages < 1:
            raise UserError(f"first_pages={self.first_pages}, last_pages={self.last_pages}; expected >= 0 and >= 1.")
        if self.size and not self.lengths.is_cuda:
            reserved = self.first_pages + self.last_pages
            if int(self.budgets.min()) < reserved:
                raise UserError(
                    f"a KV budget is {int(self.budgets.min())} pages; expected at least the {reserved} reserved pages "
                    f"(first {self.first_pages} + last {self.last_pages}). Raise the schedule's pages."
                )
            if int(self.lengths.min()) < 1:
                raise UserError("a sequence has length 0; lengths include the current token, so expected at least 1.")

    @property
    def size(self) -> int:
        """Number of sequences B."""
        return self.lengths.shape[0]

    def num_pages(self, page_size: int) -> Tensor:
        """Logical pages N of every sequence, int32 [B]."""
        return torch.div(self.lengths + (page_size - 1), page_size, rounding_mode="floor")

    def num_selected(self, page_size: int) -> Tensor:
        """Pages a sparse layer reads, min(N, budget), int32 [B]."""
        return torch.minimum(self.num_pages(page_size), self.budgets)

    def selection_width(self, page_size: int) -> int:
        """K: the most pages any sequence of the batch reads on a sparse layer."""
        return int(self.num_selected(page_size).max()) if self.size else 0


def current_slots(batch: DecodeBatch, page_size: int) -> Tensor:
    """Slot of every sequence's current token, page * S + offset, int64 [B]."""
    last = batch.lengths.long() - 1
    logical = torch.div(last, page_size, rounding_mode="floor")
    physical = batch.block_table.gather(1, logical[:, None]).squeeze(1).long()
    return physical * page_size + last % page_size
