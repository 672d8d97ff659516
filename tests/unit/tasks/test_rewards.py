from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from leanroll.errors import ConfigError, RewardError
from leanroll.tasks.base import RewardSpec, TaskItem
from leanroll.tasks.rewards import RewardResult, RewardRunner
from leanroll.tasks.user_rewards import load_reward

HERE = Path(__file__).parent
SAMPLES = HERE / "reward_samples.py"


def spec(function: str, **options: Any) -> RewardSpec:
    return load_reward(f"{SAMPLES}:{function}", **options)


def items(n: int, **columns: Any) -> list[TaskItem]:
    return [TaskItem(i, ({"role": "user", "content": f"question {i}"},), dict(columns)) for i in range(n)]


def score(
    function: str, texts: list[str], on_error: str = "fail", limit: float = 5.0, workers: int = 1
) -> RewardResult:
    with RewardRunner([spec(function)], num_workers=workers, time_limit_s=limit, on_error=on_error) as runner:  # type: ignore[arg-type]
        return runner.score(items(len(texts)), texts)


@pytest.fixture(scope="module")
def zero_runner() -> Iterator[RewardRunner]:
    with RewardRunner([spec("misbehaves")], num_workers=2, time_limit_s=0.5, on_error="zero") as runner:
        runner.start()
        yield runner


def test_several_weighted_rewards_are_returned_apart() -> None:
    specs = [spec("length"), spec("num_ids", weight=0.5), spec("length", name="minus", weight=-2.0)]
    with RewardRunner(specs, num_workers=2) as runner:
        result = runner.score(items(3), ["a", "bbb", ""], [[1, 2], [3], []])
    assert {name: values.tolist() for name, values in result.values.items()} == {
        "length": [1, 3, 0],
        "num_ids": [2, 1, 0],
        "minus": [1, 3, 0],
    }
    np.testing.assert_allclose(result.total, [1 + 1 - 2, 3 + 0.5 - 6, 0])
    assert result.kept.all()
    assert not result.failures


def test_columns_reach_the_function_and_missing_ones_are_none() -> None:
    mixed = [
        TaskItem(0, ({"role": "user", "content": "q"},), {"answer": "x", "bonus": 0.5}),
        TaskItem(1, ({"role": "user", "content": "q"},), {"answer": "y"}),
    ]
    with RewardRunner([spec("columns")]) as runner:
        assert runner.score(mixed, ["x", "y"]).total.tolist() == [1.5, 1.0]


@pytest.mark.parametrize("workers", [0, 1])
def test_conversational_format(workers: int) -> None:
    with RewardRunner([spec("conversational", format="conversational")], num_workers=workers) as runner:
        assert runner.score(items(2), ["abc", ""]).total.tolist() == [3, 0]


def test_workers_start_clean_and_persist() -> None:
    with RewardRunner([spec("loads_nothing_heavy"), spec("process_id")]) as runner:
        first = runner.score(items(2), ["a", "b"])
        second = runner.score(items(2), ["a", "b"])
    assert first.values["loads_nothing_heavy"].tolist() == [1, 1]
    assert first.values["process_id"].tolist() == second.values["process_id"].tolist()
    assert first.values["process_id"][0] != os.getpid()


def test_batch_size_cuts_calls() -> None:
    with RewardRunner([spec("fails_in_batches", batch_size=1)], num_workers=2) as runner:
        assert runner.score(items(5), ["a"] * 5).total.tolist() == [2.0] * 5


def test_array_results_are_accepted() -> None:
    assert score("an_array", ["a", "b", "c"]).total.tolist() == [0, 1, 2]


def test_a_batch_costs_milliseconds() -> None:
    with RewardRunner([spec("length")]) as runner:
        runner.start()
        batch, texts = items(64, answer="x" * 100), ["word " * 200] * 64
        ids = [list(range(320))] * 64
        times = [runner.score(batch, texts, ids).seconds for _ in range(5)]
    assert min(times) < 0.05


@pytest.mark.parametrize(
    ("text", "kind", "detail"),
    [
        ("raise", "exception", "no such thing"),
        ("sys.exit", "exception", "SystemExit"),
        ("hang", "timeout", "0.5 s"),
        ("spin", "timeout", "0.5 s"),
        ("os._exit", "died", "exit code 7"),
        ("segfault", "died", "SIGSEGV"),
        ("nan", "bad_value", "nan"),
        ("huge", "bad_value", "int"),
        ("none", "bad_value", "NoneType"),
        ("string", "bad_value", "'1.0'"),
    ],
)
def test_a_failure_is_pinned_to_its_sample(zero_runner: RewardRunner, text: str, kind: str, detail: str) -> None:
    result = zero_runner.score(items(4, answer="42"), ["fine", "fine", text, "fine"])
    assert result.total.tolist() == [1, 1, 0, 1]
    assert result.kept.all()
    (failure,) = result.failures
    assert (failure.kind, failure.sample, failure.completion) == (kind, 2, text)
    assert detail in failure.detail
    report = str(failure)
    assert "question 2" in report
    assert "42" in report


