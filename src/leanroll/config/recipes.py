"""Whole recipes, one per verb, and the rules between their fields."""

from __future__ import annotations

import math
from typing import Literal, TypeVar

from pydantic import Field, model_validator

from leanroll.config.alarm import AlarmConfig
from leanroll.config.base import Int, Section
from leanroll.config.benchmark import BenchmarkConfig
from leanroll.config.calibration import CalibrationConfig
from leanroll.config.distillation import AdaptConfig, DistillationConfig, GuardConfig, TeacherConfig
from leanroll.config.inert import SCORELESS, reject_inert
from leanroll.config.profile import AFTER_ONLY, BEFORE_ONLY, ProfilingConfig
from leanroll.config.sampler import SamplerAdapterConfig, SavedSamplerConfig
from leanroll.config.sections import AdapterConfig, ModelConfig, RolloutConfig, TaskConfig
from leanroll.config.training import AlgorithmConfig, EvalConfig, MeasureConfig, OptimizerConfig, TrainConfig


class RLConfig(Section):
    """Everything `leanroll rl` needs."""

    name: str = Field(
        "rl", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", description="Name of the run; starts its folder's name."
    )
    model: ModelConfig = ModelConfig()
    adapter: AdapterConfig = AdapterConfig()
    sampler_adapter: SamplerAdapterConfig = SamplerAdapterConfig()
    task: TaskConfig = TaskConfig()
    rollout: RolloutConfig = RolloutConfig()
    rl: AlgorithmConfig = AlgorithmConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    train: TrainConfig = TrainConfig()
    measure: MeasureConfig = MeasureConfig()
    alarm: AlarmConfig = AlarmConfig()
    eval: EvalConfig = EvalConfig()

    @model_validator(mode="after")
    def _consistent(self) -> RLConfig:
        rl, optimizer, rollout = self.rl, self.optimizer, self.rollout
        if rl.num_generations == 1 and rl.scale_rewards == "group":
            raise ValueError(
                "rl.num_generations is 1 and rl.scale_rewards is 'group'; the std of one reward is 0 and nothing would be "
                "learned. Sample at least 2 completions per prompt"
            )
        if rl.num_generations == 1:
            raise ValueError(
                "rl.num_generations is 1; the advantage is relative to the group's mean, so it needs at least 2"
            )
        if rl.num_mini_batches > rl.prompts_per_step:
            raise ValueError(
                f"rl.num_mini_batches is {rl.num_mini_batches} but a step has only {rl.prompts_per_step} groups "
                "(rl.prompts_per_step); an update needs at least one group"
            )
        if rl.delta is not None and rl.delta <= 1 + rl.epsilon_high:
            raise ValueError(
                f"rl.delta is {rl.delta}; the dual clip must lie above 1 + epsilon_high = {1 + rl.epsilon_high:g}"
            )
        if rl.resample_zero_std and not rl.filter_zero_std:
            raise ValueError(
                "rl.resample_zero_std replaces dropped groups, but rl.filter_zero_std is false; set it to true"
            )
        if rl.train_generations == 1 or rl.train_generations > rl.num_generations:
            raise ValueError(
                f"rl.train_generations is {rl.train_generations}; expected 2 to rl.num_generations = {rl.num_generations}, or 0 "
                "for all of them"
            )
        if rollout.control == "hold" and rollout.schedule == "dense":
            raise ValueError(
                "rollout.control is 'hold' and rollout.schedule is 'dense', which has no length bins to move; start with a preset "
                "or a file (budgets larger than any completion read every page, too)"
            )
        if rl.overlong_buffer > rollout.max_completion_length:
            raise ValueError(
                f"rl.overlong_buffer is {rl.overlong_buffer}, more than rollout.max_completion_length = "
                f"{rollout.max_completion_length}; even an empty completion would be penalised"
            )
        _check_rejection(rl)
        _check_training(optimizer, self.train, rollout.max_completion_length, "rollout.max_completion_length")
        _check_alarm(self.alarm, self.train)
        if rollout.temperature == 0:
            raise ValueError(
                "rollout.temperature is 0 (greedy); all completions of a group would be equal. Train at 1.0, and use "
                "eval.temperature = 0 for greedy evaluation"
            )
        _reject_dense_sampler(self)
        reject_inert(self)
        return self


