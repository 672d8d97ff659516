"""Sections of on-policy distillation: teacher, distill."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from leanroll.config.base import Bool, Float, Int, Section

SelectionName = Literal[
    "all", "prefix", "equal_weight_full", "increasing", "random", "suffix", "middle", "top_reverse_kl", "top_forward_kl",
    "top_student_entropy", "top_teacher_entropy", "top_kl_times_student_entropy", "top_kl_times_teacher_entropy",
]  # fmt: skip
"""As `losses.selection` knows them, which loads numpy and torch and so is not imported here; a test compares them."""

WHOLE_SELECTIONS = ("all", "increasing")
"""Selections that take every token and so no number of them."""


class TeacherConfig(Section):
    """[teacher]: who scores the student's tokens. The student's own base, unless another model is named."""

    model: str | None = Field(
        None,
        min_length=1,
        description="Folder or hub id of a model with the student's tokenizer. None: the student's base (model.name).",
    )
    revision: str | None = Field(None, description="Branch, tag or commit of teacher.model. None: the default branch.")
    dtype: Literal["bfloat16", "float32"] | None = Field(None, description="Type of its weights. None: model.dtype.")
    adapter: str | None = Field(
        None,
        description="Adapter on the teacher: a folder in peft's format, or a run directory of leanroll (its latest checkpoint). "
        "None: no adapter.",
    )
    privileged: Bool = Field(
        False,
        description="The teacher sees the task's privileged prompt (hints, a worked solution); the student does not.",
    )
    system_prompt: str | None = Field(
        None, description="System message before every prompt in the teacher's context alone. None: the student's."
    )
    weights: Literal["frozen", "current"] = Field(
        "frozen",
        description="frozen: as they are at the start; current: the student's own weights of the moment, without gradient (a "
        "teacher that differs by its prompt alone).",
    )
    evaluate: Bool = Field(
        True, description="Evaluate the teacher on the held-out prompts before training, beside the student."
    )
    min_margin: Float = Field(
        0.0,
        description="Least held-out reward by which the teacher must beat the student, at the lower end of the paired 95 % "
        "interval; otherwise training does not start.",
    )
    max_first_token_kl: Float = Field(
        10.0,
        ge=0,
        description="Largest mean KL at the first token, nats, over the prompts of the preflight: more than this means that "
        "templates or stop tokens do not fit. 0: not checked.",
    )
    max_dropped_mass: Float = Field(
        0.01,
        gt=0,
        le=1,
        description="Largest mean probability that either side may put on ids that the other one does not have.",
    )
    preflight_prompts: Int = Field(32, ge=1, description="Prompts of the preflight.")
    offload: Bool = Field(
        False,
        description="Keep the teacher in the CPU's memory while it does not score. Needs a GPU and a teacher of its own.",
    )

    @property
    def is_student(self) -> bool:
        """Whether the teacher is the student's base or the student itself, so that only the prompt or an adapter differs."""
        return self.model is None and self.adapter is None

    @model_validator(mode="after")
    def _consistent(self) -> TeacherConfig:
        if self.revision is not None and self.model is None:
            raise ValueError("teacher.revision is set without teacher.model; name the model, or leave the revision out")
        if self.weights == "current" and not self.is_student:
            raise ValueError(
                "teacher.weights is 'current' but teacher.model or teacher.adapter names other weights; the current weights are "
                "the student's own. Leave out one of them"
            )
        if self.weights == "current" and not (self.privileged or self.system_prompt is not None):
            raise ValueError(
                "teacher.weights is 'current' and the teacher's prompt is the student's, so their divergence is always 0; set "
                "teacher.privileged or teacher.system_prompt"
            )
        if self.weights == "current" and self.dtype is not None:
            raise ValueError("teacher.dtype is set but has no effect: current weights have the student's type")
        return self


