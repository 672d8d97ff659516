"""Before a distillation: `run(config)` is what `leanroll profile` does.

Preflight → full completions of the student → divergence from the teacher at every token → position curves (D2) and N (D3) → the
teacher's decay along the student's completions (D1) → seconds per step at N and at full length. Nothing is trained. The folder:

  profile.json         everything that was found; also what the page is drawn from
  trajectories.jsonl   per completion: text, KL and both entropies by token
  profile.html         the page
  config.toml, environment.json

Source of the diagnostics: early-stopped rollouts, arXiv 2605.27028.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from leanroll.config import ProfileConfig
from leanroll.errors import ConfigError, RolloutError
from leanroll.measure.positions import NumTokensChoice, PositionCurves, choose_num_tokens
from leanroll.rundir import PROFILE, PROFILE_PAGE, TRAJECTORIES, write_json, write_jsonl
from leanroll.tasks import TaskItem
from leanroll.train import setup
from leanroll.train.forecast import UPDATE_FACTOR, StepCost, Workload, step_cost
from leanroll.train.preflight import Finding, Preflight
from leanroll.train.profile_record import (
    CURVES,
    cumulative_kl,
    decay_findings,
    length_statistics,
    plain,
    records,
    teacher_name,
)
from leanroll.train.profile_stages import (
    check_folder,
    complete,
    divergence_by_rollout,
    examine_pair,
    finish,
    result_files,
)
from leanroll.train.progress import RunDisplay
from leanroll.train.prompts import PromptOrder
from leanroll.train.teacher import Teacher
from leanroll.train.teacher_decay import Decay, measure_decay
from leanroll.types import Prompt, RolloutGroup, SamplingParams


@dataclass(frozen=True, slots=True)
class ProfileSummary:
    """What a profile came to.

    threshold: of the teacher's decay, tokens; None where it was not measured or there is none. costs: at N, at the recipe's
    distill.num_tokens where that is another number, and of full completions (last). errors: findings with which training would not
    start.
    """

    folder: Path
    choice: NumTokensChoice
    threshold: int | None
    costs: tuple[StepCost, ...]
    errors: int

    def line(self) -> str:
        """The closing line."""
        choice, short, full = self.choice, self.costs[0], self.costs[-1]
        interval = "" if choice.low is None else f" [{choice.low}, {choice.high}]"
        parts = [f"N = {choice.num_tokens}{interval} tokens", f"knee {'none' if choice.knee is None else choice.knee}"]
        parts.append("no decay threshold" if self.threshold is None else f"teacher holds up to k = {self.threshold}")
        parts.append(
            f"{short.step_s:.1f} s per step against {full.step_s:.1f} s full ({full.step_s / short.step_s:.1f}x)"
        )
        if self.errors:
            parts.append(f"{self.errors} errors, see the page" if self.errors > 1 else "1 error, see the page")
        return " · ".join([*parts, str(self.folder / PROFILE_PAGE)])


def run(config: ProfileConfig, *, quiet: bool = False, at_end: Callable[[Path], None] | None = None) -> ProfileSummary:
    """Profile a pair of student and teacher.

    quiet: show nothing. at_end: gets the folder once profile.json is in it (writes the page).

    Raises:
        ConfigError: something in the recipe cannot be used, or the folder is not empty.
        ModelError: a model cannot be loaded, or the two have different tokenizers.
        UserError: student and teacher agree at every token.
        RolloutError, RewardError: a completion or reward failed and the recipe does not say to go on.
    """
    folder = check_folder(config.profile.run_dir or f"runs/{config.name}-profile-{time.strftime('%Y%m%d-%H%M%S')}")
    with RunDisplay(5, 1, quiet=quiet) as display:
        with display.phase("load"):
            profiler = _Profiler(config, display)
        with profiler.rewards:
            if profiler.measures_decay:
                with display.phase("load"):
                    profiler.rewards.start()
            with result_files(folder, config, profiler.facts) as files:
                summary = profiler.measure(files, folder)
        finish(display, folder, summary.line(), at_end)
    return summary


class _Profiler:
    """The objects of a profile, and its stages."""

    def __init__(self, config: ProfileConfig, display: RunDisplay) -> None:
        self.config, self.display = config, display
        options = config.profile
        schedule = setup.build_schedule(config.rollout)
        task = setup.build_task(config.task)
        if task.num_train is not None and task.num_train < options.num_prompts:
            raise ConfigError(
                f"profile.num_prompts is {options.num_prompts}, but task {task.name!r} has {task.num_train} training prompts; "
                "lower it, or add prompts."
            )
        order = PromptOrder(task.num_train, options.num_prompts, 1, options.seed)
        self.items: list[TaskItem] = [task.train_item(i) for i in order.indices(1)]
        self.measures_decay = options.measures_decay
        self.rewards: Any = setup.build_rewards(config.task, task) if self.measures_decay else nullcontext()
        # As in training, so that the same modules are timed; a new adapter changes nothing.
        self.student = setup.build_policy(config.model, config.adapter, training=True, seed=options.seed % 2**31)
        self.prompts: list[Prompt] = setup.PromptEncoder(self.student, config.task).encode(self.items)
        self.engine = setup.build_engine(self.student, schedule, config.rollout)
        self.sampling = setup.sampling_params(self.student, config.rollout, seed=options.seed)
        self.engine.check(self.prompts, self.sampling)
        self.teacher = Teacher(config, self.student)
        self.teacher_prompts: list[Prompt] = self.teacher.encode(self.items)
        self.facts = {"device": str(self.student.device), "kernel": self.engine.backend.name}
        self._step_size = config.distill.prompts_per_step * config.distill.num_generations

    def measure(self, files: Path, folder: Path) -> ProfileSummary:
        """All stages; writes profile.json and trajectories.jsonl to `files`, which will be `folder`."""
        config, options = self.config, self.config.profile
        preflight, findings = examine_pair(
            config, self.student, self.teacher, self.prompts, self.teacher_prompts, self.display
        )
        self.sampling = replace(self.sampling, forbidden_token_ids=preflight.forbidden)
        groups, full_rate = self._generate(self.sampling)
        missing = [f for g in groups for f in g.failures]
        if missing:
            findings.append(
                Finding(
                    "completions",
                    "warning",
                    f"{len(missing)} of {len(groups)} prompts were left out: {missing[0].reason}",
                )
            )
        self._keep([bool(group.rollouts) for group in groups])
        groups = [group for group in groups if group.rollouts]
        if not groups:
            raise RolloutError(f"No completion could be generated. First reason: {missing[0].reason}")
        rollouts = [group.rollouts[0] for group in groups]
        lengths = np.array([len(r.token_ids) for r in rollouts])
        self.display.step_done(2, f"completions · median {np.median(lengths):.0f} tokens · {full_rate:,.0f} tokens/s")

        curves, rates = self._score(groups, preflight)
        settings: dict[str, Any] = {"level": options.level, "seed": options.seed}
        by_position = PositionCurves.of(*(curves[name] for name in CURVES), bin_tokens=options.bin_tokens, **settings)
        choice = choose_num_tokens(
            curves["reverse_kl"], [r.finish_reason for r in rollouts], share=options.share, **settings
        )
        findings += [Finding("choice of N", "warning", text) for text in choice.warnings]
        if not choice.warnings:
            findings.append(Finding("choice of N", "ok", f"Nothing speaks against N = {choice.num_tokens}."))
        kl = np.concatenate(curves["reverse_kl"]).mean()
        self.display.step_done(3, f"teacher · mean KL {kl:.3f} nats · N = {choice.num_tokens}")

        decay = self._decay(groups) if self.measures_decay else None
        if decay is not None:
            findings += decay_findings(decay, choice)
        costs = self._costs(lengths, choice.num_tokens, full_rate, rates)
        result = {
            "kind": "before",
            "name": config.name,
            "model": config.model.name,
            "teacher": teacher_name(config),
            "max_completion_length": config.rollout.max_completion_length,
            "step": {
                "prompts_per_step": config.distill.prompts_per_step, "num_generations": config.distill.num_generations,
            },
            "findings": findings,
            "lengths": length_statistics(lengths, choice.num_capped),
            "curves": by_position,
            "cumulative_kl": cumulative_kl(curves["reverse_kl"]),
            "choice": choice,
            "decay": decay,
            "delta": options.delta,
            "rates": {"full_rollout": full_rate, **rates, "update_factor": UPDATE_FACTOR},
            "costs": [asdict(cost) | {"step_s": cost.step_s} for cost in costs],
        }  # fmt: skip
        write_jsonl(files / TRAJECTORIES, records(groups, curves))
        write_json(files / PROFILE, plain(result))
        return ProfileSummary(
            folder=folder,
            choice=choice,
            threshold=None if decay is None else decay.threshold,
            costs=tuple(costs),
            errors=sum(f.level == "error" for f in findings),
        )

    def _keep(self, kept: Sequence[bool]) -> None:
        """Leave out the prompts without a completion."""

        def those(values: Sequence[Any]) -> list[Any]:
            return [value for value, keep in zip(values, kept, strict=True) if keep]

        self.items = those(self.items)
        self.prompts = those(self.prompts)
        self.teacher_prompts = those(self.teacher_prompts)

    def _generate(self, sampling: SamplingParams) -> tuple[list[RolloutGroup], float]:
        return complete(self.engine, self.prompts, sampling, self._step_size, self.display)

    def _score(
        self, groups: Sequence[RolloutGroup], preflight: Preflight
    ) -> tuple[dict[str, list[np.ndarray]], dict[str, float]]:
        """Per completion KL and entropies, nats [T]; and inputs/s of the teacher and of the student with the divergence."""
        curves: dict[str, list[np.ndarray]] = {name: [] for name in CURVES}
        rates: dict[str, list[float]] = {"teacher": [], "student": []}
        most = self.config.profile.micro_batch_tokens
        for start in range(0, len(groups), self._step_size):
            part = groups[start : start + self._step_size]
            prompts = self.teacher_prompts[start : start + self._step_size]
            fed = sum(len(g.rollouts[0].token_ids) - 1 for g in part)
            with self.display.phase("teacher"):
                self.display.advance(start, len(groups))
                began = self._now()
                states = self.teacher.hidden_states(part, prompts, most)
                rates["teacher"].append((fed + sum(len(p.token_ids) for p in prompts)) / (self._now() - began))
            with self.display.phase("score"):
                began = self._now()
                found = divergence_by_rollout(
                    self.student, self.teacher, part, states, preflight.vocabulary, self.config, CURVES
                )
                rates["student"].append((fed + sum(len(g.prompt.token_ids) for g in part)) / (self._now() - began))
            for name in CURVES:
                curves[name] += [values[name] for values in found]
        return curves, {name: float(np.median(values)) for name, values in rates.items()}

    def _now(self) -> float:
        if self.student.device.type == "cuda":
            torch.cuda.synchronize(self.student.device)
        return time.perf_counter()

    def _decay(self, groups: Sequence[RolloutGroup]) -> Decay:
        count = self.config.profile.decay_prompts or len(groups)
        decay = measure_decay(
            self.config,
            self.teacher,
            self.rewards,
            self.items[:count],
            self.teacher_prompts[:count],
            groups[:count],
            self.display,
        )
        rewards = " → ".join(f"{p.continued.mean:.3f} (k = {p.k})" for p in decay.points)
        self.display.step_done(4, f"teacher's decay · reward {rewards} · student {decay.points[0].student.mean:.3f}")
        return decay

    def _costs(self, lengths: np.ndarray, num_tokens: int, full_rate: float, rates: dict[str, float]) -> list[StepCost]:
        """At N, at the recipe's number of tokens if it is another, and full; rollouts of each length are timed."""
        config, full = self.config, self.config.rollout.max_completion_length
        own = config.distill.num_tokens
        limits = [num_tokens]
        if not config.distill.full_rollouts and own < full and own != num_tokens:
            limits.append(own)
        work = Workload(
            lengths.tolist(),
            float(np.mean([len(p.token_ids) for p in self.prompts])),
            float(np.mean([len(p.token_ids) for p in self.teacher_prompts])),
            config.distill.prompts_per_step,
            config.distill.num_generations,
        )
        costs = []
        for limit in limits:
            _, rate = self._generate(replace(self.sampling, max_completion_length=limit))
            costs.append(
                step_cost(limit, work, rollout_rate=rate, teacher_rate=rates["teacher"], student_rate=rates["student"])
            )
        costs.append(
            step_cost(full, work, rollout_rate=full_rate, teacher_rate=rates["teacher"], student_rate=rates["student"])
        )
        line = f"{costs[0].step_s:.1f} s at N, {costs[-1].step_s:.1f} s full"
        self.display.step_done(5, f"cost of a step · {line}")
        return costs
