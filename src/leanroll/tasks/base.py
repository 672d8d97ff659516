"""What a task is: prompts, columns, and verifiable rewards. Imports neither torch nor transformers.

A task hands out `TaskItem`s; tokenisation and chat templates belong to `leanroll.models`. Reward functions have TRL's
signature, called with keywords:

    function(prompts=[...], completions=[...], completion_ids=[...], **columns) -> list[float]

All arguments are lists with one entry per sample. Two formats exist (`RewardSpec.format`):

    "text"            prompts and completions are strings: the contents of the messages joined by a blank line, and the
                      decoded completion without special tokens (TRL's standard format; all tasks here use it)
    "conversational"  a prompt is the list of its messages, a completion is [{"role": "assistant", "content": text}]

A column that only some samples have is None for the others.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from leanroll.errors import ConfigError

Split = Literal["train", "eval"]
RewardFormat = Literal["text", "conversational"]
RewardFunction = Callable[..., Sequence[float]]


@dataclass(frozen=True, slots=True)
class TaskItem:
    """One prompt of a task.

    index: position in its split; train and eval count separately.
    messages: chat messages, each {"role": ..., "content": ...}, the last one from the user.
    columns: what the reward functions get (answer, constraint kind, ...); plain picklable values.
    privileged: what a privileged teacher is told besides, behind the last message (hints, a worked solution); the student never
        sees it. Empty: nothing.
    num_tokens: tokens per completion that a distillation with `distill.per_prompt_tokens` generates, at least 1. None: not said.
    """

    index: int
    messages: tuple[dict[str, str], ...]
    columns: Mapping[str, Any] = field(default_factory=dict)
    privileged: str = ""
    num_tokens: int | None = None

    @property
    def prompt(self) -> str:
        """The contents of the messages joined by a blank line: what a "text" reward function sees."""
        return "\n\n".join(message["content"] for message in self.messages)


@dataclass(frozen=True, slots=True)
class RewardSpec:
    """A named, weighted reward.

    function: importable by name or a picklable callable object, since it runs in worker processes.
    batch_size: samples per call; None means all samples of a step in one call (what TRL does).
    own_limit_s: seconds after which a call of one sample ends by itself; a runner's time limit has to be longer, so that it is the
        function that says what happened. None: it may take for ever.
    """

    name: str
    weight: float
    function: RewardFunction
    format: RewardFormat = "text"
    batch_size: int | None = None
    own_limit_s: float | None = None

    def __post_init__(self) -> None:
        if self.format not in ("text", "conversational"):
            raise ConfigError(f"Reward {self.name!r}: format is {self.format!r}; expected 'text' or 'conversational'.")
        if self.batch_size is not None and self.batch_size < 1:
            raise ConfigError(
                f"Reward {self.name!r}: batch_size is {self.batch_size}; expected at least 1, or None for all."
            )


class Task(Protocol):
    """Where prompts and rewards come from.

    num_train, num_eval: sizes of the splits; None means unlimited (a generator).
    rewards: the task's own rewards; a trainer may add others.
    """

    @property
    def name(self) -> str: ...

    @property
    def num_train(self) -> int | None: ...

    @property
    def num_eval(self) -> int | None: ...

    @property
    def rewards(self) -> Sequence[RewardSpec]: ...

    def train_item(self, index: int) -> TaskItem:
        """The training item at any index >= 0 (finite tasks: index < num_train), the same on every call."""
        ...

    def eval_items(self, n: int) -> list[TaskItem]:
        """The first n evaluation items, disjoint from training; a shorter list is a prefix of a longer one.

        Raises:
            ConfigError: n is more than `num_eval`.
        """
        ...

    def answer_key(self, completion: str) -> Hashable | None:
        """What majority voting counts as the completion's answer; None where it has none or voting makes no sense."""
        ...

    def correct(self, reward: float) -> bool:
        """Whether a total reward counts as solved, for pass@k."""
        ...


def item_random(*key: int | str) -> random.Random:
    """A generator that depends on the key alone: no global state, the same in every process.

    Args:
        key: e.g. (task name, seed, split, index); 3 and "3" are different keys.
    """
    digest = hashlib.blake2b(repr(key).encode(), digest_size=16).digest()
    return random.Random(int.from_bytes(digest, "big"))


def check_index(task: str, index: int, size: int | None) -> None:
    """Raises ConfigError unless 0 <= index < size (size None: unlimited)."""
    if index < 0 or (size is not None and index >= size):
        bound = "any index >= 0" if size is None else f"0 <= index < {size}"
        raise ConfigError(f"Task {task!r}: no training item {index}; expected {bound}.")


def check_count(task: str, n: int, size: int | None) -> None:
    """Raises ConfigError unless 1 <= n <= size (size None: unlimited)."""
    if n < 1 or (size is not None and n > size):
        bound = "at least 1" if size is None else f"from 1 to {size} (all it has)"
        raise ConfigError(f"Task {task!r}: {n} evaluation items asked for; expected {bound}.")
