"""Which tokens of a trajectory enter the distillation loss, and with which weight: the controls of early-stopped rollouts.

The loss weight of a token is `token_weights(chosen.lengths, normalizer)[sample] · factor`. A token of factor 0 has no loss and
no gradient, so it needs no scoring. `all` is the plain loss; the other kinds take a full rollout and do one thing to it.

| kind | factor | length that the normaliser counts |
|---|---|---|
| all | 1 | T |
| prefix, suffix, middle, random, top_* | 1 for min(N, T) of the tokens, else 0 | min(N, T) |
| equal_weight_full | 1 for all tokens: each weighs what a token of the prefix weighs | min(N, T) |
| increasing | 2 (t + 1) / (T + 1), mean 1 over the trajectory | T |

Legend: T tokens of a trajectory that may be chosen (masked ones are not in it), t in 0 … T - 1, N `num_tokens`, S trajectories.

Worked example: weights of two trajectories, A of T = 4 tokens and B of T = 1, N = 2. Other choices of N tokens weigh what prefix
does, elsewhere (suffix: A 0 0 ¼ ¼).

| kind | A, trajectory_mean | B | A, token_mean | B | A, sum | B |
|---|---|---|---|---|---|---|
| all | ⅛ ⅛ ⅛ ⅛ | ½ | ⅕ ⅕ ⅕ ⅕ | ⅕ | ½ ½ ½ ½ | ½ |
| prefix | ¼ ¼ 0 0 | ½ | ⅓ ⅓ 0 0 | ⅓ | ½ ½ 0 0 | ½ |
| equal_weight_full | ¼ ¼ ¼ ¼ | ½ | ⅓ ⅓ ⅓ ⅓ | ⅓ | ½ ½ ½ ½ | ½ |
| increasing | .05 .10 .15 .20 | .5 | .08 .16 .24 .32 | .2 | .2 .4 .6 .8 | .5 |

So a comparison changes, under each normaliser:
- trajectory_mean: only where a trajectory's weight 1 / S lies, except that equal_weight_full gives it T / min(N, T) times as much.
- token_mean: also the share of each trajectory, which goes with its counted length: long ones count for less once N caps them.
  The weights add up to 1, but for equal_weight_full.
- sum: also the size of the loss, since each chosen token weighs 1 / S, however many there are. equal_weight_full is then `all`.

prefix has the weights of a rollout stopped after N tokens under each of them; the two differ only once the lengths of later
rollouts do.

Source: early-stopped rollouts (arXiv 2605.27028). Its top-KL runs ranked by the forward KL, whatever the name.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from hashlib import blake2b
from typing import Literal, get_args

import numpy as np
import torch
from torch import Tensor

from leanroll.errors import ConfigError, UserError

Selection = Literal[
    "all",
    "prefix",
    "equal_weight_full",
    "increasing",
    "random",
    "suffix",
    "middle",
    "top_reverse_kl",
    "top_forward_kl",
    "top_student_entropy",
    "top_teacher_entropy",
    "top_kl_times_student_entropy",
    "top_kl_times_teacher_entropy",
]

_RANKED_BY: dict[Selection, tuple[str, ...]] = {
    "top_reverse_kl": ("reverse_kl",),
    "top_forward_kl": ("forward_kl",),
    "top_student_entropy": ("student_entropy",),
    "top_teacher_entropy": ("teacher_entropy",),
    "top_kl_times_student_entropy": ("reverse_kl", "student_entropy"),
    "top_kl_times_teacher_entropy": ("reverse_kl", "teacher_entropy"),
}
"""The statistics whose product ranks the tokens."""


@dataclass(frozen=True, slots=True)
class TokenStatistics:
    """Of one trajectory, all float [T], in nats; as in `distill.Divergence`. Positions that a mask leaves out may hold anything.

    Raises:
        UserError: not one value of each per token.
    """

    reverse_kl: np.ndarray
    forward_kl: np.ndarray
    student_entropy: np.ndarray
    teacher_entropy: np.ndarray

    def __post_init__(self) -> None:
        shapes = {field.name: np.shape(getattr(self, field.name)) for field in fields(self)}
        if len(set(shapes.values())) != 1 or len(shapes["reverse_kl"]) != 1:
            raise UserError(
                f"Token statistics of shapes {shapes}; expected [T] each. Cut all of them at the same trajectory boundaries."
            )


@dataclass(frozen=True, slots=True)
class Chosen:
    """factors: per trajectory float32 [T], what its token weights are multiplied by. lengths: int64 [S], what `token_weights` gets.

    Example: prefix of N = 2 in trajectories of 4 and 1 tokens is Chosen(([1, 1, 0, 0], [1]), [2, 1]).
    """

    factors: tuple[np.ndarray, ...]
    lengths: np.ndarray


def needs_num_tokens(kind: Selection) -> bool:
    """Whether the kind has an N; the others refuse one."""
    return kind not in ("all", "increasing")


def needs_statistics(kind: Selection) -> bool:
    """Whether the kind ranks tokens, so that a pass without gradient has to score them first."""
    return kind in _RANKED_BY


def token_factors(
    kind: Selection,
    num_tokens: int | None,
    lengths: Sequence[int],
    *,
    masks: Sequence[np.ndarray] | None = None,
    statistics: Sequence[TokenStatistics] | None = None,
    keys: Sequence[tuple[int, int, int]] | None = None,
    seed: int = 0,
) -> Chosen:
    """The tokens that enter the loss. The choice in a trajectory depends on nothing but that trajectory.

    Args:
        num_tokens: N, at least 1; None for the kinds without one (`needs_num_tokens`). Trajectories of N tokens or fewer have
            all of them chosen.
        lengths: [S] tokens per trajectory; one with 0 is allowed and still counts as a trajectory.
        masks: per trajectory bool [T], False for tokens that no kind may choose (a stop token that is not trained, for one):
            neither N nor the length counts them, and positions are those among the others. None allows all tokens.
        statistics: per trajectory, read by the kinds `top_*` alone (`needs_statistics`). Among equal values the earlier token is
            taken.
        keys: per trajectory (step, prompt index, sample index), read by `random` alone. It takes the same positions for the same
            seed and key, more of them for a larger N, and is independent of the numbers that drew the tokens.

    Raises:
        ConfigError: unknown kind; N missing, not positive, or given to a kind that has none.
        UserError: inputs missing or of other lengths; a statistic that is NaN where a token may be chosen.
    """
    _check_options(kind, num_tokens)
    _check_inputs(kind, lengths, masks, statistics, keys)
    factors, counted = [], []
    for index, length in enumerate(lengths):
        allowed = np.arange(length) if masks is None else np.flatnonzero(masks[index])
        size = len(allowed) if num_tokens is None else min(num_tokens, len(allowed))
        factor = np.zeros(length, dtype=np.float32)
        if kind == "increasing":
            factor[allowed] = 2.0 * np.arange(1, size + 1) / (size + 1)
        elif kind in ("all", "equal_weight_full"):
            factor[allowed] = 1.0
        elif kind in ("prefix", "middle", "suffix"):
            spare = len(allowed) - size
            start = {"prefix": 0, "middle": spare // 2, "suffix": spare}[kind]
            factor[allowed[start : start + size]] = 1.0
        else:
            if kind == "random":
                assert keys is not None
                values = _uniforms(seed, keys[index], length)
            else:
                assert statistics is not None
                values = _ranked_values(kind, statistics[index], allowed, index)
            descending = np.argsort(-values[allowed], kind="stable")
            factor[allowed[descending[:size]]] = 1.0
        factors.append(factor)
        counted.append(size)
    return Chosen(tuple(factors), np.array(counted, dtype=np.int64))


def no_teacher_loss(logprobs: Tensor, weights: Tensor, *, threshold: float, advantage: float) -> Tensor:
    """Policy-gradient loss per token [R] that needs no teacher: -advantage · logprob · weight below a probability, else 0.

    The control for what a teacher adds to pushing unlikely tokens down. The loss has no lower bound (a token's probability may
    go to 0), but the gradient in a logit is at most |advantage · weight|.

    Args:
        logprobs: [R], nats, of the sampled tokens under the student; differentiable.
        weights: [R], as for `divergence`; without gradient.
        threshold: probability in (0, 1]; only tokens strictly below it have a loss.
        advantage: of those tokens; finite and negative.

    Raises:
        ConfigError: threshold or advantage out of range. UserError: shapes differ.
    """
    if not 0.0 < threshold <= 1.0:
        raise ConfigError(
            f"The no-teacher threshold is {threshold}; expected a probability in (0, 1], 1 to push every token down."
        )
    if not -math.inf < advantage < 0.0:
        raise ConfigError(
            f"The no-teacher advantage is {advantage}; expected a finite negative number, -1.0 for one: it pushes tokens down."
        )
    if logprobs.ndim != 1 or weights.shape != logprobs.shape:
        raise UserError(
            f"logprobs of shape {tuple(logprobs.shape)} with weights of {tuple(weights.shape)}; expected [R] twice. "
            "Look the weights of trajectories up with the tokens' sample ids."
        )
    scale = torch.where(logprobs.detach() < math.log(threshold), -advantage * weights.detach().to(logprobs), 0.0)
    return logprobs * scale


def _uniforms(seed: int, key: tuple[int, int, int], count: int) -> np.ndarray:
    """[count] in [0, 1), fp64: entry t depends on seed, key and t alone.

    The text is none of `rollout.sampling.sequence_uniforms`: its numbers drew the tokens, and a choice by them would be one of
    tokens at one end of the vocabulary.
    """
    step, prompt_index, sample_index = key
    text = f"selection:{seed}:{step}:{prompt_index}:{sample_index}".encode()
    philox = np.random.Philox(key=int.from_bytes(blake2b(text, digest_size=16).digest(), "little"))
    return (philox.random_raw(count) >> np.uint64(11)) * 2.0**-53


def _ranked_values(kind: Selection, statistics: TokenStatistics, allowed: np.ndarray, index: int) -> np.ndarray:
    """[T] fp64; the tokens with the largest enter the loss."""
    names = _RANKED_BY[kind]
    values = np.prod([np.asarray(getattr(statistics, name), dtype=np.float64) for name in names], axis=0)
    num_nan = int(np.isnan(values[allowed]).sum())
    if num_nan:
        raise UserError(
            f"{kind} ranks by {' · '.join(names)}, which is NaN for {num_nan} of {len(allowed)} tokens of trajectory {index}; "
            "expected numbers. Mask tokens that were not scored, or look for a model whose logits are not finite."
        )
    return values


def _check_options(kind: str, num_tokens: int | None) -> None:
    if kind not in get_args(Selection):
        raise ConfigError(f"The token selection is {kind!r}; expected one of {', '.join(get_args(Selection))}.")
    if kind in ("all", "increasing"):
        if num_tokens is not None:
            raise ConfigError(
                f"num_tokens is {num_tokens} with the token selection {kind!r}, which takes every token; leave it out, or "
                "select 'prefix' for the first tokens."
            )
    elif num_tokens is None or num_tokens < 1:
        raise ConfigError(
            f"num_tokens is {num_tokens} with the token selection {kind!r}; expected at least 1 token per trajectory. Set it, "
            "or select 'all'."
        )


def _check_inputs(
    kind: Selection,
    lengths: Sequence[int],
    masks: Sequence[np.ndarray] | None,
    statistics: Sequence[TokenStatistics] | None,
    keys: Sequence[tuple[int, int, int]] | None,
) -> None:
    if any(length < 0 for length in lengths):
        raise UserError(f"lengths are {list(lengths)}; expected numbers of tokens. Pass 0 for an empty trajectory.")
    if needs_statistics(kind) and statistics is None:
        raise UserError(
            f"{kind} ranks tokens by statistics, but got none; expected one TokenStatistics per trajectory."
        )
    if kind == "random" and keys is None:
        raise UserError("random got no keys; expected (step, prompt index, sample index) per trajectory.")
    for name, given in (("masks", masks), ("statistics", statistics), ("keys", keys)):
        if given is not None and len(given) != len(lengths):
            raise UserError(
                f"{len(given)} {name} for {len(lengths)} trajectories; expected one each. Pass them in one order."
            )
    for index, length in enumerate(lengths):
        if masks is not None and (masks[index].shape != (length,) or masks[index].dtype != np.bool_):
            raise UserError(
                f"The mask of trajectory {index} is {masks[index].dtype} of shape {masks[index].shape}; expected bool "
                f"[{length}]. Pass True for each token that may be chosen, no positions."
            )
        if needs_statistics(kind) and statistics is not None and len(statistics[index].reverse_kl) != length:
            raise UserError(
                f"Statistics of {len(statistics[index].reverse_kl)} tokens for trajectory {index} of {length}; expected one "
                "per token. Score the completion tokens, all of them."
            )
