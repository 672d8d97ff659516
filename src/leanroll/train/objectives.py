"""What the student is trained on, per token: the module that computes it, and what it leaves behind for the records.

The divergence over the full vocabulary reads the teacher's hidden states and streams both heads. With `distill.top_k` the teacher
leaves its likeliest tokens instead, [T, k + 1] ids and log-probs, and the update streams the student's head alone. The control
`no_teacher` pushes unlikely tokens down and asks no teacher at all.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
import torch
from torch import Tensor, nn

from leanroll.config import DistillConfig
from leanroll.losses.distill import Divergence, divergence
from leanroll.losses.selection import no_teacher_loss
from leanroll.losses.topk import TeacherTopk, TopkDivergence, topk_divergence
from leanroll.losses.vocabulary import SharedVocabulary
from leanroll.measure.logprobs import batch_hidden, token_logprobs
from leanroll.measure.packing import PackedBatch
from leanroll.models import Policy
from leanroll.models.head import LmHead

TeacherRows = Tensor | TeacherTopk
"""Of R tokens: hidden states [R, H_t], or the likeliest tokens."""


@dataclass(frozen=True, slots=True)
class NoTeacher:
    """Per token, all [R]; only the loss has a gradient.

    loss: `no_teacher_loss`. sampled_logprob: nats, of the sampled token under the student at kl_temperature. pushed_share: 1 where
    its probability is below the threshold, else 0. student_entropy: nats.
    """

    loss: Tensor
    sampled_logprob: Tensor
    pushed_share: Tensor
    student_entropy: Tensor


TokenLoss = Divergence | TopkDivergence | NoTeacher
"""Per token, [R]; the sum of `loss` is a micro-batch's."""
KL_NAMES = ("reverse_kl", "topk_reverse_kl")
"""Recorded values that say how far the student is from the teacher, nats; a record has one of them."""


def join_rows(parts: Sequence[TeacherRows], device: torch.device | str) -> TeacherRows:
    """The rows of several completions, at least one, one after the other."""
    if isinstance(parts[0], TeacherTopk):
        return TeacherTopk.join([part for part in parts if isinstance(part, TeacherTopk)]).to(device)
    return torch.cat([part for part in parts if isinstance(part, Tensor)]).to(device)


class StudentModule(nn.Module):
    """The student from packed tokens to its loss, as one forward (see `train.policy_module`)."""

    def __init__(
        self, student: Policy, teacher_head: LmHead, vocabulary: SharedVocabulary, config: DistillConfig
    ) -> None:
        super().__init__()
        self.model = student.model
        self._student, self._teacher_head = student, teacher_head
        self._vocabulary, self._options = vocabulary, config.distill

    def forward(self, batch: PackedBatch, teacher: TeacherRows | None, weights: Tensor | None) -> TokenLoss:
        """Per completion token of the batch, [R]; teacher: of the same tokens, None where it is not asked; weights [R]."""
        options = self._options
        hidden = batch_hidden(self._student, batch)
        if teacher is None:
            return self._no_teacher(hidden, batch.targets, weights)
        if isinstance(teacher, TeacherTopk):
            return topk_divergence(
                hidden,
                self._student.head,
                teacher.ids,
                teacher.logprobs,
                side=self._vocabulary.student,
                weights=weights,
                kl_temperature=options.kl_temperature,
            )
        return divergence(
            hidden,
            self._student.head,
            teacher,
            self._teacher_head,
            weights=weights,
            kind=options.divergence,
            beta=options.beta,
            kl_temperature=options.kl_temperature,
            vocabulary=self._vocabulary,
        )

    def _no_teacher(self, hidden: Tensor, targets: Tensor, weights: Tensor | None) -> NoTeacher:
        options = self._options
        scores = token_logprobs(hidden, self._student.head, targets, options.kl_temperature, with_entropy=True)
        assert scores.entropy is not None
        loss = no_teacher_loss(
            scores.logprobs,
            torch.ones_like(scores.logprobs) if weights is None else weights,
            threshold=options.no_teacher_threshold,
            advantage=options.no_teacher_advantage,
        )
        logprobs = scores.logprobs.detach()
        pushed = (logprobs < math.log(options.no_teacher_threshold)).to(logprobs.dtype)
        return NoTeacher(loss, logprobs, pushed, scores.entropy)


def recorded_values(result: TokenLoss, teacher: TeacherRows | None) -> dict[str, np.ndarray]:
    """What a micro-batch leaves behind, on the CPU, all [R], under the names of its metrics (`distill/<name>`; `teacher_rank` has
    none)."""
    found = {f.name: getattr(result, f.name) for f in fields(result) if f.name != "loss"}
    if isinstance(result, TopkDivergence) and isinstance(teacher, TeacherTopk):
        found["topk_reverse_kl"] = found.pop("divergence")
        found["tail_clamped_share"] = found.pop("clamped")
        found |= {"teacher_entropy": teacher.entropy, "teacher_dropped": teacher.dropped}
    return {name: value.detach().to("cpu", copy=True).numpy() for name, value in found.items()}
