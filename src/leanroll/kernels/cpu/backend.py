"""The C++ backend: checks shapes and dtypes, then passes raw pointers."""

from __future__ import annotations

from leanroll.kernels.cpu.native import native


class CpuBackend:
    """`KernelBackend` on the C++ extension."""

    name = "cpu"

    def __init__(self) -> None:
        self._native = native()
