"""C++ kernels for CPUs. Importing this needs no built extension; the first call does."""

from leanroll.kernels.cpu.backend import CpuBackend
from leanroll.kernels.cpu.native import available_isas, describe, use_isa
from leanroll.kernels.cpu.ops import LoraWeights, linear_group, rms_norm, rope, sample_rows, silu_mul

__all__ = [
    "CpuBackend",
    "LoraWeights",
    "available_isas",
    "describe",
    "linear_group",
    "rms_norm",
    "rope",
    "sample_rows",
    "silu_mul",
    "use_isa",
]