def test_standard_input_is_empty(zero_runner: RewardRunner) -> None:
    assert zero_runner.score(items(1), ["read input"]).total.tolist() == [0]


def test_output_comes_with_the_failure() -> None:
    for text in ("hang", "os._exit"):
        (failure,) = score("misbehaves", [text], "zero", limit=0.5).failures
        assert "about to" in failure.output


def test_drop_takes_the_sample_out() -> None:
    result = score("misbehaves", ["fine", "raise", "nan"], "drop")
    assert result.kept.tolist() == [True, False, False]
    assert np.isnan(result.total).tolist() == [False, True, True]
    assert np.isnan(result.values["misbehaves"]).tolist() == [False, True, True]
    assert len(result.failures) == 2


@pytest.mark.parametrize("text", ["raise", "hang", "os._exit", "nan"])
def test_fail_raises_with_the_sample(text: str) -> None:
    with pytest.raises(RewardError, match=r"sample 1, prompt: 'question 1'") as caught:
        score("misbehaves", ["fine", text, "fine"], "fail", limit=0.5)
    assert "on_reward_error" in str(caught.value)


def test_failures_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    score("misbehaves", ["raise"] * 8, "zero")
    assert sum("Reward 'misbehaves' failed" in record.message for record in caplog.records) == 5
    assert "3 more reward failures" in caplog.text


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("function", ["one_value", "a_dict"])
def test_a_wrong_return_fails_the_whole_call(function: str, workers: int) -> None:
    result = score(function, ["a", "b", "c"], "drop", workers=workers)
    assert not result.kept.any()
    assert [failure.kind for failure in result.failures] == ["bad_return"]
    with pytest.raises(RewardError, match="3"):
        score(function, ["a", "b", "c"], "fail", workers=workers)


def test_an_exception_that_no_sample_raises_alone_is_still_reported() -> None:
    result = score("fails_in_batches", ["a", "b"], "zero")
    assert result.total.tolist() == [2, 2]
    assert [failure.sample for failure in result.failures] == [None]
    with pytest.raises(RewardError, match="only one at a time"):
        score("fails_in_batches", ["a", "b"], "fail")


def test_a_slow_batch_is_not_a_failure(caplog: pytest.LogCaptureFixture) -> None:
    result = score("slow_each", ["a"] * 4, "fail", limit=0.4)
    assert result.total.tolist() == [1.0] * 4
    assert result.num_slow_calls == 1
    assert "batch_size" in caplog.text


def test_printed_output_never_reaches_ours(capfd: pytest.CaptureFixture[str]) -> None:
    assert score("floods", ["a", "b"]).total.tolist() == [1, 1]
    captured = capfd.readouterr()
    assert captured.out == captured.err == ""


def test_empty_batch() -> None:
    result = score("length", [])
    assert result.total.shape == (0,)
    assert result.kept.shape == (0,)


def test_functions_that_cannot_travel() -> None:
    with pytest.raises(ConfigError, match="lambda"):
        RewardRunner([RewardSpec("r", 1.0, lambda completions, **_: [1.0])])
    with RewardRunner([RewardSpec("r", 1.0, lambda completions, **_: [1.0])], num_workers=0) as runner:
        assert runner.score(items(1), [""]).total.tolist() == [1.0]


