"""`leanroll profile` end to end on tiny models."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from leanroll.cli.main import main
from leanroll.config import ProfileConfig, load_config, to_toml, validate
from leanroll.errors import ConfigError, ModelError
from leanroll.losses.distill import divergence
from leanroll.losses.vocabulary import SharedVocabulary
from leanroll.measure.logprobs import batch_hidden
from leanroll.measure.packing import pack
from leanroll.models import load_policy
from leanroll.models.compatibility import check_compatible, vocabulary_arguments
from leanroll.rundir import read_jsonl
from leanroll.tasks.metrics import Interval
from leanroll.train import profile
from leanroll.train.forecast import Workload, step_cost
from leanroll.train.teacher_decay import DecayPoint, _read, prefix_lengths
from leanroll.types import Prompt, Rollout, RolloutGroup
from tests.distilling import save_pair
from tests.recipe import reward
from tests.tiny import tiny_model, tiny_tokenizer

pytest.importorskip("matplotlib")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A student, and a teacher of another architecture and size with the same tokenizer."""
    return save_pair(tmp_path_factory.mktemp("pair"))


def recipe(models: tuple[Path, Path], run_dir: Path, **changes: Any) -> ProfileConfig:
    """Full completions of at most 12 tokens; `changes` are dotted keys with __ for the dot."""
    data: dict[str, Any] = {
        "name": "tiny",
        "model": {"name": str(models[0]), "dtype": "float32", "device": "cpu"},
        "adapter": {"r": 8, "alpha": 16.0},
        "teacher": {"model": str(models[1]), "preflight_prompts": 4, "max_dropped_mass": 0.5},
        "task": {"rewards": reward("share_of_liked_ids"), "reward_workers": 0},
        "rollout": {"kernel": "reference", "max_completion_length": 12, "kv_memory_gib": 0.1},
        "distill": {"prompts_per_step": 4, "num_tokens": 6},
        "profile": {"num_prompts": 6, "decay_points": 2, "bin_tokens": 4, "run_dir": str(run_dir)},
    }
    for key, value in changes.items():
        section, _, field = key.partition("__")
        data[section][field] = value
        if value is None:
            data[section].pop(field, None)
    return validate(ProfileConfig, data)


