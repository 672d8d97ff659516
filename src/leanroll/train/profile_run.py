"""After a distillation: `run(run_dir, config)` is what `leanroll profile RUN_DIR` does.

Held-out prompts → full completions of the student before training (the fixed base rollouts), of the trained student (same prompts,
same seeds) and of the teacher → KL and P(EOS) of both students on the base rollouts, and of each on its own → cascade (D4),
commitment (D6), lengths and signs of collapse (D7, D8), categories of tokens (D9). Nothing is trained. The folder:

  profile.json         everything that was found; also what the page is drawn from
  trajectories.jsonl   per completion: whose, text, categories of its tokens, KL, entropies and P(EOS) by token under each student
  profile.html         the page
  config.toml, environment.json

Source of the diagnostics: early-stopped rollouts, arXiv 2605.27028.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from leanroll.config import DistillConfig, RewardConfig, RunProfileConfig, read_resolved
from leanroll.errors import ConfigError, RolloutError
from leanroll.measure.bootstrap import Estimate
from leanroll.measure.boxed import BoxedAccuracy, boxed_accuracy, boxed_scorer
from leanroll.measure.categories import category_kl, category_ratios, token_categories
from leanroll.measure.collapse import CollapseReport, compare
from leanroll.measure.commitment import TOP_SHARE, TokenScores, commitment
from leanroll.measure.positions import Cascade, OwnCascade, cascade, own_cascade
from leanroll.measure.stops import position_means, stop_probs
from leanroll.models import Policy
from leanroll.rollout.schedule import BudgetSchedule
from leanroll.rundir import PROFILE, PROFILE_PAGE, TRAJECTORIES, RunDir, write_json, write_jsonl
from leanroll.tasks import TaskItem
from leanroll.train import setup
from leanroll.train.checkpoint import read_state
from leanroll.train.preflight import Finding, Preflight
from leanroll.train.profile_record import CURVES, plain, records, teacher_name
from leanroll.train.profile_stages import (
    EOS_PROB,
    check_folder,
    complete,
    divergence_by_rollout,
    examine_pair,
    finish,
    result_files,
)
from leanroll.train.profile_students import Student, find_checkpoint, load_students, trained_tokens
from leanroll.train.progress import RunDisplay
from leanroll.types import Prompt, RolloutGroup, SamplingParams

BASE, TRAINED, TEACHER = "base", "trained", "teacher"
"""The student before training, after it, and the teacher: keys of profile.json."""
FOLDER = "profile"
"""In the run directory: where the results go unless the recipe says otherwise."""

_FIELDS = (*CURVES, "student_top1", "teacher_rank")
_TEACHER_EOS = "teacher_eos_prob"
_FROM_THE_START = ("all", "increasing", "equal_weight_full")  # selections that train every token generated

Scores = Mapping[str, Sequence[np.ndarray]]
"""Per statistic, one array [T] per completion."""


@dataclass(frozen=True, slots=True)
class RunProfileSummary:
    """What the profile of a run came to.

    step: of the checkpoint. trained_ratio, untrained_ratio: KL after / before on the base rollouts, None without such positions.
    untrained_share: of all positions of the base rollouts. reports: by whose completions.
    """

    folder: Path
    step: int
    trained_ratio: Estimate | None
    untrained_ratio: Estimate | None
    untrained_share: float
    reports: Mapping[str, CollapseReport]

    def line(self) -> str:
        """The closing line."""
        base, trained = self.reports[BASE], self.reports[TRAINED]
        parts = []
        if self.trained_ratio is not None:
            parts.append(f"x{self.trained_ratio.value:.2f} on trained")
        if self.untrained_ratio is not None:
            ratio = self.untrained_ratio
            parts.append(
                f"x{ratio.value:.2f} [{ratio.low:.2f}, {ratio.high:.2f}] on untrained positions ({self.untrained_share:.0%} of all)"
            )
        else:
            parts.append("no untrained positions")
        return " · ".join(
            [
                f"KL {', '.join(parts)}",
                f"length p50 {base.lengths.p50:.0f} → {trained.lengths.p50:.0f}",
                f"loops {base.periodic_tail:.0%} → {trained.periodic_tail:.0%}",
                str(self.folder / PROFILE_PAGE),
            ]
        )


def run(
    run_dir: RunDir,
    config: RunProfileConfig,
    *,
    step: int | None = None,
    quiet: bool = False,
    at_end: Callable[[Path], None] | None = None,
) -> RunProfileSummary:
    """Profile a trained student.

    Args:
        run_dir: of `leanroll distill`. config: the run's recipe, with what the profile changes in it.
        step: of the checkpoint. None: the latest.
        quiet: show nothing. at_end: gets the folder once profile.json is in it (writes the page).

    Raises:
        ConfigError: no such checkpoint, too few held-out prompts, or a folder that is not empty.
        ModelError: a model cannot be loaded.
        RolloutError: no prompt could be completed by both students.
    """
    recipe = read_resolved(DistillConfig, run_dir.config_path)
    checkpoint = find_checkpoint(run_dir, step)
    folder = check_folder(config.profile.run_dir or run_dir.path / FOLDER)
    with RunDisplay(5, 1, quiet=quiet) as display:
        with display.phase("load"):
            profiler = _RunProfiler(config, recipe, run_dir, checkpoint, display)
        with result_files(folder, config, profiler.facts) as files:
            summary = profiler.measure(files, folder)
        finish(display, folder, summary.line(), at_end)
    return summary


class _RunProfiler:
    """The objects of a run's profile, and its stages."""

    def __init__(
        self, config: RunProfileConfig, recipe: DistillConfig, run_dir: RunDir, checkpoint: Path, display: RunDisplay
    ) -> None:
        self.config, self.recipe, self.run_name, self.display = config, recipe, run_dir.path.name, display
        self.step = int(read_state(checkpoint)["step"])
        self.trained = trained_tokens(recipe, run_dir.read_metrics(), self.step)
        self.schedule = setup.build_schedule(config.rollout)
        self.task = task = setup.build_task(config.task)
        count = config.profile.num_prompts
        if task.num_eval is not None and task.num_eval < count:
            raise ConfigError(
                f"profile.num_prompts is {count}, but task {task.name!r} has {task.num_eval} held-out prompts; lower it, or add "
                "prompts."
            )
        self.items: list[TaskItem] = task.eval_items(count)
        base, trained = load_students(config, checkpoint)
        self.students = {BASE: base, TRAINED: trained}
        self.prompts: list[Prompt] = setup.PromptEncoder(base.policy, config.task).encode(self.items)
        self.teacher_prompts: list[Prompt] = base.teacher.encode(self.items)
        self.sampling = setup.sampling_params(base.policy, config.rollout, seed=config.profile.seed)
        engine = setup.build_engine(base.policy, self.schedule, config.rollout)
        engine.check(self.prompts, self.sampling)
        self.facts = {"device": str(base.policy.device), "kernel": engine.backend.name}
        self._batch_size = config.distill.prompts_per_step * config.distill.num_generations

    def measure(self, files: Path, folder: Path) -> RunProfileSummary:
        """All stages; writes profile.json and trajectories.jsonl to `files`, which will be `folder`."""
        config, options, base = self.config, self.config.profile, self.students[BASE]
        with base.active() as policy:
            preflight, findings = examine_pair(
                config, policy, base.teacher, self.prompts, self.teacher_prompts, self.display
            )
        findings += self._notes()
        groups = self._complete(preflight, findings)
        accuracies = self._boxed(groups)
        scores = self._score(groups[BASE], self.students, preflight)
        kl = {name: values["reverse_kl"] for name, values in scores.items()}
        settings: dict[str, Any] = {"level": options.level, "seed": options.seed}
        fixed = cascade(kl[BASE], kl[TRAINED], options.bin_tokens, self.trained, **settings)
        self.display.step_done(3, f"on base completions · {_kl_line(kl)}")

        own = self._score(groups[TRAINED], {TRAINED: self.students[TRAINED]}, preflight)[TRAINED]
        fresh = own_cascade(kl[BASE], own["reverse_kl"], options.bin_tokens, self.trained, **settings)
        self.display.step_done(4, f"on own completions · {_kl_line({BASE: kl[BASE], TRAINED: own['reverse_kl']})}")

        eos_probs = {BASE: scores[BASE][EOS_PROB], TRAINED: own[EOS_PROB]}
        if TEACHER in groups:
            eos_probs[TEACHER] = self._teacher_eos(groups[TEACHER])
        reports = {name: self._report(made, eos_probs[name]) for name, made in groups.items()}
        categories = self._categories(groups[BASE])
        by_category = {
            name: category_kl(categories, values, bin_tokens=options.bin_tokens, **settings)
            for name, values in kl.items()
        }
        alarms = compare(reports[BASE], reports[TRAINED])
        findings += [Finding("collapse", "warning", f"Against the start, the {alarm.reason}.") for alarm in alarms]
        if not alarms:
            findings.append(Finding("collapse", "ok", "Nothing about the trained student's completions points to one."))
        positions = np.concatenate([np.arange(len(values)) for values in kl[BASE]])
        untrained_share = float((positions >= self.trained).mean())
        result = {
            "kind": "after",
            "name": config.name,
            "run": self.run_name,
            "model": config.model.name,
            "teacher": teacher_name(config),
            "step": self.step,
            "num_steps": self.recipe.train.steps,
            "max_completion_length": config.rollout.max_completion_length,
            "num_prompts": len(self.prompts),
            "trained_tokens": self.trained,
            "untrained_share": untrained_share,
            "bin_tokens": options.bin_tokens,
            "level": options.level,
            "findings": findings,
            "cascade": {"base": fixed, "own": fresh},
            "commitment": {"top_share": TOP_SHARE, "models": commitment(_flat(scores))},
            "completions": {
                name: {"report": reports[name], "lengths": _lengths(made), "boxed_accuracy": accuracies[name]}
                for name, made in groups.items()
            },
            "stops": self._stops(scores),
            "categories": {
                "before": by_category[BASE],
                "after": by_category[TRAINED],
                "ratios": category_ratios(categories, kl[BASE], kl[TRAINED], **settings),
            },
        }  # fmt: skip
        write_jsonl(files / TRAJECTORIES, self._lines(groups, scores, own, categories))
        write_json(files / PROFILE, plain(result))
        self.display.step_done(5, f"cascade · {_cascade_line(fixed, fresh)}")
        return RunProfileSummary(
            folder, self.step, fixed.trained_ratio, fixed.untrained_ratio, untrained_share, reports
        )

    def _notes(self) -> list[Finding]:
        """What the figures must be read with."""
        options, found = self.recipe.distill, []
        if options.selection not in (*_FROM_THE_START, "prefix"):
            text = (
                f"distill.selection is {options.selection!r}: of the first {self.trained} tokens only {options.selected_tokens} "
                "per completion were in the loss. Positions up to there count as trained below."
            )
            found.append(Finding("trained positions", "warning", text))
        if options.per_prompt_tokens:
            text = (
                f"distill.per_prompt_tokens is set: {self.trained} tokens is the most of any prompt, others were trained on fewer. "
                "Positions up to there count as trained below."
            )
            found.append(Finding("trained positions", "warning", text))
        if self.config.teacher.weights == "current":
            text = (
                "teacher.weights is 'current': each student is compared with a teacher that has its own weights, so the KL can "
                "fall because either side moved."
            )
            found.append(Finding("moving teacher", "warning", text))
        return found

    def _sampling_of_students(self, preflight: Preflight) -> SamplingParams:
        return replace(self.sampling, forbidden_token_ids=preflight.forbidden)

    def _complete(self, preflight: Preflight, findings: list[Finding]) -> dict[str, list[RolloutGroup]]:
        """Completions by whose they are; the students' of the same prompts, those that both could complete."""
        sampling = self._sampling_of_students(preflight)
        made: dict[str, list[RolloutGroup]] = {}
        for name, student in self.students.items():
            with student.active() as policy:
                engine = setup.build_engine(policy, self.schedule, self.config.rollout)
                made[name], _ = complete(
                    engine, self.prompts, sampling, self._batch_size, self.display, phase=f"completions, {name}"
                )
        kept = [all(bool(groups[i].rollouts) for groups in made.values()) for i in range(len(self.prompts))]
        failures = [f for groups in made.values() for g in groups for f in g.failures]
        if not any(kept):
            raise RolloutError(f"No prompt could be completed by both students. First reason: {failures[0].reason}")
        if failures:
            text = f"{kept.count(False)} of {len(kept)} prompts were left out: {failures[0].reason}"
            findings.append(Finding("completions", "warning", text))

        def those(values: Sequence[Any]) -> list[Any]:
            return [value for value, keep in zip(values, kept, strict=True) if keep]

        self.prompts, self.teacher_prompts = those(self.prompts), those(self.teacher_prompts)
        made = {name: those(groups) for name, groups in made.items()}
        if self.config.profile.teacher_completions:
            made |= self._teacher_completions(findings)
        medians = [f"{name} {np.median(_lengths(groups)):.0f}" for name, groups in made.items()]
        self.display.step_done(2, f"completions · median tokens: {', '.join(medians)}")
        return made

    def _teacher_completions(self, findings: list[Finding]) -> dict[str, list[RolloutGroup]]:
        """The teacher's own of the same prompts; empty where it can complete none."""
        student, rollout = self.students[TRAINED], self.config.rollout
        with student.active(), student.teacher.scoring() as policy:
            engine = setup.build_engine(
                policy, BudgetSchedule.dense(), rollout.model_copy(update={"schedule": "dense"})
            )
            sampling = self._sampling_of_teacher(policy)
            groups, _ = complete(
                engine, self.teacher_prompts, sampling, self._batch_size, self.display, phase="completions, teacher"
            )
        failures = [f for g in groups for f in g.failures]
        if failures:
            text = f"The teacher could not complete {len(failures)} of {len(groups)} prompts: {failures[0].reason}"
            findings.append(Finding("teacher's completions", "warning", text))
        groups = [g for g in groups if g.rollouts]
        return {TEACHER: groups} if groups else {}

    def _report(self, groups: Sequence[RolloutGroup], eos_probs: Sequence[np.ndarray]) -> CollapseReport:
        limit = self.config.rollout.max_completion_length
        return CollapseReport.of([g.rollouts[0] for g in groups], limit, eos_probs=eos_probs)

    def _boxed(self, groups: Mapping[str, Sequence[RolloutGroup]]) -> dict[str, BoxedAccuracy | None]:
        """By whose completions; None where there is no box, or the task does not compare answers."""
        scorer, items = boxed_scorer(self.task), {item.index: item for item in self.items}
        if scorer is None:
            return dict.fromkeys(groups)
        task = self.config.task.model_copy(update={"rewards": (RewardConfig(name=scorer.name),)})
        with self.display.phase("boxed answers"), setup.build_rewards(task, self.task) as rewards:
            return {
                name: boxed_accuracy([items[g.prompt.index] for g in made], [g.rollouts[0].text for g in made], rewards)
                for name, made in groups.items()
            }

    def _teacher_eos(self, groups: Sequence[RolloutGroup]) -> list[np.ndarray]:
        """The teacher's P(EOS) by token on its own completions, [T] each."""
        student, found = self.students[TRAINED], []
        with self.display.phase("teacher"), student.active():
            for start in range(0, len(groups), self._batch_size):
                self.display.advance(start, len(groups))
                part = groups[start : start + self._batch_size]
                most = self.config.profile.micro_batch_tokens
                found += self._eos_of_states(
                    student, student.teacher.hidden_states(part, [g.prompt for g in part], most)
                )
        return found

    def _eos_of_states(self, student: Student, states: Sequence[Tensor]) -> list[np.ndarray]:
        """The same from its hidden states [T, H] per completion."""
        with student.teacher.scoring() as policy:
            sampling = self._sampling_of_teacher(policy)
            return [stop_probs(s, policy.head, sampling).cpu().numpy().astype(np.float64) for s in states]

    def _sampling_of_teacher(self, policy: Policy) -> SamplingParams:
        return setup.sampling_params(policy, self.config.rollout, seed=self.config.profile.seed)

    def _stops(self, scores: Mapping[str, Scores]) -> dict[str, Any]:
        """P(EOS) of all three on the same tokens, the base rollouts: mean over them, and by position."""
        width = self.config.profile.bin_tokens
        whose = {name: scores[name][EOS_PROB] for name in (BASE, TRAINED)} | {TEACHER: scores[TRAINED][_TEACHER_EOS]}
        return {
            "temperature": self.sampling.temperature or 1.0,
            "models": {
                name: {"mean": float(np.concatenate(probs).mean()), "by_position": position_means(probs, width)}
                for name, probs in whose.items()
            },
        }

    def _score(
        self, groups: Sequence[RolloutGroup], students: Mapping[str, Student], preflight: Preflight
    ) -> dict[str, dict[str, list[np.ndarray]]]:
        """Per student, what it and its teacher say to the same completions."""
        moves = self.config.teacher.weights == "current"
        sampling = self._sampling_of_students(preflight)
        fields = (*_FIELDS, EOS_PROB)
        scores: dict[str, dict[str, list[np.ndarray]]] = {
            name: {field: [] for field in (*fields, _TEACHER_EOS)} for name in students
        }
        for start in range(0, len(groups), self._batch_size):
            part = groups[start : start + self._batch_size]
            prompts = self.teacher_prompts[start : start + self._batch_size]
            states: tuple[Tensor, ...] | None = None
            teacher_eos: list[np.ndarray] = []
            for name, student in students.items():
                with student.active() as policy:
                    if states is None or moves:
                        with self.display.phase("teacher"):
                            self.display.advance(start, len(groups))
                            states = student.teacher.hidden_states(
                                part, prompts, self.config.profile.micro_batch_tokens
                            )
                            teacher_eos = self._eos_of_states(student, states)
                    with self.display.phase(f"score, {name}"):
                        self.display.advance(start, len(groups))
                        found = divergence_by_rollout(
                            policy,
                            student.teacher,
                            part,
                            states,
                            preflight.vocabulary,
                            self.config,
                            _FIELDS,
                            sampling=sampling,
                        )
                for field in fields:
                    scores[name][field] += [values[field] for values in found]
                scores[name][_TEACHER_EOS] += teacher_eos
        return scores

    def _categories(self, groups: Sequence[RolloutGroup]) -> list[np.ndarray]:
        policy = self.students[BASE].policy
        special = {*policy.tokenizer.all_special_ids, *policy.spec.stop_token_ids}
        return [token_categories(g.rollouts[0].token_ids, policy.decode, special) for g in groups]

    def _lines(
        self,
        groups: Mapping[str, Sequence[RolloutGroup]],
        scores: Mapping[str, Scores],
        own: Scores,
        categories: Sequence[np.ndarray],
    ) -> Iterator[dict[str, Any]]:
        """trajectories.jsonl: the base rollouts under both students, then each other's own."""
        before, after = scores[BASE], scores[TRAINED]
        columns = {name: before[name] for name in (*CURVES, EOS_PROB)}
        columns |= {f"trained_{name}": after[name] for name in ("reverse_kl", "student_entropy", EOS_PROB)}
        columns[_TEACHER_EOS] = after[_TEACHER_EOS]
        yield from records(groups[BASE], {**columns, "categories": categories}, model=BASE)
        yield from records(groups[TRAINED], {name: own[name] for name in (*CURVES, EOS_PROB)}, model=TRAINED)
        yield from records(groups.get(TEACHER, []), {}, model=TEACHER)


def _flat(scores: Mapping[str, Scores]) -> dict[str, TokenScores]:
    return {
        name: TokenScores(*(np.concatenate(values[field]) for field in ("reverse_kl", "student_top1", "teacher_rank")))
        for name, values in scores.items()
    }


def _lengths(groups: Sequence[RolloutGroup]) -> list[int]:
    return [len(g.rollouts[0].token_ids) for g in groups]


def _kl_line(kl: Mapping[str, Sequence[np.ndarray]]) -> str:
    before, after = (float(np.concatenate(kl[name]).mean()) for name in (BASE, TRAINED))
    return f"mean KL {before:.3f} → {after:.3f} nats"


def _cascade_line(fixed: Cascade, fresh: OwnCascade) -> str:
    """Ratios on untrained positions, of both kinds."""
    parts = [
        f"{where} x{found.untrained_ratio.value:.2f}"
        for where, found in (("base completions", fixed), ("own completions", fresh))
        if found.untrained_ratio is not None
    ]
    return f"untrained positions: {', '.join(parts) or 'none'}"
