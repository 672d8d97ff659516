"""Runs a list of jobs in every process of a launcher; what became of each goes to OUT/NAME.RANK.json.

    python -m torch.distributed.run --standalone --nproc-per-node 2 -m tests.rank_jobs JOBS.json OUT

A job is a dictionary: name, verb (a function of `VERBS`), and its arguments.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from leanroll import rundir
from leanroll.cli import main as cli
from leanroll.config import DistillConfig, RLConfig, load_config
from leanroll.errors import ConfigError
from leanroll.models import CausalContext
from leanroll.train import checkpoint, distill, ranks, rl
from leanroll.train.optim import MasterAdamW
from leanroll.train.ranks import Ranks
from leanroll.train.sharding import ShardedAdamW, ShardedWeights
from tests.recipe import poison_loss
from tests.tiny import tiny_policy

RANK = int(os.environ.get("RANK", "0"))


FULL = {"rollouts": (rundir, "write_jsonl"), "checkpoint": (checkpoint, "write_json")}
"""What writes the completions of a step and the state of a checkpoint."""


@contextlib.contextmanager
def faults(job: dict[str, Any]) -> Iterator[None]:
    """disturb: see `rewards.disturbed`. poison: [rank, micro-batch], whose loss is NaN. break: [rank], whose `collect` has a bug.
    full: a name of `FULL`, for which no process has room on its disk. env: variables of the launcher."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in job.get("env", {}).items():
            patch.setenv(name, value)
        patch.setenv("DISTURB", f"{job['name']}:{job['disturb']}" if "disturb" in job else "")
        if job.get("poison", [None])[0] == RANK:
            poison_loss(patch, job["poison"][1])
        if job.get("break") == [RANK]:
            patch.setattr(rl.RLTrainer, "collect", mock.Mock(side_effect=ZeroDivisionError("a bug")))
        if "full" in job:
            refusal = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            patch.setattr(*FULL[job["full"]], mock.Mock(side_effect=refusal))
        yield


def train(verb: Any, schema: Any, job: dict[str, Any]) -> dict[str, Any]:
    """seeds: per rank. See `faults` for the rest."""
    config = load_config(schema, job["recipe"], [tuple(pair) for pair in job.get("overrides", [])])
    if "seeds" in job:
        config = config.model_copy(update={"train": config.train.model_copy(update={"seed": job["seeds"][RANK]})})
    with faults(job):
        summary = verb(config, resume=job.get("resume", False), quiet=True)
    return {"last_step": summary.last_step, "interrupted": summary.interrupted}


def command(job: dict[str, Any]) -> dict[str, Any]:
    """The command line's exit code."""
    options = [f"--{key}={value}" for key, value in job["overrides"]]
    with faults(job):
        return {"code": cli.main(["rl", job["recipe"], *options])}


def apart(job: dict[str, Any]) -> dict[str, Any]:
    """The ranks come to different exchanges."""
    group = Ranks.join("cpu")
    with group.session():
        group.gather(RANK, f"place {RANK}")
    return {}


def sums(job: dict[str, Any]) -> dict[str, Any]:
    """Gradients of three parameters, in buckets of 5 elements; the second is missing on rank 1, the third on both."""
    group = Ranks.join("cpu")
    with group.session(), mock.patch.object(ranks, "_BUCKET_ELEMENTS", 5):
        parameters = [nn.Parameter(torch.zeros(shape)) for shape in ((2, 2), (3,), (4,), (2,))]
        parameters[0].grad = torch.full((2, 2), 1.0 + group.rank)
        parameters[1].grad = torch.arange(3.0) if group.rank == 0 else None
        parameters[3].grad = torch.full((2,), 10.0 * group.rank)
        group.sum_gradients(parameters)
        return {
            "gradients": [None if p.grad is None else p.grad.reshape(-1).tolist() for p in parameters],
            "shares": [list(group.share(n)) for n in (0, 1, 3, 4)],
            "split": group.split(list(range(5)), lambda own: [10 * x for x in own], "numbers"),
            "any": [group.any(group.rank == 1, "flag"), group.any(False, "flag")],
            "from_main": group.from_main(f"of {group.rank}", "text"),
        }


def rescue(job: dict[str, Any]) -> dict[str, Any]:
    """Rank 1 fails, and whether all are there afterwards is asked by both, with other states, or by rank 0 alone."""
    met: dict[str, Any] = {}
    for case in ("both", "other states", "one"):
        group = Ranks.join("cpu")
        with contextlib.suppress(ConfigError), group.session():
            try:
                if group.rank == 1:
                    raise ConfigError("failed")
                group.gather(None, "place")
            except ConfigError as error:
                if case != "one" or group.rank == 0:
                    met[case] = group.meet_after(error, (1, group.rank if case == "other states" else 0))
                raise
    return met


