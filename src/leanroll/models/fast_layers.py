"""Stand-ins for the forward methods of small modules during decoding: few rows, no gradient, CPU.

Each class takes over the `forward` of modules of any architecture that it recognises by structure, reads the live parameters
in every call (no copies, never stale), and hands anything it is not made for (many rows, another dtype, a graph to build) to
the original. `fast` decides by comparison which of them are used.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from peft.tuners.lora.layer import Linear as LoraLinear
from torch import Tensor, nn
from transformers.activations import SiLUActivation

from leanroll.kernels.cpu import LoraWeights, linear_group, rms_norm, rope, silu_mul
from leanroll.models.head import LmHead

MAX_ROWS = 16
"""Rows up to which our products beat torch's."""
_MAX_NORM_ELEMENTS = 1 << 18  # heads of 16 rows at most; beyond, torch's threads win
_SUPPORTED = (torch.bfloat16, torch.float32)


class FastProduct:
    """One linear layer, with or without a LoRA adapter around it."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        linear = module.base_layer if isinstance(module, LoraLinear) else module
        assert isinstance(linear, nn.Linear)
        self.lora = module if isinstance(module, LoraLinear) else None
        # Parameters are looked up in the module's own dictionary: nn.Module.__getattr__ is ten times slower, and a bound
        # tensor would go stale when a checkpoint replaces it.
        self._parameters = linear._parameters

    @staticmethod
    def recognises(module: nn.Module) -> bool:
        """Plain linear layers and peft's plain LoRA around them."""
        if type(module) is LoraLinear:
            return type(module.base_layer) is nn.Linear
        return type(module) is nn.Linear

    def weight(self) -> Tensor:
        """[N, K], live."""
        weight = self._parameters["weight"]
        assert weight is not None
        return weight

    def bias(self) -> Tensor | None:
        """[N], live."""
        return self._parameters["bias"]

    def is_plain(self) -> bool:
        """False when the adapter is in a state that only peft's own forward handles."""
        lora = self.lora
        if lora is None or lora.disable_adapters:
            return not (lora is not None and lora.merged_adapters)
        active = lora.active_adapters
        return (
            len(active) == 1 and not lora.merged_adapters and not lora.lora_variant and not any(lora.lora_bias.values())
        )

    def adapter(self) -> LoraWeights | None:
        """Weights of the active adapter, live."""
        lora = self.lora
        if lora is None or lora.disable_adapters:
            return None
        name = lora.active_adapters[0]
        modules = lora.lora_A._modules
        if name not in modules:
            return None
        a, b = modules[name], lora.lora_B._modules[name]
        assert a is not None
        assert b is not None
        return LoraWeights(a._parameters["weight"], b._parameters["weight"], lora.scaling[name])  # type: ignore[arg-type]


def multiply(x: Tensor, products: Sequence[FastProduct]) -> list[Tensor]:
    """x [M, K] through each product → [M, N_i]."""
    return linear_group(
        x, [p.weight() for p in products], [p.bias() for p in products], [p.adapter() for p in products]
    )


def _is_small(x: Tensor, dtype: torch.dtype) -> bool:
    return x.dtype is dtype and x.numel() <= MAX_ROWS * x.shape[-1] and not torch.is_grad_enabled()


