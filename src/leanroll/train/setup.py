"""From a recipe's sections to the objects of a run: policy, schedule, task, prompts, sampling parameters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from leanroll.config import (
    AdapterConfig,
    EvalConfig,
    ModelConfig,
    RolloutConfig,
    SamplerAdapterConfig,
    SavedSamplerConfig,
    TaskConfig,
)
from leanroll.errors import ConfigError
from leanroll.models import LoraSpec, Policy, load_policy
from leanroll.rollout.engine import RolloutEngine
from leanroll.rollout.schedule import BudgetSchedule
from leanroll.tasks import RewardSpec, Task, TaskItem, load_task
from leanroll.tasks.rewards import RewardRunner
from leanroll.tasks.user_rewards import load_reward
from leanroll.train.ranks import ALONE, Ranks
from leanroll.train.shared import SharedEngine, SharedRewards
from leanroll.types import Prompt, SamplingParams

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


def build_policy(model: ModelConfig, adapter: AdapterConfig, *, training: bool, seed: int = 0) -> Policy:
    """Load the model with its adapter and chat template.

    training: a new adapter is made when the section asks for one and names no folder; otherwise the plain model is
    loaded.

    Raises:
        ModelError: the model or adapter cannot be loaded. ConfigError: no such chat template file.
    """
    spec: LoraSpec | None = None
    if adapter.type == "lora" and (training or adapter.path is not None):
        targets = adapter.target_modules
        spec = LoraSpec(
            r=adapter.r,
            alpha=adapter.alpha,
            target_modules=targets if isinstance(targets, str) else tuple(targets),
            path=Path(adapter.path) if adapter.path is not None else None,
            seed=seed,
        )
    policy = load_policy(
        model.name, dtype=DTYPES[model.dtype], device=device_of(model), adapter=spec, revision=model.revision
    )
    if model.chat_template is not None:
        path = Path(model.chat_template)
        if not path.is_file():
            raise ConfigError(
                f"model.chat_template is {str(path)!r}, but there is no such file; give a Jinja template."
            )
        try:
            policy.set_chat_template(path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"model.chat_template {str(path)!r} cannot be read ({error}); expected a text file."
            ) from error
    return policy


def add_sampler(policy: Policy, options: SamplerAdapterConfig, *, seed: int = 0) -> None:
    """Give the policy the sampler adapter that the section asks for.

    Raises:
        ModelError: its targets match nothing, or the saved one cannot be read or does not fit.
    """
    targets = options.target_modules
    policy.add_sampler(
        LoraSpec(
            r=options.r,
            alpha=options.alpha,
            target_modules=targets if isinstance(targets, str) else tuple(targets),
            path=Path(options.path) if options.path is not None else None,
            seed=seed,
        )
    )


def load_sampler(policy: Policy, options: SavedSamplerConfig) -> None:
    """Give the policy the saved sampler adapter that the section names, if it names one.

    Raises:
        ModelError: it cannot be read or does not fit.
    """
    if options.path is not None:
        policy.add_sampler(LoraSpec(path=Path(options.path)))


def check_sampler(schedule: BudgetSchedule, options: SamplerAdapterConfig | SavedSamplerConfig) -> str | None:
    """What is to be said where the schedule was made for a sampler adapter and there is none; else None.

    Raises:
        ConfigError: there is one, and the schedule reads every page.
    """
    if options.is_on and schedule.is_dense:
        raise ConfigError(
            f"sampler_adapter is set but has no effect, because the schedule {schedule.name!r} reads every page; leave it out, or "
            "use a sparse schedule."
        )
    if options.is_on or not schedule.provenance.get("with_sampler_adapter"):
        return None
    return (
        f"note: schedule {schedule.name!r} was made for a sampler adapter; without one ([sampler_adapter]) its budgets are too "
        "small."
    )


def device_of(model: ModelConfig) -> str:
    """The torch device of `model.device`; "cuda" is the process's current one."""
    if model.device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return model.device


def build_schedule(rollout: RolloutConfig) -> BudgetSchedule:
    """The schedule with the scorer that is to be used. Raises ConfigError for a bad schedule."""
    schedule = BudgetSchedule.load(rollout.schedule)
    return schedule if rollout.scorer is None else replace(schedule, scorer=rollout.scorer)


def build_engine(
    policy: Policy, schedule: BudgetSchedule, rollout: RolloutConfig, ranks: Ranks = ALONE
) -> RolloutEngine:
    """A rollout engine on the policy. ranks: the processes that share its prompts."""
    make = RolloutEngine if ranks.size == 1 else partial(SharedEngine, ranks=ranks)
    return make(
        policy,
        schedule,
        kv_memory_gib=rollout.kv_memory_gib,
        kernel=rollout.kernel,
        max_batch_size=rollout.max_batch_size,
        kv_dtype=DTYPES[rollout.kv_dtype] if rollout.kv_dtype is not None else None,
    )


