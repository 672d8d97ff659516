"""Before distillation: do student and teacher fit together? Tokenizers, stop tokens, templates, and the very first token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from leanroll.config import DistillConfig
from leanroll.errors import TeacherError
from leanroll.losses.distill import divergence
from leanroll.losses.vocabulary import SharedVocabulary
from leanroll.measure.logprobs import batch_hidden
from leanroll.measure.packing import pack_tokens
from leanroll.models import Policy
from leanroll.models.compatibility import (
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
    options = config.teacher
    compatibility = check_compatible(student, teacher.policy)
    eos_class = config.distill.eos_class
    vocabulary = SharedVocabulary.of(
        **vocabulary_arguments(student, teacher.policy, compatibility, eos_class=eos_class), device=student.device
    )
    forbidden = unshared_student_ids(student, compatibility, eos_class=eos_class).tolist()
    notes = template_differences(student, teacher.policy) if teacher.policy is not student else []
    with torch.no_grad():
        rows = _first_rows(student, prompts, config.train.micro_batch_tokens)
        with teacher.scoring() as policy:
            teacher_rows = _first_rows(policy, teacher_prompts, config.train.micro_batch_tokens)
            found = divergence(rows, student.head, teacher_rows, policy.head, vocabulary=vocabulary)
    result = Preflight(
        vocabulary,
        tuple(forbidden),
        float(found.reverse_kl.mean()),
        float(found.student_dropped.mean()),
        float(found.teacher_dropped.mean()),
        tuple(notes),
    )
    limit = options.max_first_token_kl
    if limit and result.first_token_kl > limit:
        raise TeacherError(
            f"The mean KL at the first token is {result.first_token_kl:.1f} nats over {len(prompts)} prompts; expected at most "
            f"{limit:g} (teacher.max_first_token_kl). Student and teacher expect answers to start in different ways: "
            + (" ".join(notes) if notes else "compare their chat templates, and what the teacher's prompt asks for.")
        )
    for side, mass in (("student", result.student_dropped), ("teacher", result.teacher_dropped)):
        if mass > options.max_dropped_mass:
            raise TeacherError(
                f"The {side} puts {mass:.1%} of its probability on tokens that the other side does not have; expected at most "
                f"{options.max_dropped_mass:.1%} (teacher.max_dropped_mass). "
                + (" ".join(notes) or "Pick a teacher of the same family, or turn distill.eos_class on.")
            )
    return result


def _first_rows(policy: Policy, prompts: Sequence[Prompt], max_tokens: int) -> Tensor:
    """Hidden states [P, H] that predict the first token after each prompt."""
    longest = max(len(prompt.token_ids) for prompt in prompts)
    # A completion of one token feeds nothing, so it may be any.
    batches = pack_tokens([p.token_ids for p in prompts], [[(0,)] for _ in prompts], max(max_tokens, longest))
    rows = torch.cat([batch_hidden(policy, batch) for batch in batches])
    order = torch.cat([batch.sample_ids for batch in batches])
    return rows[order.argsort()]
