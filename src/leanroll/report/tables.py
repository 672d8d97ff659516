"""Tables of a run: first and last values, held-out reward by kind of prompt, seconds per phase."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any

from leanroll.report.curves import PHASES, Records
from leanroll.report.layout import table
from leanroll.rundir import EVAL, TEACHER_EVAL, RunDir, read_json
from leanroll.rundir_metrics import describe_metric


def summary_table(records: Records, metrics: Sequence[tuple[str, str]]) -> str:
    """First and last value of every metric that the run has. metrics: name and label."""
    rows = [["steps", "", str(records[-1]["step"]), ""]]
    for name, label in metrics:
        values = [r[name] for r in records if name in r]
        metric = describe_metric(name)
        if values and metric is not None:
            first = f"{values[0]:.4g}" if len(values) > 1 else ""
            rows.append([label, first, f"{values[-1]:.4g}", "" if metric.unit == "1" else metric.unit])
    return table(["", "first", "last", "unit"], rows)


def evaluation_tables(run: RunDir) -> str:
    """Held-out reward by kind of prompt, first and last evaluation, and the teacher's where there is one."""
    steps = run.eval_steps()
    if not steps:
        return ""
    results = {f"step {step}": read_json(run.eval_path(step)) for step in (steps[0], steps[-1])}
    teacher = teacher_evaluation(run)
    if teacher is not None:
        results["teacher"] = teacher
    text = ""
    names = sorted({column for result in results.values() for column in result.get("tables", {})})
    for column in names:
        keys = sorted({key for result in results.values() for key in result["tables"].get(column, {})})
        rows = []
        for key in keys:
            cells = [result["tables"].get(column, {}).get(key, {}).get("mean_reward") for result in results.values()]
            rows.append([key, *("" if cell is None else f"{cell:.3f}" for cell in cells)])
        text += table([column, *(f"mean reward, {label}" for label in results)], rows)
    return f"<h2>Held-out evaluation</h2>{text}" if text else ""


def teacher_evaluation(run: RunDir) -> dict[str, Any] | None:
    """The teacher's result on the held-out prompts, None where it was not evaluated."""
    path = run.path / EVAL / TEACHER_EVAL
    return read_json(path) if path.is_file() else None


def phase_table(records: Records) -> str:
    """Median seconds of every phase over the steps that had it; empty before the first step."""
    steps = [r for r in records if r["step"] > 0]
    times = {phase: [r[f"time/{phase}_s"] for r in steps if f"time/{phase}_s" in r] for phase in PHASES}
    total = sum(map(sum, times.values()))
    rows = []
    for phase, seconds in times.items():
        if seconds:
            share = f"{sum(seconds) / total:.3f}" if total else ""
            rows.append([phase, f"{median(seconds):.4g}", str(len(seconds)), share])
    whole = [r["time/step_s"] for r in steps if "time/step_s" in r]
    if whole:
        rows.append(["whole step", f"{median(whole):.4g}", str(len(whole)), ""])
    return table(["phase", "median, s", "steps with it", "share of all time"], rows) if rows else ""
