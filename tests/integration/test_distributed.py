"""I5: two processes train what one trains, with and without FSDP2. All jobs run in one launch of two CPU processes; see
tests/rank_jobs.py."""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from leanroll.config import DistillConfig, RLConfig, load_config, to_toml
from leanroll.errors import ConfigError
from leanroll.rundir import CHECKPOINTS, RunDir
from leanroll.rundir_metrics import is_timing
from leanroll.train import distill, rl
from leanroll.train.checkpoint import Checkpoints
from leanroll.train.ranks import Ranks
from tests.integration.test_distill import recipe as distill_recipe
from tests.recipe import reward, save_tiny_model, tiny_recipe
from tests.tiny import tiny_model, tiny_tokenizer

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]

TOLERANCE = {"rel": 2e-4, "abs": 2e-5}
"""Of a metric after three steps in fp32: sums over groups are taken in another order, and AdamW divides by small numbers."""

FSDP2 = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_CPU_RAM_EFFICIENT_LOADING": "true"}
"""What `accelerate launch --use_fsdp --fsdp_version 2` sets; with the last one transformers would load weights on rank 0 alone."""

SHARDED = ["train.sharding", "fsdp2"]


@dataclass(frozen=True)
class Launch:
    """Folders of the runs of one process and of two, and what became of the jobs."""

    folder: Path

    def run(self, name: str, processes: int) -> Path:
        return self.folder / f"{name}-{processes}"

    def results(self, name: str) -> list[dict[str, Any]]:
        return [json.loads((self.folder / f"{name}.{rank}.json").read_text()) for rank in (0, 1)]

    def metrics(self, name: str, processes: int) -> list[dict[str, Any]]:
        records = RunDir.open(self.run(name, processes)).read_metrics()
        return [{k: v for k, v in record.items() if not is_timing(k)} for record in records]

    def state(self, name: str, processes: int) -> dict[str, Any]:
        path = self.run(name, processes) / "checkpoints" / "latest" / "trainer.pt"
        state: dict[str, Any] = torch.load(path, weights_only=True)
        return state


def recipes(folder: Path) -> dict[str, RLConfig | DistillConfig]:
    """What one process trains as well. Their run directories are set at the call."""
    student = save_tiny_model(folder / "student")
    teacher = folder / "teacher"
    tiny_model("qwen3", num_hidden_layers=2, seed=7, initializer_range=0.1, vocab_size=320).save_pretrained(teacher)
    tiny_tokenizer().save_pretrained(teacher)
    tight = folder / "tight.json"
    tight.write_text(
        json.dumps({"page_size": 8, "bin_pages": 4, "pages": [4] * 8, "dense_layers": [0], "scorer": "mean"})
    )
    whole = {"adapter__type": "none", "adapter__r": None, "adapter__alpha": None}
    return {
        # Several micro-batches per process, an odd number of held-out prompts, acceptance with bounds.
        "rl": tiny_recipe(
            student,
            folder,
            task__rewards=reward("disturbed"),
            train__micro_batch_tokens=160,
            train__save_every=1,
            rl__loss_type="dapo",
            rl__num_iterations=2,
            rl__beta=0.01,
            measure__alpha_every=1,
            measure__num_top_logprobs=4,
            eval__num_prompts=3,
        ),
        # Three groups in three updates: the second process never has one to train on. Groups without variance are resampled.
        "rl-uneven": tiny_recipe(
            student,
            folder,
            **whole,
            task__rewards=reward("any_liked_id"),
            optimizer__learning_rate=0.001,
            rl__prompts_per_step=3,
            rl__num_mini_batches=3,
            rl__num_generations=2,
            rl__loss_type="bnpo",
            rl__filter_zero_std=True,
            rl__resample_zero_std=1,
            train__steps=2,
            eval__num_prompts=1,
        ),
        "distill": distill_recipe(
            (student, teacher),
            folder,
            distill__prompts_per_step=3,
            distill__num_generations=2,
            distill__compare_full=True,
            teacher__evaluate=True,
            teacher__min_margin=-1.0,
            guard__every=2,
            guard__num_prompts=3,
            train__micro_batch_tokens=140,
        ),
        # What is rejected is decided over all; budgets move, and the sampler's adapter with them.
        "rl-sampler": tiny_recipe(
            student,
            folder,
            rollout__schedule=str(tight),
            rollout__control="hold",
            rollout__target=0.98,
            rollout__max_pages=8,  # or the second step would read every page, and the adapter rest
            measure__alpha_every=None,
            sampler_adapter__r=4,
            rl__prompts_per_step=3,
            rl__num_generations=4,
            rl__num_mini_batches=2,
            rl__geo_mask_low=0.96,
            rl__geo_mask_high=1.04,
            rl__m2_threshold=0.005,
            train__steps=2,
            eval__num_prompts=1,
        ),
        # One probe of two is scored by each; N moves after it.
        "distill-adaptive": distill_recipe(
            (student, teacher),
            folder,
            distill__num_tokens=4,
            distill__top_k=8,
            distill__prompts_per_step=1,
            adapt__max_num_tokens=10,
            adapt__min_num_tokens=2,
            adapt__window=1,
            adapt__extend_below=2.0,
            adapt__tail_factor=0.01,
            guard__every=2,
            guard__num_prompts=2,
            eval__num_prompts=1,
        ),
        "distill-ranked": distill_recipe(
            (student, teacher),
            folder,
            **whole,
            optimizer__learning_rate=0.001,
            distill__selection="top_reverse_kl",
            distill__selected_tokens=2,
            distill__normalizer="token_mean",
            distill__prompts_per_step=1,
            train__steps=2,
            eval__num_prompts=1,
        ),
    }


