"""Dense causal attention of one contiguous run of queries, differentiable, in bounded memory.

Used where whole stretches of a sequence are computed at once: prefill and teacher-forced scoring. On CUDA, and for long stretches
on a CPU, that is torch's own attention. For short ones in bfloat16 a CPU is faster with plain fp32 products in small blocks, which
need neither repeated keys nor a mask (9 query and 3 KV heads, D 64, one thread, forward / with backward):

    queries, keys     torch           here
    60, 60            0.23 / 1.7 ms   0.26 / 0.9 ms
    140, 200          1.2 / 5.9 ms    1.1 / 4.1 ms
    320, 380          4.3 / 15 ms     3.3 / 11 ms
    1024, 1100        37 / 110 ms     23 / 77 ms
    2048, 2048        77 / 222 ms     90 / 280 ms
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from leanroll.kernels.products import is_emulated

QUERY_BLOCK = 512
"""Queries per block where an explicit mask is needed; bounds the mask to QUERY_BLOCK x Tk."""
MAX_SHORT_KEYS = 1280
"""Keys up to which plain products beat torch's attention on a CPU."""
SHORT_SCORES = 2**19
"""Scores of one block of those products, which then stay in a core's cache: 2 MiB."""


def segment_attention(q: Tensor, k: Tensor, v: Tensor, scale: float, softcap: float = 0.0, window: int = 0) -> Tensor:
    """Causal attention in which the queries are the last Tq of the Tk positions.

    Args:
        q: [N, Hq, Tq, D]; k, v: [N, Hk, Tk, D] with Hq a multiple of Hk and Tq <= Tk.
        scale: factor on q·k. softcap: 0 for none. window: 0 for none; otherwise the last `window` keys, own included.

    Returns:
        [N, Hq, Tq, D] in q's dtype. Softmax runs in fp32.
    """
    num_queries, num_keys = q.shape[2], k.shape[2]
    windowed = 0 < window < num_keys
    if softcap == 0.0 and not windowed and num_queries > 1 and _is_short(q, k, v):
        return _ShortAttention.apply(q, k, v, scale)
    if is_emulated(q):
        return segment_attention(q.float(), k.float(), v.float(), scale, softcap, window).to(q.dtype)
    groups = q.shape[1] // k.shape[1]
    if groups > 1:
        k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
    if softcap == 0.0 and not windowed and (num_queries == num_keys or num_queries == 1):
        return F.scaled_dot_product_attention(q, k, v, is_causal=num_queries > 1, scale=scale)
    blocks = []
    for start in range(0, num_queries, QUERY_BLOCK):
        stop = min(start + QUERY_BLOCK, num_queries)
        position = torch.arange(num_keys - num_queries + start, num_keys - num_queries + stop, device=q.device)[:, None]
        # Only the keys that this block of queries can see.
        high = num_keys - num_queries + stop
        low = max(0, num_keys - num_queries + start - window + 1) if windowed else 0
        key = torch.arange(low, high, device=q.device)[None, :]
        visible = key <= position
        if windowed:
            visible = visible & (key > position - window)
        blocks.append(_masked(q[:, :, start:stop], k[:, :, low:high], v[:, :, low:high], visible, scale, softcap))
    return torch.cat(blocks, dim=2) if len(blocks) > 1 else blocks[0]


def _masked(q: Tensor, k: Tensor, v: Tensor, visible: Tensor, scale: float, softcap: float) -> Tensor:
    if softcap == 0.0:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=visible, scale=scale)
    scores = (q.float() @ k.float().transpose(-1, -2)) * scale
    scores = softcap * torch.tanh(scores / softcap)
    weights = scores.masked_fill(~visible, float("-inf")).softmax(dim=-1)
    return (weights @ v.float()).to(q.dtype)


def _is_short(q: Tensor, k: Tensor, v: Tensor) -> bool:
    return (
        q.device.type == "cpu"
        and q.dtype in (torch.bfloat16, torch.float16)
        and k.dtype is q.dtype
        and v.dtype is q.dtype
        and k.shape[2] <= MAX_SHORT_KEYS
        and not torch.is_autocast_enabled("cpu")
    )


class _ShortAttention(torch.autograd.Function):
    """Everything in fp32; the backward computes the weights again, block by block, instead of keeping them.

    Legend: M = N·Hk matrices, G query heads per KV head, n queries of a block, which see the first `seen` keys.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        keys, values = _matrices(k), _matrices(v)
        out = torch.empty_like(q)
        for a, b, seen in _blocks(q, k):
            weights = _weights(_rows(q, a, b, k.shape[1]).mul_(scale), keys[:, :seen], b - a)
            out[:, :, a:b] = (weights @ values[:, :seen]).view_as(out[:, :, a:b])
        ctx.save_for_backward(q, k, v)
        ctx.scale = scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v = ctx.saved_tensors
        num_kv_heads = k.shape[1]
        keys, values = _matrices(k), _matrices(v)
        grad_q = torch.empty_like(q)
        grad_keys, grad_values = torch.zeros_like(keys), torch.zeros_like(values)
        for a, b, seen in _blocks(q, k):
            queries = _rows(q, a, b, num_kv_heads).mul_(ctx.scale)
            grads = _rows(grad, a, b, num_kv_heads)
            weights = _weights(queries, keys[:, :seen], b - a)
            grad_values[:, :seen] += weights.transpose(1, 2) @ grads
            grad_scores = (grads @ values[:, :seen].transpose(1, 2)).mul_(weights)
            grad_scores.addcmul_(weights, grad_scores.sum(dim=-1, keepdim=True), value=-1.0)
            grad_keys[:, :seen] += grad_scores.transpose(1, 2) @ queries
            grad_q[:, :, a:b] = (grad_scores @ keys[:, :seen]).mul_(ctx.scale).view_as(grad_q[:, :, a:b])
        return grad_q, grad_keys.to(k.dtype).view(k.shape), grad_values.to(v.dtype).view(v.shape), None


def _blocks(q: Tensor, k: Tensor) -> Iterator[tuple[int, int, int]]:
    """Queries [a, b) and the number of keys that the last of them sees."""
    num_queries, num_keys = q.shape[2], k.shape[2]
    size = min(64, max(16, SHORT_SCORES // (q.shape[0] * q.shape[1] * num_keys)))
    for a in range(0, num_queries, size):
        b = min(a + size, num_queries)
        yield a, b, num_keys - num_queries + b


def _matrices(x: Tensor) -> Tensor:
    """[N, Hk, Tk, D] → fp32 [M, Tk, D]."""
    return x.reshape(-1, *x.shape[2:]).float()


def _rows(x: Tensor, a: int, b: int, num_kv_heads: int) -> Tensor:
    """A block of [N, Hq, Tq, D] as a new fp32 [M, G·n, D]: the query heads of a KV head below each other."""
    block = torch.empty(x.shape[0], x.shape[1], b - a, x.shape[3], dtype=torch.float32)
    block.copy_(x[:, :, a:b])
    return block.view(x.shape[0] * num_kv_heads, -1, x.shape[3])


def _weights(queries: Tensor, keys: Tensor, num_queries: int) -> Tensor:
    """Attention weights [M, G·n, seen] of scaled queries [M, G·n, D], which are the last n of the `seen` positions."""
    scores = queries @ keys.transpose(1, 2)
    own = scores.view(scores.shape[0], -1, num_queries, scores.shape[2])[..., -num_queries:]
    own.masked_fill_(torch.ones(num_queries, num_queries, dtype=torch.bool).triu_(1), -torch.inf)
    return scores.softmax(dim=-1)
