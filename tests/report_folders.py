"""Run and calibration directories as the trainer and `leanroll calibrate` leave them, with invented numbers. Loads no torch."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from leanroll.config import DistillConfig, RLConfig, to_toml, validate
from leanroll.rundir import CALIBRATION, CONFIG, ENVIRONMENT, SCHEDULE, RunDir, write_json, write_text

BIN_TOKENS = 128

RUN_PLOTS = [
    "Reward", "Rewards by name", "Tail acceptance by length", "Acceptance of the sampler",
    "Tokens with acceptance above 0.999", "Sampler KL by position", "Importance ratio by position", "Signs of collapse",
    "Completion length", "Entropy", "KL", "Log ratio of policy and sampler", "Shares", "Gradient norm",
    "Speed of rollouts", "Time per phase",
]  # fmt: skip
"""Plots on the page of `write_run`, in order."""
DISTILL_PLOTS = [
    "Reward", "Rewards by name", "Held-out completion length", "KL of student and teacher", "Entropy",
    "KL by position", "KL by position and step", "Likeliest token", "Dropped mass", "Completion length", "Tokens per step",
    "Completions cut", "Share of the KV read", "Signs of collapse", "Full-length completions", "Loss", "Gradient norm",
    "Time per phase", "Speed of rollouts", "Peak memory",
]  # fmt: skip
"""Plots on the page of `write_distillation`, in order."""
CALIBRATION_PLOTS = [
    "Schedules", "Tail by length, target 0.86", "Tail by length, target 0.9", "Tail by budget", "Mean by budget",
    "Distribution of alpha, target 0.86", "Distribution of alpha, target 0.9",
]  # fmt: skip
"""Plots on the page of `write_calibration`, in order."""


def write_run(folder: Path, *, steps: int = 12) -> RunDir:
    """A sparse run with everything that a trainer logs."""
    recipe = {"name": "demo", "rollout": {"schedule": "qwen3-4b-0.86"}, "measure": {"bin_tokens": BIN_TOKENS}}
    environment = {"versions": {"torch": "x"}, "command": "leanroll rl " + "a-very-long-name-without-a-break" * 4}
    run = RunDir.create(folder, config_toml=to_toml(validate(RLConfig, recipe)), environment=environment)
    write_json(run.path / SCHEDULE, {"name": "demo", "target": 0.88})
    for step in range(steps + 1):
        run.append_metrics({"step": step, **(_training(step) if step else {}), **_evaluation(step, steps)})
    for step in (0, steps):
        rows = {kind: {"mean_reward": 0.1 * step / steps, "num_prompts": 3} for kind in ("title", "quoted")}
        run.write_eval(step, {"mean_reward": 0.1, "tables": {"kind": rows}})
    sample = {"prompt": "<b>p</b>", "text": "answer & more " + "x" * 300, "reward": 1.0}
    run.write_rollouts(steps, [sample] * 8)
    return run


def _training(step: int) -> dict[str, float]:
    wave = math.sin(step)
    metrics = {
        "reward/mean": 0.2 + 0.02 * step, "reward/exact": 0.3 + 0.02 * step, "reward/overlong": -0.1 + 0.01 * wave,
        "completion_length/mean": 120 + 10 * wave, "completion_length/p50": 90 + 5 * wave, "completion_length/max": 320,
        "entropy": 2.4 - 0.05 * step, "sampler_kl": 0.007 + 0.001 * wave, "approx_kl": 0.0, "grad_norm": 0.3 + 0.05 * wave,
        "log_ratio/p01": -0.4, "log_ratio/p50": 0.0, "log_ratio/p99": 0.35, "kv_share_read": 0.7,
        "truncated_share": 0.1, "zero_std_share": 0.2, "is_clipped_share": 0.0, "tokens_per_second": 300 + 30 * wave,
        "time/rollout_s": 20 + wave, "time/reward_s": 0.1, "time/update_s": 15 + wave, "time/step_s": 35 + 2 * wave,
    }  # fmt: skip
    for number in range(3):
        prefix = f"mismatch/pos_{number * BIN_TOKENS}/"
        spread = 0.05 + 0.03 * number + 0.002 * step
        metrics |= {
            f"{prefix}kl": spread**2 / 2, f"{prefix}ratio_mean": 1.0, f"{prefix}ratio_p05": 1 - spread,
            f"{prefix}ratio_p50": 1.0, f"{prefix}ratio_p95": 1 + spread, f"{prefix}tokens": 2000 >> number,
        }  # fmt: skip
    if step > 4:
        metrics |= {"alarm/length": 0.1, "alarm/entropy": 0.2, "alarm/reward": 0.0, "alarm/raised": 0}
    if step % 3 == 1:
        metrics |= {"time/measure_s": 3.0}
        metrics |= {"alpha/p05": 0.9, "alpha/mean": 0.96, "alpha/share_above_0999": 0.06, "alpha/tokens": 1100}
        for number in range(3):
            prefix = f"alpha/bin_{number * BIN_TOKENS}/"
            tail = 0.92 - 0.02 * number - 0.002 * step
            metrics |= {f"{prefix}p05": tail, f"{prefix}mean": 0.96, f"{prefix}share_above_0999": 0.06}
            metrics[f"{prefix}tokens"] = 900 >> 2 * number
    return metrics


def _evaluation(step: int, steps: int) -> dict[str, float]:
    if step not in (0, steps):
        return {}
    mean = 0.2 + 0.2 * step / steps
    return {
        "eval/reward/mean": mean, "eval/low_95": mean - 0.08, "eval/high_95": mean + 0.08, "eval/mean_length": 130.0,
        "time/eval_s": 25.0,
    }  # fmt: skip


def write_distillation(folder: Path, *, steps: int = 24, done: int | None = None, evaluated: bool = True) -> RunDir:
    """A distillation with everything that a trainer logs. done: last finished step; evaluated: on held-out prompts."""
    recipe = {
        "name": "demo", "teacher": {"model": "org/<teacher>", "system_prompt": "Be brief."}, "train": {"steps": steps},
        "distill": {"num_tokens": 48, "final_num_tokens": 64, "bin_tokens": 16},
    }  # fmt: skip
    run = RunDir.create(folder, config_toml=to_toml(validate(DistillConfig, recipe)), environment={"device": "cpu"})
    done = steps if done is None else done
    for step in range(done + 1):
        metrics = _distilling(step) if step else {"preflight/first_token_kl": 0.7, "time/load_s": 5.0}
        if evaluated:
            metrics |= _evaluation(step, steps) | _probe(step, steps)
        if evaluated and not step:
            metrics |= {"eval/teacher/mean": 0.5, "eval/teacher/margin": 0.3}
            metrics |= {"eval/teacher/margin_low_95": 0.2, "eval/teacher/margin_high_95": 0.4}
        run.append_metrics({"step": step, **metrics})
    run.write_rollouts(done, [{"prompt": "<b>p</b>", "completion": "answer & more", "length": 48}] * 8)
    if evaluated:
        for step in {0, done}:
            rows = {kind: {"mean_reward": 0.1 * step / steps, "num_prompts": 3} for kind in ("title", "quoted")}
            run.write_eval(step, {"mean_reward": 0.1, "tables": {"kind": rows}})
        rows = {"title": {"mean_reward": 0.375, "num_prompts": 3}}
        run.write_teacher_eval({"mean_reward": 0.5, "low_95": 0.42, "high_95": 0.58, "tables": {"kind": rows}})
    return run


def _distilling(step: int) -> dict[str, float]:
    wave, fall = math.sin(step), math.exp(-step / 8)
    limit = min(64, 48 + step)
    metrics = {
        "distill/num_tokens": limit, "distill/reverse_kl": 0.1 + 0.6 * fall, "distill/forward_kl": 0.15 + 0.7 * fall,
        "distill/first_token_kl": 0.05 + fall, "distill/student_entropy": 2.0 - 0.02 * step, "distill/teacher_entropy": 1.4,
        "distill/student_top1": 0.5, "distill/teacher_top1_share": 0.9 - 0.3 * fall, "distill/student_dropped": 0.0,
        "distill/teacher_dropped": 1e-4, "completion_length/mean": limit - 4 + wave, "completion_length/p50": limit,
        "completion_length/max": limit, "generated_tokens": 16 * limit, "trained_tokens": 16 * limit, "truncated_share": 0.8,
        "kv_share_read": 0.7, "loss": 0.1 + 0.6 * fall, "grad_norm": 0.3 + 0.05 * wave, "tokens_per_second": 300 + 30 * wave,
        "memory/peak_rss_gib": 4.0, "memory/peak_device_gib": 12.0, "time/rollout_s": 20 + wave, "time/teacher_s": 9.0,
        "time/score_s": 4.0, "time/update_s": 15 + wave, "time/step_s": 48 + 2 * wave,
    }  # fmt: skip
    for start in range(0, limit, 16):
        prefix = f"distill/pos_{start}/"
        metrics |= {f"{prefix}reverse_kl": (0.1 + 0.6 * fall) * (1 + start / 32), f"{prefix}tokens": 250 - start}
    return metrics


def _probe(step: int, steps: int) -> dict[str, float]:
    if step not in (0, steps):
        return {}
    return {
        "eval/reward/exact": 0.3, "eval/reward/length": 0.1, "eval/truncated_share": 0.1, "probe/cap_rate": 0.1,
        "probe/loop_share": 0.0, "probe/repeated_share": 0.05, "probe/distinct_2": 0.8, "probe/length_p10": 60,
        "probe/length_p50": 130, "probe/length_p90": 400, "probe/alarms": 0, "time/probe_s": 8.0,
    }  # fmt: skip


def write_calibration(folder: Path, *, targets: tuple[float, ...] = (0.86, 0.90)) -> Path:
    """A finished calibration of four length bins."""
    folder.mkdir()
    edges = [0, 496, 992, 1488, 1984]
    budgets = (16, 24, 32, 48)
    summary = {
        "name": "demo", "model": "smollm2-135m", "scorer": "softmax", "quantile": 0.05, "confidence": 0.9, "page_size": 16,
        "bin_pages": 31, "max_tokens": 1984, "ladder": [16, 32, 64], "edges": edges, "sources": ["/texts/a.txt"],
        "held_out_sources": ["/texts/" + "a-long-name-" * 8 + ".txt"], "targets_missing": [],
        "targets": [_target(target, [int(b * (1 + 4 * (target - 0.86))) for b in budgets], edges) for target in targets],
        "passes": [
            {
                "pages": [scale * b for b in budgets], "trajectories": 8, "seconds": 30.0,
                "bins": [_stats(e, 0.84 + 0.01 * scale - 0.01 * i) for i, e in enumerate(edges[:-1])],
            }
            for scale in (1, 2, 4)
        ],
        "model_seconds": 100.0, "wall_seconds": 120.0,
    }  # fmt: skip
    write_json(folder / CALIBRATION, summary)
    write_json(folder / ENVIRONMENT, {"device": "cpu"})
    write_text(folder / CONFIG, 'name = "demo"\n')
    return folder


def _target(target: float, pages: list[int], edges: list[int]) -> dict[str, Any]:
    measured = [_stats(low, target + 0.005) for low in edges[:-1]]
    return {
        "target": target,
        "pages": pages,
        "dense_bins": [0],
        "complete": True,
        "kv_share": 0.4,
        "passes": 3,
        "scorings": 24,
        "exhaustive_scorings": 96,
        "seconds": 90.0,
        "exhaustive_seconds": 360.0,
        "fit": measured,
        "held_out": measured,
        "continuations": [None, *measured[1:]],
        "beta": {"a": 4.0, "b": 0.5, "ks": 0.04, "mean": 0.9, "std": 0.1, "num_tokens": 4000, "share": 0.3},
        "length_correlation": {"per_token": -0.1, "num_tokens": 9000, "per_window": -0.5, "num_windows": 40},
        "histogram": [int(2 + 40 * (i / 100) ** 4) for i in range(100)],
        "paper": {"exact": 0.9, "paper": 0.86, "ceiling": 0.95},
    }


def _stats(low: int, tail: float) -> dict[str, Any]:
    return {
        "low": low, "high": low + 496, "num_tokens": 4000, "num_rollouts": 8, "mean": 0.97, "tail": tail,
        "tail_low": tail - 0.01, "tail_high": tail + 0.01, "share_high": 0.3,
    }  # fmt: skip
