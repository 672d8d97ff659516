"""Tasks by name: `ifollow`, `reasoning_gym:<dataset>`, `jsonl`, `parquet`, `code`."""

from __future__ import annotations

import difflib
import importlib
import inspect
import typing
from collections.abc import Callable
from typing import Any

from pydantic import TypeAdapter, ValidationError

from leanroll.errors import ConfigError
from leanroll.tasks.base import Task

# Modules are imported when their task is asked for: their dependencies are extras.
_FACTORIES: dict[str, tuple[str, str]] = {
    "ifollow": ("leanroll.tasks.ifollow", "IfollowTask"),
    "reasoning_gym": ("leanroll.tasks.reasoning_gym", "ReasoningGymTask"),
    "jsonl": ("leanroll.tasks.files", "FileTask"),
    "parquet": ("leanroll.tasks.files", "FileTask"),
    "code": ("leanroll.tasks.code", "CodeTask"),
}
_NEEDS_ARGUMENT = {"reasoning_gym": "dataset"}


def task_names() -> tuple[str, ...]:
    """What `load_task` accepts, with the form of the argument."""
    return tuple(f"{name}:<{_NEEDS_ARGUMENT[name]}>" if name in _NEEDS_ARGUMENT else name for name in _FACTORIES)


def task_options(name: str) -> tuple[str, ...]:
    """The options that the task takes besides `seed`.

    Raises:
        ConfigError: no such task.
    """
    factory, argument = _factory(name)
    return tuple(key for key in inspect.signature(factory).parameters if key not in ("seed", *argument))


def load_task(name: str, *, seed: int = 0, **options: Any) -> Task:
    """The task of that name.

    Args:
        name: one of `task_names()`, e.g. "ifollow" or "reasoning_gym:chain_sum".
        seed: of the generator or of the split.
        options: the task's own; see the class or function that makes it (`IfollowTask`, `ReasoningGymTask`,
            `FileTask`, `CodeTask`).

    Raises:
        ConfigError: an unknown name or option, a missing package, or whatever the task finds wrong.
    """
    factory, argument = _factory(name)
    allowed = task_options(name)
    for option in options:
        if option not in allowed:
            near = difflib.get_close_matches(option, allowed, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"it takes {', '.join(allowed)}."
            raise ConfigError(f"Task {name!r} has no option {option!r}; {hint}")
    required = [
        key
        for key, parameter in inspect.signature(factory).parameters.items()
        if parameter.default is inspect.Parameter.empty and key not in ("seed", *argument, *options)
    ]
    if required:
        raise ConfigError(f"Task {name!r} needs the option {required[0]!r}.")
    _check_types(name, factory, {"seed": seed, **options})
    task: Task = factory(seed=seed, **argument, **options)
    return task


def _check_types(name: str, factory: Callable[..., Any], options: dict[str, Any]) -> None:
    """Options come from recipes: "no" is not False, and "2" is not 2."""
    hints = typing.get_type_hints(getattr(factory, "__init__", factory))
    for option, value in options.items():
        try:
            TypeAdapter(hints[option]).validate_python(value, strict=True)
        except ValidationError as error:
            expected = " or ".join(dict.fromkeys(e["msg"].removeprefix("Input should be ") for e in error.errors()))
            raise ConfigError(f"Task {name!r}: option {option} is {value!r}; expected {expected}.") from error


def _factory(name: str) -> tuple[Callable[..., Any], dict[str, str]]:
    base, separator, argument = name.partition(":")
    if base not in _FACTORIES:
        near = difflib.get_close_matches(base, _FACTORIES, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise ConfigError(f"No task {name!r}; expected one of {', '.join(task_names())}.{hint}")
    key = _NEEDS_ARGUMENT.get(base)
    if key is None and separator:
        raise ConfigError(f"Task {base!r} takes nothing after a colon, but got {name!r}; write {base!r}.")
    if key is not None and not argument:
        raise ConfigError(f"Task {name!r} needs a {key} after a colon: '{base}:<{key}>'.")
    module, attribute = _FACTORIES[base]
    return getattr(importlib.import_module(module), attribute), {key: argument} if key else {}
