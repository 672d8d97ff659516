"""`leanroll bench` on a tiny model: the table, the files, the last line, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest

from leanroll.calibrate import bench, speed
from leanroll.cli.main import main
from leanroll.config import BenchConfig, load_config, option_keys
from leanroll.config.benchmark import BenchmarkConfig
from leanroll.models import Policy, load_policy
from leanroll.rollout.schedule import BudgetSchedule
from tests.tiny import save_sampler, tiny_model, tiny_tokenizer


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    tiny_model("llama").save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def recipe(model: Path, tmp_path: Path) -> Path:
    (tmp_path / "budget.json").write_text(json.dumps({"page_size": 8, "pages": [4], "dense_layers": [0]}))
    path = tmp_path / "recipe.toml"
    # With what only training uses, which is left aside.
    path.write_text(
        f'[model]\nname = "{model}"\ndtype = "float32"\ndevice = "cpu"\n[rl]\nnum_generations = 4\n'
        '[rollout]\nschedule = "budget.json"\nkernel = "reference"\ntemperature = 0.7\n'
        '[bench]\nbatch = 2\nlengths = [48, 96]\nsteps = 2\nrounds = 1\ndevice = "none"\n'
    )
    return path


def test_bench(recipe: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    output, plot = tmp_path / "speed.json", tmp_path / "speed.png"
    lengths = ["--lengths", "48", "96", "160", "--bench.prompt_length=50"]
    peers = ["--bench.peers", "transformers", "--bench.peer_steps", "2"]
    assert main(["bench", str(recipe), *lengths, *peers, "-o", str(output), "--plot", str(plot)]) == 0
    printed = capfd.readouterr().out
    *shown, last = printed.splitlines()
    result = json.loads(last)
    assert result == json.loads(output.read_text())
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert result["benchmark"] == "bench"
    assert [row["length"] for row in result["rows"]] == [48, 96, 160]
    assert (result["kernel"], result["batch"], result["dtype"]) == ("reference", 2, "float32")
    assert {"versions", "cpu", "git"} <= result["environment"].keys()
    assert result["options"]["bench"]["peers"] == ["transformers"]
    assert "temperature" not in result["options"]["rollout"]
    assert result["prediction"] == "not asked for"
    (peer,) = result["peers"]
    assert list(peer["step_ms"]) == ["48", "96", "160"]
    assert peer["greedy_regret"] < 1e-3
    text = "\n".join(shown)
    assert "50 to 160 tokens: dense" in text
    assert "transformers (sdpa" in text
    assert "4 of 20" in text


def test_a_sampler_adapter_counts_on_the_sparse_side(
    recipe: Path, model: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = save_sampler(tmp_path / "sampler", load_policy(model, dtype="float32"))
    counted: dict[bool, set[bool]] = {True: set(), False: set()}
    decode = speed.decode_seconds

    def timed(policy: Policy, schedule: BudgetSchedule, **options: Any) -> list[float]:
        sampler = policy.sampler
        assert sampler is not None
        on = sampler.on
        sampler.on = lambda rows: counted[schedule.is_dense].add(rows is not False) or on(rows)  # type: ignore[method-assign, func-returns-value]
        try:
            return decode(policy, schedule, **options)
        finally:
            del sampler.on

    monkeypatch.setattr(bench, "decode_seconds", timed)
    options = ["--sampler_adapter.path", str(saved), "--bench.device", "auto"]
    assert main(["bench", str(recipe), *options]) == 0
    result = json.loads(capfd.readouterr().out.splitlines()[-1])
    assert result["options"]["sampler_adapter"] == {"path": str(saved)}
    assert result["prediction"] == "the cost model knows no sampler adapter"
    assert counted[True] == {False}
    assert True in counted[False]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--rollout.schedule", "dense"], "nothing to compare"),
        (["--lengths", "96", "1024"], "beyond the model's context of 512"),
        (["--lengths", "96", "48"], "must ascend"),
        (["--rollout.kv_memory_gib", "0.0001"], "kv_memory_gib is 0.0001"),
        (["--rollout.kv_memory_gib", "0.0001", "--batch", "0"], "one sequence of 96 tokens"),
        (["--rollout.scheduel", "x"], "did you mean rollout.schedule"),
        (["--rollout.temperature", "0.5"], "rollout.temperature is set but has no effect"),
        (["--rollout.max_batch_size", "4"], "no effect"),
        (["--bench.peer_steps", "4"], "no effect, because peers is empty"),
        (["--bench.gguf", "some.gguf"], "does not name llama_cpp"),
        (["--bench.peers", "vllm"], "give peer_python vllm="),
        (["--bench.peers", "vllm", "--bench.peer_python", "vllm=none/python"], "there is no such program"),
        (["--bench.peers", "vllm", "--bench.peer_python", "/bin/python"], "is not NAME=PYTHON"),
        (["--bench.peer_python", "vllm=none/python"], "no effect because peers does not"),
        (["--bench.peers", "llama_cpp", "--bench.peer_python", "llama_cpp=python"], "give it as bench.gguf"),
        (["--bench.peers", "mlx"], "bench.peers"),
        (["--bench.device", "h100"], "is a GPU, but the model runs on the CPU"),
        (["--sampler_adapter.path", "none"], "none"),
        (["--sampler_adapter.r", "4"], "unknown key sampler_adapter.r"),
        (["--plot", "speed.svg"], "ends in .png"),
        (["--output", "none/speed.json"], "does not exist"),
        (["--adapter.type", "none", "--adapter.path", "adapter"], "adapter.path is set but has no effect"),
    ],
)
def test_user_errors(recipe: Path, options: list[str], message: str, capfd: pytest.CaptureFixture[str]) -> None:
    before = sorted(recipe.parent.iterdir())
    assert main(["bench", str(recipe), *options]) == 2
    captured = capfd.readouterr()
    assert message in captured.err.replace("\n", " ")
    assert captured.out == ""
    assert sorted(recipe.parent.iterdir()) == before


def test_options_of_peers() -> None:
    options = [
        ("rollout.schedule", "qwen3-4b-0.86"),
        ("bench.peers", "vllm,transformers"),
        ("bench.peer_python", "vllm=/v/python"),
    ]
    peers = load_config(BenchConfig, None, options).bench
    assert peers.peers == ("vllm", "transformers")
    assert peers.peer_python == {"vllm": "/v/python"}
    options[2] = ("bench.peer_python.vllm", "/v/python")
    assert load_config(BenchConfig, None, options).bench == peers
    # The embedded default comes as a GGUF file.
    llama = [("bench.peers", "llama_cpp"), ("bench.peer_python", "llama_cpp=/l/python")]
    assert load_config(BenchConfig, None, [options[0], *llama]).bench.gguf is None
    assert BenchmarkConfig().batch > 0


def test_help_lists_every_option(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["bench", "--help"])
    text = capfd.readouterr().out
    assert [key for key in option_keys(BenchConfig) if f"--{key}  " not in text] == []
