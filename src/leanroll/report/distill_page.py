"""What the page of a distillation shows of its own: rewards beside the teacher's, divergence, tokens, updates, cost."""

from __future__ import annotations

import html
from collections.abc import Sequence
from typing import Any

from leanroll.report.curves import (
    GRADIENT,
    LENGTHS,
    SPEED,
    Panel,
    Records,
    Reference,
    draw_panel,
    draw_phases,
    draw_rewards,
    rewards_by_name,
)  # fmt: skip
from leanroll.report.layout import grid, table
from leanroll.report.positions import draw_by_position, draw_position_map, first_middle_last, measured
from leanroll.report.tables import phase_table, summary_table, teacher_evaluation
from leanroll.rundir import FULL_STEP, RunDir, read_json

_BINS = "distill/pos_"

_SUMMARY = (
    ("eval/reward/mean", "held-out reward"),
    ("distill/reverse_kl", "KL(student ‖ teacher)"),
    ("distill/forward_kl", "KL(teacher ‖ student)"),
    ("distill/first_token_kl", "KL(student ‖ teacher) at the first token"),
    ("distill/topk_reverse_kl", "KL(student ‖ teacher) with a tail bucket, a lower bound"),
    ("distill/tail_clamped_share", "tails raised to the floor"),
    ("distill/pushed_share", "tokens pushed down, without a teacher"),
    ("distill/teacher_top1_share", "same likeliest token"),
    ("distill/num_tokens", "tokens per completion at most, N"),
    ("completion_length/mean", "completion length"),
    ("truncated_share", "completions cut at N"),
    ("distill/student_dropped", "probability dropped, student"),
    ("distill/teacher_dropped", "probability dropped, teacher"),
    ("tokens_per_second", "rollout speed"),
    ("time/step_s", "time per step"),
    ("memory/peak_rss_gib", "peak memory, process"),
    ("memory/peak_device_gib", "peak memory, accelerator"),
)

_DIVERGENCE = Panel(
    "KL of student and teacher",
    (
        ("distill/reverse_kl", "student ‖ teacher"),
        ("distill/forward_kl", "teacher ‖ student"),
        ("distill/first_token_kl", "student ‖ teacher, first token"),
    ),
    "Per token over the full vocabulary",
    from_zero=True,
)
_TOPK = (
    Panel(
        "KL of student and teacher, lower bound",
        (
            ("distill/topk_reverse_kl", "student ‖ teacher"),
            ("distill/first_token_topk_kl", "student ‖ teacher, first token"),
        ),
        "Per token, of the teacher's likeliest tokens, the sampled one and a bucket for the rest",
        from_zero=True,
    ),
    Panel(
        "The bucket for the rest",
        (
            ("distill/student_tail", "probability, student"),
            ("distill/teacher_tail", "probability, teacher"),
            ("distill/tail_clamped_share", "teacher's raised to the floor, share of tokens"),
        ),
        from_zero=True,
    ),
)
_NO_TEACHER = Panel(
    "Tokens pushed down",
    (("distill/pushed_share", "below the threshold"),),
    "Share, no teacher asked",
    from_zero=True,
)
_ENTROPY = Panel(
    "Entropy",
    (("distill/student_entropy", "student"), ("distill/teacher_entropy", "teacher")),
    "Per token, on the student's tokens",
)
_AGREEMENT = Panel(
    "Likeliest token",
    (
        ("distill/teacher_top1_share", "the same on both sides, share"),
        ("distill/student_top1", "its probability, student"),
    ),
)
_DROPPED = Panel(
    "Dropped mass",
    (("distill/student_dropped", "student"), ("distill/teacher_dropped", "teacher")),
    "Mean probability on ids that the other side lacks",
    from_zero=True,
)
_TOKENS = (
    Panel(
        "Completion length",
        (*LENGTHS, ("distill/num_tokens", "at most, N")),
        dashed=("distill/num_tokens",),
        from_zero=True,
    ),
    Panel(
        "Tokens per step",
        (("trained_tokens", "in the loss"), ("generated_tokens", "generated")),
        dashed=("generated_tokens",),
        from_zero=True,
    ),
    Panel("Completions cut", (("truncated_share", "at N"), ("eval/truncated_share", "held out, at the full length"))),
)
_ADAPTING = (
    Panel("Tokens per completion, N", (("distill/num_tokens", "at most, N"),), "Moved at the probes", from_zero=True),
    Panel(
        "What N is moved by",
        (
            ("adapt/head_kl", "first positions, training"),
            ("adapt/probe_head_kl", "first positions, probes"),
            ("adapt/probe_tail_kl", "beyond N, probes"),
        ),
        "KL of student and teacher per token",
        from_zero=True,
    ),
)
_HELD_OUT_LENGTH = Panel("Held-out completion length", (("eval/mean_length", "mean"),), "Mean, at the full length")
_PROBES = (
    Panel(
        "Signs of collapse",
        (
            ("probe/cap_rate", "at the length limit"),
            ("probe/loop_share", "end in a loop"),
            ("probe/repeated_share", "tokens repeated"),
            ("probe/distinct_2", "different pairs of tokens"),
        ),
        "Shares, full-length completions of held-out prompts",
    ),
    Panel(
        "P(EOS)",
        (("probe/eos_prob", "any stop token"),),
        "Probability of stopping per token, full-length completions of held-out prompts",
        from_zero=True,
    ),
    Panel(
        "Full-length completions",
        (
            ("probe/length_p10", "10th percentile"),
            ("probe/length_p50", "median"),
            ("probe/length_p90", "90th percentile"),
        ),
        "Length, on held-out prompts",
        from_zero=True,
    ),
)
_KV_READ = Panel("Share of the KV read", (("kv_share_read", "rollouts"),))
_LOSS = Panel("Loss", (("loss", "loss"),))
_MEMORY = Panel(
    "Peak memory",
    (("memory/peak_rss_gib", "process"), ("memory/peak_device_gib", "accelerator")),
    "Largest so far",
    from_zero=True,
)


