"""`leanroll.train.rl.run` end to end on a tiny model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from peft import AutoPeftModelForCausalLM
from transformers import AutoModelForCausalLM

from leanroll.errors import ConfigError, ResumeError, RewardError, TrainingDiverged, UserError
from leanroll.losses import policy as policy_loss_module
from leanroll.measure.logprobs import score
from leanroll.rundir import RunDir
from leanroll.rundir_metrics import is_timing
from leanroll.train import checkpoint, rl, trainer, update
from leanroll.train.ranks import Ranks
from leanroll.types import Rollout
from tests import rewards
from tests.recipe import poison_loss, reward, save_tiny_model, tiny_recipe


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"))


def trainer_state(run_dir: Path) -> dict[str, Any]:
    state: dict[str, Any] = torch.load(run_dir / "checkpoints" / "latest" / "trainer.pt", weights_only=True)
    return state


def metrics(run_dir: Path) -> list[dict[str, Any]]:
    records = RunDir.open(run_dir).read_metrics()
    return [{k: v for k, v in record.items() if not is_timing(k)} for record in records]


def test_learns_and_leaves_a_complete_run(model: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    config = tiny_recipe(
        model,
        run,
        train__steps=8,
        eval__every=4,
        train__save_every=4,
        rl__num_generations=8,
        optimizer__learning_rate=0.02,
    )
    summary = rl.run(config, quiet=True)
    assert summary.before is not None
    assert summary.after is not None
    assert summary.after > 1.4 * summary.before
    assert summary.alpha_p05 is not None
    assert 0 < summary.alpha_p05 <= 1
    assert summary.speed is not None
    assert f"held-out reward {summary.before:.3f} → {summary.after:.3f}" in summary.line()
    assert str(run) in summary.line()

    records = RunDir.open(run).read_metrics()
    assert [r["step"] for r in records] == list(range(9))
    assert [r["step"] for r in records if "eval/reward/mean" in r] == [0, 4, 8]
    assert [r["step"] for r in records if "alpha/p05" in r] == [1, 3, 5, 7]
    assert records[0]["time/load_s"] > 0
    assert records[8]["eval/reward/share_of_liked_ids"] == records[8]["eval/reward/mean"]
    assert records[8]["eval/missing"] == 0
    assert all(0 < r["kv_share_read"] < 1 for r in records[1:])
    assert all(r["updates"] == 1 for r in records[1:])
    assert {"time/rollout_s", "time/reward_s", "time/update_s", "time/step_s"} <= records[1].keys()
    evaluation = json.loads((run / "eval" / "step-000008.json").read_text())
    assert evaluation["num_prompts"] == 8
    assert sum(row["num_prompts"] for row in evaluation["tables"]["kind"].values()) == 8
    completions = [json.loads(line) for line in (run / "rollouts" / "step-000008.jsonl").read_text().splitlines()]
    assert len(completions) == 32
    assert completions[0]["weights_version"] == 7, "the engine follows the trainer"
    assert sorted(p.name for p in (run / "checkpoints").iterdir()) == ["latest", "step-000004", "step-000008"]

    loaded = AutoPeftModelForCausalLM.from_pretrained(run / "checkpoints" / "latest" / "policy", local_files_only=True)
    saved = trainer_state(run)["optimizer"]["masters"]
    weights = dict(loaded.named_parameters())
    for name, value in saved.items():
        assert torch.equal(weights[name], value), name


OPTIONS: dict[str, dict[str, Any]] = {
    "mini batches, passes, KL, dual clip": {
        "rl__num_mini_batches": 2,
        "rl__num_iterations": 2,
        "rl__beta": 0.1,
        "rl__delta": 2.0,
        "measure__bin_tokens": 8,
    },
    "all weights in bf16 with a reference": {
        "adapter__type": "none",
        "adapter__r": None,
        "adapter__alpha": None,
        "model__dtype": "bfloat16",
        "rl__beta": 0.1,
        "optimizer__learning_rate": 1e-4,
    },
    "dense, sequence masking, mean of sequences": {
        "rollout__schedule": "dense",
        "rl__importance_sampling_mode": "sequence_mask",
        "rl__loss_type": "grpo",
        "rl__scale_rewards": "none",
    },
    "truncating sampler, checkpointing, cosine": {
        "rollout__top_p": 0.9,
        "rollout__temperature": 0.8,
        "train__gradient_checkpointing": True,
        "optimizer__scheduler": "cosine",
        "optimizer__warmup_steps": 1,
        "rollout__stop_strings": list("abcdefghijklmnopqrstuvwxyz"),  # so that not every completion is cut
        "rl__mask_truncated_completions": True,
        "measure__num_top_logprobs": 5,
    },
}


@pytest.mark.parametrize("changes", OPTIONS.values(), ids=list(OPTIONS))
def test_options(model: Path, tmp_path: Path, changes: dict[str, Any]) -> None:
    run = tmp_path / "run"
    rl.run(tiny_recipe(model, run, train__steps=2, eval__num_prompts=2, eval__num_samples=1, **changes), quiet=True)
    records = metrics(run)
    last = records[-1]
    assert last["updates"] == changes.get("rl__num_iterations", 1) * changes.get("rl__num_mini_batches", 1)
    assert ("kl_to_ref" in last) == ("rl__beta" in changes)
    if "rl__beta" in changes:
        assert records[1]["kl_to_ref"] >= 0
        assert last["kl_to_ref"] > 0, "the policy has moved away from the reference"
    if "rl__delta" in changes:
        assert last["clip_share/dual"] >= 0
    if "rl__mask_truncated_completions" in changes:
        assert 0 < records[1]["truncated_share"] < 1
        assert 0 < records[1]["trained_tokens"] < records[1]["generated_tokens"]
        assert (
            0 < records[1]["alpha/paper_p05"] <= records[1]["alpha/paper_p05_low"] <= records[1]["alpha/paper_p05_high"]
        )
    by_position = {name: value for name, value in records[1].items() if name.startswith("mismatch/pos_")}
    counts = {name: value for name, value in by_position.items() if name.endswith("/tokens")}
    assert sum(counts.values()) == records[1]["trained_tokens"], "masked tokens and further passes do not count"
    total = sum(by_position[name.replace("/tokens", "/kl")] * count for name, count in counts.items())
    assert total / records[1]["trained_tokens"] == pytest.approx(records[1]["sampler_kl"], abs=1e-9)
    assert len(counts) == (2 if "measure__bin_tokens" in changes else 1)
    if changes.get("rl__num_iterations", 1) > 1:
        assert last["approx_kl"] > 0
    if changes.get("adapter__type") == "none":
        loaded = AutoModelForCausalLM.from_pretrained(run / "checkpoints" / "latest" / "policy", local_files_only=True)
        masters = trainer_state(run)["optimizer"]["masters"]
        assert all(m.dtype == torch.float32 for m in masters.values())
        weights = dict(loaded.named_parameters())
        assert all(torch.equal(weights[n].bfloat16(), m.bfloat16()) for n, m in masters.items())


@pytest.mark.parametrize("loss_type", ["dapo", "grpo"])
def test_the_loss_gets_what_the_recipe_says(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, loss_type: str
) -> None:
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
    rollouts: list[Rollout] = []
    old: list[torch.Tensor] = []
    run_update = update.PolicyUpdater.update

    def loss_spy(*args: Any, **kwargs: Any) -> Any:
        calls.append((args, kwargs))
        return policy_loss_module.policy_loss(*args, **kwargs)

    def update_spy(self: update.PolicyUpdater, step: int, groups: Any) -> Any:
        plain = [g.group for g in groups]
        rollouts.extend(r for g in plain for r in g.rollouts)
        old.extend(score(self._policy, plain, temperature=0.7, max_tokens=1024).logprobs)
        return run_update(self, step, groups)

    monkeypatch.setattr(update, "policy_loss", loss_spy)
    monkeypatch.setattr(update.PolicyUpdater, "update", update_spy)
    config = tiny_recipe(
        model, tmp_path / "run", train__steps=1, eval__num_prompts=0, eval__num_samples=None, rollout__temperature=0.7,
        rollout__stop_strings=list("abcdefghijklmnopqrstuvwxyz"), rl__mask_truncated_completions=True,
        rl__epsilon=0.1, rl__epsilon_high=0.3, rl__delta=3.0, rl__beta=0.2, rl__use_bias_correction_kl=False,
        rl__importance_sampling_cap=1.001, rl__num_mini_batches=2, rl__num_iterations=2,
        rl__loss_type=loss_type,
    )  # fmt: skip
    rl.run(config, quiet=True)
    assert len(calls) == 4
    counted = sum(len(r.token_ids) for r in rollouts if r.finish_reason == "stop")
    at_cap = 0
    seen = 0
    for args, kwargs in calls:
        _, old_logprobs, _, divisors, sample_ids = args
        settings = {key: kwargs[key] for key in ("clip_low", "clip_high", "delta", "beta", "use_bias_correction_kl")}
        assert list(settings.values()) == [0.1, 0.3, 3.0, 0.2, False]
        # Mini-batches count their samples from 0: the second one's follow the first one's.
        first = seen % len(rollouts)
        used = sorted(set(sample_ids.tolist()))
        seen += len(used)
        expected = torch.cat([old[first + s] for s in used])
        sampled = torch.tensor([x for s in used for x in rollouts[first + s].logprobs])
        mask = torch.tensor(
            [rollouts[first + s].finish_reason == "stop" for s in used for _ in rollouts[first + s].token_ids]
        )
        torch.testing.assert_close(old_logprobs, expected, atol=1e-4, rtol=0)
        assert torch.equal(kwargs["mask"], mask)
        weights = (expected - sampled).exp().clamp(max=1.001)
        torch.testing.assert_close(kwargs["weights"][mask], weights[mask], atol=1e-3, rtol=0)
        at_cap += int((weights[mask] == 1.001).sum())
        assert not kwargs["weights"].requires_grad
        if loss_type == "dapo":
            assert divisors.tolist() == pytest.approx([counted / 2] * len(used))
        else:
            own = [len(r.token_ids) if r.finish_reason == "stop" else 1 for r in rollouts[first : first + len(used)]]
            assert divisors.tolist() == pytest.approx([len(used) * n for n in own])
        if len(rollouts) >= seen:  # the first pass
            assert kwargs["ref_logprobs"].tolist() == pytest.approx(expected.tolist(), abs=1e-4), "B is 0 at the start"
    assert at_cap > 0
    torch.testing.assert_close(calls[0][0][0].detach(), calls[0][0][1], atol=1e-4, rtol=0)


def test_zero_variance_groups_are_resampled_then_left_out(model: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    config = tiny_recipe(
        model,
        run,
        task__rewards=reward("constant"),
        rl__resample_zero_std=2,
        train__steps=1,
        eval__num_prompts=0,
        eval__num_samples=None,
    )
    summary = rl.run(config, quiet=True)
    record = metrics(run)[-1]
    assert record["prompts"] == 12
    assert record["zero_std_share"] == 1.0
    assert record["trained_groups"] == 0
    assert record["updates"] == 0
    assert summary.before is None


def test_overlong_completions_lose_reward_in_training_only(model: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    limit, buffer, penalty = 24, 16, 0.5
    config = tiny_recipe(
        model, run, train__steps=2, rollout__max_completion_length=limit, rl__overlong_buffer=buffer,
        rl__overlong_penalty=penalty,
    )  # fmt: skip
    rl.run(config, quiet=True)
    records = RunDir.open(run).read_metrics()
    name = next(k for k in records[1] if k.startswith("reward/share"))
    assert records[1]["reward/mean"] == pytest.approx(records[1][name] + records[1]["reward/overlong"])
    assert "eval/reward/overlong" not in records[2]
    assert records[2]["eval/reward/mean"] == records[2][f"eval/{name}"]
    rows = [json.loads(line) for line in (run / "rollouts" / "step-000001.jsonl").read_text().splitlines()]
    for row in rows:
        expected = -penalty * min(max((row["length"] - (limit - buffer)) / buffer, 0.0), 1.0)
        assert row["rewards"]["overlong"] == pytest.approx(expected)
    assert min(r["rewards"]["overlong"] for r in rows) == -penalty
    with pytest.raises(ConfigError, match="even an empty completion"):
        tiny_recipe(model, run, rollout__max_completion_length=limit, rl__overlong_buffer=limit + 1)


def test_the_logged_penalty_is_of_the_samples_that_count(model: Path, tmp_path: Path) -> None:
    config = tiny_recipe(
        model, tmp_path / "run", train__steps=1, rollout__max_completion_length=24, rl__overlong_buffer=16,
        task__rewards=reward("fails_on_short"), task__on_reward_error="drop", rl__prompts_per_step=16,
    )  # fmt: skip
    rl.run(config, quiet=True)
    record = metrics(tmp_path / "run")[1]
    assert 0 < record["dropped_completions"] < record["completions"]
    assert record["reward/mean"] == pytest.approx(record["reward/fails_on_short"] + record["reward/overlong"])


def test_gradient_does_not_depend_on_micro_batches(model: Path, tmp_path: Path) -> None:
    """The first moment after one step is (1 - beta1) times the clipped gradient."""
    moments = []
    for tokens in (4096, 160):
        run = tmp_path / str(tokens)
        rl.run(tiny_recipe(model, run, train__steps=1, train__micro_batch_tokens=tokens), quiet=True)
        state = trainer_state(run)["optimizer"]["adamw"]["state"]
        moments.append(torch.cat([s["exp_avg"].flatten() for s in state.values()]))
    whole, cut = (metrics(tmp_path / tokens)[1] for tokens in ("4096", "160"))
    assert whole["trained_tokens"] == cut["trained_tokens"]
    by_position = {name: value for name, value in whole.items() if name.startswith("mismatch/")}
    assert by_position == pytest.approx({name: cut[name] for name in by_position}, rel=1e-3, abs=1e-6)
    scale = moments[0].norm()
    assert scale > 0
    assert (moments[0] - moments[1]).norm() < 1e-5 * scale


def test_gradient_does_not_depend_on_the_environment(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """accelerate would divide the loss by what a variable of its launcher says."""
    norms = []
    for steps in ("1", "4"):
        monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", steps)
        rl.run(tiny_recipe(model, tmp_path / steps, train__steps=1), quiet=True)
        norms.append(metrics(tmp_path / steps)[1]["grad_norm"])
    assert norms[0] == norms[1] > 0


def test_ctrl_c_saves_and_resume_equals_no_interruption(model: Path, tmp_path: Path) -> None:
    straight, broken = tmp_path / "straight", tmp_path / "broken"
    changes = {"task__rewards": reward("interrupting"), "train__steps": 4, "train__save_every": 0}
    rewards.InterruptOnce.at = 0
    # The reward is loaded from its file under another module name: reach it through what it loaded.
    rl.run(tiny_recipe(model, straight, **changes), quiet=True)
    loaded = _loaded_rewards()
    loaded.InterruptOnce.calls, loaded.InterruptOnce.at = 0, 3  # evaluation, step 1, step 2
    summary = rl.run(tiny_recipe(model, broken, **changes), quiet=True)
    assert summary.interrupted
    assert summary.last_step == 2
    assert "continue with --resume" in summary.line()
    summary = rl.run(tiny_recipe(model, broken, **changes), resume=True, quiet=True)
    assert not summary.interrupted
    assert metrics(broken) == metrics(straight)
    ours, theirs = (trainer_state(run)["optimizer"]["masters"] for run in (broken, straight))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_a_decay_added_when_resuming_equals_one_planned_from_the_start(model: Path, tmp_path: Path) -> None:
    straight, extended = tmp_path / "straight", tmp_path / "extended"
    changes: dict[str, Any] = {
        "task__rewards": reward("share_of_liked_ids"), "eval__num_prompts": 0, "eval__num_samples": None,
    }  # fmt: skip
    decay = {"train__steps": 4, "optimizer__scheduler": "linear", "optimizer__decay_steps": 2}
    rl.run(tiny_recipe(model, straight, **changes, **decay), quiet=True)
    rl.run(tiny_recipe(model, extended, **changes, train__steps=2), quiet=True)
    rl.run(tiny_recipe(model, extended, **changes, **decay), resume=True, quiet=True)
    assert metrics(extended) == metrics(straight)
    rates = [record["learning_rate"] for record in metrics(straight) if record["step"] > 0]
    assert rates == pytest.approx([rates[0], rates[0], rates[0] * 2 / 3, rates[0] / 3])
    with pytest.raises(ResumeError, match=r"optimizer\.decay_steps"):
        rl.run(
            tiny_recipe(model, extended, **changes, **decay | {"optimizer__decay_steps": 1}), resume=True, quiet=True
        )


def test_rewards_that_draw_and_fail_resume_exactly(model: Path, tmp_path: Path) -> None:
    """The checkpoint of step 2 is written when step 3 has already drawn numbers."""
    straight, broken = tmp_path / "straight", tmp_path / "broken"
    changes: dict[str, Any] = {
        "task__rewards": reward("noisy_and_failing"), "train__steps": 4, "train__save_every": 0,
        "eval__num_prompts": 0, "eval__num_samples": None,
    }  # fmt: skip
    rl.run(tiny_recipe(model, straight, **changes), quiet=True)
    loaded = _loaded_rewards()
    loaded.FailAt.calls, loaded.FailAt.at = 0, 3
    with pytest.raises(RewardError, match="out of order"):
        rl.run(tiny_recipe(model, broken, **changes), quiet=True)
    assert json.loads((broken / "checkpoints" / "latest" / "state.json").read_text())["step"] == 2
    (broken / "checkpoints" / "latest").unlink()  # as a copy without links has it
    with (broken / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "loss": 1.0}\n{"step": 4, "lo')  # killed after step 3, while appending
    rl.run(tiny_recipe(model, broken, **changes), resume=True, quiet=True)
    assert metrics(broken) == metrics(straight)
    last = "rollouts/step-000004.jsonl"
    assert (broken / last).read_text() == (straight / last).read_text()
    ours, theirs = (trainer_state(run)["optimizer"]["masters"] for run in (broken, straight))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_restore_keeps_generator_states_off_the_device(tmp_path: Path) -> None:
    """torch restores them from the CPU only, wherever the model is."""

    def write(folder: Path) -> None:
        state = {"optimizer": {}, "random": checkpoint.random_state(), "num_updates": 1, "policy_version": 1}
        torch.save(state, folder / "trainer.pt")

    store = checkpoint.Checkpoints(tmp_path, keep=0)
    store.save(1, write, {})
    saved = torch.get_rng_state()
    torch.rand(3)
    stand_in = mock.Mock(policy=mock.Mock(device=torch.device("meta")), ranks=Ranks())  # for a GPU
    assert rl.RLTrainer._restore(stand_in, store) == 1
    assert torch.equal(torch.get_rng_state(), saved)


@pytest.mark.parametrize("loaded", ["", "adapter.path", "model.name"])
def test_kl_is_to_where_training_started(model: Path, tmp_path: Path, loaded: str) -> None:
    """One update per step, so that step 2 has moved away from the start but not from its own beginning."""
    first, second = tmp_path / "first", tmp_path / "second"
    changes: dict[str, Any] = {"rl__beta": 0.1}
    if loaded:
        rl.run(tiny_recipe(model, first, train__steps=1, optimizer__learning_rate=0.1), quiet=True)
        adapter = str(first / "checkpoints" / "latest" / "policy")
        changes |= {"adapter__r": None, "adapter__alpha": None}
        changes |= {"adapter__path": adapter} if loaded == "adapter.path" else {}
        changes |= {"model__name": adapter, "adapter__type": "none"} if loaded == "model.name" else {}
        changes |= {"rollout__schedule": str(model / "schedule.json")} if loaded == "model.name" else {}
    rl.run(tiny_recipe(model, second, train__steps=2, **changes), quiet=True)
    records = metrics(second)
    assert records[1]["kl_to_ref"] == pytest.approx(0.0, abs=1e-6)
    assert records[2]["kl_to_ref"] > 1e-4


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"train__micro_batch_tokens": 20}, "micro_batch_tokens is 20, but a prompt of"),
        ({"rollout__top_k": 1000}, "top_k is 1000; expected 0"),
        ({"rollout__kv_memory_gib": 2e-5}, "but kv_memory_gib=2e-05 holds 3"),
        ({"task__few_shot": "x" * 600}, "the model's context holds 512"),
        ({"task__few_shot_file": "rewards"}, "expected a UTF-8 text file"),
        ({"model__chat_template": "broken"}, "does not take a conversation"),
    ],
)
@pytest.mark.parametrize("with_eval", [True, False])
def test_what_cannot_run_leaves_no_run_directory(
    model: Path, tmp_path: Path, changes: dict[str, Any], message: str, with_eval: bool
) -> None:
    (tmp_path / "rewards").write_bytes(b"\xff\xfe")
    (tmp_path / "broken").write_text("{{ raise_exception('no') }}")
    changes = {k: str(tmp_path / v) if k.endswith(("_file", "_template")) else v for k, v in changes.items()}
    if not with_eval:
        changes |= {"eval__num_prompts": 0, "eval__num_samples": None}
    with pytest.raises(UserError, match=message):
        rl.run(tiny_recipe(model, tmp_path / "run", **changes), quiet=True)
    assert not (tmp_path / "run").exists()


def test_a_tracker_that_is_not_installed_raises(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainer, "get_available_trackers", lambda: ["wandb"])
    with pytest.raises(ConfigError, match="names tensorboard, which is not installed"):
        rl.run(tiny_recipe(model, tmp_path / "run", train__trackers=["wandb", "tensorboard"]), quiet=True)
    assert not (tmp_path / "run").exists()


def test_a_finite_task_runs_out_of_prompts_in_a_step(model: Path, tmp_path: Path) -> None:
    rows = [json.dumps({"prompt": f"say {i}", "answer": "1"}) for i in range(5)]
    (tmp_path / "rows.jsonl").write_text("\n".join(rows))
    run = tmp_path / "run"
    config = tiny_recipe(
        model, run, task__name="jsonl", task__path=str(tmp_path / "rows.jsonl"), task__params={"eval_size": 4},
        task__rewards=reward("constant"), rl__prompts_per_step=1, rl__resample_zero_std=2, train__steps=2,
        eval__num_prompts=0, eval__num_samples=None,
    )  # fmt: skip
    summary = rl.run(config, quiet=True)
    assert [record.get("prompts") for record in metrics(run)[1:]] == [1, 1]
    assert summary.speed is not None, "with the only prompt there is"


def _loaded_rewards() -> Any:
    import sys

    return next(m for name, m in sys.modules.items() if name.startswith("leanroll_user_reward_"))


def test_divergence_is_diagnosed_and_nothing_lost(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tmp_path / "run"
    poison_loss(monkeypatch, call=3)
    with pytest.raises(TrainingDiverged, match=r"Step 3: the loss is nan.*step-000003\.json"):
        rl.run(tiny_recipe(model, run, train__steps=5, train__save_every=0), quiet=True)
    diagnosis = json.loads((run / "diagnosis" / "step-000003.json").read_text())
    assert diagnosis["loss"] == "nan"
    assert diagnosis["statistics"]["logprobs"]["not_finite"] == 0
    assert len(diagnosis["completions"]) == 16
    assert len(diagnosis["completions"][0]["logprobs"]) == len(diagnosis["completions"][0]["token_ids"])
    assert json.loads((run / "checkpoints" / "latest" / "state.json").read_text())["step"] == 2
    summary = rl.run(tiny_recipe(model, run, train__steps=5, train__save_every=0), resume=True, quiet=True)
    assert summary.last_step == 5


def test_bad_gradient_names_the_parameters(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tmp_path / "run"

    def poisoned(*args: Any, **kwargs: Any) -> Any:
        loss, sums = policy_loss_module.policy_loss(*args, **kwargs)
        loss.register_hook(lambda grad: grad * float("inf"))
        return loss, sums

    monkeypatch.setattr(update, "policy_loss", poisoned)
    with pytest.raises(TrainingDiverged, match="gradient norm is nan"):
        rl.run(tiny_recipe(model, run, train__steps=1), quiet=True)
    assert json.loads((run / "diagnosis" / "step-000001.json").read_text())["parameters_with_bad_gradients"]
