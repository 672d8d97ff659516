"""The cost model against the engine's measured decode steps on this machine, and against the paper's speed-ups.

    python -m benchmarks.cost_model --threads 2
    python -m benchmarks.cost_model --paper

The device is measured first, kernel by kernel; then steps of the real engine are timed on a grid of contexts and batch sizes,
dense and with a fixed number of pages, and each is set beside its prediction. Keys and values are random: how long a step
takes does not depend on them. Cells that do not fit in memory are skipped, and named. `--paper` measures nothing: it predicts
the published schedules on an H200, for several batch sizes. The last line is JSON.
"""

from __future__ import annotations

import argparse
import statistics
from dataclasses import asdict
from typing import Any

import torch

from benchmarks._common import print_result, progress, wait_for_idle
from leanroll.calibrate.cost import step_cost, trajectory
from leanroll.calibrate.devices import Device, named_device
from leanroll.calibrate.model_shape import ModelShape
from leanroll.calibrate.probe import measure_cpu, measure_overheads, shape_of
from leanroll.calibrate.speed import available_gib, decode_seconds, pool_gib, typical_length
from leanroll.calibrate.summary import Summary
from leanroll.environment import memory_gib
from leanroll.models.load import load_policy
from leanroll.models.policy import Policy
from leanroll.rollout.schedule import BudgetSchedule

TARGET = 0.20  # largest relative error of a prediction

PUBLISHED_SPEEDUPS = {"qwen3-1.7b": 2.21, "qwen3-4b": 2.41, "qwen3-8b": 2.06, "qwen3-14b": 1.49}
"""Rollout throughput, sparse over dense, at 0.86 on 4 × H200 (arXiv 2606.08446). Batch sizes and lengths are not published."""
PAPER_BATCHES = (1, 8, 16, 32, 64)
PAPER_PROMPT, PAPER_COMPLETION = 150, 32_000
PAPER_LAYER_SECONDS = 30e-6  # ten launches of some 3 µs per layer, an assumption
H200_BYTES, USABLE = 141e9, 0.9


