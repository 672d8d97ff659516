"""Verifiable instruction following: a request on a topic with one or more constraints that a program can check.

    "Describe coral reefs in your own words. Use only lowercase letters."

The generator is keyed by (seed, split, index). Training and evaluation share no topic, no word, phrase, letter or key
parameter, and evaluation adds kinds of constraint never trained on (columns `kind`, `seen_kind`). Kinds come in shuffled
rounds, so that every stretch of items holds about the same mix.

Reward: the mean over the constraints of 1 or 0 (`partial_credit`: of a value in [0, 1]). So that a canned or degenerate
answer wins nothing, the reward is 0 unless the answer

    has enough words (option `min_words`, 20; 8 or 10 where the constraint itself asks for a short answer),
    mentions a content word of the topic (option `require_topic`),
    does not copy 8 consecutive words of the prompt,
    does not repeat itself: at least 3 in 10 words are distinct (of the first 100 words).
"""

from __future__ import annotations

import random
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

from leanroll.errors import ConfigError
from leanroll.tasks.base import RewardSpec, Split, TaskItem, check_count, check_index, item_random
from leanroll.tasks.ifollow_checks import words
from leanroll.tasks.ifollow_kinds import BY_NAME, DEFAULT_MIN_WORDS, HELD_OUT_KINDS, KINDS, SEEN_KINDS, Kind
from leanroll.tasks.ifollow_privileged import privileged_text
from leanroll.tasks.ifollow_topics import EVAL_TOPICS, REQUESTS, TRAIN_TOPICS, topic_stems

COPY_WORDS = 8
MIN_DISTINCT_SHARE = 0.3
MAX_CONSTRAINTS = 3
MAX_MIN_WORDS = 200


def is_genuine(text: str, prompt: str, topic: str, min_words: int) -> bool:
    """Whether the text is an answer at all; see the module docstring for the four conditions. No topic: not asked for."""
    found = [word.lower() for word in words(text)]
    if len(found) < max(min_words, 1):
        return False
    if topic and not any(word.startswith(stem) for stem in topic_stems(topic) for word in found):
        return False
    head = found[:100]
    if len(set(head)) < MIN_DISTINCT_SHARE * len(head):
        return False
    asked = [word.lower() for word in words(prompt)]
    asked_spans = {tuple(asked[i : i + COPY_WORDS]) for i in range(len(asked) - COPY_WORDS + 1)}
    return not any(tuple(found[i : i + COPY_WORDS]) in asked_spans for i in range(len(found) - COPY_WORDS + 1))


def constraint_values(text: str, constraints: Sequence[Mapping[str, Any]]) -> list[float]:
    """The checker's value in [0, 1] for each {"kind": name, "params": {...}}; 1.0 means satisfied."""
    return [BY_NAME[constraint["kind"]].check(text, **constraint["params"]) for constraint in constraints]


def strict_reward(
    prompts: Sequence[str],
    completions: Sequence[str],
    constraints: Sequence[Sequence[Mapping[str, Any]]],
    topic: Sequence[str],
    min_words: Sequence[int],
    **_columns: Any,
) -> list[float]:
    """Share of satisfied constraints per sample, 0 for an answer that is not genuine."""
    return [
        sum(value >= 1.0 for value in constraint_values(text, asked)) / len(asked)
        if is_genuine(text, prompt, about, floor)
        else 0.0
        for prompt, text, asked, about, floor in zip(prompts, completions, constraints, topic, min_words, strict=True)
    ]


def partial_reward(
    prompts: Sequence[str],
    completions: Sequence[str],
    constraints: Sequence[Sequence[Mapping[str, Any]]],
    topic: Sequence[str],
    min_words: Sequence[int],
    **_columns: Any,
) -> list[float]:
    """Mean partial credit per sample, 0 for an answer that is not genuine; 1.0 exactly when `strict_reward` is 1."""
    return [
        sum(constraint_values(text, asked)) / len(asked) if is_genuine(text, prompt, about, floor) else 0.0
        for prompt, text, asked, about, floor in zip(prompts, completions, constraints, topic, min_words, strict=True)
    ]


