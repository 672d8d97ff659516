"""Tasks from files: JSON lines or parquet, one prompt per row. Read into memory once.

A row has `prompt` (text) or `messages` (list of {"role", "content"}, the last from the user), and `answer` unless the
scoring is `none`. `privileged` (text) is what only a privileged teacher is told, `num_tokens` (a whole number) how much of a
completion `leanroll distill` generates with `distill.per_prompt_tokens`. Every other column is passed to the reward functions under
its own name.
"""

from __future__ import annotations

import hashlib
import importlib
import json
from collections.abc import Hashable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

from leanroll.errors import ConfigError
from leanroll.tasks.answers import REWARDS, Scoring, numeric_answer, require_math_verify, vote_key
from leanroll.tasks.base import RewardSpec, TaskItem, check_count, check_index

_RESERVED = ("prompts", "completions", "completion_ids")
_OF_THE_ITEM = ("messages", "privileged", "num_tokens")
_ROLES = ("system", "user", "assistant", "tool")
_MATH_VERIFY_BATCH = 8
_MAX_DEFAULT_EVAL = 500


class FileTask:
    """Prompts and answers from a file; the format follows the name's ending (.parquet, otherwise JSON lines).

    Args:
        path: training rows; also the evaluation rows where `eval_path` is None.
        seed: of the split.
        eval_path: evaluation rows. None holds out `eval_size` rows of `path`, chosen by a hash of (seed, prompt), so that
            equal prompts are never on both sides.
        eval_size: different prompts held out; None means a tenth of the rows, at most 500. Only without `eval_path`.
        scoring: how the answer is compared, see `leanroll.tasks.answers`; `none` leaves it to other rewards.
        correct_from: total reward from which a completion counts as solved (pass@k).

    Raises:
        ConfigError: a missing, empty or malformed file (with the row), a missing column, a prompt in both files, no
            prompt left on one side, or a missing package.
    """

    def __init__(
        self,
        path: str | Path,
        seed: int = 0,
        eval_path: str | Path | None = None,
        eval_size: int | None = None,
        scoring: Scoring = "exact",
        correct_from: float = 1.0,
    ) -> None:
        if scoring not in get_args(Scoring):
            raise ConfigError(f"scoring is {scoring!r}; expected one of {', '.join(get_args(Scoring))}.")
        if scoring == "math_verify":
            require_math_verify()
        self.name = f"file:{Path(path).name}"
        self._scoring: Scoring = scoring
        self._correct_from = correct_from
        rows = read_rows(Path(path), scoring)
        if eval_path is None:
            self._train, self._eval = _split(rows, seed, eval_size, Path(path))
        else:
            if eval_size is not None:
                raise ConfigError("eval_size and eval_path are both set; eval_size has no effect then, take it out.")
            self._train, self._eval = rows, read_rows(Path(eval_path), scoring)
            _check_disjoint(self._train, self._eval, Path(path), Path(eval_path))
        batch_size = _MATH_VERIFY_BATCH if scoring == "math_verify" else None
        self.rewards: tuple[RewardSpec, ...] = (
            () if scoring == "none" else (RewardSpec(scoring, 1.0, REWARDS[scoring], batch_size=batch_size),)
        )

    @property
    def num_train(self) -> int:
        return len(self._train)

    @property
    def num_eval(self) -> int:
        return len(self._eval)

    def train_item(self, index: int) -> TaskItem:
        """Training row `index`, in file order."""
        check_index(self.name, index, self.num_train)
        return row_item(index, self._train[index])

    def eval_items(self, n: int) -> list[TaskItem]:
        """The first n evaluation rows."""
        check_count(self.name, n, self.num_eval)
        return [row_item(index, row) for index, row in enumerate(self._eval[:n])]

    def answer_key(self, completion: str) -> Hashable | None:
        """The answer as it is compared; None where none is stated, or with scoring `none`."""
        return vote_key(completion, self._scoring)

    def correct(self, reward: float) -> bool:
        """Total reward of at least `correct_from`."""
        return reward >= self._correct_from - 1e-9


Row = dict[str, Any]  # "messages" (tuple of dicts) and the columns


def row_item(index: int, row: Row) -> TaskItem:
    """Item `index`, with the row's columns."""
    columns = {name: value for name, value in row.items() if name not in _OF_THE_ITEM}
    return TaskItem(index, row["messages"], columns, str(row.get("privileged") or ""), row.get("num_tokens"))


def _key(row: Row) -> str:
    return json.dumps(row["messages"], sort_keys=True)


def read_rows(path: Path, scoring: Scoring) -> list[Row]:
    """The rows of a file, checked, each with `messages` (tuple of dicts) and its other columns.

    Raises:
        ConfigError: a missing, empty or malformed file (with the row), or a missing column.
    """
    if not path.is_file():
        raise ConfigError(f"There is no file {path}; give the path of a .jsonl or .parquet file.")
    raw = _parquet_rows(path) if path.suffix == ".parquet" else _json_rows(path)
    rows = [_checked(row, where, scoring) for where, row in raw]
    if not rows:
        raise ConfigError(f"{path} has no rows; expected at least one prompt.")
    return rows


