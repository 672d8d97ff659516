"""Sections that say what runs: model, adapter, task, rollout."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from leanroll.config.base import Float, Int, Section

RESERVED_REWARD_NAMES = frozenset({"mean", "std", "min", "max", "overlong"})
"""What metrics.jsonl calls the statistics of the total reward, `reward/mean` and so on, and the penalty for length."""


class ModelConfig(Section):
    """[model]: the policy. Code from a model repository is never executed."""

    name: str = Field(
        "smollm2-135m",
        min_length=1,
        description="Folder of a Hugging Face causal LM, its hub id, or the embedded default smollm2-135m (needs no download).",
    )
    revision: str | None = Field(None, description="Branch, tag or commit of a hub id. None: the hub's default branch.")
    dtype: Literal["bfloat16", "float32"] = Field(
        "bfloat16", description="Type of the weights and of the KV cache; log-probs and losses are float32 in both."
    )
    device: str = Field(
        "auto",
        pattern=r"^(auto|cpu|cuda(:\d+)?)$",
        description="auto (the first GPU, else the CPU), cpu, cuda or cuda:N.",
    )
    chat_template: str | None = Field(
        None,
        description="File with a Jinja chat template (in recipes: relative to the recipe). None: the tokenizer's own.",
    )


class AdapterConfig(Section):
    """[adapter]: what is trained."""

    type: Literal["lora", "none"] = Field("lora", description="lora: a low-rank adapter; none: all weights.")
    r: Int = Field(32, ge=1, le=4096, description="Rank of the adapter.")
    alpha: Float = Field(64.0, gt=0, description="Scale of the adapter; its product is multiplied by alpha / r.")
    dropout: Float = Field(
        0.0,
        ge=0,
        le=0,
        description="Must be 0: with dropout the policy that is updated is not the one that generated and scored.",
    )
    target_modules: Literal["all-linear"] | tuple[str, ...] = Field(
        "all-linear", description="all-linear (every linear layer but the head), or a list of module name endings."
    )
    path: str | None = Field(
        None,
        description="Adapter folder (peft format) to continue from or to evaluate; its own r, alpha and targets count. None: a "
        "new adapter when training, the plain model in `rollout` and `eval`.",
    )


class RewardConfig(Section):
    """One entry of task.rewards."""

    name: str = Field(
        "",
        description="Scorer of the task, or the label under which `function` is logged (empty: the function's name).",
        pattern=r"^[A-Za-z0-9_.:-]*$",
    )
    function: str | None = Field(
        None,
        pattern=r"^[^:]+(\.py)?:[A-Za-z_]\w*$",
        description="file.py:function or package.module:function with the signature (prompts, completions, completion_ids, "
        "**columns) -> list of float. None: `name` is one of the task's own scorers.",
    )
    weight: Float = Field(1.0, description="Factor in the total reward; negative values penalise. 0: only logged.")

    @model_validator(mode="after")
    def _named(self) -> RewardConfig:
        if not self.name and self.function is None:
            raise ValueError("a reward needs `name` (one of the task's scorers) or `function` (file.py:function)")
        return self

    @property
    def label(self) -> str:
        """Name in the metrics: `name`, or the function's own."""
        return self.name or str(self.function).rpartition(":")[2]


class TaskConfig(Section):
    """[task]: prompts and rewards."""

    name: str = Field(
        "ifollow",
        min_length=1,
        description="ifollow, reasoning_gym:<dataset>, code, jsonl (also reads parquet), or another registered task.",
    )
    path: str | None = Field(
        None, description="Training file of a file task (in recipes: relative to the recipe). None: the task has none."
    )
    eval_path: str | None = Field(
        None, description="Held-out file of a file task. None: the task says what its held-out split is."
    )
    system_prompt: str | None = Field(
        None, description="System message before every prompt. None: the task's own, if any."
    )
    few_shot: str = Field("", description="Text put before every prompt's question. Empty: nothing.")
    few_shot_file: str | None = Field(
        None, description="File whose text is put before every prompt's question. None: `few_shot` is used."
    )
    params: dict[str, Any] = Field(
        default_factory=dict, description="Options of the task itself; the task rejects those it does not know."
    )
    rewards: tuple[RewardConfig, ...] = Field(
        (), description="Weighted rewards, each {name or function, weight}. Empty: the task's own reward with weight 1."
    )
    reward_timeout_s: Float = Field(10.0, gt=0, le=3600, description="Seconds a reward may take for one completion.")
    reward_workers: Int = Field(
        1,
        ge=0,
        le=256,
        description="Worker processes for rewards. 0: in the main process, where time limits do not apply.",
    )
    on_reward_error: Literal["fail", "zero", "drop"] = Field(
        "fail",
        description="When a reward raises or times out: fail stops the run, zero scores 0, drop leaves the completion out. "
        "Always reported with the sample.",
    )

    @model_validator(mode="after")
    def _consistent(self) -> TaskConfig:
        if self.few_shot and self.few_shot_file is not None:
            raise ValueError("few_shot and few_shot_file are both set; keep one of them")
        labels = [reward.label for reward in self.rewards]
        taken = sorted(set(labels) & RESERVED_REWARD_NAMES)
        if taken:
            raise ValueError(
                f"rewards named {taken} would be logged over the statistics of the total (reward/{taken[0]}); give them "
                "another `name`"
            )
        twice = sorted({label for label in labels if labels.count(label) > 1})
        if twice:
            raise ValueError(
                f"rewards named {twice} occur more than once; give each its own `name`, since it is logged by it"
            )
        if self.rewards and all(reward.weight == 0 for reward in self.rewards):
            raise ValueError("every reward has weight 0, so the total reward is always 0; give one of them a weight")
        return self


