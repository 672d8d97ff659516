"""Which outcomes a student and a teacher can be compared on, when their vocabularies are not quite the same.

An outcome is a token that both have, or the stop class: all ids that end a completion, taken together. Both distributions are
renormalised on the outcomes; what that drops is reported.

Worked example: student ids 0…4, teacher ids 0…6 of which 5 and 6 are padding; the student stops with 3, the teacher with 4.

    SharedVocabulary.of(5, 7, shared=5, eos_class=([3], [4]))
    student outcomes   0 1 2 {3, 4}
    teacher outcomes   0 1 2 {3, 4}      dropped: 5 6
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from leanroll.errors import ConfigError
from leanroll.measure.streaming import Scratch

_SIDES = ("student", "teacher")
_NEVER = -1e30
"""Logit of an outcome that cannot happen. Finite: differences and products with probability 0 are 0, where -inf gives NaN."""


@dataclass(frozen=True, slots=True)
class Side:
    """One side's view of the outcomes.

    size: V, rows of its head. columns: the id that stands for each outcome, in the same order on both sides; a slice where these
    are the first ids. stops: ids of the stop class, which the first one stands for; empty without a class. The other ones keep a
    column if they have one, with probability 0. dropped: ids that are no outcome.
    """

    size: int
    columns: slice | Tensor
    stops: Tensor
    dropped: Tensor

    @classmethod
    def whole(cls, size: int, device: torch.device | str = "cpu") -> Side:
        """Every id is an outcome of its own."""
        none = torch.zeros(0, dtype=torch.int64, device=device)
        return cls(size, slice(0, size), none, none)

    @property
    def num_outcomes(self) -> int:
        """C."""
        return self.columns.stop if isinstance(self.columns, slice) else self.columns.numel()

    def outcomes(self, ids: Tensor) -> Tensor:
        """The outcome of each id: int64 of any shape → the same shape, 0 … C - 1, and -1 for an id that is dropped."""
        index = torch.full((self.size,), -1, dtype=torch.int64, device=ids.device)
        index[self.columns] = torch.arange(self.num_outcomes, device=ids.device)
        if self.stops.numel():
            index[self.stops] = index[self.stops[:1]]
        return index[ids]

    def log_probs(self, x: Tensor, scratch: Scratch, name: str) -> tuple[Tensor, Tensor]:
        """Log-probabilities [n, C] of the outcomes under logits x [n, V] (left as they are), and the probability [n] dropped."""
        members = x[:, self.stops]
        if self.stops.numel():
            x[:, self.stops] = _NEVER
            x[:, self.stops[0]] = members.logsumexp(dim=-1)
        outcomes = x[:, self.columns]
        log_probs = torch.log_softmax(outcomes, dim=-1, out=scratch.like(name, outcomes))
        dropped = torch.zeros_like(x[:, 0])
        if self.dropped.numel():
            total = outcomes.amax(dim=-1) - log_probs.amax(dim=-1)
            dropped = torch.sigmoid(x[:, self.dropped].logsumexp(dim=-1) - total)
        if self.stops.numel():
            x[:, self.stops] = members
        return log_probs, dropped

    def logits_grad(self, grad: Tensor, x: Tensor) -> Tensor:
        """The gradient of the logits x [n, V] from that of the outcomes' logits [n, C], which it may overwrite."""
        if grad.shape[1] != self.size or isinstance(self.columns, Tensor):
            outcomes, grad = grad, torch.zeros_like(x)
            grad[:, self.columns] = outcomes
        if self.stops.numel():
            grad[:, self.stops] = grad[:, self.stops[0], None] * x[:, self.stops].softmax(dim=-1)
        return grad


