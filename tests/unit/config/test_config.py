"""Recipes: loading, overrides, rules between fields, and the resolved file."""

import tomllib
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, ValidationError

from leanroll.config import (
    CalibrateConfig,
    DistillConfig,
    EvaluateConfig,
    GenerateConfig,
    OptimizerConfig,
    RLConfig,
    TaskConfig,
    changed_options,
    iter_fields,
    load_config,
    nearest_key,
    option_keys,
    parse_value,
    read_resolved,
    resume_conflicts,
    split_overrides,
    to_dict,
    to_toml,
    validate,
)
from leanroll.config.inert import INERT_RULES, inert_options
from leanroll.config.schema import field_at
from leanroll.config.sections import ScorerName
from leanroll.errors import ConfigError

RECIPES = sorted((Path(__file__).parents[3] / "recipes").glob("*.toml"))
SUITES = {"distill_controls.toml"}  # parsed in test_suite.py


def load(*overrides: tuple[str, str], schema: Any = RLConfig) -> Any:
    return load_config(schema, None, overrides)


HOLD = (("rollout.schedule", "qwen3-4b-0.86"), ("rollout.control", "hold"))


@pytest.mark.parametrize("path", [p for p in RECIPES if p.name not in SUITES], ids=lambda path: path.name)
def test_shipped_recipe(path: Path) -> None:
    config = load_config(DistillConfig if path.name.startswith("distill") else RLConfig, path)
    if config.rollout.schedule.endswith(".json"):
        assert Path(config.rollout.schedule).is_file()
    for option in (config.task.path, config.task.eval_path, config.task.few_shot_file, config.model.chat_template):
        assert option is None or Path(option).is_file()


def test_page_scorers_are_those_of_the_kernels() -> None:
    from leanroll.kernels.scorers import scorer_names

    assert get_args(ScorerName) == scorer_names()


def test_every_field_is_described() -> None:
    for schema in (RLConfig, GenerateConfig, EvaluateConfig):
        for field in iter_fields(schema):
            assert len(field.description) > 10, field.key


def test_none_and_zero_have_a_meaning() -> None:
    for field in iter_fields(RLConfig):
        if field.default == "-":
            assert "None:" in field.description, f"{field.key} does not say what None means"
        info = field_at(RLConfig, field.key.split("."))
        assert info is not None
        zero_off = field.type in ("int", "float") and field.default == "0"
        if zero_off and field.key not in ("train.seed",):
            assert "0" in field.description, f"{field.key} does not say what 0 means"


def test_defaults_are_the_vetted_ones() -> None:
    config = RLConfig()
    assert (config.rl.loss_type, config.rl.scale_rewards) == ("dapo", "group")
    assert (config.rl.epsilon, config.rl.epsilon_high, config.rl.delta, config.rl.beta) == (0.2, 0.28, None, 0.0)
    assert (config.rl.importance_sampling_mode, config.rl.importance_sampling_cap) == ("token_truncate", 3.0)


def test_frozen() -> None:
    config = RLConfig()
    with pytest.raises(ValidationError):
        config.rl.epsilon = 0.1  # type: ignore[misc]


def test_file_then_overrides(tmp_path: Path) -> None:
    path = tmp_path / "a.toml"
    path.write_text('name = "a"\n[rl]\nprompts_per_step = 4\nnum_generations = 4\n')
    config = load_config(RLConfig, path, [("rl.num_generations", "16"), ("rollout.schedule", "qwen3-4b-0.86")])
    assert (config.name, config.rl.prompts_per_step, config.rl.num_generations) == ("a", 4, 16)
    assert config.rollout.schedule == "qwen3-4b-0.86"


