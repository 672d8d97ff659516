"""What the engine and the measures need to know about a model, read from its configuration; and what is refused."""

from __future__ import annotations

from dataclasses import dataclass

import jinja2
import torch
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from leanroll.errors import ModelError

VERIFIED_FAMILIES = ("llama", "qwen2", "qwen3", "gemma2", "gemma3_text")
"""Families with tests of their own. Others are accepted when the check at load passes (see `verify`)."""

# Configuration fields that only architectures have whose attention reads something else than plain keys and values.
_REFUSED_FIELDS = {
    "kv_lora_rank": "multi-head latent attention (MLA)",
    "q_lora_rank": "multi-head latent attention (MLA)",
    "attn_layer_indices": "a hybrid of attention and state-space layers",
    "mamba_d_state": "state-space (Mamba) layers",
    "ssm_cfg": "state-space (Mamba) layers",
    "state_size": "state-space (Mamba) layers",
    "linear_num_value_heads": "linear-attention layers",
    "alibi": "ALiBi position biases",
    "num_kv_shared_layers": "layers that share one KV cache",
}
_REFUSED_FAMILIES = {
    "gpt_oss": "attention sinks",
    "rwkv": "recurrent layers",
    "bloom": "ALiBi position biases",
    "mpt": "ALiBi position biases",
}
_WINDOWED, _FULL = "sliding_attention", "full_attention"


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Sizes of a decoder.

    windows: one entry per layer, 0 for full attention, otherwise the number of tokens a query sees, its own included.
    softcap: cap on attention scores, 0 for none (the cap on logits is the head's).
    max_position: longest context in tokens; where long sequences get other rotary frequencies (LongRoPE), the longest
        with the original ones, since a batch of both would mix them. stop_token_ids: ids that end a completion, ascending.
    """

    family: str
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int
    vocab_size: int
    max_position: int
    windows: tuple[int, ...]
    softcap: float
    stop_token_ids: tuple[int, ...]
    has_chat_template: bool

    def kv_bytes_per_token(self, dtype: torch.dtype) -> int:
        """Bytes of keys and values that one token takes in all layers (landmarks not counted)."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * dtype.itemsize


def read_spec(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> ModelSpec:
    """The spec of a loaded model.

    Raises:
        ModelError: an unsupported architecture, or no token that ends a completion.
    """
    refuse_unsupported(model.config)
    config = model.config.get_text_config()
    heads = config.num_attention_heads
    return ModelSpec(
        family=config.model_type,
        num_layers=config.num_hidden_layers,
        num_heads=heads,
        num_kv_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
        hidden_size=config.hidden_size,
        vocab_size=config.vocab_size,
        max_position=_max_position(config),
        windows=read_windows(config),
        softcap=float(getattr(config, "attn_logit_softcapping", None) or 0.0),
        stop_token_ids=stop_token_ids(model, tokenizer),
        has_chat_template=tokenizer.chat_template is not None,
    )


def _max_position(config: PreTrainedConfig) -> int:
    """Tokens up to which every position is rotated in the same way, whatever else is in the batch."""
    longest = int(config.max_position_embeddings)
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    if rope.get("rope_type", rope.get("type")) != "longrope":
        return longest
    original = rope.get("original_max_position_embeddings") or getattr(config, "original_max_position_embeddings", None)
    return min(longest, int(original)) if original else longest


def refuse_unsupported(config: PreTrainedConfig) -> None:
    """Raise ModelError for an architecture whose attention this library does not reproduce."""
    text = config.get_text_config()
    family = text.model_type
    reason = None
    if getattr(config, "is_encoder_decoder", False):
        reason = "an encoder-decoder"
    elif family in _REFUSED_FAMILIES:
        reason = _REFUSED_FAMILIES[family]
    else:
        reason = next((what for field, what in _REFUSED_FIELDS.items() if getattr(text, field, None)), None)
        layer_types = getattr(text, "layer_types", None) or ()
        strange = sorted({kind for kind in layer_types if kind not in (_WINDOWED, _FULL)})
        if reason is None and strange:
            reason = f"layers of type {', '.join(map(repr, strange))}"
    if reason is not None:
        raise ModelError(
            f"Model family {family!r} has {reason}, which is not supported; expected a causal decoder with softmax attention over "
            f"keys and values in every layer, full or sliding-window (verified: {', '.join(VERIFIED_FAMILIES)})."
        )


def read_windows(config: PreTrainedConfig) -> tuple[int, ...]:
    """The window of each layer, 0 for full attention, from a text configuration."""
    layers = config.num_hidden_layers
    window = int(getattr(config, "sliding_window", None) or 0)
    if getattr(config, "use_sliding_window", True) is False:
        window = 0
    layer_types = getattr(config, "layer_types", None)
    if layer_types is None:
        first = getattr(config, "max_window_layers", 0) or 0
        return tuple(window if layer >= first else 0 for layer in range(layers))
    if _WINDOWED in layer_types and not window:
        raise ModelError(
            "The configuration has sliding-window layers and no sliding_window; set it to a number of tokens."
        )
    return tuple(window if kind == _WINDOWED else 0 for kind in layer_types)


def stop_token_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Ids that end a completion: of the generation configuration, the tokenizer, and the end of a turn in the chat template.

    Raises:
        ModelError: there is none, so that a completion could never end by itself.
    """
    found: set[int] = set()
    generation = getattr(model, "generation_config", None)
    for eos in (
        getattr(generation, "eos_token_id", None),
        model.config.get_text_config().eos_token_id,
        tokenizer.eos_token_id,
    ):
        if eos is not None:
            found.update([eos] if isinstance(eos, int) else eos)
    turn_end = _turn_end_id(tokenizer)
    if turn_end is not None:
        found.add(turn_end)
    if not found:
        raise ModelError(
            "The model has no end-of-sequence token: neither its generation_config, its config nor its tokenizer names one. "
            "Set tokenizer.eos_token and generation_config.eos_token_id in the model's directory."
        )
    return tuple(sorted(found))


def _turn_end_id(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """The special token that the chat template writes right after an assistant's message."""
    if tokenizer.chat_template is None:
        return None
    marker = "leanroll"
    turns = [{"role": "user", "content": "x"}, {"role": "assistant", "content": marker}]
    try:
        text = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=False)
    except jinja2.TemplateError:
        return None  # a template for other kinds of conversation; `encode_chat` reports it when it is used
    _, found, tail = str(text).rpartition(marker)
    if not found:
        return None
    special = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    return next((i for i in tokenizer.encode(tail, add_special_tokens=False) if i in special), None)