def sampling_params(policy: Policy, rollout: RolloutConfig, *, seed: int, num_top_logprobs: int = 0) -> SamplingParams:
    """How training completions are drawn."""
    return SamplingParams(
        temperature=rollout.temperature,
        top_k=rollout.top_k,
        top_p=rollout.top_p,
        min_p=rollout.min_p,
        max_completion_length=rollout.max_completion_length,
        stop_token_ids=policy.spec.stop_token_ids,
        stop_strings=rollout.stop_strings,
        seed=seed,
        num_top_logprobs=num_top_logprobs,
    )


def eval_sampling(policy: Policy, rollout: RolloutConfig, evaluation: EvalConfig) -> SamplingParams:
    """How held-out completions are drawn: as in training, but for what [eval] sets."""
    return replace(
        sampling_params(policy, rollout, seed=evaluation.seed),
        temperature=evaluation.temperature,
        max_completion_length=evaluation.max_completion_length or rollout.max_completion_length,
    )


def build_task(config: TaskConfig) -> Task:
    """The task. Its generator's seed is `task.params.seed` (0), so that runs of different `train.seed` share held-out
    prompts.

    Raises:
        ConfigError: unknown task or option, missing file or package.
    """
    options = dict(config.params)
    seed = options.pop("seed", 0)
    for name, value in (("path", config.path), ("eval_path", config.eval_path)):
        if value is not None:
            options[name] = value
    return load_task(config.name, seed=seed, **options)


def build_rewards(config: TaskConfig, task: Task, ranks: Ranks = ALONE) -> RewardRunner:
    """The weighted rewards of the recipe; the task's own where it names none. Close it after use.

    ranks: the processes that share the scoring.

    Raises:
        ConfigError: a name that is not one of the task's rewards, or a function that does not exist.
    """
    own = {spec.name: spec for spec in task.rewards}
    specs: list[RewardSpec] = []
    for reward in config.rewards:
        if reward.function is not None:
            specs.append(load_reward(reward.function, name=reward.label, weight=reward.weight))
        elif reward.name in own:
            specs.append(replace(own[reward.name], weight=reward.weight))
        else:
            raise ConfigError(
                f"task.rewards names {reward.name!r}; task {task.name!r} has {', '.join(own) or 'none'}. Use one of these, or "
                "give `function`."
            )
    make = RewardRunner if ranks.size == 1 else partial(SharedRewards, ranks=ranks)
    return make(
        specs or list(task.rewards),
        num_workers=config.reward_workers,
        time_limit_s=config.reward_timeout_s,
        on_error=config.on_reward_error,
    )


class PromptEncoder:
    """Task items to tokenised prompts, with the recipe's system prompt and few-shot text.

    Raises:
        ConfigError: no such few-shot file. ModelError (from `encode`): the tokenizer has no chat template.
    """

    def __init__(self, policy: Policy, task: TaskConfig, *, privileged: bool = False) -> None:
        """privileged: put an item's privileged text behind its last message."""
        self._privileged = privileged
        self._policy = policy
        self._system = task.system_prompt
        self._prefix = task.few_shot
        if task.few_shot_file is not None:
            path = Path(task.few_shot_file)
            if not path.is_file():
                raise ConfigError(f"task.few_shot_file is {str(path)!r}, but there is no such file; give a text file.")
            try:
                self._prefix = path.read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as error:
                raise ConfigError(
                    f"task.few_shot_file {str(path)!r} cannot be read ({error}); expected a UTF-8 text file."
                ) from error

    def encode(self, items: Sequence[TaskItem]) -> list[Prompt]:
        """One prompt per item, in order."""
        return [
            Prompt(
                index=item.index,
                token_ids=tuple(self._policy.encode_chat(self._messages(item))),
                text=item.prompt,
                columns=item.columns,
            )
            for item in items
        ]

    def _messages(self, item: TaskItem) -> list[dict[str, str]]:
        messages = [dict(message) for message in item.messages]
        if self._system is not None:
            messages = [m for m in messages if m["role"] != "system"]
            messages.insert(0, {"role": "system", "content": self._system})
        if self._prefix:
            messages[-1]["content"] = f"{self._prefix}\n\n{messages[-1]['content']}"
        if self._privileged:
            if not item.privileged:
                raise ConfigError(
                    f"teacher.privileged is set, but prompt {item.index} of the task has no privileged text; give it one (a file "
                    "task: the column `privileged`), or leave the option out."
                )
            messages[-1]["content"] += f"\n\n{item.privileged}"
        return messages