def paper_batch_that_fits(shape: ModelShape) -> int:
    """Sequences of the full length whose keys and values fit on one H200 beside the weights."""
    free = USABLE * H200_BYTES - shape.num_parameters * shape.dtype_bytes
    return int(free // (shape.kv_bytes_per_token * (PAPER_PROMPT + PAPER_COMPLETION)))


def paper_table() -> list[dict[str, Any]]:
    """Predicted speed-ups of the published 0.86 schedules, one entry per model; all sequences grow to 32k together."""
    rows = []
    for name, published in PUBLISHED_SPEEDUPS.items():
        shape, schedule = ModelShape.named(name), BudgetSchedule.load(f"{name}-0.86")
        fits = paper_batch_that_fits(shape)
        row: dict[str, Any] = {"model": name, "published": published, "fits": fits}
        for kind, layer_seconds in (("ideal", 0.0), ("launches", PAPER_LAYER_SECONDS)):
            device = named_device("h200").with_overheads(layer_seconds)
            runs = {
                batch: trajectory(
                    shape,
                    schedule,
                    device,
                    prompt_length=PAPER_PROMPT,
                    completion_lengths=[PAPER_COMPLETION] * batch,
                )
                for batch in (*PAPER_BATCHES, fits)
            }
            row[kind] = {batch: round(run.speedup, 2) for batch, run in runs.items()}
            row["kv_share"], row["page_share"] = (round(runs[fits].kv_share, 3), round(runs[fits].page_share, 3))
        rows.append(row)
    return rows


def print_paper(rows: list[dict[str, Any]]) -> None:
    """The table in Markdown."""
    batches = [f"batch {batch}" for batch in PAPER_BATCHES]
    print("| model | pages read | published | " + " | ".join(batches) + " | full memory (batch) |")
    print("|---" * (len(batches) + 4) + "|")
    for row in rows:
        cells = [f"{row['launches'][b]:.2f} ({row['ideal'][b]:.2f})" for b in PAPER_BATCHES]
        full = f"{row['launches'][row['fits']]:.2f} ({row['ideal'][row['fits']]:.2f}), {row['fits']}"
        print(
            f"| {row['model']} | {row['page_share']:.2f} | {row['published']:.2f} | "
            + " | ".join(cells)
            + f" | {full} |"
        )


def measure_grid(policy: Policy, device: Device, options: argparse.Namespace) -> tuple[list[dict[str, Any]], list[str]]:
    """Measured and predicted milliseconds per cell, and the cells that were skipped."""
    shape = shape_of(policy)
    schedules = [
        BudgetSchedule.dense(options.page_size),
        BudgetSchedule(f"{options.pages} pages", options.page_size, pages=(options.pages,), scorer=options.scorer),
    ]
    cells: list[dict[str, Any]] = []
    skipped: list[str] = []
    for batch in options.batches:
        for context in options.contexts:
            for schedule in schedules:
                where = f"batch {batch}, {context} tokens, {schedule.name}"
                needed = pool_gib(policy, schedule, batch, context)
                room = min(available_gib() - options.spare_gib, options.memory_gib - options.spare_gib)
                if needed > room:
                    skipped.append(f"{where}: {needed:.1f} GiB of keys and values, room for {room:.1f}")
                    progress(f"skipped {skipped[-1]}")
                    continue
                seconds = decode_seconds(
                    policy, schedule, batch=batch, context=context, num_steps=options.steps, kernel=options.kernel
                )
                lengths = [typical_length(context, options.steps)] * batch
                parts = step_cost(shape, schedule, lengths).seconds(device)
                measured, predicted = Summary.of(seconds).scaled(1e3), 1e3 * float(sum(parts.values()))
                cells.append(
                    {
                        "batch": batch,
                        "context": context,
                        "schedule": schedule.name,
                        "measured_ms": measured.as_dict(2),
                        "predicted_ms": round(predicted, 2),
                        "error": round(predicted / measured.median - 1.0, 3),
                        "parts_ms": {name: round(1e3 * float(part), 2) for name, part in parts.items()},
                    }
                )
                progress(f"{where}: measured {measured} ms, predicted {predicted:.2f} ms")
    return cells, skipped


def print_grid(cells: list[dict[str, Any]]) -> None:
    """The table in Markdown."""
    print("| batch | tokens | schedule | measured ms | predicted ms | error | largest parts |")
    print("|---" * 7 + "|")
    for cell in cells:
        parts = sorted(cell["parts_ms"].items(), key=lambda item: -item[1])[:2]
        named = ", ".join(f"{name.replace('_', ' ')} {value:.1f}" for name, value in parts)
        print(
            f"| {cell['batch']} | {cell['context']} | {cell['schedule']} | {cell['measured_ms']['median']:.1f} | "
            f"{cell['predicted_ms']:.1f} | {cell['error']:+.0%} | {named} |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--paper", action="store_true", help="only the paper's table; nothing is measured")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--contexts", type=int, nargs="+", default=[1024, 2048, 4096, 8192])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 16, 64])
    parser.add_argument("--pages", type=int, default=96, help="budget of the sparse schedule; layers 0 and 1 are dense")
    parser.add_argument("--scorer", default="peak4-int4")
    parser.add_argument("--page-size", type=int, default=8)
    parser.add_argument("--steps", type=int, default=12, help="decode steps timed per cell")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--kernel", default="cpu", choices=["cpu"], help="the device is measured with these kernels")
    parser.add_argument("--memory-gib", type=float, default=memory_gib() or 8.0, help="memory of the machine")
    parser.add_argument("--spare-gib", type=float, default=2.0, help="of which this much is left alone")
    parser.add_argument("--most-load", type=float, default=0.5, help="wait until the machine's load average is below")
    parser.add_argument("--patience", type=float, default=0.0, help="seconds to wait for that")
    options = parser.parse_args()

    if options.paper:
        rows = paper_table()
        print_paper(rows)
        print_result("cost_model_paper", {"models": rows, "device": asdict(named_device("h200"))})
        return
    load = wait_for_idle(options.most_load, options.patience)
    torch.set_num_threads(options.threads)
    policy = load_policy(options.model, dtype=torch.bfloat16)
    device = measure_cpu(shape_of(policy), scorer=options.scorer, page_size=options.page_size)
    device = measure_overheads(policy, device)
    progress(f"device: {device}")
    cells, skipped = measure_grid(policy, device, options)
    print_grid(cells)
    for line in skipped:
        print(f"skipped: {line}")
    errors = [abs(cell["error"]) for cell in cells]
    within = sum(error <= TARGET for error in errors)
    print(f"{within} of {len(errors)} cells within {TARGET:.0%}; largest error {max(errors, default=0.0):.0%}")
    print_result(
        "cost_model",
        {
            "options": vars(options),
            "device": asdict(device),
            "cells": cells,
            "skipped": skipped,
            "within_target": within,
            "median_error": round(statistics.median(errors), 3) if errors else None,
            "load_before": round(load, 2),
        },
    )


if __name__ == "__main__":
    main()
