r"""First, last and any \boxed right: hand-made texts, scored by the tasks' own functions."""

import importlib.util
import math

import pytest

from leanroll.config import TaskConfig
from leanroll.errors import UserError
from leanroll.measure.boxed import BoxedAccuracy, boxed_accuracy, boxed_scorer
from leanroll.tasks import RewardSpec, TaskItem, load_task
from leanroll.tasks.answers import REWARDS
from leanroll.tasks.rewards import RewardRunner
from leanroll.train import setup


def item(answer, index=0):
    return TaskItem(index, ({"role": "user", "content": "?"},), {"answer": answer})


def accuracy(scoring, *cases, **options):
    """cases: (answer, text)."""
    with RewardRunner([RewardSpec(scoring, 1.0, REWARDS[scoring])], num_workers=0, **options) as rewards:
        return boxed_accuracy([item(answer) for answer, _ in cases], [text for _, text in cases], rewards)


NUMERIC = [
    ("7", r"so \boxed{7}", (1, 1, 1)),
    ("7", r"\boxed{7}. Wait: \boxed{8}", (1, 0, 1)),
    ("7", r"\boxed{8}, no, \boxed{7.0}", (0, 1, 1)),
    ("7", r"\boxed{1} \boxed{\frac{14}{2}} \boxed{1}", (0, 0, 1)),
    ("7", r"\boxed{1} and the answer is 7", (0, 0, 0)),
    ("7", "the answer is 7", (0, 0, 0)),
    ("1,000", r"\boxed{1000} \boxed{10", (1, 1, 1)),
    ("7", r"\boxed{} 7", (0, 0, 0)),
    ("7", r"\boxed{\boxed{7} apples} \boxed{}", (1, 0, 1)),
]


@pytest.mark.parametrize(("answer", "text", "expected"), NUMERIC)
def test_one_completion(answer, text, expected):
    found = accuracy("numeric", (answer, text), ("3", r"\boxed{4}"))
    assert found == BoxedAccuracy(*(x / 2 for x in expected), num_completions=2)


def test_shares_are_of_all_completions():
    found = accuracy("numeric", *((answer, text) for answer, text, _ in NUMERIC))
    columns = [sum(expected[i] for _, _, expected in NUMERIC) / len(NUMERIC) for i in range(3)]
    assert found == BoxedAccuracy(*columns, num_completions=len(NUMERIC))
    assert accuracy("numeric", ("7", "the answer is 7"), ("7", r"\boxed{7")) is None


def test_exact_scoring_compares_text():
    assert accuracy("exact", ("Paris", r"\boxed{Rome} \boxed{Paris}")) == BoxedAccuracy(0, 1, 1, num_completions=1)


@pytest.mark.skipif(importlib.util.find_spec("math_verify") is None, reason="math-verify is an extra")
def test_math_verify_scoring_compares_mathematics():
    found = accuracy("math_verify", (r"\frac{1}{2}", r"\boxed{0.5} so \boxed{x^2}"), ("x+1", r"\boxed{2} \boxed{1+x}"))
    assert found == BoxedAccuracy(0.5, 0.5, 1.0, num_completions=2)


def broken(completions, **_columns):
    if any("bad" in text for text in completions):
        raise ValueError("injected")
    return [float(text == r"\boxed{7}") for text in completions]


def test_each_distinct_box_is_scored_once_and_alone():
    seen = []

    def recording(completions, answer, **_columns):
        seen.extend(completions)
        return [1.0] * len(completions)

    with RewardRunner([RewardSpec("recording", 1.0, recording)], num_workers=0) as rewards:
        text = "loop " + r"\boxed{4} = 4, \boxed{ 5 } " * 50
        assert boxed_accuracy([item("4")], [text], rewards) == BoxedAccuracy(1, 1, 1, num_completions=1)
    assert seen == [r"\boxed{4}", r"\boxed{ 5 }"]


def test_a_dropped_reward_leaves_its_completion_out():
    items, texts = [item("7")] * 2, [r"\boxed{bad} \boxed{7}", r"\boxed{7} \boxed{1}"]
    with RewardRunner([RewardSpec("broken", 1.0, broken)], num_workers=0, on_error="drop") as rewards:
        assert boxed_accuracy(items, texts, rewards) == BoxedAccuracy(1, 0, 1, num_completions=1)
        assert boxed_accuracy(items[:1], texts[:1], rewards) is None
        with pytest.raises(UserError, match="1 items for 2 completions"):
            boxed_accuracy(items[:1], texts, rewards)


def test_which_tasks_state_boxed_answers(tmp_path):
    path = tmp_path / "task.jsonl"
    path.write_text("".join(f'{{"prompt": "{i}?", "answer": "{i}"}}\n' for i in range(4)))
    for scoring in ("numeric", "exact"):
        task = load_task("jsonl", seed=0, path=str(path), scoring=scoring)
        spec = boxed_scorer(task)
        assert spec is not None
        assert spec.name == scoring
        config = TaskConfig(name="jsonl", path=str(path), params={"scoring": scoring}, rewards=({"name": scoring},))
        with setup.build_rewards(config.model_copy(update={"reward_workers": 0}), task) as rewards:
            found = boxed_accuracy([item("2"), item("2")], [r"\boxed{2}", "2"], rewards)
        assert found is not None
        assert math.isclose(found.last, 0.5)
    assert boxed_scorer(load_task("jsonl", seed=0, path=str(path), scoring="none")) is None
    assert boxed_scorer(load_task("ifollow", seed=0)) is None
