"""What `measure_speed` finds: step times by length, a trajectory, other engines; and the same as JSON. Never imports torch."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from leanroll.calibrate.devices import Device
from leanroll.calibrate.summary import Summary
from leanroll.rollout.schedule import BudgetSchedule

if TYPE_CHECKING:
    from leanroll.calibrate.agreement import Agreement


@dataclass(frozen=True, slots=True)
class SpeedRow:
    """One length.

    length: tokens that the timed sequences end with. tokens: in the cache in the middle of the steps. num_pages, budget: held at
    that point, and read on a sparse layer. dense, sparse: seconds per step. speedup: dense over sparse, one value per round.
    predicted_dense, predicted_sparse: seconds per step by the cost model; None without a device.
    """

    length: int
    tokens: int
    num_pages: int
    budget: int
    dense: Summary
    sparse: Summary
    speedup: Summary
    predicted_dense: float | None = None
    predicted_sparse: float | None = None

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready, times in ms."""
        found: dict[str, Any] = {
            "length": self.length,
            "tokens": self.tokens,
            "num_pages": self.num_pages,
            "budget": self.budget,
            "dense_ms": self.dense.scaled(1e3).as_dict(3),
            "sparse_ms": self.sparse.scaled(1e3).as_dict(3),
            "speedup": self.speedup.as_dict(3),
        }
        if self.predicted_dense is not None and self.predicted_sparse is not None:
            found["predicted_dense_ms"] = round(1e3 * self.predicted_dense, 3)
            found["predicted_sparse_ms"] = round(1e3 * self.predicted_sparse, 3)
            found["predicted_speedup"] = round(self.predicted_dense / self.predicted_sparse, 3)
        return found


@dataclass(frozen=True, slots=True)
class TrajectorySpeed:
    """A batch that grows from prompt_length to max_length tokens together: step times between measured lengths are interpolated.

    dense_seconds, sparse_seconds: of all steps. num_tokens: drawn in them. speedup: their ratio, one value per round.
    """

    prompt_length: int
    max_length: int
    num_tokens: int
    dense_seconds: float
    sparse_seconds: float
    speedup: Summary
    predicted_dense_seconds: float | None = None
    predicted_sparse_seconds: float | None = None

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        found: dict[str, Any] = {
            "prompt_length": self.prompt_length,
            "max_length": self.max_length,
            "num_tokens": self.num_tokens,
            "dense_seconds": round(self.dense_seconds, 3),
            "sparse_seconds": round(self.sparse_seconds, 3),
            "speedup": self.speedup.as_dict(3),
        }
        if self.predicted_dense_seconds is not None and self.predicted_sparse_seconds is not None:
            found["predicted_dense_seconds"] = round(self.predicted_dense_seconds, 3)
            found["predicted_sparse_seconds"] = round(self.predicted_sparse_seconds, 3)
            found["predicted_speedup"] = round(self.predicted_dense_seconds / self.predicted_sparse_seconds, 3)
        return found


@dataclass(slots=True)
class PeerSpeed:
    """Another engine on the same work.

    note: in what it differs. regret: of its greedy tokens, in nats. measured, steps: seconds per step by length.
    trajectory_seconds: None when a length is missing. error: why it stopped; None when it did not.
    """

    name: str
    note: str
    regret: float
    versions: dict[str, str]
    measured: dict[int, list[float]] = field(default_factory=dict)
    trajectory_seconds: float | None = None
    error: str | None = None

    @property
    def steps(self) -> dict[int, Summary]:
        """Seconds per step by length."""
        return {length: Summary.of(values) for length, values in sorted(self.measured.items())}

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready, times in ms."""
        return {
            "name": self.name,
            "note": self.note,
            "greedy_regret": self.regret,
            "versions": self.versions,
            "step_ms": {str(length): step.scaled(1e3).as_dict(3) for length, step in self.steps.items()},
            "trajectory_seconds": None if self.trajectory_seconds is None else round(self.trajectory_seconds, 3),
            "error": self.error,
        }


@dataclass(frozen=True, slots=True)
class SpeedTable:
    """All that was measured. device_name, kernel, dtype, kv_dtype, threads: with what. device: of the predictions."""

    model: str
    schedule: BudgetSchedule
    batch: int
    device_name: str
    kernel: str
    dtype: str
    kv_dtype: str
    threads: int
    checks: Agreement
    rows: tuple[SpeedRow, ...]
    trajectory: TrajectorySpeed
    device: Device | None = None
    peers: tuple[PeerSpeed, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        s = self.schedule
        return {
            "model": self.model,
            "schedule": {
                "name": s.name,
                "page_size": s.page_size,
                "bin_pages": s.bin_pages,
                "pages": list(s.pages),
                "dense_layers": list(s.dense_layers),
                "scorer": s.scorer,
                "target": s.target,
            },
            "batch": self.batch,
            "device": self.device_name,
            "kernel": self.kernel,
            "dtype": self.dtype,
            "kv_dtype": self.kv_dtype,
            "threads": self.threads,
            "checks": asdict(self.checks),
            "rows": [row.as_dict() for row in self.rows],
            "trajectory": self.trajectory.as_dict(),
            "predicted_for": None if self.device is None else asdict(self.device),
            "peers": [peer.as_dict() for peer in self.peers],
        }