class FastGroup:
    """Linear layers that read the same tensor object: the first one called computes all, the others hand out their part."""

    def __init__(self, products: Sequence[FastProduct]) -> None:
        self.products = list(products)
        self.originals = [p.module.forward for p in products]
        self._input: Tensor | None = None  # kept, so that no other tensor can take its identity
        self._outputs: list[Tensor | None] = [None] * len(products)

    def forwards(self) -> list[tuple[nn.Module, Callable[..., Tensor]]]:
        """Module → stand-in."""
        return [(p.module, self._member(i)) for i, p in enumerate(self.products)]

    def release(self) -> None:
        """Let go of the tensors of the last step."""
        self._input = None
        self._outputs = [None] * len(self.products)

    def _member(self, index: int) -> Callable[..., Tensor]:
        products, original = self.products, self.originals[index]
        alone = [products[index]]

        def forward(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            if x is self._input and (ready := self._outputs[index]) is not None:
                self._outputs[index] = None
                return ready
            if (
                args
                or kwargs
                or not _is_small(x, products[0].weight().dtype)
                or not all(p.is_plain() for p in products)
            ):
                return original(x, *args, **kwargs)
            shape = x.shape[:-1]
            outputs = [
                y.view(*shape, y.shape[-1]) for y in multiply(x.reshape(-1, x.shape[-1]), alone if index else products)
            ]
            if index == 0 and len(outputs) > 1:
                self._input, self._outputs = x, [None, *outputs[1:]]
            return outputs[0]

        return forward


class FastMlp:
    """down(act(gate(x)) · up(x)) as two calls."""

    def __init__(self, module: nn.Module) -> None:
        self.module, self.original = module, module.forward
        self.inner = [FastProduct(module.get_submodule(name)) for name in ("gate_proj", "up_proj")]
        self.outer = [FastProduct(module.get_submodule("down_proj"))]
        self.activation: nn.Module = module.get_submodule("act_fn")
        self.is_silu = isinstance(self.activation, (nn.SiLU, SiLUActivation))

    @staticmethod
    def recognises(module: nn.Module) -> bool:
        """Gated MLPs under the names that nearly all architectures use."""
        parts = dict(module.named_children())
        return parts.keys() == {"gate_proj", "up_proj", "down_proj", "act_fn"} and all(
            FastProduct.recognises(parts[name]) for name in ("gate_proj", "up_proj", "down_proj")
        )

    def forwards(self) -> list[tuple[nn.Module, Callable[..., Tensor]]]:
        """Module → stand-in."""
        return [(self.module, self._forward)]

    def release(self) -> None:
        """Nothing is kept."""

    def _forward(self, x: Tensor) -> Tensor:
        inner, outer = self.inner, self.outer
        plain = inner[0].is_plain() and inner[1].is_plain() and outer[0].is_plain()
        if not plain or not _is_small(x, outer[0].weight().dtype):
            return self.original(x)
        gate, up = multiply(x.reshape(-1, x.shape[-1]), inner)
        hidden = silu_mul(gate, up) if self.is_silu else self.activation(gate) * up
        return multiply(hidden, outer)[0].view(x.shape)


class FastHead(LmHead):
    """The head without widening its weight to fp32 in every step: bf16 products are exact in fp32, and so is their sum kept."""

    __slots__ = ()

    @classmethod
    def of(cls, head: LmHead) -> FastHead:
        """The same head, on the same live weight."""
        return cls(weight=head.weight, bias=head.bias, softcap=head.softcap, scale=head.scale)

    def project(self, hidden: Tensor) -> Tensor:
        """hidden [..., H] → fp32 products [..., V]."""
        if not _is_small(hidden, self.weight.dtype):
            return LmHead.project(self, hidden)
        rows = hidden.reshape(-1, hidden.shape[-1])
        return linear_group(rows, [self.weight], out_dtype=torch.float32)[0].view(*hidden.shape[:-1], -1)


class FastNorm:
    """RMS norms in the conventions of Llama (weight after rounding) and Gemma (1 + weight, in fp32)."""

    def __init__(self, module: nn.Module, offset: float, float_weight: bool) -> None:
        self.module, self.original = module, module.forward
        self.offset, self.float_weight = offset, float_weight
        self.eps = norm_eps(module) or 0.0
        self._parameters = module._parameters

    @staticmethod
    def recognises(module: nn.Module) -> bool:
        """One 1-D weight, an epsilon, nothing else."""
        parameters = dict(module.named_parameters())
        weight = parameters.get("weight")
        return (
            len(parameters) == 1 and weight is not None and weight.dim() == 1 and weight.dtype in _SUPPORTED
            and norm_eps(module) is not None and not isinstance(module, nn.LayerNorm)
        )  # fmt: skip

    def forwards(self) -> list[tuple[nn.Module, Callable[..., Tensor]]]:
        """Module → stand-in."""
        return [(self.module, self._forward)]

    def release(self) -> None:
        """Nothing is kept."""

    def _forward(self, x: Tensor) -> Tensor:
        weight = self._parameters["weight"]
        assert weight is not None
        if x.dtype is not weight.dtype or x.numel() > _MAX_NORM_ELEMENTS or torch.is_grad_enabled():
            return self.original(x)
        return rms_norm(x, weight, self.eps, self.offset, self.float_weight)


def norm_eps(module: nn.Module) -> float | None:
    """The epsilon of a norm, under either of its usual names."""
    for name in ("variance_epsilon", "eps"):
        value = getattr(module, name, None)
        if isinstance(value, float):
            return value
    return None


class FastRope:
    """An architecture's `apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=1)`, for one token per sequence."""

    def __init__(self, original: Callable[..., tuple[Tensor, Tensor]]) -> None:
        self.original = original

    def __call__(
        self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        if (
            args or kwargs or q.dim() != 4 or q.shape[2] != 1 or cos.shape != (q.shape[0], 1, q.shape[3])
            or q.dtype is not cos.dtype or q.dtype not in _SUPPORTED or torch.is_grad_enabled()
        ):  # fmt: skip
            return self.original(q, k, cos, sin, *args, **kwargs)
        # q is a transposed view of [B, 1, Hq, D]; with one token both orders are the same memory.
        cos, sin = cos[:, 0], sin[:, 0]
        return rope(q[:, :, 0], cos, sin).unsqueeze(2), rope(k[:, :, 0], cos, sin).unsqueeze(2)
