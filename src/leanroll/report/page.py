"""The page: closing numbers, curves, acceptance by length, evaluation tables, sample completions, recipe, environment."""

from __future__ import annotations

import html
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from leanroll.errors import ResumeError
from leanroll.report.layout import page, table
from leanroll.report.plots import Panel, draw_panels
from leanroll.rundir import RunDir, read_jsonl, write_text
from leanroll.rundir_metrics import describe_metric

PANELS = (
    Panel("Reward", ("reward/mean", "eval/reward/mean")),
    Panel("Acceptance rate of the sampler", ("alpha/p05", "alpha/mean", "alpha/share_above_0999")),
    Panel("Completion length", ("completion_length/mean", "completion_length/p50", "completion_length/max")),
    Panel("Shares", ("truncated_share", "zero_std_share", "kv_share_read", "is_clipped_share")),
    Panel("log p_old - log q_sampler", ("log_ratio/p01", "log_ratio/p50", "log_ratio/p99")),
    Panel("Entropy and KL", ("entropy", "kl_to_ref", "sampler_kl")),
    Panel("Gradient norm", ("grad_norm",)),
    Panel("Speed", ("tokens_per_second",)),
    Panel(
        "Time per phase",
        ("time/rollout_s", "time/reward_s", "time/score_s", "time/update_s", "time/measure_s", "time/eval_s"),
    ),
)

_SAMPLES = 6


def write_report(run: RunDir, output: Path) -> None:
    """Write the page of a run, atomically.

    Raises:
        ResumeError: the run has no metrics yet. ConfigError: matplotlib is not installed.
    """
    metrics = run.read_metrics()
    if not metrics:
        raise ResumeError(f"Run {str(run.path)!r} has no metrics yet; expected at least one finished step.")
    config, environment = run.read_config(), run.read_environment()
    parts = [
        f"<h1>{html.escape(str(config.get('name', 'run')))} <small>{html.escape(run.path.name)}</small></h1>",
        _summary(metrics),
        "<h2>Curves</h2>",
        f'<img alt="curves" src="data:image/png;base64,{draw_panels(PANELS, metrics)}">',
        _acceptance(metrics),
        _evaluation(run),
        _samples(run),
        f"<h2>Recipe</h2><pre>{html.escape(run.config_path.read_text(encoding='utf-8'))}</pre>",
        f"<h2>Environment</h2><pre>{html.escape(json.dumps(environment, indent=1))}</pre>",
        _legend(metrics),
    ]
    body = "\n".join(part for part in parts if part)
    write_text(output, page(run.path.name, body))


def _summary(metrics: Sequence[dict[str, Any]]) -> str:
    rows = [["steps", str(metrics[-1]["step"])]]
    for name in (
        "eval/reward/mean",
        "reward/mean",
        "completion_length/mean",
        "alpha/p05",
        "kv_share_read",
        "tokens_per_second",
    ):
        values = [record[name] for record in metrics if name in record]
        if values:
            rows.append([name, f"{values[0]:.4g} → {values[-1]:.4g}"])
    return table(["", "first → last"], rows)


def _acceptance(metrics: Sequence[dict[str, Any]]) -> str:
    measured = [record for record in metrics if any(name.startswith("alpha/bin_") for name in record)]
    if not measured:
        return ""
    last = measured[-1]
    starts = sorted({name.split("/")[1] for name in last if name.startswith("alpha/bin_")})
    columns = ("p05", "mean", "share_above_0999", "tokens")
    rows = []
    for start in starts:
        values = [last.get(f"alpha/{start}/{column}") for column in columns]
        rows.append([f"from {int(start.removeprefix('bin_'))}", *("" if v is None else f"{v:.4g}" for v in values)])
    return f"<h2>Acceptance by total length, step {last['step']}</h2>" + table(["tokens", *columns], rows)


def _evaluation(run: RunDir) -> str:
    steps = run.eval_steps()
    if not steps:
        return ""
    results = {step: json.loads(run.eval_path(step).read_text(encoding="utf-8")) for step in (steps[0], steps[-1])}
    text = "<h2>Held-out evaluation</h2>"
    names = sorted({column for result in results.values() for column in result.get("tables", {})})
    for column in names:
        keys = sorted({key for result in results.values() for key in result["tables"].get(column, {})})
        rows = []
        for key in keys:
            cells = [result["tables"].get(column, {}).get(key, {}).get("mean_reward") for result in results.values()]
            rows.append([key, *("" if cell is None else f"{cell:.3f}" for cell in cells)])
        text += table([column, *(f"mean reward, step {step}" for step in results)], rows)
    return text


def _samples(run: RunDir) -> str:
    steps = run.rollout_steps()
    if not steps:
        return ""
    records = list(read_jsonl(run.rollouts_path(steps[-1])))[:_SAMPLES]
    blocks = "".join(f"<pre>{html.escape(_sample(record))}</pre>" for record in records)
    return f"<h2>Completions of step {steps[-1]}</h2>{blocks}"


def _sample(record: dict[str, Any]) -> str:
    prompt, text = record.get("prompt", ""), record.get("completion", record.get("text", ""))
    rest = {key: value for key, value in record.items() if isinstance(value, int | float | bool)}
    return f"{prompt}\n\n→ {text}\n\n{json.dumps(rest)}"


def _legend(metrics: Sequence[dict[str, Any]]) -> str:
    names = sorted({name for record in metrics for name in record})
    known = [(name, describe_metric(name)) for name in names]
    rows = [[name, metric.unit, metric.meaning] for name, metric in known if metric is not None]
    return "<h2>Metrics</h2>" + table(["name", "unit", "meaning"], rows)