def shards(job: dict[str, Any]) -> dict[str, Any]:
    """Three steps of a tied bf16 model with an odd number of rows, split and not, of two micro-batches on rank 0 and one on 1."""
    group = Ranks.join("cpu", "fsdp2")
    with group.session():
        whole, split = (tiny_policy("qwen3", num_hidden_layers=2, dtype=torch.bfloat16) for _ in range(2))
        total = sum(p.numel() for p in whole.trainable_parameters().values())
        weights = ShardedWeights(split, group)
        expected = MasterAdamW(whole.trainable_parameters().items(), lr=0.01, weight_decay=0.1)
        optimizer = ShardedAdamW(weights, group, lr=0.01, weight_decay=0.1)
        norms = []
        for step in range(3):
            generator = torch.Generator().manual_seed(10 * step + group.rank)
            for _ in range(2 - group.rank):
                for name, one in expected.parameters.items():
                    if name.endswith("q_norm.weight") and step < 2:
                        continue  # without a gradient until then
                    one.grad = torch.randn(one.shape, generator=generator).bfloat16()
                    optimizer.parameters[name].grad = one.grad.clone()
                expected.accumulate()
                optimizer.accumulate()
            for adamw in (expected, optimizer):
                adamw.sum_over(group)
                norms.append(adamw.grad_norm())
            freed = sum(p.untyped_storage().nbytes() for p in weights.parameters.values())
            reduced = list(optimizer.gradients().values())
            for adamw, norm in zip((expected, optimizer), norms[-2:], strict=True):
                adamw.step(lr_factor=1.0, max_grad_norm=1.0, grad_norm=norm)
        before = {name: p.detach().clone() for name, p in weights.parameters.items()}
        optimizer.parameters["model.norm.weight"].grad = torch.ones(64, dtype=torch.bfloat16)
        optimizer.accumulate()
        optimizer.sum_over(group)
        optimizer.zero_grad()  # an update that is not applied
        back = all(torch.equal(p, before[name]) for name, p in weights.parameters.items())
        state, own = expected.state_dict(), optimizer.state_dict()
        moments = [m for s in optimizer.adamw.state.values() for m in s.values() if m.dim()]
        ids = torch.tensor([[5, 6, 7]])
        with torch.no_grad():
            hidden = [p.hidden(ids, torch.arange(3)[None], CausalContext()) for p in (whole, split)]
        pairs = [(p, weights.parameters[name]) for name, p in expected.parameters.items()]
        return {
            "total": total,
            "norms": norms,
            "masters": sum(m.nbytes for m in optimizer.masters.values()),
            "moments": sum(m.nbytes for m in moments),
            "reduced": sum(grad.nbytes for grad in reduced),
            "freed": freed,
            "whole": sum(p.untyped_storage().nbytes() for p in weights.parameters.values()),
            "weights_differ": max(float((a - b).detach().abs().max()) for a, b in pairs),
            "hidden_differ": float((hidden[0] - hidden[1]).abs().max()),
            "tied": split.head.weight is split.base.get_input_embeddings().weight,
            "plain": all(type(p) is nn.Parameter for p in split.model.parameters())
            and all(type(grad) is torch.Tensor for grad in reduced),
            "back": back and not optimizer.gradients(),
            "checksums": group.gather(optimizer.checksum(), "checksums"),
            "state": None if not own else _largest_difference(state, own),
        }


def _largest_difference(one: Any, other: Any) -> float:
    """Between two states of the same structure; infinite where that differs."""
    if isinstance(one, torch.Tensor):
        same = one.shape == other.shape and one.dtype == other.dtype and type(other) is torch.Tensor
        return float((one - other).abs().max()) if same else float("inf")
    if isinstance(one, dict):
        return (
            max((_largest_difference(v, other[k]) for k, v in one.items()), default=0.0)
            if one.keys() == other.keys()
            else float("inf")
        )
    if isinstance(one, list):
        return max((_largest_difference(a, b) for a, b in zip(one, other, strict=True)), default=0.0)
    return 0.0 if one == other else float("inf")


VERBS: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "rl": lambda job: train(rl.run, RLConfig, job),
    "distill": lambda job: train(distill.run, DistillConfig, job),
    "command": command,
    "apart": apart,
    "sums": sums,
    "rescue": rescue,
    "shards": shards,
}


def main(jobs: Path, out: Path) -> None:
    """Run the jobs, whether the ones before failed or not."""
    for job in json.loads(jobs.read_text(encoding="utf-8")):
        try:
            result = VERBS[job["verb"]](job)
        except Exception as error:  # what it was is looked at by the test
            result = {"error": type(error).__name__, "text": str(error)}
        (out / f"{job['name']}.{RANK}.json").write_text(json.dumps(result), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
