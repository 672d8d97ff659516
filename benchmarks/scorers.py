"""Which page scorer and page size give the best tail for the same bytes, and the fastest attention for the same tail.

    python -m benchmarks.scorers --texts code=FILES prose=FILES chat=FILES [--adapter DIR] [--max-tokens 4096]

For every kind of text, scorer, page size and share of the dense KV bytes: the budgets whose pages and landmarks together are at
most that share at every length, and the 5th percentile of exact alpha under them, teacher-forced. From these, the share at which
the tail reaches the target (linear in between), the pages that are read there at the last length, and the time of one layer's
decode attention with as many, landmarks scored and pages selected, against dense. `--adapter`: a policy that reinforcement
learning has moved.

A kind is NAME=PATTERN[,PATTERN …]. Windows of max_tokens each, the first of each file. One row per kind, page size and scorer.
"""

from __future__ import annotations

import argparse
import glob
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks._common import interleaved, print_result, progress
from leanroll.calibrate.passes import PassRunner
from leanroll.calibrate.probe import median_seconds
from leanroll.calibrate.trajectories import Trajectory, from_texts
from leanroll.config.sections import AdapterConfig, ModelConfig
from leanroll.errors import ConfigError
from leanroll.kernels.dispatch import KernelBackend, get_backend
from leanroll.kernels.layout import DecodeBatch, PagedLayer
from leanroll.kernels.scorers import bytes_per_page, get_scorer
from leanroll.models import Policy
from leanroll.rollout.schedule import BudgetSchedule
from leanroll.train.setup import build_policy

QUANTILE = 0.05
LAYERS = 12  # of the timed pool: more than a cache holds


