"""The section that says how a distillation is profiled, before it is trained and after."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, model_validator

from leanroll.config.base import Bool, Float, Int, Section

BEFORE_ONLY = ("decay_points", "decay_tokens", "decay_prompts", "share", "delta")
"""Options that choose N and so have no effect once a run was trained."""
AFTER_ONLY = ("teacher_completions",)
"""Options of the profile of a finished run alone."""


class ProfilingConfig(Section):
    """[profile]: prompts, prefix lengths of the teacher's decay, and what is read off the curves."""

    num_prompts: Int = Field(
        64,
        ge=2,
        description="Prompts, with one full completion each: training prompts before training, held-out prompts after.",
    )
    decay_points: Int = Field(
        4,
        ge=0,
        description="Prefix lengths k above 0 at which the teacher continues the student's completions, at quantiles of their "
        "length. 0: the decay is not measured, unless decay_tokens says where.",
    )
    decay_tokens: tuple[Annotated[Int, Field(ge=1)], ...] = Field(
        (), description="The prefix lengths themselves, tokens, ascending; k = 0 is always added. Empty: decay_points."
    )
    decay_prompts: Int = Field(
        0, ge=0, description="First prompts with which the decay is measured; each k takes two continuations. 0: all."
    )
    share: Float = Field(0.45, gt=0, le=1, description="Share of the total KL that the first N tokens are to hold.")
    delta: Float = Field(
        0.1,
        ge=0,
        le=1,
        description="Share of the teacher's lead over the student that it may lose by a prefix, for the decay threshold.",
    )
    teacher_completions: Bool = Field(
        True,
        description="After training: the teacher completes the prompts too, for its lengths and repetitions. false: left out.",
    )
    level: Float = Field(0.95, gt=0, lt=1, description="Of all bootstrap intervals.")
    bin_tokens: Int = Field(16, ge=1, description="Width of a bin of positions in the curves, tokens.")
    micro_batch_tokens: Int = Field(
        4096, ge=1, description="Tokens per scoring forward; one longer sequence gets a forward of its own."
    )
    seed: Int = Field(0, ge=0, lt=2**63, description="Seed of prompts, draws and bootstraps.")
    run_dir: str | None = Field(
        None,
        description="Folder of the results. None: runs/<name>-profile-<date>-<time> in the current folder; after training "
        "the folder `profile` of the run.",
    )

    @model_validator(mode="after")
    def _consistent(self) -> ProfilingConfig:
        if any(b <= a for a, b in zip(self.decay_tokens, self.decay_tokens[1:], strict=False)):
            raise ValueError(
                f"profile.decay_tokens is {list(self.decay_tokens)}; expected ascending lengths, such as [25, 50, 100]"
            )
        for field, because in self.inert_fields().items():
            if field in self.model_fields_set:
                raise ValueError(f"profile.{field} is set but has no effect, because {because}; leave out one of them")
        return self

    @property
    def measures_decay(self) -> bool:
        """Whether the teacher continues the student's completions."""
        return self.decay_points > 0 or bool(self.decay_tokens)

    def inert_fields(self) -> dict[str, str]:
        """Fields without effect → why; resolved files leave them out."""
        if self.decay_tokens:
            return {"decay_points": "profile.decay_tokens names the lengths"}
        if self.decay_points == 0:
            return dict.fromkeys(("decay_prompts", "delta"), "profile.decay_points is 0 (the decay is not measured)")
        return {}
