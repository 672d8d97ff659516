"""What a decode step costs, dense and sparse: arithmetic, traffic, and the time they take on a device.

Derived in docs/cost-model.md, which also says where and why it differs from the formulas printed in Sparrow (arXiv
2606.08446). Never imports torch.

Legend: L tokens of a sequence with the current one, S tokens per page, N = ceil(L / S) pages, B sequences, T steps.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from leanroll.calibrate.devices import Device
from leanroll.calibrate.model_shape import ModelShape
from leanroll.errors import ConfigError
from leanroll.rollout.schedule import BudgetSchedule

Floats = NDArray[np.float64]
# Sub-landmarks (or every key) as whole numbers with one bf16 scale each: sub4-int4, peak4-int4, keys-int4.
_QUANTISED = re.compile(r"(?:(?:sub|peak)(?P<rows>[1-9]\d*)|keys)-int(?P<bits>4|8)")
_SCALE_BYTES = 2
PARTS = ("weights", "logits", "dense_attention", "sparse_attention", "scoring")


@dataclass(frozen=True, slots=True)
class ScorerCost:
    """Of scoring one candidate page for one KV head: landmark bytes read, and FLOPs."""

    bytes_per_page: float
    flops_per_page: float

    @classmethod
    def of(
        cls, shape: ModelShape, *, vectors: int = 1, bytes_per_vector: float | None = None, averages_heads: bool = False
    ) -> ScorerCost:
        """A scorer that multiplies queries with `vectors` landmarks per page.

        bytes_per_vector: None stores them in the cache's dtype. averages_heads: one query per KV head (the paper's `mean`)
        instead of every query head by itself.
        """
        size = shape.head_dim * shape.dtype_bytes if bytes_per_vector is None else bytes_per_vector
        queries = 1 if averages_heads else shape.group_size
        return cls(vectors * size, 2.0 * vectors * queries * shape.head_dim)

    @classmethod
    def named(cls, name: str, shape: ModelShape, page_size: int) -> ScorerCost:
        """Of the scorers in `leanroll.kernels.scorers`, by their names.

        Raises:
            ConfigError: another scorer; describe it with `ScorerCost.of`.
        """
        if name in ("mean", "softmax"):
            return cls.of(shape, averages_heads=name == "mean")
        if name == "minmax":
            return cls.of(shape, vectors=2)
        if name == "oracle-mass":  # reads every key
            return cls.of(shape, vectors=page_size)
        packed = _QUANTISED.fullmatch(name)
        if packed is None:
            raise ConfigError(
                f"the cost of page scorer {name!r} is unknown; expected mean, softmax, minmax, sub4-int4, peak4-int4 and the like, "
                "or oracle-mass. Pass scorer=ScorerCost.of(...) with its landmarks per page and their bytes."
            )
        rows = int(packed["rows"]) if packed["rows"] else page_size
        bits = int(packed["bits"])
        dims = -(-shape.head_dim * bits // 64) * 64 // bits  # rows are padded to whole tiles of 8 bytes
        return cls.of(shape, vectors=rows, bytes_per_vector=dims * bits / 8 + _SCALE_BYTES)


@dataclass(frozen=True, slots=True)
class Part:
    """FLOPs and bytes of one part of a step; arrays over steps, shape [] for a single one."""

    flops: Floats
    bytes: Floats


@dataclass(frozen=True, slots=True)
class StepCost:
    """A decode step, or T of them: every number is an array [T], or [] for one step.

    weights: products of the layers. logits: the head's. dense_attention, sparse_attention: queries with keys and values on
    layers of each kind. scoring: landmarks. candidates: pages scored, times KV heads and sparse layers. chosen_share: tokens
    that sparse layers read, of those they hold; 1 where there are none. Activations, norms, sampling, and the writing of the
    current token are not in here: a device's overheads stand for them.

    Example, one step of 8 sequences of 8,000 tokens of `smollm2-135m` in bf16, 64 pages, layers 0 and 1 dense: weights
    212 MB, logits 57 MB, dense attention 98 MB, sparse attention 176 MB, scoring 43 MB.
    """

    weights: Part
    logits: Part
    dense_attention: Part
    sparse_attention: Part
    scoring: Part
    candidates: Floats
    chosen_share: Floats
    num_layers: int
    batch: Floats

    @property
    def flops(self) -> Floats:
        """All FLOPs."""
        return sum((getattr(self, name).flops for name in PARTS), np.zeros(()))

    @property
    def bytes(self) -> Floats:
        """All bytes read."""
        return sum((getattr(self, name).bytes for name in PARTS), np.zeros(()))

    @property
    def kv_bytes(self) -> Floats:
        """Keys, values and landmarks read."""
        return self.dense_attention.bytes + self.sparse_attention.bytes + self.scoring.bytes

    def seconds(self, device: Device) -> dict[str, Floats]:
        """Predicted time by part, `overhead` included; the parts run one after another, so a step takes their sum."""
        weight_rate = device.weight_bytes_per_second or device.bytes_per_second
        attention_rate = device.attention_flops or device.matmul_flops
        times = {
            "weights": _streamed(self.weights, device.matmul_flops, weight_rate),
            "logits": _streamed(self.logits, device.matmul_flops, weight_rate),
            "dense_attention": _streamed(self.dense_attention, attention_rate, device.bytes_per_second),
            "sparse_attention": _scattered(
                self.sparse_attention,
                attention_rate,
                device,
                device.scattered_overlap + (1.0 - device.scattered_overlap) * self.chosen_share,
            ),
            "scoring": _scattered(
                self.scoring, device.scoring_flops or attention_rate, device, device.scattered_overlap
            )
            + self.candidates * device.candidate_seconds,
        }
        running = self.batch > 0
        per_layer = device.layer_seconds * running + device.layer_row_seconds * self.batch
        return {**times, "overhead": self.num_layers * per_layer}

    def step_seconds(self, device: Device) -> Floats:
        """Predicted time of the step, or of each."""
        return sum(self.seconds(device).values(), np.zeros(()))


def _streamed(part: Part, flops_rate: float, bytes_rate: float) -> Floats:
    return np.maximum(part.flops / flops_rate, part.bytes / bytes_rate)


def _scattered(part: Part, flops_rate: float, device: Device, overlap: Floats | float) -> Floats:
    arithmetic, memory = part.flops / flops_rate, part.bytes / device.bytes_per_second
    return np.maximum(arithmetic, memory) + (1.0 - overlap) * np.minimum(arithmetic, memory)


def step_cost(
    shape: ModelShape,
    schedule: BudgetSchedule,
    lengths: ArrayLike,
    *,
    counts: ArrayLike = 1,
    scorer: ScorerCost | None = None,
    prompt_length: int = 0,
    samples_per_prompt: int = 1,
) -> StepCost:
    """FLOPs and bytes of decode steps.

    Args:
        shape: of the model. schedule: `BudgetSchedule.dense()` for ordinary attention.
        lengths: tokens of each sequence, the current one included: integers [B], or [T, B] for T steps.
        counts: sequences of each length, broadcast against `lengths`; 0 where none runs.
        scorer: its cost; None takes that of the schedule's scorer.
        prompt_length, samples_per_prompt: sequences come in groups that share a prompt, whose keys, values and landmarks are
            read once per group where everything is read. Selected pages are not shared: each sequence has its own. Leave
            samples_per_prompt at 1 for kernels that read a shared prompt once per sequence, as ours for the CPU does.

    Raises:
        ConfigError: lengths that are not positive integers, or shorter than the prompt; a dense layer that does not exist.
    """
    tokens = np.asarray(lengths)
    if tokens.ndim == 0 or not np.issubdtype(tokens.dtype, np.integer) or tokens.size == 0 or tokens.min() < 1:
        raise ConfigError(f"lengths is {lengths!r}; expected an array of positive integers, one per sequence.")
    if prompt_length < 0 or samples_per_prompt < 1 or tokens.min() < prompt_length:
        raise ConfigError(
            f"prompt_length is {prompt_length} and samples_per_prompt {samples_per_prompt}, the shortest sequence has "
            f"{tokens.min()} tokens; expected a prompt no longer than that, and at least one sample."
        )
    outside = [layer for layer in schedule.dense_layers if layer >= shape.num_layers]
    if outside:
        raise ConfigError(
            f"schedule {schedule.name!r} names dense layers {outside}, but {shape.name!r} has {shape.num_layers} layers."
        )
    number = np.broadcast_to(np.asarray(counts, dtype=np.float64), tokens.shape)

    def over_batch(values: NDArray[np.floating] | NDArray[np.integer]) -> Floats:
        return (values * number).sum(axis=-1)

    size, repeated = schedule.page_size, 1.0 - 1.0 / samples_per_prompt
    windows = shape.windows or (0,) * shape.num_layers
    full = [layer for layer, window in enumerate(windows) if window == 0]
    num_sparse = 0 if schedule.is_dense else len([i for i in full if i not in schedule.dense_layers])

    # Tokens that a layer multiplies with, and tokens it reads from memory: fewer where a prompt is read once for its samples.
    seen = over_batch(tokens) * (len(full) - num_sparse)
    read = seen - over_batch(np.full_like(tokens, prompt_length)) * repeated * (len(full) - num_sparse)
    for window in windows:
        if window:
            in_window = over_batch(np.minimum(tokens, window))
            seen, read = seen + in_window, read + in_window

    pages = -(-tokens // size)
    budgets = schedule.budgets(tokens).astype(np.int64)
    is_sparse = pages > budgets
    # The last page, always chosen, holds what the others leave.
    chosen = over_batch(np.where(is_sparse, budgets * size - (pages * size - tokens), tokens)) * num_sparse
    scored = np.where(is_sparse, pages - schedule.first_pages - schedule.last_pages, 0)
    in_prompt = np.minimum(scored, max(prompt_length // size - schedule.first_pages, 0))
    cost = scorer or (ScorerCost(0, 0) if num_sparse == 0 else ScorerCost.named(schedule.scorer, shape, size))

    held = over_batch(tokens) * num_sparse
    batch = over_batch(np.ones_like(tokens))
    running, rows = batch > 0, 2.0 * batch
    layer_weights, head_weights = shape.num_layers * shape.layer_parameters, shape.head_parameters
    token_flops = 4.0 * shape.num_heads * shape.head_dim  # q·k and p·v of one layer
    token_bytes = 2.0 * shape.num_kv_heads * shape.head_dim * shape.dtype_bytes
    per_page = num_sparse * shape.num_kv_heads
    return StepCost(
        weights=Part(rows * layer_weights, _where(running, layer_weights * shape.dtype_bytes)),
        logits=Part(rows * head_weights, _where(running, head_weights * shape.dtype_bytes)),
        dense_attention=Part(seen * token_flops, read * token_bytes),
        sparse_attention=Part(chosen * token_flops, chosen * token_bytes),
        scoring=Part(
            over_batch(scored) * per_page * cost.flops_per_page,
            over_batch(scored - in_prompt * repeated) * per_page * cost.bytes_per_page,
        ),
        candidates=over_batch(scored) * per_page,
        chosen_share=np.divide(chosen, held, out=np.ones_like(held), where=held > 0),
        num_layers=shape.num_layers,
        batch=batch,
    )


def _where(running: NDArray[np.bool_], value: int) -> Floats:
    """`value` in steps in which something runs, 0 in others."""
    return np.where(running, float(value), 0.0)


@dataclass(frozen=True, slots=True)
class Trajectory:
    """Sampling a batch of completions, dense and under a schedule.

    dense_seconds, sparse_seconds: predicted, of all decode steps. num_tokens: drawn in them.
    kv_share: bytes of keys, values and landmarks that the schedule reads, of those that dense attention reads; over all
    layers, dense ones included. page_share: pages read of pages held on the sparse layers (the paper's mean budget share).
    """

    dense_seconds: float
    sparse_seconds: float
    num_tokens: int
    kv_share: float
    page_share: float

    @property
    def speedup(self) -> float:
        """Dense time over sparse time."""
        return self.dense_seconds / self.sparse_seconds


def trajectory(
    shape: ModelShape,
    schedule: BudgetSchedule,
    device: Device,
    *,
    prompt_length: int,
    completion_lengths: Sequence[int],
    scorer: ScorerCost | None = None,
    samples_per_prompt: int = 1,
) -> Trajectory:
    """Integrate predicted step times over sequences that start together and leave the batch as they end.

    completion_lengths: tokens of each sequence. The first token comes from prefill, so n tokens take n - 1 steps, over
    lengths prompt_length + 1 … prompt_length + n - 1. Prefill is not counted: it is dense in both cases.

    Raises:
        ConfigError: no sequence has two tokens, or as for `step_cost`.
    """
    ends = np.sort(np.asarray(completion_lengths, dtype=np.int64))
    if ends.size == 0 or ends[-1] < 2 or ends[0] < 1:
        raise ConfigError(
            f"completion_lengths is {completion_lengths!r}; expected positive lengths, at least one of 2 tokens or more."
        )
    steps = np.arange(1, ends[-1])
    lengths = prompt_length + steps
    running = ends.size - np.searchsorted(ends, steps, side="right")  # those with more than `step` tokens
    costs = [
        step_cost(
            shape,
            chosen,
            lengths[:, None],
            counts=running[:, None],
            scorer=scorer,
            prompt_length=prompt_length,
            samples_per_prompt=samples_per_prompt,
        )
        for chosen in (BudgetSchedule.dense(schedule.page_size), schedule)
    ]
    dense, sparse = costs
    pages = -(-lengths // schedule.page_size)
    chosen_pages = np.minimum(pages, schedule.budgets(lengths))
    return Trajectory(
        dense_seconds=float(dense.step_seconds(device).sum()),
        sparse_seconds=float(sparse.step_seconds(device).sum()),
        num_tokens=int(running.sum()),
        kv_share=float(sparse.kv_bytes.sum() / dense.kv_bytes.sum()),
        page_share=float((chosen_pages * running).sum() / (pages * running).sum()),
    )
