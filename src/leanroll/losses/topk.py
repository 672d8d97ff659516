"""Distillation from the teacher's likeliest tokens alone: their log-probs, and one bucket for all the rest.

With S the teacher's top k together with the sampled token, R the other ids, p student and q teacher, r_i = log(p_i / q_i):

    L = sum_S p_i r_i + p_R r_R        dL/dx_j = p_j (r_e(j) - L), e(j): j itself in S, else R

L is a lower bound of the full reverse KL (the rest's shape is not compared), and its gradient is not the full one. Without the
bucket it would not be a divergence at all: it could fall below 0, and would not see mass that leaves S.

Ids are outcomes that both sides share: the ids of a vocabulary, or the outcomes of a `SharedVocabulary`, its stop class among them.

Legend: R tokens (rows), n of a chunk, H hidden size, V a head's vocabulary, C outcomes, k + 1 slots.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from leanroll.errors import ConfigError, UserError
from leanroll.losses.vocabulary import Side
from leanroll.measure.streaming import Head, Scratch, TemperedHead, chunks, row_function_rows, row_values, wide

TAIL_FLOOR = 1e-6
"""Default of the smallest q_R: log-probs in float32 say no more about what is left of 1."""
LOGPROB_TOLERANCE = 0.01
"""By how much log-probs, or the logarithm of their sum, may exceed 0: those that were stored in bfloat16 do."""


@dataclass(frozen=True, slots=True)
class TeacherTopk:
    """What a teacher leaves of R tokens, at kl_temperature; without gradient.

    ids: int64 [R, k + 1], outcomes; -1 is an unused slot. logprobs: [R, k + 1], among all outcomes; -inf in an unused slot.
    entropy: [R] nats, of all outcomes. dropped: [R], probability on ids that are no outcome, before the rest was renormalised.
    """

    ids: Tensor
    logprobs: Tensor
    entropy: Tensor
    dropped: Tensor

    @classmethod
    def join(cls, parts: Sequence[TeacherTopk]) -> TeacherTopk:
        """Rows one after the other; at least one part."""
        return cls(*(torch.cat([getattr(part, field.name) for part in parts]) for field in fields(cls)))

    def split(self, lengths: Sequence[int]) -> list[TeacherTopk]:
        """The inverse of `join`."""
        pieces = [getattr(self, field.name).split(list(lengths)) for field in fields(self)]
        return [TeacherTopk(*piece) for piece in zip(*pieces, strict=True)]

    def to(self, device: torch.device | str) -> TeacherTopk:
        """The same on a device."""
        return TeacherTopk(*(getattr(self, field.name).to(device) for field in fields(self)))


@dataclass(frozen=True, slots=True)
class TopkDivergence:
    """Per token, all [R]; only the loss has a gradient. All at kl_temperature.

    loss: weight · divergence. divergence: L, nats, without weight. student_tail: p_R. teacher_tail: q_R as used. clamped: bool, q_R
    was below the floor; its mean is the clamp rate. student_entropy: nats, of all outcomes. student_top1: the largest p.
    student_dropped: probability on ids that are no outcome.
    """

    loss: Tensor
    divergence: Tensor
    student_tail: Tensor
    teacher_tail: Tensor
    clamped: Tensor
    student_entropy: Tensor
    student_top1: Tensor
    student_dropped: Tensor


@torch.no_grad()
def teacher_topk(
    hidden: Tensor,
    head: Head,
    k: int,
    sampled: Tensor,
    *,
    side: Side | None = None,
    kl_temperature: float = 1.0,
    chunk_rows: int | None = None,
) -> TeacherTopk:
    """What `topk_divergence` needs of a teacher, streamed: [R, V] never exists.

    The last slot is the sampled token, or unused where that is among the k likeliest.

    Args:
        hidden: [R, H]. sampled: int64 [R], outcomes of the student's tokens (`Side.outcomes` of the student's side).
        side: the teacher's. None: every id is an outcome.

    Raises:
        ConfigError: k is not in 1 … C, or the temperature is not positive. UserError: shapes or sampled ids do not fit.
    """
    _check_temperature(kl_temperature)
    side = side or Side.whole(head.weight.shape[0], hidden.device)
    size = side.num_outcomes
    if not 1 <= k <= size:
        raise ConfigError(f"k is {k} with a vocabulary of {size}; expected 1 to {size}.")
    if hidden.ndim != 2 or sampled.shape != hidden.shape[:1]:
        raise UserError(
            f"{tuple(sampled.shape)} sampled tokens for hidden states {tuple(hidden.shape)}; expected [R] and [R, H]."
        )
    if sampled.numel() and not 0 <= int(sampled.min()) <= int(sampled.max()) < size:
        raise UserError(
            f"Sampled ids run from {int(sampled.min())} to {int(sampled.max())}; expected ids of the teacher, 0 to {size - 1}. "
            "Mask the student's own ids in sampling."
        )
    num_rows, dtype = hidden.shape[0], wide(head.weight.dtype)
    ids, values = sampled.new_empty(num_rows, k + 1), hidden.new_empty(num_rows, k + 1, dtype=dtype)
    entropy, dropped = (hidden.new_empty(num_rows, dtype=dtype) for _ in range(2))
    tempered, scratch = TemperedHead.of(head, kl_temperature, num_rows), Scratch()
    with torch.autocast(hidden.device.type, enabled=False):
        for rows in chunks(num_rows, chunk_rows or row_function_rows(head.weight.shape[0])):
            y = scratch.logits("logits", tempered, hidden[rows])
            log_q, dropped[rows] = side.log_probs(y, scratch, "log q")
            entropy[rows] = -scratch.dot(torch.exp(log_q, out=y[:, :size]), log_q)
            top, own = log_q.topk(k, dim=-1), sampled[rows, None]
            there = (top.indices == own).any(dim=-1, keepdim=True)
            ids[rows] = torch.cat([top.indices, own.masked_fill(there, -1)], dim=-1)
            values[rows] = torch.cat([top.values, log_q.gather(1, own).masked_fill(there, -torch.inf)], dim=-1)
    return TeacherTopk(ids, values, entropy, dropped)


def topk_divergence(
    hidden: Tensor,
    head: Head,
    ids: Tensor,
    teacher_logprobs: Tensor,
    *,
    side: Side | None = None,
    weights: Tensor | None = None,
    kl_temperature: float = 1.0,
    tail_floor: float = TAIL_FLOOR,
    chunk_rows: int | None = None,
) -> TopkDivergence:
    """Weighted reverse KL per token on the teacher's top k, the sampled token and the rest; its sum is the loss of a micro-batch.

    Differentiable in hidden, head.weight and head.bias, streamed like `divergence`.

    Args:
        hidden: [R, H], the student's. ids: int64 [R, k + 1], outcomes, different ones per row; -1 is an unused slot (never the
            first).
        teacher_logprobs: [R, k + 1], among all outcomes of the teacher at kl_temperature; not raw logits.
        side: the student's. None: every id is an outcome.
        weights: [R], without gradient; None is 1.
        tail_floor: smallest q_R. A rest without ids (S is all outcomes) counts 0.
        chunk_rows: rows per chunk; None fits `CHUNK_BYTES`.

    Raises:
        ConfigError: temperature or floor out of range. UserError: shapes, ids or log-probs do not fit.
    """
    _check_temperature(kl_temperature)
    if not 0.0 < tail_floor < 1.0:
        raise ConfigError(f"tail_floor is {tail_floor}; expected a probability between 0 and 1, both excluded.")
    _check_shapes(hidden, head, ids, teacher_logprobs, weights)
    side = side or Side.whole(head.weight.shape[0], hidden.device)
    used = _check_slots(ids, teacher_logprobs, side.num_outcomes)
    num_rows, dtype = hidden.shape[0], wide(head.weight.dtype)

    log_q = teacher_logprobs.detach().to(dtype).masked_fill(~used, -torch.inf)
    left = -torch.expm1(log_q.logsumexp(dim=-1).clamp(max=0.0))
    whole = used.sum(dim=-1) == side.num_outcomes
    tail = left.clamp(min=tail_floor)
    dtypes = {field.name: dtype for field in fields(TopkDivergence)}
    result = TopkDivergence(**{name: hidden.new_empty(num_rows, dtype=d) for name, d in dtypes.items()})
    result = replace(result, teacher_tail=tail.masked_fill(whole, 0.0), clamped=(left < tail_floor) & ~whole)
    function = _CompareTopk(side, ids, used, log_q, tail.log(), result)
    rows = chunk_rows or row_function_rows(head.weight.shape[0])
    loss = row_values(hidden, TemperedHead.of(head, kl_temperature, num_rows), function, rows)
    return replace(result, loss=loss if weights is None else loss * weights.detach().to(dtype))


@dataclass(frozen=True, slots=True)
class _CompareTopk:
    """The divergence of a chunk of rows (a `RowFunction`); fills in the student's fields of `result`."""

    side: Side
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
        log_p, dropped = self.side.log_probs(x, scratch, "log p")
        p = torch.exp(log_p, out=scratch.like("p", log_p))
        if first:
            self.result.student_dropped[rows] = dropped
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
        return value, self.side.logits_grad(p.mul_((r_tail - value)[:, None]).scatter_(1, ids, slots), x)


def _check_temperature(kl_temperature: float) -> None:
    if not 0.0 < kl_temperature < math.inf:
        raise ConfigError(
            f"kl_temperature is {kl_temperature}; expected a positive number, the same one for both sides."
        )


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
            "an unused slot that is not a token's first. Vocabularies that differ need the student's `side`."
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
