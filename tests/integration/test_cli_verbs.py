"""`leanroll rollout`, `eval` and `doctor` on a tiny model, from files to files."""

import json
from pathlib import Path

import pytest

from leanroll.cli.main import main
from leanroll.config import AdapterConfig, GenerateConfig, load_config
from leanroll.models import LoraSpec, load_policy
from leanroll.rundir import read_jsonl
from leanroll.train.setup import (
    PromptEncoder,
    build_engine,
    build_policy,
    build_schedule,
    build_task,
    sampling_params,
)
from tests.tiny import save_sampler, tiny_model, tiny_tokenizer

REWARD = """
def short(completions, answer, **columns):
    return [1.0 if len(text) < limit else 0.25 for text, limit in zip(completions, answer)]
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    tiny_model("llama").save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def recipe(model: Path, tmp_path: Path) -> Path:
    (tmp_path / "budget.json").write_text(json.dumps({"page_size": 8, "pages": [4], "dense_layers": [0]}))
    (tmp_path / "reward.py").write_text(REWARD)
    for name in ("Train", "Eval"):
        rows = [{"prompt": f"{name} {i}: what comes next?", "answer": 5 * i} for i in range(6)]
        (tmp_path / f"{name.lower()}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    path = tmp_path / "recipe.toml"
    path.write_text(
        f'[model]\nname = "{model}"\ndtype = "float32"\ndevice = "cpu"\n'
        '[task]\nname = "jsonl"\npath = "train.jsonl"\neval_path = "eval.jsonl"\n'
        'rewards = [{function = "reward.py:short"}]\n'
        '[rollout]\nschedule = "budget.json"\nkernel = "reference"\nmax_completion_length = 24\nkv_memory_gib = 0.1\n'
        "[rl]\nnum_generations = 4\n[eval]\nnum_prompts = 3\nnum_samples = 2\n"
    )
    return path


def test_rollout_of_prompts(recipe: Path, tmp_path: Path) -> None:
    prompts, output = tmp_path / "prompts.txt", tmp_path / "out.jsonl"
    prompts.write_text("Say hello.\nCount to three, slowly and carefully.\n")
    arguments = ["rollout", str(recipe), "--prompts", str(prompts), "-o", str(output), "--num_samples", "3"]
    assert main([*arguments, "--num_top_logprobs", "2", "--seed=5"]) == 0
    rows = list(read_jsonl(output))
    assert [(row["prompt_index"], row["sample_index"]) for row in rows] == [(p, s) for p in range(2) for s in range(3)]
    for row in rows:
        assert 1 <= len(row["token_ids"]) == len(row["logprobs"]) == len(row["top_token_ids"]) <= 24
        assert all(logprob <= 0 for logprob in row["logprobs"])
        assert row["finish_reason"] in ("stop", "length")
    long = [row for row in rows if row["finish_reason"] == "length"]
    assert long
    assert all(0 < row["kv_share_read"] < 1 for row in long)
    assert main([*arguments, "--num_top_logprobs", "2", "--seed=5"]) == 0
    assert list(read_jsonl(output)) == rows


def test_rollout_of_the_task(recipe: Path, tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    assert main(["rollout", str(recipe), "-o", str(output), "--num_prompts", "2"]) == 0
    rows = list(read_jsonl(output))
    assert [row["prompt"] for row in rows] == [f"Eval {i}: what comes next?" for i in range(2)]


def test_rollout_refuses_before_it_writes(recipe: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    prompts, output = tmp_path / "prompts.txt", tmp_path / "out.jsonl"
    prompts.write_text("short\n" + "long " * 200 + "\n")
    assert main(["rollout", str(recipe), "--prompts", str(prompts), "-o", str(output)]) == 2
    assert "Prompt 1 has" in capfd.readouterr().err
    assert main(["rollout", str(recipe), "-o", str(output), "--num_prompts", "7"]) == 2
    assert "has 6 prompts" in capfd.readouterr().err
    assert main(["rollout", str(recipe), "--prompts", str(prompts), "-o", str(output), "--split", "train"]) == 2
    assert "split has no effect" in capfd.readouterr().err
    assert not output.exists()


@pytest.mark.parametrize(
    ("options", "in_recipe", "said"),
    [
        ([], 'few_shot = "Q: 1+1? A: 2"', "task.few_shot has no effect"),
        ([], 'few_shot_file = "train.jsonl"', "task.few_shot_file has no effect"),
        (["--task.few_shot", "Q: 1+1?"], "", "task.few_shot has no effect"),
        (["--task.name", "ifollow"], "", "task.name has no effect"),
        (["--task.params.seed=3"], "", "task.params.seed has no effect"),
        (["--task.reward_workers", "0"], "", "task.reward_workers has no effect"),
        (["--plain", "--task.system_prompt", "Be brief."], "", "task.system_prompt has no effect"),
        (["--plain"], 'system_prompt = "Be brief."', "because --plain gives them"),
    ],
)
def test_what_the_prompts_of_a_file_leave_without_effect_is_an_error(
    recipe: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], options: list[str], in_recipe: str, said: str
) -> None:
    prompts, output = tmp_path / "prompts.txt", tmp_path / "out.jsonl"
    prompts.write_text("Say hello.\n")
    recipe.write_text(recipe.read_text().replace("[task]\n", f"[task]\n{in_recipe}\n"))
    arguments = ["rollout", str(recipe), "--prompts", str(prompts), "-o", str(output), *options]
    assert main(arguments) == 2
    assert said in capfd.readouterr().err
    assert not output.exists()
    option = said.split()[0]
    if in_recipe and option.startswith("task.few_shot"):
        assert main([*arguments, f"--{option}", "null"]) == 0


def test_a_system_prompt_for_conversations_that_have_one(
    recipe: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    prompts, output = tmp_path / "prompts.jsonl", tmp_path / "out.jsonl"
    own = [{"role": "system", "content": "Be long."}, {"role": "user", "content": "Hello."}]
    prompts.write_text(json.dumps({"messages": own}) + "\n" + json.dumps({"prompt": "Hello."}) + "\n")
    arguments = ["rollout", str(recipe), "--prompts", str(prompts), "-o", str(output)]
    arguments += ["--task.system_prompt", "Be brief."]
    assert main(arguments) == 0, "the second takes it"
    assert main([*arguments, "--num_prompts", "1"]) == 2
    assert "because each has a system message of its own" in capfd.readouterr().err


def test_a_chat_template_of_the_users(recipe: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    template, output = tmp_path / "chat.jinja", tmp_path / "out.jsonl"
    # In this one a turn ends with <|start|>, which then ends a completion.
    template.write_text("{% for m in messages %}{{ m['content'] + '<|start|>' }}{% endfor %}")
    policy = build_policy(
        load_config(GenerateConfig, recipe, [("model.chat_template", str(template))]).model,
        AdapterConfig(type="none"),
        training=False,
    )
    assert policy.spec.stop_token_ids == (1, 2)
    template.write_text("{{ raise_exception('no such role') }}")
    arguments = ["rollout", str(recipe), "--model.chat_template", str(template), "-o", str(output)]
    assert main([*arguments, "--num_prompts", "1"]) == 2
    assert "no such role" in capfd.readouterr().err


@pytest.fixture
def sampler(model: Path, recipe: Path, tmp_path: Path) -> Path:
    """A sampler adapter, and a schedule that was fitted with it."""
    schedule = {"page_size": 8, "pages": [4], "dense_layers": [0], "provenance": {"with_sampler_adapter": True}}
    (tmp_path / "fitted.json").write_text(json.dumps(schedule))
    return save_sampler(tmp_path / "sampler", load_policy(model, dtype="float32"))


def test_rollout_with_a_sampler_adapter(
    recipe: Path, sampler: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """What the verb writes is what the engine draws with the adapter, whatever else the training recipe's table says."""
    output = tmp_path / "out.jsonl"
    recipe.write_text(recipe.read_text() + '[sampler_adapter]\npath = "sampler"\nlearning_rate = 0.1\n')
    arguments = ["rollout", str(recipe), "-o", str(output), "--num_prompts", "2", "--rollout.schedule"]
    assert main([*arguments, str(tmp_path / "fitted.json")]) == 0
    assert "made for a sampler adapter" not in capfd.readouterr().err
    with_adapter = list(read_jsonl(output))

    config = load_config(GenerateConfig, recipe)
    policy = build_policy(config.model, config.adapter, training=False)
    policy.add_sampler(LoraSpec(path=sampler))
    engine = build_engine(policy, build_schedule(config.rollout), config.rollout)
    prompts = PromptEncoder(policy, config.task).encode(build_task(config.task).eval_items(2))
    groups = engine.generate(prompts, sampling_params(policy, config.rollout, seed=0), 1)
    for row, group in zip(with_adapter, groups, strict=True):
        assert row["token_ids"] == list(group.rollouts[0].token_ids)
        assert row["logprobs"] == pytest.approx(list(group.rollouts[0].logprobs), abs=1e-6)

    assert main([*arguments, str(tmp_path / "fitted.json"), "--sampler_adapter.path", "null"]) == 0
    assert "fitted.json' was made for a sampler adapter; without one" in capfd.readouterr().err
    without = list(read_jsonl(output))
    assert [row["logprobs"] for row in without] != [row["logprobs"] for row in with_adapter]
    for row, other in zip(without, with_adapter, strict=True):
        assert row["logprobs"][0] == other["logprobs"][0], "the first token is drawn densely"


