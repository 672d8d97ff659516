"""Decode a job with transformers' `generate`: sdpa attention and its own dynamic KV cache.

    python -m benchmarks.peers.run_transformers job.json

See `compare.py` for the job and the result. The prompts of a job have one length, so nothing is padded.
"""

from __future__ import annotations

import json
import os
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import transformers
from torch import Tensor
from transformers import AutoModelForCausalLM, StoppingCriteria, StoppingCriteriaList


class StepClock(StoppingCriteria):
    """Notes the time after every generated token and stops nothing."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def __call__(self, input_ids: Tensor, scores: Tensor, **kwargs: Any) -> Tensor:
        self.times.append(time.perf_counter())
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    torch.set_num_threads(job["threads"])
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(
        job["model"], dtype=getattr(torch, job["dtype"]), attn_implementation="sdpa", local_files_only=True
    ).eval()
    model.generation_config.eos_token_id = None  # every sequence runs to its full length
    model.generation_config.pad_token_id = 0
    input_ids = torch.tensor(job["prompts"])
    clock = StepClock()
    greedy = job["temperature"] == 0
    options: dict[str, Any] = {"do_sample": False} if greedy else {"do_sample": True, "top_k": 0, "top_p": 1.0}
    began = time.perf_counter()
    with torch.inference_mode():
        output = model.generate(
            input_ids,
            attention_mask=torch.ones_like(input_ids),
            max_new_tokens=job["num_tokens"],
            stopping_criteria=StoppingCriteriaList([clock]),
            **options,
        )
    result = {
        "step_seconds": [b - a for a, b in pairwise(clock.times)],
        "prefill_seconds": clock.times[0] - began,
        "token_ids": output[:, input_ids.shape[1] :].tolist(),
        "versions": {"transformers": transformers.__version__, "torch": torch.__version__},
        "threads": torch.get_num_threads(),
    }
    print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
