"""Which page scorer and page size give the best tail for the same bytes, and the fastest attention for the same tail.

    python -m benchmarks.scorers --texts code=FILES prose=FILES chat=FILES [--adapter DIR] [--max-tokens 4096]
    [--scorers mean:16 softmax:16 peak4-int4:8]

A share of the dense KV bytes gives budgets: what pages and landmarks together may take at every length. For every kind of text and
every scorer with its page size, the smallest share is looked for whose 5th percentile of exact alpha, teacher-forced, reaches the
target (bisection, then linear in between). Then the tokens that are read there at the last length, beside those of the first
scorer, and the time of one layer's decode attention with as many, landmarks scored and pages selected, against dense.
`--adapter`: a policy that reinforcement learning has moved.

A kind is NAME=PATTERN[,PATTERN …]; .jsonl files are rollouts of a run or of `leanroll rollout`, put behind each other in the
model's chat format. Windows of max_tokens each, the first of each file. One row per kind and scorer.
"""

from __future__ import annotations

import argparse
import glob
import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from benchmarks._common import interleaved, print_result, progress
from leanroll.calibrate.passes import PassRunner
from leanroll.calibrate.trajectories import Trajectory, from_texts
from leanroll.config.sections import AdapterConfig, ModelConfig
from leanroll.environment import last_level_cache_bytes
from leanroll.errors import ConfigError
from leanroll.kernels.dispatch import KernelBackend, get_backend
from leanroll.kernels.layout import DecodeBatch, PagedLayer
from leanroll.kernels.scorers import bytes_per_page, get_scorer
from leanroll.models import Policy
from leanroll.rollout.schedule import BudgetSchedule
from leanroll.train.setup import build_policy

QUANTILE = 0.05
SHARES = [0.09, 0.125, 0.16, 0.2, 0.25, 0.32, 0.4, 0.5, 0.64]
SCORERS = [
    "mean:16", "softmax:16", "minmax:16", "sub4-int4:16", "keys-int4:16", "peak4-int4:16", "softmax:8", "sub4-int4:8",
    "peak4-int4:8", "softmax:32", "peak8-int4:32",
]  # fmt: skip
LAYERS = 12  # of the timed pool at least; it takes up twice the last-level cache


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


@dataclass(frozen=True)
class Candidate:
    """A scorer with a page size, on some texts of max_tokens each."""

    runner: PassRunner
    policy: Policy
    texts: Sequence[Trajectory]
    scorer: str
    page_size: int
    dense_layers: tuple[int, ...]
    bin_tokens: int
    max_tokens: int

    def schedule(self, share: float) -> BudgetSchedule | None:
        """Its budgets at a share of the dense bytes."""
        found = schedule_of_share(share, self.policy, self.scorer, self.page_size, self.bin_tokens, self.max_tokens)
        return found and replace(found, dense_layers=self.dense_layers)

    def tail(self, share: float) -> float:
        """5th percentile of alpha over all positions from the second bin on; -1 where there are no budgets."""
        schedule = self.schedule(share)
        if schedule is None:
            return -1.0
        rates = self.runner.run(schedule, self.texts).rates
        return float(np.quantile(np.concatenate([alpha[self.bin_tokens :] for alpha in rates]), QUANTILE))


def share_at(
    target: float, shares: Sequence[float], tail_of: Callable[[float], float]
) -> tuple[float | None, dict[float, float]]:
    """The share at which the tail reaches the target, and the tails measured by share. Takes the tail to rise with the share.

    None: the largest share does not reach it. The smallest share itself where that already does.
    """
    tails: dict[float, float] = {}
    low, high = -1, len(shares)  # does not reach it, reaches it
    while high - low > 1:
        middle = (low + high) // 2
        tails[shares[middle]] = tail_of(shares[middle])
        low, high = (middle, high) if tails[shares[middle]] < target else (low, middle)
    if high == len(shares):
        return None, tails
    if low < 0 or tails[shares[low]] < 0.0:  # nothing smaller, or no budgets there
        return shares[high], tails
    ends = shares[low : high + 1]
    return float(np.interp(target, [tails[x] for x in ends], ends)), tails


