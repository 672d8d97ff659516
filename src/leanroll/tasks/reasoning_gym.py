"""Tasks of the package reasoning-gym (extra `tasks`): `reasoning_gym:chain_sum` and a hundred others.

Its own generators and scorers are used. Training and evaluation draw from disjoint ranges of generator seeds; a dataset
with few distinct questions can still repeat one.
"""

from __future__ import annotations

import contextlib
import difflib
import functools
import importlib
import io
import json
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from leanroll.errors import ConfigError
from leanroll.tasks.answers import stated_answer
from leanroll.tasks.base import RewardSpec, TaskItem, check_count, check_index, item_random

INSTRUCTION = "Give your final answer between <answer> and </answer>."

# Most generators seed item i with (dataset seed + i), so a block of items takes a range of seeds as long as itself.
_BLOCK = 1000
_EVAL_BASE = 1 << 30
_MAX_START = 1 << 29


class ReasoningGymTask:
    """One dataset of reasoning-gym. Columns: `answer`, `entry` (the generator's whole item), `dataset`.

    Args:
        dataset: its name in reasoning-gym.
        seed: of the generator.
        config: the dataset's own options, e.g. {"min_terms": 2}.
        correct_from: reward from which a completion counts as solved; its scorers give partial credit.

    Raises:
        ConfigError: the package is missing, no such dataset, or it rejects the config.
    """

    num_train = None
    num_eval = None

    def __init__(
        self, dataset: str, seed: int = 0, config: Mapping[str, Any] | None = None, correct_from: float = 1.0
    ) -> None:
        self.name = f"reasoning_gym:{dataset}"
        self._dataset = dataset
        self._config = json.dumps(dict(config or {}), sort_keys=True)
        self._start = item_random("reasoning_gym", seed).randrange(_MAX_START)
        self._correct_from = correct_from
        _check_name(dataset)
        _block(dataset, self._config, self._start)
        self.rewards = (RewardSpec(dataset, 1.0, ReasoningGymReward(dataset, self._config)),)

    def train_item(self, index: int) -> TaskItem:
        """Item `index` >= 0 of the endless training stream."""
        check_index(self.name, index, self.num_train)
        return self._item(self._start, index)

    def eval_items(self, n: int) -> list[TaskItem]:
        """The first n evaluation items."""
        check_count(self.name, n, self.num_eval)
        return [self._item(_EVAL_BASE + self._start, index) for index in range(n)]

    def answer_key(self, completion: str) -> Hashable | None:
        """The stated answer without white space, in lower case; None without one."""
        answer = stated_answer(completion)
        return "".join(answer.split()).lower() or None if answer is not None else None

    def correct(self, reward: float) -> bool:
        """Reward of at least `correct_from`."""
        return reward >= self._correct_from - 1e-9

    def _item(self, start: int, index: int) -> TaskItem:
        block, place = divmod(index, _BLOCK)
        entry = _block(self._dataset, self._config, start + block * _BLOCK)[place]
        content = f"{entry['question']}\n\n{INSTRUCTION}"
        columns = {"answer": entry["answer"], "entry": dict(entry), "dataset": self._dataset}
        return TaskItem(index, ({"role": "user", "content": content},), columns)


@dataclass(frozen=True)
class ReasoningGymReward:
    """The dataset's own scorer on the stated answer; a completion without one is scored as no answer."""

    dataset: str
    config: str

    def load(self) -> Any:
        """The dataset that scores; loaded when the worker starts."""
        return _block(self.dataset, self.config, 0)

    def __call__(self, completions: Sequence[str], entry: Sequence[Mapping[str, Any]], **_columns: Any) -> list[float]:
        scorer = self.load()
        return [
            float(scorer.score_answer(answer=stated_answer(text), entry=dict(item)))
            for text, item in zip(completions, entry, strict=True)
        ]


def _package() -> Any:
    try:
        return importlib.import_module("reasoning_gym")
    except ImportError as error:
        raise ConfigError(
            f"Tasks reasoning_gym:<dataset> need the package reasoning-gym ({error}); install leanroll with the extra "
            "`tasks`: pip install 'leanroll[tasks]'."
        ) from None


def _check_name(dataset: str) -> None:
    _package()
    names = sorted(importlib.import_module("reasoning_gym.factory").DATASETS)
    if dataset not in names:
        near = difflib.get_close_matches(dataset, names, n=3)
        hint = f"Did you mean {' or '.join(near)}?" if near else f"It has {', '.join(names)}."
        raise ConfigError(f"reasoning-gym has no dataset {dataset!r}. {hint}")


@functools.lru_cache(maxsize=8)
def _block(dataset: str, config: str, seed: int) -> Any:
    package = _package()
    try:
        with contextlib.redirect_stdout(io.StringIO()):  # some generators print while they are built
            return package.create_dataset(dataset, **{**json.loads(config), "seed": seed, "size": _BLOCK})
    except (TypeError, ValueError, AssertionError) as error:
        raise ConfigError(f"reasoning-gym rejects the config {config} of {dataset!r}: {error}.") from None
