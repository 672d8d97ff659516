"""What the command line says to bad input: one message, exit code 2, nothing written."""

import os
from pathlib import Path

import pytest

from leanroll.cli import main as command_line
from leanroll.cli.help import options_text
from leanroll.cli.main import main
from leanroll.cli.prompts import read_prompts
from leanroll.cli.training import read_config
from leanroll.config import RLConfig, option_keys, to_toml
from leanroll.errors import ConfigError, LeanrollError, ResumeError
from leanroll.rundir import RunDir


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["rl", "--rl.epsilo", "3"], "did you mean rl.epsilon?"),
        (["rl", "none.toml"], "does not exist"),
        (["rl", "--rl.num_generations", "1"], "std of one reward"),
        (["rl", "--resume"], "does not say which run"),
        (["rl", ".", "--resume"], "No run in"),
        (["rl", "."], "is a folder"),
        (["rl", "--rl.epsilon"], "has no value"),
        (["rollout", "-o", "none/out.jsonl"], "does not exist"),
        (["rollout", "-o", "out.jsonl", "--prompts", "none.txt"], "cannot be read"),
        (["rollout", "-o", "out.jsonl", "--plain"], "no effect"),
        (["rollout", "-o", "/dev/null"], "device or a pipe"),
        (["rollout", "-o", "out.jsonl", "--rollout.scorer", "mean"], "no effect"),
        (["eval", "--rollout.scorer", "mean"], "no effect"),
        (["eval", "-o", "."], "is a folder"),
        (["eval", "--completions", "none/out.jsonl"], "--completions 'none/out.jsonl': the folder"),
        (["eval", "-o", "out", "--completions", "./out"], "give each a file of its own"),
        (["eval", "--eval.temperature", "0"], "num_samples"),
        (["report", "."], "No run in"),
    ],
)
def test_user_errors(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    captured = capfd.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ")
    assert message in captured.err.replace("\n", " ")
    assert "Traceback" not in captured.err
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("arguments", [["train"], [], ["rollout"], ["rl", "a.toml", "b.toml"], ["rl", "--unknown"]])
def test_wrong_usage(arguments: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert "usage: leanroll" in capfd.readouterr().err


@pytest.mark.parametrize("verb", ["rollout", "eval"])
def test_a_folder_that_cannot_be_written(
    verb: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def refuse(**_: object) -> None:
        raise PermissionError(13, "Permission denied")  # root could write to a read-only folder

    monkeypatch.setattr("leanroll.cli.output.tempfile.TemporaryFile", refuse)
    assert main([verb, "-o", str(tmp_path / "out.jsonl")]) == 2
    assert "is not writable (Permission denied)" in capfd.readouterr().err


def test_exit_code_of_our_errors(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    def fail(*_: object) -> int:
        raise LeanrollError("[brackets] stay")

    monkeypatch.setattr(command_line.VERBS["doctor"], "run", fail)
    assert main(["doctor"]) == 1
    assert "[brackets] stay" in capfd.readouterr().err


def test_exit_code_of_an_interrupt(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(command_line.VERBS["doctor"], "run", interrupt)
    assert main(["doctor"]) == 130


@pytest.mark.parametrize("verb", ["rl", "rollout", "eval", "doctor"])
def test_help_lists_every_option(verb: str, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main([verb, "--help"])
    assert caught.value.code == 0
    text = capfd.readouterr().out
    schema = command_line.VERBS[verb].SCHEMA
    for key in option_keys(schema):
        assert f"--{key}  " in text
    assert options_text(schema) in text


def test_resume_from_a_run_directory(tmp_path: Path) -> None:
    config = RLConfig(name="mine")
    run = RunDir.create(tmp_path / "run", config_toml=to_toml(config), environment={})
    again = read_config(RLConfig, str(run.path), True, [("train.save_every", "1")])
    assert (again.name, again.train.run_dir, again.train.save_every) == ("mine", str(run.path), 1)
    with pytest.raises(ConfigError, match="is a folder"):
        read_config(RLConfig, str(run.path), False, [])
    with pytest.raises(ResumeError, match="which run"):
        read_config(RLConfig, None, True, [])


def test_read_prompts(tmp_path: Path) -> None:
    text = tmp_path / "a.txt"
    text.write_text("first\n\n second \n")
    assert read_prompts(text) == [{"prompt": "first"}, {"prompt": " second "}]
    lines = tmp_path / "a.jsonl"
    lines.write_text('{"prompt": "p", "answer": 3}\n{"messages": [{"role": "user", "content": "q"}]}\n')
    assert read_prompts(lines)[0] == {"prompt": "p", "answer": 3}
    lines.write_text('{"prompt": "one\u2028line\x85"}\n', encoding="utf-8")
    assert read_prompts(lines) == [{"prompt": "one\u2028line\x85"}]
    for bad, message in (
        ('{"prompt": "p", "messages": [{"role": "user", "content": "q"}]}', "either"),
        ('{"text": "p"}', "either"),
        ('{"messages": []}', "either"),
        ("[1]", "either"),
        ("{", "not JSON"),
        ("", "no prompt"),
    ):
        lines.write_text(bad)
        with pytest.raises(ConfigError, match=message):
            read_prompts(lines)
