"""`leanroll.train.distill.run` end to end on tiny models."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import AutoPeftModelForCausalLM
from peft.tuners.tuners_utils import BaseTunerLayer
from transformers import AutoModelForCausalLM

from leanroll.cli.main import main
from leanroll.config import to_toml
from leanroll.errors import ConfigError, ModelError, OutOfMemory, TeacherError, TrainingDiverged
from leanroll.losses.distill import divergence
from leanroll.measure.logprobs import batch_hidden
from leanroll.measure.packing import pack
from leanroll.models import load_policy
from leanroll.rollout.schedule import BudgetSchedule
from leanroll.rundir import RunDir
from leanroll.train import distill, distill_update, guard, objectives, stepper
from leanroll.train.progress import RunDisplay
from leanroll.train.prompts import PromptOrder
from leanroll.train.teacher import move_body
from leanroll.types import Prompt, Rollout, RolloutGroup
from tests.distilling import QUICK, distill_adapter, killed_in_step, metrics, recipe, save_pair
from tests.tiny import tiny_model, tiny_tokenizer


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return save_pair(tmp_path_factory.mktemp("pair"))


def test_follows_the_teacher_and_leaves_a_complete_run(models: tuple[Path, Path], tmp_path: Path) -> None:
    run = tmp_path / "run"
    config = recipe(models, run, train__steps=12, distill__prompts_per_step=8, optimizer__learning_rate=0.02)
    summary = distill.run(config, quiet=True)
    records = metrics(run)
    assert [r["step"] for r in records] == list(range(13))
    assert records[12]["distill/reverse_kl"] < 0.6 * records[1]["distill/reverse_kl"]
    assert all(r["completion_length/max"] <= 6 for r in records[1:]), "generation really stops at N"
    assert all(r["distill/num_tokens"] == 6 for r in records[1:])
    assert records[1]["distill/teacher_dropped"] > 0.01, "its padded rows are no tokens"
    assert records[1]["trained_tokens"] == records[1]["generated_tokens"]
    assert {"distill/pos_0/reverse_kl", "distill/pos_4/tokens"} <= records[1].keys()
    assert f"held-out reward {summary.before:.3f} → {summary.after:.3f}" in summary.line()
    assert summary.step_s is not None
    assert summary.step_s > 0
    completions = [json.loads(line) for line in (run / "rollouts" / "step-000012.jsonl").read_text().splitlines()]
    assert completions[0]["weights_version"] == 11
    AutoPeftModelForCausalLM.from_pretrained(run / "checkpoints" / "latest" / "policy", local_files_only=True)


def test_comparison_with_a_full_step_changes_nothing(models: tuple[Path, Path], tmp_path: Path) -> None:
    weights, found = [], []
    for name, compare in (("without", False), ("with", True)):
        summary = distill.run(
            recipe(models, tmp_path / name, train__steps=2, distill__compare_full=compare), quiet=True
        )
        state = torch.load(tmp_path / name / "checkpoints" / "latest" / "trainer.pt", weights_only=True)
        weights.append(state["optimizer"]["masters"])
        found.append(summary)
        final = RunDir.open(tmp_path / name).read_metrics()[-1]
        assert final["completion_length/max"] <= 6
    for key, weight in weights[0].items():
        assert torch.equal(weight, weights[1][key]), key
    assert found[0].comparison is None
    comparison = found[1].comparison
    assert comparison is not None
    assert (comparison.early.num_tokens, comparison.full.num_tokens) == (6, 12)
    assert comparison.full.mean_length > comparison.early.mean_length
    assert json.loads((tmp_path / "with" / "full-step.json").read_text())["full"]["num_tokens"] == 12
    assert "with full rollouts" in found[1].line()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"train__micro_batch_tokens": 160}, r"prompt \d+ of the last step .* it takes \d+ of a micro-batch"),
        ({"rollout__max_completion_length": 380}, r"prompt \d+ of the last step .* the model's context holds 512"),
    ],
    ids=["micro-batch", "context"],
)
def test_comparison_needs_room_for_full_rollouts_of_the_last_step(
    models: tuple[Path, Path], tmp_path: Path, changes: dict[str, Any], said: str
) -> None:
    """Said at the start, also where only a prompt that comes later is too long; a run that does not reach it is fine."""
    rows = [{"prompt": f"Prompt {i:02d}", "answer": 0} for i in range(12)]
    size = len(rows)

    def built(steps: int) -> distill.DistillTrainer:
        config = recipe(
            models,
            tmp_path / "run",
            distill__compare_full=True,
            task__name="jsonl",
            task__path=str(tmp_path / "train.jsonl"),
            task__eval_path=str(tmp_path / "eval.jsonl"),
            train__steps=steps,
            **QUICK,
            **changes,
        )
        with RunDisplay(1, 1, quiet=True) as display:
            return distill.DistillTrainer(config, BudgetSchedule.dense(), display)

    late = PromptOrder(size, 4, 1, seed=0).indices(3)[-1]
    rows[late]["prompt"] = "A long prompt. " * 9  # 154 tokens, with the template: 159 inputs early stopped, 165 in full
    for name, some in (("train", rows), ("eval", [{"prompt": "Held out", "answer": 0}])):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in some))
    with pytest.raises(ConfigError, match=said) as caught:
        built(3)
    assert f"prompt {late} of" in str(caught.value)
    built(2)


@pytest.mark.parametrize("full", [False, True], ids=["lora", "all weights"])
def test_micro_batches_do_not_change_a_step(models: tuple[Path, Path], tmp_path: Path, full: bool) -> None:
    changes: dict[str, Any] = {"train__steps": 2, "distill__num_generations": 2}
    if full:
        changes |= {"adapter__type": "none", "adapter__r": None, "adapter__alpha": None}
    results = []
    for name, tokens in (("one", 4096), ("many", 140)):
        run = tmp_path / name
        distill.run(recipe(models, run, **changes, train__micro_batch_tokens=tokens), quiet=True)
        state = torch.load(run / "checkpoints" / "latest" / "trainer.pt", weights_only=True)
        results.append((metrics(run), state["optimizer"]["masters"]))
    (first, weights), (second, others) = results
    assert first[1]["grad_norm"] == pytest.approx(second[1]["grad_norm"], rel=1e-4)
    assert first[1]["loss"] == pytest.approx(second[1]["loss"], rel=1e-5)
    for name, weight in weights.items():
        torch.testing.assert_close(weight, others[name], rtol=1e-3, atol=1e-4)


def test_killed_and_resumed_is_never_killed(models: tuple[Path, Path], tmp_path: Path) -> None:
    straight, broken = tmp_path / "straight", tmp_path / "broken"
    changes = {"distill__final_num_tokens": 12, "train__save_every": 2}
    distill.run(recipe(models, straight, train__steps=4, **changes), quiet=True)
    killed_in_step(4, recipe(models, broken, train__steps=4, **changes))
    distill.run(recipe(models, broken, train__steps=4, **changes), resume=True, quiet=True)
    assert metrics(broken) == metrics(straight)
    assert [r["distill/num_tokens"] for r in metrics(straight)[1:]] == [6, 8, 10, 12]
    ours, theirs = (
        torch.load(run / "checkpoints" / "latest" / "trainer.pt", weights_only=True)["optimizer"]["masters"]
        for run in (broken, straight)
    )
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_full_rollout_with_the_tail_masked_is_early_stop_for_one_step(
    models: tuple[Path, Path], tmp_path: Path
) -> None:
    early, masked = tmp_path / "early", tmp_path / "masked"
    distill.run(recipe(models, early, train__steps=1), quiet=True)
    distill.run(
        recipe(
            models,
            masked,
            train__steps=1,
            distill__full_rollouts=True,
            distill__num_tokens=None,
            distill__selection="prefix",
            distill__selected_tokens=6,
        ),
        quiet=True,
    )
    first, second = metrics(early)[1], metrics(masked)[1]
    assert second["generated_tokens"] > first["generated_tokens"]
    assert second["trained_tokens"] == first["trained_tokens"]
    assert second["loss"] == pytest.approx(first["loss"], rel=1e-5)
    assert second["grad_norm"] == pytest.approx(first["grad_norm"], rel=1e-4)


def test_ranked_tokens_and_stop_tokens(models: tuple[Path, Path], tmp_path: Path) -> None:
    distill.run(
        recipe(
            models, tmp_path / "top", train__steps=1, distill__selection="top_reverse_kl", distill__selected_tokens=2
        ),
        quiet=True,
    )
    assert metrics(tmp_path / "top")[1]["trained_tokens"] == 8
    stop = int(load_policy(models[0]).spec.stop_token_ids[0])
    rollout = Rollout(0, 0, (5, 6, stop), (-1.0, -1.0, -1.0), "stop")
    cut = Rollout(0, 1, (5, stop, 7), (-1.0, -1.0, -1.0), "length")
    group = RolloutGroup(Prompt(0, (1, 4)), (rollout, cut))
    student = load_policy(models[0])
    for score_stop, expected in ((True, [1, 1, 1]), (False, [1, 1, 0])):
        config = recipe(models, tmp_path / "none", distill__score_stop=score_stop)
        updater = distill_update.DistillUpdater(student, None, None, config, None, None)  # type: ignore[arg-type]
        chosen = updater._choose(1, distill_update.DistillBatch((group,), (), {}))
        assert chosen.factors[0].tolist() == expected
        assert chosen.factors[1].tolist() == [1, 1, 1], "cut, so its last token is no stop"


def test_out_of_memory_starts_the_update_again(
    models: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, short = tmp_path / "plain", tmp_path / "short"
    distill.run(recipe(models, plain, train__steps=1, train__micro_batch_tokens=140), quiet=True)
    backward, calls = stepper.Stepper.backward, 0

    def failing(self: stepper.Stepper, loss: torch.Tensor) -> tuple[float, float]:
        nonlocal calls
        calls += 1
        result = backward(self, loss)  # the gradients are there already when memory runs out
        if calls == 2:
            raise torch.OutOfMemoryError("injected")
        return result

    monkeypatch.setattr(stepper.Stepper, "backward", failing)
    distill.run(recipe(models, short, train__steps=1, train__micro_batch_tokens=240), quiet=True)
    assert calls > 3
    ours, theirs = metrics(short)[1], metrics(plain)[1]
    assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-4)
    assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-5)

    def never(self: stepper.Stepper, loss: torch.Tensor) -> tuple[float, float]:
        raise torch.OutOfMemoryError("injected")

    monkeypatch.setattr(stepper.Stepper, "backward", never)
    with pytest.raises(OutOfMemory, match="which hold one sequence"):
        distill.run(recipe(models, tmp_path / "none", train__steps=1), quiet=True)


def test_a_loss_that_is_not_finite_stops_the_run(
    models: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def poisoned(*args: Any, **kwargs: Any) -> Any:
        result = divergence(*args, **kwargs)
        if kwargs["weights"] is None:
            return result
        return type(result)(
            **{f: getattr(result, f) for f in result.__slots__ if f != "loss"}, loss=result.loss * torch.nan
        )

    monkeypatch.setattr(objectives, "divergence", poisoned)
    run = tmp_path / "run"
    with pytest.raises(TrainingDiverged, match="Step 1: the loss is nan"):
        distill.run(recipe(models, run), quiet=True)
    diagnosis = json.loads((run / "diagnosis" / "step-000001.json").read_text())
    assert diagnosis["loss"] == "nan"
    assert len(diagnosis["completions"][0]["reverse_kl"]) == len(diagnosis["completions"][0]["token_ids"])


def looping(monkeypatch: pytest.MonkeyPatch, from_probe: int) -> None:
    """From the given probe on, the completions that the guard sees end in loops."""
    probe, calls = guard.CollapseGuard._probe, 0

    def found(self: guard.CollapseGuard) -> Any:
        nonlocal calls
        calls += 1
        report = probe(self)
        return replace(report, periodic_tail=1.0) if calls >= from_probe else replace(report, periodic_tail=0.0)

    monkeypatch.setattr(guard.CollapseGuard, "_probe", found)


@pytest.mark.parametrize(
    ("action", "steps", "checkpoints"), [("warn", 6, [4, 6]), ("stop", 4, [2, 4]), ("roll_back", 4, [2])]
)
def test_collapse_guard(
    models: tuple[Path, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    action: str,
    steps: int,
    checkpoints: list[int],
) -> None:
    """Probes at steps 0, 2, 4, 6; the third one is the first to alarm."""
    looping(monkeypatch, from_probe=3)
    run = tmp_path / "run"
    config = recipe(
        models, run, train__steps=6, train__save_every=2, guard__every=2, guard__on_alarm=action, guard__num_prompts=2
    )
    summary = distill.run(config, quiet=True)
    assert summary.last_step == steps
    records = metrics(run)
    assert records[0]["probe/length_p50"] <= 12
    assert [r["probe/alarms"] for r in records[1:] if "probe/alarms" in r] == [0, 1, 1][: steps // 2]
    assert RunDir.open(run).checkpoint_steps() == checkpoints
    assert (run / "checkpoints" / "latest").resolve().name == f"step-{checkpoints[-1]:06d}"
    if action == "warn":
        assert summary.halted is None
        return
    assert "share of completions that end in a loop rose from 0.00 to 1.00; allowed 0.1 more" in summary.line()
    # What went on is kept, and the run can go on.
    monkeypatch.undo()
    again = distill.run(config, resume=True, quiet=True)
    assert again.last_step == 6


def test_p_eos_of_probes(models: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before training and after it, from all logits of the models on disk; it is in the baseline that a resumed run reads."""
    probe, probed = guard.CollapseGuard._probe, []

    def found(self: guard.CollapseGuard) -> Any:
        report = probe(self)
        probed.append(self.groups)
        return report

    monkeypatch.setattr(guard.CollapseGuard, "_probe", found)
    run = tmp_path / "run"
    changes = {
        "rollout__temperature": 0.7,
        "guard__every": 2,
        "guard__num_prompts": 3,
        "train__micro_batch_tokens": 160,
    }
    distill.run(recipe(models, run, train__steps=2, optimizer__learning_rate=0.05, **changes, **QUICK), quiet=True)
    trained = AutoPeftModelForCausalLM.from_pretrained(run / "checkpoints" / "latest" / "policy", local_files_only=True)
    plain = AutoModelForCausalLM.from_pretrained(models[0], local_files_only=True)
    values = []
    for record, groups, model in zip(
        (r for r in metrics(run) if "probe/eos_prob" in r), probed, (plain, trained), strict=True
    ):
        probs = []
        for group in groups:
            for rollout in group.rollouts:
                with torch.no_grad():
                    logits = model(torch.tensor([[*group.prompt.token_ids, *rollout.token_ids]])).logits[0]
                first = len(group.prompt.token_ids)
                probs += (logits[first - 1 : -1] / 0.7).softmax(-1)[:, 2].tolist()
        assert record["probe/eos_prob"] == pytest.approx(sum(probs) / len(probs), rel=1e-4)
        values.append(record["probe/eos_prob"])
    assert len(probed[0]) == 3
    assert values[0] != pytest.approx(values[1], rel=1e-2), "it could be one model"
    assert json.loads((run / "eval" / guard.BASELINE).read_text())["eos_prob"] == values[0]


