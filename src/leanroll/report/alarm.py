"""The collapse alarm on the page of an RL run: what was raised, in words, and the signs over steps."""

from __future__ import annotations

import html
from typing import Any

from leanroll.config import AlarmConfig
from leanroll.measure.alarm import Watcher
from leanroll.report.curves import Panel, Records
from leanroll.report.layout import table

SIGNS = Panel(
    "Signs of collapse",
    (
        ("alarm/length", "completion length"),
        ("alarm/kl_growth", "KL growth with position"),
        ("alarm/tail", "tail acceptance"),
        ("alarm/entropy", "entropy"),
        ("alarm/reward", "reward"),
    ),
    "Times past its limit; two signs of 1, or one of alarm.hard, are an alarm",
    from_zero=True,
)


def alarm_table(records: Records, config: dict[str, Any]) -> str:
    """The alarms of a run with their reasons, read again from its records; empty without any.

    config: the run's resolved recipe.
    """
    if not any(r.get("alarm/raised") for r in records):
        return ""
    raised = [(step, v) for step, v in Watcher(AlarmConfig(**config.get("alarm", {}))).replay(records) if v.raised]
    rows = [[str(step), html.escape(verdict.text()), str(verdict.last_calm)] for step, verdict in raised]
    return "<h2>Alarms</h2>" + table(["step", "what was wrong", "last calm step"], rows)
