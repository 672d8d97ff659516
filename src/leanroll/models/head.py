"""The language-model head: final hidden states to fp32 logits."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from leanroll.errors import ModelError

# Rows of a bf16 weight that are widened to fp32 at a time: 8192 rows of width 4096 are 134 MB.
_VOCAB_CHUNK = 8192


@dataclass(frozen=True, slots=True)
class LmHead:
    """logits = cap(scale · (hidden · weightᵀ + bias)), cap(x) = softcap · tanh(x / softcap).

    weight: [V, H], the live parameter (possibly tied to the embedding), so never stale. bias: [V] or None.
    softcap: 0 means none (Gemma 2: 30). scale: 1 for most (Cohere, Granite: not).
    """

    weight: Tensor
    bias: Tensor | None = None
    softcap: float = 0.0
    scale: float = 1.0

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [..., H] → fp32 logits [..., V], differentiable in hidden, weight and bias.

        The product accumulates in fp32 and is *not* rounded to bf16: a bf16 logit of 20 has steps of 0.125, which would
        be the largest difference between the sampler's and the trainer's log-probs. Callers bound the number of rows.
        """
        return self.finish(self.project(hidden))

    def project(self, hidden: Tensor) -> Tensor:
        """hidden [..., H] → fp32 hidden · weightᵀ [..., V], without bias, scale and cap."""
        if self.weight.dtype == torch.float32:
            return F.linear(hidden.float(), self.weight)
        if hidden.is_cuda:
            rows = hidden.reshape(-1, hidden.shape[-1]).to(self.weight.dtype)
            if not (rows.requires_grad or self.weight.requires_grad) or not torch.is_grad_enabled():
                return torch.mm(rows, self.weight.t(), out_dtype=torch.float32).view(*hidden.shape[:-1], -1)
        wide = hidden.float()
        return torch.cat([F.linear(wide, part.float()) for part in self.weight.split(_VOCAB_CHUNK)], dim=-1)

    def finish(self, products: Tensor) -> Tensor:
        """Products [..., V] of `project` → logits, same shape."""
        if self.bias is not None:
            products = products + self.bias.float()
        if self.scale != 1.0:
            products = products * self.scale
        if self.softcap:
            products = self.softcap * torch.tanh(products / self.softcap)
        return products


def read_head(model: PreTrainedModel) -> LmHead:
    """The head of a causal LM, scale and cap as configured (compared with the model's own logits at load).

    Raises:
        ModelError: the model's output is not one linear layer.
    """
    layer = model.get_output_embeddings()
    if not isinstance(layer, nn.Linear):
        raise ModelError(
            f"{type(model).__name__} has no linear language-model head (got {type(layer).__name__}); expected a causal LM."
        )
    config = model.config.get_text_config()
    scale = float(getattr(config, "logit_scale", None) or 1.0)
    if getattr(config, "logits_scaling", None):
        # Granite divides by this field, HyperCLOVA X multiplies.
        scale = (
            float(config.logits_scaling) if config.model_type == "hyperclovax" else 1.0 / float(config.logits_scaling)
        )
    return LmHead(
        weight=layer.weight,
        bias=layer.bias,
        softcap=float(getattr(config, "final_logit_softcapping", None) or 0.0),
        scale=scale,
    )
