"""The section of the collapse alarm of RL."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from leanroll.config.base import Float, Int, Section

MIN_REFERENCE = 3
"""Fewest values that a signal's reference is made of."""


class AlarmConfig(Section):
    """[alarm]: signs of collapse in a step's own metrics, compared with those of the steps before."""

    on_alarm: Literal["off", "warn", "stop", "roll_back"] = Field(
        "warn",
        description="off: nothing is watched; warn: say it and go on; stop: save and stop; roll_back: stop, and keep no checkpoint "
        "later than the last step without a sign.",
    )
    reference: Literal["trailing", "start"] = Field(
        "trailing",
        description="What steps are compared with: trailing, the window before the recent ones, which healthy learning moves "
        "along; start, the first window of the run, which a slow collapse cannot move.",
    )
    window: Int = Field(
        20, ge=MIN_REFERENCE, description="Steps of the reference; before they are over nothing is judged."
    )
    patience: Int = Field(5, ge=1, description="Steps in a row that a sign must last before it counts.")
    num_mads: Float = Field(
        3.0,
        ge=0,
        description="A sign is also further from the reference's median than this many of its median absolute deviations. 0: noise "
        "is not looked at.",
    )
    length_factor: Float = Field(
        2.0, ge=0, description="Factor by which the mean completion may shrink or grow, above 1. 0: not watched."
    )
    entropy_factor: Float = Field(
        2.0, ge=0, description="Factor by which the policy's entropy may fall or rise, above 1. 0: not watched."
    )
    reward_drop: Float = Field(
        0.45, ge=0, le=1, description="Share of the mean reward's size that may be lost. 0: not watched."
    )
    tail_drop: Float = Field(
        0.1, ge=0, lt=1, description="How far the 5th percentile of acceptance may fall. 0: not watched."
    )
    kl_growth: Float = Field(
        2.0,
        ge=0,
        description="How far the sampler's KL may come to rise from the first positions to the last, in multiples of its usual "
        "mean. 0: not watched.",
    )
    hard: Float = Field(
        2.0,
        gt=1,
        description="One sign this many times past its limit (for factors: the limit to this power) is an alarm by itself; "
        "otherwise it takes two signs together.",
    )

    @model_validator(mode="after")
    def _consistent(self) -> AlarmConfig:
        for name in ("length_factor", "entropy_factor"):
            value = getattr(self, name)
            if 0 < value <= 1:
                raise ValueError(f"alarm.{name} is {value}; expected a factor above 1, or 0 to leave it out")
        watched = (self.length_factor, self.entropy_factor, self.reward_drop, self.tail_drop, self.kl_growth)
        if self.on_alarm != "off" and not any(watched):
            raise ValueError("every sign of [alarm] is 0, so nothing is watched; set alarm.on_alarm to 'off'")
        return self
