"""Run, calibration and profile directories as the trainer, `leanroll calibrate` and `leanroll profile` leave them, with invented
numbers. Loads no torch."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from leanroll.config import DistillConfig, RLConfig, to_toml, validate
from leanroll.rundir import CALIBRATION, CONFIG, ENVIRONMENT, PROFILE, SCHEDULE, RunDir, write_json, write_text

BIN_TOKENS = 128

RUN_PLOTS = [
    "Reward", "Rewards by name", "Tail acceptance by length", "Budgets by length", "Held tail by length",
    "Acceptance of the sampler",
    "Tokens with acceptance above 0.999", "Sparse sampler and dense policy",
    "Sampler KL by position", "Importance ratio by position", "Signs of collapse",
    "Completion length", "Entropy", "KL", "Log ratio of policy and sampler", "Shares", "Gradient norm",
    "Speed of rollouts", "Time per phase",
]  # fmt: skip
"""Plots on the page of `write_run`, in order."""
DISTILL_PLOTS = [
    "Reward", "Rewards by name", "Held-out completion length", "KL of student and teacher", "Entropy",
    "KL by position", "KL by position and step", "Likeliest token", "Dropped mass", "Completion length", "Tokens per step",
    "Completions cut", "Share of the KV read", "Signs of collapse", "P(EOS)", "Full-length completions", "Loss", "Gradient norm",
    "Time per phase", "Speed of rollouts", "Peak memory",
]  # fmt: skip
"""Plots on the page of `write_distillation`, in order."""
CALIBRATION_PLOTS = [
    "Schedules", "Tail by length, target 0.86", "Tail by length, target 0.9", "Tail by budget", "Mean by budget",
    "Distribution of alpha, target 0.86", "Distribution of alpha, target 0.9",
]  # fmt: skip
"""Plots on the page of `write_calibration`, in order."""
PROFILE_PLOTS = [
    "KL by position", "Entropies by position", "Completions by position", "Cumulative KL", "Teacher decay", "Seconds per step",
]  # fmt: skip
"""Plots on the page of `write_profile`, in order."""
RUN_PROFILE_PLOTS = [
    "KL on the base completions", "KL after / before by position", "Base completions by position", "KL on own completions",
    "Where the student's likeliest token stands with the teacher", "Completion length", "Completion length, quantiles",
    "P(EOS) on the base completions", "KL by category", "KL by category and position, before", "KL by category and position, after",
    "Share of the KL by category and position",
]  # fmt: skip
"""Plots on the page of `write_run_profile`, in order."""


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
    metrics |= {"control/target": 0.9, "control/raised": 0, "control/lowered": int(step == 4), "control/at_limit": 0}
    for number, start in enumerate((1, 1985, 3985)):
        prefix = f"control/bin_{start}/"
        metrics[f"{prefix}pages"] = (64 if step <= 4 else 45) << number
        if step == 4:
            metrics[f"{prefix}next_pages"] = 45 << number
        if number < 2:  # nothing was as long as the third
            metrics |= {f"{prefix}tail": 0.93 - 0.01 * number, f"{prefix}tail_low": 0.92 - 0.01 * number}
            metrics[f"{prefix}effective_tokens"] = 300.0
    metrics["sampler_adapter/kl"] = 0.05 / step
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
        "probe/loop_share": 0.0, "probe/repeated_share": 0.05, "probe/eos_prob": 0.007, "probe/distinct_2": 0.8,
        "probe/length_p10": 60, "probe/length_p50": 130, "probe/length_p90": 400, "probe/alarms": 0, "time/probe_s": 8.0,
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


def write_profile(folder: Path) -> Path:
    """A profile before training, of completions of up to 160 tokens."""
    starts = list(range(0, 160, 16))
    means = [0.9 * math.exp(-start / 60) + 0.2 for start in starts]
    entropies = [2.0 - 0.004 * start for start in starts]
    costs = [
        {"num_tokens": n, "generated": 16 * n, "teacher_inputs": 20 * n, "student_inputs": 18 * n, "rollout_s": n / 8,
         "teacher_s": n / 30, "update_s": n / 10, "step_s": n * (1 / 8 + 1 / 30 + 1 / 10)}
        for n in (24, 160)
    ]  # fmt: skip
    kinds = {"title": {"continued": 0.5, "own_prefix": 0.6, "student": 0.2, "num_prompts": 5}}
    points = [
        {"k": k, "num_prompts": 60 - k // 4, "continued": _around(0.7 - k / 300), "at_zero": _around(0.7),
         "student": _around(0.3), "own_prefix": _around(0.69), "difference": _around(-k / 300), "by_kind": kinds}
        for k in (0, 25, 50, 100)
    ]  # fmt: skip
    found = {
        "kind": "before", "name": "demo", "model": "smollm2-135m", "teacher": "the student's base, privileged prompt",
        "max_completion_length": 160, "step": {"prompts_per_step": 16, "num_generations": 1}, "findings": _FINDINGS,
        "lengths": {"num": 64, "p10": 20.0, "p50": 90.0, "p90": 160.0, "mean": 92.5, "capped_share": 0.2},
        "curves": _curves(starts, means) | {
            "student_entropy": _curves(starts, entropies)["reverse_kl"],
            "teacher_entropy": _curves(starts, [0.7 * e for e in entropies])["reverse_kl"],
        },
        "cumulative_kl": [math.sqrt((t + 1) / 160) for t in range(160)],
        "choice": {"num_tokens": 33, "low": 28, "high": 40, "level": 0.95, "share": 0.45, "knee": 50},
        "decay": {"points": points, "threshold": 50, "notes": []}, "delta": 0.1,
        "rates": {"full_rollout": 300.0, "teacher": 900.0, "student": 700.0, "update_factor": 3.0}, "costs": costs,
    }  # fmt: skip
    return _profile_folder(folder, found)


def write_run_profile(folder: Path) -> Path:
    """A profile after training at N = 40, of completions of up to 160 tokens."""
    starts = sorted({*range(0, 160, 16), 40})
    stops = [*starts[1:], 160]
    before = [0.9 * math.exp(-start / 60) + 0.2 for start in starts]
    after = [kl * (0.55 if start < 40 else 0.68 + 0.001 * start) for kl, start in zip(before, starts, strict=True)]
    counts = [64 - start // 3 for start in starts]
    own_starts = list(range(0, 160, 16))
    shares = {
        "base": {"own": (0.71, 0.29, 0.59, 0.12), "common": (0.68, 0.35, 0.53, 0.12)},
        "trained": {"own": (0.79, 0.42, 0.47, 0.11), "common": (0.74, 0.48, 0.42, 0.10)},
    }
    names = ("num_positions", "top1", "rank_1", "rank_2_to_5", "rank_above_5")
    found = {
        "kind": "after", "name": "demo", "run": "demo-20260102", "model": "smollm2-135m",
        "teacher": "the student's base, privileged prompt, which has a rather long description of what it is", "step": 60,
        "num_steps": 60, "max_completion_length": 160, "num_prompts": 64, "trained_tokens": 40, "untrained_share": 0.66,
        "bin_tokens": 16, "level": 0.95, "findings": _FINDINGS,
        "cascade": {
            "base": {
                "starts": starts, "stops": stops, "num_trajectories": counts,
                "num_tokens": [n * (b - a) for n, a, b in zip(counts, starts, stops, strict=True)], "before": before,
                "after": after, "ratio": [*(a / b for a, b in zip(after[:-1], before[:-1], strict=True)), None],
                "trained": [stop <= 40 for stop in stops], "trained_ratio": _estimated(0.55),
                "untrained_ratio": _estimated(0.75),
            },
            "own": {
                "before": _curves(own_starts, [0.9 * math.exp(-start / 60) + 0.2 for start in own_starts]),
                "after": _curves(own_starts[:8], [0.5 * math.exp(-start / 60) + 0.14 for start in own_starts[:8]]),
                "trained_ratio": _estimated(0.56), "untrained_ratio": _estimated(0.8),
            },
        },
        "commitment": {
            "top_share": 0.1,
            "models": {
                model: {where: dict(zip(names, (560, *row), strict=True)) for where, row in kinds.items()}
                for model, kinds in shares.items()
            },
        },
        "completions": {
            "base": _completions(90, 1.0), "trained": _completions(70, 0.7, boxed={"share_many": 0.1, "mean_count": 0.9}),
            "teacher": _completions(100, 1.1),
        },
        "stops": {
            "temperature": 0.7,
            "models": {
                name: {"mean": mean, "by_position": [mean * i / 5 for i in range(10)]}
                for name, mean in (("base", 0.011), ("trained", 0.014), ("teacher", 0.00004))
            },
        },
        "categories": {
            "before": _category_table(own_starts, 1.0), "after": _category_table(own_starts, 0.7),
            "ratios": {name: None if name == "latex" else _estimated(0.7) for name in _CATEGORIES},
        },
    }  # fmt: skip
    return _profile_folder(folder, found)


_FINDINGS = [
    {"name": "tokenizers", "level": "ok", "text": "Both sides share 49152 ids.", "value": None, "limit": None},
    {
        "name": "templates",
        "level": "warning",
        "text": "The <b>templates</b> differ " + "x" * 90,
        "value": 1.0,
        "limit": 2.0,
    },
]
_CATEGORIES = ("stop", "latex", "number", "operator", "planning", "structural", "continuation")


def _profile_folder(folder: Path, found: dict[str, Any]) -> Path:
    folder.mkdir()
    write_json(folder / PROFILE, found)
    write_json(folder / ENVIRONMENT, {"device": "cpu"})
    write_text(folder / CONFIG, 'name = "demo"\n')
    return folder


def _around(mean: float) -> dict[str, float]:
    return {"mean": mean, "low": mean - 0.05, "high": mean + 0.05, "level": 0.95}


def _estimated(value: float) -> dict[str, float]:
    return {"value": value, "low": value - 0.05, "high": value + 0.05, "level": 0.95}


def _curves(starts: list[int], means: list[float]) -> dict[str, Any]:
    """The last bin rests on one completion, so that it has no interval."""
    low, high = ([*(mean * f for mean in means[:-1]), None] for f in (0.9, 1.1))
    return {
        "bin_tokens": 16, "level": 0.95, "starts": starts, "num_trajectories": [64 - start // 3 for start in starts],
        "num_tokens": [900 - start for start in starts], "reverse_kl": {"mean": means, "low": low, "high": high},
    }  # fmt: skip


def _completions(median: int, spread: float, boxed: dict[str, float] | None = None) -> dict[str, Any]:
    lengths = [min(160, max(3, round(median + spread * 60 * math.sin(i)))) for i in range(64)]
    ordered = sorted(lengths)
    stats = {"p10": ordered[6], "p50": ordered[32], "p90": ordered[57], "mean": sum(lengths) / 64}
    report = {
        "num_completions": 64, "max_completion_length": 160, "cap_rate": 0.1, "periodic_tail": 0.03, "repeated": 0.05,
        "distinct_2": 0.9, "lengths": stats, "eos_prob": 1 / median, "boxed": boxed,
    }  # fmt: skip
    accuracy = None if boxed is None else {"first": 0.52, "last": 0.48, "relaxed": 0.53, "num_completions": 64}
    return {"report": report, "lengths": lengths, "boxed_accuracy": accuracy}


def _category_table(starts: list[int], scale: float) -> dict[str, Any]:
    rows = []
    for number, name in enumerate(_CATEGORIES):
        used = name != "latex"
        means = [
            scale * (0.2 + 0.1 * number + 0.001 * start) if used and (start + number) % 5 else None for start in starts
        ]
        rows.append({
            "category": name, "num_tokens": 100 * number + 7 if used else 0, "num_trajectories": 60 if used else 0,
            "token_share": number / 20 if used else 0.0, "kl_share": number / 20 if used else 0.0,
            "mean": _estimated(scale * (0.2 + 0.1 * number)) if used else None, "bin_tokens": [40] * len(starts),
            "bin_mean": means, "bin_share": [None if mean is None else mean / 60 for mean in means],
        })  # fmt: skip
    return {"starts": starts, "rows": rows}
