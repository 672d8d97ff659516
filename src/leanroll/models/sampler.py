"""The sampler's own adapter (DistillSparse, arXiv 2606.08446): low-rank terms that count where attention is sparse, nowhere else.

The adapter follows the attention: a context says which of its tokens read only a part of their pages (`sparse_rows`), and the
layers add the adapter's term to these rows alone. So it is on in sparse decoding and sparse re-scoring, and off in dense passes,
prompts and steps that read every page; there the policy's own forward runs, to the bit. A layer that is recomputed in the backward
pass sees the same context, so the same adapter.

The adapter lies outside the model: its parameters are not among the model's, an optimizer or a state dict of the policy never sees
them, and no switch of peft is used. It composes with a LoRA adapter of the policy, or with full fine-tuning.

Legend: T rows, K input width, N output width, r rank.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from types import MethodType
from typing import Any

import torch
from peft import LoraConfig, PeftConfig
from peft.tuners.tuners_utils import BaseTunerLayer
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from leanroll.errors import ModelError
from leanroll.models.lora import LoraSpec, product_dtype

_TERM = "_leanroll_sampler_term"
_WEIGHTS = "adapter_model.safetensors"
_PREFIX = "base_model.model."
"""Of parameter names in peft's files."""

SparseRows = bool | Tensor
"""Which tokens of a batch attend sparsely: all, none, or a mask bool [B, T]."""


class Switch:
    """rows: where the adapter counts at this moment; shared by all of its layers."""

    __slots__ = ("rows",)

    def __init__(self) -> None:
        self.rows: SparseRows = False


class SamplerTerm:
    """The adapter's part of one linear layer: scaling · (x aᵀ) bᵀ, with a [r, K] and b [N, r] in float32 or wider."""

    __slots__ = ("a", "b", "inner", "scaling", "switch")

    def __init__(self, inner: Any, a: nn.Parameter, b: nn.Parameter, scaling: float, switch: Switch) -> None:
        """inner: the layer's forward without the adapter."""
        self.inner, self.a, self.b, self.scaling, self.switch = inner, a, b, scaling, switch

    def add(self, out: Tensor, x: Tensor) -> Tensor:
        """out [..., N] of the layer's input x [..., K], plus the term where the switch says."""
        rows = self.switch.rows
        if rows is False:
            return out
        mask = None if rows is True else rows
        if mask is not None and mask.shape != x.shape[:-1]:
            raise ModelError(
                f"A layer with a sampler adapter got an input of shape {tuple(x.shape)} in a batch of {tuple(mask.shape)} tokens; "
                "it must see every token once. Leave such layers (experts, say) out of sampler_adapter.target_modules."
            )
        result: Tensor = _AddLowRank.apply(out, x, self.a, self.b, self.scaling, mask)
        return result


def sampler_term(module: nn.Module) -> SamplerTerm | None:
    """The adapter's part of a layer, None where it has none."""
    term: SamplerTerm | None = module.__dict__.get(_TERM)
    return term


