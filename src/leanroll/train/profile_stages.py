"""What the profiles before and after training share: folder, preflight, completions, divergence at every token."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from leanroll.config import ProfileConfig, to_toml
from leanroll.environment import describe
from leanroll.errors import ConfigError
from leanroll.losses.distill import Divergence, divergence
from leanroll.losses.vocabulary import SharedVocabulary
from leanroll.measure.logprobs import batch_hidden, split_by_sample
from leanroll.measure.packing import pack
from leanroll.measure.stops import stop_probs
from leanroll.models import Policy
from leanroll.rollout.engine import RolloutEngine
from leanroll.rundir import CONFIG, ENVIRONMENT, staged_folder, write_json, write_text
from leanroll.train.preflight import Finding, Preflight, examine
from leanroll.train.progress import RunDisplay
from leanroll.train.teacher import Teacher
from leanroll.types import Prompt, RolloutGroup, SamplingParams

EOS_PROB = "eos_prob"
"""P(EOS) by token, beside the statistics of the divergence."""


def check_folder(path: str | Path) -> Path:
    """Where the results go; touches nothing. Raises ConfigError unless it is a new or empty folder."""
    folder = Path(path).absolute()
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(
            f"profile.run_dir {str(folder)!r} is not a new or empty folder; choose another, or remove what is there."
        )
    return folder


@contextmanager
def result_files(folder: Path, config: ProfileConfig, facts: dict[str, Any]) -> Iterator[Path]:
    """Where to write the results: a temporary folder with recipe and environment, which becomes `folder` when the block ends well.

    facts: of the models, for environment.json.

    Raises:
        ConfigError: it cannot be written.
    """
    with ExitStack() as stack:
        try:
            files = stack.enter_context(staged_folder(folder))
            write_json(files / ENVIRONMENT, describe(facts))
            write_text(files / CONFIG, to_toml(config))
        except OSError as error:
            raise ConfigError(
                f"profile.run_dir {str(folder)!r} cannot be written ({error.strerror or error}); choose another folder."
            ) from error
        yield files


def finish(display: RunDisplay, folder: Path, line: str, at_end: Callable[[Path], None] | None) -> None:
    """The end of a profile whose results are in `folder`: what the caller does with them, and the closing line."""
    if at_end is not None:
        with display.phase("report"):
            at_end(folder)
    display.say(line)


def examine_pair(
    config: ProfileConfig,
    student: Policy,
    teacher: Teacher,
    prompts: Sequence[Prompt],
    teacher_prompts: Sequence[Prompt],
    display: RunDisplay,
) -> tuple[Preflight, list[Finding]]:
    """The preflight of a run on the first prompts; what would stop a run is a finding.

    Raises:
        ModelError: the tokenizers differ, or no completion could end.
    """
    count = config.teacher.preflight_prompts
    with display.phase("preflight"):
        found, findings = examine(
            student,
            teacher,
            prompts[:count],
            teacher_prompts[:count],
            config.teacher,
            eos_class=config.distill.eos_class,
            max_tokens=config.profile.micro_batch_tokens,
        )
    wrong = [f for f in findings if f.level != "ok"]
    for finding in wrong:
        display.say(f"{finding.level}: {finding.text}")
    display.step_done(1, f"preflight · first-token KL {found.first_token_kl:.2f} nats · {len(wrong)} to look at")
    return found, findings


def complete(
    engine: RolloutEngine,
    prompts: Sequence[Prompt],
    sampling: SamplingParams,
    batch_size: int,
    display: RunDisplay,
    *,
    phase: str = "rollout",
) -> tuple[list[RolloutGroup], float]:
    """One completion per prompt, in batches; and completion tokens/s, the median over whole batches (NaN without tokens)."""
    groups: list[RolloutGroup] = []
    rates: list[float] = []
    for start in range(0, len(prompts), batch_size):
        part = prompts[start : start + batch_size]
        with display.phase(phase, total=len(part)):
            began = time.perf_counter()
            made = engine.generate(part, sampling, 1, progress=display.show_rollout)
            seconds = time.perf_counter() - began
        groups += made
        tokens = sum(len(r.token_ids) for g in made for r in g.rollouts)
        if tokens and (not rates or len(part) == batch_size):
            rates.append(tokens / seconds)
    return groups, float(np.median(rates)) if rates else math.nan


def divergence_by_rollout(
    student: Policy,
    teacher: Teacher,
    groups: Sequence[RolloutGroup],
    states: Sequence[Tensor],
    vocabulary: SharedVocabulary,
    config: ProfileConfig,
    fields: Sequence[str],
    *,
    sampling: SamplingParams | None = None,
) -> list[dict[str, np.ndarray]]:
    """Per group, of one completion each: fields of `losses.distill.Divergence`, [T] each; with `sampling` also the student's P(EOS)
    under it, as `eos_prob`.

    The student's states are computed first, in the mode that its adapter is in, then both heads.

    Args:
        states: the teacher's, [T, H] per completion.
    """
    longest = max(len(g.prompt.token_ids) + len(g.rollouts[0].token_ids) - 1 for g in groups)
    found: list[dict[str, np.ndarray]] = [{} for _ in groups]
    for batch in pack(groups, max(config.profile.micro_batch_tokens, longest)):
        with torch.no_grad():
            hidden = batch_hidden(student, batch)
        with teacher.scoring() as policy:
            result: Divergence = divergence(
                hidden,
                student.head,
                torch.cat([states[s] for s in batch.samples]),
                policy.head,
                kl_temperature=config.distill.kl_temperature,
                vocabulary=vocabulary,
            )
        flat = {name: getattr(result, name) for name in fields}
        if sampling is not None:
            flat[EOS_PROB] = stop_probs(hidden, student.head, sampling)
        for name, statistic in flat.items():
            for sample, values in split_by_sample(statistic, batch).items():
                found[sample][name] = values.cpu().numpy().astype(np.int64 if name == "teacher_rank" else np.float64)
    return found
