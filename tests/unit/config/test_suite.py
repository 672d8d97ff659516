"""Suites: one base recipe, arms and seeds in; whole recipes out."""

from __future__ import annotations

from pathlib import Path

import pytest

from leanroll.config import changed_options, load_suite
from leanroll.errors import ConfigError

SHIPPED = Path(__file__).parents[3] / "recipes" / "distill_controls.toml"
BASE = "[base.teacher]\nprivileged = true\n[base.distill]\nnum_tokens = 8\n[base.eval]\nevery = 2\nnum_prompts = 4\n"
ARMS = '[[arms]]\nname = "a"\n[[arms]]\nname = "b"\noverrides = { "distill.num_tokens" = 4 }\n'


def written(folder: Path, head: str = "", base: str = BASE, arms: str = ARMS) -> Path:
    path = folder / "suite.toml"
    path.write_text(f"{head}\n{base}\n{arms}")
    return path


def test_shipped_suite() -> None:
    suite = load_suite(SHIPPED)
    assert suite.config.seeds == (0, 1, 2)
    assert len(suite.runs) == 3 * len(suite.config.arms) == 51
    first = {run.arm: run.config for run in suite.runs if run.seed == 0}
    assert {config.teacher.adapter for config in first.values()} == {str(SHIPPED.parent / "teachers" / "ifollow")}
    assert all(config.teacher.min_margin == 0.1 for config in first.values())
    early = [config.distill for config in first.values() if not config.distill.full_rollouts]
    assert [d.num_tokens for d in early if d.asks_teacher] == [8, 16, 32]
    assert [d.num_tokens for d in early if not d.asks_teacher] == [16]
    full = [config.distill for config in first.values() if config.distill.full_rollouts]
    crossed = {(d.score_stop, d.eos_class) for d in full if d.selection == "all"}
    assert crossed == {(True, True), (True, False), (False, True), (False, False)}
    assert {d.selection for d in full} == {
        "all", "prefix", "equal_weight_full", "increasing", "random", "suffix", "top_reverse_kl", "top_student_entropy",
        "top_teacher_entropy", "top_kl_times_student_entropy",
    }  # fmt: skip
    assert {d.selected_tokens for d in full} == {None, first[suite.config.reference_arm].distill.num_tokens}
    assert len({run.path for run in suite.runs}) == len(suite.runs)


def test_runs_differ_in_what_the_arm_sets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    suite = load_suite(written(tmp_path, 'name = "s"\nseeds = [3, 5]'))
    assert [(run.arm, run.seed) for run in suite.runs] == [("a", 3), ("b", 3), ("a", 5), ("b", 5)]
    assert suite.config.reference_arm == "a"
    assert suite.runs[1].path == tmp_path / "runs" / "s" / "b-seed3"
    a3, b3, a5, _ = (run.config for run in suite.runs)
    assert set(changed_options(a3, b3)) == {"name", "distill.num_tokens", "train.run_dir"}
    assert set(changed_options(a3, a5)) == {"train.seed", "train.run_dir"}


def test_base_file_paths_tables_and_null(tmp_path: Path) -> None:
    folder = tmp_path / "bases"
    folder.mkdir()
    (folder / "budget.json").write_text("{}")
    (tmp_path / "adapter").mkdir()
    (folder / "base.toml").write_text(
        'name = "x"\n[teacher]\nprivileged = true\n[rollout]\nschedule = "budget.json"\n[train]\nseed = 9\nrun_dir = "y"\n'
        "[distill]\nnum_tokens = 5\n"
    )
    arms = (
        '[[arms]]\nname = "a"\n[[arms]]\nname = "b"\n[arms.overrides]\nteacher.adapter = "adapter"\n'
        'distill.full_rollouts = true\n"distill.num_tokens" = "null"\n'
    )
    path = written(tmp_path, 'base = "bases/base.toml"', "", arms)
    suite = load_suite(path, [("train.run_dir", str(tmp_path / "out")), ("train.steps", "7")])
    a, b = (run.config for run in suite.runs)
    assert a.rollout.schedule == str(folder / "budget.json"), "from the base's folder"
    assert b.teacher.adapter == str(tmp_path / "adapter"), "from the suite's folder"
    assert b.distill.full_rollouts
    assert (a.train.seed, a.train.steps, a.train.run_dir) == (0, 7, str(tmp_path / "out" / "a-seed0"))