class SamplerAdapter(nn.Module):
    """A policy's sampler adapter: its parameters, by layer, and its switch. `Policy.add_sampler` makes it."""

    def __init__(self, base: nn.Module, decoder: nn.Module, spec: LoraSpec, dtype: torch.dtype) -> None:
        """Give the decoder's linear layers their terms, in place. A new adapter changes nothing yet (its b are zero).

        base: the model whose names of modules count. dtype: of the base weights.

        Raises:
            ModelError: a rank or target that is not possible, or a saved adapter that cannot be read or does not fit.
        """
        super().__init__()
        saved = None if spec.path is None else _read(spec.path)
        if saved is not None:
            config, _ = saved
            spec = LoraSpec(r=int(config.r), alpha=float(config.lora_alpha), path=spec.path)
        if spec.r < 1:
            raise ModelError(f"The sampler adapter's rank is {spec.r}; expected r ≥ 1.")
        layers = _linear_layers(base, decoder)
        names = _targets(layers, spec) if saved is None else _saved_targets(layers, saved[1], spec.path)
        self.spec = spec
        self.scaling = spec.alpha / spec.r
        self._switch, self._enabled = Switch(), True
        self._names = tuple(names)
        self._all_names = tuple(layers)
        wide = torch.promote_types(dtype, torch.float32)
        self.a, self.b = nn.ParameterList(), nn.ParameterList()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(spec.seed)
            for name in names:
                layer = layers[name]
                width, size, device = layer.in_features, layer.out_features, layer.weight.device
                a, b = torch.empty(spec.r, width, dtype=wide), torch.zeros(size, spec.r, dtype=wide)
                nn.init.kaiming_uniform_(a, a=math.sqrt(5))  # as peft does
                self.a.append(nn.Parameter(a.to(device)))
                self.b.append(nn.Parameter(b.to(device)))
        if saved is not None:
            self._copy(saved[1], spec.path)
        for name, a, b in zip(names, self.a, self.b, strict=True):
            layer = layers[name]
            layer.__dict__[_TERM] = SamplerTerm(layer.forward, a, b, self.scaling, self._switch)
            # A bound method rather than a closure: deep copies of the layer get one of their own.
            layer.forward = MethodType(_forward, layer)

    @property
    def targets(self) -> tuple[str, ...]:
        """Names of the adapted layers."""
        return self._names

    def trainable_parameters(self) -> dict[str, nn.Parameter]:
        """Name → parameter, of all of them, in the model's order."""
        named: dict[str, nn.Parameter] = {}
        for name, a, b in zip(self._names, self.a, self.b, strict=True):
            named[f"{name}.lora_A"], named[f"{name}.lora_B"] = a, b
        return named

    @contextmanager
    def on(self, rows: SparseRows) -> Iterator[None]:
        """Inside, the adapter counts at these rows (nowhere while it is disabled)."""
        if isinstance(rows, Tensor):
            rows = rows.to(self.a[0].device)
        with self._set(rows if self._enabled else False):
            yield

    def as_now(self) -> AbstractContextManager[None]:
        """A context inside which the adapter counts where it counts at this moment: to compute a layer once more."""
        return self._set(self._switch.rows)

    @contextmanager
    def _set(self, rows: SparseRows) -> Iterator[None]:
        before = self._switch.rows
        self._switch.rows = rows
        try:
            yield
        finally:
            self._switch.rows = before

    @contextmanager
    def disabled(self) -> Iterator[None]:
        """Inside, sparse passes run without the adapter; to compare, never around a part of a training step."""
        before = self._enabled
        self._enabled = False
        try:
            yield
        finally:
            self._enabled = before

    def save(self, directory: Path) -> None:
        """Write it in peft's format, without merging anything. Not atomic by itself."""
        directory.mkdir(parents=True, exist_ok=True)
        endings = sorted({name.rpartition(".")[2] for name in self._names})
        unique = [n for n in self._all_names if n.rpartition(".")[2] in endings] == list(self._names)
        LoraConfig(
            r=self.spec.r,
            lora_alpha=self.spec.alpha,  # type: ignore[arg-type]  # peft takes any number
            target_modules=endings if unique else list(self._names),
            bias="none",
            task_type="CAUSAL_LM",
            inference_mode=True,
        ).save_pretrained(str(directory))
        tensors: dict[str, Tensor] = {}
        for name, a, b in zip(self._names, self.a, self.b, strict=True):
            tensors[f"{_PREFIX}{name}.lora_A.weight"] = a.detach().cpu().contiguous()
            tensors[f"{_PREFIX}{name}.lora_B.weight"] = b.detach().cpu().contiguous()
        save_file(tensors, directory / _WEIGHTS, metadata={"format": "pt"})

    def _copy(self, tensors: dict[str, Tensor], path: Path | None) -> None:
        with torch.no_grad():
            for name, a, b in zip(self._names, self.a, self.b, strict=True):
                for kind, parameter in (("lora_A", a), ("lora_B", b)):
                    tensor = tensors[f"{_PREFIX}{name}.{kind}.weight"]
                    if tensor.shape != parameter.shape:
                        raise ModelError(
                            f"The sampler adapter in {path} has {kind} of shape {tuple(tensor.shape)} at {name}; expected "
                            f"{tuple(parameter.shape)}. Load it on the model it was made for."
                        )
                    parameter.copy_(tensor)


