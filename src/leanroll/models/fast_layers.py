"""Stand-ins for the forward methods of small modules during decoding: few rows, no gradient, CPU.

Each class takes over the `forward` of modules of any architecture that it recognises by structure, reads the live parameters
in every call (no copies, never stale), and hands anything it is not made for (many rows, another dtype, a graph to build) to
the original. `fast` decides by comparison which of them are used.

The extension is called directly, since a decode step makes some 300 calls of a few microseconds: what `kernels.cpu.ops` checks in
every call is checked here once, when a parameter is first seen.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from peft.tuners.lora.layer import Linear as LoraLinear
from torch import Tensor, nn
from transformers.activations import SiLUActivation

from leanroll.kernels.cpu import linear_group
from leanroll.kernels.cpu.native import check, dtype_code, native
from leanroll.models.head import LmHead
from leanroll.models.sampler import SamplerTerm, sampler_term

MAX_ROWS = 64
"""Rows up to which our products beat torch's."""
MAX_HEAD_ROWS = 512
"""The same for the head, where the alternative also widens the weight."""
_MAX_NORM_ELEMENTS = 1 << 18  # 16 rows of 128 heads of 128; beyond, torch's threads win
SUPPORTED = (torch.bfloat16, torch.float32)

Forwards = list[tuple[nn.Module, Callable[..., Tensor]]]
# What the extension takes for one layer before the address of its output: weight, bias, N, A, B, their dtype, rank, scaling.
_Item = tuple[int, int, int, int, int, int, int, float]


class FastProduct:
    """One linear layer, with or without a LoRA adapter around it; the sampler's own adapter (`models.sampler`) included.

    Where all rows want the sampler's adapter, the extension gets both adapters as one of the sum of their ranks.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        linear = module.base_layer if isinstance(module, LoraLinear) else module
        assert isinstance(linear, nn.Linear)
        self.lora = module if isinstance(module, LoraLinear) else None
        self.width, self.size, self.dtype = linear.in_features, linear.out_features, linear.weight.dtype
        # Parameters are looked up in the module's own dictionary: nn.Module.__getattr__ is ten times slower, and a bound
        # tensor would go stale when a checkpoint replaces it.
        self._parameters = linear._parameters
        self._lora_a = module.lora_A._modules if isinstance(module, LoraLinear) else {}
        self._lora_b = module.lora_B._modules if isinstance(module, LoraLinear) else {}
        self._checked: tuple[Tensor | None, ...] = ()
        self._joined: tuple[tuple[Any, ...], Tensor, Tensor] | None = None

    @property
    def term(self) -> SamplerTerm | None:
        """The sampler's own adapter of this layer, None where there is none."""
        return sampler_term(self.module)

    @staticmethod
    def recognises(module: nn.Module) -> bool:
        """Plain linear layers and peft's plain LoRA around them."""
        if type(module) is LoraLinear:
            return type(module.base_layer) is nn.Linear and max(module.r.values(), default=0) <= native().MAX_RANK
        return type(module) is nn.Linear

    def recheck(self) -> None:
        """Forget which tensors were checked (a module's `.to` changes them in place)."""
        self._checked = ()
        self._joined = None

    def is_plain(self) -> bool:
        """False when the adapter is in a state that only peft's own forward handles, or the two together have too large a rank."""
        lora, term = self.lora, self.term
        if term is not None and term.switch.rows is True:
            rank = term.a.shape[0] + (0 if lora is None else max(lora.r.values(), default=0))
            if rank > native().MAX_RANK:
                return False
        if lora is None:
            return True
        if lora.merged_adapters:
            return False
        active = lora._active_adapter
        return lora._disable_adapters or (
            (isinstance(active, str) or len(active) == 1) and not lora.lora_variant and not any(lora.lora_bias.values())
        )

    def item(self) -> _Item:
        """The live parameters, as the extension takes them."""
        weight, bias = self._parameters["weight"], self._parameters["bias"]
        assert weight is not None
        a: Tensor | None = None
        b: Tensor | None = None
        scaling = 0.0
        lora = self.lora
        if lora is not None and not lora._disable_adapters:
            active = lora._active_adapter
            name = active if isinstance(active, str) else active[0]
            layer = self._lora_a.get(name)
            if layer is not None:
                a, b = layer._parameters["weight"], self._lora_b[name]._parameters["weight"]
                scaling = lora.scaling[name]
        term = self.term
        if term is not None and term.switch.rows is True:
            a, b, scaling = self._join(a, b, scaling, term)
        checked = self._checked
        if (
            not checked
            or checked[0] is not weight
            or checked[1] is not bias
            or checked[2] is not a
            or checked[3] is not b
        ):
            self._check(weight, bias, a, b)
        bias_address = 0 if bias is None else bias.data_ptr()
        if a is None or b is None:
            return weight.data_ptr(), bias_address, self.size, 0, 0, 0, 0, 0.0
        code = 1 if a.dtype is torch.bfloat16 else 0
        return weight.data_ptr(), bias_address, self.size, a.data_ptr(), b.data_ptr(), code, a.shape[0], scaling

    def _join(
        self, a: Tensor | None, b: Tensor | None, scaling: float, term: SamplerTerm
    ) -> tuple[Tensor, Tensor, float]:
        """Both adapters as one, made anew when a weight has changed."""
        if a is None or b is None:
            return term.a, term.b, term.scaling
        tensors = (a, b, term.a, term.b)
        state = (*map(id, tensors), *(t._version for t in tensors), scaling)
        if self._joined is None or self._joined[0] != state:
            # Of different dtypes, both in float32.
            joined_a = torch.cat([a.detach(), term.a.detach()])
            joined_b = torch.cat([scaling * b.detach(), term.scaling * term.b.detach()], dim=1)
            self._joined = (state, joined_a, joined_b.contiguous())
        return self._joined[1], self._joined[2], 1.0

    def _check(self, weight: Tensor, bias: Tensor | None, a: Tensor | None, b: Tensor | None) -> None:
        check(weight, "weight", (self.size, self.width), self.dtype)
        if bias is not None:
            check(bias, "bias", (self.size,), self.dtype)
        if a is not None and b is not None:
            dtype_code(a, "lora A")
            check(a, "lora A", (a.shape[0], self.width), a.dtype)
            check(b, "lora B", (self.size, a.shape[0]), a.dtype)
        self._checked = (weight, bias, a, b)