@pytest.fixture(scope="module")
def launch(tmp_path_factory: pytest.TempPathFactory) -> Launch:
    folder = tmp_path_factory.mktemp("ranks")
    found = Launch(folder)
    jobs: list[dict[str, Any]] = [{"name": verb, "verb": verb} for verb in ("apart", "sums", "rescue", "shards")]

    def add(name: str, recipe: str, run: str, **more: Any) -> None:
        overrides = [["train.run_dir", str(found.run(run, 2))], *more.pop("overrides", [])]
        job = {"name": name, "verb": recipe.split("-")[0], "recipe": str(folder / f"{recipe}.toml")}
        jobs.append({**job, "overrides": overrides, **more})

    for name, config in recipes(folder).items():
        (folder / f"{name}.toml").write_text(to_toml(config))
        add(name, name, name)
        train = config.train.model_copy(update={"run_dir": str(found.run(name, 1))})
        alone = config.model_copy(update={"train": train})
        if isinstance(alone, RLConfig):
            rl.run(alone, quiet=True)
        else:
            distill.run(alone, quiet=True)
    # Calls of the reward: evaluation, then one per step. Interrupted in step 1, failed in step 3, finished.
    add("interrupted", "rl", "broken", disturb="1:2:interrupt")
    add("failed", "rl", "broken", resume=True, disturb="1:2:fail")
    add("resumed", "rl", "broken", resume=True)
    add("diverged", "rl", "diverged", poison=[1, 1])
    add("bug", "rl", "bug", **{"break": [0]})
    add("full", "rl", "full", full="rollouts")
    add("full-code", "rl", "full-code", full="rollouts", verb="command")
    few = [["train.save_every", "0"]]
    add("full-while-saving", "rl", "full-while-saving", full="checkpoint", disturb="1:3:fail", overrides=few)
    add("taken", "rl", "rl")
    add("different", "rl", "different", seeds=[0, 1])
    # Sharded: three whole runs, one broken off and continued in the ways above, one that an unsharded run began.
    add("rl-sharded", "rl", "rl-sharded", env=FSDP2)
    add("rl-uneven-sharded", "rl-uneven", "rl-uneven-sharded", overrides=[SHARDED])
    add("distill-ranked-sharded", "distill-ranked", "distill-ranked-sharded", overrides=[SHARDED])
    rarely = [SHARDED, ["train.save_every", "10"]]
    add("interrupted-sharded", "rl", "broken-sharded", disturb="1:2:interrupt", overrides=rarely)
    add("failed-sharded", "rl", "broken-sharded", resume=True, disturb="1:2:fail", overrides=rarely)
    add("resumed-sharded", "rl", "broken-sharded", resume=True, overrides=rarely)
    shutil.copytree(found.run("rl", 1), found.run("taken-over", 2), symlinks=True)
    Checkpoints(found.run("taken-over", 2) / CHECKPOINTS, 0).go_back_to(2)
    add("taken-over", "rl", "taken-over", resume=True, overrides=[SHARDED])
    (folder / "jobs.json").write_text(json.dumps(jobs))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*command, "-m", "tests.rank_jobs", str(folder / "jobs.json"), str(folder)],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=1200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return found


