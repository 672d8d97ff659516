"""What a step of distillation will cost at a number of tokens N, from the rates that a profile measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

UPDATE_FACTOR = 3.0
"""Time of an update in forwards of the student with its loss: a backward counts as two."""


@dataclass(frozen=True, slots=True)
class Workload:
    """What a step draws from: full completions, one per prompt, and the size of a step.

    lengths: tokens per full completion, [R]. student_prompt, teacher_prompt: mean tokens per prompt as each side sees it.
    prompts_per_step, num_generations: of the recipe.
    """

    lengths: Sequence[int]
    student_prompt: float
    teacher_prompt: float
    prompts_per_step: int
    num_generations: int


@dataclass(frozen=True, slots=True)
class StepCost:
    """A step of completions of at most `num_tokens` tokens.

    generated: completion tokens. teacher_inputs, student_inputs: tokens through each model in a scoring forward, prompts counted
    once per group. *_s: seconds; update_s is estimated as `UPDATE_FACTOR` student forwards. step_s: their sum.
    """

    num_tokens: int
    generated: float
    teacher_inputs: float
    student_inputs: float
    rollout_s: float
    teacher_s: float
    update_s: float

    @property
    def step_s(self) -> float:
        """Seconds per step, without evaluations and checkpoints."""
        return self.rollout_s + self.teacher_s + self.update_s


def step_cost(
    num_tokens: int, work: Workload, *, rollout_rate: float, teacher_rate: float, student_rate: float
) -> StepCost:
    """Forecast a step.

    Args:
        num_tokens: limit of a completion. rollout_rate: completion tokens/s at that limit. teacher_rate, student_rate: inputs/s of
            the scoring forwards, the student's with the loss.
    """
    per_completion = float(np.minimum(work.lengths, num_tokens).mean())
    completions = work.prompts_per_step * work.num_generations
    # The last token of a completion is predicted, not fed.
    fed = completions * (per_completion - 1)
    teacher_inputs = work.prompts_per_step * work.teacher_prompt + fed
    student_inputs = work.prompts_per_step * work.student_prompt + fed
    generated = completions * per_completion
    return StepCost(
        num_tokens=num_tokens,
        generated=generated,
        teacher_inputs=teacher_inputs,
        student_inputs=student_inputs,
        rollout_s=generated / rollout_rate,
        teacher_s=teacher_inputs / teacher_rate,
        update_s=UPDATE_FACTOR * student_inputs / student_rate,
    )
