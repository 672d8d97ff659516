"""Reward functions for tests of the trainer, in TRL's signature."""

from __future__ import annotations

import os
import random
import signal
from typing import Any

import numpy as np
import torch


def share_of_liked_ids(completion_ids: list[list[int]], **columns: Any) -> list[float]:
    """Share of tokens with an id 3 modulo 8: about 1/8 for a random policy, learnable in a few steps."""
    return [sum(token % 8 == 3 for token in ids) / len(ids) for ids in completion_ids]


def constant(completion_ids: list[list[int]], **columns: Any) -> list[float]:
    """Every group has zero variance."""
    return [1.0] * len(completion_ids)


def any_liked_id(completion_ids: list[list[int]], **columns: Any) -> list[float]:
    """0 or 1, so that some groups have no variance."""
    return [float(any(token % 8 == 3 for token in ids)) for ids in completion_ids]


def fails_on_short(completion_ids: list[list[int]], **columns: Any) -> list[float]:
    """Raises for a completion that stopped early."""
    if min(map(len, completion_ids)) < max(map(len, completion_ids)) or len(completion_ids[0]) < 24:
        raise RuntimeError("too short")
    return [1.0] * len(completion_ids)


def noisy(completion_ids: list[list[int]], **columns: Any) -> list[float]:
    """Draws from the global generators, all three."""
    return [random.random() + float(np.random.rand()) + float(torch.rand(())) for _ in completion_ids]


class FailAt:
    """`noisy` that raises once at the n-th call, after it has drawn."""

    calls = 0
    at = 0


def noisy_and_failing(completion_ids: list[list[int]], **columns: Any) -> list[float]:
    """See `FailAt`."""
    values = noisy(completion_ids)
    FailAt.calls += 1
    if FailAt.calls == FailAt.at:
        raise RuntimeError("out of order")
    return values


class InterruptOnce:
    """Sends SIGINT to its own process at the n-th call; for runs with rewards in the main process."""

    calls = 0
    at = 0


def interrupting(completion_ids: list[list[int]], **columns: Any) -> list[float]:
    """`share_of_liked_ids` that presses Ctrl-C once."""
    InterruptOnce.calls += 1
    if InterruptOnce.calls == InterruptOnce.at:
        os.kill(os.getpid(), signal.SIGINT)
    return share_of_liked_ids(completion_ids)


_calls: dict[str, int] = {}


def disturbed(completion_ids: list[list[int]], **columns: Any) -> list[float]:
    """`share_of_liked_ids` that does something at one call on one rank, as DISTURB="job:rank:call:action" says; the action is
    `fail` or `interrupt`."""
    order = os.environ.get("DISTURB", "")
    if order:
        _, rank, call, action = order.split(":")
        _calls[order] = _calls.get(order, 0) + 1
        if os.environ["RANK"] == rank and _calls[order] == int(call):
            if action == "fail":
                raise RuntimeError("disturbed")
            os.kill(os.getpid(), signal.SIGINT)
    return share_of_liked_ids(completion_ids)