@pytest.mark.parametrize(
    ("head", "base", "arms", "message"),
    [
        ("", BASE, '[[arms]]\nname = "a"\noverrides = { "distill.num_token" = 4 }', r"arm 'a': .*distill\.num_tokens\?"),
        ("", BASE, '[[arms]]\nname = "a"\noverrides = { "distill.num_tokens" = 0 }', r"arm 'a': distill\.num_tokens = 0"),
        ("", BASE, '[[arms]]\nname = "a"\noverrides = { distil = { num_tokens = 4 } }', r"unknown key distil\.num_tokens"),
        ("", BASE, '[[arms]]\nname = "a"\noverrides = { distill = 4 }', "is a table"),
        ("", BASE, '[[arms]]\nname = "a"\n[[arms]]\nname = "A"', "several arms are called a"),
        ("", BASE, '[[arms]]\nname = "../a"', r"arms\.0\.name|arms = "),
        ("", BASE, '[[arms]]\nname = "a"\noveride = {}', "unknown key arms"),
        ("", BASE, "", "arms"),
        ("arms = []", BASE, "", "arms"),
        ('reference = "c"', BASE, ARMS, "reference is 'c', which is no arm; expected one of a, b"),
        ("seeds = [1, 1]", BASE, ARMS, "seeds has 1 more than once"),
        ("seeds = []", BASE, ARMS, "seeds"),
        ("sedes = [1]", BASE, ARMS, "unknown key sedes; did you mean seeds"),
        ('base = "none.toml"', "", ARMS, "does not exist"),
        ("", '[base.teacher]\nprivilegd = true', ARMS, r"did you mean teacher\.privileged"),
        ("", BASE.replace("num_prompts = 4", "num_prompts = 0").replace("every = 2", ""), ARMS, "eval.num_prompts is 0"),
        ("compare_at_seconds = 5", BASE.replace("every = 2", ""), ARMS, "compare_at_seconds is set, but eval.every is 0"),
        ("compare_at_seconds = 0", BASE, ARMS, "compare_at_seconds = 0"),
        ("", BASE, ARMS + '[[arms]]\nname = "c"\noverrides = { eval.seed = 2 }', r"not evaluated alike \(eval\.seed: 1234 and 2"),
        ("", BASE, ARMS + '[[arms]]\nname = "c"\noverrides = { task.few_shot = "x" }', r"task\.few_shot: '' and 'x'"),
        ("", BASE, ARMS + '[[arms]]\nname = "c"\noverrides = { task.params = { seed = 1 } }', r"task\.params\.seed"),
        ("", BASE, ARMS + '[[arms]]\nname = "c"\noverrides = { rollout.top_p = 0.9 }', "not evaluated alike"),
        ("", BASE, ARMS + '[[arms]]\nname = "c"\noverrides = { rollout.max_completion_length = 300 }', "not evaluated alike"),
        ("", BASE, ARMS + '[[arms]]\nname = "c"\noverrides = { train.seed = 2 }', r"train\.seed is set by the suite"),
        ("", BASE, ARMS + '[[arms]]\nname = "c"\noverrides = { name = "x" }', "name is set by the suite"),
        (
            "", BASE, '[[arms]]\nname = "c"\noverrides = { "distill.num_tokens" = 1, distill = { num_tokens = 2 } }',
            r"distill\.num_tokens is set twice",
        ),
        ("", BASE, '[[arms]]\nname = "c"\noverrides = { guard = { every = 2, on_alarm = "stop" } }', "guard.on_alarm"),
    ],
)  # fmt: skip
def test_mistakes(head: str, base: str, arms: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        load_suite(written(tmp_path, head, base, arms))
    assert "suite.toml" in str(caught.value) or "none.toml" in str(caught.value)


def test_an_evaluation_length_of_its_own_frees_that_of_rollouts(tmp_path: Path) -> None:
    arms = ARMS + '[[arms]]\nname = "c"\noverrides = { rollout.max_completion_length = 300 }'
    suite = load_suite(written(tmp_path, "", BASE + "max_completion_length = 64\n", arms))
    assert suite.of_arm("c")[0].config.rollout.max_completion_length == 300


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("distill.num_tokens", "3", "--distill.num_tokens changes the base recipe, but arm b"),
        ("train.seed", "3", "--train.seed is set by the suite"),
        ("train.step", "3", "did you mean train.steps"),
    ],
)
def test_mistakes_on_the_command_line(key: str, value: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        load_suite(written(tmp_path), [(key, value)])
