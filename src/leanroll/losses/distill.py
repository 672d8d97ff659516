"""On-policy distillation: the divergence of a student from a teacher over the full vocabulary, fused with both heads.

Rows of hidden states are streamed in chunks through both heads; the gradient is analytic and [tokens, vocabulary] never exists.

Legend: R tokens of a micro-batch, n of a chunk, H hidden sizes, V vocabulary sizes, C outcomes that both sides share
(`SharedVocabulary`), N trajectories. p student, q teacher, both softmax(logits / kl_temperature) on the outcomes,
r = log p - log q, x = the student's logits / kl_temperature.

| kind | per token | d / dx_j |
|---|---|---|
| reverse_kl | L = sum p r | p_j (r_j - L) |
| forward_kl | -sum q r | p_j - q_j |
| jsd | beta KL(q‖m) + (1 - beta) KL(p‖m), m = beta q + (1 - beta) p | p_j (f_j - sum p f), f = (1 - beta) log(p / m) |

Sources: early-stopped rollouts (arXiv 2605.27028), generalised JSD (arXiv 2306.13649; beta as there, the teacher's share of m).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from typing import Literal, get_args

import torch
from torch import Tensor

from leanroll.errors import ConfigError, UserError
from leanroll.losses.vocabulary import SharedVocabulary
from leanroll.measure.streaming import Head, Scratch, TemperedHead, row_function_rows, row_values, wide

DivergenceKind = Literal["reverse_kl", "forward_kl", "jsd"]
Normalizer = Literal["trajectory_mean", "token_mean", "sum"]


@dataclass(frozen=True, slots=True)
class Divergence:
    """Per token, all [R]; only the loss has a gradient. Everything else is of p and q as compared, so at kl_temperature.

    loss: weight · divergence. reverse_kl, forward_kl: KL(p‖q) and KL(q‖p), nats, without weight.
    student_entropy, teacher_entropy: nats. student_top1: the largest p. teacher_rank: int64, rank of that outcome under q, 1 for
    the likeliest (ties count as better for the student). student_dropped, teacher_dropped: probability on ids that are no outcome,
    before p and q were renormalised.
    """

    loss: Tensor
    reverse_kl: Tensor
    forward_kl: Tensor
    student_entropy: Tensor
    teacher_entropy: Tensor
    student_top1: Tensor
    teacher_rank: Tensor
    student_dropped: Tensor
    teacher_dropped: Tensor


def divergence(
    student_hidden: Tensor,
    student_head: Head,
    teacher_hidden: Tensor,
    teacher_head: Head,
    *,
    weights: Tensor | None = None,
    kind: DivergenceKind = "reverse_kl",
    beta: float | None = None,
    kl_temperature: float = 1.0,
    vocabulary: SharedVocabulary | None = None,
    chunk_rows: int | None = None,
) -> Divergence:
    """Weighted divergence per token; its sum is the loss of a micro-batch.

    Differentiable in student_hidden, student_head.weight and student_head.bias; the teacher is never differentiated. If only the
    hidden states need a gradient, it is computed in the forward; otherwise the backward streams both heads once more.

    Args:
        student_hidden: [R, H_s]. teacher_hidden: [R, H_t], of the same tokens in the teacher's context.
        weights: [R], `token_weights(...)[sample_ids]` for one; without gradient. None is 1.
        beta: for `jsd` alone, in (0, 1): near 0 the gradient is that of beta · KL(q‖p), near 1 that of (1 - beta) · KL(p‖q).
        kl_temperature: divides the logits of both sides. Gradients are not multiplied by its square.
        vocabulary: the ids compared and the stop class; None compares all ids of two vocabularies of one size.
        chunk_rows: rows per chunk; None fits `CHUNK_BYTES`.

    Raises:
        ConfigError: unknown kind, beta or temperature out of range, vocabularies of different sizes.
        UserError: shapes do not fit.
    """
    _check_options(kind, beta, kl_temperature)
    _check_shapes(student_hidden, student_head, teacher_hidden, teacher_head, weights)
    sizes = (student_head.weight.shape[0], teacher_head.weight.shape[0])
    if vocabulary is None:
        vocabulary = SharedVocabulary.of(*sizes, device=student_hidden.device)
    if (vocabulary.student.size, vocabulary.teacher.size) != sizes:
        raise UserError(
            f"The vocabulary is for {vocabulary.student.size} student and {vocabulary.teacher.size} teacher ids, the heads have "
            f"{sizes[0]} and {sizes[1]}; make it with SharedVocabulary.of({sizes[0]}, {sizes[1]}, …)."
        )
    num_rows, dtype = student_hidden.shape[0], wide(student_head.weight.dtype)
    dtypes = {field.name: dtype for field in fields(Divergence)} | {"teacher_rank": torch.int64}
    result = Divergence(**{name: student_hidden.new_empty(num_rows, dtype=d) for name, d in dtypes.items()})
    student = TemperedHead.of(student_head, kl_temperature, num_rows)
    # A model that teaches itself has one head; its widened copy is made once.
    teacher = student if teacher_head is student_head else TemperedHead.of(teacher_head, kl_temperature, num_rows)
    compare = _Compare(teacher, teacher_hidden.detach(), vocabulary, kind, beta, result)
    rows = chunk_rows or row_function_rows(max(sizes))
    loss = row_values(student_hidden, student, compare, rows)
    return replace(result, loss=loss if weights is None else loss * weights.detach().to(dtype))


@dataclass(frozen=True, slots=True)
class _Compare:
    """The divergence of a chunk of rows (a `RowFunction`); fills in the fields of `result` but the loss."""

    teacher: TemperedHead
    teacher_hidden: Tensor
    vocabulary: SharedVocabulary
    kind: DivergenceKind
    beta: float | None
    result: Divergence

    def __call__(
        self, x: Tensor, rows: slice, scratch: Scratch, *, first: bool, with_grad: bool
    ) -> tuple[Tensor, Tensor | None]:
        y = scratch.logits("teacher logits", self.teacher, self.teacher_hidden[rows]).to(x.dtype)
        log_p, student_dropped = self.vocabulary.student.log_probs(x, scratch, "log p")
        log_q, teacher_dropped = self.vocabulary.teacher.log_probs(y, scratch, "log q")
        p = torch.exp(log_p, out=scratch.like("p", log_p))
        q = torch.exp(log_q, out=y[:, : log_q.shape[1]])
        if first:
            record = self.result
            record.student_dropped[rows], record.teacher_dropped[rows] = student_dropped, teacher_dropped
            record.student_entropy[rows], record.teacher_entropy[rows] = -scratch.dot(p, log_p), -scratch.dot(q, log_q)
            top, best = log_p.max(dim=-1)
            record.student_top1[rows] = top.exp()
            # Counted in floats, which hold every vocabulary: a CPU sums booleans five times slower.
            better = torch.gt(log_q, log_q.gather(1, best[:, None]), out=scratch.like("product", log_q))
            record.teacher_rank[rows] = 1 + better.sum(dim=-1).long()
        r = torch.sub(log_p, log_q, out=log_q)
        reverse, forward = scratch.dot(p, r), -scratch.dot(q, r)
        if first:
            record.reverse_kl[rows], record.forward_kl[rows] = reverse, forward

        grad: Tensor | None
        if self.kind == "jsd":
            value, grad = _jsd(p, q, r, forward, float(self.beta or 0.0), scratch)
        elif self.kind == "forward_kl":
            value, grad = forward, p.sub_(q) if with_grad else None
        else:
            value, grad = reverse, r.sub_(reverse[:, None]).mul_(p) if with_grad else None
        if grad is None or not with_grad:
            return value, None
        return value, self.vocabulary.student.logits_grad(grad, x)


def _jsd(p: Tensor, q: Tensor, r: Tensor, forward: Tensor, beta: float, scratch: Scratch) -> tuple[Tensor, Tensor]:
    """Value [n] and gradient [n, C]; overwrites r."""
    # log(m / p) = log(1 - beta + beta q / p), where q / p may overflow but its logarithm -r cannot.
    floor = r.new_tensor(math.log1p(-beta))
    log_m = torch.logaddexp(r.neg_().add_(math.log(beta)), floor, out=r)
    student, teacher = scratch.dot(p, log_m), forward - scratch.dot(q, log_m)  # -KL(p‖m) and KL(q‖m)
    value = beta * teacher - (1.0 - beta) * student
    return value, log_m.sub_(student[:, None]).mul_(p).mul_(beta - 1.0)


def token_weights(
    lengths: Tensor,
    normalizer: Normalizer = "trajectory_mean",
    *,
    num_samples: float | None = None,
    num_tokens: float | None = None,
) -> Tensor:
    """The weight of each token of a trajectory, float32 [N]; look it up with the sample ids of a micro-batch's tokens.

    Computed once for a whole optimizer step, so that the sum over micro-batches, however cut, is the same. trajectory_mean: mean
    over the tokens of a trajectory, then over trajectories. token_mean: mean over all tokens. sum: sum over the tokens of a
    trajectory, mean over trajectories.

    Args:
        lengths: [N] tokens per trajectory that enter the loss. One with 0 still counts as a trajectory.
        num_samples, num_tokens: totals of the step over all processes, where `lengths` holds a part of them. Under data
            parallelism that averages gradients, divide both by the number of processes.

    Raises:
        ConfigError: unknown normaliser. UserError: no token at all enters the loss.
    """
    if normalizer not in get_args(Normalizer):
        raise ConfigError(f"The normaliser is {normalizer!r}; expected one of {', '.join(get_args(Normalizer))}.")
    lengths = lengths.float()
    samples = float(lengths.shape[0] if num_samples is None else num_samples)
    tokens = float(lengths.sum()) if num_tokens is None else float(num_tokens)
    if not (tokens > 0.0 and samples > 0.0):
        raise UserError(
            f"{lengths.shape[0]} trajectories with {tokens:g} tokens in the loss; expected at least one. Leave this update out, "
            "or train more tokens: raise max_completion_length, or turn masks off."
        )
    if normalizer == "trajectory_mean":
        return 1.0 / (samples * lengths.clamp(min=1.0))
    return torch.full_like(lengths, 1.0 / (tokens if normalizer == "token_mean" else samples))


def _check_options(kind: str, beta: float | None, kl_temperature: float) -> None:
    if kind not in get_args(DivergenceKind):
        raise ConfigError(f"The divergence is {kind!r}; expected one of {', '.join(get_args(DivergenceKind))}.")
    if kind == "jsd" and (beta is None or not 0.0 < beta < 1.0):
        raise ConfigError(
            f"beta is {beta} with the divergence 'jsd'; expected a number between 0 and 1, both excluded. At the ends use "
            "'forward_kl' (0) or 'reverse_kl' (1)."
        )
    if kind != "jsd" and beta is not None:
        raise ConfigError(f"beta is {beta}, but the divergence {kind!r} has none; leave it out or use 'jsd'.")
    if not 0.0 < kl_temperature < math.inf:
        raise ConfigError(
            f"kl_temperature is {kl_temperature}; expected a positive number, 1.0 to compare the models as they are."
        )


def _check_shapes(
    student_hidden: Tensor, student_head: Head, teacher_hidden: Tensor, teacher_head: Head, weights: Tensor | None
) -> None:
    for side, hidden, head in (("student", student_hidden, student_head), ("teacher", teacher_hidden, teacher_head)):
        if hidden.ndim != 2 or hidden.shape[1] != head.weight.shape[1]:
            raise UserError(
                f"{side} hidden states of shape {tuple(hidden.shape)} with a head of {tuple(head.weight.shape)}; expected "
                "[R, H] and [V, H]. Pass the last hidden states of the tokens in the loss, one row each."
            )
    if student_hidden.shape[0] != teacher_hidden.shape[0]:
        raise UserError(
            f"{student_hidden.shape[0]} student rows and {teacher_hidden.shape[0]} teacher rows; expected one each per token. "
            "Score the same completion tokens with both."
        )
    if weights is not None and weights.shape != student_hidden.shape[:1]:
        raise UserError(
            f"weights of shape {tuple(weights.shape)} for {student_hidden.shape[0]} tokens; expected one per token. "
            "Look the weights of trajectories up with the tokens' sample ids."
        )