class DistillConfig(Section):
    """Everything `leanroll distill` needs. rollout.max_completion_length bounds full rollouts and held-out completions; training
    rollouts stop at distill.num_tokens."""

    name: str = Field(
        "distill", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", description="Name of the run; starts its folder's name."
    )
    model: ModelConfig = ModelConfig()
    adapter: AdapterConfig = AdapterConfig()
    teacher: TeacherConfig = TeacherConfig()
    task: TaskConfig = TaskConfig()
    rollout: RolloutConfig = RolloutConfig()
    distill: DistillationConfig = DistillationConfig()
    guard: GuardConfig = GuardConfig()
    adapt: AdaptConfig = AdaptConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    train: TrainConfig = TrainConfig()
    eval: EvalConfig = EvalConfig()

    @model_validator(mode="after")
    def _consistent(self) -> DistillConfig:
        distill, rollout, teacher = self.distill, self.rollout, self.teacher
        full = rollout.max_completion_length
        limited = not (distill.full_rollouts or distill.per_prompt_tokens)
        for name in ("num_tokens", "final_num_tokens"):
            tokens = getattr(distill, name)
            if limited and tokens is not None and tokens > full:
                raise ValueError(
                    f"distill.{name} is {tokens}, more than rollout.max_completion_length = {full}, the length of a full rollout; "
                    "lower the former or raise the latter"
                )
        if rollout.temperature == 0 and distill.num_generations > 1:
            raise ValueError(
                f"rollout.temperature is 0 (greedy) and distill.num_generations is {distill.num_generations}; greedy completions "
                "are all equal. Raise the temperature, or sample one"
            )
        longest = full if distill.full_rollouts else max(distill.num_tokens, distill.final_num_tokens or 0)
        limit = "rollout.max_completion_length" if distill.full_rollouts else "distill.num_tokens"
        if distill.per_prompt_tokens:
            longest = 1  # the trainer reads them
        if self.adapt.max_num_tokens:
            _check_adapt(self)
            longest, limit = self.adapt.max_num_tokens, "adapt.max_num_tokens"
        _check_training(self.optimizer, self.train, longest, limit)
        if self.guard.every and self.guard.on_alarm == "roll_back":
            _check_roll_back(self.guard.every, self.train)
        _check_teacher(teacher, self.adapter)
        reject_inert(self)
        return self


class ProfileConfig(Section):
    """Everything `leanroll profile` needs: a recipe of `leanroll distill` without its training. All completions are drawn as
    [rollout] says, full ones up to rollout.max_completion_length."""

    name: str = Field(
        "distill", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", description="Name of the run; starts its folder's name."
    )
    model: ModelConfig = ModelConfig()
    adapter: AdapterConfig = AdapterConfig()
    teacher: TeacherConfig = TeacherConfig()
    task: TaskConfig = TaskConfig()
    rollout: RolloutConfig = RolloutConfig()
    distill: DistillationConfig = DistillationConfig()
    profile: ProfilingConfig = ProfilingConfig()

    @model_validator(mode="after")
    def _consistent(self) -> ProfileConfig:
        _check_teacher(self.teacher, self.adapter)
        _reject_scorer(self)
        full, tokens = self.rollout.max_completion_length, self.profile.decay_tokens
        if tokens and tokens[-1] >= full:
            raise ValueError(
                f"profile.decay_tokens goes up to {tokens[-1]}, but completions have at most rollout.max_completion_length = "
                f"{full} tokens, so that nothing would be left to continue; lower the former or raise the latter"
            )
        for field, because in self.inert_profile_options().items():
            if field in self.profile.model_fields_set:
                raise ValueError(f"profile.{field} is set but has no effect, because {because}")
        return self

    def inert_profile_options(self) -> dict[str, str]:
        """Fields of [profile] without effect → why; setting one is an error, and resolved files leave it out."""
        before = "this profile is made before training; give the folder of a run to profile it after training"
        return {**self.profile.inert_fields(), **dict.fromkeys(AFTER_ONLY, before)}


