"""Teacher-forced scoring of one long sequence by the very kernels that decode it: what calibration runs on.

The keys of the whole sequence are known at once, so the decode steps of a layer can be run in blocks of positions: write all pages,
build all landmarks, then score, select and attend per block. Only the pages that are read are touched (the differentiable
`PackedContext` masks a dense product instead), and nothing is approximated: a position's result is its decode step's, given the
tokens before it. Without gradients.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from leanroll.errors import UserError
from leanroll.kernels.dispatch import KernelBackend
from leanroll.kernels.layout import DecodeBatch, PagedLayer
from leanroll.kernels.scorers import get_scorer
from leanroll.kernels.segment import segment_attention
from leanroll.measure.acceptance import intersection_acceptance
from leanroll.measure.head import acceptance_rates, top_logprobs
from leanroll.measure.logprobs import ScoringPolicy
from leanroll.measure.selection import SparsePlan
from leanroll.models.attention import AttentionCall

MAX_QUERIES = 512
"""Positions per block of sparse attention."""
GATHERED_ELEMENTS = 2**26
"""Bound on the keys that the reference backend gathers for one block."""


class Prefix:
    """Keys and values of a dense prefix, per layer [1, Hk, T, D], collected by one dense pass and continued by others."""

    def __init__(self) -> None:
        self.layers: dict[int, tuple[Tensor, Tensor]] = {}


class DocumentContext:
    """`AttentionContext` of the last n tokens of a sequence of T; without a plan it is dense.

    Args:
        num_tokens: T.
        plan: schedule, sparse layers, scorer and the cache's dtype. Positions below `prompt_length` are dense, as in prefill.
        backend: kernels to decode with.
        prefix: keys and values of the first T - n tokens. keep: collects those of this pass, which must be the whole sequence.
    """

    def __init__(
        self,
        num_tokens: int,
        plan: SparsePlan | None,
        backend: KernelBackend,
        prompt_length: int = 0,
        *,
        num_prefix: int = 0,
        prefix: Prefix | None = None,
        keep: Prefix | None = None,
    ) -> None:
        self._num_tokens, self._plan, self._backend = num_tokens, plan, backend
        self._num_prefix, self._prefix, self._keep = num_prefix, prefix, keep
        self._prompt_length = prompt_length
        self._first_sparse = num_tokens if plan is None else first_sparse_position(num_tokens, plan, prompt_length)

    @property
    def sparse_rows(self) -> bool | Tensor:
        """Tokens that read only a part of their pages, bool [1, n]; False without any."""
        if self._plan is None or self._first_sparse == self._num_tokens:
            return False
        rows = self._plan.schedule.reads_part(np.arange(1, self._num_tokens + 1))
        rows[: self._prompt_length] = False
        return torch.from_numpy(rows[None, self._num_prefix :])

    def attend(self, q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> Tensor:
        """q [1, Hq, n, D], k and v [1, Hk, n, D] → [1, n, Hq, D]."""
        offset = self._num_prefix
        if q.shape[0] != 1 or q.shape[2] != self._num_tokens - offset:
            raise UserError(
                f"a document context of {self._num_tokens - offset} tokens got queries of shape {tuple(q.shape)}; expected one "
                "sequence of exactly these tokens."
            )
        plan = self._plan
        if plan is not None and plan.kv_dtype is not None:
            k, v = (x.to(plan.kv_dtype).to(x.dtype) for x in (k, v))
        if self._keep is not None:
            self._keep.layers[call.layer] = (k, v)
        if offset:
            assert self._prefix is not None, "tokens before the first one need a prefix"
            k, v = (
                torch.cat([old[:, :, :offset], new], dim=2)
                for old, new in zip(self._prefix.layers[call.layer], (k, v), strict=True)
            )
        sparse = plan is not None and call.layer in plan.sparse_layers
        split = max(self._first_sparse, offset) if sparse else self._num_tokens
        parts = []
        if split > offset:
            queries, keys, values = q[:, :, : split - offset], k[:, :, :split], v[:, :, :split]
            dense = segment_attention(queries, keys, values, call.scale, call.softcap, call.window)
            parts.append(dense.transpose(1, 2))
        if plan is not None and split < self._num_tokens:
            parts.append(self._decode(q[0].transpose(0, 1)[split - offset :], k[0], v[0], plan, split, call)[None])
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)

    def _decode(self, q: Tensor, k: Tensor, v: Tensor, plan: SparsePlan, first: int, call: AttentionCall) -> Tensor:
        """Queries [n, Hq, D] at positions first, first + 1, … over k and v [Hk, T, D] → [n, Hq, D]."""
        schedule, backend, scorer = plan.schedule, self._backend, get_scorer(plan.scorer)
        size = schedule.page_size
        cache_dtype = plan.kv_dtype or k.dtype
        paged = [_pages(x.to(cache_dtype), size) for x in (k, v)]
        num_pages, num_heads, _, dim = paged[0].shape
        landmarks = scorer.allocate(num_pages, num_heads, dim, size, cache_dtype, k.device)
        layer = PagedLayer(paged[0], paged[1], landmarks)
        full = torch.arange(self._num_tokens // size, dtype=torch.int32, device=k.device)
        backend.update_landmarks(layer, full, scorer)
        lengths = np.arange(first + 1, self._num_tokens + 1)
        budgets = schedule.budgets(lengths)
        gathered = int(np.minimum(budgets.astype(np.int64), num_pages).max()) * size * num_heads * dim
        block = MAX_QUERIES if backend.name != "reference" else max(1, min(MAX_QUERIES, GATHERED_ELEMENTS // gathered))
        table = torch.arange(num_pages, dtype=torch.int32, device=k.device).repeat(min(block, len(lengths)), 1)
        out = torch.empty_like(q)
        for start in range(0, len(lengths), block):
            rows = slice(start, min(start + block, len(lengths)))
            batch = DecodeBatch(
                block_table=table[: rows.stop - rows.start],
                lengths=torch.as_tensor(lengths[rows], dtype=torch.int32, device=k.device),
                budgets=torch.as_tensor(budgets[rows], dtype=torch.int32, device=k.device),
                first_pages=schedule.first_pages,
                last_pages=schedule.last_pages,
            )
            queries = q[rows].contiguous()
            selected = backend.select_pages(backend.score_pages(queries, layer, batch, scorer), batch, size)
            out[rows] = backend.decode_attention(queries, layer, batch, selected, call.scale, call.softcap)
        return out


def first_sparse_position(num_tokens: int, plan: SparsePlan, prompt_length: int = 0) -> int:
    """0-based position of the first query that does not read every page; num_tokens when there is none."""
    lengths = np.arange(1, num_tokens + 1)
    reads_all = ~plan.schedule.reads_part(lengths)
    reads_all[: min(prompt_length, num_tokens)] = True
    return num_tokens if reads_all.all() else int(reads_all.argmin())


def _pages(x: Tensor, size: int) -> Tensor:
    """[Hk, T, D] → contiguous [pages, Hk, S, D]; the unused slots of the last page are zero."""
    num_heads, length, dim = x.shape
    num_pages = -(-length // size)
    padded = x.new_zeros(num_heads, num_pages * size, dim)
    padded[:, :length] = x
    return padded.view(num_heads, num_pages, size, dim).transpose(0, 1).contiguous()


@torch.no_grad()
def document_hidden(
    policy: ScoringPolicy,
    token_ids: Sequence[int],
    backend: KernelBackend,
    plan: SparsePlan | None = None,
    prompt_length: int = 0,
    *,
    num_prefix: int = 0,
    prefix: Prefix | None = None,
    keep: Prefix | None = None,
) -> Tensor:
    """Final hidden states [T - num_prefix, H] of a sequence of T tokens, dense or as sparse decoding would have them.

    Args:
        num_prefix, prefix: begin after that many tokens, whose keys and values an earlier dense pass kept. keep: keeps this pass's.
    """
    ids = torch.tensor([list(token_ids)], device=policy.device)
    positions = torch.arange(ids.shape[1], device=policy.device)[None]
    context = DocumentContext(
        ids.shape[1], plan, backend, prompt_length, num_prefix=num_prefix, prefix=prefix, keep=keep
    )
    return policy.hidden(ids[:, num_prefix:], positions[:, num_prefix:], context)[0]


@torch.no_grad()
def document_acceptance(
    policy: ScoringPolicy,
    token_ids: Sequence[int],
    backend: KernelBackend,
    plan: SparsePlan,
    *,
    temperature: float,
    prompt_length: int = 0,
    dense_hidden: Tensor | None = None,
) -> np.ndarray:
    """Exact alpha of the next-token distribution at every position: float32 [T]; 1 below the first sparse position.

    Args:
        dense_hidden: [T, H] of `document_hidden` without a plan, where it has been computed before.
    """
    alpha = np.ones(len(token_ids), dtype=np.float32)
    first = first_sparse_position(len(token_ids), plan, prompt_length)
    if first < len(token_ids):
        dense = document_hidden(policy, token_ids, backend) if dense_hidden is None else dense_hidden
        sparse = document_hidden(policy, token_ids, backend, plan, prompt_length)
        rates = acceptance_rates(dense[first:], policy.head, sparse[first:], policy.head, temperature)
        alpha[first:] = rates.cpu().numpy()
    return alpha


@torch.no_grad()
def continuation_acceptance(
    policy: ScoringPolicy,
    prefix_ids: Sequence[int],
    prefix: Prefix,
    token_ids: Sequence[int],
    backend: KernelBackend,
    plan: SparsePlan,
    *,
    temperature: float,
) -> np.ndarray:
    """Exact alpha of the tokens of a completion but its first, which the dense prefill gives: float32 [len(token_ids) - 1].

    prefix: keys and values of a sequence that begins with prefix_ids.
    """
    ids, start = [*prefix_ids, *token_ids[:-1]], len(prefix_ids)
    dense, sparse = (
        document_hidden(policy, ids, backend, p, start, num_prefix=start, prefix=prefix) for p in (None, plan)
    )
    return acceptance_rates(dense, policy.head, sparse, policy.head, temperature).cpu().numpy()


@torch.no_grad()
def paper_acceptance(
    policy: ScoringPolicy, dense_hidden: Tensor, sparse_hidden: Tensor, *, temperature: float, k: int = 20
) -> tuple[np.ndarray, np.ndarray]:
    """The paper's reading of alpha from top-k log-probs, and what it reads where the two agree: float32 [T] each.

    The first is the sum of min(p, q) over ids that both have in their top k; the second, its ceiling, the mass of p's top k.
    """
    (p_ids, p), (q_ids, q) = (
        (ids.cpu().numpy(), values.cpu().numpy())
        for ids, values in (top_logprobs(h, policy.head, k, temperature) for h in (dense_hidden, sparse_hidden))
    )
    return intersection_acceptance(q_ids, q, p_ids, p), np.exp(p).sum(axis=1)
