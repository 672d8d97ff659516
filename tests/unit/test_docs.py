"""What the documents point at exists, and README's code runs against the names that exist."""

import ast
import importlib
import re
from pathlib import Path

import pytest

from leanroll.cli.main import VERBS
from leanroll.config import option_keys

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted(
    p.relative_to(ROOT) for p in [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("*/README.md")]
)
LINK = re.compile(r"\]\(([^)#\s]+)\)")


def test_documents_are_found():
    assert {Path("README.md"), Path("docs/LOG.md"), Path("recipes/README.md"), Path("benchmarks/README.md")} <= set(
        DOCUMENTS
    )


@pytest.mark.parametrize("document", DOCUMENTS, ids=str)
def test_links_lead_somewhere(document):
    folder = (ROOT / document).parent
    targets = [t for t in LINK.findall((ROOT / document).read_text(encoding="utf-8")) if "://" not in t]
    missing = [t for t in targets if not (folder / t).exists()]
    assert not missing


@pytest.mark.parametrize("document", [d for d in DOCUMENTS if d.name not in ("LOG.md", "CHANGELOG.md")], ids=str)
def test_commands_have_the_options_they_are_given(document):
    """`leanroll VERB … --table.option`, over lines that end with a backslash."""
    text = (ROOT / document).read_text(encoding="utf-8").replace("\\\n", " ")
    wrong = [
        f"{verb} --{option}"
        for verb, rest in re.findall(rf"\bleanroll ({'|'.join(VERBS)})\b([^`\n]*)", text)
        for option in re.findall(r"--(\w+\.[\w.]+)", rest)
        if option not in option_keys(VERBS[verb].SCHEMA)
    ]
    assert not wrong


@pytest.mark.parametrize("document", [d for d in DOCUMENTS if d.name not in ("LOG.md", "CHANGELOG.md")], ids=str)
def test_options_that_are_named_exist(document):
    """`table.option` in code, where some verb has such a table."""
    known = {key for verb in VERBS.values() if verb.SCHEMA is not None for key in option_keys(verb.SCHEMA)}
    named = re.findall(
        r"`(?:--)?([a-z_]+\.[a-z_0-9]+)(?: = [^`]*| [^`]*)?`", (ROOT / document).read_text(encoding="utf-8")
    )
    tables = {key.partition(".")[0] for key in known}
    modules = {"rollout.pages", "train.policy_module"}
    assert {
        n for n in named if n.partition(".")[0] in tables and not n.endswith((".py", ".json", ".html"))
    } <= known | modules


def test_readme_code_imports_what_exists():
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.ImportFrom):
            module = importlib.import_module(str(node.module))
            assert [a.name for a in node.names if not hasattr(module, a.name)] == []


def test_readme_names_the_commands_of_the_makefile():
    readme, makefile = ((ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "Makefile"))
    for target in re.findall(r"^make (\w+)", readme, re.MULTILINE):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), f"make {target}"


def test_the_makefile_rebuilds_for_every_native_source():
    sources = {p.suffix for p in (ROOT / "src/leanroll/kernels/cpu/csrc").rglob("*") if p.is_file()}
    watched = re.search(r"^NATIVE := .*$", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    assert watched is not None
    assert sources == set(re.findall(r"-name '\*(\.\w+)'", watched[0]))


def test_the_table_of_faults_names_tests_that_exist():
    """`folder/file.py::test`; an ellipsis stands for integration/test_faults.py."""
    found = 0
    for name, test in re.findall(r"`(\S+\.py|…)(?:::(\w+))?`", (ROOT / "docs/faults.md").read_text(encoding="utf-8")):
        path = "integration/test_faults.py" if name == "…" else name
        text = (ROOT / "tests" / path).read_text(encoding="utf-8")
        assert not test or f"\ndef {test}(" in text, f"{path}::{test}"
        found += 1
    assert found > 15
