"""Sections that say how the policy is trained and watched: rl, optimizer, train, measure, eval."""

from __future__ import annotations

import math
from typing import Annotated, Literal

from pydantic import Field, model_validator

from leanroll.config.base import Bool, Float, Int, Section

Tracker = Literal["tensorboard", "wandb", "trackio"]


class AlgorithmConfig(Section):
    """[rl]: the GRPO family, in TRL's words."""

    prompts_per_step: Int = Field(8, ge=1, description="Prompts sampled per step.")
    num_generations: Int = Field(8, ge=1, description="Completions per prompt; they form the group of the advantage.")
    loss_type: Literal["grpo", "bnpo", "dapo", "dr_grpo"] = Field(
        "dapo",
        description="Normaliser: grpo averages per sequence, then over sequences; bnpo averages over all tokens of the "
        "update, dapo divides by the mean tokens per update of the step (the same with one mini-batch); dr_grpo divides by "
        "sequences x max_completion_length.",
    )
    scale_rewards: Literal["group", "none"] = Field(
        "group",
        description="Advantage: reward minus the group's mean, divided by (the group's std + 1e-6) or by nothing.",
    )
    epsilon: Float = Field(0.2, gt=0, lt=1, description="Clip range of the policy ratio below 1.")
    epsilon_high: Float = Field(0.28, gt=0, description="Clip range of the policy ratio above 1.")
    delta: Float | None = Field(
        None,
        gt=1,
        description="Dual clip: bound on the ratio where the advantage is negative; above 1 + epsilon_high. None: off.",
    )
    beta: Float = Field(0.0, ge=0, description="Weight of the KL to the starting policy. 0: no reference is kept.")
    use_bias_correction_kl: Bool = Field(
        True,
        description="Multiply the KL estimate by the policy ratio, which makes its gradient that of the reverse KL; false: the "
        "estimate of the original GRPO.",
    )
    mask_truncated_completions: Bool = Field(
        False, description="Leave completions that hit max_completion_length out of the loss."
    )
    importance_sampling_mode: Literal["off", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask"] = (
        Field(
            "token_truncate",
            description="Correction p_old / q_sampler for the sampler's mismatch: truncate caps the weight, mask drops tokens or "
            "sequences whose weight exceeds the cap. off: none (the mismatch is still logged).",
        )
    )
    importance_sampling_cap: Float = Field(3.0, gt=0, description="Cap of the correction weight.")
    geo_mask_low: Float | None = Field(
        None,
        gt=0,
        lt=1,
        description="Completions whose geometric mean of token ratios p_old / q_sampler is lower are left out of the loss. None: "
        "no bound.",
    )
    geo_mask_high: Float | None = Field(
        None, gt=1, description="The same for a geometric mean that is higher. None: no bound."
    )
    token_veto_low: Float | None = Field(
        None,
        gt=0,
        lt=1,
        description="Completions with any token whose ratio is lower are left out of the loss, whole. None: no bound.",
    )
    token_veto_high: Float | None = Field(
        None, gt=1, description="The same for any token whose ratio is higher. None: no bound."
    )
    m2_threshold: Float | None = Field(
        None,
        gt=0,
        description="Bound on the mean squared log ratio over the step's tokens, nats²: the tokens with the largest |log ratio| "
        "get weight 0 until the rest meets it (M2PO, arXiv 2510.01161: 0.04). None: no bound.",
    )
    num_iterations: Int = Field(1, ge=1, le=64, description="Passes over each rollout batch.")
    num_mini_batches: Int = Field(
        1, ge=1, description="Optimizer updates per pass, each on a share of the groups; at most prompts_per_step."
    )
    train_generations: Int = Field(
        0,
        ge=0,
        description="Completions of each group that enter the loss: those whose rewards vary most, with advantages among "
        "themselves (PODS, arXiv 2504.13818). Where updates cost more than rollouts, sample many and train on few. 0: all.",
    )
    overlong_buffer: Int = Field(
        0,
        ge=0,
        description="Last tokens below rollout.max_completion_length over which a penalty for length grows linearly from 0; a "
        "completion that is cut there gets all of it (DAPO, arXiv 2503.14476). 0: no penalty.",
    )
    overlong_penalty: Float = Field(1.0, gt=0, description="The full penalty, taken from the total reward.")
    filter_zero_std: Bool = Field(
        True, description="Drop groups whose rewards are all equal (their advantage is 0) before the update."
    )
    resample_zero_std: Int = Field(
        0,
        ge=0,
        le=16,
        description="Extra rounds of prompts to replace dropped groups. 0: train on the groups that are left.",
    )


