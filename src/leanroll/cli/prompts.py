"""Prompts for `leanroll rollout`: a text file, a JSON-lines file, or the task of the recipe."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from leanroll.errors import ConfigError
from leanroll.types import Prompt

if TYPE_CHECKING:
    from leanroll.models import Policy
    from leanroll.tasks import Task, TaskItem


def read_prompts(path: Path) -> list[dict[str, Any]]:
    """The prompts of a file: one per line of a text file, or per object of a .jsonl file.

    Returns:
        Mappings with `prompt` (text) or `messages` (chat), and whatever else a JSON object held.

    Raises:
        ConfigError: missing, empty or malformed file.
    """
    try:
        # Not splitlines: U+2028 and its kin may stand inside a prompt, and inside JSON strings.
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"Prompts {str(path)!r} cannot be read ({error}); expected a UTF-8 text or .jsonl file."
        ) from error
    rows: list[dict[str, Any]] = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        rows.append(_row(line, f"{path}:{number}") if path.suffix == ".jsonl" else {"prompt": line})
    if not rows:
        raise ConfigError(f"Prompts {str(path)!r} has no prompt; expected one per line.")
    return rows


def _row(line: str, where: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{where} is not JSON: {error}.") from error
    if not isinstance(row, dict) or isinstance(row.get("prompt"), str) == _is_chat(row.get("messages")):
        raise ConfigError(
            f'{where}: expected an object with either "prompt" (text) or "messages" (list of {{"role", "content"}}), '
            f"got {line[:120]}"
        )
    return row


def _is_chat(value: Any) -> bool:
    return (
        isinstance(value, list)
        and bool(value)
        and all(
            isinstance(m, dict) and isinstance(m.get("role"), str) and isinstance(m.get("content"), str) for m in value
        )
    )


def takes_system(row: Mapping[str, Any], *, plain: bool) -> bool:
    """Whether the recipe's system prompt is put before a row: one that is a conversation and has no system message."""
    return not plain if "messages" not in row else row["messages"][0]["role"] != "system"


def encode_rows(policy: Policy, rows: list[dict[str, Any]], *, plain: bool, system: str | None) -> list[Prompt]:
    """Tokenised prompts, index by position. `plain`: text goes to the model as it is, without a chat template."""
    prompts = []
    for index, row in enumerate(rows):
        columns: Mapping[str, Any] = {k: v for k, v in row.items() if k not in ("prompt", "messages")}
        if "messages" in row:
            messages = list(row["messages"])
            text = "\n\n".join(message["content"] for message in messages)
        else:
            text = row["prompt"]
            messages = [{"role": "user", "content": text}]
        if plain and "prompt" in row:
            ids = policy.encode(text)
        else:
            if system is not None and takes_system(row, plain=plain):
                messages.insert(0, {"role": "system", "content": system})
            ids = policy.encode_chat(messages)
        prompts.append(Prompt(index=index, token_ids=tuple(ids), text=text, columns=columns))
    return prompts


def task_items(task: Task, split: str, num_prompts: int, option: str) -> list[TaskItem]:
    """The first items of a split. num_prompts 0: all of them.

    Raises:
        ConfigError: all of an endless split, more than there are, or an empty one. `option` names what to change.
    """
    size = task.num_eval if split == "eval" else task.num_train
    if num_prompts == 0 and size is None:
        raise ConfigError(f"The {split} split of task {task.name!r} has no end; say how many prompts with --{option}.")
    count = num_prompts or size or 0
    if size is not None and count > size:
        raise ConfigError(
            f"{option} is {count}, but the {split} split of task {task.name!r} has {size} prompts; lower it."
        )
    if count == 0:
        raise ConfigError(f"The {split} split of task {task.name!r} is empty; expected at least one prompt.")
    return task.eval_items(count) if split == "eval" else [task.train_item(index) for index in range(count)]


def check_lengths(prompts: list[Prompt], max_completion_length: int, max_position: int) -> None:
    """Raise ConfigError when a prompt and its completion may not fit in the model's context."""
    for prompt in prompts:
        total = len(prompt.token_ids) + max_completion_length
        if total > max_position:
            raise ConfigError(
                f"Prompt {prompt.index} has {len(prompt.token_ids)} tokens; with max_completion_length {max_completion_length} "
                f"that is {total}, more than the {max_position} of the model's context. Shorten it or the completion."
            )
