"""AdamW on fp32 weights, whatever the model's dtype.

Policy of precisions: every trainable parameter has an fp32 master. An fp32 parameter (LoRA weights are kept in fp32
even on a bf16 model) is its own master; a bf16 parameter (full fine-tuning in bf16) gets a copy, because an update of
relative size 1e-3 vanishes in bf16's eight bits. Gradients of micro-batches are accumulated in the master's fp32
`.grad`, so their sum does not depend on how the batch was cut; clipping and AdamW work on masters; the result is
rounded into the model once per update. Memory: 12 bytes per trainable fp32 parameter besides the weight (gradient and
two moments), 16 per bf16 one. With several processes `train.sharding` splits them over these.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from leanroll.errors import ConfigError, ResumeError
from leanroll.train.ranks import Ranks


class MasterAdamW:
    """AdamW over named parameters with fp32 masters. See the module docstring.

    Weight decay applies to matrices only (not to biases and norms).
    """

    def __init__(
        self,
        named: Iterable[tuple[str, nn.Parameter]],
        *,
        lr: float,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        masters: Mapping[str, Tensor] | None = None,
    ) -> None:
        """masters: fp32 tensors to work on, one per trainable parameter; None: as the module docstring says."""
        self.parameters = {name: p for name, p in named if p.requires_grad}
        if not self.parameters:
            raise ConfigError("The model has no trainable parameter; give it a LoRA adapter or unfreeze its weights.")
        self.masters: dict[str, Tensor] = (
            {name: p if p.dtype == torch.float32 else p.detach().float().clone() for name, p in self.parameters.items()}
            if masters is None
            else {name: masters[name] for name in self.parameters}
        )
        self.lr = lr
        matrices = [m for m in self.masters.values() if m.dim() >= 2]
        vectors = [m for m in self.masters.values() if m.dim() < 2]
        groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]
        self.adamw = torch.optim.AdamW([g for g in groups if g["params"]], lr=lr, betas=betas, eps=eps)

    def accumulate(self) -> None:
        """Move the gradients of the last backward into the masters. Call once per backward."""
        for name, p in self.parameters.items():
            master = self.masters[name]
            if master is p or p.grad is None:
                continue
            if master.grad is None:
                master.grad = p.grad.float()
            else:
                master.grad += p.grad
            p.grad = None

    def gradients(self) -> dict[str, Tensor]:
        """Name → accumulated gradient, of the parameters that have one."""
        return {name: m.grad for name, m in self.masters.items() if m.grad is not None}

    def grad_norm(self) -> float:
        """L2 norm over all accumulated gradients (nan or inf when one of them is not finite)."""
        grads = list(self.gradients().values())
        return float(torch.nn.utils.get_total_norm(grads)) if grads else 0.0

    def sum_over(self, ranks: Ranks) -> None:
        """Add up the accumulated gradients of all processes, which call this together."""
        ranks.sum_gradients(list(self.masters.values()))

    def checksum(self) -> float:
        """A number that differs where the masters do, but for coincidence: sums of values and squares, in fp64."""
        return float(sum(m.detach().double().sum() + m.detach().double().square().sum() for m in self.masters.values()))

    def step(self, *, lr_factor: float, max_grad_norm: float, grad_norm: float) -> None:
        """Clip to `max_grad_norm` (0: never) given the norm, update masters, round them into the model, drop
        gradients."""
        if 0 < max_grad_norm < grad_norm:
            scale = max_grad_norm / grad_norm
            for m in self.masters.values():
                if m.grad is not None:
                    m.grad.mul_(scale)
        for group in self.adamw.param_groups:
            group["lr"] = self.lr * lr_factor
        self.adamw.step()
        self._round_into_model()
        self.zero_grad()

    def zero_grad(self) -> None:
        """Drop all gradients, accumulated or not."""
        for name, p in self.parameters.items():
            p.grad = None
            self.masters[name].grad = None

    def state_dict(self) -> dict[str, Any]:
        """Masters and moments; enough to continue exactly."""
        masters = {name: m.detach() for name, m in self.masters.items()}
        return {"masters": masters, "adamw": self.adamw.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore masters, moments and the model's parameters.

        Raises:
            ResumeError: the saved parameters are not this model's.
        """
        saved: dict[str, Tensor] = state["masters"]
        check_shapes(saved, {name: m.shape for name, m in self.masters.items()})
        with torch.no_grad():
            for name, m in self.masters.items():
                m.copy_(saved[name])
        self._round_into_model()
        self.adamw.load_state_dict(state["adamw"])

    def _round_into_model(self) -> None:
        with torch.no_grad():
            for name, p in self.parameters.items():
                if self.masters[name] is not p:
                    p.copy_(self.masters[name])


def check_shapes(saved: Mapping[str, Tensor], expected: Mapping[str, torch.Size]) -> None:
    """Raise ResumeError unless the saved parameters are those expected, by name and shape."""
    differing = sorted(saved.keys() ^ expected.keys()) or sorted(
        name for name, shape in expected.items() if saved[name].shape != shape
    )
    if differing:
        raise ResumeError(
            f"The checkpoint's trainable parameters are not this model's ({len(differing)} differ, such as "
            f"{differing[0]}); resume with the model and adapter options of the original run."
        )
