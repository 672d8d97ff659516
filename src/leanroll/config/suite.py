"""A suite: one base recipe of `leanroll distill`, several arms that change it, every arm with every seed.

    name = "controls"
    base = "recipe.toml"              # or the recipe's tables themselves: [base.task], [base.distill] ...
    reference = "early-16"
    seeds = [0, 1, 2]

    [[arms]]
    name = "early-16"
    overrides = { "distill.num_tokens" = 16 }

    [[arms]]
    name = "full"
    overrides = { "distill.full_rollouts" = true }

Two arms x three seeds are six recipes, which differ from the base in what the arm sets, in train.seed and in where they run.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, Field, model_validator

from leanroll.config.base import Float, Int, Section
from leanroll.config.load import apply_override, read_toml, resolve_paths, set_option, validate
from leanroll.config.recipes import DistillConfig
from leanroll.config.resolved import changed_options
from leanroll.config.schema import field_at, section_of
from leanroll.errors import ConfigError

SET_BY_SUITE = ("name", "train.seed", "train.run_dir")
"""Options of a run that neither an arm nor, but for the folder, the command line can set."""

EVALUATION_ROLLOUT = ("schedule", "scorer", "top_p", "top_k", "min_p", "stop_strings")
"""Options of [rollout] that held-out completions are drawn with, too. (max_completion_length: unless [eval] has its own.)"""


class ArmConfig(Section):
    """One entry of arms."""

    name: str = Field(
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", description="Name of the arm; its runs are <name>-seed<seed>."
    )
    overrides: dict[str, Any] = Field(
        default_factory=dict,
        description='Options that differ from the base, by dotted key or as nested tables; "null": back to the default.',
    )


class SuiteConfig(Section):
    """A file of `leanroll distill --suite`."""

    name: str = Field("suite", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", description="Name of the suite.")
    base: str | dict[str, Any] = Field(
        default_factory=dict,
        description="The recipe that arms change: a TOML file, or its tables. Its name, train.seed and train.run_dir do not count.",
    )
    arms: tuple[ArmConfig, ...] = Field(min_length=1, description="What is compared.")
    reference: str | None = Field(
        None, description="Arm that the others are compared with, in pairs of (seed, prompt). None: the first."
    )
    seeds: tuple[Annotated[Int, Field(ge=0, lt=2**63)], ...] = Field(
        (0,), min_length=1, description="train.seed of the runs of every arm."
    )
    compare_at_seconds: Float | None = Field(
        None,
        gt=0,
        description="Compare also at this many seconds of training (rollout, teacher, score, update): every run at its last "
        "evaluation up to there; needs eval.every. None: only after the last step.",
    )
    run_dir: str | None = Field(
        None, description="Folder of the suite (relative to the current one). None: runs/<name> in the current folder."
    )

    @model_validator(mode="after")
    def _consistent(self) -> SuiteConfig:
        names = [arm.name for arm in self.arms]
        # Folders: some file systems do not tell cases apart.
        twice = sorted(name for name, count in Counter(map(str.lower, names)).items() if count > 1)
        if twice:
            raise ValueError(
                f"several arms are called {', '.join(twice)} (upper and lower case count as equal); name each differently"
            )
        if self.reference is not None and self.reference not in names:
            raise ValueError(f"reference is {self.reference!r}, which is no arm; expected one of {', '.join(names)}")
        repeated = sorted(seed for seed, count in Counter(self.seeds).items() if count > 1)
        if repeated:
            raise ValueError(f"seeds has {', '.join(map(str, repeated))} more than once; the runs would be the same")
        return self

    @property
    def reference_arm(self) -> str:
        """Name of the arm that the others are compared with."""
        return self.reference or self.arms[0].name


@dataclass(frozen=True, slots=True)
class SuiteRun:
    """One arm with one seed. config: the whole recipe, with the run's folder in train.run_dir."""

    arm: str
    seed: int
    config: DistillConfig

    @property
    def path(self) -> Path:
        """The run directory."""
        assert self.config.train.run_dir is not None
        return Path(self.config.train.run_dir)


@dataclass(frozen=True, slots=True)
class Suite:
    """folder: absolute. runs: all arms of the first seed, then all of the second ..., so that a broken-off suite is balanced.

    Worked example: arms a, b and seeds 0, 1 in /s: runs (a, 0), (b, 0), (a, 1), (b, 1) in /s/a-seed0, /s/b-seed0, ...
    """

    config: SuiteConfig
    folder: Path
    runs: tuple[SuiteRun, ...]

    def of_arm(self, name: str) -> tuple[SuiteRun, ...]:
        """The runs of an arm, in the order of `seeds`."""
        return tuple(run for run in self.runs if run.arm == name)


