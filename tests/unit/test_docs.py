"""What the documents point at exists, and README's code runs against the names that exist."""

import ast
import importlib
import re
from pathlib import Path

import pytest

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