def distill_parts(run: RunDir, records: Records, config: dict[str, Any]) -> list[str]:
    """Parts of the page, below its title; empty where the run has no data."""
    teacher = teacher_evaluation(run)
    reference = None
    if teacher is not None:
        reference = Reference("teacher", teacher["mean_reward"], teacher["low_95"], teacher["high_95"])
    by_name = rewards_by_name(records, "eval/reward/", "Held out, mean over completions, before weights")
    held_out = [draw_rewards(records, reference), draw_panel(by_name, records), draw_panel(_HELD_OUT_LENGTH, records)]
    divergence = [
        draw_panel(_DIVERGENCE, records),
        *(draw_panel(panel, records) for panel in (*_TOPK, _NO_TEACHER)),
        draw_panel(_ENTROPY, records),
        *_by_position(records, config["distill"].get("bin_tokens", 0)),
        draw_panel(_AGREEMENT, records),
        _unless_always(_DROPPED, 0, records),
    ]
    tokens = [*(draw_panel(panel, records) for panel in _TOKENS), _unless_always(_KV_READ, 1, records)]
    updates = [draw_panel(_LOSS, records), draw_panel(GRADIENT, records)]
    cost = [draw_phases(records), draw_panel(SPEED, records), draw_panel(_MEMORY, records)]
    return [
        f"<p>{html.escape(_what(records, config))}</p>",
        f"<p>{_outcome(records, reference)}</p>",
        _full_step(run),
        summary_table(records, _SUMMARY),
        _section("Held-out reward", held_out),
        _section("Divergence of student and teacher", divergence),
        _section("Tokens", tokens),
        _section("N over the steps", *_adapting(records)),
        _section("Full-length probes", [draw_panel(panel, records) for panel in _PROBES]),
        _section("Updates", updates),
        _section("Time and memory", cost, phase_table(records)),
    ]


def _full_step(run: RunDir) -> str:
    """A step beside one of full rollouts, where that was measured."""
    path = run.path / FULL_STEP
    if not path.is_file():
        return ""
    found = read_json(path)
    rows = [
        [
            label,
            str(step["num_tokens"]),
            f"{step['mean_length']:.1f}",
            f"{step['seconds']:.2f}",
            "" if step["peak_gib"] is None else f"{step['peak_gib']:.2f}",
        ]
        for label, step in (("as trained", found["early"]), ("full rollouts", found["full"]))
    ]
    head = ["one more step, not applied", "tokens at most", "generated per completion", "s", "peak memory, GiB"]
    return table(head, rows)


def _section(title: str, figures: Sequence[str], rest: str = "") -> str:
    """Empty without a figure."""
    found = [figure for figure in figures if figure]
    return f"<h2>{html.escape(title)}</h2>{grid(found)}{rest}" if found else ""


def _unless_always(panel: Panel, value: float, records: Records) -> str:
    """The plot, empty where all of it is one value that says nothing (the summary has it)."""
    names = [name for name, _ in panel.lines]
    return draw_panel(panel, records) if any(r.get(name, value) != value for r in records for name in names) else ""


