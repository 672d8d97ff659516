"""Forward and backward of peft's LoRA linear layers in less memory and fewer passes.

peft widens the input of every adapted layer to the adapter's dtype and keeps that copy for the backward: with fp32 adapters on
a bf16 model, about half of an update's activations and of its time. Here the input is kept once, in its own dtype, shared by the
layers that read it. On a bf16 model the adapter's weights are fp32, its products bf16, as under autocast: sums are fp32 inside a
product, and what the base product rounds to bf16 anyway is rounded once, adapter included. In other dtypes, and on a CPU where
products of bf16 are slow (`kernels.products`), the rounding is peft's: the base product to the input's dtype, the adapter in its
own, their sum back to the input's.

Legend: T rows, K input width, N output width, r rank.
"""

from __future__ import annotations

import functools
import warnings
from dataclasses import dataclass
from pathlib import Path
from types import MethodType
from typing import Any

import torch
from peft import LoraConfig
from peft.tuners.lora.layer import Linear as LoraLinear
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from leanroll.kernels.products import is_emulated, linear, product

# Relative RMS between peft's result and ours on random input. Only the adapter's sum is added in another order.
_TOLERANCE = {torch.float16: 2e-3, torch.bfloat16: 1e-2}
_TOLERANCE_WIDE = 1e-5


@dataclass(frozen=True, slots=True)
class LoraSpec:
    """A LoRA adapter on a frozen base.

    r: rank, ≥ 1. alpha: the update is scaled by alpha / r. target_modules: "all-linear" (all but the head) or names of modules.
    path: a saved peft adapter to start from; r, alpha and target_modules are then the saved ones. seed: of the initial weights.
    Dropout is always 0: the sampler and the trainer must be the same function. Weights are fp32 on bf16 and fp16 models.
    """

    r: int = 16
    alpha: float = 32.0
    target_modules: str | tuple[str, ...] = "all-linear"
    path: Path | None = None
    seed: int = 0


def install_lora(model: nn.Module) -> int:
    """Give every plain LoRA linear layer of the model the leaner forward; returns how many. State dicts do not change.

    In a state that the leaner forward is not made for (adapter merged, disabled or one of several, a trainable base, autocast),
    a call goes to peft's own forward, so the switches of peft and `Policy` work as before.
    """
    layers = [m for m in model.modules() if type(m) is LoraLinear and type(m.base_layer) is nn.Linear]
    count = 0
    for layer in layers:
        weight = layer.base_layer.weight
        if not _agrees_with_peft(weight.dtype, weight.device):
            warnings.warn(
                f"leanroll's LoRA forward differs from this version of peft's in {weight.dtype} on {weight.device}; peft's own, "
                "which takes more memory, is used.",
                stacklevel=2,
            )
            break
        # A bound method rather than a closure: deep copies of the layer get one of their own.
        layer.forward = MethodType(_forward, layer)  # type: ignore[method-assign]
        count += 1
    return count


