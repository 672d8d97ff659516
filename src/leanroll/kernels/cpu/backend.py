"""The C++ backend: checks shapes and dtypes, then passes raw pointers.

bfloat16 and float32 caches; queries of either dtype. Results do not depend on the number of threads or on which other
sequences are in the batch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from leanroll.errors import BackendUnavailable, UserError
from leanroll.kernels.cpu.native import check, dtype_code, native
from leanroll.kernels.cpu.ops import sample_rows
from leanroll.kernels.landmarks import QUAD
from leanroll.kernels.layout import DecodeBatch, PagedLayer
from leanroll.kernels.scorers import (
    MeanScorer,
    MinMaxScorer,
    OracleScorer,
    PeakScorer,
    QuantisedScorer,
    Scorer,
    SoftmaxScorer,
    landmarks_of,
    scorer_names,
)

# As `ScorerKind` in kernels.h counts them.
_SCORER_KINDS: dict[type, int] = {MeanScorer: 1, SoftmaxScorer: 2, MinMaxScorer: 3, OracleScorer: 6}
_QUANTISED_KINDS = {(QuantisedScorer, 4): 4, (QuantisedScorer, 8): 5, (PeakScorer, 4): 7}  # with their bits
_DENSE = (0, 1)


class CpuBackend:
    """`KernelBackend` on the C++ extension.

    Raises:
        BackendUnavailable: the extension is not built, or a scorer has no C++ version.
        UserError: a tensor of the wrong shape, dtype, device or memory layout.
    """

    name = "cpu"

    def __init__(self) -> None:
        self._native = native()

    def write_kv(self, layer: PagedLayer, k: Tensor, v: Tensor, slots: Tensor) -> None:
        num_tokens, (_, num_kv_heads, page_size, head_dim) = slots.shape[0], layer.k.shape
        shape = (num_tokens, num_kv_heads, head_dim)
        k, v = k.contiguous(), v.contiguous()
        self._native.write_kv(
            _layer(layer), num_kv_heads, head_dim, page_size, dtype_code(k, "k"), check(k, "k", shape, k.dtype),
            check(v, "v", shape, k.dtype), check(slots, "slots", (num_tokens,), torch.int64), num_tokens, _threads(),
        )  # fmt: skip

    def update_landmarks(self, layer: PagedLayer, page_ids: Tensor, scorer: Scorer) -> None:
        _, num_kv_heads, page_size, head_dim = layer.k.shape
        pages = check(page_ids, "page_ids", tuple(page_ids.shape), torch.int32)
        self._native.update_landmarks(
            _layer(layer, scorer), scorer_code(scorer, page_size), num_kv_heads, head_dim, page_size, pages, page_ids.numel(),
            _threads(),
        )  # fmt: skip

    def score_pages(self, q: Tensor, layer: PagedLayer, batch: DecodeBatch, scorer: Scorer) -> Tensor:
        q = q.contiguous()
        out = torch.empty(batch.size, layer.num_kv_heads, batch.block_table.shape[1], dtype=torch.float32)
        self._native.score_pages(
            _layer(layer, scorer), _batch(batch, q, layer), dtype_code(q, "q"), q.data_ptr(),
            scorer_code(scorer, layer.page_size), out.data_ptr(), _threads(),
        )  # fmt: skip
        return out

    def select_pages(self, scores: Tensor, batch: DecodeBatch, page_size: int) -> Tensor:
        num_seqs, num_kv_heads, max_pages = scores.shape
        address = check(scores, "scores", (batch.size, num_kv_heads, batch.block_table.shape[1]), torch.float32)
        width = batch.selection_width(page_size)
        out = torch.empty(num_seqs, num_kv_heads, width, dtype=torch.int32)
        sizes = (num_seqs, num_kv_heads, num_kv_heads, 8, page_size, max_pages)
        self._native.select_pages(address, _batch_tuple(batch, sizes), out.data_ptr(), width, _threads())
        return out

    def decode_attention(
        self,
        q: Tensor,
        layer: PagedLayer,
        batch: DecodeBatch,
        selected: Tensor | None,
        scale: float,
        softcap: float = 0.0,
        window: int = 0,
    ) -> Tensor:
        q = q.contiguous()
        out = torch.empty_like(q)
        pages, width = 0, 0
        if selected is not None:
            width = selected.shape[-1]
            pages = check(selected, "selected", (batch.size, layer.num_kv_heads, width), torch.int32)
        self._native.decode_attention(
            _layer(layer), _batch(batch, q, layer), dtype_code(q, "q"), q.data_ptr(), pages, width, scale, softcap, window,
            out.data_ptr(), _threads(),
        )  # fmt: skip
        return out

    def decode_layer(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        layer: PagedLayer,
        batch: DecodeBatch,
        scorer: Scorer | None,
        scale: float,
        softcap: float = 0.0,
        window: int = 0,
        selected_out: Tensor | None = None,
    ) -> Tensor:
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        out = torch.empty_like(q)
        shape = (batch.size, layer.num_kv_heads, layer.head_dim)
        pages, width = 0, 0
        if selected_out is not None:
            width = selected_out.shape[-1]
            pages = check(selected_out, "selected_out", (*shape[:2], width), torch.int32)
        arguments = (
            _layer(layer, scorer), _batch(batch, q, layer), dtype_code(q, "q"), q.data_ptr(), check(k, "k", shape, q.dtype),
            check(v, "v", shape, q.dtype), scorer_code(scorer, layer.page_size), scale, softcap, window, pages, width,
            out.data_ptr(), _threads(),
        )  # fmt: skip
        try:
            self._native.decode_layer(*arguments)
        except ValueError as error:  # selected_out is too narrow; C++ knows the width and says so
            raise UserError(str(error)) from error
        return out

    def sample_rows(self, logits: Tensor, uniforms: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        return sample_rows(logits, uniforms, temperature)


def _threads() -> int:
    return torch.get_num_threads()


def scorer_code(scorer: Scorer | None, page_size: int) -> tuple[int, int]:
    """Kind and rows per page as C++ takes them."""
    if scorer is None:
        return _DENSE
    # Subclasses may define another score, so only the very types are known.
    if isinstance(scorer, QuantisedScorer) and (type(scorer), scorer.bits) in _QUANTISED_KINDS:
        rows = scorer.num_rows(page_size)
        if rows % QUAD or page_size % rows:
            raise UserError(
                f"page scorer {scorer.name!r} cuts pages of {page_size} tokens into {rows} runs; expected a multiple of "
                f"{QUAD} that divides the page."
            )
        return _QUANTISED_KINDS[type(scorer), scorer.bits], rows
    kind = _SCORER_KINDS.get(type(scorer))
    if kind is None:
        raise BackendUnavailable(
            f"page scorer {scorer.name!r} has no C++ version; use one of {', '.join(scorer_names())}, or kernel 'reference'."
        )
    return kind, page_size if type(scorer) is OracleScorer else 1


def _layer(layer: PagedLayer, scorer: Scorer | None = None) -> tuple[int, int, int, int]:
    """dtype, k, v and the landmarks of a scorer as C++ takes them."""
    pool_shape = tuple(layer.k.shape)
    if pool_shape[2] % 8 or pool_shape[3] % 8:
        raise UserError(
            f"the KV pool has page size {pool_shape[2]} and head dimension {pool_shape[3]}; the CPU kernels take multiples "
            "of 8. Use kernel 'reference'."
        )
    address = 0
    if scorer is not None:
        shape, stored = scorer.storage(pool_shape[1], pool_shape[3], pool_shape[2], layer.k.dtype)
        address = check(landmarks_of(layer), "landmarks", (pool_shape[0], *shape), stored)
    k, v = check(layer.k, "k pool", pool_shape, layer.k.dtype), check(layer.v, "v pool", pool_shape, layer.k.dtype)
    return dtype_code(layer.k, "the KV pool"), k, v, address


def _batch(batch: DecodeBatch, q: Tensor, layer: PagedLayer) -> tuple[int, ...]:
    num_seqs, num_heads, head_dim = q.shape
    if num_seqs != batch.size or head_dim != layer.head_dim or num_heads % layer.num_kv_heads or not q.is_cpu:
        raise UserError(
            f"q is {tuple(q.shape)} on {q.device}; expected [{batch.size}, a multiple of {layer.num_kv_heads}, "
            f"{layer.head_dim}] on the CPU."
        )
    sizes = (num_seqs, num_heads, layer.num_kv_heads, head_dim, layer.page_size, batch.block_table.shape[1])
    return _batch_tuple(batch, sizes)


def _batch_tuple(batch: DecodeBatch, sizes: tuple[int, ...]) -> tuple[int, ...]:
    addresses = (batch.block_table.data_ptr(), batch.lengths.data_ptr(), batch.budgets.data_ptr())
    return (*sizes, *addresses, batch.first_pages, batch.last_pages)
