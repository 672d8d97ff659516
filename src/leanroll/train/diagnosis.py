"""What is saved when a run stops because a loss or gradient is not finite."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from leanroll.measure.packing import PackedBatch
from leanroll.rundir import RunDir, step_name, write_json
from leanroll.rundir_storage import storing


def write_diagnosis(
    run: RunDir,
    step: int,
    *,
    loss: float,
    grad_norm: float,
    bad_gradients: Sequence[str],
    batch: PackedBatch,
    values: Mapping[str, np.ndarray],
    sample_ids: np.ndarray,
    sums: Mapping[str, float],
) -> Path:
    """Write diagnosis/step-NNNNNN.json: the numbers of the offending micro-batch and its completions.

    JSON has no NaN or infinity, so such values are written as the strings "nan", "inf" and "-inf".

    values: by name, [R], one per completion token of the micro-batch, whose samples are `sample_ids` [R]. sums: over the
        micro-batch.

    Raises:
        StorageError: the disk refused it.
    """
    completions = [
        {
            "sample": sample,
            "prompt_index": rollout.prompt_index,
            "sample_index": rollout.sample_index,
            "token_ids": list(rollout.token_ids),
            "text": rollout.text,
            "finish_reason": rollout.finish_reason,
            **{name: [_plain(x) for x in array[sample_ids == sample]] for name, array in values.items()},
        }
        for sample, rollout in sorted(batch.rollouts.items())
    ]
    path = run.diagnosis_path(f"{step_name(step)}.json")
    record = {
        "step": step,
        "loss": _plain(loss),
        "grad_norm": _plain(grad_norm),
        "parameters_with_bad_gradients": list(bad_gradients),
        "input_tokens": batch.num_inputs,
        "statistics": {name: _describe(array) for name, array in values.items()},
        "sums": {name: _plain(value) for name, value in sums.items()},
        "completions": completions,
    }
    with storing(path):
        write_json(path, record)
    return path


def _plain(value: float) -> float | str:
    number = float(value)
    return number if math.isfinite(number) else str(number)


def _describe(values: np.ndarray) -> dict[str, Any]:
    finite = values[np.isfinite(values)]
    summary: dict[str, Any] = {"count": int(values.size), "not_finite": int(values.size - finite.size)}
    if finite.size:
        summary |= {"min": float(finite.min()), "max": float(finite.max()), "mean": float(finite.mean())}
    return summary
