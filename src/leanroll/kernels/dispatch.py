"""Choosing a kernel backend. An unavailable backend raises; nothing falls back in silence.

| backend | runs on | what it is |
|---|---|---|
| reference | any device | plain torch, the truth, slow |
| cpu | CPU | C++ with runtime dispatch on the instruction set |
| triton | GPU | arrives in a later release |

`auto` is `cpu` on CPU tensors, and raises when the extension is not built; elsewhere it is `reference`.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from leanroll.errors import BackendUnavailable, ConfigError
from leanroll.kernels.layout import DecodeBatch, PagedLayer
from leanroll.kernels.reference import ReferenceBackend
from leanroll.kernels.scorers import Scorer

BACKENDS = ("auto", "reference", "cpu", "triton")


class KernelBackend(Protocol):
    """Tensors in, tensors out; shapes by the legend in `layout.py`. `reference.py` states what each function means."""

    name: str

    def write_kv(self, layer: PagedLayer, k: Tensor, v: Tensor, slots: Tensor) -> None:
        """k, v [T, Hk, D] into slots int64 [T] = page * S + offset."""
        ...

    def update_landmarks(self, layer: PagedLayer, page_ids: Tensor, scorer: Scorer) -> None:
        """Landmarks of full physical pages, page_ids int32 [n]."""
        ...

    def score_pages(self, q: Tensor, layer: PagedLayer, batch: DecodeBatch, scorer: Scorer) -> Tensor:
        """q [B, Hq, D] → float32 [B, Hk, Nmax], -inf on pages that are not candidates."""
        ...

    def select_pages(self, scores: Tensor, batch: DecodeBatch, page_size: int) -> Tensor:
        """→ int32 [B, Hk, K] logical pages, ascending, -1 padded; ties to the earlier page; N <= budget reads all."""
        ...

    def decode_attention(
        self,
        q: Tensor,
        layer: PagedLayer,
        batch: DecodeBatch,
        selected: Tensor | None,
        scale: float,
        softcap: float = 0.0,
        window: int = 0,
    ) -> Tensor:
        """→ [B, Hq, D] in q's dtype; selected None is dense, window > 0 reads only the last `window` tokens."""
        ...

    def decode_layer(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        layer: PagedLayer,
        batch: DecodeBatch,
        scorer: Scorer | None,
        scale: float,
        softcap: float = 0.0,
        window: int = 0,
        selected_out: Tensor | None = None,
    ) -> Tensor:
        """One layer's step: write k, v [B, Hk, D] at position L - 1, landmark if a page filled, score, select, attend.

        scorer None is a dense layer. selected_out: optional int32 [B, Hk, >=K], receives the selection, -1 padded.
        Returns [B, Hq, D] in q's dtype.
        """
        ...

    def sample_rows(self, logits: Tensor, uniforms: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        """Draw one token per row: logits float32 [B, V], uniforms float64 [B] → ids int64 [B], log-probs float32 [B]."""
        ...


class BackendStatus(NamedTuple):
    """One row of `leanroll doctor`."""

    name: str
    available: bool
    reason: str


def get_backend(name: str = "auto", device: torch.device | str = "cpu") -> KernelBackend:
    """Kernel backend for tensors on a device.

    Raises:
        ConfigError: unknown name.
        BackendUnavailable: the backend is not built, does not exist yet, or does not run on the device.
    """
    device_type = torch.device(device).type
    if name not in BACKENDS:
        raise ConfigError(f"kernel backend {name!r} is unknown; expected one of {', '.join(BACKENDS)}.")
    if name == "reference" or (name == "auto" and device_type != "cpu"):
        return ReferenceBackend()
    if name == "triton":
        raise BackendUnavailable(
            "kernel backend 'triton' arrives in a later release; on a GPU use 'reference' (or 'auto', which picks it)."
        )
    if device_type != "cpu":
        raise BackendUnavailable(f"kernel backend 'cpu' works on CPU tensors, got device {device_type!r}; use 'auto'.")
    from leanroll.kernels.cpu.backend import CpuBackend

    return CpuBackend()


def backend_report() -> list[BackendStatus]:
    """Every backend, whether it can run here, and why."""
    from leanroll.kernels.cpu.native import describe, native

    report = [BackendStatus("reference", True, f"plain torch {torch.__version__}; 'auto' picks it on GPU tensors")]
    try:
        native()
    except BackendUnavailable as error:
        report.append(BackendStatus("cpu", False, str(error)))
    else:
        report.append(BackendStatus("cpu", True, f"{describe()}; 'auto' picks it on CPU tensors"))
    report.append(BackendStatus("triton", False, "arrives in a later release"))
    return report