def test_eval_with_a_sampler_adapter(
    recipe: Path, sampler: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    output, lines = tmp_path / "eval.json", tmp_path / "completions.jsonl"
    arguments = ["eval", str(recipe), "-o", str(output), "--completions", str(lines), "--eval.temperature", "1.0"]
    arguments += ["--rollout.schedule", str(tmp_path / "fitted.json"), "--task.reward_workers", "0"]
    assert main([*arguments, "--sampler_adapter.path", str(sampler)]) == 0
    assert "made for a sampler adapter" not in capfd.readouterr().err
    assert json.loads(output.read_text())["config"]["sampler_adapter"] == {"path": str(sampler)}
    with_adapter = [row["completion"] for row in read_jsonl(lines)]
    assert main(arguments) == 0
    assert "made for a sampler adapter" in capfd.readouterr().err
    assert [row["completion"] for row in read_jsonl(lines)] != with_adapter


@pytest.mark.parametrize("verb", ["rollout", "eval"])
def test_sampler_adapters_that_cannot_be_used(
    recipe: Path, sampler: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], verb: str
) -> None:
    output, dense = tmp_path / "out.json", tmp_path / "dense.json"
    dense.write_text(json.dumps({"page_size": 8, "pages": [2**30], "dense_layers": []}))
    arguments = [verb, str(recipe), "-o", str(output), "--sampler_adapter.path", str(sampler)]
    for options, said in (
        (["--rollout.schedule", "dense"], "no effect, because rollout.schedule is 'dense'"),
        (["--rollout.schedule", str(dense)], "dense.json' reads every page"),
        (["--sampler_adapter.path", str(tmp_path / "none")], "none"),
        (["--sampler_adapter.r", "4"], "unknown key sampler_adapter.r"),
    ):
        assert main([*arguments, *options]) == 2
        assert said in capfd.readouterr().err
    recipe.write_text(recipe.read_text() + "[sampler_adapter]\nrank = 4\n")
    assert main(arguments[:4]) == 2, "left aside is what training recipes have"
    assert "unknown key sampler_adapter.rank" in capfd.readouterr().err
    assert not output.exists()


