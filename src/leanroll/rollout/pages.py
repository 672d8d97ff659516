"""The paged KV pool: pages with reference counts, worst-case reservations, and an index of shared prefixes.

A page holds `page_size` tokens of keys and values of every layer. Pages of a prompt are shared by its samples, and by
prompts with the same beginning; a page that will still be written belongs to one sequence. What a sequence may ever
need is reserved when it is admitted, so that nothing has to be evicted or computed again while it runs.
"""

from __future__ import annotations

import contextlib
import math
import mmap
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from leanroll.errors import ConfigError
from leanroll.kernels.layout import PagedLayer
from leanroll.kernels.scorers import Scorer, bytes_per_page

GIB = 1024**3
NO_PARENT = -1
PrefixKey = tuple[int, tuple[int, ...]]


class PagePool:
    """Keys, values and landmarks of all layers, and who uses which page.

    Args:
        num_pages: pages in the pool.
        page_size: tokens per page.
        num_layers, num_kv_heads, head_dim: shape of the model's KV.
        dtype, device: of keys and values.
        scorer: owns the landmark storage of the sparse layers.
        sparse_layers: layers that select pages; the others have no landmarks.
    """

    def __init__(
        self,
        *,
        num_pages: int,
        page_size: int,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
        scorer: Scorer,
        sparse_layers: Sequence[int],
    ) -> None:
        self.num_pages, self.page_size = num_pages, page_size
        shape = (num_layers, num_pages, num_kv_heads, page_size, head_dim)
        self.k = allocate(shape, dtype, device)
        self.v = allocate(shape, dtype, device)
        page_shape, stored = scorer.storage(num_kv_heads, head_dim, page_size, dtype)
        landmarks = allocate((len(sparse_layers), num_pages, *page_shape), stored, device)
        of_layer = dict(zip(sparse_layers, landmarks, strict=True))
        self.layers = [PagedLayer(self.k[i], self.v[i], of_layer.get(i)) for i in range(num_layers)]
        self._free = list(range(num_pages - 1, -1, -1))
        self._references = [0] * num_pages
        self._reserved = 0
        self._prefix_of_page: dict[int, PrefixKey] = {}
        self._page_of_prefix: dict[PrefixKey, int] = {}

    @property
    def num_available(self) -> int:
        """Pages that are neither in use nor promised to a running sequence."""
        return len(self._free) - self._reserved

    @property
    def num_used(self) -> int:
        """Pages in use."""
        return self.num_pages - len(self._free)

    @property
    def num_reserved(self) -> int:
        """Free pages promised to running sequences."""
        return self._reserved

    def reserve(self, count: int) -> bool:
        """Promise `count` pages; False (and nothing promised) if they are not available."""
        if count > self.num_available:
            return False
        self._reserved += count
        return True

    def unreserve(self, count: int) -> None:
        """Give back a promise that was not used."""
        assert 0 <= count <= self._reserved
        self._reserved -= count

    def take(self, count: int) -> list[int]:
        """Turn `count` promised pages into pages in use, each with one reference."""
        assert count <= self._reserved, "pages are taken only from a reservation"
        self._reserved -= count
        pages = [self._free.pop() for _ in range(count)]
        for page in pages:
            self._references[page] = 1
        return pages

    def share(self, pages: Iterable[int]) -> None:
        """Add one reference to each page."""
        for page in pages:
            assert self._references[page] > 0, "only a page in use can be shared"
            self._references[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        """Drop one reference from each page; a page without references is free, and forgotten as a prefix."""
        for page in pages:
            assert self._references[page] > 0, "page released twice"
            self._references[page] -= 1
            if self._references[page] == 0:
                self._free.append(page)
                key = self._prefix_of_page.pop(page, None)
                if key is not None:
                    del self._page_of_prefix[key]

    def copy(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy keys and values of whole pages in every layer (copy-on-write of a partial page)."""
        src = torch.as_tensor(sources, device=self.k.device)
        dst = torch.as_tensor(targets, device=self.k.device)
        self.k[:, dst] = self.k[:, src]
        self.v[:, dst] = self.v[:, src]

    def remember_prefix(self, parent: int, token_ids: tuple[int, ...], page: int) -> None:
        """Offer a full page to prompts that begin in the same way.

        parent: the page before it, NO_PARENT for the first. Whoever uses a page also uses all pages before it, so a
        remembered chain is never broken.
        """
        key = (parent, token_ids)
        if key not in self._page_of_prefix:
            self._page_of_prefix[key] = page
            self._prefix_of_page[page] = key

    def match_prefix(self, token_ids: tuple[int, ...], max_pages: int) -> list[int]:
        """Longest run of remembered pages that spell the beginning of `token_ids`; not referenced yet."""
        pages: list[int] = []
        parent = NO_PARENT
        while len(pages) < max_pages:
            start = len(pages) * self.page_size
            page = self._page_of_prefix.get((parent, token_ids[start : start + self.page_size]))
            if page is None:
                break
            pages.append(page)
            parent = page
        return pages


def pages_for_memory(
    kv_memory_gib: float,
    *,
    page_size: int,
    num_layers: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    scorer: Scorer,
    num_sparse_layers: int,
) -> int:
    """Pages that fit in `kv_memory_gib`, landmarks included.

    Raises:
        ConfigError: not a positive number, or not even one page fits.
    """
    if not 0.0 < kv_memory_gib < math.inf:
        raise ConfigError(f"kv_memory_gib is {kv_memory_gib}; expected a positive number.")
    one_layer = 2 * num_kv_heads * page_size * head_dim * dtype.itemsize
    landmark = bytes_per_page(scorer, num_kv_heads, head_dim, page_size, dtype)
    page_bytes = num_layers * one_layer + num_sparse_layers * landmark
    count = int(kv_memory_gib * GIB // page_bytes)
    if count < 1:
        raise ConfigError(
            f"kv_memory_gib is {kv_memory_gib}, but one page of {page_size} tokens takes {page_bytes / GIB:.4f} GiB; "
            "raise it."
        )
    return count


def allocate(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Memory for keys, values or landmarks, contents undefined. Pages are read in scattered pieces of a few KiB: where the
    system has huge pages on request (Linux), asking for them saves the processor an address translation per piece, 5 to 10 % of
    a decode step.

    Raises:
        ConfigError: the system does not have it.
    """
    num_bytes = math.prod(shape) * dtype.itemsize
    if num_bytes == 0 or device.type != "cpu" or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(shape, dtype=dtype, device=device)
    try:
        memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError) as error:
        raise ConfigError(
            f"The system gives no {num_bytes / GIB:.1f} GiB for a part of the KV pool ({error}); lower kv_memory_gib."
        ) from error
    with contextlib.suppress(OSError):  # a kernel without huge pages says EINVAL; the memory is as good as any other
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype).view(shape)
