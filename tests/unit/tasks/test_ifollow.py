from __future__ import annotations

import json
import pickle
import random
from collections import Counter
from typing import Any

import pytest

from leanroll.errors import ConfigError
from leanroll.tasks.base import TaskItem
from leanroll.tasks.ifollow import IfollowTask, is_genuine, partial_reward, strict_reward
from leanroll.tasks.ifollow_kinds import HELD_OUT_KINDS, KINDS, SEEN_KINDS
from leanroll.tasks.ifollow_topics import EVAL_TOPICS, TRAIN_TOPICS, topic_stems

TASK = IfollowTask()
GOOD = (
    "the moon is the only natural companion of our planet. it pulls on the sea and makes the tides. on clear nights "
    "it lights the way for people who walk home."
)


def reward_of(function: Any, item: TaskItem, text: str) -> float:
    columns = {name: [value] for name, value in item.columns.items()}
    return float(function(prompts=[item.prompt], completions=[text], completion_ids=[[]], **columns)[0])


def lowercase_item(*more: dict[str, Any]) -> TaskItem:
    columns = {
        "constraints": ({"kind": "lowercase", "params": {}}, *more),
        "topic": "the moon",
        "min_words": 20,
        "kind": "lowercase",
        "seen_kind": True,
    }
    prompt = "Tell me about the moon. Write everything in lowercase, with no capital letters."
    return TaskItem(0, ({"role": "user", "content": prompt},), columns)


def test_the_list_of_kinds_is_frozen() -> None:
    assert len(KINDS) == len({kind.name for kind in KINDS}) == 32
    assert [kind.name for kind in HELD_OUT_KINDS] == ["exclamations", "parentheses", "max_sentences", "sections"]


def test_items_are_a_function_of_seed_split_and_index() -> None:
    state = random.getstate()
    first, again, other = IfollowTask(seed=3), IfollowTask(seed=3), IfollowTask(seed=4)
    assert [first.train_item(i) for i in (7, 0, 10**9)] == [again.train_item(i) for i in (7, 0, 10**9)]
    assert first.eval_items(5) == again.eval_items(20)[:5]
    assert [first.train_item(i).prompt for i in range(20)] != [other.train_item(i).prompt for i in range(20)]
    assert random.getstate() == state


def test_a_known_item_stays_as_it_is() -> None:
    # Results are comparable only while this holds; a change needs a new task name.
    assert TASK.train_item(1).prompt == "What is interesting about chocolate? Use only lowercase letters."


def test_topics_share_no_content_word() -> None:
    assert len(TRAIN_TOPICS) > 150
    assert len(EVAL_TOPICS) > 50
    train = {stem for topic in TRAIN_TOPICS for stem in topic_stems(topic)}
    for topic in EVAL_TOPICS:
        for stem in topic_stems(topic):
            assert not [other for other in train if other.startswith(stem) or stem.startswith(other)], topic


@pytest.mark.parametrize("kind", SEEN_KINDS, ids=lambda kind: kind.name)
def test_parameters_of_the_splits_are_disjoint(kind: Any) -> None:
    for name, (train, held_out) in kind.params.items():
        assert train
        assert held_out
        if (kind.name, name) != ("keyword", "n"):
            assert not set(train) & set(held_out), name
    single = {w for name in ("word", "pair") for w in _flat(kind.params.get(name, ((), ()))[0])}
    assert not single & {w for name in ("word", "pair") for w in _flat(kind.params.get(name, ((), ()))[1])}


def _flat(values: tuple[Any, ...]) -> list[str]:
    return [word for value in values for word in ([value] if isinstance(value, str) else value)]


@pytest.mark.parametrize("num_constraints", [1, 2, 3])
def test_splits(num_constraints: int) -> None:
    task = IfollowTask(num_constraints=num_constraints)
    train, held_out = [task.train_item(i) for i in range(280)], task.eval_items(320)
    assert not {item.prompt for item in train} & {item.prompt for item in held_out}
    assert all(item.columns["seen_kind"] for item in train)
    unseen = {kind.name for kind in HELD_OUT_KINDS}
    for item in held_out:
        names = {constraint["kind"] for constraint in item.columns["constraints"]}
        assert item.columns["seen_kind"] == (not names & unseen)
        assert item.columns["kind"].split("+") == [c["kind"] for c in item.columns["constraints"]]
    firsts = Counter(item.columns["constraints"][0]["kind"] for item in train)
    assert set(firsts.values()) == {10}
    assert set(Counter(item.columns["constraints"][0]["kind"] for item in held_out).values()) == {10}


