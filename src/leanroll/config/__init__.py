"""Recipes: pydantic schemas, TOML and dotted overrides in, a resolved file out. Never imports torch.

config = load_config(RLConfig, "recipes/quickstart.toml", [("rollout.schedule", "qwen3-4b-0.86")])
config.rollout.max_completion_length
"""

from leanroll.config.alarm import AlarmConfig
from leanroll.config.base import Section
from leanroll.config.benchmark import BenchmarkConfig
from leanroll.config.calibration import CalibrationConfig
from leanroll.config.distillation import AdaptConfig, DistillationConfig, GuardConfig, TeacherConfig
from leanroll.config.inert import inert_options
from leanroll.config.load import load_config, parse_value, split_overrides, validate
from leanroll.config.profile import ProfilingConfig
from leanroll.config.recipes import (
    BenchConfig,
    CalibrateConfig,
    DistillConfig,
    DoctorConfig,
    EvaluateConfig,
    GenerateConfig,
    ProfileConfig,
    Recipe,
    RLConfig,
    RunProfileConfig,
    TrainingRecipe,
)
from leanroll.config.resolved import changed_options, read_resolved, resume_conflicts, to_dict, to_toml
from leanroll.config.sampler import SamplerAdapterConfig, SavedSamplerConfig
from leanroll.config.schema import FieldDoc, iter_fields, nearest_key, option_keys
from leanroll.config.sections import AdapterConfig, ModelConfig, RewardConfig, RolloutConfig, TaskConfig
from leanroll.config.suite import Suite, SuiteConfig, SuiteRun, load_suite
from leanroll.config.training import AlgorithmConfig, EvalConfig, MeasureConfig, OptimizerConfig, TrainConfig

__all__ = [
    "AdaptConfig",
    "AdapterConfig",
    "AlarmConfig",
    "AlgorithmConfig",
    "BenchConfig",
    "BenchmarkConfig",
    "CalibrateConfig",
    "CalibrationConfig",
    "DistillConfig",
    "DistillationConfig",
    "DoctorConfig",
    "EvalConfig",
    "EvaluateConfig",
    "FieldDoc",
    "GenerateConfig",
    "GuardConfig",
    "MeasureConfig",
    "ModelConfig",
    "OptimizerConfig",
    "ProfileConfig",
    "ProfilingConfig",
    "RLConfig",
    "Recipe",
    "RewardConfig",
    "RolloutConfig",
    "RunProfileConfig",
    "SamplerAdapterConfig",
    "SavedSamplerConfig",
    "Section",
    "Suite",
    "SuiteConfig",
    "SuiteRun",
    "TaskConfig",
    "TeacherConfig",
    "TrainConfig",
    "TrainingRecipe",
    "changed_options",
    "inert_options",
    "iter_fields",
    "load_config",
    "load_suite",
    "nearest_key",
    "option_keys",
    "parse_value",
    "read_resolved",
    "resume_conflicts",
    "split_overrides",
    "to_dict",
    "to_toml",
    "validate",
]
