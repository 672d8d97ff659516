"""C++ kernels for CPUs. Importing this needs no built extension; the first call does."""

from leanroll.kernels.cpu.backend import CpuBackend
from leanroll.kernels.cpu.native import available_isas, describe, use_isa
from leanroll.kernels.cpu.ops import (
    LoraWeights,
    has_tiles,
    linear_group,
    rms_norm,
    rope,
    sample_rows,
    silu_mul,
    wide_products,
)

__all__ = [
    "CpuBackend",
    "LoraWeights",
    "available_isas",
    "describe",
    "has_tiles",
    "linear_group",
    "rms_norm",
    "rope",
    "sample_rows",
    "silu_mul",
    "use_isa",
    "wide_products",
]
