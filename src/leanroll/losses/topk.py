"""Distillation from the teacher's likeliest tokens alone: their log-probs, and one bucket for all the rest.

With S the teacher's top k together with the sampled token, R the other ids, p student and q teacher, r_i = log(p_i / q_i):

    L = sum_S p_i r_i + p_R r_R        dL/dx_j = p_j (r_e(j) - L), e(j): j itself in S, else R

L is a lower bound of the full reverse KL (the rest's shape is not compared), and its gradient is not the full one. Without the
bucket it would not be a divergence at all: it could fall below 0, and would not see mass that leaves S.

Legend: R tokens (rows), n of a chunk, H hidden size, V the student's vocabulary, k + 1 slots.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from leanroll.errors import ConfigError, UserError
from leanroll.measure.head import streamed_logprobs
from leanroll.measure.streaming import Head, Scratch, TemperedHead, row_function_rows, row_values, wide

TAIL_FLOOR = 1e-6
"""Default of the smallest q_R: log-probs in float32 say no more about what is left of 1."""
LOGPROB_TOLERANCE = 0.01
"""By how much log-probs, or the logarithm of their sum, may exceed 0: those that were stored in bfloat16 do."""


@dataclass(frozen=True, slots=True)
class TopkDivergence:
    """Per token, all [R]; only the loss has a gradient. All at kl_temperature.

    loss: weight · divergence. divergence: L, nats, without weight. student_tail: p_R. teacher_tail: q_R as used. clamped: bool, q_R
    was below the floor; its mean is the clamp rate. student_entropy: nats, full vocabulary. student_top1: the largest p.
    """

    loss: Tensor
    divergence: Tensor
    student_tail: Tensor
    teacher_tail: Tensor
    clamped: Tensor
    student_entropy: Tensor
    student_top1: Tensor


@torch.no_grad()
def teacher_topk(
    hidden: Tensor, head: Head, k: int, sampled: Tensor, *, kl_temperature: float = 1.0, chunk_rows: int | None = None
) -> tuple[Tensor, Tensor]:
    """What `topk_divergence` needs of a teacher: ids int64 [R, k + 1] and their log-probs over the full vocabulary [R, k + 1].

    The last slot is the sampled token, or unused (id -1, log-prob -inf) where that is among the k likeliest.

    Args:
        hidden: [R, H]. sampled: int64 [R], the student's tokens.

    Raises:
        ConfigError: k is not in 1 … V, or the temperature is not positive. UserError: shapes or sampled ids do not fit.
    """
    size = head.weight.shape[0]
    if not 1 <= k <= size:
        raise ConfigError(f"k is {k} with a vocabulary of {size}; expected 1 to {size}.")
    if sampled.shape != hidden.shape[:1]:
        raise UserError(f"{tuple(sampled.shape)} sampled tokens for hidden states {tuple(hidden.shape)}; expected [R].")
    if sampled.numel() and not 0 <= int(sampled.min()) <= int(sampled.max()) < size:
        raise UserError(
            f"Sampled ids run from {int(sampled.min())} to {int(sampled.max())}; expected ids of the teacher, 0 to {size - 1}. "
            "Mask the student's own ids in sampling."
        )
    ids = sampled.new_empty(hidden.shape[0], k + 1)
    values = hidden.new_empty(hidden.shape[0], k + 1, dtype=wide(head.weight.dtype))
    for rows, log_q in streamed_logprobs(hidden, head, kl_temperature, chunk_rows):
        top, own = log_q.topk(k, dim=-1), sampled[rows, None]
        there = (top.indices == own).any(dim=-1, keepdim=True)
        ids[rows] = torch.cat([top.indices, own.masked_fill(there, -1)], dim=-1)
        values[rows] = torch.cat([top.values, log_q.gather(1, own).masked_fill(there, -torch.inf)], dim=-1)
    return ids, values


def topk_divergence(
    hidden: Tensor,
    head: Head,
    ids: Tensor,
    teacher_logprobs: Tensor,
    *,
    weights: Tensor | None = None,
    kl_temperature: float = 1.0,
    tail_floor: float = TAIL_FLOOR,
    chunk_rows: int | None = None,
) -> TopkDivergence:
    """Weighted reverse KL per token on the teacher's top k, the sampled token and the rest; its sum is the loss of a micro-batch.

    Differentiable in hidden, head.weight and head.bias, streamed like `divergence`. Compares ids as they are: the student must have
    all ids given, and there is no stop class.

    Args:
        hidden: [R, H], the student's. ids: int64 [R, k + 1], different ones per row; -1 is an unused slot (never the first).
        teacher_logprobs: [R, k + 1], of the teacher's full vocabulary at kl_temperature; not raw logits.
        weights: [R], without gradient; None is 1.
        tail_floor: smallest q_R. A rest without ids (S is the whole vocabulary) counts 0.
        chunk_rows: rows per chunk; None fits `CHUNK_BYTES`.

    Raises:
        ConfigError: temperature or floor out of range. UserError: shapes, ids or log-probs do not fit.
    """
    if not 0.0 < kl_temperature < math.inf:
        raise ConfigError(
            f"kl_temperature is {kl_temperature}; expected a positive number, that of the teacher's log-probs."
        )
    if not 0.0 < tail_floor < 1.0:
        raise ConfigError(f"tail_floor is {tail_floor}; expected a probability between 0 and 1, both excluded.")
    _check_shapes(hidden, head, ids, teacher_logprobs, weights)
    used = _check_slots(ids, teacher_logprobs, head.weight.shape[0])
    num_rows, dtype = hidden.shape[0], wide(head.weight.dtype)

    log_q = teacher_logprobs.detach().to(dtype).masked_fill(~used, -torch.inf)
    left = -torch.expm1(log_q.logsumexp(dim=-1).clamp(max=0.0))
    whole = used.sum(dim=-1) == head.weight.shape[0]
    tail = left.clamp(min=tail_floor)
    dtypes = {field.name: dtype for field in fields(TopkDivergence)}
    result = TopkDivergence(**{name: hidden.new_empty(num_rows, dtype=d) for name, d in dtypes.items()})
    result = replace(result, teacher_tail=tail.masked_fill(whole, 0.0), clamped=(left < tail_floor) & ~whole)
    function = _CompareTopk(ids, used, log_q, tail.log(), result)
    rows = chunk_rows or row_function_rows(head.weight.shape[0])
    loss = row_values(hidden, TemperedHead.of(head, kl_temperature, num_rows), function, rows)
    return replace(result, loss=loss if weights is None else loss * weights.detach().to(dtype))


@dataclass(frozen=True, slots=True)
class _CompareTopk:
    """The divergence of a chunk of rows (a `RowFunction`); fills in the student's fields of `result`."""

    ids: Tensor
    used: Tensor
    log_q: Tensor
    log_tail: Tensor
    result: TopkDivergence

    def __call__(
        self, x: Tensor, rows: slice, scratch: Scratch, *, first: bool, with_grad: bool
    ) -> tuple[Tensor, Tensor | None]:
        used = self.used[rows]
        # An unused slot repeats the first one, so that scattering the same value there changes nothing.
        ids = torch.where(used, self.ids[rows], self.ids[rows, :1])
        log_p = torch.log_softmax(x, dim=-1, out=scratch.like("log p", x))
        p = torch.exp(log_p, out=scratch.like("p", x))
        if first:
            self.result.student_entropy[rows] = -scratch.dot(p, log_p)
            self.result.student_top1[rows] = log_p.amax(dim=-1).exp()
        log_p_slots, p_slots = log_p.gather(1, ids), p.gather(1, ids)
        r = (log_p_slots - self.log_q[rows]).masked_fill(~used, 0.0)
        # Summed over the rest itself: 1 minus the slots would be rounding noise where the rest is small.
        log_p_tail = log_p.scatter_(1, ids, -torch.inf).logsumexp(dim=-1)
        p_tail = log_p_tail.exp()
        r_tail = (log_p_tail - self.log_tail[rows]).masked_fill(log_p_tail == -torch.inf, 0.0)
        value = (p_slots * r).sum(dim=-1) + p_tail * r_tail
        if first:
            self.result.divergence[rows], self.result.student_tail[rows] = value, p_tail
        if not with_grad:
            return value, None
        slots = p_slots * (r - value[:, None])
        slots = torch.where(used, slots, slots[:, :1])
        return value, p.mul_((r_tail - value)[:, None]).scatter_(1, ids, slots)