def _json_rows(path: Path) -> Iterator[tuple[str, Any]]:
    try:
        stream = path.open("rb")
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error.strerror or error}); expected a readable file.") from error
    with stream:
        for number, line in enumerate(stream, start=1):
            where = f"{path}, line {number}"
            try:
                text = line.decode("utf-8-sig" if number == 1 else "utf-8").strip()
                if text:
                    yield where, json.loads(text)
            except (UnicodeDecodeError, json.JSONDecodeError) as error:
                raise ConfigError(f"{where}: not a JSON object in UTF-8 ({error}).") from None


def _parquet_rows(path: Path) -> Iterator[tuple[str, Any]]:
    try:
        arrow = importlib.import_module("pyarrow")
        parquet = importlib.import_module("pyarrow.parquet")
    except ImportError as error:
        raise ConfigError(
            f"Reading {path} needs the package pyarrow ({error}); install leanroll with the extra `tasks`: "
            "pip install 'leanroll[tasks]'."
        ) from None
    try:
        table = parquet.read_table(path)
    except (arrow.ArrowException, OSError) as error:
        raise ConfigError(f"{path} cannot be read as parquet: {error}.") from None
    for number, row in enumerate(table.to_pylist(), start=1):
        yield f"{path}, row {number}", row


def _checked(row: Any, where: str, scoring: Scoring) -> Row:
    if not isinstance(row, Mapping):
        raise ConfigError(f"{where}: got {type(row).__name__}; expected an object with columns.")
    has_prompt, has_messages = row.get("prompt") is not None, row.get("messages") is not None
    if has_prompt == has_messages:
        raise ConfigError(
            f"{where}: columns are {', '.join(map(str, row)) or 'none'}; expected either 'prompt' or 'messages'."
        )
    reserved = [name for name in _RESERVED if name in row]
    if reserved:
        raise ConfigError(f"{where}: column {reserved[0]!r} is an argument of reward functions; rename it.")
    if has_prompt:
        messages = [{"role": "user", "content": row["prompt"]}]
    else:
        messages = row["messages"]
    columns = {name: value for name, value in row.items() if name not in ("prompt", "messages")}
    tokens = row.get("num_tokens")
    if tokens is not None and (not isinstance(tokens, int) or isinstance(tokens, bool) or tokens < 1):
        raise ConfigError(
            f"{where}: num_tokens is {tokens!r}; expected a whole number of tokens, at least 1, or nothing. A column of another "
            "meaning needs another name."
        )
    if scoring != "none":
        _check_answer(row.get("answer"), where, scoring)
    return {**columns, "messages": _messages(messages, where)}


def _messages(value: Any, where: str) -> tuple[dict[str, str], ...]:
    expected = f"a list of {{role, content}} with text in both, roles {', '.join(_ROLES)}, the last 'user'"
    if not isinstance(value, Sequence) or isinstance(value, str) or not value:
        raise ConfigError(f"{where}: messages is {type(value).__name__}; expected {expected}.")
    messages = []
    for message in value:
        role, content = (message.get("role"), message.get("content")) if isinstance(message, Mapping) else (None, None)
        if role not in _ROLES or not isinstance(content, str) or not content.strip():
            raise ConfigError(f"{where}: message is {message!r}; expected {expected}.")
        messages.append({"role": role, "content": content})
    if messages[-1]["role"] != "user":
        raise ConfigError(f"{where}: the last message is of role {messages[-1]['role']!r}; expected {expected}.")
    return tuple(messages)


def _check_answer(answer: Any, where: str, scoring: Scoring) -> None:
    if answer is None or (isinstance(answer, str) and not answer.strip()):
        raise ConfigError(f"{where}: no 'answer'; scoring {scoring!r} needs one (or set scoring to 'none').")
    if scoring == "numeric" and numeric_answer(str(answer)) is None:
        raise ConfigError(f"{where}: the answer {answer!r} contains no number; scoring 'numeric' needs one.")


def _split(rows: list[Row], seed: int, eval_size: int | None, path: Path) -> tuple[list[Row], list[Row]]:
    if eval_size is None:
        eval_size = min(max(1, len(rows) // 10), _MAX_DEFAULT_EVAL)
    digests = [hashlib.blake2b(f"{seed}\0{_key(row)}".encode(), digest_size=16).digest() for row in rows]
    # Different prompts count, so that repeated rows cannot fill the held-out side.
    chosen = set(sorted(set(digests))[: max(eval_size, 0)])
    held_out = [row for row, digest in zip(rows, digests, strict=True) if digest in chosen]
    train = [row for row, digest in zip(rows, digests, strict=True) if digest not in chosen]
    if eval_size < 1 or not train:
        raise ConfigError(
            f"{path} has {len(set(digests))} different prompts and eval_size is {eval_size}; expected eval_size from 1 to "
            "less than the number of prompts, so that both sides have some. Give eval_path, or more rows."
        )
    return train, held_out


def _check_disjoint(train: list[Row], held_out: list[Row], path: Path, eval_path: Path) -> None:
    shared = {_key(row) for row in train} & {_key(row) for row in held_out}
    if shared:
        raise ConfigError(
            f"{len(shared)} prompts of {eval_path} also occur in {path}, e.g. {min(shared)[:200]}; an evaluation on "
            "training prompts says nothing. Take them out of one of the files."
        )