def _adapting(records: Records) -> tuple[list[str], str]:
    """Plots, and a table of the moves with what led to them; both empty where N does not adapt."""
    probes = [r for r in records if "adapt/move" in r]
    if not probes:
        return [], ""
    rows = []
    for record in (r for r in probes if r["adapt/move"]):
        cells = [record.get(name) for name in ("adapt/head_share", "adapt/probe_head_kl", "adapt/probe_tail_kl")]
        rows.append(
            [
                str(record["step"]),
                "extended" if record["adapt/move"] > 0 else "shrunk",
                f"{record['distill/num_tokens']:g}",
                *("" if cell is None else f"{cell:.3f}" for cell in cells),
                f"{record.get('probe/alarms', 0):g}",
            ]
        )
    titles = ["step", "N", "from", "head KL, share of its start", "head KL, nats", "KL beyond N, nats", "alarms"]
    return [draw_panel(panel, records) for panel in _ADAPTING], table(titles, rows) if rows else "<p>N never moved.</p>"


def _by_position(records: Records, bin_tokens: int) -> list[str]:
    """KL by position: some steps beside each other, and a map of all."""
    name = "topk_reverse_kl" if measured(records, _BINS, "topk_reverse_kl") else "reverse_kl"
    what = "KL(student ‖ teacher) per token" + (", a lower bound" if name != "reverse_kl" else "")
    where = f"in bins of {bin_tokens} tokens (distill/pos_<start>/{name})."
    curves = draw_by_position(
        "KL by position",
        first_middle_last(measured(records, _BINS, name)),
        _BINS,
        bin_tokens,
        ((name, "-"),),
        note=f"{what} at the start, in the middle and at the end of the run, {where}",
        y_label="nats per token",
        from_zero=True,
    )
    note = f"{what}, {where} Blank: no token."
    return [
        curves,
        draw_position_map("KL by position and step", records, _BINS, bin_tokens, name, note=note, unit="nats"),
    ]


def _what(records: Records, config: dict[str, Any]) -> str:
    """Who learned from whom, on how many tokens, and how far the run got."""
    limits = [r["distill/num_tokens"] for r in records if "distill/num_tokens" in r]
    text = f"{config['model']['name']} learns from {_teacher(config['teacher'])}"
    if config["distill"].get("objective") == "no_teacher":
        text = f"{config['model']['name']} pushes down what it finds unlikely and asks no teacher"
    if limits:
        ends = f"{limits[0]:g}" if limits[0] == limits[-1] else f"{limits[0]:g} to {limits[-1]:g}"
        text += f", on its own completions of at most {ends} tokens"
    last, steps = records[-1]["step"], config["train"]["steps"]
    return f"{text}. {steps} steps." if last >= steps else f"{text}. {last} of {steps} steps done."


def _teacher(teacher: dict[str, Any]) -> str:
    name = teacher.get("model") or ("itself" if teacher.get("weights") == "current" else "its own start")
    extras = [
        f"the adapter {teacher['adapter']}" if "adapter" in teacher else "",
        "a system prompt of its own" if "system_prompt" in teacher else "",
        "the task's privileged prompt" if teacher.get("privileged") else "",
    ]
    found = [extra for extra in extras if extra]
    return f"{name} with {' and '.join(found)}" if found else str(name)


def _outcome(records: Records, reference: Reference | None) -> str:
    """Held-out rewards of the student before and after, and of the teacher with its margin, as HTML."""
    results = [r for r in records if "eval/reward/mean" in r]
    parts = [f"step {r['step']}: {_student(r)}" for r in (results[0], results[-1])[: len(results)]] if results else []
    if reference is not None:
        text = f"teacher: {reference.mean:.3f} [{reference.low:.3f}, {reference.high:.3f}]"
        margin = next((r for r in records if "eval/teacher/margin" in r), None)
        if margin is not None:
            value, low, high = (margin[f"eval/teacher/margin{end}"] for end in ("", "_low_95", "_high_95"))
            text += f", {value:+.3f} [{low:+.3f}, {high:+.3f}] against the student before training"
        parts.append(text)
    if not parts:
        return "No held-out evaluation."
    return (
        f"<strong>Held-out reward: {html.escape('; '.join(parts))}.</strong> In brackets: 95 % intervals over prompts."
    )


def _student(record: dict[str, Any]) -> str:
    low, high = record.get("eval/low_95"), record.get("eval/high_95")
    return f"{record['eval/reward/mean']:.3f}" + ("" if low is None or high is None else f" [{low:.3f}, {high:.3f}]")