def as_chat(files: Sequence[Path], tokenizer: PreTrainedTokenizerBase, path: Path) -> Path:
    """Prompts and completions of JSONL files behind each other in the model's chat format, written to `path`."""
    rows = [json.loads(line) for file in files for line in file.read_text(encoding="utf-8").split("\n") if line]
    turns = [
        [{"role": "user", "content": row["prompt"]}, {"role": "assistant", "content": row["completion"]}]
        for row in rows
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(tokenizer.apply_chat_template(t, tokenize=False) for t in turns), encoding="utf-8")
    return path


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
        for _ in range(max(LAYERS, -(-2 * (last_level_cache_bytes() or 0) // (k.nbytes + v.nbytes)))):
            landmarks = kind.allocate(
                pool, spec.num_kv_heads, spec.head_dim, page_size, self._dtype, torch.device("cpu")
            )
            layers.append(PagedLayer(k.clone(), v.clone(), landmarks))
            self._backend.update_landmarks(layers[-1], torch.arange(pool, dtype=torch.int32), kind)
        lengths = torch.full((self._batch,), self._num_tokens, dtype=torch.int32)
        table = torch.arange(pool, dtype=torch.int32).view(self._batch, num_pages)
        batch = DecodeBatch(table, lengths, torch.full_like(lengths, pages))
        new = random(2, self._batch, spec.num_kv_heads, spec.head_dim)
        scale = spec.head_dim**-0.5

        def all_layers(of: str | None, q: Tensor) -> float:
            start = time.perf_counter()
            for layer in layers:
                self._backend.decode_layer(q, new[0], new[1], layer, batch, of and kind, scale)
            return (time.perf_counter() - start) / len(layers) * 1e6

        def step(of: str | None) -> float:
            # Other queries, so that other pages are chosen than those that the first call has brought into the caches.
            first, second = (random(self._batch, spec.num_heads, spec.head_dim) for _ in range(2))
            all_layers(of, first)
            return all_layers(of, second)

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
    parser.add_argument("--scorers", nargs="+", default=SCORERS, metavar="NAME:PAGE_SIZE")
    parser.add_argument("--dense-layers", type=int, nargs="*", default=[0, 1])
    parser.add_argument("--shares", type=float, nargs="+", default=SHARES)
    parser.add_argument("--target", type=float, default=0.86)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--work-dir", type=Path, default=Path("runs/scorers"))
    options = parser.parse_args(arguments)

    adapter = AdapterConfig() if options.adapter is None else AdapterConfig(path=str(options.adapter))
    policy = build_policy(ModelConfig(name=options.model), adapter, training=False)
    backend = get_backend()
    times = LayerTimes(policy, backend, options.max_tokens, options.repeats)
    name = "base" if options.adapter is None else options.adapter.resolve().as_posix().replace("/", "_")
    folder = options.work_dir / name
    shares = sorted(options.shares)
    rows: list[dict[str, Any]] = []
    for kind, files in read_kinds(options.texts).items():
        length = options.max_tokens
        if all(file.suffix == ".jsonl" for file in files):
            files = [as_chat(files, policy.tokenizer, folder / f"{kind}.txt")]
        texts = from_texts(files, policy.tokenizer, max_tokens=length, min_tokens=length, per_file=1, seed=0)
        runner = PassRunner(policy, policy.spec, backend, folder, kv_dtype=policy.dtype)
        first: int | None = None
        for scorer, size in ((n, int(s)) for n, s in (pair.split(":") for pair in options.scorers)):
            candidate = Candidate(
                runner,
                policy,
                texts[: options.windows],
                scorer,
                size,
                tuple(options.dense_layers),
                options.bin_tokens,
                length,
            )
            wanted, tails = share_at(options.target, shares, candidate.tail)
            row: dict[str, Any] = {"text": kind, "page_size": size, "scorer": scorer, "tails": tails, "share": wanted}
            at = wanted and candidate.schedule(wanted)
            line = f"{kind:8} {scorer:10} pages of {size:3}"
            if at:
                row["tokens"] = at.pages[-1] * size
                first = first or row["tokens"]
                row["tokens_of_first"] = round(row["tokens"] / first, 3)
                row |= times.ratio(scorer, size, at.pages[-1])
                line += (
                    f" {options.target:g} at {wanted:.3f} of the bytes, {row['tokens']} tokens ({row['tokens_of_first']:.2f}), "
                    f"{row['sparse_us']:.0f} us, {row['speedup']:.2f}x"
                )
            rows.append(row)
            progress(line)
    print_result("scorers", {"target": options.target, "policy": name, "max_tokens": options.max_tokens, "rows": rows})


if __name__ == "__main__":
    main()