def test_roll_back_needs_checkpoints(models: tuple[Path, Path], tmp_path: Path) -> None:
    changes = {"guard__every": 4, "guard__on_alarm": "roll_back"}
    with pytest.raises(ConfigError, match=r"guard\.every = 4 is no multiple of train\.save_every = 3"):
        recipe(models, tmp_path, train__save_every=3, **changes)
    with pytest.raises(ConfigError, match=r"of the 4 checkpoints between two probes train\.keep_checkpoints keeps 2"):
        recipe(models, tmp_path, train__save_every=1, **changes)
    recipe(models, tmp_path, train__save_every=1, train__keep_checkpoints=4, **changes)


class TestTeachers:
    def test_an_adapter_on_the_students_base(self, models: tuple[Path, Path], tmp_path: Path) -> None:
        """The run directory of a distillation is a teacher; its base weights are the student's own tensors."""
        first = tmp_path / "first"
        distill.run(recipe(models, first, train__steps=6, optimizer__learning_rate=0.02), quiet=True)
        run = tmp_path / "run"
        config = recipe(models, run, teacher__model=None, teacher__adapter=str(first), train__steps=6)
        trainer_teacher = distill.Teacher(config, load_policy(models[0], dtype="float32", adapter=distill_adapter()))
        assert trainer_teacher.policy.has_adapter
        distill.run(config, quiet=True)
        records = metrics(run)
        assert records[6]["distill/reverse_kl"] < records[1]["distill/reverse_kl"]

    def test_shares_the_base(self, models: tuple[Path, Path], tmp_path: Path) -> None:
        first = tmp_path / "first"
        distill.run(recipe(models, first, train__steps=1), quiet=True)
        student = load_policy(models[0], dtype="float32", adapter=distill_adapter())
        config = recipe(models, tmp_path / "run", teacher__model=None, teacher__adapter=str(first))
        teacher = distill.Teacher(config, student)
        own = {p.data_ptr() for p in student.base.parameters()}
        alone = [n for n, p in teacher.policy.base.named_parameters() if p.data_ptr() not in own]
        assert alone
        assert all("lora_" in name for name in alone)
        assert not any(p.requires_grad for p in teacher.policy.model.parameters())

    def test_offload_leaves_the_head(self, models: tuple[Path, Path], tmp_path: Path) -> None:
        """The loss reads the head's weight between two scorings; it may be the embedding too."""
        for folder in models:  # untied, tied
            policy = load_policy(folder, dtype="float32")
            move_body(policy, torch.float64)  # stands in for another device
            assert policy.head.weight.dtype is torch.float32
            elsewhere = [p for p in policy.model.parameters() if p.dtype is torch.float64]
            assert len(elsewhere) == len(list(policy.model.parameters())) - 1
        with pytest.raises(ConfigError, match="on the CPU already"):
            distill.run(recipe(models, tmp_path / "run", teacher__offload=True), quiet=True)

    def test_a_privileged_prompt(self, models: tuple[Path, Path], tmp_path: Path) -> None:
        """Frozen, the teacher is the base with the adapter off; its states are those of its own prompt."""
        config = recipe(
            models, tmp_path / "run", teacher__model=None, teacher__system_prompt="Be brief.", train__steps=1
        )
        student = load_policy(models[0], dtype="float32", adapter=distill_adapter())
        with torch.no_grad():
            for name, parameter in student.trainable_parameters().items():
                if "lora_B" in name:
                    parameter.normal_(std=0.1)
        teacher = distill.Teacher(config, student)
        assert teacher.policy is student
        prompt = Prompt(0, (1, 9, 4))
        groups = [RolloutGroup(prompt, (Rollout(0, 0, (5, 6, 7), (-1.0,) * 3, "length"),))]
        seen = Prompt(0, (1, 8, 8, 8, 9, 4))
        (states,) = teacher.hidden_states(groups, [seen], 1024)
        base = load_policy(models[0], dtype="float32")
        (batch,) = pack([RolloutGroup(seen, groups[0].rollouts)], 1024)
        with torch.no_grad():
            torch.testing.assert_close(states, batch_hidden(base, batch))
            assert not torch.allclose(states, batch_hidden(student, batch)), "the adapter is on again"
        assert not states.requires_grad
        distill.run(config, quiet=True)

    def test_current_weights_keep_the_adapter_on(self, models: tuple[Path, Path], tmp_path: Path) -> None:
        config = recipe(
            models,
            tmp_path / "run",
            teacher__model=None,
            teacher__system_prompt="Be brief.",
            teacher__weights="current",
        )
        student = load_policy(models[0], dtype="float32", adapter=distill_adapter())
        teacher = distill.Teacher(config, student)
        layers = [m for m in student.model.modules() if isinstance(m, BaseTunerLayer)]
        with teacher.scoring():
            assert not any(m.disable_adapters for m in layers)
            assert not torch.is_grad_enabled()

    def test_has_to_be_better(self, models: tuple[Path, Path], tmp_path: Path) -> None:
        run = tmp_path / "run"
        with pytest.raises(TeacherError, match=r"expected at least \+0\.900 at its lower end \(teacher\.min_margin\)"):
            distill.run(recipe(models, run, teacher__evaluate=True, teacher__min_margin=0.9), quiet=True)
        assert json.loads((run / "eval" / "teacher.json").read_text())["num_prompts"] == 4
        distill.run(
            recipe(models, tmp_path / "good", teacher__evaluate=True, teacher__min_margin=-1.0, train__steps=1),
            quiet=True,
        )
        record = metrics(tmp_path / "good")[0]
        assert record["eval/teacher/margin"] == pytest.approx(record["eval/teacher/mean"] - record["eval/reward/mean"])

    def test_other_tokenizer(self, models: tuple[Path, Path], tmp_path: Path) -> None:
        other = tmp_path / "other"
        tiny_model("llama").save_pretrained(other)
        tokenizer = tiny_tokenizer()
        backend = json.loads(tokenizer.backend_tokenizer.to_str())
        vocab = backend["model"]["vocab"]
        vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
        type(tokenizer)(
            tokenizer_object=type(tokenizer.backend_tokenizer).from_str(json.dumps(backend)),
            eos_token="<|end|>", bos_token="<|start|>", pad_token="<|pad|>", chat_template=tokenizer.chat_template,
        ).save_pretrained(other)  # fmt: skip
        run = tmp_path / "run"
        with pytest.raises(ModelError, match="tokenizer"):
            distill.run(recipe((models[0], other), run), quiet=True)
        assert not run.exists(), "nothing half-written"

    def test_first_token(self, models: tuple[Path, Path], tmp_path: Path) -> None:
        run = tmp_path / "run"
        with pytest.raises(
            TeacherError, match=r"mean KL at the first token is .* over 4 prompts; expected at most 0\.001"
        ):
            distill.run(recipe(models, run, teacher__max_first_token_kl=0.001), quiet=True)
        assert not run.exists()

    def test_dropped_mass(self, models: tuple[Path, Path], tmp_path: Path) -> None:
        with pytest.raises(
            TeacherError, match=r"The teacher puts .*% of its probability on tokens that the other side"
        ):
            distill.run(recipe(models, tmp_path / "run", teacher__max_dropped_mass=0.001), quiet=True)

    def test_a_run_that_is_no_teacher(self, models: tuple[Path, Path], tmp_path: Path) -> None:
        empty = tmp_path / "empty"
        empty.mkdir()
        config = recipe(models, tmp_path / "run", teacher__model=None, teacher__adapter=str(empty))
        with pytest.raises(ConfigError, match="there is no adapter"):
            distill.run(config, quiet=True)
        (empty / "config.toml").write_text("")
        with pytest.raises(ConfigError, match="has no checkpoint yet"):
            distill.run(config, quiet=True)
        config = recipe(models, tmp_path / "run", teacher__model=None, teacher__adapter=str(models[0]))
        with pytest.raises(ConfigError, match="a whole model"):
            distill.run(config, quiet=True)

    def test_no_privileged_text(self, models: tuple[Path, Path], tmp_path: Path) -> None:
        task = tmp_path / "task.jsonl"
        rows = [{"prompt": f"Say {i}.", "answer": str(i)} for i in range(12)]
        task.write_text("\n".join(map(json.dumps, rows)))
        config = recipe(
            models, tmp_path / "run", teacher__model=None, teacher__privileged=True, eval__num_prompts=1,
            task__name="jsonl", task__path=str(task), task__rewards=None,
        )  # fmt: skip
        with pytest.raises(ConfigError, match="has no privileged text"):
            distill.run(config, quiet=True)


def test_command_line(models: tuple[Path, Path], tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "recipe.toml"
    file.write_text(to_toml(recipe(models, tmp_path / "run", train__steps=1)))
    assert main(["distill", str(file)]) == 0
    assert "held-out reward" in capfd.readouterr().err
    assert main(["distill", str(file), "--distill.num_tokens", "0", "--train.run_dir", str(tmp_path / "b")]) == 2
    assert "distill.num_tokens = 0: expected greater than or equal to 1" in capfd.readouterr().err
    assert main(["distill", str(file), "--distill.num_tokens", "13", "--train.run_dir", str(tmp_path / "b")]) == 2
    assert "more than rollout.max_completion_length = 12" in capfd.readouterr().err
