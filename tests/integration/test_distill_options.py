"""Options of the distillation trainer end to end on tiny models: top-k, no teacher, tokens per prompt, N that adapts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from leanroll.errors import ConfigError
from leanroll.losses.distill import divergence
from leanroll.losses.vocabulary import SharedVocabulary
from leanroll.measure.logprobs import batch_hidden
from leanroll.measure.packing import pack
from leanroll.models import CausalContext, load_policy
from leanroll.tasks import TaskItem
from leanroll.train import distill, distill_update, guard, objectives
from leanroll.train.prompts import with_own_limits
from leanroll.types import Prompt, Rollout, RolloutGroup
from tests.distilling import QUICK, distill_adapter, killed_in_step, metrics, recipe, save_pair


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return save_pair(tmp_path_factory.mktemp("pair"))


class TestTopk:
    """The teacher's padded rows and the stop class are in play throughout."""

    def test_all_tokens_are_the_full_divergence(self, models: tuple[Path, Path], tmp_path: Path) -> None:
        """The same update, but for rounding; and with few of them less than it, under a name of its own."""
        for name, changes in (("full", {}), ("all", {"distill__top_k": 259}), ("few", {"distill__top_k": 8})):
            distill.run(recipe(models, tmp_path / name, train__steps=1, **QUICK, **changes), quiet=True)
        full, whole, few = (metrics(tmp_path / name)[1] for name in ("full", "all", "few"))
        assert whole["distill/topk_reverse_kl"] == pytest.approx(full["distill/reverse_kl"], rel=1e-4)
        assert whole["loss"] == pytest.approx(full["loss"], rel=1e-4)
        assert whole["grad_norm"] == pytest.approx(full["grad_norm"], rel=1e-3)
        assert whole["distill/first_token_topk_kl"] == pytest.approx(full["distill/first_token_kl"], rel=1e-4)
        assert whole["distill/pos_4/topk_reverse_kl"] == pytest.approx(full["distill/pos_4/reverse_kl"], rel=1e-4)
        assert whole["distill/student_tail"] == pytest.approx(0, abs=1e-6)
        for name in ("student_dropped", "teacher_dropped", "student_entropy", "teacher_entropy"):
            assert few[f"distill/{name}"] == pytest.approx(full[f"distill/{name}"], rel=1e-4)
        assert 0.05 * full["distill/reverse_kl"] < few["distill/topk_reverse_kl"] < 0.95 * full["distill/reverse_kl"]
        assert few["distill/student_tail"] > 0.1
        assert few["distill/tail_clamped_share"] == 0
        assert "distill/reverse_kl" not in few, "a bound is not called what it bounds"

    @pytest.mark.parametrize("full", [False, True], ids=["lora", "all weights"])
    def test_micro_batches_do_not_change_a_step(self, models: tuple[Path, Path], tmp_path: Path, full: bool) -> None:
        changes: dict[str, Any] = {"train__steps": 1, "distill__num_generations": 2, "distill__top_k": 8, **QUICK}
        if full:
            changes |= {"adapter__type": "none", "adapter__r": None, "adapter__alpha": None}
        for name, tokens in (("one", 4096), ("many", 140)):
            distill.run(recipe(models, tmp_path / name, **changes, train__micro_batch_tokens=tokens), quiet=True)
        one, many = (metrics(tmp_path / name)[1] for name in ("one", "many"))
        assert one["grad_norm"] == pytest.approx(many["grad_norm"], rel=1e-4)
        assert one["loss"] == pytest.approx(many["loss"], rel=1e-5)

    def test_killed_and_resumed(self, models: tuple[Path, Path], tmp_path: Path) -> None:
        straight, broken = tmp_path / "straight", tmp_path / "broken"
        changes = {"distill__top_k": 8, "train__steps": 3, "train__save_every": 1, **QUICK}
        distill.run(recipe(models, straight, **changes), quiet=True)
        killed_in_step(3, recipe(models, broken, **changes))
        distill.run(recipe(models, broken, **changes), resume=True, quiet=True)
        assert metrics(broken) == metrics(straight)
        assert metrics(straight)[3]["distill/topk_reverse_kl"] < metrics(straight)[1]["distill/topk_reverse_kl"]

    def test_options_that_do_not_fit(self, models: tuple[Path, Path], tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match="top_k is 260, but student and teacher share 259 tokens"):
            distill.run(recipe(models, tmp_path / "run", distill__top_k=260), quiet=True)
        assert not (tmp_path / "run").exists()
        with pytest.raises(ConfigError, match="tail bucket is for 'reverse_kl' alone"):
            recipe(models, tmp_path, distill__top_k=8, distill__divergence="forward_kl")
        with pytest.raises(ConfigError, match="ranks tokens by statistics over the full vocabulary"):
            recipe(models, tmp_path, distill__top_k=8, distill__selection="top_reverse_kl", distill__selected_tokens=2)
        with pytest.raises(ConfigError, match="greater than or equal to 1"):
            recipe(models, tmp_path, distill__top_k=0)


