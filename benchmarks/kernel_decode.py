"""Decode attention on the CPU: dense against 64 of 512 pages, and both against the machine's read bandwidth.

    python benchmarks/kernel_decode.py [--threads 2] [--layers 8] [--repeats 30] [--scorers mean softmax …] [--layout prompt]

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
from leanroll.kernels.layout import DecodeBatch, PagedLayer
from leanroll.kernels.scorers import Scorer, bytes_per_page, get_scorer, scorer_names
from leanroll.rollout.pages import allocate

BUFFER_BYTES = 1 << 29


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sequences", type=int, default=8)
    parser.add_argument("--kv-heads", type=int, default=3)
    parser.add_argument("--group", type=int, default=3, help="query heads per KV head")
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--length", type=int, default=8192, help="tokens in the cache, the current one included")
    parser.add_argument("--page-size", type=int, default=16)
    parser.add_argument(
        "--budget", type=int, default=64, help="pages read by the sparse kernel, reserved ones included"
    )
    parser.add_argument("--scorers", nargs="+", default=["mean"], choices=scorer_names(), help="page scorers to time")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--layout", choices=("prompt", "grown", "random"), default="prompt")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--isa", help="force an instruction set")
    return parser.parse_args()


class Case:
    """Layers of a decoding batch with random contents."""

    def __init__(self, args: argparse.Namespace, scorers: list[Scorer], backend: KernelBackend) -> None:
        generator = torch.Generator().manual_seed(0)
        dtype = getattr(torch, args.dtype)
        num_pages = -(-args.length // args.page_size)
        pool = args.sequences * num_pages
        self.scale, cpu = args.head_dim**-0.5, torch.device("cpu")
        shape = (args.layers, pool, args.kv_heads, args.page_size, args.head_dim)
        k, v = (allocate(shape, dtype, cpu) for _ in range(2))
        numbers = torch.randn(2, *shape[1:], generator=generator).to(dtype)
        for i in range(
            args.layers
        ):  # layers differ in their order of pages; what a page holds does not change the time
            order = torch.randperm(pool, generator=generator)
            k[i], v[i] = numbers[0, order], numbers[1, order]
        pages = torch.arange(pool, dtype=torch.int32)
        # The same keys and values for all scorers.
        self.layers: dict[str, list[PagedLayer]] = {}
        for scorer in scorers:
            page_shape, stored = scorer.storage(args.kv_heads, args.head_dim, args.page_size, dtype)
            landmarks = allocate((args.layers, pool, *page_shape), stored, cpu)
            self.layers[scorer.name] = [PagedLayer(*of_layer) for of_layer in zip(k, v, landmarks, strict=True)]
            for layer in self.layers[scorer.name]:
                backend.update_landmarks(layer, pages, scorer)
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

    def step(self, backend: KernelBackend, layer: PagedLayer, scorer: Scorer | None) -> Tensor:
        return backend.decode_layer(self.q, self.k, self.v, layer, self.batch, scorer, self.scale)


def check_correct(
    case: Case, backend: KernelBackend, dtype: torch.dtype, layer: PagedLayer, scorer: Scorer | None
) -> None:
    """Stop the benchmark when the kernel does not agree with the reference."""
    bound = 6e-3 if dtype == torch.bfloat16 else 1e-5
    expected = case.step(get_backend("reference"), layer, scorer).double()
    actual = case.step(backend, layer, scorer).double()
    error = float((actual - expected).square().mean().sqrt() / expected.square().mean().sqrt())
    if not error <= bound:
        sys.exit(
            f"{scorer.name if scorer else 'dense'} kernel is wrong: relative RMS error {error:.1e}, bound {bound:.0e}"
        )


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
    backend, dtype = get_backend("cpu"), getattr(torch, args.dtype)
    scorers = [get_scorer(name) for name in dict.fromkeys(args.scorers)]
    case = Case(args, scorers, backend)
    some_layers = case.layers[scorers[0].name]
    check_correct(case, backend, dtype, some_layers[0], None)
    for scorer in scorers:
        check_correct(case, backend, dtype, case.layers[scorer.name][0], scorer)
    print(f"correct against the reference; {describe()}")

    buffer = torch.ones(BUFFER_BYTES // 4)
    times: dict[str, list[float]] = {}
    for repeat in range(args.repeats + 1):
        batch = time_once(args, case, backend, scorers, buffer)
        if repeat:  # the first round warms up
            for name, values in batch.items():
                times.setdefault(name, []).extend(values)

    row = args.sequences * args.kv_heads * args.head_dim * dtype.itemsize
    num_pages = -(-args.length // args.page_size)
    dense_bytes = 2 * row * args.length
    attend_bytes = 2 * row * args.page_size * min(args.budget, num_pages)
    median = {name: statistics.median(values) for name, values in times.items()}
    bandwidth = BUFFER_BYTES / median["read"]
    by_scorer = {}
    for scorer in scorers:
        landmark = bytes_per_page(scorer, args.kv_heads, args.head_dim, args.page_size, dtype)
        score, step = median[f"score {scorer.name}"], median[f"step {scorer.name}"]
        by_scorer[scorer.name] = {
            "landmark_bytes_per_page": landmark,
            "landmark_share_of_kv": round(landmark * args.sequences / (2 * row * args.page_size), 4),
            "score_gb_s": round(landmark * args.sequences * num_pages / score / 1e9, 1),
            "dense_over_step": round(median["dense"] / step, 2),
            **{name: summary(times[f"{name} {scorer.name}"]) for name in ("score", "select", "step")},
        }
    result = {
        "benchmark": "kernel_decode",
        "hardware": {"cpu": cpu_name(), "threads": args.threads, "machine": platform.machine()},
        "versions": {"python": platform.python_version(), "torch": torch.__version__, "compiler": native().compiler()},
        "isa": native().isa(),
        "isas": list(available_isas()),
        "shape": {
            name: getattr(args, name)
            for name in (
                "sequences",
                "kv_heads",
                "group",
                "head_dim",
                "length",
                "page_size",
                "budget",
                "dtype",
                "layout",
            )
        },
        "layers": args.layers,
        "repeats": args.repeats,
        "read_gb_s": round(bandwidth / 1e9, 1),
        "dense_gb_s": round(dense_bytes / median["dense"] / 1e9, 1),
        "dense_share_of_read": round(dense_bytes / median["dense"] / bandwidth, 3),
        "attend_gb_s": round(attend_bytes / median["attend"] / 1e9, 1),
        "dense_over_attend": round(median["dense"] / median["attend"], 2),
        "times": {name: summary(times[name]) for name in ("read", "dense", "attend")},
        "scorers": by_scorer,
    }
    for name in ("dense", "attend"):
        print(f"{name:12s} {median[name] * 1e6:9.1f} us per layer")
    for scorer in scorers:
        score, select, step = (median[f"{part} {scorer.name}"] * 1e6 for part in ("score", "select", "step"))
        faster = by_scorer[scorer.name]["dense_over_step"]
        print(
            f"{scorer.name:12s} {score:9.1f} us score, {select:7.1f} select, {step:7.1f} whole step, {faster}x faster than dense"
        )
    print(
        f"read {bandwidth / 1e9:.1f} GB/s · dense {result['dense_gb_s']} GB/s ({result['dense_share_of_read']:.0%}) · "
        f"selected pages {result['dense_over_attend']}x faster"
    )
    print(json.dumps(result))


def time_once(
    args: argparse.Namespace, case: Case, backend: KernelBackend, scorers: list[Scorer], buffer: Tensor
) -> dict[str, list[float]]:
    """Seconds of every part on every layer."""
    some_layers = case.layers[scorers[0].name]
    times = {"read": [timed(lambda: native().read_sum(buffer.data_ptr(), buffer.numel(), args.threads))]}
    times["dense"] = [timed(lambda x=x: case.step(backend, x, None)) for x in some_layers]
    for scorer in scorers:
        layers = case.layers[scorer.name]
        times[f"step {scorer.name}"] = [timed(lambda x=x, s=scorer: case.step(backend, x, s)) for x in layers]
        buffer[::16].sum()  # another pass over memory: pages and landmarks leave the caches
        scores = [torch.empty(0)] * len(layers)

        def score(i: int, scorer: Scorer = scorer, scores: list[Tensor] = scores) -> None:
            scores[i] = backend.score_pages(case.q, case.layers[scorer.name][i], case.batch, scorer)

        times[f"score {scorer.name}"] = [timed(lambda i=i, score=score: score(i)) for i in range(len(layers))]
        times[f"select {scorer.name}"] = [
            timed(lambda s=s: backend.select_pages(s, case.batch, args.page_size)) for s in scores
        ]
    selected = [backend.select_pages(s, case.batch, args.page_size) for s in scores]
    buffer[::16].sum()
    times["attend"] = [
        timed(lambda x=x, s=s: backend.decode_attention(case.q, x, case.batch, s, case.scale))
        for x, s in zip(some_layers, selected, strict=True)
    ]
    return times


def cpu_name() -> str:
    """Model name of the processor, from the kernel where it tells."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            return next((line.split(":", 1)[1].strip() for line in file if line.startswith("model name")), "unknown")
    except FileNotFoundError:  # not Linux
        return platform.processor()


if __name__ == "__main__":
    main()
