from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from leanroll.errors import ConfigError
from leanroll.tasks import load_task
from leanroll.tasks.files import FileTask
from leanroll.tasks.rewards import RewardRunner


def write(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def rows(n: int) -> list[dict[str, Any]]:
    return [{"prompt": f"What is {i} + 1?", "answer": i + 1, "level": i % 3} for i in range(n)]


def test_rows_become_items(tmp_path: Path) -> None:
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1 + 1?"}]
    path = write(tmp_path / "a.jsonl", [{"messages": chat, "answer": "2"}])
    other = write(tmp_path / "b.jsonl", rows(2))
    task = FileTask(path, eval_path=other)
    item = task.train_item(0)
    assert item.messages == tuple(chat)
    assert dict(item.columns) == {"answer": "2"}
    assert item.prompt == "Be brief.\n\n1 + 1?"
    assert (task.num_train, task.num_eval) == (1, 2)
    assert task.eval_items(2)[1].columns == {"answer": 2, "level": 1}


def test_a_row_names_its_number_of_tokens(tmp_path: Path) -> None:
    several = [{"prompt": "a", "answer": "1", "num_tokens": 5}, {"prompt": "b", "answer": "2", "num_tokens": None}]
    path = write(tmp_path / "a.jsonl", [*several, {"prompt": "c", "answer": "3"}])
    task = FileTask(path, eval_path=write(tmp_path / "b.jsonl", rows(1)))
    assert [task.train_item(i).num_tokens for i in range(3)] == [5, None, None]
    assert dict(task.train_item(0).columns) == {"answer": "1"}, "no column for rewards"


@pytest.mark.parametrize("tokens", [0, -3, 2.0, "8", True, [8]])
def test_a_number_of_tokens_that_is_none(tmp_path: Path, tokens: Any) -> None:
    path = write(tmp_path / "a.jsonl", [*rows(3), {"prompt": "a", "answer": "1", "num_tokens": tokens}])
    with pytest.raises(ConfigError, match=r"a\.jsonl, line 4: num_tokens is .*; expected a whole number of tokens"):
        FileTask(path)


def test_scored_in_workers(tmp_path: Path) -> None:
    task = load_task("jsonl", path=str(write(tmp_path / "a.jsonl", rows(20))), scoring="numeric")
    items = [task.train_item(0), task.train_item(1)]
    with RewardRunner(task.rewards) as runner:
        total = runner.score(items, [f"It is {items[0].columns['answer']}.", "It is 99."]).total
    assert total.tolist() == [1.0, 0.0]
    assert task.correct(1.0)
    assert not task.correct(0.5)
    assert task.answer_key("it is 7") == task.answer_key("7.0")


def test_the_seeded_split_is_disjoint_even_with_repeated_prompts(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", rows(40) + rows(40))
    task, again, other = FileTask(path, seed=1), FileTask(path, seed=1), FileTask(path, seed=2)
    held_out = {item.prompt for item in task.eval_items(task.num_eval)}
    train = {task.train_item(i).prompt for i in range(task.num_train)}
    assert not held_out & train
    assert len(held_out) == 8
    assert len(held_out | train) == 40
    assert held_out == {item.prompt for item in again.eval_items(again.num_eval)}
    assert held_out != {item.prompt for item in other.eval_items(other.num_eval)}


def test_parquet(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    path = tmp_path / "a.parquet"
    pq.write_table(pa.Table.from_pylist(rows(10)), path)
    task = load_task("parquet", path=str(path), eval_size=3)
    assert (task.num_train, task.num_eval) == (7, 3)
    chat = [{"messages": [{"role": "user", "content": f"q{i}"}], "answer": "x"} for i in range(3)]
    pq.write_table(pa.Table.from_pylist(chat), path)
    assert load_task("parquet", path=str(path)).train_item(0).messages[0]["role"] == "user"
    path.write_bytes(b"PAR1 nonsense")
    with pytest.raises(ConfigError, match="cannot be read as parquet"):
        load_task("parquet", path=str(path))


def test_parquet_needs_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    (tmp_path / "a.parquet").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"leanroll\[tasks\]"):
        FileTask(tmp_path / "a.parquet")


GOOD = b'{"prompt": "a", "answer": "b"}\n'


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "no rows"),
        (b"\n \n", "no rows"),
        (GOOD + b"{prompt: 1}\n", "line 2: not a JSON object"),
        (GOOD + b'{"prompt": "a", "answer"', "line 2: not a JSON object"),
        (GOOD + b"\n\xff\xfe\n", "line 3: not a JSON object in UTF-8"),
        (GOOD + b"[1]\n", "line 2: got list"),
        (b'{"question": "a", "answer": "b"}\n', "columns are question, answer"),
        (b'{"prompt": "a", "messages": [], "answer": "b"}\n', "either 'prompt' or 'messages'"),
        (GOOD + b'{"prompt": "c"}\n', "line 2: no 'answer'"),
        (b'{"prompt": "a", "answer": " "}\n', "no 'answer'"),
        (b'{"prompt": 7, "answer": "b"}\n', "line 1: message is"),
        (b'{"prompt": "  ", "answer": "b"}\n', "line 1: message is"),
        (b'{"messages": "a", "answer": "b"}\n', "messages is str"),
        (b'{"messages": [{"role": "boss", "content": "a"}], "answer": "b"}\n', "role"),
        (b'{"messages": [{"role": "assistant", "content": "a"}], "answer": "b"}\n', "the last message"),
        (b'{"prompt": "a", "answer": "b", "completions": 1}\n', "rename it"),
        (GOOD, "different prompts"),
        (GOOD + GOOD, "different prompts"),
    ],
)
def test_bad_files(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        FileTask(path)


def test_a_file_that_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied")  # root could read it

    path = write(tmp_path / "a.jsonl", rows(4))
    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(ConfigError, match=r"a\.jsonl cannot be read \(Permission denied\)"):
        FileTask(path)


def test_bad_options(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", rows(4))
    for options, message in [
        ({"path": tmp_path / "none.jsonl"}, "no file"),
        ({"scoring": "fuzzy"}, "expected one of exact"),
        ({"eval_size": 4}, "less than the number"),
        ({"eval_size": 0}, "eval_size is 0"),
        ({"eval_path": path}, "4 prompts of"),
        ({"eval_path": path, "eval_size": 1}, "no effect"),
    ]:
        with pytest.raises(ConfigError, match=message):
            FileTask(**{"path": path, **options})  # type: ignore[arg-type]
    write(path, [*rows(3), {"prompt": "x", "answer": "seven"}])
    with pytest.raises(ConfigError, match=r"line 4: the answer 'seven' contains no number"):
        FileTask(path, scoring="numeric")
    task = FileTask(path, scoring="none")
    assert task.rewards == ()
    with pytest.raises(ConfigError, match="expected from 1 to 1"):
        task.eval_items(2)
    with pytest.raises(ConfigError, match="0 <= index < 3"):
        task.train_item(3)


def test_byte_order_mark_and_blank_lines(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + GOOD + b"\r\n" + GOOD.replace(b'"a"', b'"c"'))
    task = FileTask(path)
    assert task.num_train == task.num_eval == 1