class RunProfileConfig(ProfileConfig):
    """Everything `leanroll profile` needs of a run that was trained: the run's recipe without its training."""

    def inert_profile_options(self) -> dict[str, str]:
        """As before training."""
        return dict.fromkeys(BEFORE_ONLY, "the run was trained already; they choose the number of tokens before that")


class GenerateConfig(Section):
    """Everything `leanroll rollout` needs."""

    model: ModelConfig = ModelConfig()
    adapter: AdapterConfig = AdapterConfig()
    sampler_adapter: SavedSamplerConfig = SavedSamplerConfig()
    task: TaskConfig = TaskConfig()
    rollout: RolloutConfig = RolloutConfig()
    num_samples: Int = Field(1, ge=1, description="Completions per prompt.")
    num_prompts: Int = Field(0, ge=0, description="Prompts used, from the start of the file or split. 0: all of them.")
    num_top_logprobs: Int = Field(0, ge=0, le=256, description="Likeliest tokens written per position. 0: none.")
    split: Literal["eval", "train"] = Field("eval", description="Split of the task, when the prompts come from one.")
    seed: Int = Field(0, ge=0, lt=2**63, description="Seed of the draws.")

    @model_validator(mode="after")
    def _consistent(self) -> GenerateConfig:
        if self.rollout.temperature == 0 and self.num_samples > 1:
            raise ValueError(
                f"rollout.temperature is 0 and num_samples is {self.num_samples}; greedy completions are all equal, so set "
                "num_samples = 1 or raise the temperature"
            )
        _reject_dense_sampler(self)
        _reject_scorer(self)
        return self


class EvaluateConfig(Section):
    """Everything `leanroll eval` needs. Sampling comes from [eval] where it has the field, otherwise from [rollout]."""

    model: ModelConfig = ModelConfig()
    adapter: AdapterConfig = AdapterConfig()
    sampler_adapter: SavedSamplerConfig = SavedSamplerConfig()
    task: TaskConfig = TaskConfig()
    rollout: RolloutConfig = RolloutConfig()
    eval: EvalConfig = EvalConfig()

    @model_validator(mode="after")
    def _consistent(self) -> EvaluateConfig:
        _reject_dense_sampler(self)
        _reject_scorer(self)
        return self


class CalibrateConfig(Section):
    """Everything `leanroll calibrate` needs. Of [rollout], temperature, KV type and memory count; the schedule is what is made (and
    what a sampler adapter is trained at before, where calibrate.distill_steps says so)."""

    name: str = Field(
        "calibration", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", description="Name of the run and of its schedules."
    )
    model: ModelConfig = ModelConfig()
    adapter: AdapterConfig = AdapterConfig()
    task: TaskConfig = TaskConfig()
    sampler_adapter: SamplerAdapterConfig = SamplerAdapterConfig()
    rollout: RolloutConfig = RolloutConfig()
    calibrate: CalibrationConfig = CalibrationConfig()

    @model_validator(mode="after")
    def _consistent(self) -> CalibrateConfig:
        if not self.calibrate.distill_steps:
            return self
        if not self.sampler_adapter.is_on:
            raise ValueError(
                "calibrate.distill_steps trains a sampler adapter, but none is set; give sampler_adapter.r (32, say) or path"
            )
        if not self.sampler_adapter.kl_weight:
            raise ValueError("calibrate.distill_steps trains the KL alone, but sampler_adapter.kl_weight is 0; set it")
        if self.rollout.schedule == "dense":
            raise ValueError(
                "calibrate.distill_steps trains a sampler adapter at rollout.schedule, which is 'dense', so that it would have no "
                "effect; name a sparse schedule"
            )
        return self


