"""Choosing backends: never a silent fallback; and one OpenMP runtime per process."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from leanroll.errors import BackendUnavailable, ConfigError
from leanroll.kernels.cpu import CpuBackend, native, use_isa
from leanroll.kernels.dispatch import backend_report, get_backend
from leanroll.kernels.reference import ReferenceBackend


def run(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **environment}, capture_output=True, text=True, check=False
    )


def test_auto_takes_the_best_backend_of_the_device() -> None:
    assert isinstance(get_backend("auto", "cpu"), CpuBackend)
    assert isinstance(get_backend("auto", "cuda"), ReferenceBackend)
    assert isinstance(get_backend("reference", "cpu"), ReferenceBackend)


def test_what_is_not_there_raises() -> None:
    with pytest.raises(BackendUnavailable, match="later release"):
        get_backend("triton", "cuda")
    with pytest.raises(BackendUnavailable, match="CPU tensors"):
        get_backend("cpu", "cuda")
    with pytest.raises(ConfigError, match="expected one of"):
        get_backend("gpu")
    with pytest.raises(BackendUnavailable, match="expected one of"):
        use_isa("sse9")


def test_auto_without_the_extension_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "leanroll.kernels.cpu._cpu", None)
    native.native.cache_clear()
    try:
        with pytest.raises(BackendUnavailable, match="pip install"):
            get_backend("auto", "cpu")
        rows = {row.name: row for row in backend_report()}
        assert not rows["cpu"].available
        assert "pip install" in rows["cpu"].reason
        assert rows["reference"].available
    finally:
        native.native.cache_clear()


def test_report_names_the_instruction_set_in_use() -> None:
    rows = {row.name: row for row in backend_report()}
    assert rows["cpu"].available
    assert "instruction set" in rows["cpu"].reason
    assert not rows["triton"].available


def test_instruction_set_by_environment() -> None:
    code = "from leanroll.kernels.cpu.native import native; print(native().isa())"
    assert run(code, LEANROLL_CPU_ISA="portable").stdout.strip() == "portable"
    failed = run(code, LEANROLL_CPU_ISA="sse9")
    assert failed.returncode != 0
    assert "BackendUnavailable" in failed.stderr


@pytest.mark.skipif(not os.path.exists("/proc/self/maps"), reason="needs /proc")
def test_one_openmp_runtime_is_loaded() -> None:
    code = """
import torch
from leanroll.kernels.cpu import linear_group
from leanroll.kernels.cpu.native import native
torch.set_num_threads(2)
linear_group(torch.randn(4, 512), [torch.randn(512, 512)])  # large enough to use threads
torch.randn(512, 512) @ torch.randn(512, 512)
files = {line.split()[-1] for line in open("/proc/self/maps") if ".so" in line}
runtimes = [f for f in files if any(name in f for name in ("libgomp", "libomp", "libiomp"))]
assert len(runtimes) == 1, runtimes
assert native().openmp_library() == runtimes[0], (native().openmp_library(), runtimes)
"""
    done = run(code)
    assert done.returncode == 0, done.stderr