def test_eval(recipe: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "eval.json"
    assert main(["eval", str(recipe), "-o", str(output)]) == 0
    result = json.loads(output.read_text())
    assert {"mean@2", "pass@1", "pass@2"} <= set(result["scores"])
    for value in result["scores"].values():
        assert 0 <= value["low"] <= value["mean"] <= value["high"] <= 1
    assert result["scores"]["mean@2"]["mean"] == pytest.approx(result["mean_reward"])
    assert result["config"]["eval"]["num_prompts"] == 3
    assert result["environment"]["kernel"] == "reference"
    assert "mean@2" in capfd.readouterr().out
    assert main(["eval", str(recipe), "-o", str(output), "--eval.num_prompts", "0"]) == 0
    assert json.loads(output.read_text())["num_prompts"] == 6


def test_eval_keeps_its_completions(recipe: Path, tmp_path: Path) -> None:
    output, completions = tmp_path / "eval.json", tmp_path / "completions.jsonl"
    assert main(["eval", str(recipe), "-o", str(output), "--completions", str(completions)]) == 0
    rows = list(read_jsonl(completions))
    assert [(row["prompt_index"], row["sample_index"]) for row in rows] == [(p, s) for p in range(3) for s in range(2)]
    assert [row["prompt"] for row in rows[::2]] == [f"Eval {i}: what comes next?" for i in range(3)]
    for row in rows:
        expected = 1.0 if len(row["completion"]) < 5 * row["prompt_index"] else 0.25  # `REWARD`
        assert (row["reward"], row["rewards"]) == (expected, {"short": expected})
        assert row["finish_reason"] in ("stop", "length")
    rewards = [reward for prompt in json.loads(output.read_text())["per_prompt"] for reward in prompt["rewards"]]
    assert [row["reward"] for row in rows] == rewards


def test_doctor(model: Path, capfd: pytest.CaptureFixture[str]) -> None:
    options = ["--model.name", str(model), "--model.device", "cpu", "--rollout.kernel", "reference"]
    assert main(["doctor", *options, "--rollout.schedule", "qwen3-4b-0.86"]) == 0
    text = " ".join(capfd.readouterr().out.split())
    for expected in (
        "vector extensions",
        "reference (rollout.kernel = reference, device cpu)",
        "2 '<|end|>'",
        "KiB per token",
    ):
        assert expected in text
    assert "<|start|>user" in text
    assert main(["doctor", "--no-model"]) == 0
    assert main(["doctor", "--model.name", "/nowhere"]) == 2


@pytest.mark.parametrize(
    ("schedule", "said"),
    [
        ({"dense_layers": [0, 1]}, "sparse layers 2 of 4 usable yes"),
        ({"dense_layers": [0, 4]}, "keeps layers [4] dense; the model has layers 0 to 3"),
        ({"dense_layers": [0, 1, 2, 3]}, "leaves no layer of the model sparse"),
        ({"scorer": "guess"}, "guess"),
    ],
)
def test_doctor_tries_the_schedule(
    model: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], schedule: dict[str, object], said: str
) -> None:
    (tmp_path / "budget.json").write_text(json.dumps({"page_size": 8, "pages": [4], **schedule}))
    options = ["--model.name", str(model), "--model.device", "cpu", "--rollout.schedule", str(tmp_path / "budget.json")]
    code = main(["doctor", *options])
    captured = capfd.readouterr()
    assert said in " ".join(captured.out.split())
    usable = "usable yes" in said
    assert code == (0 if usable else 2)
    assert ("error: " in captured.err) == (not usable)


def test_doctor_tries_the_kernels(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    tiny_model("llama", head_dim=12).save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    options = ["--model.name", str(tmp_path), "--model.device", "cpu", "--rollout.schedule", "qwen3-4b-0.86"]
    assert main(["doctor", *options, "--rollout.kernel", "reference"]) == 0
    assert main(["doctor", *options, "--rollout.kernel", "cpu"]) == 2
    assert "head dimension 12; the CPU kernels take multiples of 8" in " ".join(capfd.readouterr().out.split())