class BenchConfig(Section):
    """Everything `leanroll bench` needs. Of [rollout]: schedule, scorer, kernel, kv_memory_gib and kv_dtype. A sampler adapter
    counts on the sparse side."""

    model: ModelConfig = ModelConfig()
    adapter: AdapterConfig = AdapterConfig()
    sampler_adapter: SavedSamplerConfig = SavedSamplerConfig()
    rollout: RolloutConfig = RolloutConfig()
    bench: BenchmarkConfig = BenchmarkConfig()

    @model_validator(mode="after")
    def _consistent(self) -> BenchConfig:
        if self.rollout.schedule == "dense":
            raise ValueError(
                "rollout.schedule is 'dense', so there is nothing to compare; give a preset or a JSON file with "
                "--rollout.schedule (`leanroll calibrate` makes one)"
            )
        if self.adapter.type == "none" and self.adapter.path is not None:
            raise ValueError(
                "adapter.path is set but has no effect, because adapter.type is 'none'; remove one of them"
            )
        if self.bench.peers and self.adapter.path is not None:
            raise ValueError("bench.peers run the plain model, but adapter.path is set; leave out one of them")
        if "llama_cpp" in self.bench.peers and self.bench.gguf is None and self.model.name != "smollm2-135m":
            raise ValueError(
                f"bench.peers has llama_cpp, which needs the model {self.model.name!r} as a GGUF file; give it as bench.gguf"
            )
        return self


class DoctorConfig(Section):
    """What `leanroll doctor` looks at."""

    model: ModelConfig = ModelConfig()
    rollout: RolloutConfig = RolloutConfig()


TrainingRecipe = RLConfig | DistillConfig
Recipe = TrainingRecipe | ProfileConfig | GenerateConfig | EvaluateConfig | CalibrateConfig | BenchConfig | DoctorConfig
RecipeT = TypeVar(
    "RecipeT",
    RLConfig,
    DistillConfig,
    ProfileConfig,
    RunProfileConfig,
    GenerateConfig,
    EvaluateConfig,
    CalibrateConfig,
    BenchConfig,
    DoctorConfig,
)


def _check_adapt(config: DistillConfig) -> None:
    adapt, distill, full = config.adapt, config.distill, config.rollout.max_completion_length
    others = {
        "distill.full_rollouts is true": distill.full_rollouts,
        "distill.per_prompt_tokens is true": distill.per_prompt_tokens,
        "distill.final_num_tokens is set": distill.final_num_tokens is not None,
    }
    for other in (text for text, holds in others.items() if holds):
        raise ValueError(
            f"adapt.max_num_tokens is {adapt.max_num_tokens} and {other}; N either adapts or is said. Leave out one"
        )
    if not distill.asks_teacher:
        raise ValueError(
            f"adapt.max_num_tokens is {adapt.max_num_tokens} and distill.objective is {distill.objective!r}; N adapts to the KL "
            "from the teacher, which is not asked then. Leave out one of them"
        )
    if not config.guard.every:
        raise ValueError(
            f"adapt.max_num_tokens is {adapt.max_num_tokens}, but guard.every is 0; N moves at the guard's probes alone. Set "
            "guard.every, 20 say, or leave [adapt] out"
        )
    if config.guard.on_alarm == "roll_back":
        raise ValueError(
            "guard.on_alarm is 'roll_back' with [adapt]; the way back would forget the alarm, and the shrink that answers it. Use "
            "'warn', or 'stop'"
        )
    if not adapt.min_num_tokens <= distill.num_tokens <= adapt.max_num_tokens:
        raise ValueError(
            f"distill.num_tokens is {distill.num_tokens}, where N starts; expected {adapt.min_num_tokens} to "
            f"{adapt.max_num_tokens} (adapt.min_num_tokens, adapt.max_num_tokens)"
        )
    if adapt.max_num_tokens > full:
        raise ValueError(
            f"adapt.max_num_tokens is {adapt.max_num_tokens}, more than rollout.max_completion_length = {full}, the length of a "
            "full rollout; lower the former or raise the latter"
        )


def _check_roll_back(every: int, train: TrainConfig) -> None:
    """Every probe without an alarm must leave a checkpoint of its step, which must still be there at the next probe."""
    if train.save_every == 0 or every % train.save_every:
        raise ValueError(
            f"guard.on_alarm is 'roll_back' and guard.every = {every} is no multiple of train.save_every = {train.save_every}; a "
            "probe without an alarm needs a checkpoint of its step to go back to"
        )
    if 0 < train.keep_checkpoints < every // train.save_every:
        raise ValueError(
            f"guard.on_alarm is 'roll_back', but of the {every // train.save_every} checkpoints between two probes "
            f"train.keep_checkpoints keeps {train.keep_checkpoints}; raise it, so that the one of the last probe is still there"
        )


