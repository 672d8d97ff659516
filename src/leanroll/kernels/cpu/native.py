"""Loading the C++ extension, choosing its instruction set, and reading tensors as raw pointers."""

from __future__ import annotations

import functools
import importlib
import os
from types import ModuleType

import torch
from torch import Tensor

from leanroll.errors import BackendUnavailable, UserError

ISA_VARIABLE = "LEANROLL_CPU_ISA"
"""Environment variable that forces an instruction set: portable, avx2, avx512_bf16 or amx_bf16."""

_DTYPES = {torch.float32: 0, torch.bfloat16: 1}


@functools.cache
def native() -> ModuleType:
    """The extension module.

    Raises:
        BackendUnavailable: it was not built, cannot be loaded, or the forced instruction set does not exist here.
    """
    try:
        # torch is imported above, since the extension takes its threads from the OpenMP runtime that torch loads.
        module = importlib.import_module("leanroll.kernels.cpu._cpu")
    except ImportError as error:
        raise BackendUnavailable(
            f"kernel backend 'cpu' is not built ({error}); build it with `pip install --no-build-isolation -e .` in a "
            "clone (needs a C++17 compiler and CMake), or ask for the slow plain-torch kernels: kernel 'reference'."
        ) from error
    forced = os.environ.get(ISA_VARIABLE)
    if forced:
        _set_isa(module, forced)
    return module


def _set_isa(module: ModuleType, name: str) -> None:
    if not module.set_isa(name):
        raise BackendUnavailable(
            f"instruction set {name!r} is unknown or not supported by this machine; expected one of "
            f"{', '.join(module.available_isas())} (set by {ISA_VARIABLE} or use_isa)."
        )


def use_isa(name: str) -> None:
    """Force an instruction set for the whole process; for tests and measurements.

    Raises:
        BackendUnavailable: unknown, or this machine does not have it.
    """
    _set_isa(native(), name)


def available_isas() -> tuple[str, ...]:
    """Instruction sets this machine can run, best first; the first one is used unless another is forced."""
    return tuple(native().available_isas())


def describe() -> str:
    """One line for `leanroll doctor`: instruction set in use, those available, compiler, threads."""
    module = native()
    return (
        f"instruction set {module.isa()} of {', '.join(module.available_isas())}; built with {module.compiler()}; "
        f"{torch.get_num_threads()} threads of {module.openmp_library()}"
    )


def dtype_code(tensor: Tensor, name: str) -> int:
    """Number by which C++ knows a dtype.

    Raises:
        UserError: the dtype is not bfloat16 or float32.
    """
    code = _DTYPES.get(tensor.dtype)
    if code is None:
        raise UserError(
            f"{name} is {tensor.dtype}; the CPU kernels take bfloat16 and float32. Convert it, or use kernel 'reference'."
        )
    return code


def check(tensor: Tensor, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> int:
    """Address of a tensor that C++ may read or write as [shape] of a dtype.

    Raises:
        UserError: other shape or dtype, not contiguous, or not on the CPU.
    """
    if tensor.shape != shape or tensor.dtype != dtype or not tensor.is_contiguous() or not tensor.is_cpu:
        raise UserError(
            f"{name} is {tuple(tensor.shape)} {tensor.dtype} on {tensor.device}"
            f"{'' if tensor.is_contiguous() else ', not contiguous'}; expected a contiguous {shape} {dtype} on the CPU."
        )
    return tensor.data_ptr()
