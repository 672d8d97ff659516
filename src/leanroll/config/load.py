"""A TOML file plus dotted overrides in, a validated recipe out.

Order: the schema's defaults, then the file, then the overrides, left to right. Relative paths of the file count from the
file's folder, those of overrides from the current folder; the recipe holds absolute ones.
"""

from __future__ import annotations

import copy
import json
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from leanroll.config.recipes import DistillConfig, RecipeT, RLConfig
from leanroll.config.schema import field_at, nearest_key, section_of
from leanroll.errors import ConfigError

SchemaT = TypeVar("SchemaT", bound=BaseModel)

PATH_OPTIONS = (
    "model.chat_template", "task.path", "task.eval_path", "task.few_shot_file", "adapter.path", "sampler_adapter.path",
    "teacher.adapter", "bench.gguf",
)  # fmt: skip
"""Options that are always paths."""

PATH_OR_NAME_OPTIONS = ("model.name", "teacher.model", "rollout.schedule", "calibrate.warm_start")
"""Options that are a path when such a file or folder exists there, else a name."""


def load_config(
    schema: type[RecipeT], path: str | Path | None = None, overrides: Sequence[tuple[str, str]] = ()
) -> RecipeT:
    """Read a recipe.

    schema: of the verb. Those that do not train also accept training recipes: tables, and options of tables, that only training
        uses are left aside.
    path: TOML file. None: defaults and overrides only.
    overrides: (dotted key, value text) pairs, as `split_overrides` returns them.

    Raises:
        ConfigError: missing file, TOML syntax, unknown key (names the nearest), value out of bounds, inconsistent options.
    """
    data: dict[str, Any] = {}
    where = "command line"
    if path is not None:
        file = Path(path)
        where = str(path)
        data = read_toml(file)
        if schema not in (RLConfig, DistillConfig):
            data = _without_training(schema, data)
        resolve_paths(data, file.resolve().parent)
    for key, text in overrides:
        apply_override(schema, data, key, text)
    return validate(schema, data, where)


def _without_training(schema: type[BaseModel], data: Mapping[str, Any]) -> dict[str, Any]:
    """Nested tables without those keys that training recipes have and the schema has not."""
    kept: dict[str, Any] = {}
    for key, value in data.items():
        trained = [info for recipe in (RLConfig, DistillConfig) if (info := field_at(recipe, [key])) is not None]
        own = field_at(schema, [key])
        if own is None and trained:
            continue
        section = section_of(own) if own is not None else None
        if section is not None and isinstance(value, dict):
            tables = [table for info in trained if (table := section_of(info)) is not None]
            options = {name for table in tables for name in table.model_fields}
            value = {name: v for name, v in value.items() if name in section.model_fields or name not in options}
        kept[key] = value
    return kept