def test_prompts_are_short_and_columns_are_plain() -> None:
    for item in [TASK.train_item(i) for i in range(300)] + TASK.eval_items(100):
        assert len(item.prompt.split()) <= 32
        assert "{" not in item.prompt or item.columns["kind"] == "json_object"
        assert pickle.loads(pickle.dumps(item)) == item
        json.dumps(dict(item.columns))


def test_combined_kinds_do_not_conflict() -> None:
    task = IfollowTask(num_constraints=3)
    by_name = {kind.name: kind for kind in KINDS}
    for item in [task.train_item(i) for i in range(300)]:
        kinds = [by_name[constraint["kind"]] for constraint in item.columns["constraints"]]
        assert not any(a.conflicts(b) for i, a in enumerate(kinds) for b in kinds[:i])
        assert len(kinds) == 3 or kinds[0].alone


def test_rewards() -> None:
    item = lowercase_item()
    assert reward_of(strict_reward, item, GOOD) == reward_of(partial_reward, item, GOOD) == 1.0
    near = GOOD.replace("the moon is", "The moon is")
    assert reward_of(strict_reward, item, near) == 0.0
    assert 0.5 < reward_of(partial_reward, item, near) < 1.0
    two = lowercase_item({"kind": "numbers", "params": {"n": 2}})
    assert reward_of(strict_reward, two, GOOD) == 0.5
    assert reward_of(strict_reward, two, GOOD + " 12 and 7.") == 1.0


@pytest.mark.parametrize(
    "text",
    [
        "",
        "moon",
        "the moon " * 30,
        GOOD.replace("moon", "sun"),
        GOOD + " write everything in lowercase, with no capital letters.",
    ],
    ids=["empty", "one word", "repetition", "off topic", "copied prompt"],
)
def test_degenerate_answers_win_nothing(text: str) -> None:
    assert reward_of(strict_reward, lowercase_item(), text) == 0.0
    assert reward_of(partial_reward, lowercase_item(), text) == 0.0


def test_one_canned_text_wins_little() -> None:
    items = [TASK.train_item(i) for i in range(280)]
    rewards = [reward_of(strict_reward, item, GOOD) for item in items]
    assert sum(rewards) / len(rewards) < 0.02


def test_genuine_answers() -> None:
    assert is_genuine("Black cats sleep", "Tell me about house cats.", "house cats", 3)
    assert not is_genuine("", "", "house cats", 0)
    assert is_genuine("Dogs sleep", "Tell me about house cats.", "", 2)
    assert IfollowTask(require_topic=False).train_item(0).columns["topic"] == ""


def test_options() -> None:
    floors = {i.columns["kind"]: i.columns["min_words"] for i in IfollowTask(min_words=60).eval_items(32)}
    assert (floors["lowercase"], floors["max_words"], floors["json_object"]) == (60, 8, 8)
    task = IfollowTask(kinds=["lowercase", "exclamations"])
    assert {task.train_item(i).columns["kind"] for i in range(8)} == {"lowercase"}
    assert {item.columns["kind"] for item in task.eval_items(4)} == {"lowercase", "exclamations"}
    for options, message in [
        ({"kinds": ["lower"]}, "no kind 'lower'"),
        ({"kinds": ["sections"]}, "nothing to train on"),
        ({"num_constraints": 0}, "1 to 3"),
        ({"num_constraints": 4}, "1 to 3"),
        ({"min_words": 0}, "1 to 200"),
    ]:
        with pytest.raises(ConfigError, match=message):
            IfollowTask(**options)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="no training item -1"):
        TASK.train_item(-1)
    with pytest.raises(ConfigError, match="at least 1"):
        TASK.eval_items(0)
    assert TASK.answer_key("anything") is None
    assert TASK.correct(1.0)
    assert not TASK.correct(0.99)
