r"""Accuracy by which \boxed of a completion counts: the first one, the last one, or any (D8; arXiv 2605.27028).

A model that goes on after its answer boxes a second one. Then the first box can still be right where the last one, which is what a
task scores, no longer is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from leanroll.errors import UserError
from leanroll.measure.collapse import boxed
from leanroll.tasks import RewardSpec, Task, TaskItem
from leanroll.tasks.answers import REWARDS
from leanroll.tasks.rewards import RewardRunner


@dataclass(frozen=True, slots=True)
class BoxedAccuracy:
    r"""Shares of the completions; one without a complete \boxed counts as wrong.

    first, last: the first / last \boxed holds the right answer. relaxed: at least one does, so at least max(first, last).
    num_completions: those judged; one whose scoring failed and was dropped is left out.
    """

    first: float
    last: float
    relaxed: float
    num_completions: int


def boxed_scorer(task: Task) -> RewardSpec | None:
    r"""The task's own comparison of a stated answer, which reads \boxed; None where its answers are not stated like that."""
    return next((spec for spec in task.rewards if spec.function in REWARDS.values()), None)


def boxed_accuracy(items: Sequence[TaskItem], texts: Sequence[str], rewards: RewardRunner) -> BoxedAccuracy | None:
    r"""Of N completions. Each box is given to the task's own scorer as a text that has nothing else.

    Args:
        items: [N], what each completion answers. texts: [N]. rewards: of `boxed_scorer` alone; 1 where the answer is right.

    Returns:
        None where no completion has a \boxed, or the scoring of all was dropped.

    Raises:
        UserError: the numbers of items and texts differ. RewardError: the scorer failed, and rewards do not go on then.
    """
    if len(items) != len(texts):
        raise UserError(
            f"{len(items)} items for {len(texts)} completions; expected the item that each of them answers."
        )
    boxes = [boxed(text) for text in texts]
    # A loop repeats its box: each distinct one is scored once.
    cases = [(number, content) for number, found in enumerate(boxes) for content in dict.fromkeys(found)]
    if not cases:
        return None
    scored = rewards.score([items[number] for number, _ in cases], [rf"\boxed{{{content}}}" for _, content in cases])
    value = {
        case: reward if kept else np.nan for case, reward, kept in zip(cases, scored.total, scored.kept, strict=True)
    }
    judged = []
    for number, found in enumerate(boxes):
        values = [value[number, content] for content in found] or [0.0]
        judged.append((values[0], values[-1], max(values) if not np.isnan(values).any() else np.nan))
    table = np.asarray(judged, dtype=np.float64)
    table = table[~np.isnan(table).any(axis=1)]
    if not len(table):
        return None
    first, last, relaxed = (table == 1.0).mean(axis=0).tolist()
    return BoxedAccuracy(first, last, relaxed, len(table))
