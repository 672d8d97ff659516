"""Sizes of a decoder as the cost model needs them: from a Hugging Face configuration, or by name. Never imports torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from leanroll.errors import ConfigError

_DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
_EXPERT_FIELDS = ("num_experts", "num_local_experts", "n_routed_experts")
# Families whose MLP is two matrices around an activation; the others have a gate as a third.
_PLAIN_MLP = frozenset({"gpt2", "gptj", "gpt_neo", "gpt_neox", "opt", "phi", "starcoder2", "nemotron"})
_WINDOWED = "sliding_attention"


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes of a dense decoder: L layers of attention (q, k, v, o products) and an MLP, then the head.

    name: for tables.
    num_heads, num_kv_heads: query heads, and KV heads, which divide them.
    tied_head: the head's weight is the embedding's; it changes the number of parameters, not the cost of a step.
    dtype_bytes: of one weight and of one cached key or value, in bytes.
    windows: one entry per layer, 0 for full attention, otherwise the tokens a query sees; empty: all full.
    mlp_matrices: 3 with a gate (Llama, Qwen, Gemma), 2 without.

    Raises:
        ConfigError: a size that is not positive, query heads that do not divide, or windows that do not match the layers.
    """

    name: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    tied_head: bool = False
    dtype_bytes: int = 2
    windows: tuple[int, ...] = ()
    mlp_matrices: int = 3

    def __post_init__(self) -> None:
        for key in (
            "num_layers", "hidden_size", "intermediate_size", "num_heads", "num_kv_heads", "head_dim", "vocab_size",
            "dtype_bytes", "mlp_matrices",
        ):  # fmt: skip
            value = getattr(self, key)
            if type(value) is not int or value < 1:
                raise ConfigError(f"model shape {self.name!r}: {key} is {value!r}; expected a positive integer.")
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                f"model shape {self.name!r}: {self.num_heads} query heads on {self.num_kv_heads} KV heads; expected a multiple."
            )
        if self.windows and (len(self.windows) != self.num_layers or min(self.windows) < 0):
            raise ConfigError(
                f"model shape {self.name!r}: windows is {self.windows}; expected {self.num_layers} entries, one per layer, "
                "0 for full attention."
            )

    @property
    def layer_parameters(self) -> int:
        """Weights of one layer's matrix products (norms and biases are left out: under 0.1 %)."""
        heads = (2 * self.num_heads + 2 * self.num_kv_heads) * self.head_dim
        return self.hidden_size * (heads + self.mlp_matrices * self.intermediate_size)

    @property
    def head_parameters(self) -> int:
        """Weights of the head's product."""
        return self.hidden_size * self.vocab_size

    @property
    def num_parameters(self) -> int:
        """All weights, the embedding included."""
        return self.num_layers * self.layer_parameters + self.head_parameters * (1 if self.tied_head else 2)

    @property
    def group_size(self) -> int:
        """Query heads per KV head."""
        return self.num_heads // self.num_kv_heads

    @property
    def kv_bytes_per_token(self) -> int:
        """Keys and values of one token in all layers, landmarks not counted."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.dtype_bytes

    @classmethod
    def from_config(
        cls, config: Mapping[str, Any], *, name: str | None = None, dtype_bytes: int | None = None
    ) -> ModelShape:
        """From a Hugging Face configuration as a dictionary (`config.json`, or `model.config.to_dict()`).

        dtype_bytes: None takes the configuration's dtype, 2 where it names none.

        Raises:
            ConfigError: a size is missing or makes no sense, or the model has experts, whose traffic depends on the routing.
        """
        nested = config.get("text_config")
        config = nested if isinstance(nested, Mapping) else config
        name = name or str(config.get("model_type", "model"))
        experts = [key for key in _EXPERT_FIELDS if (config.get(key) or 1) > 1]
        if experts:
            raise ConfigError(
                f"model {name!r} has {config[experts[0]]} experts ({experts[0]}); the cost model knows dense decoders only, since "
                "the weights a step reads would depend on the routing."
            )
        needed = (
            "num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "vocab_size",
        )  # fmt: skip
        missing = [key for key in needed if config.get(key) is None]
        if missing:
            raise ConfigError(
                f"model {name!r}: the configuration lacks {', '.join(missing)}; expected that of a causal decoder with "
                f"{', '.join(needed)}."
            )
        heads = config["num_attention_heads"]
        return cls(
            name=name,
            num_layers=config["num_hidden_layers"],
            hidden_size=config["hidden_size"],
            intermediate_size=config["intermediate_size"],
            num_heads=heads,
            num_kv_heads=config.get("num_key_value_heads") or heads,
            head_dim=config.get("head_dim") or config["hidden_size"] // heads,
            vocab_size=config["vocab_size"],
            tied_head=bool(config.get("tie_word_embeddings", False)),
            dtype_bytes=_dtype_bytes(config, name) if dtype_bytes is None else dtype_bytes,
            windows=_windows(config),
            mlp_matrices=2 if config.get("model_type") in _PLAIN_MLP else 3,
        )

    @classmethod
    def named(cls, name: str) -> ModelShape:
        """A published architecture in bf16 by name; see `shape_names`.

        Raises:
            ConfigError: the name is unknown.
        """
        if name not in _NAMED:
            raise ConfigError(
                f"model shape {name!r} is unknown; expected one of {', '.join(_NAMED)}, or build one from a configuration."
            )
        return _NAMED[name]


def _dtype_bytes(config: Mapping[str, Any], name: str) -> int:
    dtype = config.get("dtype") or config.get("torch_dtype")
    if dtype is None:
        return 2
    known = str(dtype).removeprefix("torch.")
    if known not in _DTYPE_BYTES:
        raise ConfigError(
            f"model {name!r}: dtype {known!r} is unknown; expected one of {', '.join(_DTYPE_BYTES)}, or pass dtype_bytes."
        )
    return _DTYPE_BYTES[known]


def _windows(config: Mapping[str, Any]) -> tuple[int, ...]:
    """As `leanroll.models.spec.read_windows` reads them, without torch."""
    window = int(config.get("sliding_window") or 0)
    if config.get("use_sliding_window", True) is False or not window:
        return ()
    layers = config["num_hidden_layers"]
    kinds = config.get("layer_types")
    if kinds is not None:
        return tuple(window if kind == _WINDOWED else 0 for kind in kinds)
    first = config.get("max_window_layers") or 0
    return tuple(window if layer >= first else 0 for layer in range(layers))


# name: layers, hidden, intermediate, query heads, KV heads, head dimension, vocabulary, tied head; from the models' config.json.
_SIZES: dict[str, tuple[int, int, int, int, int, int, int, bool]] = {
    "smollm2-135m": (30, 576, 1536, 9, 3, 64, 49152, True),
    "qwen3-1.7b": (28, 2048, 6144, 16, 8, 128, 151936, True),
    "qwen3-4b": (36, 2560, 9728, 32, 8, 128, 151936, True),
    "qwen3-8b": (36, 4096, 12288, 32, 8, 128, 151936, False),
    "qwen3-14b": (40, 5120, 17408, 40, 8, 128, 151936, False),
}
_NAMED = {name: ModelShape(name, *sizes) for name, sizes in _SIZES.items()}


def shape_names() -> tuple[str, ...]:
    """Names that `ModelShape.named` knows."""
    return tuple(_NAMED)