def test_runner_options() -> None:
    with pytest.raises(ConfigError, match="name of its own"):
        RewardRunner([spec("length"), spec("length")])
    with pytest.raises(ConfigError, match="at least one"):
        RewardRunner([])
    with pytest.raises(ConfigError, match="zero or drop"):
        RewardRunner([spec("length")], on_error="ignore")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="batch_size"):
        spec("length", batch_size=0)
    runner = RewardRunner([spec("length")])
    runner.close()
    runner.close()
    with pytest.raises(RewardError, match="closed"):
        runner.score(items(1), ["a"])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("import no_such_package_anywhere\ndef reward(**_): return [1.0]\n", "no_such_package_anywhere"),
        ("import sys\nsys.exit(1)\ndef reward(**_): return [1.0]\n", "SystemExit"),
        ("reward = 3\n", "expected a function"),
    ],
)
def test_a_module_that_does_not_load(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "broken.py"
    path.write_text(content)
    with RewardRunner([load_reward(f"{path}:reward")]) as runner, pytest.raises(ConfigError, match=message):
        runner.start()


def test_a_module_that_kills_its_worker(tmp_path: Path) -> None:
    path = tmp_path / "deadly.py"
    path.write_text("import os\nprint('bye', flush=True)\nos._exit(9)\ndef reward(**_): return [1.0]\n")
    with RewardRunner([load_reward(f"{path}:reward")]) as runner, pytest.raises(RewardError, match="exit code 9"):
        runner.start()


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        ("length", "expected 'file.py:function'"),
        ("no/such/file.py:reward", "no file"),
        (f"{SAMPLES}:nothing", "defines no 'nothing'"),
        ("no_such_module_anywhere:reward", "no module"),
        (f"{SAMPLES}:not-a-name", "expected 'file.py:function'"),
    ],
)
def test_bad_references(reference: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_reward(reference)


def test_functions_by_module_name() -> None:
    reward = load_reward("leanroll.tasks.ifollow:strict_reward", name="again", weight=0.0)
    assert (reward.name, reward.weight) == ("again", 0.0)


def test_the_file_of_a_reward_can_import_its_neighbours(tmp_path: Path) -> None:
    (tmp_path / "neighbour_module.py").write_text("VALUE = 4.0\n")
    (tmp_path / "mine.py").write_text(
        "from neighbour_module import VALUE\ndef reward(completions, **_): return [VALUE] * len(completions)\n"
    )
    with RewardRunner([load_reward(f"{tmp_path / 'mine.py'}:reward")]) as runner:
        assert runner.score(items(2), ["a", "b"]).total.tolist() == [4, 4]


SCRIPT = """
import json, os, signal, sys, time
from leanroll.tasks.base import RewardSpec, TaskItem
from leanroll.tasks.rewards import RewardRunner

def reward(completions, **_):
    if completions[0] == "hang":
        time.sleep(600)
    return [float(os.getpid())] * len(completions)

if __name__ == "__main__":
    # A shell starts its background jobs, a test run among them, with SIGINT ignored, and children inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    runner = RewardRunner([RewardSpec("r", 1.0, reward)], time_limit_s=60)
    item = TaskItem(0, ({"role": "user", "content": "q"},))
    print(int(runner.score([item], ["a"]).total[0]), flush=True)
    if sys.argv[1] == "hang":
        runner.score([item], ["hang"])
"""


def _gone(pid: int, seconds: float = 5.0) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        status = Path(f"/proc/{pid}/stat")
        if status.exists() and status.read_text().rsplit(")", 1)[1].split()[0] == "Z":
            return True
        time.sleep(0.05)
    return False


@pytest.mark.parametrize(("mode", "how"), [("exit", None), ("hang", signal.SIGINT), ("hang", signal.SIGKILL)])
def test_workers_end_with_the_program(tmp_path: Path, mode: str, how: signal.Signals | None) -> None:
    script = tmp_path / "program.py"
    script.write_text(textwrap.dedent(SCRIPT))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    with subprocess.Popen(
        [sys.executable, str(script), mode], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment
    ) as program:
        assert program.stdout is not None
        worker = json.loads(program.stdout.readline())
        assert worker != program.pid
        if how is not None:
            time.sleep(0.3)
            program.send_signal(how)
        program.wait(timeout=10)
    assert _gone(worker)


def test_a_worker_killed_from_outside_is_replaced() -> None:
    with RewardRunner([spec("process_id")]) as runner:
        first = int(runner.score(items(1), ["a"]).total[0])
        os.kill(first, signal.SIGKILL)
        # Not until the last of its threads is gone: the process can be a zombie before that.
        assert runner._pool is not None
        runner._pool._workers[0].process.wait(5)
        second = int(runner.score(items(1), ["a"]).total[0])
    assert second != first


@pytest.mark.parametrize("workers", [1, 2])
def test_a_worker_killed_in_a_call(tmp_path: Path, caplog: pytest.LogCaptureFixture, workers: int) -> None:
    """Once is somebody else's doing, and the call is made again; twice counts as the reward's."""
    mark = tmp_path / "mark"
    mark.write_text("1")
    with RewardRunner([spec("kills_itself")], num_workers=workers) as runner:
        assert runner.score(items(3, mark=str(mark)), ["a", "b", "c"]).total.tolist() == [1, 1, 1]
        assert "made once more" in caplog.text
        mark.write_text("2")
        with pytest.raises(RewardError, match="SIGKILL"):
            runner.score(items(1, mark=str(mark)), ["a"])


def test_an_interrupted_score_leaves_no_stale_reply(monkeypatch: pytest.MonkeyPatch) -> None:
    with RewardRunner([spec("length")]) as runner:
        runner.start()
        with monkeypatch.context() as patch:
            patch.setattr("leanroll.tasks.reward_pool.wait", _interrupt)
            with pytest.raises(KeyboardInterrupt):
                runner.score(items(2), ["one", "three"])
        assert runner.score(items(2), ["a", ""]).total.tolist() == [1, 0]


def _interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("workers", [0, 1])
def test_what_cannot_be_loaded_is_said_at_the_start(tmp_path: Path, workers: int) -> None:
    (tmp_path / "broken.py").write_text("import a_module_that_is_not_there\ndef mine(**_): ...\n")
    with (
        RewardRunner([load_reward(f"{tmp_path}/broken.py:mine")], num_workers=workers) as runner,
        pytest.raises(ConfigError, match=r"(?s)Reward 'mine' cannot be loaded.*a_module_that_is_not_there"),
    ):
        runner.start()
