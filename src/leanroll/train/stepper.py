"""One optimizer update, gathered from the backward passes of its micro-batches."""

from __future__ import annotations

import math

from accelerate import Accelerator
from torch import Tensor

from leanroll.models import Policy
from leanroll.train.optim import MasterAdamW


class Stepper:
    """Backward, accumulate, clip, step. `num_updates` counts the updates of the run; the policy's version grows with each."""

    def __init__(
        self, policy: Policy, optimizer: MasterAdamW, accelerator: Accelerator, *, max_grad_norm: float
    ) -> None:
        """max_grad_norm: gradients are scaled down to this global norm; 0 never."""
        self._policy, self._accelerator, self._max_grad_norm = policy, accelerator, max_grad_norm
        self.optimizer = optimizer
        self.num_updates = 0

    def backward(self, loss: Tensor) -> tuple[float, float]:
        """Add a micro-batch's gradient; returns its loss and the norm of what is accumulated so far.

        A loss that is not finite is not propagated: its norm is nan, and the gradients are those before it.
        """
        value = float(loss.detach())
        if not math.isfinite(value):
            return value, math.nan
        self._accelerator.backward(loss)
        self.optimizer.accumulate()
        return value, self.optimizer.grad_norm()

    def apply(self, lr_factor: float, grad_norm: float) -> None:
        """Update the weights with what is accumulated, whose norm is `grad_norm`."""
        self.optimizer.step(lr_factor=lr_factor, max_grad_norm=self._max_grad_norm, grad_norm=grad_norm)
        self._policy.bump_version()
        self.num_updates += 1

    def abandon(self) -> None:
        """Forget the gradients of an update that will not be applied."""
        self.optimizer.zero_grad()

    def bad_gradients(self) -> list[str]:
        """Names of the parameters whose accumulated gradient is not finite."""
        return [
            name
            for name, master in self.optimizer.masters.items()
            if master.grad is not None and not bool(master.grad.isfinite().all())
        ]
