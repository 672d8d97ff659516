"""What a step of full rollouts would have cost beside the early-stopped one, measured side by side at the end of a run."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from leanroll.train.distill_update import DistillBatch

_PEAK = Path("/proc/self/clear_refs")


@dataclass(frozen=True, slots=True)
class StepMeasurement:
    """One step that was not applied. num_tokens: limit of a completion. mean_length: tokens generated per completion.
    peak_gib: largest memory during the step (of the GPU, where there is one); None where the system cannot tell.
    """

    num_tokens: int
    mean_length: float
    seconds: float
    peak_gib: float | None

    @classmethod
    def of(cls, step: Callable[[], DistillBatch], device: torch.device) -> StepMeasurement:
        """Run the step once. One call: a figure for a closing line, not a benchmark."""
        resettable = _reset_peak(device)
        began = time.perf_counter()
        batch = step()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds = time.perf_counter() - began
        return cls(
            num_tokens=int(batch.metrics["distill/num_tokens"]),
            mean_length=batch.metrics["completion_length/mean"],
            seconds=seconds,
            peak_gib=_peak_gib(device) if resettable else None,
        )


@dataclass(frozen=True, slots=True)
class FullComparison:
    """The same prompts under the same student, early stopped and in full."""

    early: StepMeasurement
    full: StepMeasurement

    def line(self) -> str:
        """For the closing line."""
        early, full = self.early, self.full
        text = f"a step {early.seconds:.1f} s against {full.seconds:.1f} s with full rollouts"
        text += f" ({full.seconds / early.seconds:.1f}x, {full.mean_length:.0f} tokens)"
        if early.peak_gib is not None and full.peak_gib is not None:
            text += f", {early.peak_gib:.1f} GiB against {full.peak_gib:.1f}"
        return text


def _reset_peak(device: torch.device) -> bool:
    """Set the peak back to what is in use now; False where that cannot be done."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return True
    try:
        _PEAK.write_text("5")
    except OSError:  # not Linux, or a kernel that forbids it: the peak would be that of the whole run
        return False
    return True


def _peak_gib(device: torch.device) -> float:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return int(next(line for line in status.splitlines() if line.startswith("VmHWM")).split()[1]) / 2**20
