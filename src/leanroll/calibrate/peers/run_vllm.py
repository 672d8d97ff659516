"""Decode a job with vLLM's CPU build; runs in vLLM's own environment and imports nothing of leanroll.

    VENV/bin/python run_vllm.py job.json

The engine core runs in this process, so that one `step()` of the engine is one decode step and nothing is hidden in
another process. Prefix caching is off: every prompt is computed and stored. See `leanroll.calibrate.peers` for the job and
the result.
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
from pathlib import Path

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")

MIN_KV_GIB = 4


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", str(max(MIN_KV_GIB, math.ceil(job.get("kv_gib", 0)))))
    # All cores for the computation; left to itself vLLM keeps one for its front end.
    cores = sorted(os.sched_getaffinity(0))[: job["threads"]]
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", ",".join(map(str, cores)))

    import torch
    import vllm
    from vllm import LLM, SamplingParams

    prompts, num_tokens = job["prompts"], job["num_tokens"]
    longest = max(map(len, prompts)) + num_tokens
    llm = LLM(
        model=job["model"],
        revision=job.get("revision"),
        dtype=job["dtype"],
        max_model_len=longest + 1,
        max_num_seqs=len(prompts),
        max_num_batched_tokens=2048,
        enable_prefix_caching=False,
        enforce_eager=job.get("eager", False),
        seed=0,
    )
    sampling = SamplingParams(
        temperature=job["temperature"], max_tokens=num_tokens, ignore_eos=True, detokenize=False, seed=None
    )
    engine = llm.llm_engine
    for i, prompt in enumerate(prompts):
        engine.add_request(str(i), {"prompt_token_ids": prompt}, sampling)

    generated: list[list[int]] = [[] for _ in prompts]
    steps: list[float] = []
    began = last = time.perf_counter()
    prefill_seconds = 0.0
    while engine.has_unfinished_requests():
        before = sum(map(len, generated))
        all_running = all(generated)
        for output in engine.step():
            generated[int(output.request_id)] = list(output.outputs[0].token_ids)
        now = time.perf_counter()
        if not all_running:
            prefill_seconds = now - began
        elif sum(map(len, generated)) - before == len(prompts):  # a step in which every sequence got one token
            steps.append(now - last)
        last = now
    result = {
        "step_seconds": steps,
        "prefill_seconds": prefill_seconds,
        "token_ids": generated,
        "versions": {"vllm": vllm.__version__, "torch": torch.__version__},
        "threads": torch.get_num_threads(),
    }
    print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