class GuardConfig(Section):
    """[guard]: full-length probe completions during training, compared with those before it."""

    every: Int = Field(0, ge=0, description="Steps between probes. 0: no guard.")
    num_prompts: Int = Field(8, ge=1, description="Held-out prompts of a probe.")
    num_samples: Int = Field(2, ge=1, description="Completions per prompt, each up to rollout.max_completion_length.")
    on_alarm: Literal["warn", "stop", "roll_back"] = Field(
        "warn",
        description="warn: say it and go on; stop: save and stop; roll_back: stop, and keep no checkpoint later than the last "
        "probe without an alarm.",
    )
    max_cap_rise: Float = Field(
        0.2, ge=0, le=1, description="Allowed rise of the share of completions that reach the length limit."
    )
    max_loop_rise: Float = Field(
        0.1, ge=0, le=1, description="Allowed rise of the share of completions that end in a loop."
    )
    max_repeat_rise: Float = Field(
        0.2, ge=0, le=1, description="Allowed rise of the share of tokens in repeated blocks."
    )
    max_length_factor: Float = Field(
        3.0, ge=1, description="Largest factor by which the median length may grow or shrink."
    )
    max_eos_factor: Float = Field(
        4.0,
        ge=1,
        description="Largest factor by which P(EOS), the mean probability per token of stopping there, may fall. Computing it "
        "takes one scoring forward over each probe's completions.",
    )


class AdaptConfig(Section):
    """[adapt]: N, the tokens generated per completion, moves during training, from distill.num_tokens on, at the probes of the
    collapse guard. The head is the first min_num_tokens positions, which every N generates."""

    max_num_tokens: Int = Field(0, ge=0, description="Largest N, tokens. 0: N does not adapt.")
    min_num_tokens: Int = Field(8, ge=1, description="Smallest N, tokens; also how long the head is.")
    factor: Float = Field(
        1.5, gt=1, description="N is multiplied by it to extend and divided by it to shrink, rounded."
    )
    extend_below: Float = Field(
        0.5,
        gt=0,
        description="Extend once the head's mean KL is at most this share of that at the start (1: without any fall).",
    )
    window: Int = Field(
        5, ge=1, description="Training steps over which the head's KL is averaged, at the start and now."
    )
    tail_factor: Float = Field(
        1.0,
        ge=0,
        description="Extend only while, in the probes, the KL beyond N is more than this many times the head's. 0: any KL there.",
    )
    calm_steps: Int = Field(20, ge=0, description="Steps after a shrink in which N does not extend. 0: no such time.")

    @model_validator(mode="after")
    def _consistent(self) -> AdaptConfig:
        if self.max_num_tokens and self.min_num_tokens > self.max_num_tokens:
            raise ValueError(
                f"adapt.min_num_tokens is {self.min_num_tokens}, more than adapt.max_num_tokens = {self.max_num_tokens}; lower the "
                "former or raise the latter"
            )
        return self