class IfollowTask:
    """The `ifollow` task: unlimited items, generated on demand.

    Columns of an item: `kind` (names joined by "+"), `seen_kind` (False when any kind is held out of training),
    `constraints` (tuple of {"kind", "params"}), `topic` (empty without `require_topic`), `min_words`.

    Args:
        seed: of the generator; items of different seeds are unrelated.
        num_constraints: constraints per prompt, 1 to 3.
        partial_credit: reward near misses.
        min_words: words below which an answer wins nothing, 1 to 200; kinds that ask for short answers keep their own floor.
            The prompt does not mention it. Longer answers make for longer contexts.
        require_topic: an answer that does not speak of the topic wins nothing. Without it a canned text can win.
        kinds: names of the kinds to train and evaluate on; None means all. Held-out kinds only ever appear in evaluation.

    Raises:
        ConfigError: an option out of range or an unknown kind.
    """

    name = "ifollow"
    num_train = None
    num_eval = None

    def __init__(
        self,
        seed: int = 0,
        num_constraints: int = 1,
        partial_credit: bool = False,
        kinds: Sequence[str] | None = None,
        min_words: int = DEFAULT_MIN_WORDS,
        require_topic: bool = True,
    ) -> None:
        if not 1 <= min_words <= MAX_MIN_WORDS:
            raise ConfigError(f"ifollow: min_words is {min_words}; expected 1 to {MAX_MIN_WORDS}.")
        if not 1 <= num_constraints <= MAX_CONSTRAINTS:
            raise ConfigError(f"ifollow: num_constraints is {num_constraints}; expected 1 to {MAX_CONSTRAINTS}.")
        names = tuple(BY_NAME) if kinds is None else tuple(kinds)
        unknown = [name for name in names if name not in BY_NAME]
        if unknown:
            raise ConfigError(f"ifollow: no kind {unknown[0]!r}; the kinds are {', '.join(BY_NAME)}.")
        self._train_kinds = tuple(kind for kind in SEEN_KINDS if kind.name in names)
        self._eval_kinds = tuple(kind for kind in KINDS if kind.name in names)
        if not self._train_kinds:
            raise ConfigError(
                f"ifollow: kinds {list(names)} leave nothing to train on; name at least one that is not held out "
                f"({', '.join(kind.name for kind in HELD_OUT_KINDS)} are)."
            )
        self._seed = seed
        self._num_constraints = num_constraints
        self._min_words = min_words
        self._require_topic = require_topic
        function = partial_reward if partial_credit else strict_reward
        self.rewards = (RewardSpec("ifollow", 1.0, function),)

    def train_item(self, index: int) -> TaskItem:
        """Item `index` >= 0 of the endless training stream."""
        check_index(self.name, index, self.num_train)
        return self._item("train", index)

    def eval_items(self, n: int) -> list[TaskItem]:
        """The first n evaluation items: every kind about equally often, the held-out ones included."""
        check_count(self.name, n, self.num_eval)
        return [self._item("eval", index) for index in range(n)]

    def answer_key(self, completion: str) -> Hashable | None:
        """None: there is no answer to vote on."""
        return None

    def correct(self, reward: float) -> bool:
        """Every constraint satisfied."""
        return reward >= 1.0 - 1e-9

    def _item(self, split: Split, index: int) -> TaskItem:
        rng = item_random(self.name, self._seed, split, index)
        chosen = self._choose_kinds(split, index, rng)
        topic = rng.choice(TRAIN_TOPICS if split == "train" else EVAL_TOPICS)
        parts = [rng.choice(REQUESTS).format(topic=topic)]
        constraints = []
        for kind in chosen:
            params = kind.sample(rng, split)
            parts.append(kind.instruction(rng, params))
            constraints.append({"kind": kind.name, "params": params})
        columns = {
            "kind": "+".join(kind.name for kind in chosen),
            "seen_kind": not any(kind.held_out for kind in chosen),
            "constraints": tuple(constraints),
            "topic": topic if self._require_topic else "",
            "min_words": self._floor(chosen),
        }
        # A generator of its own: what the teacher is told changes nothing about the item.
        hint = privileged_text(item_random(self.name, self._seed, split, index, "privileged"), topic, constraints)
        return TaskItem(index, ({"role": "user", "content": " ".join(parts)},), columns, hint)

    def _floor(self, chosen: Sequence[Kind]) -> int:
        short = [kind.min_words for kind in chosen if kind.min_words < DEFAULT_MIN_WORDS]
        return min([self._min_words, *short])

    def _choose_kinds(self, split: Split, index: int, rng: random.Random) -> list[Kind]:
        kinds = self._train_kinds if split == "train" else self._eval_kinds
        cycle, place = divmod(index, len(kinds))
        order = list(range(len(kinds)))
        item_random(self.name, self._seed, split, "kinds of round", cycle).shuffle(order)
        chosen = [kinds[order[place]]]
        while len(chosen) < self._num_constraints:
            # A kind that must stand alone keeps its prompt to itself: fewer constraints than asked for.
            fitting = [kind for kind in kinds if not any(kind.conflicts(other) for other in chosen)]
            if not fitting:
                break
            chosen.append(rng.choice(fitting))
        return chosen
