from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from leanroll.errors import ConfigError
from leanroll.tasks import load_task, task_names
from leanroll.tasks.registry import task_options


def test_names_and_options() -> None:
    assert task_names() == ("ifollow", "reasoning_gym:<dataset>", "jsonl", "parquet", "code")
    assert task_options("ifollow") == ("num_constraints", "partial_credit", "kinds", "min_words", "require_topic")
    assert "dataset" not in task_options("reasoning_gym:chain_sum")
    task = load_task("ifollow", seed=5, num_constraints=2)
    assert task.train_item(0) == load_task("ifollow", seed=5, num_constraints=2).train_item(0)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("ifolow", {}, "Did you mean 'ifollow'"),
        ("nothing", {}, "expected one of ifollow"),
        ("ifollow:hard", {}, "nothing after a colon"),
        ("reasoning_gym", {}, "needs a dataset"),
        ("ifollow", {"num_constraint": 2}, "did you mean 'num_constraints'"),
        ("ifollow", {"path": "x"}, "no option 'path'"),
        ("jsonl", {}, "needs the option 'path'"),
        ("ifollow", {"num_constraints": "two"}, "num_constraints is 'two'; expected a valid integer"),
        ("ifollow", {"partial_credit": "no"}, "partial_credit is 'no'; expected a valid boolean"),
        ("ifollow", {"kinds": "lowercase"}, "kinds is 'lowercase'; expected"),
        ("ifollow", {"seed": "one"}, "seed is 'one'; expected a valid integer"),
        ("jsonl", {"path": "rows.jsonl", "eval_size": "some"}, "eval_size is 'some'; expected a valid integer"),
    ],
)
def test_mistakes(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_task(name, **options)


def test_tasks_import_no_model_code() -> None:
    code = (
        "import sys; from leanroll.tasks import load_task; import leanroll.tasks.rewards, leanroll.tasks.metrics; "
        "import leanroll.tasks.files; load_task('ifollow').train_item(0); "
        "print({'torch', 'transformers', 'pyarrow', 'reasoning_gym'} & set(sys.modules))"
    )
    search_path = f"import sys; sys.path[:] = {sys.path!r}; "
    done = subprocess.run([sys.executable, "-c", search_path + code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
