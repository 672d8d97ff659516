"""`leanroll profile RUN_DIR` end to end on tiny models."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import AutoPeftModelForCausalLM
from transformers import AutoModelForCausalLM

from leanroll.cli.main import main
from leanroll.config import RunProfileConfig, load_config, to_toml, validate
from leanroll.errors import ConfigError
from leanroll.losses.distill import divergence
from leanroll.losses.vocabulary import SharedVocabulary
from leanroll.measure.logprobs import batch_hidden
from leanroll.measure.packing import pack
from leanroll.models import LoraSpec, load_policy
from leanroll.models.compatibility import check_compatible, vocabulary_arguments
from leanroll.rundir import RunDir, read_jsonl
from leanroll.train import distill, profile_run
from leanroll.train.profile_students import trained_tokens
from leanroll.types import Prompt, Rollout, RolloutGroup
from tests.distilling import recipe as tiny_distillation
from tests.distilling import save_pair
from tests.recipe import tiny_recipe

pytest.importorskip("matplotlib")

OPTIONS = ["--profile.num_prompts", "5", "--profile.bin_tokens", "4"]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return save_pair(tmp_path_factory.mktemp("pair"))


def train(models: tuple[Path, Path], run: Path, **changes: Any) -> Path:
    """A finished run; no evaluation, which the profile does not need."""
    options = {"eval__num_prompts": 0, "eval__num_samples": None, "teacher__evaluate": None, **changes}
    distill.run(tiny_distillation(models, run, **options), quiet=True)
    return run


def profiled(run: Path, folder: Path, *, step: int | None = None) -> dict[str, Any]:
    """What a profile without the teacher's completions and without a page found."""
    options = {"num_prompts": "5", "bin_tokens": "4", "teacher_completions": "false", "run_dir": str(folder)}
    config = load_config(
        RunProfileConfig, run / "config.toml", [(f"profile.{key}", value) for key, value in options.items()]
    )
    profile_run.run(RunDir.open(run), config, step=step, quiet=True)
    found: dict[str, Any] = json.loads((folder / "profile.json").read_text())
    return found