@dataclass(frozen=True, slots=True)
class SharedVocabulary:
    """What both sides share; made once per pair of models."""

    student: Side
    teacher: Side

    @classmethod
    def of(
        cls,
        student_size: int,
        teacher_size: int,
        *,
        shared: int | tuple[Tensor, Tensor] | None = None,
        eos_class: tuple[Sequence[int], Sequence[int]] | None = None,
        device: torch.device | str = "cpu",
    ) -> SharedVocabulary:
        """From the numbers of rows of both heads.

        Args:
            shared: the number of leading ids that mean the same token on both sides; or the ids of the same tokens, int64 [K] in
                the student's and [K] in the teacher's vocabulary. None: all, of two vocabularies of one size.
            eos_class: the ids that end a completion, the student's own and the teacher's own. All of them form one outcome:
                each side also counts the other's stop ids that it shares. None: every id is an outcome of its own.

        Raises:
            ConfigError: nothing is shared, ids are out of range or appear twice, a side has no stop id.
        """
        sizes = (student_size, teacher_size)
        ids = _shared_ids(sizes, shared)
        stops = [torch.zeros(0, dtype=torch.int64)] * 2
        if eos_class is not None:
            own = [
                _stop_ids(side, stop_ids, size) for side, stop_ids, size in zip(_SIDES, eos_class, sizes, strict=True)
            ]
            common = torch.isin(ids[0], own[0]) | torch.isin(ids[1], own[1])
            # A shared stop comes first, so that the class stands in a column that is there already.
            stops = [_unique(torch.cat([ids[i][common], own[i]])) for i in (0, 1)]
            if not bool(common.any()):
                ids = [torch.cat([ids[i], stops[i][:1]]) for i in (0, 1)]
        return cls(*(_side(*parts, device) for parts in zip(sizes, ids, stops, strict=True)))


def _side(size: int, ids: Tensor, stops: Tensor, device: torch.device | str) -> Side:
    outside = torch.ones(size, dtype=torch.bool)
    outside[ids] = False
    outside[stops] = False
    leading = torch.equal(ids, torch.arange(ids.numel()))
    columns = slice(0, ids.numel()) if leading else ids.to(device)
    return Side(size, columns, stops.to(device), outside.nonzero()[:, 0].to(device))


def _shared_ids(sizes: tuple[int, int], shared: int | tuple[Tensor, Tensor] | None) -> list[Tensor]:
    given = f"The student has {sizes[0]} ids and the teacher {sizes[1]}"
    if shared is None:
        if sizes[0] != sizes[1]:
            raise ConfigError(
                f"{given}; expected equally many, or to be told which ones mean the same: pass shared = the number of leading ids "
                "that both tokenizers give to the same tokens."
            )
        shared = sizes[0]
    if isinstance(shared, int):
        if not 1 <= shared <= min(sizes):
            raise ConfigError(
                f"{shared} shared ids. {given}; expected 1 to {min(sizes)}: count the leading ids that both "
                "tokenizers give to the same tokens."
            )
        return [torch.arange(shared)] * 2
    both = [ids.detach().to("cpu", torch.int64) for ids in shared]
    if both[0].ndim != 1 or both[0].shape != both[1].shape or both[0].numel() == 0:
        raise ConfigError(
            f"shared ids of shapes {tuple(both[0].shape)} and {tuple(both[1].shape)}; expected [K] twice with K ≥ 1, the student's "
            "and the teacher's id of each shared token."
        )
    for side, ids, size in zip(_SIDES, both, sizes, strict=True):
        low, high, different = int(ids.min()), int(ids.max()), ids.unique().numel()
        if low < 0 or high >= size or different != ids.numel():
            raise ConfigError(
                f"The {side}'s shared ids run from {low} to {high}, {different} different ones of {ids.numel()}; expected "
                f"different ids from 0 to {size - 1}. Give every shared token once."
            )
    return both


def _stop_ids(side: str, ids: Sequence[int], size: int) -> Tensor:
    if not ids or min(ids) < 0 or max(ids) >= size:
        raise ConfigError(
            f"The {side}'s stop ids are {list(ids)}; expected one or more ids from 0 to {size - 1}. Give the ids that end its "
            "completions, or leave eos_class out."
        )
    return torch.tensor(list(ids), dtype=torch.int64)


def _unique(ids: Tensor) -> Tensor:
    """Without repetitions, first occurrences in order."""
    return torch.tensor(list(dict.fromkeys(ids.tolist())), dtype=torch.int64)
