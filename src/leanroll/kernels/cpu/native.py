"""Loading the C++ extension, and choosing its instruction set."""

from __future__ import annotations

import functools
import importlib
from types import ModuleType

import torch  # noqa: F401  must come first: the extension shares the OpenMP runtime that torch loads

from leanroll.errors import BackendUnavailable


@functools.cache
def native() -> ModuleType:
    """The extension module.

    Raises:
        BackendUnavailable: it was not built, or cannot be loaded.
    """
    try:
        return importlib.import_module("leanroll.kernels.cpu._cpu")
    except ImportError as error:
        raise BackendUnavailable(
            f"kernel backend 'cpu' is not built ({error}); build it with `pip install --no-build-isolation -e .` "
            "in a clone (needs a C++17 compiler and CMake), or ask for the slow plain-torch kernels with kernel 'reference'."
        ) from error


def describe() -> str:
    """One line for `leanroll doctor`: the instruction set in use, those available, and the compiler."""
    module = native()
    return f"instruction set {module.isa()} of {', '.join(module.available_isas())}; built with {module.compiler()}"
