"""The page of a run: its numbers, plots, acceptance by length, evaluation, sample completions, recipe, environment."""

from __future__ import annotations

import html
import json
from pathlib import Path
from typing import Any

from leanroll.errors import ResumeError
from leanroll.report.curves import Panel, Records, draw_panel, draw_phases, draw_rewards
from leanroll.report.layout import grid, page, table
from leanroll.report.mismatch import acceptance_table, draw_kl_by_position, draw_ratio_by_position, draw_tails
from leanroll.rundir import SCHEDULE, RunDir, read_jsonl, write_text
from leanroll.rundir_metrics import SCHEMA, describe_metric, schema_name

_TOTALS = ("mean", "std", "min", "max")

ACCEPTANCE = Panel(
    "Acceptance of the sampler",
    (
        ("alpha/p05", "5th percentile"),
        ("alpha/mean", "mean"),
        ("alpha/paper_p05", "paper's measure, 5th percentile"),
    ),
    "All lengths",
)
ACCEPTED = Panel("Tokens with acceptance above 0.999", (("alpha/share_above_0999", "share"),))
COMMON = (
    Panel(
        "Completion length",
        (
            ("completion_length/mean", "mean"),
            ("completion_length/p50", "median"),
            ("completion_length/max", "longest"),
            ("eval/mean_length", "held out, mean"),
        ),
    ),
    Panel("Entropy", (("entropy", "policy"),), "Of the policy per token, at the sampling temperature"),
    Panel(
        "KL",
        (("sampler_kl", "sampler ‖ policy"), ("kl_to_ref", "policy ‖ start"), ("approx_kl", "old ‖ new policy")),
        "Per token, estimated",
    ),
    Panel(
        "Log ratio of policy and sampler",
        (("log_ratio/p01", "1st percentile"), ("log_ratio/p50", "median"), ("log_ratio/p99", "99th percentile")),
        "log p_old - log q_sampler",
    ),
    Panel(
        "Shares",
        (
            ("kv_share_read", "KV read"),
            ("truncated_share", "completions cut"),
            ("zero_std_share", "groups of equal rewards"),
            ("is_clipped_share", "tokens with capped weight"),
        ),
    ),
    Panel("Gradient norm", (("grad_norm", "before clipping"),)),
    Panel("Speed of rollouts", (("tokens_per_second", "generated"),)),
)

_SUMMARY = (
    ("eval/reward/mean", "held-out reward"),
    ("reward/mean", "training reward"),
    ("completion_length/mean", "completion length"),
    ("alpha/p05", "5th-percentile acceptance"),
    ("kv_share_read", "share of the KV read"),
    ("tokens_per_second", "rollout speed"),
    ("time/step_s", "time per step"),
)
_SAMPLES = 6


def write_report(run: RunDir, output: Path) -> None:
    """Write the page of a run, atomically.

    Raises:
        ResumeError: the run has no metrics yet. MissingExtra: matplotlib is not installed.
    """
    records = run.read_metrics()
    if not records:
        raise ResumeError(f"Run {str(run.path)!r} has no metrics yet; expected at least one finished step.")
    config, environment = run.read_config(), run.read_environment()
    parts = [
        f"<h1>{html.escape(str(config.get('name', 'run')))} <small>{html.escape(run.path.name)}</small></h1>",
        _summary(records),
        "<h2>Curves</h2>",
        grid(_figures(run, records, config)),
        acceptance_table(records),
        _evaluation(run),
        _samples(run),
        f"<h2>Recipe</h2><pre>{html.escape(run.config_path.read_text(encoding='utf-8'))}</pre>",
        f"<h2>Environment</h2><pre>{html.escape(json.dumps(environment, indent=1))}</pre>",
        _legend(records),
    ]
    body = "\n".join(part for part in parts if part)
    write_text(output, page(run.path.name, body))


def _figures(run: RunDir, records: Records, config: dict[str, Any]) -> list[str]:
    """Those that the run has data for."""
    bin_tokens = config.get("measure", {}).get("bin_tokens", 0)
    figures = [
        draw_rewards(records),
        draw_panel(_rewards_by_name(records), records),
        draw_tails(records, _schedule_target(run)),
        draw_panel(ACCEPTANCE, records),
        draw_panel(ACCEPTED, records),
        draw_kl_by_position(records, bin_tokens),
        draw_ratio_by_position(records, bin_tokens),
        *(draw_panel(panel, records) for panel in COMMON),
        draw_phases(records),
    ]
    return [figure for figure in figures if figure]


def _rewards_by_name(records: Records) -> Panel:
    """Of training; without lines where there is only one reward, which is the total's plot."""
    names = sorted(
        {name.removeprefix("reward/") for r in records for name in r if name.startswith("reward/")} - {*_TOTALS}
    )
    lines = tuple((f"reward/{name}", name) for name in names) if len(names) > 1 else ()
    return Panel("Rewards by name", lines, "Training, mean over completions, before weights")


def _schedule_target(run: RunDir) -> float | None:
    """Acceptance that the run's schedule was calibrated for, None for a dense or hand-made one."""
    path = run.path / SCHEDULE
    target = json.loads(path.read_text(encoding="utf-8")).get("target") if path.is_file() else None
    return None if target is None else float(target)


def _summary(records: Records) -> str:
    rows = [["steps", "", str(records[-1]["step"]), ""]]
    for name, label in _SUMMARY:
        values = [r[name] for r in records if name in r]
        metric = describe_metric(name)
        if values and metric is not None:
            first = f"{values[0]:.4g}" if len(values) > 1 else ""
            rows.append([label, first, f"{values[-1]:.4g}", "" if metric.unit == "1" else metric.unit])
    return table(["", "first", "last", "unit"], rows)


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


def _legend(records: Records) -> str:
    """The metrics that the run has, families as one."""
    found = {schema_name(name) for r in records for name in r}
    rows = [[name, metric.unit, metric.meaning] for name, metric in SCHEMA.items() if name in found]
    return "<h2>Metrics</h2>" + table(["name", "unit", "meaning"], rows)
