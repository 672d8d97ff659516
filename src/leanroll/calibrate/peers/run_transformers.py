"""Decode a job with transformers' `generate`: sdpa attention and its own dynamic KV cache.

    python -m leanroll.calibrate.peers.run_transformers job.json

See `leanroll.calibrate.peers` for the job and the result. The prompts of a job have one length, so nothing is padded.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel, StoppingCriteria, StoppingCriteriaList


class StepClock(StoppingCriteria):
    """Notes the time after every generated token and stops nothing."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def __call__(self, input_ids: Tensor, scores: Tensor, **kwargs: Any) -> Tensor:
        if input_ids.is_cuda:
            torch.cuda.synchronize(input_ids.device)
        self.times.append(time.perf_counter())
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)


def load_plain(
    name: str, *, dtype: torch.dtype, device: torch.device | str = "cpu", revision: str | None = None
) -> PreTrainedModel:
    """The model as transformers loads it, with its own attention, from a folder or from what has been downloaded."""
    model = AutoModelForCausalLM.from_pretrained(
        name, revision=revision, dtype=dtype, attn_implementation="sdpa", local_files_only=True
    )
    torch.nn.Module.to(model, torch.device(device))
    model.eval()
    model.generation_config.eos_token_id = None  # every sequence runs to its full length
    model.generation_config.pad_token_id = 0
    return model


def random_cache(model: PreTrainedModel, batch: int, length: int) -> DynamicCache:
    """A cache as after a prefill of `length` tokens, its keys and values random; sliding windows keep what they would."""
    config = model.config.get_text_config()
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    cache = DynamicCache(config=model.config)
    for layer in range(config.num_hidden_layers):
        k, v = (torch.randn(batch, heads, length, dim, dtype=model.dtype, device=model.device) for _ in range(2))
        cache.update(k, v, layer)
    return cache


def decode(model: PreTrainedModel, job: Mapping[str, Any]) -> dict[str, Any]:
    """Run `generate` on the job's prompts; with `random_cache`, everything before a prompt's last token is not computed."""
    torch.manual_seed(0)
    input_ids = torch.tensor(job["prompts"], device=model.device)
    clock = StepClock()
    options: dict[str, Any] = {"do_sample": False}
    if job["temperature"] > 0:
        options = {"do_sample": True, "top_k": 0, "top_p": 1.0, "temperature": job["temperature"]}
    with torch.inference_mode():
        if job.get("random_cache"):
            options["past_key_values"] = random_cache(model, len(input_ids), input_ids.shape[1] - 1)
        generate: Any = model.generate  # typed as a tensor, like every attribute of a module
        began = time.perf_counter()
        output = generate(
            input_ids,
            attention_mask=torch.ones_like(input_ids),
            max_new_tokens=job["num_tokens"],
            stopping_criteria=StoppingCriteriaList([clock]),
            **options,
        )
    return {
        "step_seconds": [b - a for a, b in pairwise(clock.times)],
        "prefill_seconds": clock.times[0] - began,
        "token_ids": output[:, input_ids.shape[1] :].tolist(),
        "versions": {"transformers": transformers.__version__, "torch": torch.__version__},
        "threads": torch.get_num_threads(),
    }


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    torch.set_num_threads(job["threads"])
    model = load_plain(job["model"], dtype=getattr(torch, job["dtype"]), revision=job.get("revision"))
    print(json.dumps(decode(model, job)), flush=True)


if __name__ == "__main__":
    main()