def schedule_of_share(
    share: float, policy: Policy, scorer: str, page_size: int, bin_tokens: int, max_tokens: int
) -> BudgetSchedule | None:
    """The largest budgets whose pages and landmarks are `share` of the dense bytes at the end of every bin.

    None where the last bin's landmarks alone leave nothing to choose.
    """
    spec = policy.spec
    page_bytes = 2 * page_size * spec.num_kv_heads * spec.head_dim * policy.dtype.itemsize
    landmark = bytes_per_page(get_scorer(scorer), spec.num_kv_heads, spec.head_dim, page_size, policy.dtype)
    template = BudgetSchedule("equal-bytes", page_size=page_size, bin_pages=bin_tokens // page_size, scorer=scorer)
    reserved = template.first_pages + template.last_pages
    pages = []
    for end in range(bin_tokens, max_tokens + 1, bin_tokens):
        total = end // page_size
        pages.append(int(total * (share * page_bytes - landmark) // page_bytes))
    if pages[-1] <= reserved:
        return None
    growing = np.maximum.accumulate(np.maximum(pages, reserved + 1))
    return BudgetSchedule(
        "equal-bytes",
        page_size=page_size,
        bin_pages=template.bin_pages,
        pages=(*(int(p) for p in growing), int(growing[-1])),
        scorer=scorer,
    )


def tail(runner: PassRunner, schedule: BudgetSchedule, texts: Sequence[Trajectory], first: int) -> float:
    """5th percentile of alpha over all positions from `first` on."""
    rates = runner.run(schedule, texts).rates
    return float(np.quantile(np.concatenate([alpha[first:] for alpha in rates]), QUANTILE))


def share_at(target: float, shares: Sequence[float], tails: Sequence[float]) -> float | None:
    """Smallest share at which the tail reaches the target, linear between the measured ones; None if it never does."""
    for i, value in enumerate(tails):
        if value >= target:
            if i == 0:
                return shares[0]
            return float(np.interp(target, tails[i - 1 : i + 1], shares[i - 1 : i + 1]))
    return None


class LayerTimes:
    """Times of one layer's decode attention, 8 sequences of the model's heads, on pools of random numbers."""

    def __init__(self, policy: Policy, backend: KernelBackend, num_tokens: int, repeats: int) -> None:
        self._spec, self._dtype, self._backend = policy.spec, policy.dtype, backend
        self._num_tokens, self._repeats, self._batch = num_tokens, repeats, 8

    def ratio(self, scorer: str, page_size: int, pages: int) -> dict[str, float]:
        """Medians in microseconds: `dense_us`, `sparse_us`, and their ratio `speedup`."""
        spec, generator = self._spec, torch.Generator().manual_seed(0)
        num_pages = -(-self._num_tokens // page_size)
        pool = self._batch * num_pages
        shape = (pool, spec.num_kv_heads, page_size, spec.head_dim)

        def random(*size: int) -> Tensor:
            return torch.randn(*size, generator=generator).to(self._dtype)

        k, v = random(*shape), random(*shape)
        kind = get_scorer(scorer)
        layers = []
        for _ in range(LAYERS):
            landmarks = kind.allocate(
                pool, spec.num_kv_heads, spec.head_dim, page_size, self._dtype, torch.device("cpu")
            )
            layers.append(PagedLayer(k.clone(), v.clone(), landmarks))
            self._backend.update_landmarks(layers[-1], torch.arange(pool, dtype=torch.int32), kind)
        lengths = torch.full((self._batch,), self._num_tokens, dtype=torch.int32)
        table = torch.arange(pool, dtype=torch.int32).view(self._batch, num_pages)
        batch = DecodeBatch(table, lengths, torch.full_like(lengths, pages))
        q = random(self._batch, spec.num_heads, spec.head_dim)
        new = random(2, self._batch, spec.num_kv_heads, spec.head_dim)
        scale = spec.head_dim**-0.5

        def step(of: str | None) -> float:
            def all_layers() -> None:
                for layer in layers:
                    self._backend.decode_layer(q, new[0], new[1], layer, batch, of and kind, scale)

            return median_seconds(all_layers, 1) / LAYERS * 1e6

        times = interleaved({"dense": lambda: step(None), "sparse": lambda: step(scorer)}, self._repeats)
        dense, sparse = (statistics.median(times[name]) for name in ("dense", "sparse"))
        return {"dense_us": round(dense, 1), "sparse_us": round(sparse, 1), "speedup": round(dense / sparse, 2)}


def read_kinds(arguments: Sequence[str]) -> dict[str, list[Path]]:
    """NAME=PATTERN[,PATTERN …] → files by kind of text."""
    kinds = {}
    for argument in arguments:
        name, found, patterns = argument.partition("=")
        files = [Path(f) for pattern in patterns.split(",") for f in sorted(glob.glob(pattern))]
        if not found or not files:
            raise ConfigError(
                f"--texts {argument!r}: expected NAME=PATTERN[,PATTERN …] that matches at least one file."
            )
        kinds[name] = files
    return kinds


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line of the module docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--texts", nargs="+", required=True, metavar="KIND=FILES")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--adapter", type=Path, help="peft folder, of a checkpoint of `leanroll rl` say")
    parser.add_argument("--max-tokens", type=int, default=4096)
    parser.add_argument("--bin-tokens", type=int, default=512)
    parser.add_argument("--windows", type=int, default=4, help="texts per kind at most")
    parser.add_argument("--scorers", nargs="+", default=["mean", "softmax", "minmax", "sub4-int4", "keys-int4"])
    parser.add_argument("--page-sizes", type=int, nargs="+", default=[8, 16, 32, 64])
    parser.add_argument("--shares", type=float, nargs="+", default=[0.125, 0.1875, 0.25, 0.375, 0.5])
    parser.add_argument("--target", type=float, default=0.86)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--work-dir", type=Path, default=Path("runs/scorers"))
    options = parser.parse_args(arguments)

    adapter = AdapterConfig() if options.adapter is None else AdapterConfig(path=str(options.adapter))
    policy = build_policy(ModelConfig(name=options.model), adapter, training=False)
    backend = get_backend()
    times = LayerTimes(policy, backend, options.max_tokens, options.repeats)
    name = "base" if options.adapter is None else options.adapter.resolve().as_posix().replace("/", "_")
    shares = sorted(options.shares)
    rows: list[dict[str, Any]] = []
    for kind, files in read_kinds(options.texts).items():
        length = options.max_tokens
        texts = from_texts(files, policy.tokenizer, max_tokens=length, min_tokens=length, per_file=1, seed=0)
        runner = PassRunner(policy, policy.spec, backend, options.work_dir / name, kv_dtype=policy.dtype)
        for size in options.page_sizes:
            for scorer in options.scorers:
                schedules = [
                    schedule_of_share(share, policy, scorer, size, options.bin_tokens, length) for share in shares
                ]
                tails = [
                    -1.0 if s is None else tail(runner, s, texts[: options.windows], options.bin_tokens)
                    for s in schedules
                ]
                row: dict[str, Any] = {
                    "text": kind,
                    "page_size": size,
                    "scorer": scorer,
                    "tails": dict(zip(shares, tails, strict=True)),
                }
                wanted = share_at(options.target, shares, tails)
                row["share_at_target"] = wanted
                at = wanted and schedule_of_share(wanted, policy, scorer, size, options.bin_tokens, length)
                if at:
                    row |= {"pages": at.pages[-1], **times.ratio(scorer, size, at.pages[-1])}
                rows.append(row)
                progress(
                    f"{kind:8} pages of {size:3} {scorer:10} tails "
                    + " ".join("  —  " if t < 0 else f"{t:.3f}" for t in tails)
                    + (f" · {options.target:g} at {wanted:.3f} of the bytes" if wanted else "")
                    + (f", {row['speedup']:.2f}x" if "speedup" in row else "")
                )
    print_result("scorers", {"shares": shares, "target": options.target, "policy": name, "rows": rows})


if __name__ == "__main__":
    main()
