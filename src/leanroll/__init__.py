"""leanroll: post-training of language models with lean rollouts."""

__version__ = "0.1.0"
