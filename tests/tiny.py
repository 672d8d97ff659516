"""Tiny random models of each family, with a real tokenizer, built offline: `tiny_policy("qwen3")`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
)

from leanroll.models import LoraSpec, Policy

FAMILIES = ("llama", "qwen2", "qwen3", "gemma2", "gemma3")
WINDOW = 8
"""Sliding window of the tiny Gemma models, in tokens."""

_SPECIAL = ("<|pad|>", "<|start|>", "<|end|>")
_TEMPLATE = (
    "{% for message in messages %}{{ '<|start|>' + message['role'] + '\n' + message['content'] + '<|end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>assistant\n' }}{% endif %}"
)
_COMMON: dict[str, Any] = {
    "vocab_size": len(_SPECIAL) + 256,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    # Large enough for attention to be far from uniform.
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_FAMILY: dict[str, tuple[type[PreTrainedConfig], dict[str, Any]]] = {
    "llama": (LlamaConfig, {}),
    "qwen2": (Qwen2Config, {}),
    "qwen3": (Qwen3Config, {"tie_word_embeddings": True}),
    "gemma2": (
        Gemma2Config,
        {
            "sliding_window": WINDOW,
            "attn_logit_softcapping": 5.0,
            "final_logit_softcapping": 3.0,
            "query_pre_attn_scalar": 16,
        },
    ),
    "gemma3": (Gemma3TextConfig, {"sliding_window": WINDOW, "query_pre_attn_scalar": 16, "sliding_window_pattern": 2}),
}


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level, no merges: one token per byte, three special tokens (pad 0, start 1, end 2), a chat template."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate([*_SPECIAL, *alphabet])}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in _SPECIAL])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<|pad|>",
        bos_token="<|start|>",
        eos_token="<|end|>",
        chat_template=_TEMPLATE,
    )


def tiny_model(family: str, *, dtype: torch.dtype = torch.float32, seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """A random causal LM: 4 layers, width 64, 4 query heads on 2 KV heads of 16. Overrides are fields of its configuration."""
    config_class, special = _FAMILY[family]
    config = config_class(**{**_COMMON, **special, **overrides})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                # Norm weights and biases start constant: make them matter too.
                if parameter.dim() == 1:
                    parameter.add_(0.1 * torch.randn_like(parameter), alpha=1.0 if "norm" in name else 3.0)
    return model.to(dtype).eval()


def tiny_policy(
    family: str, *, adapter: bool = False, dtype: torch.dtype = torch.float32, seed: int = 0, **overrides: Any
) -> Policy:
    """A policy around `tiny_model`. With adapter=True a LoRA adapter of rank 4 that already has an effect."""
    model = tiny_model(family, dtype=dtype, seed=seed, **overrides)
    policy = Policy(
        model, tiny_tokenizer(), name=f"tiny-{family}", adapter=LoraSpec(r=4, alpha=8.0, seed=seed) if adapter else None
    )
    if adapter:
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(seed + 1)
            for name, parameter in policy.trainable_parameters().items():
                if "lora_B" in name:
                    parameter.normal_(std=0.1)
    return policy


def save_sampler(folder: Path, policy: Policy, seed: int = 3) -> Path:
    """Write a sampler adapter of rank 2 that has an effect; the policy has it from then on. Returns the folder."""
    sampler = policy.add_sampler(LoraSpec(r=2, alpha=16.0, seed=seed))
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        for b in sampler.b:
            b.normal_(std=0.1)
    sampler.save(folder)
    return folder
