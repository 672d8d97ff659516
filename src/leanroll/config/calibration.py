"""The section that says how budgets are fitted."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from leanroll.config.base import Bool, Float, Int, Section

Share = Annotated[Float, Field(gt=0, lt=1)]


class CalibrationConfig(Section):
    """[calibrate]: targets, lengths, and what they are measured on."""

    targets: tuple[Share, ...] = Field(
        (0.9,), min_length=1, description="Acceptance rates that the tail must reach; one schedule each."
    )
    quantile: Share = Field(0.05, description="Quantile of alpha over tokens that must reach the target.")
    confidence: Share = Field(
        0.9,
        description="Of the interval of that quantile (bootstrap over trajectories); its lower bound must reach the target.",
    )
    max_tokens: Int = Field(
        8192, ge=64, description="Length up to which budgets are fitted; beyond, all pages are read."
    )
    bin_pages: Int = Field(128, ge=1, description="Pages per length bin: 128 pages of 8 tokens are 1,024 tokens.")
    page_size: Literal[8, 16, 32, 64, 128] = Field(8, description="Tokens per page.")
    first_pages: Int = Field(1, ge=0, description="Pages at the start that are always read.")
    last_pages: Int = Field(
        2, ge=1, description="Pages at the end that are always read; the one being written is one of them."
    )
    dense_layers: tuple[Annotated[Int, Field(ge=0)], ...] = Field(
        (0, 1), description="Layers that always read everything."
    )
    scorer: str = Field("peak4-int4", min_length=1, description="Page scorer the budgets are for.")
    budgets: tuple[Annotated[Int, Field(ge=2)], ...] = Field(
        (), description="Budgets in pages that may be chosen. Empty: about four per doubling."
    )
    texts: tuple[str, ...] = Field(
        (),
        description="Text files, or patterns of them, that are scored in place. Empty: dense rollouts of the task are made first.",
    )
    windows_per_file: Int = Field(2, ge=1, description="Windows of max_tokens taken from one text at most.")
    trajectories: Int = Field(8, ge=2, description="Texts or completions that budgets are fitted on.")
    held_out: Int = Field(
        4, ge=0, description="Others, of other files or prompts, that the schedules are validated on. 0: none."
    )
    min_trajectories: Int = Field(4, ge=2, description="Trajectories in a bin before its interval counts.")
    continuations: Int = Field(
        64, ge=0, description="Tokens per sparse continuation of held-out prefixes, the second validation. 0: none."
    )
    warm_start: str | None = Field(
        None,
        description="Schedule (name or file) of a neighbouring model or target to begin with. None: a guess by length.",
    )
    time_budget_min: Float = Field(0.0, ge=0, description="Minutes after which no new pass begins. 0: no limit.")
    measure_speed: Bool = Field(
        True,
        description="Predict and measure, per target, how much faster rollouts decode than dense; skipped where the time budget "
        "does not suffice.",
    )
    speed_batch_size: Int = Field(
        8,
        ge=0,
        le=65536,
        description="Sequences decoded together for the speed-up, fewer where rollout.kv_memory_gib holds fewer at max_tokens. "
        "0: as many as it holds.",
    )
    distill_steps: Int = Field(
        0,
        ge=0,
        description="Updates of a sampler adapter ([sampler_adapter]) at rollout.schedule before budgets are fitted; they are "
        "then for sampling with it. 0: none is trained.",
    )
    distill_trajectories: Int = Field(
        32, ge=1, description="Other texts or completions, at most, that the adapter is trained on."
    )
    distill_tokens: Int = Field(2048, ge=2, description="First tokens of each of them that are trained on.")
    seed: Int = Field(0, ge=0, lt=2**63, description="Of the order of texts and of rollouts.")
    run_dir: str | None = Field(None, description="Folder. None: runs/<name>-<date>-<time> in the current folder.")

    @model_validator(mode="after")
    def _consistent(self) -> CalibrationConfig:
        if self.min_trajectories > self.trajectories:
            raise ValueError(
                f"min_trajectories is {self.min_trajectories}, more than trajectories = {self.trajectories}; no bin could be "
                "decided"
            )
        if len(set(self.targets)) < len(self.targets):
            raise ValueError(f"targets {list(self.targets)} has a value twice")
        if list(self.budgets) != sorted(set(self.budgets)):
            raise ValueError(f"budgets {list(self.budgets)} must ascend without repetitions")
        reserved = self.first_pages + self.last_pages
        if self.budgets and self.budgets[0] < reserved:
            raise ValueError(f"budgets begins with {self.budgets[0]} pages, fewer than the {reserved} reserved ones")
        if self.max_tokens < self.bin_pages * self.page_size:
            raise ValueError(
                f"max_tokens is {self.max_tokens}, less than one bin of {self.bin_pages} pages x {self.page_size} tokens; lower "
                "bin_pages"
            )
        if self.continuations and not self.held_out:
            raise ValueError("continuations is set but held_out is 0, so there is nothing to continue; set one of them")
        for field, because in self.inert_fields().items():
            if field in self.model_fields_set:
                raise ValueError(f"{field} is set but has no effect, because {because}; remove it or change that")
        return self

    def inert_fields(self) -> dict[str, str]:
        """Fields without effect → why; resolved files leave them out."""
        if self.distill_steps:
            return {}
        return dict.fromkeys(("distill_trajectories", "distill_tokens"), "distill_steps is 0 (no adapter is trained)")
