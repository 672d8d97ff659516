"""Running a job with another engine; see the package for what a job and a result are."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from gguf import GGUFReader, LlamaFileType

from leanroll.calibrate.peers.run_transformers import decode, load_plain
from leanroll.calibrate.speed import available_gib
from leanroll.errors import BackendUnavailable, ConfigError

HERE = Path(__file__).parent
SCRIPTS = {"vllm": HERE / "run_vllm.py", "llama_cpp": HERE / "run_llama_cpp.py"}
"""What runs with the Python of the peer's own environment."""
_LAST_WORDS = 1500  # characters of a failed peer's output
_CACHE_COPIES = 1.3  # transformers builds the cache anew, layer by layer, for every token


class Peer(Protocol):
    """Another engine with a model.

    name: as in the options. note: in what it differs from our engine's work. same_weights: False where the weights are not the
    numbers that our engine multiplies with.
    """

    name: str
    note: str
    same_weights: bool

    def decode(self, job: Mapping[str, Any]) -> dict[str, Any]:
        """The result of a job. The peer adds the model.

        Raises:
            BackendUnavailable: it failed; the message has its last words.
        """
        ...


class TransformersPeer:
    """transformers' own `generate` in this process, on a model that nothing of ours has touched."""

    name = "transformers"
    same_weights = True

    def __init__(
        self, model: str, *, dtype: torch.dtype, device: torch.device | str = "cpu", revision: str | None = None
    ) -> None:
        self.note = "sdpa, dynamic cache; random cache instead of a prefill; no log-probs"
        self._model = load_plain(model, dtype=dtype, device=device, revision=revision)

    def decode(self, job: Mapping[str, Any]) -> dict[str, Any]:
        needed, room = _CACHE_COPIES * job.get("kv_gib", 0.0), available_gib(self._model.device)
        if needed > room:
            raise BackendUnavailable(f"transformers needs {needed:.1f} GiB for its cache, but {room:.1f} GiB are free.")
        try:
            return decode(self._model, job)
        except (RuntimeError, ValueError, TypeError) as error:
            # torch's for memory, transformers' for what it does not support
            raise BackendUnavailable(f"transformers' generate failed: {error}") from error


class ProcessPeer:
    """A script in another Python environment.

    Args:
        name: "vllm" or "llama_cpp". python: interpreter of its environment. model: what the job's model is.

    Raises:
        ConfigError: there is no such interpreter.
    """

    def __init__(
        self, name: str, python: str, model: str, *, note: str, same_weights: bool, revision: str | None = None
    ) -> None:
        self.name, self.note, self.same_weights = name, note, same_weights
        # Not resolved: the python of a virtual environment is a link, and is told by its place.
        self._python = Path(python).expanduser().absolute()
        if not (self._python.is_file() and os.access(self._python, os.X_OK)):
            raise ConfigError(
                f"bench.peer_python.{name} is {python!r}, but there is no such program; give the Python of the environment that "
                f"has {name}."
            )
        self._job = {"model": model} | ({} if revision is None else {"revision": revision})

    def decode(self, job: Mapping[str, Any]) -> dict[str, Any]:
        variables = vllm_variables(self._python) if self.name == "vllm" else {}
        return run_job(self.name, [str(self._python), str(SCRIPTS[self.name])], {**job, **self._job}, variables)


def vllm_variables(python: Path) -> dict[str, str]:
    """Environment of a vLLM process: its own programs first, and the OpenMP that it asks for "for best performance"."""
    variables = {"PATH": f"{python.parent}{os.pathsep}{os.environ.get('PATH', '')}"}
    openmp = python.parent.parent / "lib" / "libiomp5.so"
    return variables | ({"LD_PRELOAD": str(openmp)} if openmp.is_file() else {})


def run_job(
    name: str, command: Sequence[str], job: Mapping[str, Any], variables: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Run a command on a job file; the result is the last line it prints that is one.

    Raises:
        BackendUnavailable: the process fails or prints no result.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "job.json"
        path.write_text(json.dumps(job), encoding="utf-8")
        done = subprocess.run(
            [*command, str(path)], capture_output=True, text=True, check=False, env={**os.environ, **(variables or {})}
        )
    lines = [line for line in done.stdout.splitlines() if line.startswith('{"step_seconds"')]
    if done.returncode != 0 or not lines:
        what = f"ended with code {done.returncode}" if done.returncode != 0 else "printed no result"
        words = (done.stderr.strip() or done.stdout.strip())[-_LAST_WORDS:]
        raise BackendUnavailable(f"The peer {name} ({command[0]}) {what}. Its last words: {words or 'none'}")
    result: dict[str, Any] = json.loads(lines[-1])
    return result


def llama_cpp_note(gguf: Path) -> str:
    """What a GGUF file's weights are, for the row of llama.cpp.

    Raises:
        ConfigError: not a GGUF file.
    """
    try:
        field = GGUFReader(gguf).fields.get("general.file_type")
    except (ValueError, OSError) as error:
        raise ConfigError(f"bench.gguf {str(gguf)!r} cannot be read ({error}); expected a GGUF file.") from error
    kind = "unknown" if field is None else LlamaFileType(field.contents()).name.removeprefix("MOSTLY_")
    return f"{gguf.name}: {kind} weights, not the bytes that leanroll reads; fp16 cache; no log-probs"
