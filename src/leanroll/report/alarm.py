"""The collapse alarm on the page of an RL run: what was raised, in words, and the signs over steps."""

from __future__ import annotations

from leanroll.report.curves import Panel
from leanroll.report.layout import table
from leanroll.rundir import RunDir

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


def alarm_table(run: RunDir) -> str:
    """The alarms of a run with their reasons, also those before which it went back; empty without any."""
    alarms = run.read_alarms()
    if not alarms:
        return ""
    rows = [[str(a["step"]), "; ".join(s["reason"] for s in a["signs"]), str(a["last_calm"])] for a in alarms]
    return "<h2>Alarms</h2>" + table(["step", "what was wrong", "last calm step"], rows)
