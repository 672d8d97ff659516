"""How fast a machine moves bytes and multiplies, as the cost model takes it. Never imports torch.

Named devices carry datasheet numbers, so what is predicted for them is a bound; `probe` measures the CPU at hand.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace

from leanroll.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Device:
    """Rates and overheads.

    bytes_per_second: reading memory in order.
    matmul_flops: FLOP/s of matrix products in the model's dtype (one multiply-add is two).
    attention_flops: FLOP/s of decode attention, 0: as matmul_flops. A GPU's tensor cores do not mind a few query heads per KV
        head; a CPU's attention has its own loops, slower than a product.
    scoring_flops: FLOP/s of products with landmarks, 0: as attention_flops. Whole numbers multiply faster.
    weight_bytes_per_second: weights through the products of a small batch, 0: as bytes_per_second.
    scattered_overlap: share of the shorter of arithmetic and memory time that hides behind the longer where few pages of
        many are read: 1, all of it (the part takes the longer of the two); 0, none (it takes their sum). Parts that read
        memory in order always overlap, and so does the share of pages behind which the next one is read, too.
    candidate_seconds: scoring and selecting, per candidate page, KV head and sparse layer, beyond arithmetic and traffic.
    layer_seconds, layer_row_seconds: everything else (launches, Python, norms, sampling), per layer of a step, and per
        layer and sequence.

    Raises:
        ConfigError: a rate that is not positive, an overhead that is negative, or an overlap outside [0, 1].
    """

    name: str
    bytes_per_second: float
    matmul_flops: float
    attention_flops: float = 0.0
    scoring_flops: float = 0.0
    weight_bytes_per_second: float = 0.0
    scattered_overlap: float = 1.0
    candidate_seconds: float = 0.0
    layer_seconds: float = 0.0
    layer_row_seconds: float = 0.0

    def __post_init__(self) -> None:
        for field in fields(self)[1:]:
            value = getattr(self, field.name)
            positive = field.name in ("bytes_per_second", "matmul_flops")
            if not 0 <= value < math.inf or (positive and not value):
                raise ConfigError(
                    f"device {self.name!r}: {field.name} is {value}; expected a finite number {'>' if positive else '>='} 0."
                )
        if self.scattered_overlap > 1:
            raise ConfigError(
                f"device {self.name!r}: scattered_overlap is {self.scattered_overlap}; expected a share from 0 to 1."
            )

    def slowed(self, memory: float = 1.0, arithmetic: float = 1.0) -> Device:
        """The device at these shares of its memory and arithmetic rates (what kernels reach of a datasheet)."""
        return replace(
            self,
            bytes_per_second=self.bytes_per_second * memory,
            weight_bytes_per_second=self.weight_bytes_per_second * memory,
            matmul_flops=self.matmul_flops * arithmetic,
            attention_flops=self.attention_flops * arithmetic,
            scoring_flops=self.scoring_flops * arithmetic,
        )

    def with_overheads(self, layer_seconds: float, layer_row_seconds: float = 0.0) -> Device:
        """The device with these overheads."""
        return replace(self, layer_seconds=layer_seconds, layer_row_seconds=layer_row_seconds)


# Datasheets of the SXM modules: memory bandwidth, and bf16 on tensor cores without structured sparsity.
_NAMED = {
    "h100": Device("h100", bytes_per_second=3.35e12, matmul_flops=989e12),
    "h200": Device("h200", bytes_per_second=4.8e12, matmul_flops=989e12),
    "b200": Device("b200", bytes_per_second=8.0e12, matmul_flops=2250e12),
}


def named_device(name: str) -> Device:
    """A GPU at its datasheet's peak, without overheads.

    Raises:
        ConfigError: the name is unknown.
    """
    if name not in _NAMED:
        raise ConfigError(
            f"device {name!r} is unknown; expected one of {', '.join(_NAMED)}, or measure the CPU at hand (calibrate.probe)."
        )
    return _NAMED[name]


def device_names() -> tuple[str, ...]:
    """Names that `named_device` knows."""
    return tuple(_NAMED)