def _forward(layer: nn.Module, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    term: SamplerTerm = layer.__dict__[_TERM]
    return term.add(term.inner(x, *args, **kwargs), x)


class _AddLowRank(torch.autograd.Function):
    """out + scaling · mask · (x aᵀ) bᵀ. Keeps the input as it is, not widened (see `models.lora`)."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, x: Tensor, a: Tensor, b: Tensor, scaling: float, mask: Tensor | None) -> Tensor:
        inner = product_dtype(x, a.dtype)
        low = x.reshape(-1, x.shape[-1]).to(inner) @ a.to(inner).T
        if mask is not None:
            low *= mask.reshape(-1, 1)
        result = torch.addmm(out.reshape(-1, out.shape[-1]).to(inner), low, b.to(inner).T, alpha=scaling)
        ctx.save_for_backward(x, a, b, low, mask)
        ctx.scaling = scaling
        return result.to(out.dtype).view(out.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, a, b, low, mask = ctx.saved_tensors
        _, need_x, need_a, need_b, _, _ = ctx.needs_input_grad
        wide = grad.reshape(-1, grad.shape[-1]).to(low.dtype)
        grad_x = grad_a = grad_b = None
        if need_b:
            grad_b = (wide.T @ low).to(b.dtype).mul_(ctx.scaling)
        if need_x or need_a:
            grad_low = (wide @ b.to(low.dtype)).mul_(ctx.scaling)
            if mask is not None:
                grad_low *= mask.reshape(-1, 1)
            if need_a:
                grad_a = (grad_low.T @ x.reshape(-1, x.shape[-1]).to(low.dtype)).to(a.dtype)
            if need_x:
                grad_x = (grad_low @ a.to(low.dtype)).to(x.dtype).view(x.shape)
        return grad, grad_x, grad_a, grad_b, None, None


def _linear_layers(base: nn.Module, decoder: nn.Module) -> dict[str, Any]:
    """Name → linear layer of the decoder, plain or around which peft put one; the head is not among them."""
    inside = set(decoder.modules())
    found: dict[str, Any] = {}
    hidden: set[nn.Module] = set()
    for name, module in base.named_modules():
        if module not in inside or module in hidden:
            continue
        adapted = isinstance(module, BaseTunerLayer)
        if adapted:
            hidden.update(module.modules())  # base layer and adapter weights are parts of it
        if type(module.base_layer if adapted else module) is nn.Linear:
            if sampler_term(module) is not None:
                raise ModelError("The policy has a sampler adapter already; one policy has at most one.")
            found[name] = module
    return found


def _targets(layers: dict[str, Any], spec: LoraSpec) -> list[str]:
    if spec.target_modules == "all-linear":
        return list(layers)
    endings = (spec.target_modules,) if isinstance(spec.target_modules, str) else spec.target_modules
    found = {e: {name for name in layers if name == e or name.endswith(f".{e}")} for e in endings}
    unmatched = sorted(e for e, names in found.items() if not names)
    if unmatched or not found:
        known = sorted({name.rpartition(".")[2] for name in layers})
        raise ModelError(
            f"The sampler adapter's target_modules {list(endings)} match no linear layer of the decoder "
            f"({', '.join(unmatched) or 'none given'}); it has {', '.join(known)}. Name some of these, or use 'all-linear'."
        )
    chosen = set().union(*found.values())
    return [name for name in layers if name in chosen]


def _saved_targets(layers: dict[str, Any], tensors: dict[str, Tensor], path: Path | None) -> list[str]:
    saved = {key.removeprefix(_PREFIX).partition(".lora_")[0] for key in tensors}
    expected = {f"{_PREFIX}{name}.lora_{kind}.weight" for name in saved for kind in "AB"}
    unknown = sorted(saved - layers.keys()) or sorted(expected ^ tensors.keys())
    if unknown or not saved:
        raise ModelError(
            f"The sampler adapter in {path} does not fit the model ({len(unknown)} names differ, such as "
            f"{unknown[0] if unknown else 'none'}); load it on the model it was made for."
        )
    return [name for name in layers if name in saved]


def _read(path: Path) -> tuple[LoraConfig, dict[str, Tensor]]:
    if not (path / "adapter_config.json").is_file() or not (path / _WEIGHTS).is_file():
        raise ModelError(
            f"No sampler adapter in {path}: expected adapter_config.json and {_WEIGHTS}, as a checkpoint's folder "
            "'sampler' holds them."
        )
    try:
        config = PeftConfig.from_pretrained(str(path))
        tensors = load_file(path / _WEIGHTS)
    except (OSError, ValueError, TypeError, SafetensorError) as error:
        raise ModelError(f"The sampler adapter in {path} cannot be read ({error}); save it again.") from error
    plain = isinstance(config, LoraConfig) and not (
        config.modules_to_save or config.bias != "none" or config.use_rslora or config.use_dora
        or config.rank_pattern or config.alpha_pattern
    )  # fmt: skip
    if not isinstance(config, LoraConfig) or not plain:
        raise ModelError(
            f"The adapter in {path} is {type(config).__name__} with options beyond plain LoRA; expected one rank and alpha, no "
            "bias, no modules_to_save, neither rslora nor dora."
        )
    return config, tensors