@pytest.mark.parametrize("name", ["rl", "rl-uneven", "rl-sampler", "distill", "distill-adaptive", "distill-ranked"])
def test_two_processes_train_what_one_trains(launch: Launch, name: str) -> None:
    same_training(launch, (name, 1), (name, 2))


def same_training(launch: Launch, expected: tuple[str, int], got: tuple[str, int]) -> None:
    """Two runs have the same metrics, completions and weights. expected, got: names and numbers of processes."""
    if got[1] == 2:
        assert launch.results(got[0])[0].get("error") is None, launch.results(got[0])
    one, two = launch.metrics(*expected), launch.metrics(*got)
    assert [r.keys() for r in one] == [r.keys() for r in two]
    for record, other in zip(one, two, strict=True):
        for key, value in record.items():
            assert other[key] == pytest.approx(value, **TOLERANCE), f"step {record['step']}, {key}"
    for step in RunDir.open(launch.run(*expected)).rollout_steps():
        texts = [RunDir.open(launch.run(*run)).rollouts_path(step).read_text() for run in (expected, got)]
        assert texts[0] == texts[1], f"completions of step {step}"
    weights, others = (launch.state(*run)["optimizer"]["masters"] for run in (expected, got))
    for key, weight in weights.items():
        torch.testing.assert_close(others[key], weight, rtol=1e-3, atol=2e-4, msg=lambda m, key=key: f"{key}: {m}")


@pytest.mark.parametrize("name", ["rl", "rl-uneven", "distill-ranked"])
def test_sharded_processes_train_what_one_trains(launch: Launch, name: str) -> None:
    same_training(launch, (name, 1), (f"{name}-sharded", 2))
    environment = RunDir.open(launch.run(f"{name}-sharded", 2)).read_environment()
    assert (environment["num_processes"], environment["sharding"]) == (2, "fsdp2")


def test_a_shard_is_a_half(launch: Launch) -> None:
    for result in launch.results("shards"):
        half = 4 * result["total"] / 2  # bytes, in fp32
        for name, parts in (("masters", 1), ("moments", 2), ("reduced", 1)):
            assert result[name] == pytest.approx(parts * half, rel=2e-3), name  # one of 259 rows more or less
        assert (result["freed"], result["whole"]) == (0, pytest.approx(2 * result["total"], rel=2e-3))
    here, there = launch.results("shards")
    assert here["masters"] + there["masters"] == 4 * here["total"]


def test_shards_are_updated_as_whole_weights_are(launch: Launch) -> None:
    for result in launch.results("shards"):
        for expected, norm in zip(result["norms"][::2], result["norms"][1::2], strict=True):
            assert norm == pytest.approx(expected, rel=1e-5)
        # A sum of two is the same in any order; the norm, which clipping divides by, is not.
        assert result["weights_differ"] < 1e-6
        assert result["hidden_differ"] < 1e-2
        assert result["tied"]
        assert result["plain"]
        assert result["back"]
        assert result["checksums"][0] == result["checksums"][1]
    assert launch.results("shards")[0]["state"] < 1e-6, "a checkpoint is that of whole weights"