def _check_shapes(hidden: Tensor, head: Head, ids: Tensor, logprobs: Tensor, weights: Tensor | None) -> None:
    if hidden.ndim != 2 or hidden.shape[1] != head.weight.shape[1]:
        raise UserError(
            f"hidden states of shape {tuple(hidden.shape)} with a head of {tuple(head.weight.shape)}; expected [R, H] and [V, H]."
        )
    if ids.ndim != 2 or ids.shape != logprobs.shape or ids.shape[0] != hidden.shape[0] or ids.shape[1] == 0:
        raise UserError(
            f"ids of shape {tuple(ids.shape)} and log-probs of {tuple(logprobs.shape)} for {hidden.shape[0]} tokens; expected "
            "[R, k + 1] twice, as `teacher_topk` makes them."
        )
    if weights is not None and weights.shape != hidden.shape[:1]:
        raise UserError(
            f"weights of shape {tuple(weights.shape)} for {hidden.shape[0]} tokens; expected one per token."
        )


def _check_slots(ids: Tensor, logprobs: Tensor, size: int) -> Tensor:
    """bool [R, k + 1], the slots in use."""
    used = ids >= 0
    if ids.numel() == 0:
        return used
    ordered = ids.sort(dim=-1).values
    if bool(((ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)).any()):
        raise UserError("Some token has the same id in two slots; expected different ids. Set the second one to -1.")
    if int(ids.min()) < -1 or int(ids.max()) >= size or not bool(used[:, 0].all()):
        raise UserError(
            f"Teacher ids run from {int(ids.min())} to {int(ids.max())}; expected ids of the student, 0 to {size - 1}, or -1 for "
            "an unused slot that is not a token's first. For other vocabularies use `divergence`."
        )
    kept = logprobs.detach().float().masked_fill(~used, -torch.inf)
    largest, total = float(kept.max()), float(kept.logsumexp(dim=-1).max())
    finite = bool(kept.masked_fill(~used, 0.0).isfinite().all())
    if not (finite and largest <= LOGPROB_TOLERANCE and total <= LOGPROB_TOLERANCE):
        raise UserError(
            f"Teacher log-probs: the largest is {largest:.4g}, the largest logarithm of a token's sum {total:.4g}; expected finite "
            "numbers, at most 0 both. Raw logits will not do: subtract their logsumexp over the teacher's full vocabulary."
        )
    return used
