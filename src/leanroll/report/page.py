"""The page of a run: its numbers and plots, evaluation, sample completions, recipe, environment."""

from __future__ import annotations

import html
import json
from pathlib import Path
from typing import Any

from leanroll.errors import ResumeError
from leanroll.report.curves import Records
from leanroll.report.distill_page import distill_parts
from leanroll.report.layout import page, table
from leanroll.report.rl_page import rl_parts
from leanroll.report.tables import evaluation_tables
from leanroll.rundir import RunDir, read_jsonl, write_text
from leanroll.rundir_metrics import SCHEMA, schema_name

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
    distillation = "distill" in config
    what = f"distillation, {run.path.name}" if distillation else run.path.name
    parts = [
        f"<h1>{html.escape(str(config.get('name', 'run')))} <small>{html.escape(what)}</small></h1>",
        *(distill_parts if distillation else rl_parts)(run, records, config),
        evaluation_tables(run),
        _samples(run),
        f"<h2>Recipe</h2><pre>{html.escape(run.config_path.read_text(encoding='utf-8'))}</pre>",
        f"<h2>Environment</h2><pre>{html.escape(json.dumps(environment, indent=1))}</pre>",
        _legend(records),
    ]
    body = "\n".join(part for part in parts if part)
    write_text(output, page(run.path.name, body))


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
