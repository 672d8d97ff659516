"""Imports go one way, and the light modules stay light."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import leanroll

SOURCE = Path(leanroll.__file__).parent

# A module may import its own layer and those above it.
LAYERS = (
    ("errors", "types", "rundir", "rundir_lock", "rundir_metrics", "rundir_storage", "environment"),
    ("config",),
    ("sandbox",),
    ("tasks",),
    ("kernels",),
    ("rollout.schedule", "rollout.pages"),
    ("models",),
    ("rollout",),
    ("measure",),
    ("losses",),
    ("calibrate",),
    ("train",),
    ("report",),
    ("integrations",),
    ("cli",),
)

MODULES = sorted(SOURCE.rglob("*.py"))


def module_name(path: Path) -> str:
    parts = path.relative_to(SOURCE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def layer_of(module: str) -> int:
    """Row of a module (without the `leanroll.`), by the longest name that covers it."""
    covering = [
        (len(name), row)
        for row, names in enumerate(LAYERS)
        for name in names
        if module == name or module.startswith(f"{name}.")
    ]
    assert covering, f"leanroll.{module} is in no layer; give it one here and in DESIGN's table"
    return max(covering)[1]


def is_type_checking(node: ast.stmt) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")


def imports_of(path: Path) -> set[str]:
    """Modules of ours that a file imports, wherever in the file; names under TYPE_CHECKING count too."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    known = {module_name(other) for other in MODULES}
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import; write the whole name"
            assert node.module is not None
            # `from leanroll.train import rl` imports leanroll.train.rl when that is a module.
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                found.add(inner if inner.removeprefix("leanroll.") in known else node.module)
    return {name.removeprefix("leanroll.") for name in found if name.startswith("leanroll.")}


@pytest.mark.parametrize("path", MODULES, ids=[module_name(path) or "leanroll" for path in MODULES])
def test_imports_go_up_only(path: Path) -> None:
    name = module_name(path)
    if not name:
        assert imports_of(path) == set(), "leanroll/__init__ stays free of imports"
        return
    row = layer_of(name)
    for imported in imports_of(path):
        assert layer_of(imported) <= row, f"leanroll.{name} imports leanroll.{imported}, which is below it"


def test_rollout_package_imports_nothing() -> None:
    # Otherwise leanroll.rollout.schedule could not be imported without torch.
    assert imports_of(SOURCE / "rollout" / "__init__.py") == set()


def test_report_does_not_know_the_trainer() -> None:
    for path in (SOURCE / "report").rglob("*.py"):
        for imported in imports_of(path):
            assert imported.split(".")[0] in ("report", "errors", "types", "rundir", "rundir_metrics"), imported


@pytest.mark.parametrize(
    "module",
    [
        "leanroll",
        "leanroll.types",
        "leanroll.config",
        "leanroll.rundir",
        "leanroll.environment",
        "leanroll.report",
        "leanroll.rollout.schedule",
        "leanroll.calibrate.cost",
        "leanroll.measure.alarm",
        "leanroll.tasks",
        "leanroll.cli.main",
    ],
)
def test_loads_without_torch(module: str) -> None:
    code = f"import sys, {module}; sys.exit(' '.join(m for m in ('torch', 'transformers', 'peft') if m in sys.modules) or 0)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{module} loads {done.stderr.strip()}"
