"""The resolved recipe: written to the run directory, read back, compared when resuming."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from leanroll.config.alarm import AlarmConfig
from leanroll.config.inert import inert_options
from leanroll.config.load import read_toml, validate
from leanroll.config.recipes import (
    CalibrateConfig,
    DistillConfig,
    ProfileConfig,
    Recipe,
    RecipeT,
    RLConfig,
    TrainingRecipe,
)

FREE_ON_RESUME = frozenset(
    {
        *(f"alarm.{name}" for name in AlarmConfig.model_fields),
        "train.save_every",
        "train.keep_checkpoints",
        "train.trackers",
        "train.run_dir",
        "train.sharding",
        "rollout.kv_memory_gib",
        "rollout.schedule",
        "task.reward_workers",
        "distill.compare_full",
    }
)
"""Options that may change when a run is resumed: they enter no formula. (kv_memory_gib can change which sequences are decoded
together, so in bfloat16 a token may differ by rounding. A schedule may have moved; its content is compared apart.)"""

RATE_SCHEDULE = frozenset({"train.steps", "optimizer.scheduler", "optimizer.warmup_steps", "optimizer.decay_steps"})
"""Options that only say how the learning rate goes over the steps."""

_BARE_KEY = re.compile(r"^[A-Za-z0-9_-]+$")


def to_dict(config: Recipe) -> dict[str, Any]:
    """Every option with its value, as JSON-ready nested tables; None and options without effect are left out."""
    data = config.model_dump(mode="json", exclude_none=True)
    if isinstance(config, RLConfig | DistillConfig):
        for option in inert_options(config):
            section, _, field = option.partition(".")
            data[section].pop(field, None)
    if isinstance(config, CalibrateConfig):
        for field in config.calibrate.inert_fields():
            data["calibrate"].pop(field, None)
    if isinstance(config, ProfileConfig):
        for field in config.inert_profile_options():
            data["profile"].pop(field, None)
    return data


def to_toml(config: Recipe) -> str:
    """The resolved recipe as TOML; `load_config` reads it back to an equal recipe."""
    return _tables(to_dict(config), ())


def read_resolved(schema: type[RecipeT], path: Path) -> RecipeT:
    """Read what `to_toml` wrote. Raises ConfigError as `load_config` does."""
    return validate(schema, read_toml(path), str(path))


def changed_options(old: Recipe, new: Recipe) -> dict[str, tuple[Any, Any]]:
    """Dotted keys whose values differ → (old, new); None stands for absent."""
    before, after = _flat(to_dict(old)), _flat(to_dict(new))
    return {
        key: (before.get(key), after.get(key))
        for key in sorted(before.keys() | after.keys())
        if before.get(key) != after.get(key)
    }


def resume_conflicts(old: TrainingRecipe, new: TrainingRecipe, steps_done: int) -> dict[str, tuple[Any, Any]]:
    """The changed options that would make a resumed run differ from an uninterrupted one → (old, new).

    The number of steps and the schedule of the learning rate may change as long as the steps done so far had the same rates (and in
    a distillation the same numbers of tokens): more steps at a constant rate, say, or a decay at their end.
    """
    free = set(FREE_ON_RESUME)
    if all(_course(old, step) == _course(new, step) for step in range(1, steps_done + 1)):
        free |= RATE_SCHEDULE
    if 0 in (old.task.reward_workers, new.task.reward_workers):
        free.add("task.reward_timeout_s")  # without effect on that side, so left out there
    return {key: values for key, values in changed_options(old, new).items() if key not in free}


def _course(config: TrainingRecipe, step: int) -> tuple[float, int | None]:
    """What of a step depends on how many there are: factor of the learning rate, and tokens of a distillation's completions."""
    steps = config.train.steps
    tokens = config.distill.tokens_at(step, steps) if isinstance(config, DistillConfig) else None
    return config.optimizer.rate_factor(step, steps), tokens


def _flat(data: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in data.items():
        if isinstance(value, Mapping) and value:
            flat.update(_flat(value, f"{prefix}{key}."))
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def _tables(data: Mapping[str, Any], path: tuple[str, ...]) -> str:
    lines = [f"{_key(k)} = {_value(v)}" for k, v in data.items() if not isinstance(v, Mapping)]
    text = "\n".join(lines) + ("\n" if lines else "")
    for key, value in data.items():
        if isinstance(value, Mapping):
            inner = (*path, key)
            text += f"\n[{'.'.join(_key(part) for part in inner)}]\n" + _tables(value, inner)
    return text


def _key(key: str) -> str:
    return key if _BARE_KEY.match(key) else _string(key)


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, str):
        return _string(value)
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_key(k)} = {_value(v)}" for k, v in value.items()) + "}"
    return "[" + ", ".join(_value(item) for item in value) + "]"


def _string(text: str) -> str:
    # JSON strings are TOML basic strings, but for DEL, which TOML wants escaped.
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007F")
