"""The student of a distillation run before training and after it, and which positions were trained."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from leanroll.config import DistillConfig, RunProfileConfig
from leanroll.errors import ConfigError
from leanroll.models import Policy
from leanroll.rundir import CHECKPOINTS, RunDir
from leanroll.train import setup
from leanroll.train.checkpoint import POLICY_DIR, STATE_FILE, Checkpoints
from leanroll.train.teacher import Teacher, share_base


@dataclass(frozen=True, slots=True)
class Student:
    """A student at one time. Its policy may be that of another time as well, with the adapter on or off."""

    policy: Policy
    teacher: Teacher
    adapter_off: bool

    @contextmanager
    def active(self) -> Iterator[Policy]:
        """Inside, the policy is this student."""
        with self.policy.adapter_disabled() if self.adapter_off else nullcontext():
            yield self.policy


def find_checkpoint(run_dir: RunDir, step: int | None = None) -> Path:
    """The latest checkpoint of a run, or that of `step`.

    Raises:
        ConfigError: there is none.
    """
    if step is None:
        found = Checkpoints(run_dir.path / CHECKPOINTS, 0).latest()
        if found is None:
            raise ConfigError(
                f"Run {str(run_dir.path)!r} has no checkpoint yet, so there is no trained student; let it save one first."
            )
        return found
    there = [s for s in run_dir.checkpoint_steps() if (run_dir.checkpoint_path(s) / STATE_FILE).is_file()]
    if step not in there:
        raise ConfigError(
            f"Run {str(run_dir.path)!r} has no checkpoint of step {step}; it has {', '.join(map(str, there)) or 'none'}. Name one "
            "of these, or leave --step out for the latest."
        )
    return run_dir.checkpoint_path(step)


def load_students(config: RunProfileConfig, checkpoint: Path) -> tuple[Student, Student]:
    """The student before training and the one of the checkpoint, each with its teacher; base weights are held once under LoRA.

    Raises:
        ModelError: one of them or the teacher cannot be loaded.
    """
    saved = str(checkpoint / POLICY_DIR)
    model, adapter = config.model, config.adapter
    if adapter.type == "lora":
        trained = setup.build_policy(model, adapter.model_copy(update={"path": saved}), training=False)
    else:
        trained = setup.build_policy(
            model.model_copy(update={"name": saved, "revision": None}), adapter, training=False
        )
    if adapter.type == "lora" and adapter.path is None:
        teacher = Teacher(config, trained)
        return Student(trained, teacher, adapter_off=True), Student(trained, teacher, adapter_off=False)
    base = setup.build_policy(model, adapter, training=False)
    if adapter.type == "lora":
        share_base(trained, base)
    teacher = Teacher(config, base, student_changes=False)
    moved = Teacher(config, trained) if config.teacher.weights == "current" else teacher
    return Student(base, teacher, adapter_off=False), Student(trained, moved, adapter_off=False)


def trained_tokens(recipe: DistillConfig, records: Sequence[Mapping[str, Any]], step: int) -> int:
    """N: positions below it were in the loss at some step up to `step` (of a selection from the middle: could have been).

    records: of the run's metrics, which say how many tokens each step really generated at most. Without a step: 0.
    """
    most = max((int(r["distill/num_tokens"]) for r in records if 0 < r["step"] <= step), default=0)
    options = recipe.distill
    return min(most, options.selected_tokens or most) if options.selection == "prefix" else most
