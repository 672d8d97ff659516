"""Before distillation: do student and teacher fit together? Tokenizers, stop tokens, templates, and the very first token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from leanroll.config import DistillConfig, TeacherConfig
from leanroll.errors import TeacherError
from leanroll.losses.distill import divergence
from leanroll.losses.vocabulary import SharedVocabulary
from leanroll.measure.logprobs import batch_hidden
from leanroll.measure.packing import pack_tokens
from leanroll.models import Policy
from leanroll.models.compatibility import (
    Compatibility,
    check_compatible,
    template_differences,
    unshared_student_ids,
    vocabulary_arguments,
)
from leanroll.train.teacher import Teacher
from leanroll.types import Prompt


@dataclass(frozen=True, slots=True)
class Preflight:
    """What was found; a fatal finding is an error instead.

    vocabulary: for the loss. forbidden: ids that the student must not sample, since the teacher does not have them.
    first_token_kl: nats, mean over the prompts. student_dropped, teacher_dropped: mean probability on ids the other lacks.
    notes: differences that are no error, in words.
    """

    vocabulary: SharedVocabulary
    forbidden: tuple[int, ...]
    first_token_kl: float
    student_dropped: float
    teacher_dropped: float
    notes: tuple[str, ...]

    def metrics(self) -> dict[str, float]:
        """As they are written to metrics.jsonl at step 0."""
        return {
            "preflight/first_token_kl": self.first_token_kl,
            "preflight/student_dropped": self.student_dropped,
            "preflight/teacher_dropped": self.teacher_dropped,
        }


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at.

    value, limit: as measured and allowed, None where there is no number. level: "error" is what stops a run. text: a sentence.
    """

    name: str
    level: Literal["ok", "warning", "error"]
    text: str
    value: float | None = None
    limit: float | None = None


def preflight(
    config: DistillConfig,
    student: Policy,
    teacher: Teacher,
    prompts: Sequence[Prompt],
    teacher_prompts: Sequence[Prompt],
) -> Preflight:
    """Compare the two sides, and score the first token after each prompt with both.

    prompts, teacher_prompts: the same ones as each side sees them, at least one.

    Raises:
        ModelError: the tokenizers differ, or no completion could end.
        TeacherError: the first token's KL or the probability dropped is beyond what the recipe allows.
    """
    result, findings = examine(
        student,
        teacher,
        prompts,
        teacher_prompts,
        config.teacher,
        eos_class=config.distill.eos_class,
        max_tokens=config.train.micro_batch_tokens,
    )
    for finding in findings:
        if finding.level == "error":
            raise TeacherError(finding.text)
    return result


def examine(
    student: Policy,
    teacher: Teacher,
    prompts: Sequence[Prompt],
    teacher_prompts: Sequence[Prompt],
    options: TeacherConfig,
    *,
    eos_class: bool,
    max_tokens: int,
) -> tuple[Preflight, list[Finding]]:
    """`preflight`, but with what is beyond the limits as a finding of level "error" instead of an exception.

    options: has the limits. max_tokens: inputs per forward.

    Raises:
        ModelError: the tokenizers differ, or no completion could end; then nothing can be compared.
    """
    compatibility = check_compatible(student, teacher.policy)
    vocabulary = SharedVocabulary.of(
        **vocabulary_arguments(student, teacher.policy, compatibility, eos_class=eos_class), device=student.device
    )
    forbidden = unshared_student_ids(student, compatibility, eos_class=eos_class).tolist()
    notes = template_differences(student, teacher.policy) if teacher.policy is not student else []
    with torch.no_grad():
        rows = _first_rows(student, prompts, max_tokens)
        with teacher.scoring() as policy:
            teacher_rows = _first_rows(policy, teacher_prompts, max_tokens)
            found = divergence(rows, student.head, teacher_rows, policy.head, vocabulary=vocabulary)
    result = Preflight(
        vocabulary,
        tuple(forbidden),
        float(found.reverse_kl.mean()),
        float(found.student_dropped.mean()),
        float(found.teacher_dropped.mean()),
        tuple(notes),
    )
    return result, [
        _tokenizers(compatibility),
        _first_token(result, len(prompts), options.max_first_token_kl),
        _dropped("student", result.student_dropped, options.max_dropped_mass, result.notes),
        _dropped("teacher", result.teacher_dropped, options.max_dropped_mass, result.notes),
        *(Finding("templates and stop tokens", "warning", note) for note in result.notes),
    ]


def _tokenizers(compatibility: Compatibility) -> Finding:
    alone = len(compatibility.student_only) + len(compatibility.teacher_only)
    text = f"Both sides share {len(compatibility.ids)} ids; {alone} tokens have no equal on the other side."
    return Finding("tokenizers", "ok", text)


def _first_token(result: Preflight, num_prompts: int, limit: float) -> Finding:
    name, kl = "KL at the first token", result.first_token_kl
    if not limit or kl <= limit:
        text = f"{kl:.2f} nats on average over {num_prompts} prompts."
        return Finding(name, "ok", text, kl, limit or None)
    text = (
        f"The mean KL at the first token is {kl:.1f} nats over {num_prompts} prompts; expected at most {limit:g} "
        "(teacher.max_first_token_kl). Student and teacher expect answers to start in different ways: "
        + (" ".join(result.notes) or "compare their chat templates, and what the teacher's prompt asks for.")
    )
    return Finding(name, "error", text, kl, limit)


def _dropped(side: str, mass: float, limit: float, notes: Sequence[str]) -> Finding:
    name = f"probability dropped, {side}"
    if mass <= limit:
        return Finding(name, "ok", f"{mass:.2%} on tokens that the other side does not have.", mass, limit)
    text = (
        f"The {side} puts {mass:.1%} of its probability on tokens that the other side does not have; expected at most "
        f"{limit:.1%} (teacher.max_dropped_mass). "
        + (" ".join(notes) or "Pick a teacher of the same family, or turn distill.eos_class on.")
    )
    return Finding(name, "error", text, mass, limit)


def _first_rows(policy: Policy, prompts: Sequence[Prompt], max_tokens: int) -> Tensor:
    """Hidden states [P, H] that predict the first token after each prompt."""
    longest = max(len(prompt.token_ids) for prompt in prompts)
    # A completion of one token feeds nothing, so it may be any.
    batches = pack_tokens([p.token_ids for p in prompts], [[(0,)] for _ in prompts], max(max_tokens, longest))
    rows = torch.cat([batch_hidden(policy, batch) for batch in batches])
    order = torch.cat([batch.sample_ids for batch in batches])
    return rows[order.argsort()]