def multiply(x: Tensor, products: Sequence[FastProduct]) -> list[Tensor]:
    """x [..., K], contiguous, of few rows, through each product → [..., N_i]."""
    leading, width, dtype = x.shape[:-1], products[0].width, x.dtype
    outputs, items = [], []
    for product in products:
        out = torch.empty((*leading, product.size), dtype=dtype)
        outputs.append(out)
        items.append((*product.item(), out.data_ptr()))
    code = 1 if dtype is torch.bfloat16 else 0
    native().linear_group(code, x.data_ptr(), x.numel() // width, width, items, code, torch.get_num_threads())
    for i, product in enumerate(products):
        term = product.term
        if term is not None and isinstance(term.switch.rows, Tensor):
            outputs[i] = term.add(
                outputs[i], x
            )  # some rows: sequences at both sides of a length, a few steps of a rollout
    return outputs


def _is_small(x: Tensor, product: FastProduct) -> bool:
    return (
        x.numel() <= MAX_ROWS * product.width and x.dtype is product.dtype and x.is_contiguous()
        and x.shape[-1] == product.width and not torch.is_grad_enabled()
    )  # fmt: skip


class FastGroup:
    """Linear layers that read the same tensor object: the first one called computes all, the others hand out their part."""

    def __init__(self, products: Sequence[FastProduct]) -> None:
        self.products = list(products)
        self.originals = [p.module.forward for p in products]
        self._input: Tensor | None = None  # kept, so that no other tensor can take its identity
        self._outputs: list[Tensor | None] = [None] * len(products)

    def forwards(self) -> Forwards:
        """Module → stand-in."""
        return [(p.module, self._member(i)) for i, p in enumerate(self.products)]

    def reset(self) -> None:
        """Let go of the tensors of the last step and look at the parameters anew."""
        self._input = None
        self._outputs = [None] * len(self.products)
        for product in self.products:
            product.recheck()

    def _member(self, index: int) -> Callable[..., Tensor]:
        products, original = self.products, self.originals[index]
        alone = [products[index]]
        needed = alone if index else products

        def forward(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            if x is self._input and (ready := self._outputs[index]) is not None:
                self._outputs[index] = None
                return ready
            if args or kwargs or not _is_small(x, alone[0]) or not all([p.is_plain() for p in needed]):
                return original(x, *args, **kwargs)
            outputs = multiply(x, needed)
            if len(outputs) > 1:
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

    def forwards(self) -> Forwards:
        """Module → stand-in."""
        return [(self.module, self._forward)]

    def reset(self) -> None:
        """Look at the parameters anew."""
        for product in (*self.inner, *self.outer):
            product.recheck()

    def _forward(self, x: Tensor) -> Tensor:
        inner, outer = self.inner, self.outer
        plain = inner[0].is_plain() and inner[1].is_plain() and outer[0].is_plain()
        if not plain or not _is_small(x, inner[0]):
            return self.original(x)
        gate, up = multiply(x, inner)
        if not self.is_silu:
            return multiply(self.activation(gate) * up, outer)[0]
        hidden, code = torch.empty_like(gate), 1 if gate.dtype is torch.bfloat16 else 0
        native().silu_mul(
            code, gate.data_ptr(), up.data_ptr(), hidden.data_ptr(), gate.numel(), torch.get_num_threads()
        )
        return multiply(hidden, outer)[0]


class FastHead(LmHead):
    """The head without widening its weight to fp32 in every step: bf16 products are exact in fp32, and so is their sum kept."""

    __slots__ = ()

    @classmethod
    def of(cls, head: LmHead) -> FastHead:
        """The same head, on the same live weight."""
        return cls(weight=head.weight, bias=head.bias, softcap=head.softcap, scale=head.scale)

    def project(self, hidden: Tensor) -> Tensor:
        """hidden [..., H] → fp32 products [..., V]."""
        weight = self.weight
        rows = hidden.reshape(-1, hidden.shape[-1])
        if rows.shape[0] > MAX_HEAD_ROWS or hidden.dtype is not weight.dtype or torch.is_grad_enabled():
            return LmHead.project(self, hidden)
        parts = [linear_group(part, [weight], out_dtype=torch.float32)[0] for part in rows.split(MAX_ROWS)]
        products = parts[0] if len(parts) == 1 else torch.cat(parts)
        return products.view(*hidden.shape[:-1], weight.shape[0])


class FastNorm:
    """RMS norms in the conventions of Llama (weight after rounding) and Gemma (1 + weight, in fp32)."""

    def __init__(self, module: nn.Module, offset: float, float_weight: bool) -> None:
        self.module, self.original = module, module.forward
        self.offset, self.float_weight = offset, float_weight
        self.eps = norm_eps(module) or 0.0
        weight = module.get_parameter("weight")
        self.width, self.dtype = weight.shape[0], weight.dtype
        self._parameters = module._parameters
        self._checked: Tensor | None = None

    @staticmethod
    def recognises(module: nn.Module) -> bool:
        """One 1-D weight, an epsilon, nothing else."""
        parameters = dict(module.named_parameters())
        weight = parameters.get("weight")
        return (
            len(parameters) == 1 and weight is not None and weight.dim() == 1 and weight.dtype in SUPPORTED
            and norm_eps(module) is not None and not isinstance(module, nn.LayerNorm)
        )  # fmt: skip

    def forwards(self) -> Forwards:
        """Module → stand-in."""
        return [(self.module, self._forward)]

    def reset(self) -> None:
        """Look at the parameters anew."""
        self._checked = None

    def _forward(self, x: Tensor) -> Tensor:
        weight, size = self._parameters["weight"], x.numel()
        assert weight is not None
        if weight is not self._checked:
            check(weight, "weight", (self.width,), self.dtype)
            self._checked = weight
        if (
            size > _MAX_NORM_ELEMENTS or x.dtype is not self.dtype or x.shape[-1] != self.width or not x.is_contiguous()
            or torch.is_grad_enabled()
        ):  # fmt: skip
            return self.original(x)
        out, width = torch.empty_like(x), self.width
        native().rms_norm(
            1 if x.dtype is torch.bfloat16 else 0, x.data_ptr(), weight.data_ptr(), out.data_ptr(), size // width, width,
            self.eps, self.offset, self.float_weight, torch.get_num_threads(),
        )  # fmt: skip
        return out


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
        if args or kwargs or q.dim() != 4 or q.shape[2] != 1 or torch.is_grad_enabled():
            return self.original(q, k, cos, sin, *args, **kwargs)
        batch, _, _, dim = q.shape
        dtype = q.dtype
        if (
            dtype not in SUPPORTED or k.dtype is not dtype or cos.dtype is not dtype or sin.dtype is not dtype
            or cos.shape != (batch, 1, dim) or not (cos.is_contiguous() and sin.is_contiguous())
        ):  # fmt: skip
            return self.original(q, k, cos, sin)
        code, cos_address, sin_address = 1 if dtype is torch.bfloat16 else 0, cos.data_ptr(), sin.data_ptr()
        outputs = []
        for x in (q, k):
            # A transposed view of [B, 1, H, D]: with one token that is the memory of [B, H, 1, D].
            x = x.contiguous()
            heads = x.shape[1]
            out = torch.empty((batch, heads, 1, dim), dtype=dtype)
            native().rope(
                code, x.data_ptr(), cos_address, sin_address, out.data_ptr(), batch, heads, dim, torch.get_num_threads()
            )
            outputs.append(out)
        return outputs[0], outputs[1]