@pytest.fixture(scope="module")
def run(models: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that learned something, and its profile."""
    run = tmp_path_factory.mktemp("run") / "run"
    train(models, run, train__steps=8, distill__prompts_per_step=8, optimizer__learning_rate=0.02, train__save_every=4)
    assert main(["profile", str(run), *OPTIONS]) == 0
    return run


@pytest.fixture(scope="module")
def found(run: Path) -> dict[str, Any]:
    data: dict[str, Any] = json.loads((run / "profile" / "profile.json").read_text())
    return data


def lines(run: Path, whose: str) -> list[dict[str, Any]]:
    return [row for row in read_jsonl(run / "profile" / "trajectories.jsonl") if row["model"] == whose]


def test_kl_falls_where_it_was_trained(run: Path, found: dict[str, Any]) -> None:
    assert (found["kind"], found["step"], found["trained_tokens"]) == ("after", 8, 6)
    base = found["cascade"]["base"]
    assert base["trained_ratio"]["high"] < 0.9
    assert [start for start, inside in zip(base["starts"], base["trained"], strict=True) if inside] == [0, 4]
    rows = lines(run, "base")
    before, after = ([np.array(row[name]) for row in rows] for name in ("reverse_kl", "trained_reverse_kl"))
    for region, part in (("trained", slice(6)), ("untrained", slice(6, None))):
        expected = sum(kl[part].sum() for kl in after) / sum(kl[part].sum() for kl in before)
        assert base[f"{region}_ratio"]["value"] == pytest.approx(expected, rel=1e-4)
    own = [np.array(row["reverse_kl"]) for row in lines(run, "trained")]
    expected = np.concatenate([kl[6:] for kl in own]).mean() / np.concatenate([kl[6:] for kl in before]).mean()
    assert found["cascade"]["own"]["untrained_ratio"]["value"] == pytest.approx(expected, rel=1e-4)
    lengths = [len(kl) for kl in before]
    assert found["untrained_share"] == pytest.approx(sum(max(n - 6, 0) for n in lengths) / sum(lengths))
    assert found["completions"]["base"]["lengths"] == lengths


def test_leaves_a_whole_folder(run: Path, found: dict[str, Any]) -> None:
    assert {entry.name for entry in (run / "profile").iterdir()} == {
        "config.toml", "environment.json", "profile.json", "profile.html", "trajectories.jsonl",
    }  # fmt: skip
    assert not list(run.glob(".tmp-*"))
    assert {name: len(lines(run, name)) for name in ("base", "trained", "teacher")} == dict.fromkeys(
        ("base", "trained", "teacher"), 5
    )
    config = load_config(RunProfileConfig, run / "profile" / "config.toml")
    assert config.profile.num_prompts == 5
    assert set(found["commitment"]["models"]) == {"base", "trained"}
    shares = [row["token_share"] for row in found["categories"]["before"]["rows"]]
    assert sum(shares) == pytest.approx(1.0)
    # Page and JSON agree, and the page can be drawn again from the folder alone.
    page = run / "profile" / "profile.html"
    first = page.read_text()
    page.unlink()
    assert main(["report", str(run / "profile")]) == 0
    assert page.read_text() == first
    assert f"{found['cascade']['base']['untrained_ratio']['value']:.3f}" in first


def test_both_students_are_the_models_on_disk(run: Path, models: tuple[Path, Path]) -> None:
    """KL before and after as two plain forwards give it, with the adapter of the checkpoint loaded apart."""
    row = lines(run, "base")[0]
    teacher = load_policy(models[1], dtype="float32")
    adapter = LoraSpec(path=run / "checkpoints" / "latest" / "policy")
    for name, spec in (("reverse_kl", None), ("trained_reverse_kl", adapter)):
        student = load_policy(models[0], dtype="float32", adapter=spec)
        ids = tuple(student.encode_chat([{"role": "user", "content": row["prompt"]}]))
        tokens = tuple(row["token_ids"])
        group = RolloutGroup(Prompt(0, ids), (Rollout(0, 0, tokens, (0.0,) * len(tokens), "length"),))
        (batch,) = pack([group], 4096)
        arguments = vocabulary_arguments(student, teacher, check_compatible(student, teacher), eos_class=True)
        with torch.no_grad():
            expected = divergence(
                batch_hidden(student, batch), student.head, batch_hidden(teacher, batch), teacher.head,
                vocabulary=SharedVocabulary.of(**arguments),
            )  # fmt: skip
        np.testing.assert_allclose(row[name], expected.reverse_kl.numpy(), rtol=1e-4, atol=1e-5)


def test_p_eos_is_that_of_the_models_on_disk(run: Path, found: dict[str, Any], models: tuple[Path, Path]) -> None:
    """By token, from all logits: before a token is drawn, at the temperature of sampling (1 here)."""
    saved = run / "checkpoints" / "latest" / "policy"
    base, trained, teacher = (
        AutoModelForCausalLM.from_pretrained(models[0], local_files_only=True),
        AutoPeftModelForCausalLM.from_pretrained(saved, local_files_only=True),
        AutoModelForCausalLM.from_pretrained(models[1], local_files_only=True),
    )
    encoder = load_policy(models[0], dtype="float32")

    def probs(model: Any, row: dict[str, Any]) -> np.ndarray:
        prompt = encoder.encode_chat([{"role": "user", "content": row["prompt"]}])
        with torch.no_grad():
            logits = model(torch.tensor([[*prompt, *row["token_ids"]]])).logits[0, len(prompt) - 1 : -1]
        values: np.ndarray = logits.softmax(-1)[:, 2].numpy()
        return values

    on_base = {
        "base": (base, "eos_prob"),
        "trained": (trained, "trained_eos_prob"),
        "teacher": (teacher, "teacher_eos_prob"),
    }
    for name, (model, column) in on_base.items():
        expected = [probs(model, row) for row in lines(run, "base")]
        for row, values in zip(lines(run, "base"), expected, strict=True):
            np.testing.assert_allclose(row[column], values, rtol=1e-4, atol=1e-6)
        stops = found["stops"]["models"][name]
        assert stops["mean"] == pytest.approx(np.concatenate(expected).mean(), rel=1e-4)
        assert stops["by_position"][0] == pytest.approx(np.concatenate([v[:4] for v in expected]).mean(), rel=1e-4)
    for name, model in (("base", base), ("trained", trained), ("teacher", teacher)):
        own = np.concatenate([probs(model, row) for row in lines(run, name)])
        assert found["completions"][name]["report"]["eos_prob"] == pytest.approx(own.mean(), rel=1e-4)
    assert found["stops"]["temperature"] == 1.0
    page = (run / "profile" / "profile.html").read_text()
    assert f"{found['completions']['trained']['report']['eos_prob']:.3g}" in page
    assert "<td>last \\boxed right, share</td><td>n/a</td><td>n/a</td><td>n/a</td>" in page.replace(' class="n"', "")


@pytest.fixture(scope="module")
def from_rows(models: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Rows with numbers of tokens of their own and the answers 0, 1, …; the trained student boxes its answer and then 3."""
    folder = tmp_path_factory.mktemp("rows")
    for name in ("train", "held_out"):
        rows = [{"prompt": f"{name} {i}", "answer": str(i), "num_tokens": 1 + i % 4} for i in range(8)]
        (folder / name).with_suffix(".jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    changes = {
        "distill__per_prompt_tokens": True, "distill__num_tokens": None, "train__steps": 1, "task__name": "jsonl",
        "task__path": str(folder / "train.jsonl"), "task__eval_path": str(folder / "held_out.jsonl"),
        "task__params": {"scoring": "numeric"},
    }  # fmt: skip
    run = train(models, folder / "run", **changes)
    complete = profile_run.complete

    def boxing(*args: Any, phase: str, **kwargs: Any) -> Any:
        groups, rate = complete(*args, phase=phase, **kwargs)
        if phase.endswith("trained"):
            for i, g in enumerate(groups):
                text = rf"\boxed{{{g.prompt.index}}}" + r" \boxed{3}" * (g.prompt.index > 0)
                groups[i] = replace(g, rollouts=(replace(g.rollouts[0], text=text),))
        return groups, rate

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(profile_run, "complete", boxing)
        return profiled(run, folder / "profile")


def test_prompts_with_numbers_of_their_own_are_named(from_rows: dict[str, Any]) -> None:
    (finding,) = (f for f in from_rows["findings"] if f["name"] == "trained positions")
    assert f"{from_rows['trained_tokens']} tokens is the most of any prompt" in finding["text"]


def test_boxed_answers_are_those_of_the_prompts(from_rows: dict[str, Any]) -> None:
    """Prompts 0 … 4: all first boxes are right, the last ones of prompts 0 and 3."""
    completions = from_rows["completions"]
    assert completions["base"]["boxed_accuracy"] is None, "no box"
    assert completions["trained"]["boxed_accuracy"] == {
        "first": 1.0, "last": 0.4, "relaxed": 1.0, "num_completions": 5
    }  # fmt: skip


@pytest.mark.parametrize("kind", ["new adapter", "adapter continued", "all weights", "moving teacher"])
def test_an_unchanged_student_has_ratios_of_one(models: tuple[Path, Path], tmp_path: Path, kind: str) -> None:
    """The two students are loaded in different ways; without training they are one."""
    changes: dict[str, Any] = {"train__steps": 1, "optimizer__learning_rate": 1e-30}
    if kind == "adapter continued":
        first = train(models, tmp_path / "first", train__steps=1)
        changes |= {"adapter__path": str(first / "checkpoints" / "latest" / "policy"), "adapter__r": None}
        changes |= {"adapter__alpha": None}
    if kind != "new adapter" and kind != "adapter continued":
        changes |= {"adapter__type": "none", "adapter__r": None, "adapter__alpha": None}
    if kind != "new adapter":
        changes |= {"teacher__model": None, "teacher__system_prompt": "Be brief."}
    if kind == "moving teacher":
        changes["teacher__weights"] = "current"
    found = profiled(train(models, tmp_path / "run", **changes), tmp_path / "profile")
    base, own = found["cascade"]["base"], found["cascade"]["own"]
    assert {base["trained_ratio"]["value"], base["untrained_ratio"]["value"], *base["ratio"]} == {1.0}
    assert own["untrained_ratio"]["value"] == 1.0
    assert found["commitment"]["models"]["base"] == found["commitment"]["models"]["trained"]
    assert found["completions"]["base"] == found["completions"]["trained"]
    assert "teacher" not in found["completions"]
    ratios = [r["value"] for r in found["categories"]["ratios"].values() if r is not None]
    assert ratios
    assert set(ratios) == {1.0}
    assert any(f["name"] == "moving teacher" for f in found["findings"]) == (kind == "moving teacher")


def test_an_earlier_checkpoint(run: Path, found: dict[str, Any], tmp_path: Path) -> None:
    earlier = profiled(run, tmp_path / "earlier", step=4)
    assert earlier["step"] == 4
    before, now = (f["cascade"]["base"] for f in (earlier, found))
    assert before["before"] == now["before"], "the base rollouts stay the same"
    assert before["trained_ratio"]["value"] > now["trained_ratio"]["value"]


@pytest.mark.parametrize(
    ("changes", "step", "expected"),
    [
        ({}, 1, 6),
        ({}, 2, 9),
        ({}, 3, 9),
        ({}, 0, 0),
        ({"distill__selection": "prefix", "distill__selected_tokens": 5}, 3, 5),
        ({"distill__selection": "prefix", "distill__selected_tokens": 20}, 3, 9),
        ({"distill__selection": "suffix", "distill__selected_tokens": 2}, 3, 9),
    ],
)
def test_trained_tokens(models: tuple[Path, Path], tmp_path: Path, changes: Any, step: int, expected: int) -> None:
    records = [{"step": 0}, *({"step": i + 1, "distill/num_tokens": n} for i, n in enumerate((6, 9, 4, 12)))]
    assert trained_tokens(tiny_distillation(models, tmp_path, **changes), records, step) == expected


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--profile.share", "0.5"], "profile.share is set but has no effect, because the run was trained already"),
        (["--profile.decay_points", "0"], "profile.decay_points is set but has no effect"),
        (["--teacher.model", "other"], "--teacher.model is set, but the run was trained with its own"),
        (["--train.steps", "3"], "--train.steps is set"),
        (["--profile.num_prompt", "3"], "did you mean profile.num_prompts?"),
        (["--step", "5"], "has no checkpoint of step 5; it has 4, 8"),
        ([], "is not a new or empty folder"),
    ],
)
def test_bad_options(run: Path, capfd: pytest.CaptureFixture[str], options: list[str], message: str) -> None:
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    assert main(["profile", str(run), *options]) == 2
    assert message in capfd.readouterr().err.replace("\n", " ")
    assert {path: path.stat().st_mtime_ns for path in run.rglob("*")} == before


