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
from leanroll.train import checkpoint, distill, ranks, rl
from leanroll.train.ranks import Ranks
from tests.recipe import poison_loss

RANK = int(os.environ.get("RANK", "0"))


FULL = {"rollouts": (rundir, "write_jsonl"), "checkpoint": (checkpoint, "write_json")}
"""What writes the completions of a step and the state of a checkpoint."""


@contextlib.contextmanager
def faults(job: dict[str, Any]) -> Iterator[None]:
    """disturb: see `rewards.disturbed`. poison: [rank, micro-batch], whose loss is NaN. break: [rank], whose `collect` has a bug.
    full: a name of `FULL`, for which no process has room on its disk."""
    with pytest.MonkeyPatch.context() as patch:
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


VERBS: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "rl": lambda job: train(rl.run, RLConfig, job),
    "distill": lambda job: train(distill.run, DistillConfig, job),
    "command": command,
    "apart": apart,
    "sums": sums,
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