# The names that `kernels.scorers` knows, which loads torch and so is not imported here; a test compares them.
ScorerName = Literal[
    "mean", "softmax", "minmax", "sub4-int4", "sub4-int8", "sub8-int4", "keys-int4", "peak4-int4", "peak8-int4", "oracle-mass"
]  # fmt: skip


class RolloutConfig(Section):
    """[rollout]: how completions are generated."""

    schedule: str = Field(
        "dense",
        min_length=1,
        description="KV pages read per token by length: dense, a preset such as qwen3-4b-0.86, or a JSON file.",
    )
    scorer: ScorerName | None = Field(
        None,
        description="Page scorer: mean, softmax, minmax, sub4-int4, sub4-int8, sub8-int4, keys-int4, peak4-int4, peak8-int4, or "
        "oracle-mass (for diagnosis). None: the one the schedule was measured with.",
    )
    control: Literal["fixed", "hold"] = Field(
        "fixed",
        description="In `rl`: fixed keeps the schedule's budgets; hold measures acceptance in every step and moves the "
        "budget of each length bin so that its 5th percentile stays at the target (docs/closed-loop.md).",
    )
    target: Float | None = Field(
        None,
        gt=0,
        le=0.999,
        description="Exact acceptance that `hold` keeps the 5th percentile at. None: the schedule's own target, or 0.90 where it "
        "has none.",
    )
    calm_steps: Int = Field(
        2, ge=1, le=1000, description="Steps in a row after which a smaller budget looks safe, before `hold` takes it."
    )
    min_pages: Int = Field(
        0, ge=0, description="Least pages that `hold` reads. 0: the lowest rung, three pages more than are always read."
    )
    max_pages: Int | None = Field(None, ge=1, description="Most pages that `hold` reads. None: all of them if need be.")
    kernel: Literal["auto", "reference", "cpu", "triton"] = Field(
        "auto",
        description="Kernel backend. auto: the fastest that this machine and device have (see `leanroll doctor`).",
    )
    temperature: Float = Field(1.0, ge=0, le=10, description="Softmax temperature. 0: greedy (not for training).")
    top_p: Float = Field(1.0, gt=0, le=1, description="Nucleus mass kept. 1: off.")
    top_k: Int = Field(0, ge=0, description="Likeliest tokens kept. 0: off.")
    min_p: Float = Field(
        0.0, ge=0, lt=1, description="Least probability kept, relative to the likeliest token. 0: off."
    )
    max_completion_length: Int = Field(256, ge=1, description="Tokens generated at most, the stop token included.")
    stop_strings: tuple[Annotated[str, Field(min_length=1)], ...] = Field(
        (),
        description="A completion also ends with the token that completes one of these. Empty: only stop tokens end it.",
    )
    kv_memory_gib: Float = Field(
        1.0, gt=0, description="GiB for the KV page pool; it holds back sequences that do not fit."
    )
    max_batch_size: Int = Field(64, ge=1, le=65536, description="Sequences decoded together at most.")
    kv_dtype: Literal["bfloat16", "float32"] | None = Field(
        None, description="Type of the KV cache. None: the model's."
    )

    @model_validator(mode="after")
    def _limits_in_order(self) -> RolloutConfig:
        if self.max_pages is not None and self.max_pages < self.min_pages:
            raise ValueError(
                f"max_pages is {self.max_pages}, less than min_pages = {self.min_pages}; swap or drop them"
            )
        return self
