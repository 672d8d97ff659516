"""Decode attention on the CPU: dense against 64 of 512 pages, and both against the machine's read bandwidth.

    python benchmarks/kernel_decode.py [--threads 2] [--layers 8] [--repeats 30] [--scorer mean] [--layout prompt]

Correctness first: the kernel is compared with the plain-torch reference on the benchmark's own tensors, and a wrong kernel is
not timed. Bandwidth is that of summing a buffer far larger than the caches with the same threads, measured between the
kernel's repeats. Every call works on another layer, so that the caches never hold what it reads. The pages come from the
engine's own pool. Layouts: `prompt`, the pages of a sequence lie side by side, as after a prefill; `grown`, sequences took
pages in turn, as they do while they generate; `random`. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable

import torch
from torch import Tensor

from leanroll.kernels.cpu.native import available_isas, describe, native, use_isa
from leanroll.kernels.dispatch import KernelBackend, get_backend
from leanroll.kernels.layout import DecodeBatch
from leanroll.kernels.scorers import Scorer, get_scorer
from leanroll.rollout.pages import PagePool

BUFFER_BYTES = 1 << 29


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sequences", type=int, default=8)
    parser.add_argument("--kv-heads", type=int, default=3)
    parser.add_argument("--group", type=int, default=3, help="query heads per KV head")
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--length", type=int, default=8192, help="tokens in the cache, the current one included")
    parser.add_argument("--page-size", type=int, default=16)
    parser.add_argument("--budget", type=int, default=64, help="pages read by the sparse kernel, reserved ones included")
    parser.add_argument("--scorer", default="mean")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--layout", choices=("prompt", "grown", "random"), default="prompt")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--isa", help="force an instruction set")
    return parser.parse_args()


class Case:
    """Layers of a decoding batch with random contents."""

    def __init__(self, args: argparse.Namespace, scorer: Scorer) -> None:
        generator = torch.Generator().manual_seed(0)
        dtype = getattr(torch, args.dtype)
        num_pages = -(-args.length // args.page_size)
        pool = args.sequences * num_pages
        self.scorer, self.scale = scorer, args.head_dim**-0.5
        self.layers = PagePool(
            num_pages=pool, page_size=args.page_size, num_layers=args.layers, num_kv_heads=args.kv_heads,
            head_dim=args.head_dim, dtype=dtype, device=torch.device("cpu"), scorer=scorer, sparse_layers=range(args.layers),
        ).layers  # fmt: skip
        for layer in self.layers:
            for tensor in (layer.k, layer.v):
                tensor.copy_(torch.randn(tensor.shape, generator=generator))
            scorer.update(layer, torch.arange(pool))
        pages = torch.arange(pool, dtype=torch.int32)
        if args.layout == "grown":
            table = pages.view(num_pages, args.sequences).t().contiguous()
        elif args.layout == "random":
            table = pages[torch.randperm(pool, generator=generator)].view(args.sequences, num_pages)
        else:
            table = pages.view(args.sequences, num_pages)
        lengths = torch.full((args.sequences,), args.length, dtype=torch.int32)
        self.batch = DecodeBatch(table, lengths, torch.full_like(lengths, args.budget))
        heads = args.kv_heads * args.group
        self.q = torch.randn(args.sequences, heads, args.head_dim, generator=generator).to(dtype)
        self.k = torch.randn(args.sequences, args.kv_heads, args.head_dim, generator=generator).to(dtype)
        self.v = torch.randn(args.sequences, args.kv_heads, args.head_dim, generator=generator).to(dtype)

    def step(self, backend: KernelBackend, layer: int, sparse: bool) -> Tensor:
        scorer = self.scorer if sparse else None
        return backend.decode_layer(self.q, self.k, self.v, self.layers[layer], self.batch, scorer, self.scale)


def check_correct(case: Case, backend: KernelBackend, dtype: torch.dtype) -> None:
    """Stop the benchmark when the kernel does not agree with the reference."""
    bound = 6e-3 if dtype == torch.bfloat16 else 1e-5
    for sparse in (False, True):
        expected = case.step(get_backend("reference"), 0, sparse).double()
        actual = case.step(backend, 0, sparse).double()
        error = float((actual - expected).square().mean().sqrt() / expected.square().mean().sqrt())
        if not error <= bound:
            sys.exit(f"{'sparse' if sparse else 'dense'} kernel is wrong: relative RMS error {error:.1e}, bound {bound:.0e}")


def timed(function: Callable[[], object]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def summary(seconds: list[float]) -> dict[str, float]:
    """Median and spread in microseconds."""
    q1, _, q3 = statistics.quantiles(seconds, n=4)
    return {
        "median_us": round(statistics.median(seconds) * 1e6, 1),
        "q1_us": round(q1 * 1e6, 1),
        "q3_us": round(q3 * 1e6, 1),
        "min_us": round(min(seconds) * 1e6, 1),
    }


def main() -> None:
    args = parse_args()
    torch.set_num_threads(args.threads)
    if args.isa:
        use_isa(args.isa)
    backend, scorer, dtype = get_backend("cpu"), get_scorer(args.scorer), getattr(torch, args.dtype)
    case = Case(args, scorer)
    check_correct(case, backend, dtype)
    print(f"correct against the reference; {describe()}")

    selected = [
        backend.select_pages(backend.score_pages(case.q, layer, case.batch, scorer), case.batch, args.page_size)
        for layer in case.layers
    ]
    buffer = torch.ones(BUFFER_BYTES // 4)
    times: dict[str, list[float]] = {"read": [], "dense": [], "sparse": [], "attend": [], "score": []}
    for repeat in range(args.repeats + 1):
        batch: dict[str, list[float]] = {name: [] for name in times}
        batch["read"].append(timed(lambda: native().read_sum(buffer.data_ptr(), buffer.numel(), args.threads)))
        for i in range(args.layers):
            batch["dense"].append(timed(lambda i=i: case.step(backend, i, sparse=False)))
        for i in range(args.layers):
            batch["sparse"].append(timed(lambda i=i: case.step(backend, i, sparse=True)))
        buffer[::16].sum()  # another pass over memory: the selected pages leave the caches
        for i, layer in enumerate(case.layers):
            batch["attend"].append(
                timed(lambda i=i, layer=layer: backend.decode_attention(case.q, layer, case.batch, selected[i], case.scale))
            )
        for layer in case.layers:
            batch["score"].append(timed(lambda layer=layer: backend.score_pages(case.q, layer, case.batch, scorer)))
        if repeat:  # the first round warms up
            for name, values in batch.items():
                times[name] += values

    element = dtype.itemsize
    row = args.sequences * args.kv_heads * args.head_dim * element
    num_pages = -(-args.length // args.page_size)
    dense_bytes = 2 * row * args.length
    attend_bytes = 2 * row * args.page_size * min(args.budget, num_pages)
    median = {name: statistics.median(values) for name, values in times.items()}
    bandwidth = BUFFER_BYTES / median["read"]
    result = {
        "benchmark": "kernel_decode",
        "hardware": {"cpu": cpu_name(), "threads": args.threads, "machine": platform.machine()},
        "versions": {"python": platform.python_version(), "torch": torch.__version__, "compiler": native().compiler()},
        "isa": native().isa(),
        "isas": list(available_isas()),
        "shape": {
            name: getattr(args, name)
            for name in ("sequences", "kv_heads", "group", "head_dim", "length", "page_size", "budget", "scorer", "dtype", "layout")
        },
        "layers": args.layers,
        "repeats": args.repeats,
        "read_gb_s": round(bandwidth / 1e9, 1),
        "dense_gb_s": round(dense_bytes / median["dense"] / 1e9, 1),
        "dense_share_of_read": round(dense_bytes / median["dense"] / bandwidth, 3),
        "attend_gb_s": round(attend_bytes / median["attend"] / 1e9, 1),
        "dense_over_attend": round(median["dense"] / median["attend"], 2),
        "dense_over_sparse_step": round(median["dense"] / median["sparse"], 2),
        "times": {name: summary(values) for name, values in times.items()},
    }
    for name in ("dense", "sparse", "attend", "score"):
        print(f"{name:7s} {median[name] * 1e6:9.1f} us per layer")
    print(
        f"read {bandwidth / 1e9:.1f} GB/s · dense {result['dense_gb_s']} GB/s ({result['dense_share_of_read']:.0%}) · "
        f"selected pages {result['dense_over_attend']}x, whole sparse step {result['dense_over_sparse_step']}x faster"
    )
    print(json.dumps(result))


def cpu_name() -> str:
    """Model name of the processor, from the kernel where it tells."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            return next((line.split(":", 1)[1].strip() for line in file if line.startswith("model name")), "unknown")
    except FileNotFoundError:  # not Linux
        return platform.processor()


if __name__ == "__main__":
    main()
