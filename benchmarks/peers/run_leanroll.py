"""Decode a job with leanroll's engine, dense or sparse, timed by its progress callback.

    python -m benchmarks.peers.run_leanroll job.json [--pages 64] [--scorer softmax]

See `leanroll.calibrate.peers` for the job and the result. All prompts must differ, otherwise prefix sharing lets them share memory.
"""

from __future__ import annotations

import argparse
import json
import time
from itertools import pairwise
from pathlib import Path

import torch

import leanroll
from benchmarks.engine_decode import Variant, make_engine
from leanroll.calibrate.agreement import as_prompts
from leanroll.models.load import load_policy
from leanroll.rollout.batching import RolloutProgress
from leanroll.types import SamplingParams


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("job", type=Path)
    parser.add_argument("--pages", type=int, default=None, help="dense without")
    parser.add_argument("--scorer", default="softmax")
    options = parser.parse_args()
    job = json.loads(options.job.read_text(encoding="utf-8"))
    torch.set_num_threads(job["threads"])
    prompts = job["prompts"]
    policy = load_policy(job["model"], dtype=job["dtype"])
    engine = make_engine(policy, Variant(options.pages, options.scorer), len(prompts))
    sampling = SamplingParams(temperature=job["temperature"], max_completion_length=job["num_tokens"], ignore_stop=True)
    times: list[float] = []

    def after_step(now: RolloutProgress) -> None:
        times.append(time.perf_counter())

    began = time.perf_counter()
    groups = engine.generate(as_prompts(prompts), sampling, 1, progress=after_step)
    result = {
        "step_seconds": [b - a for a, b in pairwise(times)],
        "prefill_seconds": times[0] - began,  # and one decode step
        "token_ids": [list(group.rollouts[0].token_ids) for group in groups],
        "versions": {"leanroll": leanroll.__version__, "torch": torch.__version__},
        "threads": torch.get_num_threads(),
    }
    print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