def test_null_returns_to_the_default(tmp_path: Path) -> None:
    path = tmp_path / "a.toml"
    path.write_text('[rollout]\nschedule = "qwen3-4b-0.86"\nscorer = "softmax"\n')
    with pytest.raises(ConfigError, match=r"rollout\.scorer is set but has no effect"):
        load_config(RLConfig, path, [("rollout.schedule", "dense")])
    config = load_config(RLConfig, path, [("rollout.schedule", "dense"), ("rollout.scorer", "null")])
    assert config.rollout.scorer is None


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("3", 3),
        ("-0.5", -0.5),
        ("1e-4", 1e-4),
        ("true", True),
        ("[1, 2]", [1, 2]),
        ('{a = "b"}', {"a": "b"}),
        ('"3"', "3"),
        ("plain words", "plain words"),
        ("qwen3-4b-0.86", "qwen3-4b-0.86"),
        ("org/name", "org/name"),
        ("2026-01-02", "2026-01-02"),
        ("", ""),
        ("1\nb = 2", "1\nb = 2"),
    ],
)
def test_parse_value(text: str, value: Any) -> None:
    assert parse_value(text) == value
    assert type(parse_value(text)) is type(value)


def test_split_overrides() -> None:
    arguments = ["r.toml", "--rl.epsilon", "0.1", "--resume", "--name=x", "--rl.beta=-1", "--model.name", "-x"]
    rest, overrides = split_overrides(arguments, RLConfig)
    assert rest == ["r.toml", "--resume"]
    assert overrides == [("rl.epsilon", "0.1"), ("name", "x"), ("rl.beta", "-1"), ("model.name", "-x")]
    with pytest.raises(ConfigError, match="has no value"):
        split_overrides(["--rl.epsilon", "--resume"], RLConfig)
    with pytest.raises(ConfigError, match="has no value"):
        split_overrides(["--rl.epsilon"], RLConfig)


@pytest.mark.parametrize(
    ("key", "nearest"),
    [
        ("rollout.temprature", "rollout.temperature"),
        ("rl.temperature", "rollout.temperature"),
        ("rl.num_generation", "rl.num_generations"),
        ("steps", "train.steps"),
    ],
)
def test_nearest_key(key: str, nearest: str) -> None:
    assert nearest_key(RLConfig, key) == nearest


def test_unknown_key_names_the_nearest(tmp_path: Path) -> None:
    path = tmp_path / "a.toml"
    path.write_text("[rl]\nnum_generation = 4\n")
    with pytest.raises(
        ConfigError, match=r"a\.toml: unknown key rl\.num_generation; did you mean rl\.num_generations\?"
    ):
        load_config(RLConfig, path)
    with pytest.raises(ConfigError, match=r"did you mean rollout\.temperature\?"):
        load(("rollout.temprature", "1"))


