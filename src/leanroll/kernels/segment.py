"""Dense causal attention of one contiguous run of queries, differentiable, in bounded memory.

Used where whole stretches of a sequence are computed at once: prefill and teacher-forced scoring.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

QUERY_BLOCK = 512
"""Queries per block where an explicit mask is needed; bounds the mask to QUERY_BLOCK x Tk."""


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
