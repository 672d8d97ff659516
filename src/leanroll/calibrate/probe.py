"""The CPU at hand as a `Device`: its rates, from the kernels that the engine runs; its overheads, from short sequences.

Nothing is fitted to the decode steps that the cost model predicts: the rates come from single kernels, the overheads from
sequences so short that attention costs nothing.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from leanroll.calibrate.cost import ScorerCost, step_cost
from leanroll.calibrate.devices import Device
from leanroll.calibrate.model_shape import ModelShape
from leanroll.environment import last_level_cache_bytes
from leanroll.errors import ConfigError
from leanroll.kernels.cpu import linear_group
from leanroll.kernels.cpu.native import native
from leanroll.kernels.dispatch import KernelBackend, get_backend
from leanroll.kernels.layout import DecodeBatch, PagedLayer
from leanroll.kernels.scorers import Scorer, get_scorer
from leanroll.models.policy import Policy
from leanroll.rollout.batching import RolloutProgress
from leanroll.rollout.engine import RolloutEngine
from leanroll.rollout.schedule import BudgetSchedule
from leanroll.types import Prompt, SamplingParams

_STREAM_BYTES = 1 << 29
_COLD_BYTES = 1 << 27  # at least; otherwise twice the last-level cache
_HOT_TOKENS = 512  # keys and values of a few heads, well inside a cache
_HOT_PAGES = 512  # and their landmarks
_MANY_ROWS = 64  # what our products take at most, and enough to make them bound by arithmetic
_DTYPES = {2: torch.bfloat16, 4: torch.float32}
_SHORT_PROMPT, _SHORT_STEPS = 16, 24


def median_seconds(function: Callable[[], object], repeats: int) -> float:
    """Median wall time of a call; one more call warms up."""
    function()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def measure_cpu(
    shape: ModelShape, *, scorer: str = "peak4-int4", page_size: int = 8, repeats: int = 7, name: str = "cpu"
) -> Device:
    """Rates of this machine with torch's current threads, for products and attention of this shape; a few seconds.

    The overheads are left at 0, see `measure_overheads`.

    Raises:
        ConfigError: weights that are neither bf16 nor fp32, or an unknown scorer.
        BackendUnavailable: the C++ kernels are not built, or do not know the scorer.
    """
    if shape.dtype_bytes not in _DTYPES:
        raise ConfigError(
            f"model shape {shape.name!r} has {shape.dtype_bytes} bytes per number; expected 2 (bf16) or 4 (fp32)."
        )
    with torch.inference_mode():
        attention = _AttentionProbe(shape, get_backend("cpu"), get_scorer(scorer), page_size)
        matmul_flops, weight_rate = _measure_products(shape, repeats)
        device = Device(
            name,
            bytes_per_second=_measure_bandwidth(repeats),
            matmul_flops=matmul_flops,
            weight_bytes_per_second=weight_rate,
            attention_flops=attention.flops_per_second(repeats),
            scoring_flops=attention.scoring_flops_per_second(repeats),
        )
        return attention.with_scattered(device, repeats)


def _measure_bandwidth(repeats: int) -> float:
    buffer = torch.ones(max(_STREAM_BYTES, 2 * (last_level_cache_bytes() or 0)) // 4)
    threads = torch.get_num_threads()
    return buffer.nbytes / median_seconds(
        lambda: native().read_sum(buffer.data_ptr(), buffer.numel(), threads), repeats
    )


def _measure_products(shape: ModelShape, repeats: int) -> tuple[float, float]:
    """FLOP/s of many rows on weights in cache, and bytes per second of one row on weights in memory."""
    dtype = _DTYPES[shape.dtype_bytes]
    group = [shape.intermediate_size] * 2
    pair = 2 * shape.intermediate_size * shape.hidden_size
    copies = _cold_copies(shape, pair * shape.dtype_bytes)
    weights = [[torch.ones(rows, shape.hidden_size, dtype=dtype) for rows in group] for _ in range(copies)]
    one, many = (torch.ones(rows, shape.hidden_size, dtype=dtype) for rows in (1, _MANY_ROWS))
    hot = median_seconds(lambda: linear_group(many, weights[0]), repeats)
    cold = median_seconds(lambda: [linear_group(one, pair) for pair in weights], repeats)
    return 2.0 * _MANY_ROWS * pair / hot, copies * pair * shape.dtype_bytes / cold


def _cold_copies(shape: ModelShape, num_bytes: int) -> int:
    """Layers to go round, so that each has left the cache when its turn comes again; a small model has no more than its own."""
    cold = max(_COLD_BYTES, 2 * (last_level_cache_bytes() or 0))
    return max(2, min(-(-cold // num_bytes), shape.num_layers))


@dataclass
class _Cache:
    """Layers of random keys and values, sequences of one length on them, and a token for each."""

    layers: list[PagedLayer]
    batch: DecodeBatch
    q: Tensor
    kv: Tensor


class _AttentionProbe:
    """Decode attention of one shape: in cache, and on pages scattered over memory."""

    def __init__(self, shape: ModelShape, backend: KernelBackend, scorer: Scorer, page_size: int) -> None:
        self.shape, self.backend, self.scorer, self.page_size = shape, backend, scorer, page_size
        self.dtype = _DTYPES[shape.dtype_bytes]

    def _cache(self, num_seqs: int, length: int, budget: int, num_layers: int) -> _Cache:
        shape, size = self.shape, self.page_size
        pages = -(-length // size)
        total = num_seqs * pages
        dims = (total, shape.num_kv_heads, size, shape.head_dim)
        layers: list[PagedLayer] = []
        for _ in range(num_layers):
            k, v = (layers[0].k.clone(), layers[0].v.clone()) if layers else (self._random(dims), self._random(dims))
            landmarks = self.scorer.allocate(
                total, shape.num_kv_heads, shape.head_dim, size, self.dtype, torch.device("cpu")
            )
            layer = PagedLayer(k, v, landmarks)
            self.backend.update_landmarks(layer, torch.arange(total, dtype=torch.int32), self.scorer)
            layers.append(layer)
        lengths = torch.full((num_seqs,), length, dtype=torch.int32)
        table = torch.arange(total, dtype=torch.int32).view(num_seqs, pages)
        return _Cache(
            layers,
            DecodeBatch(table, lengths, torch.full_like(lengths, budget)),
            self._random((num_seqs, shape.num_heads, shape.head_dim)),
            self._random((num_seqs, shape.num_kv_heads, shape.head_dim)),
        )

    def _random(self, dims: tuple[int, ...]) -> Tensor:
        return torch.empty(dims, dtype=self.dtype).normal_()

    def flops_per_second(self, repeats: int) -> float:
        """Arithmetic of dense attention on keys and values that stay in the cache."""
        num_seqs, calls = 2, 32
        cache = self._cache(num_seqs, _HOT_TOKENS, _HOT_TOKENS, 1)
        seconds = median_seconds(lambda: [self._attend(cache, 0, None) for _ in range(calls)], repeats) / calls
        return 4.0 * num_seqs * _HOT_TOKENS * self.shape.num_heads * self.shape.head_dim / seconds

    def scoring_flops_per_second(self, repeats: int) -> float:
        """Arithmetic of scoring on landmarks that stay in the cache."""
        num_seqs, calls = 2, 32
        cache = self._cache(num_seqs, _HOT_PAGES * self.page_size, _HOT_PAGES, 1)
        seconds = median_seconds(
            lambda: [
                self.backend.score_pages(cache.q, cache.layers[0], cache.batch, self.scorer) for _ in range(calls)
            ],
            repeats,
        )
        cost = ScorerCost.named(self.scorer.name, self.shape, self.page_size)
        num_scored = num_seqs * (_HOT_PAGES - cache.batch.first_pages - cache.batch.last_pages)
        return cost.flops_per_page * num_scored * self.shape.num_kv_heads * calls / seconds

    def with_scattered(self, device: Device, repeats: int) -> Device:
        """The device with what selected pages cost: how far their arithmetic hides behind memory, and scoring."""
        shape, size = self.shape, self.page_size
        num_seqs, num_pages, budget = 8, 512, 64
        per_layer = 2 * num_seqs * budget * size * shape.num_kv_heads * shape.head_dim * shape.dtype_bytes
        # Layer after layer, other queries in every round: chosen pages have left the cache when they are chosen again.
        cache = self._cache(num_seqs, num_pages * size, budget, _cold_copies(shape, 2 * per_layer))
        num_layers = len(cache.layers)
        rounds = [
            [self._random((num_seqs, shape.num_heads, shape.head_dim)) for _ in range(num_layers)]
            for _ in range(repeats + 1)
        ]
        selections = [
            [
                self.backend.select_pages(
                    self.backend.score_pages(q, layer, cache.batch, self.scorer), cache.batch, size
                )
                for q, layer in zip(queries, cache.layers, strict=True)
            ]
            for queries in rounds
        ]
        chosen, asked = iter(selections), iter(rounds)
        attend = median_seconds(
            lambda: [self._attend(cache, i, selected) for i, selected in enumerate(next(chosen))], repeats
        )
        whole = median_seconds(lambda: [self._step(cache, i, q) for i, q in enumerate(next(asked))], repeats)
        schedule = BudgetSchedule("probe", size, dense_layers=(), pages=(budget,), scorer=self.scorer.name)
        one_layer = replace(shape, num_layers=num_layers, windows=())
        cost = step_cost(one_layer, schedule, [num_pages * size] * num_seqs)
        part = cost.sparse_attention
        memory = float(part.bytes) / device.bytes_per_second
        arithmetic = float(part.flops) / (device.attention_flops or device.matmul_flops)
        overlap = (memory + arithmetic - attend) / min(memory, arithmetic)
        in_order = budget / num_pages
        overlap = (overlap - in_order) / (1.0 - in_order)
        device = replace(device, scattered_overlap=min(max(overlap, 0.0), 1.0))
        scoring = float(cost.seconds(device)["scoring"])
        beyond = max(whole - attend - scoring, 0.0)
        return replace(device, candidate_seconds=beyond / float(cost.candidates))

    def _attend(self, cache: _Cache, layer: int, selected: Tensor | None) -> Tensor:
        return self.backend.decode_attention(
            cache.q, cache.layers[layer], cache.batch, selected, self.shape.head_dim**-0.5
        )

    def _step(self, cache: _Cache, layer: int, q: Tensor) -> Tensor:
        return self.backend.decode_layer(
            q, cache.kv, cache.kv, cache.layers[layer], cache.batch, self.scorer, self.shape.head_dim**-0.5
        )


def shape_of(policy: Policy) -> ModelShape:
    """Sizes of a loaded model, in the dtype it runs in."""
    config = policy.model.config.get_text_config().to_dict()
    return ModelShape.from_config(config, name=policy.name, dtype_bytes=policy.dtype.itemsize)


def measure_overheads(policy: Policy, device: Device, *, many: int = 64, num_steps: int = _SHORT_STEPS) -> Device:
    """The device with what a step of this policy takes beyond the cost model's parts, from sequences of some 30 tokens.

    Batches of 1 and of `many` sequences give the cost per layer, and per layer and sequence.
    """
    shape = shape_of(policy)
    beyond = []
    for num_seqs in (1, many):
        seconds = statistics.median(_short_steps(policy, num_seqs, num_steps))
        cost = step_cost(shape, BudgetSchedule.dense(), [_SHORT_PROMPT + num_steps // 2] * num_seqs)
        predicted = float(cost.step_seconds(device.with_overheads(0.0)))
        beyond.append(max(seconds - predicted, 0.0) / shape.num_layers)
    per_row = max(beyond[1] - beyond[0], 0.0) / (many - 1)
    return device.with_overheads(max(beyond[0] - per_row, 0.0), per_row)


def _short_steps(policy: Policy, num_seqs: int, num_steps: int) -> list[float]:
    """Seconds of decode steps of short sequences, the first few left out."""
    engine = RolloutEngine(policy, BudgetSchedule.dense(), max_batch_size=num_seqs)
    ids = [(i % policy.spec.vocab_size,) * _SHORT_PROMPT for i in range(num_seqs)]
    prompts = [Prompt(index=i, token_ids=token_ids) for i, token_ids in enumerate(ids)]
    ends: list[float] = []

    def after_step(now: RolloutProgress) -> None:
        if now.num_running == num_seqs:
            ends.append(time.perf_counter())

    sampling = SamplingParams(max_completion_length=num_steps + 1, ignore_stop=True)
    engine.generate(prompts, sampling, 1, progress=after_step)
    return [end - start for start, end in itertools.pairwise(ends[3:])]
