"""The language-model head, streamed over rows: log-probs, entropies, gathers and acceptance without [tokens, vocabulary].

Legend: R rows (tokens to score), H hidden size, V vocabulary. How the rows stream is in `measure.streaming`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from leanroll.errors import ConfigError, UserError
from leanroll.kernels.products import product
from leanroll.measure.streaming import Head, HeadGradients, TemperedHead, chunks, default_chunk_rows, wide


class TokenScores(NamedTuple):
    """logprobs: [R], of the target tokens. entropy: [R] nats of the same distribution, no gradient; None unless asked for."""

    logprobs: Tensor
    entropy: Tensor | None


@dataclass(frozen=True, slots=True)
class Support:
    """Per row, the token ids that a truncating sampler could draw; a row without ids is not truncated.

    offsets: int64 [R + 1], row r owns ids[offsets[r]:offsets[r + 1]].
    """

    offsets: Tensor
    ids: Tensor

    @classmethod
    def of(cls, rows: Sequence[np.ndarray | None], device: torch.device | str = "cpu") -> Support:
        """From one id array (or None) per row."""
        counts = [0 if ids is None else len(ids) for ids in rows]
        kept = [np.asarray(ids, dtype=np.int64) for ids in rows if ids is not None]
        flat = np.concatenate(kept) if kept else np.zeros(0, dtype=np.int64)
        offsets = torch.from_numpy(np.concatenate([[0], np.cumsum(counts)]).astype(np.int64))
        return cls(offsets.to(device), torch.from_numpy(flat).to(device))

    def apply(self, logits: Tensor, start: int) -> None:
        """Set logits [n, V] of rows start, start + 1, … to -inf outside the support."""
        stop = start + logits.shape[0]
        counts = self.offsets[start + 1 : stop + 1] - self.offsets[start:stop]
        rows = torch.repeat_interleave(torch.arange(stop - start, device=logits.device), counts)
        keep = torch.zeros_like(logits, dtype=torch.bool)
        keep[rows, self.ids[self.offsets[start] : self.offsets[stop]]] = True
        logits.masked_fill_(~(keep | (counts == 0)[:, None]), -torch.inf)


def token_logprobs(
    hidden: Tensor,
    head: Head,
    targets: Tensor,
    temperature: float,
    *,
    with_entropy: bool = False,
    support: Support | None = None,
    chunk_rows: int | None = None,
) -> TokenScores:
    """Log-probabilities of `targets` under softmax(logits / temperature).

    Differentiable with respect to hidden, head.weight and head.bias. If only `hidden` needs a gradient (a frozen head), its rows'
    gradients are computed in the forward, which saves the backward a third of the products; otherwise the backward recomputes the
    logits chunk by chunk.

    Args:
        hidden: [R, H]. targets: int64 [R]. support: renormalise every row on the ids its sampler kept.
        chunk_rows: rows per chunk; None fits `CHUNK_BYTES`.

    Raises:
        ConfigError: temperature is not positive. UserError: shapes do not fit.
    """
    _check(hidden, targets, temperature)
    rows = chunk_rows or default_chunk_rows(head.weight.shape[0])
    logprobs, entropy = _TokenLogprobs.apply(
        hidden,
        head.weight,
        head.bias,
        targets,
        support,
        TemperedHead.of(head, temperature, hidden.shape[0]),
        rows,
        with_entropy,
        torch.is_grad_enabled(),  # always off inside a Function
    )
    return TokenScores(logprobs, entropy if with_entropy else None)


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        support: Support | None,
        tempered: TemperedHead,
        chunk: int,
        with_entropy: bool,
        needs_grad: bool,
    ) -> tuple[Tensor, Tensor]:
        dtype = wide(weight.dtype)
        num_rows = hidden.shape[0]
        logprobs = hidden.new_empty(num_rows, dtype=dtype)
        entropy = hidden.new_empty(num_rows if with_entropy else 0, dtype=dtype)
        head_grad = needs_grad and (weight.requires_grad or (bias is not None and bias.requires_grad))
        # d logprob / d hidden of a row is independent of the other rows, so it can be made here and scaled later.
        jacobian = torch.empty_like(hidden) if needs_grad and hidden.requires_grad and not head_grad else None
        with torch.autocast(hidden.device.type, enabled=False):
            # Pages that are fresh in every chunk cost a CPU more than the arithmetic on them: two buffers serve all chunks.
            x = p = None
            for rows in chunks(num_rows, chunk):
                x = tempered.logits(hidden[rows], x)
                if support is not None:
                    support.apply(x, rows.start)
                top = x.amax(dim=-1, keepdim=True)
                x -= top
                if not with_entropy and jacobian is None:
                    target = x.gather(1, targets[rows, None])
                    logprobs[rows] = (target - x.exp_().sum(dim=-1, keepdim=True).log_()).squeeze(1)
                    continue
                p = torch.exp(x, out=torch.empty_like(x) if p is None else p[: x.shape[0]])
                total = p.sum(dim=-1, keepdim=True)
                log_total = total.log()
                logprobs[rows] = (x.gather(1, targets[rows, None]) - log_total).squeeze(1)
                if with_entropy:
                    finite = x if support is None else x.masked_fill(x == -torch.inf, 0.0)
                    mean = torch.bmm(p[:, None], finite[:, :, None])[:, :, 0] / total
                    entropy[rows] = (log_total - mean).squeeze(1)
                if jacobian is not None:
                    if tempered.head.softcap:
                        x += top
                    jacobian[rows] = _jacobian(tempered, p.div_(total), targets[rows], x).to(hidden.dtype)
        ctx.mark_non_differentiable(entropy)
        ctx.has_jacobian = jacobian is not None
        if jacobian is not None:
            ctx.save_for_backward(jacobian)
        elif head_grad:
            ctx.settings = (support, tempered, chunk)
            ctx.save_for_backward(hidden, weight, bias, targets)
        return logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, _grad_entropy: Tensor) -> tuple[Tensor | None, ...]:
        nothing = (None,) * 6
        if ctx.has_jacobian:
            (jacobian,) = ctx.saved_tensors
            return (jacobian * grad[:, None].to(jacobian.dtype), None, None, *nothing)
        hidden, weight, bias, targets = ctx.saved_tensors
        support, tempered, chunk = ctx.settings
        gradients = HeadGradients(hidden, weight, bias, ctx.needs_input_grad[:3])
        with torch.autocast(hidden.device.type, enabled=False):
            for rows in chunks(hidden.shape[0], chunk):
                x = tempered.logits(hidden[rows])
                if support is not None:
                    support.apply(x, rows.start)
                gradients.add(rows, _product_grad(tempered, x.softmax(dim=-1), targets[rows], x, grad[rows]))
        return (*gradients.result(), *nothing)


def _jacobian(head: TemperedHead, p: Tensor, targets: Tensor, tempered: Tensor) -> Tensor:
    """d logprob(target) / d hidden [n, H], rows apart; p [n, V] are the probabilities."""
    weight = head.head.weight
    if head.head.softcap:
        dz = _product_grad(head, p, targets, tempered, torch.ones_like(p[:, 0]))
        return product(dz, weight)
    return (weight[targets] - product(p, weight)).mul_(head.slope)


def _product_grad(head: TemperedHead, p: Tensor, targets: Tensor, tempered: Tensor, grad: Tensor) -> Tensor:
    """grad [n] · d logprob(target) / d product [n, V]; overwrites the probabilities p."""
    grad = grad * head.slope
    dz = p.mul_(-grad[:, None])
    dz[torch.arange(dz.shape[0], device=dz.device), targets] += grad
    return head.through_cap(dz, tempered)


@torch.no_grad()
def gather_logprobs(
    hidden: Tensor, head: Head, ids: Tensor, temperature: float, *, chunk_rows: int | None = None
) -> Tensor:
    """Log-probabilities at given ids: hidden [R, H], ids int64 [R, k] → float32 [R, k]. Untruncated, no gradient."""
    _check(hidden, ids, temperature)
    out = hidden.new_empty(ids.shape, dtype=wide(head.weight.dtype))
    for rows, logprobs in streamed_logprobs(hidden, head, temperature, chunk_rows):
        out[rows] = logprobs.gather(1, ids[rows])
    return out


@torch.no_grad()
def top_logprobs(
    hidden: Tensor, head: Head, k: int, temperature: float, *, chunk_rows: int | None = None
) -> tuple[Tensor, Tensor]:
    """The k likeliest tokens per row: ids int64 [R, k], log-probabilities float32 [R, k], likeliest first."""
    ids, values = [], []
    for _, logprobs in streamed_logprobs(hidden, head, temperature, chunk_rows):
        top = logprobs.topk(k, dim=-1)
        ids.append(top.indices)
        values.append(top.values)
    return torch.cat(ids), torch.cat(values)


@torch.no_grad()
def acceptance_rates(
    hidden_p: Tensor,
    head_p: Head,
    hidden_q: Tensor,
    head_q: Head,
    temperature: float,
    *,
    chunk_rows: int | None = None,
) -> Tensor:
    """alpha = sum_v min(p(v), q(v)) over the whole vocabulary, float32 [R] in [0, 1].

    Sparrow, arXiv 2606.08446: policy p (dense), sampler q (sparse), both at `temperature`, both untruncated.
    """
    if hidden_p.shape[0] != hidden_q.shape[0]:
        raise UserError(
            f"acceptance of {hidden_p.shape[0]} policy rows and {hidden_q.shape[0]} sampler rows; score the same tokens."
        )
    chunk = chunk_rows or default_chunk_rows(head_p.weight.shape[0])
    out = hidden_p.new_empty(hidden_p.shape[0], dtype=torch.float32)
    p_stream = streamed_logprobs(hidden_p, head_p, temperature, chunk)
    q_stream = streamed_logprobs(hidden_q, head_q, temperature, chunk)
    for (rows, log_p), (_, log_q) in zip(p_stream, q_stream, strict=True):
        out[rows] = torch.minimum(log_p, log_q).exp_().sum(dim=-1).clamp_(max=1.0).float()
    return out


def streamed_logprobs(
    hidden: Tensor, head: Head, temperature: float, chunk_rows: int | None = None
) -> Iterator[tuple[slice, Tensor]]:
    """Chunks of full log-probabilities [n, V]."""
    _check(hidden, None, temperature)
    tempered = TemperedHead.of(head, temperature, hidden.shape[0])
    for rows in chunks(hidden.shape[0], chunk_rows or default_chunk_rows(head.weight.shape[0])):
        with torch.autocast(hidden.device.type, enabled=False):
            logprobs = tempered.logits(hidden[rows]).log_softmax(dim=-1)
        yield rows, logprobs


def _check(hidden: Tensor, targets: Tensor | None, temperature: float) -> None:
    if not temperature > 0.0:
        raise ConfigError(
            f"temperature is {temperature}; expected a positive number. Greedy completions have no log-probabilities to score; "
            "score them at the temperature of the policy, 1.0 say."
        )
    if hidden.ndim != 2 or (targets is not None and targets.shape[0] != hidden.shape[0]):
        got = "none" if targets is None else tuple(targets.shape)
        raise UserError(
            f"hidden states of shape {tuple(hidden.shape)} with ids of shape {got}; expected [R, H] and [R, ...]."
        )
