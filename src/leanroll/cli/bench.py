"""`leanroll bench`: decode steps dense and under a schedule, by length and over a trajectory."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from leanroll.cli.output import check_output, remark
from leanroll.cli.progress import pass_progress, status
from leanroll.config import BenchConfig, load_config, to_dict
from leanroll.environment import describe
from leanroll.errors import BackendUnavailable, ConfigError
from leanroll.report.speed import draw_speed, speed_figure
from leanroll.rundir import write_json

if TYPE_CHECKING:
    from leanroll.calibrate.peers.engines import Peer
    from leanroll.calibrate.speed_table import SpeedRow, SpeedTable
    from leanroll.models import Policy

HELP = "Time decode steps dense and under a schedule, over lengths and a trajectory; beside the cost model and other engines."
SCHEMA = BenchConfig

USED = (
    "model.name", "model.revision", "model.dtype", "model.device", "adapter.type", "adapter.path", "sampler_adapter.path",
    "rollout.schedule", "rollout.scorer", "rollout.kernel", "rollout.kv_memory_gib", "rollout.kv_dtype",
)  # fmt: skip
"""Options outside [bench] that change what is measured."""
TABLE_WIDTH = 160  # where stdout is no terminal


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments besides the options of the recipe."""
    parser.add_argument("recipe", nargs="?", help="TOML file; what only training and sampling use is left aside")
    parser.add_argument("--lengths", nargs="+", metavar="N", help="short for --bench.lengths")
    parser.add_argument("--batch", metavar="N", help="short for --bench.batch")
    parser.add_argument("--output", "-o", metavar="FILE", help="also write the result as JSON")
    parser.add_argument("--plot", metavar="FILE", help="also draw it, as PNG")


def run(arguments: argparse.Namespace, overrides: list[tuple[str, str]]) -> int:
    """Measure; returns the exit code. The last line on stdout is the result as JSON."""
    config = load_config(BenchConfig, arguments.recipe, [*overrides, *_shorthands(arguments)])
    inert = [key for key, text in overrides if key not in USED and not key.startswith("bench.") and text != "null"]
    if inert:
        raise ConfigError(f"{inert[0]} is set but has no effect on decode times; leave it out.")
    output = check_output(arguments.output) if arguments.output is not None else None
    plot = check_output(arguments.plot, "--plot") if arguments.plot is not None else None
    if plot is not None and plot.suffix.lower() != ".png":
        raise ConfigError(
            f"--plot {arguments.plot!r}: expected a name that ends in .png, the only format that is drawn."
        )
    figure = speed_figure() if plot is not None else None

    load_before = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
    table, note = _measure(config)
    result = {
        "benchmark": "bench",
        **table.as_dict(),
        "prediction": note,
        "options": _options(config),
        "load_before": load_before,
        "environment": describe({"device": table.device_name, "kernel": table.kernel}),
    }
    if output is not None:
        write_json(output, result)
    if plot is not None:
        draw_speed(figure, result, plot)
    _print(table, note)
    print(json.dumps(result, allow_nan=False), flush=True)
    failed = [peer for peer in table.peers if peer.error is not None]
    if failed:
        raise BackendUnavailable(f"{failed[0].name} failed after the others had been measured: {failed[0].error}")
    return 0


def _shorthands(arguments: argparse.Namespace) -> list[tuple[str, str]]:
    found = []
    if arguments.lengths is not None:
        found.append(("bench.lengths", f"[{', '.join(arguments.lengths)}]"))
    if arguments.batch is not None:
        found.append(("bench.batch", arguments.batch))
    return found


def _options(config: BenchConfig) -> dict[str, Any]:
    """Those that count, as nested tables."""
    everything = to_dict(config)
    found: dict[str, Any] = {"bench": everything["bench"]}
    for key in USED:
        section, _, field = key.partition(".")
        if field in everything[section]:
            found.setdefault(section, {})[field] = everything[section][field]
    return found


def _measure(config: BenchConfig) -> tuple[SpeedTable, str]:
    """The measurement, and a sentence about its prediction."""
    from leanroll.calibrate.bench import check_work, largest_batch, measure_speed, prediction_device, with_jumps
    from leanroll.train import setup

    bench, rollout = config.bench, config.rollout
    schedule = setup.build_schedule(rollout)
    remark(setup.check_sampler(schedule, config.sampler_adapter))
    kv_dtype = setup.DTYPES[rollout.kv_dtype] if rollout.kv_dtype is not None else None
    with status(f"Loading {config.model.name} …"):
        policy = setup.build_policy(config.model, config.adapter, training=False)
        setup.load_sampler(policy, config.sampler_adapter)
    batch = bench.batch or largest_batch(policy, schedule, bench.lengths[-1], rollout.kv_memory_gib, kv_dtype)
    start = bench.prompt_length or bench.lengths[0]
    # Before the device is measured and peers are loaded: most mistakes show here.
    check_work(
        policy,
        schedule,
        batch=batch,
        lengths=bench.lengths,
        num_steps=bench.steps,
        rounds=bench.rounds,
        prompt_length=start,
        kv_dtype=kv_dtype,
        kv_memory_gib=rollout.kv_memory_gib,
    )
    peers = _peers(config, policy)
    with status("Measuring the device …") if bench.device == "auto" else contextlib.nullcontext():
        device, note = prediction_device(policy, schedule, bench.device, kernel=rollout.kernel, kv_dtype=kv_dtype)
    with pass_progress("measurements") as (advance, _):
        table = measure_speed(
            policy,
            schedule,
            batch=batch,
            lengths=with_jumps(schedule, bench.lengths, bench.steps),
            num_steps=bench.steps,
            rounds=bench.rounds,
            prompt_length=start,
            kernel=rollout.kernel,
            kv_dtype=kv_dtype,
            kv_memory_gib=rollout.kv_memory_gib,
            device=device,
            peers=peers,
            peer_steps=bench.peer_steps,
            peer_rounds=bench.peer_rounds,
            seed=bench.seed,
            progress=advance,
        )
    return table, note


