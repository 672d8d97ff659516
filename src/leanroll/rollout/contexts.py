"""The two batches a rollout engine runs: prompts being prefilled, and sequences decoding one token.

Both are `AttentionContext`s: the model computes q, k and v of a layer, the context writes k and v to the page pool and
attends.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from leanroll.kernels.dispatch import KernelBackend
from leanroll.kernels.layout import DecodeBatch, PagedLayer
from leanroll.kernels.scorers import Scorer
from leanroll.kernels.segment import segment_attention
from leanroll.models.attention import AttentionCall
from leanroll.rollout.pages import PagePool


@dataclass(frozen=True, slots=True)
class PrefillSegment:
    """Tokens [start, start + count) of one prompt, at rows [row, row + count) of the packed batch.

    pages: physical pages of the prompt from its first token on, covering at least start + count tokens. The tokens
    before `start` are already in the pool, or are written by an earlier segment of the same batch.
    """

    row: int
    start: int
    count: int
    pages: tuple[int, ...]


class PrefillContext:
    """Dense prefill of several prompt segments packed in one row of tokens."""

    def __init__(
        self,
        segments: list[PrefillSegment],
        pool: PagePool,
        backend: KernelBackend,
        scorer: Scorer,
    ) -> None:
        self._segments, self._pool, self._backend, self._scorer = segments, pool, backend, scorer
        size, device = pool.page_size, pool.k.device
        slots: list[Tensor] = []
        filled: list[int] = []
        for s in segments:
            position = torch.arange(s.start, s.start + s.count)
            pages = torch.as_tensor(s.pages)
            slots.append(pages[position // size] * size + position % size)
            filled += s.pages[s.start // size : (s.start + s.count) // size]
        self.sparse_rows = False
        self._slots = torch.cat(slots).to(device)
        self._filled = torch.as_tensor(filled, dtype=torch.int32, device=device)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> Tensor:
        """q [1, Hq, T, D], k and v [1, Hk, T, D] → [1, T, Hq, D]."""
        layer = self._pool.layers[call.layer]
        dtype = layer.k.dtype
        by_token = lambda x: x[0].transpose(0, 1).contiguous()  # noqa: E731
        # Rounded to the cache's dtype before anything attends to them: a chunk, or a prompt that shares this beginning,
        # reads them from the pool.
        k, v = k.to(dtype), v.to(dtype)
        self._backend.write_kv(layer, by_token(k), by_token(v), self._slots)
        if layer.landmarks is not None and self._filled.numel():
            self._backend.update_landmarks(layer, self._filled, self._scorer)
        out = torch.empty_like(q)
        for s in self._segments:
            rows = slice(s.row, s.row + s.count)
            if s.start == 0:
                keys, values = k[:, :, rows], v[:, :, rows]
            else:
                keys, values = (_gather(x, s.pages, s.start + s.count) for x in (layer.k, layer.v))
            keys, values = keys.to(q.dtype), values.to(q.dtype)
            out[:, :, rows] = segment_attention(q[:, :, rows], keys, values, call.scale, call.softcap, call.window)
        return out.transpose(1, 2)


def _gather(cache: Tensor, pages: tuple[int, ...], length: int) -> Tensor:
    """Pages of a [P, Hk, S, D] cache as one contiguous [1, Hk, length, D]."""
    picked = cache[torch.as_tensor(pages, device=cache.device)]
    num_pages, num_heads, size, dim = picked.shape
    return picked.transpose(0, 1).reshape(1, num_heads, num_pages * size, dim)[:, :, :length]


class DecodeContext:
    """One token of each running sequence.

    sparse_rows: which sequences read only a part of their pages (see `AttentionContext`).
    recorded: per sparse layer an int32 [B, Hk, K] buffer that receives the selected logical pages; None records
    nothing.
    """

    def __init__(
        self,
        batch: DecodeBatch,
        layers: list[PagedLayer],
        backend: KernelBackend,
        scorer: Scorer,
        recorded: dict[int, Tensor] | None = None,
        *,
        sparse_rows: bool | Tensor = False,
    ) -> None:
        self.sparse_rows = sparse_rows
        self._batch, self._layers, self._backend, self._scorer = batch, layers, backend, scorer
        self._recorded = recorded or {}

    def attend(self, q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> Tensor:
        """q [B, Hq, 1, D], k and v [B, Hk, 1, D] → [B, 1, Hq, D]."""
        layer = self._layers[call.layer]
        out = self._backend.decode_layer(
            q[:, :, 0],
            k[:, :, 0],
            v[:, :, 0],
            layer,
            self._batch,
            self._scorer if layer.landmarks is not None else None,
            call.scale,
            softcap=call.softcap,
            window=call.window,
            selected_out=self._recorded.get(call.layer),
        )
        return out.unsqueeze(1)