@pytest.fixture(scope="module")
def folder(models: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What one run of the command left, with a preflight that has something to say."""
    file = tmp_path_factory.mktemp("recipe") / "recipe.toml"
    run = file.parent / "run"
    file.write_text(to_toml(recipe(models, run, teacher__max_first_token_kl=0.001)) + "\n[train]\nsteps = 3\n")
    assert main(["profile", str(file)]) == 0
    return run


def test_leaves_a_whole_folder(folder: Path) -> None:
    assert {entry.name for entry in folder.iterdir()} == {
        "config.toml", "environment.json", "profile.json", "profile.html", "trajectories.jsonl",
    }  # fmt: skip
    found = json.loads((folder / "profile.json").read_text())
    rows = list(read_jsonl(folder / "trajectories.jsonl"))
    assert len(rows) == found["lengths"]["num"] == 6
    kl = [np.array(row["reverse_kl"]) for row in rows]
    assert [len(k) for k in kl] == [len(row["token_ids"]) for row in rows]
    total = sum(k.sum() for k in kl)
    choice = found["choice"]
    assert sum(k[: choice["num_tokens"]].sum() for k in kl) >= 0.45 * total * (1 - 1e-4)
    assert sum(k[: choice["num_tokens"] - 1].sum() for k in kl) < 0.45 * total
    assert choice["low"] <= choice["num_tokens"] <= choice["high"]
    assert found["cumulative_kl"][-1] == pytest.approx(1.0)
    assert found["curves"]["reverse_kl"]["mean"][0] == pytest.approx(
        np.concatenate([k[:4] for k in kl]).mean(), rel=1e-4
    )
    assert [cost["num_tokens"] for cost in found["costs"]][-1] == 12
    assert all(cost["step_s"] > 0 for cost in found["costs"])
    assert load_config(ProfileConfig, folder / "config.toml").teacher.max_first_token_kl == 0.001


def test_findings_do_not_stop_it(folder: Path) -> None:
    findings = json.loads((folder / "profile.json").read_text())["findings"]
    levels = {f["name"]: f["level"] for f in findings}
    assert levels["KL at the first token"] == "error"
    assert levels["tokenizers"] == "ok"
    assert any("of the median length" in f["text"] for f in findings), "N is a large part of 12 tokens"


def test_the_page_is_whole(folder: Path) -> None:
    text = (folder / "profile.html").read_text()
    titles = re.findall(r'<img alt="([^"]*)" src="data:image/png;base64,[A-Za-z0-9+/=]{1000,}"', text)
    assert titles == [
        "KL by position", "Entropies by position", "Completions by position", "Cumulative KL", "Teacher decay", "Seconds per step",
    ]  # fmt: skip
    assert not re.findall(r"""(?:src|href)=["'](?!data:)""", text)
    assert "expected at most 0.001 (teacher.max_first_token_kl)" in text


def test_kl_is_that_of_the_models(folder: Path, models: tuple[Path, Path]) -> None:
    """Packed, in micro-batches and with the adapter on: the numbers of one plain forward."""
    row = next(iter(read_jsonl(folder / "trajectories.jsonl")))
    student, teacher = load_policy(models[0], dtype="float32"), load_policy(models[1], dtype="float32")
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
    np.testing.assert_allclose(row["reverse_kl"], expected.reverse_kl.numpy(), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(row["teacher_entropy"], expected.teacher_entropy.numpy(), rtol=1e-4)


class TestDecay:
    def test_controls_are_on_the_same_prompts(self, folder: Path) -> None:
        decay = json.loads((folder / "profile.json").read_text())["decay"]
        lengths = [len(row["token_ids"]) for row in read_jsonl(folder / "trajectories.jsonl")]
        first = decay["points"][0]
        assert first["k"] == 0
        assert first["continued"] == first["at_zero"] == first["own_prefix"]
        for point in decay["points"]:
            assert point["num_prompts"] == sum(length > point["k"] for length in lengths)
        assert len(decay["points"]) > 1

    def test_greedy_the_own_prefix_leads_to_the_own_completion(self, models: tuple[Path, Path], tmp_path: Path) -> None:
        """So a prefix is appended as it was generated, and the text scored is the whole."""
        config = recipe(
            models, tmp_path / "run", rollout__temperature=0.0, profile__decay_points=None, profile__decay_tokens=[2, 5],
        )  # fmt: skip
        profile.run(config, quiet=True)
        points = json.loads((tmp_path / "run" / "profile.json").read_text())["decay"]["points"]
        assert [p["k"] for p in points] == [0, 2, 5]
        for point in points:
            assert point["own_prefix"]["mean"] == pytest.approx(point["at_zero"]["mean"])

    @pytest.mark.parametrize(
        ("lengths", "tokens", "points", "expected"),
        [
            ([10, 20, 30, 40, 50], (), 4, [0, 10, 20, 30]),
            ([16] * 5, (), 3, [0, 4, 8, 12]),
            ([10, 20, 30], (5, 20, 25), 4, [0, 5]),
            ([10, 20], (), 0, [0]),
        ],
    )
    def test_prefix_lengths(
        self, lengths: list[int], tokens: tuple[int, ...], points: int, expected: list[int]
    ) -> None:
        assert prefix_lengths(lengths, tokens, points) == expected

    def test_threshold(self) -> None:
        def point(k: int, continued: float, student: float = 0.2) -> DecayPoint:
            def at(mean: float) -> Interval:
                return Interval(mean, mean - 0.01, mean + 0.01, 0.95)

            return DecayPoint(k, 9, at(continued), at(0.8), at(student), at(0.8), at(continued - 0.8), {})

        decay = _read((point(0, 0.8), point(10, 0.78), point(30, 0.5)), 0.1)
        assert (decay.threshold, decay.notes) == (10, ())
        no_lead = _read((point(0, 0.8, 0.9), point(10, 0.7)), 0.1)
        assert no_lead.threshold is None
        assert "expected the teacher's to be higher" in no_lead.notes[0]
        left_out = _read((point(0, 0.8), point(10, 0.8, 0.9)), 0.1)
        assert left_out.threshold == 0
        assert "k = 10" in left_out.notes[0]


def test_without_the_decay(models: tuple[Path, Path], tmp_path: Path) -> None:
    """The same model with another prompt; no reward is needed, and micro-batches change nothing."""
    curves = []
    for name, tokens in (("one", 4096), ("many", 16)):
        config = recipe(
            models, tmp_path / name, teacher__model=None, teacher__system_prompt="Be brief.", profile__decay_points=0,
            profile__micro_batch_tokens=tokens,
        )  # fmt: skip
        summary = profile.run(config, quiet=True)
        assert summary.threshold is None
        assert re.match(r"N = \d+ \[\d+, \d+\] tokens · knee (\d+|none) · no decay threshold · ", summary.line())
        found = json.loads((tmp_path / name / "profile.json").read_text())
        assert found["decay"] is None
        curves.append(found["curves"]["reverse_kl"]["mean"])
    np.testing.assert_allclose(curves[0], curves[1], rtol=1e-4, atol=1e-6)


def test_step_cost() -> None:
    work = Workload([4, 10], student_prompt=5.0, teacher_prompt=8.0, prompts_per_step=2, num_generations=3)
    cost = step_cost(6, work, rollout_rate=10.0, teacher_rate=20.0, student_rate=30.0)
    assert (cost.generated, cost.teacher_inputs, cost.student_inputs) == (30.0, 16 + 24, 10 + 24)
    assert cost.step_s == pytest.approx(3.0 + 2.0 + 3 * 34 / 30)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--profile.num_prompts", "1"], "profile.num_prompts = 1: expected greater than or equal to 2"),
        (["--profile.decay_tokens", "[4, 4]"], "expected ascending lengths"),
        (
            ["--profile.decay_tokens", "[4]", "--profile.decay_points", "2"],
            "profile.decay_points is set but has no effect",
        ),
        (["--profile.decay_tokens", "[12]"], "nothing would be left to continue"),
        (
            ["--profile.decay_points", "0", "--profile.delta", "0.2"],
            "profile.delta is set but has no effect, because",
        ),
        (["--teacher.model", "null"], "the teacher is the student as it starts"),
        (["--profile.share", "0"], "profile.share = 0"),
        (["--profile.teacher_completions", "true"], "profile.teacher_completions is set but has no effect"),
        (["--step", "3"], "there is no run with checkpoints"),
        (["--train.steps", "3"], "unknown key train.steps"),
    ],
)
def test_bad_options(
    models: tuple[Path, Path], tmp_path: Path, capfd: pytest.CaptureFixture[str], options: list[str], message: str
) -> None:
    file = tmp_path / "recipe.toml"
    text = to_toml(recipe(models, tmp_path / "run"))
    file.write_text(re.sub(r"(?m)^(decay_points|decay_prompts|delta|decay_tokens) = .*\n", "", text))
    assert main(["profile", str(file), *options]) == 2
    assert message in capfd.readouterr().err.replace("\n", " ")
    assert not (tmp_path / "run").exists()