def test_missing_and_malformed_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        load_config(RLConfig, tmp_path / "none.toml")
    path = tmp_path / "a.toml"
    path.write_text('name = "a"\n[rl\n')
    with pytest.raises(ConfigError, match=r"not valid TOML.*line 2"):
        load_config(RLConfig, path)
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="UTF-8"):
        load_config(RLConfig, path)
    with pytest.raises(ConfigError, match="cannot be read"):
        load_config(RLConfig, tmp_path)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ([("rl.num_generations", "1")], "std of one reward"),
        ([("rl.num_generations", "1"), ("rl.scale_rewards", "none")], "at least 2"),
        ([("optimizer.warmup_steps", "200")], "more than train.steps"),
        ([("rollout.temperature", "0")], "greedy"),
        (
            [("rl.importance_sampling_mode", "off"), ("rl.importance_sampling_cap", "3.0")],
            "importance_sampling_mode is 'off'",
        ),
        ([("adapter.type", "none"), ("adapter.r", "8")], "adapter.type is 'none'"),
        ([("rl.num_mini_batches", "9")], "only 8 groups"),
        ([("rl.delta", "1.1")], "dual clip"),
        ([("rl.filter_zero_std", "false"), ("rl.resample_zero_std", "2")], "filter_zero_std is false"),
        ([("eval.temperature", "0")], "num_samples = 1"),
        ([("adapter.dropout", "0.1")], "Must be 0"),
        ([("rl.prompts_per_step", "true")], "integer"),
        ([("rl.prompts_per_step", '"8"')], "integer"),
        ([("rl.prompts_per_step", "8.5")], "integer"),
        ([("optimizer.learning_rate", "inf")], "finite"),
        ([("optimizer.betas", "[0.9]")], "betas"),
        ([("model.device", "tpu")], "auto"),
        ([("task.few_shot", "a"), ("task.few_shot_file", "b")], "keep one"),
        ([("task.rewards", "[{weight = 1.0}]")], "needs `name`"),
        ([("task.rewards", '[{name = "a"}, {name = "a"}]')], "more than once"),
        ([("task.rewards", '[{name = "a", weight = 0}]')], "weight 0"),
        ([("task.rewards", '[{function = "a.py:mean"}]')], "over the statistics of the total"),
        ([("rollout.max_completion_length", "4097")], "must hold one sequence"),
        ([("rl.use_bias_correction_kl", "false")], "no KL"),
        ([("task.reward_workers", "0"), ("task.reward_timeout_s", "5")], "time limits do not apply"),
        ([("measure.alpha_every", "0"), ("measure.num_top_logprobs", "20")], "never measured"),
        ([("rollout.control", "hold")], "no length bins to move"),
        ([("rollout.target", "0.9")], "budgets do not move"),
        ([("rollout.calm_steps", "2")], "budgets do not move"),
        ([*HOLD, ("measure.alpha_every", "4")], "in every step"),
        ([*HOLD, ("rollout.min_pages", "9"), ("rollout.max_pages", "8")], "less than min_pages"),
        ([*HOLD, ("rollout.target", "1.0")], "less than or equal to 0.999|at most 0.999"),
        ([("rollout", "1")], "is a table"),
        ([("model.name.x", "1")], "is a value"),
        ([("measure.alpha_every", "0"), ("measure.alpha_trajectories", "4")], "never measured"),
    ],
)
def test_refused(overrides: list[tuple[str, str]], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(*overrides)


def test_hold_measures_in_every_step() -> None:
    config = load(*HOLD, ("rollout.target", "0.88"), ("measure.alpha_every", "1"))
    assert validate(RLConfig, tomllib.loads(to_toml(config))) == config
    implied = load(*HOLD)
    assert "alpha_every" not in to_toml(implied)
    assert validate(RLConfig, tomllib.loads(to_toml(implied))) == implied
    with pytest.raises(ConfigError, match="distillation does not measure"):
        load(("teacher.privileged", "true"), ("rollout.control", "hold"), schema=DistillConfig)
    assert load(("rollout.control", "hold"), schema=EvaluateConfig).rollout.schedule == "dense", "a recipe's, set aside"


def test_all_problems_are_reported() -> None:
    with pytest.raises(ConfigError) as caught:
        load(("rl.epsilon", "2"), ("train.steps", "0"))
    assert "rl.epsilon = 2" in str(caught.value)
    assert "train.steps = 0" in str(caught.value)


def test_a_wrong_entry_of_a_list_is_one_problem() -> None:
    with pytest.raises(ConfigError, match=r"^command line: calibrate\.targets = 1\.5: expected less than 1\."):
        load(("calibrate.targets", "[1.5]"), schema=CalibrateConfig)
    with pytest.raises(ConfigError, match="at least 1 item"):
        load(("calibrate.targets", "[]"), schema=CalibrateConfig)


def test_inert_rules_name_fields_that_exist() -> None:
    keys = set(option_keys(RLConfig)) | set(option_keys(DistillConfig))
    for rule in INERT_RULES:
        assert set(rule.options) <= keys


def test_paths_count_from_the_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "recipes"
    folder.mkdir()
    (folder / "budget.json").write_text("{}")
    path = folder / "a.toml"
    path.write_text(
        '[task]\nname = "jsonl"\npath = "data.jsonl"\nrewards = [{function = "reward.py:score"}, {function = "pkg.mod:f"}]\n'
        '[rollout]\nschedule = "budget.json"\n[model]\nname = "org/name"\n'
    )
    config = load_config(RLConfig, path)
    assert config.task.path == str(folder / "data.jsonl")
    assert config.task.rewards[0].function == f"{folder / 'reward.py'}:score"
    assert config.task.rewards[0].label == "score"
    assert config.task.rewards[1].function == "pkg.mod:f"
    assert config.rollout.schedule == str(folder / "budget.json")
    assert config.model.name == "org/name"
    monkeypatch.chdir(tmp_path)
    assert load_config(RLConfig, path, [("task.path", "x.jsonl")]).task.path == str(tmp_path / "x.jsonl")


def test_eval_and_rollout_accept_training_recipes(tmp_path: Path) -> None:
    path = tmp_path / "a.toml"
    path.write_text('name = "a"\n[rl]\nnum_generations = 4\n[rollout]\ntop_p = 0.9\n[train]\nsteps = 3\n')
    assert load_config(EvaluateConfig, path).rollout.top_p == 0.9
    assert load_config(GenerateConfig, path, [("num_samples", "2")]).num_samples == 2
    path.write_text("[rul]\nnum_generations = 4\n")
    with pytest.raises(ConfigError, match="unknown key rul"):
        load_config(EvaluateConfig, path)


def test_resolved_round_trip(tmp_path: Path) -> None:
    config = load(
        ("rollout.schedule", "qwen3-4b-0.86"),
        ("rl.importance_sampling_mode", "off"),
        ("task.params", '{kinds = ["a", "b\\"c"], "odd key" = 1, nested = {x = 0.1}}'),
        ("task.rewards", '[{name = "x", weight = 0.5}]'),
        ("task.system_prompt", '"two\\nlines \\t and a \\\\"'),
        ("optimizer.learning_rate", "1e-5"),
        ("rl.delta", "2.0"),
    )
    path = tmp_path / "config.toml"
    path.write_text(to_toml(config))
    assert read_resolved(RLConfig, path) == config
    assert load_config(RLConfig, path) == config
    assert "importance_sampling_cap" not in to_toml(config)


@given(st.text(max_size=40))
def test_any_text_survives_the_resolved_file(text: str) -> None:
    text = text.encode("utf-8", "ignore").decode()
    config = RLConfig(task=TaskConfig(system_prompt=text, params={"x": text}))
    assert validate(RLConfig, tomllib.loads(to_toml(config))) == config


def test_changed_options_and_resume() -> None:
    old, new = load(), load(("rl.epsilon", "0.1"), ("train.steps", "7"), ("train.save_every", "3"))
    assert changed_options(old, new) == {
        "rl.epsilon": (0.2, 0.1),
        "train.steps": (100, 7),
        "train.save_every": (10, 3),
    }
    assert resume_conflicts(old, new, steps_done=50) == {"rl.epsilon": (0.2, 0.1)}
    assert changed_options(load(), load(("rl.delta", "2.0"))) == {"rl.delta": (None, 2.0)}


def test_resume_may_change_the_rest_of_the_learning_rate_schedule() -> None:
    linear = ("optimizer.scheduler", "linear")
    old, new = load(linear), load(linear, ("train.steps", "7"))
    assert resume_conflicts(old, new, steps_done=0) == {}
    assert resume_conflicts(old, new, steps_done=2) == {"train.steps": (100, 7)}

    constant, decaying = load(("train.steps", "6")), load(("train.steps", "10"), linear, ("optimizer.decay_steps", "4"))
    assert resume_conflicts(constant, decaying, steps_done=6) == {}
    assert set(resume_conflicts(constant, decaying, steps_done=7)) == {
        "train.steps",
        "optimizer.scheduler",
        "optimizer.decay_steps",
    }


def test_resume_may_move_rewards_into_the_main_process_and_back(tmp_path: Path) -> None:
    """The time limit has no effect there and is left out of the resolved recipe, which is no change of the run."""

    def saved(*overrides: tuple[str, str]) -> RLConfig:
        path = tmp_path / "config.toml"
        path.write_text(to_toml(load(*overrides)))
        return read_resolved(RLConfig, path)

    main, default, own = (
        (("task.reward_workers", "0"),),
        (("task.reward_workers", "3"),),
        (("task.reward_timeout_s", "4"),),
    )
    for workers in (default, own):
        assert resume_conflicts(saved(*workers), load(*main), steps_done=2) == {}
        assert resume_conflicts(saved(*main), load(*workers), steps_done=2) == {}
    assert resume_conflicts(saved(*default), load(*own), steps_done=2) == {"task.reward_timeout_s": (10.0, 4.0)}
    other = ("task.on_reward_error", "drop")
    assert set(resume_conflicts(saved(*default), load(*main, other), steps_done=2)) == {"task.on_reward_error"}


def test_resume_may_not_change_how_many_tokens_earlier_steps_generated() -> None:
    def distill(steps: int) -> DistillConfig:
        overrides = ("teacher.model", "t"), ("distill.num_tokens", "10"), ("distill.final_num_tokens", "40")
        return load_config(DistillConfig, overrides=[*overrides, ("train.steps", str(steps))])

    assert [distill(4).distill.tokens_at(step, 4) for step in (1, 2)] == [10, 20]
    assert resume_conflicts(distill(4), distill(7), steps_done=1) == {}, "step 1 has 10 tokens in both"
    assert resume_conflicts(distill(4), distill(7), steps_done=2) == {"train.steps": (4, 7)}


@pytest.mark.parametrize("schema", [RLConfig, CalibrateConfig])
def test_the_folder_of_a_sampler_adapter_counts_from_the_recipe(tmp_path: Path, schema: Any) -> None:
    (tmp_path / "a.toml").write_text(
        '[rollout]\nschedule = "qwen3-4b-0.86"\n[sampler_adapter]\npath = "run/sampler_adapter"\n'
    )
    config = load_config(schema, tmp_path / "a.toml")
    assert config.sampler_adapter.path == str(tmp_path / "run" / "sampler_adapter")


def test_learning_rate_warms_up_stays_and_falls() -> None:
    def factors(**options: Any) -> list[float]:
        optimizer = OptimizerConfig(**options)
        return [optimizer.rate_factor(step, 8) for step in range(1, 9)]

    assert factors(warmup_steps=4) == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0, 1.0, 1.0]
    assert factors(scheduler="linear", warmup_steps=4) == pytest.approx([0.25, 0.5, 0.75, 1.0, 0.8, 0.6, 0.4, 0.2])
    assert factors(scheduler="linear", decay_steps=3) == pytest.approx([1.0] * 5 + [0.75, 0.5, 0.25])
    assert factors(scheduler="linear", warmup_steps=4, decay_steps=9) == factors(scheduler="linear", warmup_steps=4)
    cosine = factors(scheduler="cosine")
    assert cosine[0] == 1.0
    assert cosine == sorted(cosine, reverse=True)
    assert cosine[-1] > 0


def test_resolved_lists_every_option_that_is_set() -> None:
    data = to_dict(RLConfig())
    flat = {f"{section}.{key}" for section, table in data.items() if isinstance(table, dict) for key in table} | {
        "name"
    }
    missing = set(option_keys(RLConfig)) - flat
    empty = {field.key for field in iter_fields(RLConfig) if field.default == "-"}
    assert missing == empty | set(inert_options(RLConfig()))


def test_optional_fields_default_to_none() -> None:
    # TOML has no null: a field that can be None must be None when it is left out, or the resolved file would change it.
    def walk(schema: type[BaseModel]) -> None:
        for name, info in schema.model_fields.items():
            if type(None) in get_args(info.annotation):
                assert info.default is None, name
            if isinstance(info.annotation, type) and issubclass(info.annotation, BaseModel):
                walk(info.annotation)

    walk(RLConfig)
