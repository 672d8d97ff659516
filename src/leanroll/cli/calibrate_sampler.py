"""The first part of `leanroll calibrate --distill-sparse`: train a sampler adapter, so that budgets are fitted with it on."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from leanroll.config import CalibrateConfig
from leanroll.errors import ConfigError
from leanroll.rundir import write_jsonl

if TYPE_CHECKING:
    from leanroll.calibrate.trajectories import Trajectory
    from leanroll.models import Policy

ADAPTER, CURVE = "sampler_adapter", "distill_sparse.jsonl"
"""In a calibration's folder: the adapter in peft's format, and the metrics of every update."""


def training_part(
    config: CalibrateConfig, trajectories: Sequence[Trajectory], parts: Sequence[Sequence[Trajectory]]
) -> list[Trajectory]:
    """Trajectories to train the adapter on, of sources that neither fit nor validate; none where nothing is trained.

    Raises:
        ConfigError: nothing is left for them.
    """
    settings = config.calibrate
    if not settings.distill_steps:
        return []
    used = {t.source for part in parts for t in part}
    left = [t for t in trajectories if t.source not in used][: settings.distill_trajectories]
    if not left:
        raise ConfigError(
            f"All {len(trajectories)} trajectories are of sources that budgets are fitted or validated on, so none is left to "
            "train the sampler adapter; give more texts or prompts, or lower calibrate.trajectories or calibrate.held_out."
        )
    return [replace(t, token_ids=t.token_ids[: settings.distill_tokens]) for t in left]


def add_trained_sampler(
    config: CalibrateConfig,
    policy: Policy,
    trajectories: Sequence[Trajectory],
    folder: Path,
    say: Callable[[str], None],
) -> None:
    """Give the policy its sampler adapter: trained now, or before a break, or as `sampler_adapter.path` has it.

    Raises:
        ConfigError: no token of the trajectories attends sparsely under rollout.schedule. ModelError: the adapter does not fit.
    """
    from leanroll.calibrate.trajectories import to_groups
    from leanroll.measure.selection import SparsePlan
    from leanroll.train import setup
    from leanroll.train.sampler_adapter import train_sampler_adapter

    settings, options = config.calibrate, config.sampler_adapter
    saved = folder / ADAPTER
    if settings.distill_steps and saved.is_dir():
        setup.add_sampler(policy, options.with_values(r=0, path=str(saved)))
        return
    if not settings.distill_steps and options.path is None:
        return
    setup.add_sampler(policy, options, seed=settings.seed % 2**31)
    if not settings.distill_steps:
        return
    schedule = setup.build_schedule(config.rollout)
    kv_dtype = setup.DTYPES[config.rollout.kv_dtype] if config.rollout.kv_dtype is not None else None
    records: list[dict[str, float]] = []

    def after_step(step: int, metrics: dict[str, float]) -> None:
        records.append({"step": step, **metrics})
        if step == 1 or step == settings.distill_steps or step % max(1, settings.distill_steps // 10) == 0:
            say(f"sampler adapter, step {step} of {settings.distill_steps}: KL {metrics['sampler_adapter/kl']:.4f}")

    train_sampler_adapter(
        policy,
        to_groups(trajectories),
        SparsePlan.of(policy.spec, schedule, kv_dtype=kv_dtype),
        config=options,
        steps=settings.distill_steps,
        temperature=config.rollout.temperature,
        max_tokens=max(len(t.token_ids) for t in trajectories),
        seed=settings.seed,
        after_step=after_step,
    )
    write_jsonl(folder / CURVE, records)
    assert policy.sampler is not None
    temporary = saved.with_suffix(".tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    policy.sampler.save(temporary)
    temporary.replace(saved)
