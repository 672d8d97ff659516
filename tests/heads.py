"""Heads for tests of the streamed losses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode


@dataclass(frozen=True)
class DoubleHead:
    """A head in float64, for gradcheck (`LmHead` works in float32)."""

    weight: Tensor
    bias: Tensor | None = None
    softcap: float = 0.0
    scale: float = 1.0

    def project(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self.weight)

    def logits(self, hidden: Tensor) -> Tensor:
        x = self.scale * (self.project(hidden) + (0.0 if self.bias is None else self.bias))
        return self.softcap * torch.tanh(x / self.softcap) if self.softcap else x


class LargestTensor(TorchDispatchMode):
    """numel: that of the largest tensor that an operation returned inside this context, forward and backward."""

    numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for value in out if isinstance(out, tuple | list) else (out,):
            if isinstance(value, Tensor):
                self.numel = max(self.numel, value.numel())
        return out
