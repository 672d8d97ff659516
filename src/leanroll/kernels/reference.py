"""The truth: every kernel in plain torch, float32 accumulation, on any device. Written to be read, not to be fast.

Shapes: see the legend in `layout.py`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from leanroll.kernels.layout import DecodeBatch, PagedLayer, current_slots
from leanroll.kernels.scorers import Scorer, candidate_mask


def write_kv(layer: PagedLayer, k: Tensor, v: Tensor, slots: Tensor) -> None:
    """Put keys and values [T, Hk, D] into slots int64 [T] (page * S + offset), rounded to the cache's dtype."""
    pages = torch.div(slots, layer.page_size, rounding_mode="floor")
    offsets = slots % layer.page_size
    layer.k[pages, :, offsets] = k.to(layer.k.dtype)
    layer.v[pages, :, offsets] = v.to(layer.v.dtype)


def select_pages(scores: Tensor, batch: DecodeBatch, page_size: int) -> Tensor:
    """Logical pages to read.

    N <= budget: all pages. Otherwise [0, first) and [N - last, N) and the budget - first - last best of the pages between;
    ties go to the earlier page.

    Args:
        scores: float32 [B, Hk, Nmax].
    Returns:
        int32 [B, Hk, K], ascending, -1 at the end of shorter rows.
    """
    num_pages, num_selected = batch.num_pages(page_size), batch.num_selected(page_size)
    pages = torch.arange(scores.shape[-1], device=scores.device)
    exists = pages < num_pages[:, None]
    candidate = candidate_mask(batch, page_size)
    # Reserved pages rank above every candidate, and all pages do where the budget covers them.
    reserved = exists & (~candidate | (num_pages <= batch.budgets)[:, None])
    ranked = scores.masked_fill(reserved[:, None], torch.inf).masked_fill(~exists[:, None], -torch.inf)
    order = ranked.argsort(dim=-1, descending=True, stable=True)[..., : batch.selection_width(page_size)]
    kept = torch.arange(order.shape[-1], device=scores.device) < num_selected[:, None, None]
    beyond = scores.shape[-1]  # sorts behind every page
    ascending = order.masked_fill(~kept, beyond).sort(dim=-1).values
    return ascending.masked_fill(ascending == beyond, -1).int()


def decode_attention(
    q: Tensor,
    layer: PagedLayer,
    batch: DecodeBatch,
    selected: Tensor | None,
    scale: float,
    softcap: float = 0.0,
    window: int = 0,
) -> Tensor:
    """Attention of every sequence's current token over its selected pages.

    Args:
        q: [B, Hq, D]; query head h reads KV head h // G.
        selected: int32 [B, Hk, K] logical pages, -1 ignored, the current page among them; None reads all pages.
        scale: factor on q·k. softcap: 0 means none, otherwise scores become softcap·tanh(score / softcap).
        window: 0 means all tokens, otherwise only the last `window` tokens, the current one included.
    Returns:
        [B, Hq, D] in q's dtype.
    """
    num_seqs, num_heads, head_dim = q.shape
    num_kv_heads, page_size = layer.num_kv_heads, layer.page_size
    if selected is None:
        pages = torch.arange(batch.block_table.shape[1], device=q.device)
        every = torch.where(pages < batch.num_pages(page_size)[:, None], pages, -1)
        selected = every[:, None].expand(-1, num_kv_heads, -1)

    logical = selected.long()
    position = logical[..., None] * page_size + torch.arange(page_size, device=q.device)  # [B, Hk, K, S]
    length = batch.lengths.long()[:, None, None, None]
    readable = (logical >= 0)[..., None] & (position < length)
    if window:
        readable &= position >= length - window

    table = batch.block_table.long()[:, None].expand(-1, num_kv_heads, -1)
    # Pages and slots that must not be read may hold NaN, so they are replaced, not multiplied away.
    physical = torch.where(readable.any(-1), table.gather(2, logical.clamp_min(0)), 0)
    head = torch.arange(num_kv_heads, device=q.device)[None, :, None]
    keys = layer.k[physical, head].float().masked_fill(~readable[..., None], 0.0).flatten(2, 3)  # [B, Hk, K*S, D]
    values = layer.v[physical, head].float().masked_fill(~readable[..., None], 0.0).flatten(2, 3)

    grouped = q.float().view(num_seqs, num_kv_heads, num_heads // num_kv_heads, head_dim)
    scores = torch.einsum("bhgd,bhtd->bhgt", grouped, keys) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    weights = scores.masked_fill(~readable.flatten(2, 3)[:, :, None], -torch.inf).softmax(dim=-1)
    return torch.einsum("bhgt,bhtd->bhgd", weights, values).reshape(q.shape).to(q.dtype)


def sample_rows(logits: Tensor, uniforms: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Invert the cumulative distribution of softmax(logits / temperature), in vocabulary order.

    Args:
        logits: float32 [B, V]; -inf is never drawn. uniforms: float64 [B] in [0, 1). temperature: > 0.
    Returns:
        ids int64 [B], the first token whose cumulative probability exceeds the uniform, and log-probs float32 [B].
    """
    logprobs = (logits / temperature).log_softmax(dim=-1)
    cumulative = logprobs.double().exp().cumsum(dim=-1)
    targets = (uniforms * cumulative[:, -1])[:, None]
    ids = torch.searchsorted(cumulative, targets, right=True)
    # Rounding may put the target on the very end; the last token with any mass is then the one.
    last = torch.searchsorted(cumulative, cumulative[:, -1:].contiguous())
    ids = torch.minimum(ids, last)
    return ids[:, 0], logprobs.gather(1, ids)[:, 0]


class ReferenceBackend:
    """`KernelBackend` in plain torch: CPU, CUDA and whatever else torch runs on."""

    name = "reference"

    def write_kv(self, layer: PagedLayer, k: Tensor, v: Tensor, slots: Tensor) -> None:
        write_kv(layer, k, v, slots)

    def update_landmarks(self, layer: PagedLayer, page_ids: Tensor, scorer: Scorer) -> None:
        scorer.update(layer, page_ids)

    def score_pages(self, q: Tensor, layer: PagedLayer, batch: DecodeBatch, scorer: Scorer) -> Tensor:
        return scorer.score(q, layer, batch)

    def select_pages(self, scores: Tensor, batch: DecodeBatch, page_size: int) -> Tensor:
        return select_pages(scores, batch, page_size)

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
        return decode_attention(q, layer, batch, selected, scale, softcap, window)

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
        slots = current_slots(batch, layer.page_size)
        write_kv(layer, k, v, slots)
        selected = None
        if scorer is not None:
            filled = batch.lengths % layer.page_size == 0
            scorer.update(layer, torch.div(slots[filled], layer.page_size, rounding_mode="floor"))
            selected = select_pages(scorer.score(q, layer, batch), batch, layer.page_size)
            if selected_out is not None:
                selected_out.fill_(-1)
                selected_out[..., : selected.shape[-1]] = selected
        return decode_attention(q, layer, batch, selected, scale, softcap, window)

    def sample_rows(self, logits: Tensor, uniforms: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        return sample_rows(logits, uniforms, temperature)