def _peers(config: BenchConfig, policy: Policy) -> Sequence[Peer]:
    """The engines that were asked for, each on the model's own files."""
    from leanroll.calibrate.peers.engines import ProcessPeer, TransformersPeer, llama_cpp_note
    from leanroll.models.default import DEFAULT_MODEL, default_gguf_path, default_model_dir

    bench, name, revision = config.bench, config.model.name, config.model.revision
    if not bench.peers:
        return ()
    if policy.has_adapter:
        raise ConfigError(
            f"bench.peers run plain models, but {name!r} is an adapter; merge it, or leave out the peers."
        )
    folder = default_model_dir() if name == DEFAULT_MODEL else Path(name).expanduser()
    source = str(folder) if folder.is_dir() else name
    found: list[Peer] = []
    for peer in bench.peers:
        if peer == "transformers":
            found.append(TransformersPeer(source, dtype=policy.dtype, device=policy.device, revision=revision))
        elif peer == "vllm":
            note = "its own process, all prompts prefilled; no log-probs"
            found.append(
                ProcessPeer(peer, bench.peer_python[peer], source, note=note, same_weights=True, revision=revision)
            )
        else:
            gguf = default_gguf_path() if bench.gguf is None else Path(bench.gguf)
            found.append(
                ProcessPeer(peer, bench.peer_python[peer], str(gguf), note=llama_cpp_note(gguf), same_weights=False)
            )
    return found


def _print(table: SpeedTable, note: str) -> None:
    """The table, and one line each for the trajectory, the checks, and the peers."""
    console = Console(highlight=False, soft_wrap=True)
    if not console.is_terminal:
        console.width = TABLE_WIDTH
    shown = Table(
        title=f"{table.model}, {table.schedule.name} ({table.schedule.scorer}), batch {table.batch}: ms per decode step"
    )
    predicted = table.device is not None
    working = [peer for peer in table.peers if peer.measured]
    columns = ["tokens", "pages read", "dense", "sparse", "speed-up"]
    columns += ["predicted (dense / sparse)"] if predicted else []
    for column in columns + [peer.name for peer in working]:
        shown.add_column(column, justify="right", no_wrap=True)
    for row in table.rows:
        cells = [str(row.length), f"{row.budget} of {row.num_pages}", *_measured(row)]
        if row.predicted_dense is not None and row.predicted_sparse is not None:
            ratio = row.predicted_dense / row.predicted_sparse
            cells.append(f"{ratio:.2f}x ({1e3 * row.predicted_dense:.2f} / {1e3 * row.predicted_sparse:.2f})")
        cells += [f"{1e3 * p.steps[row.length].median:.2f}" if row.length in p.steps else "-" for p in working]
        shown.add_row(*cells)
    console.print(shown)
    for line in summary_lines(table, note):
        console.print(line, markup=False)


def _measured(row: SpeedRow) -> list[str]:
    dense, sparse = row.dense.scaled(1e3), row.sparse.scaled(1e3)
    times = [f"{x.median:.2f} [{x.low:.2f}, {x.high:.2f}]" for x in (dense, sparse)]
    return [*times, f"{row.speedup.median:.2f}x [{row.speedup.low:.2f}, {row.speedup.high:.2f}]"]


def summary_lines(table: SpeedTable, note: str) -> list[str]:
    """What is said below the table."""
    t, c = table.trajectory, table.checks
    lines = [
        f"{t.prompt_length} to {t.max_length} tokens: dense {t.dense_seconds:.2f} s, sparse {t.sparse_seconds:.2f} s, speed-up "
        f"{t.speedup.median:.2f}x [{t.speedup.low:.2f}, {t.speedup.high:.2f}] over {t.speedup.count} rounds; "
        f"{t.num_tokens / t.dense_seconds:.0f} and {t.num_tokens / t.sparse_seconds:.0f} tokens/s"
    ]
    if t.predicted_dense_seconds is not None and t.predicted_sparse_seconds is not None:
        lines.append(f"predicted: {t.predicted_dense_seconds / t.predicted_sparse_seconds:.2f}x ({note})")
    else:
        lines.append(f"no prediction: {note}")
    lines.append(
        f"checked before: full budget against dense, largest difference of a log-prob {c.full_against_dense:.1e}; "
        f"sparse against re-scoring {c.sparse_rescored:.1e} (dense {c.dense_rescored:.1e}), in the mean {c.sparse_mean:.1e} "
        f"({c.dense_mean:.1e})"
    )
    for peer in table.peers:
        line = f"{peer.name} ({peer.note}): greedy tokens within {peer.regret:.1e} nats of ours"
        if peer.trajectory_seconds is not None:
            to_dense, to_sparse = (peer.trajectory_seconds / x for x in (t.dense_seconds, t.sparse_seconds))
            line += f"; the trajectory takes {to_dense:.2f}x the time of dense, {to_sparse:.2f}x that of sparse"
        lines.append(line if peer.error is None else f"{line}; failed: {peer.error}")
    return lines
