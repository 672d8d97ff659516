"""The fused divergence against full logits and autograd: time and peak memory of forward and backward, by number of tokens.

    python -m benchmarks.distill_loss [--tokens 2048 4096] [--kind reverse_kl] [--repeats 3] [--device cpu] [--threads 2]

Correctness first: value and gradients are compared with float64 on the first rows, and a wrong loss is not timed. `full` does what
trainers do: both heads' logits in the dtype of the model, widened to float32, then log-softmax and autograd. `frozen` trains the
hidden states alone (LoRA), `trained` the student's head too. Head sizes are those of the default model, with a teacher of the same
size. Memory is what a call needs on top of its inputs (on a CPU: peak resident size). `at 16 x 1024` is the straight line
through the smallest and the largest number of tokens (both must be more than the few hundred rows of a chunk); with full logits
such a batch rarely fits. The last line is JSON.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import math
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks._common import interleaved, print_result, progress
from leanroll.losses.distill import divergence
from leanroll.models.head import LmHead

CHECKED_ROWS = 64
LARGE_BATCH = 16 * 1024
# Relative RMS errors. Values are never rounded to bfloat16, gradients twice.
VALUE_BOUND = 1e-5
GRADIENT_BOUND = {torch.float32: 1e-5, torch.bfloat16: 6e-3}
BETA = 0.5


def full_divergence(h: Tensor, weight: Tensor, t: Tensor, teacher: Tensor, kind: str) -> Tensor:
    """Sum over rows [R, H], from logits that are held in full."""
    log_p = _wide(h @ weight.T).log_softmax(dim=-1)
    with torch.no_grad():
        log_q = _wide(t @ teacher.T).log_softmax(dim=-1)
    if kind == "reverse_kl":
        return (log_p.exp() * (log_p - log_q)).sum()
    if kind == "forward_kl":
        return (log_q.exp() * (log_q - log_p)).sum()
    log_m = torch.logaddexp(log_q + math.log(BETA), log_p + math.log1p(-BETA))
    return (BETA * log_q.exp() * (log_q - log_m) + (1 - BETA) * log_p.exp() * (log_p - log_m)).sum()


def _wide(logits: Tensor) -> Tensor:
    return logits if logits.dtype == torch.float64 else logits.float()


class Case:
    """Random hidden states and heads; logits have a standard deviation of about 3."""

    def __init__(self, args: argparse.Namespace, num_tokens: int) -> None:
        generator = torch.Generator().manual_seed(0)

        def random(*shape: int, std: float = 1.0) -> Tensor:
            return (std * torch.randn(shape, generator=generator)).to(args.device, getattr(torch, args.dtype))

        self.kind, self.num_tokens = args.kind, num_tokens
        self.h, self.t = random(num_tokens, args.hidden), random(num_tokens, args.teacher_hidden)
        self.weight = random(args.vocab, args.hidden, std=3.0 * args.hidden**-0.5)
        self.teacher = random(args.vocab, args.teacher_hidden, std=3.0 * args.teacher_hidden**-0.5)

    def fused(self, leaves: Sequence[Tensor], rows: int) -> Tensor:
        beta = BETA if self.kind == "jsd" else None
        heads = LmHead(leaves[1]), LmHead(self.teacher)
        return divergence(leaves[0], heads[0], self.t[:rows], heads[1], kind=self.kind, beta=beta).loss.sum()

    def full(self, leaves: Sequence[Tensor], rows: int) -> Tensor:
        dtype = leaves[0].dtype
        return full_divergence(*leaves, self.t[:rows].to(dtype), self.teacher.to(dtype), self.kind)

    def run(
        self,
        loss: Callable[[Sequence[Tensor], int], Tensor],
        trained: bool,
        rows: int | None = None,
        dtype: torch.dtype | None = None,
    ) -> tuple[Tensor, ...]:
        """Loss and gradients of all or the first rows."""
        rows = rows or self.num_tokens
        leaves = [x.detach().to(dtype or x.dtype) for x in (self.h[:rows], self.weight)]
        for leaf in leaves[: 1 + trained]:
            leaf.requires_grad_()
        value = loss(leaves, rows)
        return (value.detach(), *torch.autograd.grad(value, leaves[: 1 + trained]))

    def check(self) -> dict[str, float]:
        """Relative RMS errors of the fused loss on a few rows; a wrong one ends the benchmark."""
        rows = min(CHECKED_ROWS, self.num_tokens)
        bounds = (VALUE_BOUND, *[GRADIENT_BOUND[self.h.dtype]] * 2)
        errors: dict[str, float] = {}
        for trained in (False, True):
            got = self.run(self.fused, trained, rows)
            wanted = self.run(self.full, trained, rows, torch.float64)
            for name, a, e, bound in zip(("loss", "d hidden", "d weight"), got, wanted, bounds, strict=False):
                error = float((a.double() - e).square().mean().sqrt() / e.square().mean().sqrt())
                if not error <= bound:
                    sys.exit(f"The fused {self.kind} is wrong: {name} is off by {error:.1e}, bound {bound:.0e}")
                errors[name] = max(error, errors.get(name, 0.0))
        return errors


def seconds(function: Callable[[], object], device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    function()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def peak_mib(function: Callable[[], object], device: str) -> float:
    """What a call needs at its worst moment, on top of what is held before it."""
    gc.collect()
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        function()
        return (torch.cuda.max_memory_allocated() - before) / 2**20
    ctypes.CDLL(None).malloc_trim(0)  # what earlier calls have left behind would serve this one unseen
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from here (Linux)
    before = _resident_kib("VmRSS")
    function()
    return (_resident_kib("VmHWM") - before) / 2**10


def _resident_kib(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field))


def measure(args: argparse.Namespace, num_tokens: int) -> dict[str, Any]:
    case = Case(args, num_tokens)
    result: dict[str, Any] = {"tokens": num_tokens, "errors": {k: float(f"{e:.1e}") for k, e in case.check().items()}}
    for mode, trained in (("frozen", False), ("trained", True)):
        calls = {
            name: lambda loss=loss, trained=trained: case.run(loss, trained)
            for name, loss in (("fused", case.fused), ("full", case.full))
        }
        # The first calls warm up: their memory is not taken either.
        for call in calls.values():
            call()
        memory = {name: peak_mib(call, args.device) for name, call in calls.items()}
        timers = {name: lambda call=call: seconds(call, args.device) for name, call in calls.items()}
        times = interleaved(timers, args.repeats)
        result[mode] = {
            name: {"seconds": round(statistics.median(times[name]), 4), "peak_mib": round(memory[name], 1)}
            for name in calls
        }
        progress(f"{num_tokens} tokens, head {mode}: {result[mode]}")
    return result


def extrapolate(small: dict[str, Any], large: dict[str, Any], tokens: int) -> dict[str, Any]:
    """The straight line through two measurements."""
    share = (tokens - small["tokens"]) / (large["tokens"] - small["tokens"])
    return {
        mode: {
            name: {unit: round(a + share * (large[mode][name][unit] - a), 2) for unit, a in small[mode][name].items()}
            for name in ("fused", "full")
        }
        for mode in ("frozen", "trained")
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line of the module docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[2048, 4096])
    parser.add_argument("--kind", choices=("reverse_kl", "forward_kl", "jsd"), default="reverse_kl")
    parser.add_argument("--hidden", type=int, default=576)
    parser.add_argument("--teacher-hidden", type=int, default=576)
    parser.add_argument("--vocab", type=int, default=49152)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int)
    args = parser.parse_args(arguments)
    if args.threads:
        torch.set_num_threads(args.threads)
    sizes = sorted(set(args.tokens))
    results = [measure(args, num_tokens) for num_tokens in sizes]
    settings = {name: value for name, value in vars(args).items() if name != "tokens"}
    result = {**settings, "threads": torch.get_num_threads(), "measured": results}
    if len(sizes) > 1:
        result["at 16 x 1024"] = extrapolate(results[0], results[-1], LARGE_BATCH)
    print_result("distill_loss", result)


if __name__ == "__main__":
    main()
