"""Does training on sparse rollouts learn as much as on dense ones? `ifollow`, the default model, several seeds.

    python -m benchmarks.rl_ifollow [--work-dir runs/rl_ifollow] [--seeds 0 1 2] [--steps N] [--prompts 1000]
    [--jobs N] [--report FILE] [--plot FILE]

Trains recipes/ifollow_sparse.toml and recipes/ifollow_dense.toml per seed, then evaluates the base model and every
final policy on the same held-out prompts (unseen topics and parameters, some unseen kinds) with the same draws and
*dense* decoding: what is compared are policies, not samplers. Takes hours on two cores; everything finished is kept
in the work directory and not done again. `--jobs 2` trains and evaluates two policies side by side, each on half of the
cores: faster together than one after the other, while the time per step that it reports is no longer that of the recipe.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks._common import print_result, progress
from benchmarks._rl import final_adapter, finish_run, last_step, mean_of
from leanroll.config import EvaluateConfig, load_config
from leanroll.environment import usable_cores
from leanroll.report.plots import new_figure
from leanroll.rundir import RunDir, read_jsonl, write_json, write_jsonl, write_text
from leanroll.tasks.metrics import Interval, bootstrap_mean, paired_difference

RECIPES = Path(__file__).parent.parent / "recipes"
METHODS = ("sparse", "dense")
ROUND = 4
"""Steps in which every trained kind of constraint comes up once."""
TASK_REWARD = "reward/ifollow"

CHUNK = 100
"""Held-out prompts per call and per line of progress; a broken-off evaluation repeats at most these."""


@dataclass(frozen=True, slots=True)
class Rewards:
    """rewards: [P], held-out reward per prompt. kinds, seen: [P], its kind of constraint and whether training had
    it."""

    rewards: np.ndarray
    kinds: np.ndarray
    seen: np.ndarray


def evaluate(name: str, adapter: Path | None, num_prompts: int, folder: Path) -> Rewards:
    """Reward of one dense completion per held-out prompt; continues an evaluation that was broken off."""
    path = folder / f"{name}.jsonl"
    rows = list(read_jsonl(path)) if path.exists() else []
    if len(rows) < num_prompts:
        rows = _evaluate_rest(name, adapter, num_prompts, path, rows)
    rows = rows[:num_prompts]
    return Rewards(
        np.array([np.nan if r["reward"] is None else r["reward"] for r in rows], dtype=float),
        np.array([r["kind"] for r in rows]),
        np.array([r["seen_kind"] for r in rows]),
    )


def _evaluate_rest(
    name: str, adapter: Path | None, num_prompts: int, path: Path, rows: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    from leanroll.train import evaluation, setup

    overrides = [] if adapter is None else [("adapter.path", str(adapter))]
    config = load_config(EvaluateConfig, RECIPES / "ifollow_dense.toml", overrides)
    policy = setup.build_policy(config.model, config.adapter, training=False)
    engine = setup.build_engine(policy, setup.build_schedule(config.rollout), config.rollout)
    task = setup.build_task(config.task)
    encoder = setup.PromptEncoder(policy, config.task)
    items = task.eval_items(num_prompts)
    sampling = setup.eval_sampling(policy, config.rollout, config.eval)
    with setup.build_rewards(config.task, task) as rewards:
        for start in range(len(rows), num_prompts, CHUNK):
            chunk = items[start : min(start + CHUNK, num_prompts)]
            result = evaluation.evaluate(engine, rewards, chunk, encoder.encode(chunk), sampling, 1)
            rows += [
                {
                    "index": item.index,
                    "kind": item.columns["kind"],
                    "seen_kind": item.columns["seen_kind"],
                    "reward": None if np.isnan(reward) else float(reward),
                    "length": len(group.rollouts[0].token_ids) if group.rollouts else 0,
                }
                for item, group, reward in zip(chunk, result.groups, result.rewards[:, 0], strict=True)
            ]
            write_jsonl(path, rows)
            mean = np.mean([r["reward"] for r in rows if r["reward"] is not None])
            progress(f"{name}: {len(rows)} of {num_prompts} held-out prompts, reward {mean:.3f}")
    return rows


def compare(base: Rewards, finals: dict[str, list[Rewards]]) -> dict[str, Any]:
    """Intervals of the means, of the gains over the base, and of sparse minus dense: all over prompts, seeds averaged
    first."""
    means = {method: np.mean([r.rewards for r in runs], axis=0) for method, runs in finals.items()}
    result: dict[str, Any] = {"base": _interval(bootstrap_mean(base.rewards))}
    for method, values in means.items():
        result[method] = _interval(bootstrap_mean(values))
        result[f"{method}_gain"] = _interval(paired_difference(values, base.rewards))
        result[f"{method}_by_seed"] = [round(float(np.nanmean(r.rewards)), 4) for r in finals[method]]
    result["sparse_minus_dense"] = _interval(paired_difference(means["sparse"], means["dense"]))
    for label, wanted in (("seen_kinds", True), ("unseen_kinds", False)):
        rows = base.seen == wanted
        if rows.any():
            part = {"base": base.rewards, **means}
            result[label] = {k: round(float(np.nanmean(v[rows])), 4) for k, v in part.items()} | {
                "prompts": int(rows.sum())
            }
    return result


def _interval(interval: Interval) -> dict[str, float]:
    return {"mean": round(interval.mean, 4), "low": round(interval.low, 4), "high": round(interval.high, 4)}


def report(
    result: dict[str, Any],
    base: Rewards,
    finals: dict[str, list[Rewards]],
    runs: dict[str, list[RunDir]],
    curves: str,
) -> str:
    """Markdown: the comparison, the reward curves, and the table by kind. curves: the plot, as the page links to it."""
    seeds = ", ".join(map(str, result["seeds"]))
    lines = [
        "# RL on `ifollow`: sparse against dense rollouts",
        "",
        "`recipes/ifollow_sparse.toml` and `ifollow_dense.toml`, which differ in the schedule of rollouts alone: "
        f"{result['steps']} steps, seeds {seeds}. Every policy is then evaluated with dense decoding on the same "
        f"{result['prompts']} held-out prompts, one completion each; intervals are bootstrapped over prompts, after averaging over "
        "seeds. Written by `python -m benchmarks.rl_ifollow`.",
        "",
        "| | held-out reward | 95 % interval | by seed |",
        "|---|---|---|---|",
    ]
    for key in ("base", "sparse", "dense", "sparse_gain", "dense_gain", "sparse_minus_dense"):
        row = result[key]
        by_seed = " ".join(f"{value:.3f}" for value in result.get(f"{key}_by_seed", ()))
        name = key.replace("_", " ").replace("minus", "−")
        lines.append(f"| {name} | {row['mean']:.3f} | {row['low']:.3f} … {row['high']:.3f} | {by_seed} |")
    lines += ["", "| | prompts | base | sparse | dense |", "|---|---|---|---|---|"]
    for label in (label for label in ("seen_kinds", "unseen_kinds") if label in result):
        part = result[label]
        rewards = " | ".join(f"{part[name]:.3f}" for name in ("base", *METHODS))
        lines.append(f"| {label.replace('_', ' ')} | {part['prompts']} | {rewards} |")
    lines += [
        "",
        f"Sparse rollouts read {100 * result['kv_share_read']:.0f} % of the keys and values; the 5th percentile of their "
        f"acceptance was {result['alpha_p05']:.3f} on average, {result['alpha_p05_lowest']:.3f} at its lowest.",
        "",
        f"![training reward and acceptance]({curves})",
    ]
    lines += ["", f"## Training reward, means of {ROUND} steps (a round of all kinds) over all seeds", ""]
    lines += ["| steps | sparse | dense | sparse alpha p05 | sparse KV read | tokens per completion, sparse | dense |"]
    lines += ["|---|---|---|---|---|---|---|"]
    records = {method: [_steps(run) for run in group] for method, group in runs.items()}
    for start in range(0, _num_steps(runs), ROUND):
        rows = {m: [r for steps in group for r in steps[start : start + ROUND]] for m, group in records.items()}
        alphas = [r["alpha/p05"] for r in rows["sparse"] if "alpha/p05" in r]
        cells = [
            f"{start + 1}–{min(start + ROUND, _num_steps(runs))}",
            *(f"{mean_of(rows[m], TASK_REWARD):.3f}" for m in METHODS),
            f"{np.mean(alphas):.3f}" if alphas else "",
            f"{mean_of(rows['sparse'], 'kv_share_read'):.2f}",
            *(f"{mean_of(rows[m], 'completion_length/mean'):.0f}" for m in METHODS),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    lines += [
        "",
        "## Held-out reward by kind",
        "",
        "| kind | prompts | base | sparse | dense |",
        "|---|---|---|---|---|",
    ]
    for kind in sorted(set(base.kinds)):
        rows = base.kinds == kind
        values = [np.nanmean(base.rewards[rows])]
        values += [np.mean([np.nanmean(r.rewards[rows]) for r in finals[method]]) for method in METHODS]
        mark = "" if base.seen[rows].all() else " (unseen)"
        lines.append(f"| {kind}{mark} | {rows.sum()} | " + " | ".join(f"{v:.2f}" for v in values) + " |")
    return "\n".join(lines) + "\n"


def _steps(run: RunDir) -> list[dict[str, Any]]:
    return [r for r in run.read_metrics() if r["step"] > 0]


def _num_steps(runs: dict[str, list[RunDir]]) -> int:
    return min(len(_steps(run)) for group in runs.values() for run in group)


def plot(runs: dict[str, list[RunDir]], path: Path) -> None:
    """Task reward over steps, smoothed over a round of all kinds: every seed thin, the mean bold; and sparse alpha."""
    figure = new_figure(9.0, 3.4)
    reward, alpha = figure.subplots(1, 2)
    steps = np.arange(ROUND, _num_steps(runs) + 1)
    for method, colour in zip(METHODS, ("tab:blue", "tab:orange"), strict=True):
        curves = []
        for run in runs[method]:
            values = np.array([r[TASK_REWARD] for r in _steps(run)[: steps[-1]]])
            curves.append(np.convolve(values, np.full(ROUND, 1 / ROUND), mode="valid"))
            reward.plot(steps, curves[-1], color=colour, linewidth=0.7, alpha=0.5)
        reward.plot(steps, np.mean(curves, axis=0), color=colour, linewidth=2, label=f"{method} rollouts")
    for seed, run in enumerate(runs["sparse"]):
        points = [(r["step"], r["alpha/p05"]) for r in _steps(run) if "alpha/p05" in r]
        alpha.plot(*zip(*points, strict=True), marker=".", linewidth=1, label=f"run {seed + 1}")
    alpha.axhline(0.86, color="grey", linestyle="--", linewidth=1, label="0.86")
    reward.set_title(f"training reward, means of {ROUND} steps", fontsize=10)
    alpha.set_title("sparse rollouts: 5th percentile of acceptance", fontsize=10)
    for axes in (reward, alpha):
        axes.set_xlabel("step")
        axes.grid(alpha=0.25)
        axes.legend(fontsize=8)
    figure.savefig(path)


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line of the module docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work-dir", type=Path, default=Path("runs/rl_ifollow"))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, help="steps per run (default: the recipes')")
    parser.add_argument("--prompts", type=int, default=1000, help="held-out prompts of the final evaluation")
    parser.add_argument("--jobs", type=int, default=1, help="policies trained or evaluated side by side")
    parser.add_argument(
        "--report", type=Path, help="Markdown file for curves and tables (default: in the work directory)"
    )
    parser.add_argument("--plot", type=Path, help="SVG or PNG file of the curves (default: in the work directory)")
    options = parser.parse_args(arguments)
    folder = options.work_dir / "evaluation"
    folder.mkdir(parents=True, exist_ok=True)
    steps = [] if options.steps is None else [("train.steps", str(options.steps))]

    threads = None if options.jobs == 1 else max(1, usable_cores() // options.jobs)
    pairs = [(seed, method) for seed in options.seeds for method in METHODS]

    def train(pair: tuple[int, str]) -> RunDir:
        seed, method = pair
        overrides = [*steps, ("train.seed", str(seed))]
        return finish_run(
            RECIPES / f"ifollow_{method}.toml", options.work_dir / f"{method}-seed{seed}", overrides, threads
        )

    with ThreadPoolExecutor(options.jobs) as pool:
        trained = dict(zip(pairs, pool.map(train, pairs), strict=True))
    # The step count is in the name: an evaluation of a shorter run is not taken for this one's.
    policies: list[tuple[str, Path | None]] = [("base", None)]
    policies += [(f"{run.path.name}-step{last_step(run.path)}", final_adapter(run)) for run in trained.values()]
    if threads is not None:
        os.environ["OMP_NUM_THREADS"] = str(threads)
    # Processes of their own, which read that variable.
    with ProcessPoolExecutor(options.jobs, multiprocessing.get_context("spawn")) as pool:
        futures = [pool.submit(evaluate, name, adapter, options.prompts, folder) for name, adapter in policies]
        base, *rest = [future.result() for future in futures]
    runs = {m: [run for (_, method), run in trained.items() if method == m] for m in METHODS}
    finals = {m: [r for (_, method), r in zip(pairs, rest, strict=True) if method == m] for m in METHODS}
    result = compare(base, finals)
    sparse_steps = [r for run in runs["sparse"] for r in _steps(run)]
    result |= {
        "prompts": options.prompts,
        "seeds": options.seeds,
        "steps": last_step(runs["sparse"][0].path),
        "kv_share_read": round(mean_of(sparse_steps, "kv_share_read"), 4),
        "alpha_p05": round(mean_of(sparse_steps, "alpha/p05"), 4),
        "alpha_p05_lowest": round(min(r["alpha/p05"] for r in sparse_steps if "alpha/p05" in r), 4),
        "minutes_per_run": {
            m: round(sum(r.get("time/step_s", 0.0) for run in group for r in run.read_metrics()) / len(group) / 60, 1)
            for m, group in runs.items()
        },
    }
    write_json(options.work_dir / "result.json", result)
    report_path, curves = (
        options.report or options.work_dir / "report.md",
        options.plot or options.work_dir / "curves.svg",
    )
    plot(runs, curves)
    write_text(report_path, report(result, base, finals, runs, os.path.relpath(curves, report_path.parent)))
    print_result("rl_ifollow", result)


if __name__ == "__main__":
    main()
