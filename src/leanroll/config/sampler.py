"""The section of the sampler's own adapter: to train it, and to sample with a trained one."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from leanroll.config.base import Float, Int, Section


class SamplerAdapterConfig(Section):
    """[sampler_adapter]: a second adapter, on only where attention is sparse (DistillSparse). Off unless r or path is set.

    It is trained after every update of the policy, on the same completions, with ppo_weight · (clipped policy loss of the sparse
    sampler) + kl_weight · KL(sparse ‖ dense). AdamW's betas, eps, weight decay and gradient clipping are those of [optimizer].
    """

    r: Int = Field(0, ge=0, le=4096, description="Rank of the sampler's adapter. 0: none, unless path names one.")
    alpha: Float = Field(
        64.0, gt=0, description="Scale of the sampler's adapter; its product is multiplied by alpha / r."
    )
    target_modules: Literal["all-linear"] | tuple[str, ...] = Field(
        "all-linear", description="all-linear (every linear layer but the head), or a list of module name endings."
    )
    path: str | None = Field(
        None,
        description="Folder of a sampler adapter to continue from (`leanroll calibrate --distill-sparse` makes one); its own r, "
        "alpha and targets count. None: a new one, if r is set.",
    )
    learning_rate: Float = Field(2e-4, gt=0, le=1, description="Learning rate of the sampler's adapter, constant.")
    kl_weight: Float = Field(
        1.0, ge=0, description="lambda: weight of the KL of the sparse sampler to the dense policy. 0: no KL."
    )
    ppo_weight: Float = Field(
        1.0, ge=0, description="Weight of the policy loss of the sparse sampler. 0: none, the KL alone is trained."
    )
    tail_weighting: Literal["none", "cvar", "one_minus_alpha"] = Field(
        "none",
        description="Tokens of the KL: none weights all alike, cvar takes the worst tail_share of them by acceptance, "
        "one_minus_alpha weights each with 1 - its acceptance. All but none cost one more sparse pass.",
    )
    tail_share: Float = Field(0.05, gt=0, le=1, description="Share of the tokens that cvar takes.")

    @property
    def is_on(self) -> bool:
        """Whether there is such an adapter."""
        return self.r > 0 or self.path is not None

    @model_validator(mode="after")
    def _consistent(self) -> SamplerAdapterConfig:
        if self.r and self.path is not None:
            raise ValueError(
                f"r is {self.r} and path is {self.path!r}, whose adapter has its own rank; remove one of them"
            )
        if self.is_on and not (self.kl_weight or self.ppo_weight):
            raise ValueError("kl_weight and ppo_weight are both 0, so nothing would be trained; set one of them")
        return self


class SavedSamplerConfig(Section):
    """[sampler_adapter] where nothing is trained: of a training recipe's table, only `path` counts. A new adapter (r) would change
    no sample."""

    path: str | None = Field(
        None,
        description="Folder of the sampler adapter to sample with: RUN/sampler_adapter of `leanroll calibrate --distill-sparse`, "
        "or sampler/ in a checkpoint of `leanroll rl`. None: none.",
    )

    @property
    def is_on(self) -> bool:
        """Whether there is such an adapter."""
        return self.path is not None
