"""Rollouts laid out for teacher-forced scoring: one row, every prompt once, its completions behind it.

Worked example: a prompt of 3 tokens (a b c) with the completions (x y) and (u v w):

    input_ids     a b c | x | u v        the last token of a completion predicts nothing, so it is no input
    position_ids  0 1 2 | 3 | 3 4        every completion continues after the prompt
    rows          2 3 2 4 5              hidden state that predicts each completion token (2: shared by both)
    targets       x y u v w
    sample_ids    0 0 1 1 1
    positions     0 1 0 1 2

A group that is longer than the row is split over several rows, each of which repeats the prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from leanroll.errors import ConfigError
from leanroll.types import Rollout, RolloutGroup


@dataclass(frozen=True, slots=True)
class Segment:
    """Input tokens [start, stop) of one completion in the row; empty for a completion of one token."""

    sample: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class PackedGroup:
    """A prompt at [start, stop) of the row, and the completions that attend to it, in row order."""

    start: int
    stop: int
    completions: tuple[Segment, ...]

    @property
    def prompt_length(self) -> int:
        """Tokens of the prompt."""
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """One row of T input tokens that predicts R completion tokens.

    input_ids, position_ids: int64 [1, T].
    groups: where prompts and completions lie, contiguous and in row order.
    rows: int64 [R], index in the row of the hidden state that predicts the token.
    targets: int64 [R], the token. sample_ids: int64 [R], index of its completion in the flattened list of rollouts.
    positions: int64 [R], its index in the completion.
    samples: the sample ids of this batch, ascending; the R axis runs through them in this order.
    rollouts: where `pack` got them from, sample id → Rollout (for recorded pages and supports).
    """

    input_ids: Tensor
    position_ids: Tensor
    groups: tuple[PackedGroup, ...]
    rows: Tensor
    targets: Tensor
    sample_ids: Tensor
    positions: Tensor
    samples: tuple[int, ...]
    rollouts: dict[int, Rollout] = field(default_factory=dict)

    @property
    def num_inputs(self) -> int:
        """T, tokens fed to the model."""
        return int(self.input_ids.shape[1])

    @property
    def num_targets(self) -> int:
        """R, tokens that get a log-probability."""
        return int(self.targets.shape[0])

    def to(self, device: torch.device | str) -> PackedBatch:
        """The same batch with its tensors on `device`."""
        tensors = {name: getattr(self, name).to(device) for name in _TENSORS}
        return PackedBatch(groups=self.groups, samples=self.samples, rollouts=self.rollouts, **tensors)


_TENSORS = ("input_ids", "position_ids", "rows", "targets", "sample_ids", "positions")


@dataclass(frozen=True, slots=True)
class _Piece:
    """A prompt and those of its completions that share a row."""

    prompt: Sequence[int]
    samples: tuple[int, ...]
    length: int


def pack(groups: Sequence[RolloutGroup], max_tokens: int) -> list[PackedBatch]:
    """Lay out rollout groups in rows of at most `max_tokens` input tokens.

    Sample ids count through `[r for g in groups for r in g.rollouts]`. Rows are filled first-fit, largest group first, so that
    few rows are left half empty.

    Raises:
        ConfigError: one completion with its prompt is longer than `max_tokens`, or a prompt or completion is empty.
    """
    rollouts = [r for g in groups for r in g.rollouts]
    batches = pack_tokens(
        [g.prompt.token_ids for g in groups],
        [[r.token_ids for r in g.rollouts] for g in groups],
        max_tokens,
    )
    for batch in batches:
        batch.rollouts.update({s: rollouts[s] for s in batch.samples})
    return batches


def pack_tokens(
    prompts: Sequence[Sequence[int]], completions: Sequence[Sequence[Sequence[int]]], max_tokens: int
) -> list[PackedBatch]:
    """`pack` for bare token ids: `completions[g]` are the completions of `prompts[g]`."""
    flat = [c for group in completions for c in group]
    pieces: list[_Piece] = []
    first = 0
    for index, (prompt, group) in enumerate(zip(prompts, completions, strict=True)):
        pieces += _split(prompt, {first + i: c for i, c in enumerate(group)}, max_tokens, index)
        first += len(group)
    bins: list[list[_Piece]] = []
    free: list[int] = []
    for piece in sorted(pieces, key=lambda p: (-p.length, p.samples)):
        slot = next((i for i, room in enumerate(free) if piece.length <= room), len(bins))
        if slot == len(bins):
            bins.append([])
            free.append(max_tokens)
        bins[slot].append(piece)
        free[slot] -= piece.length
    return [_lay_out(sorted(row, key=lambda p: p.samples), flat) for row in bins]


def _split(prompt: Sequence[int], completions: dict[int, Sequence[int]], max_tokens: int, index: int) -> list[_Piece]:
    """Cut one group into pieces that fit a row, completions in order."""
    if not completions:
        return []
    if not prompt:
        raise ConfigError(
            f"Group {index} has an empty prompt; a completion needs at least one prompt token (a BOS, say)."
        )
    pieces: list[_Piece] = []
    samples: list[int] = []
    length = len(prompt)
    for sample, tokens in completions.items():
        if not tokens:
            raise ConfigError(f"Sample {sample} (group {index}) has no tokens; drop empty completions before scoring.")
        need = len(tokens) - 1
        if len(prompt) + need > max_tokens:
            raise ConfigError(
                f"Sample {sample} (group {index}) needs {len(prompt) + need} tokens ({len(prompt)} of prompt, {need} of "
                f"completion), but a micro-batch holds {max_tokens}; raise the token budget of a micro-batch."
            )
        if length + need > max_tokens:
            pieces.append(_Piece(prompt, tuple(samples), length))
            samples, length = [], len(prompt)
        samples.append(sample)
        length += need
    pieces.append(_Piece(prompt, tuple(samples), length))
    return pieces


def _lay_out(pieces: Sequence[_Piece], flat: Sequence[Sequence[int]]) -> PackedBatch:
    ids: list[np.ndarray] = []
    position_ids: list[np.ndarray] = []
    rows: list[np.ndarray] = []
    groups: list[PackedGroup] = []
    cursor = 0
    for piece in pieces:
        start, cursor = cursor, cursor + len(piece.prompt)
        stop = cursor
        ids.append(np.asarray(piece.prompt, dtype=np.int64))
        position_ids.append(np.arange(stop - start))
        segments: list[Segment] = []
        for sample in piece.samples:
            num_inputs = len(flat[sample]) - 1
            ids.append(np.asarray(flat[sample][:-1], dtype=np.int64))
            position_ids.append(np.arange(num_inputs) + (stop - start))
            rows += [np.array([stop - 1]), np.arange(cursor, cursor + num_inputs)]
            segments.append(Segment(sample, cursor, cursor + num_inputs))
            cursor += num_inputs
        groups.append(PackedGroup(start, stop, tuple(segments)))
    samples = [s for piece in pieces for s in piece.samples]
    lengths = [len(flat[s]) for s in samples]
    return PackedBatch(
        input_ids=torch.from_numpy(np.concatenate(ids))[None],
        position_ids=torch.from_numpy(np.concatenate(position_ids))[None],
        groups=tuple(groups),
        rows=torch.from_numpy(np.concatenate(rows)),
        targets=torch.from_numpy(np.concatenate([np.asarray(flat[s], dtype=np.int64) for s in samples])),
        sample_ids=torch.from_numpy(np.repeat(np.asarray(samples, dtype=np.int64), lengths)),
        positions=torch.from_numpy(np.concatenate([np.arange(n) for n in lengths])),
        samples=tuple(samples),
    )
