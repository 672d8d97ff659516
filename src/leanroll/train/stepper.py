"""One optimizer update, gathered from the backward passes of its micro-batches."""

from __future__ import annotations

import math

from accelerate import Accelerator
from torch import Tensor

from leanroll.errors import TrainingDiverged
from leanroll.models import Policy
from leanroll.train.optim import MasterAdamW
from leanroll.train.ranks import ALONE, Ranks


class Stepper:
    """Backward, accumulate, clip, step. `num_updates` counts the updates of the run; the policy's version grows with each."""

    def __init__(
        self,
        policy: Policy,
        optimizer: MasterAdamW,
        accelerator: Accelerator,
        *,
        max_grad_norm: float,
        ranks: Ranks = ALONE,
    ) -> None:
        """max_grad_norm: gradients are scaled down to this global norm; 0 never. ranks: the processes whose micro-batches make up
        an update."""
        self._policy, self._accelerator, self._max_grad_norm = policy, accelerator, max_grad_norm
        self.optimizer, self.ranks = optimizer, ranks
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

    def combine(self, loss: float, grad_norm: float) -> tuple[float, float]:
        """After the backward passes of an update: add up losses and gradients of all ranks; returns the update's loss and norm.

        One exchange per update, not one per backward pass as in torch's DDP: ranks may have different numbers of micro-batches,
        or none. Losses are normalised over all ranks before, so this is a sum.

        loss, grad_norm: of the own micro-batches, added up.

        Raises:
            TrainingDiverged: on all ranks, the sum is not finite though each rank's part was.
        """
        if self.ranks.size == 1:
            return loss, grad_norm
        self.optimizer.sum_over(self.ranks)
        norm = self.optimizer.grad_norm()
        if not math.isfinite(norm):
            bad = self.bad_gradients()
            self.abandon()
            raise TrainingDiverged(
                f"The gradient norm over all processes is {norm} ({', '.join(bad[:3]) or 'finite in each parameter'}); expected a "
                "finite number. The update was not applied. A lower learning rate usually helps."
            )
        return sum(self.ranks.gather(loss, "loss")), norm

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
        return [name for name, grad in self.optimizer.gradients().items() if not bool(grad.isfinite().all())]