def read_toml(path: Path) -> dict[str, Any]:
    """The tables of a TOML file. Raises ConfigError for a missing, unreadable or malformed file."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise ConfigError(f"No recipe {str(path)!r}: the file does not exist. Give the path of a TOML file.") from error
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"Recipe {str(path)!r} cannot be read ({error}); expected a UTF-8 text file.") from error
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"Recipe {str(path)!r} is not valid TOML: {error}.") from error


def validate(schema: type[SchemaT], data: Mapping[str, Any], where: str = "config") -> SchemaT:
    """Build a recipe, or another checked table, from nested tables; every problem found is in the one ConfigError."""
    try:
        return schema.model_validate(dict(data))
    except ValidationError as error:
        problems = [_problem(schema, item) for item in _causes(error.errors())]
        text = "; ".join(problems) if len(problems) == 1 else "\n  - " + "\n  - ".join(problems)
        raise ConfigError(f"{where}: {text}") from error


def split_overrides(arguments: Sequence[str], schema: type[BaseModel]) -> tuple[list[str], list[tuple[str, str]]]:
    """Separate `--a.b VALUE` and `--a.b=VALUE` from the other arguments.

    An argument is an override when it starts with `--` and its key has a dot or is a field of the schema. A section that has
    a `name` may stand for it: `--model PATH` is `--model.name PATH`.

    Returns:
        The other arguments, and (key, value text) pairs in order.
    Raises:
        ConfigError: an override without a value.
    """
    rest: list[str] = []
    overrides: list[tuple[str, str]] = []
    queue = list(arguments)
    while queue:
        argument = queue.pop(0)
        key, equals, value = argument[2:].partition("=")
        if not argument.startswith("--") or not ("." in key or key in schema.model_fields):
            rest.append(argument)
            continue
        section = section_of(schema.model_fields[key]) if key in schema.model_fields else None
        if section is not None and "name" in section.model_fields:
            key += ".name"
        if equals:
            overrides.append((key, value))
        elif queue and not queue[0].startswith("--"):
            overrides.append((key, queue.pop(0)))
        else:
            raise ConfigError(f"--{key} has no value; write --{key} VALUE or --{key}=VALUE (flags take true or false).")
    return rest, overrides


def parse_value(text: str) -> Any:
    """The TOML value that `text` spells, else the text itself: 3, 0.5, true, [1, 2], {a = 1}, "quoted", plain words."""
    try:
        parsed = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return text
    value = parsed.get("value")
    # "1\nb = 2" would smuggle in a second key, and dates are never meant: no option holds one.
    if len(parsed) != 1 or not isinstance(value, bool | int | float | str | list | dict):
        return text
    return value


def apply_override(schema: type[BaseModel], data: dict[str, Any], key: str, text: str) -> None:
    """Set one dotted key in nested tables, in place. The value `null` takes the key out again (back to the default).

    Raises:
        ConfigError: no such option.
    """
    set_option(schema, data, key, None if text == "null" else parse_value(text), Path.cwd())


def set_option(schema: type[BaseModel], data: dict[str, Any], key: str, value: Any, folder: Path) -> None:
    """Set one dotted key in nested tables, in place; None takes it out. A relative path counts from `folder`.

    Raises:
        ConfigError: no such option.
    """
    parts = key.split(".")
    _check_key(schema, parts, key)
    base: dict[str, Any] = data
    for part in parts[:-1]:
        if not isinstance(base.setdefault(part, {}), dict):
            raise ConfigError(f"--{key}: {part!r} is {base[part]!r} in the recipe, not a table; fix the recipe first.")
        base = base[part]
    if value is None:
        base.pop(parts[-1], None)
        return
    base[parts[-1]] = value
    if key in PATH_OPTIONS + PATH_OR_NAME_OPTIONS:
        resolve_paths(data, folder, only=key)
    elif key == "task.rewards":
        _resolve_rewards(data, folder)


def resolve_paths(data: dict[str, Any], folder: Path, only: str | None = None) -> None:
    """Make the path options of nested tables absolute, counted from `folder`, in place."""
    for option in PATH_OPTIONS + PATH_OR_NAME_OPTIONS:
        section, _, field = option.partition(".")
        table = data.get(section)
        value = table.get(field) if isinstance(table, dict) else None
        if not isinstance(value, str) or not value or only not in (None, option):
            continue
        candidate = folder / Path(value).expanduser()
        if option in PATH_OPTIONS or candidate.exists():
            table[field] = str(candidate.resolve())  # type: ignore[index]
    if only is None:
        _resolve_rewards(data, folder)


def _resolve_rewards(data: dict[str, Any], folder: Path) -> None:
    task = data.get("task")
    rewards = task.get("rewards") if isinstance(task, dict) else None
    for reward in rewards if isinstance(rewards, list) else ():
        function = reward.get("function") if isinstance(reward, dict) else None
        if isinstance(function, str):
            file, colon, name = function.rpartition(":")
            if colon and file.endswith(".py"):
                reward["function"] = f"{(folder / Path(file).expanduser()).resolve()}:{name}"


def _check_key(schema: type[BaseModel], parts: list[str], key: str) -> None:
    for depth in range(1, len(parts) + 1):
        info = field_at(schema, parts[:depth])
        if info is None:
            raise ConfigError(_unknown(schema, key))
        if section_of(info) is None:
            # Below a leaf only free-form tables (task.params.x) go on.
            if depth < len(parts) and "dict" not in str(info.annotation):
                raise ConfigError(f"--{key}: {'.'.join(parts[:depth])} is a value, not a table; set it directly.")
            return
    raise ConfigError(
        f"--{key} is a table; set one of its fields, such as --{key}.{next(iter(_fields_of(schema, parts)))}."
    )


def _fields_of(schema: type[BaseModel], parts: Sequence[str]) -> Mapping[str, Any]:
    info = field_at(schema, parts)
    section = section_of(info) if info is not None else None
    return section.model_fields if section is not None else {}


def _unknown(schema: type[BaseModel], key: str) -> str:
    near = nearest_key(schema, key)
    hint = f"did you mean {near}?" if near else "see --help for the list."
    return f"unknown key {key}; {hint}"


def _causes(errors: Sequence[Any]) -> list[Any]:
    """Without the lists that are too short only because pydantic does not count their wrong entries."""

    def holds_another(loc: tuple[Any, ...]) -> bool:
        return any(len(other["loc"]) > len(loc) and other["loc"][: len(loc)] == loc for other in errors)

    return [item for item in errors if item["type"] != "too_short" or not holds_another(item["loc"])]


def _problem(schema: type[BaseModel], item: Any) -> str:
    location = [str(part) for part in item["loc"]]
    key = ".".join(location)
    if item["type"] == "extra_forbidden":
        return _unknown(schema, key)
    info = None
    for depth in range(len(location), 0, -1):
        info = field_at(schema, location[:depth])
        if info is not None:
            key = ".".join(location[:depth])
            break
    message = item["msg"].removeprefix("Value error, ").removeprefix("Input should be ")
    if item["type"] == "value_error":
        return f"{key}: {message}." if key and info is not None else f"{message}."
    got = json.dumps(item["input"], default=str)
    meaning = f" {info.description}" if info is not None and info.description else ""
    return f"{key} = {got}: expected {message[:1].lower() + message[1:]}.{meaning}"


def merged(data: Mapping[str, Any], extra: Mapping[str, Any]) -> dict[str, Any]:
    """Nested tables with `extra` laid over `data`; neither is changed."""
    result = copy.deepcopy(dict(data))
    for key, value in extra.items():
        if isinstance(value, Mapping) and isinstance(result.get(key), dict):
            result[key] = merged(result[key], value)
        else:
            result[key] = copy.deepcopy(value)
    return result