def test_bad_folders_and_tasks(models: tuple[Path, Path], tmp_path: Path) -> None:
    used = tmp_path / "used"
    used.mkdir()
    (used / "file").touch()
    with pytest.raises(ConfigError, match="not a new or empty folder"):
        profile.run(recipe(models, used), quiet=True)
    task = tmp_path / "task.jsonl"
    task.write_text("\n".join(json.dumps({"prompt": f"Say {i}.", "answer": str(i)}) for i in range(4)))
    with pytest.raises(ConfigError, match=r"profile\.num_prompts is 6, but task .* has"):
        profile.run(
            recipe(models, tmp_path / "run", task__name="jsonl", task__path=str(task), task__rewards=None), quiet=True
        )
    tokenizer = tiny_tokenizer()
    backend = json.loads(tokenizer.backend_tokenizer.to_str())
    vocab = backend["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
    other = tmp_path / "other"
    tiny_model("llama").save_pretrained(other)
    type(tokenizer)(
        tokenizer_object=type(tokenizer.backend_tokenizer).from_str(json.dumps(backend)),
        eos_token="<|end|>", bos_token="<|start|>", pad_token="<|pad|>", chat_template=tokenizer.chat_template,
    ).save_pretrained(other)  # fmt: skip
    with pytest.raises(ModelError, match="tokenizer"):
        profile.run(recipe((models[0], other), tmp_path / "run"), quiet=True)


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_a_failure_leaves_nothing(models: tuple[Path, Path], tmp_path: Path, error: type[BaseException]) -> None:
    def failing(*_: Any, **__: Any) -> Any:
        assert list(tmp_path.rglob("config.toml")), "it has begun to write"
        raise error

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(profile, "choose_num_tokens", failing)
        with pytest.raises(error):
            profile.run(recipe(models, tmp_path / "runs" / "x", profile__decay_points=0), quiet=True)
    assert not list(tmp_path.iterdir())
