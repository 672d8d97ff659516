"""What is read from a configuration, and which architectures are refused."""

from __future__ import annotations

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    DeepseekV3Config,
    FalconH1Config,
    GptOssConfig,
    Llama4TextConfig,
    LlamaConfig,
    MambaConfig,
    Phi3Config,
    Qwen2Config,
    Qwen3NextConfig,
    T5Config,
)

from leanroll.errors import ModelError
from leanroll.models import Policy
from leanroll.models.spec import read_windows, refuse_unsupported, stop_token_ids
from tests.tiny import tiny_model, tiny_policy, tiny_tokenizer


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (T5Config(), "encoder-decoder"),
        (DeepseekV3Config(), "MLA"),
        (Qwen3NextConfig(), "linear"),
        (MambaConfig(), "Mamba"),
        (FalconH1Config(), "Mamba"),
        (GptOssConfig(), "sinks"),
        (Llama4TextConfig(), "chunked_attention"),
        (BloomConfig(), "ALiBi"),
    ],
    ids=lambda value: value if isinstance(value, str) else value.model_type,
)
def test_unsupported_architectures_are_refused(config: object, reason: str) -> None:
    with pytest.raises(ModelError, match=reason):
        refuse_unsupported(config)  # type: ignore[arg-type]


def test_windows_of_configurations_without_layer_types() -> None:
    config = LlamaConfig(num_hidden_layers=3)
    assert read_windows(config) == (0, 0, 0)
    config.sliding_window = 128
    assert read_windows(config) == (128, 128, 128)
    assert read_windows(Qwen2Config(num_hidden_layers=2, use_sliding_window=False, sliding_window=9)) == (0, 0)


def test_windowed_layers_need_a_window() -> None:
    config = LlamaConfig(num_hidden_layers=1)
    config.layer_types = ["sliding_attention"]
    with pytest.raises(ModelError, match="sliding_window"):
        read_windows(config)


def test_sizes() -> None:
    spec = tiny_policy("qwen3").spec
    assert (spec.num_layers, spec.num_heads, spec.num_kv_heads, spec.head_dim) == (4, 4, 2, 16)
    assert spec.kv_bytes_per_token(torch.bfloat16) == 2 * 4 * 2 * 16 * 2


def test_stop_ids_of_all_sources() -> None:
    model, tokenizer = tiny_model("llama"), tiny_tokenizer()
    assert stop_token_ids(model, tokenizer) == (2,)
    model.generation_config.eos_token_id = [7, 2]
    assert stop_token_ids(model, tokenizer) == (2, 7)
    # A template whose turns end with another special token than EOS.
    tokenizer.chat_template = tokenizer.chat_template.replace("<|end|>", "<|pad|>")
    assert stop_token_ids(model, tokenizer) == (0, 2, 7)


def test_no_eos_raises() -> None:
    model, tokenizer = tiny_model("llama", eos_token_id=None), tiny_tokenizer()
    model.generation_config.eos_token_id = None
    tokenizer.eos_token = None
    tokenizer.chat_template = None
    with pytest.raises(ModelError, match="no end-of-sequence token"):
        Policy(model, tokenizer, name="endless")


def test_no_chat_template_raises_where_it_is_needed() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = None
    policy = Policy(tiny_model("llama"), tokenizer, name="base")
    assert not policy.spec.has_chat_template
    with pytest.raises(ModelError, match="no chat template"):
        policy.encode_chat([{"role": "user", "content": "x"}])


def test_longrope_ends_where_the_frequencies_change() -> None:
    """Beyond it the frequencies depend on the longest sequence of the batch, and cached keys on when they were written."""
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 8, "long_factor": [4.0] * 8}
    config = Phi3Config(
        vocab_size=259, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512, original_max_position_embeddings=64, pad_token_id=0,
        bos_token_id=1, eos_token_id=2, rope_parameters={**rope, "original_max_position_embeddings": 64},
    )  # fmt: skip
    policy = Policy(AutoModelForCausalLM.from_config(config).eval(), tiny_tokenizer(), name="longrope")
    assert policy.spec.max_position == 64
    assert tiny_policy("llama").spec.max_position == 512
