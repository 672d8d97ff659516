from __future__ import annotations

import itertools
from typing import Any

import pytest

from leanroll.tasks.ifollow import IfollowTask, is_genuine
from leanroll.tasks.ifollow_checks import words
from leanroll.tasks.ifollow_kinds import BY_NAME, KINDS, Kind
from leanroll.tasks.ifollow_privileged import LESSONS, SUBJECTS, worked_example
from leanroll.tasks.ifollow_topics import EVAL_TOPICS, TRAIN_TOPICS, topic_stems


def parameters(kind: Kind) -> list[dict[str, Any]]:
    """Every combination of a split's values."""
    return [
        dict(zip(kind.params, values, strict=True))
        for column in (0, 1)
        for values in itertools.product(*(choices[column] for choices in kind.params.values()))
    ]


def test_every_kind_has_a_lesson() -> None:
    assert set(LESSONS) == set(BY_NAME)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_examples_satisfy_their_constraint(kind: Kind) -> None:
    for params, subject in itertools.product(parameters(kind), SUBJECTS):
        example = worked_example(kind.name, params, subject)
        assert kind.check(example, **params) == 1.0, (params, example)
        assert is_genuine(example, LESSONS[kind.name].rule.format(**params), "", kind.min_words), (params, example)
        assert any(word.lower().startswith(subject[:4]) for word in words(example)), example


def test_subjects_are_no_topics() -> None:
    stems = {stem for topic in (*TRAIN_TOPICS, *EVAL_TOPICS) for stem in topic_stems(topic)}
    assert not {subject for subject in SUBJECTS for stem in stems if subject.startswith(stem)}
    assert all(len(sentences) >= 5 for sentences in SUBJECTS.values())


@pytest.mark.parametrize("num_constraints", [1, 2, 3])
def test_items_have_a_privileged_text(num_constraints: int) -> None:
    task = IfollowTask(num_constraints=num_constraints, require_topic=False)
    for item in [task.train_item(i) for i in range(200)] + task.eval_items(100):
        assert "{n}" not in item.privileged
        shown = [subject for subject in SUBJECTS if f"about {subject}:" in item.privileged]
        assert len(shown) == len(item.columns["constraints"])
        for constraint in item.columns["constraints"]:
            examples = [worked_example(constraint["kind"], constraint["params"], subject) for subject in shown]
            assert any(example in item.privileged for example in examples)
    assert task.train_item(3).privileged == IfollowTask(num_constraints=num_constraints).train_item(3).privileged


def test_subjects_vary() -> None:
    task = IfollowTask(kinds=["lowercase"])
    assert len({task.train_item(i).privileged.split("about ")[1].split(":")[0] for i in range(40)}) == len(SUBJECTS)