def test_bad_folders(models: tuple[Path, Path], run: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    def complains(folder: Path, message: str, *options: str) -> None:
        assert main(["profile", str(folder), *options]) == 2
        assert message in capfd.readouterr().err.replace("\n", " ")

    complains(tmp_path, "expected a folder with a config.toml")
    complains(run / "profile", "is no training run; expected a run directory of `leanroll distill`")
    complains(run / "config.toml", "there is no run with checkpoints", "--step", "4")

    def started(name: str, config: Any) -> Path:
        return RunDir.create(tmp_path / name, config_toml=to_toml(config), environment={}).path

    complains(started("rl", tiny_recipe(models[0], tmp_path)), "is a run of `leanroll rl`")
    complains(started("new", tiny_distillation(models, tmp_path)), "has no checkpoint yet")
    task = tmp_path / "task.jsonl"
    task.write_text("\n".join(json.dumps({"prompt": f"Say {i}.", "answer": str(i)}) for i in range(12)))
    changes = {"task__name": "jsonl", "task__path": str(task), "task__rewards": None}
    few = train(models, tmp_path / "few", train__steps=1, **changes)
    complains(few, "profile.num_prompts is 64, but task")
    assert not (few / "profile").exists()


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_a_failure_leaves_nothing(run: Path, tmp_path: Path, error: type[BaseException]) -> None:
    config = load_config(
        RunProfileConfig, run / "config.toml",
        [("profile.num_prompts", "2"), ("profile.run_dir", str(tmp_path / "a" / "b" / "profile"))],
    )  # fmt: skip

    def failing(*_: Any, **__: Any) -> Any:
        assert any((tmp_path / "a" / "b").iterdir()), "it has begun to write"
        raise error

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(profile_run, "cascade", failing)
        with pytest.raises(error):
            profile_run.run(RunDir.open(run), config, quiet=True)
    assert not list(tmp_path.iterdir())


def test_the_recipe_says_which_profile_it_is_for(models: tuple[Path, Path], tmp_path: Path) -> None:
    data = {"teacher": {"privileged": True}, "profile": {"share": 0.5}}
    with pytest.raises(ConfigError, match=r"profile\.share is set but has no effect"):
        validate(RunProfileConfig, data)