def load_suite(path: str | Path, overrides: Sequence[tuple[str, str]] = ()) -> Suite:
    """Read a suite, and resolve the recipe of every run.

    Relative paths of the suite, arms included, count from the file's folder, those of a base file from that file's.
    overrides: (dotted key, value text) pairs of the command line; they change the base. train.run_dir is the suite's folder.

    Raises:
        ConfigError: whatever `load_config` says of the file or of an arm's recipe; an arm's name twice; a reference that is no arm;
            an option that the suite sets itself; a command-line option that an arm sets as well; arms that are not evaluated alike.
    """
    file = Path(path)
    config = validate(SuiteConfig, read_toml(file), str(path))
    arms = {arm.name: _flat(arm.overrides, f"{path}, arm {arm.name!r}") for arm in config.arms}
    folder = config.run_dir
    base = _base(config, file)
    for key, text in overrides:
        if key == "train.run_dir" and text != "null":
            folder = text
            continue
        _check_settable(key, f"--{key}")
        taken = [name for name, options in arms.items() if key in options]
        if taken:
            raise ConfigError(
                f"--{key} changes the base recipe, but {_plural('arm', taken)} of {path} set it too; leave it out, or edit those."
            )
        apply_override(DistillConfig, base, key, text)
    suite_folder = Path(folder or f"runs/{config.name}").expanduser().absolute()
    runs = []
    for seed in config.seeds:
        for name, options in arms.items():
            where = f"{path}, arm {name!r}"
            data = copy.deepcopy(base)
            _apply(data, options, file.resolve().parent, where)
            data["name"] = f"{config.name}-{name}"
            data["train"] = {
                **_table(data, "train", where),
                "seed": seed,
                "run_dir": str(suite_folder / f"{name}-seed{seed}"),
            }
            runs.append(SuiteRun(name, seed, validate(DistillConfig, data, where)))
    suite = Suite(config, suite_folder, tuple(runs))
    _check_evaluation(suite, str(path))
    return suite


def _base(config: SuiteConfig, file: Path) -> dict[str, Any]:
    """The base recipe's tables, with absolute paths and without what the suite sets."""
    if isinstance(config.base, str):
        source = file.resolve().parent / Path(config.base).expanduser()
        data = read_toml(source)
    else:
        source, data = file.resolve(), copy.deepcopy(config.base)
    resolve_paths(data, source.parent)
    for key in SET_BY_SUITE:
        section, _, field = key.rpartition(".")
        (_table(data, section, str(source)) if section else data).pop(field, None)
    return data


def _table(data: Mapping[str, Any], section: str, where: str) -> dict[str, Any]:
    table = data.get(section, {})
    if not isinstance(table, dict):
        raise ConfigError(f"{where}: {section} is {table!r}; expected a table.")
    return table


def _flat(overrides: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Nested tables and dotted keys alike → dotted keys of options. Free-form options (task.params) stay whole."""
    options: dict[str, Any] = {}
    for key, value in _walk(DistillConfig, overrides, ""):
        if key in options:
            raise ConfigError(f"{where}: {key} is set twice; leave one of them out.")
        options[key] = value
    return options


def _walk(schema: type[BaseModel], tables: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for name, value in tables.items():
        key = f"{prefix}{name}"
        info = field_at(schema, key.split("."))
        if isinstance(value, Mapping) and (info is None or section_of(info) is not None):
            yield from _walk(schema, value, f"{key}.")
        else:
            yield key, value


def _apply(data: dict[str, Any], options: Mapping[str, Any], folder: Path, where: str) -> None:
    for key, value in options.items():
        try:
            _check_settable(key, key)
            set_option(DistillConfig, data, key, None if value == "null" else value, folder)
        except ConfigError as error:
            raise ConfigError(f"{where}: {error}") from error


def _check_settable(key: str, shown: str) -> None:
    if key in SET_BY_SUITE:
        raise ConfigError(
            f"{shown} is set by the suite (its name, seeds and run_dir); leave it out, or change those in the file."
        )


def _check_evaluation(suite: Suite, where: str) -> None:
    """Raise ConfigError unless all arms answer the same held-out prompts under the same conditions, after the last step."""
    (reference, *_) = suite.of_arm(suite.config.reference_arm)
    if reference.config.eval.num_prompts == 0:
        raise ConfigError(
            f"{where}: eval.num_prompts is 0; a suite compares held-out rewards, so expected at least 1. Set it in the base."
        )
    if suite.config.compare_at_seconds is not None and reference.config.eval.every == 0:
        raise ConfigError(
            f"{where}: compare_at_seconds is set, but eval.every is 0, so that there is no evaluation between the first and the "
            "last step. Set eval.every in the base, or leave compare_at_seconds out."
        )
    for run in suite.runs:
        guard = run.config.guard
        if guard.every and guard.on_alarm != "warn":
            raise ConfigError(
                f"{where}: arm {run.arm!r} has guard.on_alarm = {guard.on_alarm!r}, so that its runs may end early and arms "
                "would be compared after different steps. Set it to 'warn'."
            )
    shared = {f"rollout.{field}" for field in EVALUATION_ROLLOUT}
    if reference.config.eval.max_completion_length is None:
        shared.add("rollout.max_completion_length")
    for arm in suite.config.arms:
        (run, *_) = suite.of_arm(arm.name)
        changes = changed_options(reference.config, run.config)
        unlike = [key for key in changes if key.startswith(("task.", "eval.")) or key in shared]
        if unlike:
            differences = "; ".join(f"{key}: {changes[key][0]!r} and {changes[key][1]!r}" for key in unlike)
            raise ConfigError(
                f"{where}: arm {reference.arm!r} (the reference) and arm {arm.name!r} are not evaluated alike ({differences}), so "
                "their held-out rewards make no pairs. Change the base instead, or make two suites."
            )


def _plural(word: str, names: Sequence[str]) -> str:
    return f"{word}{'s' if len(names) > 1 else ''} {', '.join(names)}"
