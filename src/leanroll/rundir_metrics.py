"""The schema of metrics.jsonl: every name, its unit and its meaning. The writer refuses names that are not here.

A name with `<…>` is a family: `time/<phase>_s` covers `time/rollout_s`. Tokens are completion tokens unless said otherwise;
"policy" is the dense model being trained, "sampler" the distribution the rollouts were drawn from.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Metric:
    """unit: SI or a count; `share` is a fraction from 0 to 1; `1` has no dimension; `nats` for log-probs and entropies."""

    unit: str
    meaning: str


SCHEMA: dict[str, Metric] = {
    # progress
    "step": Metric("count", "Optimisation step, from 1; step 0 holds the evaluation before training."),
    "completions": Metric("count", "Completions sampled in the step, resampled ones included."),
    "prompts": Metric("count", "Prompts sampled in the step, resampled ones included."),
    "generated_tokens": Metric("tokens", "Tokens generated in the step."),
    "trained_tokens": Metric("tokens", "Tokens that entered the loss (masked ones did not), counted once."),
    "trained_groups": Metric("count", "Groups that entered the loss."),
    "updates": Metric("count", "Optimizer updates in the step."),
    # reward
    "reward/mean": Metric("reward", "Mean total reward over completions."),
    "reward/std": Metric("reward", "Mean over groups of the standard deviation of the total reward."),
    "reward/min": Metric("reward", "Smallest total reward."),
    "reward/max": Metric("reward", "Largest total reward."),
    "reward/<name>": Metric("reward", "Mean of one reward, before its weight."),
    "reward_errors": Metric("count", "Rewards that raised or timed out."),
    "dropped_completions": Metric("count", "Completions left out: failed rollouts, and reward errors under `drop`."),
    "zero_std_share": Metric("share", "Groups whose rewards are all equal."),
    "advantage/std": Metric("1", "Standard deviation of the advantages that entered the loss."),
    # completions
    "completion_length/mean": Metric("tokens", "Mean length of completions."),
    "completion_length/p50": Metric("tokens", "Median length of completions."),
    "completion_length/max": Metric("tokens", "Longest completion."),
    "completion_length/min": Metric("tokens", "Shortest completion."),
    "prompt_length/mean": Metric("tokens", "Mean length of prompts."),
    "truncated_share": Metric("share", "Completions cut at max_completion_length."),
    "kv_share_read": Metric("share", "KV pages read of pages held, over decode steps, layers and KV heads."),
    # loss
    "loss": Metric("1", "Loss of the step, mean over its updates."),
    "entropy": Metric("nats", "Mean entropy of the policy per token, at the sampling temperature."),
    "kl_to_ref": Metric("nats", "Mean estimated KL of the policy to the starting policy per token."),
    "clip_share/low": Metric("share", "Tokens whose policy ratio was clipped at 1 - epsilon."),
    "clip_share/high": Metric("share", "Tokens whose policy ratio was clipped at 1 + epsilon_high."),
    "clip_share/dual": Metric("share", "Tokens whose policy ratio was clipped at delta."),
    "policy_ratio/mean": Metric("1", "Mean of pi_theta / p_old."),
    "approx_kl": Metric(
        "nats", "Mean estimated KL(old ‖ new) of the policy at the start of the step to the one being updated."
    ),
    "grad_norm": Metric("1", "Norm of the gradient before clipping, mean over updates."),
    "learning_rate": Metric("1", "Learning rate of the step's last update."),
    # correction: ratio = p_old / q_sampler
    "ratio/mean": Metric("1", "Mean of the correction ratio, before the cap."),
    "ratio/max": Metric("1", "Largest correction ratio, before the cap."),
    "ratio/min": Metric("1", "Smallest correction ratio, before the cap."),
    "ratio/weight_mean": Metric("1", "Mean of the weight that was applied, after truncation or masking."),
    "log_ratio/p01": Metric("nats", "1st percentile of log p_old - log q_sampler."),
    "log_ratio/p05": Metric("nats", "5th percentile of log p_old - log q_sampler."),
    "log_ratio/p50": Metric("nats", "Median of log p_old - log q_sampler."),
    "log_ratio/p95": Metric("nats", "95th percentile of log p_old - log q_sampler."),
    "log_ratio/p99": Metric("nats", "99th percentile of log p_old - log q_sampler."),
    "log_ratio/abs_mean": Metric("nats", "Mean of |log p_old - log q_sampler|."),
    "sequence_log_ratio/p01": Metric("nats", "1st percentile of the log ratio summed over a completion."),
    "sequence_log_ratio/p50": Metric("nats", "Median of the log ratio summed over a completion."),
    "sequence_log_ratio/p99": Metric("nats", "99th percentile of the log ratio summed over a completion."),
    "is_clipped_share": Metric(
        "share", "Tokens whose correction weight was capped or masked (would have been, with mode off)."
    ),
    "sampler_kl": Metric("nats", "KL(q_sampler ‖ p_old) per token, by the estimator k3: mean of r - log r - 1."),
    # what was too far off policy; shares and moments are of the tokens that could enter the loss
    "rejected_share/completions": Metric("share", "Completions left out for their ratios, by any of the bounds."),
    "rejected_share/tokens": Metric("share", "Tokens of those completions."),
    "rejected_share/geo_mean": Metric("share", "Completions whose geometric mean ratio is outside its bounds."),
    "rejected_share/token_veto": Metric("share", "Completions with a token whose ratio is outside its bounds."),
    "m2/before": Metric(
        "nats²",
        "Mean squared log ratio of the tokens of completions that were not rejected, before outliers are masked.",
    ),
    "m2/after": Metric("nats²", "The same without the masked outliers; at most rl.m2_threshold."),
    "m2/masked_share": Metric("share", "Tokens of those completions that got weight 0 as outliers."),
    # mismatch by completion position, over the tokens that could enter the loss: before any cap, mask or rejection by ratio;
    # r = p_old / q_sampler. The first token of a completion has position 0; <start> is the first position of a bin of
    # measure.bin_tokens.
    "mismatch/pos_<start>/kl": Metric(
        "nats", "KL(q_sampler ‖ p_old) per token, by the estimator k3: mean of r - log r - 1, positions from <start>."
    ),
    "mismatch/pos_<start>/ratio_mean": Metric("1", "Mean of the correction ratio r, positions from <start>."),
    "mismatch/pos_<start>/ratio_p05": Metric("1", "5th percentile of r, positions from <start>."),
    "mismatch/pos_<start>/ratio_p50": Metric("1", "Median of r, positions from <start>."),
    "mismatch/pos_<start>/ratio_p95": Metric("1", "95th percentile of r, positions from <start>."),
    "mismatch/pos_<start>/tokens": Metric(
        "tokens", "Tokens that could enter the loss at positions from <start>, counted once."
    ),
    "mismatch/rise": Metric(
        "nats",
        "Rise of that KL from the first bin of positions to the last, by a line through the bins, weighted by tokens.",
    ),
    # collapse alarm of RL
    "alarm/raised": Metric("count", "1 at a step where an alarm begins, else 0."),
    "alarm/<signal>": Metric(
        "1",
        "How many times past its limit in [alarm] a signal has stayed for alarm.patience steps: a sign from 1, an alarm by itself "
        "from alarm.hard; 0 within its noise.",
    ),
    # distillation: p student, q teacher, at distill.kl_temperature, over all generated tokens (in the loss or not)
    "distill/num_tokens": Metric("tokens", "Tokens generated per completion at most in the step."),
    "distill/reverse_kl": Metric("nats", "Mean KL(p ‖ q) over the full vocabulary per token."),
    "distill/forward_kl": Metric("nats", "Mean KL(q ‖ p) over the full vocabulary per token."),
    "distill/first_token_kl": Metric("nats", "Mean KL(p ‖ q) at the first token of a completion."),
    "distill/student_entropy": Metric("nats", "Mean entropy of p per token."),
    "distill/teacher_entropy": Metric("nats", "Mean entropy of q per token, on the student's tokens."),
    "distill/student_top1": Metric("1", "Mean probability of the student's likeliest token."),
    "distill/teacher_top1_share": Metric("share", "Tokens at which both sides have the same likeliest token."),
    "distill/student_dropped": Metric("1", "Mean probability of the student on ids that the teacher lacks."),
    "distill/teacher_dropped": Metric("1", "Mean probability of the teacher on ids that the student lacks."),
    "distill/pos_<start>/reverse_kl": Metric(
        "nats", "Mean KL(p ‖ q), positions from <start>; bins of distill.bin_tokens."
    ),
    # with distill.top_k: outcomes outside the teacher's top k and the sampled token are one bucket, the tail
    "distill/topk_reverse_kl": Metric(
        "nats", "Mean reverse KL with the tail as one outcome, a lower bound of KL(p ‖ q), per token."
    ),
    "distill/first_token_topk_kl": Metric(
        "nats", "Mean of that lower bound of KL(p ‖ q) at the first token of a completion."
    ),
    "distill/student_tail": Metric("1", "Mean probability of the tail under p."),
    "distill/teacher_tail": Metric("1", "Mean probability of the tail under q, as used: at least the floor."),
    "distill/tail_clamped_share": Metric("share", "Tokens at which q of the tail was raised to the floor."),
    "distill/pos_<start>/topk_reverse_kl": Metric(
        "nats", "Mean of the lower bound of KL(p ‖ q), positions from <start>; bins of distill.bin_tokens."
    ),
    # with distill.objective = "no_teacher"
    "distill/sampled_logprob": Metric("nats", "Mean log-probability of the sampled tokens under p."),
    "distill/pushed_share": Metric("share", "Tokens whose p is below distill.no_teacher_threshold."),
    "distill/pos_<start>/tokens": Metric("tokens", "Generated tokens at positions from <start>."),
    "preflight/first_token_kl": Metric("nats", "Mean KL(p ‖ q) at the first token over the preflight's prompts."),
    "preflight/student_dropped": Metric("1", "Mean probability of the student on ids that the teacher lacks, there."),
    "preflight/teacher_dropped": Metric("1", "Mean probability of the teacher on ids that the student lacks, there."),
    # full-length probes of the collapse guard; step 0 is before training
    "probe/cap_rate": Metric("share", "Probe completions that reached the length limit."),
    "probe/loop_share": Metric("share", "Probe completions that end in three or more repeats of up to 60 tokens."),
    "probe/repeated_share": Metric(
        "share", "Tokens in a block of 16 that occurred before in the same completion, mean."
    ),
    "probe/distinct_2": Metric("share", "Different pairs of neighbouring tokens of all pairs, mean over completions."),
    "probe/eos_prob": Metric(
        "1",
        "Probability of a stop token, all of them together, before each token is drawn; mean over tokens of probe completions.",
    ),
    "probe/length_p10": Metric("tokens", "10th percentile of the length of probe completions."),
    "probe/length_p50": Metric("tokens", "Median length of probe completions."),
    "probe/length_p90": Metric("tokens", "90th percentile of the length of probe completions."),
    "probe/alarms": Metric("count", "Statistics that moved further from step 0 than [guard] allows."),
    # N that adapts: the head is the first adapt.min_num_tokens positions; KL(p ‖ q), or its lower bound with distill.top_k
    "adapt/head_kl": Metric("nats", "Mean KL of the head per token, in the step's completions."),
    "adapt/head_share": Metric("1", "Mean adapt/head_kl of the last adapt.window steps over that of the first ones."),
    "adapt/probe_head_kl": Metric("nats", "Mean KL of the head per token, in the probe's completions."),
    "adapt/probe_tail_kl": Metric("nats", "Mean KL per token from position N on, in the probe's completions."),
    "adapt/move": Metric("1", "What the probe did to N of the next step: 1 extended, -1 shrunk, 0 left it."),
    # acceptance
    "alpha/p05": Metric("1", "5th percentile over tokens of the exact acceptance rate sum_v min(p, q)."),
    "alpha/mean": Metric("1", "Mean of the exact acceptance rate."),
    "alpha/share_above_0999": Metric("share", "Tokens with an exact acceptance rate above 0.999."),
    "alpha/tokens": Metric("tokens", "Tokens measured."),
    "alpha/paper_p05": Metric(
        "1", "5th percentile of the paper's measure: min(p, q) summed over ids in both top lists."
    ),
    "alpha/paper_p05_low": Metric("1", "5th percentile of the lower bound from the sampler's top log-probs."),
    "alpha/paper_p05_high": Metric("1", "5th percentile of the upper bound from the sampler's top log-probs."),
    "alpha/bin_<start>/p05": Metric("1", "5th percentile of acceptance for total lengths from <start> tokens."),
    "alpha/bin_<start>/mean": Metric("1", "Mean acceptance for total lengths from <start> tokens."),
    "alpha/bin_<start>/share_above_0999": Metric("share", "Tokens above 0.999 for total lengths from <start> tokens."),
    "alpha/bin_<start>/tokens": Metric("tokens", "Tokens measured for total lengths from <start> tokens."),
    # closed loop on the schedule (rollout.control = "hold"); <start> is the first total length of a bin of the schedule
    "control/target": Metric("1", "Acceptance that the 5th percentile of every length bin is held at."),
    "control/raised": Metric("count", "Length bins that get a larger budget after the step."),
    "control/lowered": Metric("count", "Length bins that get a smaller budget after the step."),
    "control/at_limit": Metric("count", "Length bins under the target at the largest budget they may have."),
    "control/bin_<start>/pages": Metric("pages", "Budget that the step was sampled with, total lengths from <start>."),
    "control/bin_<start>/next_pages": Metric(
        "pages", "Budget of the next step, total lengths from <start>; only where it changes."
    ),
    "control/bin_<start>/tail": Metric(
        "1", "5th percentile of acceptance since the bin came to its budget, older steps weighing less."
    ),
    "control/bin_<start>/tail_low": Metric("1", "One-sided lower bound (69 %) of that 5th percentile."),
    "control/bin_<start>/effective_tokens": Metric("tokens", "Independent tokens that this evidence is worth."),
    # sampler adapter (DistillSparse), over completion tokens from the first one on that was decoded sparsely
    "sampler_adapter/loss": Metric("1", "Loss of the sampler adapter's update: policy_loss + kl_weight · weighted KL."),
    "sampler_adapter/kl": Metric(
        "nats", "Mean KL(sparse ‖ dense) over the full vocabulary per token, before the adapter's update."
    ),
    "sampler_adapter/policy_loss": Metric("1", "ppo_weight · policy loss of the sparse sampler."),
    "sampler_adapter/grad_norm": Metric("1", "Norm of the adapter's gradient before clipping."),
    "sampler_adapter/tokens": Metric("tokens", "Tokens that enter the KL."),
    "sampler_adapter/alpha_p05": Metric(
        "1", "5th percentile of exact acceptance of these tokens, where the tail weighting asks for it."
    ),
    # evaluation
    "eval/reward/mean": Metric("reward", "Held-out mean total reward."),
    "eval/reward/<name>": Metric("reward", "Held-out mean of one reward, before its weight."),
    "eval/low_95": Metric("reward", "Lower end of the 95 % bootstrap interval of eval/reward/mean."),
    "eval/high_95": Metric("reward", "Upper end of the 95 % bootstrap interval of eval/reward/mean."),
    "eval/mean_length": Metric("tokens", "Mean length of held-out completions."),
    "eval/truncated_share": Metric("share", "Held-out completions cut at their length limit."),
    "eval/missing": Metric(
        "count", "Held-out completions without a reward: failed rollouts, and reward errors under `drop`."
    ),
    "eval/teacher/mean": Metric("reward", "Held-out mean total reward of the teacher, before training."),
    "eval/teacher/margin": Metric("reward", "Mean difference of teacher and student on the same held-out prompts."),
    "eval/teacher/margin_low_95": Metric("reward", "Lower end of the margin's paired 95 % bootstrap interval."),
    "eval/teacher/margin_high_95": Metric("reward", "Upper end of the margin's paired 95 % bootstrap interval."),
    # cost
    "tokens_per_second": Metric("tokens/s", "Generated tokens per second of rollout."),
    "time/<phase>_s": Metric(
        "s",
        "Wall time of a phase: load, preflight, rollout, reward, teacher, score, update, sampler (its adapter), measure, probe, "
        "eval, checkpoint (the last step's); step: their sum.",
    ),
    "memory/peak_rss_gib": Metric("GiB", "Largest resident memory of the main process so far."),
    "memory/peak_device_gib": Metric("GiB", "Largest memory allocated on the accelerator so far."),
}


@functools.cache
def _families() -> tuple[tuple[re.Pattern[str], str], ...]:
    found = []
    for name in SCHEMA:
        if "<" in name:
            literal = re.split(r"<\w+>", name)
            found.append((re.compile(r"[^/]+".join(re.escape(part) for part in literal)), name))
    return tuple(found)


@functools.cache
def schema_name(name: str) -> str | None:
    """The entry of the schema that covers a metric: `time/rollout_s` → `time/<phase>_s`; None when there is none."""
    if name in SCHEMA and "<" not in name:
        return name
    for pattern, family in _families():
        if pattern.fullmatch(name):
            return family
    return None


def describe_metric(name: str) -> Metric | None:
    """Unit and meaning of a metric, None when the schema does not know it."""
    entry = schema_name(name)
    return None if entry is None else SCHEMA[entry]


def is_timing(name: str) -> bool:
    """True for metrics that differ between two identical runs: times, speeds and memory."""
    return name.startswith(("time/", "memory/")) or name == "tokens_per_second"


def check_record(record: Mapping[str, Any]) -> dict[str, Any]:
    """The record as plain JSON values, `step` first.

    Raises:
        ValueError: no integer `step`, an unknown name, or a value that is not a finite number.
    """
    step = record.get("step")
    if not isinstance(step, int) or isinstance(step, bool) or step < 0:
        raise ValueError(f"a metrics record needs an integer `step` >= 0, got {step!r}")
    clean: dict[str, Any] = {"step": step}
    for name, value in record.items():
        if describe_metric(name) is None:
            raise ValueError(
                f"metric {name!r} is not in the schema; add it to leanroll.rundir_metrics with unit and meaning"
            )
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise ValueError(
                f"metric {name!r} is {value!r}; expected a finite int or float (leave out what was not measured)"
            )
        if name != "step":
            clean[name] = value
    return clean
