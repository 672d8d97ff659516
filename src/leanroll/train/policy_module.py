"""The policy as one module whose forward ends in log-probs.

Wrappers for several processes (DDP, FSDP) synchronise what runs inside `forward`. Log-probs fused with the head would
read the head's weight outside of it, so the whole path from packed tokens to log-probs is this module's forward.
"""

from __future__ import annotations

from torch import Tensor, nn

from leanroll.measure.logprobs import batch_logprobs
from leanroll.measure.packing import PackedBatch
from leanroll.models import Policy


class PolicyModule(nn.Module):
    """Owns the policy's model as a submodule; see the module docstring."""

    def __init__(self, policy: Policy) -> None:
        super().__init__()
        self.model = policy.model
        self._policy = policy

    def forward(self, batch: PackedBatch, temperature: float) -> tuple[Tensor, Tensor]:
        """Dense log-probs [R], differentiable, and entropies [R], not, of the batch's completion tokens."""
        scores = batch_logprobs(self._policy, batch, temperature=temperature, with_entropy=True)
        assert scores.entropy is not None
        return scores.logprobs, scores.entropy
