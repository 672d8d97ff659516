"""What the page of an RL run shows of its own: summary, curves, acceptance by length."""

from __future__ import annotations

import json
from typing import Any

from leanroll.report.alarm import SIGNS, alarm_table
from leanroll.report.control import draw_budgets, draw_held_tails
from leanroll.report.curves import (
    GRADIENT,
    LENGTHS,
    SPEED,
    Panel,
    Records,
    draw_panel,
    draw_phases,
    draw_rewards,
    rewards_by_name,
)  # fmt: skip
from leanroll.report.layout import grid
from leanroll.report.mismatch import acceptance_table, draw_kl_by_position, draw_ratio_by_position, draw_tails
from leanroll.report.tables import summary_table
from leanroll.rundir import SCHEDULE, RunDir

ACCEPTANCE = Panel(
    "Acceptance of the sampler",
    (
        ("alpha/p05", "5th percentile"),
        ("alpha/mean", "mean"),
        ("alpha/paper_p05", "paper's measure, 5th percentile"),
    ),
    "All lengths",
)
_SAMPLER_KL = Panel(
    "Sparse sampler and dense policy",
    (("sampler_adapter/kl", "KL(sparse ‖ dense)"),),
    "Full vocabulary, per sparsely decoded token, before each update of the sampler's adapter",
    from_zero=True,
)
ACCEPTED = Panel("Tokens with acceptance above 0.999", (("alpha/share_above_0999", "share"),))
COMMON = (
    Panel(
        "Completion length",
        (*LENGTHS, ("eval/mean_length", "held out, mean")),
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
            ("rejected_share/completions", "completions rejected"),
            ("m2/masked_share", "tokens masked as outliers"),
        ),
    ),
    GRADIENT,
    SPEED,
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
_BY_NAME = "Training, mean over completions, before weights"


def rl_parts(run: RunDir, records: Records, config: dict[str, Any]) -> list[str]:
    """Parts of the page, below its title; empty where the run has no data."""
    return [
        summary_table(records, _SUMMARY),
        alarm_table(run),
        "<h2>Curves</h2>",
        grid(_figures(run, records, config)),
        acceptance_table(records),
    ]


def _figures(run: RunDir, records: Records, config: dict[str, Any]) -> list[str]:
    """Those that the run has data for."""
    bin_tokens = config.get("measure", {}).get("bin_tokens", 0)
    figures = [
        draw_rewards(records),
        draw_panel(rewards_by_name(records, "reward/", _BY_NAME), records),
        draw_tails(records, _schedule_target(run)),
        draw_budgets(records),
        draw_held_tails(records),
        draw_panel(ACCEPTANCE, records),
        draw_panel(ACCEPTED, records),
        draw_panel(_SAMPLER_KL, records),
        draw_kl_by_position(records, bin_tokens),
        draw_ratio_by_position(records, bin_tokens),
        draw_panel(SIGNS, records),
        *(draw_panel(panel, records) for panel in COMMON),
        draw_phases(records),
    ]
    return [figure for figure in figures if figure]


def _schedule_target(run: RunDir) -> float | None:
    """Acceptance that the run's schedule was calibrated for, None for a dense or hand-made one."""
    path = run.path / SCHEDULE
    target = json.loads(path.read_text(encoding="utf-8")).get("target") if path.is_file() else None
    return None if target is None else float(target)
