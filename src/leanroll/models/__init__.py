"""Hugging Face models, unchanged: loading, adapters, the attention hook, the head, and the embedded default model."""

from leanroll.models.attention import AttentionCall, AttentionContext, install_attention
from leanroll.models.default import DEFAULT_MODEL
from leanroll.models.head import LmHead
from leanroll.models.load import load_policy
from leanroll.models.lora import LoraSpec
from leanroll.models.policy import Policy
from leanroll.models.sampler import SamplerAdapter
from leanroll.models.spec import ModelSpec
from leanroll.models.verify import CausalContext

__all__ = [
    "DEFAULT_MODEL",
    "AttentionCall",
    "AttentionContext",
    "CausalContext",
    "LmHead",
    "LoraSpec",
    "ModelSpec",
    "Policy",
    "SamplerAdapter",
    "install_attention",
    "load_policy",
]