class DistillationConfig(Section):
    """[distill]: what is generated and how the student follows the teacher on it."""

    prompts_per_step: Int = Field(16, ge=1, description="Prompts per step.")
    num_generations: Int = Field(1, ge=1, description="Completions per prompt.")
    num_tokens: Int = Field(
        100, ge=1, description="Tokens generated per completion: rollouts really stop there, and nothing is appended."
    )
    full_rollouts: Bool = Field(
        False,
        description="Generate up to rollout.max_completion_length instead of num_tokens (a control, or for sparse rollouts).",
    )
    final_num_tokens: Int | None = Field(
        None, ge=1, description="num_tokens of the last step; it changes linearly over the steps. None: it stays."
    )
    objective: Literal["divergence", "no_teacher"] = Field(
        "divergence",
        description="divergence: follow the teacher; no_teacher: push down what the student itself finds unlikely, a control "
        "that asks no teacher in training (it is still compared and evaluated before).",
    )
    no_teacher_threshold: Float = Field(
        0.1,
        gt=0,
        le=1,
        description="Only tokens strictly below this probability under the student are pushed down. 1: all. Only for no_teacher.",
    )
    no_teacher_advantage: Float = Field(
        -1.0, lt=0, description="Advantage of those tokens in the policy gradient. Only for no_teacher."
    )
    per_prompt_tokens: Bool = Field(
        False,
        description="Every prompt names its own num_tokens (a file task: the column `num_tokens`), at most "
        "rollout.max_completion_length.",
    )
    divergence: Literal["reverse_kl", "forward_kl", "jsd"] = Field(
        "reverse_kl", description="Divergence of student and teacher over the full vocabulary, per token."
    )
    top_k: Int | None = Field(
        None,
        ge=1,
        description="Compare the teacher's k likeliest tokens, the sampled one and one bucket for all others: a lower bound of the "
        "reverse KL, for which the teacher's head is streamed once. None: the full vocabulary.",
    )
    beta: Float | None = Field(
        None, gt=0, lt=1, description="Interpolation of jsd: the teacher's share of the mixture. Only for jsd."
    )
    kl_temperature: Float = Field(1.0, gt=0, description="Divides the logits of both sides in the divergence.")
    normalizer: Literal["trajectory_mean", "token_mean", "sum"] = Field(
        "trajectory_mean",
        description="trajectory_mean: mean over a completion's tokens, then over completions; token_mean: over all tokens; sum: "
        "sum over a completion's tokens, mean over completions.",
    )
    score_stop: Bool = Field(True, description="Train on the stop token where a completion ended by itself.")
    eos_class: Bool = Field(True, description="Count the stop tokens of both sides as one outcome in the divergence.")
    selection: SelectionName = Field(
        "all", description="Which generated tokens enter the loss and with which weight; all but `all` are controls."
    )
    selected_tokens: Int | None = Field(
        None, ge=1, description="Tokens per completion that `selection` takes. None for `all` and `increasing`."
    )
    bin_tokens: Int = Field(16, ge=1, description="Width of a bin of positions in the metrics, tokens.")
    compare_full: Bool = Field(
        False,
        description="After the last step, run one more as it is and one with full rollouts, neither applied: seconds and memory of "
        "both, for the closing line.",
    )

    @model_validator(mode="after")
    def _consistent(self) -> DistillationConfig:
        if self.divergence == "jsd" and self.beta is None:
            raise ValueError("distill.divergence is 'jsd' without distill.beta; set it, 0.5 say")
        if self.divergence != "jsd" and self.beta is not None:
            raise ValueError(
                f"distill.beta is set but has no effect, because distill.divergence is {self.divergence!r}"
            )
        if self.full_rollouts and self.per_prompt_tokens:
            raise ValueError(
                "distill.full_rollouts and distill.per_prompt_tokens are both true; a rollout is either full or stops at its "
                "prompt's number of tokens. Leave out one of them"
            )
        if self.top_k is not None and self.divergence != "reverse_kl":
            raise ValueError(
                f"distill.top_k is {self.top_k} with distill.divergence {self.divergence!r}; the tail bucket is for 'reverse_kl' "
                "alone. Leave out one of them"
            )
        if self.top_k is not None and self.selection.startswith("top_"):
            raise ValueError(
                f"distill.selection is {self.selection!r}, which ranks tokens by statistics over the full vocabulary, but "
                f"distill.top_k is {self.top_k}; leave out one of them"
            )
        if not self.asks_teacher and self.selection.startswith("top_"):
            raise ValueError(
                f"distill.selection is {self.selection!r}, which ranks tokens by what the teacher says, but distill.objective is "
                "'no_teacher'; leave out one of them"
            )
        if self.selection == "equal_weight_full" and self.normalizer == "sum":
            raise ValueError(
                "distill.selection is 'equal_weight_full' with distill.normalizer 'sum', where every token weighs the same anyway; "
                "use 'all', or another normaliser"
            )
        whole = self.selection in WHOLE_SELECTIONS
        if whole and self.selected_tokens is not None:
            raise ValueError(
                f"distill.selected_tokens is set but has no effect, because distill.selection is {self.selection!r}"
            )
        if not whole and self.selected_tokens is None:
            raise ValueError(
                f"distill.selection is {self.selection!r} without distill.selected_tokens; say how many tokens it takes"
            )
        return self

    @property
    def asks_teacher(self) -> bool:
        """Whether the teacher scores the completions of a step."""
        return self.objective == "divergence"

    def tokens_at(self, step: int, num_steps: int) -> int | None:
        """Tokens generated per completion in the 1-based `step` of `num_steps`; None: full rollouts, or each prompt's own."""
        first, last = self.num_tokens, self.final_num_tokens
        if self.full_rollouts or self.per_prompt_tokens:
            return None
        if last is None or num_steps == 1:
            return first
        return round(first + (last - first) * (step - 1) / (num_steps - 1))
