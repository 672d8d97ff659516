"""The language-model head, streamed over rows: log-probs, entropies, gathers and acceptance without [tokens, vocabulary].

Legend: R rows (tokens to score), H hidden size, V vocabulary. Logits are what `LmHead.logits` gives: the product in the weight's
dtype, then float32 (float64 for float64 weights): `softcap·tanh(scale·z / softcap)`, divided by the temperature.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from leanroll.errors import ConfigError, UserError

CHUNK_BYTES = 100 * 2**20
"""Float32 logits of one chunk: 530 rows at a vocabulary of 49,152."""


class Head(Protocol):
    """The part of `LmHead` that is needed here. weight [V, H]; bias [V] or None; softcap: 0 for none; scale: factor on logits."""

    weight: Tensor
    bias: Tensor | None
    softcap: float
    scale: float


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


@dataclass(frozen=True, slots=True)
class _Transform:
    """From the product z to tempered logits: softcap·tanh(scale·z / softcap) / temperature."""

    scale: float
    softcap: float
    temperature: float

    def logits(self, z: Tensor) -> Tensor:
        """Tempered logits; may overwrite z."""
        x = z.to(torch.promote_types(z.dtype, torch.float32))
        if self.scale != 1.0:
            x = x.mul_(self.scale)
        if self.softcap:
            x = x.div_(self.softcap).tanh_().mul_(self.softcap)
        return x.div_(self.temperature) if self.temperature != 1.0 else x

    def chain_(self, grad: Tensor, tempered: Tensor | None) -> Tensor:
        """Gradient with respect to the tempered logits → with respect to z, in place."""
        if self.softcap:
            assert tempered is not None
            grad.mul_(1.0 - (tempered * (self.temperature / self.softcap)).square())
        factor = self.scale / self.temperature
        return grad.mul_(factor) if factor != 1.0 else grad


@dataclass(frozen=True, slots=True)
class _Autocast:
    """The autocast state of the forward, so that the backward computes the same products."""

    device: str
    enabled: bool
    dtype: torch.dtype

    @classmethod
    def current(cls, device: str) -> _Autocast:
        return cls(device, torch.is_autocast_enabled(device), torch.get_autocast_dtype(device))

    def context(self) -> torch.autocast:
        return torch.autocast(self.device, dtype=self.dtype, enabled=self.enabled)


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
    transform = _Transform(float(head.scale), float(head.softcap or 0.0), float(temperature))
    rows = chunk_rows or default_chunk_rows(head.weight.shape[0])
    needs_grad = torch.is_grad_enabled()
    logprobs, entropy = _TokenLogprobs.apply(
        hidden, head.weight, head.bias, targets, support, transform, rows, with_entropy, needs_grad
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
        transform: _Transform,
        chunk: int,
        with_entropy: bool,
        needs_grad: bool,
    ) -> tuple[Tensor, Tensor]:
        dtype = torch.promote_types(weight.dtype, torch.float32)
        num_rows = hidden.shape[0]
        logprobs = hidden.new_empty(num_rows, dtype=dtype)
        entropy = hidden.new_empty(num_rows if with_entropy else 0, dtype=dtype)
        norms = hidden.new_empty(num_rows, dtype=dtype)
        head_grad = needs_grad and (weight.requires_grad or (bias is not None and bias.requires_grad))
        # d logprob / d hidden of a row is independent of the other rows, so it can be made here and scaled later.
        jacobian = torch.empty_like(hidden) if needs_grad and hidden.requires_grad and not head_grad else None
        for rows in _chunks(num_rows, chunk):
            x = transform.logits(F.linear(hidden[rows].to(weight.dtype), weight, bias))
            if support is not None:
                support.apply(x, rows.start)
            norm = x.logsumexp(dim=-1)
            norms[rows] = norm
            logprobs[rows] = x.gather(1, targets[rows, None]).squeeze(1) - norm
            if not with_entropy and jacobian is None:
                continue
            p = (x - norm[:, None]).exp_()
            if with_entropy:
                weighted = p * x if support is None else torch.where(p > 0, p * x, 0.0)
                entropy[rows] = norm - weighted.sum(dim=-1)
            if jacobian is not None:
                dz = _logprob_grad(p, targets[rows], transform, x)
                jacobian[rows] = (dz.to(weight.dtype) @ weight).to(hidden.dtype)
        ctx.mark_non_differentiable(entropy)
        ctx.settings = (support, transform, chunk, _Autocast.current(hidden.device.type))
        ctx.has_jacobian = jacobian is not None
        if jacobian is not None:
            ctx.save_for_backward(jacobian)
        else:
            ctx.save_for_backward(hidden, weight, bias, targets, norms)
        return logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, _grad_entropy: Tensor) -> tuple[Tensor | None, ...]:
        nothing = (None,) * 6
        if ctx.has_jacobian:
            (jacobian,) = ctx.saved_tensors
            return (jacobian * grad[:, None].to(jacobian.dtype), None, None, *nothing)
        hidden, weight, bias, targets, norms = ctx.saved_tensors
        support, transform, chunk, autocast = ctx.settings
        need_hidden, need_weight, need_bias = ctx.needs_input_grad[:3]
        # Chunks are summed in float32: in bfloat16 the later ones would be rounded away.
        wide = norms.dtype
        grad_hidden = torch.empty_like(hidden) if need_hidden else None
        grad_weight = torch.zeros_like(weight, dtype=wide) if need_weight else None
        grad_bias = torch.zeros_like(bias, dtype=wide) if need_bias else None
        with autocast.context():
            for rows in _chunks(hidden.shape[0], chunk):
                h = hidden[rows].to(weight.dtype)
                x = transform.logits(F.linear(h, weight, bias))
                if support is not None:
                    support.apply(x, rows.start)
                p = (x - norms[rows, None]).exp_()
                dz = _logprob_grad(p, targets[rows], transform, x).mul_(grad[rows, None])
                if grad_bias is not None:
                    grad_bias += dz.sum(dim=0)
                dz = dz.to(weight.dtype)
                if grad_hidden is not None:
                    grad_hidden[rows] = (dz @ weight).to(hidden.dtype)
                if grad_weight is not None:
                    grad_weight += (dz.T @ h).to(wide)
        return (
            grad_hidden,
            None if grad_weight is None else grad_weight.to(weight.dtype),
            None if grad_bias is None else grad_bias.to(bias.dtype),
            *nothing,
        )


def _logprob_grad(p: Tensor, targets: Tensor, transform: _Transform, tempered: Tensor) -> Tensor:
    """d logprob / d z from the probabilities, which it overwrites."""
    dz = p.neg_()
    dz.scatter_add_(1, targets[:, None], torch.ones_like(targets, dtype=dz.dtype)[:, None])
    if transform.softcap:
        # Outside a support p is 0 and the logit -inf; the product would be NaN.
        tempered = tempered.masked_fill(tempered == -torch.inf, 0.0)
    return transform.chain_(dz, tempered)


@torch.no_grad()
def gather_logprobs(
    hidden: Tensor, head: Head, ids: Tensor, temperature: float, *, chunk_rows: int | None = None
) -> Tensor:
    """Log-probabilities at given ids: hidden [R, H], ids int64 [R, k] → float32 [R, k]. Untruncated, no gradient."""
    _check(hidden, ids, temperature)
    out = hidden.new_empty(ids.shape, dtype=torch.promote_types(head.weight.dtype, torch.float32))
    for rows, logprobs in _streamed(hidden, head, temperature, chunk_rows):
        out[rows] = logprobs.gather(1, ids[rows])
    return out


@torch.no_grad()
def top_logprobs(
    hidden: Tensor, head: Head, k: int, temperature: float, *, chunk_rows: int | None = None
) -> tuple[Tensor, Tensor]:
    """The k likeliest tokens per row: ids int64 [R, k], log-probabilities float32 [R, k], likeliest first."""
    ids, values = [], []
    for _, logprobs in _streamed(hidden, head, temperature, chunk_rows):
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
    p_stream = _streamed(hidden_p, head_p, temperature, chunk)
    q_stream = _streamed(hidden_q, head_q, temperature, chunk)
    for (rows, log_p), (_, log_q) in zip(p_stream, q_stream, strict=True):
        out[rows] = torch.minimum(log_p, log_q).exp_().sum(dim=-1).clamp_(max=1.0).float()
    return out


def default_chunk_rows(vocab_size: int) -> int:
    """Rows per chunk that fit `CHUNK_BYTES` of float32 logits."""
    return max(16, CHUNK_BYTES // (4 * vocab_size))


def _streamed(hidden: Tensor, head: Head, temperature: float, chunk_rows: int | None) -> Iterator[tuple[slice, Tensor]]:
    """Chunks of full log-probabilities [n, V]."""
    _check(hidden, None, temperature)
    transform = _Transform(float(head.scale), float(head.softcap or 0.0), float(temperature))
    for rows in _chunks(hidden.shape[0], chunk_rows or default_chunk_rows(head.weight.shape[0])):
        yield (
            rows,
            transform.logits(F.linear(hidden[rows].to(head.weight.dtype), head.weight, head.bias)).log_softmax(dim=-1),
        )


def _chunks(num_rows: int, chunk: int) -> Iterator[slice]:
    for start in range(0, num_rows, chunk):
        yield slice(start, min(start + chunk, num_rows))


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
