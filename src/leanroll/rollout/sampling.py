"""A token and its log-probability, from a distribution and one uniform number.

Draws invert the cumulative distribution in vocabulary order with uniforms from a counter-based generator, so that a
sequence's tokens depend on (seed, step, prompt, sample, position) and on nothing else: not on the batch, its order, or
a resume.
"""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b

import numpy as np
import torch
from torch import Tensor

from leanroll.errors import ConfigError, RolloutError
from leanroll.kernels.dispatch import KernelBackend
from leanroll.types import SamplingParams

MIN_TEMPERATURE = 1e-6
"""Divided by less, logits may overflow float32."""


def sequence_uniforms(seed: int, step: int, prompt_index: int, sample_index: int, count: int) -> np.ndarray:
    """`count` numbers in [0, 1), fp64: entry t belongs to completion position t and does not depend on `count`."""
    text = f"{seed}:{step}:{prompt_index}:{sample_index}".encode()
    key = int.from_bytes(blake2b(text, digest_size=16).digest(), "little")
    raw = np.random.Philox(key=key).random_raw(count)
    return (raw >> np.uint64(11)) * 2.0**-53


@dataclass(frozen=True, slots=True)
class Draw:
    """One token per row.

    token_ids: int64 [B]. logprobs: fp32 [B], under the drawn distribution.
    support: bool [B, V], the tokens that could have been drawn; None where nothing was truncated.
    """

    token_ids: Tensor
    logprobs: Tensor
    support: Tensor | None = None


def draw(logits: Tensor, uniforms: Tensor, params: SamplingParams, backend: KernelBackend) -> Draw:
    """Draw one token per row.

    Args:
        logits: fp32 [B, V]. uniforms: fp64 [B] in [0, 1).
        params: temperature, then top-k, top-p and min-p; see `SamplingParams`.
        backend: inverts the cumulative distribution.

    Raises:
        RolloutError: logits that no distribution fits (NaN, +inf, or only -inf).
    """
    bad = ~logits.amax(dim=-1).isfinite()  # a NaN is its row's maximum
    if bad.any():
        raise RolloutError(
            f"The logits of {int(bad.sum())} of {len(logits)} sequences hold NaN or +inf, or nothing but -inf; the weights "
            "are broken (a diverged update, a damaged file, or a model that overflows in this dtype)."
        )
    if params.forbidden_token_ids:
        logits = logits.clone()
        logits[:, list(params.forbidden_token_ids)] = -torch.inf
    if params.temperature == 0.0:
        token_ids = logits.argmax(dim=-1)
        return Draw(token_ids, torch.zeros_like(logits[:, 0]), _one_hot(token_ids, logits.shape[-1]))
    if not params.truncates:
        return Draw(*backend.sample_rows(logits, uniforms, params.temperature))
    scaled = logits / params.temperature
    support = truncation_support(scaled, params)
    return Draw(*backend.sample_rows(scaled.masked_fill(~support, float("-inf")), uniforms, 1.0), support)


def truncation_support(logits: Tensor, params: SamplingParams) -> Tensor:
    """The tokens that top-k, top-p and min-p leave: bool [B, V], never an empty row.

    logits are already divided by the temperature. Each filter works on what the one before left, renormalised. Ties
    are broken towards the smaller id, so that exactly k tokens pass top-k.
    """
    ordered, order = torch.sort(logits, dim=-1, descending=True, stable=True)
    probs = ordered.softmax(dim=-1)
    keep = torch.ones_like(probs, dtype=torch.bool)
    if params.top_k > 0:
        keep[:, params.top_k :] = False
    if params.top_p < 1.0:
        kept = probs * keep
        kept = kept / kept.sum(dim=-1, keepdim=True)
        # A token stays while the mass before it is short of top_p: the smallest set that reaches it.
        keep &= kept.cumsum(dim=-1) - kept < params.top_p
    if params.min_p > 0.0:
        keep &= probs >= params.min_p * probs[:, :1]
    return torch.zeros_like(keep).scatter_(-1, order, keep)


def top_logprobs(logits: Tensor, temperature: float, count: int) -> tuple[Tensor, Tensor]:
    """Ids int64 [B, k] and fp32 log-probs [B, k] of the likeliest tokens at `temperature`, before truncation."""
    scaled = logits / (temperature if temperature > 0 else 1.0)
    values, ids = scaled.topk(count, dim=-1)
    return ids, values - scaled.logsumexp(dim=-1, keepdim=True)


def check_sampling(params: SamplingParams, vocab_size: int) -> None:
    """Raise ConfigError for parameters that no distribution fits."""
    checks = [
        (
            params.temperature == 0.0 or params.temperature >= MIN_TEMPERATURE,
            f"temperature is {params.temperature}; expected 0 (greedy) or at least {MIN_TEMPERATURE}",
        ),
        (0.0 < params.top_p <= 1.0, f"top_p is {params.top_p}; expected a number in (0, 1], 1 for off"),
        (0 <= params.top_k <= vocab_size, f"top_k is {params.top_k}; expected 0 (off) to {vocab_size}"),
        (0.0 <= params.min_p < 1.0, f"min_p is {params.min_p}; expected a number in [0, 1), 0 for off"),
        (
            params.max_completion_length >= 1,
            f"max_completion_length is {params.max_completion_length}; expected at least 1",
        ),
        (
            0 <= params.num_top_logprobs <= vocab_size,
            f"num_top_logprobs is {params.num_top_logprobs}; expected 0 to {vocab_size}",
        ),
        (
            all(0 <= token < vocab_size for token in params.forbidden_token_ids)
            and len(set(params.forbidden_token_ids)) < vocab_size,
            f"forbidden_token_ids must be ids from 0 to {vocab_size - 1} and leave one to draw",
        ),
        ("" not in params.stop_strings, "stop_strings holds an empty string; remove it"),
    ]
    for holds, message in checks:
        if not holds:
            raise ConfigError(message + ".")


def _one_hot(ids: Tensor, size: int) -> Tensor:
    return torch.zeros(ids.shape[0], size, dtype=torch.bool, device=ids.device).scatter_(1, ids[:, None], True)