class OptimizerConfig(Section):
    """[optimizer]: AdamW."""

    learning_rate: Float = Field(
        1e-4,
        gt=0,
        le=1,
        description="Peak learning rate. The default suits LoRA; all-weight training wants about 1e-6.",
    )
    betas: tuple[Annotated[Float, Field(ge=0, lt=1)], Annotated[Float, Field(ge=0, lt=1)]] = Field(
        (0.9, 0.999), description="Decay of AdamW's two moments."
    )
    eps: Float = Field(1e-8, gt=0, description="Added to AdamW's denominator.")
    weight_decay: Float = Field(0.0, ge=0, description="Decoupled weight decay. 0: none.")
    max_grad_norm: Float = Field(
        1.0, ge=0, description="Gradients are scaled down to this global norm. 0: no clipping."
    )
    scheduler: Literal["constant", "linear", "cosine"] = Field(
        "constant",
        description="Learning rate after the warm-up: constant, or falling towards 0, reached one step after the last.",
    )
    warmup_steps: Int = Field(0, ge=0, description="Steps of linear warm-up from 0. 0: none.")
    decay_steps: Int = Field(
        0,
        ge=0,
        description="Last steps, over which `linear` or `cosine` falls; up to them the rate stays at its peak. 0: all after the "
        "warm-up.",
    )

    def rate_factor(self, step: int, num_steps: int) -> float:
        """Factor on the learning rate for the 1-based `step` of `num_steps`; all updates of a step share it.

        Warm-up rises linearly and reaches 1 at step `warmup_steps`; `linear` and `cosine` reach 0 one step after the last, so
        that no step is wasted. A pure function of the step, so there is no scheduler state to save.
        """
        if step < self.warmup_steps:
            return step / self.warmup_steps
        start = max(1, self.warmup_steps, num_steps - self.decay_steps if self.decay_steps else 0)
        if self.scheduler == "constant" or step <= start:
            return 1.0
        progress = (step - start) / (num_steps + 1 - start)
        return 1.0 - progress if self.scheduler == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))


class TrainConfig(Section):
    """[train]: the loop."""

    steps: Int = Field(100, ge=1, description="Steps; one is rollout, reward, score, update.")
    micro_batch_tokens: Int = Field(
        4096,
        ge=1,
        description="Tokens (prompt once + completions) per forward and backward; changes memory, never gradients.",
    )
    gradient_checkpointing: Bool = Field(
        False, description="Recompute activations in the backward pass to save memory."
    )
    sharding: Literal["none", "fsdp2"] = Field(
        "none",
        description="With several processes, what each of them keeps: none, all of the optimizer's state; fsdp2, a shard of the "
        "trained weights in fp32, their AdamW moments and summed gradients (docs/distributed.md). A launcher set up for FSDP2 "
        "turns it on too.",
    )
    seed: Int = Field(0, ge=0, lt=2**63, description="Seed of data order, sampling and adapter weights.")
    save_every: Int = Field(10, ge=0, description="Steps between checkpoints. 0: only after the last step.")
    keep_checkpoints: Int = Field(2, ge=0, description="Latest checkpoints kept. 0: all.")
    trackers: tuple[Tracker, ...] = Field(
        (), description="Experiment trackers (extra `trackers`) besides metrics.jsonl."
    )
    run_dir: str | None = Field(
        None, description="Run directory. None: runs/<name>-<date>-<time> in the current folder."
    )


class MeasureConfig(Section):
    """[measure]: how far the sampler is from the policy."""

    alpha_every: Int = Field(5, ge=0, description="Steps between measurements of exact acceptance. 0: never.")
    alpha_trajectories: Int = Field(8, ge=1, description="Completions measured each time.")
    bin_tokens: Int = Field(
        512, ge=1, description="Width of a bin of lengths (acceptance) or positions (KL, ratio), in tokens."
    )
    num_top_logprobs: Int = Field(
        0, ge=0, le=256, description="Top log-probs recorded per token for the paper-style acceptance bracket. 0: none."
    )


class EvalConfig(Section):
    """[eval]: held-out evaluation."""

    every: Int = Field(
        0, ge=0, description="Steps between evaluations. 0: only before the first and after the last step."
    )
    num_prompts: Int = Field(
        64, ge=0, description="Held-out prompts. 0: no evaluation in training, all prompts in `eval`."
    )
    num_samples: Int = Field(4, ge=1, description="Completions per prompt; k of mean@k, pass@k and maj@k.")
    temperature: Float = Field(1.0, ge=0, le=10, description="Temperature. 0: greedy, which needs num_samples = 1.")
    max_completion_length: Int | None = Field(
        None, ge=1, description="Tokens at most. None: rollout.max_completion_length."
    )
    seed: Int = Field(1234, ge=0, lt=2**63, description="Seed of the draws, the same in every evaluation of a run.")
    split: Literal["eval", "train"] = Field("eval", description="Split of the task that is evaluated.")

    @model_validator(mode="after")
    def _greedy_is_one(self) -> EvalConfig:
        if self.temperature == 0 and self.num_samples > 1:
            raise ValueError(
                f"temperature is 0 and num_samples is {self.num_samples}; greedy completions are all equal, so set "
                "num_samples = 1 or raise the temperature"
            )
        return self
