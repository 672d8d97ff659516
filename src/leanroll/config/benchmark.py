"""The section that says what `leanroll bench` measures."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from leanroll.config.base import Int, Section

PeerName = Literal["transformers", "vllm", "llama_cpp"]
OWN_PYTHON = ("vllm", "llama_cpp")
"""Peers that run with the Python of an environment of their own."""


class BenchmarkConfig(Section):
    """[bench]: work, repetitions, and what stands beside the measurement."""

    batch: Int = Field(
        8,
        ge=0,
        le=65536,
        description="Sequences decoded together. 0: as many as rollout.kv_memory_gib holds at the last length.",
    )
    lengths: tuple[Annotated[Int, Field(ge=1)], ...] = Field(
        (256, 1024, 2048, 4096), min_length=2, description="Tokens that the timed sequences end with, ascending."
    )
    prompt_length: Int | None = Field(
        None,
        ge=1,
        description="Tokens at which the trajectory begins; it ends at the last length. None: the first length.",
    )
    steps: Int = Field(12, ge=1, description="Decode steps timed per length, round and kind; four more warm up.")
    rounds: Int = Field(
        3, ge=1, description="Rounds in which dense and sparse alternate; a ratio is taken within a round."
    )
    device: Literal["auto", "none", "h100", "h200", "b200"] = Field(
        "auto",
        description="What the cost model predicts for. auto: the CPU at hand, measured first; on a GPU nothing. A name: that GPU's "
        "datasheet. none: no prediction.",
    )
    peers: tuple[PeerName, ...] = Field(
        (),
        description="Other engines on the same prompts, lengths and batch: transformers (in this process), vllm, llama_cpp (with "
        "bench.peer_python). Several as a,b or a list.",
    )
    peer_python: dict[Literal["vllm", "llama_cpp"], str] = Field(
        default_factory=dict, description="Python of a peer's own environment: vllm=/path/to/python, or a table."
    )
    peer_steps: Int = Field(6, ge=1, description="Steps timed per length and round of a peer; one more warms up.")
    peer_rounds: Int = Field(1, ge=1, description="Rounds, from the first on, that the peers take part in.")
    gguf: str | None = Field(
        None, description="GGUF file that llama_cpp runs. None: the one that the embedded default model was made from."
    )
    seed: Int = Field(0, ge=0, lt=2**63, description="Of random keys and values, and of draws.")

    @field_validator("peers", mode="before")
    @classmethod
    def _one_or_several(cls, value: Any) -> Any:
        return tuple(part.strip() for part in value.split(",")) if isinstance(value, str) else value

    @field_validator("peer_python", mode="before")
    @classmethod
    def _pairs(cls, value: Any) -> Any:
        """`vllm=/a,llama_cpp=/b` and lists of such pairs, beside tables."""
        pairs = value.split(",") if isinstance(value, str) else value
        if not isinstance(pairs, list | tuple):
            return pairs
        found = [str(pair).partition("=") for pair in pairs]
        wrong = [str(pair) for pair, (_, equals, python) in zip(pairs, found, strict=True) if not (equals and python)]
        if wrong:
            raise ValueError(f"{wrong[0]!r} is not NAME=PYTHON, such as vllm=/opt/vllm/bin/python")
        return {name.strip(): python.strip() for name, _, python in found}

    @model_validator(mode="after")
    def _consistent(self) -> BenchmarkConfig:
        if list(self.lengths) != sorted(set(self.lengths)):
            raise ValueError(f"lengths {list(self.lengths)} must ascend without repetitions")
        if len(set(self.peers)) < len(self.peers):
            raise ValueError(f"peers {list(self.peers)} has a name twice")
        for name in OWN_PYTHON:
            if name in self.peers and name not in self.peer_python:
                raise ValueError(
                    f"peers has {name}, which runs in an environment of its own; give peer_python {name}=/path/to/python"
                )
            if name in self.peer_python and name not in self.peers:
                raise ValueError(f"peer_python names {name}, which has no effect because peers does not; add it there")
        if self.gguf is not None and "llama_cpp" not in self.peers:
            raise ValueError("gguf is set but has no effect, because peers does not name llama_cpp")
        for option in ("peer_steps", "peer_rounds"):
            if option in self.model_fields_set and not self.peers:
                raise ValueError(f"{option} is set but has no effect, because peers is empty")
        if self.peers and self.peer_rounds > self.rounds:
            raise ValueError(f"peer_rounds is {self.peer_rounds}, more than rounds = {self.rounds}")
        return self