def test_a_sharded_checkpoint_is_an_ordinary_one(launch: Launch) -> None:
    one, two = (launch.run(f"rl-uneven{n}", k) for n, k in (("", 1), ("-sharded", 2)))
    files = [{str(p.relative_to(run)) for p in run.rglob("*")} for run in (one, two)]
    assert files[0] == files[1]
    folder = two / "checkpoints" / "latest" / "policy"
    assert json.loads((folder / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]
    model = AutoModelForCausalLM.from_pretrained(folder)
    masters = launch.state("rl-uneven-sharded", 2)["optimizer"]["masters"]
    assert masters.keys() == dict(model.named_parameters()).keys()
    for key, weight in model.named_parameters():
        assert torch.equal(weight, masters[key]), key


def test_a_sharded_run_goes_on_as_if_unbroken(launch: Launch) -> None:
    assert launch.results("interrupted-sharded") == [{"last_step": 1, "interrupted": True}] * 2
    assert [r["error"] for r in launch.results("failed-sharded")] == ["RewardError"] * 2
    assert launch.results("resumed-sharded") == [{"last_step": 3, "interrupted": False}] * 2
    assert launch.metrics("broken-sharded", 2) == launch.metrics("rl-sharded", 2)
    saved = {p.name for p in (launch.run("broken-sharded", 2) / CHECKPOINTS).glob("step-*")}
    assert saved == {"step-000002", "step-000003"}, "the step before the failed one was put together and saved"
    weights, others = (launch.state(name, 2)["optimizer"]["masters"] for name in ("rl-sharded", "broken-sharded"))
    for key, weight in weights.items():
        assert torch.equal(weight, others[key]), key


def test_processes_meet_after_a_failure_only_where_all_come(launch: Launch) -> None:
    here, there = launch.results("rescue")
    assert here == {"both": True, "other states": False, "one": False}
    assert there == {"both": True, "other states": False}


def test_sharded_and_whole_runs_continue_each_other(launch: Launch) -> None:
    same_training(launch, ("rl", 1), ("taken-over", 2))
    shutil.copytree(launch.run("rl-sharded", 2), launch.run("handed-back", 1), symlinks=True)
    Checkpoints(launch.run("handed-back", 1) / CHECKPOINTS, 0).go_back_to(2)
    config = load_config(RLConfig, launch.folder / "rl.toml", [("train.run_dir", str(launch.run("handed-back", 1)))])
    rl.run(config, resume=True, quiet=True)
    same_training(launch, ("rl", 1), ("handed-back", 1))


def test_the_uneven_run_had_a_process_without_groups(launch: Launch) -> None:
    records = launch.metrics("rl-uneven", 2)
    assert all(r["updates"] == r["trained_groups"] > 0 for r in records[1:]), "one group per update"
    assert max(r["prompts"] for r in records[1:]) > 3, "resampled"


def test_the_other_runs_do_what_they_are_for(launch: Launch) -> None:
    first, second = launch.metrics("rl-sampler", 2)[1:]
    assert any(0 < r["rejected_share/completions"] < 1 for r in (first, second))
    assert first["trained_groups"] > 1, "both processes have some"
    assert first["m2/masked_share"] > 0
    assert first["control/raised"] > 0
    assert {"sampler_adapter/kl"} <= first.keys() & second.keys()
    tokens = [r["distill/num_tokens"] for r in launch.metrics("distill-adaptive", 2)[1:]]
    assert tokens == [4, 4, 6]


def test_evaluations_are_those_of_one_process(launch: Launch) -> None:
    for name, files in (("rl", ["step-000000.json", "step-000003.json"]), ("distill", ["teacher.json"])):
        for file in files:
            one, two = (json.loads((launch.run(name, n) / "eval" / file).read_text()) for n in (1, 2))
            assert one == two, file
            assert one["num_prompts"] >= 3


def test_only_the_main_process_writes(launch: Launch) -> None:
    for name in ("rl", "distill"):
        one, two = ({str(p.relative_to(launch.run(name, n))) for p in launch.run(name, n).rglob("*")} for n in (1, 2))
        assert one == two
    assert RunDir.open(launch.run("rl", 2)).read_environment()["num_processes"] == 2
    assert len(launch.state("rl", 2)["random_of_others"]) == 1


def test_interrupted_failed_and_resumed_is_never_broken(launch: Launch) -> None:
    assert launch.results("interrupted") == [{"last_step": 1, "interrupted": True}] * 2, (
        "the signal went to one process"
    )
    here, there = launch.results("failed")
    assert (here["error"], there["error"]) == ("RewardError", "RewardError")
    assert here["text"].startswith("Process 1 of 2: Reward 'disturbed' failed")
    assert launch.results("resumed") == [{"last_step": 3, "interrupted": False}] * 2
    assert launch.metrics("broken", 2) == launch.metrics("rl", 2)
    weights, others = (launch.state(name, 2)["optimizer"]["masters"] for name in ("rl", "broken"))
    for key, weight in weights.items():
        assert torch.equal(weight, others[key]), key


def test_a_failure_of_one_stops_all(launch: Launch) -> None:
    here, there = launch.results("diverged")
    assert (here["error"], there["error"]) == ("TrainingDiverged", "TrainingDiverged")
    assert "Process 1 of 2: Step 1: the loss is nan" in here["text"]
    assert json.loads((launch.run("diverged", 2) / "diagnosis" / "step-000001.json").read_text())["loss"] == "nan"
    assert [r["step"] for r in launch.metrics("diverged", 2)] == [0]
    here, there = launch.results("bug")
    assert here == {"error": "ZeroDivisionError", "text": "a bug"}
    assert there == {"error": "RankError", "text": "Process 0 of 2: ZeroDivisionError: a bug"}
    here, there = launch.results("taken")
    assert (here["error"], there["error"]) == ("ConfigError", "ConfigError")
    assert "is not empty" in there["text"]


def test_a_full_disk_stops_all(launch: Launch) -> None:
    """Only the main process writes. The others raise what it met; the same exit code tells a launcher."""
    here, there = launch.results("full")
    assert (here["error"], there["error"]) == ("StorageError", "StorageError")
    written = launch.run("full", 2) / "rollouts" / "step-000001.jsonl"
    assert here["text"].startswith(f"'{written}' cannot be written (No space left on device; ")
    assert there["text"] == f"Process 0 of 2: {here['text']}"
    assert [r["step"] for r in launch.metrics("full", 2)] == [0]
    assert launch.results("full-code") == [{"code": 1}] * 2


def test_a_full_disk_met_while_stopping_is_said_by_the_main_process(launch: Launch) -> None:
    """The others stop with the error that stopped all."""
    here, there = launch.results("full-while-saving")
    assert here["error"] == "StorageError"
    assert "It was to be saved because of another error:\nProcess 1 of 2: Reward 'disturbed' failed" in here["text"]
    assert there["error"] == "RewardError"


def test_processes_that_differ_stop(launch: Launch) -> None:
    for result in launch.results("different"):
        assert result["error"] == "RankError"
        assert "Options of process 1 are not those of process 0" in result["text"]
    for result in launch.results("apart"):
        assert result["error"] == "RankError"
        assert "0 is at 'place 0', 1 is at 'place 1'" in result["text"]


def test_exchanges(launch: Launch) -> None:
    here, there = launch.results("sums")
    assert here["shares"] == [[], [0], [0, 1], [0, 1]]
    assert there["shares"] == [[], [], [2], [2, 3]]
    for result in (here, there):
        assert result["gradients"] == [[3.0] * 4, [0.0, 1.0, 2.0], None, [10.0, 10.0]]
        assert result["split"] == [0, 10, 20, 30, 40]
        assert result["any"] == [True, False]
        assert result["from_main"] == "of 0"


@pytest.mark.parametrize("name", ["ACCELERATE_USE_FSDP", "ACCELERATE_USE_DEEPSPEED", "ACCELERATE_USE_MEGATRON_LM"])
def test_other_ways_to_shard_are_refused(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(name, "true")  # without a version, FSDP is the first
    with pytest.raises(ConfigError, match=f"{name} is set.*expected plain data parallelism .* or FSDP2"):
        Ranks.join("cpu")


@pytest.mark.parametrize("option", ["FSDP_OFFLOAD_PARAMS", "FSDP_ACTIVATION_CHECKPOINTING"])
def test_options_of_fsdp2_without_effect_are_refused(monkeypatch: pytest.MonkeyPatch, option: str) -> None:
    for name, value in (*FSDP2.items(), (option, "true")):
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=f"{option} is set, but has no effect"):
        Ranks.join("cpu")


def test_one_process_has_nothing_to_split(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="there is one process"):
        Ranks.join("cpu", "fsdp2")
    for name, value in FSDP2.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match="there is one process"):
        Ranks.join("cpu")


def test_alone_everything_is_the_identity() -> None:
    alone = Ranks()
    assert list(alone.share(3)) == [0, 1, 2]
    assert alone.split([1, 2], lambda own: [math.sqrt(x) for x in own], "roots") == [1.0, math.sqrt(2)]
    with alone.session(), pytest.raises(RuntimeError, match="passed on"):
        raise RuntimeError("passed on")