def _check_rejection(rl: AlgorithmConfig) -> None:
    """Bounds that another one makes superfluous would be options without effect."""
    for side, beyond in (("high", lambda mean, token: mean >= token), ("low", lambda mean, token: mean <= token)):
        mean, token = getattr(rl, f"geo_mask_{side}"), getattr(rl, f"token_veto_{side}")
        if mean is not None and token is not None and beyond(mean, token):
            raise ValueError(
                f"rl.geo_mask_{side} is {mean} and rl.token_veto_{side} is {token}; where no token passes the latter, no mean "
                f"passes the former. Put rl.geo_mask_{side} nearer to 1, or leave it out"
            )
    if rl.m2_threshold is not None and rl.token_veto_low is not None and rl.token_veto_high is not None:
        largest = max(math.log(rl.token_veto_low) ** 2, math.log(rl.token_veto_high) ** 2)
        if largest <= rl.m2_threshold:
            raise ValueError(
                f"rl.m2_threshold is {rl.m2_threshold}, but rl.token_veto_low and rl.token_veto_high leave no token with a squared "
                f"log ratio above {largest:.3g}; lower it, or leave it out"
            )


def _check_alarm(alarm: AlarmConfig, train: TrainConfig) -> None:
    """Going back needs a checkpoint from before the alarm's signs, usually `patience` steps old."""
    if alarm.on_alarm != "roll_back":
        return
    if not 0 < train.save_every <= alarm.window:
        raise ValueError(
            f"alarm.on_alarm is 'roll_back' and train.save_every is {train.save_every}; expected 1 to alarm.window = "
            f"{alarm.window} steps, so that there is a checkpoint to go back to"
        )
    if train.keep_checkpoints > 0 and (train.keep_checkpoints - 1) * train.save_every < alarm.patience - 1:
        need = 1 + -(-(alarm.patience - 1) // train.save_every)
        raise ValueError(
            f"alarm.on_alarm is 'roll_back', but the {train.keep_checkpoints} checkpoints that train.keep_checkpoints keeps can "
            f"all be from the alarm.patience = {alarm.patience} steps in which the alarm builds up; keep {need} or more, or 0 "
            "for all"
        )


def _check_training(optimizer: OptimizerConfig, train: TrainConfig, longest: int, limit: str) -> None:
    """longest: completion tokens, bounded by the option `limit`."""
    if optimizer.warmup_steps > train.steps:
        raise ValueError(
            f"optimizer.warmup_steps is {optimizer.warmup_steps}, more than train.steps = {train.steps}; the peak "
            "learning rate would never be reached"
        )
    # A completion's last token is predicted, not fed: with a prompt of one token, as many inputs as completion tokens.
    if longest > train.micro_batch_tokens:
        raise ValueError(
            f"train.micro_batch_tokens is {train.micro_batch_tokens}, but a completion can have {limit} = {longest} tokens, and "
            "its prompt comes on top; a micro-batch must hold one sequence"
        )


def _check_teacher(teacher: TeacherConfig, adapter: AdapterConfig) -> None:
    plain = teacher.is_student and not teacher.privileged and teacher.system_prompt is None
    if plain and adapter.path is None:
        raise ValueError(
            "the teacher is the student as it starts; nothing would be learned. Set teacher.model, teacher.adapter, "
            "teacher.privileged or teacher.system_prompt"
        )


def _reject_scorer(config: GenerateConfig | EvaluateConfig | ProfileConfig) -> None:
    # The other rules are about options that only training uses, which these recipes leave aside.
    if config.rollout.schedule == "dense" and "scorer" in config.rollout.model_fields_set:
        raise ValueError(f"rollout.scorer is set but has no effect, because {SCORELESS}; remove it or change that")


def _reject_dense_sampler(config: RLConfig | GenerateConfig | EvaluateConfig) -> None:
    if config.sampler_adapter.is_on and config.rollout.schedule == "dense":
        raise ValueError(
            "sampler_adapter is set but has no effect, because rollout.schedule is 'dense' and the adapter counts where "
            "attention is sparse; remove one of them"
        )
