"""The order of training prompts."""

from __future__ import annotations

import pytest

from leanroll.errors import ConfigError
from leanroll.train.prompts import PromptOrder


def test_endless_task_is_read_in_order_without_overlap() -> None:
    order = PromptOrder(None, batch=3, rounds=2, seed=0)
    read = [i for step in (1, 2, 3) for round_ in (0, 1) for i in order.indices(step, round_)]
    assert read == list(range(18))
    assert PromptOrder(None, batch=3, rounds=1, seed=0).indices(4) == [9, 10, 11]


def test_finite_task_covers_an_epoch_once_and_reshuffles() -> None:
    order = PromptOrder(11, batch=4, rounds=1, seed=3)
    first, second = ([i for step in steps for i in order.indices(step)] for steps in ((1, 2), (3, 4)))
    for epoch in (first, second):
        assert len(set(epoch)) == 8
        assert set(epoch) <= set(range(11))
    assert first != second
    assert PromptOrder(11, batch=4, rounds=1, seed=4).indices(1) != order.indices(1)
    assert PromptOrder(11, batch=4, rounds=1, seed=3).indices(3) == order.indices(3), "no hidden state"


def test_no_prompt_twice_in_a_step() -> None:
    order = PromptOrder(5, batch=4, rounds=4, seed=0)
    for step in range(1, 10):
        drawn = [i for r in range(4) for i in order.indices(step, r)]
        assert len(drawn) == len(set(drawn))


def test_too_few_prompts() -> None:
    with pytest.raises(ConfigError, match="3 training prompts, fewer than the 4"):
        PromptOrder(3, batch=4, rounds=1, seed=0)
