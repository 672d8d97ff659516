"""Options without effect: which they are in a training recipe, and why. Setting one is an error."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from leanroll.config.alarm import MIN_REFERENCE, AlarmConfig


@dataclass(frozen=True, slots=True)
class InertRule:
    """Options that do nothing while `applies` holds: setting one is an error, and resolved files leave it out. A rule counts for
    recipes that have the tables of its options."""

    options: tuple[str, ...]
    applies: Callable[[Any], bool]
    because: str


SCORELESS = "rollout.schedule is 'dense' (every page is read, none is scored)"

INERT_RULES = (
    InertRule(
        ("rollout.target", "rollout.calm_steps", "rollout.min_pages", "rollout.max_pages"),
        lambda c: c.rollout.control == "fixed",
        "rollout.control is 'fixed' (budgets do not move)",
    ),
    InertRule(
        ("rollout.control",),
        lambda c: "distill" in type(c).model_fields,
        "distillation does not measure the sampler's acceptance",
    ),
    InertRule(
        ("measure.alpha_every",),
        lambda c: c.rollout.control == "hold" and c.measure.alpha_every != 1,
        "rollout.control is 'hold', which measures acceptance in every step",
    ),
    InertRule(
        ("rl.importance_sampling_cap",),
        lambda c: c.rl.importance_sampling_mode == "off",
        "rl.importance_sampling_mode is 'off'",
    ),
    InertRule(
        ("rl.importance_sampling_cap",),
        lambda c: (
            c.rl.importance_sampling_mode.startswith("token")
            and c.rl.token_veto_high is not None
            and c.rl.token_veto_high <= c.rl.importance_sampling_cap
        ),
        "rl.token_veto_high rejects completions with such a ratio",
    ),
    InertRule(
        tuple(f"alarm.{name}" for name in AlarmConfig.model_fields if name != "on_alarm"),
        lambda c: c.alarm.on_alarm == "off",
        "alarm.on_alarm is 'off'",
    ),
    InertRule(
        ("alarm.tail_drop",),
        lambda c: not c.measure.alpha_every or c.rollout.schedule == "dense",
        "acceptance is not measured (measure.alpha_every is 0, or rollout.schedule is 'dense')",
    ),
    InertRule(
        ("alarm.tail_drop",),
        lambda c: c.rollout.control != "hold" and c.measure.alpha_every > c.alarm.window // MIN_REFERENCE,
        f"fewer than {MIN_REFERENCE} measurements of acceptance (measure.alpha_every) fall into alarm.window steps",
    ),
    InertRule(
        ("optimizer.decay_steps",), lambda c: c.optimizer.scheduler == "constant", "optimizer.scheduler is 'constant'"
    ),
    InertRule(("rl.overlong_penalty",), lambda c: c.rl.overlong_buffer == 0, "rl.overlong_buffer is 0 (no penalty)"),
    InertRule(("rl.use_bias_correction_kl",), lambda c: c.rl.beta == 0, "rl.beta is 0 (no KL)"),
    InertRule(
        ("task.reward_timeout_s",),
        lambda c: c.task.reward_workers == 0,
        "task.reward_workers is 0 (in the main process, where time limits do not apply)",
    ),
    InertRule(
        ("adapter.r", "adapter.alpha", "adapter.target_modules", "adapter.dropout", "adapter.path"),
        lambda c: c.adapter.type == "none",
        "adapter.type is 'none'",
    ),
    InertRule(
        ("adapter.r", "adapter.alpha", "adapter.target_modules"),
        lambda c: c.adapter.type == "lora" and c.adapter.path is not None,
        "adapter.path continues an adapter that has its own",
    ),
    InertRule(
        tuple(
            f"sampler_adapter.{field}"
            for field in (
                "alpha",
                "target_modules",
                "learning_rate",
                "kl_weight",
                "ppo_weight",
                "tail_weighting",
                "tail_share",
            )
        ),
        lambda c: not c.sampler_adapter.is_on,
        "sampler_adapter.r is 0 (no sampler adapter)",
    ),
    InertRule(
        ("sampler_adapter.r", "sampler_adapter.alpha", "sampler_adapter.target_modules"),
        lambda c: c.sampler_adapter.path is not None,
        "sampler_adapter.path continues an adapter that has its own",
    ),
    InertRule(
        ("sampler_adapter.tail_weighting", "sampler_adapter.tail_share"),
        lambda c: c.sampler_adapter.kl_weight == 0,
        "sampler_adapter.kl_weight is 0 (no KL)",
    ),
    InertRule(
        ("sampler_adapter.tail_share",),
        lambda c: c.sampler_adapter.tail_weighting != "cvar",
        "sampler_adapter.tail_weighting is not 'cvar'",
    ),
    InertRule(
        ("measure.alpha_trajectories", "measure.num_top_logprobs"),
        lambda c: c.measure.alpha_every == 0,
        "measure.alpha_every is 0 (never measured)",
    ),
    InertRule(
        ("eval.every", "eval.num_samples", "eval.temperature", "eval.max_completion_length", "eval.seed", "eval.split"),
        lambda c: c.eval.num_prompts == 0,
        "eval.num_prompts is 0 (no evaluation)",
    ),
    InertRule(
        (
            "guard.num_prompts",
            "guard.num_samples",
            "guard.on_alarm",
            "guard.max_cap_rise",
            "guard.max_loop_rise",
            "guard.max_repeat_rise",
            "guard.max_length_factor",
            "guard.max_eos_factor",
        ),
        lambda c: c.guard.every == 0,
        "guard.every is 0 (no guard)",
    ),
    InertRule(
        (
            "adapt.min_num_tokens",
            "adapt.factor",
            "adapt.extend_below",
            "adapt.window",
            "adapt.tail_factor",
            "adapt.calm_steps",
        ),
        lambda c: c.adapt.max_num_tokens == 0,
        "adapt.max_num_tokens is 0 (N does not adapt)",
    ),
    InertRule(
        ("distill.divergence", "distill.beta", "distill.top_k"),
        lambda c: not c.distill.asks_teacher,
        "distill.objective is 'no_teacher'",
    ),
    InertRule(
        ("distill.no_teacher_threshold", "distill.no_teacher_advantage"),
        lambda c: c.distill.asks_teacher,
        "distill.objective is 'divergence'",
    ),
    InertRule(
        ("distill.num_tokens", "distill.final_num_tokens", "distill.compare_full"),
        lambda c: c.distill.full_rollouts,
        "distill.full_rollouts is true",
    ),
    InertRule(
        ("distill.num_tokens", "distill.final_num_tokens"),
        lambda c: c.distill.per_prompt_tokens,
        "distill.per_prompt_tokens is true",
    ),
    InertRule(
        ("teacher.evaluate", "teacher.min_margin"),
        lambda c: c.eval.num_prompts == 0,
        "eval.num_prompts is 0 (no evaluation)",
    ),
    InertRule(("teacher.min_margin",), lambda c: not c.teacher.evaluate, "teacher.evaluate is false"),
    InertRule(("teacher.offload",), lambda c: c.teacher.is_student, "the teacher is the student's own base"),
    InertRule(
        ("rollout.scorer",),
        lambda c: c.rollout.schedule == "dense",
        SCORELESS,
    ),
)


def inert_options(config: BaseModel) -> dict[str, str]:
    """Options of a training recipe that have no effect there: dotted key → reason."""
    found: dict[str, str] = {}
    for rule in INERT_RULES:
        known = all(option.partition(".")[0] in type(config).model_fields for option in rule.options)
        if known and rule.applies(config):
            found.update({option: rule.because for option in rule.options})
    return found


def reject_inert(config: BaseModel) -> None:
    """Raise ValueError when an option was set explicitly that has no effect."""
    for option, because in inert_options(config).items():
        section, _, field = option.partition(".")
        if field in getattr(config, section).model_fields_set:
            raise ValueError(f"{option} is set but has no effect, because {because}; remove it or change that")
