"""Decode a job with llama.cpp through llama-cpp-python; runs in an environment of its own and imports nothing of leanroll.

    VENV/bin/python run_llama_cpp.py job.json

The job's model is a GGUF file. All sequences are decoded together: one `llama_decode` per step takes a token of each, as our
engine does, and tokens are drawn by llama.cpp's own samplers. Its KV cache is fp16 and its weights are what the file holds,
quantised ones included. See `leanroll.calibrate.peers` for the job and the result.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import llama_cpp as lib

PREFILL_TOKENS = 512


def has_amx() -> bool:
    """Whether this machine multiplies with AMX tiles; False where Linux does not tell."""
    info = Path("/proc/cpuinfo")
    return info.is_file() and "amx_tile" in info.read_text(encoding="utf-8", errors="replace")


class Decoder:
    """A model with one context of `num_seqs` sequences of up to `length` tokens."""

    def __init__(self, path: str, num_seqs: int, length: int, threads: int) -> None:
        lib.llama_backend_init()
        params = lib.llama_model_default_params()
        params.n_gpu_layers = 0
        # llama-cpp-python 0.3.36 ends in a segmentation fault where it repacks Q4_1 weights for AMX tiles.
        params.use_extra_bufts = self.repacks = not has_amx()
        self.model = lib.llama_model_load_from_file(path.encode(), params)
        if not self.model:
            raise SystemExit(f"llama.cpp cannot load {path}; expected a GGUF file of a causal language model.")
        options = lib.llama_context_default_params()
        per_seq = -(-length // 256) * 256  # llama.cpp pads the cache of a sequence to that
        options.n_ctx = num_seqs * per_seq
        options.n_batch = options.n_ubatch = max(PREFILL_TOKENS, num_seqs)
        options.n_seq_max = num_seqs
        options.n_threads = options.n_threads_batch = threads
        self.context = lib.llama_init_from_model(self.model, options)
        if not self.context:
            raise SystemExit(f"llama.cpp cannot make a context for {num_seqs} sequences of {per_seq} tokens.")
        self.batch = lib.llama_batch_init(options.n_batch, 0, 1)

    def feed(self, rows: Sequence[tuple[int, int, int, bool]]) -> None:
        """One forward over (token, position, sequence, whether its logits are wanted)."""
        batch = self.batch
        batch.n_tokens = len(rows)
        for i, (token, position, sequence, wanted) in enumerate(rows):
            batch.token[i] = token
            batch.pos[i] = position
            batch.n_seq_id[i] = 1
            batch.seq_id[i][0] = sequence
            batch.logits[i] = int(wanted)
        code = lib.llama_decode(self.context, batch)
        if code != 0:
            raise SystemExit(f"llama_decode failed with code {code} on {len(rows)} tokens.")

    def sampler(self, temperature: float) -> Any:
        """Greedy at 0; otherwise a draw from the whole distribution."""
        chain = lib.llama_sampler_chain_init(lib.llama_sampler_chain_default_params())
        if temperature > 0:
            lib.llama_sampler_chain_add(chain, lib.llama_sampler_init_temp(temperature))
            lib.llama_sampler_chain_add(chain, lib.llama_sampler_init_dist(0))
        else:
            lib.llama_sampler_chain_add(chain, lib.llama_sampler_init_greedy())
        return chain


def decode(job: dict[str, Any]) -> dict[str, Any]:
    """Prefill every prompt, then one step per token for all sequences together."""
    prompts, num_tokens = job["prompts"], job["num_tokens"]
    decoder = Decoder(job["model"], len(prompts), len(prompts[0]) + num_tokens, job["threads"])
    sampler = decoder.sampler(job["temperature"])
    generated: list[list[int]] = []
    began = time.perf_counter()
    for sequence, prompt in enumerate(prompts):
        rows = [(token, i, sequence, i == len(prompt) - 1) for i, token in enumerate(prompt)]
        for start in range(0, len(rows), PREFILL_TOKENS):
            part = rows[start : start + PREFILL_TOKENS]
            decoder.feed(part)
        generated.append([lib.llama_sampler_sample(sampler, decoder.context, len(part) - 1)])
    times = [time.perf_counter()]
    for step in range(num_tokens - 1):
        decoder.feed([(ids[-1], len(prompts[i]) + step, i, True) for i, ids in enumerate(generated)])
        for i, ids in enumerate(generated):
            ids.append(lib.llama_sampler_sample(sampler, decoder.context, i))
        times.append(time.perf_counter())
    return {
        "step_seconds": [b - a for a, b in pairwise(times)],
        "prefill_seconds": times[0] - began,
        "token_ids": generated,
        "versions": {"llama_cpp": lib.__version__, "weights": "repacked" if decoder.repacks else "as in the file"},
        "threads": job["threads"],
    }


def main() -> None:
    print(json.dumps(decode(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))), flush=True)


if __name__ == "__main__":
    main()
