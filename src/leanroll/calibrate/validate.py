"""Whether a fitted schedule keeps its promise on what it was not fitted on.

Two ways: held-out trajectories scored in place, as in the fit; and completions that the engine samples under the schedule, from
held-out beginnings of many lengths. The second has the sampler's own tokens, and a prompt that was prefilled densely.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from leanroll.calibrate.passes import bin_edges, stats_by_bin
from leanroll.calibrate.trajectories import Trajectory
from leanroll.errors import ConfigError
from leanroll.kernels.dispatch import KernelBackend
from leanroll.measure.acceptance import AcceptanceStats, TailSettings
from leanroll.measure.document import Prefix, continuation_acceptance, document_hidden
from leanroll.measure.selection import SparsePlan
from leanroll.models import Policy
from leanroll.rollout.engine import RolloutEngine
from leanroll.types import Prompt, RolloutGroup, SamplingParams


@dataclass(frozen=True, slots=True)
class Continuations:
    """bins: per length bin of the schedule, None without tokens. kv_share_read: pages read of pages held while sampling."""

    bins: tuple[AcceptanceStats | None, ...]
    num_tokens: int
    kv_share_read: float


def continue_sparsely(
    engine: RolloutEngine,
    policy: Policy,
    backend: KernelBackend,
    trajectories: Sequence[Trajectory],
    *,
    num_tokens: int,
    num_bins: int,
    temperature: float,
    seed: int,
    tail: TailSettings,
) -> Continuations:
    """Sample num_tokens tokens from the middle of every length bin of every trajectory, and measure their acceptance.

    Stop tokens do not end a continuation: it is cut after num_tokens, which is too short to degenerate.

    Raises:
        ConfigError: no trajectory is long enough for any bin.
    """
    schedule = engine.schedule
    plan = SparsePlan.of(policy.spec, schedule, kv_dtype=engine.kv_dtype)
    sampling = SamplingParams(temperature=temperature, max_completion_length=num_tokens, seed=seed, ignore_stop=True)
    edges = bin_edges(schedule)
    values: list[np.ndarray] = []
    lengths: list[np.ndarray] = []
    owners: list[np.ndarray] = []
    read = held = 0
    for owner, trajectory in enumerate(trajectories):
        starts = [s for s in _starts(edges[: num_bins + 1], num_tokens) if s <= len(trajectory.token_ids)]
        if not starts:
            continue
        prompts = [Prompt(index=i, token_ids=trajectory.token_ids[:s]) for i, s in enumerate(starts)]
        groups = engine.generate(prompts, sampling, 1, step=owner)
        prefix = Prefix()
        document_hidden(policy, trajectory.token_ids[: max(starts)], backend, keep=prefix)
        for group in groups:
            alpha = _alpha(group, prefix, policy, backend, plan, temperature)
            values.append(alpha)
            lengths.append(len(group.prompt.token_ids) + 1 + np.arange(len(alpha)))
            owners.append(np.full(len(alpha), owner))
            read += sum(r.pages_read for r in group.rollouts)
            held += sum(r.pages_total for r in group.rollouts)
    if not values:
        raise ConfigError("No held-out trajectory reaches the middle of a length bin; give longer ones.")
    bins = stats_by_bin(schedule, values, lengths, owners, tail)
    return Continuations(bins, sum(len(v) for v in values), read / held if held else 1.0)


def _starts(edges: Sequence[int], num_tokens: int) -> list[int]:
    """Prompt lengths whose continuations lie around the middle of each bin."""
    return [max((low + high - num_tokens) // 2, 1) for low, high in itertools.pairwise(edges)]


def _alpha(
    group: RolloutGroup,
    prefix: Prefix,
    policy: Policy,
    backend: KernelBackend,
    plan: SparsePlan,
    temperature: float,
) -> np.ndarray:
    if group.failures:
        raise ConfigError(f"A continuation cannot be sampled: {group.failures[0].reason}")
    (rollout,) = group.rollouts
    return continuation_acceptance(
        policy, group.prompt.token_ids, prefix, rollout.token_ids, backend, plan, temperature=temperature
    )