class TestAdaptiveTokens:
    """Probes at steps 2, 4, 6; windows of one step, so that the first one is the first to move N."""

    CHANGES: ClassVar[dict[str, Any]] = {
        "guard__every": 2, "guard__num_prompts": 2, "guard__num_samples": 1, "train__steps": 6,
        "distill__prompts_per_step": 2, "adapt__max_num_tokens": 11, "adapt__min_num_tokens": 4, "adapt__window": 1,
        "adapt__extend_below": 100.0, "adapt__tail_factor": 0.0, **QUICK,
    }  # fmt: skip

    def test_extends_to_its_limit(
        self, models: tuple[Path, Path], tmp_path: Path, capfd: pytest.CaptureFixture[str]
    ) -> None:
        distill.run(recipe(models, tmp_path / "run", **self.CHANGES))
        records = metrics(tmp_path / "run")
        assert [r["distill/num_tokens"] for r in records[1:]] == [6, 6, 9, 9, 11, 11]
        assert [r["completion_length/max"] for r in records[1:]] == [6, 6, 9, 9, 11, 11]
        assert [r["adapt/move"] for r in records if "adapt/move" in r] == [1, 1, 0]
        assert "step 2: N 6 → 9 tokens; the head's KL is at" in capfd.readouterr().err
        for record in records[1:]:
            # min_num_tokens is the width of a bin here, so the head is the first one.
            assert record["adapt/head_kl"] == pytest.approx(record["distill/pos_0/reverse_kl"], rel=1e-6)
        assert records[2]["adapt/head_share"] == pytest.approx(
            records[2]["adapt/head_kl"] / records[1]["adapt/head_kl"], rel=1e-9
        )

    def test_shrinks_and_survives_a_kill(
        self, models: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Probes at every step, the third one alarms; both moves lie before the checkpoint that the killed run goes on from."""
        check = guard.CollapseGuard.check

        def alarming(self: guard.CollapseGuard, step: int) -> Any:
            found, _ = check(self, step)
            return (found | {"probe/alarms": int(step == 3)}), ["injected"] * (step == 3)

        monkeypatch.setattr(guard.CollapseGuard, "check", alarming)
        straight, broken = tmp_path / "straight", tmp_path / "broken"
        changes = self.CHANGES | {"train__save_every": 3, "train__steps": 4, "guard__every": 1}
        distill.run(recipe(models, straight, **changes), quiet=True)
        records = metrics(straight)
        assert [r["distill/num_tokens"] for r in records[1:]] == [6, 6, 9, 6]
        assert [r["adapt/move"] for r in records if "adapt/move" in r] == [0, 1, -1, 0], "calm after the shrink"
        killed_in_step(4, recipe(models, broken, **changes))
        distill.run(recipe(models, broken, **changes), resume=True, quiet=True)
        assert metrics(broken) == records
        assert all(r["probe/eos_prob"] > 0 for r in records)

    @pytest.mark.parametrize("top_k", [None, 259])
    def test_kl_of_probes(self, models: tuple[Path, Path], tmp_path: Path, top_k: int | None) -> None:
        """Per token, of completions longer than a micro-batch, against the divergence of the whole; no gradient is left."""
        config = recipe(models, tmp_path, distill__top_k=top_k, train__micro_batch_tokens=20)
        student = load_policy(models[0], dtype="float32", adapter=distill_adapter())
        teacher = distill.Teacher(config, student)
        vocabulary = SharedVocabulary.of(259, 320, shared=259)
        where = ((0, 0, 30), (0, 1, 3), (1, 0, 12))  # prompt, sample, length
        made = [Rollout(g, i, tuple(range(9, 9 + n)), (-1.0,) * n, "length") for g, i, n in where]
        groups = (
            RolloutGroup(Prompt(0, (1, 9, 4)), tuple(made[:2])),
            RolloutGroup(Prompt(1, (1, 7)), (made[2],)),
        )  # fmt: skip
        prompts = [g.prompt for g in groups]
        states = teacher.hidden_states(groups, prompts, 20)
        rows: Any = states
        if top_k is not None:
            rows = teacher.likeliest(groups, prompts, 20, k=top_k, vocabulary=vocabulary, kl_temperature=1.0)
        module = objectives.StudentModule(student, teacher.policy.head, vocabulary, config)
        updater = distill_update.DistillUpdater(student, module, None, config, None, None)  # type: ignore[arg-type]
        curves = updater.token_kl(distill_update.DistillBatch(groups, rows, {}))
        (whole,) = pack(groups, 1024)
        with torch.no_grad():
            expected = divergence(
                batch_hidden(student, whole),
                student.head,
                torch.cat(states),
                teacher.policy.head,
                vocabulary=vocabulary,
            ).reverse_kl
        assert [len(c) for c in curves] == [30, 3, 12]
        torch.testing.assert_close(torch.from_numpy(np.concatenate(curves)), expected, rtol=1e-3, atol=1e-4)
        assert not any(p.grad is not None for p in student.model.parameters())


class TestTokensPerPrompt:
    def task(self, folder: Path, tokens: list[Any]) -> dict[str, Any]:
        """Changes of a recipe: a file with one training prompt per number of tokens, and one held out that has none."""
        rows = [
            {"prompt": f"Say {i}.", "answer": str(i)} | ({} if t is None else {"num_tokens": t})
            for i, t in enumerate(tokens)
        ]
        (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        (folder / "eval.jsonl").write_text(json.dumps({"prompt": "Say so.", "answer": "so"}))
        return {
            "task__name": "jsonl", "task__path": str(folder / "train.jsonl"), "task__eval_path": str(folder / "eval.jsonl"),
            "task__rewards": None, "distill__per_prompt_tokens": True, "distill__num_tokens": None, **QUICK,
        }  # fmt: skip

    def test_every_rollout_stops_at_its_own(self, models: tuple[Path, Path], tmp_path: Path) -> None:
        wanted = [1, 3, 12, 5]
        config = recipe(
            models, tmp_path / "run", **self.task(tmp_path, wanted), distill__num_generations=2, train__steps=2
        )
        distill.run(config, quiet=True)
        for step in (1, 2):
            written = (tmp_path / "run" / "rollouts" / f"step-{step:06d}.jsonl").read_text().splitlines()
            for completion in map(json.loads, written):
                limit = wanted[completion["prompt_index"]]
                assert completion["length"] == limit or (
                    completion["length"] < limit and completion["finish_reason"] == "stop"
                )
            assert len(written) == 8
        records = metrics(tmp_path / "run")
        assert records[1]["distill/num_tokens"] == 12
        assert records[1]["completion_length/min"] == 1
        assert records[1]["trained_tokens"] == records[1]["generated_tokens"] <= 2 * sum(wanted)

    @pytest.mark.parametrize(
        ("tokens", "message"),
        [
            ([3, 3, None, 3], r"training prompt 2 \('Say 2\.'\) does not say its number of tokens"),
            ([3, 3, 3, 3, 13], r"Training prompt 4 \('Say 4\.'\) has num_tokens = 13; expected 1 to 12"),
        ],
    )
    def test_a_row_that_is_wrong_is_named_before_training(
        self, models: tuple[Path, Path], tmp_path: Path, tokens: list[Any], message: str
    ) -> None:
        with pytest.raises(ConfigError, match=message):
            distill.run(recipe(models, tmp_path / "run", **self.task(tmp_path, tokens)), quiet=True)
        assert not (tmp_path / "run").exists()

    def test_beyond_the_context_or_a_micro_batch(self) -> None:
        item = TaskItem(7, ({"role": "user", "content": "x" * 100},), num_tokens=10)
        prompt = Prompt(7, tuple(range(1, 56)))
        (found,) = with_own_limits([prompt], [item], 12, 65, 64)
        assert found.max_completion_length == 10
        with pytest.raises(
            ConfigError, match=r"Training prompt 7 \('x{60}…'\) has 55 tokens and num_tokens = 10; .* 64"
        ):
            with_own_limits([prompt], [item], 12, 64, 64)
        with pytest.raises(ConfigError, match=r"which take 64; a micro-batch must hold them, and .* is 63"):
            with_own_limits([prompt], [item], 12, 65, 63)

    def test_options_that_do_not_fit(self, models: tuple[Path, Path], tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match=r"distill\.num_tokens is set but has no effect"):
            recipe(models, tmp_path, distill__per_prompt_tokens=True)
        with pytest.raises(ConfigError, match="are both true"):
            recipe(
                models, tmp_path, distill__per_prompt_tokens=True, distill__full_rollouts=True, distill__num_tokens=None
            )


class TestNoTeacher:
    def test_gradient_is_the_naive_one(self, models: tuple[Path, Path], tmp_path: Path) -> None:
        """From whole logits by autograd: tokens below the threshold have -advantage · weight · log p, the others nothing."""
        config = recipe(
            models, tmp_path, distill__objective="no_teacher", distill__no_teacher_threshold=0.004,
            distill__no_teacher_advantage=-0.7, distill__kl_temperature=0.8,
        )  # fmt: skip
        student = load_policy(models[0], dtype="float32", adapter=distill_adapter())
        with torch.no_grad():
            for name, parameter in student.trainable_parameters().items():
                if "lora_B" in name:
                    parameter.normal_(std=0.1)
        prompt, tokens = (1, 9, 4, 77), (50, 61, 72, 83, 94, 105)
        groups = [RolloutGroup(Prompt(0, prompt), (Rollout(0, 0, tokens, (-1.0,) * 6, "length"),))]
        (batch,) = pack(groups, 1024)
        weights = torch.tensor([0.5, 1.0, 0.0, 2.0, 1.0, 0.25])
        module = objectives.StudentModule(student, student.head, SharedVocabulary.of(259, 259), config)
        parameters = list(student.trainable_parameters().values())
        result = module(batch, None, weights)
        got = torch.autograd.grad(result.loss.sum(), parameters)
        ids = torch.tensor([[*prompt, *tokens]])
        logits = student.model(ids, use_cache=False, leanroll=CausalContext()).logits[0, 3:-1] / 0.8
        logprobs = logits.log_softmax(-1).gather(1, torch.tensor(tokens)[:, None])[:, 0]
        unlikely = logprobs.exp() < 0.004
        assert 0 < int(unlikely.sum()) < 6, "some of each kind"
        expected = torch.autograd.grad((0.7 * weights * logprobs)[unlikely].sum(), parameters)
        for one, other in zip(got, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-5)
        torch.testing.assert_close(result.sampled_logprob, logprobs.detach(), rtol=1e-4, atol=1e-4)
        assert result.pushed_share.tolist() == unlikely.float().tolist()
        assert any(g.abs().sum() > 0 for g in got)

    def test_the_teacher_is_never_asked(
        self, models: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def asked(*_: Any) -> None:
            raise AssertionError("the teacher scored a completion")

        monkeypatch.setattr(distill.Teacher, "hidden_states", asked)
        config = recipe(
            models, tmp_path / "run", distill__objective="no_teacher", distill__no_teacher_threshold=1.0, train__steps=2, **QUICK
        )  # fmt: skip
        distill.run(config, quiet=True)
        records = metrics(tmp_path / "run")
        assert records[0]["preflight/first_token_kl"] > 0, "but it is compared before training"
        assert records[1]["distill/pushed_share"] == 1
        assert records[1]["distill/sampled_logprob"] < 0
        assert records[1]["grad_norm"] > 0
        assert not {"distill/reverse_kl", "distill/teacher_entropy"} & records[1].keys()

    def test_options_that_do_not_fit(self, models: tuple[Path, Path], tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match=r"distill\.top_k is set but has no effect"):
            recipe(models, tmp_path, distill__objective="no_teacher", distill__top_k=4)
        with pytest.raises(ConfigError, match=r"distill\.no_teacher_threshold is set but has no effect"):
            recipe(models, tmp_path, distill__no_teacher_threshold=0.5)
        with pytest.raises(ConfigError, match="ranks tokens by what the teacher says"):
            recipe(
                models, tmp_path, distill__objective="no_teacher", distill__selection="top_reverse_kl",
                distill__selected_tokens=2,
            )  # fmt: skip
        with pytest.raises(ConfigError, match="no_teacher_advantage"):
            recipe(models, tmp_path, distill__objective="no_teacher", distill__no_teacher_advantage=1.0)
