"""The attention hook: every Hugging Face causal LM, unchanged, attends through a context of ours.

`install_attention(model)` registers one attention function with transformers' `AttentionInterface`. The model is then
called with `use_cache=False` and `leanroll=ctx`; transformers passes the keyword down to the attention function, which
hands query, key and value to `ctx.attend`. What a context does with them (write to a page pool and decode, score a
packed batch) is its own business. Padding and packing travel in the context: a padding mask or an attention keyword we
do not know raises.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from leanroll.errors import ModelError

IMPLEMENTATION = "leanroll"

# Keywords that transformers hands to attention functions and that change nothing for us: positions are already in the
# rotated keys, causality and windows are ours to apply.
_HARMLESS = frozenset(
    [
        "position_ids",
        "cache_position",
        "use_cache",
        "output_attentions",
        "position_embeddings",
        "output_hidden_states",
        "return_dict",
    ]
)


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """What one layer asks of its attention.

    layer: index of the layer. scale: factor on q·k. softcap: 0 means none; otherwise scores become
    softcap·tanh(score/softcap).
    window: 0 means full; otherwise a query sees the last `window` tokens, its own included.
    """

    layer: int
    scale: float
    softcap: float = 0.0
    window: int = 0


class AttentionContext(Protocol):
    """The batch, as the attention sees it."""

    @property
    def sparse_rows(self) -> bool | Tensor:
        """Tokens that read only a part of their pages in sparse layers: all, none, or a mask bool [B, T]."""
        ...

    def attend(self, q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> Tensor:
        """q [B, Hq, T, D], k and v [B, Hk, T, D] (rotated, normalised) → [B, T, Hq, D]."""
        ...


def install_attention(model: PreTrainedModel) -> None:
    """Route the model's attention through contexts.

    Raises:
        ModelError: the architecture does not take its attention from `AttentionInterface`.
    """
    AttentionInterface.register(IMPLEMENTATION, _attention)
    expected = "expected an architecture built on transformers' AttentionInterface, such as Llama, Qwen3 or Gemma3"
    name = type(model).__name__
    try:
        model.set_attn_implementation(IMPLEMENTATION)
    except (ValueError, AttributeError) as error:
        raise ModelError(f"{name} does not accept a custom attention function ({error}); {expected}.") from error
    # For an architecture with an attention of its own, transformers only logs a warning.
    found = model.get_decoder().config._attn_implementation
    if found != IMPLEMENTATION:
        raise ModelError(f"{name} keeps its attention {found!r} when given a custom function; {expected}.")


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    sliding_window: int | None = None,
    is_causal: bool | None = None,
    leanroll: AttentionContext | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    name = type(module).__name__
    if leanroll is None:
        raise ModelError(
            f"{name} was called without a batch context; call the model with use_cache=False and leanroll=<context>, "
            "or restore another attention implementation with model.set_attn_implementation('sdpa')."
        )
    if attention_mask is not None:
        raise ModelError(
            f"{name} got an attention mask of shape {tuple(attention_mask.shape)}; padding and packing travel in the "
            "context. Do not pass attention_mask."
        )
    if dropout:
        raise ModelError(f"{name} asks for attention dropout {dropout}; expected 0. Set config.attention_dropout = 0.")
    if is_causal is False or getattr(module, "is_causal", True) is False:
        raise ModelError(f"{name} asks for attention in both directions; expected a causal model.")
    unknown = sorted(k for k, v in kwargs.items() if v is not None and k not in _HARMLESS)
    if unknown:
        raise ModelError(
            f"{name} passes attention options {unknown} that leanroll does not implement; such a model is not "
            "supported."
        )
    call = AttentionCall(
        layer=int(module.layer_idx),  # type: ignore[arg-type]
        scale=float(scaling) if scaling is not None else query.shape[-1] ** -0.5,
        softcap=float(softcap or 0.0),
        window=int(sliding_window or 0),
    )
    return leanroll.attend(query, key, value, call), None


def reject_padding(attention_mask: torch.Tensor | None) -> None:
    """Raise ModelError when a padding mask comes in from outside (transformers drops it before the attention
    function)."""
    if attention_mask is not None:
        raise ModelError("A padding mask was passed to a model that runs on leanroll contexts; pack the batch instead.")