def _forward(layer: LoraLinear, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    name = None if args or kwargs else _plain_adapter(layer, x)
    if name is None:
        return LoraLinear.forward(layer, x, *args, **kwargs)
    base = layer.base_layer
    out: Tensor = _LoraProduct.apply(
        x, base.weight, base.bias, layer.lora_A[name].weight, layer.lora_B[name].weight, float(layer.scaling[name])
    )
    return out


def _plain_adapter(layer: LoraLinear, x: Tensor) -> str | None:
    """Name of the one active adapter; None where peft's own forward must run."""
    active, base = layer.active_adapters, layer.base_layer
    if (
        layer.disable_adapters
        or layer.merged
        or layer.lora_variant
        or len(active) != 1
        or active[0] not in layer.lora_A
    ):
        return None
    name = active[0]
    a, b = layer.lora_A[name], layer.lora_B[name]
    dropout = layer.lora_dropout[name]
    wide = torch.promote_types(x.dtype, torch.float32)
    plain = (
        type(base) is nn.Linear and type(a) is nn.Linear and type(b) is nn.Linear
        and a.bias is None and b.bias is None
        and x.dtype is base.weight.dtype and a.weight.dtype is wide and b.weight.dtype is wide
        and (not layer.training or isinstance(dropout, nn.Identity))
        and getattr(layer, "cast_input_dtype_enabled", True)
        and not any(m._forward_hooks or m._forward_pre_hooks or m._backward_hooks for m in (base, a, b))
        and not (torch.is_grad_enabled() and (base.weight.requires_grad or (base.bias is not None and base.bias.requires_grad)))
        and not torch.is_autocast_enabled(x.device.type)
    )  # fmt: skip
    return name if plain else None


def product_dtype(x: Tensor, adapter: torch.dtype) -> torch.dtype:
    """What an adapter's products of x are computed in: float16 has too small a range for gradients that nobody scales."""
    return x.dtype if x.dtype is torch.bfloat16 and not is_emulated(x) else adapter


class _LoraProduct(torch.autograd.Function):
    """x Wᵀ + bias + scaling · (x Aᵀ) Bᵀ, with a frozen W and bias."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, a: Tensor, b: Tensor, scaling: float
    ) -> Tensor:
        """x [..., K], weight [N, K], a [r, K] and b [N, r] in float32 or wider → [..., N] in x's dtype."""
        rows, inner = x.reshape(-1, x.shape[-1]), product_dtype(x, a.dtype)
        low = rows.to(inner) @ a.to(inner).T
        out = linear(rows, weight, bias).to(inner).addmm_(low, b.to(inner).T, alpha=scaling).to(x.dtype)
        # `low` is r numbers per row, the input none beyond what autograd keeps anyway: it is the very tensor.
        ctx.save_for_backward(x, weight, a, b, low)
        ctx.scaling = scaling
        return out.view(*x.shape[:-1], out.shape[-1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, a, b, low = ctx.saved_tensors
        need_x, _, _, need_a, need_b, _ = ctx.needs_input_grad
        grad, inner = grad.reshape(-1, grad.shape[-1]), low.dtype
        wide = grad.to(inner)
        grad_x = grad_a = grad_b = None
        if need_b:
            grad_b = (wide.T @ low).to(b.dtype).mul_(ctx.scaling)
        if need_x or need_a:
            grad_low = (wide @ b.to(inner)).mul_(ctx.scaling)
            if need_a:
                grad_a = (grad_low.T @ x.reshape(-1, x.shape[-1]).to(inner)).to(a.dtype)
            if need_x:
                grad_x = product(grad, weight).to(inner).addmm_(grad_low, a.to(inner)).to(x.dtype).view(x.shape)
        return grad_x, None, None, grad_a, grad_b, None


@functools.cache
@torch.inference_mode(False)
def _agrees_with_peft(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether a small layer gives peft's values and gradients: peft's forward is not ours to define."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    with torch.random.fork_rng(devices=[]):
        base = nn.Linear(48, 40)
        layer = LoraLinear(base, "default", config=LoraConfig(r=4), r=4, lora_alpha=6)
    base.requires_grad_(False)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(random(*parameter.shape))
    base.to(dtype)
    layer.eval().to(device)
    x, g = random(2, 3, 48).to(device, dtype), random(2, 3, 40).to(device, dtype)
    adapter = [p for p in layer.parameters() if p.requires_grad]
    results = []
    for forward in (functools.partial(LoraLinear.forward, layer), functools.partial(_forward, layer)):
        leaf = x.clone().requires_grad_()
        with torch.enable_grad():
            out = forward(leaf)
            results.append([out, *torch.autograd.grad(out, [leaf, *adapter], g)])
    tolerance = _TOLERANCE.get(dtype, _TOLERANCE_WIDE)
    return all(
        got.dtype is expected.dtype and bool((got - expected).norm() <= tolerance * expected.norm())
        for expected, got in zip(*results, strict=True)
    )
