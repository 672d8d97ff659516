from __future__ import annotations

import pickle
import sys

import pytest

from leanroll.errors import ConfigError
from leanroll.tasks import load_task
from leanroll.tasks.rewards import RewardRunner


def test_missing_package_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(ConfigError, match=r"leanroll\[tasks\]"):
        load_task("reasoning_gym:chain_sum")


def test_items_and_their_scorer() -> None:
    pytest.importorskip("reasoning_gym")
    task = load_task("reasoning_gym:chain_sum", config={"max_terms": 2})
    item = task.train_item(2345)
    assert item == load_task("reasoning_gym:chain_sum", config={"max_terms": 2}).train_item(2345)
    assert item.prompt != load_task("reasoning_gym:chain_sum", seed=1, config={"max_terms": 2}).train_item(2345).prompt
    assert item.columns["entry"]["metadata"]["num_terms"] == 2
    assert pickle.loads(pickle.dumps(item)) == item
    texts = [f"Well. <answer>{item.columns['answer']}</answer>", "<answer>no</answer>", item.columns["answer"]]
    with RewardRunner(task.rewards) as runner:
        assert runner.score([item] * 3, texts).total.tolist() == [1.0, 0.0, 0.0]
    assert task.correct(1.0)
    assert task.answer_key("<answer> A b</answer>") == "ab"
    assert task.answer_key("none") is None


def test_evaluation_is_disjoint() -> None:
    pytest.importorskip("reasoning_gym")
    task = load_task("reasoning_gym:chain_sum", config={"min_digits": 6, "max_digits": 8})
    held_out = {item.prompt for item in task.eval_items(200)}
    assert len(held_out) == 200
    assert not held_out & {task.train_item(i).prompt for i in range(200)}


def test_mistakes() -> None:
    pytest.importorskip("reasoning_gym")
    with pytest.raises(ConfigError, match="Did you mean chain_sum"):
        load_task("reasoning_gym:chain_sums")
    for config in ({"no_such_option": 1}, {"min_terms": -1}):
        with pytest.raises(ConfigError, match="rejects the config"):
            load_task("reasoning_gym:chain_sum", config=config)
